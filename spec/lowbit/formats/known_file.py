"""Files that are read part by part: each part comes only from the file whose header was read, unchanged since then."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from lowbit.arrays import Array
from lowbit.errors import ArgumentError, FormatError
from lowbit.text import quoted


@dataclass(frozen=True)
class KnownFile:
    """A file as it was when its header was read.

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
    def of(cls, path: Path, status: os.stat_result) -> "KnownFile":
        """The file at `path`, whose status is `status`."""
        return cls(path, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)

    @contextmanager
    def opened(self) -> Iterator[BufferedReader]:
        """The file, which must be the same before and after the block.

        Raises:
            ArgumentError: it cannot be read.
            FormatError: it has changed, or there is another file in its place.
        """
        with opened(self.path) as stream:
            self.check_unchanged(stream)
            yield stream
            self.check_unchanged(stream)

    def read(self, what: str, offset: int, dtype: np.dtype[Any], count: int) -> Array:
        """Numbers of the file, read into memory: a file that shrinks meanwhile causes an error, not a fault.

        Args:
            what: a name for the numbers, for messages.
            offset: bytes from the start of the file.
            dtype: of the numbers.
            count: how many there are.

        Raises:
            ArgumentError, FormatError: as for `opened`; it ends before the last of them.
        """
        with self.opened() as stream:
            stream.seek(offset)
            data = np.fromfile(stream, dtype, count)
        if len(data) != count:
            given, allowed = f"{data.nbytes} bytes", f"{count * dtype.itemsize} bytes"
            raise FormatError(self.path.name, f"data of {what}", given, allowed)
        return data

    def check_unchanged(self, stream: BufferedReader) -> None:
        """Refuse an open file that is not this one, as it was."""
        if not self.is_open_as(stream):
            raise self.has_changed()

    def is_open_as(self, stream: BinaryIO) -> bool:
        """Whether an open file is this one, as it was."""
        return self == KnownFile.of(self.path, os.fstat(stream.fileno()))

    def has_changed(self) -> FormatError:
        """The error for a file that has changed."""
        return FormatError(self.path.name, "file", "changed since it was opened", "the file whose header was read")


@contextmanager
def opened(path: Path, wanted: str = "a plain file") -> Iterator[BufferedReader]:
    """A plain file of a model, open for reading; errors name `wanted` as the allowed value.

    Raises:
        ArgumentError: there is no such file at `path`, or it cannot be read.
    """
    if not os.path.isfile(path):  # opening a pipe would wait for a writer
        raise wrong_path("model", path, wanted)
    try:
        with path.open("rb") as stream:
            yield stream
    except OSError as error:
        given = f"{quoted(str(path))} ({error.strerror or error})"
        raise ArgumentError("model", given, "a file that can be read") from error


def wrong_path(argument: str, path: Path, wanted: str) -> ArgumentError:
    """The error for a path at which something `wanted` is required; it says what is there."""
    if os.path.isdir(path):
        what = "which is a directory"
    elif os.path.exists(path):
        what = "which is a plain file" if os.path.isfile(path) else "which is neither a plain file nor a directory"
    else:
        what = "a link to what does not exist" if os.path.lexists(path) else "which does not exist"
    given = f"{quoted(str(path))}, {what}"
    return ArgumentError(argument, given, wanted, f"{argument} is {given}; allowed: {wanted}")
