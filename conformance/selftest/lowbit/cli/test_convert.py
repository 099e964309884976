"""``lowbit convert``: the same numbers in every layout that holds them, and the loss in words where one does not."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rewriting
import tiny_checkpoint
import tiny_gguf
from gguf import GGMLQuantizationType, GGUFReader
from rewriting import TEXT, contents, ends, events_of, floats, killed, run_counted
from safetensors.numpy import save_file

from lowbit.attention.rope import Scaling
from lowbit.errors import ArgumentError, FormatError
from lowbit.formats.checkpoint.reader import open_checkpoint
from lowbit.formats.checkpoint.tensors import WIDTHS, read_coded, read_header
from lowbit.model.matrices import to_float
from lowbit.rewriting import converting, writing
from lowbit.runtime import open_model
from lowbit.tensor_formats.stored import Stored

run, answer = partial(rewriting.run, "convert"), partial(rewriting.answer, "convert")
quantized = partial(rewriting.answer, "quantize")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models of floats, and what `lowbit quantize` makes of the dense one: with all zeros in the middle, and others."""
    folder = tmp_path_factory.mktemp("sources")
    found = rewriting.sources_in(folder)
    order = ["--method", "gptq", "--act-order", "--calibration", found["text"], "--symmetric"]
    made: dict[str, list[Any]] = {
        "symmetric": ["--symmetric"],
        "asymmetric": [],
        "eight": ["--bits", 8, "--symmetric"],
        "three": ["--bits", 3, "--format", "compressed-tensors"],
        "mixed": ["--bits", 2, "--attention-bits", 8, "--symmetric"],
        "order": order,
        "hqq": ["--method", "hqq", "--format", "hqq"],
        "columns": ["--group-size", 16],
    }
    for name, options in made.items():
        quantized(found["dense"], "-o", folder / name, "--group-size", 32, *options)
        found[name] = folder / name
    for kind in ("Q4_0", "Q8_0", "Q5_0", "Q5_1"):
        model = tiny_gguf.published(kind=GGMLQuantizationType[kind])
        found[kind] = tiny_gguf.write(folder / f"{kind}.gguf", model)
    return found


def check_same(before: Path, after: Path) -> None:
    """All numbers, and the tokenizer."""
    one, other = open_model(before), open_model(after)
    matrices = floats(one.weights)
    for name, values in floats(other.weights).items():
        np.testing.assert_array_equal(values, matrices[name], err_msg=name)
    for this, that in zip(ends(one.weights), ends(other.weights), strict=True):
        np.testing.assert_array_equal(this, that)
    for mine, theirs in zip(one.weights.layers, other.weights.layers, strict=True):
        np.testing.assert_array_equal(mine.attention_norm, theirs.attention_norm)
        np.testing.assert_array_equal(mine.feed_forward_norm, theirs.feed_forward_norm)
    assert one.tokenizer.encode(TEXT) == other.tokenizer.encode(TEXT)
    assert (one.tokenizer.bos, one.tokenizer.stop) == (other.tokenizer.bos, other.tokenizer.stop)
    assert replace(one.config, rms_epsilon=1.0) == replace(other.config, rms_epsilon=1.0)
    assert np.float32(one.config.rms_epsilon) == np.float32(other.config.rms_epsilon)


WAYS = [
    ("symmetric", ("gptq-v1", "awq", "compressed-tensors", "hqq", "gguf", "floats")),
    ("asymmetric", ("gptq-v1", "awq", "compressed-tensors", "hqq", "gguf", "floats")),
    ("eight", ("gptq-v1", "compressed-tensors", "hqq", "gguf")),
    ("three", ("hqq", "gguf")),
    ("mixed", ("gptq-v1", "gguf")),
    ("order", ("gptq-v1", "floats")),
    ("hqq", ("floats",)),
    ("columns", ("awq",)),
    ("Q4_0", ("gptq-v2", "gptq-v1", "awq", "compressed-tensors", "floats")),
    ("Q8_0", ("gptq-v2", "compressed-tensors", "floats")),
    ("gguf", ("floats",)),
    ("Q5_1", ("floats",)),
    ("dense", ("gguf", "floats")),
    ("sparse", ("floats",)),
]

BACK = {"three": "compressed-tensors"}


