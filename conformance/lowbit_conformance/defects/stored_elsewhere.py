"""Mistakes in the place of a code in its words: which word, which place in it, and which mask.

Code n of a line of words of P codes lies in word n / P, at place n mod P. A kernel that divides by another number, or
takes another index, finds other codes. With another mask a code keeps some of the bits above it, or loses its own.
"""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import numpy.typing as npt

from lowbit.tensor_formats.bits import INTERLEAVED
from lowbit.tensor_formats.stored import FORMATS, Stored
from lowbit.tensor_formats.table import Field, Terms
from lowbit_conformance.defects.stored_codes import joined, reread, split
from lowbit_conformance.defects.stored_kinds import bits_of
from lowbit_conformance.defects.stored_words import of_some, unmasked

Numbers = Callable[[Stored], Terms]
Integers = npt.NDArray[np.int64]
Index = Callable[[Integers, Integers, int, int], Integers]
"""From the number of a code in its line, the number of the line, the words of a line and the places of a word to an
index."""


def divided(by: int, n: Integers, line: Integers, words: int, places: int) -> Integers:
    return n // by


def modulo(by: int, n: Integers, line: Integers, words: int, places: int) -> Integers:
    return n % by


def by_places(up: int, n: Integers, line: Integers, words: int, places: int) -> Integers:
    return n // (places + up)


def modulo_places(up: int, n: Integers, line: Integers, words: int, places: int) -> Integers:
    return n % (places + up)


