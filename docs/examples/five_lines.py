import numpy as np

import lowbit

W = lowbit.quantize(np.random.default_rng(0).normal(size=(256, 64)).astype(np.float32), bits=4, group_size=64)
y = lowbit.matmul(np.ones(256, np.float32), W, backend="numpy")
print(lowbit.certify("numpy", ["linear.qgemv"], quick=True).verdict)
