"""`uptrain`: the network is the decoder, a training resumes to the bit, and what is written is what was trained."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: `nox -s torch` installs it and runs these tests")

import tiny_checkpoint
import tiny_gguf
import torch
from typer.testing import CliRunner, Result

from lowbit.cli import app
from lowbit.errors import ArgumentError
from lowbit.model.decoder import Decoder
from lowbit.model.matrices import to_float
from lowbit.model.weights import LlamaWeights
from lowbit.runtime import open_model
from lowbit.uptraining import Course, uptrain
from lowbit_torch import Uptraining
from lowbit_torch.network import HEAD, Network

TEXT = "hello hall 12 of the hill, he said; hello. " * 6
TOKENS = np.random.default_rng(0).integers(3, 250, 400)
GEMMA = replace(tiny_gguf.CONFIG, activation="gelu", window=8, full_every=2, local_rope_base=1e4, embedding_scale=8.0)
COURSE = Course(3, 1e-2, tokens=64, length=16, seed=5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model whose head is the embedding."""
    config = tiny_checkpoint.DENSE | {"tie_word_embeddings": True}
    return tiny_checkpoint.write(tmp_path_factory.mktemp("model") / "tiny", tiny_checkpoint.published(config))


def tiny(path: Path, architecture: str) -> Path:
    """A GGUF file of two blocks; of gemma3 one with windows of 8 tokens."""
    config = GEMMA if architecture == "gemma3" else tiny_gguf.CONFIG
    return tiny_gguf.write(path, tiny_gguf.published(config=config, architecture=architecture))


def plain(weights: LlamaWeights) -> Decoder:
    return Decoder(weights, lambda matrix: lambda x: x @ to_float(matrix))


# **The network.**


@pytest.mark.parametrize(
    ("architecture", "factors"),
    [
        *((name, {}) for name in ("llama", "qwen2", "qwen3", "gemma3")),
        ("llama", {"embedding_scale": 3.0, "residual_scale": 0.6, "logit_divisor": 0.7}),
    ],
)
def test_logits_are_those_of_the_decoder(architecture: str, factors: dict[str, Any], tmp_path: Path) -> None:
    """With biases, with norms of heads, with windows and gates of another kind, and with factors.

    A model of two blocks has 15 products of at most 96 terms one after another. In float32 each term is rounded twice,
    so the largest logit may differ by 2 · 15 · 96 · 2^-24 of itself, where no sum cancels more than a product does.
    """
    weights = open_model(tiny(tmp_path / "a.gguf", architecture)).weights
    weights = replace(weights, config=replace(weights.config, **factors))
    assert (weights.config.layers, weights.config.hidden, weights.config.feed_forward) == (2, 64, 96)
    found = Network(weights, tied=False).logits(torch.from_numpy(TOKENS[:40].reshape(2, 20))).detach().numpy()
    decoder = plain(weights)
    for row, tokens in zip(found, TOKENS[:40].reshape(2, 20), strict=True):
        expected = decoder.logits(decoder.hidden(tokens.tolist(), decoder.new_state()))
        assert np.abs(row - expected).max() <= 2 * 15 * 96 * 2**-24 * np.abs(expected).max()


def test_a_tied_head_is_trained_as_the_embedding(folder: Path) -> None:
    """There is no parameter of its own, and after training it is the embedding still."""
    weights = open_model(folder).weights
    assert HEAD not in Network(weights, tied=True).parameters
    training = Uptraining(weights, [TOKENS], COURSE, tied=True)
    training.until(1)
    after = training.weights()
    np.testing.assert_array_equal(to_float(after.head), np.asarray(after.embedding).T)
    assert (np.asarray(after.embedding) != np.asarray(weights.embedding)).any()


# **Training.**


def test_every_weight_is_trained_and_the_loss_falls(folder: Path) -> None:
    """On a text that repeats itself; no parameter stays as it was."""
    weights = open_model(folder).weights
    training = Uptraining(weights, [np.tile(TOKENS[:8], 20)], COURSE, tied=True)
    training.until(12)
    assert training.losses[-1] < training.losses[0] - 0.5
    after = training.weights()
    for before, layer in zip(weights.layers, after.layers, strict=True):
        for name, matrix in layer.linears().items():
            assert (to_float(matrix) != to_float(before.linears()[name])).any(), name
        assert not np.array_equal(np.asarray(layer.attention_norm), np.asarray(before.attention_norm))
    assert not np.array_equal(after.norm, weights.norm)


def test_a_training_resumes_to_the_bit(folder: Path, tmp_path: Path) -> None:
    """From a file of the same training; one of another, or none, is not taken."""
    weights = open_model(folder).weights
    whole, first, second, other = (Uptraining(weights, [TOKENS], COURSE, tied=True) for _ in range(4))
    whole.until(3)
    first.until(2)
    first.save(tmp_path / "kept", "a call")
    assert other.restore(tmp_path / "kept", "another call") == other.restore(tmp_path / "none", "a call") == 0
    (tmp_path / "cut").write_bytes((tmp_path / "kept").read_bytes()[:1000])
    assert other.restore(tmp_path / "cut", "a call") == other.step == 0
    assert second.restore(tmp_path / "kept", "a call") == 2
    second.until(3)
    assert whole.losses == second.losses
    same(whole.weights(), second.weights())


