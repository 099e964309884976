"""``lowbit pool``: directories whose keys and values are pooled to the bit, and errors in words."""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_checkpoint
import tiny_gguf
from paths import SUPPORT
from typer.testing import CliRunner, Result

from lowbit.arrays import F32
from lowbit.attention.pooling import KeyValueProjection, convert
from lowbit.cli import app
from lowbit.errors import ArgumentError, FormatError, UnavailableError
from lowbit.formats.checkpoint import tensors
from lowbit.formats.checkpoint.reader import open_checkpoint
from lowbit.model.decoder import Decoder, next_logits
from lowbit.model.matrices import Matrix, to_float
from lowbit.model.weights import LayerWeights, vector_sizes
from lowbit.rewriting import changing, to_directory
from lowbit.runtime import load, open_model
from lowbit.system.interpreters import python_command

TEXT = "hello hall 12 of the hill"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["pool", *map(str, arguments)])


def answer(*arguments: object) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, (result.output, result.exception)
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with biases: four query heads, two key-value heads."""
    return tiny_gguf.write(tmp_path_factory.mktemp("source") / "a.gguf", tiny_gguf.published(architecture="qwen2"))


def projection(layer: LayerWeights, heads: int) -> KeyValueProjection:
    parts = to_float(layer.key), to_float(layer.value)
    return KeyValueProjection("self", heads, *parts, layer.key_bias, layer.value_bias)


def check_others_stay(after: LayerWeights, before: LayerWeights, names: set[str]) -> None:
    """Everything but keys and values is as it was, to the bit; `names` are the vectors of the configuration."""
    changed = {"key", "value", "key_bias", "value_bias"}
    for name, matrix in before.linears().items():
        if name not in changed:
            np.testing.assert_array_equal(to_float(after.linears()[name]), to_float(matrix), err_msg=name)
    for name in names - changed:
        expected, found = getattr(before, name), getattr(after, name)
        assert (expected is None and found is None) or np.array_equal(expected, found), name


# **What is written.**


@pytest.mark.parametrize("method", ["mean", "first"])
def test_keys_and_values_are_those_of_the_chapter(method: Any, gguf: Path, tmp_path: Path) -> None:
    """Matrices and biases equal `convert` on the source's; embedding, head and norms are as they were."""
    told = answer(gguf, "-o", tmp_path / "new", "--kv-heads", 1, "--method", method)
    assert (told["kv_heads"], told["method"], told["seed"]) == ({"before": 2, "after": 1}, method, None)
    assert told["cache_bytes_per_token"] == {"before": 2 * 2 * 2 * 16 * 2, "after": 2 * 2 * 1 * 16 * 2}
    before, after = open_model(gguf), open_model(tmp_path / "new")
    assert after.config == replace(before.config, kv_heads=1)
    assert after.tokenizer.encode(TEXT) == before.tokenizer.encode(TEXT)
    for old, new in zip(before.weights.layers, after.weights.layers, strict=True):
        expected, found = convert(projection(old, 2), 1, method), projection(new, 1)
        for name in ("key", "value", "key_bias", "value_bias"):
            np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), err_msg=name)
        check_others_stay(new, old, set(vector_sizes(before.config)))
    np.testing.assert_array_equal(np.asarray(after.weights.embedding), np.asarray(before.weights.embedding))
    np.testing.assert_array_equal(after.weights.norm, before.weights.norm)
    np.testing.assert_array_equal(to_float(after.weights.head), to_float(before.weights.head))
    with load(tmp_path / "new", "reference") as model:
        assert np.isfinite(model.logits(TEXT)).all()


def test_a_model_of_equal_heads_keeps_its_logits(tmp_path: Path) -> None:
    """Where both heads of a group hold the same numbers, pooling changes no key and no value, and so no logit."""
    model = tiny_gguf.published(architecture="qwen2")
    for name, tensor in model.tensors.items():
        if "attn_k" in name or "attn_v" in name:
            tensor[16:] = tensor[:16]
    source = tiny_gguf.write(tmp_path / "a.gguf", model)
    answer(source, "-o", tmp_path / "new", "--kv-heads", 1)
    tokens = open_model(source).tokenizer.encode(TEXT)
    models = [Decoder(open_model(path).weights, in_sequence) for path in (source, tmp_path / "new")]
    logits = [next_logits(model, tokens) for model in models]
    np.testing.assert_array_equal(logits[0], logits[1])


def in_sequence(matrix: Matrix) -> Callable[[F32], F32]:
    """A linear layer that adds row after row, so that the bits of a column do not depend on its place."""
    weights = to_float(matrix)

    def linear(x: F32) -> F32:
        total = np.zeros((len(x), weights.shape[1]), np.float32)
        for row in range(len(weights)):
            total += x[:, row : row + 1] * weights[row]
        return total

    return linear


