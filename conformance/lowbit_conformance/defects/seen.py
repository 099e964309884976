"""A call of a backend beside the right result, and the result of each defect."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from lowbit.arrays import Array
from lowbit.contract.operation import Promise
from lowbit.numbers.floats import rounded
from lowbit.operations import OPERATIONS
from lowbit.tensor_formats.stored import RESULTS
from lowbit_conformance.defects.defect import Defect
from lowbit_conformance.defects.likeness import count, floating, gives, identical, leaves, nearly, squares
from lowbit_conformance.defects.tolerances import limits_of

STORED = ("linear.gemv", "linear.gemm", "linear.gemm_cast")
LARGER = 2.0**-16  # of a result
UNITS: Mapping[str | None, float] = {"float16": 2.0**-10, "bfloat16": 2.0**-7}
ALIKE = 16.0
"""How many times smaller than the largest error of a result an error may be to be as informative."""


@dataclass(frozen=True, eq=False)
class Seen:
    """A call and its right result.

    Attributes:
        operation: its id.
        arguments: of the call; for a product, x and the matrix; for a stateful operation, those that open it.
        choices: arguments given by name.
        given: the returned result; for a stateful operation, the results of all steps.
        steps_taken: for a stateful operation, the arguments of each step.
        right: the reference's result.
        limits: how far a right result may differ from that; None if results are compared by their bits alone.
        wrong: how many elements are visibly wrong.
        unequal: how many elements differ in their bits from the right ones, rounded to their precision.
        exact: the reference's result before it is rounded to the type of a narrow result.
        call: the call itself.
    """

    operation: str
    arguments: tuple[Any, ...]
    choices: Mapping[str, Any]
    given: Any
    steps_taken: tuple[tuple[Any, ...], ...]
    right: Any
    limits: Array | None
    wrong: int
    unequal: int
    exact: Any = None
    call: Any = None

    @classmethod
    def of(cls, operation: str, call: Any) -> "Seen":
        """A call with `arguments`, `choices`, what was `given` and the `steps` of a session."""
        right = _answer(OPERATIONS[operation].reference, call.arguments, call.choices, call.steps)
        limits = limits_of(operation, call.arguments, call.choices, right)
        if limits is None and isinstance(right, np.ndarray) and floating(right):
            limits = np.zeros(right.shape)  # a mistake may be made with another rounding
        wrong = unequal = 0
        if not identical(call.given, right):
            wrong, unequal = count(call.given, right, limits), max(1, count(call.given, right, None))
            wrong = wrong if OPERATIONS[operation].promise is Promise.BOUNDED else unequal
        exact = right
        if narrow := narrow_type(operation, call.given):
            right = rounded(right, narrow).astype(np.float64)  # so that no rounding is a mistake
        given, arguments = compared(operation, call.given), tuple(compared(operation, each) for each in call.arguments)
        choices = {name: compared(operation, each) for name, each in call.choices.items()}
        return cls(operation, arguments, choices, given, call.steps, right, limits, wrong, unequal, exact, call)

    @property
    def size(self) -> int:
        """The number of numbers in the arguments, including those of all steps."""
        return sum(np.size(part) for value in (*self.arguments, *self.steps_taken) for _, part in leaves(value))

    @property
    def finite(self) -> bool:
        """Whether the given and the right result are finite."""
        return self.meant_finite and all_finite(self.given)

    @property
    def meant_finite(self) -> bool:
        """Whether the right result is finite."""
        return all_finite(self.right)

    @property
    def telling(self) -> int:
        """The number of elements that show which mistake was made: the visibly wrong ones, and those nearly as wrong.

        A bound may hide most of a vector whose errors are all similar.
        """
        arrays = isinstance(self.given, np.ndarray) and isinstance(self.right, np.ndarray)
        if not self.wrong or not arrays or self.given.shape != self.right.shape or not floating(self.given):
            return self.wrong
        with np.errstate(all="ignore"):
            errors = np.abs(self.given.astype(np.float64) - self.right.astype(np.float64))
        errors = errors[np.isfinite(errors)]
        return max(self.wrong, int((errors > errors.max(initial=0.0) / ALIKE).sum()))

    @property
    def unit(self) -> float:
        """For a defect's result: how much sums in another order may differ more, once rounded."""
        return UNITS.get(narrow_type(self.operation, getattr(self.call, "given", None)), LARGER)

    def explained(self, defect: Defect) -> bool:
        """Whether the defect gives this wrong result."""
        return gives(self.outcome(defect), self.given, self.right, self.limits, self.unit)

    @cached_property
    def on_the_lattice(self) -> bool:
        """Whether the right result needs no rounding; then a defect gives the returned bits, or nearly so."""
        if not (isinstance(self.exact, np.ndarray) and isinstance(self.call.given, np.ndarray)):
            return False
        name = self.call.given.dtype.name
        return name in RESULTS and bool((rounded(self.exact.astype(np.float64), name) == self.exact).all())

    def away(self, defect: Defect) -> float:
        """The distance of the result from the defect's, as a fraction of its distance from the right one.

        0 where rounding may explain it.
        """
        wrong = self.outcome(defect) if self.on_the_lattice else None
        if not isinstance(wrong, np.ndarray) or identical(self.given, wrong):
            return 0.0
        own, other = squares(self.given, wrong.astype(np.float32), self.right)
        return float(np.sqrt(own / other)) if other > 0 else 0.0

    def outcome(self, defect: Defect) -> Any:
        """The defect's result, rounded to the type of the returned one if that is narrow."""
        wrong = _outcome(defect, self.operation, self.arguments, self.choices, self.steps_taken)
        narrow = narrow_type(self.operation, getattr(self.call, "given", None))
        if narrow and isinstance(wrong, np.ndarray):
            return rounded(wrong.astype(np.float64), narrow).astype(np.float64)
        return wrong

    def underflows(self, defect: Defect) -> bool:
        """Whether the defect's result is nonzero before it is rounded to the type of the result."""
        wrong = _outcome(defect, self.operation, self.arguments, self.choices, self.steps_taken)
        return isinstance(wrong, np.ndarray) and bool(wrong.any())

    def unspoilt(self, defect: Defect) -> bool:
        """Whether the defect is also right here, or gives the returned result if the case did not judge the numbers."""
        wrong = self.outcome(defect)
        if self.wrong:
            return gives(wrong, self.given, self.right, self.limits, self.unit)
        if OPERATIONS[self.operation].promise is not Promise.BOUNDED:
            return identical(wrong, self.given)
        return nearly(wrong, self.right, self.limits) or (wrong is not None and identical(self.given, wrong))


