"""``lowbit ksort``: a directory that only lowbit loads, and errors in words."""

import json
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_checkpoint
import tiny_gguf
from exact_sums import logits_in_any_order
from paths import SUPPORT
from typer.testing import CliRunner, Result

from lowbit.attention.ksort import LayerOrders
from lowbit.backend import load as load_backend
from lowbit.cli import app
from lowbit.errors import ArgumentError, FormatError
from lowbit.formats.checkpoint import config as checkpoint_config
from lowbit.formats.checkpoint.reader import open_checkpoint
from lowbit.formats.checkpoint.tensors import read_coded, write_tensors
from lowbit.model.block import FORMULAS
from lowbit.model.decoder import Decoder, next_logits
from lowbit.model.matrices import to_float
from lowbit.rewriting import changing
from lowbit.rewriting.sorting import READ_A_TEXT, Key
from lowbit.runtime import BackendLinears, Options, inspect, load, open_model
from lowbit.runtime.elementwise import on_backend
from lowbit.system.interpreters import python_command

TEXT = "hello hall 12 of the hill, he said; hello.\n"


def run(*arguments: object, command: str = "ksort") -> Result:
    return CliRunner().invoke(app, [command, *map(str, arguments)])


def answer(*arguments: object, command: str = "ksort") -> dict[str, Any]:
    result = run(*arguments, "--json", command=command)
    assert result.exit_code == 0, (result.output, result.exception)
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sources")
    (folder / "text").write_text(TEXT * 8)
    kinds = {name: tiny_gguf.published(architecture=name) for name in ("llama", "qwen2", "qwen3")}
    found = {name: tiny_gguf.write(folder / f"{name}.gguf", model) for name, model in kinds.items()}
    sparse = tiny_checkpoint.write(folder / "sparse")
    sorted_before = folder / "sorted"
    answer(found["llama"], "-o", sorted_before)
    return found | {"sparse": sparse, "sorted": sorted_before, "text": folder / "text"}


# **What is written.**


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "sparse"])
def test_logits_stay(kind: str, sources: dict[str, Path], tmp_path: Path) -> None:
    """What is loaded again has the source's logits, to the bit, where no sum depends on the order of channels."""
    told = answer(sources[kind], "-o", tmp_path / "new")
    assert told["kv_heads"] == 2 and told["key"] == "norm" and told["calibration"] is None
    assert told["shared_order"] == (kind == "qwen3")
    before, after = open_model(sources[kind]), open_model(tmp_path / "new")
    tokens = before.tokenizer.encode(TEXT)
    found, expected = (logits_in_any_order(model.weights, tokens) for model in (after, before))
    np.testing.assert_array_equal(found, expected)
    assert np.abs(expected).max() > 0
    assert after.config == before.config


def test_without_the_order_the_model_is_another(sources: dict[str, Path]) -> None:
    """The vector is needed: the same weights rotated as half-split channels give other logits."""
    model = open_model(sources["sorted"])
    weights, tokens = model.weights, model.tokenizer.encode(TEXT)
    layers = tuple(replace(layer, key_order=None) for layer in weights.layers)
    found = logits_in_any_order(replace(weights, layers=layers), tokens)
    same = (found == logits_in_any_order(weights, tokens)).all(axis=1)
    assert same[0] and not same[1:].any()  # a token that sees itself only needs no place


