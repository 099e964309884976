r"""How ggml casts numbers to blocks: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q8_1, Q8_K, TQ1_0, TQ2_0, MXFP4 and NVFP4.

Activations are cast to the types of 8 bits in every product, weights to the others once. ggml computes in float32 from
the numbers of one block :math:`x_i`:

======== ============================ ============================== =================================================
type     scale                        code, before rounding          rounding
======== ============================ ============================== =================================================
Q8_0, 1  :math:`d = \max|x| / 127`    :math:`x \cdot (1/d)`          nearest, ties away from 0
Q8_K     :math:`1 / (-127 / x_m)`     :math:`(-127 / x_m) \cdot x`   nearest, ties to even; at most 127
Q4_0     :math:`d = x_m / {-8}`       :math:`x \cdot (1/d) + 8.5`    towards 0; at most 15
Q5_0     :math:`d = x_m / {-16}`      :math:`x \cdot (1/d) + 16.5`   towards 0; at most 31
Q4_1     :math:`d = (\max - \min)/15` :math:`(x - \min)(1/d) + 0.5`  towards 0; at most 15
Q5_1     :math:`d = (\max - \min)/31` :math:`(x - \min)(1/d) + 0.5`  towards 0
TQ1, 2_0 :math:`d = \max|x|`           :math:`x \cdot (1/d)`          nearest, ties away from 0
MXFP4    :math:`2^{e - 2}`            :math:`x / 2^{e - 2}`          nearest float of 4 bits, ties towards 0
======== ============================ ============================== =================================================

:math:`x_m` is the number of largest magnitude with its sign, the first of several. So the scale of Q4_0, Q5_0 and Q8_K
may be negative, and :math:`x_m` itself gets the lowest code exactly. The inverse is that of the float32 scale; only
then is *d* rounded to float16 (Q8_K keeps float32). A block of zeros has the scale 0.

**Where kernels differ**, every choice is right, and a call makes the same one throughout:

- *Quotient* of Q8_0 and Q8_1. ggml's reference multiplies by :math:`1/d`, its AVX code by :math:`127/\max|x|`, and its
  CUDA code divides by *d*.
- *Ties* of Q8_0 and Q8_1. The reference and CUDA use ``roundf`` (away from 0), AVX and NEON round to even.
- *The sum* ``s`` of Q8_1 is *d*, in float32, times the sum of the codes; in CUDA it is the sum of the numbers, added
  in pairs 16, 8, 4, 2 and 1 apart.
- *The exponent* of MXFP4 is :math:`e = \lfloor \log_2 \max|x| \rfloor`. The reference takes ``log2f``, which rounds
  up just below a power of two; others read the exponent from the float.
- *Contraction.* A compiler may turn :math:`x \cdot (1/d) + 8.5` into one fused operation with a single rounding.

**IQ4_NL** fits its scale to the codes, in the chapter `gguf_fit`: llama.cpp casts key-value caches to it. **Other
types** have no `encode`, because their definition has none. The K-quants, IQ4_XS and the other IQ types are only
written to files, and a writer chooses scales by its own search for a small error: one search in llama.cpp's reference,
others where the importance of each number is given. Readers of such a type rely only on this: its bytes are a valid
matrix, and they stand for the numbers of the table (`formats.dequantize`). How close these are to the given numbers is
not part of the format.

Source: ggml, ``ggml-quants.c`` (``quantize_row_*_ref``), ``quants.c`` of ``ggml-cpu/arch/x86`` and ``arm``,
``ggml-cuda/quantize.cu`` (``quantize_q8_1``).
"""

from collections.abc import Callable, Mapping
from typing import Literal

import numpy as np

from lowbit.arrays import F32, F64, Array
from lowbit.errors import ArgumentError
from lowbit.numbers.floats import FLOATS
from lowbit.tensor_formats.bits import join
from lowbit.tensor_formats.casts import Integers, Ties, inverse, kept_in, multiply_add, nearest, over
from lowbit.tensor_formats.table import Sizes

Quotient = Literal["x (1/d)", "x (127/absmax)", "x / d"]
Sum = Literal["of codes", "of numbers"]
QUOTIENTS: tuple[Quotient, ...] = ("x (1/d)", "x (127/absmax)", "x / d")
SUMS: tuple[Sum, ...] = ("of codes", "of numbers")


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


