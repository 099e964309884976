"""More products with stored matrices in PyTorch: tiles of K that are turned into weights before they are multiplied."""

import math
from typing import Any

import torch


def awq_dequantised(x: Any, qweight: Any, qzeros: Any, scales: Any, group_size: int, rows: int, columns: int) -> Any:
    """AWQ of 4 bits, layout gemm: tiles of at most 32 rows, each within a group."""
    order = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7], dtype=torch.int32)
    shifts = (4 * order).repeat(columns // 8)
    y = torch.zeros(len(x), columns)
    step = math.gcd(32, group_size)
    for first in range(0, rows, step):
        group, tile = first // group_size, slice(first, first + step)
        codes = qweight[tile].repeat_interleave(8, dim=1) >> shifts & 15
        zeros = qzeros[group].repeat_interleave(8) >> shifts & 15
        weights = scales[group].float() * (codes - zeros)
        y += x[:, tile].float() @ weights
    return y.to(x.dtype)


def mxfp4_biased(x: Any, elements: Any, scale: Any) -> Any:
    """OCP MXFP4: elements moved into the exponent of float32, and multiplied by what its bias is more."""
    octets = elements.view(torch.uint8).int()
    codes = torch.stack([octets & 15, octets >> 4], dim=-1).flatten(1)
    bits = (codes & 8) << 28 | (codes & 7) << 22
    values = bits.view(torch.float32) * 2.0**126
    exponent = scale.view(torch.uint8).int() - 127
    weights = torch.ldexp(values.view(len(octets), -1, 32), exponent[:, :, None])
    return (x.float() @ weights.flatten(1).T).to(x.dtype)


def fp8_dequantised(x: Any, weight: Any, weight_scale_inv: Any) -> Any:
    """FP8 with scales of blocks of 128 x 128: tiles of 64 rows, half a block."""
    columns, rows = weight.shape
    block_rows = torch.arange(columns) // 128
    y = torch.zeros(len(x), columns)
    for first in range(0, rows, 64):
        tile = slice(first, min(first + 64, rows))
        scale = weight_scale_inv[block_rows, first // 128]
        y += x[:, tile].float() @ (weight[:, tile].float() * scale[:, None]).T
    return y.to(x.dtype)
