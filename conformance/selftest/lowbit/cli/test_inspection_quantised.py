"""``lowbit inspect`` of quantised directories: method, bits, groups and formats are what their tensors say."""

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest
import tiny_checkpoint
from inspecting import answer, rows, run

from lowbit.tensor_formats.stored import FORMATS
from lowbit.tensor_formats.table import Sizes

ROWS, COLUMNS = 128, 64
TYPES = {"int32": "I32", "uint8": "U8", "int8": "I8", "float16": "F16", "bfloat16": "BF16", "float32": "F32"}
TYPES |= {"float8_e4m3fn": "F8_E4M3", "float8_e8m0fnu": "U8"}


def quantised(
    folder: Path, format: str, config: dict[str, Any], ends: dict[str, str], module: str, fill: int = 0, **options: int
) -> Path:
    """A directory with one matrix in a format, whose tensors have the names that checkpoints give them."""
    at = Sizes(ROWS, COLUMNS, options)
    tensors = {
        f"{module}{ends.get(field.name, '.' + field.name)}": (TYPES[field.dtype], list(field.sizes(at)))
        for field in FORMATS[format].tensors
    }
    tensors["model.norm.weight"] = ("F32", [8])
    header, data = tiny_checkpoint.empty(tensors)
    stored = bytearray(data)
    for name, place in header.items():
        if name.endswith("qzeros"):
            begin, end = place["data_offsets"]
            stored[begin:end] = bytes([fill]) * (end - begin)
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(tiny_checkpoint.crafted(header, bytes(stored)))
    written = tiny_checkpoint.DENSE | ({"quantization_config": config} if config else {})
    (folder / "config.json").write_text(json.dumps(written))
    return folder


def compressed(bits: int, group_size: int | None, format: str) -> dict[str, Any]:
    weights = {"num_bits": bits, "group_size": group_size}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": {"weights": weights}}}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
