"""Theorems: statements about kernels, formats and layouts that are proved for all values, or refuted with numbers.

A `Theorem` is a value: what it says, what it is about, and how it is proved. Its proof has one of three outcomes. A
`Proof` covers every value that the statement speaks of. A `Refutation` has numbers for which the statement is false. A
statement that is neither proved nor refuted is *undecided*, which counts as a failure.

What is refuted can be run again on its numbers, without the solver (`Theorem.run`): the same program, or function, is
right on them or wrong.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

from lowbit.contract.checks import check_integer

Kind = Literal[
    "places",
    "layouts",
    "formats",
    "storage",
    "products",
    "memory",
    "roundings",
    "instructions",
    "casts",
    "encoding",
    "steps",
    "graphs",
    "offload",
]
KINDS: tuple[Kind, ...] = get_args(Kind)

Way = Literal["solver", "enumeration"]
WAYS: tuple[Way, ...] = ("solver", "enumeration")
"""How a proof covers all values: symbolically all at once, or one by one."""


@dataclass(frozen=True)
class Proof:
    """The statement holds.

    Attributes:
        steps: the number of conditions shown to be impossible, or of values enumerated.
        by: the method.
    """

    steps: int
    by: Way = "solver"


def whole(numbers: "Numbers", name: str, most: int | None = None) -> int:
    """An integer of at least 0 among the numbers of a refutation.

    Raises:
        ArgumentError: there is none of this name, it is not an integer, or it is out of range.
    """
    number = numbers.get(name)
    check_integer(name, number, 0, most)
    assert isinstance(number, int)
    return number


@dataclass(frozen=True)
class Refutation:
    """The statement is false.

    Attributes:
        reason: what is wrong, as a sentence.
        numbers: the values, each with a name, as numbers or text.
    """

    reason: str
    numbers: "Numbers" = field(default_factory=dict)


@dataclass(frozen=True)
class Undecided:
    """Neither a proof nor a refutation was found."""

    reason: str


Outcome: TypeAlias = Proof | Refutation | Undecided
Numbers: TypeAlias = Mapping[str, int | float | str]


@dataclass(frozen=True)
class Theorem:
    """A statement and how it is decided.

    Attributes:
        kind: which statement of the documentation page it is.
        name: its subject: a kernel, a format, a layout.
        statement: what is claimed, in mathematics.
        subject: a complete text of its subject: a program, or the source of a function. A certificate covers this text.
        decide: proves or refutes it.
        run: runs the subject on the numbers of a refutation and returns the error that they show, or None. It raises an
            exception if the numbers are not those of a refutation of this theorem.
    """

    kind: Kind
    name: str
    statement: str
    subject: Callable[[], str]
    decide: Callable[[], Outcome]
    run: Callable[[Numbers], Refutation | None]

    @property
    def id(self) -> str:
        """Its name on the command line."""
        return f"{self.kind}/{self.name}"
