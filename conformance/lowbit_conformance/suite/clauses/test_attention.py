"""Checks of `attention.softmax` and `attention.attend`."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from lowbit.arrays import F32, F64, Array
from lowbit_conformance.isolation.remote import Remote
from lowbit_conformance.suite.bounded import assert_bounded, run_bounded
from lowbit_conformance.suite.cases import Case
from lowbit_conformance.suite.compare import assert_equal_values, assert_same_bits, refuses
from lowbit_conformance.suite.marking import Record, Settings, checks, grid

# Softmax.


@dataclass(frozen=True)
class RowsCase(Case):
    """A case with R rows of S scores."""

    rows: int
    columns: int


def rows(*variants: str) -> Callable[[str, Settings], Iterator[RowsCase]]:
    """Each variant at every width, then at widths from the seeds."""

    def generator(clause: str, settings: Settings) -> Iterator[RowsCase]:
        for variant in variants:
            for columns in (1, 2, 7, 8, 33, 100, 513):
                yield RowsCase(clause, "lattice", variant, 3, columns)
            for many, columns in ((70, 33), (2, 4099)):
                yield RowsCase(clause, "lattice", variant, many, columns)
            yield RowsCase(clause, "lattice", variant, 1, 70001)
            for seed in settings.seeds:
                yield RowsCase(clause, "random", variant, 4, 1 + 37 * seed % 300, seed=seed)

    return generator


@checks("attention.softmax/C1", rows("masked", "far-below"))
def test_one_score_takes_all(backend: Remote, case: RowsCase) -> None:
    """One finite score among −∞, or a score 200 above the others, has a probability of exactly 1."""
    rng = case.generator()
    scores = np.full((case.rows, case.columns), -np.inf if case.variant == "masked" else -200.0, np.float32)
    winners = rng.integers(0, case.columns, case.rows)
    scores[np.arange(case.rows), winners] = 0
    scores += rng.integers(-50, 50, (case.rows, 1)).astype(np.float32)
    given = run_bounded(backend, case, scores.shape, scores)
    expected = np.zeros(scores.shape)
    expected[np.arange(case.rows), winners] = 1
    assert_equal_values(given, expected)


@checks("attention.softmax/C2", rows("small", "plain", "huge", "with-masked", "far-from-0"))
def test_shares_within_the_bound(backend: Remote, case: RowsCase, record_property: Record) -> None:
    """Flat, ordinary and saturated rows, some far from zero, stay within the bound."""
    rng, scale = case.generator(), {"small": 0.01, "huge": 3e4}.get(case.variant, 3.0)
    scores = (rng.normal(size=(case.rows, case.columns)) * scale).astype(np.float32)
    if case.variant == "far-from-0":  # and close together, so that no probability vanishes
        scores += np.float32(2e4) * (1 - 2 * rng.integers(0, 2, (case.rows, 1)).astype(np.float32))
    if case.variant == "with-masked":
        scores[:, 1::2] = -np.inf
    assert_bounded(backend, case, record_property, scores)


@checks("attention.softmax/C3", rows("equal"))
def test_equal_scores_have_equal_shares(backend: Remote, case: RowsCase) -> None:
    """Equal scores of a row have equal probabilities, which do not depend on the scores of other rows."""
    scores = np.repeat(case.generator().normal(size=(case.rows, 1)), case.columns, axis=1).astype(np.float32)
    given = run_bounded(backend, case, scores.shape, scores)
    assert_same_bits(given, np.repeat(given[:, :1], case.columns, axis=1), "equal scores of one row")
    changed = scores.copy()
    changed[1:] *= -3
    assert_same_bits(given[:1], run_bounded(backend, case, scores.shape, changed)[:1], "row 0 when others changed")


SOFTMAX_MISTAKES: dict[str, Callable[[F32], Any]] = {
    "nan": lambda scores: np.where(np.arange(scores.shape[1]) == 1, np.float32(np.nan), scores),
    "infinity": lambda scores: np.where(np.arange(scores.shape[1]) == 1, np.float32(np.inf), scores),
    "nothing-seen": lambda scores: np.full_like(scores, -np.inf),
}


@checks("attention.softmax/H8", grid(RowsCase, "edge", SOFTMAX_MISTAKES, (2, 5)))
def test_softmax_refuses(backend: Remote, case: RowsCase) -> None:
    """NaN, +∞ and a row of −∞ only raise ArgumentError."""
    scores = case.generator().normal(size=(case.rows, case.columns)).astype(np.float32)
    with refuses():
        backend.run("attention.softmax", SOFTMAX_MISTAKES[case.variant](scores))


# Attention.


@dataclass(frozen=True)
class AttendCase(Case):
    """The last T of S tokens, H query heads on G key-value heads of d_h channels; a window of 0 means no window."""

    tokens: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    size: int = 0

    @property
    def label(self) -> str:
        window = f"-w{self.size}" if self.size else ""
        return f"t{self.tokens}of{self.length}-h{self.heads}on{self.kv_heads}-d{self.head_dim}{window}"

    def parameters(self) -> dict[str, object]:
        return {"head_dim": self.head_dim, "window": "sliding" if self.size else "none"}

    @property
    def movable(self) -> dict[str, str]:
        return {"head_dim": "head_dim"}

    @property
    def possible(self) -> bool:
        """Scores of the edge tier need two channels."""
        return self.head_dim > 1 or self.tier != "edge"

    @property
    def window(self) -> int | None:
        return self.size or None


# Prefill, decoding and between; multi-head, grouped-query and multi-query; with and without a window.
SHAPES = ((1, 1, 1, 1, 2), (5, 5, 4, 4, 8), (4, 9, 6, 2, 16), (1, 33, 9, 3, 64), (7, 7, 4, 1, 32), (3, 20, 8, 2, 10))
WINDOWS = (0, 1, 4)
# A long context, a long prompt, many heads: more than a kernel processes at once; the last number is a window.
LARGE = (
    (1, 300, 4, 2, 64, 0),
    (1, 300, 4, 2, 64, 100),
    (70, 130, 2, 1, 128, 0),
    (70, 130, 2, 1, 16, 50),
    (3, 40, 40, 8, 16, 0),
)
# A cache of thousands of tokens, a window of thousands, a prompt of hundreds; the widest heads in use.
MODELS = ((1, 5000, 2, 1, 256, 0), (2, 4200, 4, 2, 64, 4096), (1, 66001, 1, 1, 8, 0), (300, 620, 1, 1, 32, 0))


def shapes(clause: str, settings: Settings, windows: tuple[int, ...] = WINDOWS) -> Iterator[AttendCase]:
    """Every shape with every window, then shapes from the seeds."""
    for size in windows:
        for shape in SHAPES:
            yield AttendCase(clause, "lattice", "", *shape, size)
    for large in (*LARGE, *MODELS):
        window = windows if windows == (1,) else large[-1:]
        yield AttendCase(clause, "lattice", "large", *large[:-1], *window)
    for seed in settings.seeds:
        tokens, group = 1 + seed % 6, 1 + seed % 4
        kv_heads = 1 + seed % 3
        shape = (tokens, tokens + 7 * seed % 40, group * kv_heads, kv_heads, 2 + 5 * seed % 60)
        yield AttendCase(clause, "random", "drawn", *shape, windows[seed % len(windows)], seed=seed)


def inputs(case: AttendCase) -> tuple[F32, F32, F32]:
    rng = case.generator()
    queries = rng.normal(size=(case.tokens, case.heads, case.head_dim))
    keys, values = rng.normal(size=(2, case.kv_heads, case.length, case.head_dim))
    return queries.astype(np.float32), keys.astype(np.float32), values.astype(np.float32)


def attended(backend: Remote, case: AttendCase, *arrays: F32) -> F32:
    return run_bounded(backend, case, arrays[0].shape, *arrays, case.window)


def seen(case: AttendCase, token: int) -> range:
    """The tokens that token `token` of the T attends to."""
    end = case.length - case.tokens + token + 1
    return range(0 if case.window is None else max(0, end - case.window), end)


@checks("attention.attend/C1", lambda clause, settings: shapes(clause, settings, (1,)))
def test_one_token_is_its_value(backend: Remote, case: AttendCase) -> None:
    """With a window of 1 the result of each token is its own value in the head of its group, bit-identical."""
    queries, keys, values = inputs(case)
    given = attended(backend, case, queries, keys, values)
    own = values[:, case.length - case.tokens :]
    expected = np.repeat(own, case.heads // case.kv_heads, axis=0).swapaxes(0, 1)
    assert_equal_values(given, expected.astype(np.float64))


@checks("attention.attend/C2", shapes)
def test_one_score_above_all(backend: Remote, case: AttendCase) -> None:
    """For each head one visible token has a score far above all others; the result is its value, bit-identical.

    This detects a query head that reads the wrong key-value head, a token too many or too few, and a wrong scale.
    """
    arrays, expected, won = one_above_all(case, 1000 * np.sqrt(case.head_dim))
    assert_equal_values(attended(backend, case, *arrays)[won], expected[won])


def one_above_all(case: AttendCase, height: float) -> tuple[tuple[F32, F32, F32], F64, Array]:
    """Inputs in which one key of each head is `height` in one channel and all others are 0; the results that equal its
    value; and a mask, T × H, of the tokens that see it."""
    queries, keys, values = inputs(case)
    queries[...], keys[...] = 0, 0
    group = case.heads // case.kv_heads
    winners = case.generator().integers(0, case.length, case.kv_heads)
    keys[np.arange(case.kv_heads), winners, 0] = height
    queries[:, :, 0] = 1
    own = np.repeat(winners, group)
    expected = np.broadcast_to(values[np.arange(case.heads) // group, own], queries.shape).astype(np.float64)
    won = np.array([np.isin(own, seen(case, token)) for token in range(case.tokens)])
    return (queries, keys, values), expected, won


@checks("attention.attend/C3", shapes)
def test_attention_within_the_bound(backend: Remote, case: AttendCase, record_property: Record) -> None:
    """Random queries, keys and values stay within the chained bound."""
    assert_bounded(backend, case, record_property, *inputs(case), case.window)


@checks("attention.attend/C4", shapes)
def test_what_is_not_seen_changes_nothing(backend: Remote, case: AttendCase) -> None:
    """Different keys and values outside the view of the first token do not change the bits of its result."""
    assert_sees_no_more(attended, backend, case)


def assert_sees_no_more(attended: Callable[..., F32], backend: Remote, case: AttendCase) -> F32:
    """Different keys and values outside the view of the first token do not change its result, which is returned."""
    __tracebackhide__ = True
    queries, keys, values = inputs(case)
    first: F32 = attended(backend, case, queries, keys, values)[0]
    hidden = np.setdiff1d(np.arange(case.length), np.array(seen(case, 0)))
    keys[:, hidden] += 5
    values[:, hidden] -= 7
    assert_same_bits(first, attended(backend, case, queries, keys, values)[0], "what it does not see was changed")
    return first


ATTEND_MISTAKES: dict[str, Callable[[F32, F32, F32], tuple[F32, F32, F32]]] = {
    "heads": lambda q, k, v: (q[:, :3].copy(), k, v),
    "more-queries": lambda q, k, v: (np.concatenate([q, q, q]), k, v),
}


@checks("attention.attend/H8", grid(AttendCase, "edge", ATTEND_MISTAKES, (2, 5, 4, 2, 6)))
def test_attend_refuses(backend: Remote, case: AttendCase) -> None:
    """Numbers of heads that do not divide, and more queries than keys, raise ArgumentError."""
    with refuses():
        backend.run("attention.attend", *ATTEND_MISTAKES[case.variant](*inputs(case)))
