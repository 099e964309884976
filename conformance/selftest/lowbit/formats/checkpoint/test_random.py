"""``lowbit new-weights``: directories that read as what was asked for, in little memory, and can be interrupted."""

import json
import shutil
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tracing import traced
from typer.testing import CliRunner, Result

from lowbit.cli import app
from lowbit.errors import ArgumentError, UnavailableError
from lowbit.formats.checkpoint.names import tensor_shapes
from lowbit.formats.checkpoint.random import SHAPES, random_tensor, total_bytes, write_random
from lowbit.formats.checkpoint.reader import open_checkpoint
from lowbit.formats.checkpoint.tensors import read_floats
from lowbit.formats.checkpoint.tokenizer import read_tokenizer
from lowbit.model.config import LlamaConfig, Routing
from lowbit.model.decoder import Decoder
from lowbit.model.matrices import to_float
from lowbit.model.weights import in_memory

CONFIG = LlamaConfig(3, 64, 96, 4, 2, 16, 300, 128, 1e6, 1e-5, Routing(4, 2))
BLOCK = 2 * (64 * 64 * 2 + 64 * 32 * 2 + 4 * 64 + 4 * 3 * 64 * 96 + 2 * 64)


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize("config", [CONFIG, replace(CONFIG, routing=None, window=9)], ids=["sparse", "dense"])
def test_it_reads_as_what_was_asked_for(config: LlamaConfig, tmp_path: Path) -> None:
    """The shape, every tensor as its name and seed say, in any shards, and as many bytes as were counted."""
    write_random(tmp_path / "one", config, 7)
    write_random(tmp_path / "many", config, 7, shard_bytes=20_000)
    assert len(list((tmp_path / "one").glob("*.safetensors"))) == 1
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 5
    for name in ("one", "many"):
        source = open_checkpoint(tmp_path / name)
        assert source.config == config
        assert sum(place.nbytes for place in source.table.values()) == total_bytes(config)
        for tensor, shape in tensor_shapes(config, tied=False):
            expected = random_tensor(tensor, shape, 7, config.layers)
            np.testing.assert_array_equal(read_floats(source.table, tensor), expected.astype(np.float32))


def test_seeds_and_names() -> None:
    """Another seed or another name gives other numbers; the same gives the same, however many are made at a time."""
    tensors = [random_tensor(name, (8, 8), seed, 2) for name in ("a", "b") for seed in (0, 1)]
    for number, one in enumerate(tensors):
        for other in tensors[number + 1 :]:
            assert (one != other).mean() > 0.9
    np.testing.assert_array_equal(tensors[0], random_tensor("a", (8, 8), 0, 2))


def test_activations_stay_of_one_size(tmp_path: Path) -> None:
    """Through 24 blocks the stream is about what the embedding was, logits are about 1, and tokens part ways."""
    config = replace(CONFIG, layers=24)
    write_random(tmp_path / "m", config, 1)
    decoder = Decoder(in_memory(open_checkpoint(tmp_path / "m")))
    logits = decoder.logits(decoder.hidden(list(range(0, 300, 7)), decoder.new_state()))
    assert 0.5 < float(logits.std()) < 2
    assert len(set(logits.argmax(axis=1).tolist())) > 20
    layer = open_checkpoint(tmp_path / "m").layer(0)
    for name, matrix in layer.linears().items():
        added = 48 if name == "output" or name.endswith("down") else 1
        weights = to_float(matrix)
        assert float(weights.std()) == pytest.approx((len(weights) * added) ** -0.5, rel=0.15), name


def test_the_published_shape() -> None:
    """Mixtral 8x7B has 46.7 billion weights, as many bytes as its published index says."""
    assert total_bytes(SHAPES["mixtral-8x7b"]) == 93_405_585_408


def test_the_tokenizer_of_bytes(tmp_path: Path) -> None:
    """A vocabulary of 256 or more can read and write any text; a smaller one has no tokenizer."""
    write_random(tmp_path / "m", CONFIG, 0)
    tokenizer = read_tokenizer(open_checkpoint(tmp_path / "m"))
    assert (tokenizer.bos, tokenizer.stop) == (None, ())
    for text in ("", "Alice", " a\n\tb ", "naïve 🙂 Ω\x00"):
        assert tokenizer.encode(text) == list(text.encode())
        assert tokenizer.decode(list(text.encode())) == "".join(tokenizer.stream(list(text.encode()))) == text
    assert "".join(tokenizer.stream([72, 299, 105])) == tokenizer.decode([72, 299, 105]) == "Hi"
    write_random(tmp_path / "small", replace(CONFIG, vocabulary=255), 0)
    assert not (tmp_path / "small" / "tokenizer.json").exists()
    assert in_memory(open_checkpoint(tmp_path / "small")).config.vocabulary == 255


def test_one_shard_in_memory(tmp_path: Path) -> None:
    """The peak is a shard and some chunks, whatever the number of blocks."""
    config = replace(CONFIG, layers=12, hidden=128, feed_forward=256)
    total, shard = total_bytes(config), 200_000
    write_random(tmp_path / "warm", CONFIG, 0, shard_bytes=shard)
    with traced():
        write_random(tmp_path / "m", config, 0, shard_bytes=shard)
        peak = tracemalloc.get_traced_memory()[1]
    assert peak < shard + 30 * 128 * 256 * 4 < total / 2  # chunks here are whole matrices, one for each thread