@pytest.mark.parametrize(("kind", "layout"), [(kind, layout) for kind, layouts in WAYS for layout in layouts])
def test_no_number_changes(kind: str, layout: str, sources: dict[str, Path], tmp_path: Path) -> None:
    """There, and back to a layout of the kind that it came from where that holds it."""
    told = answer(sources[kind], "-o", tmp_path / "new", "--format", layout)
    check_same(sources[kind], tmp_path / "new")
    are_codes = layout != "floats" and kind not in ("dense", "sparse")
    assert bool(told["matrices"]) == are_codes and told["resumed"] == 0
    if are_codes:
        back = "gguf" if sources[kind].is_file() else BACK.get(kind, "gptq-v2")
        answer(tmp_path / "new", "-o", tmp_path / "back", "--format", back)
        check_same(sources[kind], tmp_path / "back")


def test_gptq_comes_back_byte_by_byte(sources: dict[str, Path], tmp_path: Path) -> None:
    """From AWQ, whose codes lie elsewhere."""
    answer(sources["asymmetric"], "-o", tmp_path / "awq", "--format", "awq")
    answer(tmp_path / "awq", "-o", tmp_path / "back", "--format", "gptq-v2")
    before, after = contents(sources["asymmetric"]), contents(tmp_path / "back")
    shards = [name for name in before if name.endswith("safetensors")]
    assert len(shards) == 3 and all(before[name] == after[name] for name in shards)


def test_blocks_of_gguf_come_back_byte_by_byte(sources: dict[str, Path], tmp_path: Path) -> None:
    """Q4_0 by way of GPTQ, scales below 0 included; ggml writes them for about half of all blocks."""
    answer(sources["Q4_0"], "-o", tmp_path / "gptq", "--format", "gptq-v2")
    answer(tmp_path / "gptq", "-o", tmp_path / "back", "--format", "gguf")
    before, after = (
        {each.name: each.data for each in GGUFReader(path).tensors} for path in (sources["Q4_0"], tmp_path / "back")
    )
    scales = np.concatenate([data[:, :2].view(np.float16).ravel() for name, data in before.items() if "ffn_up" in name])
    assert (scales < 0).any() and (scales > 0).any()
    for name, data in before.items():
        if name.startswith("blk"):
            np.testing.assert_array_equal(after[name], data, err_msg=name)


def test_other_bits_are_named_by_module(sources: dict[str, Path], tmp_path: Path) -> None:
    """In the configuration, for those that differ from most."""
    told = answer(sources["mixed"], "-o", tmp_path / "new", "--format", "gptq-v1")
    config = json.loads((tmp_path / "new/config.json").read_text())["quantization_config"]
    assert config["bits"] == 8 and config["sym"] and not config["desc_act"]
    rules = {name: rule for name, rule in config["dynamic"].items() if rule}
    assert len(rules) == 6 and all(rule == {"bits": 2} for rule in rules.values())
    assert "+:model\\.layers\\.1\\.mlp\\.up_proj$" in rules
    assert {each["bits"] for each in told["matrices"].values()} == {2, 8}


def test_matrices_that_are_floats_stay_floats(sources: dict[str, Path], tmp_path: Path) -> None:
    """A directory in which one matrix is not quantised; the new configuration names it."""
    answer(sources["asymmetric"], "-o", tmp_path / "floats", "--format", "floats")
    half = mixture(sources["asymmetric"], tmp_path / "floats", "model.layers.1.mlp.up_proj", tmp_path / "half")
    for layout in ("awq", "gptq-v2", "gguf"):
        told = answer(half, "-o", tmp_path / layout, "--format", layout)
        check_same(half, tmp_path / layout)
        assert "layers[1].feed_forward.up" not in told["matrices"] and len(told["matrices"]) == 13
    config = json.loads((tmp_path / "awq/config.json").read_text())["quantization_config"]
    assert "model.layers.1.mlp.up_proj" in config["modules_to_not_convert"]


