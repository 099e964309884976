"""The exhaustive tier of routing, layouts, pooling and offloading: all there is of each, where that is little.

All orders and all ties of five scores, all small matrices in all small blocks, all ways to group a few heads, and runs
in which every request is made after every other.
"""

from collections.abc import Iterator
from itertools import combinations, permutations, product

import numpy as np

from lowbit.attention.pooling import METHODS
from lowbit.kernels.layouts import ColumnPanels
from lowbit.moe.offload import MEMORIES, Request
from lowbit_conformance.isolation.remote import Remote
from lowbit_conformance.suite.bounded import assert_reference, run
from lowbit_conformance.suite.clauses.test_layouts import ANY_BLOCK, LayoutCase, places
from lowbit_conformance.suite.clauses.test_offload import OffloadCase, assert_traced
from lowbit_conformance.suite.clauses.test_pooling import HeadsCase
from lowbit_conformance.suite.compare import assert_exact
from lowbit_conformance.suite.marking import Settings, checks, grid
from lowbit_conformance.suite.routing_cases import RoutingCase

TIER = "exhaustive"
EXPERTS = 5


# The choice of experts.


def every_k(variant: str, tokens: int, clause: str) -> Iterator[RoutingCase]:
    for k in range(1, EXPERTS + 1):
        yield RoutingCase(clause, TIER, variant, tokens, 1, EXPERTS, k, 1)


@checks("routing.top_k/C1", lambda clause, settings: every_k("all-orders", 120, clause))
def test_every_order_of_five_scores(backend: Remote, case: RoutingCase) -> None:
    """Five distinct scores in all orders, one token for each order."""
    scores = np.array(list(permutations((-2.5, -0.5, 0.0, 1.0, 3.0))), np.float32)
    given = run(backend, case, scores, case.k)
    expected = [sorted(range(EXPERTS), key=lambda e: -float(row[e]))[: case.k] for row in scores]
    assert_exact("chosen", given, np.array(expected, np.int64))


@checks("routing.top_k/C2", lambda clause, settings: every_k("all-ties", 4**EXPERTS, clause))
def test_every_tie_of_five_scores(backend: Remote, case: RoutingCase) -> None:
    """Five scores from −1, −0, +0 and 1 in all combinations, one token for each: experts are ordered by score, then by
    id."""
    scores = np.array(list(product((-1.0, -0.0, 0.0, 1.0), repeat=EXPERTS)), np.float32)
    given = run(backend, case, scores, case.k)
    expected = [sorted(range(EXPERTS), key=lambda e: (-float(row[e]), e))[: case.k] for row in scores]
    assert_exact("chosen", given, np.array(expected, np.int64))


# Layouts.


SMALL = [(order, *sizes, *sizes) for order in ANY_BLOCK for sizes in product(range(1, 4), range(1, 6))]
small_matrices = grid(LayoutCase, TIER, ["all-blocks-up-to"], *SMALL)
"""Each case covers all blocks that are not larger than its matrix."""


def blocks(case: LayoutCase) -> Iterator[LayoutCase]:
    """The cases that it covers; a panel is as high as its matrix."""
    heights = [case.rows] if case.order == ColumnPanels.order else list(range(1, case.rows + 1))
    for height, width in product(heights, range(1, case.columns + 1)):
        yield LayoutCase(case.clause, TIER, "", case.order, case.rows, case.columns, height, width)


@checks("blocking.apply/C1", small_matrices)
def test_apply_every_small_block(backend: Remote, case: LayoutCase) -> None:
    """Distinct words are at the same places in the stream as in the reference's."""
    for each in blocks(case):
        assert_reference(backend, case, f"stream of {each.label}", places(each), each.layout)


@checks("blocking.invert/C1", small_matrices)
def test_invert_every_small_block(backend: Remote, case: LayoutCase) -> None:
    """Distinct elements return to the same rows and columns as in the reference's."""
    for each in blocks(case):
        assert_reference(backend, case, f"words of {each.label}", places(each).reshape(-1), each.layout)


# Pooling.


def few_heads(clause: str, settings: Settings) -> Iterator[HeadsCase]:
    for heads in range(1, 13):
        for groups in (groups for groups in range(1, heads + 1) if heads % groups == 0):
            yield HeadsCase(clause, TIER, "all-groupings", 2, heads, groups, 3, METHODS[clause.endswith("C2")])


@checks(("pooling.pool/C1", "pooling.pool/C2"), few_heads)
def test_pooled_in_every_grouping(backend: Remote, case: HeadsCase) -> None:
    """All ways to pool up to twelve heads."""
    weights = case.generator().normal(size=(case.rows, case.heads * case.head_dim)).astype(np.float32)
    assert_reference(backend, case, "pooled", weights, case.heads, case.groups, method=case.method)


# Offloading.


ONE_LAYER = [(1, 3, slots, 1, memory, 3, 0, 7**3 + 2) for slots, memory in product((1, 2, 3), MEMORIES)]
"""Three experts in one layer, all numbers of slots: each of 7 choices of experts after any two others."""
TWO_LAYERS = [(2, 3, *places, 3, 2, 2 * 10 * 7) for places in product((1, 2), (1, 2), MEMORIES)]
"""Three experts in two layers: all guesses before all choices of experts, twice."""


NEEDS = [needed for count in (1, 2, 3) for needed in combinations(range(3), count)]
GUESSES = [guesses for count in (0, 1, 2) for guesses in permutations(range(3), count)]


def all_triples(symbols: int) -> list[int]:
    """A sequence of numbers below `symbols` that contains every three in a row (de Bruijn).

    >>> all_triples(2)
    [0, 0, 0, 1, 0, 1, 1, 1, 0, 0]
    """
    # The Lyndon words of lengths 1 and 3, concatenated in order, are such a cycle.
    words = [word for count in (1, 3) for word in product(range(symbols), repeat=count)]
    lyndon = sorted(word for word in words if all(word < word[i:] + word[:i] for i in range(1, len(word))))
    cycle = [symbol for word in lyndon for symbol in word]
    return cycle + cycle[:2]


@checks("offload.trace/C1", grid(OffloadCase, TIER, ["all-triples"], *ONE_LAYER))
def test_every_request_after_every_two(backend: Remote, case: OffloadCase) -> None:
    """One long run that contains every sequence of three requests."""
    requests = [Request(0, NEEDS[number]) for number in all_triples(len(NEEDS))]
    assert_traced(backend, case, requests)


@checks("offload.trace/C2", grid(OffloadCase, TIER, ["all-guesses"], *TWO_LAYERS))
def test_every_guess_before_every_need(backend: Remote, case: OffloadCase) -> None:
    """One long run of all combinations of guesses and needed experts, in two random orders; the experts that the first
    layer needs are random too."""
    rng, passes = case.generator(), list(product(GUESSES, NEEDS))
    requests = []
    for number in (*rng.permutation(len(passes)), *rng.permutation(len(passes))):
        guesses, needed = passes[number]
        requests += [Request(0, NEEDS[int(rng.integers(len(NEEDS)))], guesses), Request(1, needed)]
    assert_traced(backend, case, requests)
