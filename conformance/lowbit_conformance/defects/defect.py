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
"""A wrong operation: it takes the arguments of the reference and returns a result of the same kind."""


Kind = TypeVar("Kind")
Wrong = TypeVar("Wrong", bound=Callable[..., Any])

WRONG = ("WRONG",)
MOVES = ("WRONG", "NONDETERMINISTIC")
"""The verdicts on a result that depends on something it must not depend on."""

COMMON = "common"
"""For `Defect.seen`: a mistake so common that it needs no source."""


@dataclass(frozen=True, eq=False)
class Defect:
    """One mistake.

    Attributes:
        name: in kebab-case; never changed: ``nibbles-swapped``.
        cause: one line.
        clauses: full ids of the clauses and habits that it breaks.
        seen: where it was seen: the address of an issue, an entry of the errata for what a paper prints, or `COMMON`.
        verdicts: the verdicts that a report may give.
        wrong: for each operation, the function with the mistake.
        weights: for a product with quantised weights, the function that makes weights from a matrix, once for many
            products.
        product: for the same, the function that multiplies.
        accumulator: the declared format of running sums.
        inputs: the declared types of arrays, for operations with several.
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
        """The operations that have the mistake."""
        return tuple(self.wrong)


def arithmetical(
    name: str,
    cause: str,
    clauses: str,
    wrong: Mapping[str, Function],
    seen: str = COMMON,
    verdicts: tuple[str, ...] = WRONG,
) -> Defect:
    """A defect in the result; `clauses` are separated by spaces."""
    return Defect(name, cause, tuple(clauses.split()), seen, verdicts, wrong)


class Declaring:
    """Declares defects of one kind, and adds them to a module's list.

    It decorates a function whose name is that of the defect and whose docstring is the cause. Functions made by another
    function have no name and docstring; `add` takes these as arguments.
    """

    def __init__(self, into: list[Defect], make: Callable[..., Defect]) -> None:
        """`make` takes a name, a cause, clauses, the wrong function, and other attributes."""
        self._into, self._make = into, make

    def __call__(self, clauses: str, *more: Any, **rest: Any) -> Callable[[Wrong], Wrong]:
        def declare(wrong: Wrong) -> Wrong:
            self.add(_named(wrong.__name__), " ".join((wrong.__doc__ or "").split()), clauses, wrong, *more, **rest)
            return wrong

        return declare

    def add(self, name: str, cause: str, clauses: str, wrong: Any, *more: Any, **rest: Any) -> None:
        """Declare a wrong function under a name."""
        self._into.append(self._make(name, cause, clauses, wrong, *more, **rest))


def _named(name: str) -> str:
    """The name of a defect, from that of its function or class.

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
        into: the list to which they are added.
        operation: its id.
        made: makes the wrong operation from the declared function, which may be one of its steps.
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
    """A dataclass of lowbit with fields that no right backend gives, constructed without checks."""
    made = object.__new__(kind)
    for name, value in fields.items():
        object.__setattr__(made, name, value)
    return made