def q8_0(quotient: Quotient, ties: Ties, numbers: F64, at: Sizes) -> dict[str, Array]:
    """The fields of Q8_0."""
    d, codes = eight(numbers.astype(np.float32), quotient, ties)
    return {"d": kept_in("float16", d[..., 0]), "qs": codes.astype(np.int8)}


def q8_1(quotient: Quotient, ties: Ties, added: Sum, numbers: F64, at: Sizes) -> dict[str, Array]:
    """The fields of Q8_1."""
    x = numbers.astype(np.float32)
    d, codes = eight(x, quotient, ties)
    total = d[..., 0] * codes.sum(axis=-1).astype(np.float32) if added == "of codes" else in_pairs(x)
    return {"d": kept_in("float16", d[..., 0]), "s": kept_in("float16", total), "qs": codes.astype(np.int8)}


def in_pairs(x: F32) -> F32:
    """The float32 sum over the last axis, by repeatedly adding its halves."""
    while x.shape[-1] > 1:
        middle = x.shape[-1] // 2
        x = x[..., :middle] + x[..., middle:]
    return x[..., 0]


def extreme(x: F32) -> F32:
    """The number of largest magnitude in each block, the first of equals: N × blocks × 1."""
    return np.take_along_axis(x, np.abs(x).argmax(axis=-1)[..., None], axis=-1)


def q8_k(numbers: F64, at: Sizes) -> dict[str, Array]:
    """The fields of Q8_K."""
    x = numbers.astype(np.float32)
    factor = -over(np.float32(127), extreme(x))
    codes = np.minimum(nearest(factor * x, "even"), 127)
    d = inverse(factor)[..., 0]
    return {"d": d, "qs": codes.astype(np.int8), "bsums": sums_of_16(codes)}


def sums_of_16(codes: Array) -> Array:
    """int16: the sum of every 16 codes."""
    sums: Array = codes.astype(np.int16).reshape(*codes.shape[:-1], -1, 16).sum(axis=-1, dtype=np.int16)
    return sums


def rounded_down(x: F32, factor: F32, added: float, most: int, *, fused: bool) -> Integers:
    """``x * factor + added`` towards 0."""
    total = multiply_add(x, factor, np.float32(added), fused=fused)
    return np.minimum(np.trunc(total).astype(np.int64), most)


def symmetric(bits: int, fused: bool, numbers: F64, at: Sizes) -> dict[str, Array]:
    """The fields of Q4_0 and Q5_0."""
    x, center = numbers.astype(np.float32), 2 ** (bits - 1)
    d = extreme(x) / np.float32(-center)
    codes = rounded_down(x, inverse(d), center + 0.5, 2**bits - 1, fused=fused)
    return {"d": kept_in("float16", d[..., 0]), **packed(codes, bits)}


def with_minimum(bits: int, fused: bool, numbers: F64, at: Sizes) -> dict[str, Array]:
    """The fields of Q4_1 and Q5_1."""
    x, most = numbers.astype(np.float32), 2**bits - 1
    least = x.min(axis=-1, keepdims=True)
    d = (x.max(axis=-1, keepdims=True) - least) / np.float32(most)
    codes = rounded_down(x - least, inverse(d), 0.5, most, fused=fused)
    return {"d": kept_in("float16", d[..., 0]), "m": kept_in("float16", least[..., 0]), **packed(codes, bits)}


def packed(codes: Integers, bits: int) -> dict[str, Array]:
    """The nibbles of blocks of 32, and their fifth bits."""
    fields: dict[str, Array] = {"qs": joined(codes & 15, 16, (1, 16)).astype(np.uint8)}
    return fields if bits == 4 else {"qh": join(codes >> 4, 1, np.uint8), **fields}


def ternary(planes: Callable[[Integers], dict[str, Array]], numbers: F64, at: Sizes) -> dict[str, Array]:
    """The fields of TQ1_0 and TQ2_0; `planes` packs codes of 0, 1 and 2."""
    x = numbers.astype(np.float32)
    d = np.abs(x).max(axis=-1, keepdims=True)
    return {"d": kept_in("float16", d[..., 0]), **planes(nearest(x * inverse(d), "away") + 1)}


