"""Mistakes in words that hold several codes: masks that are forgotten, and codes that lie in two words.

A format whose codes or zeros lie in words of 32 bits is linear in them. So a code that keeps what lies above it in its
word is the sum of the right one and of the codes above it, each with the weight that it has then.
"""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import numpy.typing as npt

from lowbit.arrays import Array
from lowbit.tensor_formats.stored import FORMATS, Stored
from lowbit.tensor_formats.table import Field, Terms
from lowbit_conformance.defects.stored_codes import joined, reread, split
from lowbit_conformance.defects.stored_kinds import bits_of

Numbers = Callable[[Stored], Terms]
Integers = npt.NDArray[np.int64]
WORD = 32


def together(changes: tuple[Numbers, ...], weights: Stored) -> Terms:
    """Changed codes of one field and zeros of another: products depend on codes, and offsets on zeros."""
    codes, zeros = (each(weights) for each in changes)
    return Terms(codes.products, zeros.offsets)


def unmasked(name: str, weights: Stored, signed: bool, mask: int = -1, own: Array | None = None) -> Terms:
    """Codes with all bits above them in their word; with its sign if words are shifted as signed numbers.

    Args:
        name: of the field.
        weights: the matrix.
        signed: whether words are.
        mask: the bits above that are kept; all if it is -1.
        own: the words with the kept bits of the codes themselves; unchanged by default.

    Raises:
        ValueError: words hold no whole codes.
    """
    bits, words = bits_of(weights), weights.by_name[name]
    if WORD % bits or bits == WORD:
        raise ValueError("words hold no whole codes")
    codes = split(words, bits)
    count, none = codes.shape[-1], reread(weights, {name: np.zeros_like(words)})
    above = []
    for by in range(1, count):
        moved = np.zeros_like(codes)
        moved[..., : count - by] = codes[..., by:] & kept(mask, by, bits)
        above.append((2.0 ** (bits * by), moved))
    for by in range(count) if signed else ():
        sign = np.zeros_like(codes)
        sign[..., count - 1 - by] = codes[..., -1] >> np.uint64(bits - 1)
        above += extended(mask, by, bits, sign)
    terms = weights.terms if own is None else reread(weights, {name: own})
    products, offsets = terms.products, np.broadcast_to(terms.offsets, terms.products.shape)
    for factor, each in above:
        if each.any():
            more = reread(weights, {name: joined(each, words, bits)})
            products = products + factor * (more.products - none.products)
            offsets = offsets + factor * (np.asarray(more.offsets) - np.asarray(none.offsets))
    return Terms(products, offsets)


def kept(mask: int, by: int, bits: int) -> np.uint64:
    """The bits that a mask keeps of the code `by` places above."""
    return np.uint64((mask >> bits * by) & ((1 << bits) - 1))


def extended(mask: int, by: int, bits: int, sign: Array) -> list[tuple[float, Array]]:
    """The bits that a mask keeps of the sign of a word above its last code, which is `by` places above a code.

    Without a mask this is a negative number.
    """
    if mask < 0:
        return [(-(2.0 ** (bits * (by + 1))), sign)]
    high = mask >> bits * (by + 1)
    return [(2.0 ** (bits * (by + 1)) * high, sign)] if high else []


def straddling(name: str, weights: Stored, way: str) -> Terms:
    """Codes in two words, without the bits in one of them, or with these at another place.

    Raises:
        ValueError: no code is in two words.
    """
    row = next(each for each in weights.table.fields if each.name == name)
    axis = next((number for number, size in enumerate(row.shape) if "bits" in str(size)), 0)
    bits, words = bits_of(weights), np.moveaxis(weights.by_name[name], axis, -1)
    if WORD % bits == 0 or words.shape[-1] * WORD % bits:
        raise ValueError("no code lies in two words")
    octets = np.ascontiguousarray(words).view(np.uint8)
    codes = np.unpackbits(octets, axis=-1, bitorder="little").reshape(*octets.shape[:-1], -1, bits).astype(np.int64)
    codes = (codes << np.arange(bits)).sum(axis=-1)
    begins = np.arange(codes.shape[-1]) * bits % WORD
    inside = np.where(begins + bits > WORD, WORD - begins, bits)  # bits in the word where a code begins
    low, high = codes & (1 << inside) - 1, codes >> inside
    unsigned = np.ascontiguousarray(words).view(np.uint32).astype(np.int64)
    after = np.minimum(np.arange(codes.shape[-1]) * bits // WORD + 1, words.shape[-1] - 1)
    following = np.where(inside < bits, unsigned[..., after] & 255, 0)  # masked only after it has been moved
    found = {
        "without the bits in the second word": low,
        "without the bits in the first word": high << inside,
        "with the bits of the second word one place too low": low | following << np.maximum(inside - 1, 0),
        "with the bits of the second word one place too high": low | following << inside + 1,
        "with the bits of the second word lowest": np.where(inside < bits, low | following, codes),
        "with the two parts exchanged": np.where(inside < bits, high | low << np.maximum(bits - inside, 0), codes),
        WHOLE: whole_in_words(unsigned, bits),
    }[way]
    places = (found & (1 << bits) - 1)[..., np.newaxis] >> np.arange(bits) & 1
    packed = np.packbits(places.reshape(*octets.shape[:-1], -1).astype(np.uint8), axis=-1, bitorder="little")
    return reread(weights, {name: np.ascontiguousarray(np.moveaxis(packed.view(words.dtype), -1, axis))})


def whole_in_words(words: Integers, bits: int) -> Integers:
    """The codes of words as if none were in two words: each word holds as many as fit."""
    units, count, at = words.reshape(*words.shape[:-1], -1, bits), WORD // bits, np.arange(WORD)
    found = units[..., at // count % bits] >> at % count * bits
    return found.reshape(*words.shape[:-1], -1)


WAYS = (
    "without the bits in the second word",
    "without the bits in the first word",
    "with the bits of the second word one place too low",
    "with the bits of the second word one place too high",
    "with the bits of the second word lowest",
    "with the two parts exchanged",
)
WHOLE = "as if each word held whole ones only"


def of_words(format: str) -> Iterator[tuple[str, str, Numbers]]:
    """All kinds of this module for one format: in codes, in zeros, and in both."""
    rows = [row for row in FORMATS[format].fields if row.role in ("codes", "zero") and row.dtype == "int32"]
    each_of = [(row,) for row in rows if len(row.shape) == 2]
    both = tuple(sorted((row for (row,) in each_of), key=lambda row: row.role))
    for some in (*each_of, *([both] if len(both) == 2 else [])):
        role, name = "-and-".join(row.role for row in some), " and ".join(row.name for row in some)
        for signed in (False, True):
            kept = f"all that lies above them in their word{', and its sign' if signed else ''}"
            cause = f"The numbers of {name} are not masked: they keep {kept}."
            yield f"stored-{role}-not-masked", cause, of_some(partial(unmasked, signed=signed), some)
        cause = f"The numbers of {name} are read {WHOLE}: ten of 3 bits."
        yield f"stored-{role}-whole-in-words", cause, of_some(partial(straddling, way=WHOLE), some)
        for way in WAYS:
            cause = f"The numbers of {name} that lie in two words are read {way}."
            yield f"stored-{role}-in-two-words", cause, of_some(partial(straddling, way=way), some)


def of_some(change: Callable[..., Terms], rows: tuple[Field, ...]) -> Numbers:
    """A change of one field, or of codes and zeros."""
    changes = tuple(partial(change, row.name) for row in rows)
    return changes[0] if len(changes) == 1 else partial(together, changes)
