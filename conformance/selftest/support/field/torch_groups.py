"""More products with stored matrices in PyTorch: group after group, one vector, 64 columns at once."""

from typing import Any

import torch

FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
PLACES = torch.tensor([0, 16, 4, 20, 8, 24, 12, 28], dtype=torch.int32)


def awq_int8(x_codes: Any, x_scale: Any, qweight: Any, qzeros: Any, scales: Any, group_size: int) -> Any:
    """AWQ of 4 bits, layout gemm, times int8: the zero of a group meets the sum of its codes of x."""
    codes = (qweight[:, :, None] >> PLACES & 15).flatten(1)
    zeros = (qzeros[:, :, None] >> PLACES & 15).flatten(1)
    y = torch.zeros(len(x_codes), scales.shape[1])
    for group, scale in enumerate(scales.float()):
        rows = slice(group * group_size, (group + 1) * group_size)
        own = x_codes[:, rows].int()
        dots = own @ codes[rows]
        totals = own.sum(dim=1, keepdim=True)
        y += scale * (dots - totals * zeros[group])
    return y * x_scale


def mxfp4_vector(x: Any, elements: Any, scale: Any) -> Any:
    """OCP MXFP4; one vector. Elements of even rows, then of odd rows."""
    octets = elements.view(torch.uint8).int()
    values = torch.empty(len(octets), 2 * octets.shape[1])
    values[:, 0::2] = FP4[octets & 15]
    values[:, 1::2] = FP4[octets >> 4]
    exponent = scale.view(torch.uint8).int() - 127
    weights = torch.ldexp(values.view(len(octets), -1, 32), exponent[:, :, None])
    return torch.mv(weights.flatten(1), x.float()).to(x.dtype)


def fp8_columns(x: Any, weight: Any, weight_scale: Any) -> Any:
    """FP8 with a scale for each output: 64 outputs at once."""
    y = torch.empty(len(x), len(weight), dtype=x.dtype)
    wide = x.float()
    for first in range(0, len(weight), 64):
        part = slice(first, first + 64)
        sums = wide @ weight[part].float().T
        y[:, part] = (sums * weight_scale[part, 0]).to(x.dtype)
    return y
