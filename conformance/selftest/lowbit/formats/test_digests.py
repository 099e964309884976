"""The digest of a file: computed once for as long as the file stays as it is."""

import hashlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from lowbit.errors import FormatError
from lowbit.formats import digests
from lowbit.formats.digests import digest
from lowbit.formats.known_file import KnownFile
from lowbit.system.storage import CACHE_VARIABLE


def known(path: Path) -> KnownFile:
    return KnownFile.of(path, path.stat())


def digest_of(path: Path) -> tuple[str, list[int]]:
    """The digest of a file, and how far it had been read after each piece."""
    pieces = list[int]()
    with path.open("rb") as stream:
        return digests.digest_of(known(path), stream, pieces.append), pieces


def test_a_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first digest reads it piece by piece, the second does not read it, and both are its SHA-256."""
    monkeypatch.setattr(digests, "SETTLED_NS", -1)  # as if it had been there for long
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(digests.CHUNK) + b"end")
    wanted = hashlib.sha256(path.read_bytes()).hexdigest()
    assert digest_of(path) == (wanted, [digests.CHUNK, digests.CHUNK + 3])
    assert digest_of(path) == (wanted, [])
    assert digest(known(path)) == wanted


def test_another_content_has_another_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if its size and its time of modification are those of before."""
    monkeypatch.setattr(digests, "SETTLED_NS", -1)
    path = tmp_path / "model.gguf"
    path.write_bytes(b"one")
    before = path.stat()
    first, earlier = digest_of(path), known(path)
    while path.stat().st_ctime_ns == before.st_ctime_ns:  # the clock of the file system may be coarse
        path.write_bytes(b"two")
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert digest_of(path)[0] == hashlib.sha256(b"two").hexdigest() != first[0]
    with pytest.raises(FormatError, match="changed since it was opened"):
        digest(earlier)


def test_a_file_that_has_just_changed_is_read_again(tmp_path: Path) -> None:
    """Within a tick of the file system's clock, a second change would leave the times as they are."""
    path = tmp_path / "model.gguf"
    path.write_bytes(b"one")
    assert digest_of(path)[1] == digest_of(path)[1] == [3]


def test_a_fork_while_a_file_is_read_stops_nobody(tmp_path: Path) -> None:
    """The child lacks the thread that reads, and does not wait for it."""
    path = tmp_path / "model.gguf"
    path.write_bytes(b"one")

    def forked(_: int) -> None:
        child = os.fork()
        if child == 0:
            signal.alarm(30)  # ends a child that waits
            os._exit(0 if digest_of(path)[1] == [3] else 1)
        assert os.waitpid(child, 0)[1] == 0

    with path.open("rb") as stream:
        digests.digest_of(known(path), stream, forked)


# From one process to the next.


@pytest.fixture
def another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Begins as another process would: with what is kept, and nothing in memory. Any file is large and settled."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(digests, "LARGE", 1)
    later = SimpleNamespace(time_ns=lambda: time.time_ns() + 60 * 10**9)
    monkeypatch.setattr(digests, "time", later)
    return digests._DIGESTS.clear


def test_a_large_file_is_not_read_again(tmp_path: Path, another: Callable[[], None]) -> None:
    """The next process has its digest from the record."""
    path = tmp_path / "model.gguf"
    path.write_bytes(b"one")
    another()
    wanted = hashlib.sha256(b"one").hexdigest()
    assert digest_of(path) == (wanted, [3])
    another()
    assert digest_of(path) == (wanted, [])


def test_a_large_file_that_has_changed_is_read_again(tmp_path: Path, another: Callable[[], None]) -> None:
    """Whether its size and its time of modification are new or those of before."""
    path = tmp_path / "model.gguf"
    path.write_bytes(b"one")
    digest_of(path)
    before = path.stat()
    while path.stat().st_ctime_ns == before.st_ctime_ns:
        path.write_bytes(b"two")
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    another()
    assert digest_of(path) == (hashlib.sha256(b"two").hexdigest(), [3])


def test_a_small_file_has_no_record(
    tmp_path: Path, another: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read in each process."""
    monkeypatch.setattr(digests, "LARGE", 4)
    path = tmp_path / "model.gguf"
    path.write_bytes(b"one")
    for _ in range(2):
        another()
        assert digest_of(path)[1] == [3]
    assert not (tmp_path / "cache").exists()


def test_a_record_of_tensors_is_not_one_of_the_file(tmp_path: Path, another: Callable[[], None]) -> None:
    """A shard may have a tensor of any name, such as that under which the digest of a file is kept."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"one")
    digests.keep(known(path), "tensors", time.time_ns() + 30 * 10**9, {digests.FILE: "0" * 64})
    assert digest_of(path) == (hashlib.sha256(b"one").hexdigest(), [3])
    assert digests.kept(known(path), "tensors", [digests.FILE]) == {digests.FILE: "0" * 64}