def test_random_heads(gguf: Path, tmp_path: Path) -> None:
    """A seed gives the same heads again and another seed others; they have the deviation that is promised."""
    found = {}
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        told = answer(gguf, "-o", tmp_path / name, "--kv-heads", 1, "--method", "random", "--seed", seed)
        assert told["seed"] == seed
        found[name] = open_model(tmp_path / name).weights.layers
    for a, b, c in zip(*found.values(), strict=True):
        for part in ("key", "value"):
            first, again, other = (to_float(getattr(each, part)) for each in (a, b, c))
            np.testing.assert_array_equal(first, again)
            assert (first != other).any()
            # the standard error of a standard deviation is σ/√2n; with 1024 numbers 5 of them are 0.11 σ
            assert abs(first.std() * 64**0.5 - 1) < 5 / (2 * first.size) ** 0.5
            assert not getattr(a, f"{part}_bias").any()
    first_layer, second_layer = found["a"]
    assert (to_float(first_layer.key) != to_float(second_layer.key)).any()
    assert (to_float(first_layer.key) != to_float(first_layer.value)).any()


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3"])
def test_norms_of_each_head_stay(architecture: str, tmp_path: Path) -> None:
    """Their gain is one for all heads."""
    config = tiny_gguf.CONFIG
    if architecture == "gemma3":
        config = replace(config, window=8, full_every=2, local_rope_base=10000.0)
    model = tiny_gguf.published(config=config, architecture=architecture)
    source = tiny_gguf.write(tmp_path / "a.gguf", model)
    answer(source, "-o", tmp_path / "new", "--kv-heads", 1)
    before, after = open_model(source), open_model(tmp_path / "new")
    for old, new in zip(before.weights.layers, after.weights.layers, strict=True):
        assert old.key_norm is not None
        check_others_stay(new, old, set(vector_sizes(before.config)))


def test_experts_stay(tmp_path: Path) -> None:
    """Of a sparse directory everything but attention is the same, and `config.json` differs in two fields."""
    source = tiny_checkpoint.write(tmp_path / "source")
    answer(source, "-o", tmp_path / "new", "--kv-heads", 1)
    before, after = open_model(source), open_model(tmp_path / "new")
    for old, new in zip(before.weights.layers, after.weights.layers, strict=True):
        check_others_stay(new, old, set(vector_sizes(before.config)))
    old, new = (json.loads((path / "config.json").read_text()) for path in (source, tmp_path / "new"))
    assert new == old | {"num_key_value_heads": 1, "torch_dtype": "float32"}


