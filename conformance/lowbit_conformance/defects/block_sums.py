"""Defects of what is done with blocks: decoding, dot products, their sums, and storage."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from lowbit.arrays import F32, F64, I64, Array
from lowbit.quantization import bfp_dot, bfp_storage
from lowbit.quantization.bfp import Blocks, Mantissas
from lowbit.quantization.bfp_dot import BlockSums
from lowbit.quantization.bfp_storage import StoredBlocks
from lowbit_conformance.defects.blocks import blocks_of
from lowbit_conformance.defects.defect import Defect, of_operation
from lowbit_conformance.defects.roundings import flushed

DEFECTS: list[Defect] = []
of_decode = of_operation(DEFECTS, "bfp.decode")
of_dot = of_operation(DEFECTS, "bfp.dot")
of_total = of_operation(DEFECTS, "bfp.total")
of_store = of_operation(DEFECTS, "bfp.store")
of_load = of_operation(DEFECTS, "bfp.load")


# **Decoding and dot products.**


def decode(blocks: Blocks, exponents: Array | None = None) -> F32:
    """Decode blocks; right unless other exponents are given."""
    e = (blocks.exponents if exponents is None else exponents).astype(np.int64)
    each = np.repeat(e, blocks.format.block, axis=1)[:, : blocks.columns]
    with np.errstate(over="ignore", under="ignore"):
        return np.ldexp(blocks.mantissas.astype(np.float64), each).astype(np.float32)


@of_decode("C2")
def power_in_float32(blocks: Blocks) -> F32:
    """2^e is rounded to float32 before it meets its mantissa."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        powers = np.exp2(blocks.exponents.astype(np.float64)).astype(np.float32)
        each = np.repeat(powers, blocks.format.block, axis=1)[:, : blocks.columns]
        return each * blocks.mantissas.astype(np.float32)


@of_decode("C2")
def subnormal_values_flushed(blocks: Blocks) -> F32:
    """Values below the normal range of float32 become zero."""
    return flushed(decode(blocks))


@of_decode("C1")
def zero_keeps_a_sign(blocks: Blocks) -> F32:
    """A mantissa of 0 gives -0 beside a negative one."""
    values = decode(blocks)
    return np.where((values == 0) & (np.roll(blocks.mantissas, 1, axis=1) < 0), np.float32(-0.0), values)


@of_decode("C1")
def exponent_one_low_in_decode(blocks: Blocks) -> F32:
    """A value is 2^(e-1) M."""
    return decode(blocks, blocks.exponents - np.int16(1))


@of_decode("C1")
def exponent_of_first_block(blocks: Blocks) -> F32:
    """All blocks of a row use the exponent of the first."""
    return decode(blocks, np.repeat(blocks.exponents[:, :1], blocks.exponents.shape[1], axis=1))


@of_decode("C1")
def mantissas_without_sign(blocks: Blocks) -> F32:
    """Values are never negative."""
    return decode(Blocks(np.abs(blocks.mantissas), blocks.exponents, blocks.format))


def dot(
    a: Blocks,
    b: Blocks,
    narrow: Callable[[I64], I64] = lambda products: products.sum(axis=-1),
    joined: Callable[[I64, I64], I64] = np.add,
) -> BlockSums:
    """Sums of products of mantissas; `narrow` adds the products, `joined` combines two exponents."""
    sums = []
    for span in a.format.spans(a.columns):
        sums.append(narrow(a.mantissas[:, None, span].astype(np.int64) * b.mantissas[None, :, span].astype(np.int64)))
    exponents = joined(a.exponents[:, None].astype(np.int64), b.exponents[None].astype(np.int64))
    return BlockSums(np.ascontiguousarray(np.stack(sums, axis=2)), np.ascontiguousarray(exponents, np.int32))


def saturating(products: I64) -> I64:
    """Pairs of products are added in 16 bits and saturate."""
    odd = products.shape[-1] % 2
    padded = np.concatenate([products, np.zeros_like(products[..., :odd])], axis=-1)
    return np.asarray(np.clip(padded[..., 0::2] + padded[..., 1::2], -(2**15), 2**15 - 1).sum(axis=-1))


def wrapping(dtype: Any, products: I64) -> I64:
    """The sum, wrapped in a type."""
    return np.asarray(products.sum(axis=-1).astype(dtype), np.int64)


@of_dot("C1 C2 C3")
def rows_of_a_and_b_exchanged(a: Blocks, b: Blocks) -> BlockSums:
    """Row r of a with row s of b is stored as s with r."""
    right = bfp_dot.dot(a, b)
    turned = (right.sums.shape[1], right.sums.shape[0], right.sums.shape[2])
    return BlockSums(
        np.ascontiguousarray(right.sums.reshape(turned).swapaxes(0, 1)),
        np.ascontiguousarray(right.exponents.reshape(turned).swapaxes(0, 1)),
    )


