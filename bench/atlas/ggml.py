"""ggml: every type to numbers and back, and times the 8-bit activations that its own product takes.

``vec_dot`` of the table of the CPU is the product of one row of a matrix and one vector of activations, which were cast
by ``from_float`` of the type that the table names; a model's products are many of these, or a repacked form of them.
Sums of integers are exact within a block; scales are multiplied in float32, no weight is formed.

Q4_0, Q4_1 and Q8_0 are also the backend `lowbit_adapters.ggml`, for matrices of other layouts.

Source: ``ggml.h``, ``ggml-cpu.h`` and ``ggml-quants.c``.
"""

import ctypes
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from atlas.entry import Entry, Missing, Project, library
from lowbit.arrays import F32, U8
from lowbit.contract.rounding import Arithmetic
from lowbit.tensor_formats.stored import Stored, stored

llama_cpp = library("llama_cpp")

TYPES = {
    "q4_0": 2,
    "q4_1": 3,
    "q5_0": 6,
    "q5_1": 7,
    "q8_0": 8,
    "q8_1": 9,
    "q2_k": 10,
    "q3_k": 11,
    "q4_k": 12,
    "q5_k": 13,
    "q6_k": 14,
    "q8_k": 15,
    "iq2_xxs": 16,
    "iq2_xs": 17,
    "iq3_xxs": 18,
    "iq1_s": 19,
    "iq4_nl": 20,
    "iq3_s": 21,
    "iq2_s": 22,
    "iq4_xs": 23,
    "iq1_m": 29,
    "tq1_0": 34,
    "tq2_0": 35,
    "gguf-mxfp4": 39,
    "gguf-nvfp4": 40,
    "q1_0": 41,
    "q2_0": 42,
}
"""Numbers in ggml.h, part of the file format."""
ACTIVATIONS = ("q8_0", "q8_1", "q8_k")
BY_Q8_0 = ("q4_0", "q5_0", "q8_0", "iq4_nl", "gguf-mxfp4", "gguf-nvfp4", "q1_0", "q2_0")
BY_Q8_1 = ("q4_1", "q5_1")
BY_Q8_K = tuple(name for name in TYPES if name not in (*BY_Q8_0, *BY_Q8_1, *ACTIVATIONS))
WRITTEN = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "tq1_0", "tq2_0", "gguf-mxfp4", "gguf-nvfp4")
"""Those whose reference is a rule, without a search for a scale."""

pointer, size_t = ctypes.c_void_p, ctypes.c_size_t
CONVERT = ctypes.CFUNCTYPE(None, pointer, pointer, ctypes.c_int64)
DOT = ctypes.CFUNCTYPE(None, ctypes.c_int, pointer, size_t, pointer, size_t, pointer, size_t, ctypes.c_int)


