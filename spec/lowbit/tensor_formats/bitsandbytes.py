r"""bitsandbytes: NF4 and FP4, tables of 16 numbers scaled by the largest magnitude of each block.

The layout of QLoRA's checkpoints. The matrix is N × K, row by row, and is cut into blocks of ``blocksize`` elements
regardless of rows; the last block may be short. An element of block :math:`i` is :math:`t_q\, a_i`: a number of a
table, times the block's *absmax*. Byte :math:`j` of ``weight`` holds element :math:`2j` in its **high** half and
element :math:`2j + 1` in its low half, unlike all other formats here.

**Tables.** NF4 has quantiles of the normal distribution, in ascending order. FP4 has a sign, two bits of exponent and
one of mantissa, in an order of its own: codes 0 to 7 are 0, 1/16, 8, 12, 4, 6, 2 and 3 twelfths, and codes 8 to 15 are
the same with a minus. It differs from ``float4_e2m1fn`` in its numbers and in their order. Both tables are float32.

**Double quantisation** stores each absmax in 8 bits. Their mean, ``nested_offset``, is subtracted first, and the rest
is cut into blocks of 256, each with a scale in ``nested_absmax`` and codes into a map of 256 numbers:

.. math:: a_i = \mathrm{fl}\bigl(\mathrm{fl}(\mathrm{map}[c_i]\; \mathrm{nested\_absmax}_{\lfloor i / 256 \rfloor})
   + \mathrm{nested\_offset}\bigr),

where fl rounds to float32, because bitsandbytes computes the product, then the sum, in that type. The map is a tensor
of the checkpoint; `dynamic_map` is what bitsandbytes writes. Checkpoints also hold ``quant_map``, the table of 16,
which no dequantising kernel reads, and keep ``nested_offset`` and ``blocksize`` in the JSON of ``quant_state``.

**Casts** compute in float32. With :math:`m = \max |x|` of a block, *absmax* is *m*, and the code belongs to the number
of the table nearest to :math:`x \cdot (1/m)`, or to the lower of two equally near ones. Blocks of zeros have the absmax
0. Tools differ in two choices, and a call makes the same one throughout:

- *The short last block.* CUDA treats it like all others. The CPU's code divides, :math:`x / m`, with *m* at least
  :math:`10^{-38}`, and stores that.
- *Middles of FP4.* CUDA compares magnitudes with middles that are written with 6 to 8 digits, so ties go towards 0.
  The CPU's code computes the middles from the table, and ties go to the lower number.

**Casts with double quantisation** go on from there. The mean of all absmax is subtracted in float32. In each block of
256 differences, ``nested_absmax`` is the largest magnitude *m*, and a code is that of the number of the map near
:math:`x \cdot (1/m)`. Where *m* is 0, so are its codes. Tools differ in two more choices:

- *The mean* is a float32 sum over *n* blocks and a quotient, and PyTorch adds in an order that depends on the processor
  and the number of threads. Every order has at most :math:`n + 1` roundings and absmax is never negative, so any number
  within :math:`\gamma_{n+1}` times the exact mean is right, and everything else is exact for the stored mean.
- *Codes.* CUDA takes the nearest number, and of two equally near ones the even code. The CPU's code rounds the quotient
  to one of 65536 equal steps from -1 to 1 and takes the number nearest to that step, the lower of two. Near 0, where
  the map is finer than the steps, its code may be five places away: 0 becomes 131. Its compiler may contract the
  product and sum that give the step.

Source: bitsandbytes ``functional.py`` (get_4bit_type, create_dynamic_map, quantize_4bit, dequantize_4bit, QuantState)
its default backend, and ``kernels.cu`` (dQuantizeFP4, dQuantizeNF4); QLoRA, arXiv 2305.14314.
"""

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from lowbit.arrays import F32, F64, Array
from lowbit.contract.rounding import UNIT_ROUNDOFF, gamma
from lowbit.tensor_formats.bits import exact, join, looked_up, split
from lowbit.tensor_formats.casts import Integers, inverse, multiply_add
from lowbit.tensor_formats.table import Decode, Encode, Field, Format, Sizes, Tensors, Terms

NF4_TABLE = np.array(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ],
    np.float32,
)
TWELFTHS = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)
FP4_TABLE = (np.array([*TWELFTHS, *(-each for each in TWELFTHS)], np.float32) / np.float32(12)).astype(np.float32)

NESTED = 256
"""The numbers of a block of double quantisation."""


def dynamic_map() -> F32:
    """The 256 numbers of bitsandbytes' signed dynamic map, in ascending order.

    Seven decades have 1, 2, 4 … 64 numbers each: the midpoints of equal parts of 0.1 to 1, times a power of ten, with
    either sign. 0 and 1 complete the map. Everything is computed in float32, with each point of a decade counted from
    the nearer end and rounded once.

    >>> numbers = dynamic_map()
    >>> len(numbers), float(numbers[0]), float(numbers[127]), float(numbers[255])
    (256, -0.992968738079071, 0.0, 1.0)
    """
    positive = [midpoints(2**decade) * np.float32(10.0 ** (decade - 6)) for decade in range(7)]
    numbers = np.concatenate(positive)
    return np.sort(np.concatenate([-numbers, numbers, np.array([0, 1], np.float32)]))


