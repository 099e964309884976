"""Backends made of defects: right in everything but the one thing.

What a defect does not spoil is computed by `steps` for products with quantised weights, and for everything else by the
reference, which in the host process only backends of this bank may call.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from lowbit.arrays import F32
from lowbit.backend import PRODUCTS, Backend, Capabilities, Declaration, PreparedLinear
from lowbit.contract.operation import Promise
from lowbit.contract.rounding import Arithmetic, any_order
from lowbit.linear.integer_bounds import integer_loop
from lowbit.operations import OPERATIONS
from lowbit.quantization.affine import QuantizedMatrix
from lowbit.quantization.bfp import Blocks
from lowbit_conformance.defects import integers, steps
from lowbit_conformance.defects.defect import Call, Defect, Function


def right(operation: str) -> Function:
    """A right function of an operation, quick where the reference is slow."""
    own = steps.RIGHT.operations() | {integers.OPERATION: integers.product}
    return own[operation] if operation in own else OPERATIONS[operation].reference


def rounded(operation: str, result: Any) -> Any:
    """The result as a backend gives it: float32 where the reference answers in float64."""
    if OPERATIONS[operation].promise is not Promise.BOUNDED or not isinstance(result, np.ndarray):
        return result
    with np.errstate(over="ignore"):
        return result.astype(np.float32)


class BankLinear(PreparedLinear):
    """Weights as the defect makes them, multiplied as it multiplies."""

    def __init__(self, owner: "BankBackend", matrix: QuantizedMatrix) -> None:
        super().__init__(owner.name, matrix.rows, matrix.columns, matrix.nbytes)
        self._owner, defect = owner, owner.defect
        own = {name: getattr(matrix, name).copy() for name in ("words", "scales", "zeros")}  # the caller may reuse his
        self._matrix = replace(matrix, **own)
        self._whole = bool(defect.wrong) and defect.weights is None  # a function of x and the matrix
        weigh = defect.weights or steps.RIGHT.weights
        if defect.preparing is not None:
            self._weights = defect.preparing(matrix, weigh, owner.state)
        else:
            self._weights = np.zeros((0, 0), np.float32) if self._whole else weigh(self._matrix)

    def _qgemv(self, x: F32, out: F32) -> None:
        self._multiply("linear.qgemv", x, out)

    def _qgemm(self, x: F32, out: F32) -> None:
        self._multiply("linear.qgemm", x, out)

    def _qgemm_bfp(self, x: Blocks, out: F32) -> None:
        self._multiply(integers.OPERATION, x, out)

    def _multiply(self, operation: str, x: F32 | Blocks, out: F32) -> None:
        defect = self._owner.defect
        if defect.habit is None:
            out[...] = self._product(operation, x)
            return

        def right() -> F32:
            out[...] = self._product(operation, x)
            return out

        self._owner.state["matrix"] = self._matrix
        defect.habit(Call(operation, (x,), out, right, self._owner.state))

    def _product(self, operation: str, x: F32 | Blocks) -> Any:
        if isinstance(x, Blocks):
            function = self._owner.defect.wrong.get(operation) or right(operation)
            return rounded(operation, function(x, self._matrix))
        if self._whole:
            return rounded(operation, self._owner.defect.wrong[operation](x, self._matrix))
        multiply = self._owner.defect.product or steps.product
        return multiply(x if operation == "linear.qgemm" else x[np.newaxis], self._weights).reshape(
            (len(x), -1) if operation == "linear.qgemm" else -1
        )


class BankBackend(Backend):
    """A backend with one defect.

    Attributes:
        defect: the one; None for the control, which declares every operation and must pass.
        state: what it remembers between calls.
    """

    def __init__(self, defect: Defect | None) -> None:
        self.defect = defect or CONTROL
        self.name, self.state = f"bank:{self.defect.name}", dict[str, Any]()

    def capabilities(self) -> Capabilities:
        roundings = self.defect.roundings or any_order
        operations = {}
        for name in self.defect.operations:
            form = "dequantised" if name in steps.PRODUCTS or name == "hqq.qgemv" else "direct"
            bounded = OPERATIONS[name].promise is Promise.BOUNDED
            arithmetic = Arithmetic(form, self.defect.accumulator, roundings) if bounded else None  # type: ignore[arg-type]  # a str that is a form
            if name == integers.OPERATION:
                arithmetic = Arithmetic("integer", "float64", integer_loop(1))
            operations[name] = Declaration(arithmetic=arithmetic)
        return Capabilities(operations, concurrent=self.defect.concurrent)

    def _prepare(self, matrix: QuantizedMatrix) -> PreparedLinear:
        return BankLinear(self, matrix)

    def _hook(self, operation: str) -> Callable[..., Any]:
        wrong, habit = self.defect.wrong.get(operation), self.defect.habit
        if operation in PRODUCTS and wrong is None:
            return super()._hook(operation)
        function = wrong or right(operation)

        def compute(*arguments: Any, **choices: Any) -> Any:
            return rounded(operation, function(*arguments, **choices))

        if habit is None or wrong is not None:
            return compute

        def call(*arguments: Any, **choices: Any) -> Any:
            def answer() -> Any:
                return compute(*arguments, **choices)

            return habit(Call(operation, arguments, None, answer, self.state))

        return call


class Unchecked(BankBackend):
    """Looks at no argument, and goes to work at once."""

    def run(self, operation: str, *arguments: Any, **choices: Any) -> Any:
        return permissive(right(operation), *arguments, **choices)

    def open(self, operation: str, *arguments: Any, **choices: Any) -> Any:
        return AnySteps(operation, arguments)

    def prepare(self, matrix: QuantizedMatrix) -> PreparedLinear:
        return UncheckedLinear(self, matrix)


class UncheckedLinear(BankLinear):
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


CONTROL = Defect(
    "none", "No mistake: the control, which must pass.", (), verdicts=(), habit=None, habitual=tuple(OPERATIONS)
)
