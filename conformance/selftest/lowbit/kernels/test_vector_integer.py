"""Small numbers in lanes: each word against a definition in Python's own integers, on random and on extreme bits."""

import math
import struct

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from lowbit.arrays import U32
from lowbit.kernels import vector_integer

EXTREMES = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0x80008000, 0x80808080, 0x7F7F7F7F)
LANE = st.sampled_from((*EXTREMES, 0xFFFFFFFF, 0xFF00FF00, 0x00FF00FF)) | st.integers(0, 2**32 - 1)
WORDS = hnp.arrays(np.uint32, 4, elements=LANE)


def cut(lane: int, width: int, *, signed: bool) -> list[int]:
    """The numbers of `width` bits in a lane, the lowest first."""
    parts = [lane >> at & (1 << width) - 1 for at in range(0, 32, width)]
    return [part - (1 << width) if signed and part >> width - 1 else part for part in parts]


def joined(numbers: list[int], width: int) -> int:
    """The lane of these numbers."""
    return sum((number & (1 << width) - 1) << width * n for n, number in enumerate(numbers))


def lanes(*registers: U32) -> list[tuple[int, ...]]:
    return [tuple(int(lane) for lane in lane_of_each) for lane_of_each in zip(*registers, strict=True)]


@given(WORDS, WORDS, WORDS)
def test_products_of_bytes(c: U32, a: U32, b: U32) -> None:
    """`dot4` wraps at 32 bits and nowhere before; `dot4_pairs` stops at the ends of 16 bits."""
    wide, pairs = [], []
    for sum_, x, y in lanes(c, a, b):
        products = [p * q for p, q in zip(cut(x, 8, signed=False), cut(y, 8, signed=True), strict=True)]
        wide.append((sum_ + sum(products)) % 2**32)
        two = products[0] + products[1], products[2] + products[3]
        pairs.append(joined([min(max(total, -32768), 32767) for total in two], 16))
    assert vector_integer.dot4(c, a, b).tolist() == wide
    assert vector_integer.dot4_pairs(a, b).tolist() == pairs


@given(WORDS, WORDS, WORDS)
def test_numbers_of_sixteen_bits(c: U32, a: U32, b: U32) -> None:
    """`add_pairs` carries nothing from one half to the other; `dot2` wraps at 32 bits, also at twice (−2¹⁵)²."""
    sums, dots = [], []
    for sum_, x, y in lanes(c, a, b):
        p, q = cut(x, 16, signed=True), cut(y, 16, signed=True)
        sums.append(joined([p[0] + q[0], p[1] + q[1]], 16))
        dots.append((sum_ + p[0] * q[0] + p[1] * q[1]) % 2**32)
    assert vector_integer.add_pairs(a, b).tolist() == sums
    assert vector_integer.dot2(c, a, b).tolist() == dots


def test_the_extremes_are_reached() -> None:
    """Saturation on both sides and the one sum of two products that does not fit 32 bits."""
    largest, least = np.array([0xFFFFFFFF], np.uint32), np.array([0x80808080], np.uint32)
    assert vector_integer.dot4_pairs(largest, least).view(np.int16).tolist() == [-32768, -32768]
    assert vector_integer.dot4_pairs(largest, np.array([0x7F7F7F7F], np.uint32)).view(np.int16).tolist() == [
        32767,
        32767,
    ]
    assert vector_integer.dot4(np.zeros(1, np.uint32), largest, least).view(np.int32).tolist() == [-4 * 255 * 128]
    halves = np.array([0x80008000], np.uint32)
    assert vector_integer.dot2(np.zeros(1, np.uint32), halves, halves).tolist() == [2**31]


@given(WORDS, WORDS, WORDS)
def test_bits(a: U32, m: U32, o: U32) -> None:
    """`and_or` and `select` bit by bit; `as_float` keeps every bit, also of a signalling NaN, in its own register."""
    expected = [sum((x >> n & y >> n | z >> n) % 2 << n for n in range(32)) for x, y, z in lanes(a, m, o)]
    assert vector_integer.and_or(a, m, o).tolist() == expected
    chosen = [sum(((y if x >> n & 1 else z) >> n & 1) << n for n in range(32)) for x, y, z in lanes(m, a, o)]
    assert vector_integer.select(m, a, o).tolist() == chosen
    real = vector_integer.as_float(a)
    assert real.dtype == np.float32 and real.view(np.uint32).tolist() == a.tolist() and not np.shares_memory(real, a)


@given(hnp.arrays(np.uint32, 8, elements=LANE), hnp.arrays(np.uint32, 8, elements=LANE))
def test_permute_goes_by_the_low_bits_of_the_index(table: U32, index: U32) -> None:
    """And moves bits unchanged."""
    moved = vector_integer.permute(table.view(np.float32), index).view(np.uint32)
    assert moved.tolist() == [int(table[int(i) & 7]) for i in index]


@given(*[hnp.arrays(np.uint32, 8, elements=LANE)] * 3)
def test_permute_pair_is_permute_of_a_table_of_twice_the_length(first: U32, index: U32, second: U32) -> None:
    """And moves bits unchanged."""
    moved = vector_integer.permute_pair(first.view(np.float32), index, second.view(np.float32)).view(np.uint32)
    assert moved.tolist() == [int([*first, *second][int(i) & 15]) for i in index]


@given(WORDS)
def test_load_byte(memory: U32) -> None:
    """Bytes from the least significant one of each element on."""
    assert vector_integer.load_byte(memory).tolist() == [b for lane in memory for b in struct.pack("<I", lane)]


@given(WORDS)
def test_cvt_signed_float(a: U32) -> None:
    """Two's complement; `float32` of Python's exact float64 is the nearest float32, ties to even."""
    signed = [cut(int(lane), 32, signed=True)[0] for lane in a]
    assert vector_integer.cvt_signed_float(a).tolist() == [float(np.float32(float(number))) for number in signed]


def half(pattern: int) -> float:
    """IEEE 754 binary16 from its definition."""
    sign, exponent, fraction = -1.0 if pattern >> 15 else 1.0, pattern >> 10 & 31, pattern & 1023
    if exponent == 31:
        return math.nan if fraction else sign * math.inf
    if exponent == 0:
        return sign * fraction * 2.0**-24
    return sign * (1024 + fraction) * 2.0 ** (exponent - 25)


def test_load_half_of_every_float16() -> None:
    """All 65536 of them: subnormal numbers, both zeros, infinities and NaN."""
    patterns = np.arange(2**16, dtype=np.uint16)
    loaded, expected = vector_integer.load_half(patterns.view(np.uint32)), np.array([half(int(p)) for p in patterns])
    np.testing.assert_array_equal(loaded, expected)
    np.testing.assert_array_equal(np.signbit(loaded[loaded == 0]), np.signbit(expected[expected == 0]))
