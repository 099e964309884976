"""compressed-tensors: what vLLM's and transformers' checkpoints of llm-compressor become when they are decompressed.

``decompress`` of each compressor gives the type that its scales have: bfloat16 for integers, FP4 and MX, float32 where
the scales of FP8 are float32.

Source: ``compressed_tensors/compressors``.
"""

from collections.abc import Iterator
from typing import Any

from atlas.entry import Entry, Project, library

torch = library("torch")
compressors = library("compressed_tensors.compressors")
quantization = library("compressed_tensors.quantization")


def scheme(**weights: Any) -> Any:
    """A scheme with these arguments for its weights."""
    return quantization.QuantizationScheme(targets=["Linear"], weights=quantization.QuantizationArgs(**weights))


def decompressed(compressor: str, tensors: dict[str, Any], **weights: Any) -> Any:
    numbers = getattr(compressors, compressor).decompress(tensors, scheme(**weights))["weight"]
    return numbers.T.contiguous()


def groups(group_size: int, rows: int) -> dict[str, Any]:
    """One group for a whole row is a strategy of its own."""
    return {"strategy": "channel"} if group_size >= rows else {"strategy": "group", "group_size": group_size}


def integers(weight: Any, weight_scale: Any, group_size: int, rows: int) -> Any:
    tensors = {"weight": weight, "weight_scale": weight_scale}
    return decompressed(
        "IntQuantizationCompressor", tensors, num_bits=8, type="int", symmetric=True, **groups(group_size, rows)
    )


def packed(weight_packed: Any, weight_scale: Any, bits: int, group_size: int, rows: int, columns: int) -> Any:
    tensors = {
        "weight_packed": weight_packed,
        "weight_scale": weight_scale,
        "weight_shape": torch.tensor([columns, rows]),
    }
    given = {"num_bits": bits, "type": "int", "symmetric": True} | groups(group_size, rows)
    return decompressed("PackedQuantizationCompressor", tensors, **given)


def asymmetric(
    weight_packed: Any,
    weight_scale: Any,
    weight_zero_point: Any,
    bits: int,
    group_size: int,
    rows: int,
    columns: int,
) -> Any:
    tensors = {"weight_packed": weight_packed, "weight_scale": weight_scale, "weight_zero_point": weight_zero_point}
    tensors["weight_shape"] = torch.tensor([columns, rows])
    given = {"num_bits": bits, "type": "int", "symmetric": False} | groups(group_size, rows)
    return decompressed("PackedQuantizationCompressor", tensors, **given)


def fp8_channel(weight: Any, weight_scale: Any) -> Any:
    tensors = {"weight": weight, "weight_scale": weight_scale}
    return decompressed(
        "FloatQuantizationCompressor", tensors, num_bits=8, type="float", symmetric=True, strategy="channel"
    )


def fp8_tensor(weight: Any, weight_scale: Any) -> Any:
    tensors = {"weight": weight, "weight_scale": weight_scale}
    return decompressed(
        "FloatQuantizationCompressor", tensors, num_bits=8, type="float", symmetric=True, strategy="tensor"
    )


def fp8_block(weight: Any, weight_scale_inv: Any) -> Any:
    tensors = {"weight": weight, "weight_scale": weight_scale_inv}
    given = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "block", "block_structure": [128, 128]}
    return decompressed("FloatQuantizationCompressor", tensors, **given)


def nvfp4(weight_packed: Any, weight_scale: Any, weight_global_scale: Any) -> Any:
    tensors = {"weight_packed": weight_packed, "weight_scale": weight_scale, "weight_global_scale": weight_global_scale}
    given = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
    return decompressed("NVFP4PackedCompressor", tensors, **given)


def mxfp4(elements: Any, scale: Any) -> Any:
    tensors = {"weight_packed": elements, "weight_scale": scale.view(torch.uint8)}
    given = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}
    return decompressed("MXFP4PackedCompressor", tensors, **given)


def mxfp8(elements: Any, scale: Any) -> Any:
    tensors = {"weight": elements, "weight_scale": scale.view(torch.uint8)}
    given = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}
    return decompressed("MXFP8QuantizationCompressor", tensors, **given)


KERNELS = {
    "ct-int": ("int-quantized", "integers", "bfloat16"),
    "ct-pack": ("pack-quantized", "packed", "bfloat16"),
    "ct-pack-asym": ("pack-quantized", "asymmetric", "bfloat16"),
    "fp8-channel": ("float-quantized", "fp8_channel", "float32"),
    "fp8-tensor": ("float-quantized", "fp8_tensor", "float32"),
    "fp8-block": ("float-quantized", "fp8_block", "float32"),
    "nvfp4-pack": ("nvfp4-pack-quantized", "nvfp4", "bfloat16"),
    "mxfp4": ("mxfp4-pack-quantized", "mxfp4", "bfloat16"),
    "mxfp8-e4m3": ("mxfp8-quantized", "mxfp8", "bfloat16"),
}


def entries() -> Iterator[Entry]:
    for format, (kernel, function, result) in KERNELS.items():
        yield Entry(f"decompress, {kernel}", function, "formats.dequantize", {"format": format, "result": result})


PROJECT = Project("compressed-tensors", ("compressed-tensors", "torch"), tuple(entries()))
