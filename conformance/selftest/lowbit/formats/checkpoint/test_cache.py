"""A checkpoint quantised block by block: the right weights, kept, in little memory, and never believed when damaged."""

import json
import os
import shutil
import subprocess
import threading
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paths import SUPPORT
from quantized_copies import PLAN, equal, same
from tiny_checkpoint import DENSE, MIXTRAL, published, write

from lowbit.errors import ArgumentError, FormatError, LowbitError, UnavailableError
from lowbit.formats.checkpoint import cache as checkpoint_cache
from lowbit.formats.checkpoint import tensors as checkpoint_tensors
from lowbit.formats.checkpoint.cache import COPIES, QuantizedCheckpoint, quantized, threads_for
from lowbit.formats.checkpoint.quantized_file import Origin, read_matrices, write_quantized
from lowbit.formats.checkpoint.random import SHAPES
from lowbit.formats.checkpoint.reader import Checkpoint, open_checkpoint
from lowbit.model.calibration import CalibrationText
from lowbit.model.config import LlamaConfig
from lowbit.model.decoder import Decoder, next_logits
from lowbit.model.quantization_plan import Method, Plan, Quantization, planned
from lowbit.model.weights import LayerWeights, in_memory, to_float
from lowbit.quantization.affine import QuantizedMatrix
from lowbit.quantization.affine import quantize as by_range
from lowbit.quantization.hqq import as_minimum
from lowbit.quantization.hqq import quantize as hqq_quantize
from lowbit.quantization.packing import unpack
from lowbit.system.interpreters import python_command
from lowbit.system.scratch import PREFIX, workplace
from lowbit.system.storage import CACHE_VARIABLE

TOKENS = tuple(int(each) for each in np.random.default_rng(1).integers(3, 250, 40))
PLANS = {
    "mixed": PLAN,
    "hqq": Plan(Quantization(3, 16, "hqq"), Quantization(4, 16, "hqq")),
    "gptq": Plan(Quantization(3, 16, "gptq"), Quantization(4, 16, "gptq"), PLAN.head, CalibrationText(TOKENS, 16)),
    "gptq in part": Plan(Quantization(2, 16), Quantization(3, 16, "gptq"), None, CalibrationText(TOKENS, 24)),
    "experts only": Plan(Quantization(2, 8), None),
    "attention only": Plan(None, Quantization(8, 5)),
}


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path_factory.mktemp("user")))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("cache") / "tiny")


@pytest.fixture
def source(folder: Path) -> Checkpoint:
    return open_checkpoint(folder)


# The right weights.


@pytest.mark.parametrize("name", PLANS)
def test_it_is_the_model_that_the_plan_makes_in_memory(name: str, source: Checkpoint, tmp_path: Path) -> None:
    """Block by block through files, or the whole model at once: the same numbers to the bit."""
    equal(quantized(source, PLANS[name], tmp_path), PLANS[name])


def test_a_dense_model(tmp_path: Path) -> None:
    """A plan's choice for experts is for the feed-forward matrices of a dense block, and the logits are the model's."""
    made = quantized(open_checkpoint(write(tmp_path / "m", published(DENSE))), PLAN, tmp_path / "cache")
    assert isinstance(matrix := made.layer(0).linears()["feed_forward.up"], QuantizedMatrix) and matrix.bits == 2
    equal(made, PLAN)
    decoder = Decoder(in_memory(made), lambda matrix: lambda x: x @ to_float(matrix))
    again = Decoder(planned(in_memory(made.source), PLAN), lambda matrix: lambda x: x @ to_float(matrix))
    np.testing.assert_array_equal(next_logits(decoder, [1, 2, 3]), next_logits(again, [1, 2, 3]))


