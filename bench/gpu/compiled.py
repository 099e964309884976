"""Every kernel compiled for the device, several at once, and what each takes of a processor.

This comes first, since what it makes lies in the cache when the other parts want it. Without a device it compiles for
those architectures that are named; `python -m gpu.compiled` writes what it finds for three of them to docs/data.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from cuda_cases import variants

from gpu.parts import Answer, Setting
from lowbit_cuda.cuda import compiler
from lowbit_cuda.cuda.availability import compute_capability
from lowbit_cuda.kernels.table import MAKERS

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
RECORD = Path(__file__).parents[2] / "docs/data/cuda-kernels.json"


def run(setting: Setting) -> Answer:
    """For the device; simulated, one small source for one architecture, to try the script."""
    if setting.simulate:
        found = compiled([("between.cuh", "sm_90")])
    else:
        arch = compiler.choose_architecture(compute_capability(0))
        found = compiled([(source, arch) for source in sources()])
    spilling = sorted({name for one in found for name, usage in one["kernels"].items() if usage["spill_stores"]})
    count = sum(len(one["kernels"]) for one in found)
    words = f"{count} kernels, of which {len(spilling)} spill registers"
    return Answer("simulated" if setting.simulate else "passed", words, {"spilling": spilling, "sources": found})


def sources() -> list[str]:
    """The sources of the table's kernels, largest first."""
    folder = compiler.kernel_folder()
    used = {one.source for name in MAKERS for one in variants(name)}
    return sorted(used, key=lambda name: (-(folder / name).stat().st_size, name))


def compiled(wanted: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    """Each source for each architecture, with its kernels' use of registers."""
    workers = min(len(wanted), len(os.sched_getaffinity(0)))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        return list(pool.map(one_compiled, wanted))


def one_compiled(wanted: tuple[str, str]) -> dict[str, Any]:
    """One of them."""
    made = compiler.compile_source(*wanted)
    kernels = {name: asdict(usage) for name, usage in sorted(made.usage.items())}
    key = compiler.digest(*wanted, made.nvrtc, compiler.read_sources(compiler.kernel_folder()))
    return {"source": made.source, "arch": made.arch, "nvrtc": made.nvrtc, "digest": key, "kernels": kernels}


def main() -> None:
    """Write the record."""
    from gpu.parts import write

    found = compiled([(source, arch) for arch in ARCHITECTURES for source in sources()])
    write(RECORD, {"about": "registers of a thread, and bytes that did not fit", "compiled": found})


if __name__ == "__main__":
    main()
