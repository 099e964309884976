"""OpenVINO: a product with weights of 4 bits (u4, zero-points, scales) that its CPU plugin decompresses as it goes.

The model is what its own tools make of a compressed layer: a constant of u4, converted, less its zero-points, times its
scales, times the activations. Whether the plugin keeps the weights compressed is read from the compiled model; where it
does not, the contestant is absent, since it would be another kernel under this name.
"""

from typing import Any

import numpy as np

from lowbit.arrays import F32
from lowbit.quantization.affine import QuantizedMatrix, dequantize
from lowbit.quantization.packing import Codes
from lowbit_adapters.layout import code_rows, group_rows, pack_bits
from peers.base import AbsentError, Contestant, Plan, Rotation, Weights

PROPERTIES: dict[str, dict[str, Any]] = {
    "float32": {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"},
    "bfloat16": {"INFERENCE_PRECISION_HINT": "bf16", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"},
    "default": {},
}


def fours(codes: Codes, shape: list[int]) -> Any:
    """A constant of u4, with memory of its own."""
    import openvino as ov
    from openvino import opset13 as ops

    tensor = ov.Tensor(ov.Type.u4, ov.Shape(shape))
    tensor.data.reshape(-1).view(np.uint8)[:] = pack_bits(codes.reshape(1, -1), 4).ravel()
    return ops.constant(tensor)


def compressed(weights: Weights, tile: QuantizedMatrix, turn: int) -> Any:
    """The decompression of one constant, N × K in float32; `turn` outputs are rolled, so that no two are equal."""
    from openvino import opset13 as ops

    groups, size = tile.groups, tile.group_size
    codes = np.roll(weights.spread(code_rows(tile.words, tile.bits), 0), turn, axis=0)
    scales, zeros = (np.roll(weights.spread(group_rows(a), 0), turn, axis=0) for a in (tile.scales, tile.zeros))
    stored = fours(codes, [weights.columns, groups, size])
    zero = fours(zeros, [weights.columns, groups, 1])
    shifted = ops.subtract(ops.convert(stored, "f32"), ops.convert(zero, "f32"))
    scaled = ops.multiply(shifted, ops.constant(np.ascontiguousarray(scales)[..., None]))
    return ops.reshape(scaled, [weights.columns, groups * size], special_zero=False)


def model_of(weights: Weights, tile: QuantizedMatrix, products: int) -> Any:
    """A model of one burst: products of one input with constants of their own."""
    import openvino as ov
    from openvino import opset13 as ops

    x = ops.parameter([-1, weights.rows], np.float32, name="x")
    outputs = [
        ops.matmul(x, compressed(weights, tile, turn), transpose_a=False, transpose_b=True) for turn in range(products)
    ]
    return ov.Model([ops.result(output) for output in outputs], [x], "lowbit")


class OpenVinoContestant(Contestant):
    """Compiled models, an inference request each, with input and outputs in memory of their own."""

    def __init__(self, weights: Weights, plan: Plan, precision: str) -> None:
        import openvino as ov

        self._tile, self._weights = weights.quantized(), weights
        if weights.rows % self._tile.group_size:
            raise AbsentError("groups that do not divide the rows")
        self.nbytes = self._tile.groups * weights.columns * 9 // 2 + weights.rows * weights.columns // 2
        self.products, self.bursts = plan.products(self.nbytes), plan.bursts(self.nbytes)
        hints = {"INFERENCE_NUM_THREADS": plan.threads, "NUM_STREAMS": 1, "PERFORMANCE_HINT": "LATENCY"}
        model = model_of(weights, self._tile, self.products)
        core = ov.Core()
        self._compiled = [core.compile_model(model, "CPU", hints | PROPERTIES[precision]) for _ in range(self.bursts)]
        self._requests = [compiled.create_infer_request() for compiled in self._compiled]
        self._check_compressed(self._compiled[0].get_runtime_model())

    def _check_compressed(self, model: Any) -> None:
        layers = [op for op in model.get_ops() if op.get_rt_info()["layerType"].astype(str) == "FullyConnected"]
        if len(layers) != self.products:
            kinds = sorted({op.get_rt_info()["layerType"].astype(str) for op in model.get_ops()})
            raise AbsentError(f"the CPU plugin makes no layer of compressed weights of it: {', '.join(kinds)}")

    def prepare(self, x: F32) -> None:
        import openvino as ov

        for request in self._requests:
            request.set_input_tensor(ov.Tensor(x, shared_memory=True))
            request.infer()  # the first one with a new shape makes kernels and lays out weights
        self._x, self._rotation = x, Rotation(self._requests)

    def run(self) -> None:
        self._last = self._rotation.next()
        self._last.infer()

    def result(self) -> F32:
        last = self._last.get_output_tensor(self.products - 1).data.astype(np.float32)
        return np.roll(last, 1 - self.products, axis=1)

    def held(self) -> F32:
        return dequantize(self._tile)


def details() -> dict[str, Any]:
    """Version."""
    import openvino

    return {"openvino": openvino.__version__}
