"""Digests of files and of parts of them: what a file holds, whatever its name and its times are.

Two files can have the same name, size and time and hold different weights: containers and archives normalise times,
and ``cp -p`` keeps them. So what lowbit keeps for a model is named by a digest of the model's bytes.

**Reading 90 GB takes minutes**, and a file of 100 MB takes a third of a second on a processor that has no instructions
for SHA-256. So digests are kept, in a folder that only this user can write to. They are used again only if the file has
not changed since, which a time stamp alone does not prove. All of this must hold:

- Device, inode, size, time of modification and time of change are the same, each to the nanosecond. A program can set
  the time of modification; the system alone sets the time of change.
- The time of change is at least `SETTLED_NS` older than the moment at which reading began. A file can change twice
  within one tick of the file system's clock, and the second change then leaves no trace.
- No process had the file open for writing when reading began, and what programs had written through a mapping was
  written out before (`is_quiet`). The first write to a page of a mapping sets the times, the next ones do not until the
  page has been written out; and a long call of ``write`` sets them once, when it begins.
- Neither time is in the future. If the clock was set back, times do not show the order of events.
- The file system is one of `TRUSTED`, and the time of change is not a whole second. A network or image file system may
  report a time of change that is not real.

In any other case the file is read again. A record that is damaged, incomplete or for another file is ignored.
"""

import fcntl
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import BinaryIO

from lowbit.errors import ArgumentError, FormatError, UnavailableError
from lowbit.formats.known_file import KnownFile
from lowbit.system.json_files import parsed
from lowbit.system.storage import OWN_MODE, code_folder, read_own, write_whole

FOLDER = "digests"
FORMAT = "lowbit digests 1"
MOST_RECORD_BYTES = 2**24
SETTLED_NS = 2 * 10**9
SECOND_NS = 10**9
CHUNK = 2**20
LARGE = 2**22
"""The least bytes of a file whose digest is kept: a smaller file is read as fast as a record."""
FILE = "file"
"""The name under which the digest of a whole file is kept."""
TRUSTED = frozenset({"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs"})
"""File systems whose kernel sets the time of change of each file itself."""


# **Of a whole file.**


def digest(file: KnownFile) -> str:
    """The SHA-256 of a file, in hexadecimal digits, as `digest_of` finds it.

    Raises:
        ArgumentError, FormatError: as for `KnownFile.opened`.
    """
    with file.opened() as stream:
        return digest_of(file, stream)


def digest_of(file: KnownFile, stream: BinaryIO, each: Callable[[int], object] = lambda done: None) -> str:
    """The SHA-256 of a file that is open.

    It is computed once for a file that does not change. Other threads that ask meanwhile wait for the result.

    Args:
        file: which the stream reads.
        stream: at the start of the file.
        each: called after each piece with the bytes read so far; not at all if the digest is known.
    """
    with _COMPUTING:
        known = _DIGESTS.get(file) or (kept(file, FILE, [FILE]).get(FILE) if file.size >= LARGE else None)
        if known is None:
            lasting = file.size >= LARGE and is_quiet(file)
            began, known = time.time_ns(), _read(stream, each)
            if lasting:
                keep(file, FILE, began, {FILE: known})
            if began - file.status_changed <= SETTLED_NS or not file.is_open_as(stream):
                return known
        _DIGESTS[file] = known
        return known


def _read(stream: BinaryIO, each: Callable[[int], object]) -> str:
    found, done = hashlib.sha256(), 0
    while chunk := stream.read(CHUNK):
        found.update(chunk)
        done += len(chunk)
        each(done)
    return found.hexdigest()


_DIGESTS, _COMPUTING = dict[KnownFile, str](), Lock()


def _anew() -> None:
    """Give a forked process its own lock: this one may be held by a thread that the process lacks."""
    global _COMPUTING
    _COMPUTING = Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_anew)


# **What is kept.**


