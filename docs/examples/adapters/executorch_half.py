"""ExecuTorch's mixed_linear in float16: 4096 codes of 1 times activations of 1 with a scale of 1/64, which is 64."""

import executorch.kernels.quantized  # noqa: F401 - it registers the operators
import torch

x, codes = torch.ones(1, 4096, dtype=torch.float16), torch.ones(1, 4096, dtype=torch.int8)
scale, out = torch.full((1,), 1 / 64, dtype=torch.float16), torch.empty(1, 1, dtype=torch.float16)
print(torch.ops.quantized_decomposed.mixed_linear.out(x, codes, scale, None, out=out).item(), "expected 64")
