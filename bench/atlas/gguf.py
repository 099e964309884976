"""gguf: every type to numbers and back in numpy, by the functions of its ``quants``.

Q4_0, Q4_1 and Q8_0 are also the backend `lowbit_adapters.gguf_package`, for matrices of other layouts.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from atlas.entry import Entry, Project, library
from atlas.ggml import TYPES, WRITTEN, blocks_entries
from lowbit.arrays import F32, U8
from lowbit.tensor_formats.stored import Stored, stored

gguf = library("gguf")
UNREAD = ("q8_1", "q8_k", "q1_0", "q2_0")
UNWRITTEN = ("gguf-nvfp4",)


def dequantize(weights: Any, blocks: U8) -> F32:
    numbers = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType(TYPES[weights.format]))
    return np.ascontiguousarray(numbers.T)


def written(x: F32, format: str) -> Stored:
    blocks = gguf.quants.quantize(x, gguf.GGMLQuantizationType(TYPES[format]))
    return stored(format, x.shape[1], len(x), {"blocks": blocks})


def entries() -> Iterator[Entry]:
    for format in TYPES:
        if format not in UNREAD:
            limits = {"format": format, "result": "float32"}
            yield Entry("quants.dequantize", "dequantize", "formats.dequantize", limits, arrays="numpy")
        if format in WRITTEN and format not in UNWRITTEN:
            limits = {"format": format, "inputs": "float32"}
            yield Entry("quants.quantize", "written", "formats.quantize", limits, arrays="numpy")
    yield from blocks_entries("gguf", "backend gguf: Q4_0, Q4_1, Q8_0")


PROJECT = Project("gguf", ("gguf",), tuple(entries()))
