"""Checks of `attention.attend_stored`: attention over caches in the bytes of formats.

The numbers of a cache are drawn from the tables of its two formats. On the lattice float scales are powers of two, so
that each number is exact in every type, and a token that takes all probability shows which number was read. There the
queries favour the token that the numbers favour, by a factor that makes all other probabilities 0.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lowbit.arrays import F64, Array
from lowbit.attention.stored import attend_stored, attend_stored_bound, in_heads
from lowbit.numbers.floats import FLOATS, Name, rounded
from lowbit.tensor_formats.stored import FORMATS, Stored
from lowbit.tensor_formats.table import Sizes
from lowbit_conformance.isolation.remote import Remote
from lowbit_conformance.suite.bounded import arithmetic, limit_of
from lowbit_conformance.suite.cases import Case
from lowbit_conformance.suite.clauses.test_types import judged
from lowbit_conformance.suite.compare import (
    assert_array,
    assert_equal_values,
    assert_same_bits,
    assert_within,
    refuses,
)
from lowbit_conformance.suite.format_inputs import FormatCase, allows, drawn
from lowbit_conformance.suite.marking import Record, Settings, checks, grid

CACHES = (
    ("float16", "float16"),
    ("bfloat16", "bfloat16"),
    ("fp8-tensor", "fp8-tensor"),
    ("fp8-head", "fp8-head"),
    ("int8-token", "int8-token"),
    ("int8-group", "int8-group"),
    ("q8_0", "q8_0"),
    ("q8_0", "q4_0"),
    ("q4_0", "q4_0"),
    ("kivi-keys", "kivi-values"),
    ("kivi-keys-bf16", "kivi-values-bf16"),
)
"""Pairs of formats of keys and values that servers use together."""

SHAPES = (
    *((1, 1, 1, 1, 32, 0), (1, 37, 4, 2, 32, 0), (5, 5, 6, 3, 64, 0), (3, 70, 4, 1, 64, 0), (2, 130, 8, 2, 32, 40)),
    *((1, 300, 4, 2, 128, 0), (17, 64, 2, 1, 128, 0), (64, 70, 2, 1, 64, 0)),
)
"""Queries, tokens, query heads, key-value heads, channels of a head, and the window; 0 means none."""
INPUTS: tuple[Name, ...] = ("float32", "float16", "bfloat16")
MOST_SCORE = 2.0**14
"""The largest magnitude, so that scores fit float16."""


@dataclass(frozen=True)
class StoredCase(Case):
    """A case with the last T of S tokens and a cache in two formats, which share the options that both have."""

    tokens: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    size: int
    keys: str
    values: str
    inputs: Name
    bits: int = 0

    @property
    def label(self) -> str:
        window = f"-w{self.size}" if self.size else ""
        formats = f"{self.keys}-{self.values}" + (f"-b{self.bits}" if self.bits else "")
        shape = f"t{self.tokens}of{self.length}-h{self.heads}on{self.kv_heads}-d{self.head_dim}"
        return f"{formats}-{shape}{window}-{self.inputs}"

    def parameters(self) -> dict[str, object]:
        window = "sliding" if self.size else "none"
        formats = {"key_format": self.keys, "value_format": self.values}
        return {"inputs": self.inputs, **formats, "head_dim": self.head_dim, "window": window}

    @property
    def movable(self) -> dict[str, str]:
        return {"head_dim": "head_dim"}

    @property
    def possible(self) -> bool:
        """Whether both formats allow a cache of such heads. On the lattice a drawn token must also have the greatest
        score by far in most heads, unless it is the only visible one."""
        rows, formats = self.kv_heads * self.head_dim, (self.keys, self.values)
        if not all(allows(FORMATS[name], rows, self.length, options_of(self, name)) for name in formats):
            return False
        return self.tier != "lattice" or self.size == 1 or known(self, *numbers(self, *caches(self)))

    @property
    def window(self) -> int | None:
        return self.size or None


def shapes(clause: str, tier: str, variant: str = "") -> Iterator[StoredCase]:
    """Every pair of formats in every shape, with alternating types of queries and bits of KIVI."""
    for turn, (keys, values) in enumerate(CACHES):
        for step, shape in enumerate(SHAPES):
            bits = (2, 4)[step % 2] if keys.startswith("kivi") else 0
            yield StoredCase(clause, tier, variant, *shape, keys, values, INPUTS[(turn + step) % 3], bits)


def long(clause: str, tier: str) -> Iterator[StoredCase]:
    """A long context for every pair of formats, in which no token must have the greatest score by far."""
    for turn, (keys, values) in enumerate(CACHES):
        bits = (2, 4)[turn % 2] if keys.startswith("kivi") else 0
        yield StoredCase(clause, tier, "long", 1, 4100, 2, 1, 64, 0, keys, values, INPUTS[turn % 3], bits)


def options_of(case: StoredCase, name: str) -> tuple[tuple[str, int], ...]:
    """The options of one of the formats."""
    chosen = {"bits": case.bits, "head_dim": case.head_dim, "group_size": case.head_dim, "tokens": 32}
    return tuple((option, chosen[option]) for option in FORMATS[name].options)


def cache(case: StoredCase, name: str, part: str) -> Stored:
    """Keys or values, drawn from the table of the format."""
    options = options_of(case, name)
    rows = case.kv_heads * case.head_dim
    own = FormatCase(case.clause, case.tier, f"{part}-{case.id}", name, rows, case.length, options=options)
    found = drawn(own, powers=case.tier == "lattice")
    return without_scales(found) if case.variant == "zero-scales" else found


def caches(case: StoredCase) -> tuple[Stored, Stored]:
    return cache(case, case.keys, "keys"), cache(case, case.values, "values")


def numbers(case: StoredCase, keys: Stored, values: Stored) -> tuple[F64, F64]:
    """The numbers of keys and of values, G × S × d_h."""
    return in_heads(keys.values, case.head_dim), in_heads(values.values, case.head_dim)


def without_scales(given: Stored) -> Stored:
    """The cache with every third scale 0."""
    fields = given.table.fields_of(given.by_name)
    changed = {}
    for row in given.table.fields:
        array = np.array(fields[row.name])
        if row.role == "scale":
            array.reshape(-1)[::3] = 0
        changed[row.name] = array
    return replace(given, tensors=given.table.tensors_of(changed, given.sizes))


def queries(case: StoredCase) -> Array:
    """Small random queries, because stored keys are large."""
    shape = (case.tokens, case.heads, case.head_dim)
    return rounded(case.generator().normal(size=shape) / 8, case.inputs)


def one_token(clause: str, settings: Settings) -> Iterator[StoredCase]:
    for case in shapes(clause, "lattice"):
        yield replace(case, size=1)


@checks("attention.attend_stored/C1", one_token)
def test_one_token_is_its_stored_value(backend: Remote, case: StoredCase) -> None:
    """With a window of 1 the result of each token is its own value in the head of its group."""
    keys, values = caches(case)
    given = backend.run(case.operation, queries(case), keys, values, 1)
    own = in_heads(values.values, case.head_dim)[:, case.length - case.tokens :]
    expected = np.repeat(own, case.heads // case.kv_heads, axis=0).swapaxes(0, 1)
    assert_equal_values(given, expected, case.inputs)


def favoured(case: StoredCase, read: F64) -> tuple[Array, F64]:
    """Queries that favour one token of the keys, G × S × d_h, and scores, T × H × S, with −∞ for hidden tokens."""
    signs = case.generator().choice((-1.0, 1.0), (case.tokens, case.heads, case.head_dim))
    group = np.arange(case.heads) // (case.heads // case.kv_heads)
    scores = np.einsum("thd,hsd->ths", signs, read[group]) / np.sqrt(case.head_dim)
    factor = 2.0 ** np.floor(np.log2(MOST_SCORE / max(np.abs(scores).max(), 1.0)))
    back = np.arange(case.length - case.tokens, case.length)[:, None] - np.arange(case.length)
    hidden = (back < 0) | (back >= (case.window or case.length))
    return rounded(signs * factor, case.inputs), np.where(hidden[:, None], -np.inf, scores * factor)


def winners(case: StoredCase, wanted: F64, scores: F64) -> tuple[F64, Array]:
    """Values of the tokens with the greatest scores, T × H × d_h, and a mask, T × H × 1, of those with scores far above
    all others."""
    group, order = np.arange(case.heads) // (case.heads // case.kv_heads), np.sort(scores, axis=-1)
    sure = np.ones(order.shape[:2], bool) if case.length == 1 else ~(order[..., -1] - order[..., -2] < 256)
    return wanted[group[None], scores.argmax(axis=-1)], sure[..., None]


def known(case: StoredCase, read: F64, wanted: F64) -> bool:
    """Whether a drawn token has the greatest score by far in at least half of the heads, and the result type holds its
    values."""
    expected, sure = winners(case, wanted, favoured(case, read)[1])
    held = rounded(expected, case.inputs).astype(np.float64) == expected
    return bool((held | ~sure).all() and sure.mean() >= 0.5)


@checks("attention.attend_stored/C2", lambda clause, settings: shapes(clause, "lattice"))
def test_one_stored_score_above_all(backend: Remote, case: StoredCase) -> None:
    """The result is the value of the token with the greatest score, if the other scores are far below."""
    keys, values = caches(case)
    assert_winners(backend, case, *numbers(case, keys, values), keys, values, case.window)


def assert_winners(backend: Remote, case: StoredCase, read: F64, wanted: F64, *cached: Any) -> None:
    """With queries that favour a token of the keys `read`, the result must be its value in `wanted`; `cached` are the
    other arguments."""
    __tracebackhide__ = True
    asked, scores = favoured(case, read)
    given = backend.run(case.operation, asked, *cached)
    if not known(case, read, wanted):
        raise RuntimeError("few tokens of this case win by far; this is a defect of the suite")
    expected, sure = winners(case, wanted, scores)
    assert_equal_values(given, expected, case.inputs, sure)


def bounded(clause: str, settings: Settings) -> Iterator[StoredCase]:
    """Every pair of formats in every shape; in one of them with scales of 0, and with queries of every type."""
    yield from (*shapes(clause, "random"), *long(clause, "random"))
    for case in shapes(clause, "edge", "zero-scales"):
        if case.length == SHAPES[1][1]:
            yield case
    # A backend may declare one type of queries; then it gets heads with their own scales in some type only.
    for case in shapes(clause, "edge", "types"):
        if case.length == SHAPES[1][1]:
            yield from (replace(case, inputs=each) for each in INPUTS if each != case.inputs)


@checks("attention.attend_stored/C3", bounded)
def test_attention_over_stored_numbers(backend: Remote, case: StoredCase, record_property: Record) -> None:
    """Random bytes and queries stay within the chained bound."""
    keys, values = caches(case)
    asked, declared = queries(case), arithmetic(backend, case)
    given = backend.run(case.operation, asked, keys, values, case.window)
    exact = attend_stored(asked, keys, values, case.window)
    bound = limit_of(lambda: attend_stored_bound(asked, keys, values, declared, exact, case.window))
    record_property("share", assert_within(*judged(given, exact, bound), FLOATS[case.inputs].dtype))


def hidden(clause: str, settings: Settings) -> Iterator[StoredCase]:
    """Several queries, of which the first does not see all tokens; with and without a window."""
    for case in shapes(clause, "random"):
        if case.tokens > 1:
            yield replace(case, size=case.size or (0, 9)[case.heads % 4 == 0])


@checks("attention.attend_stored/C4", hidden)
def test_what_is_not_seen_changes_nothing(backend: Remote, case: StoredCase) -> None:
    """Changing codes and scales of tokens that the first query does not see does not change the bits of its result."""
    keys, values = caches(case)
    asked, end = queries(case), case.length - case.tokens + 1
    seen = slice(max(0, end - case.size) if case.size else 0, end)
    first = asked_of(backend, case, asked, keys, values)
    other = (cache(replace(case, variant="other"), each.format, "other") for each in (keys, values))
    changed = (elsewhere(each, new, seen) for each, new in zip((keys, values), other, strict=True))
    again = asked_of(backend, case, asked, *changed)
    assert_same_bits(first[0], again[0], "tokens hidden from the first query were changed")


def asked_of(backend: Remote, case: StoredCase, asked: Array, keys: Stored, values: Stored) -> Array:
    __tracebackhide__ = True
    given = backend.run(case.operation, asked, keys, values, case.window)
    return assert_array("the result", given, FLOATS[case.inputs].dtype, asked.shape)


def elsewhere(given: Stored, other: Stored, seen: slice) -> Stored:
    """A cache in which tokens outside `seen` come from another cache, if they have their own scales."""
    mixed = tuple(
        outside(row.shape, array, new, given.sizes, seen)
        for row, array, new in zip(given.table.tensors, given.tensors, other.tensors, strict=True)
    )
    found = replace(given, tensors=mixed)
    if not (found.values == given.values)[:, seen].all():
        raise RuntimeError("a token that is seen was changed; this is a defect of the suite")
    return found


def outside(shape: tuple[str | int, ...], array: Array, other: Array, at: Sizes, seen: slice) -> Array:
    """Elements of `other` outside `seen` along an axis of tokens, of groups of tokens or of words of codes."""
    mixed = other.copy()
    if shape[0] == "N":
        mixed[seen] = array[seen]
    elif shape[-1] == "N//tokens":
        groups = slice(seen.start // at["tokens"], -(-seen.stop // at["tokens"]))
        mixed[:, groups] = array[:, groups]
    elif shape[-1] == "N*bits//32":
        kept, bits = (np.unpackbits(each.view(np.uint8), axis=1, bitorder="little") for each in (array, other))
        span = slice(seen.start * at["bits"], seen.stop * at["bits"])
        bits[:, span] = kept[:, span]
        mixed = np.packbits(bits, axis=1, bitorder="little").view(array.dtype)
    else:
        return array
    return mixed


MISTAKES = ("other-length", "other-channels", "heads", "more-queries")
WRONG = (2, 5, 4, 2, 32, 0, "q8_0", "q8_0", "float32")


@checks("attention.attend_stored/H8", grid(StoredCase, "edge", MISTAKES, WRONG))
def test_sizes_that_do_not_belong_together(backend: Remote, case: StoredCase) -> None:
    """Values with other tokens or channels than the keys, head counts that do not divide, and more queries than keys
    raise ArgumentError."""
    asked, (keys, values) = queries(case), caches(case)
    if case.variant == "other-length":
        values = cache(replace(case, length=6), case.values, "values")
    if case.variant == "other-channels":
        values = cache(replace(case, kv_heads=4), case.values, "values")
    if case.variant == "heads":
        asked = np.ascontiguousarray(asked[:, :3])
    if case.variant == "more-queries":
        asked = np.concatenate([asked] * 3)
    with refuses():
        backend.run(case.operation, asked, keys, values)
