import numpy as np

import lowbit

W = lowbit.quantize(np.random.default_rng(0).random((64, 64), "f"), bits=4, group_size=64)
y = lowbit.matmul(np.ones(64, "f"), W, backend="numpy")
print(lowbit.certify("numpy", ["linear.qgemv"], quick=True).verdict)
