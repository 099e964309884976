"""Backends made of habits: they compute what is right, and call as no backend may."""

from collections.abc import Callable
from typing import Any

import numpy as np

from kills.everywhere import CHECKS_NOTHING
from kills.habits import Call, Habit
from lowbit.arrays import F32
from lowbit.backend import PRODUCTS, Backend, Capabilities, PreparedLinear
from lowbit.operations import OPERATIONS
from lowbit.quantization.affine import QuantizedMatrix
from lowbit.quantization.bfp import Blocks
from lowbit_conformance.defects import steps
from lowbit_conformance.defects.backends import BankBackend, BankLinear, right
from lowbit_conformance.defects.defect import Function


class HabitBackend(BankBackend):
    """A backend with one habit.

    Attributes:
        habit: the one.
        state: what it remembers between calls.
    """

    def __init__(self, habit: Habit) -> None:
        super().__init__(habit)
        self.habit, self.state = habit, dict[str, Any]()

    def roundings(self) -> Callable[[int, int], int]:
        return self.habit.roundings or super().roundings()

    def capabilities(self) -> Capabilities:
        return Capabilities(super().capabilities().operations, concurrent=self.habit.concurrent)

    def _prepare(self, matrix: QuantizedMatrix) -> PreparedLinear:
        return HabitLinear(self, matrix)

    def _hook(self, operation: str) -> Callable[..., Any]:
        compute = super()._hook(operation)
        if operation in PRODUCTS:  # the habit is in the prepared matrix
            return compute

        def call(*arguments: Any, **choices: Any) -> Any:
            def answer() -> Any:
                return compute(*arguments, **choices)

            return self.habit.act(Call(operation, arguments, None, answer, self.state))

        return call


class HabitLinear(BankLinear):
    """Right weights, prepared and multiplied with the habit."""

    def __init__(self, owner: HabitBackend, matrix: QuantizedMatrix) -> None:
        super().__init__(owner, matrix)
        self._habitual = owner
        if owner.habit.preparing is not None:
            self._weights = owner.habit.preparing(matrix, steps.RIGHT.weights, owner.state)

    def _multiply(self, operation: str, x: F32 | Blocks, out: F32) -> None:
        def answer() -> F32:
            out[...] = self._product(operation, x)
            return out

        self._habitual.state["matrix"] = self._matrix
        self._habitual.habit.act(Call(operation, (x,), out, answer, self._habitual.state))


class Unchecked(HabitBackend):
    """Looks at no argument, and goes to work at once."""

    def run(self, operation: str, *arguments: Any, **choices: Any) -> Any:
        return permissive(right(operation), *arguments, **choices)

    def open(self, operation: str, *arguments: Any, **choices: Any) -> Any:
        return AnySteps(operation, arguments)

    def prepare(self, matrix: QuantizedMatrix) -> PreparedLinear:
        return UncheckedLinear(self, matrix)


class UncheckedLinear(HabitLinear):
    """Takes any x, and writes to any out."""

    def qgemv(self, x: Any, out: Any = None) -> Any:
        return self._any(x, out, (self.columns,))

    def qgemm(self, x: Any, out: Any = None) -> Any:
        return self._any(x, out, (len(x), self.columns))

    def qgemm_bfp(self, x: Any, out: Any = None) -> Any:
        return self._any(x if isinstance(x, np.ndarray) else np.zeros((1, self.rows)), out, (1, self.columns))

    def _any(self, x: Any, out: Any, shape: tuple[int, ...]) -> Any:
        given = np.zeros(shape, np.float32) if out is None else out
        numbers = np.zeros(self.rows * (len(x) if len(shape) == 2 else 1))
        flat = np.asarray(x, np.float64).reshape(-1)[: numbers.size]
        numbers[: flat.size] = flat
        result = numbers.reshape(-1, self.rows) @ self._weights
        given.setflags(write=True) if given.base is None else None
        with np.errstate(all="ignore"):
            given.reshape(-1)[: result.size] = result.reshape(-1)[: given.size]
        return given


class AnySteps:
    """The steps of a session that takes any arguments."""

    def __init__(self, operation: str, arguments: tuple[Any, ...]) -> None:
        self._operation, self._arguments = operation, arguments
        try:
            self._steps = OPERATIONS[operation].reference(*arguments)
        except Exception:
            self._steps = None

    def step(self, *arguments: Any) -> Any:
        try:
            return self._steps.step(*arguments)
        except Exception:
            return ()

    def close(self) -> None:
        """Nothing to give back."""


def permissive(function: Function, *arguments: Any, **choices: Any) -> Any:
    """The result; where there is none, a number."""
    try:
        return function(*arguments, **choices)
    except Exception:
        return np.zeros(1, np.float32)


def made_of(habit: Habit) -> Backend:
    """A backend with this habit."""
    return Unchecked(habit) if habit is CHECKS_NOTHING else HabitBackend(habit)
