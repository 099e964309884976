"""Products with stored matrices in PyTorch, for any activations that it multiplies by."""

from typing import Any

import torch

FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def gptq(x: Any, qweight: Any, qzeros: Any, scales: Any, g_idx: Any) -> Any:
    """GPTQ of 4 bits, zeros stored less one."""
    wf = torch.arange(0, 32, 4, dtype=torch.int32)
    weight = torch.bitwise_and(torch.bitwise_right_shift(qweight.unsqueeze(1), wf.view(1, -1, 1)), 15)
    zeros = torch.bitwise_and(torch.bitwise_right_shift(qzeros.unsqueeze(2), wf.view(1, 1, -1)), 15) + 1
    weight, zeros = weight.reshape(-1, scales.shape[1]), zeros.reshape(scales.shape)
    dense = scales.float()[g_idx.long()] * (weight - zeros[g_idx.long()])
    return torch.matmul(x.float(), dense).to(x.dtype)


def awq(x: Any, qweight: Any, qzeros: Any, scales: Any, group_size: int) -> Any:
    """AWQ of 4 bits, layout gemm: unpacked in the order of words, then put into the order of columns."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    reverse = torch.arange(scales.shape[1]).view(-1, 8)[:, [0, 4, 1, 5, 2, 6, 3, 7]].reshape(-1)
    codes = (qweight[:, :, None] >> shifts[None, None] & 15).reshape(len(qweight), -1)[:, reverse]
    zeros = (qzeros[:, :, None] >> shifts[None, None] & 15).reshape(len(qzeros), -1)[:, reverse]
    scale = scales.float().repeat_interleave(group_size, dim=0)[: len(codes)]
    zero = zeros.repeat_interleave(group_size, dim=0)[: len(codes)]
    return (x.float() @ ((codes - zero) * scale)).to(x.dtype)


def mxfp4(x: Any, elements: Any, scale: Any) -> Any:
    """OCP MXFP4: elements by a table, scales by ldexp."""
    octets = elements.view(torch.uint8)
    codes = torch.stack([octets & 15, octets >> 4], dim=-1).flatten(1)
    exponent = scale.view(torch.uint8).to(torch.int32) - 127
    blocks = FP4[codes.long()].view(len(codes), -1, 32)
    weights = torch.ldexp(blocks, exponent[..., None]).flatten(1)
    return (x.float() @ weights.T).to(x.dtype)


def fp8_block(x: Any, weight: Any, weight_scale_inv: Any) -> Any:
    """FP8 with scales of blocks of 128 x 128."""
    n, k = weight.shape
    scale = weight_scale_inv.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    return (x.float() @ (weight.float() * scale).T).to(x.dtype)
