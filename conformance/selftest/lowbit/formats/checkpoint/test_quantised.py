"""Directories that are quantised already, against the tools that own their formats (``quantised/write.py``)."""

import hashlib
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tiny_checkpoint
from quantised_directories import DATA, MODELS, Q, copied, held_by, written
from typer.testing import CliRunner

from lowbit.arrays import F32
from lowbit.cli import app
from lowbit.errors import ArgumentError, FormatError
from lowbit.formats.checkpoint.cache import quantized
from lowbit.formats.checkpoint.names import tensor_shapes
from lowbit.formats.checkpoint.reader import Checkpoint, open_checkpoint
from lowbit.model.block import plain_linear
from lowbit.model.decoder import Decoder
from lowbit.model.matrices import to_float
from lowbit.model.quantization_plan import Plan, planned
from lowbit.model.weights import in_memory, matrices
from lowbit.runtime import load
from lowbit.tensor_formats.stored import Stored, dequantized

LIMIT = 1e-5
"""Of the largest logit, as in ``test_transformers.py``."""


def expected(name: str) -> dict[str, Any]:
    with np.load(DATA / name / "expected.npz") as held:
        return dict(held)


def logits(weights: Checkpoint, tokens: list[int]) -> F32:
    """Those after each token, by products in float32 of the numbers rounded once."""
    decoder = Decoder(in_memory(weights), lambda matrix: plain_linear(to_float(matrix)))
    return decoder.logits(decoder.hidden(tokens, decoder.new_state()))


# **The numbers.**


def named(checkpoint: Checkpoint) -> dict[str, Stored]:
    """The quantised matrices by their modules, as they are stored."""
    shapes = dict(tensor_shapes(checkpoint.config, checkpoint.tied, checkpoint.architecture))
    return {
        packed.module: checkpoint._stored(name, *reversed(shapes[name])) for name, packed in checkpoint.packed.items()
    }


@pytest.mark.parametrize("name", MODELS)
def test_every_number_is_the_tools(name: str) -> None:
    """Bit for bit, in float32, and nothing else is quantised."""
    told, found = expected(name), named(open_checkpoint(DATA / name))
    assert sorted(told["names"]) == sorted(found)
    for module, digest in zip(told["names"], told["sums"], strict=True):
        choices = [np.ascontiguousarray(each.T) + np.float32(0) for each in dequantized(found[module], "float32")]
        assert digest in [hashlib.sha256(each.tobytes()).hexdigest() for each in choices], module


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_float_model(name: str) -> None:
    """Of the model in transformers whose weights are what the tool dequantised; other weights give others."""
    told, checkpoint = expected(name), open_checkpoint(DATA / name)
    tokens, largest = [int(token) for token in told["tokens"]], float(np.abs(told["logits"]).max())
    np.testing.assert_allclose(logits(checkpoint, tokens), told["logits"], rtol=0, atol=LIMIT * largest)
    cast = {"ct-int": "int of 8 bits", "fp8-block": "float8"}.get(name)
    assert [f"made for activations cast to {cast};" in remark for remark in checkpoint.remarks] == [True] * bool(cast)


@pytest.mark.parametrize("backend", ["numpy", "reference"])
@pytest.mark.parametrize("name", MODELS)
def test_backends_without_prepared_forms(name: str, backend: str) -> None:
    """numpy multiplies by the dequantised matrices, and the account says so."""
    told, checkpoint = expected(name), open_checkpoint(DATA / name)
    with load(checkpoint, backend) as model:
        taken = model.account().fields["matrices"]
        found = model.logits([int(token) for token in told["tokens"]])
    undeclared = [count for reason, count in taken["by_numpy_float32"].items() if "does not declare" in reason]
    assert taken["by_backend"] == 0 and sum(undeclared) >= len(checkpoint.packed)
    np.testing.assert_allclose(found, told["logits"][-1], rtol=0, atol=LIMIT * float(np.abs(told["logits"]).max()))


def test_a_plan_quantises_them_again(tmp_path: Path) -> None:
    """Through the cache as in memory, and another version of GPTQ is another model there."""
    plan = Plan.uniform(4, 32)
    source = open_checkpoint(DATA / "gptq-v1-4")
    found, wanted = in_memory(quantized(source, plan, tmp_path)), planned(in_memory(source), plan)
    for (what, ours), (_, theirs) in zip(matrices(found), matrices(wanted), strict=True):
        np.testing.assert_array_equal(to_float(ours), to_float(theirs), what)
    assert open_checkpoint(DATA / "gptq-v1-4", "v2").digest != source.digest


# **The version of GPTQ.**


