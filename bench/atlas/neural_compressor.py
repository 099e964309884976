"""Intel Neural Compressor: its weight-only layer in PyTorch, and the dequantisation of its FP8 layers on CPUs.

The layer reads GPTQ's first layout, with zeros stored less one and added modulo 2^b. It makes weights in float16 once,
and multiplies in float32. Codes of 2, 4 and 8 bits lie in words as GPTQ's do; of 3 bits they do not.

Source: ``neural_compressor/torch/algorithms/weight_only/modules.py`` (INCWeightOnlyLinear), and
``fp8_quant/_core/quantized_func_wrappers/cpu``.
"""

from collections.abc import Iterator
from typing import Any

from atlas.entry import RESULTS, Entry, Project, library
from lowbit.contract.rounding import Arithmetic

torch = library("torch")
modules = library("neural_compressor.torch.algorithms.weight_only.modules")
fp8 = library(
    "neural_compressor.torch.algorithms.fp8_quant._core.quantized_func_wrappers.cpu.cpu_quantized_func_wrapper"
)

GPTQ = "gptq-v1-wrapped"


def layer(qweight: Any, qzeros: Any, scales: Any, g_idx: Any, bits: int, group_size: int, rows: int) -> Any:
    """A layer with these buffers, as a loaded checkpoint has them."""
    made = modules.INCWeightOnlyLinear(rows, scales.shape[1], bits=bits, group_size=group_size, g_idx=True)
    made.qweight, made.qzeros, made.scales, made.g_idx = qweight, qzeros, scales, g_idx
    return made


def weights(qweight: Any, qzeros: Any, scales: Any, g_idx: Any, bits: int, group_size: int, rows: int) -> Any:
    return layer(qweight, qzeros, scales, g_idx, bits, group_size, rows).recover().T.contiguous()


def product(x: Any, qweight: Any, qzeros: Any, scales: Any, g_idx: Any, bits: int, group_size: int, rows: int) -> Any:
    return layer(qweight, qzeros, scales, g_idx, bits, group_size, rows)(x)


def channels(weight: Any, weight_scale: Any, result: str) -> Any:
    """The scales belong to the columns of the tensor, which is K × N."""
    found = fp8.QuantizedCPUDeQuantPC(None)(weight.T.contiguous(), weight_scale, out_dtype=getattr(torch, result))
    return found.contiguous()


def tensor(weight: Any, weight_scale: Any, result: str) -> Any:
    found = fp8.QuantizedCPUDeQuant(None)(weight, weight_scale.item(), out_dtype=getattr(torch, result))
    return found.T.contiguous()


def entries() -> Iterator[Entry]:
    limits: dict[str, object] = {"format": GPTQ, "bits": (2, 4, 8)}
    yield Entry("INCWeightOnlyLinear.recover", "weights", "formats.dequantize", limits | {"result": "float16"})
    for operation in ("linear.gemv", "linear.gemm"):
        types = {"activations": "float32", "result": "float32"}
        arithmetic = Arithmetic("dequantised", weights="float16")
        yield Entry("INCWeightOnlyLinear", "product", operation, limits | types, arithmetic)
    for format, kernel, name in (
        ("fp8-channel", "QuantizedCPUDeQuantPC", "channels"),
        ("fp8-tensor", "QuantizedCPUDeQuant", "tensor"),
    ):
        yield Entry(kernel, name, "formats.dequantize", {"format": format, "result": RESULTS})


PROJECT = Project("Neural Compressor", ("neural-compressor-pt", "torch"), tuple(entries()))
