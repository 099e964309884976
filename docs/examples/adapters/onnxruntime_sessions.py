"""Bytes of malloc that stay behind with each session that was made and dropped; on Linux with glibc."""

import ctypes
import gc

import onnxruntime
from onnx import TensorProto, helper


class Mallinfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in ("a", "b", "c", "d", "e", "f", "g", "used", "free", "top")]


libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Mallinfo
node = helper.make_node("Identity", ["A"], ["Y"])
ends = [[helper.make_tensor_value_info(name, TensorProto.FLOAT, [1])] for name in ("A", "Y")]
graph = helper.make_graph([node], "one", *ends)
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()
before = 0
for batch in range(5):
    for _ in range(2000):
        onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    gc.collect()
    used = libc.mallinfo2().used
    if batch:  # the first warms up
        print(f"onnxruntime {onnxruntime.__version__}: {(used - before) / 2000:.1f} bytes a session")
    before = used
