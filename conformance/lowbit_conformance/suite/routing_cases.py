"""What the cases of `routing` are made of: shapes, random layers, one guarded call, and the mistakes of its callers."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lowbit.arrays import F32
from lowbit.moe.routing import Ids, Scores, Softmax
from lowbit_conformance.suite.cases import Case
from lowbit_conformance.suite.inputs import NON_FINITE
from lowbit_conformance.suite.marking import Generator, Settings, grid


@dataclass(frozen=True)
class RoutingCase(Case):
    """A case of a sparse layer.

    Attributes:
        tokens: T.
        hidden: width of a token.
        experts: E.
        k: experts of a token.
        inner: width of an expert.
        scores: what the gate returns.
        softmax: before or after the choice of experts.
    """

    tokens: int
    hidden: int
    experts: int
    k: int
    inner: int
    scores: Scores = "logits"
    softmax: Softmax = "after"

    @property
    def label(self) -> str:
        shape = f"t{self.tokens}-h{self.hidden}-e{self.experts}-k{self.k}-i{self.inner}"
        chapter = {"routing.gate": self.scores, "routing.weights": self.softmax}
        return "-".join(word for word in (shape, chapter.get(self.operation)) if word)


# Tokens, hidden, experts, k, inner; the last two are the routing of Mixtral and of a model with many small experts.
SHAPES = ((1, 1, 1, 1, 1), (1, 8, 2, 1, 4), (3, 33, 8, 3, 17), (2, 16, 5, 5, 9), (7, 32, 8, 2, 40), (4, 24, 64, 6, 8))

# More tokens, wider layers, and more experts than a kernel takes at once.
LARGE = ((70, 24, 8, 2, 12), (2, 300, 4, 2, 150), (3, 16, 100, 24, 5))


# Hidden sizes, numbers of experts and inner widths of real models.
WIDE = ((2, 4096, 8, 2, 3), (1, 14336, 5, 2, 2))
MANY_EXPERTS = ((3, 24, 256, 8, 3), (2, 12, 300, 9, 2))


def shapes(tier: str = "lattice", variants: tuple[str, ...] = ("",)) -> Generator:
    return grid(RoutingCase, tier, variants, *SHAPES, *LARGE)


def random_shapes(clause: str, settings: Settings) -> Iterator[RoutingCase]:
    """The shapes above and one drawn from each seed, at three scales; `huge` saturates softmax and silu."""
    for variant in ("small", "plain", "huge"):
        for shape in (*SHAPES, *LARGE) if variant == "plain" else SHAPES:
            yield RoutingCase(clause, "random", variant, *shape)
    for seed in settings.seeds:
        rng = np.random.Generator(np.random.PCG64([seed, len(clause)]))
        tokens, hidden, experts, inner = (int(rng.integers(1, most)) for most in (9, 200, 20, 100))
        k = int(rng.integers(1, experts + 1))
        yield RoutingCase(clause, "random", "drawn", tokens, hidden, experts, k, inner, seed=seed)


def with_models(cases: Generator) -> Generator:
    """These cases, then one of each model size that the operation can have. On a lattice with sums of thousands of
    terms, an expert's silu would be neither the identity nor zero."""

    def generator(clause: str, settings: Settings) -> Iterator[Case]:
        first: RoutingCase | None = None
        for case in cases(clause, settings):
            assert isinstance(case, RoutingCase)
            first = first or case
            yield case
        assert first is not None
        experts = clause.startswith(("routing.expert/", "routing.sparse/"))
        for shape in (*MANY_EXPERTS, *(() if experts and first.tier == "lattice" else WIDE)):
            sizes = dict(zip(("tokens", "hidden", "experts", "k", "inner"), shape, strict=True))
            yield replace(first, variant="large-model", **sizes)

    return generator


SCALES = {"small": 0.01, "huge": 30.0}


def activations(case: RoutingCase, rng: np.random.Generator) -> F32:
    return (rng.normal(size=(case.tokens, case.hidden)) * SCALES.get(case.variant, 1.0)).astype(np.float32)


def experts_of(case: RoutingCase, rng: np.random.Generator) -> tuple[F32, F32, F32]:
    """Gate, up and down of E random experts."""
    wide, narrow = (case.experts, case.hidden, case.inner), (case.experts, case.inner, case.hidden)
    gate, up = (rng.normal(size=wide) / np.sqrt(case.hidden) for _ in range(2))
    down = rng.normal(size=narrow) / np.sqrt(case.inner)
    return gate.astype(np.float32), up.astype(np.float32), down.astype(np.float32)


def routes(case: RoutingCase, rng: np.random.Generator) -> tuple[Ids, F32]:
    """k distinct experts for each token, unordered, and weights that sum to about 1."""
    chosen = np.argsort(rng.random((case.tokens, case.experts)), axis=1)[:, : case.k].astype(np.int64)
    weights = rng.random(chosen.shape) + 0.1
    return chosen, (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)


non_finite = grid(RoutingCase, "edge", NON_FINITE, (4, 19, 6, 2, 11))


def assert_only_row_one_spoilt(result: F32) -> None:
    __tracebackhide__ = True
    finite = np.isfinite(result)
    assert not finite[1].any(), "WRONG: row 1 of x is not finite, and row 1 of the result has finite elements"
    assert finite[[0, 2, 3]].all(), "WRONG: a finite row of x gave a row that is not finite"


# Mistakes that do not follow from annotations, each in the routes or the scores.

Change = Callable[[Any], Any]
WRONG: tuple[int, ...] = (3, 19, 6, 2, 11)
"""The shape of the calls with mistakes."""
WRONG_IDS: dict[str, Change] = {
    "id-high": lambda chosen: np.where(chosen == chosen.max(), 6, chosen),
    "id-low": lambda chosen: np.where(chosen == chosen.max(), -1, chosen),
    "id-twice": np.zeros_like,
}
WRONG_PROBABILITIES: dict[str, Change] = {"negative": lambda scores: -scores, "all-zero": lambda scores: scores * 0}