def midpoints(parts: int) -> F32:
    """The midpoints of equal parts of 0.1 to 1, in float32."""
    first, last = np.float32(0.1), np.float32(1)
    step = np.float64((last - first) / np.float32(parts))
    places = np.arange(parts + 1)
    exact_points = np.where(places < (parts + 1) // 2, first + step * places, last - step * (parts - places))
    points: F32 = exact_points.astype(np.float32)
    return (points[:-1] + points[1:]) / np.float32(2)


def _weights(table: F32, scales: F64, tensors: Tensors, at: Sizes) -> Terms:
    codes = split(tensors["weight"], 4, order=(1, 0)).reshape(-1)
    blocks = np.arange(at.N * at.K) // at["blocksize"]
    numbers = looked_up(table.astype(np.float64), codes) * scales[blocks]
    return Terms(numbers.reshape(at.N, at.K).T)


def _plain(table: F32, tensors: Tensors, at: Sizes) -> Terms:
    return _weights(table, exact(tensors["absmax"]), tensors, at)


def _double(table: F32, tensors: Tensors, at: Sizes) -> Terms:
    return _weights(table, exact(nested(tensors)), tensors, at)


def nested(tensors: Tensors) -> Array:
    """float32: the absmax of each block, decoded from 8 bits."""
    codes = tensors["absmax"]
    scales = tensors["nested_absmax"][np.arange(len(codes)) // NESTED]
    with np.errstate(over="ignore"):
        scaled = tensors["nested_quant_map"][codes] * scales
        return np.asarray(scaled + tensors["nested_offset"], np.float32)


# **Casts.** Blocks are rows here, the last filled with zeros.

LEAST = np.float32(1e-38)
"""Inverses are taken of at least this value."""
LAST = ("x (1/m)", "x (1/m), the short last block x / m")
MIDDLES = np.array([0.00260417, 0.0859375, 0.20833333, 0.29166667, 0.4166667, 0.583333, 0.8333333], np.float32)
"""The thresholds between FP4's magnitudes, as written in the CUDA code."""


def _nearest(table: F32, quotients: F32) -> Integers:
    """The codes of the nearest numbers of a table, ties to the lower number."""
    order = np.argsort(table, kind="stable")
    middles = (table[order[:-1]] + table[order[1:]]) / np.float32(2)
    codes: Integers = order[np.searchsorted(middles, quotients)]
    return codes


def _by_magnitude(quotients: F32) -> Integers:
    """The codes of FP4 as the CUDA code computes them."""
    codes = np.argsort(TWELFTHS)[np.searchsorted(MIDDLES, np.abs(quotients))]
    return np.where(quotients < 0, codes + 8, codes).astype(np.int64)


Code = Callable[[F32], Integers]
CODES: Mapping[str, Mapping[str, Code]] = {
    "nf4": {"nearest": partial(_nearest, NF4_TABLE)},
    "fp4": {"nearest": partial(_nearest, FP4_TABLE), "by magnitude": _by_magnitude},
}


def _encode(code: Code, last: str, numbers: F64, at: Sizes) -> dict[str, Array]:
    """The fields without double quantisation."""
    count, size = at.N * at.K, at["blocksize"]
    x = np.zeros(-(-count // size) * size, np.float32)
    x[:count] = np.ascontiguousarray(numbers.T, np.float32).reshape(-1)
    blocks = x.reshape(-1, size)
    absmax = np.abs(blocks).max(axis=1)
    quotients = blocks * (np.float32(1) / np.maximum(absmax, LEAST))[:, np.newaxis]
    if count % size and last != LAST[0]:
        absmax[-1] = max(absmax[-1], LEAST)
        quotients[-1] = blocks[-1] / absmax[-1]
    codes = code(quotients.reshape(-1)[:count])
    return {"weight": join(codes, 4, np.uint8, order=(1, 0))[:, np.newaxis], "absmax": absmax}


# **Casts of absmax**: the codes of quotients from -1 to 1.

STEPS = np.float32(65535)


def _nearest_even(quotients: F32) -> Integers:
    """The codes of the nearest numbers of the map, ties to the even code."""
    numbers = dynamic_map()
    middles = (numbers[:-1] + numbers[1:]) * np.float32(0.5)
    lower = np.searchsorted(middles, quotients)
    tied = np.isin(quotients, middles)
    return np.where(tied, lower + lower % 2, lower).astype(np.int64)


def _in_steps(fused: bool, quotients: F32) -> Integers:
    """The codes of the numbers of the map nearest to one of 65536 steps, ties to the lower code."""
    half = np.float32(0.5)
    places = (quotients.clip(-1, 1) + np.float32(1)) * half
    steps = multiply_add(places, np.full_like(places, STEPS), half, fused=fused).astype(np.int64)
    return _nearest(dynamic_map(), np.float32(2) * steps.astype(np.float32) / STEPS - np.float32(1))


ABSMAX_CODES: Mapping[str, Code] = {
    "absmax nearest": _nearest_even,
    "absmax in 65536 steps": partial(_in_steps, False),
    "absmax in 65536 steps, fused": partial(_in_steps, True),
}


def mean(absmax: F32, stored: Array | None) -> F32:
    """float32, one number: the mean as `stored` by a cast if a sum in some order can give it, else the mean rounded
    once."""
    found = absmax.astype(np.float64).mean(keepdims=True)
    if (
        stored is not None
        and abs(float(stored[0]) - found[0]) <= gamma(len(absmax) + 1, UNIT_ROUNDOFF["float32"]) * found[0]
    ):
        return np.asarray(stored, np.float32)
    return np.asarray(found, np.float32)


def _encode_double(
    code: Code, last: str, of_absmax: Code, numbers: F64, at: Sizes, offset: Array | None = None
) -> dict[str, Array]:
    """The fields with double quantisation; `offset` comes from a cast under test."""
    fields = _encode(code, last, numbers, at)
    absmax = np.asarray(fields["absmax"], np.float32)
    nested_offset = mean(absmax, offset)
    rest = np.zeros(-(-len(absmax) // NESTED) * NESTED, np.float32)
    rest[: len(absmax)] = absmax - nested_offset
    blocks = rest.reshape(-1, NESTED)
    largest = np.abs(blocks).max(axis=1)
    codes = of_absmax(blocks * inverse(largest)[:, np.newaxis])
    codes[largest == 0] = 0
    return {
        "weight": fields["weight"],
        "absmax": codes.reshape(-1)[: len(absmax)].astype(np.uint8),
        "nested_absmax": largest,
        "nested_quant_map": dynamic_map(),
        "nested_offset": nested_offset,
    }


WEIGHT = Field("weight", "uint8", ("N*K/2", 1), "codes", "two codes a byte, the first in the high half")
PLAIN = (
    WEIGHT,
    Field("absmax", "float32", ("N*K//blocksize",), "scale", "the largest magnitude of each block"),
)
DOUBLE = (
    WEIGHT,
    Field("absmax", "uint8", ("N*K//blocksize",), "scale", "of each block, a place in the map"),
    Field("nested_absmax", "float32", (f"N*K//blocksize//{NESTED}",), "scale", f"one for {NESTED} blocks"),
    Field("nested_quant_map", "float32", (256,), "scale", "the map, ascending", signed=True),
    Field("nested_offset", "float32", (1,), "scale", "the mean that was subtracted", signed=True),
)
OPTIONS = {"blocksize": (64, 32, 128, 256, 512, 1024, 2048, 4096)}
SOURCE = "bitsandbytes, functional.py and its default backend"
HIGH_FIRST = "The first of two elements lies in the high half of a byte."
NOT_E2M1 = "FP4 is not e2m1: code 1 is 1/192, and code 3 is 1."
ROUNDED = "With double quantisation absmax is a float32 that was rounded twice, before any weight is formed."


def _format(name: str, title: str, table: F32, *traps: str, double: bool = False) -> Format:
    decode: Decode = partial(_double if double else _plain, table)
    plain = {
        f"{kind}, {last}": (code, last) for kind, code in CODES[name.removesuffix("-double")].items() for last in LAST
    }
    encode: dict[str, Encode] = {choice: partial(_encode, *given) for choice, given in plain.items()}
    if double:
        encode = {
            f"{choice}, {nested}": partial(_encode_double, *given, of_absmax)
            for choice, given in plain.items()
            for nested, of_absmax in ABSMAX_CODES.items()
        }
    return Format(
        name=name,
        title=title,
        fields=DOUBLE if double else PLAIN,
        decode=decode,
        encode=encode,
        summed="nested_offset" if double else None,
        options=OPTIONS,
        source=SOURCE,
        traps=traps,
    )


NF4 = _format("nf4", "bitsandbytes NF4", NF4_TABLE, HIGH_FIRST)
FP4 = _format("fp4", "bitsandbytes FP4", FP4_TABLE, HIGH_FIRST, NOT_E2M1)
NF4_DOUBLE = _format("nf4-double", "NF4, absmax in 8 bits", NF4_TABLE, HIGH_FIRST, ROUNDED, double=True)
FP4_DOUBLE = _format("fp4-double", "FP4, absmax in 8 bits", FP4_TABLE, HIGH_FIRST, NOT_E2M1, ROUNDED, double=True)
