"""PyTorch's product in float32: the same numbers at other addresses. Then run it with MKL_CBWR=AUTO, or COMPATIBLE."""

import torch

torch.set_num_threads(1)
generator = torch.Generator().manual_seed(0)
weights = torch.randn(1, 160, generator=generator)
room = torch.empty(160 + 16)
seen = set()
for offset in range(16):
    x = room[offset : offset + 160]
    x.copy_(torch.linspace(-1, 1, 160))
    seen.add(torch.nn.functional.linear(x, weights).item())
print(f"{len(seen)} results of one product, from x at 16 offsets: {sorted(seen)}")
