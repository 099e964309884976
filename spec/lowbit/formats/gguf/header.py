"""Header of a GGUF file: read with every claim checked.

A GGUF file is a header and a block of tensor data. The header is a list of named values (the *metadata*) and a list of
tensors, each with a name, a shape, a type and an offset into the data:

===================== =========================================================================================
part                  bytes, little-endian
===================== =========================================================================================
magic, version        ``GGUF``, uint32: 2 or 3
counts                uint64 tensors, uint64 metadata entries
metadata entry        string key, uint32 value type, value
tensor                string name, uint32 dimensions, uint64 each of them (innermost first), uint32 type, uint64 offset
padding               to a multiple of ``general.alignment`` (32 if not given); offsets count from here
===================== =========================================================================================

A string is a uint64 length and that many bytes of UTF-8; an array is a uint32 element type, a uint64 length and the
elements. Each of these lengths is a claim of the file. A reader that allocates as much as a length says would ask for
an exabyte after one flipped bit. So each claim is compared with the bytes that are left before anything is read, and
time and memory stay in proportion to the size of the file.

Source: the GGUF specification of the ggml project.
"""

import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import BinaryIO

import numpy as np

from lowbit.arrays import Array
from lowbit.contract.checks import spoken
from lowbit.errors import FormatError
from lowbit.formats.gguf.types import BLOCKS, DEFAULT_ALIGNMENT, TensorType, ValueType
from lowbit.text import quoted

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_HEADER_BYTES = 2**25
"""The most bytes before the tensors' data; the largest vocabularies take 16 MB. A sparse file may claim any size."""
LENGTH = struct.Struct("<Q")
WINDOW = 2**20
"""Bytes of a header that are read at once for consecutive strings."""
MAX_KEY_BYTES = 2**16 - 1
MAX_NAME_BYTES = 64
MAX_DIMENSIONS = 4
MAX_ELEMENTS = 2**48
ALIGNMENTS = tuple(2**power for power in range(3, 17))

Value = bool | int | float | str | list[str] | Array
"""A metadata value; an array of numbers is a numpy array, an array of strings a list."""