def mixture(codes: Path, plain: Path, module: str, folder: Path) -> Path:
    """The directory of codes, with one module as the other directory has it."""
    shutil.copytree(codes, folder)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shard = index["weight_map"][f"{module}.qweight"]
    table, place = read_header(folder / shard, tuple(WIDTHS)).table, read_header(plain / shard).table
    tensors = {name: read_coded(table, name) for name in table if not name.startswith(f"{module}.")}
    save_file(tensors | {f"{module}.weight": read_coded(place, f"{module}.weight")}, folder / shard)
    places = {name: file for name, file in index["weight_map"].items() if module not in name}
    index = {"weight_map": places | {f"{module}.weight": shard}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_several_matrices_in_one_tensor(tmp_path: Path) -> None:
    """Phi-3's queries, keys and values."""
    source = rewriting.fused_in(tmp_path / "source")
    answer(source, "-o", tmp_path / "new", "--format", "compressed-tensors")
    before, after = open_checkpoint(source).layer(0), open_checkpoint(tmp_path / "new").layer(0)
    for name, matrix in before.linears().items():
        assert isinstance(after.linears()[name], Stored)
        np.testing.assert_array_equal(to_float(after.linears()[name]), to_float(matrix), err_msg=name)


def test_scaled_rotations_get_through(tmp_path: Path) -> None:
    """The factors of a Llama 3.1 are a tensor in GGUF."""
    numbers = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    config = tiny_checkpoint.DENSE | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "rope_scaling": {"rope_type": "llama3", **numbers},
    }
    source = tiny_checkpoint.write(tmp_path / "source", tiny_checkpoint.published(config))
    answer(source, "-o", tmp_path / "new", "--format", "gguf")
    before, after = open_model(source).config.rope_scaling, open_model(tmp_path / "new").config.rope_scaling
    assert before is not None and after is not None and max(before.factors) > 1
    np.testing.assert_array_equal(np.array(after.factors, np.float32), np.array(before.factors, np.float32))


# **What is refused.**

REFUSED = [
    ("gguf", "gptq-v2", "q_proj cannot be converted without a loss: offsets of the groups is minima"),
    ("Q5_0", "gptq-v2", "bits is 5"),
    ("Q5_1", "gptq-v2", "format is 'q5_1'"),
    ("Q4_0", "gguf", "the source is a file of GGUF already"),
    ("eight", "awq", "bits is 8; allowed: 4"),
    ("mixed", "awq", "the layout awq has one number of bits: model.layers.0.mlp.gate_proj has 2, others have 8"),
    ("order", "awq", "groups of rows is in act-order"),
    ("order", "gguf", "groups is in act-order; allowed: runs of rows, a multiple of 32 long"),
    ("columns", "gguf", "groups is 16 rows long; allowed: runs of rows, a multiple of 32 long"),
    ("hqq", "gptq-v2", "allowed: a whole number from 0 to 15"),
    ("dense", "awq", "the model has no codes for the layout awq; lowbit quantize makes them"),
    ("gguf", "exl2", "--format is 'exl2'; allowed: gptq-v2"),
    ("sparse", "gguf", "architecture is 'mixtral'; allowed: one that GGUF has here"),
]


@pytest.mark.parametrize(("kind", "layout", "message"), REFUSED)
def test_what_would_be_lost(kind: str, layout: str, message: str, sources: dict[str, Path], tmp_path: Path) -> None:
    """The message names it, and nothing is left."""
    result = run(sources[kind], "-o", tmp_path / "new", "--format", layout)
    assert isinstance(result.exception, ArgumentError)
    assert message in str(result.exception)
    assert list(tmp_path.iterdir()) == []


Change = Callable[[dict[str, Any]], object]

RULES: list[tuple[Change, str]] = [
    (lambda words: words["pre_tokenizer"].update(add_prefix_space=True), "it has no name for the pre-tokenizer"),
    (lambda words: words.update(normalizer={"type": "NFC"}), "GGUF has no name for the rules of its tokenizer"),
    (lambda words: words["model"].update(ignore_merges=True), "GGUF has no name for the rules of its tokenizer"),
]


