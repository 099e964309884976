"""What the page about the generated kernels shows: real kernels, and costs that are counted."""

import re
import sys
from collections.abc import Iterator

import pytest
from paths import ROOT

from lowbit_cppyy.codegen.isa import TABLES
from lowbit_cppyy.codegen.kernels import Kernel
from lowbit_cppyy.names import kernel_of
from lowbit_cppyy.recipe import Recipe

PAGE = ROOT / "docs/kernels.rst"


@pytest.fixture(autouse=True)
def extension(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The extension of the documentation can be imported, for one test."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(PAGE.parent / "_ext"))
    yield
    for name in set(sys.modules) - before:
        if name.startswith("lowbit_docs"):
            del sys.modules[name]


def test_the_costs_are_those_of_the_text() -> None:
    """fold is three instructions a register of codes, so 0.75 cycles; at 4 bits that bounds 44 GB/s and 22."""
    from lowbit_docs.kernels import GIGAHERTZ, cost

    text, least = PAGE.read_text(), {}
    for name in ("avx512", "avx2"):
        found = cost(Kernel(Recipe(4, "float16", "zero_point", "fold"), TABLES[name]))
        assert (found.together, found.cycles) == (3, 0.75)
        least[name] = round(4 / 8 * TABLES[name].lanes / found.cycles * GIGAHERTZ)
    assert f"{least['avx512']} GB/s of codes a core with AVX-512 and {least['avx2']} GB/s with AVX2" in " ".join(
        text.split()
    )


def test_more_work_costs_more() -> None:
    """Without the fold there are shifts; looked-up sums multiply nothing; products of bytes take four codes at once."""
    from lowbit_docs.kernels import costs

    found = {(bits, method, table.name): cost for bits, method, some in costs() for table, cost in some}
    for bits in (2, 3, 4, 8):
        shift, fold = (found[bits, method, "avx512"] for method in ("shift", "fold"))
        assert shift.integers > fold.integers
        assert (shift.sums, shift.conversions) == (fold.sums, fold.conversions) == (1, 1)
        assert found[bits, "dot4", "avx512vnni"].sums == 1 / 4
    assert found[2, "sums", "avx512"].sums == found[2, "sums", "avx512"].lookups == 1 / 2
    assert (8, "sums", "avx512") not in found


def test_listings_are_of_kernels_that_exist() -> None:
    """Every kernel that the page names can be made, and an excerpt begins and ends where its directive says."""
    text = PAGE.read_text()
    names = set(re.findall(r"(?<!linear\.)\bgem[vm]_\w+", text))  # and no operation
    assert names
    assert {kernel_of(name).name for name in names} == names
    shown = re.findall(r"kernel-source:: (\w+)\n   :from: (.*)\n   :to: (.*)\n", text)
    assert len(shown) == text.count("kernel-source::")
    for name, first, last in shown:
        source = kernel_of(name).source
        assert 0 <= source.index(first) < source.index(last, source.index(first))
