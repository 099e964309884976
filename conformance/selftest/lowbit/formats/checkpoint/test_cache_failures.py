"""A checkpoint quantised block by block that is interrupted, damaged or without room: made good, and never believed."""

import os
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from quantized_copies import PLAN, equal, same
from tiny_checkpoint import write

from lowbit.errors import FormatError, LowbitError, UnavailableError
from lowbit.formats.checkpoint import tensors as checkpoint_tensors
from lowbit.formats.checkpoint.cache import QuantizedCheckpoint, quantized
from lowbit.formats.checkpoint.quantized_file import Origin, read_matrices, write_quantized
from lowbit.formats.checkpoint.reader import Checkpoint, open_checkpoint
from lowbit.model.matrices import to_float
from lowbit.model.quantization_plan import Plan, Quantization
from lowbit.model.weights import LayerWeights
from lowbit.system.scratch import PREFIX, workplace
from lowbit.system.storage import CACHE_VARIABLE

HQQ = Plan(Quantization(3, 16, "hqq"), Quantization(4, 16, "hqq"))


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path_factory.mktemp("user")))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("cache") / "tiny")


@pytest.fixture
def source(folder: Path) -> Checkpoint:
    return open_checkpoint(folder)


# Interrupted, and twice at once.


def test_an_interrupt_between_blocks_loses_nothing(
    source: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was finished is there when the work goes on, and only the rest is made."""

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantized(source, PLAN, tmp_path, stop)
    (place,) = tmp_path.iterdir()
    assert [file.name for file in place.iterdir()] == ["layer-00000.safetensors"]
    read: list[int] = []
    layer = Checkpoint.layer

    def counted(self: Checkpoint, number: int, *rest: Any) -> LayerWeights:
        read.append(number)
        return layer(self, number, *rest)

    monkeypatch.setattr(Checkpoint, "layer", counted)
    made = quantized(source, PLAN, tmp_path)
    assert read == [1]
    monkeypatch.undo()
    equal(made, PLAN)


def test_an_interrupt_inside_a_file_leaves_nothing(
    source: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is half written never has its name, and goes away; one of a killed process does so the next time."""

    def half(tensors: Any, path: Path, metadata: Any) -> None:
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint_tensors, "save_file", half)
    with pytest.raises(KeyboardInterrupt):
        quantized(source, PLAN, tmp_path)
    (place,) = tmp_path.iterdir()
    assert list(place.iterdir()) == []
    monkeypatch.undo()
    (left := place / f"{PREFIX}killed").mkdir()
    (left / "layer-00000.safetensors").write_bytes(b"half")
    with workplace(place) as running:
        (running / "layer-00000.safetensors").write_bytes(b"half")
        equal(quantized(source, PLAN, tmp_path), PLAN)
        assert [path for path in place.iterdir() if path.is_dir()] == [running]


def test_several_at_once(source: Checkpoint, tmp_path: Path) -> None:
    """Four that quantise the same model into the same folder all end with the right weights, and leave nothing else."""
    made, threads = list[QuantizedCheckpoint](), list[threading.Thread]()
    for _ in range(4):
        threads.append(threading.Thread(target=lambda: made.append(quantized(source, PLAN, tmp_path))))
        threads[-1].start()
    for thread in threads:
        thread.join(60)
    assert len(made) == 4
    for each in made:
        equal(each, PLAN)
    assert len(list(made[0].folder.iterdir())) == 3


# Damaged.


def test_damage_anywhere_is_made_good(source: Checkpoint, tmp_path: Path) -> None:
    """Whatever bytes of a kept file change, wherever it ends: the weights that come out are the right ones."""
    made = quantized(source, PLAN, tmp_path)
    path = made.folder / "layer-00001.safetensors"
    sound, rng = path.read_bytes(), np.random.default_rng(1)
    expected = made.layer(1).linears()
    for number in range(30):
        damaged = bytearray(sound)
        if number % 3 == 0:
            damaged = damaged[: rng.integers(len(sound))]
        else:
            header = 8 + int.from_bytes(sound[:8], "little")
            place = int(rng.integers(header) if number % 3 == 1 else rng.integers(header, len(sound)))
            damaged[place] ^= 1 << int(rng.integers(8))
        path.unlink()  # files are mapped, and replaced as a whole
        path.write_bytes(damaged)
        found = made.layer(1).linears()
        assert all(same(found[name], matrix) for name, matrix in expected.items()), number
        assert path.read_bytes() == sound, number
    equal(quantized(source, PLAN, tmp_path), PLAN)


