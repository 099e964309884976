"""Stored products under sanitizers: no access outside an array, nothing undefined, the bits of cppyy's compiler."""

import shutil
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import sanitized_programs
from kernel_runs import HERE
from stored_runs import CASES, kernel_for, some_activations, some_cast, some_stored

from lowbit.arrays import Array
from lowbit.numbers.floats import FLOATS
from lowbit.runtime.linears import cast_for
from lowbit.tensor_formats.stored import RESULTS, Result, Stored
from lowbit_cppyy import CppyyBackend
from lowbit_cppyy.codegen.isa import InstructionSet
from lowbit_cppyy.codegen.lowering import prelude
from lowbit_cppyy.recipe import Purpose
from lowbit_cppyy.stored.activations import StoredActivations
from lowbit_cppyy.stored.casts import KINDS
from lowbit_cppyy.stored.formats import PARTS
from lowbit_cppyy.stored.kernel import StoredKernel
from lowbit_cppyy.stored.layout import layout_of
from lowbit_cppyy.stored.linear import PANEL, bytes_of
from lowbit_cppyy.stored.types import TYPES

COMPILER = shutil.which("g++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="g++ is not installed")
ROWS, COLUMNS = 256, 77

# A case on standard input: which kernel, rows of x, type of x, bytes of out, type of out, rows of a scale (0 for
# floats, and -1 and less for floats that are cast), blocks. Then arrays, each after its bytes: sizes, stream, starts;
# numbers and lists of the route; x, scales.
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
  std::int64_t n[7];
  while (std::fread(n, sizeof n, 1, stdin) == 1) {
    const Array sizes, stream, starts, numbers, firsts;
    const Array lists[6], x, scales;
    std::uint64_t addresses[6];
    for (int list = 0; list < 6; ++list) addresses[list] = lists[list].at();
    const std::uintptr_t linear = create_linear(sizes.as<std::int64_t>(), stream.at(), starts.at(), pool);
    const std::uintptr_t route = create_stored_route(kernels[n[0]], numbers.as<std::int64_t>(), addresses,
                                                     firsts.as<std::int64_t>(), n[6]);
    const std::unique_ptr<std::uint8_t[]> out(new std::uint8_t[n[3]]);
    const auto bytes = x.as<std::uint8_t>();
    std::uint8_t* const y = out.get();
    const int status = n[5] > 0   ? multiply_stored_bytes(linear, route, bytes, scales.as<float>(), n[5], y, n[4], n[1])
                       : n[5] < 0 ? multiply_stored_cast(linear, route, -n[5] - 1, 0, bytes, n[2], y, n[4], n[1])
                                  : multiply_stored(linear, route, bytes, n[2], y, n[4], n[1]);
    if (status != lowbit::OK) return 3;
    std::fwrite(out.get(), 1, n[3], stdout);
    destroy_stored_route(route);
    destroy_linear(linear);
  }
  destroy_pool(pool);
}
"""
PURPOSES: tuple[tuple[Purpose, int], ...] = (("vector", 1), ("rows", 5), ("vector", 1), ("many rows", 18))
Made = tuple[Stored, Purpose, Array | Stored, StoredKernel]


def made(case: str, turn: int, table: InstructionSet, activations: str = "q8_0") -> Made:
    """A matrix, activations in each of the types in turn, and the kernel for them."""
    name, cast = case.split()[0], case.endswith("cast")
    weights, (purpose, count) = some_stored(name, ROWS, COLUMNS), PURPOSES[turn % 4]
    chosen: Purpose = ("integer vector", "integer rows")[turn % 2] if cast else purpose
    x = some_cast(count, ROWS, activations) if cast else some_activations(count, ROWS, RESULTS[turn % 3])
    return weights, chosen, x, kernel_for(PARTS[name](weights), table, chosen, x)


def every_case(table: InstructionSet) -> list[Made]:
    """Every format; one row and several take turns, so that no kernel is compiled twice. Integers with casts too."""
    given = [made(case, turn, table) for turn, case in enumerate(CASES)]
    given += [with_floats(*each) for each in given if isinstance(each[2], Stored)]
    return given + [made("gptq-v2 cast", turn, table, "int8-token") for turn in (0, 1)]  # integers in another order


def with_floats(weights: Stored, purpose: Purpose, x: Array | Stored, kernel: StoredKernel) -> Made:
    """The same kernel with numbers that are cast in the call."""
    count = 1 if purpose.endswith("vector") else 5
    return weights, purpose, some_activations(count, ROWS, RESULTS[len(weights.format) % 3]), kernel


def result_of(x: Array | Stored) -> Result:
    return "float16" if isinstance(x, Stored) else next(each for each in RESULTS if each == x.dtype.name)


def written(number: int, given: Made, short: int = 0) -> bytes:
    """A case as the driver reads it; the stream may be cut short by some elements."""
    weights, purpose, x, kernel = given
    parts = PARTS[weights.format](weights)
    layout = layout_of(parts, PANEL)
    stream = StoredActivations(kernel.recipe, layout, parts)
    words, out_type, x_type, each = layout.apply(parts), TYPES[FLOATS[result_of(x)].dtype], 0, 0
    scales: Array = np.zeros(0, np.float32)
    if isinstance(x, Stored):
        rows, (values, scales, each) = x.columns, bytes_of(x)
    else:
        rows, values, x_type = len(x), x, TYPES[x.dtype]
        each = -1 - KINDS[cast_for(weights.table)] if purpose.startswith("integer") else 0
    size = rows * weights.columns * (4 if out_type == 0 else 2)
    head = np.array([number, rows, x_type, size, out_type, each, len(layout.firsts) - 1], np.int64)
    firsts = np.array(layout.firsts, np.int64)
    arrays: list[Array] = [layout.numbers, words[: words.size - short], layout.starts]
    arrays += [stream.numbers(kernel.columns), firsts]
    passed = [head.tobytes()]
    for array in (*arrays, *stream.lists(), values, scales):
        passed += [np.int64(array.nbytes).tobytes(), np.ascontiguousarray(array).tobytes()]
    return b"".join(passed)


@cache
def driver(isa: str) -> Path:
    """The kernels of an instruction set with two sanitizers, made at the first request."""
    table = next(each for each in HERE if each.name == isa)
    kernels = dict.fromkeys(kernel.name for *_, kernel in every_case(table))
    sources = {kernel.name: kernel.source for *_, kernel in every_case(table)}
    addresses = ",\n".join(f"address(lowbit::{isa}::{name})" for name in kernels)
    source = '#include "casts.h"\n' + prelude(table) + "".join(sources[name] for name in kernels)
    assert COMPILER is not None
    options = ["--param", "asan-instrumentation-with-call-threshold=0"]
    return sanitized_programs.compiled(source + DRIVER.replace("KERNELS", addresses), COMPILER, options)


TESTED = [table for table in HERE if table.name != "plain"]


@pytest.mark.parametrize("table", TESTED[:1] + TESTED[-1:], ids=lambda table: table.name)
def test_every_access_is_inside_its_array(table: InstructionSet) -> None:
    """On the widest registers and on the narrowest; the bits are those of cppyy's compiler."""
    given = every_case(table)
    names = list(dict.fromkeys(kernel.name for *_, kernel in given))
    inputs = [written(names.index(each[3].name), each) for each in given]
    done = sanitized_programs.answer(driver(table.name), b"".join(inputs), "3")
    assert done.returncode == 0, done.stderr.decode()[:2000]
    expected = []
    with CppyyBackend(isa=table.name, threads=1) as backend:  # only now: a fault would end this process
        for weights, purpose, x, _ in given:
            prepared, result = backend.prepare_stored(weights), result_of(x)
            if isinstance(x, Stored):
                answer = prepared.gemm_cast(x, result)
            elif purpose.startswith("integer"):
                answer = prepared.cast_and_multiply(x, cast_for(weights.table), result)
            elif purpose == "vector":
                answer = prepared.gemv(x[0], result)
            else:
                answer = prepared.gemm(x, result)
            expected.append(answer.tobytes())
    assert done.stdout == b"".join(expected)


def test_the_sanitizer_notices_a_stream_that_is_a_line_short() -> None:
    """The test above can fail."""
    table = TESTED[0]
    given = every_case(table)
    names = list(dict.fromkeys(kernel.name for *_, kernel in given))
    done = sanitized_programs.answer(
        driver(table.name), written(names.index(given[0][3].name), given[0], short=16), "1"
    )
    assert done.returncode != 0
    assert b"AddressSanitizer" in done.stderr
