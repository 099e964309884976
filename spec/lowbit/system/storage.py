"""Storage: where lowbit keeps files, how they are written, and which of them it may load.

**Where.** Everything is kept in one folder, `cache_folder`: the user's cache folder for lowbit, or the one that the
environment variable ``LOWBIT_CACHE`` names. `make_folder` creates it and its parents so that only this user can enter.

**Writing.** `write_whole` and `written` create a file under an unguessable temporary name in its folder, and rename it
when it is complete. So a reader sees the old file or the new one, an interrupt leaves nothing, and a symbolic link that
somebody placed under the name is replaced, not followed.

**Trust.** A published file is compared with the digest that lowbit's source states. What lowbit has made itself,
compiled code and quantised weights, cannot be checked in that way: a user who can write the file can also write its
digest. So it is kept only where no other user can write. `own_folder` creates such a folder with mode 0700 and refuses
any other: the folder and each folder above it must belong to this user or to root, and no other user may be able to
replace any of them. A folder that others can write to is refused and not repaired, since they may have written to it
already. In such a folder `opened_own` opens only plain files of this user or of root that no other user can write to: a
file may have been placed there while the folder was open to others, and the target of a link can be changed by its
owner at any time. `kept_code` keeps a digest beside each compiled file and compares it before every use, so that a
damaged file is made again. Two processes that make the same file at the same time may leave the file of one and the
digest of the other; then the next use makes it once more.
"""

import errno
import hashlib
import os
import secrets
import shlex
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import IO

from platformdirs import user_cache_dir

from lowbit.errors import UnavailableError
from lowbit.system.scratch import TEMPORARY_SUFFIX, sweep, workplace

CACHE_VARIABLE = "LOWBIT_CACHE"
CODE = "the cache of compiled code"
SHARED = stat.S_IWGRP | stat.S_IWOTH  # the permission bits that let other users write
OWN_MODE = 0o644  # of files for `opened_own`, less the bits of the umask
NO_HOME = Path("/nonexistent/lowbit")  # for a user without a home folder; writing then fails with an error


def cache_folder() -> Path:
    """The folder in which lowbit keeps files; it may not exist yet."""
    if named := os.environ.get(CACHE_VARIABLE):
        return Path(named).absolute()
    try:
        usual = Path(user_cache_dir("lowbit", appauthor=False))
    except RuntimeError:  # in later versions; earlier ones return "~"
        return NO_HOME
    return NO_HOME if usual.parts[0] == "~" else usual.absolute()


def make_folder(folder: Path) -> None:
    """Create a folder of the cache, and its missing parents, with mode 0700 regardless of the umask.

    Raises:
        OSError: it cannot be created, or a file is in its place.
    """
    for place in (*reversed(folder.parents), folder):
        if not place.is_dir():
            with suppress(FileExistsError):  # another process was faster
                place.mkdir(mode=0o700)
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))


# **Writing.**


@contextmanager
def written(path: Path, mode: int = 0o666) -> Iterator[IO[bytes]]:
    """A stream for the content of `path`, which replaces the file when the block ends without an exception.

    Args:
        path: the file; its folder exists.
        mode: of the file, less the bits of the umask.

    Raises:
        OSError: the folder does not exist or cannot be written, the disk is full, or the path is a device or a pipe.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):  # renaming onto a folder fails later
        raise OSError(errno.EINVAL, "not a plain file", str(path))
    temporary = path.with_name(f".{path.name[:50]}.{secrets.token_hex(8)}{TEMPORARY_SUFFIX}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, mode)
    try:
        with open(descriptor, "wb") as stream:
            yield stream
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def write_whole(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Write a file, completely or not at all; arguments and errors as `written`."""
    with written(path, mode) as stream:
        stream.write(content)


# **Trust.**


def code_folder(name: str) -> Path:
    """The folder `name` of the cache, for executable files: an `own_folder`.

    Raises:
        UnavailableError: it cannot be created, or another user can write to it or replace it.
    """
    return own_folder(cache_folder() / name, CODE)


