"""Symbols mean what numbers mean: each word, evaluated, gives the bits that numpy gives."""

from typing import Any

import numpy as np
import pytest
import z3

from lowbit.arrays import U32, Array
from lowbit.kernels.vector import VOCABULARY, multiply_then_add
from lowbit_prove import symbols, terms
from lowbit_prove.symbols import Symbols, unknowns
from lowbit_prove.terms import UndecidedError

LANES = 4
NAN = 0x7FC00000
PLACES = ("p", "q", "r")
WORDS = [name for name, word in VOCABULARY.items() if word.function is not None and name != "store"]
FLOATS = [name for name in WORDS if "float" in (VOCABULARY[name].gives, *VOCABULARY[name].takes)]
"""Words whose results may be NaN."""
EXTREMES = (0, 1, 0x7F, 0x80, 0x80000000, 0x3F800000, 0x7F7FFFFF, 0x00800000, 0x7FFF8000, 0xFFFFFFFF, 0x7F7F7F7F)


def registers() -> U32:
    """Trials of three registers: random bits, floats of ordinary size, and extremes."""
    random = np.random.default_rng(1)
    bits = random.integers(0, 2**32, (4, 3, LANES), np.uint32)
    floats = random.standard_normal((4, 3, LANES)).astype(np.float32).view(np.uint32)
    return np.concatenate([bits, floats, random.choice(np.array(EXTREMES, np.uint32), (4, 3, LANES))])


def operands(name: str, given: dict[str, Any]) -> list[Any]:
    """The operands of a word, from three registers of bits."""
    word, found = VOCABULARY[name], list[Any]()
    for kind, place in zip(word.takes, PLACES, strict=False):
        bits, reals = given[place], given[place].view(np.float32)
        scalar = (bits if word.gives == "int" else reals)[0]
        address = bits[: LANES * word.lane_bytes // 4]
        found.append({"int": bits, "float": reals, "address": address, "scalar": scalar, "count": 5}[kind])
    return [*found, *([LANES] if "scalar" in word.takes else [])]


def evaluated(found: Symbols, given: dict[str, U32]) -> Array:
    """The bits of symbols when each variable has the value of the register that it is named after."""
    pairs = [
        (z3.BitVec(f"{place}_{lane}", 32), z3.BitVecVal(int(bits[lane]), 32))
        for place, bits in given.items()
        for lane in range(LANES)
    ]
    values = []
    for number in found.data.flat:
        bits = terms.bits_of(number, found.dtype)
        value = z3.BitVecVal(bits, 32) if terms.known(bits) else z3.simplify(z3.substitute(bits, *pairs))
        values.append(value.as_long() if z3.is_bv_value(value) else NAN)  # the bits of a NaN are not defined there
    return np.array(values, f"u{found.dtype.itemsize}")


@pytest.mark.parametrize("name", WORDS)
def test_a_word_on_symbols_is_the_word_on_numbers(name: str) -> None:
    """The same function; a NaN is any NaN."""
    function = VOCABULARY[name].function
    assert function is not None
    found = function(*operands(name, {place: unknowns(place, LANES, np.uint32) for place in PLACES}))
    for trial in registers():
        given = dict(zip(PLACES, trial, strict=True))
        with np.errstate(all="ignore"):
            expected = function(*operands(name, given))
        bits = evaluated(found, given)
        same = bits == expected.view(bits.dtype)
        if name in FLOATS:
            same |= np.isnan(expected.view(np.float32)) & np.isnan(bits.view(np.float32))
        assert same.all(), trial


def test_fmadd_on_symbols_rounds_once() -> None:
    """Where rounding twice gives another number, as in the chapter of the vocabulary."""
    a, c = np.array([1 + 2**-12], np.float32), np.array([2.0**-60], np.float32)
    unknown = unknowns("p", 1, np.float32)
    found = unknown.fused_multiply_add(unknown, symbols.of(c)).data[0]
    value = z3.substitute(found, (z3.FP("p_0", z3.Float32()), terms.expression(float(a[0]), np.dtype(np.float32))))
    bits = z3.simplify(z3.fpToIEEEBV(value)).as_long()
    assert np.array(bits, np.uint32).view(np.float32) == np.float32(1 + 2**-11 + 2**-23)
    assert multiply_then_add(a, a, c)[0] == np.float32(1 + 2**-11)


INTEGERS = (np.add, np.subtract, np.multiply, np.bitwise_and, np.bitwise_or, np.bitwise_xor)
COMPARED = (np.greater, np.greater_equal, np.less, np.less_equal, np.equal, np.not_equal)


@pytest.mark.parametrize("dtype", (np.uint8, np.int8, np.uint16, np.int32, np.int64), ids=lambda each: each.__name__)
def test_arithmetic_is_numpys(dtype: type[np.integer[Any]]) -> None:
    """Every function of two integers on extremes of a dtype, with the wrapping, the signs and the dtypes of numpy."""
    info = np.iinfo(dtype)
    numbers = np.array([info.min, info.min + 1, 0, 1, 3, info.max - 1, info.max], dtype)
    a, b = (each.reshape(-1) for each in np.meshgrid(numbers, numbers))
    for function in (*INTEGERS, *COMPARED):
        with np.errstate(all="ignore"):
            expected = function(a, b)
        found = function(unknowns("a", len(a), dtype), unknowns("b", len(b), dtype))
        assert found.dtype == expected.dtype
        pairs = [
            (terms.unknown(f"{n}_{i}", dtype), int(v)) for n, each in (("a", a), ("b", b)) for i, v in enumerate(each)
        ]
        chosen = [(name, z3.BitVecVal(value, name.size())) for name, value in pairs]
        for number, wanted in zip(found.data, expected.tolist(), strict=True):
            value = z3.simplify(z3.substitute(number, *chosen))
            assert (
                z3.is_true(value) == wanted if expected.dtype == bool else value.as_long() == wanted % 2 ** value.size()
            )


def test_shifts_and_conversions_are_numpys() -> None:
    """Counts beyond the width too; of signed numbers the sign is moved in."""
    a = np.array([-128, -1, 0, 5, 127], np.int8)
    for by in range(10):
        for function in (np.left_shift, np.right_shift):
            found = function(unknowns("a", 5, np.int8), np.int8(by))
            expected = function(a, np.int8(by))
            chosen = [(z3.BitVec(f"a_{i}", 8), z3.BitVecVal(int(value), 8)) for i, value in enumerate(a)]
            values = [z3.simplify(z3.substitute(each, *chosen)).as_signed_long() for each in found.data]
            assert values == expected.tolist(), (function, by)


def test_what_symbols_lack_is_an_error() -> None:
    """Nothing is answered silently wrong: neither a function, nor a conversion, nor a float that would be rounded."""
    a = unknowns("a", 4, np.uint32)
    with pytest.raises(UndecidedError, match=r"numpy\.sort"):
        np.sort(a)
    with pytest.raises(UndecidedError, match="sqrt"):
        np.sqrt(a)
    with pytest.raises(UndecidedError, match="power of two"):
        a % np.uint32(3)
    with pytest.raises(UndecidedError, match="takes numbers"):
        np.asarray(a)
    wide = a.astype(np.int64).astype(np.float64)
    with pytest.raises(UndecidedError, match="not exact"):
        wide * wide
