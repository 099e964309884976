"""Mistakes in scales and minima of 6 bits that are packed into twelve bytes, as in Q4_K and Q5_K."""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from lowbit.arrays import Array


def copy_of_packed(array: Array) -> Array:
    """A copy of such a field, to be changed.

    Raises:
        ValueError: there are no twelve bytes.
    """
    if array.dtype != np.uint8 or array.shape[-1] != 12:
        raise ValueError("there are no twelve bytes")
    return array.copy()


def late_of_packed(way: str, what: str, array: Array) -> Array:
    """Twelve bytes of 8 scales and 8 minima of 6 bits: the last four of each are combined differently."""
    found = copy_of_packed(array)
    for number, own in enumerate(("scales", "minima")):
        if what not in (own, "both"):
            continue
        first, other = array[..., 4 * number :][..., :4], array[..., 4 - 4 * number :][..., :4]
        low, carry = (array[..., 8:] >> 4 * number) & 15, first >> 6
        late = PACKED[way](low, carry, first, other, array) & 63
        found[..., 4 * number : 4 * number + 4] = (first & 63) | (late >> 4 << 6)
        found[..., 8:] = (found[..., 8:] & (240 >> 4 * number)) | ((late & 15) << 4 * number)
    return found


PACKED: dict[str, Callable[..., Array]] = {
    "with high bits two places low": lambda low, carry, first, other, all_of: low | carry << 2,
    "with high bits one place low": lambda low, carry, first, other, all_of: low | carry << 3,
    "with high bits four places low": lambda low, carry, first, other, all_of: low | carry,
    "with high bits one place high": lambda low, carry, first, other, all_of: low | carry << 5,
    "with high bits below the others": lambda low, carry, first, other, all_of: low << 2 | carry,
    "with bits 4 and 5 of the early ones": lambda low, carry, first, other, all_of: low | (first & 48),
    "as the bytes after the early ones": lambda low, carry, first, other, all_of: all_of[..., 4:8],
    "as the last bytes": lambda low, carry, first, other, all_of: all_of[..., 8:],
    "as the early ones": lambda low, carry, first, other, all_of: first,
    "with low bits from the other half": lambda low, carry, first, other, all_of: (
        (all_of[..., 8:] >> 4 if (low == all_of[..., 8:] & 15).all() else all_of[..., 8:] & 15) | carry << 4
    ),
    "with low bits of the early ones": lambda low, carry, first, other, all_of: (first & 15) | carry << 4,
    "as 0": lambda low, carry, first, other, all_of: 0 * low,
}


def early_of_packed(way: str, part: int, array: Array) -> Array:
    """Twelve bytes of scales and minima of 6 bits: the first four of each are read differently."""
    found, own = copy_of_packed(array), array[..., 4 * part : 4 * part + 4]
    read = {"without their low 2 bits": own >> 2, "shifted by 2 bits": own << 2, "of 4 bits": own & 15}
    read |= {"of the high half": own >> 4, "shifted by 1 bit": own >> 1, "of 5 bits": own & 31}
    found[..., 4 * part : 4 * part + 4] = (own & 192) | (read[way] & 63)
    return found


def same_of_packed(number: int, part: int, array: Array) -> Array:
    """Twelve bytes of scales and minima of 6 bits: all of one kind are the same number."""
    found = copy_of_packed(array)
    found[..., 4 * part : 4 * part + 4] = number
    found[..., 8:] = (found[..., 8:] & (240 >> 4 * part)) | (number << 4 * part)
    return found


def one_of_packed(part: int, array: Array) -> Array:
    """Twelve bytes of scales and minima of 6 bits: one kind is used for both.

    Raises:
        ValueError: there are no twelve bytes.
    """
    if array.dtype != np.uint8 or array.shape[-1] != 12:
        raise ValueError("there are no twelve bytes")
    own, late = array[..., 4 * part : 4 * part + 4], array[..., 8:] >> 4 * part & 15
    return np.concatenate([own, own, late | late << 4], axis=-1)


def quads_of_packed(scales: int, minima: int, kept: int, array: Array) -> Array:
    """Twelve bytes of scales and minima of 6 bits: the last four of each are bytes of their own.

    Args:
        scales: the four bytes that are taken for the last scales.
        minima: the same for the last minima.
        kept: the mask of their bits.
        array: the twelve bytes.
    """
    found, quads = copy_of_packed(array), [array[..., 4 * at : 4 * at + 4] & kept for at in range(3)]
    first, second = quads[scales], quads[minima]
    found[..., 0:4] = (array[..., 0:4] & 63) | (first >> 4 << 6)
    found[..., 4:8] = (array[..., 4:8] & 63) | (second >> 4 << 6)
    found[..., 8:] = (first & 15) | (second & 15) << 4
    return found


def halves_of_packed(way: str, array: Array) -> Array:
    """Twelve bytes of scales and minima of 6 bits: a half of each is read by the rule of the other half."""
    early = [array[..., at : at + 4] & 63 for at in (0, 4)]
    low = array[..., 8:] & 15, array[..., 8:] >> 4
    late = [low[at] | array[..., 4 * at : 4 * at + 4] >> 6 << 4 for at in (0, 1)]
    crossed = [low[at] | array[..., 4 - 4 * at :][..., :4] >> 6 << 4 for at in (0, 1)]
    found = copy_of_packed(array)
    first, last = {
        "all as the last four": (late, late),
        "with both halves exchanged": (late, early),
        "with high bits of the other kind": (early, crossed),
        "with high bits lost": (early, low),
        "with low bits of the other kind": (early, [low[1 - at] | late[at] & 48 for at in (0, 1)]),
        "with the last four scales and minima exchanged": (early, late[::-1]),
        "with the first four scales and minima exchanged": (early[::-1], late),
    }[way]
    found[..., 0:4], found[..., 4:8] = first[0] | last[0] >> 4 << 6, first[1] | last[1] >> 4 << 6
    found[..., 8:] = (last[0] & 15) | (last[1] & 15) << 4
    return found


HALVES = (
    "all as the last four",
    "with both halves exchanged",
    "with high bits of the other kind",
    "with high bits lost",
    "with low bits of the other kind",
    "with the last four scales and minima exchanged",
    "with the first four scales and minima exchanged",
)


EARLY = (
    *("without their low 2 bits", "shifted by 2 bits", "of 4 bits"),
    *("of the high half", "shifted by 1 bit", "of 5 bits"),
)


def of_packed() -> Iterator[tuple[str, str, Callable[[Array], Array]]]:
    """Names, words and changes of such a field."""
    for what, said in (("scales", "scales"), ("minima", "minima"), ("both", "scales and minima")):
        for way in PACKED:
            yield "packed-otherwise", f"with its last four {said} {way}", partial(late_of_packed, way, what)
    for part, said in enumerate(("scales", "minima")):
        yield "packed-otherwise", f"with {said} for both scales and minima", partial(one_of_packed, part)
        for constant in (0, 1):
            yield "packed-constant", f"with {constant} for all {said}", partial(same_of_packed, constant, part)
        for way in EARLY:
            yield "packed-otherwise", f"with its first four {said} {way}", partial(early_of_packed, way, part)
    for way in HALVES:
        yield "packed-otherwise", f"with scales and minima {way}", partial(halves_of_packed, way)
    for scales in range(3):
        for minima in range(3):
            for kept in (63, 15):
                words = f"with its last scales as bytes {4 * scales} to {4 * scales + 3}"
                said = f"{words}, and its last minima as bytes {4 * minima} to {4 * minima + 3}, masked by {kept}"
                yield "packed-otherwise", said, partial(quads_of_packed, scales, minima, kept)
