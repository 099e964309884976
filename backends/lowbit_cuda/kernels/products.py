"""Products with matrices, as launches: quantised matrices, the first half of an expert, and dense matrices.

A product reads each byte of its matrix once for up to eight tokens, and should take as long as reading does. The matrix
alone determines how the work is divided: one block for each panel of columns, in which a column's *segments* are dealt
to `SLICES` threads in rotation. So the order of a sum depends on bits, rows and group size, and not on the tokens: a
token's result has the same bits alone and among others.

The first half of an expert multiplies by two matrices at once and applies the gate between them, so neither product is
written to memory.

Source: QIGen §3 for panels and factored sums; the chapters `lowbit.linear.linear` and `lowbit.model.block`.
"""

from functools import partial

from lowbit.contract.checks import check_choice, check_integer
from lowbit.errors import ArgumentError
from lowbit.quantization.packing import CODES_PER_UNIT, check_rows
from lowbit_cuda.kernels.layouts import MOST, PANEL, PART, check_group_size, up
from lowbit_cuda.kernels.parameters import (
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
)
from lowbit_cuda.port import Kernel, Numbers, Parameter

# **Quantised matrices.** See `linear.cuh` for how a block computes.

SEGMENT = {2: 64, 3: 64, 4: 64, 8: 32}
"""By bits: rows that a thread processes at once."""
PIECE = {2: 16, 3: 32, 4: 16, 8: 16}
"""By bits: rows after which a group may end within a segment."""
SLICES = 32
"""Threads to which the segments of a column are dealt."""
HELD = 16384
"""Activations in shared memory at once, for all tokens of a block, with at most one sum for every 16 of them."""
TOKENS_AT_ONCE = (1, 8)


def segments(bits: int, rows: int, group_size: int) -> int:
    """The number of segments of a column.

    A segment is part of one group, and the last segment of a group may be short; but where several groups fill a
    segment exactly, they share it.

    >>> segments(4, 256, 128), segments(4, 256, 40), segments(4, 256, 16)
    (4, 7, 4)
    """
    segment = SEGMENT[bits]
    if group_size < segment and segment % group_size == 0 and group_size % PIECE[bits] == 0:
        return -(-rows // segment)
    whole, rest = divmod(rows, group_size)
    return whole * -(-group_size // segment) + -(-rest // segment)


def shared_of_product(numbers: Numbers, bits: int, tokens: int) -> int:
    """Bytes of shared memory of a block: the activations of as many segments as fit, at least one per slice."""
    count = up(segments(bits, number(numbers, "rows"), number(numbers, "group_size")), SLICES)
    return 4 * tokens * (SEGMENT[bits] + 4) * min(HELD // SEGMENT[bits] // tokens, count)


def check_product(numbers: Numbers, bits: int) -> None:
    """Check the limits of products with quantised matrices."""
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
        Parameter(f"{prefix}words", "uint32", "read", _words(bits), alignment=PART),
        Parameter(f"{prefix}scales", scale_dtype, "read", _scales, alignment=PART),
        Parameter(f"{prefix}zeros", scale_dtype, "read", _scales, alignment=PART),
    )


def _product(name: str, bits: int, scale_dtype: str, tokens: int, prefixes: tuple[str, ...]) -> Kernel:
    matrices = tuple(part for prefix in prefixes for part in matrix_spans(bits, scale_dtype, prefix))
    return Kernel(
        name=f"{name}_b{bits}_{FLOAT_NAMES[scale_dtype]}_t{tokens}",
        source=f"linear_b{bits}_{FLOAT_NAMES[scale_dtype]}.cuh",
        parameters=(
            RESULT,
            ACTIVATIONS,
            *matrices,
            *integers("tokens", "rows", "columns", "group_size", "zero_point"),
        ),
        grid=lambda n: (-(-number(n, "columns") // PANEL), -(-number(n, "tokens") // tokens), 1),
        block=THREADS,
        shared=partial(shared_of_product, bits=bits, tokens=tokens),
        check=partial(check_product, bits=bits),
        flops=lambda n: 2.0 * len(prefixes) * number(n, "tokens") * number(n, "rows") * number(n, "columns"),
    )


def gemm(bits: int, scales: str = "float16", tokens: int = 1) -> Kernel:
    """Y = X W for a quantised matrix."""
    return _product("gemm", bits, scales, tokens, ("",))


def expert_in(bits: int, scales: str = "float16", tokens: int = 1) -> Kernel:
    """silu(X W_gate) ⊗ (X W_up): the first half of an expert, for two matrices of the same layout."""
    return _product("expert_in", bits, scales, tokens, ("gate_", "up_"))


def dequantize(bits: int, scales: str = "float16") -> Kernel:
    """The weights of a quantised matrix, K × N, float32."""

    def check(numbers: Numbers) -> None:
        counts(numbers, "rows", "columns")
        check_product({**numbers, "tokens": 1}, bits)

    return Kernel(
        name=f"dequantize_b{bits}_{FLOAT_NAMES[scales]}",
        source=f"linear_b{bits}_{FLOAT_NAMES[scales]}.cuh",
        parameters=(
            Parameter("y", "float32", "write", product_of("rows", "columns")),
            *matrix_spans(bits, scales),
            *integers("rows", "columns", "group_size", "zero_point"),
        ),
        grid=lambda n: (-(-number(n, "columns") // PANEL), -(-number(n, "rows") // (SLICES * CODES_PER_UNIT[bits])), 1),
        block=THREADS,
        check=check,
    )


# **Products with dense matrices**: routers and heads. A block computes one column.


def dense(weights: str = "float32") -> Kernel:
    """Y = X W for plain weights, stored column by column.

    Matrices stored one after another form one matrix with all their columns, so the routers of a layer and of the next
    one are one launch. Y may be in host memory, which needs the scores of a gate.
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
            Parameter("y", "float32", "write", product_of("tokens", "columns"), host=True),
            ACTIVATIONS,
            Parameter("weights", weights, "read", product_of("rows", "columns"), alignment=PART),
            *integers("tokens", "rows", "columns"),
        ),
        grid=lambda n: (number(n, "columns"), number(n, "tokens"), 1),
        block=THREADS,
        shared=lambda n: SHARED_SUMS,
        check=check,
        flops=lambda n: 2.0 * number(n, "tokens") * number(n, "rows") * number(n, "columns"),
    )