def test_a_type_that_no_other_tool_has(sources: dict[str, Path]) -> None:
    """`config.json` names neither the kind nor the class of the source where other tools look for them."""
    config = json.loads((sources["sorted"] / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("lowbit_ksort", ["LowbitKSortForCausalLM"])
    assert config["lowbit_ksort"] == {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    found = inspect(sources["sorted"])
    assert found.problem == "" and found.architecture == "LowbitKSortForCausalLM"


@pytest.mark.parametrize("key", READ_A_TEXT)
def test_calibration_is_named(key: Key, sources: dict[str, Path], tmp_path: Path) -> None:
    """Text, tokens and window are in the answer; the orders are tested with those of the chapter."""
    common = ["--key", key, "--calibration", sources["text"], "--calibration-tokens", 50, "--window", 16]
    told = answer(sources["qwen2"], "-o", tmp_path / "new", *common)
    assert told["key"] == key and told["calibration"] == {"text": "text", "tokens": 50, "window": 16}
    other = answer(sources["qwen2"], "-o", tmp_path / "other", "--key", "bias")
    assert other["key"] == "bias"
    orders = [[layer.key_order for layer in open_model(tmp_path / each).weights.layers] for each in ("new", "other")]
    assert any((one != two).any() for one, two in zip(*orders, strict=True))


def test_a_sorted_model_is_quantised_like_any_other(sources: dict[str, Path], tmp_path: Path) -> None:
    """Its orders go along, and its codes are those of the source in the order of its channels."""
    common = ["--bits", 8, "--group-size", 16]
    for name in ("llama", "sorted"):
        answer(sources[name], "-o", tmp_path / name, *common, command="quantize")
    plain, found = (open_model(tmp_path / name).weights for name in ("llama", "sorted"))
    for old, new in zip(plain.layers, found.layers, strict=True):
        assert new.key_order is not None
        orders = LayerOrders.of(new.key_order, found.config.head_dim, found.config.heads)
        columns = {"query": orders.query_columns, "key": orders.key_columns}
        for name, matrix in old.linears().items():
            numbers = to_float(matrix)
            expected = numbers[:, columns.get(name, np.arange(numbers.shape[1]))]
            np.testing.assert_array_equal(to_float(new.linears()[name]), expected, err_msg=name)
    assert "key_order" in open_checkpoint(tmp_path / "sorted").architecture.vectors


def test_layers_without_a_rotation_need_no_pairs(tmp_path: Path) -> None:
    """SmolLM3 rotates in some layers only; both kinds are sorted."""
    fields = {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "no_rope_layers": [1, 0]}
    config = {name: value for name, value in (tiny_checkpoint.DENSE | fields).items() if name != "sliding_window"}
    source = tiny_checkpoint.write(tmp_path / "source", tiny_checkpoint.published(config))
    answer(source, "-o", tmp_path / "new")
    before, after = open_model(source), open_model(tmp_path / "new")
    tokens = before.tokenizer.encode(TEXT)
    found, expected = (logits_in_any_order(model.weights, tokens) for model in (after, before))
    np.testing.assert_array_equal(found, expected)


def test_backends_rotate_sorted_heads_too(sources: dict[str, Path]) -> None:
    """The rotation of a backend, in float32, gives the source's bits where no sum depends on the order of channels."""
    before, after = open_model(sources["llama"]), open_model(sources["sorted"])
    tokens = before.tokenizer.encode(TEXT)
    with load_backend("numpy") as backend:
        steps = on_backend(backend, before.config, FORMULAS)
        assert "rope.rotate" in steps.names
        found, expected = (logits_in_any_order(model.weights, tokens, steps.ops) for model in (after, before))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("step", ["operations", "formulas"])
def test_a_backend_runs_a_sorted_model(step: Any, sources: dict[str, Path]) -> None:
    """What `load` runs is a decoder with the operations of the backend, or with those of the formulas."""
    model = open_model(sources["sorted"])
    tokens = model.tokenizer.encode(TEXT)
    with load(sources["sorted"], "numpy", Options(step=step)) as opened, load_backend("numpy") as backend:
        ops = on_backend(backend, model.config, FORMULAS).ops if step == "operations" else FORMULAS
        decoder = Decoder(model.weights, BackendLinears(backend), ops=ops)
        np.testing.assert_array_equal(opened.logits(tokens), next_logits(decoder, tokens))


# **Damaged directories.**


@pytest.mark.parametrize("numbers", [[0, 0], [-1, 1], [1, 2], [0.5, 1]])
def test_orders_that_are_none(numbers: list[float], sources: dict[str, Path], tmp_path: Path) -> None:
    """A channel twice, one that does not exist, and a fraction are errors in the file."""
    for file in sources["sorted"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    table, name = open_checkpoint(tmp_path).table, "model.layers.0.self_attn.key_order"
    shard = table[name].shard.path
    tensors = {each: read_coded(table, each).copy() for each, place in table.items() if place.shard.path == shard}
    order = tensors[name].astype(np.float32)
    places = [int(np.flatnonzero(order[:16] == channel)[0]) for channel in (0, 1)]
    order[places] = numbers
    write_tensors(shard, tensors | {name: order}, {})
    with pytest.raises(FormatError, match=r"key_order.*no permutation; allowed: each of 0 to 15 once for each head"):
        open_checkpoint(tmp_path).layer(0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "allowed: ['LowbitKSortForCausalLM']"),
        ({"lowbit_ksort": {"model_type": "gpt2"}}, "config.json: lowbit_ksort: model_type is 'gpt2'"),
        ({"lowbit_ksort": {"model_type": "lowbit_ksort"}}, "model_type is 'lowbit_ksort'"),
        ({"lowbit_ksort": "llama"}, "lowbit_ksort"),
        ({"lowbit_ksort": {"model_type": "qwen2"}}, "q_proj.bias"),
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, "key_order"),
    ],
)
def test_other_configurations(fields: dict[str, Any], message: str, sources: dict[str, Path], tmp_path: Path) -> None:
    """Each is refused in words: also the kind of the source, whose loader would miss the order."""
    for file in sources["sorted"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | fields))
    with pytest.raises(FormatError) as caught:
        open_checkpoint(tmp_path)
    assert message in str(caught.value)


