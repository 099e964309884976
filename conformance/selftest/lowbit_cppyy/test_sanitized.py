"""The generated C++ under sanitizers: no read or write outside an array, nothing undefined, the same bits as cppyy's.

The same text that cppyy compiles is compiled by g++ or clang into one small program for each instruction set, which
reads cases and writes results. Every array has exactly its size, so the sanitizer sees an access of one byte too many.
And the results must have the bits of cppyy's compiler: what a kernel computes does not depend on who compiled it.
"""

import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import sanitized_programs
from kernel_runs import HERE, Activations, Compiled, activations, kind_of, purposes_of, some_matrix

from lowbit.arrays import F32, Array
from lowbit.quantization.affine import QuantizedMatrix
from lowbit.quantization.bfp import Blocks
from lowbit.quantization.packing import BITS, CODES_PER_UNIT
from lowbit_cppyy.codegen.isa import TABLES, InstructionSet
from lowbit_cppyy.codegen.kernels import Kernel
from lowbit_cppyy.codegen.lowering import prelude
from lowbit_cppyy.layout.panels import BLOCK_ROWS, PanelLayout
from lowbit_cppyy.recipe import Purpose, Recipe
from lowbit_cppyy.runtime import compiler, processor
from lowbit_cppyy.runtime.activations import ActivationStream
from lowbit_cppyy.tuning.choices import PANEL, default_recipe

COMPILERS = sanitized_programs.sanitizing()
pytestmark = pytest.mark.skipif(not COMPILERS, reason="neither g++ nor clang++ is installed")

SHORT = {
    "g++": ("--param", "asan-instrumentation-with-call-threshold=0"),
    "clang++": ("-mllvm", "-asan-instrumentation-with-call-threshold=0"),
}
"""Checks are calls and not inlined, which halves the time of compilation."""

# A case on standard input: which kernel, which product, rows of x, elements of out; then arrays, each after its bytes:
# those of create_linear and create_route, then x. The answer is out.
DRIVER = """
#include <cstdio>
std::uintptr_t address(lowbit::MicroKernel kernel) { return reinterpret_cast<std::uintptr_t>(kernel); }
const std::uintptr_t kernels[] = {KERNELS};

struct Array {
  std::unique_ptr<char[]> bytes;
  Array() {
    std::int64_t size;
    if (std::fread(&size, sizeof size, 1, stdin) != 1) std::abort();
    bytes.reset(new char[size]);
    if (std::fread(bytes.get(), 1, size, stdin) != std::size_t(size)) std::abort();
  }
  template <class T> const T* as() const { return reinterpret_cast<const T*>(bytes.get()); }
  std::uintptr_t at() const { return reinterpret_cast<std::uintptr_t>(bytes.get()); }
};

int main(int, char** arguments) {
  using namespace lowbit::bridge;
  const std::uintptr_t pool = create_pool(std::atoi(arguments[1]));
  std::int64_t n[5];
  while (std::fread(n, sizeof n, 1, stdin) == 1) {
    const Array sizes, stream, starts, numbers, firsts;
    const Array lists[8], x, exponents;
    std::uint64_t addresses[8];
    for (int list = 0; list < 8; ++list) addresses[list] = lists[list].at();
    const std::uintptr_t linear = create_linear(sizes.as<std::int64_t>(), stream.at(), starts.at(), pool);
    const std::uintptr_t route =
        create_route(kernels[n[0]], numbers.as<std::int64_t>(), addresses, firsts.as<std::int64_t>(), n[4]);
    const std::unique_ptr<float[]> out(new float[n[3]]);
    const int status = n[1] == 0 ? multiply(linear, route, x.as<float>(), out.get(), n[2])
                     : n[1] == 1 ? multiply_blocks(linear, route, x.as<std::uint8_t>(), exponents.as<std::int16_t>(),
                                                   out.get(), n[2])
                                 : multiply_cast(linear, route, x.as<float>(), out.get(), n[2]);
    if (status != lowbit::OK) return 3;
    std::fwrite(out.get(), sizeof(float), n[3], stdout);
    destroy_route(route);
    destroy_linear(linear);
  }
  destroy_pool(pool);
}
"""


