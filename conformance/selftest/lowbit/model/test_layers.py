"""Norm and gated unit as operations against decimal arithmetic, and their bounds against honest and wrong ways."""

from decimal import Decimal, localcontext
from math import erf

import hypothesis.strategies as st
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given

from lowbit.arrays import F32, F64
from lowbit.contract.rounding import Arithmetic, Bound, any_order
from lowbit.errors import ArgumentError
from lowbit.linear.elementary import soft_cap
from lowbit.model import layers
from lowbit.model.bounds import geglu_bound, rms_norm_bound, swiglu_bound

FLOAT32 = Arithmetic("direct", "float32", any_order)
IN_FLOAT64 = Arithmetic("direct", "float64", any_order)


def fraction(result: npt.NDArray[np.floating], exact: F64, bound: Bound) -> float:
    """The largest fraction of the bound that a result uses; above 1 it is refused."""
    return float(np.max(np.abs(result - exact) / bound.limit))


# The formulas.


@given(st.integers(0, 2**32), st.integers(1, 20), st.sampled_from([1e-12, 1e-6, 1.0, 7]))
def test_norm_in_decimal(seed: int, columns: int, epsilon: float) -> None:
    """Equation 4 with 60 digits, at any ratio of ε to the squares."""
    rng = np.random.default_rng(seed)
    x = (rng.normal(size=(1, columns)) * 10.0 ** rng.integers(-9, 9)).astype(np.float32)
    gain = rng.normal(size=columns).astype(np.float32)
    with localcontext(prec=60):
        squares = sum((Decimal(float(value)) ** 2 for value in x[0]), Decimal(0))
        root = (squares / columns + Decimal(epsilon)).sqrt()
        expected = [float(Decimal(float(g)) * Decimal(float(v)) / root) for g, v in zip(gain, x[0], strict=True)]
    np.testing.assert_allclose(layers.rms_norm_of(x, gain, epsilon)[0], expected, rtol=1e-14, atol=0)


@given(st.floats(-700, 700, width=32), st.floats(-1e6, 1e6, width=32))
def test_swiglu_in_decimal(gate: float, up: float) -> None:
    """Equation 6 for one element with 60 digits."""
    with localcontext(prec=60):
        a = Decimal(gate)
        expected = float(a / (1 + (-a).exp()) * Decimal(up))
    given = layers.swiglu_of(np.array([[gate]], np.float32), np.array([[up]], np.float32))
    np.testing.assert_allclose(given, [[expected]], rtol=1e-14, atol=1e-300)


@given(st.floats(-20, 1e9, width=32), st.floats(-1e6, 1e6, width=32))
def test_geglu_in_decimal(gate: float, up: float) -> None:
    """The form with a tanh for one element, with enough digits that 1 + tanh loses none that count."""
    with localcontext(prec=700):
        a, pi = Decimal(gate), Decimal("3.14159265358979323846264338327950288")
        power = (2 * (2 / pi).sqrt() * (a + Decimal("0.044715") * a**3)).exp() if gate < 99 else None
        expected = float((1 + (power - 1) / (power + 1)) / 2 * a * Decimal(up)) if power else gate * up
    given = layers.geglu_of(np.array([[gate]], np.float32), np.array([[up]], np.float32))
    np.testing.assert_allclose(given, [[expected]], rtol=1e-12, atol=1e-300)


SLOPE = Decimal("1.702")


@given(st.floats(-1e4, 1e9, width=32), st.floats(-1e6, 1e6, width=32), st.sampled_from([0.5, 7.0, 1e6]))
def test_a_clamped_unit_in_decimal(gate: float, up: float, limit: float) -> None:
    """One element with 60 digits."""
    with localcontext(prec=60):
        a, b = min(Decimal(gate), Decimal(limit)), max(min(Decimal(up), Decimal(limit)), -Decimal(limit))
        expected = float(a / (1 + (-SLOPE * a).exp()) * (b + 1))
    given = layers.clamped_swiglu(np.array([gate]), np.array([up]), limit)
    np.testing.assert_allclose(given, [expected], rtol=1e-11, atol=1e-300)  # e^x has the error of x, up to 17000 u


@given(st.floats(-1e9, 1e9), st.sampled_from([0.5, 30.0, 50.0]))
def test_a_soft_cap_in_decimal(number: float, cap: float) -> None:
    """The quotient of exponentials that a tanh is, with enough digits that small ones cancel."""
    with localcontext(prec=60):
        twice = 2 * Decimal(number) / Decimal(cap)
        power = twice.exp() if abs(twice) < 99 else None
        expected = float(Decimal(cap) * (power - 1) / (power + 1)) if power else float(np.copysign(cap, number))
    np.testing.assert_allclose(soft_cap(np.array([number]), cap), [expected], rtol=1e-14, atol=1e-50)


