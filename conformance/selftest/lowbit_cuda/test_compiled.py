"""Every kernel compiles for three generations of GPUs, and takes the arguments that the table says; no GPU is needed.

What is compiled stays in the cache, so only the first run takes minutes, and later ones after a kernel changed.
"""

import json
import re
from dataclasses import replace

import pytest
from cubins import arguments, described
from cuda_cases import every_kernel
from cuda_tools import needs_nvrtc
from paths import ROOT
from port_contract import KERNELS, add, fill, turn

from lowbit_cuda.cuda import compiler
from lowbit_cuda.cuda.reserve import CODE
from lowbit_cuda.port import PIECE

pytestmark = needs_nvrtc

ARCHITECTURES = ("sm_90", "sm_80", "sm_100")
TABLE = every_kernel()
RECORD = ROOT / "docs/data/cuda-kernels.json"


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("source", sorted({one.source for one in TABLE}))
def test_a_source_compiles_to_the_kernels_of_the_table(source: str, arch: str) -> None:
    """All of them and no others, each with the arguments that launches give it, in the same order and place.

    None of them keeps in memory what found no register. What it takes of a processor is what the record in the
    documentation says, if that is of the same source.
    """
    made = compiler.compile_source(source, arch)
    wanted = {one.name: described(one) for one in TABLE if one.source == source}
    assert arguments(made.code) == wanted
    assert set(made.usage) == set(wanted)
    assert all(usage.registers <= 255 for usage in made.usage.values())
    assert not [name for name, usage in made.usage.items() if usage.spill_stores or usage.spill_loads]
    assert set(re.findall(r"(\d+) bytes stack frame", made.log)) == {"0"}, "no thread needs local memory"
    key = compiler.digest(source, arch, made.nvrtc, compiler.read_sources(compiler.kernel_folder()))
    for recorded in json.loads(RECORD.read_text())["compiled"] if RECORD.exists() else ():
        if recorded["digest"] == key:
            assert recorded["kernels"] == {name: vars(usage) for name, usage in made.usage.items()}


@pytest.mark.whole  # compiling every source takes most of a minute
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_reserve_has_room_for_all_code(arch: str) -> None:
    """Every source in pieces of its own."""
    made = [compiler.compile_source(source, arch) for source in sorted({one.source for one in TABLE})]
    assert sum(-(-len(one.code) // PIECE) * PIECE for one in made) <= CODE


def test_arguments_that_differ_are_seen() -> None:
    """The comparison above is able to fail: another kind, another order, one too few."""
    made = arguments(compiler.compile_source("contract.cuh", "sm_80", folder=KERNELS).code)
    assert made == {one.name: described(one) for one in (fill, add, turn)}
    narrow = tuple(replace(one, kind="int32") if one.name == "n" else one for one in fill.parameters)
    for other in (narrow, turn.parameters, fill.parameters[:-1], fill.parameters[::-1]):
        assert made["contract_fill"] != described(replace(fill, parameters=other))
