"""Directories that are quantised already and contradict themselves: refused before weights are read, in words."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_checkpoint
from quantised_directories import MODELS, Q, copied, held_by

from lowbit.arrays import Array
from lowbit.errors import FormatError
from lowbit.formats.checkpoint.reader import open_checkpoint

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
    ("bitsandbytes-nf4", STATE, patched("nested_offset", "other"), "nested_offset is missing; it must be a number"),
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
    ("awq-gemm", {"transform_config": {"a": 1}}, "transform_config is given; it must be absent"),
]


@pytest.mark.parametrize(("name", "config", "message"), CONFIGS)
def test_a_configuration_that_says_otherwise(name: str, config: dict[str, Any], message: str, tmp_path: Path) -> None:
    """Than the tensors, or asks for what is not supported."""
    with pytest.raises(FormatError, match=message):
        open_checkpoint(copied(name, tmp_path / "m", config))


def test_an_unknown_method_in_the_older_file(tmp_path: Path) -> None:
    """The error names the file that says it, ``quantize_config.json``."""
    folder = copied("gptq-v1-4", tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    older = config.pop("quantization_config") | {"quant_method": "quark"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "quantize_config.json").write_text(json.dumps(older))
    with pytest.raises(FormatError, match=rf"^quantize_config\.json: quant_method is 'quark'; {READ}"):
        open_checkpoint(folder)


def test_floats_that_claim_to_be_quantised(tmp_path: Path) -> None:
    """A method without a single quantised matrix is a contradiction; one that is not known may mean anything."""
    for method, message in (
        ("gptq", "quantization_config is given; it must be absent where no matrix is quantised"),
        ("quark", f"quant_method is 'quark'; {READ}"),
    ):
        folder = tiny_checkpoint.write(tmp_path / method)
        config = json.loads((folder / "config.json").read_text()) | {"quantization_config": {"quant_method": method}}
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(FormatError, match=message):
            open_checkpoint(folder)
