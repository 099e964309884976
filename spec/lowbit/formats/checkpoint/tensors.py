"""Tensors of a checkpoint directory: which shard holds which, and reading one of them.

Large models come in *shards*, safetensors files of a few gigabytes each, with an index that says which tensor is in
which shard. A safetensors file is eight bytes that give the length of a header, the header, which lists tensors with
type, shape and position, and the data. The ``safetensors`` library checks that header: it has to be JSON, every shape
has to fill its range exactly, and the ranges have to cover the file without holes or overlaps. So a tensor's position
follows from the sizes of those before it. What the library accepts, a tensor that stands twice in a header, and what it
does not name, ranges that overlap or end outside the file, is refused first. The table of all shards is compared with
the index, in both directions, before any weight is read.

**Reading** uses plain reads at that position and not a mapping: if the file shrinks meanwhile, a read gives an error
and not a fault. numpy has no bfloat16; such weights are the upper halves of float32 numbers and are read as integers.
float16 and bfloat16 convert to float32 exactly, so nothing is rounded.

**Writing** creates the whole file under its name, or no file.

Source: the safetensors format; the ``safetensors`` library checks the headers.
"""

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from stat import S_IMODE
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from lowbit.arrays import F32, Array
from lowbit.contract.checks import spoken
from lowbit.errors import ArgumentError, FormatError, UnavailableError
from lowbit.formats.known_file import KnownFile, opened
from lowbit.numbers.floats import FLOATS
from lowbit.system.json_files import Fields, parsed, read_fields
from lowbit.system.memory import check_memory
from lowbit.system.scratch import workplace
from lowbit.text import quoted

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SUFFIX = ".safetensors"
MOST_INDEX_BYTES = 2**24
MOST_NAME_BYTES = 255
"""The longest name of a file; no system allows longer ones."""
LENGTH_BYTES = 8
MOST_HEADER_BYTES = 2**23
"""Of one shard; some hundred bytes for a tensor, of which a large model has some thousand a shard."""

STORED: dict[str, np.dtype[Any]] = {"F16": np.dtype("<f2"), "BF16": np.dtype("<u2"), "F32": np.dtype("<f4")}
"""The types that weights may have, and their numpy dtypes."""
DTYPES = STORED | {"U32": np.dtype("<u4")}
"""The same with that of packed codes."""
CODED: dict[str, np.dtype[Any]] = {
    "F16": np.dtype("<f2"),
    "BF16": FLOATS["bfloat16"].dtype,
    "F32": np.dtype("<f4"),
    "F8_E4M3": FLOATS["float8_e4m3fn"].dtype,
    "F8_E8M0": FLOATS["float8_e8m0fnu"].dtype,
    "U8": np.dtype("u1"),
    "I8": np.dtype("i1"),
    "I32": np.dtype("<i4"),
}
"""The types of the tensors of quantised matrices, and their dtypes."""

WIDTHS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}
"""Bits of an element of every type that a safetensors file may hold."""


