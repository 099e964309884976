"""A micro-kernel as a value: instructions over named registers, and loops around them.

There is no C++ here and no numpy. A program is a tuple of steps; `lowbit_cppyy.lowering` prints it as C++ for an
instruction set and `lowbit_cppyy.interpreter` runs it, so both read the same thing.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from lowbit_cppyy.vocabulary import VOCABULARY


@dataclass(frozen=True)
class Address:
    """Element `offset` (of 4 bytes) from where a pointer stands now: ``w + 32`` or, read as a scalar, ``x[5]``."""

    pointer: str
    offset: int = 0


Argument: TypeAlias = str | int | float | Address
"""The name of a register, a constant, or a place in memory."""


@dataclass(frozen=True)
class Instruction:
    """``target = word(arguments)``; the target is empty where the word gives nothing."""

    word: str
    target: str
    arguments: tuple[Argument, ...]

    def __post_init__(self) -> None:
        word = VOCABULARY[self.word]
        assert (self.target == "") == (word.gives == "none"), self
        assert len(self.arguments) == len(word.takes), self


@dataclass(frozen=True)
class Advance:
    """Move a pointer on by `step` elements."""

    pointer: str
    step: int


@dataclass(frozen=True)
class Loop:
    """Repeat `body` with `index` = 0, 1, … below `count`, which the kernel is given when it is called."""

    index: str
    count: str
    body: tuple["Step", ...]


@dataclass(frozen=True)
class Comment:
    """A line for whoever reads the kernel."""

    text: str


Step: TypeAlias = Instruction | Advance | Loop | Comment


@dataclass(frozen=True)
class Program:
    """A micro-kernel for registers of `lanes` lanes: `rows` rows of x times `columns` columns of W."""

    bits: int
    lanes: int
    rows: int
    columns: int
    panel: int
    body: tuple[Step, ...]

    def instructions(self) -> Iterator[Instruction]:
        """Every instruction as it is written, each once, whatever loop it stands in."""
        pending = list(reversed(self.body))
        while pending:
            step = pending.pop()
            if isinstance(step, Loop):
                pending.extend(reversed(step.body))
            elif isinstance(step, Instruction):
                yield step
