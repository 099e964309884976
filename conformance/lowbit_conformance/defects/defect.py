"""What a defect is: a mistake that real kernels make, with a name, a cause, the clauses it breaks, and code.

There are two sorts. An *arithmetical* defect is a set of functions, each with the signature of a reference function and
a wrong result; the diagnosis runs them on the arguments of a failing case, and the bank makes a whole backend of them.
A *habit* is a way of calling: the numbers are right, and the call does what no call may do.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from lowbit.arrays import F32, Array
from lowbit.contract.rounding import Accumulator
from lowbit.quantization.affine import QuantizedMatrix

Function = Callable[..., Any]
"""Of an operation: the arguments of its reference, and a result of the same kind."""


Kind = TypeVar("Kind")

WRONG = ("WRONG",)
MOVES = ("WRONG", "NONDETERMINISTIC")
"""The verdicts on a result that changes with what it must not depend on."""

COMMON = "common"
"""For `Defect.seen`: nobody needs to be cited for it."""


@dataclass
class Call:
    """One call of an operation, as a habit sees it.

    Attributes:
        operation: its id.
        arguments: as given; of a product only x, since the matrix was given before.
        out: the array that a product must write to; None for other operations.
        right: computes the right result, and for a product writes it to `out`.
        state: what the backend remembers between calls.
    """

    operation: str
    arguments: tuple[Any, ...]
    out: F32 | None
    right: Callable[[], Any]
    state: dict[str, Any]


Habit = Callable[[Call], Any]
Preparing = Callable[[QuantizedMatrix, Callable[[QuantizedMatrix], F32], dict[str, Any]], F32]
"""What a product does when it is prepared: given the matrix, what makes weights of it, and the backend's memory."""


@dataclass(frozen=True, eq=False)
class Defect:
    """One mistake.

    Attributes:
        name: in kebab-case, stable for ever: ``nibbles-swapped``.
        cause: one line.
        clauses: full ids of the clauses and habits that it breaks.
        seen: where it was seen: the address of an issue, a ruling of the errata for what a paper prints, or `COMMON`.
        verdicts: the words that may name it in a report.
        wrong: of an arithmetical defect, for each operation the function that makes the mistake.
        habit: of a habit, what it does around a right call.
        preparing: of a habit of products, what it does when a matrix is prepared.
        habitual: the operations of a habit.
        weights: of a product with quantised weights, what makes weights of a matrix, once for many products.
        product: of the same, what multiplies them.
        everywhere: whether it is a habit of all operations, which each of its clauses must find.
        concurrent: whether the backend declares calls from several threads.
        roundings: what it declares of its sums, if not the truth.
        accumulator: the format of running sums that it declares.
        uses_reference: whether it needs the reference to compute with; what falls back silently must not have it.
    """

    name: str
    cause: str
    clauses: tuple[str, ...]
    seen: str = COMMON
    verdicts: tuple[str, ...] = WRONG
    wrong: Mapping[str, Function] = field(default_factory=dict)
    habit: Habit | None = None
    preparing: Preparing | None = None
    habitual: tuple[str, ...] = ()
    weights: Callable[[QuantizedMatrix], F32] | None = None
    product: Callable[[F32, F32], Array] | None = None
    everywhere: bool = False
    concurrent: bool = False
    roundings: Callable[[int, int], int] | None = None
    accumulator: Accumulator = "float32"
    uses_reference: bool = True

    @property
    def operations(self) -> tuple[str, ...]:
        """The operations that it is made for."""
        return tuple(self.wrong) or self.habitual

    @property
    def arithmetical(self) -> bool:
        """Whether it shows in the result of every call, so that a result can be compared with it."""
        return bool(self.wrong)


def arithmetical(
    name: str,
    cause: str,
    clauses: str,
    wrong: Mapping[str, Function],
    seen: str = COMMON,
    verdicts: tuple[str, ...] = WRONG,
) -> Defect:
    """A defect of the result; `clauses` are separated by spaces."""
    return Defect(name, cause, tuple(clauses.split()), seen, verdicts, wrong)


def of(
    operation: str,
    name: str,
    cause: str,
    clauses: str,
    wrong: Function,
    seen: str = COMMON,
    verdicts: tuple[str, ...] = WRONG,
) -> Defect:
    """A defect of one operation, whose clauses are named by their numbers: ``C1 C3``."""
    full = " ".join(f"{operation}/{number}" for number in clauses.split())
    return arithmetical(name, cause, full, {operation: wrong}, seen, verdicts)


def unchecked(kind: type[Kind], **fields: object) -> Kind:
    """A dataclass of lowbit whose fields are what no right backend gives, past the checks of its construction."""
    made = object.__new__(kind)
    for name, value in fields.items():
        object.__setattr__(made, name, value)
    return made
