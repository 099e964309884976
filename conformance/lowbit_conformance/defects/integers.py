"""Defects of integer products: accumulators too narrow, exponents and sums of the wrong block, integers rounded."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from lowbit.arrays import Array
from lowbit.quantization.affine import QuantizedMatrix
from lowbit.quantization.bfp import Blocks, decode
from lowbit_conformance import packing
from lowbit_conformance.defects import steps
from lowbit_conformance.defects.defect import COMMON, MOVES, WRONG, Defect, Function, of
from lowbit_conformance.defects.sums import bfloat16

OPERATION = "linear.qgemm_bfp"

Run = tuple[int, int, int, int]
"""First row and the one after the last, number of the block, number of the group."""


# **Step by step**, each of which a defect may replace.


def runs_of(rows: int, block: int, group_size: int) -> Iterator[Run]:
    """Where either a block or a group ends, a run ends."""
    ends = sorted({*range(0, rows, block), *range(0, rows, group_size), rows})
    for first, last in pairwise(ends):
        yield first, last, first // block, first // group_size


def plain(x: Blocks) -> Array:
    """Mantissas as they are."""
    return x.mantissas.astype(np.int64)


def codes_of(matrix: QuantizedMatrix) -> Array:
    """Codes as they are."""
    return packing.unpack(matrix.words, matrix.bits).astype(np.int64)


def exactly(mantissas: Array, codes: Array) -> Array:
    """The sums of products: T × N."""
    return mantissas @ codes


def of_own_block(x: Blocks, run: Run) -> Array:
    """2^e of each row of X."""
    return np.exp2(x.exponents[:, run[2]].astype(np.float64))


def unchanged(powers: Array) -> Array:
    """The powers that the sums of mantissas are multiplied by."""
    return powers


def product(
    x: Blocks,
    matrix: QuantizedMatrix,
    runs: Callable[[int, int, int], Iterator[Run]] = runs_of,
    mantissas: Callable[[Blocks], Array] = plain,
    codes: Callable[[QuantizedMatrix], Array] = codes_of,
    dots: Callable[[Array, Array], Array] = exactly,
    powers: Callable[[Blocks, Run], Array] = of_own_block,
    for_sums: Callable[[Array], Array] = unchanged,
) -> Array:
    """T × N in float64, of these steps."""
    m, q, group = mantissas(x), codes(matrix), steps.groups(matrix)
    scales = matrix.scales.astype(np.float64)
    zeros = matrix.zeros.astype(np.float64)
    offsets = zeros if matrix.convention == "minimum" else -scales * zeros
    y = np.zeros((x.rows, matrix.columns))
    assert group[-1] == len(scales) - 1
    for run in runs(matrix.rows, x.format.block, matrix.group_size):
        first, last, _, number = run
        power = powers(x, run)[:, None]
        own = m[:, first:last]
        y += power * dots(own, q[first:last]) * scales[number]
        y += for_sums(power) * own.sum(axis=1, keepdims=True) * offsets[number]
    return y


# **Accumulators.**


def pairs(mantissas: Array, codes: Array) -> Array:
    """Sums of neighbouring products, stopped at the ends of 16 bits: T × pairs × N."""
    odd = mantissas.shape[1] % 2
    m, q = np.pad(mantissas, ((0, 0), (0, odd))), np.pad(codes, ((0, odd), (0, 0)))
    both = m[:, 0::2, None] * q[None, 0::2] + m[:, 1::2, None] * q[None, 1::2]
    clipped: Array = np.clip(both, -(2**15), 2**15 - 1)
    return clipped


def pairs_saturate(mantissas: Array, codes: Array) -> Array:
    """As ``maddubs`` adds, and wide enough afterwards."""
    total: Array = pairs(mantissas, codes).sum(axis=1)
    return total


def pairs_added_in_16_bits(mantissas: Array, codes: Array) -> Array:
    """And added up in 16 bits over the whole segment."""
    each = pairs(mantissas, codes)
    total = np.zeros((len(mantissas), codes.shape[1]), np.int64)
    for pair in range(each.shape[1]):
        total = np.clip(total + each[:, pair], -(2**15), 2**15 - 1)
    return total


def wrapped(mantissas: Array, codes: Array) -> Array:
    return (mantissas @ codes).astype(np.int16).astype(np.int64)


def to_bfloat16(mantissas: Array, codes: Array) -> Array:
    return bfloat16((mantissas @ codes).astype(np.float32)).astype(np.float64)


def last_of_odd_dropped(mantissas: Array, codes: Array) -> Array:
    """Products are taken in fours, and what is left at the end of a segment is not."""
    whole = mantissas.shape[1] // 4 * 4
    return exactly(mantissas[:, :whole], codes[:whole])


# **Signs.**


def unsigned(x: Blocks) -> Array:
    bits: int = 2 ** (8 * x.format.dtype.itemsize) - 1
    return plain(x) & bits


def complemented(x: Blocks) -> Array:
    """The sign taken off by turning all bits over: one less in magnitude."""
    m = plain(x)
    return np.where(m < 0, m + 1, m)


def biased(x: Blocks) -> Array:
    """A bias makes mantissas unsigned, and is not taken off where a block is empty."""
    m, block = plain(x), x.format.block
    for number in range(x.exponents.shape[1]):
        part = m[:, number * block : (number + 1) * block]
        part[~part.any(axis=1)] = 2 ** (x.format.mantissa - 1)
    return m


def signed_codes(matrix: QuantizedMatrix) -> Array:
    """The signed operand of the instruction is given the codes: 8 bits of them with a sign."""
    return codes_of(matrix).astype(np.uint8).view(np.int8).astype(np.int64)


# **Exponents.**


def of_next_block(x: Blocks, run: Run) -> Array:
    return of_own_block(x, (*run[:2], min(run[2] + 1, x.exponents.shape[1] - 1), run[3]))


def of_first_row(x: Blocks, run: Run) -> Array:
    return np.repeat(of_own_block(x, run)[:1], x.rows)


def of_the_group(x: Blocks, run: Run, group_size: int) -> Array:
    """That of the block in which the group begins."""
    return of_own_block(x, (*run[:2], run[3] * group_size // x.format.block, run[3]))


def without_subnormal(x: Blocks, run: Run) -> Array:
    """2^e made by shifting e + 127 to where the exponent of a float32 lies."""
    powers = of_own_block(x, run)
    return np.where(powers < 2.0**-126, 0, powers)


def in_half(x: Blocks, run: Run) -> Array:
    with np.errstate(over="ignore"):
        return of_own_block(x, run).astype(np.float16).astype(np.float64)


def aligned(x: Blocks, over: int | None) -> tuple[Array, Array]:
    """Mantissas shifted until blocks share the largest exponent: of all rows (0), or of all blocks of a row (1)."""
    e = x.exponents.astype(np.int64)
    starts = range(0, x.columns, x.format.block)
    held = np.where(np.add.reduceat(np.abs(plain(x)), starts, axis=1) > 0, e, -(2**15))  # an empty block has no say
    largest = np.maximum(held.max(axis=over, keepdims=True), -x.format.reach)
    shift = np.clip(largest - e, 0, 62)
    return plain(x) >> np.repeat(shift, x.format.block, axis=1)[:, : x.columns], np.broadcast_to(largest, e.shape)


def of_shared_exponents(x: Blocks, matrix: QuantizedMatrix, over: int) -> Array:
    mantissas, exponents = aligned(x, over)
    return product(
        x, matrix, mantissas=lambda x: mantissas, powers=lambda x, run: np.exp2(exponents[:, run[2]].astype(np.float64))
    )


# **Blocks and groups.**


def begun_anew(rows: int, block: int, group_size: int) -> Iterator[Run]:
    """Blocks are counted from the first row of each group."""
    number, most = 0, -(-rows // block) - 1
    for group, first in enumerate(range(0, rows, group_size)):
        last = min(first + group_size, rows)
        for start in range(first, last, block):
            yield start, min(start + block, last), min(number, most), group
            number += 1


def block_in_one_group(rows: int, block: int, group_size: int) -> Iterator[Run]:
    """A block has the scale of its first row."""
    for number, first in enumerate(range(0, rows, block)):
        yield first, min(first + block, rows), number, first // group_size


def short_dropped(rows: int, block: int, group_size: int) -> Iterator[Run]:
    yield from (run for run in runs_of(rows, block, group_size) if (run[2] + 1) * block <= rows)


# **Sums of mantissas.**


def added_again(x: Blocks, matrix: QuantizedMatrix) -> Array:
    """The offset meets the sum so far at every segment, not once at the end of its group."""
    y, group = product(x, matrix), -1
    for run in list(runs_of(matrix.rows, x.format.block, matrix.group_size)):
        if run[3] == group:  # what lies before this segment in the group is counted once more
            y += product(x, matrix, runs=partial(_within, run), dots=no_products)
        group = run[3]
    return y


def _within(upto: Run, *sizes: int) -> Iterator[Run]:
    yield from (run for run in runs_of(*sizes) if run[3] == upto[3] and run[0] < upto[0])


def sum_of_first_row(x: Blocks, matrix: QuantizedMatrix) -> Array:
    mantissas, exponents = (np.repeat(part[:1], x.rows, axis=0) for part in (x.mantissas, x.exponents))
    first = Blocks(mantissas, exponents, x.format)
    return product(x, matrix) - product(x, matrix, dots=no_products) + product(first, matrix, dots=no_products)


def no_products(mantissas: Array, codes: Array) -> Array:
    return np.zeros((len(mantissas), codes.shape[1]))


# **The whole.**


def rows_past_16(x: Blocks, matrix: QuantizedMatrix) -> Array:
    return product(x, matrix)[np.arange(x.rows) % 16]


def decoded(x: Blocks, matrix: QuantizedMatrix) -> Array:
    """No integers: blocks become floats again, and meet weights rounded to float32."""
    return steps.product(decode(x), steps.RIGHT.weights(matrix)).astype(np.float64)


def _defect(
    name: str, cause: str, clauses: str, wrong: Function, seen: str = COMMON, verdicts: tuple[str, ...] = WRONG
) -> Defect:
    return of(OPERATION, name, cause, clauses, wrong, seen, verdicts)


def _step(name: str, cause: str, clauses: str, seen: str = COMMON, **replaced: Any) -> Defect:
    return _defect(name, cause, clauses, partial(product, **replaced), seen)


DEFECTS: tuple[Defect, ...] = (
    _step(
        "integer-pairs-saturate-at-16-bits",
        "Two products of mantissas and codes are added in 16 bits and saturate, which only 8-bit codes show.",
        "C1",
        "https://github.com/uxlfoundation/oneDNN/issues/476",
        dots=pairs_saturate,
    ),
    _step(
        "segments-saturate-at-16-bits",
        "A whole segment is added up in 16 bits before it is widened.",
        "C1",
        dots=pairs_added_in_16_bits,
    ),
    _step("segments-wrap-at-16-bits", "The integer of a segment is kept in 16 bits and wraps.", "C1", dots=wrapped),
    _step("integers-in-bfloat16", "The integer of a segment is rounded to bfloat16.", "C1 C2", dots=to_bfloat16),
    _step(
        "rest-of-four-dropped",
        "Products are taken four at a time, and a rest at the end of a segment is left out.",
        "C1 C2 C4",
        dots=last_of_odd_dropped,
    ),
    _step("mantissas-unsigned", "A negative mantissa is read as unsigned.", "C1 C2 C4", mantissas=unsigned),
    _step(
        "mantissas-complemented",
        "The sign of a mantissa is taken off by turning its bits over, without the one to add.",
        "C1 C2 C4",
        mantissas=complemented,
    ),
    _step(
        "bias-kept-in-empty-blocks",
        "A bias that makes mantissas unsigned is not taken off where all of a block are zero.",
        "C1 C4",
        mantissas=biased,
    ),
    _step(
        "codes-with-a-sign", "Codes of 8 bits are the signed operand of the instruction.", "C1 C2", codes=signed_codes
    ),
    _step("exponent-of-next-block", "A block has the exponent of the one after it.", "C1 C2 C4", powers=of_next_block),
    _defect(
        "exponents-of-first-row",
        "All rows of X have the exponents of the first.",
        "C1 C2 C3",
        partial(product, powers=of_first_row),
        verdicts=MOVES,
    ),
    _defect(
        "exponent-once-a-group",
        "All blocks of a group have the exponent of the one that it begins in.",
        "C1 C2 C4",
        lambda x, matrix: product(x, matrix, powers=lambda x, run: of_the_group(x, run, matrix.group_size)),
    ),
    _step(
        "least-powers-flushed",
        "2^e is made by a shift into the exponent of a float32, which gives 0 where it is subnormal.",
        "C2",
        powers=without_subnormal,
    ),
    _step("powers-in-half", "2^e is kept in float16, which ends at 2^-24.", "C2", powers=in_half),
    _defect(
        "rows-share-an-exponent",
        "The rows of a tile are shifted to the largest exponent of any, so that a row depends on its neighbours.",
        "C3",
        lambda x, matrix: of_shared_exponents(x, matrix, 0),
        verdicts=MOVES,
    ),
    _defect(
        "blocks-share-an-exponent",
        "Mantissas are shifted to the largest exponent of their row, and lose their last bits.",
        "C1 C2",
        lambda x, matrix: of_shared_exponents(x, matrix, 1),
    ),
    _step(
        "blocks-begin-anew-in-groups", "Blocks are counted from the start of each group.", "C1 C2 C4", runs=begun_anew
    ),
    _step(
        "block-in-one-group",
        "A block that reaches into the next group has the scale of its first row.",
        "C1 C2 C4",
        runs=block_in_one_group,
    ),
    _step("last-short-block-dropped", "A short last block is left out.", "C1 C2 C4", runs=short_dropped),
    _step(
        "mantissa-sums-without-exponents",
        "The sums of mantissas that meet the offsets have no exponents.",
        "C1 C2 C4",
        for_sums=np.ones_like,
    ),
    _defect(
        "offset-at-every-segment",
        "The offset meets the sum of mantissas so far at every segment of its group.",
        "C1 C2",
        added_again,
    ),
    _defect(
        "mantissa-sums-of-first-row",
        "The sums of mantissas that meet the offsets are those of the first row for all.",
        "C1 C2 C3",
        sum_of_first_row,
        verdicts=MOVES,
    ),
    _defect("blocks-past-16-rows-repeated", "Rows of X past the 16th are those before them.", "C1", rows_past_16),
    _defect(
        "blocks-decoded",
        "Blocks are decoded and multiplied by weights rounded to float32, under a declaration of integers.",
        "C2",
        decoded,
    ),
)
