"""torchao: MX, NVFP4, int8 and int4 tensors, by the operations that PyTorch dispatches to them on a CPU.

Source: ``torchao/prototype/mx_formats``, ``torchao/quantization/quantize_`` and ``int4_opaque_tensor.py``.
"""

from collections.abc import Iterator
from typing import Any

from atlas.entry import RESULTS, Entry, Project, library
from lowbit.backend import Range

torch = library("torch")
mx_tensor = library("torchao.prototype.mx_formats.mx_tensor")
nvfp4_tensor = library("torchao.prototype.mx_formats.nvfp4_tensor")
int8_tensor = library("torchao.quantization.quantize_.workflows.int8.int8_tensor")
int4_tensor = library("torchao.prototype.quantization.int4.int4_opaque_tensor")

INT8 = {"int8-token": "float32", "int8-token-f16": "float16", "int8-token-bf16": "bfloat16"}
PRODUCTS = ("linear.gemv", "linear.gemm")


def mx(elements: Any, scale: Any, kind: Any, result: str) -> Any:
    tensor = mx_tensor.MXTensor(elements, scale, kind, 32, torch.float32, None, None, False)
    return tensor.dequantize(getattr(torch, result)).T.contiguous()


def mxfp4(elements: Any, scale: Any, result: str) -> Any:
    return mx(elements, scale, torch.float4_e2m1fn_x2, result)


def mxfp8_e4m3(elements: Any, scale: Any, result: str) -> Any:
    return mx(elements, scale, torch.float8_e4m3fn, result)


def mxfp8_e5m2(elements: Any, scale: Any, result: str) -> Any:
    return mx(elements, scale, torch.float8_e5m2, result)


def nvfp4(weight: Any, weight_scale: Any, weight_scale_2: Any, result: str) -> Any:
    tensor = nvfp4_tensor.NVFP4Tensor(
        weight, weight_scale, 16, torch.float32, per_tensor_scale=weight_scale_2.reshape(())
    )
    return tensor.dequantize(getattr(torch, result)).T.contiguous()


def int8(x: Any, codes: Any, scale: Any, rows: int) -> Any:
    weight = int8_tensor.Int8Tensor(codes, scale, [1, rows], x.dtype)
    return torch.nn.functional.linear(x if x.dim() == 2 else x[None], weight).reshape(*x.shape[:-1], len(codes))


def int4(x: Any, qdata: Any, scale_and_zero: Any, group_size: int, rows: int, columns: int) -> Any:
    weight = int4_tensor.Int4OpaqueTensor(qdata, scale_and_zero, [1, group_size], (columns, rows))
    return torch.nn.functional.linear(x, weight).contiguous()


def entries() -> Iterator[Entry]:
    for format, function in (("mxfp4", "mxfp4"), ("mxfp8-e4m3", "mxfp8_e4m3"), ("mxfp8-e5m2", "mxfp8_e5m2")):
        yield Entry("MXTensor.dequantize", function, "formats.dequantize", {"format": format, "result": RESULTS})
    yield Entry("NVFP4Tensor.dequantize", "nvfp4", "formats.dequantize", {"format": "nvfp4", "result": RESULTS})
    for format, type in INT8.items():
        limits = {"format": format, "activations": type, "result": type}
        yield Entry("linear, Int8Tensor", "int8", "linear.gemm", limits)
    for operation in PRODUCTS:
        limits = {"format": "int4-opaque-avx512", "activations": "bfloat16", "result": "bfloat16"}
        yield Entry("linear, Int4OpaqueTensor", "int4", operation, limits | {"columns": Range(16), "rows": Range(32)})


PROJECT = Project("torchao", ("torchao", "torch"), tuple(entries()))
