"""Memory that a library reads from and writes to: aligned as it needs, and with a margin that shows a stray write."""

from typing import Any

import numpy as np

from lowbit.arrays import Array

MARGIN = 512
"""Bytes on either side of a result. It also makes every result large enough to come fresh from the allocator."""
PATTERN = (np.arange(MARGIN) * 37 % 251 + 1).astype(np.uint8)


class OutOfBoundsError(RuntimeError):
    """The library wrote outside the memory that it was given for a result."""


class GuardedArray:
    """An array for a result, between two margins.

    Attributes:
        array: C-contiguous, not initialised.
    """

    def __init__(self, dtype: np.dtype[Any], shape: tuple[int, ...], alignment: int) -> None:
        size = int(np.prod(shape, dtype=object)) * dtype.itemsize
        unit = max(alignment, dtype.itemsize)
        buffer = np.empty(size + 2 * MARGIN + unit, np.uint8)
        start = MARGIN + -(address(buffer) + MARGIN) % unit
        self._before, self._after = buffer[start - MARGIN : start], buffer[start + size : start + size + MARGIN]
        self._before[:], self._after[:] = PATTERN, PATTERN
        self.array: Array = buffer[start : start + size].view(dtype).reshape(shape)

    def stray_write(self) -> str:
        """The place of a write outside the array, in words; empty if there was none."""
        before, after = np.flatnonzero(self._before != PATTERN), np.flatnonzero(self._after != PATTERN)
        if after.size:
            return f"{after[0]} bytes after the end"
        return f"{MARGIN - before[-1]} bytes before the beginning" if before.size else ""


def address(array: Array) -> int:
    """The address of the first element."""
    return int(array.__array_interface__["data"][0])


def is_aligned(array: Array, alignment: int) -> bool:
    """Whether an array begins at a multiple of `alignment` bytes; numpy guarantees only the size of an element."""
    return alignment == 0 or address(array) % alignment == 0


def realigned(array: Array, alignment: int) -> Array:
    """A read-only copy that is aligned."""
    copy = GuardedArray(array.dtype, array.shape, alignment).array
    copy[...] = array
    copy.setflags(write=False)
    return copy
