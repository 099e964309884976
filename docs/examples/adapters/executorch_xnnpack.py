"""ExecuTorch with XNNPACK: a linear layer whose weights alone are quantised, by torchao. Its scales are all 1/64."""

import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import to_edge_transform_and_lower
from executorch.runtime import Runtime
from torchao.quantization import IntxWeightOnlyConfig, quantize_
from torchao.quantization.granularity import PerAxis

model, x = torch.nn.Sequential(torch.nn.Linear(64, 8, bias=False)).eval(), torch.ones(1, 64)
torch.nn.init.constant_(model[0].weight, 127.5 / 64)
quantize_(model, IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=PerAxis(0)))
lowered = to_edge_transform_and_lower(torch.export.export(model, (x,)), partitioner=[XnnpackPartitioner()])
program = Runtime.get().load_program(lowered.to_executorch().buffer)
print("XNNPACK", program.load_method("forward").execute([x])[0].unique().tolist(), "torch", model(x).unique().tolist())
print("scales", model[0].weight.scale.unique().tolist())
