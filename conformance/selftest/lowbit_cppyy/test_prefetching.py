"""How words that are read once are fetched: by the processor, and in what the compiler makes."""

import subprocess
from collections.abc import Iterator
from types import SimpleNamespace

import archspec.cpu
import pytest

from lowbit_cppyy.codegen.isa import TABLES
from lowbit_cppyy.codegen.lowering import prelude
from lowbit_cppyy.runtime.prefetching import PRELUDE, fetch_once
from lowbit_cppyy.runtime.vendor import made_by_intel


@pytest.fixture
def forgotten() -> Iterator[None]:
    """Nothing is known of the processor, before the test and after it."""
    made_by_intel.cache_clear()
    yield
    made_by_intel.cache_clear()


VENDORS = {
    "GenuineIntel": ["prefetcht0", "prefetcht1"],
    "AuthenticAMD": ["prefetchnta"],
    "generic": ["prefetchnta"],  # a processor that archspec does not know
}


def prefetches(isa: str, before: str) -> list[str]:
    """The instructions that fetch a line, in the order of the compiler."""
    text = f"{before}{prelude(TABLES[isa])}\nvoid f(const float* a) {{ lowbit::{isa}::prefetch_once(a); }}\n"
    words = ["c++", "-std=c++17", "-O1", "-S", "-xc++", "-", "-o", "-", *TABLES[isa].options]
    assembly = subprocess.run(words, input=text, text=True, capture_output=True, check=True).stdout
    return [line.split()[0] for line in assembly.splitlines() if "prefetch" in line and ":" not in line]


@pytest.mark.toolchain
@pytest.mark.parametrize("vendor", VENDORS)
@pytest.mark.parametrize("isa", [name for name, table in TABLES.items() if "immintrin.h" in table.headers])
@pytest.mark.usefixtures("forgotten")
def test_the_processor_decides(isa: str, vendor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its maker."""
    monkeypatch.setattr(archspec.cpu, "host", lambda: SimpleNamespace(vendor=vendor))
    assert prefetches(isa, PRELUDE.format(fetch_once())) == VENDORS[vendor]


@pytest.mark.toolchain
@pytest.mark.parametrize("isa", [name for name, table in TABLES.items() if "immintrin.h" in table.headers])
def test_kernels_whose_source_is_printed_fetch_each_line_once(isa: str) -> None:
    """Their text does not depend on the processor."""
    assert prefetches(isa, "") == ["prefetchnta"]
