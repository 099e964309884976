"""Tensors of a checkpoint directory: which shard holds which, and reading one of them.

Large models come in *shards*, safetensors files of a few gigabytes each, with an index that says which tensor is in
which shard. A safetensors file is eight bytes that give the length of a header, the header, which lists tensors with
type, shape and position, and the data. The ``safetensors`` library checks that header: it has to be JSON, every shape
has to fill its range exactly, and the ranges have to cover the file without holes or overlaps. So a tensor's position
follows from the sizes of those before it. Here the table of all shards is compared with the index, in both directions,
before any weight is read.

**Reading** uses plain reads at that position and not a mapping: if the file shrinks meanwhile, a read gives an error
and not a fault. numpy has no bfloat16; such weights are the upper halves of float32 numbers and are read as integers.
float16 and bfloat16 convert to float32 exactly, so nothing is rounded.

**Writing** creates the whole file under its name, or no file.

Source: the safetensors format; the ``safetensors`` library checks the headers.
"""

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from math import prod
from pathlib import Path
from stat import S_IMODE
from typing import Any, BinaryIO

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from lowbit.arrays import F32, Array
from lowbit.contract.checks import spoken
from lowbit.errors import ArgumentError, FormatError, UnavailableError
from lowbit.system.json_files import Fields, read_fields
from lowbit.system.memory import check_memory
from lowbit.system.scratch import workplace
from lowbit.text import quoted

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SUFFIX = ".safetensors"
MOST_INDEX_BYTES = 2**24
MOST_NAME_BYTES = 255
"""Of a file; no system allows longer names."""
LENGTH_BYTES = 8
MOST_HEADER_BYTES = 2**23
"""Of one shard; some hundred bytes for a tensor, of which a large model has some thousand a shard."""

STORED: dict[str, np.dtype[Any]] = {"F16": np.dtype("<f2"), "BF16": np.dtype("<u2"), "F32": np.dtype("<f4")}
"""The types that weights may have, and what numpy reads each as."""
DTYPES = STORED | {"U32": np.dtype("<u4")}
"""The same with that of packed codes."""


