"""A checkpoint quantised block by block: the right weights, kept, in little memory."""

import json
import shutil
import subprocess
import threading
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from paths import SUPPORT
from quantized_copies import PLAN, equal, same
from tiny_checkpoint import DENSE, MIXTRAL, published, write

from lowbit.errors import ArgumentError, FormatError
from lowbit.formats.checkpoint import cache as checkpoint_cache
from lowbit.formats.checkpoint.cache import COPIES, QuantizedCheckpoint, quantized, threads_for
from lowbit.formats.checkpoint.random import SHAPES
from lowbit.formats.checkpoint.reader import Checkpoint, open_checkpoint
from lowbit.model.calibration import CalibrationText
from lowbit.model.config import LlamaConfig
from lowbit.model.decoder import Decoder, next_logits
from lowbit.model.matrices import to_float
from lowbit.model.quantization_plan import Method, Plan, Quantization, planned
from lowbit.model.weights import in_memory
from lowbit.quantization.affine import QuantizedMatrix
from lowbit.quantization.affine import quantize as by_range
from lowbit.quantization.hqq import as_minimum
from lowbit.quantization.hqq import quantize as hqq_quantize
from lowbit.quantization.packing import unpack
from lowbit.system.interpreters import python_command
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
for name in ("one", "two", "three"):
    with traced():
        made = cache.quantized(open_checkpoint(path), plan, folder / name)
        making.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.reset_peak()
        for number in range(2):
            made.layer(number)
        using.append(tracemalloc.get_traced_memory()[1])
print(min(making), min(using))  # tables of Python's own, such as that of interned strings, grow in some of them
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
