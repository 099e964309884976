"""What depends on the processor: how words that are read once are fetched, operands in memory, look-ups and tiles."""

import subprocess
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import archspec.cpu.detect
import pytest

from lowbit.quantization.affine import SCALE_DTYPES
from lowbit_cppyy.codegen.isa import TABLES
from lowbit_cppyy.codegen.kernels import Kernel, kernel_source
from lowbit_cppyy.codegen.lowering import prelude
from lowbit_cppyy.layout.panels import PanelLayout
from lowbit_cppyy.recipe import FAR, NEAR, NONE, Purpose, Recipe
from lowbit_cppyy.runtime.definitions import as_options, as_text
from lowbit_cppyy.runtime.tiles import tile_of
from lowbit_cppyy.runtime.vendor import Kind, kind
from lowbit_cppyy.stored import recipe as stored_recipe
from lowbit_cppyy.stored.parts import Structure
from lowbit_cppyy.tuning.choices import default_recipe

ZEN4 = ("avx2", "avx512_vnni")
ICE_LAKE = (*ZEN4, "avx512vbmi")
PROCESSORS: dict[str, tuple[str, tuple[str, ...], Kind]] = {
    "Cascade Lake": ("GenuineIntel", ZEN4, "intel"),
    "Ice Lake": ("GenuineIntel", ICE_LAKE, "icelake"),
    "Emerald Rapids": ("GenuineIntel", (*ICE_LAKE, "avx_vnni", "avx512_bf16"), "intel"),
    "Zen 3": ("AuthenticAMD", ("avx2",), "other"),
    "Zen 4": ("AuthenticAMD", ZEN4, "zen4"),
    "Zen 5": ("AuthenticAMD", (*ICE_LAKE, "avx_vnni", "avx512_bf16"), "other"),
    "unknown": ("generic", ZEN4, "other"),  # a processor that archspec does not know
}
"""The vendor and some features of processors, and the kind that follows from them."""

INTEL: tuple[Kind, ...] = ("icelake", "intel")

FETCHES: dict[Kind, list[str]] = {
    "icelake": ["prefetcht0"],
    "intel": ["prefetcht0"],
    "zen4": ["prefetchnta"],
    "other": ["prefetchnta"],
}


@pytest.fixture(params=PROCESSORS)
def processor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kind]:
    """The kind of a processor that is detected for the time of a test."""
    vendor, features, expected = PROCESSORS[request.param]
    detected = SimpleNamespace(vendor=vendor, features=set(features))
    monkeypatch.setattr(archspec.cpu.detect, "detected_info", lambda: detected)
    kind.cache_clear()
    yield expected
    kind.cache_clear()


def assembly(isa: str, text: str, *options: str) -> list[str]:
    """What the compiler makes of C++ that follows the prelude of a table."""
    words = ["c++", "-std=c++17", "-O2", "-S", "-xc++", "-", "-o", "-", *TABLES[isa].options, *options]
    return subprocess.run(words, input=text, text=True, capture_output=True, check=True).stdout.splitlines()


def prefetches(isa: str, before: str, *options: str) -> list[str]:
    """The instructions that fetch a line, in the order of the compiler."""
    text = f"{before}{prelude(TABLES[isa])}\nvoid f(const float* a) {{ lowbit::{isa}::prefetch_once(a); }}\n"
    return [line.split()[0] for line in assembly(isa, text, *options) if "prefetch" in line and ":" not in line]


@pytest.mark.toolchain
@pytest.mark.parametrize("isa", [name for name, table in TABLES.items() if "immintrin.h" in table.headers])
def test_the_processor_decides_where_to(isa: str, processor: Kind) -> None:
    """By its vendor and generation, with macros as text and as options."""
    assert kind() == processor
    assert prefetches(isa, as_text()) == FETCHES[processor]
    assert prefetches(isa, "", *as_options()) == FETCHES[processor]


@pytest.mark.toolchain
@pytest.mark.parametrize("isa", [name for name, table in TABLES.items() if "immintrin.h" in table.headers])
def test_kernels_whose_source_is_printed_fetch_each_line_once(isa: str) -> None:
    """Their text does not depend on the processor."""
    assert prefetches(isa, "") == ["prefetchnta"]


@pytest.mark.toolchain
def test_broadcasts_are_joined_on_processors_of_intel(processor: Kind) -> None:
    """There a broadcast serves all registers of columns; elsewhere each multiply-add of the loop has its own."""
    recipe = Recipe(4, "float16", "minimum", "fold", rows=4, registers=4)
    kernel = Kernel(recipe, TABLES["avx512"])
    sizes = "struct Sizes { std::int64_t groups; const std::int32_t* turns; };"
    text = f"#include <cstdint>\nnamespace lowbit {{ {sizes} }}\n{kernel_source(kernel)}\n"
    call = f"auto* kernel = &lowbit::avx512::{kernel.name};\n"
    operands = [line for line in assembly("avx512", text + call, *as_options()) if "fmadd" in line and "1to16" in line]
    assert (len(operands) == 0) == (processor in INTEL)


def test_many_rows_share_a_broadcast_on_an_ice_lake(processor: Kind) -> None:
    """Its tile has fewer rows and more registers; that of few rows and those of short registers are everywhere the
    same."""
    assert tile_of("many rows", 32) == ((8, 2) if processor == "icelake" else (16, 1))
    assert {tile_of("rows", 32), tile_of("rows", 16), tile_of("many rows", 16)} == {(4, 4), (4, 2), (8, 1)}


