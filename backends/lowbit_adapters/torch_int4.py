r"""PyTorch: the product with 4-bit weights of its CPU build, in float32.

``_convert_weight_to_int4pack_for_cpu`` lays out codes, N × K with N a multiple of 16, and
``_weight_int4pack_mm_for_cpu`` multiplies by them: groups of 32, 64, 128 or 256 rows, which must divide K, each with a
scale s and a zero z. The adapter pads N with outputs that it drops, and K with rows that it multiplies by 0.

**What it computes.** Each weight is :math:`s\,(q - 8) + z` in float32, so z is the value of code 8,
:math:`\min + 8 s` or :math:`s\,(8 - \mathrm{zero})`, rounded to float32 once. That is the form ``offset``: of the
roundings of a dot product in any order, and those of z, of the product and of the sum.

**What is not declared.** The same product in bfloat16 and float16 rounds x, scales and result to those formats, for
which `rounding` has no accumulator. ``_dyn_quant_matmul_4bit`` rounds the activations to 8 bits first, which no form
describes. ``_weight_int8pack_mm`` knows one scale a column and no zero.

Source: PyTorch's kernel int4mm_kernel.cpp in the project's repository.
"""

import ctypes
from typing import Any

import numpy as np

from lowbit.arrays import F32
from lowbit.backend import Availability, Backend, Capabilities, Declaration, PreparedLinear
from lowbit.contract.rounding import Arithmetic, any_order
from lowbit.quantization.affine import QuantizedMatrix
from lowbit_adapters.layout import code_rows, group_rows, offsets_of_code, padded
from lowbit_adapters.libraries import availability, versions

LIBRARIES = {"torch": "torch"}
BITS, CENTER, OUTPUTS = 4, 8, 16
GROUPS = (32, 64, 128, 256)


def roundings(rows: int, group_size: int) -> int:
    """Roundings of a dot product in any order, of z or of scale · code, and of their sum."""
    return any_order(rows, group_size) + 2


def codes_of(matrix: QuantizedMatrix) -> np.ndarray[Any, np.dtype[np.int32]]:
    """int32, N × K, both padded to the multiples that the kernel needs."""
    codes = padded(code_rows(matrix.words, BITS), matrix.group_size, CENTER)
    return np.pad(codes, ((0, -len(codes) % OUTPUTS), (0, 0)), constant_values=CENTER).astype(np.int32)


def scales_and_zeros(matrix: QuantizedMatrix) -> F32:
    """float32, G × N × 2, with N padded with zeros."""
    scales = group_rows(matrix.scales.astype(np.float32))
    both = np.stack([scales.T, offsets_of_code(matrix, CENTER).T], axis=-1)
    return np.pad(both, ((0, 0), (0, -matrix.columns % OUTPUTS), (0, 0)))


def tensor_over(array: F32) -> Any:
    """A tensor that shares the memory of an array, even a read-only one: the product only reads it."""
    import torch

    memory = (ctypes.c_char * array.nbytes).from_address(array.ctypes.data)
    return torch.frombuffer(memory, dtype=torch.float32).reshape(array.shape)


class TorchLinear(PreparedLinear):
    """Packed codes, and scales and zeros side by side."""

    def __init__(self, matrix: QuantizedMatrix) -> None:
        import torch

        self._group_size, self._multiply = matrix.group_size, torch.ops.aten._weight_int4pack_mm_for_cpu
        codes = torch.from_numpy(codes_of(matrix))
        self._codes = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        self._scales = torch.from_numpy(scales_and_zeros(matrix))
        super().__init__("torch", matrix.rows, matrix.columns, self._codes.nbytes + self._scales.nbytes)

    def _qgemv(self, x: F32, out: F32) -> None:
        self._qgemm(x[None], out[None])

    def _qgemm(self, x: F32, out: F32) -> None:
        whole = padded(x, self._group_size, 0)
        result = self._multiply(tensor_over(whole), self._codes, self._group_size, self._scales)
        np.copyto(out, result.numpy()[:, : self.columns])


class TorchBackend(Backend):
    """The int4 product."""

    name = "torch"

    def availability(self) -> Availability:
        return availability(LIBRARIES)

    def capabilities(self) -> Capabilities:
        declared = Declaration({"bits": (BITS,), "group_size": GROUPS}, Arithmetic("offset", "float32", roundings))
        details = {"operator": "_weight_int4pack_mm_for_cpu, float32"} | versions(LIBRARIES)
        return Capabilities(dict.fromkeys(("linear.qgemv", "linear.qgemm"), declared), concurrent=True, details=details)

    def _prepare(self, matrix: QuantizedMatrix) -> PreparedLinear:
        return TorchLinear(matrix)
