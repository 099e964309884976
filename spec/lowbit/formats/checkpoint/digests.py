"""Digests of tensors: which weights a checkpoint holds, whatever the names and times of its files are.

Two files can have the same name, size and time and hold different weights: containers and archives normalise times,
and ``cp -p`` keeps them. So the files that lowbit keeps for a model are named by a digest of each tensor's bytes, and a
tensor that has such a digest is compared with it whenever it is read
(`lowbit.formats.checkpoint.tensors.read_floats`).

**Reading 90 GB takes minutes**, so the digests of a shard are kept, in a folder that only this user can write to. They
are used again only if the file has not changed since, which a time stamp alone does not prove. All of this must hold:

- Device, inode, size, time of modification and time of change are the same, each to the nanosecond. A program can set
  the time of modification; the system alone sets the time of change.
- The time of change is at least `SETTLED_NS` older than the moment at which reading began. A file can change twice
  within one tick of the file system's clock, and the second change then leaves no trace.
- No process had the file open for writing when reading began, and what programs had written through a mapping was
  written out before (`quiet`). The first write to a page of a mapping sets the times, the next ones do not until the
  page has been written out; and a long call of ``write`` sets them once, when it begins.
- Neither time is in the future. If the clock was set back, times do not show the order of events.
- The file system is one of `TRUSTED`, and the time of change is not a whole second. A network or image file system may
  report a time of change that is not real.

In any other case the shard is read again. A record that is damaged, incomplete or for another file is ignored.
"""

import fcntl
import hashlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from lowbit.errors import ArgumentError, FormatError, UnavailableError
from lowbit.formats.checkpoint.tensors import MOST_INDEX_BYTES, Place, Table
from lowbit.formats.known_file import KnownFile
from lowbit.model.weights import Progress
from lowbit.system.json_files import parsed
from lowbit.system.storage import OWN_MODE, code_folder, read_own, write_whole
from lowbit.system.threads import side_by_side, usable_processors
from lowbit.text import quoted

FOLDER = "tensor-digests"
FORMAT = "lowbit tensor digests 1"
SETTLED_NS = 2 * 10**9
SECOND_NS = 10**9
CHUNK = 2**22
TRUSTED = frozenset({"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs"})
"""File systems whose kernel sets the time of change of each file itself."""


def with_digests(table: Table, progress: Progress | None = None) -> Table:
    """The same table with the digest of each tensor; tensors are read side by side where no record can be used.

    Args:
        table: from `lowbit.formats.checkpoint.tensors.read_table`.
        progress: called with bytes done and bytes in all.

    Raises:
        ArgumentError: a shard cannot be read.
        FormatError: a shard has changed since its table was read.
    """
    shards: dict[KnownFile, list[str]] = {}
    for name in sorted(table, key=lambda name: (str(table[name].shard.path), table[name].offset)):
        shards.setdefault(table[name].shard, []).append(name)
    total, done, lock = sum(place.nbytes for place in table.values()), 0, threading.Lock()

    def report(count: int) -> None:
        nonlocal done
        with lock:
            done += count
            if progress is not None:
                progress(done, total)

    found: dict[str, str] = {}
    for shard, names in shards.items():
        found |= _kept(shard, names)
    report(sum(table[name].nbytes for name in found))
    missing = [name for names in shards.values() for name in names if name not in found]
    lasting = {shard for shard in {table[name].shard for name in missing} if quiet(shard)}
    began = time.time_ns()
    digests = side_by_side(lambda name: _digest(table[name], name, report), missing, usable_processors())
    found |= zip(missing, digests, strict=True)
    for shard in lasting:
        _keep(shard, began, {name: found[name] for name in shards[shard]})
    return {name: replace(place, sha256=found[name]) for name, place in table.items()}


def _digest(place: Place, name: str, report: Callable[[int], None]) -> str:
    """The digest of a tensor's bytes as they are in the file."""
    digest, left, buffer = hashlib.sha256(), place.nbytes, memoryview(bytearray(min(CHUNK, max(1, place.nbytes))))
    with place.shard.opened() as stream:
        stream.seek(place.offset)
        while left:
            count = stream.readinto(buffer[: min(len(buffer), left)])
            if not count:
                file, given = place.shard.path.name, f"{left} bytes short"
                raise FormatError(file, f"data of tensor {quoted(name)}", given, f"{place.nbytes} bytes")
            digest.update(buffer[:count])
            left -= count
            report(count)
    return digest.hexdigest()


# **What is kept.**


def settled(shard: KnownFile, began: int) -> bool:
    """Whether a later change of the file would change its time stamps, if it was read from `began` on."""
    changed = shard.status_changed
    return changed + SETTLED_NS <= began <= time.time_ns() and changed % SECOND_NS != 0


def quiet(shard: KnownFile) -> bool:
    """Whether every later change of the file will set its time of change.

    The system grants a lease for reading only where no process has the file open for writing. It grants it to the
    owner of the file and to root; it refuses one to any other user. An overlay forgets a writer that has closed its
    file and kept its mapping, so what is mapped is also written out: the next write to such a page sets the time.
    """
    with shard.opened() as stream, suppress(OSError):
        if sys.platform != "linux" or not has_own_times(stream):
            return False
        os.fsync(stream.fileno())
        fcntl.fcntl(stream, fcntl.F_SETSIG, signal.SIGURG)  # what a writer that comes now causes; ignored by default
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


def _record(shard: KnownFile) -> Path:
    """Where the digests of a shard are kept.

    Raises:
        UnavailableError: there is no folder that only this user can write to.
    """
    return code_folder(FOLDER) / f"{shard.device:x}-{shard.inode:x}.json"


def _stamps(shard: KnownFile) -> list[int]:
    return [shard.device, shard.inode, shard.size, shard.changed, shard.status_changed]


def _keep(shard: KnownFile, began: int, digests: Mapping[str, str]) -> None:
    """Keep the digests if they can be used again; otherwise the shard is read again the next time."""
    content = {"format": FORMAT, "file": [str(stamp) for stamp in _stamps(shard)], "began": str(began)}
    text = json.dumps(content | {"tensors": dict(digests)}, sort_keys=True)
    whole = json.dumps({"record": text, "sha256": hashlib.sha256(text.encode()).hexdigest()})
    with shard.opened() as stream:
        lasting = settled(shard, began) and has_own_times(stream)
    if lasting:
        with suppress(OSError, UnavailableError):
            write_whole(_record(shard), whole.encode(), OWN_MODE)


def _kept(shard: KnownFile, names: list[str]) -> dict[str, str]:
    """The digests that were kept for a shard, if their record is valid and the file has not changed since."""
    try:
        path = _record(shard)
        outer = parsed(path.name, read_own(path, MOST_INDEX_BYTES))
        text = outer.value("record", str).encode()
        if hashlib.sha256(text).hexdigest() != outer.value("sha256", str):
            return {}
        record = parsed(path.name, text)
        stamps, began = record.value("file", list), int(record.value("began", str))
        tensors = record.value("tensors", dict)
        if record.value("format", str) != FORMAT or stamps != [str(stamp) for stamp in _stamps(shard)]:
            return {}
        if sorted(tensors) != sorted(names) or not all(_is_digest(digest) for digest in tensors.values()):
            return {}
        if not settled(shard, began):
            return {}
        with shard.opened() as stream:
            return tensors if has_own_times(stream) else {}
    except (ArgumentError, FormatError, UnavailableError, ValueError, OSError):
        return {}


def _is_digest(value: object) -> bool:
    return isinstance(value, str) and len(value) == 64 and set(value) <= set("0123456789abcdef")
