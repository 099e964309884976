r"""Programs: a micro-kernel as a value, instructions over named registers and loops around them.

A generated kernel can be more than text: as a value it can be run in numpy (`lowbit.kernels.interpreter`), printed for
a processor (a backend's lowering), and *counted*. This chapter defines such values, without reference to a processor or
to C++.

The state of a program is its registers, by name; *pointers* into named memories of 32-bit elements, which begin at 0
and which the program moves; and the counters of its loops. Sizes that are known only when the kernel is called are
named too. A program for four lanes that adds up an unknown number of rows:

>>> total = Program(4, (
...     Instruction("broadcast_float", "one", (1.0,)),
...     Instruction("broadcast_float", "sum", (0.0,)),
...     Loop("row", "rows", (
...         Instruction("load_float", "a", (Address("x"),)),
...         Instruction("fmadd", "sum", ("one", "a", "sum")),
...         Advance("x", 4),
...     )),
...     Instruction("store", "", (Address("y"), "sum")),
... ))
>>> live_registers(total)
3

**Live registers.** A register is *live* between being written and being read for the last time. At any point of a
program, all live values must be in registers of the processor, or some are spilled to memory; so

.. math:: \max_{\text{points } p} \; |\mathrm{live}(p)| \;\le\; \eta

says that a program fits a processor of :math:`\eta` vector registers. Counting from the last instruction backwards,
what is live before an instruction is what is live after it, less its target, plus its operands; the end of a loop's
body is followed by what follows the loop and by the body again. The target may take the register of an operand that
is read for the last time, as processors allow.

Source: QIGen §3, equation 4 (what it counts by formula); errata Q8.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from lowbit.contract.checks import check_choice, check_integer
from lowbit.errors import ArgumentError
from lowbit.kernels.vector import VOCABULARY


@dataclass(frozen=True)
class Address:
    """Element `offset` (of 4 bytes) from the current position of a pointer: ``w + 32`` or, read as a scalar,
    ``x[5]``."""

    pointer: str
    offset: int = 0

    def __str__(self) -> str:
        return f"{self.pointer} + {self.offset}"


Argument: TypeAlias = str | int | float | Address
"""The name of a register, a constant, or an address in memory."""


@dataclass(frozen=True)
class Instruction:
    """``target = word(arguments)``; the target is empty if the word has no result.

    Raises:
        ArgumentError: no such word, a missing or unexpected target, or a wrong number of arguments.
    """

    word: str
    target: str
    arguments: tuple[Argument, ...]

    def __post_init__(self) -> None:
        check_choice("word", self.word, tuple(VOCABULARY))
        word = VOCABULARY[self.word]
        if (self.target == "") != (word.gives == "none"):
            raise ArgumentError(f"target of {self.word}", repr(self.target), f"a register of kind {word.gives}")
        if len(self.arguments) != len(word.takes):
            raise ArgumentError(f"arguments of {self.word}", len(self.arguments), f"{len(word.takes)}")

    def reads(self) -> list[str]:
        """The registers that it reads."""
        operands = zip(self.arguments, VOCABULARY[self.word].takes, strict=True)
        return [str(argument) for argument, operand in operands if operand in ("int", "float")]


@dataclass(frozen=True)
class Advance:
    """Advance a pointer by `step` elements."""

    pointer: str
    step: int


@dataclass(frozen=True)
class Element:
    """A size from a list, indexed by the counter of an enclosing loop: ``units[g]``."""

    name: str
    index: str

    def __str__(self) -> str:
        return f"{self.name}[{self.index}]"


Count: TypeAlias = int | str | Element
"""The number of iterations: a number, the name of a size that the kernel is called with, or one from a list of
sizes."""


@dataclass(frozen=True)
class Loop:
    """Repeat `body` with `index` = 0, 1, … below `count`."""

    index: str
    count: Count
    body: tuple["Step", ...]


@dataclass(frozen=True)
class Comment:
    """A line for readers of the kernel."""

    text: str


Step: TypeAlias = Instruction | Advance | Loop | Comment


@dataclass(frozen=True)
class Program:
    """A micro-kernel for registers of `lanes` lanes.

    Raises:
        ArgumentError: a register is read before it is written, or holds integers in one place and floats in another.
    """

    lanes: int
    body: tuple[Step, ...]

    def __post_init__(self) -> None:
        check_integer("lanes", self.lanes, 1)
        kinds: dict[str, str] = {}
        for step in self.instructions():
            word = VOCABULARY[step.word]
            for argument, operand in zip(step.arguments, word.takes, strict=True):
                if operand in ("int", "float") and kinds.get(str(argument)) != operand:
                    given = kinds.get(str(argument), "not written yet")
                    raise ArgumentError(f"register {argument} in {step.word}", given, f"a register of kind {operand}")
            if step.target and kinds.setdefault(step.target, word.gives) != word.gives:
                raise ArgumentError(f"register {step.target}", f"{kinds[step.target]} and {word.gives}", "one kind")

    def instructions(self) -> Iterator[Instruction]:
        """Every instruction of the text, once each, whatever loop contains it."""
        pending = list(reversed(self.body))
        while pending:
            step = pending.pop()
            if isinstance(step, Loop):
                pending.extend(reversed(step.body))
            elif isinstance(step, Instruction):
                yield step


def live_registers(program: Program, without: Collection[str] = ()) -> int:
    """The largest number of registers live at once, at any point of the program.

    >>> product = Program(8, (
    ...     Instruction("load_float", "a", (Address("x"),)),
    ...     Instruction("load_float", "b", (Address("x", 8),)),
    ...     Instruction("fmadd", "a", ("a", "b", "b")),
    ...     Instruction("store", "", (Address("y"), "a")),
    ... ))
    >>> live_registers(product)
    2

    Args:
        program: any.
        without: registers that are not counted, such as constants if a processor reads them from memory.

    Source: errata Q8.
    """
    return _before(program.body, frozenset(), frozenset(without))[1]


def _before(steps: tuple[Step, ...], live: frozenset[str], without: frozenset[str]) -> tuple[frozenset[str], int]:
    """The registers live before these steps if `live` are live after them, and the largest number live in between."""
    most = len(live - without)
    for step in reversed(steps):
        if isinstance(step, Instruction):
            after = live | {step.target} if step.target else live
            live = (live - {step.target}) | frozenset(step.reads())
            most = max(most, len(after - without), len(live - without))
        elif isinstance(step, Loop):
            following, inside = _before(step.body, live, without)
            while not following <= live:  # the body also follows itself
                live |= following
                following, inside = _before(step.body, live, without)
            most = max(most, inside)
    return live, most
