"""Digests of tensors: which weights a checkpoint holds.

The files that lowbit keeps for a checkpoint are named by a digest of each tensor's bytes, and a tensor that has such a
digest is compared with it whenever it is read (`lowbit.formats.checkpoint.tensors.read_floats`). The digests of a shard
are kept as `lowbit.formats.digests` says.
"""

import hashlib
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from lowbit.errors import FormatError
from lowbit.formats.checkpoint.tensors import Place, Table
from lowbit.formats.digests import is_quiet, keep, kept
from lowbit.formats.known_file import KnownFile
from lowbit.model.weights import Progress
from lowbit.system.threads import side_by_side, usable_processors
from lowbit.text import quoted

CHUNK = 2**22
TENSORS = "tensors"
"""The name under which these digests are kept."""


def with_digests(table: Table, progress: Progress | None = None) -> Table:
    """The same table with the digest of each tensor; tensors are read in parallel if no record can be used.

    Args:
        table: from `lowbit.formats.checkpoint.tensors.read_table`.
        progress: called with bytes done and total bytes.

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
        found |= kept(shard, TENSORS, names)
    report(sum(table[name].nbytes for name in found))
    missing = [name for names in shards.values() for name in names if name not in found]
    lasting = {shard for shard in {table[name].shard for name in missing} if is_quiet(shard)}
    began = time.time_ns()
    digests = side_by_side(lambda name: _digest(table[name], name, report), missing, usable_processors())
    found |= zip(missing, digests, strict=True)
    for shard in lasting:
        keep(shard, TENSORS, began, {name: found[name] for name in shards[shard]})
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