def test_several_matrices_in_one_tensor(tmp_path: Path) -> None:
    """Phi-3's queries, keys and values are one tensor, of 8-bit codes here, and are one tensor of floats after."""
    folder = Path(__file__).parent.parent / "formats/checkpoint/quantised/gptq-v1-8-phi3"
    source = tmp_path / "source"
    source.mkdir()
    for file in folder.glob("*.*"):
        (source / file.name).write_bytes(file.read_bytes())
    tokenizer = {**tiny_checkpoint.TOKENIZER, "added_tokens": [], "post_processor": None}
    letters = {chr(97 + number): number for number in range(26)}
    tokenizer["model"] = {**tokenizer["model"], "vocab": letters, "merges": []}
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    before = open_checkpoint(source)
    assert before.config.kv_heads % 2 == 0
    answer(source, "-o", tmp_path / "new", "--kv-heads", before.config.kv_heads // 2)
    after = open_checkpoint(tmp_path / "new")
    assert not after.packed and any("qkv_proj" in name for name in after.table)
    for number in range(before.config.layers):
        old, new = before.layer(number), after.layer(number)
        expected = convert(projection(old, before.config.kv_heads), after.config.kv_heads)
        np.testing.assert_array_equal(to_float(new.key), expected.key)
        np.testing.assert_array_equal(to_float(new.value), expected.value)
        check_others_stay(new, old, set(vector_sizes(before.config)))


# **Interrupts and failures.**

KILLED = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background would ignore it
sys.path[:0] = {path!r}
from lowbit.rewriting import changing
made = changing.commit_floats
def commit(parts, source, number, layer):
    if number == 1:
        os.kill(os.getpid(), signal.{signal})
    made(parts, source, number, layer)
changing.commit_floats = commit
sys.argv = ["lowbit", "pool", *{arguments!r}]
from lowbit.cli import main
main()
"""


@pytest.mark.parametrize("name", ["SIGKILL", "SIGINT"])
def test_an_interrupted_run_is_resumed(name: str, gguf: Path, tmp_path: Path) -> None:
    """Nothing is under the final name; the same command keeps the first block and gives the same bytes."""
    answer(gguf, "-o", tmp_path / "whole", "--kv-heads", 1)
    arguments = [str(each) for each in (gguf, "-o", tmp_path / "new", "--kv-heads", 1)]
    program = KILLED.format(path=[str(SUPPORT)], arguments=arguments, signal=name)
    done = subprocess.run(python_command("-c", program), capture_output=True, check=False, text=True)
    assert done.returncode == (-signal.SIGKILL if name == "SIGKILL" else 130), done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "new").exists()
    if name == "SIGINT":
        assert "run the same command again to resume" in done.stderr
    assert answer(gguf, "-o", tmp_path / "new", "--kv-heads", 1)["resumed"] == 1
    contents = [{file.name: file.read_bytes() for file in (tmp_path / each).iterdir()} for each in ("new", "whole")]
    assert contents[0] == contents[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "whole"]


def test_another_method_begins_anew(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder that a run of another method left is removed."""
    with monkeypatch.context() as patch:
        made = to_directory.commit_floats

        def commit(parts: Any, source: Any, number: int, layer: Any) -> None:
            if number == 1:
                raise KeyboardInterrupt
            made(parts, source, number, layer)

        patch.setattr(changing, "commit_floats", commit)
        assert run(gguf, "-o", tmp_path / "new", "--kv-heads", 1).exit_code == 130
    assert len(list(tmp_path.iterdir())) == 1
    assert answer(gguf, "-o", tmp_path / "new", "--kv-heads", 1, "--method", "first")["resumed"] == 0
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


def test_a_full_disk(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in words, and nothing under the final name."""

    def full(*_: object, **__: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(tensors, "save_file", full)
    result = run(gguf, "-o", tmp_path / "new", "--kv-heads", 1)
    assert isinstance(result.exception, UnavailableError) and "No space left" in str(result.exception)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    assert "are needed and" in str(run(gguf, "-o", tmp_path / "new", "--kv-heads", 1).exception)
    assert list(tmp_path.iterdir()) == []


def test_what_loads_otherwise_is_not_published(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If numbers were rounded to float16, the final check would find it."""

    def rounded(numbers: F32) -> Any:
        return numbers.astype(np.float16)

    monkeypatch.setattr(to_directory, "smallest", rounded)
    result = run(gguf, "-o", tmp_path / "new", "--kv-heads", 1)
    assert isinstance(result.exception, FormatError)
    assert "other numbers when it is loaded" in str(result.exception)
    assert not (tmp_path / "new").exists()


# **What is refused.**


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kv-heads", 0], "--kv-heads is 0; allowed:"),
        (["--kv-heads", 2], "--kv-heads is 2; allowed: a divisor of the 2 key-value heads of a.gguf, and fewer"),
        (["--kv-heads", 3], "--kv-heads is 3; allowed: a divisor of the 2 key-value heads"),
        (["--kv-heads", 1, "--method", "best"], "--method is 'best'; allowed: mean, first or random"),
        (["--kv-heads", 1, "--seed", 5], "--seed applies only to random heads"),
        (["--kv-heads", 1, "--method", "random", "--seed", -1], "--seed is -1"),
        (["--kv-heads", 1, "--gptq-version", "v1"], "GPTQ version v1 was asked for"),
    ],
)
def test_wrong_arguments(
    arguments: list[object], message: str, gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each gets a line that names the option, what it was and what is allowed, before a weight is read."""
    monkeypatch.setattr(changing, "journal", None)  # nothing is begun
    result = run(gguf, "-o", tmp_path / "new", *arguments)
    assert isinstance(result.exception, ArgumentError), result.exception
    assert message in str(result.exception)
    assert list(tmp_path.iterdir()) == []


def test_a_destination_that_is_taken(gguf: Path, tmp_path: Path) -> None:
    """It stays as it was."""
    (tmp_path / "file").write_text("mine")
    assert "a name that is free" in str(run(tmp_path / "no", "-o", tmp_path, "--kv-heads", 1).exception)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_norm_of_all_heads_is_refused(tmp_path: Path) -> None:
    """OLMo 2 norms all key heads together, and the reason is said."""
    config = tiny_checkpoint.DENSE | {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"}
    del config["sliding_window"]
    model = tiny_checkpoint.published(config)
    for number in range(2):
        at = f"model.layers.{number}"
        gain = model.tensors.pop(f"{at}.input_layernorm.weight")
        for name, size in (("self_attn.q_norm", 32), ("self_attn.k_norm", 16), ("post_feedforward_layernorm", 32)):
            model.tensors[f"{at}.{name}.weight"] = np.resize(gain, size)
            model.types[f"{at}.{name}.weight"] = "F32"
    source = tiny_checkpoint.write(tmp_path / "olmo", model)
    said = str(run(source, "-o", tmp_path / "new", "--kv-heads", 1).exception)
    assert "olmo norms all its key heads together" in said
    assert not (tmp_path / "new").exists()


def test_what_is_said(gguf: Path, tmp_path: Path) -> None:
    """One line on standard output, with the bytes of the cache."""
    said = run(gguf, "-o", tmp_path / "new", "--kv-heads", 1)
    assert said.stdout.count("\n") == 1
    assert "1 key-value heads, the mean of groups of 2; cache in float16: 256 to 128 bytes a token" in said.stdout
    assert "16.0 KiB to 8.0 KiB for 64 tokens" in said.stdout
