"""GPTQModel: its PyTorch layers, which run where no other kernel does, on GPTQ's second layout and AWQ's.

Source: ``gptqmodel/nn_modules/qlinear/torch.py`` (TorchLinear) and ``quantization/awq/utils/packing_utils.py``
(dequantize_gemm).
"""

from collections.abc import Iterator
from typing import Any

from atlas.entry import Entry, Project, library
from lowbit.backend import Range

torch = library("torch")
layers = library("gptqmodel.nn_modules.qlinear.torch")
packing = library("gptqmodel.quantization.awq.utils.packing_utils")

GPTQ = {"gptq-v2": "float16", "gptq-v2-bf16": "bfloat16"}


def layer(qweight: Any, qzeros: Any, scales: Any, g_idx: Any, bits: int, group_size: int, rows: int) -> Any:
    """A layer with these buffers, as a loaded checkpoint has them."""
    sizes = {"in_features": rows, "out_features": scales.shape[1]}
    made = layers.TorchLinear(
        bits=bits, group_size=group_size, sym=False, desc_act=True, register_buffers=True, dtype=scales.dtype, **sizes
    )
    made.qweight, made.qzeros, made.scales, made.g_idx = qweight, qzeros, scales, g_idx
    return made.eval()


def gptq(qweight: Any, qzeros: Any, scales: Any, g_idx: Any, bits: int, group_size: int, rows: int) -> Any:
    return layer(qweight, qzeros, scales, g_idx, bits, group_size, rows).dequantize_weight().contiguous()


def gptq_product(
    x: Any, qweight: Any, qzeros: Any, scales: Any, g_idx: Any, bits: int, group_size: int, rows: int
) -> Any:
    made = layer(qweight, qzeros, scales, g_idx, bits, group_size, rows)
    with torch.inference_mode():
        return made(x).clone()


def awq(qweight: Any, qzeros: Any, scales: Any, group_size: int) -> Any:
    return packing.dequantize_gemm(qweight, qzeros, scales, 4, group_size).contiguous()


def entries() -> Iterator[Entry]:
    """Sizes are those that the layer allows: multiples of 32."""
    sizes = {"rows": Range(32), "columns": Range(32)}
    for format, type in GPTQ.items():
        limits = {"format": format, "result": type} | sizes
        yield Entry("TorchLinear.dequantize_weight", "gptq", "formats.dequantize", limits)
        yield Entry("TorchLinear", "gptq_product", "linear.gemm", limits | {"activations": type})
    yield Entry("dequantize_gemm", "awq", "formats.dequantize", {"format": "awq-gemm", "result": "float16"})


PROJECT = Project("GPTQModel", ("gptqmodel", "torch"), tuple(entries()))
