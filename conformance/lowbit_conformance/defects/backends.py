"""Backends made of defects: right in everything except one mistake.

What a defect does not spoil is computed by `steps` for products with quantised weights, and for everything else by the
reference, which in the host process only backends of this bank may call.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from lowbit.arrays import F32
from lowbit.backend import PRODUCTS, Backend, Capabilities, Declaration, PreparedLinear
from lowbit.backend.declarations import LIMITS
from lowbit.backend.reference import STORED_PRODUCTS, ReferenceBackend, in_type
from lowbit.contract.operation import Promise
from lowbit.contract.rounding import Arithmetic, Form, Roundings, any_order
from lowbit.linear.integer_bounds import integer_loop
from lowbit.operations import OPERATIONS
from lowbit.quantization.affine import QuantizedMatrix
from lowbit.quantization.bfp import Blocks
from lowbit_conformance.defects import integers, steps
from lowbit_conformance.defects.defect import Defect, Function


def right(operation: str) -> Function:
    """A right function for an operation, which is fast where the reference is slow."""
    own = steps.RIGHT.operations() | {integers.OPERATION: integers.product}
    return own[operation] if operation in own else OPERATIONS[operation].reference


def rounded(operation: str, result: Any, inputs: str = "float32") -> Any:
    """The result in a backend's type: that of the inputs if the reference returns float64."""
    if OPERATIONS[operation].promise is not Promise.BOUNDED or not isinstance(result, np.ndarray):
        return result
    return in_type(result, inputs) if result.dtype == np.float64 or inputs == "float32" else result


class BankLinear(PreparedLinear):
    """Weights and products with the defect."""

    def __init__(self, owner: "BankBackend", matrix: QuantizedMatrix) -> None:
        super().__init__(owner.name, matrix.rows, matrix.columns, matrix.nbytes)
        self._owner, defect = owner, owner.defect
        own = {name: getattr(matrix, name).copy() for name in ("words", "scales", "zeros")}  # the caller may reuse his
        self._matrix = replace(matrix, **own)
        self._whole = bool(defect.wrong) and defect.weights is None  # a function of x and the matrix
        weigh = defect.weights or steps.RIGHT.weights
        self._weights = np.zeros((0, 0), np.float32) if self._whole else weigh(self._matrix)

    def _qgemv(self, x: F32, out: F32) -> None:
        self._multiply("linear.qgemv", x, out)

    def _qgemm(self, x: F32, out: F32) -> None:
        self._multiply("linear.qgemm", x, out)

    def _qgemm_bfp(self, x: Blocks, out: F32) -> None:
        self._multiply(integers.OPERATION, x, out)

    def _multiply(self, operation: str, x: F32 | Blocks, out: F32) -> None:
        out[...] = self._product(operation, x)

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
        defect: the defect.
    """

    def __init__(self, defect: Defect) -> None:
        self.defect, self.name = defect, f"bank:{defect.name}"

    def roundings(self) -> Roundings:
        """The roundings of its sums that it declares."""
        return any_order

    def capabilities(self) -> Capabilities:
        operations = {}
        for name in self.defect.operations:
            form: Form = "dequantised" if name in steps.PRODUCTS or name == "hqq.qgemv" else "direct"
            bounded = OPERATIONS[name].promise is Promise.BOUNDED
            arithmetic = Arithmetic(form, self.defect.accumulator, self.roundings()) if bounded else None
            if name in STORED_PRODUCTS:
                arithmetic = Arithmetic("dequantised", "float64", self.roundings(), "exact")
            if name == integers.OPERATION:
                arithmetic = Arithmetic("integer", "float64", integer_loop(1))
            limits = {"inputs": self.defect.inputs} if "inputs" in LIMITS.get(name, ()) else {}
            operations[name] = Declaration(limits, arithmetic)
        return Capabilities(operations)

    def _prepare(self, matrix: QuantizedMatrix) -> PreparedLinear:
        return BankLinear(self, matrix)

    def _hook(self, operation: str) -> Callable[..., Any]:
        wrong = self.defect.wrong.get(operation)
        if operation in PRODUCTS and wrong is None:
            return super()._hook(operation)
        if operation in STORED_PRODUCTS:
            return wrong or ReferenceBackend()._hook(operation)
        function = wrong or right(operation)

        def compute(*arguments: Any, **choices: Any) -> Any:
            inputs = OPERATIONS[operation].result_type(*arguments, **choices)
            return rounded(operation, function(*arguments, **choices), inputs)

        return compute


class Control(Defect):
    """No defect, in any operation."""

    @property
    def operations(self) -> tuple[str, ...]:
        return tuple(OPERATIONS)


CONTROL = Control(
    "none",
    "No mistake: this is the control, which must pass.",
    (),
    verdicts=(),
    inputs=("float32", "float16", "bfloat16"),
)
