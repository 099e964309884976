"""Where the codes of a unit lie in the words that a kernel reads.

The specification packs the codes of a column end to end. That is the shortest rule, and not the fastest: an instruction
that multiplies four bytes at once wants four neighbouring codes in four bytes, and 3-bit codes that straddle words
cost shifts. So a prepared matrix has the same codes of a unit in other places, the same for every kernel:

- code k lies in byte ``k mod 4`` of its word, so that one mask takes four neighbouring codes out of a word;
- within the byte, codes follow each other from the lowest bits up: 2 bits ``2 (k div 4)``, 4 bits ``4 (k div 4)``;
- a 3-bit code is cut into two *planes*: its lower two bits lie in one of two words as 2-bit codes do, its highest in
  bit ``k div 4`` of byte ``k mod 4`` of the third word. Nothing straddles.

========= ======================================= ========================
bits      byte 0 holds codes                      and so on in
========= ======================================= ========================
2         0, 4, 8, 12                             bytes 1 to 3
4         0, 4                                    bytes 1 to 3
8         0                                       bytes 1 to 3
3, low    0, 4, 8, 12 of the first or second 16   bytes 1 to 3
3, high   0, 4, 8, … 28, one bit each             bytes 1 to 3
========= ======================================= ========================

Here is that rule as data, and the two functions that move words between it and the specification's.
"""

from dataclasses import dataclass

import numpy as np

from lowbit.arrays import U32
from lowbit.quantization.packing import CODES_PER_UNIT, WORD_BITS, WORDS_PER_UNIT

Words = U32


@dataclass(frozen=True)
class Field:
    """Some bits of a code, and where they lie.

    Attributes:
        word: which word of the unit.
        position: the lowest bit that they take there.
        width: how many bits.
        first: which bit of the code the lowest of them is; they count ``2**first``.
    """

    word: int
    position: int
    width: int
    first: int = 0

    @property
    def mask(self) -> int:
        """Ones where the bits lie."""
        return ((1 << self.width) - 1) << self.position


def fields(bits: int, code: int) -> tuple[Field, ...]:
    """The fields of a code of a unit: one, or for 3 bits two.

    >>> fields(4, 5)
    (Field(word=0, position=12, width=4, first=0),)
    >>> fields(3, 21)
    (Field(word=1, position=10, width=2, first=0), Field(word=2, position=13, width=1, first=2))
    """
    row, byte = divmod(code, 4)
    if bits != 3:
        return (Field(0, 8 * byte + bits * row, bits),)
    word, low = divmod(row, 4)
    return Field(word, 8 * byte + 2 * low, 2), Field(2, 8 * byte + row, 1, 2)


# **There and back**, all units and columns at once: each run of bits that stays together is moved by itself.


def place(words: Words, bits: int) -> Words:
    """Whole units of words as the specification packs them, with their codes moved to the places above.

    Args:
        words: uint32, whole units × N.

    Returns:
        uint32, of the same shape.
    """
    return _moved(words, bits, forth=True)


def unplace(words: Words, bits: int) -> Words:
    """The inverse of `place`."""
    return _moved(words, bits, forth=False)


def _moved(words: Words, bits: int, *, forth: bool) -> Words:
    units = words.reshape(-1, WORDS_PER_UNIT[bits], words.shape[1])
    moved = np.zeros_like(units)
    for packed, placed in _runs(bits):
        source, target = (packed, placed) if forth else (placed, packed)
        run = units[:, source.word] & np.uint32(source.mask)
        shift = target.position - source.position
        moved[:, target.word] |= run << np.uint32(shift) if shift >= 0 else run >> np.uint32(-shift)
    return moved.reshape(words.shape)


def _runs(bits: int) -> list[tuple[Field, Field]]:
    """Runs of bits that lie together in both: where the specification has them, and where they are here."""
    runs = []
    for code in range(CODES_PER_UNIT[bits]):
        for field in fields(bits, code):
            start = code * bits + field.first
            for n in range(field.width) if _straddles(start, field.width) else (0,):
                width = 1 if _straddles(start, field.width) else field.width
                word, position = divmod(start + n, WORD_BITS)
                runs.append(
                    (Field(word, position, width), Field(field.word, field.position + n, width, field.first + n))
                )
    return runs


def _straddles(start: int, width: int) -> bool:
    return start // WORD_BITS != (start + width - 1) // WORD_BITS
