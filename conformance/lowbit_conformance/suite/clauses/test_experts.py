"""Checks of one expert and of the sparse layer, within their derived bounds.

On the lattice every pre-activation of an expert's gate is at least 40 or at most −760. There silu(a) is a or 0 to the
bit, in float32 and in float64 alike, and the rest is small integers.
"""

import numpy as np

from lowbit.arrays import F32
from lowbit.moe.routing import Ids
from lowbit_conformance.isolation.remote import Remote
from lowbit_conformance.suite.bounded import assert_bounded, assert_on_lattice, run_bounded
from lowbit_conformance.suite.compare import assert_same_bits, refuses
from lowbit_conformance.suite.inputs import NON_FINITE
from lowbit_conformance.suite.marking import Record, checks, grid
from lowbit_conformance.suite.routing_cases import (
    WRONG,
    WRONG_IDS,
    RoutingCase,
    activations,
    assert_only_row_one_spoilt,
    experts_of,
    non_finite,
    random_shapes,
    routes,
    shapes,
    with_models,
)

# Experts.


def lattice_experts(case: RoutingCase) -> tuple[F32, F32, F32, F32]:
    """Activations of ±1 that begin with 1, and experts whose gates are far from 0: see the top of this file."""
    rng = case.generator()
    x = rng.choice((-1, 1), (case.tokens, case.hidden))
    x[:, 0] = 1
    wide, narrow = (case.experts, case.hidden, case.inner), (case.experts, case.inner, case.hidden)
    gate, up, down = (rng.integers(-1, 2, size) for size in (wide, wide, narrow))
    gate[:, 0] = np.where(rng.random((case.experts, case.inner)) < 0.3, -800, 80)
    up[:, 0] += 3
    return x.astype(np.float32), gate.astype(np.float32), up.astype(np.float32), down.astype(np.float32)


def of_first_expert(x: F32, *experts: F32) -> tuple[F32, ...]:
    """Activations, and the first of several experts."""
    return x, *(part[0].copy() for part in experts)


@checks("routing.expert/C1", with_models(shapes()))
def test_expert_on_the_lattice(backend: Remote, case: RoutingCase) -> None:
    """If silu is the identity or zero, the result is equal."""
    assert_on_lattice(backend, case, *of_first_expert(*lattice_experts(case)))


def random_expert(case: RoutingCase) -> tuple[F32, ...]:
    rng = case.generator()
    return of_first_expert(activations(case, rng), *experts_of(case, rng))


@checks("routing.expert/C2", with_models(random_shapes))
def test_expert_within_the_bound(backend: Remote, case: RoutingCase, record_property: Record) -> None:
    """Random inputs, with silu nearly linear, curved and saturated, stay within the bound."""
    assert_bounded(backend, case, record_property, *random_expert(case))


@checks("routing.expert/C3", shapes("random"))
def test_expert_goes_by_rows(backend: Remote, case: RoutingCase) -> None:
    """The same call gives the same bits, and row 0 does not depend on the others."""
    x, *parts = random_expert(case)
    first = run_bounded(backend, case, x.shape, x, *parts)
    assert_same_bits(first, run_bounded(backend, case, x.shape, x, *parts), "the same call again")
    x[1:] += 1
    assert_same_bits(first[:1], run_bounded(backend, case, x.shape, x, *parts)[:1], "row 0 changed when others did")


@checks("routing.expert/C4", non_finite)
def test_expert_passes_non_finite_on(backend: Remote, case: RoutingCase) -> None:
    """A NaN or an infinity reaches every element of its row and no other row."""
    x, *parts = random_expert(case)
    x[1, 0] = NON_FINITE[case.variant]
    assert_only_row_one_spoilt(run_bounded(backend, case, x.shape, x, *parts))


# The layer.


@checks("routing.sparse/C1", shapes(variants=("", "any-weights")))
def test_layer_on_the_lattice(backend: Remote, case: RoutingCase) -> None:
    """Exact experts with weights of 1/4, 1/2 and 1, or also with zero and negative weights, give an equal sum."""
    rng = case.generator()
    chosen, weights = routes(case, rng)
    some = (-1, -0.25, 0, 0.5) if case.variant == "any-weights" else (0.25, 0.5, 1)
    weights = rng.choice(some, weights.shape).astype(np.float32)
    assert_on_lattice(backend, case, *lattice_experts(case), chosen, weights)


def layer(case: RoutingCase) -> tuple[F32, F32, F32, F32, Ids, F32]:
    rng = case.generator()
    return activations(case, rng), *experts_of(case, rng), *routes(case, rng)


@checks("routing.sparse/C2", with_models(random_shapes))
def test_layer_within_the_bound(backend: Remote, case: RoutingCase, record_property: Record) -> None:
    """Random layers stay within the bound of the weighted sum of their experts."""
    assert_bounded(backend, case, record_property, *layer(case))


@checks("routing.sparse/C3", shapes("random"))
def test_the_sum_has_one_order(backend: Remote, case: RoutingCase) -> None:
    """Listing each token's experts in reverse or rotated order gives the same bits."""
    *inputs, chosen, weights = layer(case)
    first = run_bounded(backend, case, inputs[0].shape, *inputs, chosen, weights)
    for order in (np.arange(case.k)[::-1], np.roll(np.arange(case.k), 1)):
        again = run_bounded(backend, case, inputs[0].shape, *inputs, chosen[:, order].copy(), weights[:, order].copy())
        assert_same_bits(first, again, "the same experts in another order")


@checks("routing.sparse/C4", shapes("random"))
def test_only_the_chosen_matter(backend: Remote, case: RoutingCase) -> None:
    """NaN in all experts that no token chose changes no bit; NaN in one that row 0 did not choose changes no bit of row
    0."""
    x, gate, up, down, chosen, weights = layer(case)
    first = run_bounded(backend, case, x.shape, x, gate, up, down, chosen, weights)
    for rows in (slice(None), slice(1)):
        unread = np.setdiff1d(np.arange(case.experts), chosen[rows])
        spoilt = [part.copy() for part in (gate, up, down)]
        for part in spoilt:
            part[unread] = np.nan
        again = run_bounded(backend, case, x.shape, x, *spoilt, chosen, weights)
        assert_same_bits(first[rows], again[rows], "experts that were not chosen became NaN")


@checks("routing.sparse/H8", grid(RoutingCase, "edge", WRONG_IDS, WRONG))
def test_layer_refuses(backend: Remote, case: RoutingCase) -> None:
    """Ids that are out of range or repeated raise ArgumentError."""
    rng = case.generator()
    x, experts, (chosen, weights) = activations(case, rng), experts_of(case, rng), routes(case, rng)
    with refuses():
        backend.run("routing.sparse", x, *experts, WRONG_IDS[case.variant](chosen), weights)
