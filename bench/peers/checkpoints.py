"""GPTQ's and AWQ's matrices as their files hold them, 4 bits in groups of 128 rows with float16 scales."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from lowbit.arrays import U8, Array
from lowbit.quantization.affine import QuantizedMatrix
from lowbit.tensor_formats.stored import Stored, stored
from lowbit_adapters.layout import code_rows, pack_bits
from peers.base import Weights

BITS = 4
FROM_LOWEST = np.array([0, 2, 4, 6, 1, 3, 5, 7])
"""The columns of a word of AWQ, the one in the lowest nibble first."""


def words(codes: U8) -> Array:
    """int32: eight codes of the last axis in each word, the first in the lowest bits."""
    return pack_bits(codes, BITS).view("<i4")


def gptq(codes: U8, zeros: U8, scales: Array, group_size: int) -> Stored:
    """Version 2, rows in order.

    Args:
        codes: N × K.
        zeros: G × N.
        scales: float16, G × N.
        group_size: rows of a group.
    """
    arrays = {
        "qweight": np.ascontiguousarray(words(codes).T),
        "qzeros": words(zeros),
        "scales": scales,
        "g_idx": np.arange(codes.shape[1], dtype=np.int32) // np.int32(group_size),
    }
    return stored("gptq-v2", codes.shape[1], len(codes), arrays, bits=BITS, group_size=group_size)


def awq(codes: U8, zeros: U8, scales: Array, group_size: int) -> Stored:
    """The layout *gemm*; arguments are those of `gptq`."""

    def packed(array: Array) -> Array:
        return words(array.reshape(len(array), -1, 8)[..., FROM_LOWEST].reshape(array.shape))

    arrays = {"qweight": packed(np.ascontiguousarray(codes.T)), "qzeros": packed(zeros), "scales": scales}
    return stored("awq-gemm", codes.shape[1], len(codes), arrays, group_size=group_size)


MAKERS: Mapping[str, Callable[[U8, U8, Array, int], Stored]] = MappingProxyType({"gptq": gptq, "awq": awq})
"""By the names of contests."""


def matrices(kind: str, weights: Weights) -> tuple[Stored, Stored]:
    """The tile of some weights, and all of them."""
    tile: QuantizedMatrix = weights.quantized(BITS, scale_dtype="float16")
    codes, make = code_rows(tile.words, BITS), MAKERS[kind]
    small = make(codes, tile.zeros, tile.scales, tile.group_size)
    zeros, scales = (weights.spread(array, 1) for array in (tile.zeros, tile.scales))
    return small, make(weights.spread(codes, 0), zeros, scales, tile.group_size)
