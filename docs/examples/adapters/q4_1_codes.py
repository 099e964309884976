"""Q4_1 of the gguf package: how often another code would lie nearer to the weight than the one that is stored.

If llama-cpp-python is installed, also whether ggml stores the same bytes.
"""

import ctypes
from importlib.util import find_spec

import numpy as np
from gguf import GGMLQuantizationType, quants

weights = np.random.default_rng(0).normal(size=(10_000, 32)).astype(np.float32)
blocks = quants.quantize(weights, GGMLQuantizationType.Q4_1)  # 2 bytes scale, 2 bytes minimum, 16 bytes codes
scale, minimum = (blocks[:, start : start + 2].copy().view("<f2").astype(np.float64) for start in (0, 2))
codes = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1).astype(np.float64)
nearest = np.clip(np.rint((weights - minimum) / scale), 0, 15)
errors = [np.abs(scale * chosen + minimum - weights) for chosen in (codes, nearest)]
print(f"{np.mean(codes != nearest):.3%} of the codes are not the nearest to the weight")
print(f"they add {np.sum(errors[0] ** 2) / np.sum(errors[1] ** 2) - 1:.4%} to the squared error")

if package := find_spec("llama_cpp"):
    ggml, own = ctypes.CDLL(f"{package.submodule_search_locations[0]}/lib/libggml-base.so"), np.empty_like(blocks)
    sizes = (ctypes.c_int64(0), ctypes.c_int64(10_000), ctypes.c_int64(32))
    ggml.ggml_quantize_chunk(3, ctypes.c_void_p(weights.ctypes.data), ctypes.c_void_p(own.ctypes.data), *sizes, None)
    print("ggml stores", "the same bytes" if np.array_equal(own, blocks) else "other bytes")
