"""The clamped gated unit and the soft cap as operations: decimal arithmetic, honest ways in float32 and rough ones."""

from decimal import Decimal, localcontext

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from lowbit.arrays import F32
from lowbit.contract.rounding import Arithmetic
from lowbit.errors import ArgumentError
from lowbit.model import layers
from lowbit.model.bounds import clamped_swiglu_bound, soft_cap_bound

FLOAT32 = Arithmetic("direct", "float32")
ONE = np.float32(1)


@given(st.floats(-400, 400, width=32), st.floats(-50, 50, width=32), st.sampled_from([7.0, 0.3, 1.0]))
def test_clamped_unit_in_decimal(gate: float, up: float, limit: float) -> None:
    """The formula for one element with 60 digits."""
    with localcontext(prec=60):
        c = Decimal(limit)
        a, b = min(Decimal(gate), c), max(-c, min(Decimal(up), c))
        expected = float(a / (1 + (-Decimal(layers.SLOPE) * a).exp()) * (b + 1))
    given = layers.clamped_swiglu_of(np.array([[gate]], np.float32), np.array([[up]], np.float32), limit)
    np.testing.assert_allclose(given[0, 0], expected, rtol=1e-12, atol=1e-300)


def clamped(gate: F32, up: F32, limit: float, way: str) -> F32:
    """a / (1 + e^−αa) (b + 1); a sigmoid of either sign, then the product; or the sum multiplied out."""
    most = np.float32(limit)
    a, b = np.minimum(gate, most), np.clip(up, -most, most)
    logit = np.float32(layers.SLOPE) * a
    with np.errstate(over="ignore", under="ignore"):
        power = np.exp(-np.abs(logit))
        sigmoid = np.where(logit < 0, power, ONE) / (1 + power)
        activated = a / (1 + np.exp(-logit)) if way == "quotient" else a * sigmoid
    result: F32 = activated * (b + 1) if way != "multiplied-out" else activated * b + activated
    return result


@pytest.mark.parametrize("limit", [7.0, 0.3, 1e5])
@pytest.mark.parametrize("way", ["quotient", "of-either-sign"])
def test_honest_clamped_units_pass(way: str, limit: float) -> None:
    """Gates about the limit, saturated and so low that exponentials overflow; ups about −1 too."""
    rng = np.random.default_rng(1)
    gate = np.concatenate([np.linspace(-60, -40, 400), rng.normal(size=800) * limit]).astype(np.float32)[np.newaxis]
    up = np.concatenate([-1 + rng.normal(size=400) * 1e-6, rng.normal(size=800) * limit]).astype(np.float32)[np.newaxis]
    exact = layers.clamped_swiglu_of(gate, up, limit)
    bound = clamped_swiglu_bound(gate, up, limit, FLOAT32, exact)
    used = np.abs(clamped(gate, up, limit, way) - exact) / bound.limit
    assert 0 < used.max() < 0.6


def test_rough_clamped_units_are_refused() -> None:
    """A slope of 1.7, and the sum multiplied out, which cancels where up is about −1."""
    gate, up = np.linspace(-3, 9, 401, dtype=np.float32)[np.newaxis], np.full((1, 401), -1 + 2.0**-20, np.float32)
    exact = layers.clamped_swiglu_of(gate, up, 7.0)
    bound = clamped_swiglu_bound(gate, up, 7.0, FLOAT32, exact)
    assert (np.abs(clamped(gate, up, 7.0, "multiplied-out") - exact) / bound.limit).max() > 100
    a = np.minimum(gate.astype(np.float64), 7.0)
    assert (np.abs(a / (1 + np.exp(-1.7 * a)) * (up.astype(np.float64) + 1) - exact) / bound.limit).max() > 100


@given(st.floats(-1e3, 1e3, width=32), st.sampled_from([30.0, 0.7, 2.0**20]))
def test_soft_cap_in_decimal(x: float, cap: float) -> None:
    """The formula for one element with 80 digits, by e^2z − 1 over e^2z + 1."""
    with localcontext(prec=80):
        power = (2 * Decimal(x) / Decimal(cap)).exp()
        expected = float(Decimal(cap) * (power - 1) / (power + 1))
    given = layers.soft_cap_of(np.array([[x]], np.float32), cap)
    np.testing.assert_allclose(given[0, 0], expected, rtol=1e-13, atol=1e-300)


@pytest.mark.parametrize("cap", [30.0, 2.0**-32, 2.0**32, 0.7])
def test_honest_soft_caps_pass(cap: float) -> None:
    """A library's tanh, and 1 − 2 / (e^2z + 1) where that exceeds a half, at numbers of all sizes."""
    rng = np.random.default_rng(2)
    x = (rng.normal(size=2000) * 2.0 ** rng.integers(-40, 40, 2000)).astype(np.float32)[np.newaxis]
    exact = layers.soft_cap_of(x, cap)
    limit = soft_cap_bound(x, cap, FLOAT32, exact).limit
    z = x / np.float32(cap)
    with np.errstate(over="ignore", under="ignore"):
        power = np.exp(np.float32(2) * np.abs(z))
        by_power = np.where(np.abs(z) < 0.55, np.tanh(z), np.copysign(ONE - np.float32(2) / (power + ONE), z))
    for tanh in (np.tanh(z), by_power):
        assert (np.abs(np.float32(cap) * tanh - exact) / limit).max() < 0.6
    rough = np.float32(cap) * np.copysign(ONE - np.float32(2) / (power + ONE), z)
    assert (np.abs(rough - exact) / limit).max() > 100


@pytest.mark.parametrize("number", [0.0, -7.0, np.nan, np.inf, 2.0**33])
def test_limits_and_caps_out_of_range(number: float) -> None:
    """The argument is named."""
    x = np.ones((1, 2), np.float32)
    with pytest.raises(ArgumentError, match="limit is"):
        layers.clamped_swiglu_of(x, x, number)
    with pytest.raises(ArgumentError, match="cap is"):
        layers.soft_cap_of(x, number)
