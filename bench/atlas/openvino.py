"""OpenVINO: its plugin for CPUs, where a matrix is a compressed constant that the graph decompresses.

Types and layouts are those that NNCF writes: integers of 4 and 8 bits, NF4, MXFP4, MXFP8 and FP8, N × K, with a scale
for each output or for each group of a row. ``MatMulNBits`` of ONNX is read by the project's own frontend. A product is
compiled and run; without a product the plugin folds the constant, which decodes it.

``INFERENCE_PRECISION_HINT`` is the type of the activations, where the plugin has it: float16 is computed in float32.
``DYNAMIC_QUANTIZATION_GROUP_SIZE`` is 0, since a cast of activations is another operation.

Source: OpenVINO's documentation (LLM Weight Compression; CPU Device) and NNCF's ``compress_weights``.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np

from atlas.entry import RESULTS, Entry, Project, library
from lowbit.arrays import F32, Array
from lowbit.backend import Range
from lowbit.contract.rounding import Arithmetic, Weights

ov = library("openvino")
ops = library("openvino.opset13")
onnx = library("onnx")

Build = Callable[..., Any]
TYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
PRODUCTS = ("linear.gemv", "linear.gemm")
MX = {"mxfp4": "f4e2m1", "mxfp8-e4m3": "f8e4m3", "mxfp8-e5m2": "f8e5m2"}


def constant(octets: Array, shape: tuple[int, ...], kind: str) -> Any:
    """A constant of a type that numpy may lack, from its bytes."""
    tensor = ov.Tensor(getattr(ov.Type, kind), ov.Shape(shape))
    tensor.data.reshape(-1).view(np.uint8)[:] = np.ascontiguousarray(octets).reshape(-1).view(np.uint8)
    return ops.convert(ov.op.Constant(tensor), "f32")


def decompressed(codes: Any, scale: Any, columns: int, rows: int) -> Any:
    """The matrix N × K of codes N × groups × elements."""
    return ops.reshape(ops.multiply(codes, scale), np.array([columns, rows]), False)


def plugin(model: Any, precision: str) -> Any:
    """A model, compiled for the processor."""
    hints = {"INFERENCE_PRECISION_HINT": precision, "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
    return ov.Core().compile_model(model, "CPU", hints)


def run(model: Any, *arrays: Any) -> Array:
    """What a compiled model returns; bfloat16, which numpy lacks, by its patterns."""
    found = np.array(model(list(arrays))[0], order="C")
    return found.view(ml_dtypes.bfloat16) if model.output(0).get_element_type() == ov.Type.bf16 else found


def product(x: Array, result: str, build: Build, *arguments: Any) -> Array:
    """``x`` times the matrix that a function builds of arguments."""
    kind = TYPES[x.dtype.name]
    tensor = ov.Tensor(
        np.ascontiguousarray(x).view(f"u{x.itemsize}"),
        ov.Shape([x.size // x.shape[-1], x.shape[-1]]),
        getattr(ov.Type, kind),
    )
    return run(compiled(build, frozen(arguments), TYPES[result], kind), tensor).reshape(*x.shape[:-1], -1)


def decode(result: str, build: Build, *arguments: Any) -> Array:
    return np.ascontiguousarray(run(compiled(build, frozen(arguments), TYPES[result], "")).T)


def frozen(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments by their contents."""
    return tuple(
        (each.tobytes(), each.dtype, each.shape) if isinstance(each, np.ndarray) else each for each in arguments
    )


@lru_cache(maxsize=4)
def compiled(build: Build, told: tuple[Any, ...], result: str, kind: str) -> Any:
    """The model of a matrix, or of a product with activations of a type. It is compiled once and runs often."""
    matrix = build(
        *(np.frombuffer(each[0], each[1]).reshape(each[2]) if isinstance(each, tuple) else each for each in told)
    )
    if not kind:
        return plugin(ov.Model([ops.convert(matrix, result)], []), "f32")
    entry = ops.parameter([-1, matrix.shape[1]], getattr(ov.Type, kind))
    times = ops.matmul(ops.convert(entry, "f32"), matrix, False, True)
    return plugin(ov.Model([ops.convert(times, result)], [entry]), "bf16" if kind == "bf16" else "f32")


