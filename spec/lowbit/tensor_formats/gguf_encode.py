r"""How ggml casts numbers to blocks: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q8_1 and Q8_K.

Weights are cast to the first four once, activations to the others in every product. ggml computes in float32 from the
numbers of one block :math:`x_i`:

======== ============================ ============================== =================================================
type     scale                        code, before rounding          rounding
======== ============================ ============================== =================================================
Q8_0, 1  :math:`d = \max|x| / 127`    :math:`x \cdot (1/d)`          nearest, ties away from 0
Q8_K     :math:`1 / (-127 / x_m)`     :math:`(-127 / x_m) \cdot x`   nearest, ties to even; at most 127
Q4_0     :math:`d = x_m / {-8}`       :math:`x \cdot (1/d) + 8.5`    towards 0; at most 15
Q5_0     :math:`d = x_m / {-16}`      :math:`x \cdot (1/d) + 16.5`   towards 0; at most 31
Q4_1     :math:`d = (\max - \min)/15` :math:`(x - \min)(1/d) + 0.5`  towards 0; at most 15
Q5_1     :math:`d = (\max - \min)/31` :math:`(x - \min)(1/d) + 0.5`  towards 0
======== ============================ ============================== =================================================

:math:`x_m` is the number of largest magnitude with its sign, the first of several. So the scale of Q4_0, Q5_0 and Q8_K
may be negative, and :math:`x_m` itself gets the lowest code exactly. The inverse is that of the float32 scale; only
then is *d* rounded to float16 (Q8_K keeps float32). A block of zeros has the scale 0.

**Where kernels differ**, each is right, and a call keeps to one:

- *Quotient* of Q8_0 and Q8_1. ggml's reference multiplies by :math:`1/d`, its AVX code by :math:`127/\max|x|`, and its
  CUDA code divides by *d*.
- *Ties* of Q8_0 and Q8_1. The reference and CUDA use ``roundf`` (away from 0), AVX and NEON round to even.
- *The sum* ``s`` of Q8_1 is *d*, in float32, times the sum of the codes; in CUDA it is the sum of the numbers, added
  in pairs 16, 8, 4, 2 and 1 apart.
- *Contraction.* A compiler may turn :math:`x \cdot (1/d) + 8.5` into one fused operation with a single rounding.

Source: ggml, ``ggml-quants.c`` (``quantize_row_*_ref``), ``quants.c`` of ``ggml-cpu/arch/x86`` and ``arm``,
``ggml-cuda/quantize.cu`` (``quantize_q8_1``).
"""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from typing import Literal

import numpy as np
import numpy.typing as npt

from lowbit.arrays import F32, F64, Array
from lowbit.errors import ArgumentError
from lowbit.tensor_formats.bits import join
from lowbit.tensor_formats.table import Encode, Sizes

Quotient = Literal["x (1/d)", "x (127/absmax)", "x / d"]
Ties = Literal["away", "even"]
Sum = Literal["of codes", "of numbers"]
Integers = npt.NDArray[np.int64]
QUOTIENTS: tuple[Quotient, ...] = ("x (1/d)", "x (127/absmax)", "x / d")
TIES: tuple[Ties, ...] = ("away", "even")
SUMS: tuple[Sum, ...] = ("of codes", "of numbers")


def nearest(numbers: F32, ties: Ties) -> Integers:
    """The nearest integers."""
    if ties == "even":
        return np.rint(numbers).astype(np.int64)
    return np.copysign(np.floor(np.abs(numbers.astype(np.float64)) + 0.5), numbers).astype(np.int64)


def inverse(d: F32) -> F32:
    """1/d in float32, and 0 for 0.

    Raises:
        ArgumentError: an inverse is infinite.
    """
    with np.errstate(divide="ignore", over="ignore"):
        found = np.where(d == 0, np.float32(0), np.float32(1) / d).astype(np.float32)
    if not np.isfinite(found).all():
        raise ArgumentError("x", "a block of numbers so small that 1 / scale is infinite", "larger numbers, or zeros")
    return found


def half(numbers: F32) -> Array:
    """float16, rounded once.

    Raises:
        ArgumentError: a number is too large.
    """
    with np.errstate(over="ignore"):
        found = numbers.astype(np.float16)
    if not np.isfinite(found).all():
        raise ArgumentError("x", f"a scale or minimum of {np.abs(numbers).max():.6g}", "at most 65504, that of float16")
    return found


def eight(x: F32, quotient: Quotient, ties: Ties) -> tuple[F32, Integers]:
    """The float32 scale of each block, N × blocks × 1, and the codes of Q8_0 and Q8_1."""
    largest = np.abs(x).max(axis=-1, keepdims=True)
    d = largest / np.float32(127)
    by_inverse = inverse(d)
    if quotient == "x (1/d)":
        return d, nearest(x * by_inverse, ties)
    if quotient == "x (127/absmax)":
        return d, nearest(x * over(np.float32(127), largest), ties)
    return d, nearest(over(x, d), ties)


