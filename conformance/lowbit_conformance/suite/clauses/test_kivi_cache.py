"""Checks of `kvcache.kivi`: which tokens are in 16 bits, and what the others become.

What is right follows from the number of tokens and from `formats.quantize` of whole groups, by one of its choices. A
cache keeps to one, so an answer is compared with all that explained the answers before it.
"""

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from lowbit.arrays import F32, F64
from lowbit.attention.kivi_cache import Dtype
from lowbit.attention.kivi_cache import Tokens as Part
from lowbit.backend.declarations import LIMITS
from lowbit.numbers.floats import rounded
from lowbit.tensor_formats.kivi import SUFFIX, choices_of
from lowbit.tensor_formats.stored import quantized
from lowbit_conformance.isolation.remote import Remote
from lowbit_conformance.suite.cases import Case
from lowbit_conformance.suite.clauses.test_kvcache import NAMES, ends_of, lengths, parts, taken
from lowbit_conformance.suite.compare import assert_array, assert_exact, refuses
from lowbit_conformance.suite.marking import Settings, checks, grid

Tokens = tuple[Part, Part]  # keys and values, T × G × d_h each


@dataclass(frozen=True)
class KiviCase(Case):
    """A case with a cache and a number of tokens."""

    kv_heads: int
    head_dim: int
    bits: int
    group_size: int
    residual: int
    tokens: int
    dtype: Dtype = "float16"

    @property
    def label(self) -> str:
        sizes = f"{self.kv_heads}x{self.head_dim}-b{self.bits}-g{self.group_size}-r{self.residual}"
        kind = "" if self.dtype == "float16" else f"-{self.dtype}"
        return f"{sizes}-{self.tokens}tokens{kind}"

    def parameters(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in LIMITS["kvcache.kivi"]}

    @property
    def movable(self) -> dict[str, str]:
        return {name: name for name in ("kv_heads", "head_dim", "group_size", "residual")}

    @property
    def possible(self) -> bool:
        """Whether the operation can open such a cache."""
        return not (self.head_dim % self.group_size or self.residual % self.group_size)

    @property
    def opening(self) -> tuple[Any, ...]:
        """The arguments that open it, with the type if it is not the default."""
        sizes = self.kv_heads, self.head_dim, self.bits, self.group_size, self.residual
        return sizes if self.dtype == "float16" else (*sizes, self.dtype)


SHAPES = (
    (2, 64, 2, 32, 32),
    (1, 128, 4, 32, 64),
    (3, 16, 2, 8, 24),
    (2, 6, 4, 3, 3),
    (1, 4, 2, 1, 2),
    (4, 32, 4, 16, 48),
)


OWN_LENGTH = (1, 128, 2, 32, 128)
"""A head as in models, with KIVI's own residual length."""


def caches(*rounds: float) -> Callable[[str, Settings], Iterator[KiviCase]]:
    """Every shape with each number of tokens, in residual lengths; then a random number from each seed."""

    def generator(clause: str, settings: Settings) -> Iterator[KiviCase]:
        for shape in SHAPES:
            for part in rounds:
                yield KiviCase(clause, "random", "", *shape, max(1, round(part * shape[-1])))
        for seed in settings.seeds:
            shape = SHAPES[seed % len(SHAPES)]
            yield KiviCase(clause, "random", "drawn", *shape, 1 + 37 * seed % (3 * shape[-1]), seed=seed)
        for shape in SHAPES[:3]:
            yield KiviCase(clause, "random", "", *shape, max(1, round(rounds[-1] * shape[-1])), "bfloat16")
        yield KiviCase(clause, "random", "own-length", *OWN_LENGTH, round(rounds[-1] * OWN_LENGTH[-1]))

    return generator


def drawn(case: KiviCase, rng: np.random.Generator, tokens: int | None = None) -> Tokens:
    """Keys with some large channels, values of very different magnitudes, and constant groups; in bfloat16 all outside
    the range of float16."""
    shape = (tokens or case.tokens, case.kv_heads, case.head_dim)
    keys = rng.normal(size=shape) * np.exp2(rng.integers(-3, 6, shape[1:]))
    values = rng.normal(size=shape) * np.exp2(rng.integers(-6, 6, (shape[0], 1, 1)))
    keys[:, 0, :1] = 0.3
    values[rng.random(shape[0]) < 0.1] = -1.7
    scale = 1.0 if case.dtype == "float16" else 2.0**24
    return rounded(scale * keys, case.dtype), rounded(scale * values, case.dtype)


class Right:
    """The right contents of a cache after each step, for every choice that agrees with all answers so far."""

    def __init__(self, case: KiviCase) -> None:
        self.case, self.choices = case, list(choices_of(case.dtype))
        self._given: list[Tokens] = []

    def assert_holds(self, step: Tokens, answer: tuple[F32, F32]) -> None:
        """Check the answer of a step, first the newest tokens, which do not depend on a choice."""
        __tracebackhide__ = True
        self._given.append(step)
        case, tokens = self.case, [np.concatenate([each[kind] for each in self._given]) for kind in (0, 1)]
        length = len(tokens[0])
        ends = (length - length % case.residual, max(0, length - case.residual))
        for name, given, own, end in zip(NAMES, answer, tokens, ends, strict=True):
            array = assert_array(name, given, np.float32, (case.kv_heads, length, case.head_dim))
            newest = np.ascontiguousarray(own[end:].swapaxes(0, 1), np.float32)
            assert_exact(f"the newest {name}", np.ascontiguousarray(array[:, end:]), newest)
        expected = {
            choice: [self._stored(kind, tokens[kind][: ends[kind]], choice) for kind in (0, 1)]
            for choice in self.choices
        }
        for name, kind in zip(NAMES, (0, 1), strict=True):
            stored = np.ascontiguousarray(answer[kind][:, : ends[kind]])
            fitting = [choice for choice in self.choices if (stored == expected[choice][kind]).all()]
            if not fitting:
                assert_exact(f"the stored {name}", stored, expected[self.choices[0]][kind])
            self.choices = fitting

    def _stored(self, kind: int, tokens: Part, choice: str) -> F32:
        """float32, G × tokens × d_h: whole groups, cast to their format and decoded."""
        case = self.case
        if not len(tokens):
            return np.zeros((case.kv_heads, 0, case.head_dim), np.float32)
        name, option = (("kivi-keys", "tokens"), ("kivi-values", "group_size"))[kind]
        format = name + SUFFIX[case.dtype]
        options = (("bits", case.bits), (option, case.group_size))
        numbers: F64 = quantized(tokens.reshape(len(tokens), -1), format, options, choice).values.T
        heads = numbers.astype(np.float32).reshape(len(tokens), case.kv_heads, -1)
        return np.ascontiguousarray(heads.swapaxes(0, 1))


