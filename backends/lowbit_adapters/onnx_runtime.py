r"""ONNX Runtime: the operator MatMulNBits of its CPU provider, at accuracy level 0 (float32).

The operator reads B as N × blocks × bytes, each block of codes of 2, 4 or 8 bits packed from the least significant
end, a scale for each block, and either zero-points packed like codes or zeros in float. Its documentation allows every
block that is a power of two and at least 16, so that is what is declared. A model of this one node is built in memory
for each matrix; the kernel reads x and writes the result in place.

**What it computes.** With integer zero-points the weights are :math:`s\,(q - z)` in float32, one rounding, whether a
kernel makes them on the way or the whole matrix is dequantised for a product of matrices; then they are summed in
float32, in an order that the processor decides. That is the form ``dequantised``. With zeros in float, z', the operator
forms :math:`s q` and :math:`-s z'`, each rounded, and adds them: the form ``factored``, with three roundings more
(z' itself, which is :math:`-\min/s`; the product; the sum), and only for 2 and 4 bits. The two are two backends, since
a backend declares one arithmetic for an operation.

Source: the operator's documentation and its CPU kernel (matmul_nbits.cc and MLAS) in the project's repository.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lowbit.arrays import F32, U8, Array
from lowbit.backend import Availability, Backend, Capabilities, Declaration, PreparedLinear
from lowbit.contract.rounding import Arithmetic, any_order
from lowbit.quantization.affine import Convention, QuantizedMatrix
from lowbit_adapters.layout import code_rows, group_rows, pack_bits, padded
from lowbit_adapters.libraries import availability, versions

LIBRARIES = {"onnx": "onnx", "onnxruntime": "onnxruntime"}
BLOCKS = tuple(2**power for power in range(4, 17))
OPSET, IR_VERSION = 17, 8  # old enough for any ONNX Runtime that has the operator


def blocks_of(matrix: QuantizedMatrix) -> U8:
    """The operator's B: uint8, N × blocks × bytes of a block; the last block is padded with zeros."""
    codes = padded(code_rows(matrix.words, matrix.bits), matrix.group_size, 0)
    return pack_bits(codes.reshape(matrix.columns, matrix.groups, matrix.group_size), matrix.bits)


def packed_zeros(matrix: QuantizedMatrix) -> U8:
    """Zero-points as the operator packs them: uint8, N × ⌈blocks · bits / 8⌉."""
    return pack_bits(group_rows(matrix.zeros), matrix.bits)


def float_zeros(matrix: QuantizedMatrix) -> F32:
    """The z' of ``scale * (q - z')`` under ``minimum``: float32, N × blocks, one rounding of −min / scale."""
    zeros = -matrix.zeros.astype(np.float64) / matrix.scales.astype(np.float64)
    return group_rows(zeros.astype(np.float32))


def float_zero_roundings(rows: int, group_size: int) -> int:
    """Roundings of a dot product in any order, and three for the offset: the zero, its product and the sum."""
    return any_order(rows, group_size) + 3


def model_of(constants: Sequence[Mapping[str, Array]], sizes: Mapping[str, int]) -> bytes:
    """A model of one or several products of one input A, each with its own constants: the outputs Y0, Y1, ….

    Args:
        constants: of each product, the operator's B, scales and zero_points, in this order.
        sizes: the operator's attributes.
    """
    from onnx import TensorProto, helper, numpy_helper

    products = range(len(constants))
    tensors = [(f"{name}{n}", array) for n in products for name, array in constants[n].items()]
    named = [["A", *(f"{name}{n}" for name in constants[n])] for n in products]
    nodes = [
        helper.make_node("MatMulNBits", inputs, [f"Y{n}"], domain="com.microsoft", **sizes)
        for n, inputs in enumerate(named)
    ]
    graph = helper.make_graph(
        nodes,
        "lowbit",
        [helper.make_tensor_value_info("A", TensorProto.FLOAT, ["T", sizes["K"]])],
        [helper.make_tensor_value_info(f"Y{n}", TensorProto.FLOAT, ["T", sizes["N"]]) for n in products],
        [numpy_helper.from_array(array, name) for name, array in tensors],
    )
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)
    return bytes(model.SerializeToString())


def sizes_of(matrix: QuantizedMatrix, accuracy_level: int = 0) -> dict[str, int]:
    """The operator's attributes; accuracy level 4 rounds the activations to 8 bits, 0 leaves them in float32."""
    sizes = {"K": matrix.rows, "N": matrix.columns, "bits": matrix.bits, "block_size": matrix.group_size}
    return sizes | {"accuracy_level": accuracy_level}


def session_of(matrix: QuantizedMatrix, zeros: Array) -> Any:
    """A session on one thread with a model of one node, whose input is A and whose output is Y0."""
    import onnxruntime

    scales = group_rows(matrix.scales.astype(np.float32))
    model = model_of([{"B": blocks_of(matrix), "scales": scales, "zero_points": zeros}], sizes_of(matrix))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


class OnnxRuntimeLinear(PreparedLinear):
    """A session; a call binds x and the result in place, without copies."""

    def __init__(self, backend: str, matrix: QuantizedMatrix, zeros: Array) -> None:
        super().__init__(backend, matrix.rows, matrix.columns, matrix.nbytes)
        self._session = session_of(matrix, zeros)

    def _qgemv(self, x: F32, out: F32) -> None:
        self._multiply(x[None], out[None])

    def _qgemm(self, x: F32, out: F32) -> None:
        self._multiply(x, out)

    def _multiply(self, x: F32, out: F32) -> None:
        binding = self._session.io_binding()
        binding.bind_input("A", "cpu", 0, np.float32, x.shape, x.ctypes.data)
        binding.bind_output("Y0", "cpu", 0, np.float32, out.shape, out.ctypes.data)
        self._session.run_with_iobinding(binding)


class OnnxRuntimeBackend(Backend):
    """MatMulNBits with integer zero-points."""

    name = "onnxruntime"
    bits: tuple[int, ...] = (2, 4, 8)
    convention: Convention = "zero_point"
    arithmetic = Arithmetic("dequantised", "float32", any_order)

    def availability(self) -> Availability:
        return availability(LIBRARIES)

    def capabilities(self) -> Capabilities:
        limits = {"bits": self.bits, "group_size": BLOCKS, "convention": (self.convention,)}
        declared = Declaration(limits, self.arithmetic)
        details = {"operator": "MatMulNBits, accuracy level 0, one thread"} | versions(LIBRARIES)
        return Capabilities(dict.fromkeys(("linear.qgemv", "linear.qgemm"), declared), concurrent=True, details=details)

    def _prepare(self, matrix: QuantizedMatrix) -> PreparedLinear:
        return OnnxRuntimeLinear(self.name, matrix, self._zeros(matrix))

    def _zeros(self, matrix: QuantizedMatrix) -> Array:
        return packed_zeros(matrix)


class OnnxRuntimeMinimumBackend(OnnxRuntimeBackend):
    """MatMulNBits with zeros in float."""

    name = "onnxruntime-minimum"
    bits = (2, 4)
    convention = "minimum"
    arithmetic = Arithmetic("factored", "float32", float_zero_roundings)

    def _zeros(self, matrix: QuantizedMatrix) -> Array:
        return float_zeros(matrix)
