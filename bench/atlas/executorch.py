"""ExecuTorch: the kernels of its library of quantised operators that take weights alone.

``mixed_linear`` sums the codes of a group times the activations, then scales the sum. XNNPACK, which a model's linear
layers are given to, casts the activations itself: asymmetrically, with a zero of each row. No format here has these.

Source: ``kernels/quantized/cpu``: ``op_mixed_linear.cpp`` and ``op_dequantize.cpp``.
"""

from collections.abc import Iterator
from typing import Any

from atlas.entry import Entry, Project, library
from lowbit.backend import Range
from lowbit.contract.rounding import Arithmetic

torch = library("torch")
kernels = library("executorch.kernels.quantized")

GROUPS = {"group_size": (32, 64, 128), "rows": Range(128)}


def linear(x: Any, codes: Any, scale: Any) -> Any:
    out = torch.empty(len(x), len(codes), dtype=x.dtype)
    scales = scale.squeeze(1) if scale.shape[1] == 1 else scale
    return torch.ops.quantized_decomposed.mixed_linear.out(x, codes, scales, None, out=out)


def channels(codes: Any, scale: Any) -> Any:
    out = torch.empty(codes.shape)
    kernel = torch.ops.quantized_decomposed.dequantize_per_channel.out
    return kernel(codes, scale.squeeze(1), None, 0, -128, 127, torch.int8, out=out).T.contiguous()


def entries() -> Iterator[Entry]:
    limits: dict[str, object] = {"format": "int8-token", "result": "float32"}
    yield Entry("dequantize_per_channel", "channels", "formats.dequantize", limits)
    for format, type in (("int8-token", "float32"), ("int8-token-f16", "float16"), ("int8-group", "float32")):
        limits = {"format": format, "activations": type, "result": type} | (GROUPS if format == "int8-group" else {})
        yield Entry("mixed_linear", "linear", "linear.gemm", limits, Arithmetic("factored", weights="exact"))


PROJECT = Project("ExecuTorch", ("executorch", "torch"), tuple(entries()))
