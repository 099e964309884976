r"""GPTQ a block of rows at a time: what `lowbit.quantization.gptq` computes, as matrix products.

The chapter adds the error of a row to all later rows at once, and factors the Hessian column by column; both read a
large matrix for every row. Here the factor comes from LAPACK, and an error first goes to the later rows of its own
group only. When the group is done, one product adds the errors of all its rows to the rows after it. Everything stays
float64, so targets differ from the chapter's only by the order of sums. A code differs where this moves a target across
a tie in float32, which the tests look for and do not find.

Source: GPTQ (arXiv 2210.17323) §3.3, step 2 and 3.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from lowbit.arrays import F32, F64
from lowbit.contract.checks import check_integer
from lowbit.errors import ArgumentError
from lowbit.quantization.affine import group_codes, group_values
from lowbit.quantization.coded import CodedMatrix, Grid, runs
from lowbit.quantization.gptq import damped, of_live, unrounded


@dataclass(frozen=True, eq=False)
class Inputs:
    """What GPTQ needs to know about the inputs of a matrix; matrices with the same inputs share it.

    Attributes:
        order: int64, K: the rows in the order in which they are rounded.
        live: K, in that order: whether an input is ever nonzero.
        factor: float64, K × K: the upper triangular factor of the damped Hessian in that order.
    """

    order: npt.NDArray[np.int64]
    live: npt.NDArray[np.bool_]
    factor: F64

    @classmethod
    def of(cls, hessian: F64, *, act_order: bool, damping: float) -> Self:
        """Factor a Hessian.

        Args:
            hessian: float64, K × K, symmetric.
            act_order: take rows by decreasing diagonal, ties in row order.
            damping: the fraction of the mean of the diagonal that is added to the diagonal.

        Raises:
            ArgumentError: it is not positive definite.
        """
        diagonal = hessian.diagonal()
        order = np.argsort(-diagonal, kind="stable") if act_order else np.arange(len(hessian))
        backwards = order[::-1]
        try:
            lower = np.linalg.cholesky(damped(hessian, damping)[np.ix_(backwards, backwards)])
        except np.linalg.LinAlgError as error:
            raise ArgumentError("hessian of the calibration", "singular", "one that is positive definite") from error
        return cls(order, diagonal[order] != 0, np.ascontiguousarray(lower[::-1, ::-1]))


def check_block_size(argument: str, block_size: int, group_size: int) -> None:
    """Refuse a block that does not consist of whole groups.

    Raises:
        ArgumentError: names the argument.
    """
    check_integer(argument, block_size, least=1)
    if block_size % group_size:
        raise ArgumentError(argument, block_size, f"a multiple of the group size, {group_size}")


def rounded(weights: F32, inputs: Inputs, bits: int, grid: Grid, block_size: int | None = None) -> CodedMatrix:
    """Round the rows of a matrix one after another, each to its target.

    Args:
        weights: float32, K × N, finite.
        inputs: of this matrix.
        bits: 2, 3, 4 or 8.
        grid: of every group; groups are runs of rows in the order of `inputs`.
        block_size: rows of a block, whole groups, as `gptq.quantize`; None for one group.

    Raises:
        ArgumentError: a range that float16 cannot hold; a block that is not of whole groups.
    """
    triangle, live = inputs.factor, inputs.live
    each = grid.group_size if block_size is None else block_size
    check_block_size("block_size", each, grid.group_size)
    rows = np.where(live[:, np.newaxis], weights[inputs.order], 0).astype(np.float64)
    ratios = triangle / triangle.diagonal()
    goals, codes, scales, zeros = rows.copy(), np.empty(rows.shape, np.uint8), [], []
    for begin in range(0, len(rows), grid.group_size):
        group = slice(begin, min(begin + grid.group_size, len(rows)))
        if begin % each == 0:
            first, at_first = begin, goals.copy() if each > grid.group_size else goals
        free = unrounded(at_first, rows, triangle, slice(first, group.stop))[begin - first :]
        scale, zero = grid.of(of_live(free, live[group]), bits)
        scales.append(scale)
        zeros.append(zero)
        block, near = goals[group], ratios[group, group]
        errors = np.empty_like(block)
        for k, row in enumerate(rows[group]):
            codes[begin + k] = group_codes(block[k].astype(np.float32), scale, zero, bits, grid.convention)
            errors[k] = row - group_values(codes[begin + k], scale, zero, grid.convention)
            block[k + 1 :] += near[k, k + 1 :, np.newaxis] * errors[k]
        goals[group.stop :] += ratios[group, group.stop :].T @ errors
    order, g_idx = inputs.order, np.empty(len(rows), np.int32)
    back = np.empty_like(codes)
    back[order], g_idx[order] = codes, runs(len(rows), grid.group_size)  # rows in their original order
    return CodedMatrix(back, np.stack(scales), np.stack(zeros).astype(np.float64), g_idx, *grid.numbers(bits))
