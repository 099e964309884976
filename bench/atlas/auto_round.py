"""auto-round-lib: the kernels of AutoRound, which are Intel's, for weights of 2, 4 and 8 bits.

``woqgemm`` takes weights that ``repack_quantized_weight`` packed; ``unpack_weight`` turns them back into numbers. The
layer for AWQ's checkpoints repacks them and multiplies in float32. ``woqgemm_s8`` takes 8 bits with a scale for each
output as they are.

Source: the comments on these functions in ``auto_round_kernel``, which name types and shapes, and nothing on the
arithmetic; ``qlinear.py``.
"""

from collections.abc import Iterator
from typing import Any

from atlas.entry import RESULTS, Entry, Project, library
from lowbit.backend import Range
from lowbit.contract.rounding import Arithmetic

torch = library("torch")
kernel = library("auto_round_kernel")
layers = library("auto_round_kernel.qlinear")

GROUPS: dict[str, object] = {"bits": (2, 4, 8), "group_size": (32, 64, 128), "rows": Range(128), "columns": Range(16)}


def product(x: Any, codes: Any, scale: Any) -> Any:
    return kernel.woqgemm_s8(x, codes, scale)


def awq(x: Any, qweight: Any, qzeros: Any, scales: Any, group_size: int, rows: int, columns: int) -> Any:
    layer = layers.QuantLinearAWQ(4, group_size, False, rows, columns, False, weight_dtype=scales.dtype)
    layer.qweight, layer.qzeros, layer.scales = qweight, qzeros, scales
    layer.post_init()
    with torch.inference_mode():
        return layer(x).clone()


def packed(weight_packed: Any, weight_scale: Any, bits: int, group_size: int) -> tuple[Any, tuple[Any, ...]]:
    """The weights as the library packs them, and what it asks for with them."""
    octets = weight_packed.view(torch.uint8)
    parts = [octets >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)]
    codes = torch.stack(parts, -1).reshape(len(octets), -1).int() - (1 << bits - 1)
    told = ("fp32", f"int{bits}", "fp32", False)
    scales, none = weight_scale.float().T.contiguous(), torch.empty(0, dtype=torch.int8)
    blob = kernel.repack_quantized_weight(codes.T.to(torch.int8).contiguous(), scales, none, group_size, *told)
    return blob, (len(octets), codes.shape[1], group_size, *told)


def groups(x: Any, weight_packed: Any, weight_scale: Any, bits: int, group_size: int) -> Any:
    blob, told = packed(weight_packed, weight_scale, bits, group_size)
    return kernel.woqgemm(x if x.dim() == 2 else x[None], blob, torch.empty(0), *told).reshape(*x.shape[:-1], -1)


def unpacked(weight_packed: Any, weight_scale: Any, bits: int, group_size: int) -> Any:
    blob, told = packed(weight_packed, weight_scale, bits, group_size)
    return kernel.unpack_weight(blob, torch.float32, *told).T.contiguous()


def entries() -> Iterator[Entry]:
    for format, type in (("int8-token", "float32"), ("int8-token-bf16", "bfloat16")):
        limits: dict[str, object] = {"format": format, "activations": type, "result": type}
        yield Entry("woqgemm_s8", "product", "linear.gemm", limits)
    stored = {"format": "ct-pack", "result": "float32"} | GROUPS
    yield Entry("unpack_weight", "unpacked", "formats.dequantize", stored)
    sizes = {name: limit for name, limit in GROUPS.items() if name != "bits"}
    for operation in ("linear.gemv", "linear.gemm"):
        yield Entry("woqgemm", "groups", operation, stored | {"activations": "float32"})
        for type in RESULTS:
            limits = {"format": "awq-gemm", "activations": type, "result": type} | sizes
            yield Entry("QuantLinearAWQ", "awq", operation, limits, Arithmetic("dequantised"))


PROJECT = Project("auto-round-lib", ("auto-round-lib", "torch"), tuple(entries()))