def test_an_interrupt_and_going_on(tmp_path: Path) -> None:
    """What was interrupted is no model; the same call keeps its shards and ends with the same bytes as in one go."""

    def stop(done: int, total: int) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    path = tmp_path / "m"
    with pytest.raises(KeyboardInterrupt):
        write_random(path, CONFIG, 3, shard_bytes=50_000, progress=stop)
    with pytest.raises(ArgumentError, match=r"config\.json"):
        open_checkpoint(path)
    kept = {file: file.stat().st_mtime_ns for file in path.glob("*.safetensors")}
    assert len(kept) > 2
    seen: list[int] = []
    write_random(path, CONFIG, 3, shard_bytes=50_000, progress=lambda done, total: seen.append(done))
    assert {file: file.stat().st_mtime_ns for file in kept} == kept
    assert seen == sorted(seen) and seen[-1] == total_bytes(CONFIG)
    write_random(tmp_path / "again", CONFIG, 3, shard_bytes=50_000)
    assert contents(path) == contents(tmp_path / "again")
    write_random(path, CONFIG, 3, shard_bytes=50_000)  # once more changes nothing
    assert contents(path) == contents(tmp_path / "again")


@pytest.mark.parametrize("what", ["seed", "shape", "shards", "file", "shard", "link", "about"])
def test_a_directory_that_holds_something_else(what: str, tmp_path: Path) -> None:
    """Nothing of another seed or shape, and nobody's file, is overwritten."""
    path = tmp_path / "m"
    write_random(path, CONFIG, 3)
    if what == "file":
        (path / "notes").write_text("mine")
    elif what == "shard":
        (path / "model-00001-of-00001.safetensors").write_bytes(b"mine")
    elif what == "about":
        (path / "lowbit.json").unlink()
    elif what == "link":
        (path / "config.json").unlink()
        (path / "config.json").symlink_to(tmp_path / "nowhere")
    before = {file.name: file.read_bytes() for file in path.iterdir() if file.exists()}
    config = replace(CONFIG, rope_base=5.0) if what == "shape" else CONFIG
    with pytest.raises(ArgumentError, match="allowed: an empty directory, or one begun with the same shape and seed"):
        write_random(path, config, 4 if what == "seed" else 3, shard_bytes=999 if what == "shards" else 2**30)
    assert {file.name: file.read_bytes() for file in path.iterdir() if file.exists()} == before


def test_no_room_and_no_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are errors in words, before anything is written; shards that are there need no room again."""
    usage, total = shutil.disk_usage(tmp_path), total_bytes(CONFIG)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=total - 1))
    with pytest.raises(UnavailableError, match=r"disk space for new weights is unavailable: \d+\.\d KiB are needed"):
        write_random(tmp_path / "m", CONFIG, 0)
    assert not (tmp_path / "m").exists()
    monkeypatch.undo()
    write_random(tmp_path / "m", CONFIG, 0)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=0))
    write_random(tmp_path / "m", CONFIG, 0)
    monkeypatch.undo()
    (tmp_path / "file").touch()
    with pytest.raises(UnavailableError, match="name a folder that you can write to"):
        write_random(tmp_path / "file" / "m", CONFIG, 0)
    with pytest.raises(ArgumentError, match="allowed: a directory, or a name that is free"):
        write_random(tmp_path / "file", CONFIG, 0)


def test_shapes_that_a_directory_cannot_say(tmp_path: Path) -> None:
    """Choices of other models are refused before anything is written."""
    for change in ({"activation": "gelu"}, {"embedding_scale": 2.0}, {"routing": Routing(4, 2, "before")}):
        with pytest.raises(ArgumentError, match="the choices of model type 'mixtral'"):
            write_random(tmp_path / "m", replace(CONFIG, **change), 0)
    assert list(tmp_path.iterdir()) == []


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["new-weights", *(str(argument) for argument in arguments)])


SMALL = ["--layers", 1, "--hidden", 32, "--feed-forward", 64, "--heads", 2, "--kv-heads", 1, "--head-dim", 16]


@pytest.mark.whole
def test_the_command(tmp_path: Path) -> None:
    """The shape of Mixtral with some numbers of one's own; the model generates."""
    result = run(tmp_path / "m", *SMALL, "--vocabulary", 256, "--experts", 3, "--top-k", 1, "--seed", 5, "--json")
    assert result.exit_code == 0, result.exception
    found: dict[str, Any] = json.loads(result.stdout)
    config = open_checkpoint(tmp_path / "m").config
    assert config == LlamaConfig(1, 32, 64, 2, 1, 16, 256, 32768, 1e6, 1e-5, Routing(3, 1))
    assert (found["seed"], found["bytes"]) == (5, total_bytes(config))
    said = CliRunner().invoke(app, ["generate", "--model", str(tmp_path / "m"), "--prompt", "a", "--tokens", "3"])
    assert said.exit_code == 0, said.exception


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--like", "gpt"], "--like is 'gpt'; allowed: mixtral-8x7b"),
        (["--layers", 0], "--layers is 0"),
        (["--feed-forward", 2**40], "--feed-forward is 1099511627776"),
        (["--experts", 0], "--experts is 0"),
        (["--experts", 2**31], "shape is 32 layers of 2147483648 experts; allowed: at most 16384 in all"),
        (["--layers", 2**31, "--hidden", 2], "shape is 2147483648 layers of 8 experts; allowed: at most 16384 in all"),
        (["--top-k", 9], "top_k is 9"),
        (["--kv-heads", 3], "heads is 32"),
        (["--seed", -1], "seed is -1"),
    ],
)
def test_wrong_arguments(arguments: list[object], message: str, tmp_path: Path) -> None:
    """Each is named, and nothing is written."""
    result = run(tmp_path / "m", *arguments)
    assert isinstance(result.exception, ArgumentError) and message in str(result.exception)
    assert not (tmp_path / "m").exists()
