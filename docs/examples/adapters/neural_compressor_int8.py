"""Intel Neural Compressor: a layer of 8 bits with zero points. Codes of 200 less a zero of 10 should be 190."""

import torch
from neural_compressor.torch.algorithms.weight_only.modules import INCWeightOnlyLinear

layer = INCWeightOnlyLinear(in_features=32, out_features=8, bits=8, group_size=32, zp=True)
codes, zeros = torch.full((8, 32), 200, dtype=torch.uint8), torch.full((8, 1), 10, dtype=torch.uint8)
layer.pack(codes, torch.ones(8, 1), zeros, None)
print(layer.recover().unique().tolist())
