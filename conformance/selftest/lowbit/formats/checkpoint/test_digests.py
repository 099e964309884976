"""Checkpoints told apart by their weights, and never by the names, sizes and times of their files."""

import errno
import hashlib
import json
import mmap
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from quantized_copies import PLAN, equal
from tiny_checkpoint import published, write
from typer.testing import CliRunner

from lowbit.cli import app
from lowbit.errors import FormatError, UnavailableError
from lowbit.formats import digests as kept_digests
from lowbit.formats.checkpoint import digests as tensor_digests
from lowbit.formats.checkpoint import reader as checkpoint_reader
from lowbit.formats.checkpoint import tensors as checkpoint_tensors
from lowbit.formats.checkpoint.cache import quantized
from lowbit.formats.checkpoint.digests import with_digests
from lowbit.formats.checkpoint.reader import Checkpoint, open_checkpoint
from lowbit.formats.checkpoint.tensors import Place, Table, read_floats, read_table
from lowbit.formats.digests import settled
from lowbit.formats.known_file import KnownFile
from lowbit.model.matrices import to_float
from lowbit.system.storage import CACHE_VARIABLE

SECOND = 10**9
THEN = (1_600_000_000 * SECOND, 1_600_000_000 * SECOND)
FIRST, LAST = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return normalised(write(tmp_path / "model"))


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """Another model whose files have the same names, sizes and times."""
    return normalised(write(tmp_path / "elsewhere" / "model", published(seed=7)))


def normalised(folder: Path) -> Path:
    """The folder with one time for all files, as containers and archives have it."""
    for file in folder.iterdir():
        os.utime(file, ns=THEN)
    return folder


def in_place(source: Path, target: Path) -> None:
    """Other bytes in the same files, as ``cp -p`` writes them: same inode, same size, same time of modification."""
    for file in source.iterdir():
        inode = (target / file.name).stat().st_ino
        shutil.copyfile(file, target / file.name)
        shutil.copystat(file, target / file.name)
        assert (target / file.name).stat().st_ino == inode


def replaced(source: Path, target: Path) -> None:
    """Other files under the same names."""
    shutil.rmtree(target)
    shutil.copytree(source, target)


def linked(source: Path, target: Path) -> None:
    """Symbolic links to other files."""
    for file in source.iterdir():
        (target / file.name).unlink()
        (target / file.name).symlink_to(file)


def stamps(folder: Path) -> list[tuple[str, int, int]]:
    return sorted((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in folder.iterdir())


def right(table: Table) -> dict[str, str]:
    """The digest of each tensor's bytes, computed here."""
    return {
        name: hashlib.sha256(place.shard.path.read_bytes()[place.offset :][: place.nbytes]).hexdigest()
        for name, place in table.items()
    }


def digests(table: Table) -> dict[str, str]:
    return {name: place.sha256 for name, place in table.items()}


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """The clock of the digests, some seconds ahead of that of the file system."""

    def set_clock(seconds: float) -> None:
        ahead = SimpleNamespace(time_ns=lambda: time.time_ns() + int(seconds * SECOND))
        for module in (kept_digests, tensor_digests):
            monkeypatch.setattr(module, "time", ahead)

    return set_clock


class Reads:
    """The shards whose bytes were read for digests."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names, digest = list[str](), tensor_digests._digest

        def counted(place: Place, *rest: Any) -> str:
            self.names.append(place.shard.path.name)
            return digest(place, *rest)

        monkeypatch.setattr(tensor_digests, "_digest", counted)

    def of(self, folder: Path) -> list[str]:
        """Those that are read for a directory; the digests are the right ones whether or not any is."""
        self.names.clear()
        table = with_digests(read_table(folder))
        assert digests(table) == right(table)
        return sorted(set(self.names))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    return Reads(monkeypatch)


# Two models of equal metadata.


@pytest.mark.parametrize("exchange", [in_place, replaced, linked])
def test_two_models_of_equal_metadata(
    exchange: Callable[[Path, Path], None], model: Path, other: Path, tmp_path: Path, later: Callable[[float], None]
) -> None:
    """Neither sees the other's weights: not side by side, and not under the same path, one after the other."""
    later(60)
    assert stamps(model) == stamps(other)
    one, two = (quantized(open_checkpoint(folder), PLAN) for folder in (model, other))
    assert one.folder != two.folder
    equal(one, PLAN)
    equal(two, PLAN)
    before = open_checkpoint(model).layer(0)
    exchange(other, model)
    assert stamps(model) == stamps(other)
    made = quantized(open_checkpoint(model), PLAN)
    equal(made, PLAN)
    assert made.folder == two.folder
    after = open_checkpoint(model).layer(0)
    assert not np.array_equal(to_float(after.query), to_float(before.query))


def test_through_the_command(model: Path, other: Path, cache: Path) -> None:
    """``lowbit logits --model DIR`` gives the logits of the weights that are there, whatever is kept."""

    def logits() -> object:
        options = ["--bits", "4", "--group-size", "16", "--backend", "numpy", "--json"]  # numpy compiles no step
        result = CliRunner().invoke(app, ["logits", "--model", str(model), "--prompt", "he", *options])
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)["top"]

    first = logits()
    assert logits() == first
    in_place(other, model)
    second = logits()
    assert second != first
    shutil.rmtree(cache)
    assert logits() == second


