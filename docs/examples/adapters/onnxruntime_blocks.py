"""MatMulNBits with a large block, which its documentation allows: ``onnxruntime_blocks.py 512``, or ``4096 float``.

All weights are 1 and all activations are 1, so every element of the result is 4096.
"""

import sys

import numpy as np
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

block, floats = int(sys.argv[1]), sys.argv[2:] == ["float"]
inputs, outputs = 4096, 3
blocks = inputs // block
codes = np.full((outputs, blocks, block // 2), 0x99, np.uint8)  # 9 twice; 9 - 8 = 1
scales = np.ones((outputs, blocks), np.float32)
packed = np.full((outputs, (blocks + 1) // 2), 0x88, np.uint8)
constants = {"B": codes, "scales": scales, "zeros": np.full_like(scales, 8) if floats else packed}
sizes = {"K": inputs, "N": outputs, "bits": 4, "block_size": block}
node = helper.make_node("MatMulNBits", ["A", *constants], ["Y"], domain="com.microsoft", **sizes)
ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, size]) for name, size in (("A", 4096), ("Y", 3))]
initial = [numpy_helper.from_array(array, name) for name, array in constants.items()]
opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
model = helper.make_model(
    helper.make_graph([node], "one", ends[:1], ends[1:], initial), opset_imports=opsets, ir_version=8
)
session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
for _ in range(3):
    print(onnxruntime.__version__, session.run(None, {"A": np.ones((1, inputs), np.float32)})[0])
