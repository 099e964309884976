"""Methods: from float32 weights to codes.

==== ===============================================================================================================
name what it does
==== ===============================================================================================================
rtn  round each weight to the nearest, on the grid of the range of its group (`lowbit.quantization.affine`)
gptq round rows one after another, where later rows make up for the errors of earlier ones, on inputs that the model
     sees (`lowbit.quantization.gptq`)
hqq  move the zero of each group until its weights lie closer to the grid (`lowbit.quantization.hqq_solver`)
==== ===============================================================================================================

Scales are float16. Zeros are codes, whole numbers from 0 to 2^bits − 1, except that HQQ's are float16 numbers where the
layout stores such. Where it does not, HQQ's zeros are rounded to codes, and the codes of the weights are found anew.
For a file of GGUF, rtn and gptq give each group a minimum in float16 in place of a zero, as Q4_1 holds it.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from lowbit.arrays import F32, F64, Array
from lowbit.contract.checks import check_finite
from lowbit.errors import ArgumentError
from lowbit.quantization import gptq_blocks, hqq, hqq_solver
from lowbit.quantization.affine import group_codes
from lowbit.quantization.coded import CodedMatrix, Grid, runs
from lowbit.quantization.gptq import DAMPING
from lowbit.quantization.hqq_numbers import decode
from lowbit.quantization.hqq_published import Recipe
from lowbit.quantization.packing import unpack

Method = Literal["rtn", "gptq", "hqq"]
METHODS: tuple[Method, ...] = get_args(Method)


@dataclass(frozen=True)
class Rounding:
    """How weights become codes.

    Attributes:
        method: one of `METHODS`.
        group_size: rows of a group.
        symmetric: whether every zero is the middle of the codes.
        act_order: whether GPTQ takes the most important inputs first.
        damping: of GPTQ's Hessian.
        block_size: GPTQ's block in whole groups, whose ranges ignore the errors in the block; None for one group.
        recipe: of HQQ, one of `RECIPES`; those other than ``ruled`` need real zeros.
        real_zeros: whether zeros may be any float16 number.
        has_minima: whether groups have minima instead of zeros (rtn and gptq).
    """

    method: Method
    group_size: int
    symmetric: bool = False
    act_order: bool = False
    damping: float = DAMPING
    block_size: int | None = None
    recipe: Recipe = "ruled"
    real_zeros: bool = False
    has_minima: bool = False

    @property
    def grid(self) -> Grid:
        """The grid of every group."""
        return Grid(self.group_size, self.symmetric, "minimum" if self.has_minima else "zero_point")

    def of_inputs(self, hessian: F64) -> gptq_blocks.Inputs:
        """What GPTQ needs to know about the inputs of a matrix.

        Raises:
            ArgumentError: a Hessian that, damped, is not positive definite or not finite.
        """
        try:
            return gptq_blocks.Inputs.of(hessian, act_order=self.act_order, damping=self.damping)
        except ArgumentError as error:
            if error.argument != "damping":
                raise
            raise ArgumentError("--damping", error.given, error.allowed) from error

    def __call__(self, weights: F32, bits: int, inputs: gptq_blocks.Inputs | None = None) -> CodedMatrix:
        """Quantise a matrix.

        Args:
            weights: float32, K × N, finite.
            bits: 2, 3, 4 or 8.
            inputs: for ``gptq``; if None, as for an expert that no calibration token chose, the matrix is rounded to
                nearest.

        Raises:
            ArgumentError: weights that the method cannot quantise, such as a range beyond float16.
        """
        if self.method == "hqq" and self.recipe != "ruled":
            return by_published_hqq(weights, bits, self.group_size, self.recipe)
        if self.method == "hqq":
            return by_hqq(weights, bits, self.group_size, real_zeros=self.real_zeros)
        if self.method == "gptq" and inputs is not None:
            return gptq_blocks.rounded(weights, inputs, bits, self.grid, self.block_size)
        return to_nearest(weights, bits, self.grid)


def to_nearest(weights: F32, bits: int, grid: Grid) -> CodedMatrix:
    """Round each weight to the nearest.

    >>> weights = np.array([[-1], [0], [0.75], [2]], np.float32)
    >>> to_nearest(weights, 2, Grid(4)).codes[:, 0]
    array([0, 1, 2, 3], dtype=uint8)
    """
    codes, scales, zeros = np.empty(weights.shape, np.uint8), [], []
    for begin in range(0, len(weights), grid.group_size):
        group = weights[begin : begin + grid.group_size]
        scale, zero = grid.of(group, bits)
        codes[begin : begin + grid.group_size] = group_codes(group, scale, zero, bits, grid.convention)
        scales.append(scale)
        zeros.append(zero)
    order = runs(len(weights), grid.group_size)
    return CodedMatrix(codes, np.stack(scales), np.stack(zeros).astype(np.float64), order, *grid.numbers(bits))


def by_hqq(weights: F32, bits: int, group_size: int, *, real_zeros: bool) -> CodedMatrix:
    """Codes with the zeros that HQQ's solver finds, along axis 1.

    The solver takes groups in any order: here in their order in the matrix, so nothing is transposed.
    """
    rows, columns = weights.shape
    check_finite("weights", weights)
    hqq.check_blocks(rows, columns, group_size, 1)
    blocks = _exchanged(weights.reshape(-1, group_size, columns)).reshape(group_size, -1)
    codes, *found = hqq.ruled(blocks, bits, np.dtype(np.float16))
    scales, zeros = (np.asarray(each).reshape(-1, columns) for each in found)
    if not np.isfinite(zeros).all():
        raise ArgumentError("zero of a group of weights", "beyond float16", "what float16 can hold")
    wide = zeros.astype(np.float32)
    if not real_zeros:
        wide = np.clip(np.rint(wide), 0, 2**bits - 1)
        codes = hqq_solver.codes(blocks, scales.astype(np.float32).reshape(-1), wide.reshape(-1), bits)
    back = _exchanged(codes.reshape(group_size, -1, columns)).reshape(rows, columns)
    return CodedMatrix(back, scales, wide.astype(np.float64), runs(rows, group_size), bits, group_size)


def by_published_hqq(weights: F32, bits: int, group_size: int, recipe: Recipe) -> CodedMatrix:
    """Codes, scales and zeros of a version of HQQ's package (`lowbit.quantization.hqq_published`), along axis 1."""
    found = hqq.quantize(weights, bits=bits, group_size=group_size, scale_dtype="float16", recipe=recipe)
    rows, columns = weights.shape
    scales, zeros = (np.ascontiguousarray(decode(each).reshape(columns, -1).T) for each in (found.scales, found.zeros))
    numbers = scales.astype(np.float16), zeros.astype(np.float64), runs(rows, group_size)
    return CodedMatrix(unpack(found.words, bits), *numbers, bits, group_size)


def _exchanged(numbers: Array) -> Array:
    """An array of three dimensions with the first two exchanged, in order of its memory."""
    return np.ascontiguousarray(numbers.swapaxes(0, 1))
