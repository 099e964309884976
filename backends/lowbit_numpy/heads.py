"""Pooling heads, all groups at once."""

from typing import ClassVar

import numpy as np

from lowbit.arrays import F32
from lowbit.attention.pooling import Method
from lowbit.backend import Declaration


class PoolingOperations:
    """The hook of `pooling.pool`."""

    declared: ClassVar[dict[str, Declaration]] = {"pooling.pool": Declaration()}

    def _pooling_pool(self, weights: F32, heads: int, groups: int, method: Method = "mean") -> F32:
        members = heads // groups
        split = weights.reshape(len(weights), groups, members, -1)
        if method == "first":
            return split[:, :, 0].reshape(len(weights), -1).copy()
        # The last running sum: running sums are computed in order, which numpy's plain sum need not be.
        mean = np.cumsum(split, axis=2, dtype=np.float64)[:, :, -1] / members
        return np.ascontiguousarray(mean.reshape(len(weights), -1), np.float32)
