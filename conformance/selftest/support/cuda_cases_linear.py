"""The products among `cuda_cases`: matrices whose sums are exact, and ordinary ones with the specification's bound."""

from collections.abc import Iterator

import numpy as np
from cuda_cases import FLOAT32, Case, Limits, choices_of, floats, integers, random

from lowbit.arrays import F32, Array
from lowbit.contract.rounding import Arithmetic
from lowbit.linear.bounds import linear_bound
from lowbit.linear.linear import qgemv
from lowbit.model.bounds import swiglu_bound
from lowbit.quantization.affine import Convention, QuantizedMatrix
from lowbit.quantization.packing import CODES_PER_UNIT
from lowbit_cuda.kernels.layouts import DenseLayout, MatrixLayout
from lowbit_cuda.kernels.table import kernel
from lowbit_cuda.port import Number

FACTORED = Arithmetic("factored", "float32", lambda rows, group: rows + 20)
"""A sum in float32 and, after it, those over slices and warps."""


def lattice(bits: int, rows: int, columns: int, group: int, convention: Convention, dtype: str) -> QuantizedMatrix:
    """Any codes; scales of 1/2, 1 and 2; small integers for zeros: float32 holds every sum exactly."""
    numbers, groups = random(rows + columns), -(-rows // group)
    words = numbers.integers(0, 2**32, (rows * bits // 32, columns), np.uint32)
    scales = np.exp2(numbers.integers(-1, 2, (groups, columns))).astype(dtype)
    zeros = numbers.integers(0, 2**bits, (groups, columns))
    stored = zeros.astype(np.uint8) if convention == "zero_point" else (zeros - 3).astype(dtype)
    return QuantizedMatrix(words, scales, stored, bits, rows, group, convention)


def ordinary(bits: int, rows: int, columns: int, group: int, convention: Convention, dtype: str) -> QuantizedMatrix:
    """Scales and minima that are no lattice."""
    matrix = lattice(bits, rows, columns, group, convention, dtype)
    scales = (matrix.scales * (1 + random(1).random(matrix.scales.shape)) / 64).astype(dtype)
    zeros = matrix.zeros if convention == "zero_point" else floats(2, *matrix.zeros.shape).astype(dtype)
    return QuantizedMatrix(matrix.words, scales, zeros, bits, rows, group, convention)


def spans(matrix: QuantizedMatrix, prefix: str = "") -> dict[str, Array]:
    """The arrays of a matrix, as its packed has them."""
    layout = MatrixLayout.of(matrix)
    packed, (words, scales, zeros) = layout.apply(matrix), layout.offsets
    dtype = layout.scale_dtype
    return {
        f"{prefix}words": packed[words:scales].view(np.uint32),
        f"{prefix}scales": packed[scales:zeros].view(dtype),
        f"{prefix}zeros": packed[zeros:].view(dtype),
    }


def numbers_of(matrix: QuantizedMatrix, tokens: int) -> dict[str, Number]:
    """The numbers of a launch."""
    return {"tokens": tokens, **MatrixLayout.of(matrix).numbers}


def shapes(bits: int, tokens_at_once: int) -> Iterator[tuple[str, int, int, int, int, Convention]]:
    """What is special, rows, columns, group size, tokens, convention."""
    unit = CODES_PER_UNIT[bits]
    yield "units", 3 * unit, 33, unit, 3, "zero_point"
    yield "short", 224, 32, 96, 9, "minimum"  # a short segment in each group, and a short last group
    yield "several", 192, 5, 32 if bits != 3 else 64, 2, "minimum"  # several groups in a segment
    yield "whole", 160, 5, 160, 1, "zero_point"


def exact_x(tokens: int, rows: int) -> F32:
    """Activations of a lattice."""
    return integers(rows, tokens, rows)


def gemm() -> Iterator[Case]:
    for choices in choices_of("gemm"):
        bits, dtype, at_once = int(str(choices["bits"])), str(choices["scales"]), int(str(choices["tokens"]))
        described = kernel("gemm", **choices)
        for what, rows, columns, group, tokens, convention in shapes(bits, at_once):
            matrix = lattice(bits, rows, columns, group, convention, dtype)
            arrays = {"x": exact_x(tokens, rows).ravel(), **spans(matrix)}
            yield Case(what, described, arrays, numbers_of(matrix, tokens))
        matrix = ordinary(bits, 224, 33, 96, "minimum", dtype)
        x = floats(bits, 2, 224)
        limit = _limits(x, matrix)
        yield Case("bound", described, {"x": x.ravel(), **spans(matrix)}, numbers_of(matrix, 2), {"y": limit})
        # Numbers so large that codes may not be taken for floats, in one token of two.
        x = exact_x(2, 224)
        x[1] *= np.float32(2.0**60)
        matrix = lattice(bits, 224, 5, 96, "zero_point", dtype)
        yield Case("large", described, {"x": x.ravel(), **spans(matrix)}, numbers_of(matrix, 2))
        if dtype == "float16":
            # More segments than shared memory holds, so that it is filled twice.
            rows = (16384 if at_once == 1 else 2048) + 96
            matrix = lattice(bits, rows, 2, 128, "zero_point", dtype)
            arrays = {"x": integers(1, rows, most=1), **spans(matrix)}
            yield Case("long", described, arrays, numbers_of(matrix, 1))


def _limits(x: F32, matrix: QuantizedMatrix) -> Array:
    exact = [qgemv(row, matrix) for row in x]
    limits = [linear_bound(row, matrix, FACTORED, y).limit for row, y in zip(x, exact, strict=True)]
    # The meaning is rounded to float32.
    return np.array(limits) + 2.0**-24 * np.abs(np.array(exact))


def expert_in() -> Iterator[Case]:
    for choices in choices_of("expert_in"):
        bits, dtype = int(str(choices["bits"])), str(choices["scales"])
        for what, rows, columns, group, tokens, convention in shapes(bits, int(str(choices["tokens"]))):
            gate = lattice(bits, rows, columns, group, convention, dtype)
            up = lattice(bits, rows, columns + 32, group, convention, dtype)
            up = QuantizedMatrix(
                np.ascontiguousarray(up.words[:, :columns]),
                np.ascontiguousarray(up.scales[:, :columns]),
                np.ascontiguousarray(up.zeros[:, :columns]),
                *(bits, rows, group, convention),
            )
            x = exact_x(tokens, rows) / np.float32(64)
            products = [np.array([qgemv(row, m) for row in x]) for m in (gate, up)]  # exact, also in float32
            a, b = (part.astype(np.float32) for part in products)
            exact = products[0] / (1 + np.exp(-products[0])) * products[1]
            limit = swiglu_bound(a, b, FLOAT32, exact).limit + 2.0**-24 * np.abs(exact)
            limits: Limits = {"y": limit}
            arrays = {"x": x.ravel(), **spans(gate, "gate_"), **spans(up, "up_")}
            yield Case(what, kernel("expert_in", **choices), arrays, numbers_of(gate, tokens), limits)


def dequantize() -> Iterator[Case]:
    for choices in choices_of("dequantize"):
        bits, dtype = int(str(choices["bits"])), str(choices["scales"])
        unit = CODES_PER_UNIT[bits]
        conventions: tuple[Convention, ...] = ("minimum", "zero_point")
        for convention in conventions:
            for rows, columns, group in ((unit, 1, unit), (35 * unit, 33, 3 * unit)):
                matrix = ordinary(bits, rows, columns, group, convention, dtype)
                numbers = {**numbers_of(matrix, 1)}
                del numbers["tokens"]
                what = f"{convention}-{rows}x{columns}"
                yield Case(what, kernel("dequantize", **choices), spans(matrix), numbers)


def dense() -> Iterator[Case]:
    for choices in choices_of("dense"):
        dtype = "float16" if choices["weights"] == "float16" else "float32"
        for rows, columns, tokens in ((8, 3, 1), (264, 2, 3), (2056, 1, 2)):
            layout = DenseLayout(rows, columns, "float16" if dtype == "float16" else "float32")
            weights = layout.apply(integers(rows, rows, columns)).view(dtype)
            numbers: dict[str, Number] = {"tokens": tokens, "rows": rows, "columns": columns}
            arrays = {"x": exact_x(tokens, rows).ravel(), "weights": weights}
            yield Case(f"{rows}x{columns}", kernel("dense", **choices), arrays, numbers)


LINEAR = (gemm, expert_in, dequantize, dense)
