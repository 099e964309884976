"""Directories that are quantised already, against the tools that own their formats (``quantised/write.py``)."""

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tiny_checkpoint
from typer.testing import CliRunner

from lowbit.arrays import F32, Array
from lowbit.cli import app
from lowbit.errors import ArgumentError, FormatError
from lowbit.formats.checkpoint.cache import quantized
from lowbit.formats.checkpoint.names import tensor_shapes
from lowbit.formats.checkpoint.reader import Checkpoint, open_checkpoint
from lowbit.formats.checkpoint.tensors import CODED
from lowbit.model.block import plain_linear
from lowbit.model.decoder import Decoder
from lowbit.model.quantization_plan import Plan, planned
from lowbit.model.weights import in_memory, matrices, to_float
from lowbit.runtime import load
from lowbit.tensor_formats.stored import Stored, dequantized

DATA = Path(__file__).parent / "quantised"
MODELS = sorted(path.name for path in DATA.iterdir() if (path / "expected.npz").exists())
LIMIT = 1e-5
"""Of the largest logit, as in ``test_transformers.py``."""


def expected(name: str) -> dict[str, Any]:
    with np.load(DATA / name / "expected.npz") as held:
        return dict(held)


def copied(
    name: str, folder: Path, config: dict[str, Any] | None = None, tensors: Mapping[str, Array | None] | None = None
) -> Path:
    """A directory with some fields of its quantisation changed, and some tensors: None takes one away."""
    folder.mkdir()
    described = json.loads((DATA / name / "config.json").read_text())
    described["quantization_config"] |= config or {}
    (folder / "config.json").write_text(json.dumps(described))
    if not tensors:
        shutil.copy(DATA / name / "model.safetensors", folder)
        return folder
    changed = {key: array for key, array in {**held_by(name), **tensors}.items() if array is not None}
    (folder / "model.safetensors").write_bytes(written(changed))
    return folder


def written(tensors: Mapping[str, Array]) -> bytes:
    """A file of these tensors, by the definition of the file."""
    header, data = dict[str, Any](), b""
    for key, array in tensors.items():
        kind = next(each for each, dtype in TYPES.items() if dtype == array.dtype)
        header[key] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [len(data), len(data) + array.nbytes]}
        data += array.tobytes()
    return tiny_checkpoint.crafted(header, data)


TYPES = {each: np.dtype(dtype) for each, dtype in CODED.items()} | {"I64": np.dtype(np.int64)}


def held_by(name: str) -> dict[str, Array]:
    """The tensors of a directory, by the definition of the file."""
    content = (DATA / name / "model.safetensors").read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    header.pop("__metadata__", None)
    found = {}
    for key, place in header.items():
        begin, last = place["data_offsets"]
        array = np.frombuffer(content[end + begin : end + last], TYPES[place["dtype"]])
        found[key] = array.reshape(place["shape"])
    return found


def logits(weights: Checkpoint, tokens: list[int]) -> F32:
    """Those after each token, by products in float32 of the numbers rounded once."""
    decoder = Decoder(in_memory(weights), lambda matrix: plain_linear(to_float(matrix)))
    return decoder.logits(decoder.hidden(tokens, decoder.new_state()))


Q = "model.layers.0.self_attn.q_proj"

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


# **Refused.**

Changed = Callable[[Array], Array]


def with_number(place: tuple[int, ...], number: float) -> Changed:
    def changed(array: Array) -> Array:
        array = array.copy()
        array[place] = number
        return array

    return changed


CONTENTS: list[tuple[str, str, Changed, str]] = [
    ("gptq-v1-3", "scales", with_number((1, 3), np.nan), rf"scales\[1, 3\] of matrix '{Q}' is nan; allowed: a finite"),
    ("gptq-v1-3", "g_idx", with_number((5,), 2), rf"g_idx\[5\] of matrix '{Q}' is 2; allowed: 0 to 1"),
    ("gptq-v1-3", "g_idx", with_number((5,), -1), rf"g_idx\[5\] of matrix '{Q}' is -1; allowed: 0 to 1"),
    ("awq-gemv", "scales", with_number((0, 1), np.inf), rf"scales\[0, 1\] of matrix '{Q}' is inf"),
]


def patched(text: str, other: str) -> Changed:
    """JSON in a tensor with a part replaced."""
    return lambda array: np.frombuffer(array.tobytes().replace(text.encode(), other.encode()), np.uint8)


