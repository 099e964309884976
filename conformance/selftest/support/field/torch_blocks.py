"""More products with stored matrices in PyTorch: one vector, activations of 8 bits, and blocks cut by ``split``."""

from typing import Any

import torch

DOUBLED = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.int32)
SHIFTS = torch.arange(0, 32, 4, dtype=torch.int32)


def gptq_int8(x_codes: Any, x_scale: Any, qweight: Any, qzeros: Any, scales: Any, g_idx: Any) -> Any:
    """GPTQ of 4 bits, zeros stored less one, times int8: the integer sum of a group is scaled."""
    codes = (qweight[:, None] >> SHIFTS[:, None] & 15).flatten(0, 1)
    zeros = (qzeros[:, :, None] >> SHIFTS & 15).flatten(1) + 1
    numbers = codes - zeros[g_idx.long()]
    y = torch.zeros(len(x_codes), scales.shape[1])
    for group, scale in enumerate(scales.float()):
        rows = torch.nonzero(g_idx == group)[:, 0]
        dots = x_codes[:, rows].int() @ numbers[rows].int()
        y += dots.float() * scale
    return y * x_scale


def awq_vector(x: Any, qweight: Any, qzeros: Any, scales: Any, group_size: int) -> Any:
    """AWQ of 4 bits, layout gemm; one vector, in groups: zeros meet the sum of a group of x."""
    order = torch.tensor([0, 16, 4, 20, 8, 24, 12, 28], dtype=torch.int32)
    codes = (qweight[:, :, None] >> order & 15).flatten(1).float()
    zeros = (qzeros[:, :, None] >> order & 15).flatten(1).float()
    runs = x.float().view(-1, 1, group_size)
    dots = torch.bmm(runs, codes.view(len(scales), group_size, -1))[:, 0]
    totals = runs.sum(dim=2)
    return (scales.float() * (dots - totals * zeros)).sum(dim=0).to(x.dtype)


def q4_k(x: Any, blocks: Any) -> Any:
    """Q4_K: a block is cut into two scales, twelve bytes of scales and minima, and 128 bytes of codes."""
    records = blocks.view(-1, 144)
    d, dmin, packed, octets = torch.split(records, [2, 2, 12, 128], dim=1)
    d, dmin = (each.contiguous().view(torch.float16).float() for each in (d, dmin))
    first, second, third = packed.view(-1, 3, 4).unbind(dim=1)
    scale = torch.cat([first & 63, (third & 15) | ((first >> 2) & 48)], dim=1)
    minimum = torch.cat([second & 63, (third >> 4) | ((second >> 2) & 48)], dim=1)
    shifts = torch.tensor([0, 4], dtype=torch.uint8).view(1, 1, 2, 1)
    codes = (octets.reshape(-1, 4, 1, 32) >> shifts & 15).reshape(-1, 8, 32)
    weights = (d * scale)[:, :, None] * codes - (dmin * minimum)[:, :, None]
    return (x.float() @ weights.reshape(len(blocks), -1).T).to(x.dtype)


def mxfp4_q8_0(x_blocks: Any, elements: Any, scale: Any) -> Any:
    """MXFP4 times Q8_0: integer sums of doubled elements, with both scales and a half."""
    records = x_blocks.view(len(x_blocks), -1, 34)
    d = records[..., :2].contiguous().view(torch.float16).float()[..., 0]
    q = records[..., 2:].contiguous().view(torch.int8).float()
    octets = elements.view(torch.uint8)
    codes = torch.stack([octets & 15, octets >> 4], dim=-1).view(len(octets), -1, 32)
    dots = torch.einsum("tbi,nbi->tnb", q, DOUBLED[codes.long()].float())
    exponent = scale.view(torch.uint8).to(torch.int32) - 128
    return (torch.ldexp(dots, exponent[None]) * d[:, None]).sum(dim=2)


def fp8_vector(x: Any, weight: Any, weight_scale: Any) -> Any:
    """FP8 with a scale for each output; one vector."""
    sums = torch.mv(weight.float(), x.float())
    return (sums * weight_scale[:, 0]).to(x.dtype)


def fp8_block_int8(x_codes: Any, x_scale: Any, weight: Any, weight_scale_inv: Any) -> Any:
    """FP8 with scales of blocks of 128 x 128, times int8: block after block of K."""
    n, k = weight.shape
    y = torch.zeros(len(x_codes), n)
    for block, scale in enumerate(weight_scale_inv.T):
        part = slice(128 * block, min(k, 128 * block + 128))
        sums = x_codes[:, part].float() @ weight[:, part].float().T
        y += sums * scale.repeat_interleave(128)[:n]
    return y * x_scale
