r"""Packing: how codes of 2, 3, 4 or 8 bits lie in 32-bit words.

A low-bit weight is stored as a small unsigned integer, its *code*. Memory has no 3-bit cells, so the codes of a column
are laid end to end in a stream of bits, and the stream is cut into 32-bit *words*. Reading fewer bytes is the whole
point of low-bit inference, and nearly every wrong kernel first goes wrong about the position of a bit. So the
specification begins here, and everything here is exact.

**The layout.** A matrix of codes is :math:`K \times N`. Each *column* is a stream of its own: with :math:`b` bits per
code, code :math:`k` of a column takes the bits

.. math:: b k,\; b k + 1,\; \dots,\; b k + b - 1

of the stream, least significant bit first, and bit :math:`p` of the stream is bit :math:`p \bmod 32` of word
:math:`\lfloor p / 32 \rfloor`. The words of all columns form a matrix of :math:`bK/32 \times N`, so a row of words
holds neighbouring columns side by side, and a vector register loads the same few rows of many columns.

===== ============== ============== =======================================
bits  codes a unit   words a unit   remark
===== ============== ============== =======================================
2     16             1
3     32             3              codes 10 and 21 straddle two words
4     8              1
8     4              1
===== ============== ============== =======================================

A *unit* is the shortest run of codes that fills whole words. A column holds whole units only: a number of rows that is
not a multiple of a unit is refused rather than padded, because padding is a decision for the owner of the matrix.

Source: QIGen §3 (data format); errata Q4 (the shape of the word matrix) and Q10 (the 3-bit stream).
"""

from typing import Annotated

import numpy as np

from lowbit.arrays import U8, U32
from lowbit.contract.operation import EXACT, operation
from lowbit.contract.signature import OneOf, Shape, checked
from lowbit.errors import ArgumentError

WORD_BITS = 32
BITS = (2, 3, 4, 8)
CODES_PER_UNIT = {2: 16, 3: 32, 4: 8, 8: 4}
WORDS_PER_UNIT = {2: 1, 3: 3, 4: 1, 8: 1}

Bits = Annotated[int, OneOf(BITS)]
Codes = U8
Words = U32


# **Whole units.** These checks say what the annotations of the two functions cannot; other chapters share them.


def check_rows(argument: str, rows: int, bits: int) -> None:
    """Refuse a number of rows that does not fill whole units.

    >>> check_rows("rows of codes", 12, bits=4)
    Traceback (most recent call last):
    lowbit.errors.ArgumentError: rows of codes is 12; allowed: a multiple of 8 (4-bit codes come 8 to 1 word)
    """
    unit, words = CODES_PER_UNIT[bits], WORDS_PER_UNIT[bits]
    if rows < 1 or rows % unit != 0:
        plural = "word" if words == 1 else "words"
        raise ArgumentError(argument, rows, f"a multiple of {unit} ({bits}-bit codes come {unit} to {words} {plural})")


def check_codes(argument: str, codes: Codes, bits: int) -> None:
    """Refuse a code that needs more than `bits` bits, and say where the first one is."""
    too_large = codes >= 2**bits
    if too_large.any():
        row, column = (int(i) for i in np.unravel_index(int(np.argmax(too_large)), codes.shape))
        raise ArgumentError(f"{argument}[{row}, {column}]", codes[row, column], f"0 to {2**bits - 1} with {bits} bits")


def _check_pack(codes: Codes, bits: int) -> None:
    check_rows("rows of codes", len(codes), bits)
    check_codes("codes", codes, bits)


def _check_unpack(words: Words, bits: int) -> None:
    if len(words) % WORDS_PER_UNIT[bits] != 0:  # only 3 bits can end inside a unit
        unit = f"the words of {CODES_PER_UNIT[bits]} {bits}-bit codes"
        raise ArgumentError("rows of words", len(words), f"a multiple of {WORDS_PER_UNIT[bits]} ({unit})")


# **The two loops** over the codes of a unit are the whole chapter. Each code is handled in all units and all columns at
# once, because no unit and no column depends on another.