STATE = "weight.quant_state.bitsandbytes__nf4"
CONTENTS += [
    ("ct-fp8-tensor", "weight_scale", with_number((0,), np.nan), rf"weight_scale\[0\] of matrix '{Q}' is nan"),
    ("ct-pack", "weight_scale", with_number((1, 1), np.inf), rf"weight_scale\[1, 1\] of matrix '{Q}' is inf"),
    ("ct-nvfp4", "weight_global_scale", with_number((0,), 0), f"weight_global_scale of matrix '{Q}' is 0; allowed: a"),
    ("ct-mxfp4", "weight_scale", with_number((2, 1), 255), rf"scale\[2, 1\] of matrix '{Q}' is nan"),
    ("hqq-3", "W_q", with_number((0, 0), 2**30), rf"W_q\[0, 0\] of matrix '{Q}' is 1073741824"),
    ("hqq-4", "scale", with_number((3, 0), np.nan), rf"scale\[3, 0\] of matrix '{Q}' is nan"),
    ("bitsandbytes-nf4", "weight.nested_absmax", with_number((0,), np.nan), rf"nested_absmax\[0\] of matrix '{Q}'"),
    (
        "bitsandbytes-nf4",
        "weight.quant_map",
        with_number((1,), 0.5),
        r"tensor '\S+quant_map' is another table; allowed: that",
    ),
    ("bitsandbytes-nf4", STATE, patched('"nf4"', '"fp4"'), f"quant_type in tensor '{Q}.*' is fp4; allowed: 'nf4'"),
    ("bitsandbytes-nf4", STATE, patched("64,", "32,"), f"(blocksize|shape) in tensor '{Q}.*' is .*; allowed: "),
    ("bitsandbytes-nf4", STATE, patched("nested_offset", "other"), "nested_offset is missing; allowed: a number"),
    ("bitsandbytes-nf4", STATE, patched("{", "["), "content is "),
]


@pytest.mark.parametrize(("name", "part", "change", "message"), CONTENTS)
def test_a_wrong_number(name: str, part: str, change: Changed, message: str, tmp_path: Path) -> None:
    """Is found when its matrix is read; the sentence names the file, the matrix and the place."""
    held = held_by(name)[f"{Q}.{part}"]
    folder = copied(name, tmp_path / "m", tensors={f"{Q}.{part}": change(held)})
    checkpoint = open_checkpoint(folder)
    with pytest.raises(FormatError, match=rf"model\.safetensors: {message}"):
        checkpoint.layer(0)


TENSORS: list[tuple[str, str, Changed | None, str]] = [
    ("gptq-v1-3", "scales", None, r"kind of the tensors of .*q_proj' is g_idx I32, qweight I32, qzeros I32"),
    ("gptq-v1-3", "qweight", None, r"tensor 'model\.layers\.0\.self_attn\.q_proj\.weight' is missing"),
    ("gptq-v1-3", "qweight", lambda held: held[:-1], "bits of matrix|shape of tensor"),
    ("gptq-v1-3", "qzeros", lambda held: held[:, :-1], r"shape of tensor .*qzeros' is \(2, 5\); allowed: 2 x 6"),
    ("gptq-v1-3", "scales", lambda held: held[:, :-1], r"shape of tensor .*scales' is \(2, 63\); allowed: 2 x 64"),
    ("gptq-v1-3", "g_idx", lambda held: held[:-32], "shape of matrix|kind of the tensors"),
    ("gptq-v1-3", "scales", lambda held: held.astype(np.float32), "kind of the tensors"),
    ("awq-gemm", "qweight", lambda held: held[:32], r"shape of matrix .* is 32 x 64; allowed: 64 x 64"),
    (
        "awq-gemm",
        "scales",
        lambda held: held[:1],
        r"shape of tensor .*qzeros' is \(2, 8\); allowed: 1 x 8",
    ),
    ("awq-gemm", "qzeros", lambda held: held[:, :4], r"shape of tensor .*qzeros' is \(2, 4\); allowed: 2 x 8"),
]


def as_type(dtype: Any) -> Changed:
    return lambda array: array.astype(dtype)


