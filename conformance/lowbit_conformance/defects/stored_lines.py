"""Mistakes in the lines of a field: where the numbers of each line begin, in formats that count or pad them one by one.

A line of three zeros of 4 bits ends in the middle of a byte, and the next line begins in a new one. A line of 72 rows
in groups of 32 has three scales. The table of a format says of each field where that is so.
"""

import re
from dataclasses import replace

import numpy as np

from lowbit.arrays import Array
from lowbit.tensor_formats.stored import Stored
from lowbit.tensor_formats.table import Field, Sizes, Terms
from lowbit_conformance.defects.stored_codes import joined, reread, split

PACKED = re.compile(r"(.+)\*bits//\d+")
"""The size of an axis of integers that hold whole numbers of some bits, the last one possibly partly filled."""


def without_padding(row: Field, array: Array, at: Sizes) -> Array:
    """The numbers of each line follow those of the previous one, although each line begins in a new integer.

    Raises:
        ValueError: no line ends inside an integer.
    """
    packed = PACKED.fullmatch(str(row.shape[-1])) if len(row.shape) == 2 else None
    if packed is None or 8 * array.dtype.itemsize % at["bits"]:
        raise ValueError("lines are not packed alone")
    count, codes = at.size(packed[1], row.name), split(array, at["bits"])
    lines = codes.reshape(len(array), -1)
    if count == lines.shape[1]:
        raise ValueError("no line ends inside an integer")
    lines = np.ascontiguousarray(lines)
    taken = np.arange(len(lines))[:, np.newaxis] * count + np.arange(count)
    lines[:, :count] = lines.reshape(-1)[taken]
    return joined(lines.reshape(codes.shape), array, at["bits"])


def short_group(row: Field, at: Sizes) -> bool:
    """Whether each line of a field ends with a number for a group that is not whole."""
    if len(row.shape) != 2 or PACKED.fullmatch(str(row.shape[-1])):
        return False
    longer = (replace(at, K=at.K + 1), replace(at, N=at.N + 1))
    own = [row.sizes(each) for each in (at, *longer)]
    divided = "//" in str(row.shape[-1]) or "G" in str(row.shape[-1])
    return divided and own[0][1] > 1 and all(each[1] == own[0][1] for each in own)


def rounded_down(row: Field, array: Array, at: Sizes) -> Array:
    """Each line of a field begins one number too early, as if it had no last group.

    Raises:
        ValueError: all groups are whole.
    """
    if not short_group(row, at):
        raise ValueError("all groups are whole")
    count = array.shape[1]
    taken = np.arange(len(array))[:, np.newaxis] * (count - 1) + np.arange(count)
    return np.asarray(array.reshape(-1)[taken])


def short_groups_uncounted(weights: Stored) -> Terms:
    """Scales, zeros and minima of a matrix whose number of groups is rounded down.

    Raises:
        ValueError: all groups are whole.
    """
    table, at = weights.table, weights.sizes
    fields = table.fields_of(weights.by_name)
    rows = [row for row in table.fields if row.role in ("scale", "zero") and short_group(row, at)]
    if not rows or table.block is not None:
        raise ValueError("all groups are whole")
    return reread(weights, {row.name: rounded_down(row, np.ascontiguousarray(fields[row.name]), at) for row in rows})
