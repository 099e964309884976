"""The file of a kept step, and the step made from it.

A file consists of a line with the digest of the header, a line with its length, the header in JSON, and the arrays,
each at a multiple of `ALIGNMENT`. The header has the digest of each `PART` of the arrays, so that several threads can
check them. The file is in a folder to which no other user can write, and is used only if all digests match. Those of
the arrays are not computed again while the file is known to be unchanged (`lowbit.formats.digests`). The arrays are
read into memory on huge pages, which a mapped file does not get.
"""

import hashlib
import json
import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from lowbit.arrays import U8, U64, Array
from lowbit.formats.digests import is_quiet, keep, kept
from lowbit.formats.known_file import KnownFile
from lowbit.system.memory import check_memory
from lowbit.system.storage import OWN_MODE, opened_own, written
from lowbit.system.threads import side_by_side, usable_processors
from lowbit_cppyy.kept.libraries import RUNS, Library, create, running
from lowbit_cppyy.kept.recorder import FIRST_NAME, POOL, Recording
from lowbit_cppyy.layout.memory import ALIGNMENT, huge

DIGITS = 64  # of a digest
LONGEST_HEADER = 2**28  # bytes
PART = 2**23  # bytes
WORDS = np.dtype(np.int64)
STEP, HEADER = "step", "header"
"""The kind and the name under which the digest of a header is kept once its arrays have been checked."""


@dataclass(frozen=True)
class Image:
    """A kept step.

    Attributes:
        header: as passed to `write`, in the types of JSON.
        arrays: in memory.
    """

    header: Mapping[str, Any]
    arrays: list[Array]


