"""bitsandbytes' product of 8 bits on a CPU: 127 · 127, both scaled by 1/127, should be 1."""

import bitsandbytes  # noqa: F401, registers its operators
import torch

codes, scale = torch.full((1, 1), 127, dtype=torch.int8), torch.ones(1)
one = torch.ops.bitsandbytes.int8_scaled_mm(codes, codes, scale, scale, dtype=torch.float32)
print(f"{one.item():.8f}, off by {one.item() - 1:.1e}; the constant 1 / 127² is {1 / 127**2:.7e}")
