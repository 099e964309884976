"""Defects of stored matrices that no single result shows: what they answer depends on other calls, or its numbers are
right and its type is not. They measure the suite, and diagnose nobody's kernel."""

from typing import Any

import numpy as np

from lowbit.arrays import Array
from lowbit.numbers.floats import rounded
from lowbit.tensor_formats.stored import Stored
from lowbit_conformance.defects.defect import MOVES, arithmetical
from lowbit_conformance.defects.stored import PRODUCTS, dequantized, multiplied, of_products


def one_type(x: Any, weights: Stored, result: Any = "float32") -> Array:
    """float32, whatever was asked for."""
    return multiplied(lambda given: given.terms, x, weights, "float32")


class Remembering:
    """Adds a little of the result of the call before."""

    def __init__(self) -> None:
        self.before = 0.0

    def __call__(self, x: Any, weights: Stored, result: Any = "float32") -> Array:
        right = multiplied(lambda given: given.terms, x, weights, "float32").astype(np.float64)
        added, self.before = right + self.before, float(np.nan_to_num(right).reshape(-1)[0]) + 1.0
        return rounded(added, result)


DEFECTS = (
    arithmetical(
        "stored-result-in-float32",
        "The result is float32, whatever type was asked for.",
        # the lattice of stored activations asks for float32 only
        of_products("C2") + " linear.gemv/C1 linear.gemm/C1 formats.dequantize/C1 formats.dequantize/C2",
        dict.fromkeys(PRODUCTS, one_type)
        | {"formats.dequantize": lambda weights, result="float32": dequantized(lambda given: given.terms, weights)},
    ),
    arithmetical(
        "stored-call-before-added",
        "A little of the result of the call before is added.",
        of_products("C1 C2 C3"),
        {name: Remembering() for name in PRODUCTS},
        verdicts=MOVES,
    ),
)
