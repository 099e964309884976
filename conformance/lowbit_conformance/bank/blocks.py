"""Defects of Block Floating Point: rounding, exponents, the ends of the ranges, storage, and sums of blocks."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from lowbit import bfp_dot, bfp_storage
from lowbit.bfp import Blocks, Floats, Format, Mantissas
from lowbit.bfp_dot import BlockSums
from lowbit.bfp_storage import StoredBlocks
from lowbit_conformance.bank.defect import COMMON, Defect, Function, arithmetical, unchecked

Reals = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
MX_BLOCKS = "https://github.com/DeepWok/mase/pull/321"

# **Casting**, all blocks at once, with one thing at a time to be replaced.


def away(x: Reals) -> Reals:
    """Ties away from zero."""
    return np.sign(x) * np.floor(np.abs(x) + 0.5)


def power(largest: Reals) -> Integers:
    """E′ of f·2^E′, f in [½, 1)."""
    return np.frexp(largest)[1].astype(np.int64)


def logarithm(largest: Reals) -> Integers:
    """The same by a logarithm in float32, which rounds up to a whole number too early."""
    with np.errstate(divide="ignore"):
        return np.floor(np.log2(largest.astype(np.float32), dtype=np.float32)).astype(np.int64) + 1


def cast(
    x: Floats,
    format: Format,
    rounded: Callable[[Reals], Reals] = np.rint,
    exponent_of: Callable[[Reals], Integers] = power,
    shift: int = 0,
    least: int = 1,
    clamp: str = "first",
    of_zeros: int | None = None,
) -> Blocks:
    """Blocks; `shift` goes to the exponent, `least` to the lowest mantissa, `clamp` says when exponents are clamped."""
    rows, columns = x.shape
    count = format.blocks(columns)
    padded = np.zeros((rows, count * format.block))
    padded[:, :columns] = x
    cut = padded.reshape(rows, count, format.block)
    largest = np.abs(cut).max(axis=2)
    e = np.where(largest > 0, exponent_of(np.where(largest > 0, largest, 1)) - 1 - (format.mantissa - 2) + shift, 0)
    clamped = np.clip(e, -format.reach, format.reach)
    used = e if clamp == "last" else clamped
    mantissas = np.clip(rounded(np.ldexp(cut, -used[:, :, None])), -format.top - 1 + least, format.top)
    stored = np.where(e > format.reach, e - 2 * format.reach - 1, clamped) if clamp == "wrapped" else clamped
    exponents = np.where(largest == 0, -format.reach if of_zeros is None else of_zeros, stored)
    cells = mantissas.reshape(rows, -1)[:, :columns]
    return blocks_of(cells, exponents, format)


def blocks_of(mantissas: npt.NDArray[Any], exponents: npt.NDArray[Any], format: Format) -> Blocks:
    """Blocks that nobody has checked."""
    return unchecked(
        Blocks,
        mantissas=np.ascontiguousarray(mantissas).astype(format.dtype),
        exponents=np.ascontiguousarray(exponents).astype(np.int16),
        format=format,
    )


def grown(x: Floats, format: Format) -> Blocks:
    """Where rounding would saturate, the exponent grows by one instead."""
    plain, larger = cast(x, format), cast(x, format, shift=1)
    over = np.zeros(plain.exponents.shape, bool)
    for number, span in enumerate(format.spans(x.shape[1])):
        scaled = np.ldexp(np.abs(x[:, span]).astype(np.float64), -plain.exponents[:, number : number + 1].astype(int))
        over[:, number] = np.rint(scaled).max(axis=1) > format.top
    each = np.repeat(over, format.block, axis=1)[:, : x.shape[1]]
    return blocks_of(
        np.where(each, larger.mantissas, plain.mantissas), np.where(over, larger.exponents, plain.exponents), format
    )


def across_rows(x: Floats, format: Format) -> Blocks:
    """Blocks are cut from the matrix as one run; each row keeps the exponents of the runs that its blocks begin in."""
    rows, columns = x.shape
    flat = cast(x.reshape(1, -1), format)
    starts = np.arange(rows)[:, None] * columns + np.arange(format.blocks(columns)) * format.block
    return blocks_of(flat.mantissas.reshape(x.shape), flat.exponents[0][starts // format.block], format)


# **Decoding and dot products.**


def decode(blocks: Blocks, exponents: npt.NDArray[Any] | None = None) -> Floats:
    """Right, unless other exponents are given."""
    e = (blocks.exponents if exponents is None else exponents).astype(np.int64)
    each = np.repeat(e, blocks.format.block, axis=1)[:, : blocks.columns]
    with np.errstate(over="ignore", under="ignore"):
        values: Floats = np.ldexp(blocks.mantissas.astype(np.float64), each).astype(np.float32)
    return values


def decode_by_power(blocks: Blocks) -> Floats:
    """2^e becomes a float32 number of its own first."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        powers = np.exp2(blocks.exponents.astype(np.float64)).astype(np.float32)
        each = np.repeat(powers, blocks.format.block, axis=1)[:, : blocks.columns]
        return each * blocks.mantissas.astype(np.float32)


