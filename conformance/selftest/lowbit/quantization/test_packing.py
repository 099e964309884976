"""Packing against arithmetic on Python integers, which knows nothing of words."""

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from lowbit.errors import ArgumentError
from lowbit.quantization.packing import BITS, CODES_PER_UNIT, Codes, pack, unpack


@st.composite
def codes_and_bits(draw: st.DrawFn) -> tuple[Codes, int]:
    bits = draw(st.sampled_from(BITS))
    shape = (CODES_PER_UNIT[bits] * draw(st.integers(1, 3)), draw(st.integers(1, 4)))
    return draw(hnp.arrays(np.uint8, shape, elements=st.integers(0, 2**bits - 1))), bits


@given(codes_and_bits())
def test_a_column_is_one_little_endian_number(case: tuple[Codes, int]) -> None:
    """Σ code_k · 2^(b·k) and Σ word_i · 2^(32·i) are the same number for every column."""
    codes, bits = case
    words = pack(codes, bits)
    for column in range(codes.shape[1]):
        from_codes = sum(int(code) << (bits * k) for k, code in enumerate(codes[:, column]))
        from_words = sum(int(word) << (32 * i) for i, word in enumerate(words[:, column]))
        assert from_codes == from_words


@given(codes_and_bits())
def test_unpack_is_the_inverse(case: tuple[Codes, int]) -> None:
    """unpack(pack(codes)) is codes, and pack(unpack(words)) is words, so both are one to one."""
    codes, bits = case
    words = pack(codes, bits)
    np.testing.assert_array_equal(unpack(words, bits), codes)
    np.testing.assert_array_equal(pack(unpack(~words, bits), bits), ~words)


def test_rows_that_do_not_fill_words_say_so() -> None:
    """The error names the rows, how many there were, and what a whole unit is."""
    with pytest.raises(ArgumentError, match=r"rows of codes is 40; allowed: a multiple of 32 \(3-bit codes come 32"):
        pack(np.zeros((40, 2), np.uint8), bits=3)


def test_a_code_that_does_not_fit_is_named() -> None:
    """The error gives the place of the first code that is too large."""
    codes = np.zeros((8, 3), np.uint8)
    codes[5, 1] = 16
    with pytest.raises(ArgumentError, match=r"codes\[5, 1\] is 16; allowed: 0 to 15 with 4 bits"):
        pack(codes, bits=4)
