"""transformers: what its loaders make of MXFP4 and FP8 where no kernel for them is found, as on CPUs.

Source: ``transformers/integrations/mxfp4.py`` (convert_moe_packed_tensors) and ``finegrained_fp8.py`` (Fp8Dequantize).
"""

from typing import Any

from atlas.entry import RESULTS, Entry, Project, library

torch = library("torch")
mxfp4_loader = library("transformers.integrations.mxfp4")
fp8_loader = library("transformers.integrations.finegrained_fp8")


def mxfp4(elements: Any, scale: Any, result: str, rows: int, columns: int) -> Any:
    """Experts × outputs × groups × bytes, as gpt-oss stores them; the result is transposed there already."""
    blocks = elements.reshape(1, columns, rows // 32, 16)
    scales = scale.view(torch.uint8).reshape(1, columns, rows // 32)
    return mxfp4_loader.convert_moe_packed_tensors(blocks, scales, dtype=getattr(torch, result))[0]


def dequantized(weight: Any, scale: Any, result: str) -> Any:
    loader = fp8_loader.Fp8Dequantize(None)
    return loader._dequantize_one(weight, scale, getattr(torch, result)).T.contiguous()


def fp8_block(weight: Any, weight_scale_inv: Any, result: str) -> Any:
    return dequantized(weight, weight_scale_inv, result)


def mxfp8(elements: Any, scale: Any, result: str) -> Any:
    return dequantized(elements, scale.view(torch.uint8), result)


KERNELS = {
    "mxfp4": ("convert_moe_packed_tensors", "mxfp4"),
    "fp8-block": ("Fp8Dequantize", "fp8_block"),
    "mxfp8-e4m3": ("Fp8Dequantize", "mxfp8"),
}

PROJECT = Project(
    "transformers",
    ("transformers", "torch"),
    tuple(
        Entry(kernel, function, "formats.dequantize", {"format": format, "result": RESULTS})
        for format, (kernel, function) in KERNELS.items()
    ),
)
