"""Precision at depth in the layers around the products: routing, softmax, attention, the norm and pooling.

Scores lie far from 0 and far apart, and few terms among thousands show what a rounding of operands or of partial sums
does. The inputs and the two ways of judging them are those of `test_depth_weights`.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from lowbit.arrays import F32
from lowbit_conformance.isolation.remote import Remote
from lowbit_conformance.suite import deep_inputs
from lowbit_conformance.suite.bounded import assert_bounded, assert_on_lattice, assert_reference, run
from lowbit_conformance.suite.clauses import test_blocks
from lowbit_conformance.suite.clauses.test_attention import AttendCase, RowsCase, attended, seen
from lowbit_conformance.suite.clauses.test_attention import inputs as attend_inputs
from lowbit_conformance.suite.clauses.test_attention import shapes as attend_shapes
from lowbit_conformance.suite.clauses.test_experts import of_first_expert
from lowbit_conformance.suite.clauses.test_pooling import HeadsCase
from lowbit_conformance.suite.compare import assert_equal_values
from lowbit_conformance.suite.marking import Record, Settings, checks, grid
from lowbit_conformance.suite.routing_cases import RoutingCase, routes

# **Routing.**

DEEP_LAYERS = ((4, 1024, 8, 2, 1024), (3, 1100, 5, 2, 40), (2, 64, 3, 2, 1500))
"""Tokens, hidden, experts, k and inner."""


DEEP_GATES = ("deep-activations", "deep-router")
DEEP_EXPERTS = ("deep-gate", "deep-up", "deep-down")


@checks("routing.gate/C1", grid(RoutingCase, "lattice", DEEP_GATES, *DEEP_LAYERS, (8, 4096, 8, 2, 1)))
def test_deep_gate_on_the_lattice(backend: Remote, case: RoutingCase) -> None:
    """Tokens with few nonzero channels; these, or the router's weights, have 19 bits: the logits are equal."""
    kind = case.variant.removeprefix("deep-")
    arguments = deep_inputs.gate_lattice(case.generator(), kind, case.tokens, case.hidden, case.experts)
    assert_on_lattice(backend, case, *arguments)


@checks("routing.expert/C1", grid(RoutingCase, "lattice", DEEP_EXPERTS, *DEEP_LAYERS))
def test_deep_expert_on_the_lattice(backend: Remote, case: RoutingCase) -> None:
    """Weights of 12 or 13 bits in one of the three matrices, and silu is the identity: the result is equal."""
    kind = case.variant.removeprefix("deep-")
    inputs = deep_inputs.expert_lattice(case.generator(), kind, case.tokens, case.hidden, 1, case.inner)
    assert_on_lattice(backend, case, *of_first_expert(*inputs))


@checks("routing.sparse/C1", grid(RoutingCase, "lattice", DEEP_EXPERTS, *DEEP_LAYERS[1:]))
def test_deep_layer_on_the_lattice(backend: Remote, case: RoutingCase) -> None:
    """Such experts with weights of 1/2, 1 and 2: the sum is equal."""
    rng, kind = case.generator(), case.variant.removeprefix("deep-")
    chosen, weights = routes(case, rng)
    weights = rng.choice((0.5, 1, 2), weights.shape).astype(np.float32)
    inputs = deep_inputs.expert_lattice(rng, kind, case.tokens, case.hidden, case.experts, case.inner)
    assert_on_lattice(backend, case, *inputs, chosen, weights)


LEVELS = {"high": 200.0, "low": -200.0, "highest": 1000.0, "lowest": -1000.0}
"""The values around which all logits of a token lie: e^88.7 overflows float32, e^709.8 float64; e^-104 and e^-746 are
0."""

LEVEL_SHAPES = ((1, 8, 2, 1, 1), (3, 33, 8, 3, 1), (4, 24, 64, 6, 1), (2, 300, 5, 5, 1))


@checks("routing.gate/C3", grid(partial(RoutingCase, scores="probabilities"), "edge", LEVELS, *LEVEL_SHAPES))
def test_probabilities_of_large_logits(backend: Remote, case: RoutingCase, record_property: Record) -> None:
    """Logits far above or below 0 and close together: no probability vanishes or overflows."""
    rng = case.generator()
    x = rng.normal(size=(case.tokens, case.hidden)) * 0.1
    x[:, 0] = 1
    router = rng.normal(size=(case.hidden, case.experts))
    router[0] += LEVELS[case.variant]
    assert_bounded(backend, case, record_property, x.astype(np.float32), router.astype(np.float32), case.scores)


