"""The numpy backend: what a Python user would write first.

Packing works on whole columns of bits at a time, quantising on whole blocks of groups, and a matrix is dequantised
once, when it is prepared; every product is then one call of BLAS on float32 weights. It reads 32 bits for each
weight, whatever their width, and is the baseline that a low-bit kernel must beat. Matrices in the bytes of other
formats are decoded by the tables of the specification, in float64.
"""

from importlib.metadata import version

import numpy as np

from lowbit.arrays import F32
from lowbit.backend import Backend, Capabilities, Declaration, PreparedLinear
from lowbit.contract.rounding import Arithmetic, any_order
from lowbit.linear.integer_bounds import integer_loop
from lowbit.quantization.affine import QuantizedMatrix
from lowbit.quantization.bfp import Blocks
from lowbit_numpy.activations import ActivationOperations
from lowbit_numpy.caches import CacheOperations
from lowbit_numpy.codes import pack_bits, unpack_bits
from lowbit_numpy.engines import OffloadOperations
from lowbit_numpy.groups import dequantize_groups, quantize_groups
from lowbit_numpy.heads import PoolingOperations
from lowbit_numpy.hessians import GptqOperations
from lowbit_numpy.integers import IntegerMatrix
from lowbit_numpy.numbers import NumberOperations
from lowbit_numpy.orders import LayoutOperations
from lowbit_numpy.real_zeros import HqqOperations
from lowbit_numpy.routing import RoutingOperations
from lowbit_numpy.stored import StoredOperations

__all__ = ["NumpyBackend"]


class NumpyLinear(PreparedLinear):
    """Float32 weights, dequantised once; each call is one BLAS matrix product. Integer products use the codes."""

    def __init__(self, matrix: QuantizedMatrix) -> None:
        self._weights, self._integers = dequantize_groups(matrix), IntegerMatrix(matrix)
        super().__init__("numpy", matrix.rows, matrix.columns, self._weights.nbytes)

    def _qgemv(self, x: F32, out: F32) -> None:
        with np.errstate(invalid="ignore", over="ignore"):
            np.matmul(x, self._weights, out=out)

    _qgemm = _qgemv

    def _qgemm_bfp(self, x: Blocks, out: F32) -> None:
        with np.errstate(over="ignore"):
            out[...] = self._integers.multiplied(x)


class NumpyBackend(
    ActivationOperations,
    CacheOperations,
    GptqOperations,
    HqqOperations,
    LayoutOperations,
    NumberOperations,
    OffloadOperations,
    PoolingOperations,
    RoutingOperations,
    StoredOperations,
    Backend,
):
    """Vectorised numpy and BLAS: dequantise, then multiply."""

    name = "numpy"

    def capabilities(self) -> Capabilities:
        exact = Declaration()
        # BLAS sums in an unknown order and with fused operations, so the declaration allows any order.
        bounded = Declaration(arithmetic=Arithmetic("dequantised", "float32", any_order))
        operations = dict.fromkeys(("packing.pack", "packing.unpack", "affine.quantize", "affine.dequantize"), exact)
        operations |= dict.fromkeys(("linear.qgemv", "linear.qgemm"), bounded)
        operations["linear.qgemm_bfp"] = Declaration(arithmetic=Arithmetic("integer", "float64", integer_loop(1)))
        operations |= GptqOperations.declared | HqqOperations.declared | PoolingOperations.declared
        operations |= LayoutOperations.declared | RoutingOperations.declared | CacheOperations.declared
        operations |= OffloadOperations.declared | ActivationOperations.declared
        operations |= NumberOperations.declared | StoredOperations.declared
        return Capabilities(
            operations,
            concurrent=True,
            details={"numpy": version("numpy")},
            profiles=("lowbit-1.1/packing", "lowbit-1.1/qgemv-4", "lowbit-1.1/kv-cache", "lowbit-1.1/moe-offload"),
        )

    _packing_pack = staticmethod(pack_bits)
    _packing_unpack = staticmethod(unpack_bits)
    _affine_quantize = staticmethod(quantize_groups)
    _affine_dequantize = staticmethod(dequantize_groups)

    def _prepare(self, matrix: QuantizedMatrix) -> PreparedLinear:
        return NumpyLinear(matrix)
