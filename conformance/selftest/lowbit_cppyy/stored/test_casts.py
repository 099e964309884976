"""Casts of activations: the bytes of the specification's choice, and no access outside an array."""

import shutil
from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest
import sanitized_programs
from stored_runs import some_stored

from lowbit.arrays import Array
from lowbit.errors import ArgumentError, NotDeclaredError
from lowbit.numbers.floats import FLOATS
from lowbit.tensor_formats.stored import RESULTS, Result, quantized
from lowbit_cppyy import CppyyBackend
from lowbit_cppyy.stored.casts import KINDS
from lowbit_cppyy.stored.types import TYPES

COMPILER = shutil.which("g++")
CHOICES = {
    "q8_0": "x (1/d), even",
    "q8_1": "x (1/d), even, of codes",
    "q8_k": None,
    "int8-token": "x (127/m), even, any m",
    "int8-token-f16": "x (127/m), even, any m",
    "int8-token-bf16": "x (127/m), even, any m",
}

TINY = dict.fromkeys(KINDS, 2.0**-149) | {"q8_k": 0.0}  # Q8_K refuses it: a quotient is infinite


@pytest.fixture(scope="module")
def backend() -> Iterator[CppyyBackend]:
    with CppyyBackend(threads=2) as made:
        yield made


@cache
def rows(count: int, columns: int, dtype: str, tiny: float) -> Array:
    """Numbers of all sizes; blocks of zeros, of ties, and of tiny numbers whose scale is 0."""
    random = np.random.default_rng(columns)
    x = random.standard_normal((count, columns)) * np.exp2(random.integers(-9, 9, (count, columns)))
    x[0, :256] = 0
    x[0, -256:] = np.resize([127, 0.5, -1.5, 2.5, -126.5, 63.5], 256)
    x[-1, :256] = np.resize([0, tiny], 256)
    x[-1, -1] = -3e4
    return x.astype(FLOATS[dtype].dtype)


@pytest.mark.parametrize("dtype", RESULTS)
@pytest.mark.parametrize("format", KINDS)
def test_every_byte_is_that_of_one_choice(backend: CppyyBackend, format: str, dtype: str) -> None:
    """One row and nine, of one block and of several."""
    for count, columns in ((1, 256), (9, 1280)):
        x = rows(count, columns, dtype, TINY[format])
        given, expected = backend.run("formats.quantize", x, format), quantized(x, format, (), CHOICES[format])
        for one, other in zip(given.tensors, expected.tensors, strict=True):
            assert one.dtype == other.dtype
            assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("format", KINDS)
@pytest.mark.parametrize("size", [2.0**-131, 1e38])
def test_numbers_without_a_cast_are_refused(backend: CppyyBackend, format: str, size: float) -> None:
    """So small that a quotient is infinite; or so large that a float16 scale is, which float32 and bfloat16 hold."""
    x = np.zeros((2, 256), np.float32)
    x[1, 7] = size
    if size > 1 and format in ("q8_k", "int8-token", "int8-token-bf16"):
        assert np.isfinite(backend.run("formats.quantize", x, format).values).all()
        return
    for cast in (quantized, lambda *arguments: backend.run("formats.quantize", *arguments)):
        with pytest.raises(ArgumentError, match=r"x is a |scale.* is inf"):
            cast(x, format)


@pytest.mark.parametrize("dtype", RESULTS)
@pytest.mark.parametrize("format", KINDS)
def test_a_cast_in_the_product_is_the_cast(backend: CppyyBackend, format: str, dtype: Result) -> None:
    """One call gives the bits of two, for one row and for nine; what has no cast is refused in both."""
    prepared = backend.prepare_stored(some_stored("q4_k", 1280))
    for count in (1, 9):
        x = rows(count, 1280, dtype, TINY[format])
        apart = prepared.gemm_cast(backend.run("formats.quantize", x, format), dtype)
        assert prepared.cast_and_multiply(x, format, dtype).tobytes() == apart.tobytes()
        for spoilt in (np.nan, np.inf):
            x = x.copy()
            x[-1, 300] = spoilt
            with pytest.raises(ArgumentError, match=rf"x\[{count - 1}, 300\] is (nan|inf); allowed: finite numbers"):
                prepared.cast_and_multiply(x, format, dtype)


def test_what_is_not_declared_is_not_cast(backend: CppyyBackend) -> None:
    x = np.ones((1, 256), np.float32)
    with pytest.raises(ArgumentError, match="activations is 'q9_0'; allowed: "):
        backend.prepare_stored(some_stored("q4_k")).cast_and_multiply(x, "q9_0")
    with pytest.raises(NotDeclaredError, match=r"linear\.gemm_cast for activations mxint8"):
        backend.prepare_stored(some_stored("q4_k")).cast_and_multiply(x, "mxint8")


# A case on standard input: which cast, type, rows, columns, bytes of x, bytes of out; then x. The answer is the status,
# out and the scales.
DRIVER = """
#include <cstdio>
#include "casts.h"
int main() {
  const std::uintptr_t pool = lowbit::bridge::create_pool(2);
  std::int64_t n[6];
  while (std::fread(n, sizeof n, 1, stdin) == 1) {
    const std::unique_ptr<std::uint8_t[]> x(new std::uint8_t[n[4]]), out(new std::uint8_t[n[5]]);
    const std::unique_ptr<float[]> scales(new float[n[2]]());
    if (std::fread(x.get(), 1, n[4], stdin) != std::size_t(n[4])) std::abort();
    std::fill_n(out.get(), n[5], 0);
    const std::int64_t status =
        lowbit::bridge::cast_activations(pool, n[0], x.get(), n[1], n[2], n[3], out.get(), scales.get());
    std::fwrite(&status, sizeof status, 1, stdout);
    std::fwrite(out.get(), 1, n[5], stdout);
    std::fwrite(scales.get(), sizeof(float), n[2], stdout);
  }
  lowbit::bridge::destroy_pool(pool);
}
"""


@pytest.mark.toolchain
@pytest.mark.skipif(COMPILER is None, reason="g++ is not installed")
def test_every_access_is_inside_its_array(backend: CppyyBackend) -> None:
    """By g++ with two sanitizers: nothing undefined, and the bytes of cppyy's compiler; a row short is noticed."""
    assert COMPILER is not None
    program, written, expected = sanitized_programs.compiled(DRIVER, COMPILER), b"", b""
    for format, kind in KINDS.items():
        for dtype in RESULTS:
            x = rows(9, 1280, dtype, TINY[format])
            made = backend.run("formats.quantize", x, format)
            codes, scales = made.tensors[0], np.zeros(9, np.float32)
            if kind == 3:
                scales = np.abs(x.astype(np.float32)).max(axis=1) / np.float32(127)
            head = np.array([kind, TYPES[x.dtype], 9, 1280, x.nbytes, codes.nbytes], np.int64)
            written += head.tobytes() + x.tobytes()
            expected += bytes(8) + codes.tobytes() + scales.tobytes()
    result = sanitized_programs.answer(program, written)
    assert result.returncode == 0, result.stderr.decode()[:2000]
    assert result.stdout == expected
    short = sanitized_programs.answer(
        program, head.tobytes()[:32] + np.array([x.nbytes - 1, codes.nbytes]).tobytes() + x.tobytes()
    )
    assert short.returncode != 0
    assert b"AddressSanitizer" in short.stderr
