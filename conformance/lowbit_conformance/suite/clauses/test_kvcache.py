"""Checks of `kvcache.bfp`: what a cache in Block Floating Point answers, step by step.

What is right follows from `bfp.cast` and `bfp.decode` of each row alone, so nothing here keeps a cache of its own.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from lowbit.arrays import F32, Array
from lowbit.quantization import bfp
from lowbit.quantization.bfp import Format
from lowbit_conformance.isolation.calls import Call, Variant
from lowbit_conformance.isolation.remote import Remote
from lowbit_conformance.suite.cases import Case
from lowbit_conformance.suite.compare import assert_exact, assert_kind, refuses
from lowbit_conformance.suite.marking import Settings, checks, grid

Tokens = tuple[F32, F32]  # keys and values, T × G × d_h each
NAMES = ("keys", "values")


@dataclass(frozen=True)
class CacheCase(Case):
    """A case with a cache and a number of tokens.

    Attributes:
        kv_heads: G.
        head_dim: d_h.
        key_block, key_mantissa, key_exponent: the format of the keys.
        value_block, value_mantissa, value_exponent: the format of the values.
        tokens: S.
    """

    kv_heads: int
    head_dim: int
    key_block: int
    key_mantissa: int
    key_exponent: int
    value_block: int
    value_mantissa: int
    value_exponent: int
    tokens: int

    @property
    def label(self) -> str:
        keys = f"k{self.key_block}.{self.key_mantissa}.{self.key_exponent}"
        values = f"v{self.value_block}.{self.value_mantissa}.{self.value_exponent}"
        return f"{self.kv_heads}x{self.head_dim}-{keys}-{values}-{self.tokens}tokens"

    @property
    def movable(self) -> dict[str, str]:
        return {name: name for name in ("kv_heads", "head_dim")}

    @property
    def opening(self) -> tuple[int, int, Format, Format]:
        """The arguments that open it."""
        keys = Format(self.key_block, self.key_mantissa, self.key_exponent)
        return self.kv_heads, self.head_dim, keys, Format(self.value_block, self.value_mantissa, self.value_exponent)


BFP12, BFP16 = (32, 4, 8), (64, 8, 8)
SHAPES: tuple[tuple[int, int, tuple[int, int, int], tuple[int, int, int]], ...] = (
    (2, 64, BFP12, BFP16),
    (1, 128, BFP16, BFP12),
    (3, 33, BFP12, BFP12),
    (5, 1, (1, 2, 3), (7, 12, 8)),
    (2, 10, (3, 5, 6), (20, 25, 8)),
    (2, 200, (128, 4, 8), (128, 8, 8)),
)


def caches(*counts: int) -> Callable[[str, Settings], Iterator[CacheCase]]:
    """Every shape with each number of tokens; then one of the formats in a random shape from each seed."""

    def generator(clause: str, settings: Settings) -> Iterator[CacheCase]:
        for heads, head_dim, keys, values in SHAPES:
            for tokens in counts:
                yield CacheCase(clause, "lattice", "", heads, head_dim, *keys, *values, tokens)
        for seed in settings.seeds:
            *_, keys, values = SHAPES[seed % len(SHAPES)]
            sizes = (1 + seed % 4, 1 + 37 * seed % 70)
            yield CacheCase(clause, "random", "", *sizes, *keys, *values, 1 + 7 * seed % 11, seed=seed)

    return generator


def drawn(case: CacheCase, rng: np.random.Generator, tokens: int | None = None) -> Tokens:
    """Keys and values whose magnitudes differ much between tokens and between channels, with some zeros."""
    shape = (tokens or case.tokens, case.kv_heads, case.head_dim)

    def one() -> F32:
        scale = np.exp2(rng.integers(-30, 30, (shape[0], 1, 1)) + rng.integers(-6, 6, shape))
        x: F32 = (rng.normal(size=shape) * scale * (rng.random(shape) < 0.9)).astype(np.float32)
        return x

    return one(), one()


def parts(tokens: tuple[Array, Array], lengths: Sequence[int]) -> Iterator[tuple[Array, Array]]:
    """The tokens in steps of these lengths."""
    for start, length in zip(np.cumsum([0, *lengths]), lengths, strict=False):
        keys, values = (np.ascontiguousarray(part[start : start + length]) for part in tokens)
        yield keys, values


def lengths(total: int, rng: np.random.Generator) -> list[int]:
    """Steps of one token and of several, in any order."""
    found: list[int] = []
    while total:
        found.append(min(total, int(rng.choice((1, 1, 2, 5)))))
        total -= found[-1]
    return found


def taken(session: Any, step: tuple[Array, Array]) -> Tokens:
    """Make one step; returns copies of its two result arrays."""
    __tracebackhide__ = True
    answer: Any = assert_kind("what a step answers with", session.step(*step), tuple)
    if len(answer) != 2:
        raise AssertionError(f"WRONG: a step answers with {len(answer)} parts; allowed: keys and values")
    keys, values = (assert_kind(name, part, np.ndarray).copy() for name, part in zip(NAMES, answer, strict=True))
    return keys, values


def assert_holds(case: CacheCase, answer: Tokens, given: Sequence[Tokens]) -> None:
    """Each row of the result is the given row, cast and decoded."""
    __tracebackhide__ = True
    for kind, (name, format) in enumerate(zip(NAMES, case.opening[2:], strict=True)):
        rows = np.concatenate([step[kind] for step in given]).swapaxes(0, 1)  # G × S × d_h
        flat = bfp.decode(bfp.cast(np.ascontiguousarray(rows).reshape(-1, case.head_dim), format))
        assert_exact(name, answer[kind], flat.reshape(rows.shape))


@checks("kvcache.bfp/C1", caches(1, 9))
def test_each_token_is_cast_and_decoded(backend: Remote, case: CacheCase) -> None:
    """After every step the cache holds all tokens so far, in order, each cast row by row."""
    rng = case.generator()
    steps = list(parts(drawn(case, rng), lengths(case.tokens, rng)))
    with closing(backend.open("kvcache.bfp", *case.opening)) as session:
        for number, step in enumerate(steps):
            answer = taken(session, step)
            assert_holds(case, answer, steps[: number + 1])


def growing(clause: str, settings: Settings) -> Iterator[CacheCase]:
    """The same cases, and one that is long enough for a cache to grow several times."""
    yield from caches(6)(clause, settings)
    heads, head_dim, keys, values = SHAPES[-2]
    yield CacheCase(clause, "lattice", "long", heads, head_dim, *keys, *values, 150)


LONG = ((1, 256, *BFP12, *BFP16, 4402), (1, 4, *BFP16, *BFP12, 66005))
"""Thousands of tokens, and the widest heads in use."""


@checks("kvcache.bfp/C1", grid(CacheCase, "lattice", ["large-context"], *LONG))
def test_a_long_context_is_cast_and_decoded(backend: Remote, case: CacheCase) -> None:
    """After a long prompt, a token and a second prompt the cache holds all tokens, in order."""
    rng = case.generator()
    first = case.tokens - case.tokens // 3
    steps = list(parts(drawn(case, rng), [first, 1, case.tokens - first - 1]))
    with closing(backend.open("kvcache.bfp", *case.opening)) as session:
        for step in steps:
            answer = taken(session, step)
    assert_holds(case, answer, steps)


OFFSETS = [Variant(side=1, offset=offset, stride=5, handle=number) for number, offset in enumerate(range(0, 64, 3))]


FEW = ((1, 128, *BFP16, *BFP12, 6), (3, 33, *BFP12, *BFP12, 6))


@checks("kvcache.bfp/C1", grid(CacheCase, "lattice", ["offsets"], *FEW))
def test_tokens_from_every_offset(backend: Remote, case: CacheCase) -> None:
    """Caches whose tokens begin at different offsets of a cache line give equal and right results."""
    rng = case.generator()
    steps = list(parts(drawn(case, rng), [3, 1, 2]))
    (session,) = backend.elsewhere(Call("open", "kvcache.bfp", case.opening), OFFSETS)
    for number, step in enumerate(steps):
        answers = backend.elsewhere(Call("step", "kvcache.bfp", step, owner=session), OFFSETS)
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
            assert_holds(case, answer, steps[: number + 1])


@checks("kvcache.bfp/C2", growing)
def test_tokens_keep_their_bits(backend: Remote, case: CacheCase) -> None:
    """Later tokens, such as larger numbers, zeros or many tokens, do not change the results for earlier ones."""
    rng = case.generator()
    steps = list(parts(drawn(case, rng), lengths(case.tokens, rng)))
    one = np.zeros((1, case.kv_heads, case.head_dim), np.float32)
    steps += [(one + np.float32(3e38), one - np.float32(3e38)), (one, one), (one + np.float32(1e-40), one)]
    with closing(backend.open("kvcache.bfp", *case.opening)) as session:
        before = taken(session, steps[0])
        for step in steps[1:]:
            answer = taken(session, step)
            held = before[0].shape[1]
            for name, old, new in zip(NAMES, before, answer, strict=True):
                assert_exact(f"{name} of the first {held} tokens", np.ascontiguousarray(new[:, :held]), old)
            before = answer
    assert_holds(case, before, steps)


@checks("kvcache.bfp/C3", caches(7))
def test_together_or_one_by_one(backend: Remote, case: CacheCase) -> None:
    """All tokens in one step, one by one, and in steps of mixed lengths give the same bits at the end."""
    rng = case.generator()
    tokens = drawn(case, rng)
    for end in ends_of(backend, case, tokens, rng):
        assert_holds(case, end, [tokens])


def ends_of(backend: Remote, case: Any, tokens: tuple[Array, Array], rng: np.random.Generator) -> list[Tokens]:
    """The contents of a cache after one step with all tokens, after steps of one token, and after steps of mixed
    lengths."""
    ends: list[Tokens] = []
    for plan in ([case.tokens], [1] * case.tokens, lengths(case.tokens, rng)):
        with closing(backend.open(case.operation, *case.opening)) as session:
            ends.append([taken(session, step) for step in parts(tokens, plan)][-1])
    return ends


MISTAKES: dict[str, Callable[[Tokens], tuple[Any, Any]]] = {
    "float64": lambda step: (step[0].astype(np.float64), step[1]),
    "heads": lambda step: (np.concatenate([step[0]] * 2, axis=1), np.concatenate([step[1]] * 2, axis=1)),
    "channels": lambda step: (step[0][..., :-1].copy(), step[1][..., :-1].copy()),
    "more-keys": lambda step: (np.concatenate([step[0]] * 2), step[1]),
    "more-values": lambda step: (step[0], np.concatenate([step[1]] * 2)),
    "no-tokens": lambda step: (step[0][:0], step[1][:0]),
    "two-dimensions": lambda step: (step[0][0], step[1][0]),
    "strided": lambda step: (step[0], np.repeat(step[1], 2, axis=2)[..., ::2]),
    "nan": lambda step: (
        step[0],
        np.where(np.arange(step[1].size).reshape(step[1].shape) == 1, np.float32("nan"), step[1]),
    ),
    "infinite": lambda step: (step[0] + np.float32("inf"), step[1]),
    "list": lambda step: (step[0].tolist(), step[1]),
}

OPENINGS: dict[str, Callable[[int, int, Format, Format], tuple[Any, ...]]] = {
    "no-heads": lambda heads, width, keys, values: (0, width, keys, values),
    "no-channels": lambda heads, width, keys, values: (heads, 0, keys, values),
    "float-heads": lambda heads, width, keys, values: (float(heads), width, keys, values),
    "key-exponent": lambda heads, width, keys, values: (heads, width, Format(32, 4, 9), values),
    "value-exponent": lambda heads, width, keys, values: (heads, width, keys, Format(32, 4, 10)),
    "no-format": lambda heads, width, keys, values: (heads, width, keys, (32, 4, 8)),
}


WRONG = (*(f"step-{name}" for name in MISTAKES), *(f"open-{name}" for name in OPENINGS))


@checks("kvcache.bfp/C4", grid(CacheCase, "edge", WRONG, (2, 6, *BFP12, *BFP16, 5)))
def test_cache_refuses(backend: Remote, case: CacheCase) -> None:
    """Each mistake raises ArgumentError; in the first or a later step, it leaves the cache unchanged."""
    place, _, name = case.variant.partition("-")
    if place == "open":
        with refuses():
            backend.open("kvcache.bfp", *OPENINGS[name](*case.opening))
        return
    steps = list(parts(drawn(case, case.generator()), [2, 3]))
    with closing(backend.open("kvcache.bfp", *case.opening)) as session:
        for number, step in enumerate(steps):
            with refuses():
                session.step(*MISTAKES[name](step))
            answer = taken(session, step)
            assert_holds(case, answer, steps[: number + 1])


@checks("kvcache.bfp/C5", caches(4))
def test_caches_do_not_disturb_each_other(backend: Remote, case: CacheCase) -> None:
    """Two caches of one shape in alternation do not affect each other; a third, opened after one was closed, is
    empty."""
    rng = case.generator()
    open_now = {name: (backend.open("kvcache.bfp", *case.opening), list[Tokens]()) for name in ("first", "second")}
    for number in range(2 * case.tokens):
        if number == case.tokens:
            open_now.pop("first")[0].close()
            open_now["third"] = backend.open("kvcache.bfp", *case.opening), []
        session, given = open_now[str(rng.choice(sorted(open_now)))]
        given.append(drawn(case, rng, tokens=int(rng.integers(1, 4))))
        answer = taken(session, given[-1])
        assert_holds(case, answer, given)
    for session, _ in open_now.values():
        session.close()