SCALARS = {
    ValueType.UINT8: "<u1",
    ValueType.INT8: "<i1",
    ValueType.UINT16: "<u2",
    ValueType.INT16: "<i2",
    ValueType.UINT32: "<u4",
    ValueType.INT32: "<i4",
    ValueType.FLOAT32: "<f4",
    ValueType.BOOL: "?",
    ValueType.UINT64: "<u8",
    ValueType.INT64: "<i8",
    ValueType.FLOAT64: "<f8",
}


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of the file, checked against it.

    Attributes:
        name: unique in the file.
        shape: sizes, outermost first as in numpy; the innermost is whole blocks of its type.
        type: how the elements are stored.
        offset: bytes from the start of the file.
        nbytes: bytes of data.
    """

    name: str
    shape: tuple[int, ...]
    type: TensorType
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Header:
    """The description in a GGUF file: metadata by key, tensors by name."""

    metadata: Mapping[str, Value]
    tensors: Mapping[str, TensorInfo]


def walk(stream: BinaryIO, size: int, file: str) -> Header:
    """Read and check a header.

    Args:
        stream: at the start of the file.
        size: bytes of the file.
        file: its name, for messages.

    Raises:
        FormatError: the first claim that does not hold: field, value and what is allowed.
    """
    cursor = _Cursor(stream, min(size, MAX_HEADER_BYTES), file)
    cursor.expect("magic", cursor.take(min(size, len(MAGIC)), "magic"), (MAGIC,))
    cursor.expect("version", cursor.number("<I", "version"), VERSIONS)
    # The shortest tensor is an empty name, one dimension, a type and an offset; the shortest entry a key and a byte.
    tensor_count = cursor.length("number of tensors", least_bytes=8 + 4 + 8 + 4 + 8)
    entry_count = cursor.length("number of metadata entries", least_bytes=8 + 4 + 1)

    metadata: dict[str, Value] = {}
    for number in range(entry_count):
        key = cursor.string(f"key of metadata entry {number}", MAX_KEY_BYTES)
        if key in metadata:
            raise FormatError(file, f"key of metadata entry {number}", quoted(key), "a key that is not used before")
        metadata[key] = cursor.value(f"value of {quoted(key)}")

    claims = [_tensor_claim(cursor, number) for number in range(tensor_count)]
    alignment = _alignment(metadata, file)
    start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for name, shape, kind, offset in claims:
        if name in tensors:
            raise FormatError(file, "tensor name", quoted(name), "a name that is not used before")
        if offset % alignment != 0:
            raise FormatError(file, f"offset of tensor {quoted(name)}", offset, f"a multiple of {alignment}")
        block, block_bytes = BLOCKS[kind]
        nbytes = int(np.prod(shape, dtype=object)) // block * block_bytes
        if start + offset + nbytes > size:
            given = f"{offset} with {nbytes} bytes of data"
            raise FormatError(file, f"offset of tensor {quoted(name)}", given, f"inside the file of {size} bytes")
        tensors[name] = TensorInfo(name, shape, kind, start + offset, nbytes)
    _check_overlap(tensors, file)
    return Header(MappingProxyType(metadata), MappingProxyType(tensors))


# **Tensors.** Shape and type are checked first; whether the data lie inside the file is known only at the end of the
# header.


def _tensor_claim(cursor: "_Cursor", number: int) -> tuple[str, tuple[int, ...], TensorType, int]:
    """Name, shape (outermost first), type and offset as the file gives them; sizes fit the type."""
    name = cursor.string(f"name of tensor {number}", MAX_NAME_BYTES)
    who = f"tensor {quoted(name)}"
    dimensions = cursor.number("<I", f"number of dimensions of {who}")
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise FormatError(cursor.file, f"number of dimensions of {who}", dimensions, f"1 to {MAX_DIMENSIONS}")
    sizes = [cursor.number("<Q", f"dimension {axis} of {who}") for axis in range(dimensions)]
    elements = 1
    for axis, size in enumerate(sizes):
        elements *= size
        if not 1 <= elements <= MAX_ELEMENTS:
            given = f"{size}, {elements} elements so far"
            raise FormatError(cursor.file, f"dimension {axis} of {who}", given, f"1 to {MAX_ELEMENTS} elements")
    raw = cursor.number("<I", f"type of {who}")
    if raw not in set(TensorType):
        raise FormatError(cursor.file, f"type of {who}", raw, "a type that the gguf package knows")
    kind = TensorType(raw)
    block = BLOCKS[kind][0]
    if sizes[0] % block != 0:
        allowed = f"a multiple of {block}, a block of {kind.name}"
        raise FormatError(cursor.file, f"dimension 0 of {who}", sizes[0], allowed)
    return name, tuple(reversed(sizes)), kind, cursor.number("<Q", f"offset of {who}")


def _alignment(metadata: Mapping[str, Value], file: str) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is int and alignment in ALIGNMENTS:
        return alignment
    raise FormatError(file, "general.alignment", quoted(str(alignment)), spoken(ALIGNMENTS))


def _check_overlap(tensors: Mapping[str, TensorInfo], file: str) -> None:
    ordered = sorted(tensors.values(), key=lambda info: info.offset)
    for before, after in pairwise(ordered):
        if after.offset < before.offset + before.nbytes:
            field, allowed = f"offset of tensor {quoted(after.name)}", f"beyond the data of {quoted(before.name)}"
            raise FormatError(file, field, after.offset, allowed)


# **The cursor** reads from front to back and never past the end of the file.


def _strings_of(window: bytes, count: int, found: list[str]) -> int:
    """Append the strings at the start of these bytes, until there are `count`, or one is cut off or not UTF-8. Returns
    the number of bytes read."""
    start, last = 0, len(window) - LENGTH.size
    with suppress(UnicodeDecodeError):
        while len(found) < count and start <= last:
            first = start + LENGTH.size
            end = first + LENGTH.unpack_from(window, start)[0]
            if end > len(window):
                break
            found.append(window[first:end].decode())
            start = end
    return start


class _Cursor:
    """A position in the file, with reads that are checked against the bytes left for a header."""

    def __init__(self, stream: BinaryIO, size: int, file: str) -> None:
        self.stream, self.size, self.file, self.position = stream, size, file, 0

    def take(self, count: int, field: str) -> bytes:
        """The next `count` bytes."""
        left = self.size - self.position
        data = self.stream.read(count) if count <= left else b""
        if len(data) != count:
            raise FormatError(self.file, field, f"{count} bytes long", f"at most the {left} bytes that are left")
        self.position += count
        return data

    def number(self, form: str, field: str) -> int:
        """An unsigned integer in the format of `struct`."""
        return int(struct.unpack(form, self.take(struct.calcsize(form), field))[0])

    def length(self, field: str, least_bytes: int) -> int:
        """A count of items that each take at least `least_bytes` of the remaining bytes."""
        count, most = self.number("<Q", field), (self.size - self.position) // least_bytes
        if count > most:
            raise FormatError(self.file, field, count, f"at most {most} in the bytes that are left")
        return count

    def string(self, field: str, most_bytes: int | None = None) -> str:
        """A string of UTF-8."""
        count = self.length(f"length of {field}", least_bytes=1)
        if most_bytes is not None and count > most_bytes:
            raise FormatError(self.file, f"length of {field}", count, f"at most {most_bytes} bytes")
        data = self.take(count, field)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            byte = f"byte 0x{data[error.start]:02x} at {error.start}"
            raise FormatError(self.file, field, byte, "UTF-8") from error

    def value(self, field: str) -> Value:
        """A metadata value of any type, with its type before it."""
        kind = self._value_type(field)
        if kind == ValueType.STRING:
            return self.string(field)
        if kind == ValueType.ARRAY:
            return self._array(field)
        return self._numbers(kind, 1, field)[0].item()  # type: ignore[no-any-return]  # numpy types item() as Any

    def _array(self, field: str) -> Value:
        kind = self._value_type(f"element type of {field}")
        if kind == ValueType.ARRAY:
            raise FormatError(self.file, f"element type of {field}", "an array", "numbers or strings")
        if kind == ValueType.STRING:
            count = self.length(f"length of {field}", least_bytes=8)
            return self._strings(count, field)
        count = self.length(f"length of {field}", least_bytes=np.dtype(SCALARS[kind]).itemsize)
        return self._numbers(kind, count, field)

    def _strings(self, count: int, field: str) -> list[str]:
        """Strings, perhaps millions: each read yields many, and a name is made only for a string that is refused or
        longer than a read."""
        found: list[str] = []
        while len(found) < count:
            window = self.stream.read(min(WINDOW, self.size - self.position))
            taken = _strings_of(window, count, found)
            self.position += taken
            self.stream.seek(self.position)
            if taken == 0:
                found.append(self.string(f"element {len(found)} of {field}"))
        return found

    def _numbers(self, kind: ValueType, count: int, field: str) -> Array:
        dtype = np.dtype(SCALARS[kind])
        data = self.take(count * dtype.itemsize, field)
        if kind == ValueType.BOOL and max(data, default=0) > 1:
            raise FormatError(self.file, field, max(data), "0 or 1 for a boolean")
        return np.frombuffer(data, dtype)

    def _value_type(self, field: str) -> ValueType:
        raw = self.number("<I", f"type of {field}")
        if raw not in set(ValueType):
            raise FormatError(self.file, f"type of {field}", raw, f"0 to {max(ValueType)}")
        return ValueType(raw)

    def expect(self, field: str, given: object, allowed: tuple[object, ...]) -> None:
        """Refuse a value that is not one of the allowed ones."""
        if given not in allowed:
            raise FormatError(self.file, field, given, spoken(allowed))
