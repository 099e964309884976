"""Journals: a directory or file that is written part by part, and gets its name when it is complete.

Quantising a model takes minutes to hours. Its parts are written into a folder with an unguessable name beside the
destination. Each finished part is a file, and the journal, a file in that folder, holds its digest. A killed process
leaves the folder. The same command then continues it: parts whose digest still matches are kept, and the others are
made again. A folder of another command, for the same destination, is removed. While a process works in a folder it
holds a lock on it (``flock``), so two processes never share one.

When all parts are complete, everything is flushed to disk and the folder is renamed to the destination, or one of its
files is and the rest is removed. So under the final name there is everything or nothing.

**Trust.** A folder is continued only if it belongs to this user and no other user can write to it.
"""

import errno
import fcntl
import hashlib
import os
import secrets
import shutil
import stat
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from lowbit.arrays import F64, Array
from lowbit.errors import ArgumentError, FormatError, UnavailableError
from lowbit.formats.checkpoint.tensors import write_tensors
from lowbit.system.records import RESUME, read_record, write_record
from lowbit.system.scratch import LOCK_NOW, sweep
from lowbit.system.storage import SHARED, write_whole
from lowbit.text import quoted

RECORD, SUFFIX = "journal.json", ".rewriting"


@dataclass
class Journal:
    """The journal of a directory or file that is being written.

    Attributes:
        folder: where its parts are.
        destination: the final name of the result.
        call: everything that determines the output; JSON.
        parts: the digest and the note of each finished part, by the name of its file.
    """

    folder: Path
    destination: Path
    call: Mapping[str, Any]
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Of the finished parts."""
        return sum((self.folder / file).stat().st_size for file in self.parts)

    def note_of(self, file: str) -> Any:
        """The note of a finished part; None if it is not finished."""
        return self.parts[file]["note"] if file in self.parts else None

    def commit(self, file: str, tensors: Mapping[str, Array], note: Any) -> None:
        """Write a part, and record that it is finished.

        Args:
            file: its name, that of a safetensors file.
            tensors: what it holds.
            note: JSON that `note_of` gives back.

        Raises:
            UnavailableError: the disk is full, or cannot be written.
        """
        with self.told():
            self.note_part(file, write_part(self.folder / file, tensors), note)

    def note_part(self, file: str, digest: str, note: Any) -> None:
        """Record that a part written by `write_part`, perhaps in another process, is finished.

        Args:
            file: its name.
            digest: from `write_part`.
            note: JSON that `note_of` gives back.

        Raises:
            UnavailableError: as `commit`.
        """
        with self.told():
            self.parts[file] = {"sha256": digest, "note": note}
            write_record(self.folder / RECORD, self.call, self.parts)

    def discard(self, file: str) -> None:
        """Remove a part that is no longer needed, if it exists.

        Raises:
            UnavailableError: as `commit`.
        """
        with self.told():
            if self.parts.pop(file, None) is not None:
                write_record(self.folder / RECORD, self.call, self.parts)
                (self.folder / file).unlink(missing_ok=True)

    def write(self, file: str, content: bytes) -> None:
        """Write a small file.

        Raises:
            UnavailableError: as `commit`.
        """
        with self.told():
            write_whole(self.folder / file, content)

    def finish(self, result: Path, files: Collection[str]) -> None:
        """Give the result its final name.

        Args:
            result: the folder, or a file in it; in that case the rest of the folder is removed.
            files: the parts that belong to the folder; all others are removed.

        Raises:
            UnavailableError: as `commit`; the name has been taken meanwhile.
        """
        for file in set(self.parts) - set(files):
            self.discard(file)
        with self.told():
            sweep(self.folder)  # left by processes that died while writing
            if result == self.folder:
                for path in sorted(self.folder.iterdir()):
                    _synchronise(path)
                self.folder.chmod(0o777 & ~_umask())
                (self.folder / RECORD).unlink()  # last, because without it the parts would be made again
                _synchronise(self.folder)
                os.rename(self.folder, self.destination)
            else:
                _synchronise(result)
                result.chmod(0o666 & ~_umask())
                _placed(result, self.destination)
                shutil.rmtree(self.folder, ignore_errors=True)
            _synchronise(self.destination.parent)

    @contextmanager
    def told(self) -> Iterator[None]:
        """Turn system errors of the block's writing into an error of the destination.

        Raises:
            UnavailableError: the disk is full, or cannot be written.
        """
        try:
            yield
        except OSError as error:
            reason = f"it cannot be written: {error.strerror or error}"
            remedy = f"free disk space or make the folder writeable, and {RESUME}"
            raise UnavailableError(quoted(str(self.destination)), reason, remedy) from error


def write_part(path: Path, tensors: Mapping[str, Array]) -> str:
    """Write the file of a part, whole or not at all, and return its digest.

    Raises:
        UnavailableError: it cannot be written.
    """
    contiguous = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    try:
        write_tensors(path, contiguous, {"format": "pt"})
    except UnavailableError as error:
        raise UnavailableError(error.what, error.reason, f"{error.remedy}, and {RESUME}") from error
    return _digest(path)


def check_destination(destination: Path, *, is_file: bool = False) -> None:
    """Refuse a destination that exists, or in a folder that does not exist.

    Args:
        destination: the name.
        is_file: whether the result is a file, for which nothing may exist there.

    Raises:
        ArgumentError: something exists there, other than an empty directory for a directory; or the folder does not
            exist.
    """
    if not destination.absolute().parent.is_dir():
        raise ArgumentError("--out", quoted(str(destination)), "a name in a folder that exists")
    taken = destination.is_symlink() or destination.exists()
    if taken and is_file:
        raise ArgumentError("--out", quoted(str(destination)), "a name that is free")
    if taken and not (destination.is_dir() and not destination.is_symlink() and not any(destination.iterdir())):
        raise ArgumentError("--out", quoted(str(destination)), "a name that is free, or an empty directory")


@contextmanager
def journal(destination: Path, call: Mapping[str, Any], *, is_file: bool = False) -> Iterator[Journal]:
    """The folder of an interrupted process for the same call, or a new one.

    A folder without a finished part is removed at the end of the block, unless it got its final name. So is any folder
    if the block refuses an argument or the source: the same command would fail again, and a corrected source is a
    different one, for which no part would be resumed.

    Args:
        destination: the final name of the result.
        call: everything that determines the output; JSON.
        is_file: whether a file gets the name.

    Raises:
        ArgumentError: the destination exists.
        UnavailableError: its folder cannot be written.
    """
    check_destination(destination, is_file=is_file)
    destination = destination.absolute()
    for folder, descriptor in _left(destination):
        try:
            parts = _parts(folder, call)
            if parts:
                with _removed_if_refused(folder):
                    yield Journal(folder, destination, call, parts)
                return
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(descriptor)
    folder = destination.with_name(f".{destination.name[:50]}.{secrets.token_hex(8)}{SUFFIX}")
    try:
        folder.mkdir(mode=0o700)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        reason = f"{folder.parent} cannot be written: {error.strerror}"
        raise UnavailableError("a folder for the new model", reason, "name another folder") from error
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        made = Journal(folder, destination, call)
        with _removed_if_refused(folder):
            yield made
    finally:
        os.close(descriptor)
        if not made.parts:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _removed_if_refused(folder: Path) -> Iterator[None]:
    """Remove a folder if the block raises an error that the same command would raise again."""
    try:
        yield
    except (ArgumentError, FormatError):
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _left(destination: Path) -> Iterator[tuple[Path, int]]:
    """The folders for a destination left by ended processes, each locked by an open descriptor."""
    own = f".{destination.name[:50]}."
    for path in sorted(destination.parent.iterdir()):
        name = path.name
        middle = name.removeprefix(own).removesuffix(SUFFIX)
        if not (name.startswith(own) and name.endswith(SUFFIX) and len(middle) == 16):
            continue
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:  # gone, or not a folder
            continue
        status = os.fstat(descriptor)
        is_ours = status.st_uid == os.geteuid() and not stat.S_IMODE(status.st_mode) & SHARED
        if is_ours and _is_free(descriptor):
            yield path, descriptor
        else:
            os.close(descriptor)


def _is_free(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, LOCK_NOW)
    except OSError:
        return False
    return True


def _parts(folder: Path, call: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The finished parts of a folder, if it is for this call; other files are removed."""
    try:
        told = read_record(folder / RECORD, call) or {}
        parts = {file: told[file] for file in told if _is_whole(folder / file, told[file]["sha256"])}
    except (ArgumentError, FormatError, OSError, LookupError, TypeError):
        return {}
    for path in folder.iterdir():
        if path.name not in (*parts, RECORD):
            with suppress(OSError):
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    return parts


def _is_whole(path: Path, digest: str) -> bool:
    return path.is_file() and digest == _digest(path)


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _placed(file: Path, name: Path) -> None:
    """Give a file a free name, without replacing a file that takes the name meanwhile."""
    try:
        os.link(file, name)
    except FileExistsError:
        raise
    except OSError:  # a file system without links
        if name.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)) from None
        os.rename(file, name)


def _synchronise(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def read_windows(path: Path) -> list[F64]:
    """The float64 matrices of a part, in the order of their names."""
    found = load_file(path)
    return [found[name] for name in sorted(found)]
