"""Calling the code under test without trusting it.

Inputs are read-only and lie among NaNs, so that a kernel that writes to them raises and one that reads beyond them
spoils its own result. Outputs are poisoned first, so that an element nobody wrote shows, and lie among canaries, so
that a write beyond them shows. Inputs are compared with a copy afterwards: read-only protects against numpy, not
against C.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from lowbit.affine import Floats, QuantizedMatrix
from lowbit.backend import Backend, PreparedLinear

PAD = 16  # floats on either side: one register of 512 bits
CANARY = np.float32(-1.2345e-30)


class BrokenPromiseError(AssertionError):
    """A verdict on the way a call was made rather than on its result; the first word of its text is the verdict."""


def guarded(x: Floats) -> Floats:
    """A read-only copy of x with NaN on both sides of it."""
    buffer = np.full(x.size + 2 * PAD, np.nan, np.float32)
    view = buffer[PAD:-PAD].reshape(x.shape)
    view[:] = x
    view.setflags(write=False)
    return view


def frozen(*arrays: npt.NDArray[Any]) -> None:
    """Make arrays read-only."""
    for array in arrays:
        array.setflags(write=False)


def freeze(matrix: QuantizedMatrix) -> QuantizedMatrix:
    """Make the arrays of a matrix read-only."""
    frozen(matrix.words, matrix.scales, matrix.zeros)
    return matrix


def prepare(backend: Backend, matrix: QuantizedMatrix) -> PreparedLinear:
    """``backend.prepare`` on read-only arrays, which must come back as they were.

    Raises:
        BrokenPromiseError: ``INPUT_MUTATED``.
    """
    arrays = [matrix.words, matrix.scales, matrix.zeros]
    copies = [array.copy() for array in arrays]
    prepared = backend.prepare(freeze(matrix))
    if not all(np.array_equal(array, copy) for array, copy in zip(arrays, copies, strict=True)):
        raise BrokenPromiseError("INPUT_MUTATED: the matrix was changed by prepare")
    return prepared


def multiply(linear: PreparedLinear, x: Floats, vectors: int) -> Floats:
    """``qgemv`` of ``x[0]``, or ``qgemm`` of x if the case has several vectors; checks what the call left behind.

    Raises:
        BrokenPromiseError: ``INPUT_MUTATED``, ``OOB_WRITE`` or ``STALE_OUTPUT``.
    """
    given = guarded(x if vectors else x[0])
    shape = (len(x), linear.columns) if vectors else (linear.columns,)
    size = int(np.prod(shape))
    buffer = np.full(size + 2 * PAD, CANARY, np.float32)
    out = buffer[PAD : PAD + size].reshape(shape)
    poison = np.uint32(0x7FC0DEAD)  # a NaN that no arithmetic produces
    out.view(np.uint32)[...] = poison
    call: Callable[..., Floats] = linear.qgemm if vectors else linear.qgemv
    result = call(given, out)
    if result is not out:
        raise BrokenPromiseError("STALE_OUTPUT: the call did not return the array it was given as out")
    if not np.array_equal(given.reshape(x.shape if vectors else (-1,)), x if vectors else x[0], equal_nan=True):
        raise BrokenPromiseError("INPUT_MUTATED: x was changed by the call")
    outside = np.concatenate([buffer[:PAD], buffer[PAD + size :]])
    if not (outside == CANARY).all():
        raise BrokenPromiseError("OOB_WRITE: the call wrote outside out")
    unwritten = np.flatnonzero(out.view(np.uint32) == poison)
    if len(unwritten):
        raise BrokenPromiseError(
            f"STALE_OUTPUT: {len(unwritten)} elements of out were never written, first {unwritten[0]}"
        )
    return result
