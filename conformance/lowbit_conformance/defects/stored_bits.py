"""Mistakes in the bits of a block: integers that are read from other bits, or that keep bits which are not theirs.

Where the codes and the small scales of a block lie follows from its table: each bit of a record is set in turn, and
what it changes is seen. So these kinds know no format. An integer consists of *pieces*, runs of neighbouring bits.
Piece i mostly begins at a bit that is a sum over the binary digits of i,

.. math:: p(i) = p_0 + \\sum_b i_b A_b,

and loops that are wrong take other steps :math:`A_b` or another beginning :math:`p_0`, for all i or in one branch of an
unrolled loop, where one digit of i is given.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from itertools import product as pairs
from math import prod

import numpy as np
import numpy.typing as npt

from lowbit.arrays import Array
from lowbit.numbers.floats import FLOATS
from lowbit.tensor_formats.stored import FORMATS, Stored
from lowbit.tensor_formats.table import Field, Format, Sizes, Terms
from lowbit_conformance.defects.stored_codes import PLAIN, reread
from lowbit_conformance.defects.stored_fields import with_field

Integers = npt.NDArray[np.int64]
Numbers = Callable[[Stored], Terms]
FieldChange = Callable[[Field, Array, Stored], Array]
Named = Iterator[tuple[str, str, Numbers]]

ALL = 255
"""A byte of codes, none of which stands for 0."""
MOST_BITS = 8
"""Largest number of bits of an integer in a block; longer fields are, for example, indices of a grid."""
EARLIER = (*range(-4, 5), *(8 * each for each in (-32, -16, -8, -4, -3, -2, -1, 1, 2, 3, 4, 8, 16, 32)))
"""Bits by which the start of a piece may be shifted."""
FACTORS = (0.0, 0.5, 0.25, 2.0, 4.0)
DIGITS = "abcdefgh"


@dataclass(frozen=True, eq=False)
class Place:
    """The location of the integers of one kind in a record.

    Attributes:
        row: their field.
        what: ``codes``, ``scales`` or ``minima``, for a sentence.
        bits: integers × bits, from the lowest bit of each up: the places of the bits in the record.
        linear: whether the numbers are linear in these integers.
    """

    row: Field
    what: str
    bits: Integers
    linear: bool

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """The pieces that all integers have in common: the first bit and the number of bits of each."""
        near = (np.diff(self.bits, axis=1) == 1).all(axis=0)
        ends = [0, *(np.flatnonzero(~near) + 1), self.bits.shape[1]]
        return [(int(a), int(b - a)) for a, b in pairwise(ends)]


def bytes_of(row: Field) -> int:
    """The bytes of a field of a block."""
    return row.numpy_dtype.itemsize * prod(map(int, row.shape))


def with_bit_set(table: Format, row: Field) -> tuple[Terms, Terms]:
    """The terms of blocks with one bit of a field set in each, and of one block with no bit set."""
    count = 8 * bytes_of(row)
    at = Sizes(table.block or 1, count + 1)
    fields = {}
    for each in table.fields:
        shape = (count + 1, 1, *(int(size) for size in each.shape))
        if each.dtype in FLOATS:
            fields[each.name] = np.ones(shape).astype(each.numpy_dtype)
            continue
        octets = np.full((*shape, each.numpy_dtype.itemsize), ALL if each.role == "codes" else PLAIN, np.uint8)
        fields[each.name] = octets.view(each.numpy_dtype)[..., 0]
    one_each = np.packbits(np.eye(count + 1, count, dtype=np.uint8), axis=1, bitorder="little")
    fields[row.name] = np.ascontiguousarray(one_each).view(row.numpy_dtype).reshape(fields[row.name].shape)
    found = table.decode(fields, at)
    products, offsets = (np.broadcast_to(each, found.products.shape)[:, 0] for each in (found.products, found.offsets))
    return Terms(products[:-1], offsets[:-1]), Terms(products[-1:], offsets[-1:])


@cache
def places_of(format: str) -> tuple[Place, ...]:
    """The integers of a block format, if all of one kind depend on the same number of bits."""
    table, found = FORMATS[format], list[Place]()
    for row in table.fields if table.block is not None else ():
        if row.dtype in FLOATS or row.role not in ("codes", "scale"):
            continue
        wrong, right = with_bit_set(table, row)
        begin = 8 * offset_of(table, row)
        for part, what in (("products", "codes" if row.role == "codes" else "scales"), ("offsets", "minima")):
            given, none = np.asarray(getattr(wrong, part)), np.asarray(getattr(right, part))
            off = np.abs(given - none)
            other = (off > 0) | (np.signbit(given) != np.signbit(none))
            counts = np.unique(other.sum(axis=0))
            if len(counts) != 1 or not 0 < counts[0] <= MOST_BITS:
                continue
            order = np.argsort(np.where(other, off, np.inf), axis=0, kind="stable")[: counts[0]].T
            sizes = np.take_along_axis(off, order.T, axis=0)
            linear = bool((sizes == sizes[:1] * 2.0 ** np.arange(counts[0])[:, np.newaxis]).all())
            if not linear:
                order = np.sort(order, axis=1)
            _, first = np.unique(order, axis=0, return_index=True)
            bits = order[np.sort(first)] + begin
            if not any(np.array_equal(bits, each.bits) for each in found):
                found.append(Place(row, what, bits.astype(np.int64), linear))
    return tuple(found)


# **Read from other bits.**


def records_of(weights: Stored) -> tuple[Array, int]:
    """The bits of the blocks of each column, columns × bits, and the number of bits of a block."""
    octets = np.ascontiguousarray(weights.tensors[0])
    return np.unpackbits(octets, axis=1, bitorder="little"), 8 * weights.table.record.itemsize


def read_from(place: Place, first: int, count: int, starts: tuple[int, ...], weights: Stored) -> Terms:
    """One piece of each integer read from other bits, which wrap after the last block."""
    bits, size = records_of(weights)
    table = weights.table
    own = place.bits[:, first : first + count]
    blocks = size * np.arange(bits.shape[1] // size)[:, np.newaxis]
    sources = (np.array(starts)[:, np.newaxis] + np.arange(count)).reshape(-1)
    read = bits.copy()
    read[:, blocks + own.reshape(-1)] = bits[:, (blocks + sources) % bits.shape[1]]
    wrong = table.fields_of({table.tensors[0].name: np.packbits(read, axis=1, bitorder="little")})
    return reread(weights, {place.row.name: wrong[place.row.name]})


def steps_of(starts: Integers) -> Integers | None:
    """The step of each binary digit of i in the starts of pieces; None if the starts are not such sums."""
    digits = len(starts).bit_length() - 1
    if len(starts) != 1 << digits or digits == 0:
        return None
    steps = np.array([starts[1 << b] - starts[0] for b in range(digits)])
    return steps if (summed(int(starts[0]), steps) == starts).all() else None


def summed(begin: int, steps: Integers) -> Integers:
    """The start for each i."""
    i = np.arange(1 << len(steps))[:, np.newaxis]
    return np.asarray(begin + ((i >> np.arange(len(steps)) & 1) * steps).sum(axis=1))


def runs_of(steps: Integers) -> list[range]:
    """The binary digits of one loop: each step is twice the previous one."""
    ends = [0, *(b for b in range(1, len(steps)) if steps[b] != 2 * steps[b - 1]), len(steps)]
    return [range(a, b) for a, b in pairwise(ends)]


def written(begin: int, steps: Integers, runs: list[range]) -> str:
    """The bit where number i begins, in the digits of i.

    >>> written(16, np.array([8, 16, 4]), [range(0, 2), range(2, 3)])
    '8 a + 4 b + 16'
    """
    terms = []
    for run, name in zip(runs, DIGITS, strict=False):
        own = steps[list(run)]
        if (own == own[0] * 2 ** np.arange(len(own))).all():
            terms += [name if own[0] == 1 else f"{own[0]} {name}"] if own[0] else []
        else:
            terms.append(f"({' + '.join(f'{step} {name}{digit}' for digit, step in enumerate(own) if step)})")
    return " + ".join([*terms, *([str(begin)] if begin or not terms else [])]).replace("+ -", "- ")


def other_steps(begin: int, steps: Integers) -> Iterator[tuple[int, Integers]]:
    """Starts and steps of wrong loops."""
    for by in EARLIER:
        if by:
            yield begin + by, steps
    runs = runs_of(steps)
    for run in runs:
        for first, factor in pairs(run, FACTORS):
            there = (np.arange(len(steps)) >= first) & (np.arange(len(steps)) < run.stop)
            other = steps * np.where(there, factor, 1.0)
            if (other == np.floor(other)).all():
                yield begin, other.astype(np.int64)
        yield begin + int(steps[list(run)].sum()), np.where(np.isin(np.arange(len(steps)), list(run)), -steps, steps)
        for b in run if len(run) > 1 else ():
            yield begin, np.where(np.arange(len(steps)) == b, 0, steps)
    for one in range(len(runs) - 1):
        for other_one in range(one + 1, len(runs)):
            order = list(runs)
            order[one], order[other_one] = order[other_one], order[one]
            yield begin, steps[[b for run in order for b in run]]


def other_digits(steps: Integers) -> Iterator[Integers]:
    """Steps of loops that shift inside a byte by another digit of i: two are exchanged, or one depends on both.

    >>> [each.tolist() for each in other_digits(np.array([8, 4]))]
    [[4, 8], [12, 0]]
    """
    for b in map(int, np.flatnonzero(np.abs(steps) < 8)):
        for c in range(len(steps)):
            if b != c:
                exchanged, joined = steps.copy(), steps.copy()
                exchanged[b], exchanged[c] = steps[c], steps[b]
                joined[b], joined[c] = 0, steps[b] + steps[c]
                yield from (exchanged, joined)


def of_pieces(place: Place) -> Named:
    """Pieces with another start, in all integers or in those with one given binary digit."""
    for first, count in place.pieces:
        starts = place.bits[:, first]
        steps = steps_of(starts)
        if steps is None:
            continue
        runs, begin = runs_of(steps), int(starts[0])
        i = " + ".join(
            reversed([f"{1 << run[0]} {name}" if run[0] else name for run, name in zip(runs, DIGITS, strict=False)])
        )
        zero = 8 * (begin // 8)
        right = written(begin - zero, steps, runs)
        which = "" if len(place.pieces) == 1 else f" (of its bits {first} to {first + count - 1})"
        partly = [(other_begin, other, len(steps)) for other_begin, other in other_steps(begin, steps)]
        for other_begin, other, conditions in [*partly, *((begin, other, 0) for other in other_digits(steps))]:
            wrong = summed(other_begin, other)
            if (wrong < 0).any() or np.array_equal(wrong, starts):
                continue
            said = written(other_begin - zero, other, runs)
            cause = f"Number i = {i} of {place.row.name}{which} is read from bit {said} where bit {right} is right"
            for digit, value in ((0, None), *((b, v) for b in range(conditions) for v in (0, 1))):
                there = np.ones(len(starts), bool) if value is None else (np.arange(len(starts)) >> digit & 1) == value
                taken = np.where(there, wrong, starts)
                if np.array_equal(taken, starts):
                    continue
                end = (
                    "."
                    if value is None
                    else f", where i mod {2 << digit} is {'not ' if value else ''}below {1 << digit}."
                )
                change = partial(read_from, place, first, count, tuple(int(each) for each in taken))
                yield f"stored-{place.row.role}-of-other-bits", cause + end, change


# **Other integers**: the numbers of a block are linear in them.


def by_integers(place: Place, change: Callable[[Integers, Array], Integers], weights: Stored) -> Terms:
    """The numbers with other integers; the table gives the value of one unit.

    Args:
        place: where the integers lie.
        change: of the integers, columns × blocks × integers, and the bytes of the records.
        weights: the matrix.
    """
    bits, size = records_of(weights)
    table, at = weights.table, weights.sizes
    records = bits.reshape(len(bits), -1, size)
    own = (records[..., place.bits].astype(np.int64) << np.arange(place.bits.shape[1])).sum(axis=-1)
    more = change(own, np.packbits(records, axis=-1, bitorder="little").astype(np.int64)) - own
    fields = table.fields_of(weights.by_name)
    plain = np.zeros(size, np.uint8)
    none, one = plain.copy(), plain.copy()
    one[place.bits[:, 0]] = 1
    terms = []
    for each in (none, one):
        record = np.packbits(each, bitorder="little").view(table.record)
        fields[place.row.name] = np.broadcast_to(record[place.row.name], fields[place.row.name].shape)
        terms.append(table.decode(fields, at))
    with np.errstate(all="ignore"):
        shape = terms[0].products.shape
        of_one = terms[1].products - terms[0].products
        of_offset = np.broadcast_to(terms[1].offsets, shape) - np.broadcast_to(terms[0].offsets, shape)
        each = np.repeat(more, shape[-1] // more.shape[-1], axis=-1)
        added = Terms(of_one * each, of_offset * each).across(at)
        return Terms(weights.terms.products + added.products, weights.terms.offsets + added.offsets)


def unmasked(
    place: Place, which: int | None, among: int | None, wide: bool, own: Integers, octets: Integers
) -> Integers:
    """Integers whose pieces keep the bits above them in their byte, or in four bytes.

    Args:
        place: where they lie.
        which: of the pieces; all if None.
        among: the number of pieces of the integers that are read wrongly; all integers if None.
        wide: in four bytes.
        own: the integers.
        octets: the bytes of the records.
    """
    found = np.zeros_like(own)
    begin = int(place.bits.min()) // 8
    for number, row in enumerate(place.bits):
        ends = [0, *(np.flatnonzero(np.diff(row) != 1) + 1), len(row)]
        for piece, (a, b) in enumerate(pairwise(ends)):
            octet, shift = divmod(int(row[a]), 8)
            value = octets[..., octet]
            if wide:
                first = begin + (octet - begin) // 4 * 4
                value = sum((octets[..., min(first + j, octets.shape[-1] - 1)] << 8 * j for j in range(4)), 0 * value)
                shift += 8 * (octet - first)
            value = value >> shift
            if (which is not None and piece != which) or (among is not None and among != len(ends) - 1):
                value = value & (1 << b - a) - 1
            found[..., number] |= value << a
    return found


def with_pieces_at(place: Place, by: int, masked: bool, own: Integers, octets: Integers) -> Integers:
    """Integers whose high piece is placed some bits too high or too low, over the low one.

    Raises:
        ValueError: no integer has two pieces.
    """
    found = own.copy()
    ends = {number: np.flatnonzero(np.diff(row) != 1) + 1 for number, row in enumerate(place.bits)}
    if not any(map(len, ends.values())):
        raise ValueError("no integer has two pieces")
    for number, cuts in ends.items():
        if len(cuts):
            low, high = own[..., number] & (1 << cuts[0]) - 1, own[..., number] >> cuts[0]
            found[..., number] = low | high << max(cuts[0] + by, 0)
    return found & (1 << place.bits.shape[1]) - 1 if masked else found


def moved(by: int, own: Integers, octets: Integers) -> Integers:
    return own + by


def moved_in_bytes(by: int, own: Integers, octets: Integers) -> Integers:
    return (own + by) % 256


def without(bit: int, own: Integers, octets: Integers) -> Integers:
    return own & ~(1 << bit)


def of_integers(place: Place) -> Named:
    """Missing or too short masks, and small scales that are off by a number."""
    name, role = place.row.name, place.row.role
    found = {1 + int((np.diff(row) != 1).sum()) for row in place.bits}
    counts = found if len(found) > 1 else set()
    for wide, said in ((False, "byte"), (True, "word of 32 bits")):
        if wide and bytes_of(place.row) % 4:
            continue
        for which, among in pairs((None, 0, 1), sorted({None, *counts}, key=str)):
            words = {None: "all pieces", 0: "the low bits", 1: "the high bits"}[which]
            end = "" if among is None else f", of those that consist of {among} piece{'s' if among > 1 else ''}"
            cause = f"The {place.what} of {name} are not masked: {words} keep what lies above them in the {said}{end}."
            change = partial(by_integers, place, partial(unmasked, place, which, among, wide))
            yield f"stored-{role}-not-masked", cause, change
    for by in (-4, -3, -2, -1, 1, 2, 3, 4):
        for masked in (False, True):
            where = f"{abs(by)} bit{'s' * (abs(by) > 1)} too {'high' if by > 0 else 'low'}"
            end = f", and only {place.bits.shape[1]} bits are kept" if masked else ""
            cause = f"Of {place.what} of {name} that consist of two pieces, the high one is put {where}{end}."
            yield (
                f"stored-{role}-pieces-apart",
                cause,
                partial(by_integers, place, partial(with_pieces_at, place, by, masked)),
            )
    if role == "scale":
        for bit in range(place.bits.shape[1]):
            cause = f"Bit {bit} of the {place.what} in the field {name} is lost."
            yield f"stored-{role}-without-a-bit", cause, partial(by_integers, place, partial(without, bit))
        for by in (1, -1, 8, -8, 16, -16, 32, -32, 64, -64, 128, -128):
            cause = f"The {place.what} of {name} are {abs(by)} too {'high' if by > 0 else 'low'}."
            yield f"stored-{role}-off-by-a-number", cause, partial(by_integers, place, partial(moved, by))
            cause = f"{cause.removesuffix('.')}, and wrap around in a byte."
            yield f"stored-{role}-off-by-a-number", cause, partial(by_integers, place, partial(moved_in_bytes, by))


# **Fields** that begin at any byte of a block.


def begun_at(begin: int, row: Field, array: Array, weights: Stored) -> Array:
    """A field of a block read from another byte on, which wraps after the last block.

    Raises:
        ValueError: there are no blocks.
    """
    table = weights.table
    if table.block is None:
        raise ValueError("there are no blocks")
    own = offset_of(table, row)
    records = np.ascontiguousarray(np.roll(weights.tensors[0], own - begin, axis=1)).view(table.record)
    return np.asarray(records[row.name])


def offset_of(table: Format, row: Field) -> int:
    """The byte of a block at which a field begins."""
    fields = table.record.fields
    assert fields is not None
    return int(fields[row.name][1])


def of_beginnings(table: Format) -> Iterator[tuple[str, str, Field, FieldChange]]:
    """Fields of scales that are read from any byte of a block."""
    for row in table.fields if table.block is not None else ():
        if row.role == "codes":
            continue
        size = bytes_of(row)
        own = offset_of(table, row)
        for begin in range(table.record.itemsize - size + 1):
            if begin != own:
                cause = f"The field {row.name} is read from byte {begin} of its block where byte {own} is right."
                yield "field-begins-elsewhere", cause, row, partial(begun_at, begin)


@cache
def of_blocks(format: str) -> tuple[tuple[str, str, Numbers], ...]:
    """All kinds of this module for one block format."""
    found: list[tuple[str, str, Numbers]] = [
        (f"stored-{name}", cause, partial(with_field, row.name, change))
        for name, cause, row, change in of_beginnings(FORMATS[format])
    ]
    for place in places_of(format):
        if place.linear and len(place.bits):
            found += of_integers(place)
    for place in places_of(format):
        found += of_pieces(place)
    return tuple(found)
