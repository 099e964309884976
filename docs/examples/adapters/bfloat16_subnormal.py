"""PyTorch's product in bfloat16: a weight below 2^-126 counts as 0 where the processor multiplies such numbers."""

import torch

x = torch.full((64, 64), 2.0**100, dtype=torch.bfloat16)
weights = torch.full((64, 64), 2.0**-130, dtype=torch.bfloat16)
print("the weights are", weights[0, 0].item(), "and an element of the product should be", 64 * 2.0**-30)
print(
    "it is",
    torch.nn.functional.linear(x, weights)[0, 0].item(),
    "on a processor with",
    torch.backends.cpu.get_cpu_capability(),
)