TENSORS += [
    ("ct-pack", "weight_scale", lambda held: held[:, :1], r"group_size of matrix .* is 64 by the number of its scales"),
    ("ct-pack", "weight_packed", lambda held: held[:, :-1], "shape of matrix .* is 56 x 64; allowed: 64 x 64"),
    ("ct-pack-asym", "weight_zero_point", lambda held: held[:-1], r"shape of tensor .*weight_zero_point' is \(15, 2\)"),
    ("ct-int", "weight_scale", as_type(np.int8), "kind of the tensors of .* is weight I8, weight_scale I8"),
    ("ct-mxfp4", "weight_scale", lambda held: held[:-1], r"shape of tensor .*weight_scale' is \(63, 2\)"),
    ("ct-nvfp4", "weight_global_scale", None, "kind of the tensors of"),
    ("fp8-block", "weight_scale_inv", lambda held: np.ones((2, 1), np.float32), r"is \(2, 1\); allowed: 1 x 1"),
    ("bitsandbytes-nf4", "weight.absmax", lambda held: held[:-1], "kind of the tensors of"),
    ("bitsandbytes-nf4", STATE, None, r"tensor '\S+nested_offset' is missing"),
    ("hqq-4", "zero", None, "kind of the tensors of"),
    ("hqq-4", "scale", lambda held: held[:-1], r"shape of tensor .*scale' is \(127, 1\); allowed: 128 x 1"),
]


@pytest.mark.parametrize(("name", "part", "change", "message"), TENSORS)
def test_wrong_tensors(name: str, part: str, change: Changed | None, message: str, tmp_path: Path) -> None:
    """One that is missing, or of another shape or type than its format asks for, is found before weights are read."""
    held = held_by(name)[f"{Q}.{part}"]
    folder = copied(name, tmp_path / "m", tensors={f"{Q}.{part}": None if change is None else change(held)})
    with pytest.raises(FormatError, match=message) as caught:
        open_checkpoint(folder)
    assert str(caught.value).isprintable()


def test_tensors_too_many(tmp_path: Path) -> None:
    """The weights beside their codes, a tensor that no format has, and an embedding of codes."""
    weight = np.zeros((64, 64), np.float16)
    for part, message in (("weight", "q_proj.weight'"), ("qscale", "q_proj.qscale'")):
        with pytest.raises(
            FormatError, match=rf"tensor is .*{message}; allowed: those of a matrix in the format gptq-v1"
        ):
            open_checkpoint(copied("gptq-v1-3", tmp_path / part, tensors={f"{Q}.{part}": weight}))
    held = held_by("gptq-v1-3")
    codes = {key.replace(Q, "model.embed_tokens"): held[key] for key in held if key.startswith(f"{Q}.")}
    with pytest.raises(FormatError, match=r"module 'model\.embed_tokens' is quantised; allowed: weights as floats"):
        open_checkpoint(copied("gptq-v1-3", tmp_path / "m", tensors={**codes, "model.embed_tokens.weight": None}))


