"""auto-round-lib on a CPU: weight-only products with an 8-bit matrix of ones, whose elements should be sums of rows."""

import auto_round_kernel
import torch

codes = torch.ones(64, 128, dtype=torch.int8)
x, scales = torch.ones(4, 128, dtype=torch.bfloat16), torch.ones(64, dtype=torch.bfloat16)
print("bfloat16, expected 128:", auto_round_kernel.woqgemm_s8(x, codes, scales).float().unique().tolist()[:4])
x, scales = torch.zeros(2, 128), torch.ones(64)
x[0, 0], x[0, 1], x[1, 0] = 1.0, 2.0**-10, 1000.0
print("float32, expected 1 + 2^-10:", auto_round_kernel.woqgemm_s8(x[:1], codes, scales)[0, 0].item())
print("the same row above a larger one:", auto_round_kernel.woqgemm_s8(x, codes, scales)[0, 0].item())