class Traits(ctypes.Structure):
    """The head of ``struct ggml_type_traits``."""

    _fields_ = (
        ("type_name", ctypes.c_char_p),
        ("blck_size", ctypes.c_int64),
        ("blck_size_interleave", ctypes.c_int64),
        ("type_size", size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", CONVERT),
        ("from_float_ref", CONVERT),
    )


class CpuTraits(ctypes.Structure):
    """``struct ggml_type_traits_cpu``."""

    _fields_ = (("from_float", CONVERT), ("vec_dot", DOT), ("vec_dot_type", ctypes.c_int), ("nrows", ctypes.c_int64))


@cache
def libraries() -> tuple[ctypes.CDLL, ctypes.CDLL]:
    """libggml-base and libggml-cpu, whose tables are initialised."""
    folder = Path(str(llama_cpp.__file__)).parent / "lib"
    base, cpu = (ctypes.CDLL(str(folder / f"libggml-{name}.so")) for name in ("base", "cpu"))
    base.ggml_get_type_traits.restype, cpu.ggml_get_type_traits_cpu.restype = pointer, pointer
    sizes = (ctypes.c_int64,) * 3
    base.ggml_quantize_chunk.argtypes = (ctypes.c_int, pointer, pointer, *sizes, pointer)
    base.ggml_quantize_chunk.restype = size_t
    cpu.ggml_cpu_init()
    for number in TYPES.values():
        base.ggml_quantize_init(number)
    return base, cpu


def traits(format: str) -> Traits:
    return Traits.from_address(libraries()[0].ggml_get_type_traits(TYPES[format]))


def cpu_traits(format: str) -> CpuTraits:
    return CpuTraits.from_address(libraries()[1].ggml_get_type_traits_cpu(TYPES[format]))


if not isinstance(llama_cpp, Missing):
    libraries()


def dequantize(weights: Any, blocks: U8, rows: int, columns: int) -> F32:
    numbers = np.empty((columns, rows), np.float32)
    traits(weights.format).to_float(blocks.ctypes.data, numbers.ctypes.data, numbers.size)
    return np.ascontiguousarray(numbers.T)


def written(x: F32, format: str) -> Stored:
    """What quantises files, without an importance matrix."""
    of = traits(format)
    blocks = np.empty((len(x), x.shape[1] // of.blck_size * of.type_size), np.uint8)
    libraries()[0].ggml_quantize_chunk(TYPES[format], x.ctypes.data, blocks.ctypes.data, 0, *x.shape, None)
    return stored(format, x.shape[1], len(x), {"blocks": blocks})


def cast(x: F32, format: str) -> Stored:
    """What casts the activations of a product."""
    of = traits(format)
    blocks = np.empty((len(x), x.shape[1] // of.blck_size * of.type_size), np.uint8)
    for row, numbers in zip(blocks, x, strict=True):
        cpu_traits(format).from_float(numbers.ctypes.data, row.ctypes.data, len(numbers))
    return stored(format, x.shape[1], len(x), {"blocks": blocks})


def product(weights: Any, x_blocks: U8, blocks: U8, rows: int) -> F32:
    found = np.empty((len(x_blocks), len(blocks)), np.float32)
    dot = cpu_traits(weights.format).vec_dot
    for row, activations in zip(found, x_blocks, strict=True):
        for n, column in enumerate(blocks):
            dot(rows, row[n:].ctypes.data, 0, column.ctypes.data, 0, activations.ctypes.data, 0, 1)
    return found


def blocks_entries(backend: str, kernel: str) -> Iterator[Entry]:
    """Both directions of a backend that holds matrices of `affine` in these types."""
    limits = {"format": "affine: minimum", "result": "float32", "bits": 4, "group_size": 32, "scale_dtype": "float16"}
    yield Entry(kernel, backend, "affine.quantize", limits, backend=backend)
    limits |= {"format": "affine: zero_point, minimum", "bits": (2, 3, 4), "group_size": "multiples of 32"}
    yield Entry(kernel, backend, "affine.dequantize", limits, backend=backend)


def entries() -> Iterator[Entry]:
    read = tuple(name for name in TYPES if name not in ACTIVATIONS[1:])
    for kernel, function, operation, limits in (
        ("to_float", "dequantize", "formats.dequantize", {"format": read, "result": "float32"}),
        ("ggml_quantize_chunk", "written", "formats.quantize", {"format": WRITTEN, "inputs": "float32"}),
        ("from_float", "cast", "formats.quantize", {"format": ACTIVATIONS, "inputs": "float32"}),
    ):
        yield Entry(kernel, function, operation, limits, arrays="numpy")
    exact = Arithmetic("factored", weights="exact")
    for activations, formats in zip(ACTIVATIONS, (BY_Q8_0, BY_Q8_1, BY_Q8_K), strict=True):
        types = {"format": formats, "activations": activations, "result": "float32"}
        yield Entry("vec_dot", "product", "linear.gemm_cast", types, exact, arrays="numpy")
    yield from blocks_entries("ggml", "backend ggml: Q4_0, Q4_1, Q8_0")


PROJECT = Project("ggml", ("llama-cpp-python",), tuple(entries()))
