"""Defects of what is done with blocks: decoding, dot products, their sums, and storage."""

from collections.abc import Callable
from typing import Any

import numpy as np

from lowbit.arrays import F32, F64, I64, Array
from lowbit.quantization import bfp_dot, bfp_storage
from lowbit.quantization.bfp import Blocks, Mantissas
from lowbit.quantization.bfp_dot import BlockSums
from lowbit.quantization.bfp_storage import StoredBlocks
from lowbit_conformance.defects.blocks import blocks_of
from lowbit_conformance.defects.defect import of

# **Decoding and dot products.**


def decode(blocks: Blocks, exponents: Array | None = None) -> F32:
    """Right, unless other exponents are given."""
    e = (blocks.exponents if exponents is None else exponents).astype(np.int64)
    each = np.repeat(e, blocks.format.block, axis=1)[:, : blocks.columns]
    with np.errstate(over="ignore", under="ignore"):
        values: F32 = np.ldexp(blocks.mantissas.astype(np.float64), each).astype(np.float32)
    return values


def decode_by_power(blocks: Blocks) -> F32:
    """2^e becomes a float32 number of its own first."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        powers = np.exp2(blocks.exponents.astype(np.float64)).astype(np.float32)
        each = np.repeat(powers, blocks.format.block, axis=1)[:, : blocks.columns]
        return each * blocks.mantissas.astype(np.float32)


def decode_flushed(blocks: Blocks) -> F32:
    values = decode(blocks)
    return np.where(np.abs(values) < np.finfo(np.float32).tiny, np.float32(0), values)


def decode_signed_zero(blocks: Blocks) -> F32:
    values = decode(blocks)
    return np.where((values == 0) & (np.roll(blocks.mantissas, 1, axis=1) < 0), np.float32(-0.0), values)


def dot(
    a: Blocks,
    b: Blocks,
    narrow: Callable[[I64], I64] = lambda products: products.sum(axis=-1),
    joined: Callable[[I64, I64], I64] = np.add,
) -> BlockSums:
    """Sums of products of mantissas; `narrow` adds them up, `joined` makes one exponent of two."""
    sums = []
    for span in a.format.spans(a.columns):
        sums.append(narrow(a.mantissas[:, None, span].astype(np.int64) * b.mantissas[None, :, span].astype(np.int64)))
    exponents = joined(a.exponents[:, None].astype(np.int64), b.exponents[None].astype(np.int64))
    return BlockSums(np.ascontiguousarray(np.stack(sums, axis=2)), np.ascontiguousarray(exponents, np.int32))


def saturating(products: I64) -> I64:
    """Pairs of products are added in 16 bits, and stop at the end of them."""
    padded = (
        np.concatenate([products, np.zeros_like(products[..., :1])], axis=-1) if products.shape[-1] % 2 else products
    )
    result: I64 = np.clip(padded[..., 0::2] + padded[..., 1::2], -(2**15), 2**15 - 1).sum(axis=-1)
    return result


def wrapping(products: I64) -> I64:
    answer: I64 = products.sum(axis=-1).astype(np.int16).astype(np.int64)
    return answer


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


def terms(blocks: BlockSums) -> F64:
    with np.errstate(over="ignore"):
        return np.ldexp(blocks.sums.astype(np.float64), blocks.exponents)


def total(blocks: BlockSums, order: int = 1, rounded: bool = False) -> F32:
    """Block by block in float32, backwards if `order` is −1; with each block rounded to float32 first if asked."""
    y = np.zeros(blocks.sums.shape[:2], np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        for number in range(blocks.sums.shape[2])[::order]:
            term = terms(blocks)[:, :, number]
            y = bfp_dot.add_rounded_once(y, term.astype(np.float32).astype(np.float64) if rounded else term)
    return y


def total_wide(blocks: BlockSums) -> F32:
    with np.errstate(over="ignore", invalid="ignore"):
        wide: F32 = terms(blocks).sum(axis=2).astype(np.float32)
    return wide


def total_saturated(blocks: BlockSums) -> F32:
    most = float(np.finfo(np.float32).max)
    answer: F32 = np.clip(np.nan_to_num(bfp_dot.total(blocks), nan=most, posinf=most, neginf=-most), -most, most)
    return answer


def total_flushed(blocks: BlockSums) -> F32:
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


DEFECTS = (
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
