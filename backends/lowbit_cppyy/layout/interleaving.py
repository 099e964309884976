r"""Interleaving: where the codes of a unit lie in the words that a kernel reads.

The specification packs the codes of a column end to end. That is the shortest rule, but not the fastest to read: an
instruction that multiplies four bytes at once needs four neighbouring codes in four bytes, and 3-bit codes that
straddle words cost shifts. So a prepared matrix holds the same codes of a unit at other bits, the same for all kernels:

- code k lies in byte ``k mod 4`` of its word, so that one mask takes four neighbouring codes out of a word;
- within a byte, codes lie in its lower and its upper half by turns, from the lowest bits of each up: with
  :math:`r = k \operatorname{div} 4`, b bits of a code at :math:`4 (r \bmod 2) + b (r \operatorname{div} 2)`;
- a code of 3, 5 or 6 bits is split into two *planes*. The lower two or four bits lie in words as codes of 2 or 4 bits
  do, and the others in words as codes of 1 or 2 bits would. No code straddles a word. Codes k and k + 4 are four bits
  apart in both planes where r is even, so each plane of eight codes of 3 bits is shifted and masked at once. *Measured*
  against four at once, on one thread of an Emerald Rapids with AVX2: one row of x takes 0.88 of the time, four rows
  0.95.

Words follow each other in the order in which a kernel needs them: by their first codes, and of two planes the upper one
first. If all words of the upper plane lay behind the others, a kernel would read forwards, backwards and forwards
again, and prefetchers in hardware lose track of that. *Measured* on one thread of a Zen 4 without prefetches by
instructions, with integers and AVX-512, Q5_0 takes 0.8 of the time in this order, 3 bits a half, Q6_K a third.

========= ======================================= ========================
bits      codes in byte 0 of the words            bytes 1 to 3
========= ======================================= ========================
2         0, 8, 4, 12                             the same for 1, 2 and 3
4         0, 4                                    the same for 1, 2 and 3
8         0                                       the same for 1, 2 and 3
3         upper 0, 8, 16, 24, 4, 12, 20, 28;      the same for 1, 2 and 3
          lower as 2, twice
5         upper as 3; lower as 4, four times      the same for 1, 2 and 3
6         upper as 2; lower as 4, twice; again    the same for 1, 2 and 3
========= ======================================= ========================

`fields` is that rule as data. `interleave` converts words from the specification's packing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

import numpy as np

from lowbit.arrays import U32
from lowbit.quantization.packing import CODES_PER_UNIT, WORD_BITS, WORDS_PER_UNIT

Words = U32


@dataclass(frozen=True)
class Field:
    """A run of bits of a code, and its position.

    Attributes:
        word: the word of the unit.
        position: the lowest bit of the run in that word.
        width: the number of bits.
        first: the lowest bit of the code in the run, so that its value is scaled by ``2**first``.
    """

    word: int
    position: int
    width: int
    first: int = 0

    @property
    def mask(self) -> int:
        """The mask of the bits of the run."""
        return ((1 << self.width) - 1) << self.position


PLANES: Mapping[int, tuple[int, ...]] = MappingProxyType({2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 8: (8,)})
"""The widths of the planes of a code, the lowest bits first."""


def fields(bits: int, code: int) -> tuple[Field, ...]:
    """The fields of a code, one for each of its planes; words are counted from the first word of code 0.

    A unit of 32 codes has as many words as a code has bits. A shorter unit has the first of these words.

    >>> fields(4, 5)
    (Field(word=0, position=12, width=4, first=0),)
    >>> fields(3, 21)
    (Field(word=2, position=12, width=2, first=0), Field(word=0, position=14, width=1, first=2))
    """
    found, first = list[Field](), 0
    for plane, width in enumerate(PLANES[bits]):
        word, place = divmod(code, WORD_BITS // width)
        row, byte = divmod(place, 4)
        position = 8 * byte + 4 * (row % 2) + width * (row // 2)
        found.append(Field(_order(bits).index((plane, word)), position, width, first))
        first += width
    return tuple(found)


@cache
def _order(bits: int) -> list[tuple[int, int]]:
    """The words of a unit, as their planes and numbers in them: by their first codes, an upper plane before a lower."""
    planes = PLANES[bits]
    words = [(plane, word) for plane in range(len(planes)) for word in range(planes[plane])]
    return sorted(words, key=lambda each: (each[1] * WORD_BITS // planes[each[0]], -each[0]))


# **Conversion**, of all units and columns at once: each run of bits that stays together moves as a whole.


def interleave(words: Words, bits: int) -> Words:
    """Convert whole units of words from the specification's packing to the bit positions above.

    Args:
        words: uint32, whole units × N, as the specification packs them.

    Returns:
        uint32, of the same shape.
    """
    units = words.reshape(-1, WORDS_PER_UNIT[bits], words.shape[1])
    moved = np.zeros_like(units)
    for packed, interleaved in _runs(bits):
        run = units[:, packed.word] & np.uint32(packed.mask)
        shift = interleaved.position - packed.position
        moved[:, interleaved.word] |= run << np.uint32(shift) if shift >= 0 else run >> np.uint32(-shift)
    return moved.reshape(words.shape)


def _runs(bits: int) -> list[tuple[Field, Field]]:
    """Runs of bits that stay together: as the specification packs them, and interleaved."""
    runs = []
    for code in range(CODES_PER_UNIT[bits]):
        for field in fields(bits, code):
            start = code * bits + field.first
            width = 1 if _straddles(start, field.width) else field.width
            for n in range(0, field.width, width):
                word, position = divmod(start + n, WORD_BITS)
                interleaved = Field(field.word, field.position + n, width, field.first + n)
                runs.append((Field(word, position, width), interleaved))
    return runs


def _straddles(start: int, width: int) -> bool:
    return start // WORD_BITS != (start + width - 1) // WORD_BITS
