r"""The interpreter: run a program on numpy arrays, one instruction after another, and count.

The interpreter defines what a program means, independent of any processor: a compiled kernel must return the same bits.
So a kernel can be followed, and checked, on a machine that lacks its instructions. The interpreter also measures what
the papers' models only estimate: how many instructions are executed, how much is read from each memory, and how many
registers are live at once. A program that needs more registers than it is allowed is refused before anything is read.

>>> from lowbit.kernels.program import Address, Advance, Instruction, Loop
>>> double = Program(2, (
...     Instruction("broadcast_float", "two", (2.0,)),
...     Instruction("broadcast_float", "none", (0.0,)),
...     Loop("i", "iterations", (
...         Instruction("load_float", "a", (Address("x"),)),
...         Instruction("fmadd", "a", ("a", "two", "none")),
...         Instruction("store", "", (Address("y"), "a")),
...         Advance("x", 2),
...         Advance("y", 2),
...     )),
... ))
>>> memory = {"x": np.arange(6, dtype=np.float32), "y": np.empty(6, np.float32)}
>>> counts = run(double, memory, {"iterations": 3})
>>> memory["y"]
array([ 0.,  2.,  4.,  6.,  8., 10.], dtype=float32)
>>> counts.instructions["fmadd"], counts.read["x"], counts.registers
(3, 6, 3)
>>> run(double, memory, {"iterations": 4})
Traceback (most recent call last):
lowbit.errors.ArgumentError: load_float at x + 0 is elements 6 to 7; allowed: elements 0 to 5
>>> run(double, memory, {"iterations": 3}, registers=2)
Traceback (most recent call last):
lowbit.errors.ArgumentError: registers live at once is 3; allowed: at most 2

Source: QIGen table 1; equation 4; errata Q8.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lowbit.arrays import Array
from lowbit.contract.checks import check_array, check_integer
from lowbit.errors import ArgumentError
from lowbit.kernels.program import (
    Address,
    Advance,
    Argument,
    Count,
    Element,
    Instruction,
    Loop,
    Program,
    Step,
    live_registers,
)
from lowbit.kernels.vector import VOCABULARY, Operand, multiply_then_add

Memory = Mapping[str, Array]
Sizes = Mapping[str, int | Sequence[int]]


@dataclass(frozen=True)
class Counts:
    """The counts of one run.

    Attributes:
        instructions: the number of executions of each word.
        read: for each memory, the elements of 4 bytes read by loads and broadcasts, counted at every read.
        written: for each memory, elements written.
        registers: the largest number of registers live at once.
    """

    instructions: Counter[str] = field(default_factory=Counter)
    read: Counter[str] = field(default_factory=Counter)
    written: Counter[str] = field(default_factory=Counter)
    registers: int = 0


def run(
    program: Program, memory: Memory, sizes: Sizes | None = None, *, fused: bool = True, registers: int | None = None
) -> Counts:
    """Run a program.

    Args:
        program: the program to run.
        memory: for each pointer of the program a one-dimensional array, uint32 or float32; the pointer starts at
            element 0, and stores write to the array.
        sizes: for each size that the program names, a number or, for `Element`, a list of numbers.
        fused: whether `fmadd` rounds once.
        registers: η, the number of registers; ``None`` for no limit.

    Returns:
        The counts.

    Raises:
        ArgumentError: more registers are live at once than exist; a memory or a size is missing or of another kind; an
            address is outside its memory.
    """
    counts = Counts(registers=live_registers(program))
    if registers is not None and counts.registers > registers:
        raise ArgumentError("registers live at once", counts.registers, f"at most {registers}")
    for name, array in memory.items():
        check_array(f"memory of {name}", array, np.uint32 if array.dtype == np.uint32 else np.float32, (None,))
    machine = Machine(program, memory, sizes or {}, fused, counts)
    with np.errstate(all="ignore"):  # a kernel does not trap either
        machine.block(program.body)
    return counts


class Machine:
    """Registers by name, pointers into memories, and the counters of the loops; use it through `run`.

    The memories may be arrays of another class that follows numpy's protocols, for example symbolic arrays. A subclass
    sees every instruction with its operands in `execute`.
    """

    def __init__(
        self,
        program: Program,
        memory: Mapping[str, Any],
        sizes: Sizes,
        fused: bool = True,
        counts: Counts | None = None,
    ) -> None:
        self.lanes, self.memory, self.sizes, self.fused = program.lanes, memory, sizes, fused
        self.counts = counts if counts is not None else Counts()
        self.pointers = dict.fromkeys(memory, 0)
        self.indices: dict[str, int] = {}
        self.registers: dict[str, Any] = {}

    def block(self, steps: tuple[Step, ...]) -> None:
        for step in steps:
            if isinstance(step, Instruction):
                self.instruction(step)
            elif isinstance(step, Advance):
                self.pointers[step.pointer] += step.step
            elif isinstance(step, Loop):
                for number in range(self.count(step.count)):
                    self.indices[step.index] = number
                    self.block(step.body)

    def instruction(self, step: Instruction) -> None:
        word = VOCABULARY[step.word]
        self.counts.instructions[step.word] += 1
        if word.function is None:
            return
        operands = [self.value(step, argument, kind) for argument, kind in zip(step.arguments, word.takes, strict=True)]
        result = self.execute(step, operands)
        if word.gives != "none":
            self.registers[step.target] = result

    def execute(self, step: Instruction, operands: list[Any]) -> Any:
        """The result of an instruction for these operands."""
        word = VOCABULARY[step.word]
        assert word.function is not None
        fused = self.fused or step.word != "fmadd"
        function: Callable[..., Any] = word.function if fused else multiply_then_add
        return function(*operands, self.lanes) if "scalar" in word.takes else function(*operands)

    def value(self, step: Instruction, argument: Argument, operand: Operand) -> Any:
        """The value of an argument: lanes of memory, one number, or the content of a register."""
        if isinstance(argument, Address):
            return self.lanes_at(step, argument) if operand == "address" else self.number_at(step, argument)
        if operand == "scalar":
            return (np.uint32 if VOCABULARY[step.word].gives == "int" else np.float32)(argument)
        return argument if operand == "count" else self.registers[str(argument)]

    def lanes_at(self, step: Instruction, address: Address) -> Any:
        count = self.counts.written if step.word == "store" else self.counts.read
        elements = self.lanes * VOCABULARY[step.word].lane_bytes // 4
        count[address.pointer] += elements
        return self._elements(step, address, elements)

    def number_at(self, step: Instruction, address: Address) -> Any:
        self.counts.read[address.pointer] += 1
        kind = np.uint32 if VOCABULARY[step.word].gives == "int" else np.float32
        return self._elements(step, address, 1).view(kind)[0]

    def _elements(self, step: Instruction, address: Address, length: int) -> Any:
        """A view of memory; a kernel that would leave the memory is wrong, whatever a real machine holds there."""
        if address.pointer not in self.memory:
            raise ArgumentError("memory", f"missing for {address.pointer}", f"an array for it, as {step.word} uses it")
        array, start = self.memory[address.pointer], self.pointers[address.pointer] + address.offset
        if start < 0 or start + length > len(array):
            given = f"elements {start} to {start + length - 1}"
            raise ArgumentError(f"{step.word} at {address}", given, f"elements 0 to {len(array) - 1}")
        return array[start : start + length]

    def count(self, count: Count) -> int:
        """The number of iterations of a loop."""
        if isinstance(count, int):
            return count
        name = count if isinstance(count, str) else count.name
        if name not in self.sizes:
            raise ArgumentError("sizes", f"without {name}", f"a number for {count}")
        size = self.sizes[name]
        if isinstance(count, Element):
            if isinstance(size, int):
                raise ArgumentError(f"size {name}", size, f"a list of numbers, as {count} is one of them")
            size = size[self.indices[count.index]]
        check_integer(f"size {count}", size, 0)
        assert isinstance(size, int)
        return size
