"""auto-round-lib on a CPU: products of ones with an 8-bit matrix of ones, whose elements should be K = 128."""

import auto_round_kernel
import torch

codes = torch.ones(64, 128, dtype=torch.int8)
print("igemm_s8s8s32", auto_round_kernel.igemm_s8s8s32(codes[:4], codes).unique().tolist()[:4])
for kind in (torch.float32, torch.bfloat16):
    x, scales = torch.ones(4, 128, dtype=kind), torch.ones(64, dtype=kind)
    print("woqgemm_s8", kind, auto_round_kernel.woqgemm_s8(x, codes, scales).float().unique().tolist()[:4])
x = torch.zeros(1, 128)
x[0, 0], x[0, 1] = 1.0, 2.0**-10
print("woqgemm_s8 of 1 + 2^-10:", auto_round_kernel.woqgemm_s8(x, codes, torch.ones(64))[0, 0].item())