@pytest.mark.parametrize("epsilon", [0, 0.0, -1e-6, 2.0**-127, 1e39, float("nan"), float("inf"), "1e-6", True, None])
def test_an_epsilon_that_is_none_is_refused(epsilon: object) -> None:
    """What float32 does not hold as a normal positive number would make another norm, or none of zeros."""
    with pytest.raises(ArgumentError, match="epsilon"):
        layers.rms_norm_of(np.ones((1, 2), np.float32), np.ones(2, np.float32), epsilon)  # type: ignore[arg-type]  # that is what is tried


# The bounds: wide enough for honest float32, too narrow for mistakes.


def norm_in_float32(x: F32, gain: F32, epsilon: float) -> F32:
    """A plain loop: one product, one addition at a time."""
    total = np.zeros((len(x), 1), np.float32)
    for column in x.T:
        total[:, 0] += column * column
    scale = 1 / np.sqrt(total * np.float32(1 / x.shape[1]) + np.float32(epsilon))
    result: F32 = x * scale * gain
    return result


@pytest.mark.parametrize("columns", [1, 7, 64, 576, 4096])
def test_honest_norms_pass_and_wrong_ones_do_not(columns: int) -> None:
    """A float32 loop uses a part of the bound; one root estimated to 12 bits, or ε elsewhere, exceeds it."""
    rng = np.random.default_rng(columns)
    x, gain = rng.normal(size=(3, columns)).astype(np.float32), rng.normal(1, 0.3, columns).astype(np.float32)
    exact = layers.rms_norm_of(x, gain, 1e-2)
    bound = rms_norm_bound(x, gain, 1e-2, FLOAT32, exact)
    assert fraction(norm_in_float32(x, gain, 1e-2), exact, bound) < 0.5
    assert fraction(exact * (1 + 2.0**-11), exact, bound) > 1
    outside = x / (np.sqrt(np.mean(x.astype(np.float64) ** 2, axis=1, keepdims=True)) + 1e-2) * gain
    assert fraction(outside, exact, bound) > 1


def test_one_square_of_thousands_is_missed() -> None:
    """In 4096 channels a dropped square hides inside the bound of any order, and not where the sum is exact."""
    x, gain = np.ones((1, 4096), np.float32), np.ones(4096, np.float32)
    exact = layers.rms_norm_of(x, gain, 1e-5)
    dropped = x / np.sqrt(4095 / 4096 + 1e-5)
    assert fraction(dropped, exact, rms_norm_bound(x, gain, 1e-5, FLOAT32, exact)) < 1
    exactly = rms_norm_bound(x, gain, 1e-5, FLOAT32, exact, summed_exactly=True)
    assert fraction(dropped, exact, exactly) > 100
    assert 0 < fraction(norm_in_float32(x, gain, 1e-5), exact, exactly) < 0.5
    assert fraction(dropped, exact, rms_norm_bound(x, gain, 1e-5, IN_FLOAT64, exact)) > 100


@given(st.integers(0, 2**32), st.integers(-126, 100), st.integers(-70, 60))
def test_norms_of_all_sizes(seed: int, epsilon: int, size: int) -> None:
    """Whether ε or the squares prevail, and where squares are subnormal or vanish, a float32 loop stays inside."""
    rng = np.random.default_rng(seed)
    x = np.ldexp(rng.normal(size=(2, 12)), size).astype(np.float32)
    gain = rng.normal(1, 0.3, 12).astype(np.float32)
    exact = layers.rms_norm_of(x, gain, 2.0**epsilon)
    bound = rms_norm_bound(x, gain, 2.0**epsilon, FLOAT32, exact)
    assert fraction(norm_in_float32(x, gain, 2.0**epsilon), exact, bound) <= 1


def test_a_norm_declared_too_wide_is_refused() -> None:
    """As for every sum."""
    x = np.ones((1, 8), np.float32)
    with pytest.raises(ArgumentError, match="roundings"):
        rms_norm_bound(x, x[0], 1.0, Arithmetic("direct", "float32", lambda rows, group: 10**6), np.ones((1, 8)))


STABLE = ("quotient", "of-either-sign", "up-first")