def settled(file: KnownFile, began: int) -> bool:
    """Whether a later change of the file would change its time stamps, if it was read from `began` on."""
    changed = file.status_changed
    return changed + SETTLED_NS <= began <= time.time_ns() and changed % SECOND_NS != 0


def is_quiet(file: KnownFile) -> bool:
    """Whether every later change of the file will set its time of change; False if it has changed already.

    The system grants a read lease only if no process has the file open for writing. It grants it to the owner of the
    file and to root, and refuses any other user. An overlay forgets a writer that has closed its file and kept its
    mapping, so what is mapped is also written out: the next write to such a page sets the time.
    """
    with suppress(ArgumentError, FormatError, OSError), file.opened() as stream:
        if sys.platform != "linux" or not has_own_times(stream):
            return False
        os.fsync(stream.fileno())
        fcntl.fcntl(stream, fcntl.F_SETSIG, signal.SIGURG)  # sent if a writer opens the file now; ignored by default
        fcntl.fcntl(stream, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(stream, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        return True
    return False


def has_own_times(stream: BinaryIO) -> bool:
    """Whether an open file is on a file system whose times of change can be relied on."""
    try:
        details = Path(f"/proc/self/fdinfo/{stream.fileno()}").read_text()
        mount = next(line.split()[1] for line in details.splitlines() if line.startswith("mnt_id:"))
        for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines():
            own, _, described = line.partition(" - ")
            if own.split()[0] == mount:
                return described.split()[0] in TRUSTED
    except (OSError, LookupError, StopIteration):
        pass
    return False


def _record(file: KnownFile, of: str) -> Path:
    """The file that keeps the digests of a file.

    Raises:
        UnavailableError: there is no folder that only this user can write to.
    """
    return code_folder(FOLDER) / f"{file.device:x}-{file.inode:x}-{of}.json"


def _stamps(file: KnownFile) -> list[int]:
    return [file.device, file.inode, file.size, file.changed, file.status_changed]


def keep(file: KnownFile, of: str, began: int, digests: Mapping[str, str]) -> None:
    """Keep digests if they can be used again; otherwise the file is read again the next time.

    Args:
        file: that was read.
        of: the kind of digests, such as `FILE`, in letters.
        began: when reading began, in nanoseconds.
        digests: by name; SHA-256 in hexadecimal digits.
    """
    content = {"format": FORMAT, "file": [str(stamp) for stamp in _stamps(file)], "of": of, "began": str(began)}
    text = json.dumps(content | {"digests": dict(digests)}, sort_keys=True)
    whole = json.dumps({"record": text, "sha256": hashlib.sha256(text.encode()).hexdigest()})
    with suppress(ArgumentError, FormatError, UnavailableError, OSError):
        with file.opened() as stream:
            lasting = settled(file, began) and has_own_times(stream)
        if lasting:
            write_whole(_record(file, of), whole.encode(), OWN_MODE)


def kept(file: KnownFile, of: str, names: Iterable[str]) -> dict[str, str]:
    """The digests that were kept, if their record is valid, has just these names, and the file has not changed."""
    try:
        path = _record(file, of)
        outer = parsed(path.name, read_own(path, MOST_RECORD_BYTES))
        text = outer.value("record", str).encode()
        if hashlib.sha256(text).hexdigest() != outer.value("sha256", str):
            return {}
        record = parsed(path.name, text)
        stamps, began = record.value("file", list), int(record.value("began", str))
        digests = record.value("digests", dict)
        if (record.value("format", str), record.value("of", str)) != (FORMAT, of):
            return {}
        if stamps != [str(stamp) for stamp in _stamps(file)] or not settled(file, began):
            return {}
        if sorted(digests) != sorted(names) or not all(map(_is_digest, digests.values())):
            return {}
        with file.opened() as stream:
            return digests if has_own_times(stream) else {}
    except (ArgumentError, FormatError, UnavailableError, ValueError, OSError):
        return {}


def _is_digest(value: object) -> bool:
    return isinstance(value, str) and len(value) == 64 and set(value) <= set("0123456789abcdef")