READ = "allowed: gptq, auto-round, awq, compressed-tensors, modelopt, fp8, fbgemm_fp8, bitsandbytes, hqq or mxfp4$"
OF_CT = "allowed: 2, 3, 4, 5, 6, 7 or 8$"
CONFIGS: list[tuple[str, dict[str, Any], str]] = [
    ("gptq-v1-3", {"bits": 4}, "bits of matrix .* is 3; allowed: 4, as config.json says"),
    ("gptq-v2-4", {"lm_head": False}, "module 'lm_head' is quantised; allowed: floats, as config.json says"),
    ("gptq-v2-4", {"dynamic": {}}, "bits of matrix 'lm_head' is 8; allowed: 4, as config.json says"),
    ("awq-gemm", {"modules_to_not_convert": ["self_attn"]}, "module .*q_proj' is quantised; allowed: floats"),
    ("awq-gemm", {"version": "gemv_fast"}, "kind of the tensors of .* allowed: .* for method 'awq'"),
    ("awq-gemm", {"group_size": 16}, "group_size of matrix .* is 32 by the number of its scales; allowed: 16"),
    ("awq-gemv", {"group_size": 128}, "shape of tensor .*qzeros'"),
    ("ct-pack", {"ignore": ["re:.*", "self_attn"]}, "module .*self_attn.* is quantised; allowed: floats"),
    ("ct-pack", {"config_groups": {"a": {"weights": {"num_bits": 4}}, "b": {"weights": {}}}}, "config_groups is given"),
    *(
        (
            name,
            {"config_groups": {"a": {"weights": {"num_bits": bits}}}},
            f"bits of compressed-tensors is {bits}; {OF_CT}",
        )
        for name, bits in (("ct-pack", 9), ("ct-pack", 1), ("ct-int", 9), ("ct-int", 16), ("ct-int", 1))
    ),
    (
        "ct-int",
        {"quant_method": "modelopt", "config_groups": {"a": {"weights": {"num_bits": 9}}}},
        "kind of the tensors",
    ),
    *((name, {"quant_method": "quark"}, rf"^config\.json: quant_method is 'quark'; {READ}") for name in MODELS),
    ("gptq-v1-4", {"quant_method": "GPTQ"}, f"quant_method is 'GPTQ'; {READ}"),
    ("gptq-v1-4", {"quant_method": ["gptq"]}, "quant_method is "),
    ("hqq-4", {"quant_config": {"weight_quant_params": {"nbits": 8, "group_size": 32, "axis": 1}}}, "shape of tensor"),
    (
        "hqq-4",
        {"quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 32, "axis": 2}}},
        "axis is 2",
    ),
    ("gptq-v1-4", {"group_size": 64}, "group_size of matrix .* is 32 by the number of its scales; allowed: 64, as"),
    ("gptq-v2-2", {"group_size": -1}, "group_size of matrix .* is 32 by the number of its scales; allowed: 64, as"),
    (
        "gptq-v1-4",
        {"group_size": "32"},
        r"config\.json: group_size is '32'; allowed: a positive integer",
    ),
    (
        "gptq-v1-4",
        {"group_size": 0},
        r"config\.json: group_size is 0; allowed: a positive integer",
    ),
    ("gptq-v1-4", {"bits": True}, r"config\.json: bits is True; allowed: an integer from 1 to 16"),
    ("awq-gemm", {"bits": 8}, "bits of matrix .* is 4; allowed: 8, as config.json says"),
    (
        "ct-mxfp4",
        {"config_groups": {"a": {"weights": {"group_size": 16}}}},
        "group_size of matrix .* is 32 by .*: 16",
    ),
    ("ct-nvfp4", {"config_groups": {"a": {"weights": {"num_bits": 8}}}}, "bits of matrix .* is 4; allowed: 8, as"),
    ("awq-gemm", {"transform_config": {"a": 1}}, "transform_config is given; allowed: absent"),
]


@pytest.mark.parametrize(("name", "config", "message"), CONFIGS)
def test_a_configuration_that_says_otherwise(name: str, config: dict[str, Any], message: str, tmp_path: Path) -> None:
    """Than the tensors, or asks for what is not supported."""
    with pytest.raises(FormatError, match=message):
        open_checkpoint(copied(name, tmp_path / "m", config))


def test_a_method_without_a_name_is_read_by_its_tensors(tmp_path: Path) -> None:
    """As tools wrote it before configurations named the method."""
    found = open_checkpoint(copied("gptq-v1-4", tmp_path / "m", {"quant_method": None}))
    assert {each.format for each in found.packed.values()} == {"gptq-v1"}


def test_an_unknown_method_in_the_older_file(tmp_path: Path) -> None:
    """The error names the file that says it, ``quantize_config.json``."""
    folder = copied("gptq-v1-4", tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    older = config.pop("quantization_config") | {"quant_method": "quark"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "quantize_config.json").write_text(json.dumps(older))
    with pytest.raises(FormatError, match=rf"^quantize_config\.json: quant_method is 'quark'; {READ}"):
        open_checkpoint(folder)


def test_groups_that_a_pattern_gives_to_some_matrices(tmp_path: Path) -> None:
    """As GPTQModel's ``dynamic`` does: the tensors say which matrix has which."""
    config = {"group_size": 64, "dynamic": {"+:.*": {"group_size": 32}, "+:lm_head": {"bits": 8}}}
    folder = copied("gptq-v2-4", tmp_path / "m", config)
    assert {each.layout.options["group_size"] for each in open_checkpoint(folder).packed.values()} == {32}


def test_floats_that_claim_to_be_quantised(tmp_path: Path) -> None:
    """A method without a single quantised matrix is a contradiction; one that is not known may mean anything."""
    for method, message in (
        ("gptq", "quantization_config is given; allowed: absent where no matrix is quantised"),
        ("quark", f"quant_method is 'quark'; {READ}"),
    ):
        folder = tiny_checkpoint.write(tmp_path / method)
        config = json.loads((folder / "config.json").read_text()) | {"quantization_config": {"quant_method": method}}
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(FormatError, match=message):
            open_checkpoint(folder)


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