# **Interrupts.**

KILLED = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background would ignore it
sys.path[:0] = {path!r}
from lowbit.rewriting import changing
made = changing.commit_floats
def commit(parts, source, number, layer):
    if number == 1:
        os.kill(os.getpid(), signal.SIGINT)
    made(parts, source, number, layer)
changing.commit_floats = commit
sys.argv = ["lowbit", "ksort", *{arguments!r}]
from lowbit.cli import main
main()
"""


def test_an_interrupted_calibration_is_resumed(sources: dict[str, Path], tmp_path: Path) -> None:
    """The same command keeps the first block, reads the text again, and gives the same bytes."""
    options = ["--key", "calibrated", "--calibration", sources["text"], "--window", 32]
    answer(sources["llama"], "-o", tmp_path / "whole", *options)
    arguments = [str(each) for each in (sources["llama"], "-o", tmp_path / "new", *options)]
    program = KILLED.format(path=[str(SUPPORT)], arguments=arguments)
    done = subprocess.run(python_command("-c", program), capture_output=True, check=False, text=True)
    assert done.returncode == 130 and "Traceback" not in done.stderr, done.stderr
    assert "run the same command again to resume" in done.stderr
    assert not (tmp_path / "new").exists()
    assert answer(sources["llama"], "-o", tmp_path / "new", *options)["resumed"] == 1
    contents = [{file.name: file.read_bytes() for file in (tmp_path / each).iterdir()} for each in ("new", "whole")]
    assert contents[0] == contents[1]
    assert done.returncode == 128 + signal.SIGINT


# **What is refused.**

REFUSED: list[tuple[str, list[object], str]] = [
    ("llama", ["--key", "size"], "--key is 'size'; allowed: norm, bias, calibrated or keys-over-queries"),
    ("llama", ["--key", "bias"], "--key bias applies only to a model with key biases, and llama.gguf has none"),
    ("llama", ["--calibration", "text"], "--calibration applies only to --key calibrated or keys-over-queries"),
    ("llama", ["--window", 8], "--window applies only to --key calibrated or keys-over-queries"),
    ("llama", ["--key", "calibrated", "--calibration-tokens", 0], "--calibration-tokens is 0"),
    ("llama", ["--key", "calibrated", "--window", 65, "--calibration", "TEXT"], "--window is 65; allowed: at most 64"),
    ("sorted", [], "the channels of sorted are sorted already"),
    ("llama", ["--gptq-version", "v1"], "GPTQ version v1 was asked for"),
]


@pytest.mark.parametrize(("source", "arguments", "message"), REFUSED)
def test_wrong_arguments(
    source: str,
    arguments: list[object],
    message: str,
    sources: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each gets a line that names the option, what it was and what is allowed, before a weight is read."""
    monkeypatch.setattr(changing, "journal", None)  # nothing is begun
    given = [sources["text"] if each == "TEXT" else each for each in arguments]
    result = run(sources[source], "-o", tmp_path / "new", *given)
    assert isinstance(result.exception, ArgumentError), result.exception
    assert message in str(result.exception)
    assert list(tmp_path.iterdir()) == []


def test_an_empty_text_and_pooling_after(sources: dict[str, Path], tmp_path: Path) -> None:
    """No token is no calibration; and sorted heads have different orders, so they cannot be pooled."""
    (tmp_path / "empty").touch()
    seen = ["--key", "calibrated", "--calibration", tmp_path / "empty"]
    assert "--calibration is 0 tokens" in str(run(sources["llama"], "-o", tmp_path / "new", *seen).exception)
    refused = run(sources["sorted"], "-o", tmp_path / "new", "--kv-heads", 1, command="pool")
    assert "pool first, and sort after" in str(refused.exception)


def test_what_is_said(sources: dict[str, Path], tmp_path: Path) -> None:
    """One line on standard output."""
    said = run(sources["llama"], "-o", tmp_path / "new")
    assert said.stdout.count("\n") == 1
    assert "key channels sorted by norm, 2 orders in each layer" in said.stdout
    said = run(sources["qwen3"], "-o", tmp_path / "shared")
    assert "one order in each layer" in said.stdout


def test_the_field_is_the_type() -> None:
    """Outsiders may have stored such directories."""
    assert checkpoint_config.SORTED == "lowbit_ksort"


def test_a_file_of_gguf_has_no_place_for_the_order(sources: dict[str, Path], tmp_path: Path) -> None:
    """So a sorted model is not converted into one."""
    result = run(sources["sorted"], "-o", tmp_path / "new.gguf", "--format", "gguf", command="convert")
    assert isinstance(result.exception, ArgumentError) and "lowbit_ksort" in str(result.exception)
    assert list(tmp_path.iterdir()) == []
