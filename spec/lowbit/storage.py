"""The files that lowbit keeps: where they are, how they are written, and which of them may be run.

**Where.** Everything is kept in one folder, `cache_folder`: the user's cache folder for lowbit, or the one that the
environment variable ``LOWBIT_CACHE`` names.

**Writing.** `write_whole` and `written` create a file under a temporary name that nobody can guess, in the folder of
the file, and rename it when all of it is on the disk. So a reader sees the old file or the new one, an interrupt leaves
nothing, and a symbolic link that somebody placed under the name is replaced, not followed.

**Running.** Data from the cache is checked before it is used. Code cannot be checked in that way: whoever may write the
code may write its digest too. So compiled files are kept only where no other user can write. `code_folder` creates such
a folder with mode 0700 and refuses any other: the folder and each folder above it must belong to this user or to root,
and no other user may be able to replace any of them. `kept_code` keeps a digest beside each compiled file and compares
it before every use, so that a damaged file is made again.
"""

import hashlib
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from platformdirs import user_cache_dir

from lowbit.errors import UnavailableError

CACHE_VARIABLE = "LOWBIT_CACHE"
TEMPORARY_SUFFIX = ".part"
SHARED = stat.S_IWGRP | stat.S_IWOTH  # the permission bits that let other users write


def cache_folder() -> Path:
    """The folder in which lowbit keeps files; it may not exist yet."""
    return Path(os.environ.get(CACHE_VARIABLE) or user_cache_dir("lowbit", appauthor=False)).absolute()


# **Writing.**


@contextmanager
def written(path: Path) -> Iterator[IO[bytes]]:
    """A stream for the content of `path`, which replaces the file when the block ends without an exception.

    Raises:
        OSError: the folder does not exist or cannot be written, or the disk is full.
    """
    temporary = path.with_name(f".{path.name[:100]}.{secrets.token_hex(8)}{TEMPORARY_SUFFIX}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, 0o666)
    try:
        with open(descriptor, "wb") as stream:
            yield stream
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def write_whole(path: Path, content: bytes) -> None:
    """Write a file, all of it or nothing.

    Raises:
        OSError: the folder does not exist or cannot be written, or the disk is full.
    """
    with written(path) as stream:
        stream.write(content)


# **Running.**


def code_folder(name: str) -> Path:
    """The folder `name` of the cache, for files that are run; created with mode 0700 if it does not exist.

    Raises:
        UnavailableError: it cannot be created, or another user can write to it or replace it.
    """
    folder = cache_folder() / name
    remedy = f"name a folder that only you can write to in {CACHE_VARIABLE}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        reason = replaceable_by_others(folder)
    except OSError as error:
        raise UnavailableError("the cache of compiled code", f"{folder}: {error.strerror}", remedy) from error
    if reason:
        raise UnavailableError("the cache of compiled code", reason, remedy)
    return folder


def replaceable_by_others(path: Path) -> str:
    """Why another user could replace `path` or what is in it; empty if nobody but this user and root can.

    A symbolic link anywhere in the path is resolved first, and the folders of its target are the ones that count.

    Raises:
        OSError: the path does not exist.
    """
    real = path.resolve(strict=True)
    for place in (real, *real.parents):
        found = place.stat()
        if found.st_uid not in (0, os.geteuid()):
            return f"{place} belongs to user {found.st_uid}"
        sticky = bool(found.st_mode & stat.S_ISVTX) and place != real  # others may add entries and not replace ours
        if found.st_mode & SHARED and not sticky:
            return f"other users can write to {place} (mode {stat.S_IMODE(found.st_mode):o})"
    return ""


def kept_code(folder: Path, name: str, make: Callable[[Path], object]) -> Path:
    """A compiled file of the cache, made if it is missing or does not match the digest beside it.

    Args:
        folder: from `code_folder`.
        name: of the file; it holds a digest of everything that the content follows from.
        make: writes the file to the path that it is given, in a new folder of its own.

    Raises:
        OSError: the folder cannot be written.
        Exception: whatever `make` raises.
    """
    path, record = folder / name, folder / f"{name}.sha256"
    if not _matches(path, record):
        workplace = folder / f".{secrets.token_hex(8)}{TEMPORARY_SUFFIX}"
        workplace.mkdir(mode=0o700)
        try:
            made = workplace / name
            make(made)
            digest = hashlib.sha256(made.read_bytes()).hexdigest()
            os.replace(made, path)
            write_whole(record, digest.encode())
        finally:
            for leftover in workplace.iterdir():
                leftover.unlink()
            workplace.rmdir()
    return path


def _matches(path: Path, record: Path) -> bool:
    """Whether a kept file is a plain file of this user with the digest that was noted when it was made."""
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with open(os.open(path, flags), "rb") as stream, open(os.open(record, flags), "rb") as noted:
            status = os.fstat(stream.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_uid not in (0, os.geteuid()) or status.st_mode & SHARED:
                return False
            return hashlib.file_digest(stream, "sha256").hexdigest().encode() == noted.read(100)
    except OSError:
        return False
