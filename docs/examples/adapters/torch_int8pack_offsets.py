"""PyTorch on a CPU: an 8-bit product whose activations start one element after an aligned address. The process ends."""

import torch

K = 128
codes, scales = torch.ones(K, K, dtype=torch.int8), torch.ones(K, dtype=torch.bfloat16)
for start in (0, 1):
    x = torch.ones(8 * K + 1, dtype=torch.bfloat16)[start : start + 8 * K].reshape(8, K)
    print("start", start, flush=True)
    print(torch._weight_int8pack_mm(x, codes, scales).unique().tolist(), "expected", [float(K)], flush=True)
