"""Layouts, all words at once: one key for each word, and the stream is the words sorted by it."""

from typing import ClassVar

import numpy as np

from lowbit.arrays import I64
from lowbit.backend import Declaration
from lowbit.kernels.layouts import ORDERS, Layout, NestedPanels, ZCurve
from lowbit.quantization.packing import Words

Indices = I64


class LayoutOperations:
    """The hooks of `blocking.apply` and `blocking.invert`."""

    declared: ClassVar[dict[str, Declaration]] = dict.fromkeys(
        ("blocking.apply", "blocking.invert"), Declaration({"order": ORDERS})
    )

    def _blocking_apply(self, words: Words, layout: Layout) -> Words:
        return words.reshape(-1)[_order(layout)]

    def _blocking_invert(self, stream: Words, layout: Layout) -> Words:
        words = np.empty_like(stream)
        words[_order(layout)] = stream
        return words.reshape(layout.rows, layout.columns)


def _order(layout: Layout) -> Indices:
    """Which word of the matrix, counted row by row, each place of the stream holds."""
    row, column = (places.reshape(-1) for places in np.indices((layout.rows, layout.columns)))
    height, width = layout.block
    block = column // width
    if isinstance(layout, NestedPanels):
        return np.asarray(np.lexsort((column, row, block, row // height, column // layout.panel)), np.int64)
    if isinstance(layout, ZCurve):
        block = _spread(block) | _spread(row // height) << 1
    return np.asarray(np.lexsort((column, row, block)), np.int64)


def _spread(numbers: Indices) -> Indices:
    """Move bit i of numbers below 2³¹ to bit 2·i."""
    for shift, mask in ((16, 0x0000FFFF0000FFFF), (8, 0x00FF00FF00FF00FF), (4, 0x0F0F0F0F0F0F0F0F)):
        numbers = (numbers | numbers << shift) & mask
    numbers = (numbers | numbers << 2) & 0x3333333333333333
    return (numbers | numbers << 1) & 0x5555555555555555