def decode_flushed(blocks: Blocks) -> Floats:
    values = decode(blocks)
    return np.where(np.abs(values) < np.finfo(np.float32).tiny, np.float32(0), values)


def decode_signed_zero(blocks: Blocks) -> Floats:
    values = decode(blocks)
    return np.where((values == 0) & (np.roll(blocks.mantissas, 1, axis=1) < 0), np.float32(-0.0), values)


def dot(
    a: Blocks,
    b: Blocks,
    narrow: Callable[[Integers], Integers] = lambda products: products.sum(axis=-1),
    joined: Callable[[Integers, Integers], Integers] = np.add,
) -> BlockSums:
    """Sums of products of mantissas; `narrow` adds them up, `joined` makes one exponent of two."""
    sums = []
    for span in a.format.spans(a.columns):
        sums.append(narrow(a.mantissas[:, None, span].astype(np.int64) * b.mantissas[None, :, span].astype(np.int64)))
    exponents = joined(a.exponents[:, None].astype(np.int64), b.exponents[None].astype(np.int64))
    return BlockSums(np.ascontiguousarray(np.stack(sums, axis=2)), np.ascontiguousarray(exponents, np.int32))


def saturating(products: Integers) -> Integers:
    """Pairs of products are added in 16 bits, and stop at the end of them."""
    padded = (
        np.concatenate([products, np.zeros_like(products[..., :1])], axis=-1) if products.shape[-1] % 2 else products
    )
    result: Integers = np.clip(padded[..., 0::2] + padded[..., 1::2], -(2**15), 2**15 - 1).sum(axis=-1)
    return result


def wrapping(products: Integers) -> Integers:
    return products.sum(axis=-1).astype(np.int16).astype(np.int64)


def rows_exchanged(a: Blocks, b: Blocks) -> BlockSums:
    """As many rows and columns as there should be, read the other way round."""
    right = bfp_dot.dot(a, b)
    turned = (right.sums.shape[1], right.sums.shape[0], right.sums.shape[2])
    return BlockSums(
        np.ascontiguousarray(right.sums.reshape(turned).swapaxes(0, 1)),
        np.ascontiguousarray(right.exponents.reshape(turned).swapaxes(0, 1)),
    )


def short_block_dropped(a: Blocks, b: Blocks) -> BlockSums:
    right = bfp_dot.dot(a, b)
    if a.columns % a.format.block:
        right.sums[:, :, -1] = 0
    return right


def terms(blocks: BlockSums) -> Reals:
    with np.errstate(over="ignore"):
        return np.ldexp(blocks.sums.astype(np.float64), blocks.exponents)