# **Matrices as graphs.**


def integers(codes: Array, scale: Array, rows: int, columns: int) -> Any:
    groups = scale.shape[1]
    told = constant(codes, (columns, groups, rows // groups), "i8")
    return decompressed(told, scale.astype(np.float32)[..., np.newaxis], columns, rows)


def four_bits(weight_packed: Array, weight_scale: Array, rows: int, columns: int) -> Any:
    """Stored with 8 added, so that the sign is the highest bit, turned over."""
    groups = weight_scale.shape[1]
    told = constant(weight_packed.view(np.uint8) ^ 0x88, (columns, groups, rows // groups), "i4")
    return decompressed(told, weight_scale.astype(np.float32)[..., np.newaxis], columns, rows)


def quantiles(weight: Array, absmax: F32, blocksize: int, rows: int, columns: int) -> Any:
    """Bitsandbytes stores the first of two in the high half, OpenVINO in the low half."""
    told = constant(weight << 4 | weight >> 4, (columns, rows // blocksize, blocksize), "nf4")
    return decompressed(told, absmax.reshape(columns, -1, 1), columns, rows)


def microscaled(format: str, elements: Array, scale: Array, rows: int, columns: int) -> Any:
    told = constant(elements, (columns, rows // 32, 32), MX[format])
    return decompressed(told, constant(scale, (columns, rows // 32, 1), "f8e8m0"), columns, rows)


def channels(weight: Array, weight_scale: F32, rows: int, columns: int) -> Any:
    return decompressed(constant(weight, (columns, rows), "f8e4m3"), weight_scale, columns, rows)


# **Functions.**


def integers_product(x: Array, codes: Array, scale: Array, rows: int, columns: int, result: str) -> Array:
    return product(x, result, integers, codes, scale, rows, columns)


def integers_decode(codes: Array, scale: Array, rows: int, columns: int, result: str) -> Array:
    return decode(result, integers, codes, scale, rows, columns)


def four_bits_product(
    x: Array, weight_packed: Array, weight_scale: Array, rows: int, columns: int, result: str
) -> Array:
    return product(x, result, four_bits, weight_packed, weight_scale, rows, columns)


def four_bits_decode(weight_packed: Array, weight_scale: Array, rows: int, columns: int, result: str) -> Array:
    return decode(result, four_bits, weight_packed, weight_scale, rows, columns)


def nf4_product(x: Array, weight: Array, absmax: F32, blocksize: int, rows: int, columns: int, result: str) -> Array:
    return product(x, result, quantiles, weight, absmax, blocksize, rows, columns)


def nf4_decode(weight: Array, absmax: F32, blocksize: int, rows: int, columns: int, result: str) -> Array:
    return decode(result, quantiles, weight, absmax, blocksize, rows, columns)


def mx_product(x: Array, weights: Any, elements: Array, scale: Array, rows: int, columns: int, result: str) -> Array:
    return product(x, result, microscaled, weights.format, elements, scale, rows, columns)


def mx_decode(weights: Any, elements: Array, scale: Array, rows: int, columns: int, result: str) -> Array:
    return decode(result, microscaled, weights.format, elements, scale, rows, columns)


mxfp4_product = mxfp8_product = mx_product
mxfp4_decode = mxfp8_decode = mx_decode
"""A cause of failures names functions, and FP4 and FP8 fail by different ones."""


def fp8_product(x: Array, weight: Array, weight_scale: F32, rows: int, columns: int, result: str) -> Array:
    return product(x, result, channels, weight, weight_scale, rows, columns)


def fp8_decode(weight: Array, weight_scale: F32, rows: int, columns: int, result: str) -> Array:
    return decode(result, channels, weight, weight_scale, rows, columns)


def imported(x: F32, B: Array, scales: F32, bits: int, block_size: int, rows: int, columns: int) -> Array:
    sizes = {"K": rows, "N": columns, "bits": bits, "block_size": block_size}
    return from_onnx(x, sizes, B, scales)


def imported_zeros(
    x: F32, B: Array, scales: F32, zero_points: Array, bits: int, block_size: int, rows: int, columns: int
) -> Array:
    sizes = {"K": rows, "N": columns, "bits": bits, "block_size": block_size}
    return from_onnx(x, sizes, B, scales, zero_points)


def from_onnx(x: F32, sizes: dict[str, int], *tensors: Array) -> Array:
    model = read(frozen(tensors), tuple(sizes.items()))
    return run(model, np.atleast_2d(x)).reshape(*x.shape[:-1], -1)


@lru_cache(maxsize=4)
def read(told: tuple[Any, ...], sizes: tuple[tuple[str, int], ...]) -> Any:
    """What the frontend makes of a model of one operator, compiled."""
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    named = dict(zip(("B", "scales", "zero_points"), told, strict=False))
    tensors = [
        onnx.numpy_helper.from_array(np.frombuffer(octets, dtype).reshape(shape), name)
        for name, (octets, dtype, shape) in named.items()
    ]
    node = helper.make_node("MatMulNBits", ["A", *named], ["Y"], domain="com.microsoft", **dict(sizes))
    ends = [
        helper.make_tensor_value_info(name, kind, [None, size]) for name, (_, size) in zip("AY", sizes[:2], strict=True)
    ]
    graph = helper.make_graph([node], "product", ends[:1], ends[1:], tensors)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    octets = helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()
    return plugin(ov.Core().read_model(octets), "f32")


GROUPS: dict[str, object] = {"group_size": (32, 64, 128), "rows": Range(128)}
KINDS: dict[str, tuple[str, str, dict[str, object]]] = {
    "int8-token": ("i8, a scale for each output", "integers", {}),
    "int8-token-f16": ("i8, a scale for each output", "integers", {}),
    "int8-group": ("i8, groups", "integers", GROUPS),
    "ct-pack": ("i4, groups", "four_bits", {"bits": 4} | GROUPS),
    "nf4": ("nf4", "nf4", {"blocksize": (32, 64, 128), "rows": Range(128)}),
    "mxfp4": ("f4e2m1", "mxfp4", {}),
    "mxfp8-e4m3": ("f8e4m3", "mxfp8", {}),
    "mxfp8-e5m2": ("f8e5m2", "mxfp8", {}),
    "fp8-channel": ("f8e4m3, a scale for each output", "fp8", {}),
}
"""For each format the type of its constant, the functions and the options."""
WEIGHTS: dict[str, Weights] = {"float32": "float32", "float16": "float32", "bfloat16": "bfloat16"}
"""The types of activations, and those into which weights are turned for each."""


def entries() -> Iterator[Entry]:
    """Both operations on each type, then what the frontend for ONNX reads."""
    for format, (kernel, name, options) in KINDS.items():
        limits = {"format": format, "result": RESULTS} | options
        yield Entry(f"decompression, {kernel}", f"{name}_decode", "formats.dequantize", limits, arrays="numpy")
        for operation in PRODUCTS:
            for type, weights in WEIGHTS.items():
                told = limits | {"activations": type, "result": type}
                arithmetic = Arithmetic("dequantised", weights=weights)
                yield Entry(f"MatMul, {kernel}", f"{name}_product", operation, told, arithmetic, "numpy")
    for format, name in (("matmulnbits", "imported_zeros"), ("matmulnbits-symmetric", "imported")):
        for operation in PRODUCTS:
            limits = {"format": format, "activations": "float32", "result": "float32", "bits": (2, 4, 8)}
            yield Entry("MatMulNBits", name, operation, limits, arrays="numpy")


PROJECT = Project("OpenVINO", ("openvino", "onnx"), tuple(entries()))
