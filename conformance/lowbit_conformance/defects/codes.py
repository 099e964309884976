"""Defects of the place of a code in its words: order of nibbles, bytes and words, the straddling codes of 3 bits."""

from collections.abc import Callable

import numpy as np

from lowbit.arrays import Array
from lowbit.quantization.packing import WORD_BITS, Codes, Words
from lowbit_conformance.defects import steps
from lowbit_conformance.defects.defect import COMMON, Declaring, Defect
from lowbit_conformance.defects.steps import of_step, stepwise, unit_of
from lowbit_conformance.packing import Place, pack, places, read, straddling, unpack, write

DEFECTS: list[Defect] = []
of_unpack, of_pack = of_step(DEFECTS, "unpack"), of_step(DEFECTS, "pack")

VALUES = "affine.dequantize/C1 affine.dequantize/C2 linear.qgemv/C1 linear.qgemm/C1"
READS = f"packing.unpack/C1 packing.unpack/C2 {VALUES}"
DEEP = f"packing.pack/C2 packing.unpack/C1 {VALUES}"
PACKS = "packing.pack/C1 packing.pack/C2"
BOTH = f"{PACKS} {READS}"


def misplaced(name: str, cause: str, clauses: str, place: Callable[[int, int], Place], seen: str = COMMON) -> Defect:
    """A defect that reads and writes codes at other places."""
    return stepwise(
        name,
        cause,
        clauses,
        seen,
        unpack=lambda words, bits: read(words, place(len(words) * WORD_BITS // bits, bits), bits),
        pack=lambda codes, bits: write(codes, place(len(codes), bits), bits),
    )


of_place = Declaring(DEFECTS, misplaced)

# **Orders.**


@of_place(BOTH, "https://github.com/citra-emu/citra/issues/2049")
def nibbles_swapped(rows: int, bits: int) -> Place:
    """The two nibbles of each byte change places."""
    word, shift = places(rows, bits)
    return word, shift ^ 4 if bits in (2, 4) else shift


@of_place(BOTH)
def most_significant_first(rows: int, bits: int) -> Place:
    """The first code of a word lies in its most significant bits."""
    unit_bits = unit_of(bits) * bits
    position = np.arange(rows) * bits
    within = position % unit_bits
    turned = position - within + (unit_bits - bits - within)
    return turned // WORD_BITS, turned % WORD_BITS


@of_place(BOTH, "https://github.com/amd/Quark/pull/30")
def codes_interleaved(rows: int, bits: int) -> Place:
    """4-bit codes lie in the order 0 2 4 6 1 3 5 7, which AWQ's format uses."""
    word, shift = places(rows, bits)
    if bits != 4:
        return word, shift
    return word, 4 * np.array([0, 4, 1, 5, 2, 6, 3, 7])[shift // 4]


@of_place(BOTH)
def words_in_pairs_swapped(rows: int, bits: int) -> Place:
    """Words are taken in pairs of 64 bits whose halves change places."""
    word, shift = places(rows, bits)
    last = rows * bits // WORD_BITS - 1
    return np.where(word | 1 <= last, word ^ 1, word), np.where(straddling(shift, bits), shift % 29, shift)


@of_place(DEEP)
def codes_dealt_over_words(rows: int, bits: int) -> Place:
    """Neighbouring codes lie in neighbouring words and not side by side."""
    if bits == 3:
        return places(rows, bits)
    count = rows * bits // WORD_BITS
    return np.arange(rows) % count, np.arange(rows) // count * bits


@of_place(BOTH, "https://github.com/ddalcu/mlx-serve/issues/305")
def three_bits_do_not_straddle(rows: int, bits: int) -> Place:
    """A word is taken to hold whole codes only: ten of 3 bits."""
    last = rows * bits // WORD_BITS - 1
    each = WORD_BITS // bits
    return np.minimum(np.arange(rows) // each, last), np.arange(rows) % each * bits


# **Reading and writing.**


@of_unpack(f"packing.unpack/C1 {VALUES}")
def codes_without_top_bit(words: Words, bits: int) -> Array:
    """The mask is one bit too short, so that codes lose their top bit."""
    return unpack(words, bits) & np.uint8(2 ** (bits - 1) - 1)


@of_unpack(VALUES, only=steps.VALUES)
def codes_not_masked(words: Words, bits: int) -> Array:
    """A code keeps the bits above it in its word."""
    word, shift = places(len(words) * WORD_BITS // bits, bits)
    return np.asarray(words[word] >> shift[:, None].astype(np.uint32))


@of_unpack(f"packing.unpack/C1 {VALUES}")
def words_by_columns(words: Words, bits: int) -> Array:
    """Words are read column by column."""
    turned = np.ascontiguousarray(words.ravel().reshape(words.shape[1], -1).T)
    return unpack(turned, bits)


@of_unpack(f"packing.unpack/C1 {VALUES}")
def codes_of_next_row(words: Words, bits: int) -> Array:
    """Row k has the codes of row k + 1."""
    codes = unpack(words, bits)
    return codes[np.minimum(np.arange(len(codes)) + 1, len(codes) - 1)]


@of_unpack(READS)
def straddle_cut_short(words: Words, bits: int) -> Codes:
    """A 3-bit code loses the bits that lie in the next word."""
    codes = unpack(words, bits)
    _, shift = places(len(codes), bits)
    kept = np.minimum(WORD_BITS - shift, bits)
    return np.asarray((codes & (2**kept - 1)[:, None]).astype(np.uint8))


@of_unpack(READS)
def straddle_split_wrong(words: Words, bits: int) -> Codes:
    """Codes 10 and 21 of 3 bits are put together from 1 + 2 and 2 + 1 bits instead of 2 + 1 and 1 + 2."""
    codes = unpack(words, bits)
    if bits == 3:
        first, second, third = words[0::3], words[1::3], words[2::3]
        codes[10::32] = first >> 31 | (second & 3) << 1
        codes[21::32] = second >> 30 | (third & 1) << 2
    return codes


@of_pack(PACKS)
def straddle_not_written(codes: Codes, bits: int) -> Words:
    """Packing drops the bits of a 3-bit code that belong to the next word."""
    _, shift = places(len(codes), bits)
    kept = np.minimum(WORD_BITS - shift, bits)
    return pack((codes & (2**kept - 1)[:, None]).astype(np.uint8), bits)


@of_unpack(READS, "https://github.com/casper-hansen/AutoAWQ/issues/275")
def codes_signed(words: Words, bits: int) -> Array:
    """Codes are taken for two's complement."""
    codes = unpack(words, bits).astype(np.int16)
    return np.asarray(codes - 2**bits * (codes >= 2 ** (bits - 1)))


@of_unpack(READS)
def arithmetic_shift(words: Words, bits: int) -> Array:
    """The topmost code of a word is shifted down as a signed number and not masked."""
    codes = unpack(words, bits).astype(np.int16)
    _, shift = places(len(codes), bits)
    at_top = (shift + bits == WORD_BITS)[:, None]
    return np.asarray(codes - 2**bits * (at_top & (codes >= 2 ** (bits - 1))))


@of_unpack(READS)
def last_two_codes_swapped(words: Words, bits: int) -> Codes:
    """The last two 4-bit codes of the last column change places, and no others."""
    codes = unpack(words, bits)
    if bits == 4:
        codes[[-2, -1], -1] = codes[[-1, -2], -1]
    return codes


@of_pack(PACKS, "https://github.com/bitsandbytes-foundation/bitsandbytes/pull/1721")
def packing_variable_not_cleared(codes: Codes, bits: int) -> Words:
    """The word that codes are gathered in is not cleared for the next word of the column."""
    return np.bitwise_or.accumulate(pack(codes, bits), axis=0)


@of_pack(PACKS)
def packing_uninitialized(codes: Codes, bits: int) -> Words:
    """Codes are or-ed into memory that was not zero."""
    words = pack(codes, bits)
    words[-1] |= np.uint32(0x80000001)
    return words


def rows_in_16_bits(codes: Array) -> Array:
    return codes[np.arange(len(codes)) % 2**16]


DEFECTS.append(
    stepwise(
        "rows-wrap-at-65536",
        "The row number has 16 bits, so that it wraps at row 65,536.",
        "packing.pack/C2 packing.unpack/C1",
        unpack=lambda words, bits: rows_in_16_bits(unpack(words, bits)),
        pack=lambda codes, bits: pack(rows_in_16_bits(codes), bits),
        only=("packing.pack", "packing.unpack"),
    )
)
DEFECTS.append(
    stepwise(
        "bytes-swapped",
        "Words are read and written with their bytes in the other order.",
        BOTH,
        "https://github.com/ollama/ollama/pull/17826",
        unpack=lambda words, bits: unpack(words.byteswap(), bits),
        pack=lambda codes, bits: pack(codes, bits).byteswap(),
    )
)
of_pack.add(
    "words-are-int32",
    "The words come back as int32, as files of GPTQ hold them.",
    "packing.pack/C2",
    lambda codes, bits: pack(codes, bits).view(np.int32),
)
of_unpack.add(
    "codes-are-int8",
    "The codes come back as int8.",
    "packing.unpack/C2",
    lambda words, bits: unpack(words, bits).view(np.int8),
    only=("packing.unpack",),
)