# **Cases**: every width with every kernel that is used for it, groups and tails of all kinds.


@dataclass(frozen=True)
class Case:
    """One call."""

    matrix: QuantizedMatrix
    purpose: Purpose
    table: InstructionSet
    rows: int

    @cached_property
    def layout(self) -> PanelLayout:
        """As the backend has it; where there are seven to nine groups, in blocks of three."""
        rows = 3 * self.matrix.group_size if 6 < self.matrix.groups < 10 else BLOCK_ROWS
        return PanelLayout.of(self.matrix, PANEL, rows)

    @cached_property
    def recipe(self) -> Recipe:
        return default_recipe(self.purpose, self.layout, self.table)

    @property
    def x(self) -> Activations:
        return activations(self.recipe, self.rows, self.matrix.rows)


@cache
def cases(isa: str) -> list[Case]:
    """All cases of an instruction set."""
    return list(every_case(TABLES[isa]))


def every_case(table: InstructionSet) -> Iterator[Case]:
    """Tails in K, N, rows of x and groups; groups that cut units and blocks of activations."""
    for bits, purpose in product(BITS, purposes_of(table)):
        unit, (scales, convention) = CODES_PER_UNIT[bits], kind_of(purpose, bits)
        shapes = [(unit, 1, unit), (3 * unit, PANEL, 3), (3 * unit, PANEL, 3 * unit), (224, 2 * PANEL + 13, 100)]
        if purpose != "integer rows":  # where every segment is whole iterations; for one row that is enough
            shapes += [(224, 2 * PANEL + 13, 32), (224, 2 * PANEL + 13, 224)]
        for rows, columns, group_size in shapes:
            matrix = some_matrix(bits, rows, columns, group_size, convention, scales)
            for count in (1,) if purpose.endswith("vector") else (2, 9):
                yield Case(matrix, purpose, table, count)
        if bits == 3 and not purpose.endswith("vector"):  # more activations than a cache holds: a pass for each block
            yield Case(some_matrix(3, 1056, 70, 100, convention, scales), purpose, table, 65)


@cache
def recipes_of(isa: str) -> list[Recipe]:
    """The recipes of the cases, each once."""
    return list(dict.fromkeys(case.recipe for case in cases(isa)))


class Recorder:
    """Takes the place of the compiled C++, and records the arguments that would be passed to it."""

    def __init__(self) -> None:
        self.bridge, self.passed = self, list[Array]()

    def kernel(self, _: Kernel) -> int:
        return 0

    def address(self, _: Array) -> int:
        return 0

    def create_linear(self, sizes: Array, *_: int) -> int:
        self.passed.append(sizes)
        return 0

    def create_route(self, _: int, numbers: Any, addresses: Any, firsts: Array, blocks: int) -> int:
        self.passed += [numbers, firsts]
        return 0

    def destroy_linear(self, _: int) -> None: ...

    def destroy_route(self, _: int) -> None: ...


def written(case: Case, monkeypatch: pytest.MonkeyPatch, *, short: int = 0, cast: bool = False) -> bytes:
    """A case as the driver reads it; the stream may be cut short by some elements, to see that this is detected."""
    recorder, stream = Recorder(), ActivationStream(case.recipe, case.layout)
    words, x = case.layout.apply(case.matrix), case.x
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "runtime", lambda: recorder)
        compiler.Linear(case.layout, words, SimpleNamespace(handle=0))  # type: ignore[arg-type]  # stands for a Pool
        compiler.Route(Kernel(case.recipe, case.table), stream)
    sizes, numbers, firsts = recorder.passed
    nothing = np.zeros(0, np.int16)
    values = (x.mantissas, x.exponents) if isinstance(x, Blocks) else (x, nothing)
    which = 1 if isinstance(x, Blocks) else 0
    if cast:
        which, values = 2, (casts(case), nothing)
    arrays = (sizes, words[: words.size - short], case.layout.starts, numbers, firsts, *stream.lists(), *values)
    number, results = recipes_of(case.table.name).index(case.recipe), case.rows * case.matrix.columns
    head = np.array([number, which, case.rows, results, case.layout.blocks], np.int64)
    parts = [head.tobytes()]
    for array in arrays:
        parts += [np.int64(array.nbytes).tobytes(), array.tobytes()]
    return b"".join(parts)


