"""The routing chapter against decimal arithmetic and loops, and its bounds against implementations that are wrong."""

import math
from decimal import Decimal, localcontext

import hypothesis.strategies as st
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis.extra import numpy as hnp

from lowbit.arrays import F32, F64
from lowbit.contract.rounding import Arithmetic, Bound, any_order
from lowbit.linear.elementary import silu
from lowbit.moe import routing
from lowbit.moe.bounds import expert_bound, gate_bound, sparse_bound, weights_bound
from lowbit.moe.routing import Ids

FLOAT32 = Arithmetic("direct", "float32", any_order)


def experts(rng: np.random.Generator, count: int, hidden: int, inner: int) -> tuple[F32, F32, F32]:
    gate, up = (rng.normal(size=(count, hidden, inner)).astype(np.float32) for _ in range(2))
    return gate, up, rng.normal(size=(count, inner, hidden)).astype(np.float32)


def decimal_expert(row: F32, gate: F32, up: F32, down: F32) -> list[Decimal]:
    """The SwiGLU formula for one token with 60 digits."""

    def times(x: list[Decimal], matrix: F32) -> list[Decimal]:
        return [sum((a * Decimal(float(w)) for a, w in zip(x, column, strict=True)), Decimal(0)) for column in matrix.T]

    with localcontext(prec=60):
        x = [Decimal(float(value)) for value in row]
        inner = [a / (1 + (-a).exp()) * b for a, b in zip(times(x, gate), times(x, up), strict=True)]
        return times(inner, down)


# The formulas.


def test_an_expert_and_the_layer_in_decimal() -> None:
    """Experts and the weighted sum agree with 60-digit arithmetic to the last few bits of float64."""
    rng = np.random.default_rng(1)
    gate, up, down = experts(rng, 4, 7, 5)
    x = rng.normal(size=(3, 7)).astype(np.float32)
    chosen = np.array([[2, 0], [3, 1], [1, 2]])
    weights = np.array([[0.25, 0.75], [0.1, 0.9], [0.5, 0.5]], np.float32)
    y = routing.sparse(x, gate, up, down, chosen, weights)
    for t in range(3):
        total = [Decimal(0)] * 7
        for e, w in zip(chosen[t], weights[t], strict=True):
            alone = decimal_expert(x[t], gate[e], up[e], down[e])
            np.testing.assert_allclose(
                routing.expert(x[t : t + 1], gate[e], up[e], down[e])[0],
                [float(v) for v in alone],
                rtol=1e-13,
                atol=1e-13,
            )
            total = [a + Decimal(float(w)) * b for a, b in zip(total, alone, strict=True)]
        np.testing.assert_allclose(y[t], [float(v) for v in total], rtol=1e-13, atol=1e-13)


def test_the_layer_is_the_exact_sum_of_its_experts() -> None:
    """Bit for bit: weights times experts, each run alone, added by ascending id; another order gives other bits."""
    rng = np.random.default_rng(2)
    parts = experts(rng, 8, 16, 24)
    x = rng.normal(size=(40, 16)).astype(np.float32)
    chosen = routing.top_k(rng.random((40, 8)).astype(np.float32), 4)
    weights = rng.random((40, 4)).astype(np.float32)
    ascending, descending = np.zeros(x.shape), np.zeros(x.shape)
    for t in range(40):
        terms = {
            int(e): np.float64(w) * routing.expert(x[t : t + 1], *(part[e] for part in parts))[0]
            for e, w in zip(chosen[t], weights[t], strict=True)
        }
        for e in sorted(terms):
            ascending[t] += terms[e]
        for e in sorted(terms, reverse=True):
            descending[t] += terms[e]
    y = routing.sparse(x, *parts, chosen, weights)
    np.testing.assert_array_equal(y, ascending)
    assert (y != descending).any()


@given(st.integers(0, 2**32), st.integers(1, 12), st.data())
def test_softmax_before_and_after_are_one_number(seed: int, count: int, data: st.DataObject) -> None:
    """The two orders of gate and choice give the same experts and weights, up to the rounding of probabilities."""
    k = data.draw(st.integers(1, count))
    rng = np.random.default_rng(seed)
    x, router = rng.normal(size=(3, 5)).astype(np.float32), rng.normal(size=(5, count)).astype(np.float32)
    logits = routing.gate(x, router).astype(np.float32)
    powers = np.exp(logits.astype(np.float64))
    probabilities = (powers / powers.sum(axis=1, keepdims=True)).astype(np.float32)
    chosen = routing.top_k(logits, k)
    np.testing.assert_array_equal(routing.top_k(probabilities, k), chosen)
    after, before = routing.weights(logits, chosen), routing.weights(probabilities, chosen, "before")
    np.testing.assert_allclose(after, before, rtol=1e-5)
    np.testing.assert_allclose(after.sum(axis=1), 1, rtol=1e-12)


@given(
    hnp.arrays(np.float32, st.tuples(st.integers(1, 4), st.integers(1, 9)), elements=st.sampled_from([-1, -0.0, 0, 2]))
)
def test_the_choice_by_selection(scores: F32) -> None:
    """Taking the greatest that is left, the first of them in order of id, k times."""
    for k in range(1, scores.shape[1] + 1):
        chosen = routing.top_k(scores, k)
        for row, mine in zip(scores, chosen, strict=True):
            left = list(range(len(row)))
            for e in mine:
                best = left[0]
                for other in left:
                    if row[other] > row[best]:
                        best = other
                assert e == best
                left.remove(best)


