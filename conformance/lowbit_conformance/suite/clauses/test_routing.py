"""Checks of the gate, the choice and the weights: the choice exact, the others within their derived bounds."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from lowbit.arrays import F32
from lowbit.moe.routing import SOFTMAXES, Softmax
from lowbit_conformance.isolation.remote import Remote
from lowbit_conformance.suite.bounded import assert_bounded, assert_on_lattice, assert_reference, run, run_bounded
from lowbit_conformance.suite.compare import assert_equal_values, assert_exact, assert_same_bits, refuses
from lowbit_conformance.suite.inputs import NON_FINITE
from lowbit_conformance.suite.marking import Record, Settings, chained, checks, grid
from lowbit_conformance.suite.routing_cases import (
    SCALES,
    SHAPES,
    WRONG,
    WRONG_IDS,
    WRONG_PROBABILITIES,
    RoutingCase,
    activations,
    assert_only_row_one_spoilt,
    non_finite,
    random_shapes,
    routes,
    shapes,
    with_models,
)

# The gate.


@checks("routing.gate/C1", with_models(shapes()))
def test_gate_on_the_lattice(backend: Remote, case: RoutingCase) -> None:
    """Small integers give equal logits."""
    rng = case.generator()
    x, router = (rng.integers(-9, 10, size) for size in ((case.tokens, case.hidden), (case.hidden, case.experts)))
    assert_on_lattice(backend, case, x.astype(np.float32), router.astype(np.float32))


def gate_inputs(case: RoutingCase) -> tuple[F32, F32]:
    rng = case.generator()
    return activations(case, rng), rng.normal(size=(case.hidden, case.experts)).astype(np.float32)


@checks("routing.gate/C2", with_models(random_shapes))
def test_logits_within_the_bound(backend: Remote, case: RoutingCase, record_property: Record) -> None:
    """Random logits stay within the bound of a plain sum."""
    assert_bounded(backend, case, record_property, *gate_inputs(case))


def probability_shapes(clause: str, settings: Settings) -> Iterator[RoutingCase]:
    yield from (replace(case, scores="probabilities") for case in random_shapes(clause, settings))


@checks("routing.gate/C3", with_models(probability_shapes))
def test_probabilities_within_the_bound(backend: Remote, case: RoutingCase, record_property: Record) -> None:
    """Random, flat and saturated probabilities stay within the bound of a softmax of such logits."""
    assert_bounded(backend, case, record_property, *gate_inputs(case), case.scores)


@checks("routing.gate/C4", shapes("random"))
def test_gate_goes_by_rows(backend: Remote, case: RoutingCase) -> None:
    """The same call gives the same bits, and row 0 does not depend on the others."""
    x, router = gate_inputs(case)
    shape = (case.tokens, case.experts)
    first = run_bounded(backend, case, shape, x, router)
    assert_same_bits(first, run_bounded(backend, case, shape, x, router), "the same call again")
    x[1:] += 1
    assert_same_bits(first[:1], run_bounded(backend, case, shape, x, router)[:1], "row 0 changed when others did")


@checks("routing.gate/C5", non_finite)
def test_gate_passes_non_finite_on(backend: Remote, case: RoutingCase) -> None:
    """A NaN or an infinity reaches every logit of its row, and no other row."""
    x, router = gate_inputs(case)
    x[1, case.hidden - 1] = NON_FINITE[case.variant]
    assert_only_row_one_spoilt(run_bounded(backend, case, (4, case.experts), x, router))


# The choice.


@checks("routing.top_k/C1", with_models(chained(random_shapes, shapes("edge", ("neighbours", "low", "lowest")))))
def test_the_greatest_are_chosen(backend: Remote, case: RoutingCase) -> None:
    """With distinct scores, including float32 neighbours, the chosen experts are those found by sorting Python
    numbers."""
    scores = case.generator().permutation(case.tokens * case.experts).reshape(case.tokens, -1).astype(np.float32) - 9
    if case.variant == "neighbours":
        scores = 1 + scores * np.float32(2.0**-23)
    if case.variant in ("low", "lowest"):  # below a start value that a search for the greatest may use
        scores = -(scores + 11) * np.float32(1e4 if case.variant == "low" else 1e33)
    given = run(backend, case, scores, case.k)
    expected = [sorted(range(case.experts), key=lambda e: -float(row[e]))[: case.k] for row in scores]
    assert_exact("chosen", given, np.array(expected, np.int64))


@checks("routing.top_k/C2", shapes("edge", ("equal", "zeros", "few-values")))
def test_ties_go_to_the_lowest(backend: Remote, case: RoutingCase) -> None:
    """Equal scores, zeros of both signs, and scores of three values: experts are ordered by score, then by id."""
    rng = case.generator()
    values = {"equal": [0.5], "zeros": [0.0, -0.0], "few-values": [-1.0, 0.25, 3.0]}[case.variant]
    scores = rng.choice(values, (case.tokens, case.experts)).astype(np.float32)
    given = run(backend, case, scores, case.k)
    expected = [sorted(range(case.experts), key=lambda e: (-float(row[e]), e))[: case.k] for row in scores]
    assert_exact("chosen", given, np.array(expected, np.int64))


@checks("routing.top_k/C3", shapes("edge", ("extremes",)))
def test_choice_equals_the_reference(backend: Remote, case: RoutingCase) -> None:
    """With the largest, least and subnormal scores, type, shape and ids are the reference's."""
    values = np.array([3.4e38, -3.4e38, 1e-45, -1e-45, 0, 1e-38, 1], np.float32)
    scores = case.generator().choice(values, (case.tokens, case.experts))
    assert_reference(backend, case, "chosen", scores, case.k)