def total(blocks: BlockSums, order: int = 1, rounded: bool = False) -> Floats:
    """Block by block in float32, backwards if `order` is −1; with each block rounded to float32 first if asked."""
    y = np.zeros(blocks.sums.shape[:2], np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        for number in range(blocks.sums.shape[2])[::order]:
            term = terms(blocks)[:, :, number]
            y = bfp_dot.add_rounded_once(y, term.astype(np.float32).astype(np.float64) if rounded else term)
    return y


def total_wide(blocks: BlockSums) -> Floats:
    with np.errstate(over="ignore", invalid="ignore"):
        wide: Floats = terms(blocks).sum(axis=2).astype(np.float32)
    return wide


def total_saturated(blocks: BlockSums) -> Floats:
    most = np.finfo(np.float32).max
    return np.clip(np.nan_to_num(bfp_dot.total(blocks), nan=most, posinf=most, neginf=-most), -most, most)


def total_flushed(blocks: BlockSums) -> Floats:
    y = bfp_dot.total(blocks)
    return np.where(np.abs(y) < np.finfo(np.float32).tiny, np.float32(0), y)


# **Storage.**


def store(blocks: Blocks, bias: int = 127, mantissas: Callable[[Mantissas, int], Any] = bfp_storage.pack_signed) -> Any:
    stored = mantissas(blocks.mantissas, blocks.format.mantissa)
    exponents = (blocks.exponents + bias).astype(np.uint8)
    return StoredBlocks(stored, exponents, blocks.columns, blocks.format)


def sign_and_magnitude(mantissas: Mantissas, bits: int) -> Any:
    wide = mantissas.astype(np.int64)
    return bfp_storage.pack_signed(np.where(wide < 0, (1 << (bits - 1)) + np.abs(wide), wide), bits)


def high_half_first(mantissas: Mantissas, bits: int) -> Any:
    stream = bfp_storage.pack_signed(mantissas, bits)
    return (stream << 4 | stream >> 4).astype(np.uint8) if bits == 4 else stream


def load(stored: StoredBlocks, bias: int = 127, signed: bool = True) -> Blocks:
    right = bfp_storage.load(stored)
    mantissas = right.mantissas.astype(np.int64)
    if not signed:
        mantissas = mantissas & (2**stored.format.mantissa - 1)
    return blocks_of(mantissas, stored.exponents.astype(np.int16) - bias, stored.format)


def of(operation: str, name: str, cause: str, clauses: str, wrong: Function, seen: str = COMMON) -> Defect:
    """A defect of one operation, whose clauses are named by their numbers."""
    return arithmetical(
        name, cause, " ".join(f"{operation}/{number}" for number in clauses.split()), {operation: wrong}, seen
    )


CASTS = (
    of(
        "bfp.cast",
        "mantissas-truncated",
        "Mantissas are cut towards zero and not rounded.",
        "C1 C3",
        lambda x, format: cast(x, format, rounded=np.trunc),
    ),
    of(
        "bfp.cast",
        "mantissa-ties-away",
        "A tie goes away from zero and not to the even mantissa.",
        "C1 C3",
        lambda x, format: cast(x, format, rounded=away),
        "https://github.com/sonos/tract/pull/2850",
    ),
    of(
        "bfp.cast",
        "mantissas-down-to-minus-8",
        "The lowest mantissa is -2^(p-1): -8 where -7 is the last.",
        "C1 C3",
        lambda x, format: cast(x, format, least=0),
        "errata B8, whose sentence on the range is garbled in print",
    ),
    of(
        "bfp.cast",
        "exponent-one-too-high",
        "The exponent is E' - (p - 2): the top bit of mantissas is never used.",
        "C1 C2 C3",
        lambda x, format: cast(x, format, shift=1),
    ),
    of(
        "bfp.cast",
        "exponent-one-too-low",
        "The exponent is one too low, and the largest elements saturate.",
        "C1 C2 C3",
        lambda x, format: cast(x, format, shift=-1),
        MX_BLOCKS,
    ),
    of(
        "bfp.cast",
        "exponent-by-logarithm",
        "The exponent is the floor of a float32 logarithm.",
        "C2",
        lambda x, format: cast(x, format, exponent_of=logarithm),
    ),
    of(
        "bfp.cast",
        "exponent-grows-instead-of-saturating",
        "Where rounding reaches 2^(p-1), the exponent grows by one.",
        "C1 C2 C3",
        grown,
    ),
    of(
        "bfp.cast",
        "exponent-wraps",
        "An exponent above its range wraps to the least.",
        "C4",
        lambda x, format: cast(x, format, clamp="wrapped"),
    ),
    of(
        "bfp.cast",
        "mantissas-before-clamp",
        "The exponent is clamped after the mantissas were computed.",
        "C4",
        lambda x, format: cast(x, format, clamp="last"),
    ),
    of(
        "bfp.cast",
        "zero-block-exponent-0",
        "A block of zeros has the exponent 0.",
        "C1 C5",
        lambda x, format: cast(x, format, of_zeros=0),
        "https://github.com/intel/auto-round/issues/1908",
    ),
    of(
        "bfp.cast",
        "blocks-cross-rows",
        "Blocks are cut from the matrix as one run, across its rows.",
        "C1",
        across_rows,
        MX_BLOCKS,
    ),
)

OTHERS = (
    of(
        "bfp.decode",
        "exponent-one-off-in-decode",
        "A value is 2^(e+1) M.",
        "C1 C2",
        lambda blocks: decode(blocks, blocks.exponents + 1),
    ),
    of(
        "bfp.decode",
        "exponent-unsigned-in-decode",
        "A negative exponent of 8 bits is read as unsigned.",
        "C1 C2",
        lambda blocks: decode(blocks, np.where(blocks.exponents < 0, blocks.exponents + 256, blocks.exponents)),
    ),
    of(
        "bfp.decode",
        "power-in-float32",
        "2^e is rounded to float32 before it meets its mantissa.",
        "C2",
        decode_by_power,
    ),
    of(
        "bfp.decode",
        "subnormal-values-flushed",
        "Values below the normal range of float32 become zero.",
        "C2",
        decode_flushed,
    ),
    of("bfp.decode", "zero-keeps-a-sign", "A mantissa of 0 gives -0 beside a negative one.", "C1", decode_signed_zero),
    of(
        "bfp.dot",
        "products-saturate-at-16-bits",
        "Pairs of products are added in 16 bits and saturate.",
        "C1",
        lambda a, b: dot(a, b, narrow=saturating),
        "https://github.com/uxlfoundation/oneDNN/issues/476",
    ),
    of(
        "bfp.dot",
        "sums-wrap-at-16-bits",
        "The sum of a block is kept in 16 bits and wraps.",
        "C1",
        lambda a, b: dot(a, b, narrow=wrapping),
        "https://github.com/microsoft/BitNet/issues/629",
    ),
    of(
        "bfp.dot",
        "larger-exponent-for-both",
        "The exponent of a product is the larger of the two.",
        "C2",
        lambda a, b: dot(a, b, joined=np.maximum),
    ),
    of(
        "bfp.dot",
        "rows-of-a-and-b-exchanged",
        "Row r of a with row s of b is stored as s with r.",
        "C1 C2 C3",
        rows_exchanged,
    ),
    of(
        "bfp.dot", "short-block-not-summed", "A short last block of a row counts as zero.", "C1 C3", short_block_dropped
    ),
    of("bfp.total", "blocks-added-backwards", "The last block is added first.", "C1", lambda blocks: total(blocks, -1)),
    of(
        "bfp.total",
        "blocks-rounded-first",
        "The integer of a block is rounded to float32 before it is added.",
        "C1",
        lambda blocks: total(blocks, rounded=True),
    ),
    of(
        "bfp.total",
        "blocks-added-in-float64",
        "Blocks are added in float64 and rounded once at the end.",
        "C1",
        total_wide,
    ),
    of(
        "bfp.total",
        "overflow-saturates",
        "A sum beyond float32 becomes its largest number, and NaN too.",
        "C2",
        total_saturated,
    ),
    of("bfp.total", "subnormal-sums-flushed", "A sum below the normal range becomes zero.", "C2", total_flushed),
    of(
        "bfp.store",
        "mantissas-by-sign-and-magnitude",
        "Negative mantissas are stored as a sign bit and a magnitude.",
        "C1",
        lambda blocks: store(blocks, mantissas=sign_and_magnitude),
    ),
    of(
        "bfp.store",
        "high-half-first",
        "Of two 4-bit mantissas the first lies in the high half of the byte.",
        "C1",
        lambda blocks: store(blocks, mantissas=high_half_first),
    ),
    of(
        "bfp.store",
        "stored-bias-128",
        "Exponents are stored with a bias of 128.",
        "C2",
        lambda blocks: store(blocks, bias=128),
    ),
    of(
        "bfp.load",
        "loaded-bias-128",
        "Exponents are loaded with a bias of 128.",
        "C1",
        lambda stored: load(stored, bias=128),
    ),
    of(
        "bfp.load",
        "mantissas-not-sign-extended",
        "Loaded mantissas keep their bits and lose their sign.",
        "C1",
        lambda stored: load(stored, signed=False),
    ),
)

DEFECTS = (*CASTS, *OTHERS)