@checks("kvcache.kivi/C1", caches(0.1, 1, 1.2))
def test_the_newest_tokens_are_kept(backend: Remote, case: KiviCase) -> None:
    """With steps of one token, the newest tokens are as given, around every end of a group and of the residual
    tokens."""
    right = Right(case)
    with closing(backend.open("kvcache.kivi", *case.opening)) as session:
        for step in parts(drawn(case, case.generator()), [1] * case.tokens):
            right.assert_holds(step, taken(session, step))


@checks("kvcache.kivi/C2", caches(2, 3.4))
def test_whole_groups_are_stored(backend: Remote, case: KiviCase) -> None:
    """With steps of any length, stored tokens are those of the format, and later tokens do not change their bits."""
    rng, right = case.generator(), Right(case)
    steps = list(parts(drawn(case, rng), lengths(case.tokens, rng)))
    large = rounded(np.full((case.residual, case.kv_heads, case.head_dim), 30000.0), case.dtype)
    with closing(backend.open("kvcache.kivi", *case.opening)) as session:
        for step in (*steps, (large, -large)):
            right.assert_holds(step, taken(session, step))


@checks("kvcache.kivi/C3", caches(2.3))
def test_a_prompt_ends_as_its_tokens_do(backend: Remote, case: KiviCase) -> None:
    """All tokens in one step, one by one, and in steps of mixed lengths give the same bits at the end."""
    rng = case.generator()
    tokens = drawn(case, rng)
    first, *others = ends_of(backend, case, tokens, rng)
    Right(case).assert_holds(tokens, first)
    for end in others:
        for name, one, other in zip(NAMES, first, end, strict=True):
            assert_exact(name, other, one)


MISTAKES: dict[str, Callable[[Tokens], tuple[Any, Any]]] = {
    "float32": lambda step: (step[0].astype(np.float32), step[1]),
    "heads": lambda step: (np.concatenate([step[0]] * 2, axis=1), np.concatenate([step[1]] * 2, axis=1)),
    "more-keys": lambda step: (np.concatenate([step[0]] * 2), step[1]),
    "no-tokens": lambda step: (step[0][:0], step[1][:0]),
    "strided": lambda step: (step[0], np.repeat(step[1], 2, axis=2)[..., ::2]),
    "infinite": lambda step: (step[0] + np.float16("inf"), step[1]),
    "too-large": lambda step: (step[0], step[1] + np.float16(40000)),
}
OPENINGS: dict[str, tuple[int, int, int, int, int]] = {
    "no-heads": (0, 8, 2, 4, 8),
    "three-bits": (2, 8, 3, 4, 8),
    "group-beside-heads": (2, 8, 2, 3, 9),
    "residual-beside-groups": (2, 8, 2, 4, 6),
    "no-residual": (2, 8, 2, 4, 0),
}


WRONG = (*(f"step-{name}" for name in MISTAKES), *(f"open-{name}" for name in OPENINGS))


@checks("kvcache.kivi/C4", grid(KiviCase, "edge", WRONG, (2, 8, 2, 4, 4, 6)))
def test_kivi_refuses(backend: Remote, case: KiviCase) -> None:
    """Each mistake raises ArgumentError; in the first or a later step, it leaves the cache unchanged."""
    place, _, name = case.variant.partition("-")
    if place == "open":
        with refuses():
            backend.open("kvcache.kivi", *OPENINGS[name])
        return
    right = Right(case)
    with closing(backend.open("kvcache.kivi", *case.opening)) as session:
        for step in parts(drawn(case, case.generator()), [3, 3]):
            with refuses():
                session.step(*MISTAKES[name](step))
            right.assert_holds(step, taken(session, step))


@checks("kvcache.kivi/C5", caches(1.5))
def test_kivi_caches_do_not_disturb_each_other(backend: Remote, case: KiviCase) -> None:
    """Two caches of one shape in alternation do not affect each other; a third, opened after one was closed, is
    empty."""
    rng = case.generator()
    open_now = {name: (backend.open("kvcache.kivi", *case.opening), Right(case)) for name in ("first", "second")}
    for number in range(12):
        if number == 6:
            open_now.pop("first")[0].close()
            open_now["third"] = backend.open("kvcache.kivi", *case.opening), Right(case)
        session, right = open_now[str(rng.choice(sorted(open_now)))]
        step = drawn(case, rng, tokens=int(rng.integers(1, case.residual + 2)))
        right.assert_holds(step, taken(session, step))
    for session, _ in open_now.values():
        session.close()