# The weights.


def weight_shapes(clause: str, settings: Settings) -> Iterator[RoutingCase]:
    softmax: Softmax = "after" if clause.endswith("C1") else "before"
    yield from (replace(case, softmax=softmax) for case in random_shapes(clause, settings))


@checks(("routing.weights/C1", "routing.weights/C2"), with_models(weight_shapes))
def test_weights_within_the_bound(backend: Remote, case: RoutingCase, record_property: Record) -> None:
    """The softmax of the chosen logits, or the chosen probabilities divided by their sum, is within its bound."""
    rng = case.generator()
    scores = (rng.normal(size=(case.tokens, case.experts)) * SCALES.get(case.variant, 1.0)).astype(np.float32)
    if case.softmax == "before":
        scores = np.exp(scores - scores.max(axis=1, keepdims=True))
    chosen, _ = routes(case, rng)
    assert_bounded(backend, case, record_property, scores, chosen, case.softmax)


EQUAL = [(*shape, "logits", softmax) for softmax in SOFTMAXES for shape in SHAPES]


@checks("routing.weights/C3", grid(RoutingCase, "lattice", ["equal"], *EQUAL))
def test_equal_scores_share_equally(backend: Remote, case: RoutingCase) -> None:
    """Equal scores have bit-identical weights; a single expert has exactly 1."""
    scores = np.full((case.tokens, case.experts), 0.3, np.float32)
    chosen, _ = routes(case, case.generator())
    given = run_bounded(backend, case, chosen.shape, scores, chosen, case.softmax)
    assert_same_bits(given, np.repeat(given[:, :1], case.k, axis=1), "weights of equal scores")
    if case.k == 1:
        assert_equal_values(given, np.ones(given.shape))


@checks("routing.weights/H8", grid(RoutingCase, "edge", (*WRONG_IDS, *WRONG_PROBABILITIES), WRONG))
def test_weights_refuses(backend: Remote, case: RoutingCase) -> None:
    """Ids that are out of range or repeated, and probabilities that cannot be renormalised, raise ArgumentError."""
    rng = case.generator()
    scores, (chosen, _) = np.abs(rng.normal(size=(case.tokens, case.experts))).astype(np.float32), routes(case, rng)
    with refuses():
        if case.variant in WRONG_IDS:
            backend.run("routing.weights", scores, WRONG_IDS[case.variant](chosen), "after")
        else:
            backend.run("routing.weights", WRONG_PROBABILITIES[case.variant](scores), chosen, "before")
