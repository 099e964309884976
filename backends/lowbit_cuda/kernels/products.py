"""Products with matrices, as launches: quantised ones, the first half of an expert, and dense ones."""

from functools import partial

from lowbit.check import check_choice, check_integer
from lowbit.errors import ArgumentError
from lowbit.packing import CODES_PER_UNIT, check_rows
from lowbit_cuda.kernels import numpy_kernels as meanings
from lowbit_cuda.kernels.layouts import MOST, PANEL, PART, check_group_size, up
from lowbit_cuda.kernels.pieces import (
    ACTIVATIONS,
    FLOAT_NAMES,
    MOST_TOKENS,
    RESULT,
    SHARED_SUMS,
    THREADS,
    Extent,
    counts,
    integers,
    number,
    product_of,
    span,
)
from lowbit_cuda.port import Kernel, Numbers, Parameter

# **Quantised matrices.** See `linear.cuh` for how a block computes.

SEGMENT = 64
"""Rows, of one group, that a thread takes at once."""
SLICES = 32
"""Threads among which the segments of a column are dealt out."""
SLOTS = 256
"""Segments whose activations are in shared memory at once, for all tokens of a block together."""
SLOT_BYTES = 4 * (SEGMENT + 4)
TOKENS_AT_ONCE = (1, 8)


def segments(numbers: Numbers) -> int:
    """Into how many segments a column is cut; a group's last may be short."""
    rows, group = number(numbers, "rows"), number(numbers, "group_size")
    whole, rest = divmod(rows, group)
    return whole * -(-group // SEGMENT) + -(-rest // SEGMENT)


def shared_of_product(numbers: Numbers, tokens: int) -> int:
    """Bytes of shared memory of a block: activations of as many segments as fit, at least one of each slice."""
    return tokens * SLOT_BYTES * min(SLOTS // tokens, up(segments(numbers), SLICES))


def check_product(numbers: Numbers, bits: int) -> None:
    """The limits of products with quantised matrices."""
    counts(numbers, "tokens", "rows", most={"tokens": MOST_TOKENS})
    counts(numbers, "tokens", "columns")
    check_rows("rows", number(numbers, "rows"), bits)
    check_integer("columns", numbers["columns"], 1, MOST - PANEL)
    check_group_size(bits, number(numbers, "rows"), number(numbers, "group_size"))
    check_choice("zero_point", numbers["zero_point"], (0, 1))
    check_integer("words", _words(bits)(numbers), 1, MOST)


def _width(numbers: Numbers) -> int:
    return up(number(numbers, "columns"), PANEL)


def _words(bits: int) -> Extent:
    return lambda numbers: number(numbers, "rows") * bits // 32 * _width(numbers)


def _scales(numbers: Numbers) -> int:
    return -(-number(numbers, "rows") // number(numbers, "group_size")) * _width(numbers)


def matrix_spans(bits: int, scale_dtype: str, prefix: str = "") -> tuple[Parameter, ...]:
    """The three spans of a quantised matrix."""
    return (
        span(f"{prefix}words", "uint32", "read", _words(bits), alignment=PART),
        span(f"{prefix}scales", scale_dtype, "read", _scales, alignment=PART),
        span(f"{prefix}zeros", scale_dtype, "read", _scales, alignment=PART),
    )


def _product(name: str, bits: int, scale_dtype: str, tokens: int, prefixes: tuple[str, ...]) -> Kernel:
    matrices = tuple(part for prefix in prefixes for part in matrix_spans(bits, scale_dtype, prefix))
    return Kernel(
        name=f"{name}_b{bits}_{FLOAT_NAMES[scale_dtype]}_t{tokens}",
        source=f"linear_b{bits}.cuh",
        parameters=(
            RESULT,
            ACTIVATIONS,
            *matrices,
            *integers("tokens", "rows", "columns", "group_size", "zero_point"),
        ),
        grid=lambda n: (-(-number(n, "columns") // PANEL), -(-number(n, "tokens") // tokens), 1),
        block=THREADS,
        shared=partial(shared_of_product, tokens=tokens),
        meaning=partial(getattr(meanings, name), bits),
        check=partial(check_product, bits=bits),
        flops=lambda n: 2.0 * len(prefixes) * number(n, "tokens") * number(n, "rows") * number(n, "columns"),
    )


def gemm(bits: int, scales: str = "float16", tokens: int = 1) -> Kernel:
    """Y = X W for a quantised matrix."""
    return _product("gemm", bits, scales, tokens, ("",))


def expert_in(bits: int, scales: str = "float16", tokens: int = 1) -> Kernel:
    """silu(X W_gate) ⊗ (X W_up): the first half of an expert, for two matrices of the same shape and kind."""
    return _product("expert_in", bits, scales, tokens, ("gate_", "up_"))


def dequantize(bits: int, scales: str = "float16") -> Kernel:
    """The weights of a quantised matrix, K × N, float32."""

    def check(numbers: Numbers) -> None:
        counts(numbers, "rows", "columns")
        check_product({**numbers, "tokens": 1}, bits)

    return Kernel(
        name=f"dequantize_b{bits}_{FLOAT_NAMES[scales]}",
        source=f"linear_b{bits}.cuh",
        parameters=(
            span("y", "float32", "write", product_of("rows", "columns")),
            *matrix_spans(bits, scales),
            *integers("rows", "columns", "group_size", "zero_point"),
        ),
        grid=lambda n: (-(-number(n, "columns") // PANEL), -(-number(n, "rows") // (SLICES * CODES_PER_UNIT[bits])), 1),
        block=THREADS,
        meaning=partial(meanings.dequantize, bits),
        check=check,
    )


# **Products with dense matrices**: routers and heads. A block computes a column.


def dense(weights: str = "float32") -> Kernel:
    """Y = X W for plain weights, column by column.

    Matrices that lie one after the other are one matrix with all their columns: so the routers of a layer and of the
    next are one launch.
    """

    def check(numbers: Numbers) -> None:
        counts(numbers, "tokens", "rows", most={"tokens": MOST_TOKENS})
        counts(numbers, "tokens", "columns")
        counts(numbers, "rows", "columns")
        if number(numbers, "rows") % 8:
            raise ArgumentError("rows", numbers["rows"], "a multiple of 8")

    return Kernel(
        name=f"dense_{FLOAT_NAMES[weights]}",
        source="dense.cuh",
        parameters=(
            RESULT,
            ACTIVATIONS,
            span("weights", weights, "read", product_of("rows", "columns"), alignment=PART),
            *integers("tokens", "rows", "columns"),
        ),
        grid=lambda n: (number(n, "columns"), number(n, "tokens"), 1),
        block=THREADS,
        shared=lambda n: SHARED_SUMS,
        meaning=meanings.dense,
        check=check,
        flops=lambda n: 2.0 * number(n, "tokens") * number(n, "rows") * number(n, "columns"),
    )