@checked(also=_check_pack)
def pack(codes: Annotated[Codes, Shape("K", "N")], bits: Bits) -> Words:
    """Lay the codes of each column end to end in 32-bit words.

    The first eight 4-bit codes of a column fill its first word from the least significant end:

    >>> codes = np.arange(1, 9, dtype=np.uint8).reshape(8, 1)
    >>> print(hex(pack(codes, bits=4)[0, 0]))
    0x87654321

    With 3 bits, code 10 takes bits 30, 31 and 32: its lowest two end the first word, its highest begins the second.

    >>> codes = np.zeros((32, 1), np.uint8)
    >>> codes[10] = 0b101
    >>> [f"{word:032b}" for word in pack(codes, bits=3)[:2, 0]]
    ['01000000000000000000000000000000', '00000000000000000000000000000001']

    Args:
        codes: uint8, K × N, each below ``2**bits``; K a multiple of the codes in a unit.
        bits: 2, 3, 4 or 8.

    Returns:
        uint32, ``K * bits // 32`` × N.

    Raises:
        ArgumentError: wrong bits, dtype, shape or layout; K not whole units; a code of ``2**bits`` or more.

    Source: QIGen §3; errata Q4, Q10.
    """
    rows, columns = codes.shape
    units = codes.reshape(rows // CODES_PER_UNIT[bits], CODES_PER_UNIT[bits], columns)
    words = np.zeros_like(codes, np.uint32, shape=(len(units), WORDS_PER_UNIT[bits], columns))
    for k in range(CODES_PER_UNIT[bits]):
        word, shift = divmod(k * bits, WORD_BITS)
        code = units[:, k].astype(np.uint32)
        words[:, word] |= code << np.uint32(shift)  # bits above 31 fall off the end of the word …
        if shift + bits > WORD_BITS:  # … and begin the next one
            words[:, word + 1] |= code >> np.uint32(WORD_BITS - shift)
    return words.reshape(rows * bits // WORD_BITS, columns)


@checked(also=_check_unpack)
def unpack(words: Annotated[Words, Shape("rows", "N")], bits: Bits) -> Codes:
    """Read the codes back; the inverse of `pack`, for every value of every word.

    >>> unpack(np.array([[0x87654321]], np.uint32), bits=4)[:, 0]
    array([1, 2, 3, 4, 5, 6, 7, 8], dtype=uint8)

    Args:
        words: uint32, ``K * bits // 32`` × N; with 3 bits the number of rows is a multiple of 3.
        bits: 2, 3, 4 or 8.

    Returns:
        uint8, K × N.

    Raises:
        ArgumentError: wrong bits, dtype, shape or layout; rows of words that are not whole units.

    Source: QIGen §3, Algorithm 2 (shift, then mask); errata Q4, Q10.
    """
    word_rows, columns = words.shape
    units = words.reshape(word_rows // WORDS_PER_UNIT[bits], WORDS_PER_UNIT[bits], columns)
    mask = np.uint32(2**bits - 1)
    codes = np.empty_like(words, np.uint8, shape=(len(units), CODES_PER_UNIT[bits], columns))
    for k in range(CODES_PER_UNIT[bits]):
        word, shift = divmod(k * bits, WORD_BITS)
        code = units[:, word] >> np.uint32(shift)
        if shift + bits > WORD_BITS:
            code |= units[:, word + 1] << np.uint32(WORD_BITS - shift)
        codes[:, k] = code & mask
    return codes.reshape(word_rows * WORD_BITS // bits, columns)


# **What a backend promises.** The suite checks each clause by its number.

operation(
    "packing.pack",
    "Codes to words",
    pack,
    promise=EXACT,
    source="QIGen §3; errata Q4, Q10",
    clauses={
        "C1": "Code k of a column occupies bits b·k to b·k + b − 1 of the column's stream, least significant first; "
        "bit p of the stream is bit p mod 32 of word ⌊p/32⌋.",
        "C2": "The result is uint32, K·b/32 × N, and every bit of it is a bit of some code.",
    },
)

operation(
    "packing.unpack",
    "Words to codes",
    unpack,
    promise=EXACT,
    source="QIGen §3, Algorithm 2; errata Q4, Q10",
    clauses={
        "C1": "For every value of the words, code k of a column is bits b·k to b·k + b − 1 of the column's stream.",
        "C2": "The result is uint8, K × N, each code below 2^b.",
    },
)