def all_finite(value: Any) -> bool:
    """Whether no float of a value is NaN or infinite."""
    parts = [part for _, part in leaves(value)]
    return all(np.isfinite(part).all() for part in parts if isinstance(part, np.ndarray) and floating(part))


def narrow_type(operation: str, given: Any) -> Literal["float16", "bfloat16"] | None:
    """The type of a result of 16 bits of a product with a stored matrix."""
    name = given.dtype.name if operation in STORED and isinstance(given, np.ndarray) else ""
    return "float16" if name == "float16" else "bfloat16" if name == "bfloat16" else None


def compared(operation: str, value: Any) -> Any:
    """An argument or a result as defects of products with stored matrices compare them: 16-bit numbers as float32.

    Limits know the types; results that a defect gives are not rounded to them.
    """
    if operation not in STORED:
        return value
    if isinstance(value, np.ndarray) and value.dtype.name in RESULTS:
        return value.astype(np.float32)
    return "float32" if isinstance(value, str) and value in RESULTS else value


def _outcome(
    defect: Defect,
    operation: str,
    arguments: tuple[Any, ...],
    choices: Mapping[str, Any],
    steps_taken: tuple[tuple[Any, ...], ...],
) -> Any:
    """The defect's result; None if it fails."""
    try:
        return _answer(defect.wrong[operation], arguments, choices, steps_taken)
    except Exception:  # a defect may refuse what the reference accepts
        return None


def _answer(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    choices: Mapping[str, Any],
    steps_taken: tuple[tuple[Any, ...], ...],
) -> Any:
    with np.errstate(all="ignore"):
        result = function(*arguments, **choices)
        return tuple(result.step(*each) for each in steps_taken) if steps_taken else result