@of_dot("C1 C3")
def short_block_not_summed(a: Blocks, b: Blocks) -> BlockSums:
    """A short last block of a row counts as zero."""
    right = bfp_dot.dot(a, b)
    if a.columns % a.format.block:
        right.sums[:, :, -1] = 0
    return right


def terms(blocks: BlockSums) -> F64:
    with np.errstate(over="ignore"):
        return np.ldexp(blocks.sums.astype(np.float64), blocks.exponents)


def total(blocks: BlockSums, order: int = 1, rounded: bool = False) -> F32:
    """The total of blocks in float32, from the last if `order` is −1; on request each block is rounded to float32
    first."""
    y = np.zeros(blocks.sums.shape[:2], np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        for number in range(blocks.sums.shape[2])[::order]:
            term = terms(blocks)[:, :, number]
            y = bfp_dot.add_rounded_once(y, term.astype(np.float32).astype(np.float64) if rounded else term)
    return y


@of_total("C1")
def blocks_added_in_float64(blocks: BlockSums) -> F32:
    """Blocks are added in float64 and rounded once at the end."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(terms(blocks).sum(axis=2), np.float32)


@of_total("C2")
def overflow_saturates(blocks: BlockSums) -> F32:
    """A sum beyond float32 becomes its largest number, and NaN too."""
    most = float(np.finfo(np.float32).max)
    return np.nan_to_num(bfp_dot.total(blocks), nan=most, posinf=most, neginf=-most)


@of_total("C2")
def subnormal_sums_flushed(blocks: BlockSums) -> F32:
    """A sum below the normal range becomes zero."""
    return flushed(bfp_dot.total(blocks))


@of_total("C1")
def last_block_not_added(blocks: BlockSums) -> Array:
    """The last block is left out."""
    if blocks.sums.shape[2] == 1:
        return np.zeros(blocks.sums.shape[:2], np.float32)
    sums, exponents = np.ascontiguousarray(blocks.sums[:, :, :-1]), np.ascontiguousarray(blocks.exponents[:, :, :-1])
    return bfp_dot.total(BlockSums(sums, exponents))


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


of_decode.add(
    "exponent-one-off-in-decode", "A value is 2^(e+1) M.", "C1 C2", lambda blocks: decode(blocks, blocks.exponents + 1)
)
of_decode.add(
    "exponent-unsigned-in-decode",
    "A negative exponent of 8 bits is read as unsigned.",
    "C1 C2",
    lambda blocks: decode(blocks, np.where(blocks.exponents < 0, blocks.exponents + 256, blocks.exponents)),
)
of_dot.add(
    "products-saturate-at-16-bits",
    "Pairs of products are added in 16 bits and saturate.",
    "C1",
    partial(dot, narrow=saturating),
    "https://github.com/uxlfoundation/oneDNN/issues/476",
)
of_dot.add(
    "sums-wrap-at-16-bits",
    "The sum of a block is kept in 16 bits and wraps.",
    "C1",
    partial(dot, narrow=partial(wrapping, np.int16)),
    "https://github.com/microsoft/BitNet/issues/629",
)
of_dot.add(
    "larger-exponent-for-both",
    "The exponent of a product is the larger of the two.",
    "C2",
    partial(dot, joined=np.maximum),
)
of_total.add("blocks-added-backwards", "The last block is added first.", "C1", partial(total, order=-1))
of_total.add(
    "blocks-rounded-first",
    "The integer of a block is rounded to float32 before it is added.",
    "C1",
    partial(total, rounded=True),
)
of_store.add(
    "mantissas-by-sign-and-magnitude",
    "Negative mantissas are stored as a sign bit and a magnitude.",
    "C1",
    partial(store, mantissas=sign_and_magnitude),
)
of_store.add(
    "high-half-first",
    "Of two 4-bit mantissas the first lies in the high half of the byte.",
    "C1",
    partial(store, mantissas=high_half_first),
)
of_store.add("stored-bias-128", "Exponents are stored with a bias of 128.", "C2", partial(store, bias=128))
of_load.add("loaded-bias-128", "Exponents are loaded with a bias of 128.", "C1", partial(load, bias=128))
of_load.add(
    "mantissas-not-sign-extended",
    "Loaded mantissas keep their bits and lose their sign.",
    "C1",
    partial(load, signed=False),
)
of_dot.add(
    "exponents-subtracted",
    "The exponents of a product are subtracted instead of added.",
    "C2",
    partial(dot, joined=np.subtract),
)
