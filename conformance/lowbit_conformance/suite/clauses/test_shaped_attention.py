"""Checks of `attention.attend_shaped`: a factor, a soft cap and sinks, alone and together.

**The lattice** has equal scores, of which a power of two is seen, the sink included: each has a probability of one over
their number, and values are small integers, so that every order of the sum is exact. With a cap the scores lie so far
beyond it that their tanh is 1 in every type, and the sink is the cap itself.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

import numpy as np

from lowbit.arrays import F32, F64
from lowbit_conformance.isolation.remote import Remote
from lowbit_conformance.suite.bounded import assert_bounded, run_bounded
from lowbit_conformance.suite.clauses.test_attention import (
    LARGE,
    MODELS,
    SHAPES,
    WINDOWS,
    AttendCase,
    assert_sees_no_more,
    inputs,
    one_above_all,
    seen,
)
from lowbit_conformance.suite.compare import assert_equal_values, assert_same_bits, refuses
from lowbit_conformance.suite.marking import Generator, Record, Settings, checks, grid

SHAPINGS: dict[str, tuple[float | None, float | None, bool]] = {
    "none": (None, None, False),
    "factor": (0.25, None, False),
    "cap": (0.0625, 50.0, False),
    "sinks": (None, None, True),
    "all": (0.5, 2.0, True),
}
"""The factor, the cap, and whether there are sinks: as in Llama, Gemma 3, Gemma 2 and GPT-OSS, and all together."""

Shape = tuple[float | None, float | None, F32 | None]
"""The factor, the cap and the sinks of a call."""


@dataclass(frozen=True)
class ShapedCase(AttendCase):
    """A case of attention with one of `SHAPINGS`."""

    shaping: str = "all"

    @property
    def label(self) -> str:
        return f"{super().label}-{self.shaping}"

    @property
    def factor(self) -> float | None:
        return SHAPINGS[self.shaping][0]

    @property
    def cap(self) -> float | None:
        return SHAPINGS[self.shaping][1]

    @property
    def sunk(self) -> bool:
        return SHAPINGS[self.shaping][2]

    def parameters(self) -> dict[str, object]:
        shape = {"cap": "none" if self.cap is None else "soft", "sinks": "per-head" if self.sunk else "none"}
        return {**super().parameters(), **shape}


def shaped(case: AttendCase, shaping: str) -> ShapedCase:
    """A case of plain attention, turned into one of this operation."""
    own = {field.name: getattr(case, field.name) for field in fields(AttendCase)}
    return ShapedCase(**own, shaping=shaping)


def shapes(clause: str, settings: Settings, windows: tuple[int, ...] = WINDOWS) -> Iterator[ShapedCase]:
    """Every shape of plain attention with every window; shapings alternate, and every second case has all at once."""
    names = list(SHAPINGS)
    for turn, (shape, size) in enumerate((shape, size) for shape in SHAPES for size in windows):
        for shaping in dict.fromkeys((names[turn % 4], "all" if turn % 2 else "sinks")):
            yield ShapedCase(clause, "lattice", "", *shape, size, shaping)
    for turn, large in enumerate((*LARGE, MODELS[1], MODELS[3])):
        yield shaped(AttendCase(clause, "lattice", "large", *large), names[-1 - turn % 4])
    for seed in settings.seeds:
        tokens, group, kv_heads = 1 + seed % 5, 1 + seed % 4, 1 + seed % 3
        sizes = (tokens, tokens + 11 * seed % 40, group * kv_heads, kv_heads, 2 + 7 * seed % 60)
        yield ShapedCase(clause, "random", "drawn", *sizes, windows[seed % len(windows)], names[seed % 5], seed=seed)


def sinks_of(case: ShapedCase) -> F32 | None:
    """Sinks about as large as the scores, in no order."""
    if not case.sunk:
        return None
    return (2 * case.of(f"{case.clause}-sinks").generator().normal(size=case.heads)).astype(np.float32)


def attended(backend: Remote, case: ShapedCase, *arrays: F32, shape: Shape | None = None) -> F32:
    shape = shape or (case.factor, case.cap, sinks_of(case))
    return run_bounded(backend, case, arrays[0].shape, *arrays, case.window, *shape)


# **The lattice.**

SINGLE, PAIR = (1, 1, 1, 1, 2), (2, 8, 4, 2, 8)
EQUAL = (SINGLE, PAIR, (3, 16, 6, 3, 16), (1, 64, 4, 1, 64), (8, 9, 4, 2, 5), (1, 256, 2, 2, 32), (2, 1025, 2, 1, 4))
BESIDE = 256.0
"""A score on the lattice without a cap."""


def equal(clause: str, settings: Settings) -> Iterator[ShapedCase]:
    """Contexts and windows whose size is a power of two, or one less with a sink."""
    for shaping, (_, _, sunk) in SHAPINGS.items():
        for tokens, length, heads, kv_heads, head_dim in EQUAL:
            for size in (0, 3 if sunk else 4):
                own = length - 1 if sunk and length > 1 else length
                shape = (min(tokens, own), own, heads, kv_heads, head_dim, size)
                yield ShapedCase(clause, "lattice", "equal", *shape, shaping)


@checks("attention.attend_shaped/C1", equal)
def test_equal_scores_share_alike(backend: Remote, case: ShapedCase) -> None:
    """Scores differ between heads, and some are negative, but all tokens of a head have the same score: the result is
    the mean."""
    rng = case.generator()
    queries, keys, values = (np.zeros_like(part) for part in inputs(case))
    values[...] = rng.integers(-500, 501, values.shape)
    signs = rng.choice((-1, 1), case.heads).astype(np.float32)
    factor = case.factor or float(1 / np.sqrt(case.head_dim))
    queries[:, :, 0], keys[:, :, 0] = signs, 0 if case.factor is None else BESIDE / factor
    beside = 0.0 if case.factor is None else BESIDE
    sinks = signs * np.float32(beside if case.cap is None else case.cap) if case.sunk else None
    given = attended(backend, case, queries, keys, values, shape=(case.factor, case.cap, sinks))
    expected, counts = mean(case, values)
    whole = np.log2(counts) % 1 == 0
    assert_equal_values(given[whole], expected[whole])


def mean(case: ShapedCase, values: F32) -> tuple[F64, F64]:
    """The sum of the visible values of each token divided by the number of values and sinks, and this number."""
    counts = np.array([len(seen(case, token)) + case.sunk for token in range(case.tokens)], np.float64)
    sums = [values[:, list(seen(case, token))].astype(np.float64).sum(axis=1) for token in range(case.tokens)]
    heads = np.arange(case.heads) // (case.heads // case.kv_heads)
    return np.array(sums)[:, heads] / counts[:, np.newaxis, np.newaxis], counts


WIDE_CAP = 512.0


@checks("attention.attend_shaped/C2", shapes)
def test_one_score_above_all(backend: Remote, case: ShapedCase) -> None:
    """For each head one visible token has a score far above all others and the sink; the result is its value,
    bit-identical. A cap is wide enough for that."""
    arrays, expected, won = one_above_all(case, 1000 / (case.factor or 1 / np.sqrt(case.head_dim)))
    shape = case.factor, None if case.cap is None else WIDE_CAP, sinks_of(case)
    assert_equal_values(attended(backend, case, *arrays, shape=shape)[won], expected[won])


def sunk(variant: str) -> Generator:
    """The cases with sinks, without the large ones."""

    def generator(clause: str, settings: Settings) -> Iterator[ShapedCase]:
        for case in shapes(clause, settings):
            if case.sunk and not case.large:
                yield replace(case, variant=variant)

    return generator


@checks("attention.attend_shaped/C2", sunk("sink-above"))
def test_a_sink_above_all(backend: Remote, case: ShapedCase) -> None:
    """With a sink at least 280 above all scores the result is 0; heads with a sink of −∞ give what they see."""
    arrays = inputs(case)
    sinks = np.where(np.arange(case.heads) % 2 == 0, 300, -np.inf).astype(np.float32)
    given = attended(backend, case, *arrays, shape=(case.factor, case.cap, sinks))
    assert_equal_values(given[:, ::2], np.zeros(given[:, ::2].shape))
    assert not (given[:, 1::2] == 0).any(), "WRONG: a head without a sink has a result of 0"


# **The bound.**


@checks("attention.attend_shaped/C3", shapes)
def test_shaped_attention_within_the_bound(backend: Remote, case: ShapedCase, record_property: Record) -> None:
    """Random queries, keys, values and sinks stay within the chained bound."""
    shape = case.factor, case.cap, sinks_of(case)
    assert_bounded(backend, case, record_property, *inputs(case), case.window, *shape)


MOST = 2.0**32
EDGES: dict[str, tuple[float, float | None, float | None, float]] = {
    "least-cap": (1.0, 1 / MOST, None, 1.0),
    "small-cap": (1.0, 2.0**-20, 0.5, 30.0),
    "cap-beyond-scores": (1.0, MOST, 1.0, 1.0),
    "cap-far-beyond-scores": (2.0**-10, MOST, None, 1e-3),
    "scores-far-beyond-cap": (1.0, 3.0, 2.5, 1e15),
    "quotient-overflows": (1.0, 1 / MOST, 0.0, 1e17),
    "scores-about-cap": (1.0, 6.0, 5.0, 6.0),
    "factor-least": (1 / MOST, None, 0.0, 1e6),
    "factor-most": (MOST, 20.0, 3.0, 1e-6),
    "sink-minus-infinity": (1.0, 30.0, -np.inf, 1.0),
    "sink-of-minus-infinity-alone": (0.5, None, -np.inf, 1.0),
    "sink-near-overflow": (0.5, None, 87.0, 1.0),
    "sink-as-large-as-scores": (1.0, None, 100.0, 40.0),
    "sink-far-below": (0.5, None, -1e30, 1.0),
    "both-far-from-0": (1.0, None, -300.0, 1.0),
    "both-far-above-0": (1.0, None, 300.0, 1.0),
}
"""The factor, the cap, the sinks and the magnitude of queries."""
FEW = ((1, 9, 4, 2, 8, 0), (5, 33, 6, 2, 16, 0), (3, 20, 3, 1, 10, 4), (3, 12, 4, 4, 6, 1), (2, 5, 2, 1, 4, 64))
"""The last two have a window of 1, and one that is longer than the context."""


@checks("attention.attend_shaped/C3", grid(ShapedCase, "edge", EDGES, *FEW))
def test_extremes_of_shapes(backend: Remote, case: ShapedCase, record_property: Record) -> None:
    """Caps, factors and sinks at the ends of their ranges stay within the bound; a common offset of all scores brings
    them near the sinks."""
    factor, cap, sink, size = EDGES[case.variant]
    queries, keys, values = inputs(case)
    queries *= np.float32(size)
    sinks = None
    if sink is not None:
        sinks = (sink + case.generator().normal(size=case.heads)).astype(np.float32)
    if case.variant.startswith("both"):
        queries[..., 0], keys[..., 0] = 1, np.float32(sink)
    assert_bounded(backend, case, record_property, queries, keys, values, case.window, factor, cap, sinks)


# **What must not matter.**


@checks("attention.attend_shaped/C4", shapes)
def test_what_is_not_seen_changes_nothing(backend: Remote, case: ShapedCase) -> None:
    """Changing keys and values that the first token does not see, and the sinks of other heads, does not change the
    bits of the result."""
    first, sinks = assert_sees_no_more(attended, backend, case), sinks_of(case)
    if sinks is not None:
        own = case.generator().integers(case.heads)
        others = np.where(np.arange(case.heads) == own, sinks, 3 - sinks).astype(np.float32)
        again = attended(backend, case, *inputs(case), shape=(case.factor, case.cap, others))[0]
        assert_same_bits(first[own], again[own], "the sinks of other heads were changed")


# **Mistakes** that do not follow from annotations.

MISTAKES: dict[str, Callable[[F32, F32, F32, F32], tuple[F32, F32, F32, F32]]] = {
    "heads": lambda q, k, v, s: (q[:, :3].copy(), k, v, s[:3].copy()),
    "more-queries": lambda q, k, v, s: (np.concatenate([q, q, q]), k, v, s),
    "sink-nan": lambda q, k, v, s: (q, k, v, np.where(np.arange(len(s)) == 1, np.float32(np.nan), s)),
    "sink-infinite": lambda q, k, v, s: (q, k, v, np.where(np.arange(len(s)) == 1, np.float32(np.inf), s)),
}


@checks("attention.attend_shaped/H8", grid(ShapedCase, "edge", MISTAKES, (2, 5, 4, 2, 6)))
def test_shaped_attention_refuses(backend: Remote, case: ShapedCase) -> None:
    """Numbers of heads that do not divide, more queries than keys, and a sink of NaN or +∞ raise ArgumentError."""
    sinks = np.zeros(case.heads, np.float32)
    queries, keys, values, own = MISTAKES[case.variant](*inputs(case), sinks)
    with refuses():
        backend.run("attention.attend_shaped", queries, keys, values, None, 1.0, None, own)
