"""Defects of the place of a code in its words: order of nibbles, bytes and words, the straddling codes of 3 bits."""

from collections.abc import Callable

import numpy as np

from lowbit.arrays import Array
from lowbit.quantization.packing import WORD_BITS, Codes, Words
from lowbit_conformance.defects.defect import COMMON, Defect
from lowbit_conformance.defects.steps import stepwise, unit_of
from lowbit_conformance.packing import Place, pack, places, read, straddling, unpack, write

READS = "packing.unpack/C1 packing.unpack/C2 affine.dequantize/C1 affine.dequantize/C2 linear.qgemv/C1 linear.qgemm/C1"
BOTH = "packing.pack/C1 packing.pack/C2 " + READS
DEEP = "packing.pack/C2 packing.unpack/C1 affine.dequantize/C1 affine.dequantize/C2 linear.qgemv/C1 linear.qgemm/C1"
MISPLACED = Callable[[int, int], Place]


def placed(name: str, cause: str, place: MISPLACED, seen: str = COMMON, clauses: str = BOTH) -> Defect:
    """A defect that reads and writes codes at places of its own."""
    return stepwise(
        name,
        cause,
        clauses,
        seen,
        unpack=lambda words, bits: read(words, place(len(words) * WORD_BITS // bits, bits), bits),
        pack=lambda codes, bits: write(codes, place(len(codes), bits), bits),
    )


# **Orders.**


def nibbles_swapped(rows: int, bits: int) -> Place:
    word, shift = places(rows, bits)
    return word, shift ^ 4 if bits in (2, 4) else shift


def most_significant_first(rows: int, bits: int) -> Place:
    unit_bits = unit_of(bits) * bits
    position = np.arange(rows) * bits
    within = position % unit_bits
    turned = position - within + (unit_bits - bits - within)
    return turned // WORD_BITS, turned % WORD_BITS


def interleaved(rows: int, bits: int) -> Place:
    word, shift = places(rows, bits)
    if bits != 4:
        return word, shift
    return word, 4 * np.array([0, 4, 1, 5, 2, 6, 3, 7])[shift // 4]


def words_in_pairs_swapped(rows: int, bits: int) -> Place:
    word, shift = places(rows, bits)
    last = rows * bits // WORD_BITS - 1
    return np.where(word | 1 <= last, word ^ 1, word), np.where(straddling(shift, bits), shift % 29, shift)


def dealt(rows: int, bits: int) -> Place:
    if bits == 3:
        return places(rows, bits)
    count = rows * bits // WORD_BITS
    return np.arange(rows) % count, np.arange(rows) // count * bits


def whole_codes_a_word(rows: int, bits: int) -> Place:
    last = rows * bits // WORD_BITS - 1
    each = WORD_BITS // bits
    return np.minimum(np.arange(rows) // each, last), np.arange(rows) % each * bits


# **Reading and writing.**


def straddle_lost(words: Words, bits: int) -> Codes:
    codes = unpack(words, bits)
    _, shift = places(len(codes), bits)
    kept = np.minimum(WORD_BITS - shift, bits)
    answer: Codes = (codes & (2**kept - 1)[:, None]).astype(np.uint8)
    return answer


def straddle_split_wrong(words: Words, bits: int) -> Codes:
    codes = unpack(words, bits)
    if bits == 3:
        first, second, third = words[0::3], words[1::3], words[2::3]
        codes[10::32] = first >> 31 | (second & 3) << 1
        codes[21::32] = second >> 30 | (third & 1) << 2
    return codes


def straddle_dropped(codes: Codes, bits: int) -> Words:
    _, shift = places(len(codes), bits)
    kept = np.minimum(WORD_BITS - shift, bits)
    return pack((codes & (2**kept - 1)[:, None]).astype(np.uint8), bits)


def signed(words: Words, bits: int) -> Array:
    codes = unpack(words, bits).astype(np.int16)
    answer: Array = codes - 2**bits * (codes >= 2 ** (bits - 1))
    return answer


def arithmetic_shift(words: Words, bits: int) -> Array:
    codes = unpack(words, bits).astype(np.int16)
    _, shift = places(len(codes), bits)
    at_top = (shift + bits == WORD_BITS)[:, None]
    answer: Array = codes - 2**bits * (at_top & (codes >= 2 ** (bits - 1)))
    return answer


def last_two_swapped(words: Words, bits: int) -> Codes:
    codes = unpack(words, bits)
    if bits == 4:
        codes[[-2, -1], -1] = codes[[-1, -2], -1]
    return codes


def not_cleared(codes: Codes, bits: int) -> Words:
    return np.bitwise_or.accumulate(pack(codes, bits), axis=0)


def uninitialized(codes: Codes, bits: int) -> Words:
    words = pack(codes, bits)
    words[-1] |= np.uint32(0x80000001)
    return words


def rows_in_16_bits(codes: Array) -> Array:
    return codes[np.arange(len(codes)) % 2**16]


DEFECTS = (
    stepwise(
        "rows-wrap-at-65536",
        "The number of a row is kept in 16 bits, so that rows begin again at the 65537th.",
        "packing.pack/C2 packing.unpack/C1",
        unpack=lambda words, bits: rows_in_16_bits(unpack(words, bits)),
        pack=lambda codes, bits: pack(rows_in_16_bits(codes), bits),
        only=("packing.pack", "packing.unpack"),
    ),
    placed(
        "nibbles-swapped",
        "The two nibbles of each byte change places.",
        nibbles_swapped,
        "https://github.com/citra-emu/citra/issues/2049",
    ),
    placed(
        "most-significant-first", "The first code of a word lies in its most significant bits.", most_significant_first
    ),
    placed(
        "codes-interleaved",
        "4-bit codes lie in the order 0 2 4 6 1 3 5 7, which AWQ's format uses.",
        interleaved,
        "https://github.com/amd/Quark/pull/30",
    ),
    stepwise(
        "bytes-swapped",
        "Words are read and written with their bytes in the other order.",
        BOTH,
        "https://github.com/ollama/ollama/pull/17826",
        unpack=lambda words, bits: unpack(words.byteswap(), bits),
        pack=lambda codes, bits: pack(codes, bits).byteswap(),
    ),
    placed(
        "words-in-pairs-swapped",
        "Words are taken in pairs of 64 bits whose halves change places.",
        words_in_pairs_swapped,
    ),
    placed(
        "codes-dealt-over-words",
        "Neighbouring codes lie in neighbouring words and not side by side.",
        dealt,
        clauses=DEEP,
    ),
    placed(
        "three-bits-do-not-straddle",
        "A word is taken to hold whole codes only: ten of 3 bits.",
        whole_codes_a_word,
        "https://github.com/ddalcu/mlx-serve/issues/305",
    ),
    stepwise(
        "straddle-cut-short",
        "A 3-bit code loses the bits that lie in the next word.",
        READS,
        unpack=straddle_lost,
    ),
    stepwise(
        "straddle-split-wrong",
        "Codes 10 and 21 of 3 bits are put together from 1 + 2 and 2 + 1 bits instead of 2 + 1 and 1 + 2.",
        READS,
        unpack=straddle_split_wrong,
    ),
    stepwise(
        "straddle-not-written",
        "Packing drops the bits of a 3-bit code that belong to the next word.",
        "packing.pack/C1 packing.pack/C2",
        pack=straddle_dropped,
    ),
    stepwise(
        "codes-signed",
        "Codes are taken for two's complement.",
        READS,
        "https://github.com/casper-hansen/AutoAWQ/issues/275",
        unpack=signed,
    ),
    stepwise(
        "arithmetic-shift",
        "The topmost code of a word is shifted down as a signed number and not masked.",
        READS,
        unpack=arithmetic_shift,
    ),
    stepwise(
        "last-two-codes-swapped",
        "The last two 4-bit codes of the last column change places, and no others.",
        READS,
        unpack=last_two_swapped,
    ),
    stepwise(
        "packing-variable-not-cleared",
        "The word that codes are gathered in is not cleared for the next word of the column.",
        "packing.pack/C1 packing.pack/C2",
        "https://github.com/bitsandbytes-foundation/bitsandbytes/pull/1721",
        pack=not_cleared,
    ),
    stepwise(
        "packing-uninitialized",
        "Codes are or-ed into memory that was not zero.",
        "packing.pack/C1 packing.pack/C2",
        pack=uninitialized,
    ),
    stepwise(
        "words-are-int32",
        "The words come back as int32, as files of GPTQ hold them.",
        "packing.pack/C2",
        pack=lambda codes, bits: pack(codes, bits).view(np.int32),
    ),
    stepwise(
        "codes-are-int8",
        "The codes come back as int8.",
        "packing.unpack/C2",
        only=("packing.unpack",),
        unpack=lambda words, bits: unpack(words, bits).view(np.int8),
    ),
)
