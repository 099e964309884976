"""Checks of `pooling.pool`, all of them exact."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from lowbit.arrays import F32
from lowbit.attention.pooling import METHODS, Method
from lowbit_conformance.isolation.remote import Remote
from lowbit_conformance.suite.bounded import assert_reference
from lowbit_conformance.suite.cases import Case
from lowbit_conformance.suite.compare import assert_array, assert_exact, refuses
from lowbit_conformance.suite.marking import Settings, checks, grid


@dataclass(frozen=True)
class HeadsCase(Case):
    """A case with a projection and its heads.

    Attributes:
        rows: the number of rows of the projection; 1 for a bias.
        heads: H.
        groups: G.
        head_dim: d_h.
        method: ``mean`` or ``first``.
    """

    rows: int
    heads: int
    groups: int
    head_dim: int
    method: Method

    @property
    def label(self) -> str:
        return f"{self.rows}x{self.heads}x{self.head_dim}-g{self.groups}-{self.method}"


SHAPES = (
    (1, 1, 1, 1),
    (1, 2, 1, 3),
    (3, 4, 2, 1),
    (5, 6, 2, 4),
    (7, 6, 3, 5),
    (9, 9, 9, 2),
    (64, 8, 1, 8),
    (33, 32, 8, 16),
    (130, 6, 2, 80),
)
OUTLIERS = ("", "wide", "cancelling", "large-first", "subnormal", "duplicated")


def shapes(method: Method, variants: tuple[str, ...] = OUTLIERS) -> Callable[[str, Settings], Iterator[HeadsCase]]:
    def generator(clause: str, settings: Settings) -> Iterator[HeadsCase]:
        for variant in variants:
            for shape in SHAPES:
                yield HeadsCase(clause, "lattice", variant, *shape, method)
            for seed in settings.seeds:
                rng = np.random.Generator(np.random.PCG64(seed))
                groups, members, head_dim, rows = (int(size) for size in rng.integers(1, 13, 4))
                shape = (rows, groups * members, groups, head_dim)
                yield HeadsCase(clause, "random", f"{variant}-drawn".lstrip("-"), *shape, method, seed=seed)

    return generator


def projection(case: HeadsCase) -> F32:
    """Weights of one kind; *wide*, *cancelling* and *large-first* weights distinguish orders and precisions of the
    sum."""
    rng = case.generator()
    shape = (case.rows, case.groups, case.heads // case.groups, case.head_dim)
    weights = rng.normal(size=shape)
    if "wide" in case.variant:
        weights = weights * np.exp2(rng.integers(-60, 60, shape))
    elif "cancelling" in case.variant:
        weights[:, :, 1::2] = -weights[:, :, : shape[2] // 2] * (1 + 2.0**-20)
    elif "large-first" in case.variant and shape[2] > 2:  # lost in another order
        weights[:, :, 0] *= 2.0**70
        weights[:, :, 1] = -weights[:, :, 0]
    elif "subnormal" in case.variant:
        weights = weights * 2.0**-140
    elif "duplicated" in case.variant:
        weights = np.broadcast_to(weights[:, :, :1], shape)
    return np.ascontiguousarray(weights.reshape(case.rows, -1), np.float32)


def run(backend: Remote, case: HeadsCase, weights: F32) -> F32:
    __tracebackhide__ = True
    pooled = backend.run("pooling.pool", weights, case.heads, case.groups, method=case.method)
    return assert_array("pooled", pooled, np.float32, (case.rows, case.groups * case.head_dim))


@checks("pooling.pool/C2", shapes("first"))
@checks("pooling.pool/C1", shapes("mean"))
def test_pooled_heads(backend: Remote, case: HeadsCase) -> None:
    """Heads of very different sizes, nearly opposite heads, subnormal heads and equal heads give their mean, or the
    first."""
    assert_reference(backend, case, "pooled", projection(case), case.heads, case.groups, method=case.method)


def duplicated(clause: str, settings: Settings) -> Iterator[HeadsCase]:
    for method in METHODS:
        yield from shapes(method, ("duplicated",))(clause, settings)


@checks("pooling.pool/C3", duplicated)
def test_equal_heads_come_back(backend: Remote, case: HeadsCase) -> None:
    """Pooling repeated heads gives the heads themselves; this needs no reference."""
    weights = projection(case)
    pooled = run(backend, case, weights)
    members = weights.reshape(case.rows, case.groups, -1, case.head_dim)
    assert_exact("pooled", pooled, np.ascontiguousarray(members[:, :, 0]).reshape(case.rows, -1))


MISTAKES = {"heads-5": (5, 1), "groups-3": (4, 3)}
"""Heads and groups."""


@checks("pooling.pool/H8", grid(HeadsCase, "edge", MISTAKES, (3, 4, 2, 2, "mean")))
def test_refuses(backend: Remote, case: HeadsCase) -> None:
    """A number of heads that does not divide the columns, or of groups that does not divide the heads, raises
    ArgumentError."""
    with refuses():
        backend.run("pooling.pool", projection(case), *MISTAKES[case.variant], "mean")