@pytest.mark.parametrize(("change", "message"), RULES, ids=["words", "accents", "merges"])
def test_rules_that_gguf_has_no_name_for(
    change: Change, message: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    """Of a tokenizer."""
    words = json.loads(json.dumps(tiny_checkpoint.TOKENIZER))
    change(words)
    shutil.copytree(sources["dense"], tmp_path / "source")
    (tmp_path / "source/tokenizer.json").write_text(json.dumps(words))
    said = str(run(tmp_path / "source", "-o", tmp_path / "new", "--format", "gguf").exception)
    assert "source does not fit into a file of GGUF" in said and message in said


def test_a_directory_does_not_say_the_rule_of_factors(tmp_path: Path) -> None:
    """Those of a file of GGUF."""
    config = replace(tiny_gguf.CONFIG, rope_scaling=Scaling((1.0,) * 4 + (8.0,) * 4))
    source = tiny_gguf.write(tmp_path / "a.gguf", tiny_gguf.published(config=config))
    said = str(run(source, "-o", tmp_path / "new", "--format", "floats").exception)
    assert "config.json does not say of a.gguf: rope_scaling" in said


def test_a_name_that_is_taken(sources: dict[str, Path], tmp_path: Path) -> None:
    """An empty directory is free for a directory, and not for a file."""
    (tmp_path / "new").mkdir()
    said = str(run(sources["dense"], "-o", tmp_path / "new", "--format", "gguf").exception)
    assert "--out is" in said and "allowed: a name that is free" in said
    answer(sources["dense"], "-o", tmp_path / "new", "--format", "floats")


def test_a_name_that_is_taken_meanwhile(
    sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that somebody else puts there is not replaced."""
    made = writing.finish

    def late(*arguments: Any) -> Any:
        (tmp_path / "new").write_text("of somebody else")
        return made(*arguments)

    monkeypatch.setattr(converting, "finish", late)
    result = run(sources["symmetric"], "-o", tmp_path / "new", "--format", "gguf")
    assert "File exists" in str(result.exception) and (tmp_path / "new").read_text() == "of somebody else"


def test_what_loads_otherwise_is_not_published(
    sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If two matrices changed places, the final check would find it."""
    made = converting._packed

    def swapped(*arguments: Any) -> Any:
        packed = dict(made(*arguments))
        one, other = (f"blk.0.ffn_{name}.weight" for name in ("gate", "up"))
        if one in packed:
            gate, up = packed[one], packed[other]
            packed |= {one: replace(gate, written=up.written), other: replace(up, written=gate.written)}
        return packed

    monkeypatch.setattr(converting, "_packed", swapped)
    result = run(sources["symmetric"], "-o", tmp_path / "new", "--format", "gguf")
    assert isinstance(result.exception, FormatError)
    assert "feed_forward.gate is other numbers when it is loaded" in str(result.exception)
    assert not (tmp_path / "new").exists()


# **Interrupts.**


@pytest.fixture(scope="module")
def finished(sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, Path]]:
    """How many events a conversion has that nothing interrupts, and what it writes."""
    found = {}
    for layout in ("gguf", "awq"):
        folder = tmp_path_factory.mktemp(layout)
        arguments = [sources["symmetric"], "--format", layout, "-o", folder / "whole"]
        found[layout] = events_of(folder, "convert", *arguments), folder / "whole"
    return found


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("layout", ["gguf", "awq"])
def test_a_killed_run_is_resumed(
    layout: str, seed: int, sources: dict[str, Path], finished: dict[str, tuple[int, Path]], tmp_path: Path
) -> None:
    """At a random moment: what has the final name then is whole, and the same command gives the same bytes."""
    events, whole = finished[layout]
    last = int(np.random.default_rng([seed, len(layout)]).integers(1, events + 1))
    arguments = [sources["symmetric"], "--format", layout, "-o", tmp_path / "new"]
    killed(tmp_path, last, "convert", *arguments)
    if not (tmp_path / "new").exists():
        answer(*arguments)
        assert [path.name for path in tmp_path.iterdir()] == ["new"]
    assert contents(tmp_path / "new") == contents(whole)


def test_a_disk_that_fills_up(sources: dict[str, Path], tmp_path: Path) -> None:
    """While the parts are written; a second run takes up what is there."""
    arguments = [sources["symmetric"], "--format", "gguf", "-o", tmp_path / "new"]
    status, said = run_counted(tmp_path, "convert", *arguments, most=40000)
    assert status == 2 and "File too large" in said and not (tmp_path / "new").exists()
    assert answer(*arguments)["resumed"] == 2


def test_what_is_said(sources: dict[str, Path], tmp_path: Path) -> None:
    """One line on standard output."""
    said = run(sources["symmetric"], "-o", tmp_path / "new", "--format", "gguf")
    assert said.stdout.count("\n") == 1
    assert "in layout gguf; 14 matrices of codes; every number is that of symmetric" in said.stdout