def same(one: LlamaWeights, other: LlamaWeights) -> None:
    for first, second in zip(one.layers, other.layers, strict=True):
        for name, matrix in first.linears().items():
            np.testing.assert_array_equal(to_float(second.linears()[name]), to_float(matrix), err_msg=name)
        np.testing.assert_array_equal(second.attention_norm, first.attention_norm)
        np.testing.assert_array_equal(second.feed_forward_norm, first.feed_forward_norm)
    np.testing.assert_array_equal(np.asarray(other.embedding), np.asarray(one.embedding))
    np.testing.assert_array_equal(other.norm, one.norm)


# **Directories.**


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ["qwen2", "gemma3"])
def test_what_is_written_is_what_was_trained(architecture: str, dtype: str, tmp_path: Path) -> None:
    """Each number rounded to the dtype; Gemma's files hold the gains of its norms less 1."""
    source = tiny(tmp_path / "a.gguf", architecture)
    course, before = Course(2, 1e-3, 64, 16, dtype=dtype), open_model(source)
    told = uptrain(source, tmp_path / "new", [TEXT], course)
    after = open_model(tmp_path / "new")
    tokens = np.array(before.tokenizer.encode(TEXT, begin=False), np.int64)
    training = Uptraining(before.weights, [tokens], course, tied="output.weight" not in names(source))
    training.until(2)
    same(training.weights(1.0 if architecture == "gemma3" else 0.0), after.weights)
    assert (told["steps"], told["resumed"]) == (2, 0)
    assert told["loss"]["last"] == pytest.approx(np.mean(training.losses), abs=1e-12)


def names(path: Path) -> set[str]:
    from gguf import GGUFReader

    return {tensor.name for tensor in GGUFReader(path).tensors}


def test_an_interrupted_command_resumes(folder: Path, tmp_path: Path) -> None:
    """The file beside the directory holds the steps that are done; the result is that of an undisturbed run."""

    def interrupted(what: str, done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        uptrain(folder, tmp_path / "new", [TEXT], COURSE, interrupted)
    assert [path.name for path in tmp_path.iterdir()] == [".new.training"]
    assert uptrain(folder, tmp_path / "new", [TEXT], COURSE)["resumed"] == 2
    uptrain(folder, tmp_path / "other", [TEXT], COURSE)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "other"]
    for file in (tmp_path / "other").iterdir():
        assert (tmp_path / "new" / file.name).read_bytes() == file.read_bytes(), file.name


# **The command, and what is refused.**


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["uptrain", *map(str, arguments)])


def test_the_command(folder: Path, tmp_path: Path) -> None:
    """It pools, trains on, and says how the loss went; the answer is one object."""
    (tmp_path / "text").write_text(TEXT)
    pooled = CliRunner().invoke(app, ["pool", str(folder), "-o", str(tmp_path / "pooled"), "--kv-heads", "1"])
    assert pooled.exit_code == 0
    options = ["--text", tmp_path / "text", "--steps", 2, "--tokens", 64, "--length", 16]
    result = run(tmp_path / "pooled", "-o", tmp_path / "new", *options, "--json")
    assert result.exit_code == 0, (result.output, result.exception)
    told = json.loads(result.stdout)
    assert (told["texts"], told["resumed"], told["course"]["rate"]) == (["text"], 0, 1e-4)
    assert open_model(tmp_path / "new").config.kv_heads == 1
    spoken = run(tmp_path / "pooled", "-o", tmp_path / "again", *options)
    assert f"2 steps; loss {told['loss']['first']:.3f} to" in spoken.stdout


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"steps": 0}, "steps is 0"),
    ({"rate": 0.0}, "rate is 0.0; allowed: a finite number above 0"),
    ({"rate": float("nan")}, "rate is nan"),
    ({"tokens": 15}, "tokens is 15; allowed: an integer of at least 16"),
    ({"seed": -1}, "seed is -1"),
    ({"dtype": "int8"}, "dtype is 'int8'; allowed: float32, bfloat16 or float16"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_courses_that_are_none(change: dict[str, Any], message: str) -> None:
    """A course is checked when it is made."""
    with pytest.raises(ArgumentError, match=message):
        Course(**{"steps": 2, "rate": 1e-3, "tokens": 64, "length": 16} | change)


def test_models_and_texts_that_cannot_be_trained_on(folder: Path, tmp_path: Path) -> None:
    """Experts, a window beyond the context, a short text, a token too many, a name that is taken, numbers too large."""
    sparse = tiny_checkpoint.write(tmp_path / "sparse")
    with pytest.raises(ArgumentError, match="a model with the operation gate cannot be trained"):
        uptrain(sparse, tmp_path / "new", [TEXT], COURSE)
    with pytest.raises(ArgumentError, match="length is 65; allowed: an integer from 1 to 64"):
        uptrain(folder, tmp_path / "new", [TEXT], Course(1, tokens=99, length=65))
    with pytest.raises(ArgumentError, match="tokens of a text is 3"):
        uptrain(folder, tmp_path / "new", ["abc"], COURSE)
    with pytest.raises(ArgumentError, match="token of a text is 260"):
        Uptraining(open_model(folder).weights, [np.full(99, 260)], COURSE, tied=True)
    with pytest.raises(ArgumentError, match="sparse"):
        uptrain(folder, sparse, [TEXT], COURSE)
    with pytest.raises(ArgumentError, match="not finite in float16"):
        uptrain(folder, tmp_path / "new", [TEXT], Course(1, 1e6, 64, 16, dtype="float16"))
    result = run(folder, "-o", tmp_path / "new", "--text", folder / "config.json", "--steps", 0)
    assert isinstance(result.exception, ArgumentError) and "--steps is 0" in str(result.exception)
