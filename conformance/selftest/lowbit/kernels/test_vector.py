"""The words of the vocabulary against Python's own integers and fractions."""

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from lowbit.arrays import F32, U32
from lowbit.kernels import vector
from lowbit.kernels.vector import UNUSED, VOCABULARY, fmadd, reduce_add

WORDS = hnp.arrays(np.uint32, 4, elements=st.integers(0, 2**32 - 1))
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)


def meaning(word: str) -> Callable[..., Any]:
    function = VOCABULARY[word].function
    assert function is not None
    return function


@given(WORDS, WORDS, st.integers(0, 31))
def test_words_of_integers(a: U32, b: U32, i: int) -> None:
    """Shifts, and, or, sums and differences: lane by lane what Python's integers give modulo 2³²."""
    pairs = [(int(x), int(y)) for x, y in zip(a, b, strict=True)]
    assert meaning("srli")(a, i).tolist() == [x // 2**i for x, _ in pairs]
    assert meaning("slli")(a, i).tolist() == [x * 2**i % 2**32 for x, _ in pairs]
    assert meaning("and")(a, b).tolist() == [x & y for x, y in pairs]
    assert meaning("or")(a, b).tolist() == [x | y for x, y in pairs]
    assert meaning("add_int")(a, b).tolist() == [(x + y) % 2**32 for x, y in pairs]
    assert meaning("subtract_int")(a, b).tolist() == [(x - y) % 2**32 for x, y in pairs]


REALS = hnp.arrays(np.float32, 4, elements=st.floats(-(2.0**60), 2.0**60, width=32))


@given(REALS, REALS)
def test_words_of_floats(a: F32, b: F32) -> None:
    """Float64 holds enough of a sum, a product or a quotient of two float32 that rounding it gives the nearest."""
    b = np.where(np.abs(b) < 1e-18, np.float32(3), b)
    pairs = [(float(x), float(y)) for x, y in zip(a, b, strict=True)]
    assert meaning("add")(a, b).tolist() == [np.float32(x + y) for x, y in pairs]
    assert meaning("multiply")(a, b).tolist() == [np.float32(x * y) for x, y in pairs]
    assert meaning("divide")(a, b).tolist() == [np.float32(x / y) for x, y in pairs]


def test_a_register_has_a_copy_of_memory() -> None:
    """What is stored after a load does not change the register; bits pass through loads unchanged."""
    memory = np.array([0x7FC0DEAD, 1, 2, 3], np.uint32)
    loaded, reals = vector.load_int(memory), vector.load_float(memory.view(np.float32))
    vector.store(memory.view(np.float32), np.zeros(4, np.float32))
    assert loaded.tolist() == [0x7FC0DEAD, 1, 2, 3] == reals.view(np.uint32).tolist()
    assert memory.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("lanes", (1, 2, 3, 4, 8, 16))
def test_reduce_add_adds_every_lane_once(lanes: int) -> None:
    """Powers of two have only one way to make this sum."""
    total = reduce_add(np.exp2(np.arange(lanes)).astype(np.float32))
    assert total.tolist() == [2**lanes - 1] * lanes


def test_every_word_gives_what_it_says() -> None:
    """The dtype and length of each word's result are those of the kind of register that it gives."""
    ints, reals = np.arange(4, dtype=np.uint32), np.ones(4, np.float32)
    samples = {"int": ints, "float": reals, "address": reals, "count": 3}
    for name, word in VOCABULARY.items():
        if word.function is None or word.gives == "none":
            continue
        lanes = (4,) if "scalar" in word.takes else ()
        samples["scalar"] = np.uint32(2) if word.gives == "int" else np.float32(2)
        samples["address"] = ints[: word.lane_bytes]  # four lanes of so many bytes
        result = word.function(*(samples[operand] for operand in word.takes), *lanes)
        assert result.dtype == (np.uint32 if word.gives == "int" else np.float32) and result.shape == (4,), name
    assert set(UNUSED) < set(VOCABULARY)


# The one piece of arithmetic that numpy does not have.


@given(hnp.arrays(np.float32, (3, 4), elements=FINITE))
def test_fmadd_rounds_once(operands: F32) -> None:
    """Against rational arithmetic: the result is finite exactly where it should be, and no float32 is nearer."""
    a, b, c = operands
    with np.errstate(over="ignore"):
        results = fmadd(a, b, c)
    for result, *numbers in zip(results, a, b, c, strict=True):
        exact = Fraction(float(numbers[0])) * Fraction(float(numbers[1])) + Fraction(float(numbers[2]))
        if np.isfinite(result):
            with np.errstate(over="ignore"):
                neighbours = [np.nextafter(result, np.float32(side)) for side in (-np.inf, np.inf)]
            error = abs(Fraction(float(result)) - exact)
            assert all(error <= abs(Fraction(float(n)) - exact) for n in neighbours if np.isfinite(n))
        else:
            assert abs(exact) >= Fraction(2) ** 128 - Fraction(2) ** 103


def test_fmadd_breaks_ties_to_even() -> None:
    """1 + 2⁻²⁴ lies half-way between two float32 numbers, and a last bit far below decides."""
    one, half_step = np.ones(4, np.float32), np.full(4, 2**-24, np.float32)
    below = np.array([0, 2**-60, -(2**-60), 0], np.float32)
    sums = fmadd(one + np.array([0, 0, 0, 2**-23], np.float32), one, half_step)
    assert sums.tolist() == [1, 1, 1, np.float32(1 + 2**-22)]
    step = np.full(4, 1 + 2**-12, np.float32)  # its square is 1 + 2⁻¹¹ + 2⁻²⁴, a tie
    assert fmadd(step, step, below).tolist() == [
        np.float32(1 + 2**-11),
        np.float32(1 + 2**-11 + 2**-23),
        np.float32(1 + 2**-11),
        np.float32(1 + 2**-11),
    ]