def swiglu_in_float32(gate: F32, up: F32, way: str) -> F32:
    """a / (1 + e^-a) · b; the sigmoid by e^-|a|, vanishing below the least normal number; or a · b first."""
    with np.errstate(over="ignore", under="ignore"):
        if way == "quotient":
            result: F32 = gate / (1 + np.exp(-gate)) * up
            return result
        power = np.exp(-np.abs(gate))
        power = np.where(power < 2.0**-126, np.float32(0), power)
        sigmoid = np.where(gate < 0, power, np.float32(1)) / (1 + power)
        result = gate * sigmoid * up if way == "of-either-sign" else gate * up * sigmoid
        return result


@pytest.mark.parametrize("way", STABLE)
@pytest.mark.parametrize("scale", [0.01, 1, 30, 1e9])
def test_honest_activations_pass(way: str, scale: float) -> None:
    """Three ways to compute it, at gates that are small, usual, saturated and immense."""
    rng = np.random.default_rng(5)
    gate = np.append(np.linspace(-110, -80, 500), rng.normal(size=500) * scale).astype(np.float32)[np.newaxis]
    up = rng.normal(size=gate.shape).astype(np.float32)
    exact = layers.swiglu_of(gate, up)
    assert 0 < fraction(swiglu_in_float32(gate, up, way), exact, swiglu_bound(gate, up, FLOAT32, exact)) < 0.5


def test_rough_activations_are_refused() -> None:
    """An exponential of 16 bits, and a sigmoid that is exact to float32's roundoff absolutely but not relatively."""
    gate, up = np.linspace(-30, 0.5, 400, dtype=np.float32)[np.newaxis], np.ones((1, 400), np.float32)
    exact = layers.swiglu_of(gate, up)
    bound = swiglu_bound(gate, up, FLOAT32, exact)
    wide = gate.astype(np.float64)
    assert fraction(wide / (1 + np.exp(-wide) * (1 + 2.0**-17)), exact, bound) > 1
    assert fraction(wide * (1 / (1 + np.exp(-wide)) + 2.0**-25), exact, bound) > 100


def geglu_in_float32(gate: F32, up: F32, way: str) -> F32:
    """By a tanh, with the cube or by Horner's rule; by an exponential of minus w, or of minus |w|."""
    root, cubic, one = np.float32(np.sqrt(2 / np.pi)), np.float32(0.044715), np.float32(1)
    with np.errstate(over="ignore", under="ignore"):
        inner = gate * (one + cubic * gate * gate) if way != "cube" else gate + cubic * gate * gate * gate
        if way in ("cube", "tanh"):
            return np.asarray(gate * (one + np.tanh(root * inner)) * up / 2, np.float32)
        logit: F32 = root * inner * np.float32(2)
        if way == "quotient":
            return np.asarray(gate / (one + np.exp(-logit)) * up)
        power = np.exp(-np.abs(logit))
        power = np.where(power < 2.0**-126, np.float32(0), power)
        return np.asarray(gate * up * (np.where(gate < 0, power, one) / (one + power)), np.float32)


@pytest.mark.parametrize("way", ("cube", "tanh", "quotient", "of-either-sign"))
@pytest.mark.parametrize("scale", [0.01, 1, 30, 1e9])
def test_honest_gelus_pass(way: str, scale: float) -> None:
    """Four ways to compute it, at gates that are small, usual, saturated and immense."""
    rng = np.random.default_rng(6)
    gate = np.append(np.linspace(-12, -8, 500), rng.normal(size=500) * scale).astype(np.float32)[np.newaxis]
    up = rng.normal(size=gate.shape).astype(np.float32)
    exact = layers.geglu_of(gate, up)
    assert 0 < fraction(geglu_in_float32(gate, up, way), exact, geglu_bound(gate, up, FLOAT32, exact)) < 0.5


def test_rough_gelus_are_refused() -> None:
    """The approximation is not replaced by what it approximates, by a coarser one, or by a table in float16."""
    gate, up = np.linspace(-4, 4, 401, dtype=np.float32)[np.newaxis], np.ones((1, 401), np.float32)
    exact, wide = layers.geglu_of(gate, up), gate.astype(np.float64)
    bound = geglu_bound(gate, up, FLOAT32, exact)
    by_erf = wide * (1 + np.array([[erf(a / 2**0.5) for a in wide[0]]])) / 2
    for rough in (by_erf, wide / (1 + np.exp(-1.702 * wide)), exact.astype(np.float16).astype(np.float64)):
        assert fraction(rough, exact, bound) > 100


def test_what_an_exponential_loses_where_it_vanishes() -> None:
    """The product of the gate and e^gate at the first gate whose e^gate lies below the least normal number."""
    gate = np.nextafter(np.float64(-126 * np.log(2)), -np.inf)
    assert np.exp(gate) < 2.0**-126 and abs(gate) * 2.0**-126 < 2.0**-119