def over(above: F32 | np.float32, below: F32) -> F32:
    """A quotient in float32, and 0 where the divisor is 0."""
    divisor = np.where(below == 0, np.float32(1), below)
    return np.where(below == 0, np.float32(0), above / divisor).astype(np.float32)


def q8_0(quotient: Quotient, ties: Ties, numbers: F64, at: Sizes) -> dict[str, Array]:
    """The fields of Q8_0."""
    d, codes = eight(numbers.astype(np.float32), quotient, ties)
    return {"d": half(d[..., 0]), "qs": codes.astype(np.int8)}


def q8_1(quotient: Quotient, ties: Ties, added: Sum, numbers: F64, at: Sizes) -> dict[str, Array]:
    """The fields of Q8_1."""
    x = numbers.astype(np.float32)
    d, codes = eight(x, quotient, ties)
    total = d[..., 0] * codes.sum(axis=-1).astype(np.float32) if added == "of codes" else in_pairs(x)
    return {"d": half(d[..., 0]), "s": half(total), "qs": codes.astype(np.int8)}


def in_pairs(x: F32) -> F32:
    """The float32 sum of the last axis, halves added to each other again and again."""
    while x.shape[-1] > 1:
        middle = x.shape[-1] // 2
        x = x[..., :middle] + x[..., middle:]
    return x[..., 0]


def extreme(x: F32) -> F32:
    """The number of largest magnitude in each block, the first of several: N × blocks × 1."""
    return np.take_along_axis(x, np.abs(x).argmax(axis=-1)[..., None], axis=-1)


def q8_k(numbers: F64, at: Sizes) -> dict[str, Array]:
    """The fields of Q8_K."""
    x = numbers.astype(np.float32)
    factor = -over(np.float32(127), extreme(x))
    codes = np.minimum(nearest(factor * x, "even"), 127)
    d = inverse(factor)[..., 0]
    return {"d": d, "qs": codes.astype(np.int8), "bsums": sums_of_16(codes)}


def sums_of_16(codes: Array) -> Array:
    """int16: the sum of each 16 codes."""
    sums: Array = codes.astype(np.int16).reshape(*codes.shape[:-1], -1, 16).sum(axis=-1, dtype=np.int16)
    return sums


def rounded_down(x: F32, factor: F32, added: float, most: int, *, fused: bool) -> Integers:
    """``x * factor + added`` towards 0, in float32 with two roundings, or with one if fused."""
    if fused:
        total = (x.astype(np.float64) * factor + added).astype(np.float32)
    else:
        total = x * factor + np.float32(added)
    return np.minimum(np.trunc(total).astype(np.int64), most)


def symmetric(bits: int, fused: bool, numbers: F64, at: Sizes) -> dict[str, Array]:
    """The fields of Q4_0 and Q5_0."""
    x, center = numbers.astype(np.float32), 2 ** (bits - 1)
    d = extreme(x) / np.float32(-center)
    codes = rounded_down(x, inverse(d), center + 0.5, 2**bits - 1, fused=fused)
    return {"d": half(d[..., 0]), **packed(codes, bits)}


def with_minimum(bits: int, fused: bool, numbers: F64, at: Sizes) -> dict[str, Array]:
    """The fields of Q4_1 and Q5_1."""
    x, most = numbers.astype(np.float32), 2**bits - 1
    least = x.min(axis=-1, keepdims=True)
    d = (x.max(axis=-1, keepdims=True) - least) / np.float32(most)
    codes = rounded_down(x - least, inverse(d), 0.5, most, fused=fused)
    return {"d": half(d[..., 0]), "m": half(least[..., 0]), **packed(codes, bits)}


def packed(codes: Integers, bits: int) -> dict[str, Array]:
    """The nibbles of blocks of 32, and their fifth bits."""
    low, high = np.split(codes & 15, 2, axis=-1)
    fields: dict[str, Array] = {"qs": (low | high << 4).astype(np.uint8)}
    return fields if bits == 4 else {"qh": join(codes >> 4, 1, np.uint8), **fields}


# **Choices of the field**: by name, the reference first.


def choices(encode: Callable[..., dict[str, Array]], *sets: tuple[str, ...]) -> Mapping[str, Encode]:
    """One `Encode` for each combination of choices."""
    return {", ".join(each): partial(encode, *each) for each in product(*sets)}


def contractions(encode: Callable[..., dict[str, Array]], bits: int) -> Mapping[str, Encode]:
    """Two roundings, as ggml's reference is written, and one."""
    return {"two roundings": partial(encode, bits, False), "fused": partial(encode, bits, True)}