def test_the_same_weights_are_found_again(model: Path, tmp_path: Path) -> None:
    """A copy under another name and time, or the same tensors, is not quantised twice."""
    made = quantized(open_checkpoint(model), PLAN)
    shutil.copytree(model, tmp_path / "copy", copy_function=shutil.copyfile)
    assert quantized(open_checkpoint(tmp_path / "copy"), PLAN).folder == made.folder


# When a digest is used again.


def test_a_digest_is_used_again(model: Path, reads: Reads, later: Callable[[float], None]) -> None:
    """Where nothing has changed, no weights are read; where one shard has, that one is."""
    later(60)
    assert reads.of(model) == [FIRST, LAST]
    assert reads.of(model) == []
    (model / LAST).chmod(0o600)  # which sets the time of change
    assert reads.of(model) == [LAST]
    assert reads.of(model) == []


def test_a_file_that_has_just_changed(model: Path, reads: Reads, later: Callable[[float], None]) -> None:
    """A digest is not kept within two seconds of the last change, when another change could leave no trace."""
    later(1.5)
    assert reads.of(model) == [FIRST, LAST]
    later(60)
    assert reads.of(model) == [FIRST, LAST]
    assert reads.of(model) == []


def test_a_file_that_is_mapped_for_writing(model: Path, reads: Reads, later: Callable[[float], None]) -> None:
    """The second write to a page of a mapping leaves no trace, so a digest is not kept while one can follow."""
    later(60)
    with (model / LAST).open("r+b") as stream, mmap.mmap(stream.fileno(), 0) as mapping:
        mapping[-1] ^= 1
        assert reads.of(model) == [FIRST, LAST]
        mapping[-1] ^= 1
        assert reads.of(model) == [LAST]
    reads.of(model)
    assert reads.of(model) == []


def test_a_file_that_is_open_for_writing(model: Path, reads: Reads, later: Callable[[float], None]) -> None:
    """A long call of ``write`` sets the times when it begins, so a digest is not kept before it has ended."""
    later(60)
    with (model / LAST).open("r+b"):
        assert reads.of(model) == [FIRST, LAST]
        assert reads.of(model) == [LAST]
    assert reads.of(model) == [LAST]
    assert reads.of(model) == []


