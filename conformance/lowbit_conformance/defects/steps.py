"""Products with quantised weights, step by step: where a code lies, its group, its scale and zero, its weight, the sum.

Most defects of a kernel are a defect of one of these steps. Each is a function here, vectorised over the whole matrix;
`Steps` holds one of each, and a defect replaces one of them. What the replaced step takes part in is wrong then: the
place of a code also in packing, a scale in dequantising and in products, a sum in products alone.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lowbit.arrays import F32, I64, Array
from lowbit.quantization.affine import Convention, QuantizedMatrix
from lowbit.quantization.packing import CODES_PER_UNIT, Codes, Words
from lowbit_conformance.defects.defect import COMMON, WRONG, Declaring, Defect, Function
from lowbit_conformance.packing import pack, unpack

Indices = I64


def unit_of(bits: int) -> int:
    """Rows of a unit."""
    return CODES_PER_UNIT[bits]


def groups(matrix: QuantizedMatrix) -> Indices:
    """The group of each row."""
    return np.arange(matrix.rows) // matrix.group_size


def scales(matrix: QuantizedMatrix) -> F32:
    """Float32, G × N."""
    return matrix.scales.astype(np.float32)


def zeros(matrix: QuantizedMatrix) -> F32:
    """Float32, G × N: minima or zero-points."""
    return matrix.zeros.astype(np.float32)


def value(codes: F32, scale: F32, zero: F32, convention: Convention) -> F32:
    """The values of codes; all three arrays are K × N."""
    return scale * codes + zero if convention == "minimum" else scale * (codes - zero)


def finish(weights: F32, matrix: QuantizedMatrix) -> F32:
    """A last change of weights; here none."""
    return weights


def product(x: F32, weights: F32) -> Array:
    """T × K times K × N, summed in float64 and rounded once."""
    with np.errstate(invalid="ignore", over="ignore"):
        result: Array = (x.astype(np.float64) @ weights.astype(np.float64)).astype(np.float32)
    return result


@dataclass(frozen=True)
class Steps:
    """One function for each step; all are right unless replaced."""

    unpack: Callable[[Words, int], Array] = unpack
    pack: Callable[[Codes, int], Array] = pack
    groups: Callable[[QuantizedMatrix], Indices] = groups
    scales: Callable[[QuantizedMatrix], F32] = scales
    zeros: Callable[[QuantizedMatrix], F32] = zeros
    value: Callable[[F32, F32, F32, Convention], F32] = value
    finish: Callable[[F32, QuantizedMatrix], F32] = finish
    product: Callable[[F32, F32], Array] = product

    def weights(self, matrix: QuantizedMatrix) -> F32:
        """Float32, K × N."""
        codes, group = self.unpack(matrix.words, matrix.bits).astype(np.float32), self.groups(matrix)
        with np.errstate(over="ignore", invalid="ignore"):
            parts = codes, self.scales(matrix)[group], self.zeros(matrix)[group]
            return self.finish(self.value(*parts, matrix.convention), matrix)

    def operations(self) -> dict[str, Function]:
        """Each operation with quantised weights, made of these steps."""
        return {
            "packing.pack": self.pack,
            "packing.unpack": lambda words, bits: _as_codes(self.unpack(words, bits)),
            "affine.dequantize": self.weights,
            "linear.qgemv": lambda x, matrix: self.product(x[np.newaxis], self.weights(matrix))[0],
            "linear.qgemm": lambda x, matrix: self.product(x, self.weights(matrix)),
        }


RIGHT = Steps()
PRODUCTS = ("linear.qgemv", "linear.qgemm")
VALUES = ("affine.dequantize", *PRODUCTS)
AFFECTED = {"unpack": ("packing.unpack", *VALUES), "pack": ("packing.pack",), "product": PRODUCTS}
"""The clauses that depend on a step; for any other step `VALUES`."""


def _as_codes(codes: Array) -> Array:
    """Signed codes as the bytes that hold them."""
    return codes if codes.dtype == np.int8 else codes.astype(np.uint8)


def stepwise(
    name: str,
    cause: str,
    clauses: str,
    seen: str = COMMON,
    only: tuple[str, ...] = (),
    verdicts: tuple[str, ...] = WRONG,
    **replaced: Any,
) -> Defect:
    """A defect in the given steps, for the named operations only, if any are named."""
    steps = replace(RIGHT, **replaced)
    affected = only or tuple(dict.fromkeys(name for step in replaced for name in AFFECTED.get(step, VALUES)))
    wrong = {name: function for name, function in steps.operations().items() if name in affected}
    return Defect(
        name, cause, tuple(clauses.split()), seen, verdicts, wrong, weights=steps.weights, product=steps.product
    )


def of_step(
    into: list[Defect], step: str, only: tuple[str, ...] = (), made: Callable[[Any], Any] = lambda wrong: wrong
) -> Declaring:
    """Declares defects of one step.

    Args:
        into: where they are added.
        step: the attribute of `Steps`.
        only: the operations that are wrong, if not all that use the step.
        made: makes the wrong step from the declared function.
    """

    def make(
        name: str,
        cause: str,
        clauses: str,
        wrong: Any,
        seen: str = COMMON,
        only: tuple[str, ...] = only,
        verdicts: tuple[str, ...] = WRONG,
    ) -> Defect:
        return stepwise(name, cause, clauses, seen, only, verdicts, **{step: made(wrong)})

    return Declaring(into, make)