def test_the_methods() -> None:
    """``nearest`` is `affine`'s; ``hqq`` has HQQ's scales, its minima to a rounding, the best codes, and less error."""
    weights = (np.random.default_rng(0).standard_t(2, (128, 400)) / 50).astype(np.float32)
    apart: list[int] = []
    for bits in (2, 3, 4):
        nearest, solved = (Quantization(bits, 64, method)(weights) for method in ("nearest", "hqq"))
        assert same(nearest, by_range(weights, bits=bits, group_size=64, scale_dtype="float16"))
        found = as_minimum(hqq_quantize(weights, bits=bits, group_size=64, scale_dtype="float16"))
        np.testing.assert_array_equal(solved.scales, found.scales)
        np.testing.assert_array_equal(solved.zeros, found.zeros.astype(np.float16))
        scales, minima = (np.repeat(part.astype(np.float32), 64, axis=0) for part in (solved.scales, solved.zeros))
        nearest_codes = np.clip(np.rint((weights - minima) / scales), 0, 2**bits - 1)
        np.testing.assert_array_equal(unpack(solved.words, bits), nearest_codes)
        apart.append(int((solved.words != found.words).sum()))  # HQQ's codes are for a zero that is not stored
        if bits < 4:  # where its zero is not rounded first
            errors = [float(np.abs(weights - to_float(matrix)).mean()) for matrix in (solved, nearest)]
            assert errors[0] < errors[1]
    assert max(apart) > 0


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"bits": 5}, "bits is 5; allowed: 2, 3, 4 or 8"),
    ({"group_size": 0}, "group_size is 0"),
    ({"group_size": True}, "group_size is True"),
    ({"method": "awq"}, "method is 'awq'; allowed: nearest, hqq or gptq"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_quantisations_that_are_none(change: dict[str, Any], message: str) -> None:
    """A plan is checked when it is made."""
    with pytest.raises(ArgumentError, match=message):
        Quantization(**{"bits": 4, "group_size": 32, **change})


def test_weights_that_cannot_be_quantised_so(source: Checkpoint, tmp_path: Path) -> None:
    """Groups longer than a column, groups that do not fill it, and minima beyond float16 are named."""
    for quantization, message in (
        (Quantization(4, 33), "group_size is 33; allowed: an integer from 1 to 32"),
        (Quantization(4, 24, "hqq"), "group_size is 24; allowed: a divisor of 32"),
        (Quantization(4, 64, "hqq"), "group_size is 64; allowed: an integer from 1 to 32"),
    ):
        with pytest.raises(ArgumentError, match=message):
            quantized(source, Plan(None, quantization), tmp_path)
    large = np.linspace(7e4, 7.001e4, 16, dtype=np.float32).reshape(16, 1)
    with pytest.raises(ArgumentError, match="float16"):
        Quantization(4, 16, "hqq")(large)


# Kept.


def test_what_is_there_is_not_made_again(
    source: Checkpoint, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second run reads no block of the checkpoint, reports its progress all the same, and has the same weights."""
    quantized(source, PLAN, tmp_path)
    monkeypatch.setattr(Checkpoint, "layer", lambda *arguments: pytest.fail("a block was read"))
    seen: list[tuple[int, int]] = []
    again = quantized(open_checkpoint(folder), PLAN, tmp_path, lambda *work: seen.append(work))
    assert seen == [(1, 3), (2, 3), (3, 3)]
    again.layer(0)
    monkeypatch.undo()
    equal(again, PLAN)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_block_is_calibrated_behind_the_others(lost: int, source: Checkpoint, tmp_path: Path) -> None:
    """Whether it is missing when the model is opened, or when the block is asked for."""
    plan = PLANS["gptq"]
    made = quantized(source, plan, tmp_path)
    file = made.folder / f"layer-{lost:05}.safetensors"
    expected = file.read_bytes()
    file.unlink()
    made.layer(lost)
    assert file.read_bytes() == expected
    file.unlink()
    quantized(source, plan, tmp_path)
    assert file.read_bytes() == expected


def test_the_default_folder(source: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in the cache folder of lowbit, wherever that is."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    made = quantized(source, PLAN)
    assert made.folder == tmp_path / "quantized" / made.digest
    assert sorted(file.name for file in made.folder.iterdir()) == [
        "head.safetensors",
        "layer-00000.safetensors",
        "layer-00001.safetensors",
    ]


def test_another_plan_or_another_source_is_another_folder(folder: Path, tmp_path: Path) -> None:
    """Bits, groups, method, text, parts; a shard of other weights; another configuration: none takes the other's."""
    path = tmp_path / "m"
    shutil.copytree(folder, path)
    plans = [*PLANS.values(), Plan(Quantization(3, 16), PLAN.attention, PLAN.head), Plan(PLAN.experts, PLAN.attention)]
    plans += [Plan(Quantization(2, 8), PLAN.attention, PLAN.head), Plan(PLAN.attention, PLAN.experts, PLAN.head)]
    plans += [Plan(Quantization(2, 16, "hqq"), PLAN.attention, PLAN.head)]
    plans += [
        replace(PLANS["gptq"], text=text) for text in (CalibrationText(TOKENS[1:], 16), CalibrationText(TOKENS, 9))
    ]
    cache = tmp_path / "cache"
    digests = {quantized(open_checkpoint(path), plan, cache).digest for plan in plans}
    assert len(digests) == len(plans) == len(list(cache.iterdir()))
    for change in (
        lambda: write(path, published(seed=5)),
        lambda: (path / "config.json").write_text(json.dumps(MIXTRAL | {"rope_theta": 5.0})),
        lambda: (path / "model.safetensors.index.json").write_text(
            (folder / "model.safetensors.index.json").read_text() + " "
        ),
    ):
        change()
        digest = quantized(open_checkpoint(path), PLAN, cache).digest
        assert digest not in digests
        digests.add(digest)


def test_new_weights_are_never_the_old_ones(folder: Path, tmp_path: Path) -> None:
    """A checkpoint that is replaced under its path is quantised anew, and one replaced while in use is refused."""
    path, cache = tmp_path / "m", tmp_path / "cache"
    shutil.copytree(folder, path)
    old = quantized(open_checkpoint(path), PLAN, cache)
    write(path, published(seed=9))
    equal(quantized(open_checkpoint(path), PLAN, cache), PLAN)
    shutil.rmtree(old.folder)
    with pytest.raises(FormatError, match="changed since it was opened"):
        old.layer(0)


# Memory.


MEASURED = """
import sys, tracemalloc
from pathlib import Path

sys.path.append(sys.argv[1])
from tiny_checkpoint import MIXTRAL, published, write
from tracing import traced

from lowbit.formats.checkpoint import cache
from lowbit.formats.checkpoint.reader import open_checkpoint
from lowbit.model.quantization_plan import Plan, Quantization

cache.usable_processors = lambda: 1
folder = Path(sys.argv[2])
config = MIXTRAL | {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_local_experts": 8}
path = write(folder / "m", published(config | {"head_dim": 32, "vocab_size": 260}))
plan = Plan(Quantization(4, 64), Quantization(4, 64))
cache.quantized(open_checkpoint(path), Plan(Quantization(3, 64), None), folder / "warm").layer(0)
making, using = [], []
for name in ("one", "two"):
    with traced():
        made = cache.quantized(open_checkpoint(path), plan, folder / name)
        making.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.reset_peak()
        for number in range(2):
            made.layer(number)
        using.append(tracemalloc.get_traced_memory()[1])
print(min(making), min(using))  # tables of Python's own, such as that of interned strings, grow in one of them at most
"""


def test_no_more_than_a_block_in_memory(tmp_path: Path) -> None:
    """Quantising takes one matrix as float32 and one block quantised, using the result takes less than that.

    In a process of its own: what earlier tests have begun would be counted too.
    """
    command = python_command("-c", MEASURED, str(SUPPORT), str(tmp_path))
    making, using = map(int, subprocess.check_output(command, text=True, timeout=100).split())
    matrix = 128 * 256 * 4
    block = 8 * 3 * matrix
    assert making < block / 6 + 6 * matrix < block
    assert using < block / 8  # the codes of a block alone


def test_how_many_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many matrices as there are processors, but no more than fit in 4 GiB four times over: four of Mixtral's."""
    mixtral, small = SHAPES["mixtral-8x7b"], LlamaConfig(1, 64, 128, 2, 1, 32, 256, 64, 1e4, 1e-5)
    for processors, of_mixtral in ((1, 1), (3, 3), (64, 4)):
        monkeypatch.setattr(checkpoint_cache, "usable_processors", lambda processors=processors: processors)
        assert (threads_for(mixtral), threads_for(small)) == (of_mixtral, processors)
    assert threads_for(replace(mixtral, hidden=2**20)) == 1


@pytest.mark.parametrize("method", ["nearest", "hqq"])
def test_what_a_matrix_takes(method: Method) -> None:
    """Its float32 weights at most four times, which is what the number of threads is reckoned by.

    Buffers of HQQ's solver take 5 MB for any matrix, so this one is larger.
    """
    weights = np.random.default_rng(0).standard_normal((2048, 2048), np.float32)
    for bits in (2, 3, 8):
        tracemalloc.start()
        try:
            Quantization(bits, 64, method)(weights)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert weights.nbytes + peak < COPIES * weights.nbytes


def test_any_number_of_threads(source: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files are the same to the bit, and with three threads three matrices are in work at once."""
    made, meet = list[QuantizedCheckpoint](), threading.Barrier(3, timeout=60)
    mine, places, of = threading.local(), list[int](), Plan.of

    def met(plan: Plan, name: str) -> Quantization | None:
        """The first matrix of each thread waits for those of two others."""
        if threading.current_thread() is not threading.main_thread() and not hasattr(mine, "met"):
            mine.met = True
            places.append(meet.wait())
        return of(plan, name)

    monkeypatch.setattr(Plan, "of", met)
    for threads in (1, 3):
        monkeypatch.setattr(checkpoint_cache, "usable_processors", lambda threads=threads: threads)
        made.append(quantized(source, PLANS["hqq"], tmp_path / str(threads)))
    for name in made[0].parts():
        one, other = (each.folder / f"{name}.safetensors" for each in made)
        assert one.read_bytes() == other.read_bytes()
    assert sorted(places) == [0, 0, 1, 1, 2, 2]  # for each of two blocks


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
    made, other = quantized(source, PLAN, tmp_path), quantized(source, PLANS["hqq"], tmp_path)
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
