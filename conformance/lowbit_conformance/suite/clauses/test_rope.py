"""Checks of `rope.rotate`."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from lowbit.arrays import F32, F64
from lowbit.attention import rope
from lowbit.attention.ksort import permuted_layout
from lowbit.attention.rope import Layout, Rotation, half_split, interleaved
from lowbit_conformance.isolation.remote import Remote
from lowbit_conformance.suite.bounded import assert_bounded, assert_on_lattice, run_bounded
from lowbit_conformance.suite.cases import Case
from lowbit_conformance.suite.marking import Record, Settings, checks


@dataclass(frozen=True)
class RopeCase(Case):
    """A case with T tokens of some heads of d_h channels; the variant names the pairing."""

    tokens: int
    heads: int
    head_dim: int

    @property
    def movable(self) -> dict[str, str]:
        return {"head_dim": "head_dim"}

    @property
    def possible(self) -> bool:
        return self.head_dim % 2 == 0  # pairings of channels


PAIRINGS = ("half-split", "interleaved", "half-split-permuted", "interleaved-permuted")
SHAPES = ((1, 1, 2), (3, 2, 6), (5, 3, 16), (2, 9, 64), (7, 1, 128), (1, 4, 256), (70, 2, 8), (3, 40, 64))


def shapes(clause: str, settings: Settings) -> Iterator[RopeCase]:
    """Every pairing at every shape, then shapes from the seeds."""
    for pairing in PAIRINGS:
        for shape in SHAPES:
            yield RopeCase(clause, "lattice", pairing, *shape)
        for seed in settings.seeds:
            yield RopeCase(clause, "random", pairing, 1 + seed % 7, 1 + seed % 5, 2 + 2 * (29 * seed % 60), seed=seed)


def model_shapes(clause: str, settings: Settings) -> Iterator[RopeCase]:
    """More tokens than 16 bits can count, heads and channels as in models, and positions past 2^16 and 2^24."""
    for pairing in PAIRINGS[:2]:
        yield RopeCase(clause, "lattice", f"{pairing}-large", 70001, 1, 2)
        yield RopeCase(clause, "lattice", f"{pairing}-large", 2, 128, 256)
    for variant in FIRST:
        yield RopeCase(clause, "lattice", variant, 9, 2, 64)


FIRST = {"half-split-large-far": 2**16 - 4, "interleaved-large-far": 2**17 - 4, "half-split-large-farther": 2**24 - 4}
"""The position of the first token, if it is not drawn."""


def layout_of(case: RopeCase) -> Layout:
    layout = (half_split if case.variant.startswith("half") else interleaved)(case.head_dim)
    if not case.variant.endswith("permuted"):
        return layout
    return permuted_layout(layout, case.generator().permutation(case.head_dim))


def inputs(case: RopeCase) -> tuple[F32, Rotation]:
    rng = case.generator()
    x = rng.normal(size=(case.tokens, case.heads, case.head_dim)) * np.exp(rng.normal(size=case.head_dim))
    first = FIRST.get(case.variant) or int(rng.integers(0, 5000))
    return x.astype(np.float32), rope.rotation(layout_of(case), 10000.0, first, case.tokens)


def quarter_turns(case: RopeCase) -> tuple[F32, Rotation]:
    x, turn = quarters(case.generator(), layout_of(case), case.tokens, case.heads)
    return x.astype(np.float32), turn


def quarters(rng: np.random.Generator, layout: Layout, tokens: int, heads: int) -> tuple[F64, Rotation]:
    """Integers, and an angle of 0, 1, 2 or 3 quarter turns for each token and pair."""
    count = rng.integers(0, 4, (tokens, layout.head_dim // 2))[:, layout.pair]
    cos, sin = np.array([1.0, 0.0, -1.0, 0.0])[count], np.array([0.0, 1.0, 0.0, -1.0])[count]
    x = rng.integers(-99, 100, (tokens, heads, layout.head_dim))
    return x.astype(np.float64), Rotation(layout, cos, layout.sign * sin)


@checks("rope.rotate/C1", model_shapes)
@checks("rope.rotate/C1", shapes)
def test_quarter_turns_are_exact(backend: Remote, case: RopeCase) -> None:
    """Integers rotated by quarter turns are equal: this detects every wrong partner and every wrong sign."""
    assert_on_lattice(backend, case, *quarter_turns(case))


@checks("rope.rotate/C2", model_shapes)
@checks("rope.rotate/C2", shapes)
def test_turns_within_the_bound(backend: Remote, case: RopeCase, record_property: Record) -> None:
    """Random heads at random positions, also past 2^16 and 2^24, stay within the bound of two terms."""
    assert_bounded(backend, case, record_property, *inputs(case))


@checks("rope.rotate/C3", shapes)
def test_a_pair_turns_alone(backend: Remote, case: RopeCase) -> None:
    """With a single nonzero channel, only it and its partner are nonzero afterwards."""
    x, turn = inputs(case)
    for channel in (0, case.head_dim // 2, case.head_dim - 1):
        one = np.zeros_like(x)
        one[..., channel] = x[..., channel]
        given = run_bounded(backend, case, x.shape, one, turn)
        others = np.delete(np.arange(case.head_dim), [channel, turn.layout.partner[channel]])
        assert (given[..., others] == 0).all(), f"WRONG: channel {channel} moved others than its partner"
