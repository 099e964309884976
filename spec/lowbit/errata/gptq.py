"""Rulings on GPTQ, from which QIGen takes its weights.

Its authors' code differs from its paper in one place and decides another of which the paper is silent.

Source: QIGen §3 (Data format); GPTQ (arXiv 2210.17323) §3; the authors' code, ``gptq.py``.
"""

import numpy as np

from lowbit.errata import ruling
from lowbit.quantization.gptq import hessian, layer_error, quantize

RNG = np.random.Generator(np.random.PCG64(0))
WEIGHTS = RNG.normal(size=(64, 16)).astype(np.float32)
INPUTS = (RNG.normal(size=(200, 64)) + 3 * RNG.normal(size=(200, 2)) @ RNG.normal(size=(2, 64))).astype(np.float32)


@ruling(
    "P1",
    printed="a group's range comes from the weights as they are updated; the authors' code takes it from weights that "
    "lack the errors of their block of 128",
    ruled="updated weights: a block is a group. The argument block_size = 128 does what the code does",
)
def ranges_see_all_errors() -> None:
    """The first group of a block has the same range either way, the others have not; one group a block has it too."""
    square = hessian(INPUTS)
    ruled = quantize(WEIGHTS, square, bits=4, group_size=16)
    code = quantize(WEIGHTS, square, bits=4, group_size=16, block_size=128)
    assert (ruled.matrix.scales[0] == code.matrix.scales[0]).all()
    assert (ruled.matrix.scales[1:] != code.matrix.scales[1:]).any(axis=1).all()
    assert (ruled.dequantize() != code.dequantize()).mean() > 0.1
    whole = [quantize(WEIGHTS, square, bits=4, group_size=64, block_size=size) for size in (None, 128)]
    assert (whole[0].dequantize() == whole[1].dequantize()).all()


@ruling(
    "P2",
    printed="the weights of an input that is always 0: not stated; the authors' code sets them to 0",
    ruled="0, and they have no say in the range of their group",
)
def dead_inputs_are_zeroed() -> None:
    """A large weight of a dead input, kept, makes the layer's error a hundred times as large."""
    x, weights = INPUTS.copy(), WEIGHTS.copy()
    x[:, 5], weights[5] = 0, 1000
    square = hessian(x)
    ruled = quantize(weights, square, bits=4, group_size=64)
    assert (ruled.dequantize()[5] == 0).all()
    nearly = square.copy()
    nearly[5, 5] = 1e-9  # not dead, so that its weight is kept
    kept = quantize(weights, nearly, bits=4, group_size=64)
    assert layer_error(weights, kept.dequantize(), square) > 100 * layer_error(weights, ruled.dequantize(), square)