@checks("routing.weights/C1", grid(RoutingCase, "edge", LEVELS, *LEVEL_SHAPES))
def test_weights_of_large_logits(backend: Remote, case: RoutingCase, record_property: Record) -> None:
    """The same for the softmax of the chosen logits."""
    rng = case.generator()
    scores = (LEVELS[case.variant] + rng.normal(size=(case.tokens, case.experts))).astype(np.float32)
    chosen, _ = routes(case, rng)
    assert_bounded(backend, case, record_property, scores, chosen, case.softmax)


# **Softmax and attention.**


NEAR = ("falling", "falling-high", "falling-low", "tied")


@checks("attention.softmax/C2", grid(RowsCase, "edge", NEAR, (3, 61), (3, 100), (3, 1025)))
def test_shares_of_scores_far_apart(backend: Remote, case: RowsCase, record_property: Record) -> None:
    """Scores around 0 and ±10⁴ with differences of 80 to 110, so that exponentials pass through the least normal
    numbers; and 61 equal scores above all others, whose probability half precision cannot represent."""
    rng = case.generator()
    if case.variant == "tied":
        scores = np.full((case.rows, case.columns), -300.0)
        for row in scores:
            row[rng.permutation(case.columns)[:61]] = 5
    else:
        scores = -rng.uniform(80, 110, (case.rows, case.columns))
        scores[np.arange(case.rows), rng.integers(0, case.columns, case.rows)] = 0
        scores += {"falling-high": 1e4, "falling-low": -1e4}.get(case.variant, 0.0)
    assert_bounded(backend, case, record_property, scores.astype(np.float32))


FAR = {"low": -2e4, "lower": -2e5, "lowest": -4e9, "least": -1e30, "high": 2e4, "highest": 1e30}


@checks("attention.softmax/C1", grid(RowsCase, "lattice", FAR, (3, 1), (3, 2), (3, 33), (3, 100), (3, 1025)))
def test_one_score_takes_all_far_from_zero(backend: Remote, case: RowsCase) -> None:
    """Scores far below or above 0 and among −∞, one of them far above the others: its probability is exactly 1."""
    rng, level = case.generator(), FAR[case.variant]
    scores = np.full((case.rows, case.columns), level if level < 0 else level / 2)
    scores[:, ::3] = -np.inf
    scores *= 1 + rng.random((case.rows, case.columns)) * (level < 0)
    winners = rng.integers(0, case.columns, case.rows)
    scores[np.arange(case.rows), winners] = level if level > 0 else level / 2
    given = run(backend, case, scores.astype(np.float32))
    expected = np.zeros(scores.shape)
    expected[np.arange(case.rows), winners] = 1
    assert_equal_values(given, expected)


STEPS = {"rising-low": -2e4, "falling-low": -2e4, "rising-lower": -2e5, "falling-lower": -2e5, "rising-lowest": -4e9}
STEPS |= {"falling-lowest": -4e9, "rising-high": 2e4, "falling-high": 2e4, "rising-float": -1e27}
"""The difference between scores of neighbouring tokens; its sign is that of all scores."""

LONG = ((1, 1500, 4, 2, 64, 0), (3, 1100, 6, 3, 16, 0), (2, 1100, 4, 1, 32, 600))


def low_scores(clause: str, settings: Settings) -> Iterator[AttendCase]:
    for variant in STEPS:
        for case in attend_shapes(clause, settings):
            yield replace(case, variant=f"{variant}-{case.variant}".rstrip("-"))
        for shape in LONG:
            yield AttendCase(clause, "lattice", f"{variant}-deep", *shape)


