"""The ``gguf`` package: quantising and dequantising in numpy, as the converters of llama.cpp do it.

`blocks` says which matrices its types hold.

Source: gguf/quants.py in the project's repository.
"""

from types import MappingProxyType

import numpy as np

from lowbit.arrays import F32, U8
from lowbit_adapters.blocks import BLOCK_BYTES, BlockBackend, Kind


class GgufBackend(BlockBackend):
    """Q4_0, Q4_1 and Q8_0 by gguf.quants."""

    name = "gguf"
    libraries = MappingProxyType({"gguf": "gguf"})

    def _to_floats(self, blocks: U8, kind: Kind) -> F32:
        from gguf import quants
        from gguf.constants import GGMLQuantizationType

        rows = blocks.reshape(len(blocks), -1)
        return np.asarray(quants.dequantize(rows, GGMLQuantizationType[kind]), np.float32)

    def _to_blocks(self, weights: F32) -> U8:
        from gguf import quants
        from gguf.constants import GGMLQuantizationType

        blocks = np.asarray(quants.quantize(weights, GGMLQuantizationType.Q4_1), np.uint8)
        return np.ascontiguousarray(blocks.reshape(len(weights), -1, BLOCK_BYTES["Q4_1"]))
