"""tinygrad: blocks of GGUF files to numbers, on its CPU device, whose kernels LLVM compiles in this process.

LLVM is a library of the system (15 or later), and no package of Python.

Source: ``tinygrad/llm/gguf.py`` (ggml_data_to_tensor).
"""

import os
from typing import Any

import numpy as np

from atlas.entry import Entry, Project, library
from lowbit.arrays import U8

os.environ |= {"DEV": "CPU:LLVM", "PARALLEL": "0"}
tinygrad = library("tinygrad")
gguf = library("tinygrad.llm.gguf")

TYPES = {
    "q4_0": 2,
    "q4_1": 3,
    "q5_0": 6,
    "q5_1": 7,
    "q8_0": 8,
    "q4_k": 12,
    "q5_k": 13,
    "q6_k": 14,
    "iq3_xxs": 18,
    "iq3_s": 21,
    "iq2_s": 22,
    "iq4_xs": 23,
    "gguf-mxfp4": 39,
    "q1_0": 41,
}
"""Those that its docstring names, by their numbers in GGUF files."""


def dequantize(weights: Any, blocks: U8, rows: int, columns: int) -> Any:
    octets = tinygrad.Tensor(blocks.reshape(-1).copy(), device="CPU")
    numbers = gguf.ggml_data_to_tensor(octets, rows * columns, TYPES[weights.format]).reshape(columns, rows)
    return np.ascontiguousarray(numbers.cast("float32").numpy().T)


LIMITS = {"format": tuple(TYPES), "result": "float32"}

PROJECT = Project(
    "tinygrad",
    ("tinygrad",),
    (Entry("ggml_data_to_tensor", "dequantize", "formats.dequantize", LIMITS, arrays="numpy"),),
)
