"""GPTQ of 4 bits in PyTorch, for any activations that it multiplies by.

``lowbit conformance --function torch_gptq:gemm --profile lowbit-1.1/gptq-gemm-bf16 --arrays torch``
"""

import torch


def gemm(x, qweight, qzeros, scales, g_idx):
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    columns = qweight.shape[1]
    codes = (qweight[:, None, :] >> shifts[None, :, None] & 15).reshape(-1, columns)
    zeros = (qzeros[:, :, None] >> shifts & 15).reshape(-1, columns) + 1
    group = g_idx.long()
    weights = scales.float()[group] * (codes - zeros[group])
    return (x.float() @ weights).to(x.dtype)
