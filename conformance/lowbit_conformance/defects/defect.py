"""What a defect is: a mistake that real kernels make, with a name, a cause, the clauses it breaks, and code.

The code is a set of functions, each with the signature of a reference function and a wrong result. The diagnosis runs
them on the arguments of a failing case, and `bank` makes a whole backend of them. A module declares its defects with
`Declaring`, in the list ``DEFECTS``.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from lowbit.arrays import F32, Array
from lowbit.contract.rounding import Accumulator
from lowbit.quantization.affine import QuantizedMatrix

Function = Callable[..., Any]
"""Of an operation: the arguments of its reference, and a result of the same kind."""


Kind = TypeVar("Kind")
Wrong = TypeVar("Wrong", bound=Callable[..., Any])

WRONG = ("WRONG",)
MOVES = ("WRONG", "NONDETERMINISTIC")
"""The verdicts on a result that changes with what it must not depend on."""

COMMON = "common"
"""For `Defect.seen`: a mistake so common that it needs no source."""


@dataclass(frozen=True, eq=False)
class Defect:
    """One mistake.

    Attributes:
        name: in kebab-case; it never changes: ``nibbles-swapped``.
        cause: one line.
        clauses: full ids of the clauses and habits that it breaks.
        seen: where it was seen: the address of an issue, a ruling of the errata for what a paper prints, or `COMMON`.
        verdicts: the words that may name it in a report.
        wrong: for each operation the function that makes the mistake.
        weights: of a product with quantised weights, what makes weights of a matrix, once for many products.
        product: of the same, what multiplies them.
        accumulator: the format of running sums that it declares.
        inputs: the types of arrays that it declares, of operations that have several.
    """

    name: str
    cause: str
    clauses: tuple[str, ...]
    seen: str = COMMON
    verdicts: tuple[str, ...] = WRONG
    wrong: Mapping[str, Function] = field(default_factory=dict)
    weights: Callable[[QuantizedMatrix], F32] | None = None
    product: Callable[[F32, F32], Array] | None = None
    accumulator: Accumulator = "float32"
    inputs: tuple[str, ...] = ("float32",)

    @property
    def operations(self) -> tuple[str, ...]:
        """The operations that it is made for."""
        return tuple(self.wrong)


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


class Declaring:
    """Declares defects of one kind, and adds them to the list of a module.

    It decorates a function whose name is that of the defect and whose docstring is the cause. What another function
    makes has no name and no docstring of its own; `add` takes them as arguments.
    """

    def __init__(self, into: list[Defect], make: Callable[..., Defect]) -> None:
        """`make` takes a name, a cause, clauses, what is wrong, and what a declaration says besides."""
        self._into, self._make = into, make

    def __call__(self, clauses: str, *more: Any, **rest: Any) -> Callable[[Wrong], Wrong]:
        def declare(wrong: Wrong) -> Wrong:
            self.add(_named(wrong.__name__), " ".join((wrong.__doc__ or "").split()), clauses, wrong, *more, **rest)
            return wrong

        return declare

    def add(self, name: str, cause: str, clauses: str, wrong: Any, *more: Any, **rest: Any) -> None:
        """Declare what is wrong under a name."""
        self._into.append(self._make(name, cause, clauses, wrong, *more, **rest))


def _named(name: str) -> str:
    """The name of a defect, by that of its function or class.

    >>> _named("zeros_in_float16"), _named("StepsIn16Bits")
    ('zeros-in-float16', 'steps-in-16-bits')
    """
    words = name if name.islower() else re.sub("(?<!^)(?=[A-Z])|(?<=[a-z])(?=[0-9])", "_", name).lower()
    return words.replace("_", "-")


def of_operation(
    into: list[Defect], operation: str, made: Callable[[Any], Function] = lambda wrong: wrong, **always: Any
) -> Declaring:
    """Declares defects of one operation, whose clauses are named by their numbers: ``C1 C3``.

    Args:
        into: where they are added.
        operation: its id.
        made: makes the wrong operation of what is declared, which may be one of its steps.
        always: other attributes of all of them.
    """

    def make(
        name: str,
        cause: str,
        numbers: str,
        wrong: Any,
        seen: str = COMMON,
        verdicts: tuple[str, ...] = WRONG,
        **declared: Any,
    ) -> Defect:
        clauses = " ".join(f"{operation}/{number}" for number in numbers.split())
        return replace(
            arithmetical(name, cause, clauses, {operation: made(wrong)}, seen, verdicts), **always | declared
        )

    return Declaring(into, make)


def unchecked(kind: type[Kind], **fields: object) -> Kind:
    """A dataclass of lowbit whose fields are what no right backend gives, past the checks of its construction."""
    made = object.__new__(kind)
    for name, value in fields.items():
        object.__setattr__(made, name, value)
    return made