def test_what_is_no_file(source: Checkpoint, tmp_path: Path) -> None:
    """A pipe or a link to a device or to nowhere is replaced and not waited for; a folder is refused."""
    made = quantized(source, PLAN, tmp_path)
    path = made.folder / "layer-00001.safetensors"
    sound = path.read_bytes()
    for target in (None, "/dev/zero", "nowhere"):
        path.unlink()
        os.mkfifo(path) if target is None else path.symlink_to(target)
        made.keep("layer-00001")
        assert not path.is_symlink() and path.read_bytes() == sound
    path.unlink()
    path.mkdir()
    with pytest.raises(
        UnavailableError, match=r"file layer-00001\.safetensors is unavailable: it cannot be written to .* directory"
    ):
        made.keep("layer-00001")


def test_files_are_as_readable_as_others(source: Checkpoint, tmp_path: Path) -> None:
    """Others may be allowed to read a cache folder, so its files have the mode of any file of this user's."""
    made = quantized(source, PLAN, tmp_path)
    (tmp_path / "any").touch()
    modes = {path.stat().st_mode for path in (*made.folder.iterdir(), tmp_path / "any")}
    assert len(modes) == 1


def test_a_folder_that_others_can_write_to(source: Checkpoint, tmp_path: Path) -> None:
    """Another user could leave a file there that has the right digest, a right sum of its own, and other weights."""
    made = quantized(source, PLAN, tmp_path / "cache")
    for place in (made.folder, tmp_path / "cache"):
        place.chmod(0o777)
        with pytest.raises(
            UnavailableError, match=r"cache of quantised weights .* other users can write to .*mode 777"
        ):
            quantized(source, PLAN, tmp_path / "cache")
        place.chmod(0o700)


def test_files_that_were_taken_for_others(source: Checkpoint, tmp_path: Path) -> None:
    """A block in another's place, one of another plan, an old format, a matrix of another shape: none is believed."""
    made, other = quantized(source, PLAN, tmp_path), quantized(source, HQQ, tmp_path)
    first, second = (made.folder / f"layer-0000{number}.safetensors" for number in (0, 1))

    def replace(content: bytes) -> None:
        first.unlink()
        first.write_bytes(content)

    for content in (second.read_bytes(), (other.folder / first.name).read_bytes()):
        replace(content)
        with pytest.raises(FormatError, match=r"(holds|source) is"):
            read_matrices(first, Origin(made.digest, "layer-00000"))
        equal(made, PLAN)
    replace(first.read_bytes().replace(b"quantised 1", b"quantised 0"))
    with pytest.raises(FormatError, match="format is 'lowbit quantised 0'"):
        read_matrices(first, Origin(made.digest, "layer-00000"))
    write_quantized(first, {"query": np.zeros((2, 2), np.float32)}, Origin(made.digest, "layer-00000"))
    equal(made, PLAN)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kept") / "part.safetensors"
    matrix = Quantization(4, 8)(np.random.default_rng(0).standard_normal((16, 2)).astype(np.float32))
    write_quantized(path, {"a": matrix, "b": np.ones(3, np.float32)}, Origin("s", "p"))
    return path


@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(edits=st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 255)), min_size=1, max_size=3))
def test_a_damaged_file(edits: list[tuple[int, int]], kept: Path) -> None:
    """A file with some bytes changed is refused by an error of lowbit's own, or holds what was written."""
    whole = bytearray(kept.read_bytes())
    for place, value in edits:
        whole[place % len(whole)] = value
    path = kept.with_name("damaged.safetensors")
    path.unlink(missing_ok=True)
    path.write_bytes(whole)
    try:
        found = read_matrices(path, Origin("s", "p"))
    except LowbitError as error:
        assert "\n" not in str(error)
    else:
        expected = read_matrices(kept, Origin("s", "p"))
        numbers = [to_float(matrix).ravel() for matrix in (*found.values(), *expected.values())]
        np.testing.assert_array_equal(np.concatenate(numbers[:2]), np.concatenate(numbers[2:]))


# No room.


def test_no_room(source: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too little room is found before anything is written, and a full disk on the way is an error in words."""
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=2**12))
    with pytest.raises(
        UnavailableError, match=r"disk space for quantised weights is unavailable: \d+\.\d KiB are needed"
    ):
        quantized(source, PLAN, tmp_path)
    assert [list(place.iterdir()) for place in tmp_path.iterdir()] == [[]]
    monkeypatch.undo()

    def full(*arguments: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_tensors, "save_file", full)
    with pytest.raises(UnavailableError, match="No space left on device"):
        quantized(source, PLAN, tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(UnavailableError, match="a folder that only you can write to in LOWBIT_CACHE"):
        quantized(source, PLAN, tmp_path / "file")


def test_the_room_that_is_asked_for(source: Checkpoint, tmp_path: Path) -> None:
    """It is what the files take, but for their headers."""
    made = QuantizedCheckpoint(source, PLAN, tmp_path, "x")
    asked = made.missing_bytes()
    for name in made.parts():
        made.keep(name)
    taken = sum(file.stat().st_size for file in tmp_path.iterdir())
    assert 0 < asked - taken < 2**9 * sum(2 + len(made.layer(number).linears()) for number in range(3 - 1)) + 2**9
    assert made.missing_bytes() == 0
