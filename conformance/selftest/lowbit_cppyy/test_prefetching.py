"""The hint by which words that are read once are fetched: by the processor, and in what the compiler makes."""

import subprocess
from collections.abc import Iterator
from types import SimpleNamespace

import archspec.cpu
import pytest

from lowbit_cppyy.codegen.isa import TABLES
from lowbit_cppyy.codegen.lowering import prelude
from lowbit_cppyy.runtime.prefetching import PRELUDE, once_hint


@pytest.fixture
def forgotten() -> Iterator[None]:
    """Nothing is known of the processor, before the test and after it."""
    once_hint.cache_clear()
    yield
    once_hint.cache_clear()


@pytest.mark.parametrize(
    "vendor, hint", (("GenuineIntel", "_MM_HINT_T0"), ("AuthenticAMD", "_MM_HINT_NTA"), ("generic", "_MM_HINT_NTA"))
)
@pytest.mark.usefixtures("forgotten")
def test_the_processor_decides(vendor: str, hint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its maker; one that archspec does not know has the default."""
    monkeypatch.setattr(archspec.cpu, "host", lambda: SimpleNamespace(vendor=vendor))
    assert once_hint() == hint


@pytest.mark.toolchain
@pytest.mark.parametrize("hint, instruction", (("_MM_HINT_T0", "prefetcht0"), ("", "prefetchnta")))
@pytest.mark.parametrize("isa", [name for name, table in TABLES.items() if "immintrin.h" in table.headers])
def test_the_hint_is_an_instruction(isa: str, hint: str, instruction: str) -> None:
    """Without a hint it is that of kernels whose C++ is printed."""
    before = PRELUDE.format(hint) if hint else ""
    text = f"{before}{prelude(TABLES[isa])}\nvoid f(const float* a) {{ lowbit::{isa}::prefetch_once(a); }}\n"
    words = ["c++", "-std=c++17", "-O1", "-S", "-xc++", "-", "-o", "-", *TABLES[isa].options]
    assembly = subprocess.run(words, input=text, text=True, capture_output=True, check=True).stdout
    assert [line.split()[0] for line in assembly.splitlines() if "prefetch" in line and ":" not in line] == [
        instruction
    ]
