"""OpenVINO: FP8 weights of 2^-127 times activations of 2^100, of which a sum of 32 is 2^-22.

The weights come from a scale below 2^-126, or from an element of 1/2 and a scale of 2^-126. CPU_DENORMALS_OPTIMIZATION
is off.
"""

import numpy as np
import openvino as ov
from openvino import opset13 as ops

for precision in ("f32", "bf16"):
    for scale, element in ((2.0**-127, 1.0), (2.0**-126, 0.5)):
        elements = ops.convert(ops.constant(np.full((16, 32), element, np.float32), ov.Type.f8e4m3), "f32")
        weights = ops.multiply(elements, ops.constant(np.full((16, 1), scale, np.float32)))
        x = ops.parameter([1, 32], ov.Type.f32)
        model = ov.Model([ops.matmul(x, weights, False, True)], [x])
        hints = {"INFERENCE_PRECISION_HINT": precision, "CPU_DENORMALS_OPTIMIZATION": False}
        found = ov.Core().compile_model(model, "CPU", hints)([np.full((1, 32), 2.0**100, np.float32)])[0]
        print(precision, "scale", scale, "element", element, "sum", found[0, 0], "expected", 2.0**-22)
