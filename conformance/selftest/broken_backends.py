"""Backends with one mistake each, of the kind that real kernels have; the suite must find every one.

`Correct` computes as the numpy backend does, from unpacked codes; each class below it changes one thing.
"""

import dataclasses
import os
import signal
import time
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import pytest

from lowbit.affine import Floats, QuantizedMatrix
from lowbit.backend import Availability, Backend, Capabilities, Declaration, PreparedLinear
from lowbit.bounds import Arithmetic, any_order
from lowbit.packing import Codes, unpack

Indices = npt.NDArray[np.int64]


class Weights(PreparedLinear):
    """Float32 weights, from codes, scales and zeros that a subclass may have spoiled."""

    def __init__(self, owner: "Correct", matrix: QuantizedMatrix) -> None:
        super().__init__(owner.name, matrix.rows, matrix.columns, matrix.nbytes)
        self.owner, self.matrix = owner, matrix
        codes = owner.spoil_codes(unpack(matrix.words, matrix.bits), matrix)
        group = owner.group_of(np.arange(matrix.rows), matrix)
        scales = matrix.scales.astype(np.float32)[group]
        zeros = owner.spoil_zeros(matrix.zeros.astype(np.float32), matrix)[group]
        self.weights = owner.spoil_weights(
            scales * codes + zeros if matrix.convention == "minimum" else scales * (codes - zeros)
        )

    def _qgemv(self, x: Floats, out: Floats) -> None:
        self.owner.multiply(x[None], self.weights, out[None])

    def _qgemm(self, x: Floats, out: Floats) -> None:
        self.owner.multiply(x, self.weights, out)


class Correct(Backend):
    """No mistake: the control, which must pass."""

    name = "correct"
    roundings = staticmethod(any_order)

    def capabilities(self) -> Capabilities:
        bounded = Declaration(arithmetic=Arithmetic("dequantised", "float32", self.roundings))
        return Capabilities({"linear.qgemv": bounded, "linear.qgemm": bounded})

    def _prepare(self, matrix: QuantizedMatrix) -> PreparedLinear:
        return Weights(self, matrix)

    def spoil_codes(self, codes: Codes, matrix: QuantizedMatrix) -> Codes:
        return codes

    def spoil_zeros(self, zeros: Floats, matrix: QuantizedMatrix) -> Floats:
        return zeros

    def spoil_weights(self, weights: Floats) -> Floats:
        return weights

    def group_of(self, rows: Indices, matrix: QuantizedMatrix) -> Indices:
        return rows // matrix.group_size

    def multiply(self, x: Floats, weights: Floats, out: Floats) -> None:
        with np.errstate(invalid="ignore", over="ignore"):
            out[...] = x @ weights


# Reading the codes.


class SwappedNibble(Correct):
    """The last two 4-bit codes of the last word of the last column are exchanged, and no others."""

    def spoil_codes(self, codes: Codes, matrix: QuantizedMatrix) -> Codes:
        if matrix.bits == 4:
            codes[[-2, -1], -1] = codes[[-1, -2], -1]
        return codes


class StraddleCutShort(Correct):
    """3-bit code 21 loses the bit that lies in the next word."""

    def spoil_codes(self, codes: Codes, matrix: QuantizedMatrix) -> Codes:
        if matrix.bits == 3:
            codes[21::32] &= 1
        return codes


# Finding the group.


class WrongGroupAtOneRow(Correct):
    """The first row of the second group takes the scale and zero of the first."""

    def group_of(self, rows: Indices, matrix: QuantizedMatrix) -> Indices:
        group = rows // matrix.group_size
        group[rows == matrix.group_size] = 0
        return group


