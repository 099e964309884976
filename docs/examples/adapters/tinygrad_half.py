"""tinygrad on a CPU: float16 numbers below 2^-14, as float32."""

import os

os.environ |= {"DEV": "CPU:LLVM"}

import numpy as np
from tinygrad import Tensor

halves = np.array([2.0**-24, 2.0**-15, 2.0**-14], np.float16)
print(Tensor(halves).cast("float32").numpy(), "expected", halves.astype(np.float32))
