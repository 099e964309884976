"""tinygrad: blocks of GGUF files to numbers, on its CPU device, whose kernels LLVM compiles in this process.

LLVM is a library of the system (15 or later), and no package of Python.

Source: ``tinygrad/llm/gguf.py`` (ggml_data_to_tensor).
"""

import os
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType

from atlas.entry import Entry, Project, library
from lowbit.arrays import U8

os.environ |= {"DEV": "CPU:LLVM", "PARALLEL": "0"}
tinygrad = library("tinygrad")
gguf = library("tinygrad.llm.gguf")

EARLY = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k")
LATE = ("iq3_xxs", "iq3_s", "iq2_s", "iq4_xs", "gguf-mxfp4", "q1_0")
"""The types that its docstring names: ggml's early ones, and later ones."""


def number_of(format: str) -> int:
    """The number of a type in GGUF files."""
    return GGMLQuantizationType[format.removeprefix("gguf-").upper()].value


def dequantize(weights: Any, blocks: U8, rows: int, columns: int) -> Any:
    octets = tinygrad.Tensor(blocks.reshape(-1).copy(), device="CPU")
    numbers = gguf.ggml_data_to_tensor(octets, rows * columns, number_of(weights.format)).reshape(columns, rows)
    return np.ascontiguousarray(numbers.cast("float32").numpy().T)


LIMITS = {"format": (*EARLY, *LATE), "result": "float32"}

PROJECT = Project(
    "tinygrad",
    ("tinygrad",),
    (Entry("ggml_data_to_tensor", "dequantize", "formats.dequantize", LIMITS, arrays="numpy"),),
)
