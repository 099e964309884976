"""Defects of integer products: accumulators too narrow, exponents and sums of the wrong block, integers rounded."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise

import numpy as np

from lowbit.arrays import Array
from lowbit.quantization.affine import QuantizedMatrix
from lowbit.quantization.bfp import Blocks, decode
from lowbit_conformance import packing
from lowbit_conformance.defects import steps
from lowbit_conformance.defects.defect import MOVES, Declaring, Defect, of_operation
from lowbit_conformance.defects.sums import bfloat16

DEFECTS: list[Defect] = []
OPERATION = "linear.qgemm_bfp"
of_integers = of_operation(DEFECTS, OPERATION)

Run = tuple[int, int, int, int]
"""First row and the one after the last, number of the block, number of the group."""


# **Steps**, each of which a defect may replace.


def runs_of(rows: int, block: int, group_size: int) -> Iterator[Run]:
    """Runs of rows; a run ends where a block or a group ends."""
    ends = sorted({*range(0, rows, block), *range(0, rows, group_size), rows})
    for first, last in pairwise(ends):
        yield first, last, first // block, first // group_size


def plain(x: Blocks) -> Array:
    """Mantissas, unchanged."""
    return x.mantissas.astype(np.int64)


def codes_of(matrix: QuantizedMatrix) -> Array:
    """Codes, unchanged."""
    return packing.unpack(matrix.words, matrix.bits).astype(np.int64)


def exactly(mantissas: Array, codes: Array) -> Array:
    """The sums of products: T × N."""
    return mantissas @ codes


def of_own_block(x: Blocks, run: Run) -> Array:
    """2^e of each row of X."""
    return np.exp2(x.exponents[:, run[2]].astype(np.float64))


def product(
    x: Blocks,
    matrix: QuantizedMatrix,
    runs: Callable[[int, int, int], Iterator[Run]] = runs_of,
    mantissas: Callable[[Blocks], Array] = plain,
    codes: Callable[[QuantizedMatrix], Array] = codes_of,
    dots: Callable[[Array, Array], Array] = exactly,
    powers: Callable[[Blocks, Run], Array] = of_own_block,
    for_sums: Callable[[Array], Array] = lambda powers: powers,
    of_sums: Callable[[Array], Array] = lambda sums: sums,
) -> Array:
    """The product, T × N in float64, from these steps; `for_sums` gives the powers for sums of mantissas."""
    m, q = mantissas(x), codes(matrix)
    scales, zeros = matrix.scales.astype(np.float64), matrix.zeros.astype(np.float64)
    offsets = zeros if matrix.convention == "minimum" else -scales * zeros
    y = np.zeros((x.rows, matrix.columns))
    for run in runs(matrix.rows, x.format.block, matrix.group_size):
        first, last, _, number = run
        power = powers(x, run)[:, None]
        own = m[:, first:last]
        y += power * dots(own, q[first:last]) * scales[number]
        y += for_sums(power) * of_sums(own.sum(axis=1, keepdims=True)) * offsets[number]
    return y


def of_step(into: list[Defect], step: str) -> Declaring:
    """Declares defects of one of these steps."""
    return of_operation(into, OPERATION, lambda wrong: partial(product, **{step: wrong}))


of_dots, of_mantissas, of_codes = (of_step(DEFECTS, step) for step in ("dots", "mantissas", "codes"))
of_powers, of_runs, of_for_sums = (of_step(DEFECTS, step) for step in ("powers", "runs", "for_sums"))

# **Accumulators.**


def pairs(mantissas: Array, codes: Array) -> Array:
    """Sums of neighbouring products, saturated at 16 bits: T × pairs × N."""
    odd = mantissas.shape[1] % 2
    m, q = np.pad(mantissas, ((0, 0), (0, odd))), np.pad(codes, ((0, odd), (0, 0)))
    both = m[:, 0::2, None] * q[None, 0::2] + m[:, 1::2, None] * q[None, 1::2]
    return np.asarray(np.clip(both, -(2**15), 2**15 - 1))


@of_dots("C1", "https://github.com/uxlfoundation/oneDNN/issues/476")
def integer_pairs_saturate_at_16_bits(mantissas: Array, codes: Array) -> Array:
    """Two products of mantissas and codes are added in 16 bits and saturate, which only 8-bit codes show."""
    return np.asarray(pairs(mantissas, codes).sum(axis=1))


@of_dots("C1")
def segments_saturate_at_16_bits(mantissas: Array, codes: Array) -> Array:
    """A whole segment is summed in 16 bits before it is widened."""
    each = pairs(mantissas, codes)
    total = np.zeros((len(mantissas), codes.shape[1]), np.int64)
    for pair in range(each.shape[1]):
        total = np.clip(total + each[:, pair], -(2**15), 2**15 - 1)
    return total


@of_dots("C1")
def segments_wrap_at_16_bits(mantissas: Array, codes: Array) -> Array:
    """The integer of a segment is kept in 16 bits and wraps."""
    return (mantissas @ codes).astype(np.int16).astype(np.int64)


@of_dots("C1 C2")
def integers_in_bfloat16(mantissas: Array, codes: Array) -> Array:
    """The integer of a segment is rounded to bfloat16."""
    return bfloat16((mantissas @ codes).astype(np.float32)).astype(np.float64)


@of_dots("C1 C2 C4")
def rest_of_four_dropped(mantissas: Array, codes: Array) -> Array:
    """Products are taken four at a time, and the remainder at the end of a segment is left out."""
    whole = mantissas.shape[1] // 4 * 4
    return exactly(mantissas[:, :whole], codes[:whole])


# **Signs.**


@of_mantissas("C1 C2 C4")
def mantissas_unsigned(x: Blocks) -> Array:
    """A negative mantissa is read as unsigned."""
    bits: int = 2 ** (8 * x.format.dtype.itemsize) - 1
    return plain(x) & bits


@of_mantissas("C1 C2 C4")
def mantissas_complemented(x: Blocks) -> Array:
    """The magnitude of a mantissa is computed by inverting its bits without adding one."""
    m = plain(x)
    return np.where(m < 0, m + 1, m)


@of_mantissas("C1 C4")
def bias_kept_in_empty_blocks(x: Blocks) -> Array:
    """A bias that makes mantissas unsigned is not subtracted if a block is all zeros."""
    m, block = plain(x), x.format.block
    for number in range(x.exponents.shape[1]):
        part = m[:, number * block : (number + 1) * block]
        part[~part.any(axis=1)] = 2 ** (x.format.mantissa - 1)
    return m


@of_codes("C1 C2")
def codes_with_a_sign(matrix: QuantizedMatrix) -> Array:
    """Codes of 8 bits are the signed operand of the instruction."""
    return codes_of(matrix).astype(np.uint8).view(np.int8).astype(np.int64)


# **Exponents.**


@of_powers("C1 C2 C4")
def exponent_of_next_block(x: Blocks, run: Run) -> Array:
    """A block has the exponent of the one after it."""
    return of_own_block(x, (*run[:2], min(run[2] + 1, x.exponents.shape[1] - 1), run[3]))


def of_first_row(x: Blocks, run: Run) -> Array:
    return np.repeat(of_own_block(x, run)[:1], x.rows)


def of_the_group(x: Blocks, run: Run, group_size: int) -> Array:
    """The power of the block in which the group begins."""
    return of_own_block(x, (*run[:2], run[3] * group_size // x.format.block, run[3]))


@of_powers("C2")
def least_powers_flushed(x: Blocks, run: Run) -> Array:
    """2^e is made by a shift into the exponent field of a float32, which gives 0 for subnormal powers."""
    powers = of_own_block(x, run)
    return np.where(powers < 2.0**-126, 0, powers)


@of_powers("C2")
def powers_in_half(x: Blocks, run: Run) -> Array:
    """2^e is kept in float16, which ends at 2^-24."""
    with np.errstate(over="ignore"):
        return of_own_block(x, run).astype(np.float16).astype(np.float64)


def aligned(x: Blocks, over: int | None) -> tuple[Array, Array]:
    """Mantissas shifted until blocks share the largest exponent: of all rows (0), or of all blocks of a row (1)."""
    e = x.exponents.astype(np.int64)
    starts = range(0, x.columns, x.format.block)
    held = np.where(np.add.reduceat(np.abs(plain(x)), starts, axis=1) > 0, e, -(2**15))  # an empty block does not count
    largest = np.maximum(held.max(axis=over, keepdims=True), -x.format.reach)
    shift = np.clip(largest - e, 0, 62)
    return plain(x) >> np.repeat(shift, x.format.block, axis=1)[:, : x.columns], np.broadcast_to(largest, e.shape)


def of_shared_exponents(x: Blocks, matrix: QuantizedMatrix, over: int) -> Array:
    mantissas, exponents = aligned(x, over)
    return product(
        x, matrix, mantissas=lambda x: mantissas, powers=lambda x, run: np.exp2(exponents[:, run[2]].astype(np.float64))
    )


# **Blocks and groups.**


@of_runs("C1 C2 C4")
def blocks_begin_anew_in_groups(rows: int, block: int, group_size: int) -> Iterator[Run]:
    """Blocks are counted from the start of each group."""
    number, most = 0, -(-rows // block) - 1
    for group, first in enumerate(range(0, rows, group_size)):
        last = min(first + group_size, rows)
        for start in range(first, last, block):
            yield start, min(start + block, last), min(number, most), group
            number += 1


@of_runs("C1 C2 C4")
def block_in_one_group(rows: int, block: int, group_size: int) -> Iterator[Run]:
    """A block that extends into the next group has the scale of its first row."""
    for number, first in enumerate(range(0, rows, block)):
        yield first, min(first + block, rows), number, first // group_size


@of_runs("C1 C2 C4")
def last_short_block_dropped(rows: int, block: int, group_size: int) -> Iterator[Run]:
    """A short last block is left out."""
    yield from (run for run in runs_of(rows, block, group_size) if (run[2] + 1) * block <= rows)


# **Sums of mantissas.**


@of_integers("C1 C2")
def offset_at_every_segment(x: Blocks, matrix: QuantizedMatrix) -> Array:
    """The offset is multiplied by the running sum of mantissas at every segment of its group."""
    y, group = product(x, matrix), -1
    for run in list(runs_of(matrix.rows, x.format.block, matrix.group_size)):
        if run[3] == group:  # earlier segments of the group are counted again
            y += product(x, matrix, runs=partial(_within, run), dots=no_products)
        group = run[3]
    return y


def _within(upto: Run, *sizes: int) -> Iterator[Run]:
    yield from (run for run in runs_of(*sizes) if run[3] == upto[3] and run[0] < upto[0])


@of_integers("C1 C2 C3", verdicts=MOVES)
def mantissa_sums_of_first_row(x: Blocks, matrix: QuantizedMatrix) -> Array:
    """The sums of mantissas for the offsets are those of the first row for all rows."""
    mantissas, exponents = (np.repeat(part[:1], x.rows, axis=0) for part in (x.mantissas, x.exponents))
    first = Blocks(mantissas, exponents, x.format)
    return product(x, matrix) - product(x, matrix, dots=no_products) + product(first, matrix, dots=no_products)


def no_products(mantissas: Array, codes: Array) -> Array:
    return np.zeros((len(mantissas), codes.shape[1]))


# **The whole.**


@of_integers("C1")
def blocks_past_16_rows_repeated(x: Blocks, matrix: QuantizedMatrix) -> Array:
    """Rows of X past the 16th are those before them."""
    return product(x, matrix)[np.arange(x.rows) % 16]


@of_integers("C2")
def blocks_decoded(x: Blocks, matrix: QuantizedMatrix) -> Array:
    """Blocks are decoded and multiplied by weights rounded to float32, although integers are declared."""
    return steps.product(decode(x), steps.RIGHT.weights(matrix)).astype(np.float64)


of_integers.add(
    "exponents-of-first-row",
    "All rows of X have the exponents of the first.",
    "C1 C2 C3",
    partial(product, powers=of_first_row),
    verdicts=MOVES,
)
of_integers.add(
    "exponent-once-a-group",
    "All blocks of a group have the exponent of the one that it begins in.",
    "C1 C2 C4",
    lambda x, matrix: product(x, matrix, powers=lambda x, run: of_the_group(x, run, matrix.group_size)),
)
of_integers.add(
    "rows-share-an-exponent",
    "The rows of a tile are shifted to the largest exponent of any, so that a row depends on its neighbours.",
    "C3",
    lambda x, matrix: of_shared_exponents(x, matrix, 0),
    verdicts=MOVES,
)
of_integers.add(
    "blocks-share-an-exponent",
    "Mantissas are shifted to the largest exponent of their row, and lose their last bits.",
    "C1 C2",
    lambda x, matrix: of_shared_exponents(x, matrix, 1),
)
of_for_sums.add(
    "mantissa-sums-without-exponents",
    "The sums of mantissas that meet the offsets have no exponents.",
    "C1 C2 C4",
    np.ones_like,
)
