"""MNN: a convolution of 1 × 1 with weights of 1, in float32, whose activations hold a NaN or an infinity."""

import MNN.expr as expr
import numpy as np

weights, bias = np.ones((4, 64, 1, 1), np.float32), np.zeros(4, np.float32)
for number in (np.nan, np.inf):
    x = np.ones((1, 64), np.float32)
    x[0, 3] = number
    given = expr.convert(expr.const(x, [1, 64, 1, 1], expr.NCHW), expr.NC4HW4)
    constants = expr.const(weights, [4, 64, 1, 1], expr.NCHW), expr.const(bias, [4], expr.NCHW)
    print(number, expr.convert(expr.conv2d(given, *constants), expr.NCHW).read().reshape(-1).tolist())