EIGHT_PAGES = """
#include <cstdio>
int main() {
  const char* const start = reinterpret_cast<const char*>(1 << 20);
  for (int line = 0; line < 64 * 24; ++line) lowbit::fetch_in_eight_pages(start + 64 * line);
}
"""
"""A program that fetches 24 pages as a kernel does."""


@pytest.mark.toolchain
def test_eight_pages_at_a_time_fetch_each_line_once(tmp_path: Path) -> None:
    """Each line behind the first seven pages is fetched once: from each of eight pages an eighth, in order."""
    noted = (
        '#include <cstdio>\n#define __builtin_prefetch(a, ...) std::printf("%zu\\n", (std::size_t)(a) - (1 << 20))\n'
    )
    words = ["c++", "-std=c++17", "-xc++", "-", "-o", str(tmp_path / "reader")]
    text = noted + prelude(TABLES["plain"]) + EIGHT_PAGES
    subprocess.run(words, input=text, text=True, capture_output=True, check=True)
    printed = subprocess.run([tmp_path / "reader"], text=True, capture_output=True, check=True).stdout
    fetched = [int(place) for place in printed.split()]
    inner = [place for place in fetched if 7 * 4096 <= place < 24 * 4096]
    assert sorted(inner) == list(range(7 * 4096, 24 * 4096, 64))
    for number in range(7, 24):
        own = [(place, time // 64) for time, place in enumerate(fetched) if place // 4096 == number]
        assert own == sorted(own)
        assert [page for _, page in own] == [number - 7 + eighth for eighth in range(8) for _ in range(8)]


ONE_PLANE = (Structure(4), Structure(4, inner="uint8", run=32, offset="minimum"), Structure(2, inner="uint8", run=16))
TWO_PLANES = (Structure(5, offset="center"), Structure(5, inner="uint8", run=32), Structure(6, inner="int8", run=16))


def stored_distance(structure: Structure, isa: str, purpose: Purpose) -> int:
    """The prefetch distance of the default kernel of a stored matrix."""
    return stored_recipe.default_recipe(structure, TABLES[isa], purpose, panel=64).ahead


@pytest.mark.parametrize("isa", ["avx2", "avx512vnni"])
def test_integers_are_fetched_only_where_that_pays(isa: str, processor: Kind) -> None:
    """On a Zen 4 by its own prefetchers, unless a kernel reads back and forth."""
    table, zen4 = TABLES[isa], processor == "zen4"
    wide, far = table.registers == 32, NEAR if processor in INTEL else FAR
    for scales in SCALE_DTYPES:
        layout = PanelLayout(rows=256, columns=64, bits=3, group_size=32, scales=scales, convention="minimum", panel=64)
        assert default_recipe("integer vector", layout, table).ahead == (NONE if zen4 else far)
    for structures, in_order in ((ONE_PLANE, True), (TWO_PLANES, wide)):
        expected = NONE if zen4 and in_order else far
        assert {stored_distance(each, isa, "integer vector") for each in structures} == {expected}
    bytes_ = stored_distance(Structure(8, values="signed"), isa, "integer vector")
    assert bytes_ == (NONE if zen4 or (wide and processor == "other") else far)


@pytest.mark.parametrize("isa", ["avx2", "avx512vnni"])
def test_codes_are_subnormal_floats_only_where_these_are_fast(isa: str, processor: Kind) -> None:
    """On a Zen 4, for one row; its kernels fetch near, or not at all if registers are short and they read in one
    direction. Others fetch far, and so do matrices of floats and of tables everywhere."""
    table, zen4 = TABLES[isa], processor == "zen4"
    wide = table.registers == 32
    far, stored_far = (NEAR, NEAR) if processor in INTEL else (FAR, FAR + 1024 if wide else FAR)
    for bits in (2, 3, 4, 8):
        layout = PanelLayout(
            rows=256, columns=64, bits=bits, group_size=32, scales="float16", convention="minimum", panel=64
        )
        recipe = default_recipe("vector", layout, table)
        looked_up = "table" if bits == 4 and processor == "icelake" else "sums" if bits < 4 else "fold"
        assert recipe.method == ("subnormal" if zen4 else looked_up if wide else "fold")
        assert recipe.ahead == (far if not zen4 else NEAR if wide or bits == 3 else NONE)
        assert default_recipe("rows", layout, table).method == "fold"
    for structures, near in ((ONE_PLANE, wide), (TWO_PLANES, True)):
        for each in structures:
            assert stored_distance(each, isa, "vector") == (stored_far if not zen4 else NEAR if near else NONE)
    for each in (Structure(16, values="float16", scale="one"), Structure(4, values="table")):
        assert stored_distance(each, isa, "vector") == stored_far


@pytest.mark.parametrize("isa", ["avx2", "avx512vnni"])
def test_stored_codes_are_looked_up_on_an_ice_lake(isa: str, processor: Kind) -> None:
    """In registers of sixteen floats: codes of 3 to 5 bits for one row, of 3 and 4 for many rows."""
    widths: dict[Purpose, tuple[int, ...]] = {"vector": (3, 4, 5), "rows": (), "many rows": (3, 4)}
    for purpose, bits in product(widths, (2, 3, 4, 5, 6, 8)):
        method = stored_recipe.default_recipe(Structure(bits), TABLES[isa], purpose, 64).method
        looked_up = processor == "icelake" and isa == "avx512vnni" and bits in widths[purpose]
        subnormal = processor == "zen4" and purpose == "vector"
        assert method == ("table" if looked_up else "subnormal" if subnormal else "fold")
