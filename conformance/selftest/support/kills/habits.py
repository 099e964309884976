"""What a habit is: a way of calling. Its numbers are right, and the call does what no call may do.

A habit names no mistake in a result, so the diagnosis of failures has no use for it, and it is not among the defects
that ship. It is there to measure the suite.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lowbit.arrays import F32
from lowbit.quantization.affine import QuantizedMatrix
from lowbit_conformance.defects.defect import COMMON, Declaring, Defect


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


PRODUCTS = ("linear.qgemv", "linear.qgemm")

Act = Callable[[Call], Any]
"""What a habit does around a right call; it returns what the call returns."""

Weigh = Callable[[QuantizedMatrix], F32]
Preparing = Callable[[QuantizedMatrix, Weigh, dict[str, Any]], F32]
"""What a product does when it is prepared: given the matrix, what makes weights of it, and the backend's memory."""


@dataclass(frozen=True, eq=False)
class Habit(Defect):
    """A defect in the way of calling.

    Attributes:
        act: what it does around a right call.
        preparing: of products, what it does when a matrix is prepared; None for what is right.
        habitual: its operations.
        everywhere: whether it is a habit of all operations, which each of its clauses must find.
        concurrent: whether the backend declares calls from several threads.
        roundings: what it declares of its sums, if not the truth.
        uses_reference: whether it needs the reference to compute with; what falls back silently must not have it.
    """

    act: Act = lambda call: call.right()
    preparing: Preparing | None = None
    habitual: tuple[str, ...] = ()
    everywhere: bool = False
    concurrent: bool = False
    roundings: Callable[[int, int], int] | None = None
    uses_reference: bool = True

    @property
    def operations(self) -> tuple[str, ...]:
        return self.habitual


def nothing(call: Call) -> Any:
    """A right call; the habit is elsewhere."""
    return call.right()


def _habit(
    name: str,
    cause: str,
    numbers: str,
    act: Act,
    verdicts: str,
    operations: tuple[str, ...] = PRODUCTS,
    seen: str = COMMON,
    **rest: Any,
) -> Habit:
    clauses = [clause for clause in numbers.split() if "/" in clause]
    clauses += [f"{operation}/{number}" for number in numbers.split() if "/" not in number for operation in operations]
    return Habit(name, cause, tuple(clauses), seen, tuple(verdicts.split()), act=act, habitual=operations, **rest)


def habits(into: list[Defect]) -> Declaring:
    """Declares habits of some operations, by numbers such as ``H1 H2`` or clauses in full, and by their verdicts."""
    return Declaring(into, _habit)


def preparations(into: list[Defect]) -> Declaring:
    """Declares habits of products when a matrix is prepared."""

    def make(
        name: str, cause: str, numbers: str, preparing: Preparing, verdicts: str, *more: Any, **rest: Any
    ) -> Habit:
        return _habit(name, cause, numbers, nothing, verdicts, *more, preparing=preparing, **rest)

    return Declaring(into, make)