WORDS: tuple[tuple[str, Index], ...] = (
    ("n / P", partial(by_places, 0)),
    ("n mod P", partial(modulo_places, 0)),
    ("n / (P + 1)", partial(by_places, 1)),
    ("n / (P - 1)", partial(by_places, -1)),
    ("n / P + 1", lambda n, line, words, places: n // places + 1),
    ("n / P - 1", lambda n, line, words, places: n // places - 1),
    ("n mod W", lambda n, line, words, places: n % words),
    ("the line / P", lambda n, line, words, places: line // places),
    ("the line", lambda n, line, words, places: line),
    ("0", lambda n, line, words, places: 0 * n),
    *((f"n / {by}", partial(divided, by)) for by in (1, 2, 4, 8, 16, 32, 64)),
    *((f"n mod {by}", partial(modulo, by)) for by in (2, 4, 16)),
)
PLACES: tuple[tuple[str, Index], ...] = (
    ("n mod P", partial(modulo_places, 0)),
    ("n / P", partial(by_places, 0)),
    ("n mod (P + 1)", partial(modulo_places, 1)),
    ("n mod (P - 1)", partial(modulo_places, -1)),
    ("n + 1", lambda n, line, words, places: n + 1),
    ("n - 1", lambda n, line, words, places: n - 1),
    ("n / W", lambda n, line, words, places: n // words),
    ("the line", lambda n, line, words, places: line),
    ("n / 2 mod P", lambda n, line, words, places: n // 2),
    ("n / 4 mod P", lambda n, line, words, places: n // 4),
    ("2 n mod P", lambda n, line, words, places: 2 * n),
    ("P / 2 for odd n and n / 2 for even n", lambda n, line, words, places: n % 2 * (places // 2) + n % places // 2),
    ("0", lambda n, line, words, places: 0 * n),
    *((f"n mod {by}", partial(modulo, by)) for by in (2, 4)),
)
"""Each result is taken modulo P."""


def axis_of(row: Field) -> int:
    """The axis along which words hold several codes."""
    return next((axis for axis, size in enumerate(map(str, row.shape)) if "/8" in size or "bits" in size), 1)


def elsewhere(name: str, weights: Stored, word: Index, place: Index) -> Terms:
    """Each code of a field from another word and place, which wrap after the last word.

    Raises:
        ValueError: words do not hold whole codes.
    """
    bits, words = bits_of(weights), weights.by_name[name]
    row = next(each for each in weights.table.fields if each.name == name)
    axis = axis_of(row)
    if 32 % bits:
        raise ValueError("words hold no whole codes")
    turned = np.moveaxis(words, axis, -1)
    codes = split(turned, bits)
    lines, count, places = codes.shape
    interleaved = any("0, 2, 4, 6" in each.holds for each in weights.table.fields)
    of_place = np.array(INTERLEAVED) if interleaved else np.arange(places)  # of number n mod P
    n, line = np.arange(count * places), np.arange(lines)[:, np.newaxis]
    taken = np.broadcast_to(word(n, line, count, places) % count, (lines, len(n)))
    at = of_place[np.broadcast_to(place(n, line, count, places) % places, (lines, len(n)))]
    found = np.empty_like(codes)
    found[:, n // places, of_place[n % places]] = codes[line, taken, at]
    read = joined(found, np.ascontiguousarray(turned), bits)
    return reread(weights, {name: np.ascontiguousarray(np.moveaxis(read, -1, axis))})


def pairs_of_ways() -> Iterator[tuple[str, str, Index, Index]]:
    """Pairs of words and places with one of them right, and pairs that are both wrong in typical ways."""
    for said, word in WORDS[1:]:
        yield said, PLACES[0][0], word, PLACES[0][1]
    for said, place in PLACES[1:]:
        if said != "the line":  # `stored_fields` has this one
            yield WORDS[0][0], said, WORDS[0][1], place
    for first, second in ((6, 6), (2, 2), (3, 3), (7, 7), (12, 8), (13, 9), (11, 13), (12, 14)):
        (said, word), (at, place) = WORDS[first], PLACES[second]
        yield said, at, word, place


# **Masks.**


def masked(name: str, weights: Stored, mask: int, signed: bool) -> Terms:
    """Codes with the bits of a mask, some of which belong to the codes above.

    Raises:
        ValueError: words do not hold whole codes.
    """
    bits, words = bits_of(weights), weights.by_name[name]
    own = joined(split(words, bits) & np.uint64(mask % (1 << bits)), words, bits)
    return unmasked(name, weights, signed, mask, own)


def masks(bits: int) -> Iterator[int]:
    """Wrong masks for codes of a width: off by one, shifted, or those of other widths."""
    right = (1 << bits) - 1
    wrong = {right - 1, right + 1, right + 2, 2 * right, right << bits, 2 * right + 1, 4 * right + 3, 8 * right + 7}
    yield from sorted((wrong | {3, 7, 15, 31, 63, 127, 255, 1}) - {right, 0})


def with_mask(names: tuple[str, ...], bits: int, mask: int, signed: bool, weights: Stored) -> Terms:
    """The numbers with one mask for some fields.

    Raises:
        ValueError: codes have another width.
    """
    if bits_of(weights) != bits:
        raise ValueError(f"codes do not have {bits} bits")
    found = [masked(name, weights, mask, signed) for name in names]
    return found[0] if len(found) == 1 else Terms(found[0].products, found[1].offsets)


def of_elsewhere(format: str) -> Iterator[tuple[str, str, Numbers]]:
    """All kinds of this module for one format: in codes, in zeros, and in both."""
    fields = [row for row in FORMATS[format].fields if row.role in ("codes", "zero") and row.dtype == "int32"]
    each_of: list[tuple[Field, ...]] = [(row,) for row in fields if len(row.shape) == 2]
    both = tuple(sorted((row for (row,) in each_of), key=lambda row: row.role))
    for some in (*each_of, *([both] if len(both) == 2 else [])):
        role, name = "-and-".join(row.role for row in some), " and ".join(row.name for row in some)
        for word, place, change, at in pairs_of_ways():
            read = f"is read from word {word}, place {place}"
            cause = f"Number n of each line of {name}, which has W words of P places, {read}."
            yield f"stored-{role}-elsewhere-in-words", cause, of_some(partial(elsewhere, word=change, place=at), some)
        names = tuple(row.name for row in some)
        for bits in (2, 4, 8):
            for mask in masks(bits):
                for signed in (False, True) if mask >= 1 << bits else (False,):
                    sign = ", after a shift that keeps the sign of a word" if signed else ""
                    cause = f"The numbers of {name}, of {bits} bits, are masked by {mask}{sign}."
                    yield f"stored-{role}-with-another-mask", cause, partial(with_mask, names, bits, mask, signed)