@pytest.mark.parametrize(("label", "format"), [("gptq", "gptq-v1"), ("gptq_v2", "gptq-v2"), (None, "gptq-v1")])
def test_the_zeros_show_the_version(label: str | None, format: str, tmp_path: Path) -> None:
    """A label that the zeros of symmetric codes contradict counts for nothing, and a warning says so."""
    folder = copied("gptq-v2-4", tmp_path / "m", {"checkpoint_format": label})
    told = expected("gptq-v2-4")
    checkpoint = open_checkpoint(folder)
    assert {packed.format for packed in checkpoint.packed.values()} == {"gptq-v2"}
    np.testing.assert_allclose(
        logits(checkpoint, [int(token) for token in told["tokens"]]),
        told["logits"],
        rtol=0,
        atol=LIMIT * float(np.abs(told["logits"]).max()),
    )
    if format == "gptq-v2":
        assert not checkpoint.remarks
    else:
        said = "the label says gptq-v1" if label else "without a label it would be gptq-v1"
        (remark,) = checkpoint.remarks
        assert said in remark and "so this is gptq-v2" in remark and "gptq_version" in remark


@pytest.mark.parametrize("name", ["gptq-v1-4", "gptq-v2-4"])
@pytest.mark.parametrize("version", ["v1", "v2"])
def test_a_version_that_is_given_counts(name: str, version: Any) -> None:
    """Whatever label and zeros say; there is nothing to remark then."""
    checkpoint = open_checkpoint(DATA / name, version)
    assert {packed.format for packed in checkpoint.packed.values()} == {f"gptq-{version}"}
    assert not checkpoint.remarks


def test_zeros_that_differ_leave_it_to_the_label(tmp_path: Path) -> None:
    """As those of codes without symmetry do."""
    checkpoint = open_checkpoint(copied("gptq-v1-4", tmp_path / "m", {"checkpoint_format": "gptq_v2"}))
    assert {packed.format for packed in checkpoint.packed.values()} == {"gptq-v2"} and not checkpoint.remarks


def test_a_wrong_version(tmp_path: Path) -> None:
    """One that does not exist, and one for a model of another kind."""
    wrong: Any = "v3"
    with pytest.raises(ArgumentError, match="gptq_version is 'v3'; allowed: v1 or v2"):
        open_checkpoint(DATA / "gptq-v1-4", wrong)
    for folder in (DATA / "awq-gemm", tiny_checkpoint.write(tmp_path / "m")):
        with pytest.raises(ArgumentError, match="GPTQ version v1 was asked for, and the checkpoint has no matrices of"):
            open_checkpoint(folder, "v1")
    with pytest.raises(ArgumentError, match="None, where the model is open already"):
        load(open_checkpoint(DATA / "gptq-v1-4"), "numpy", gptq_version="v1")


# **Unusual but right.**


def test_groups_in_order_need_no_index(tmp_path: Path) -> None:
    """The first GPTQ checkpoints have no ``g_idx``."""
    indices = {key: None for key in held_by("gptq-v1-3") if key.endswith("g_idx")}
    told = expected("gptq-v1-3")
    tokens = [int(token) for token in told["tokens"]]
    found = logits(open_checkpoint(copied("gptq-v1-3", tmp_path / "m", tensors=indices)), tokens)
    np.testing.assert_array_equal(found, logits(open_checkpoint(DATA / "gptq-v1-3"), tokens))


def test_biases_of_zeros(tmp_path: Path) -> None:
    """AutoGPTQ writes them for matrices without a bias; others would be ignored, and are refused."""
    bias = np.zeros(64, np.float16)
    folder = copied("gptq-v1-3", tmp_path / "m", tensors={"model.layers.0.self_attn.q_proj.bias": bias})
    assert open_checkpoint(folder).layer(0).query_bias is None
    bias[3] = 1e-3
    folder = copied("gptq-v1-3", tmp_path / "n", tensors={"model.layers.0.self_attn.q_proj.bias": bias})
    with pytest.raises(FormatError, match=r"tensor is 'model\.layers\.0\.self_attn\.q_proj\.bias'"):
        open_checkpoint(folder)


def test_matrices_in_several_files(tmp_path: Path) -> None:
    """Even where the tensors of one matrix lie in two of them."""
    folder = copied("gptq-v1-3", tmp_path / "m")
    held, listed = held_by("gptq-v1-3"), dict[str, str]()
    for number in range(2):
        file = f"model-{number}.safetensors"
        part = dict(list(held.items())[number::2])
        (folder / file).write_bytes(written(part))
        listed |= dict.fromkeys(part, file)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
    whole = named(open_checkpoint(DATA / "gptq-v1-3"))
    for module, matrix in named(open_checkpoint(folder)).items():
        np.testing.assert_array_equal(matrix.values, whole[module].values)


def test_scales_of_a_cache(tmp_path: Path) -> None:
    """They belong to caches that are cast, which lowbit's is not; a remark says so."""
    one = np.ones(1, np.float32)
    scales = {"model.layers.0.self_attn.k_scale": one, f"{Q}.k_scale": one}
    for name, scale in scales.items():
        checkpoint = open_checkpoint(copied("ct-fp8-tensor", tmp_path / name, tensors={name: scale}))
        (remark,) = checkpoint.remarks
        assert "here the cache is not cast" in remark and checkpoint.layer(0)