HQQ = {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 64, "axis": 1}}}
HQQ_3 = {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 3, "group_size": 64, "axis": 0}}}
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
ABSMAX = {"absmax": ".weight.absmax", "nested_absmax": ".weight.nested_absmax"}
DOUBLE = ABSMAX | {"nested_quant_map": ".weight.nested_quant_map", "nested_offset": ".weight.nested_offset"}
MXFP4 = {"elements": ".weight_packed", "scale": ".weight_scale"}
PREQUANTISED: list[tuple[str, dict[str, Any], dict[str, str], dict[str, int], tuple[str, int | None, int | None]]] = [
    ("gptq-v1", GPTQ, {}, {"bits": 4, "group_size": 32}, ("gptq", 4, 32)),
    ("gptq-v1", GPTQ | {"group_size": -1}, {}, {"bits": 4, "group_size": ROWS}, ("gptq", 4, -1)),
    ("gptq-v2", GPTQ | {"bits": 3, "checkpoint_format": "gptq_v2"}, {}, {"bits": 3, "group_size": 32}, ("gptq", 3, 32)),
    ("gptq-v1-bf16", GPTQ | {"bits": 8}, {}, {"bits": 8, "group_size": 32}, ("gptq", 8, 32)),
    ("marlin", GPTQ | {"checkpoint_format": "marlin"}, {}, {"group_size": 32}, ("gptq", 4, 32)),
    ("awq-gemm", {"quant_method": "awq", "bits": 4, "group_size": 32}, {}, {"group_size": 32}, ("awq", 4, 32)),
    ("awq-gemv", {"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, {}, {"group_size": 64}, ("awq", 4, 64)),
    ("ct-pack", compressed(4, 32, "pack-quantized"), {}, {"bits": 4, "group_size": 32}, ("compressed-tensors", 4, 32)),
    (
        "ct-pack-asym",
        compressed(2, 64, "pack-quantized"),
        {},
        {"bits": 2, "group_size": 64},
        ("compressed-tensors", 2, 64),
    ),
    ("ct-int", compressed(8, None, "int-quantized"), {}, {"group_size": ROWS}, ("compressed-tensors", 8, ROWS)),
    ("fp8-channel", compressed(8, None, "float-quantized"), {}, {}, ("compressed-tensors", 8, None)),
    ("nvfp4-pack", compressed(4, 16, "nvfp4-pack-quantized"), {}, {}, ("compressed-tensors", 4, 16)),
    ("mxfp4", compressed(4, 32, "mxfp4-pack-quantized"), MXFP4, {}, ("compressed-tensors", 4, 32)),
    ("nvfp4", {"quant_method": "modelopt", "quant_algo": "NVFP4"}, {}, {}, ("modelopt", 4, 16)),
    ("fp8-tensor", {"quant_method": "fp8"}, {}, {}, ("fp8", 8, None)),
    ("fp8-block", {"quant_method": "fp8", "weight_block_size": [128, 128]}, {}, {}, ("fp8", 8, None)),
    ("nf4", BNB, ABSMAX, {"blocksize": 64}, ("bitsandbytes", 4, 64)),
    ("nf4-double", BNB, DOUBLE, {"blocksize": 64}, ("bitsandbytes", 4, 64)),
    ("hqq-axis1", HQQ, {}, {"bits": 4, "group_size": 64}, ("hqq", 4, 64)),
    ("hqq-axis0-3bit", HQQ_3, {}, {"group_size": 64}, ("hqq", 3, 64)),
]


@pytest.mark.parametrize(("format", "config", "ends", "options", "method"), PREQUANTISED)
def test_a_quantised_directory(
    format: str,
    config: dict[str, Any],
    ends: dict[str, str],
    options: dict[str, int],
    method: tuple[str, int | None, int | None],
    tmp_path: Path,
) -> None:
    """Method, bits, groups and format; its tensors are one matrix of K x N, whose bytes are those of its fields."""
    found = answer(quantised(tmp_path / "m", format, config, ends, "model.layers.0.self_attn.q_proj", **options))
    told = found["quantization"]
    assert (told["method"], told["bits"], told["group_size"]) == method
    assert (told["formats"], told["without_format"]) == ({format: 1}, 0)
    at = Sizes(ROWS, COLUMNS, options)
    fields = FORMATS[format].tensors
    nbytes = sum(prod(each.sizes(at)) * each.numpy_dtype.itemsize for each in fields)
    assert rows(found) == {
        ("attention", format): (len(fields), ROWS * COLUMNS, nbytes),
        ("norms", "F32"): (1, 8, 32),
    }
    assert not found["runs"] and "embed_tokens.weight' is missing" in found["reason"]
    assert f"stored('{format}', ...)" in found["next_step"]
    (matrices,) = found["backends"]["numpy"]["matrices"]
    assert (matrices["type"], matrices["float32"]["native"]) == (format, 1)
    assert found["backends"]["numpy"]["advice"] == "It has kernels for every quantised matrix."


def test_experts_in_mxfp4(tmp_path: Path) -> None:
    """All experts of a layer lie in two tensors, as gpt-oss has them; each gate shares one with its other side."""
    folder = tmp_path / "m"
    folder.mkdir()
    name = "model.layers.0.mlp.experts.gate_up_proj"
    tensors = {
        f"{name}_blocks": ("U8", [4, 6, 3, 16]),
        f"{name}_scales": ("U8", [4, 6, 3]),
        f"{name}_bias": ("BF16", [4, 6]),
    }
    (folder / "model.safetensors").write_bytes(tiny_checkpoint.crafted(*tiny_checkpoint.empty(tensors)))
    config = tiny_checkpoint.DENSE | {"quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(config))
    found = answer(folder)
    assert found["quantization"]["formats"] == {"mxfp4": 8}
    assert rows(found)["experts", "mxfp4"] == (2, 4 * 6 * 96, 4 * 6 * 3 * 17)
    assert (found["quantization"]["bits"], found["quantization"]["group_size"]) == (4, 32)


def test_tensors_that_no_format_describes(tmp_path: Path) -> None:
    """They are counted by the method's bits, and no backend is said to multiply by them."""
    folder = tmp_path / "m"
    folder.mkdir()
    tensors = {"a.q_proj.weight": ("I8", [8, 16]), "a.q_proj.SCB": ("F32", [8])}
    (folder / "model.safetensors").write_bytes(tiny_checkpoint.crafted(*tiny_checkpoint.empty(tensors)))
    config = tiny_checkpoint.DENSE | {"quantization_config": {"load_in_8bit": True}}
    (folder / "config.json").write_text(json.dumps(config))
    found = answer(folder)
    assert (found["quantization"]["method"], found["quantization"]["without_format"]) == ("bitsandbytes", 1)
    assert found["parameters"] == 8 * 16
    lacking = {"no format of lowbit.tensor_formats describes it": 1}
    assert found["backends"]["numpy"]["matrices"][0]["float32"] == {"native": 0, "lacking": lacking}
    assert "stored(" not in found["next_step"]


@pytest.mark.parametrize(
    ("label", "fill", "value", "version", "format"),
    [
        ("gptq", 0x77, 7, "gptq-v1", "gptq-v1"),
        ("gptq_v2", 0x88, 8, "gptq-v2", "gptq-v2"),
        ("gptq", 0x88, 8, "gptq-v2", "gptq-v2"),
        ("gptq_v2", 0x77, 7, "gptq-v1", "gptq-v1"),
        ("gptq_v2", 0x55, 5, None, "gptq-v2"),
        ("gptq", 0x87, None, None, "gptq-v1"),
    ],
)
def test_the_version_of_gptq(
    label: str, fill: int, value: int | None, version: str | None, format: str, tmp_path: Path
) -> None:
    """A zero of 8 is stored as 7 in version 1 and as 8 in version 2; other zeros leave it to the label."""
    config = GPTQ | {"checkpoint_format": label}
    options = {"bits": 4, "group_size": 32}
    folder = quantised(tmp_path / "m", "gptq-v1", config, {}, "model.layers.0.mlp.up_proj", fill, **options)
    told = answer(folder)["quantization"]
    assert (told["zeros"]["value"], told["zeros"]["version"]) == (value, version)
    assert told["zeros"]["label"] == ("gptq-v2" if label == "gptq_v2" else "gptq-v1")
    assert told["formats"] == {format: 1}
    lies = version is not None and version != told["zeros"]["label"]
    assert ("although the label says" in " ".join(run(folder).stdout.split())) == lies


def test_the_version_without_a_label(tmp_path: Path) -> None:
    """It would be 1; zeros that say otherwise count."""
    options = {"bits": 4, "group_size": 32}
    folder = quantised(tmp_path / "m", "gptq-v1", GPTQ, {}, "model.layers.0.mlp.up_proj", 0x88, **options)
    assert "so this is gptq-v2, although without a label it would be gptq-v1." in " ".join(run(folder).stdout.split())


def test_an_older_gptq_directory(tmp_path: Path) -> None:
    """Its configuration lies in a file of its own."""
    options = {"bits": 4, "group_size": 32}
    folder = quantised(tmp_path / "m", "gptq-v1", {}, {}, "model.layers.0.mlp.up_proj", 0x77, **options)
    (folder / "quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": 32, "desc_act": False}))
    told = answer(folder)["quantization"]
    assert (told["method"], told["bits"], told["group_size"], told["formats"]) == ("gptq", 4, 32, {"gptq-v1": 1})
    (folder / "quantize_config.json").unlink()
    assert answer(folder)["quantization"]["method"] == "not named"
