"""Defects of casting to Block Floating Point: rounding, exponents, the ends of the ranges."""

from collections.abc import Callable
from functools import partial

import numpy as np

from lowbit.arrays import F32, F64, I64, Array
from lowbit.quantization.bfp import Blocks, Format
from lowbit_conformance.defects.defect import Defect, of_operation, unchecked

DEFECTS: list[Defect] = []
of_cast = of_operation(DEFECTS, "bfp.cast")


MX_BLOCKS = "https://github.com/DeepWok/mase/pull/321"

# **Casting**, all blocks at once, in which one step at a time can be replaced.


def away(x: F64) -> F64:
    """Round ties away from zero."""
    return np.sign(x) * np.floor(np.abs(x) + 0.5)


def power(largest: F64) -> I64:
    """E′ of f·2^E′, f in [½, 1)."""
    return np.frexp(largest)[1].astype(np.int64)


def logarithm(largest: F64) -> I64:
    """The same by a float32 logarithm, which rounds up to an integer too early."""
    with np.errstate(divide="ignore"):
        return np.floor(np.log2(largest.astype(np.float32), dtype=np.float32)).astype(np.int64) + 1


def cast(
    x: F32,
    format: Format,
    rounded: Callable[[F64], F64] = np.rint,
    exponent_of: Callable[[F64], I64] = power,
    shift: int = 0,
    least: int = 1,
    clamp: str = "first",
    of_zeros: int | None = None,
) -> Blocks:
    """Cast blocks; `shift` is added to the exponent, `least` to the lowest mantissa, and `clamp` says when exponents
    are clamped."""
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


def blocks_of(mantissas: Array, exponents: Array, format: Format) -> Blocks:
    """Blocks, constructed without checks."""
    return unchecked(
        Blocks,
        mantissas=np.ascontiguousarray(mantissas).astype(format.dtype),
        exponents=np.ascontiguousarray(exponents).astype(np.int16),
        format=format,
    )


@of_cast("C1 C2 C3")
def exponent_grows_instead_of_saturating(x: F32, format: Format) -> Blocks:
    """Where rounding reaches 2^(p-1), the exponent grows by one."""
    plain, larger = cast(x, format), cast(x, format, shift=1)
    over = np.zeros(plain.exponents.shape, bool)
    for number, span in enumerate(format.spans(x.shape[1])):
        scaled = np.ldexp(np.abs(x[:, span]).astype(np.float64), -plain.exponents[:, number : number + 1].astype(int))
        over[:, number] = np.rint(scaled).max(axis=1) > format.top
    each = np.repeat(over, format.block, axis=1)[:, : x.shape[1]]
    return blocks_of(
        np.where(each, larger.mantissas, plain.mantissas), np.where(over, larger.exponents, plain.exponents), format
    )


@of_cast("C1", MX_BLOCKS)
def blocks_cross_rows(x: F32, format: Format) -> Blocks:
    """Blocks are cut from the matrix as one run, across its rows."""
    # Each row keeps the exponents of the runs in which its blocks begin.
    rows, columns = x.shape
    flat = cast(x.reshape(1, -1), format)
    starts = np.arange(rows)[:, None] * columns + np.arange(format.blocks(columns)) * format.block
    return blocks_of(flat.mantissas.reshape(x.shape), flat.exponents[0][starts // format.block], format)


of_cast.add(
    "mantissas-truncated",
    "Mantissas are cut towards zero and not rounded.",
    "C1 C3",
    partial(cast, rounded=np.trunc),
)
of_cast.add(
    "mantissa-ties-away",
    "A tie goes away from zero and not to the even mantissa.",
    "C1 C3",
    partial(cast, rounded=away),
    "https://github.com/sonos/tract/pull/2850",
)
of_cast.add(
    "mantissas-down-to-minus-8",
    "The lowest mantissa is -2^(p-1): -8 where -7 is the last.",
    "C1 C3",
    partial(cast, least=0),
    "errata B8, whose sentence on the range is garbled in print",
)
of_cast.add(
    "exponent-one-too-high",
    "The exponent is E' - (p - 2): the top bit of mantissas is never used.",
    "C1 C2 C3",
    partial(cast, shift=1),
)
of_cast.add(
    "exponent-one-too-low",
    "The exponent is one too low, and the largest elements saturate.",
    "C1 C2 C3",
    partial(cast, shift=-1),
    MX_BLOCKS,
)
of_cast.add(
    "exponent-by-logarithm",
    "The exponent is the floor of a float32 logarithm.",
    "C2",
    partial(cast, exponent_of=logarithm),
)
of_cast.add(
    "exponent-wraps",
    "An exponent above its range wraps to the least.",
    "C4",
    partial(cast, clamp="wrapped"),
)
of_cast.add(
    "mantissas-before-clamp",
    "The exponent is clamped after the mantissas were computed.",
    "C4",
    partial(cast, clamp="last"),
)
of_cast.add(
    "zero-block-exponent-0",
    "A block of zeros has the exponent 0.",
    "C1 C5",
    partial(cast, of_zeros=0),
    "https://github.com/intel/auto-round/issues/1908",
)
of_cast.add(
    "mantissas-rounded-down",
    "Mantissas are rounded down instead of to nearest.",
    "C2",
    partial(cast, rounded=np.floor),
)
