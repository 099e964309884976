"""The bounds hold where they must and are tight enough to mean something."""

import numpy as np
import pytest

from lowbit.arrays import F32
from lowbit.contract.rounding import Arithmetic, Form, any_order, gamma, one_loop
from lowbit.errors import ArgumentError
from lowbit.linear.bounds import linear_bound
from lowbit.linear.linear import qgemv
from lowbit.quantization.affine import CONVENTIONS, Convention, QuantizedMatrix, dequantize, quantize
from lowbit.quantization.packing import unpack

ROWS, GROUP = 256, 64


def problem(convention: Convention) -> tuple[F32, QuantizedMatrix]:
    rng = np.random.default_rng(3)
    weights = rng.normal(size=(ROWS, 200)).astype(np.float32)
    x = rng.normal(size=ROWS).astype(np.float32)
    return x, quantize(weights, bits=4, group_size=GROUP, convention=convention)


def in_one_loop(x: F32, matrix: QuantizedMatrix, form: Form) -> F32:
    """The worst legal order of each form: float32, one product after the other."""
    one = np.float32
    y = np.zeros(matrix.columns, np.float32)
    if form == "dequantised":
        for x_k, row in zip(x, dequantize(matrix), strict=True):
            y += x_k * row
        return y
    codes, center = unpack(matrix.words, matrix.bits).astype(np.float32), one(2 ** (matrix.bits - 1))
    for group in range(matrix.groups):
        rows = matrix.group_rows(group)
        s, z = matrix.scales[group].astype(np.float32), matrix.zeros[group].astype(np.float32)
        o = z if matrix.convention == "minimum" else -s * z
        shift = center if form == "offset" else one(0)
        accumulator, x_sum = np.zeros(matrix.columns, np.float32), one(0)
        for x_k, q in zip(x[rows], codes[rows], strict=True):
            accumulator += x_k * (q - shift)
            x_sum += x_k
        y += s * accumulator
        y += (o + s * shift) * x_sum
    return y


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("form", ["dequantised", "factored", "offset"])
def test_a_float32_loop_stays_within(form: Form, convention: Convention) -> None:
    """Each form computed in float32 lies within its bound, and uses a thousandth of it or more: no empty promise."""
    x, matrix = problem(convention)
    exact = qgemv(x, matrix)
    # The offset form shifts its offset too, which is one product and one sum more.
    roundings = {"dequantised": any_order, "factored": one_loop, "offset": lambda k, g: one_loop(k, g) + 2}[form]
    bound = linear_bound(x, matrix, Arithmetic(form, "float32", roundings), exact)
    share = np.abs(in_one_loop(x, matrix, form) - exact) / bound.limit
    assert 1e-3 < share.max() < 1


def test_a_finer_accumulator_has_a_finer_bound() -> None:
    """A float64 accumulator leaves hardly more than the rounding of the result to float32."""
    x, matrix = problem("minimum")
    exact = qgemv(x, matrix)
    fine = linear_bound(x, matrix, Arithmetic("factored", "float64", one_loop), exact)
    assert (fine.limit <= 2.0**-24 * np.abs(exact) + 2.0**-44 * fine.gauge).all()


def test_one_wrong_code_is_outside() -> None:
    """On a shallow matrix a code that is off by one already leaves the bound."""
    x, matrix = problem("minimum")
    exact = qgemv(x, matrix)
    bound = linear_bound(x, matrix, Arithmetic("factored", "float32", one_loop), exact)
    step = np.abs(x).max() * matrix.scales[0].astype(np.float64)
    assert (step > bound.limit).all()


def test_declarations_that_mean_nothing_are_refused() -> None:
    """A tenth of the gauge is the limit; no rounding at all is impossible; unknown forms have no derivation."""
    x, matrix = problem("minimum")
    exact = qgemv(x, matrix)
    for roundings in (2_000_000, 0):
        with pytest.raises(ArgumentError, match="declared roundings"):
            linear_bound(x, matrix, Arithmetic("factored", "float32", lambda k, g, n=roundings: n), exact)  # type: ignore[misc]  # a default argument binds the loop variable
    with pytest.raises(ArgumentError, match="form is 'magic'"):
        Arithmetic("magic")  # type: ignore[arg-type]  # wrong on purpose
    assert gamma(1_500_000, 2.0**-24) < 0.1 < gamma(1_600_000, 2.0**-24)