def written_image(
    path: Path, recording: Recording, arrays: Sequence[Array], header: Callable[[], Mapping[str, Any]]
) -> Image:
    """Write the file of a step, and return the step.

    Args:
        path: of the file, in a folder that only this user can write.
        recording: of the step; its kernels are not in the file.
        arrays: further arrays, which follow those of the recording.
        header: further entries; called after the arrays are copied.

    Raises:
        OSError: the folder cannot be written, or the disk is full.
        UnavailableError: what `header` raises.
    """
    every = [np.ascontiguousarray(array) for array in (*recording.arrays, *arrays)]
    sizes = [-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in every]
    *starts, end = accumulate(sizes, initial=0)
    check_memory(f"the kept step {path.name}", end)
    room = huge(end)
    for array, start, size in zip(every, starts, sizes, strict=True):
        room[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
        room[start + array.nbytes : start + size] = 0
    places = [
        {"dtype": array.dtype.name, "shape": array.shape, "start": start}
        for array, start in zip(every, starts, strict=True)
    ]
    parts = side_by_side(lambda start: _digest(room[start : start + PART]), range(0, end, PART), usable_processors())
    own = {"names": recording.names, "calls": [asdict(call) for call in recording.calls], "arrays": places}
    text = json.dumps({**header(), **own, "parts": parts, "bytes": end}).encode()
    with written(path, OWN_MODE) as stream:
        stream.write(b"%s\n%d\n%s" % (hashlib.sha256(text).hexdigest().encode(), len(text), text))
        stream.write(room.data)
    return _image(json.loads(text), room)


def read(path: Path) -> Image | None:
    """The step in a file; None if there is no file, or not a complete one that this user wrote.

    Raises:
        UnavailableError: there is too little memory for it.
    """
    try:
        with opened_own(path) as stream:
            told, length = stream.readline(DIGITS + 1), int(stream.readline(20))
            text = stream.read(length) if 0 < length <= LONGEST_HEADER else b""
            digest = hashlib.sha256(text).hexdigest()
            if told != digest.encode() + b"\n":
                return None
            header, first = json.loads(text), stream.tell()
            file, size, parts = KnownFile.of(path, os.fstat(stream.fileno())), header["bytes"], header["parts"]
            if file.size != first + size:
                return None
            check_memory(f"the kept step {path.name}", size)
            room = huge(size)
            is_known = kept(file, STEP, [HEADER]) == {HEADER: digest}
            lasting, began = not is_known and is_quiet(file), time.time_ns()

            def right(number: int) -> bool:
                part = room[number * PART : (number + 1) * PART]
                count = os.preadv(stream.fileno(), [part.data], first + number * PART)
                return count == part.nbytes and (is_known or _digest(part) == parts[number])

            if not all(side_by_side(right, range(len(parts)), usable_processors())):
                return None
            if not file.is_open_as(stream):
                return None
            if lasting:
                keep(file, STEP, began, {HEADER: digest})
    except (OSError, ValueError):
        return None
    return _image(header, room)


def _digest(part: U8) -> str:
    return hashlib.sha256(part.data).hexdigest()


def _image(header: Mapping[str, Any], room: U8) -> Image:
    return Image(header, [_array(place, room) for place in header["arrays"]])


def _array(place: Mapping[str, Any], room: U8) -> Array:
    dtype, shape, start = np.dtype(place["dtype"]), tuple(place["shape"]), place["start"]
    count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    array: Array = room[start : start + count].view(dtype).reshape(shape)
    return array


class KeptParts:
    """The arguments of a step, made from an image; see `lowbit_cppyy.step.parts.StepParts`.

    Raises:
        MissingError: a library is missing or damaged.
    """

    def __init__(self, folder: Path, image: Image, threads: int) -> None:
        header = image.header
        self._addresses: dict[str, int] = {}
        self._pool = 0
        self._kept: list[object] = [image]
        for name, entries in header["libraries"]:
            library = Library(folder, name, entries)
            self._kept.append(library)
            self._addresses |= library.addresses
        self._made = self._replayed(image, threads)
        weakref.finalize(self, _destroy, self._destroyers(image)).atexit = False
        self.keys = header["keys"]
        self.model = self._made[header["model"] - FIRST_NAME]
        self._tables: dict[tuple[int, bool], int] = {
            tuple(key): self._made[name - FIRST_NAME] for key, name in header["tables"]
        }
        self.run, self.run_on, self.run_batch, self.score, self.choose = (
            running(name, self._addresses[name]) for name in RUNS
        )

    def address(self, array: Array) -> int:
        """The address of an array for the step; the caller keeps the array alive."""
        return int(array.ctypes.data)

    @contextmanager
    def written(self, arrays: Sequence[Array]) -> Iterator[U64]:
        """As `StepParts.written`."""
        yield np.array([self.address(each) for each in arrays], np.uint64)

    def table_of(self, purpose: int, *, exact: bool = False) -> int:
        """As `StepParts.table_of`."""
        return self._tables[purpose, exact]

    def stop(self) -> None:
        """End the threads; later calls raise an error."""
        create(self._addresses["stop_pool"], [self._pool])

    def _destroyers(self, image: Image) -> list[tuple[int, int]]:
        """The objects that were created, the last first: the address of the function that frees each, and its own."""
        made = [value for (kind, _), value in zip(image.header["names"], self._made, strict=True) if kind == "made"]
        functions = [call["function"].replace("create_", "destroy_", 1) for call in image.header["calls"]]
        return [(self._addresses[name], value) for name, value in zip(functions, made, strict=True)][::-1]

    def _known(self, image: Image, kind: str, which: Any) -> int:
        """The value of a name before any call: the address of a kernel or an array; 0 for an object not yet created."""
        if kind == "kernel":
            return self._addresses[which]
        return int(image.arrays[which].ctypes.data) if kind == "array" else 0

    def _replayed(self, image: Image, threads: int) -> list[int]:
        """Repeat the calls, and return the value of each name."""
        header = image.header
        values = [self._known(image, kind, which) for kind, which in header["names"]]
        places = {which: n for n, (kind, which) in enumerate(header["names"]) if kind == "made"}

        def actual(number: int) -> int:
            return number if number < FIRST_NAME else values[number - FIRST_NAME]

        def argument(given: int | list[int]) -> int | Array:
            return np.array([actual(number) for number in given], WORDS) if isinstance(given, list) else actual(given)

        for n, call in enumerate(header["calls"]):
            arguments: list[int | Array] = [argument(each) for each in call["arguments"]]
            if call["function"] == POOL:
                arguments = [threads]
            made = create(self._addresses[call["function"]], arguments)
            values[places[n]] = made
            if call["function"] == POOL:
                self._pool = made
        return values


def _destroy(objects: Sequence[tuple[int, int]]) -> None:
    for function, made in objects:
        create(function, [made])