SCALES: list[tuple[str, str, Any]] = [
    ("hqq-4", "scale", np.float32),
    ("hqq-4", "zero", ml_dtypes.bfloat16),
    ("ct-fp8-tensor", "weight_scale", np.float32),
    ("fp8-block", "weight_scale_inv", ml_dtypes.float8_e8m0fnu),
    ("fp8-block", "weight_scale_inv", ml_dtypes.bfloat16),
]


@pytest.mark.parametrize(("name", "part", "dtype"), SCALES)
def test_scales_of_another_type(name: str, part: str, dtype: Any, tmp_path: Path) -> None:
    """They become those of the format where that is exact: here powers of two, which every float type has."""
    held = held_by(name)[f"{Q}.{part}"].astype(np.float32)
    powers = np.exp2(np.arange(held.size, dtype=np.float32) % 5 - 8).reshape(held.shape)
    own = copied(name, tmp_path / "own", tensors={f"{Q}.{part}": powers.astype(held_by(name)[f"{Q}.{part}"].dtype)})
    other = copied(name, tmp_path / "other", tensors={f"{Q}.{part}": powers.astype(dtype)})
    wanted, found = (named(open_checkpoint(folder))[Q] for folder in (own, other))
    for ours, theirs in zip(found.tensors, wanted.tensors, strict=True):
        assert ours.dtype == theirs.dtype and np.array_equal(ours.view(np.uint8), theirs.view(np.uint8))


def test_scales_that_the_format_does_not_hold(tmp_path: Path) -> None:
    """One that would have to be rounded is refused."""
    scales = np.full((128, 1), 0.1, np.float32)
    checkpoint = open_checkpoint(copied("hqq-4", tmp_path / "m", tensors={f"{Q}.scale": scales}))
    message = rf"type of tensor '{Q}\.scale' is F32; allowed: float16, or numbers that it holds exactly"
    with pytest.raises(FormatError, match=message):
        checkpoint.layer(0)


def test_a_method_without_a_name_is_read_by_its_tensors(tmp_path: Path) -> None:
    """As tools wrote it before configurations named the method."""
    found = open_checkpoint(copied("gptq-v1-4", tmp_path / "m", {"quant_method": None}))
    assert {each.format for each in found.packed.values()} == {"gptq-v1"}


def test_groups_that_a_pattern_gives_to_some_matrices(tmp_path: Path) -> None:
    """As GPTQModel's ``dynamic`` does: the tensors say which matrix has which."""
    config = {"group_size": 64, "dynamic": {"+:.*": {"group_size": 32}, "+:lm_head": {"bits": 8}}}
    folder = copied("gptq-v2-4", tmp_path / "m", config)
    assert {each.layout.options["group_size"] for each in open_checkpoint(folder).packed.values()} == {32}


# **On the command line.**

WORDS = {"<unk>": 0} | {chr(ord("A") + number): 1 + number for number in range(63)}
TOKENIZER: dict[str, Any] = {
    "version": "1.0",
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": None,
    "post_processor": None,
    "decoder": {"type": "Fuse"},
    "model": {"type": "BPE", "vocab": WORDS, "merges": [], "unk_token": "<unk>"},
}


def run(folder: Path, *arguments: object) -> Any:
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    model = () if "inspect" in arguments else ("--model", folder)
    given = [str(each) for each in (*arguments, *model, "--backend", "numpy")]
    return CliRunner().invoke(app, given)


def test_generate_logits_and_perplexity(tmp_path: Path) -> None:
    """A directory runs under every command; what it has to remark goes to standard error."""
    folder = copied("gptq-v2-4", tmp_path / "m", {"checkpoint_format": "gptq"})
    (tmp_path / "text").write_text("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
    told = json.loads(run(folder, "inspect", folder, "--json").stdout)
    assert (told["runs"], told["reason"], told["next_step"]) == (True, None, None)
    found = run(folder, "generate", "--prompt", "ABC", "--tokens", 3, "--json")
    assert found.exit_code == 0 and "so this is gptq-v2, although" in found.stderr
    with pytest.warns(UserWarning, match="although the label says gptq-v1"):
        model = load(folder, "numpy")
    assert json.loads(found.stdout)["tokens"] == [step.token for step in model.generate("ABC", 3)]
    forced = run(folder, "logits", "--prompt", "ABC", "--gptq-version", "v1", "--json")
    assert forced.exit_code == 0 and "so this is" not in forced.stderr
    with load(folder, "numpy", gptq_version="v1") as other:
        assert json.loads(forced.stdout)["top"][0]["logit"] == float(other.logits("ABC").max())
        assert other.logits("ABC").max() != model.logits("ABC").max()
    measured = run(folder, "perplexity", "--text", tmp_path / "text", "--window", 8)
    assert measured.exit_code == 0
    refused = run(folder, "generate", "--prompt", "ABC", "--gptq-version", "v3")
    assert "--gptq-version is 'v3'; allowed: v1 or v2" in str(refused.exception)
