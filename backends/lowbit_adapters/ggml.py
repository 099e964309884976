"""ggml: quantising and dequantising by the shared library that llama-cpp-python brings.

`blocks` says which matrices its types hold. The functions are those of ``libggml-base``: ``dequantize_row_*``, which
the type's own conversion to float calls, and ``ggml_quantize_chunk`` without an importance matrix, which quantises
files.

**What is not declared.** ggml's product of matrices rounds the activations to 8 bits first (Q8_0 or Q8_1), which none
of the forms of `rounding` describes: it is another operation, without a derived bound.

Source: ggml.h and ggml-quants.c in the project's repository.
"""

import ctypes
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

import numpy as np

from lowbit.arrays import F32, U8
from lowbit.backend import Availability
from lowbit.errors import UnavailableError
from lowbit_adapters.blocks import BLOCK, BLOCK_BYTES, BlockBackend, Kind

FILES = ("libggml-base.so", "libggml-base.dylib", "ggml-base.dll")
Q4_1 = 3  # its number in ggml.h, part of the file format
TO_FLOAT: dict[Kind, str] = {kind: f"dequantize_row_{kind.lower()}" for kind in BLOCK_BYTES}


def library_file() -> Path | None:
    """The shared library, if the package is installed and contains it."""
    spec = find_spec("llama_cpp")
    folders = spec.submodule_search_locations if spec is not None else None
    places = (Path(folder, "lib", name) for folder in folders or () for name in FILES)
    return next((place for place in places if place.is_file()), None)


@cache
def library() -> ctypes.CDLL:
    """The library, with the signatures of the functions that are called.

    Raises:
        UnavailableError: it is missing, cannot be loaded or lacks a function.
    """
    file = library_file()
    remedy = "install another version of llama-cpp-python"
    if file is None:
        raise UnavailableError("backend ggml", "libggml-base is not there", remedy)
    try:
        loaded = ctypes.CDLL(str(file))
        for name in TO_FLOAT.values():
            function = getattr(loaded, name)
            function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64), None
        sizes = (ctypes.c_int64,) * 3
        loaded.ggml_quantize_chunk.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *sizes, ctypes.c_void_p)
        loaded.ggml_quantize_chunk.restype = ctypes.c_size_t
    except (OSError, AttributeError) as error:
        raise UnavailableError("backend ggml", f"libggml-base cannot be used: {error}", remedy) from error
    return loaded


class GgmlBackend(BlockBackend):
    """Q4_0, Q4_1 and Q8_0 by libggml-base."""

    name = "ggml"
    libraries = MappingProxyType({"llama_cpp": "llama-cpp-python"})

    def availability(self) -> Availability:
        state = super().availability()
        if state.usable and library_file() is None:
            return Availability(False, "llama-cpp-python brings no libggml-base", "install a newer one")
        return state

    def _to_floats(self, blocks: U8, kind: Kind) -> F32:
        weights = np.empty((blocks.shape[0], blocks.shape[1] * BLOCK), np.float32)
        getattr(library(), TO_FLOAT[kind])(blocks.ctypes.data, weights.ctypes.data, weights.size)
        return weights

    def _to_blocks(self, weights: F32) -> U8:
        rows, length = weights.shape
        blocks = np.empty((rows, length // BLOCK, BLOCK_BYTES["Q4_1"]), np.uint8)
        library().ggml_quantize_chunk(Q4_1, weights.ctypes.data, blocks.ctypes.data, 0, rows, length, None)
        return blocks