def own_folder(folder: Path, what: str) -> Path:
    """A folder in which no other user can write; created with mode 0700 if it does not exist.

    Symbolic links are resolved, so that the checked folder is the one used.

    Args:
        folder: where.
        what: the kind of files kept there, for errors.

    Raises:
        UnavailableError: it cannot be created, or another user can write to it or replace it.
    """
    remedy = f"name a folder that only you can write to in {CACHE_VARIABLE}"
    try:
        make_folder(folder)
        real = folder.resolve(strict=True)
        for place in (real, *real.parents):
            _check_ours(place, what, remedy, sticky_allowed=place != real)
    except OSError as error:
        raise UnavailableError(what, f"{error.filename or folder}: {error.strerror}", remedy) from error
    return real


def _check_ours(place: Path, what: str, remedy: str, *, sticky_allowed: bool) -> None:
    """Ensure that no other user can replace the contents of a folder.

    If `sticky_allowed`, others may add entries to a folder with a sticky bit, because they cannot replace those of this
    user.
    """
    found = place.stat()
    if found.st_uid not in (0, os.geteuid()):
        raise UnavailableError(what, f"{place} belongs to user {found.st_uid}", remedy)
    if found.st_mode & SHARED and not (sticky_allowed and found.st_mode & stat.S_ISVTX):
        reason = f"other users can write to {place} (mode {stat.S_IMODE(found.st_mode):o})"
        if found.st_uid == os.geteuid():
            remedy = f"remove what they may have put there and run `chmod go-w {shlex.quote(str(place))}`, or {remedy}"
        raise UnavailableError(what, reason, remedy)


def kept_code(folder: Path, name: str, make: Callable[[Path], object]) -> Path:
    """A compiled file of the cache, made if it is missing or does not match the digest beside it.

    Args:
        folder: from `code_folder`.
        name: of the file; it holds a digest of everything that determines the content.
        make: writes the file to a given path, in a new folder of its own.

    Raises:
        OSError: the folder cannot be written.
        Exception: whatever `make` raises.
    """
    path, record = folder / name, record_of(folder / name)
    for taken in (path, record):
        if taken.is_dir() and not taken.is_symlink():  # a folder could not be replaced after minutes of work
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(taken))
    if not _matches(path, record):
        sweep(folder)
        with workplace(folder) as place:
            made, noted = place / name, place / "digest"
            make(made)
            made.chmod(0o700)  # compilers follow the umask, which may let a group write
            content = made.read_bytes()
            write_whole(noted, _noted(len(content), hashlib.sha256(content).hexdigest()), OWN_MODE)
            os.replace(made, path)
            os.replace(noted, record)
    return path


def record_of(path: Path) -> Path:
    """The file with the digest of a file that `kept_code` made."""
    return path.with_name(f"{path.name}.sha256")


def _matches(path: Path, record: Path) -> bool:
    """Whether a kept file is a plain file of this user with the size and digest recorded when it was made."""
    try:
        with opened_own(path) as stream, opened_own(record) as noted:
            size, told = os.fstat(stream.fileno()).st_size, noted.read(100)
            if not told.startswith(_noted(size, "")):  # so that a sparse file of a terabyte is not read
                return False
            return told == _noted(size, hashlib.file_digest(stream, "sha256").hexdigest())
    except OSError:
        return False


def _noted(size: int, digest: str) -> bytes:
    """The content of the record of a kept file."""
    return f"{size} {digest}".encode()


def opened_own(path: Path) -> BufferedReader:
    """A file of an `own_folder`, open for reading.

    Raises:
        OSError: it cannot be read, is not a plain file of this user or of root, has a second name, or can be written
            by others.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    found = os.fstat(descriptor)
    is_ours = stat.S_ISREG(found.st_mode) and found.st_uid in (0, os.geteuid()) and found.st_nlink == 1
    if not is_ours or found.st_mode & SHARED:
        os.close(descriptor)
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(path))
    return open(descriptor, "rb")


def read_own(path: Path, most_bytes: int) -> bytes:
    """All of a file that `opened_own` opens.

    Raises:
        OSError: as for `opened_own`, or it is larger than `most_bytes`.
    """
    with opened_own(path) as stream:
        if os.fstat(stream.fileno()).st_size > most_bytes:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
        return stream.read(most_bytes)