def pairs_in_planes(codes: Integers) -> dict[str, Array]:
    """Codes of 2 bits in planes over 32 bytes."""
    return {"qs": joined(codes, 32, (1, 4, 16, 64)).astype(np.uint8)}


def trits_in_planes(codes: Integers) -> dict[str, Array]:
    """Digits in base 3, the first the highest, as fractions of 256 that are rounded up."""
    places = (81, 27, 9, 3, 1)
    first, second, last = np.split(codes, (160, 240), axis=-1)
    parts = joined(first, 32, places), joined(second, 16, places), joined(last, 4, places[:4])
    qs, rest, qh = (((256 * part + 242) // 243).astype(np.uint8) for part in parts)
    return {"qs": np.concatenate([qs, rest], axis=-1), "qh": qh}


def joined(codes: Integers, run: int, worth: tuple[int, ...]) -> Integers:
    """Planes of `run` codes each, every plane times its worth, added up."""
    cut = codes.reshape(*codes.shape[:-1], -1, len(worth), run)
    total: Integers = (cut * np.array(worth)[:, None]).sum(axis=-2)
    return total.reshape(*codes.shape[:-1], -1)


BETWEEN = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""The midpoints between neighbours among 0, 0.5, 1, 1.5, 2, 3, 4 and 6."""


def floats_of_4(exponent: Callable[[F32], Array], numbers: F64, at: Sizes) -> dict[str, Array]:
    """The fields of MXFP4; a zero has the code 0 whatever its sign.

    Raises:
        ArgumentError: the largest number of a block is so small that its scale would be below the least.
    """
    largest = np.abs(numbers).max(axis=-1).astype(np.float32)
    e = np.where(largest > 0, exponent(np.where(largest > 0, largest, np.float32(1))) - 2, -127).astype(np.int64)
    if e.min() < -127:
        raise ArgumentError(
            "x", f"a block whose largest number is {largest[e < -127][0]:.3g}", "2^-125 or more, or zeros"
        )
    codes = floats_nearest(np.ldexp(numbers, -e[..., None]))
    return {"e": (e + 127).astype(np.uint8).view(FLOATS["float8_e8m0fnu"].dtype), **packed(codes, 4)}


def floats_nearest(quotients: F64) -> Integers:
    """The codes of the nearest 4-bit floats, ties towards 0; a zero has no sign."""
    codes = np.searchsorted(BETWEEN, np.abs(quotients))
    return codes | np.where((quotients < 0) & (codes > 0), 8, 0)


def nvfp4(numbers: F64, at: Sizes) -> dict[str, Array]:
    """The fields of NVFP4."""
    runs = numbers.reshape(*numbers.shape[:-1], 4, 16)
    scales = without_sign((np.abs(runs).max(axis=-1) / 6).astype(np.float32))
    d = scales.astype(np.float64)[..., None]
    codes = floats_nearest(np.where(d == 0, 0, runs / np.where(d == 0, 1, d)))
    return {"d": scales, "qs": joined(codes, 8, (1, 16)).astype(np.uint8).reshape(*numbers.shape[:-1], 32)}


def without_sign(scales: F32) -> Array:
    """float8_e4m3fn as ggml rounds it: ties upwards, 448 instead of 256 and more, at most 7 subnormal steps."""
    steps, exponents = np.frexp(scales.astype(np.float64))
    normal = (exponents + 6) * 8 + np.floor(np.ldexp(steps, 4) + 0.5).astype(np.int64) - 8
    subnormal = np.minimum(np.floor(scales * np.float32(512) + np.float32(0.5)), 7).astype(np.int64)
    pattern = np.where(scales < 2.0**-6, subnormal, np.where(normal >= 120, 126, normal))
    return pattern.astype(np.uint8).view(FLOATS["float8_e4m3fn"].dtype)


EXPONENTS: Mapping[str, Callable[[F32], Array]] = {
    "log2 in float32": lambda x: np.floor(np.log2(x.astype(np.float64)).astype(np.float32)),
    "exponent of the float": lambda x: np.frexp(x)[1] - 1,
}