def test_a_file_of_somebody_else(
    model: Path, reads: Reads, later: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the system does not say whether the file is open for writing, every run reads."""

    def refused(*arguments: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    later(60)
    monkeypatch.setattr(kept_digests.fcntl, "fcntl", refused)  # type: ignore[attr-defined]  # a name that the module imports and does not export
    assert reads.of(model) == [FIRST, LAST]
    assert reads.of(model) == [FIRST, LAST]


def test_a_clock_that_is_set_back(model: Path, reads: Reads, later: Callable[[float], None]) -> None:
    """A record from the future is not used, nor is one made for a file whose time of change lies in the future."""
    later(60)
    reads.of(model)
    later(30)
    assert reads.of(model) == [FIRST, LAST]
    later(-3600)
    assert reads.of(model) == [FIRST, LAST]
    assert reads.of(model) == [FIRST, LAST]


@pytest.mark.parametrize(
    ("changed", "began", "expected"),
    [
        (5 * SECOND + 1, 7 * SECOND + 1, True),
        (5 * SECOND + 2, 7 * SECOND + 1, False),
        (5 * SECOND, 60 * SECOND, False),
        (5 * SECOND + 1, 61 * SECOND, False),
        (70 * SECOND + 1, 60 * SECOND, False),
    ],
    ids=["two seconds", "less", "whole seconds", "record of the future", "file of the future"],
)
def test_settled(changed: int, began: int, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the time of 60 s: two seconds between change and reading, neither in the future, no whole second."""
    monkeypatch.setattr(kept_digests, "time", SimpleNamespace(time_ns=lambda: 60 * SECOND))
    assert settled(KnownFile(Path("x"), 1, 2, 3, 4, changed), began) == expected


def test_a_file_system_that_makes_times_up(
    model: Path, reads: Reads, later: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a file system that is not known to keep times of change, every run reads."""
    later(60)
    reads.of(model)
    monkeypatch.setattr(kept_digests, "TRUSTED", frozenset({"fuse"}))
    assert reads.of(model) == [FIRST, LAST]
    assert reads.of(model) == [FIRST, LAST]


def test_a_folder_that_others_can_write_to(
    model: Path, cache: Path, reads: Reads, later: Callable[[float], None]
) -> None:
    """Records that another user may have written are not used."""
    later(60)
    reads.of(model)
    (cache / kept_digests.FOLDER).chmod(0o777)
    assert reads.of(model) == [FIRST, LAST]


def test_a_record_that_others_can_change(
    model: Path, cache: Path, tmp_path: Path, reads: Reads, later: Callable[[float], None]
) -> None:
    """A link to it, a second name, one that others can write to, or another user's: it is not used and written anew."""
    later(60)
    reads.of(model)
    record, aside = min((cache / kept_digests.FOLDER).iterdir()), tmp_path / "aside"

    def linked() -> None:
        record.rename(aside)
        record.symlink_to(aside)

    harms: list[Callable[[], object]] = [linked, lambda: aside.hardlink_to(record), lambda: record.chmod(0o620)]
    if os.geteuid() == 0:  # nobody else can give a file away
        harms.append(lambda: os.chown(record, 12345, -1))
    for harm in harms:
        aside.unlink(missing_ok=True)
        harm()
        assert len(reads.of(model)) == 1
        assert reads.of(model) == []


# Records that are not sound.


def test_damaged_records(model: Path, cache: Path, reads: Reads, later: Callable[[float], None]) -> None:
    """Whatever bytes of a record change, wherever it ends: the digests are the right ones."""
    later(60)
    reads.of(model)
    records, rng = sorted((cache / kept_digests.FOLDER).iterdir()), np.random.default_rng(0)
    assert len(records) == 2
    sound = records[0].read_bytes()
    for number in range(60):
        damaged = bytearray(sound)
        if number % 3 == 0:
            damaged = damaged[: rng.integers(len(sound))]
        else:
            damaged[rng.integers(len(sound))] ^= 1 << int(rng.integers(8))
        records[0].write_bytes(damaged)
        reads.of(model)
    for content in (b"", b"{}", b"[" * 100_000, b'{"record": 1}', records[1].read_bytes()):
        records[0].write_bytes(content)
        assert len(reads.of(model)) == 1


def test_a_record_of_another_file(model: Path, cache: Path, reads: Reads, later: Callable[[float], None]) -> None:
    """One with a right sum of its own that names other stamps, other tensors or no digests is not used."""
    later(60)
    reads.of(model)
    records = sorted((cache / kept_digests.FOLDER).iterdir())
    for key, value in (
        ("file", ["1", "2", "3", "4", "5"]),
        ("format", "lowbit digests 0"),
        ("of", "file"),
        ("digests", {}),
        ("began", "soon"),
        ("digests", dict.fromkeys(json.loads(json.loads(records[0].read_text())["record"])["digests"], "f" * 63)),
    ):
        text = json.dumps(json.loads(json.loads(records[0].read_text())["record"]) | {key: value})
        whole = {"record": text, "sha256": hashlib.sha256(text.encode()).hexdigest()}
        records[0].write_text(json.dumps(whole))
        assert len(reads.of(model)) == 1, key
        assert reads.of(model) == []  # it has been written anew


def test_a_wrong_record_is_noticed_when_weights_are_read(
    model: Path, cache: Path, later: Callable[[float], None]
) -> None:
    """Each tensor is compared with its digest, so weights never go under another's name."""
    later(60)
    with_digests(read_table(model))
    for path in (cache / kept_digests.FOLDER).iterdir():
        record = json.loads(json.loads(path.read_text())["record"])
        text = json.dumps(record | {"digests": dict.fromkeys(record["digests"], "0" * 64)})
        path.write_text(json.dumps({"record": text, "sha256": hashlib.sha256(text.encode()).hexdigest()}))
    with pytest.raises(FormatError, match="changed since it was opened"):
        quantized(open_checkpoint(model), PLAN)


# Files that change meanwhile.


def test_a_file_that_changes_while_it_is_read(model: Path, other: Path) -> None:
    """Between the first and the last byte of a shard: no digest is given and none is kept."""
    table = read_table(model)

    def change(done: int, total: int) -> None:
        if done:
            in_place(other, model)

    with pytest.raises(FormatError, match="changed since it was opened"):
        with_digests(table, change)


def test_a_file_that_changes_after_its_digest(model: Path, other: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights that are quantised are those of the digest, even if the file's stamps are what they were."""
    source = open_checkpoint(model)
    made = quantized(source, PLAN)
    monkeypatch.setattr(KnownFile, "check_unchanged", lambda self, stream: None)
    in_place(other, model)
    shutil.rmtree(made.folder)
    with pytest.raises(FormatError, match="changed since it was opened"):
        made.layer(0)
    with pytest.raises(FormatError, match="changed since it was opened"):
        _ = made.embedding


@pytest.mark.parametrize("field", ["device", "inode", "size", "changed", "status_changed"])
def test_every_stamp_counts(field: str, model: Path) -> None:
    """A tensor is read only from the file that has all five."""
    table = read_table(model)
    name, place = next(iter(table.items()))
    stamp = replace(place.shard, **{field: getattr(place.shard, field) + 1})
    with pytest.raises(FormatError, match="changed since it was opened"):
        read_floats({name: replace(place, shard=stamp)}, name)


def test_a_file_that_is_replaced_while_its_header_is_read(
    model: Path, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table is that of one file."""
    opened = checkpoint_tensors.safe_open  # type: ignore[attr-defined]  # a name that the module imports and does not export

    def exchanged(path: Path, **options: str) -> object:
        os.replace(other / path.name, path)
        return opened(path, **options)

    monkeypatch.setattr(checkpoint_tensors, "safe_open", exchanged)
    with pytest.raises(FormatError, match="changed since it was opened"):
        read_table(model)


# Progress, and a cache that cannot be written.


def test_progress(model: Path, later: Callable[[float], None]) -> None:
    """Bytes done grow to the bytes in all, whether they are read or known."""
    later(60)
    for _ in range(2):
        seen = list[tuple[int, int]]()
        table = with_digests(read_table(model), lambda *work, seen=seen: seen.append(work))
        total = sum(place.nbytes for place in table.values())
        assert sorted(seen) == seen and seen[-1] == (total, total)


def test_a_cache_that_cannot_be_written_is_refused_first(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the weights are read, which takes minutes."""

    monkeypatch.setattr(Checkpoint, "identified", None)
    (tmp_path / "file").touch()
    with pytest.raises(UnavailableError, match="Not a directory; name a folder"):
        quantized(open_checkpoint(model), PLAN, tmp_path / "file")
    (tmp_path / "closed").mkdir(mode=0o500)
    if not os.access(tmp_path / "closed", os.W_OK):
        with pytest.raises(UnavailableError, match="Permission denied; give a folder"):
            quantized(open_checkpoint(model), PLAN, tmp_path / "closed")


def test_what_is_identified_is_not_read_again(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory that is run and quantised is identified for both."""
    source = open_checkpoint(model).identified()
    monkeypatch.setattr(checkpoint_reader, "with_digests", None)
    assert source.identified() is source
