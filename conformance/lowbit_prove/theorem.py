"""Theorems: statements about kernels, formats and layouts that are proved for all values, or refuted with numbers.

A `Theorem` is a value: what it says, what it is about, and how it is proved. Its proof has one of three outcomes. A
`Proof` covers every value that the statement speaks of. A `Refutation` has numbers for which the statement is false. A
statement that is neither proved nor refuted is *undecided*, which counts as a failure.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

Kind = Literal[
    "places", "layouts", "formats", "storage", "products", "memory", "roundings", "casts", "steps", "offload"
]
KINDS: tuple[Kind, ...] = get_args(Kind)

Way = Literal["solver", "enumeration"]
WAYS: tuple[Way, ...] = ("solver", "enumeration")
"""How a proof covers all values: all at once, or one by one."""


@dataclass(frozen=True)
class Proof:
    """The statement holds.

    Attributes:
        steps: conditions that were shown to be impossible, or values that were enumerated.
        by: how.
    """

    steps: int
    by: Way = "solver"


@dataclass(frozen=True)
class Refutation:
    """The statement is false.

    Attributes:
        reason: what is wrong, in a sentence.
        numbers: for which values: each with a name, as numbers or text.
    """

    reason: str
    numbers: Mapping[str, int | float | str] = field(default_factory=dict)


@dataclass(frozen=True)
class Undecided:
    """Neither a proof nor a refutation was found."""

    reason: str


Outcome: TypeAlias = Proof | Refutation | Undecided


@dataclass(frozen=True)
class Theorem:
    """A statement and how it is decided.

    Attributes:
        kind: which of the statements of the docs' page it is.
        name: what it is about: a kernel, a format, a layout.
        statement: what is claimed, in mathematics.
        subject: a text that says all about its subject: a program, or the source of a function. A certificate is for
            this text.
        decide: proves or refutes it.
    """

    kind: Kind
    name: str
    statement: str
    subject: Callable[[], str]
    decide: Callable[[], Outcome]

    @property
    def id(self) -> str:
        """By which the command line names it."""
        return f"{self.kind}/{self.name}"
