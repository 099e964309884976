"""The digest of a file: computed once for as long as the file stays as it is."""

import hashlib
import os
import signal
from pathlib import Path

import pytest

from lowbit.errors import FormatError
from lowbit.formats import known_file
from lowbit.formats.known_file import KnownFile


def known(path: Path) -> KnownFile:
    return KnownFile.of(path, path.stat())


def digest_of(path: Path) -> tuple[str, list[int]]:
    """The digest of a file, and how far it had been read after each piece."""
    pieces = list[int]()
    with path.open("rb") as stream:
        return known(path).digest_of(stream, pieces.append), pieces


def test_a_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first digest reads it piece by piece, the second does not read it, and both are its SHA-256."""
    monkeypatch.setattr(known_file, "TICK", -1)  # as if it had been there for long
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(known_file.CHUNK) + b"end")
    wanted = hashlib.sha256(path.read_bytes()).hexdigest()
    assert digest_of(path) == (wanted, [known_file.CHUNK, known_file.CHUNK + 3])
    assert digest_of(path) == (wanted, [])
    assert known(path).digest() == wanted


def test_another_content_has_another_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if its size and its time of modification are those of before."""
    monkeypatch.setattr(known_file, "TICK", -1)
    path = tmp_path / "model.gguf"
    path.write_bytes(b"one")
    before = path.stat()
    first, earlier = digest_of(path), known(path)
    while path.stat().st_ctime_ns == before.st_ctime_ns:  # the clock of the file system may be coarse
        path.write_bytes(b"two")
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert digest_of(path)[0] == hashlib.sha256(b"two").hexdigest() != first[0]
    with pytest.raises(FormatError, match="changed since it was opened"):
        earlier.digest()


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
        known(path).digest_of(stream, forked)