class ShortLastGroup(Correct):
    """A short last group is counted to the one before it."""

    def group_of(self, rows: Indices, matrix: QuantizedMatrix) -> Indices:
        return np.minimum(rows // matrix.group_size, max(matrix.rows // matrix.group_size - 1, 0))


class ZeroOffByOne(Correct):
    """Zero-points are stored less one, as GPTQ's first format does."""

    def spoil_zeros(self, zeros: Floats, matrix: QuantizedMatrix) -> Floats:
        return zeros + 1 if matrix.convention == "zero_point" else zeros


# Summing.


class DroppedProduct(Correct):
    """The product of the last row and the last column is left out."""

    def spoil_weights(self, weights: Floats) -> Floats:
        weights[-1, -1] = 0
        return weights


class DroppedProductInDeepMatrices(Correct):
    """One product is left out, of matrices of 4096 rows and more only, where a bound alone cannot see it."""

    def spoil_weights(self, weights: Floats) -> Floats:
        if len(weights) >= 4096:
            weights[2048, 3] = 0
        return weights


class DroppedTailOfRows(Correct):
    """Rows past the last whole 32 are ignored."""

    def spoil_weights(self, weights: Floats) -> Floats:
        weights[len(weights) // 32 * 32 :] = 0
        return weights


class HalfPrecision(Correct):
    """Sums in float16 under a declaration of float32."""

    def multiply(self, x: Floats, weights: Floats, out: Floats) -> None:
        with np.errstate(invalid="ignore", over="ignore"):
            out[...] = x.astype(np.float16) @ weights.astype(np.float16)


class MeaninglessDeclaration(Correct):
    """Declares so many roundings that any result would pass."""

    @staticmethod
    def roundings(rows: int, group_size: int) -> int:
        return 10**7


class HiddenNaN(Correct):
    """Turns NaN into zero on the way."""

    def multiply(self, x: Floats, weights: Floats, out: Floats) -> None:
        super().multiply(np.nan_to_num(x), weights, out)


# Large, tall and shared: what small shapes alone would not show.


class PositiveMinimum(Correct):
    """Takes every minimum for a negative one."""

    def spoil_zeros(self, zeros: Floats, matrix: QuantizedMatrix) -> Floats:
        return -np.abs(zeros) if matrix.convention == "minimum" else zeros


class MinimumRoundedToAZeroPoint(Correct):
    """Keeps minima as whole multiples of the scale, as if they were zero-points."""

    def spoil_zeros(self, zeros: Floats, matrix: QuantizedMatrix) -> Floats:
        scales = matrix.scales.astype(np.float32)
        return np.rint(zeros / scales) * scales if matrix.convention == "minimum" else zeros


class DroppedTailOfDeepMinimum(Correct):
    """The last row of matrices of more than 512 rows is left out, under minimum only."""

    def spoil_zeros(self, zeros: Floats, matrix: QuantizedMatrix) -> Floats:
        self.deep = matrix.convention == "minimum" and matrix.rows > 512
        return zeros

    def spoil_weights(self, weights: Floats) -> Floats:
        weights[-1:] *= not self.deep
        return weights


class LastColumnOfLargeMatrices(Correct):
    """The last column of matrices of 200,000 weights and more is never computed."""

    def spoil_weights(self, weights: Floats) -> Floats:
        weights[:, -1:] *= weights.size < 200_000
        return weights


class FlushedHalves(Correct):
    """Takes subnormal float16 scales for zero, as conversions written by hand do."""

    def spoil_weights(self, weights: Floats) -> Floats:
        return weights

    def _prepare(self, matrix: QuantizedMatrix) -> PreparedLinear:
        prepared = Weights(self, matrix)
        if matrix.scales.dtype == np.float16:
            tiny = (matrix.scales < 2.0**-14)[self.group_of(np.arange(matrix.rows), matrix)]
            prepared.weights = np.where(tiny, np.float32(0), prepared.weights)
        return prepared


class HiddenNaNInDeepMatrices(Correct):
    """Turns NaN into zero on the way, in matrices of 128 rows and more."""

    def multiply(self, x: Floats, weights: Floats, out: Floats) -> None:
        super().multiply(np.nan_to_num(x) if len(weights) >= 128 else x, weights, out)


class SharedBuffer(Correct):
    """All matrices of one shape use the weights that were prepared last."""

    buffers: ClassVar[dict[tuple[int, ...], Floats]] = {}

    def spoil_weights(self, weights: Floats) -> Floats:
        shared = self.buffers.setdefault(weights.shape, weights)
        shared[...] = weights
        return shared


class AllocatesAnother(Correct):
    """Right where it is given out, and wrong where it makes its own."""

    def multiply(self, x: Floats, weights: Floats, out: Floats) -> None:
        super().multiply(x, weights, out)
        if out.base is not None and out.base.size == out.size:  # no buffer around it: it was made for this call
            out *= 2


class ScratchForAll(Correct):
    """Declares calls from several threads, and keeps one scratch for all of them."""

    scratch: ClassVar[Floats] = np.zeros(11008, np.float32)

    def capabilities(self) -> Capabilities:
        return dataclasses.replace(super().capabilities(), concurrent=True)

    def multiply(self, x: Floats, weights: Floats, out: Floats) -> None:
        for row, result in zip(x, out, strict=True):
            self.scratch[: row.size] = row
            time.sleep(0.0005)  # the moment in which another thread writes to it
            super().multiply(self.scratch[None, : row.size], weights, result[None])


class RowsPastSixtyFour(Correct):
    """Rows of X past the 64th are those before them."""

    def multiply(self, x: Floats, weights: Floats, out: Floats) -> None:
        super().multiply(x[np.arange(len(x)) % 64], weights, out)


# Writing the result.


class TailColumnsUnwritten(Correct):
    """Columns past the last whole 8 are never written."""

    def multiply(self, x: Floats, weights: Floats, out: Floats) -> None:
        whole = out.shape[1] // 8 * 8
        out[:, :whole] = x @ weights[:, :whole]


class WritesBeyond(Correct):
    """Always stores a whole register of 8 columns."""

    def multiply(self, x: Floats, weights: Floats, out: Floats) -> None:
        super().multiply(x, weights, out)
        if out.shape[0] == 1 and out.shape[1] % 8:
            beyond = np.lib.stride_tricks.as_strided(out[0], shape=(out.shape[1] + 1,))
            beyond[-1] = 0


class ChangesItsInput(Correct):
    """Writes to x through its address, as C can although numpy says read-only."""

    def multiply(self, x: Floats, weights: Floats, out: Floats) -> None:
        super().multiply(x, weights, out)
        import ctypes

        ctypes.c_float.from_address(x.__array_interface__["data"][0]).value += 1


class KeepsState(Correct):
    """Rounds every second call another way, too little for a bound to see; exact sums need no rounding."""

    calls = 0

    def multiply(self, x: Floats, weights: Floats, out: Floats) -> None:
        super().multiply(x, weights, out)
        self.calls += 1
        if self.calls % 2 and (x != np.rint(x)).any():
            out[...] = np.nextafter(out, np.float32(np.inf))


# Ending.


class Crashes(Correct):
    """Ends the process by a segmentation fault at the first product of more than 8 columns."""

    def multiply(self, x: Floats, weights: Floats, out: Floats) -> None:
        if out.shape[1] > 8:
            os.kill(os.getpid(), signal.SIGSEGV)
        super().multiply(x, weights, out)


class LeavesEarly(Correct):
    """Ends the process in good order, in the middle, as if all had been done."""

    def multiply(self, x: Floats, weights: Floats, out: Floats) -> None:
        super().multiply(x, weights, out)
        if out.shape[1] == 33:
            os._exit(0)


class SkipsItself(Correct):
    """Pretends that a case was not declared."""

    def multiply(self, x: Floats, weights: Floats, out: Floats) -> None:
        pytest.skip("not declared: today")


class Interrupts(Correct):
    """Raises what Ctrl-C raises."""

    def multiply(self, x: Floats, weights: Floats, out: Floats) -> None:
        raise KeyboardInterrupt


class Hangs(Correct):
    """Never comes back from matrices of 33 columns."""

    def multiply(self, x: Floats, weights: Floats, out: Floats) -> None:
        if out.shape[1] == 33:
            time.sleep(3600)
        super().multiply(x, weights, out)


class DeclaresAnUnknownOperation(Correct):
    """Declares an operation that the specification does not have."""

    def capabilities(self) -> Capabilities:
        return Capabilities({"linear.qgemw": Declaration()})


class LimitsAnUnknownParameter(Correct):
    """Limits a parameter that the operation does not have."""

    def capabilities(self) -> Capabilities:
        return Capabilities({"linear.qgemv": Declaration({"bitz": (4,)}, Arithmetic("dequantised"))})


class Unavailable(Correct):
    """Cannot run here, and says so."""

    def availability(self) -> Availability:
        return Availability(False, "it needs an abacus", "buy one")


class DeclaresNothing(Correct):
    """Declares no operation."""

    def capabilities(self) -> Capabilities:
        return Capabilities({})


class DeclaresWhatItLacks(Correct):
    """Declares packing and has no code for it."""

    def capabilities(self) -> Capabilities:
        return Capabilities({"packing.pack": Declaration()})


# The clause whose cases show that the result is wrong.
FOUND_BY_RESULT = {
    SwappedNibble: "C1",
    StraddleCutShort: "C1",
    WrongGroupAtOneRow: "C1",
    ShortLastGroup: "C1",
    ZeroOffByOne: "C1",
    DroppedProduct: "C1",
    DroppedProductInDeepMatrices: "C1",
    DroppedTailOfRows: "C1",
    HalfPrecision: "C2",
    HiddenNaN: "C5",
    PositiveMinimum: "C1",
    MinimumRoundedToAZeroPoint: "C1",
    DroppedTailOfDeepMinimum: "C1",
    LastColumnOfLargeMatrices: "C1",
    FlushedHalves: "C2",
    HiddenNaNInDeepMatrices: "C5",
}
# The verdict, and the clause whose cases give it.
FOUND_BY_VERDICT = {
    TailColumnsUnwritten: ("STALE_OUTPUT", "C1"),
    WritesBeyond: ("OOB_WRITE", "C1"),
    ChangesItsInput: ("INPUT_MUTATED", "C1"),
    KeepsState: ("NONDETERMINISTIC", "C3"),
    SharedBuffer: ("NONDETERMINISTIC", "C3"),
    AllocatesAnother: ("NONDETERMINISTIC", "C3"),
    ScratchForAll: ("NONDETERMINISTIC", "C3"),
    MeaninglessDeclaration: ("DECLARATION_REFUSED", "C2"),
}
