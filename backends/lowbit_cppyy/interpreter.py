"""The interpreter: runs a micro-kernel program on numpy arrays, one instruction after the other.

It is the meaning of the vocabulary, independent of any processor: a compiled kernel must return the same bits. So a
kernel can be followed, and checked, on a machine that lacks its instructions.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lowbit_cppyy.program import Address, Advance, Argument, Comment, Instruction, Loop, Program, Step
from lowbit_cppyy.vocabulary import VOCABULARY, Operand

Words = npt.NDArray[np.uint32]
Floats = npt.NDArray[np.float32]


def run(program: Program, *, fused: bool, w: Words, x: Floats, units: Sequence[int]) -> Floats:
    """Run a program over its two streams.

    Args:
        program: the micro-kernel.
        fused: whether `fmadd` rounds once.
        w: uint32, the stream of weights from the first column of the tile on.
        x: float32, the stream of activations.
        units: for each group, its units.

    Returns:
        float32, rows × panel; only the program's columns are written, the others are NaN.
    """
    machine = _Machine(program, fused, w, x, units)
    with np.errstate(all="ignore"):  # a kernel has no traps either
        machine.block(program.body)
    return machine.memory["y"].reshape(program.rows, program.panel)


class _Machine:
    """Registers by name, pointers into three arrays, and the counters of the loops."""

    def __init__(self, program: Program, fused: bool, w: Words, x: Floats, units: Sequence[int]) -> None:
        self.lanes, self.fused, self.units = program.lanes, fused, units
        y = np.full(program.rows * program.panel, np.nan, np.float32)
        self.memory: dict[str, npt.NDArray[Any]] = {"w": w.reshape(-1), "x": x.reshape(-1), "y": y}
        self.pointers = dict.fromkeys(self.memory, 0)
        self.counters: dict[str, int] = {}
        self.registers: dict[str, npt.NDArray[Any]] = {}

    def block(self, steps: tuple[Step, ...]) -> None:
        for step in steps:
            if isinstance(step, Loop):
                count = len(self.units) if step.count == "groups" else self.units[self.counters["g"]]
                for self.counters[step.index] in range(count):
                    self.block(step.body)
            elif isinstance(step, Advance):
                self.pointers[step.pointer] += step.step
            elif not isinstance(step, Comment):
                self.instruction(step)

    def instruction(self, step: Instruction) -> None:
        if step.word == "prefetch":
            return
        if step.word == "store":
            place, register = step.arguments
            assert isinstance(place, Address) and isinstance(register, str)
            self._slice(place)[:] = self.registers[register]
            return
        operands = [self.value(a, kind) for a, kind in zip(step.arguments, VOCABULARY[step.word].takes, strict=True)]
        result = self.compute(step.word, *operands)
        dtype = np.uint32 if VOCABULARY[step.word].gives == "int" else np.float32
        assert result.dtype == dtype and result.shape == (self.lanes,), step
        self.registers[step.target] = result

    def value(self, argument: Argument, operand: Operand) -> Any:
        """What an argument stands for: lanes from memory, one number, or the content of a register."""
        if isinstance(argument, Address):
            return self._slice(argument) if operand == "address" else self._slice(argument)[0]
        return self.registers[argument] if isinstance(argument, str) else argument

    def _slice(self, address: Address) -> npt.NDArray[Any]:
        start = self.pointers[address.pointer] + address.offset
        return self.memory[address.pointer][start : start + self.lanes]

    def compute(self, word: str, a: Any, b: Any = None, c: Any = None) -> npt.NDArray[Any]:
        match word:
            case "load_int":
                return np.array(a)
            case "load_float":
                return np.array(a).view(np.float32)
            case "broadcast_int":
                return np.full(self.lanes, a, np.uint32)
            case "broadcast_float":
                return np.full(self.lanes, a, np.float32)
            case "fmadd":
                return fused_multiply_add(a, b, c) if self.fused else np.asarray(a * b + c)
            case "srli":
                return np.asarray(a >> np.uint32(b))
            case "slli":
                return np.asarray(a << np.uint32(b))
            case "and":
                return np.asarray(a & b)
            case "or":
                return np.asarray(a | b)
            case "cvt_int_float":
                return np.asarray(a.astype(np.float32))
        raise AssertionError(word)


def fused_multiply_add(a: Floats, b: Floats, c: Floats) -> Floats:
    """``a * b + c`` rounded once to float32, which numpy does not offer.

    The product is exact in float64. The sum is not always; rounding it to float64 and then to float32 would round
    twice. So where the float64 sum is inexact and even, it is moved to its odd neighbour on the side of the exact value
    (rounding to odd), from where the second rounding is the right one (S. Boldo and G. Melquiond, 2008).

    >>> a, c = np.float32([1 + 2**-12]), np.float32([2.0**-60])
    >>> fused_multiply_add(a, a, c) == np.float32(1 + 2**-11 + 2**-23)  # the exact sum lies just above the midpoint
    array([ True])
    >>> (a.astype(np.float64) * a + c).astype(np.float32) == np.float32(1 + 2**-11)  # two roundings lose it
    array([ True])
    """
    product = a.astype(np.float64) * b.astype(np.float64)
    addend = c.astype(np.float64)
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)  # exactly, by Knuth's two-sum; NaN where total is not finite
    even = total.view(np.int64) & 1 == 0
    odd = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    inexact = np.isfinite(total) & (error != 0) & even
    return np.where(inexact, odd, total).astype(np.float32)
