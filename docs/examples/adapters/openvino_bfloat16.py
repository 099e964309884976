"""OpenVINO: a constant of float32 that the graph converts to bfloat16. Numbers are in units of 2^-10 above 1."""

import numpy as np
import openvino as ov
from openvino import opset13 as ops

x = np.array([5, 6, 7, 12, 21, 22, 23], np.float32) / 1024 + 1
model = ov.Model([ops.convert(ops.convert(ops.constant(x), "bf16"), "f32")], [])
found = ov.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})([])[0]
print(((found - 1) * 1024).tolist(), "expected", [8.0, 8.0, 8.0, 16.0, 24.0, 24.0, 24.0])