@dataclass(frozen=True)
class Shard:
    """One safetensors file as it was when its table was read.

    Attributes:
        path: where it is.
        device: the file system that it is on.
        inode: its number there.
        size: its bytes.
        changed: when its content was last modified, in nanoseconds; any program can set this.
        status_changed: when anything about it last changed, in nanoseconds; only the system sets this.
    """

    path: Path
    device: int
    inode: int
    size: int
    changed: int
    status_changed: int

    @classmethod
    def of(cls, path: Path, status: os.stat_result) -> "Shard":
        """The file at `path`, whose status is `status`."""
        return cls(path, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


@dataclass(frozen=True)
class Place:
    """Where a tensor lies.

    Attributes:
        shard: the file.
        type: a key of `DTYPES`.
        shape: as it is stored.
        offset: bytes from the start of the file.
        sha256: digest of the tensor's bytes, with which they are compared when they are read; empty if not known.
    """

    shard: Shard
    type: str
    shape: tuple[int, ...]
    offset: int
    sha256: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of data."""
        return DTYPES[self.type].itemsize * prod(self.shape)


Table = Mapping[str, Place]
"""Every tensor of a directory by name."""


# **The table.**


def read_table(folder: Path) -> Table:
    """The tensors of all shards of a directory; index and shards have to agree.

    Raises:
        ArgumentError: the directory holds no weights, or a shard cannot be read.
        FormatError: an index that names a file outside the directory, or one that is not there; a tensor that the
            index puts elsewhere; a shard that is not a sound safetensors file.
    """
    whole, index = folder / WHOLE, folder / INDEX
    if not index.exists():
        if not whole.is_file():
            raise ArgumentError("model", quoted(str(folder)), f"a directory that holds {WHOLE} or {INDEX}")
        return shard_table(whole)
    if whole.exists():
        raise FormatError(INDEX, "weights", f"here and in {WHOLE}", f"either {INDEX} or {WHOLE}")
    listed = _listed(read_fields(index, MOST_INDEX_BYTES))
    files = sorted(set(listed.values()))
    for file in files:
        if not (folder / file).is_file():
            raise FormatError(INDEX, "weight_map", quoted(file), "files of the directory")
    table: dict[str, Place] = {}
    for file in files:
        found = shard_table(folder / file)
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
    """From each tensor to the name of its file, which has to be a plain name without a path."""
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


def shard_table(path: Path) -> Table:
    """The tensors of one safetensors file, after the library's checks of its header.

    Raises:
        ArgumentError: the file cannot be read.
        FormatError: it is not a sound safetensors file, or holds a type that is no weight's.
    """
    return read_header(path, tuple(STORED)).table


@dataclass(frozen=True)
class Header:
    """The header of a safetensors file: its tensors, and its metadata, texts by name."""

    table: Table
    metadata: Mapping[str, str]


def read_header(path: Path, types: Sequence[str]) -> Header:
    """The checked header of a safetensors file whose tensors are of these types.

    Raises:
        ArgumentError: the file cannot be read.
        FormatError: it is not a sound safetensors file, or holds another type.
    """
    if path.exists() and not path.is_file():  # a pipe would wait for somebody to write to it
        raise ArgumentError("model", quoted(str(path)), "plain files to read")
    try:
        with path.open("rb") as stream:
            status = os.fstat(stream.fileno())
            header = int.from_bytes(stream.read(LENGTH_BYTES), "little")
            if not 2 <= header <= min(MOST_HEADER_BYTES, status.st_size - LENGTH_BYTES):  # before the library maps it
                allowed = f"2 to {MOST_HEADER_BYTES} bytes inside the file of {status.st_size}"
                raise FormatError(path.name, "length of the header", header, allowed)
            with safe_open(path, framework="numpy") as opened:
                slices = {name: opened.get_slice(name) for name in opened.offset_keys()}
                claims = {name: (each.get_dtype(), tuple(each.get_shape())) for name, each in slices.items()}
                metadata = dict(opened.metadata() or {})
            shard = Shard.of(path, status)
            if {Shard.of(path, path.stat()), Shard.of(path, os.fstat(stream.fileno()))} != {shard}:
                raise _changed(shard)
    except SafetensorError as error:
        raise FormatError(path.name, "header", quoted(str(error)), "that of a safetensors file") from error
    except OSError as error:
        raise ArgumentError("model", f"{quoted(str(path))} ({error.strerror or error})", "files to read") from error
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


# **Reading.**


def read_floats(table: Table, name: str, *, transposed: bool = False) -> F32:
    """A tensor as float32, exactly; a matrix is transposed if that is asked for.

    Raises:
        FormatError: the file is not the one whose table was read, or a number is not finite.
    """
    place = table[name]
    check_memory(f"tensor {quoted(name)} of {place.shard.path.name}", place.nbytes + 4 * prod(place.shape))
    stored = _read(place, name).reshape(place.shape)
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


def _read(place: Place, name: str) -> Array:
    shard, dtype = place.shard, STORED[place.type]
    with opened_shard(shard) as stream:
        stream.seek(place.offset)
        data = np.fromfile(stream, dtype, prod(place.shape))
        check_unchanged(shard, stream)
    if data.nbytes != place.nbytes:
        raise FormatError(
            shard.path.name, f"data of tensor {quoted(name)}", f"{data.nbytes} bytes", f"{place.nbytes} bytes"
        )
    if place.sha256 and hashlib.sha256(data.data).hexdigest() != place.sha256:
        raise _changed(shard)
    return data


@contextmanager
def opened_shard(shard: Shard) -> Iterator[BufferedReader]:
    """The file whose table was read.

    Raises:
        ArgumentError: it cannot be read.
        FormatError: it has changed since, or there is another file in its place.
    """
    try:
        with shard.path.open("rb") as stream:
            check_unchanged(shard, stream)
            yield stream
    except OSError as error:
        given = f"{quoted(str(shard.path))} ({error.strerror or error})"
        raise ArgumentError("model", given, "files that can be read") from error


def check_unchanged(shard: Shard, stream: BinaryIO) -> None:
    """Refuse an open file that is not the one whose table was read, as it was then."""
    if Shard.of(shard.path, os.fstat(stream.fileno())) != shard:
        raise _changed(shard)


def _changed(shard: Shard) -> FormatError:
    return FormatError(shard.path.name, "file", "changed since it was opened", "the file of its table")


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
            part.chmod(S_IMODE(plain.stat().st_mode) & mode)  # the library's files are their owner's alone
            part.replace(path)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        remedy = "free disk space, or make the folder writeable"
        raise UnavailableError(f"writing {path.name}", f"{path.parent}: {reason}", remedy) from error