# The bounds: wide enough for honest float32, too narrow for mistakes.


def layer(seed: int) -> tuple[F32, F32, F32, F32, Ids, F32]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(5, 64)).astype(np.float32)
    chosen, weights = routing.top_k(rng.random((5, 6)).astype(np.float32), 2), np.full((5, 2), 0.5, np.float32)
    gate, up, down = experts(rng, 6, 64, 48)
    return x, gate / np.float32(8), up / np.float32(8), down / np.float32(8), chosen, weights


def float32_layer(x: F32, gate: F32, up: F32, down: F32, chosen: Ids, weights: F32) -> F32:
    y = np.zeros_like(x)
    for t in range(len(x)):
        for e, w in zip(chosen[t], weights[t], strict=True):
            a = x[t] @ gate[e]
            y[t] += w * ((a / (1 + np.exp(-a)) * (x[t] @ up[e])) @ down[e])
    return y


def fraction(result: npt.NDArray[np.floating], exact: F64, bound: Bound) -> float:
    """The largest fraction of the bound that a result uses; above 1 it is refused."""
    return float(np.max(np.abs(result - exact) / bound.limit))


@pytest.mark.parametrize("seed", range(4))
def test_honest_layers_pass_and_wrong_ones_do_not(seed: int) -> None:
    """float32 loops use a part of the bound; a dropped product, an approximate silu or a swapped weight exceed it."""
    arguments = x, gate, up, down, chosen, weights = layer(seed)
    exact = routing.sparse(*arguments)
    bound = sparse_bound(*arguments, FLOAT32, exact)
    assert 0 < fraction(float32_layer(*arguments), exact, bound) < 0.5
    dropped = up.copy()
    dropped[:, 63, :] = 0
    assert fraction(float32_layer(x, gate, dropped, down, chosen, weights), exact, bound) > 10
    tilted = weights * np.array([1.001, 0.999], np.float32)
    assert fraction(float32_layer(x, gate, up, down, chosen, tilted), exact, bound) > 1


@pytest.mark.parametrize("seed", range(4))
def test_a_rough_silu_is_refused(seed: int) -> None:
    """x · sigmoid(1.702 x), the usual stand-in for another curve, and an exponential of 10 bits."""
    x, gate, up, down, _, _ = layer(seed)
    exact = routing.expert(x, gate[0], up[0], down[0])
    bound = expert_bound(x, gate[0], up[0], down[0], FLOAT32, exact)
    a, b = x @ gate[0], x @ up[0]
    honest = (a / (1 + np.exp(-a)) * b) @ down[0]
    assert 0 < fraction(honest, exact, bound) < 0.5
    assert fraction((a / (1 + np.exp(-1.702 * a)) * b) @ down[0], exact, bound) > 10
    rough = np.exp(-a) * np.float32(1 + 2**-10)
    assert fraction((a / (1 + rough) * b) @ down[0], exact, bound) > 1


@given(st.integers(0, 2**32), st.floats(0.01, 40))
def test_probabilities_and_weights(seed: int, scale: float) -> None:
    """float32 softmax stays inside its bound at every scale, and one over the wrong experts does not."""
    rng = np.random.default_rng(seed)
    x, router = rng.normal(size=(4, 30)).astype(np.float32), (scale * rng.normal(size=(30, 8))).astype(np.float32)
    exact = routing.gate(x, router, "probabilities")
    logits = x @ router
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    p = powers / powers.sum(axis=1, keepdims=True)
    bound = gate_bound(x, router, "probabilities", FLOAT32, exact)
    assert fraction(p, exact, bound) <= 1
    assert (bound.limit < 0.05).all()
    chosen = routing.top_k(logits, 3)
    after, before = routing.weights(logits, chosen, "after"), routing.weights(p, chosen, "before")
    for scores, exact, bound in (
        (powers, after, weights_bound(logits, chosen, "after", FLOAT32, after)),
        (p, before, weights_bound(p, chosen, "before", FLOAT32, before)),
    ):
        own = np.take_along_axis(scores, chosen, axis=1)
        assert fraction(own / own.sum(axis=1, keepdims=True), exact, bound) <= 1


def test_weights_that_were_not_renormalised_are_refused() -> None:
    """The chosen probabilities as they are sum to less than 1, and lie far outside the bound."""
    p = np.array([[0.375, 0.25, 0.25, 0.125]], np.float32)
    chosen = routing.top_k(p, 2)
    exact = routing.weights(p, chosen, "before")
    bound = weights_bound(p, chosen, "before", FLOAT32, exact)
    assert fraction(np.array([[0.6, 0.4]], np.float32), exact, bound) <= 1
    assert fraction(p[:, :2], exact, bound) > 1000


def test_the_bound_of_silu_holds_where_it_is_steepest_and_where_it_vanishes() -> None:
    """|silu'| is at most 1.1, and a quotient that overflowed is at most 2^-121 off."""
    a = np.linspace(-20, 20, 400001)
    assert 1.09 < np.max(np.abs(np.diff(silu(a)) / np.diff(a))) < 1.1
    first = -88.72283  # e^88.72284 is above the largest float32 number
    assert abs(first) * math.exp(first) < 2.0**-121
