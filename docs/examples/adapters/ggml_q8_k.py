"""ggml's cast to Q8_K: a block of zeros, written into memory that holds 77 everywhere."""

import ctypes
from pathlib import Path

import llama_cpp
import numpy as np

folder = Path(llama_cpp.__file__).parent / "lib"
ctypes.CDLL(str(folder / "libggml-base.so"))
cpu = ctypes.CDLL(str(folder / "libggml-cpu.so"))
cpu.ggml_cpu_init()
zeros, block = np.zeros(256, np.float32), np.full(292, 77, np.uint8)
cpu.quantize_row_q8_K(ctypes.c_void_p(zeros.ctypes.data), ctypes.c_void_p(block.ctypes.data), ctypes.c_int64(256))
print(
    "scale", block[:4].view(np.float32), "codes", set(block[4:260].tolist()), "bytes of sums", set(block[260:].tolist())
)
