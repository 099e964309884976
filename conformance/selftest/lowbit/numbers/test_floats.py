"""Number types against ml_dtypes (which patterns are which numbers) and against exact arithmetic (rounding)."""

from fractions import Fraction
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowbit.errors import ArgumentError
from lowbit.numbers.floats import FLOATS, NAMES, Name, as_numbers, as_patterns, decode, round_to, rounded

SMALL: tuple[Name, ...] = tuple(name for name in NAMES if FLOATS[name].bits <= 16)


@pytest.mark.parametrize("name", SMALL)
def test_every_pattern_is_the_number_that_ml_dtypes_reads(name: Name) -> None:
    """All patterns of all types of at most 16 bits, with the signs of zeros."""
    kind = FLOATS[name]
    patterns = np.arange(2**kind.bits).astype(kind.pattern_dtype)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        theirs = patterns.view(kind.dtype).astype(np.float64)
    ours = decode(patterns, name)
    np.testing.assert_array_equal(ours, theirs)
    numbers = ~np.isnan(ours)
    np.testing.assert_array_equal(np.signbit(ours[numbers]), np.signbit(theirs[numbers]))


@pytest.mark.parametrize("name", SMALL)
def test_every_number_rounds_to_its_own_pattern(name: Name) -> None:
    """Rounding is the inverse of decoding where nothing is lost."""
    kind = FLOATS[name]
    patterns = np.arange(2**kind.bits).astype(kind.pattern_dtype)
    numbers = decode(patterns, name)
    finite = np.isfinite(numbers)
    np.testing.assert_array_equal(round_to(numbers[finite], name), patterns[finite])


@pytest.mark.parametrize("name", SMALL)
def test_between_two_numbers(name: Name) -> None:
    """Just below the middle a number goes down, just above it goes up, and the middle to the even significand."""
    kind = FLOATS[name]
    numbers = decode(np.arange(2 ** (kind.bits - kind.signed)).astype(kind.pattern_dtype), name)
    numbers = numbers[np.isfinite(numbers)]
    low, high = numbers[:-1], numbers[1:]
    middle = (low + high) / 2
    np.testing.assert_array_equal(decode(round_to(np.nextafter(middle, 0), name), name), low)
    np.testing.assert_array_equal(decode(round_to(np.nextafter(middle, np.inf), name), name), high)
    tied = round_to(middle, name)
    if kind.mantissa:
        assert (tied % 2 == 0).all()
    else:
        np.testing.assert_array_equal(decode(tied, name), high)


@given(st.sampled_from(["float16", "bfloat16", "float8_e5m2", "float8_e4m3fn", "float6_e3m2fn"]), st.floats(width=64))
def test_rounding_agrees_with_fractions(name: Name, number: float) -> None:
    """The nearest of all values of the type, found by exact rational arithmetic."""
    kind = FLOATS[name]
    if not abs(number) < kind.largest:
        return
    positive = decode(np.arange(kind.top + 1).astype(kind.pattern_dtype), name)
    index = int(np.searchsorted(positive, abs(number)))
    near = positive[max(0, index - 1) : index + 2]
    distances = [abs(Fraction(float(each)) - Fraction(abs(number))) for each in near]
    found = float(decode(round_to(np.array([number]), name), name)[0])
    assert abs(Fraction(abs(found)) - Fraction(abs(number))) == min(distances)


def test_float32_and_float16_are_those_of_numpy() -> None:
    """Numbers over all exponents, infinities included; the processor rounds them once, too."""
    rng = np.random.default_rng(0)
    numbers = np.append(rng.normal(size=20_000) * 10.0 ** rng.integers(-60, 60, 20_000), [np.inf, -np.inf, 0.0, -0.0])
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(round_to(numbers, "float32", "ieee"), numbers.astype(np.float32).view(np.uint32))
        np.testing.assert_array_equal(round_to(numbers, "float16", "ieee"), numbers.astype(np.float16).view(np.uint16))


def test_ml_dtypes_rounds_twice_where_we_round_once() -> None:
    """Why its conversion is not used: from float64 it goes through float32, and a tie appears that was none."""
    number = np.array([1 + 2.0**-8 + 2.0**-40])
    assert round_to(number, "bfloat16")[0] == 0x3F81
    assert number.astype(ml_dtypes.bfloat16).view(np.uint16)[0] == 0x3F80


def test_overflow() -> None:
    """Half a step beyond the largest number is where overflow begins."""
    kind = FLOATS["float8_e4m3fn"]
    numbers = np.array([463.9, 464.0, 480.0, np.inf, -np.inf])
    assert kind.largest == 448
    assert round_to(numbers, "float8_e4m3fn").tolist() == [0x7E, 0x7E, 0x7E, 0x7E, 0xFE]
    assert round_to(numbers, "float8_e4m3fn", "ieee").tolist() == [0x7E, 0x7E, 0x7F, 0x7F, 0xFF]


def test_what_is_rounded_towards_zero_does_not_overflow() -> None:
    """IEEE 754 §7.4: the largest finite number; an infinity stays one, or is NaN in a type without."""
    numbers = np.array([1e300, -1e300, np.inf, -np.inf])
    assert round_to(numbers, "float16", "ieee", "down").tolist() == [0x7BFF, 0xFBFF, 0x7C00, 0xFC00]
    assert round_to(numbers, "float8_e4m3fn", "ieee", "down").tolist() == [0x7E, 0xFE, 0x7F, 0xFF]
    assert round_to(numbers, "float16", "ieee", "up").tolist() == [0x7C00, 0xFC00, 0x7C00, 0xFC00]


def test_steps_of_all_types_grow() -> None:
    """Values of one sign are ordered as their patterns are."""
    for name in SMALL:
        kind = FLOATS[name]
        positive = decode(np.arange(kind.top + 1).astype(kind.pattern_dtype), name)
        assert all(low < high for low, high in pairwise(positive.tolist()))


def test_what_is_refused() -> None:
    """A NaN for a type without one, a negative scale, another overflow: each is named."""
    with pytest.raises(ArgumentError, match="float4_e2m1fn has no NaN"):
        round_to(np.array([np.nan]), "float4_e2m1fn")
    with pytest.raises(ArgumentError, match="overflow is 'ieee'"):
        round_to(np.array([1.0]), "float6_e2m3fn", "ieee")
    with pytest.raises(ArgumentError, match="float8_e8m0fnu has no sign"):
        round_to(np.array([-1.0]), "float8_e8m0fnu")
    with pytest.raises(ArgumentError, match="patterns is as high as 16"):
        decode(np.array([16], np.uint8), "float4_e2m1fn")
    with pytest.raises(ArgumentError, match="dtype is 'int64'"):
        as_patterns(np.array([1]))


def test_arrays_of_numbers_are_the_same_bytes() -> None:
    """Views, not copies; `rounded` keeps the shape."""
    patterns = np.array([0x3F80, 0x4000], np.uint16)
    numbers = as_numbers(patterns, "bfloat16")
    assert numbers.astype(np.float64).tolist() == [1.0, 2.0]
    assert np.shares_memory(as_patterns(numbers), patterns)
    assert rounded(np.ones((2, 3)), "bfloat16").shape == (2, 3)