@checks("attention.attend/C2", low_scores)
def test_all_scores_far_from_zero(backend: Remote, case: AttendCase) -> None:
    """Every score lies beyond ±10⁴, and each token's scores differ by that much from the next one's.

    They rise from token to token, so that later, hidden tokens have higher scores; or they fall, so that tokens before
    the window do. A mask that adds or sets a finite number lets one of these through, and a running maximum that starts
    at a finite number loses everything. The greatest visible score is that of the token itself or of the first in its
    window, and the result is its value, bit-identical.
    """
    queries, keys, values = attend_inputs(case)
    rising = case.variant.startswith("rising")
    step = next(size for name, size in STEPS.items() if case.variant.startswith(name))
    multiples = np.arange(1, case.length + 1) if rising == (step > 0) else np.arange(case.length, 0, -1)
    queries[...], keys[...] = 0, 0
    queries[..., 0] = 1
    keys[..., 0] = step * multiples * np.sqrt(case.head_dim)
    given = attended(backend, case, queries, keys, values)
    expected = np.empty(queries.shape)
    for token in range(case.tokens):
        visible = list(seen(case, token))
        winner = visible[-1] if rising else visible[0]
        expected[token] = np.repeat(values[:, winner], case.heads // case.kv_heads, axis=0)
    assert_equal_values(given, expected)


MANY_HEADS = ((1, 40, 8, 8, 16), (1, 40, 8, 2, 16), (2, 70, 32, 4, 64), (3, 50, 9, 3, 12), (1, 64, 40, 1, 64))


@checks("attention.attend/C2", grid(AttendCase, "lattice", ["every-head"], *MANY_HEADS))
def test_every_head_has_its_own_winner(backend: Remote, case: AttendCase) -> None:
    """Each query head uses a channel of its own, in which a different token wins: an exchange of any two heads is
    detected, even of two in one group."""
    queries, keys, values = attend_inputs(case)
    queries[...], keys[...] = 0, 0
    winners = case.generator().permutation(case.length - case.tokens + 1)[: case.head_dim]  # all tokens see these
    channels = np.arange(case.heads) % len(winners)
    queries[:, np.arange(case.heads), channels] = 1
    keys[:, winners, np.arange(len(winners))] = 1000 * np.sqrt(case.head_dim)
    given = attended(backend, case, queries, keys, values)
    group = case.heads // case.kv_heads
    expected = values[np.arange(case.heads) // group, winners[channels]]
    assert_equal_values(given, np.broadcast_to(expected, queries.shape).astype(np.float64))


DEEP = ((1, 1100, 4, 2, 64), (2, 1100, 6, 3, 16), (1, 1025, 2, 1, 128))


@checks("attention.attend/C3", grid(AttendCase, "edge", ("deep-scores", "deep-tied"), *DEEP))
def test_deep_attention_within_the_bound(backend: Remote, case: AttendCase, record_property: Record) -> None:
    """Two of 1100 tokens have scores of about 12, whose last bits decide between them; or all have equal scores, and
    half precision cannot represent their probability."""
    rng = case.generator()
    queries, keys, values = attend_inputs(case)
    queries[...], keys[...] = 0, 0
    values[...] = rng.uniform(1, 2, values.shape)
    if case.variant == "deep-scores":
        places = rng.permutation(case.length - case.tokens)[:2]
        queries[..., 0], keys[..., 0] = 1, -40 * np.sqrt(case.head_dim)
        queries[..., 1] = rng.uniform(3, 4, queries.shape[:2])
        keys[:, places, 0] = 0
        keys[:, places, 1] = np.float32(3.5 * np.sqrt(case.head_dim)) * rng.uniform(0.99, 1.01, (case.kv_heads, 2))
        values[:, places[0]] *= -1
    assert_bounded(backend, case, record_property, queries, keys, values, None)


# **The norm.**


OUTLIERS = ((3, 64), (2, 1536), (2, 4096), (1, 11008))


@checks("blocks.rms_norm/C2", grid(test_blocks.RowsCase, "lattice", ["one-large"], *OUTLIERS))
def test_norm_of_one_large_number(backend: Remote, case: test_blocks.RowsCase, record_property: Record) -> None:
    """An odd 12-bit number and a few ±1, whose squares have an exact sum below 2^24: no bit of the large number may be
    dropped before squaring."""
    rng = case.generator()
    x = np.zeros(case.shape, np.float32)
    for row in x:
        row[rng.permutation(case.columns)[:40]] = rng.choice((-1, 1), 40)
        row[rng.integers(case.columns)] = rng.choice((4095, 3971, -4077, -3839))
    assert_bounded(backend, case, record_property, x, test_blocks.gain_of(case), 1e-5, summed_exactly=True)


# **Pooling.**


def pairs(clause: str, settings: Settings) -> Iterator[HeadsCase]:
    for shape in ((9, 4, 1, 2), (33, 6, 2, 5), (40, 8, 1, 8), (40, 16, 1, 8), (130, 12, 4, 16)):
        for variant in ("any-pair", "any-pair-partly"):
            yield HeadsCase(clause, "lattice", variant, *shape, "mean")


@checks("pooling.pool/C1", pairs)
def test_any_two_heads_cancel(backend: Remote, case: HeadsCase) -> None:
    """Each pair of heads of a group cancels in some channel. They are so large that the other heads are partly or fully
    lost if added between them, which detects any other order of the sum."""
    rng, members = case.generator(), case.heads // case.groups
    weights = rng.normal(size=(case.rows, case.groups, members, case.head_dim))
    pairs_of = [(i, j) for i in range(members) for j in range(i + 1, members)]
    size = 2.0 ** (70 if case.variant == "any-pair" else 40)
    for number in range(case.rows * case.head_dim):
        row, channel = divmod(number, case.head_dim)
        first, second = pairs_of[number % len(pairs_of)]
        weights[row, :, first, channel] *= size
        weights[row, :, second, channel] = -weights[row, :, first, channel]
    narrow: F32 = np.ascontiguousarray(weights.reshape(case.rows, -1), np.float32)
    assert_reference(backend, case, "pooled", narrow, case.heads, case.groups, method=case.method)