@dataclass(frozen=True)
class Place:
    """The location of a tensor.

    Attributes:
        shard: the file in which it is.
        type: a key of `WIDTHS`.
        shape: as it is stored.
        offset: bytes from the start of the file.
        sha256: digest of the tensor's bytes, checked when they are read; empty if not known.
    """

    shard: KnownFile
    type: str
    shape: tuple[int, ...]
    offset: int
    sha256: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of data."""
        return WIDTHS[self.type] * prod(self.shape) // 8


Table = Mapping[str, Place]
"""Every tensor of a directory by name."""


# **The table.**


def read_table(folder: Path, types: Sequence[str] = tuple(STORED)) -> Table:
    """The tensors of all shards of a directory, of these types; index and shards must agree.

    Raises:
        ArgumentError: the directory holds no weights, or a shard cannot be read.
        FormatError: an index that names a file outside the directory, or a missing one; a tensor that the index places
            elsewhere; a shard that is not a sound safetensors file.
    """
    whole, index = folder / WHOLE, folder / INDEX
    if not index.exists():
        if not whole.is_file():
            raise ArgumentError("model", quoted(str(folder)), f"a directory that holds {WHOLE} or {INDEX}")
        return read_header(whole, types).table
    if whole.exists():
        raise FormatError(INDEX, "weights", f"here and in {WHOLE}", f"either {INDEX} or {WHOLE}")
    listed = _listed(read_fields(index, MOST_INDEX_BYTES))
    files = sorted(set(listed.values()))
    for file in files:
        if not (folder / file).is_file():
            given = "no plain file" if os.path.lexists(folder / file) else "missing"
            raise FormatError(INDEX, f"shard {quoted(file)}", given, "a file of the directory")
    table: dict[str, Place] = {}
    for file in files:
        found = read_header(folder / file, types).table
        for name in found:
            if listed.get(name) != file:
                allowed = f"in {listed[name]}, says {INDEX}" if name in listed else f"the tensors that {INDEX} names"
                raise FormatError(file, "tensor", quoted(name), allowed)
        table |= found
    for name, file in listed.items():
        if name not in table:
            raise FormatError(file, f"tensor {quoted(name)}", "missing", f"there, says {INDEX}")
    return table


def _listed(fields: Fields) -> dict[str, str]:
    """The file of each tensor, which must be a plain name without a path."""
    listed: dict[str, str] = {}
    for name, file in fields.value("weight_map", dict).items():
        if not isinstance(file, str) or not _is_plain_name(file):
            raise FormatError(
                fields.file, f"weight_map[{quoted(name)}]", quoted(str(file)), f"the name of a {SUFFIX} file"
            )
        listed[name] = file
    return listed


def _is_plain_name(file: str) -> bool:
    plain = file.endswith(SUFFIX) and file.isprintable() and not set(file) & set("/\\:") and not file.startswith(".")
    return plain and len(file.encode()) <= MOST_NAME_BYTES


@dataclass(frozen=True)
class Header:
    """The header of a safetensors file: its tensors, and its metadata, texts by name."""

    table: Table
    metadata: Mapping[str, str]


def read_header(path: Path, types: Sequence[str] = tuple(STORED)) -> Header:
    """The checked header of a safetensors file whose tensors are of these types; by default those of weights.

    Raises:
        ArgumentError: the file cannot be read.
        FormatError: it is not a sound safetensors file, or holds another type.
    """
    try:
        with opened(path) as stream:
            status = os.fstat(stream.fileno())
            header = int.from_bytes(stream.read(LENGTH_BYTES), "little")
            if not 2 <= header <= min(MOST_HEADER_BYTES, status.st_size - LENGTH_BYTES):  # before the library maps it
                allowed = f"2 to {MOST_HEADER_BYTES} bytes inside the file of {status.st_size}"
                raise FormatError(path.name, "length of the header", header, allowed)
            _check_ranges(parsed(path.name, stream.read(header)), status.st_size - LENGTH_BYTES - header)
            with safe_open(path, framework="numpy") as library:
                slices = {name: library.get_slice(name) for name in library.offset_keys()}
                claims = {name: (each.get_dtype(), tuple(each.get_shape())) for name, each in slices.items()}
                metadata = dict(library.metadata() or {})
            shard = KnownFile.of(path, status)
            if {KnownFile.of(path, path.stat()), KnownFile.of(path, os.fstat(stream.fileno()))} != {shard}:
                raise shard.has_changed()
    except SafetensorError as error:
        raise FormatError(path.name, "header", quoted(str(error)), "that of a safetensors file") from error
    offset = LENGTH_BYTES + header
    table: dict[str, Place] = {}
    for name, (kind, shape) in claims.items():  # in the order of their places
        if kind not in types:
            raise FormatError(path.name, f"type of tensor {quoted(name)}", kind, spoken(types))
        table[name] = Place(shard, kind, shape, offset)
        offset += table[name].nbytes
    if offset != status.st_size:
        raise FormatError(path.name, "size", f"{status.st_size} bytes", f"the {offset} bytes of its tensors")
    return Header(table, metadata)


def _check_ranges(header: Fields, nbytes: int) -> None:
    """Refuse tensors that overlap or lie outside the file, by name; the library checks everything else.

    Args:
        header: of a safetensors file, without repeated tensors.
        nbytes: of the data after it.

    Raises:
        FormatError: there are such tensors.
    """
    tensors = ((name, each) for name, each in header.values.items() if isinstance(each, dict))
    places = [(*place, name) for name, each in tensors if (place := _range(each)) is not None]
    end, before = 0, ""
    for begin, stop, name in sorted(places):
        what, given = f"data_offsets of tensor {quoted(name)}", f"[{begin}, {stop}]"
        if begin < min(end, stop):
            raise FormatError(header.file, what, given, f"{end} or more, behind the data of {quoted(before)}")
        if stop > nbytes:
            raise FormatError(header.file, what, given, f"inside the {nbytes} bytes of data in the file")
        end, before = max(end, stop), name


def _range(tensor: Mapping[str, Any]) -> tuple[int, int] | None:
    place = tensor.get("data_offsets")
    if isinstance(place, list) and len(place) == 2 and all(type(each) is int for each in place):
        return place[0], place[1]
    return None


# **Reading.**


def read_floats(table: Table, name: str, *, transposed: bool = False) -> F32:
    """A tensor as float32, exactly; a matrix is transposed on request.

    Raises:
        FormatError: the file is not the one whose table was read, or a number is not finite.
    """
    place = table[name]
    check_memory(f"tensor {quoted(name)} of {place.shard.path.name}", place.nbytes + 4 * prod(place.shape))
    stored = _read(place, name, STORED[place.type])
    stored = stored.T if transposed else stored
    weights: F32 = np.empty(stored.shape, np.float32)
    if place.type == "BF16":  # the upper half of a float32
        bits = weights.view(np.uint32)
        bits[...] = stored
        np.left_shift(bits, 16, out=bits)
    else:
        weights[...] = stored
    finite = np.isfinite(weights)
    if not finite.all():
        bad = weights.ravel()[int(np.argmin(finite))]
        raise FormatError(place.shard.path.name, f"a number in tensor {quoted(name)}", bad, "finite numbers")
    return weights


def read_coded(table: Table, name: str) -> Array:
    """A tensor of a quantised matrix in the type in which it is stored, one of `CODED`.

    Raises:
        FormatError: another type; the file is not the one whose table was read.
    """
    place = table[name]
    if place.type not in CODED:
        raise FormatError(place.shard.path.name, f"type of tensor {quoted(name)}", place.type, spoken(list(CODED)))
    check_memory(f"tensor {quoted(name)} of {place.shard.path.name}", place.nbytes)
    dtype = CODED[place.type]
    return _read(place, name, np.dtype(f"<u{dtype.itemsize}")).view(dtype)


def _read(place: Place, name: str, dtype: np.dtype[Any]) -> Array:
    data = place.shard.read(f"tensor {quoted(name)}", place.offset, dtype, prod(place.shape))
    if place.sha256 and hashlib.sha256(data.data).hexdigest() != place.sha256:
        raise place.shard.has_changed()
    return data.reshape(place.shape)


# **Writing.**


def write_tensors(path: Path, tensors: Mapping[str, Array], metadata: Mapping[str, str], mode: int = 0o666) -> None:
    """A safetensors file, whole or not at all.

    Args:
        path: where; the folder exists.
        tensors: C-contiguous, of types that numpy has.
        metadata: texts for its header.
        mode: of the file, less the bits of the umask.

    Raises:
        UnavailableError: it cannot be written.
    """
    try:
        with workplace(path.parent) as place:
            part, plain = place / path.name, place / "plain"
            save_file(dict(tensors), part, metadata=dict(metadata))
            plain.touch()
            part.chmod(S_IMODE(plain.stat().st_mode) & mode)  # the library makes files private to their owner
            part.replace(path)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        remedy = "free disk space, or make the folder writeable"
        raise UnavailableError(
            f"file {path.name}", f"it cannot be written to {path.parent}: {reason}", remedy
        ) from error
