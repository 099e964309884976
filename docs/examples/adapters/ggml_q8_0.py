"""ggml's product of a row of Q4_0 and one of Q8_0: activations of -128, which its own cast never makes."""

import ctypes
from pathlib import Path

import llama_cpp
import numpy as np

folder = Path(llama_cpp.__file__).parent / "lib"
ctypes.CDLL(str(folder / "libggml-base.so"))
cpu = ctypes.CDLL(str(folder / "libggml-cpu.so"))
cpu.ggml_cpu_init()
one = np.float16(1).tobytes()
weights = one + bytes([0x77] * 16)  # 32 codes 7: each weight is 7 - 8 = -1
for code in (-127, -128):
    activations, result = one + bytes([code & 255] * 32), ctypes.c_float()
    cpu.ggml_vec_dot_q4_0_q8_0(32, ctypes.byref(result), 0, weights, 0, activations, 0, 1)
    print(f"32 times -1 times {code} is {result.value}, expected {-32 * code}")
