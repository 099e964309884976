"""torchao on a CPU: 4096 activations of 1, times weights of 1 in 8 bits with a scale for each output."""

import torch
from torchao.quantization import Int8WeightOnlyConfig, quantize_

for kind in (torch.float32, torch.bfloat16, torch.float16):
    layer = torch.nn.Linear(4096, 8, bias=False, dtype=kind)
    torch.nn.init.ones_(layer.weight)
    quantize_(layer, Int8WeightOnlyConfig())
    print(kind, layer(torch.ones(1, 4096, dtype=kind))[0, 0].item(), "expected 4096")
