"""Mistakes in the fields of a stored matrix: each field of a table read from elsewhere, in part, or as another type.

The fields are those of the format at hand, so that a report names the one that was read wrong. A new format has these
mistakes as soon as it has a table.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import permutations

import numpy as np

from lowbit.arrays import Array
from lowbit.numbers.floats import FLOATS
from lowbit.tensor_formats.stored import FORMATS, Stored
from lowbit.tensor_formats.table import Field, Terms
from lowbit_conformance.defects.places import NUMBERS, ORDERS
from lowbit_conformance.defects.stored_addresses import of_addresses
from lowbit_conformance.defects.stored_codes import joined, reread, split
from lowbit_conformance.defects.stored_kinds import bits_of, inverse, turned, with_fields
from lowbit_conformance.defects.stored_packed import of_packed
from lowbit_conformance.defects.stored_parts import QUOTIENTS, parts_of
from lowbit_conformance.defects.stored_views import of_views

Numbers = Callable[[Stored], Terms]
Change = Callable[[Array], Array]
Named = Iterator[tuple[str, str, Numbers]]
NARROWER = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu")

PLANES = (1, 8, 16, 32, 64)
"""Numbers of bytes over which planes of bits extend."""


def with_field(name: str, change: Callable[[Field, Array, Stored], Array], weights: Stored) -> Terms:
    """The numbers with one field changed.

    Raises:
        ValueError: the format has no such field.
    """
    row = next((each for each in weights.table.fields if each.name == name), None)
    if row is None:
        raise ValueError(f"no {name}")
    own = np.ascontiguousarray(weights.table.fields_of(weights.by_name)[name])
    return reread(weights, {name: change(row, own, weights)})


def alone(change: Change) -> Callable[[Field, Array, Stored], Array]:
    """A change that needs neither the table nor the matrix."""
    return lambda row, array, weights: change(array)


def axes_of(row: Field, block: bool) -> Iterator[tuple[int, str]]:
    """The axes of the array of a field, and their meaning."""
    if block:
        yield from ((0, "columns"), (1, "blocks"))
        if row.shape:
            yield 2, "places of a block"
        return
    for axis, size in enumerate(map(str, row.shape)):
        groups = "G" in size or (row.role in ("scale", "zero") and "K" in size)
        yield axis, "columns" if "N" in size else "groups" if groups else "rows" if "K" in size else "places"


# **Bits** of each integer, or of each byte of four.


def masked(mask: int, part: int | None, array: Array) -> Array:
    """The bytes masked, in every four bytes of a record or in one part of it."""
    octets = array.view(np.uint8).copy()
    if part is None:
        octets &= np.uint8(mask)
    else:
        if array.dtype.itemsize != 1 or array.ndim < 3 or array.shape[-1] < 4 * (part + 1):
            raise ValueError("there is no such part")
        octets[..., 4 * part : 4 * part + 4] &= np.uint8(mask)
    return octets.view(array.dtype)


def codes_masked(mask: int, row: Field, array: Array, weights: Stored) -> Array:
    """Each code in the integers of a field, masked."""
    bits = bits_of(weights)
    return joined(split(array, bits) & np.uint64(mask), array, bits)


def pieces_reversed(size: int, array: Array) -> Array:
    """The pieces of some bits in each byte in reverse order."""
    octets = array.view(np.uint8)
    return joined(split(octets, size)[..., ::-1], octets, size).view(array.dtype)


def replaned(size: int, run: int, other: int, array: Array) -> Array:
    """Pieces of some bits in planes over a run of bytes, read as if the planes had another length.

    A run of one byte holds neighbours.

    Raises:
        ValueError: the record of a block has no whole runs.
    """
    if array.dtype.itemsize != 1 or array.ndim < 3 or array.shape[-1] % run or array.shape[-1] % other:
        raise ValueError("there are no such runs")
    octets, pieces = array.view(np.uint8), 8 // size
    read = split(octets, size).reshape(*octets.shape[:-1], -1, other, pieces).swapaxes(-1, -2)
    kept = read.reshape(*octets.shape[:-1], -1, pieces, run).swapaxes(-1, -2)
    return joined(kept.reshape(*octets.shape, pieces), octets, size).view(array.dtype)


def piece_for_another(size: int, place: int, other: int, array: Array) -> Array:
    """One piece of some bits in each byte is read as another."""
    octets = array.view(np.uint8)
    pieces = split(octets, size)
    pieces[..., place] = pieces[..., other]
    return joined(pieces, octets, size).view(array.dtype)


def bits_apart(stride: int, row: Field, array: Array, weights: Stored) -> Array:
    """Codes read as if they were another number of bits apart in their integers.

    Raises:
        ValueError: codes are that number of bits apart.
    """
    bits, width = bits_of(weights), 8 * array.dtype.itemsize
    if stride == bits:
        raise ValueError("codes lie so")
    wide = np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}").astype(np.uint64)
    shifts = (np.arange(width // bits) * stride).astype(np.uint64)
    read = np.where(shifts < width, wide[..., np.newaxis] >> np.minimum(shifts, np.uint64(63)), np.uint64(0))
    return joined(read & np.uint64(2**bits - 1), array, bits)


def at_place_of_line(row: Field, array: Array, weights: Stored) -> Array:
    """The code at the place of the line in each integer, whichever is requested.

    Raises:
        ValueError: there are no lines of integers.
    """
    if array.ndim != 2:
        raise ValueError("there are no lines of integers")
    codes = split(array, bits_of(weights))
    count = codes.shape[-1]
    lines = np.arange(len(array))[:, np.newaxis, np.newaxis] % count
    return joined(np.broadcast_to(np.take_along_axis(codes, lines, axis=2), codes.shape), array, bits_of(weights))


def other_sign(array: Array) -> Array:
    """Signed integers as unsigned ones, and vice versa."""
    return array.view(("i" if array.dtype.kind == "u" else "u") + str(array.dtype.itemsize))


def of_bits(row: Field) -> Iterator[tuple[str, str, Callable[[Field, Array, Stored], Array]]]:
    if row.numpy_dtype.kind not in "iu" or row.dtype in FLOATS:
        return
    for bit in range(8):
        for part in (None, 0, 1, 2, 3) if row.role == "scale" else (None,):
            end = "" if part is None else f" of bytes {4 * part} to {4 * part + 3}"
            lost, kept = 255 ^ 1 << bit, 2**bit - 1
            yield "loses-a-bit", f"without bit {bit} of each byte{end}", alone(partial(masked, lost, part))
            yield "loses-high-bits", f"without bits {bit} to 7 of each byte{end}", alone(partial(masked, kept, part))
            yield (
                "loses-low-bits",
                f"with bits {bit} to 7 of each byte{end} only",
                alone(partial(masked, 255 ^ kept, part)),
            )
    if row.role in ("codes", "zero"):
        for size in (1, 2, 4):
            words = f"with the pieces of {size} bits of each byte in reverse"
            yield "pieces-reversed", words, alone(partial(pieces_reversed, size))
            for place, other in permutations(range(8 // size), 2):
                words = f"with bits {size * other} and up of each byte in place of its bits {size * place} and up"
                if size > 1:
                    words = (
                        f"with bits {size * other} to {size * other + size - 1} of each byte in place of its bits "
                        f"{size * place} to {size * place + size - 1}"
                    )
                yield "bits-for-others", words, alone(partial(piece_for_another, size, place, other))
            for run, other in permutations(PLANES, 2):
                words = f"with pieces of {size} bits in planes over {other} bytes, not {run}"
                yield "in-other-planes", words, alone(partial(replaned, size, run, other))
        for bit in range(8):
            yield "loses-a-bit", f"without bit {bit} of each code", partial(codes_masked, 255 ^ 1 << bit)
            yield "loses-high-bits", f"with the lowest {bit} bits of each code only", partial(codes_masked, 2**bit - 1)
        words = "from the place in its integer that the number of the line, the first axis, gives"
        yield "at-the-place-of-the-line", words, at_place_of_line
        for stride in range(1, 9):
            yield "bits-apart", f"as codes {stride} bits apart", partial(bits_apart, stride)
    if row.shape == (12,):
        for name, words, change in of_packed():
            yield name, words, alone(change)
    yield "halves-of-bytes-exchanged", "with the halves of each byte exchanged", alone(partial(pieces_reversed, 4))
    if row.numpy_dtype.itemsize > 1:
        yield "bytes-exchanged", "with the bytes of each integer in reverse", alone(lambda array: array.byteswap())
    yield "sign-mistaken", "as signed where it is unsigned, or the other way round", alone(other_sign)


# **Types**: the same bytes read as another type of the same width, or numbers rounded to a narrower one.


def units_read(own: str, other: str, weights: Stored) -> Terms:
    """Float codes, read as another float type of the same width.

    Raises:
        ValueError: the codes are not floats.
    """
    parts = parts_of(weights)
    if parts.bits:
        raise ValueError("codes are integers")
    patterns = parts.units.astype(FLOATS[own].dtype)
    with np.errstate(all="ignore"):
        return Terms(patterns.view(FLOATS[other].dtype).astype(np.float64) * parts.scale, parts.offsets)


def viewed(dtype: np.dtype[np.generic], array: Array) -> Array:
    return array.view(dtype)


def through(kind: str, array: Array) -> Array:
    narrow = array.astype(np.float64).astype(FLOATS[kind].dtype)
    return narrow.astype(np.float64)


def float_bits(change: Callable[[Array], Array]) -> Change:
    """A change of the bits of floats."""
    return lambda array: np.ascontiguousarray(change(array.view(f"u{array.dtype.itemsize}"))).view(array.dtype)


def signless(patterns: Array) -> Array:
    top = patterns.dtype.type(1 << (8 * patterns.dtype.itemsize - 1))
    return np.asarray(patterns & ~top)


def in_floats(change: Change, array: Array) -> Array:
    """A change of numbers; integers stay integers of their dtype."""
    if array.dtype.kind in "iu":
        return np.asarray(change(array.astype(np.int64))).astype(array.dtype)
    return change(array.astype(np.float64))


def power_below(array: Array) -> Array:
    numbers = array.astype(np.float64)
    mantissas, exponents = np.frexp(numbers)
    return np.where(numbers == 0, 0.0, np.sign(mantissas) * np.ldexp(0.5, exponents))


def of_types(row: Field) -> Iterator[tuple[str, str, Callable[[Field, Array, Stored], Array]]]:
    own = row.numpy_dtype
    if row.dtype not in FLOATS and own.kind != "f":
        return
    width = own.itemsize
    for name, each in FLOATS.items():
        dtype = np.dtype(each.dtype)
        whole = name not in ("float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn")
        if whole and dtype.itemsize == width and dtype != own:
            yield f"read-as-{name}", f"as {name} where it is {row.dtype}", alone(partial(viewed, dtype))
    for sign in "iu":
        as_integer = partial(viewed, np.dtype(f"{sign}{width}"))
        yield "read-as-integers", f"as integers where it is {row.dtype}", alone(as_integer)
    if row.dtype not in FLOATS or FLOATS[row.dtype].signed:
        yield "sign-lost", "without its sign", alone(float_bits(signless))
    yield "sign-mistaken", "with the other sign", alone(partial(in_floats, np.negative))
    if width > 1:
        yield "bytes-exchanged", "with its bytes in reverse", alone(float_bits(lambda a: a.byteswap()))
    for name in NARROWER:
        if name in FLOATS and np.dtype(FLOATS[name].dtype).itemsize <= width and name != row.dtype:
            yield f"rounded-to-{name}", f"rounded to {name}", alone(partial(through, name))
    if row.dtype == "float8_e8m0fnu":
        yield (
            "subnormals-lost",
            "with 0 for the byte 0",
            alone(lambda array: np.where(array.view(np.uint8) == 0, 0.0, array.astype(np.float64))),
        )
        for way in ("without a bias", "with a signed byte and no bias", "with a signed byte"):
            yield "exponents-read-otherwise", f"as a power of two {way}", alone(partial(exponents_read, way))
        yield "taken-as-exponents", "as its exponent, and not as that power of two", alone(exponents_alone)
    yield "rounded-to-powers", "rounded down to a power of two", alone(power_below)
    yield "inverted", "as its inverse", inverse
    yield "subnormals-lost", "with 0 for subnormal numbers", partial(subnormal_lost, row.dtype)
    for by, words in ((2.0, "twice as large, as by another bias"), (0.5, "half as large, as by another bias")):
        yield "bias-mistaken", words, alone(partial(in_floats, partial(np.multiply, by)))
    yield "root-taken", "as its square root", alone(partial(in_floats, lambda array: np.sqrt(np.abs(array))))


def subnormal_lost(kind: str, row: Field, array: Array, weights: Stored) -> Array:
    values = array.astype(np.float64)
    normal = FLOATS[kind].least_subnormal * 2.0 ** FLOATS[kind].mantissa
    return np.where(np.abs(values) < normal, 0.0, values)


def exponents_read(way: str, array: Array) -> Array:
    """Powers of two with another reading of their byte."""
    octets = array.view(np.uint8)
    exponents = octets.view(np.int8) if "signed" in way else octets.astype(np.int16)
    return np.ldexp(1.0, exponents.astype(np.int32) - (0 if "bias" in way else 127))


def exponents_alone(array: Array) -> Array:
    """The exponents of powers of two as the numbers themselves."""
    return array.view(np.uint8).astype(np.float64) - 127


def bias_in_bytes(name: str, weights: Stored) -> Terms:
    """Powers of two whose bias is subtracted in an unsigned byte, so that those below 1 overflow float32."""

    def read(row: Field, array: Array, weights: Stored) -> Array:
        return np.ldexp(1.0, (array.view(np.uint8) - np.uint8(127)).astype(np.int32))

    with np.errstate(all="ignore"):
        return Terms(with_field(name, read, weights).values.astype(np.float32).astype(np.float64))


def of_field(row: Field, block: bool) -> Iterator[tuple[str, str, Callable[[Field, Array, Stored], Array]]]:
    """Names, words and changes of one field."""
    yield from of_types(row)
    yield from of_views(row)
    yield from of_bits(row)
    for name, words, kinds, number in NUMBERS:
        if ("f" in kinds or row.numpy_dtype.kind in kinds) and row.role != "index":
            yield name, words, alone(partial(in_floats, number))
    for axis, along in axes_of(row, block):
        for name, words, order in (*ORDERS, *QUOTIENTS):
            taken = partial(ordered, order, axis)
            yield f"{name}-along-{along.split()[0]}", f"{words}, along the {along}", alone(taken)
    if not block and len(row.shape) == 2:
        yield "transposed", "as its transpose", turned
        yield "transposed", "as if its transpose were stored", turned_back
    if row.role == "index":
        yield "sorted", "in the order of the rows", alone(np.sort)
        yield "of-equal-groups", "as the row divided by the group size", equal_groups
        for size in (8, 16, 32, 64, 128, 256, 512):
            yield "of-another-size", f"as the row divided by {size}", partial(groups_of, size)
        yield (
            "inverted",
            "as the inverse permutation",
            alone(lambda array: np.argsort(np.argsort(array)) % (array.max() + 1)),
        )


def turned_back(row: Field, array: Array, weights: Stored) -> Array:
    """The transpose, read in the shape of the array."""
    return np.ascontiguousarray(array.T).reshape(array.shape)


def equal_groups(row: Field, array: Array, weights: Stored) -> Array:
    groups = int(array.max()) + 1
    return np.arange(len(array)) // max(1, len(array) // groups) % groups


def groups_of(size: int, row: Field, array: Array, weights: Stored) -> Array:
    return np.minimum(np.arange(len(array)) // size, weights.sizes.G - 1)


def ordered(order: Callable[[Array, int], Array], axis: int, array: Array) -> Array:
    if array.ndim <= axis:
        raise ValueError("there is no such axis")
    count = array.shape[axis]
    return np.asarray(np.take(array, order(np.arange(count), count) % count, axis=axis))


# **Records**: a field that begins elsewhere in its block, or blocks of another width.


def all_bits_apart(stride: int, weights: Stored) -> Terms:
    """All codes and zeros read as if they were another number of bits apart."""
    return with_fields(partial(bits_apart, stride), ("codes", "zero"), weights)


def record_shifted(name: str, by: int, weights: Stored) -> Terms:
    """One field of a block read some bytes further on in the row of blocks.

    Raises:
        ValueError: the format has no blocks, or no such field.
    """
    table = weights.table
    if table.block is None or name not in (table.record.names or ()):
        raise ValueError("there is no such field in a block")
    moved = np.ascontiguousarray(np.roll(weights.tensors[0], -by, axis=1)).view(table.record)
    return reread(weights, {name: moved[name]})


def record_reordered(order: tuple[int, ...], weights: Stored) -> Terms:
    """The fields of a block in another order.

    Raises:
        ValueError: the format has no blocks.
    """
    if weights.table.block is None:
        raise ValueError("there are no blocks")
    rows = [weights.table.fields[number] for number in order]
    record = np.dtype([(each.name, each.numpy_dtype, each.shape) for each in rows])
    read = weights.tensors[0].view(record)
    return reread(weights, {each.name: read[each.name] for each in rows})


def records_wider(by: int, weights: Stored) -> Terms:
    """Blocks read as if they were some bytes longer or shorter, in all rows, wrapping at the end.

    Raises:
        ValueError: the format has no blocks.
    """
    table, at = weights.table, weights.sizes
    if table.block is None:
        raise ValueError("there are no blocks")
    size, blocks = table.record.itemsize, at.K // table.block
    octets = weights.tensors[0].reshape(-1)
    places = np.arange(at.N * blocks)[:, np.newaxis] * (size + by) + np.arange(size)
    read = octets[places % octets.size].reshape(at.N, blocks * size)
    return reread(weights, table.fields_of({table.tensors[0].name: np.ascontiguousarray(read)}))


def lines_wider(by: int, weights: Stored) -> Terms:
    """Lines of blocks that begin as if their blocks were some bytes longer or shorter, wrapping at the end.

    Raises:
        ValueError: the format has no blocks.
    """
    table, at = weights.table, weights.sizes
    if table.block is None:
        raise ValueError("there are no blocks")
    size, blocks = table.record.itemsize, at.K // table.block
    octets = weights.tensors[0].reshape(-1)
    places = np.arange(at.N)[:, np.newaxis] * blocks * (size + by) + np.arange(blocks * size)
    read = np.ascontiguousarray(octets[places % octets.size])
    return reread(weights, table.fields_of({table.tensors[0].name: read}))


def with_alike(names: tuple[str, ...], change: Callable[[Field, Array, Stored], Array], weights: Stored) -> Terms:
    """The numbers with the same change in several fields."""
    fields = weights.table.fields_of(weights.by_name)
    rows = [row for row in weights.table.fields if row.name in names]
    return reread(weights, {row.name: change(row, np.ascontiguousarray(fields[row.name]), weights) for row in rows})


def of_alike(format: str) -> Named:
    """Fields of scales of one type that are read as another."""
    rows = [row for row in FORMATS[format].fields if row.role == "scale" and row.dtype in FLOATS]
    names = tuple(row.name for row in rows)
    if len(rows) > 1 and len({(row.dtype, row.shape) for row in rows}) == 1:
        for name, words, change in of_types(rows[0]):
            words = words.replace(" where it is ", " where they are ")
            cause = f"The fields {' and '.join(names)} are taken {words}."
            yield f"stored-scale-{name}", cause, partial(with_alike, names, change)


def of_records(format: str) -> Named:
    table = FORMATS[format]
    if table.block is None:
        return
    for row in table.fields:
        for by in (1, -1, 2, -2, 4, -4, 8, -8, 16, -16):
            words = f"{abs(by)} bytes {'late' if by > 0 else 'early'}".replace(
                "1 bytes", "1 byte", 1 if abs(by) == 1 else 0
            )
            change = partial(record_shifted, row.name, by)
            yield "stored-field-begins-elsewhere", f"The field {row.name} is read {words}.", change
    for order in permutations(range(len(table.fields))):
        said = ", ".join(table.fields[number].name for number in order)
        yield "stored-fields-in-another-order", f"A block is read as {said}.", partial(record_reordered, order)
    for by in (1, -1, 2, -2, 4, -4):
        size = table.record.itemsize + by
        yield "stored-blocks-of-another-size", f"A block is taken to have {size} bytes.", partial(records_wider, by)
    for by in (1, -1, 2, -2, 4, -4, 8, -8, 16, -16):
        size = table.record.itemsize + by
        cause = f"Lines of blocks begin as if a block had {size} bytes; inside of a line blocks have theirs."
        yield "stored-lines-of-blocks-of-another-size", cause, partial(lines_wider, by)


@cache
def of_fields(format: str) -> tuple[tuple[str, str, Numbers], ...]:
    """All kinds of this module for one format."""
    table = FORMATS[format]
    found = list(of_records(format))
    for stride in range(1, 9):
        cause = f"Codes and zeros are taken to lie {stride} bits apart."
        found.append(("stored-codes-and-zeros-bits-apart", cause, partial(all_bits_apart, stride)))
    for row in table.fields:
        if row.dtype == "float8_e8m0fnu":
            cause = f"The bias of the exponents of {row.name} is subtracted in an unsigned byte, where it wraps."
            found.append((f"stored-{row.role}-bias-in-bytes", cause, partial(bias_in_bytes, row.name)))
        for other, each in FLOATS.items() if row.role == "codes" and row.dtype in FLOATS else ():
            if np.dtype(each.dtype) != row.numpy_dtype and np.dtype(each.dtype).itemsize == row.numpy_dtype.itemsize:
                cause = f"The field {row.name} is taken as {other} where it is {row.dtype}."
                found.append((f"stored-codes-read-as-{other}", cause, partial(units_read, row.dtype, other)))
        for name, words, change in of_field(row, table.block is not None):
            slug = f"stored-{row.role}-{name}"
            found.append((slug, f"The field {row.name} is taken {words}.", partial(with_field, row.name, change)))
    return (*found, *of_alike(format), *of_addresses(format))