def casts(case: Case) -> F32:
    """Float32 for the cast: large, small and subnormal ones."""
    random = np.random.default_rng(case.rows)
    sizes = np.exp2(random.integers(-149, 100, (case.rows, case.matrix.rows)))
    return np.asarray(random.standard_normal(sizes.shape) * sizes, np.float32)


# **Drivers.**

Driver = Callable[[InstructionSet], Path]


@pytest.fixture(scope="module", params=COMPILERS, ids=lambda path: Path(path).name)
def driver(request: pytest.FixtureRequest) -> Driver:
    """The kernels of an instruction set with two sanitizers, made at the first request."""

    @cache
    def make(isa: str) -> Path:
        table = TABLES[isa]
        kernels = [Kernel(recipe, table) for recipe in recipes_of(isa)]
        addresses = ",\n".join(f"address(lowbit::{isa}::{kernel.name})" for kernel in kernels)
        source = '#include "bridge.h"\n' + prelude(table) + "".join(kernel.source for kernel in kernels)
        source += DRIVER.replace("KERNELS", addresses)
        options = list(SHORT[Path(request.param).name])
        if table.lanes == 8 and processor.has("avx2"):
            options.append("-mavx2")  # a register of the plain table is then one of the processor's: less to compile
        return sanitized_programs.compiled(source, request.param, options)

    return lambda table: make(table.name)


def answer(driver: Path, written_cases: Sequence[bytes]) -> "subprocess.CompletedProcess[bytes]":
    return sanitized_programs.answer(driver, b"".join(written_cases), "3")


@pytest.mark.parametrize("table", HERE, ids=lambda table: table.name)
def test_every_access_is_inside_its_array(
    driver: Driver, table: InstructionSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is read or written outside, nothing is undefined, and the bits are those of cppyy's compiler."""
    inputs = [written(case, monkeypatch) for case in cases(table.name)]
    result = answer(driver(table), inputs)
    assert result.returncode == 0, result.stderr.decode()[:2000]
    expected = []
    for case in cases(table.name):  # only now: a fault that the sanitizers find would end this process
        compiled = Compiled(case.matrix, case.recipe, table, block_rows=case.layout.block_rows)
        expected.append(compiled(case.x).tobytes())
    assert result.stdout == b"".join(expected)


def test_the_cast_is_inside_its_arrays(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers from subnormal to huge, in whole blocks and in short ones."""
    table = HERE[-1]
    inputs = [written(case, monkeypatch, cast=True) for case in cases(table.name) if case.recipe.integer]
    result = answer(driver(table), inputs)
    assert result.returncode == 0, result.stderr.decode()[:2000]


@pytest.mark.parametrize("table", HERE, ids=lambda table: table.name)
def test_the_sanitizer_notices_a_stream_that_is_a_line_short(
    driver: Driver, table: InstructionSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests above can fail: with one cache line less than the layout states, the driver stops, for each width."""
    seen = set[int]()
    for case in cases(table.name):
        wanted = purposes_of(table)[BITS.index(case.matrix.bits) % len(purposes_of(table))]
        if case.matrix.bits not in seen and case.matrix.columns == PANEL and case.purpose == wanted:
            seen.add(case.matrix.bits)
            result = answer(driver(table), [written(case, monkeypatch, short=16)])
            assert result.returncode != 0
            assert b"AddressSanitizer" in result.stderr
    assert seen == set(BITS)
