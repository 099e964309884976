"""Matrices in act-order: quantised weights whose rows stand in another order than the activations.

A quantiser may take the rows of a matrix in its own order; GPTQ's *act-order* takes the most important inputs first.
Its groups are then runs of rows in that order, and not in the order of the matrix. Two representations are in use.
Files keep the rows where they were, with the group of each row beside them (``g_idx``). Here the rows are stored in the
order in which they were taken, together with that order: row i of the stored matrix is row ``order[i]`` of W, and

    ``y = x W`` is ``linear.qgemv(x[order], matrix)``.

The reason for this choice: what is stored is an ordinary `QuantizedMatrix`, which every kernel, bound and format
already handles, and no kernel has to look up a group for each row. The cost is one gather of the activations for each
product, K numbers beside the K × N of the weights. No information is lost: sorting converts one representation to the
other. A gather is exact, so no new operation is needed.

Source: ``g_idx`` as GPTQ files store it.
"""

from dataclasses import dataclass

import numpy as np

from lowbit.arrays import F32, I32, I64
from lowbit.contract.checks import check_array, check_integer
from lowbit.errors import ArgumentError
from lowbit.quantization.affine import QuantizedMatrix, dequantize

Order = I64


@dataclass(frozen=True, eq=False)
class ActOrderMatrix:
    """A quantised matrix and the order of its rows.

    >>> from lowbit.quantization.affine import quantize
    >>> eye = quantize(np.eye(8, dtype=np.float32), bits=4, group_size=4)
    >>> backwards = ActOrderMatrix(eye, np.arange(8)[::-1].copy())
    >>> backwards.g_idx
    array([1, 1, 1, 1, 0, 0, 0, 0], dtype=int32)
    >>> backwards.dequantize()[0].argmax()
    np.int64(7)

    Attributes:
        matrix: K × N; its row i is row ``order[i]`` of W.
        order: int64, K, a permutation of 0 … K − 1.

    Raises:
        ArgumentError: `order` is no such permutation.
    """

    matrix: QuantizedMatrix
    order: Order

    def __post_init__(self) -> None:
        check_array("order", self.order, np.int64, (self.matrix.rows,))
        if not np.array_equal(np.sort(self.order), np.arange(self.matrix.rows)):
            raise ArgumentError("order", "not a permutation", f"each of 0 to {self.matrix.rows - 1} once")

    @property
    def g_idx(self) -> I32:
        """int32, K: the group of each row of W, as files store it. The order within a group is lost; it is not
        needed."""
        group = np.empty(self.matrix.rows, np.int32)
        group[self.order] = np.arange(self.matrix.rows) // self.matrix.group_size
        return group

    def dequantize(self) -> F32:
        """float32, K × N, rows in the order of W."""
        weights = np.empty((self.matrix.rows, self.matrix.columns), np.float32)
        weights[self.order] = dequantize(self.matrix)
        return weights


def order_of(g_idx: I32, group_size: int) -> Order:
    """The order of a file's rows that makes its groups contiguous; rows within a group keep their order.

    >>> order_of(np.array([1, 0, 1, 0], np.int32), group_size=2)
    array([1, 3, 0, 2])

    Args:
        g_idx: int32, K: the group of each row.
        group_size: rows of a group.

    Returns:
        int64, K: for an `ActOrderMatrix` whose row i is the file's row ``order[i]``.

    Raises:
        ArgumentError: wrong dtype or shape; groups other than the last that are not full.
    """
    check_array("g_idx", g_idx, np.int32, (None,))
    check_integer("group_size", group_size, 1, len(g_idx))
    order = np.argsort(g_idx, kind="stable")
    if not np.array_equal(g_idx[order], np.arange(len(g_idx)) // group_size):
        raise ArgumentError("g_idx", "uneven", f"each group {group_size} times, the last perhaps fewer")
    return order
