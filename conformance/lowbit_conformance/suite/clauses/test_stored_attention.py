"""Checks of `attention.attend_stored`: attention over caches in the bytes of formats.

The numbers of a cache are drawn from the tables of its two formats. On the lattice float scales are powers of two, so
that each number is exact in every type, and a token that takes all probability shows which number was read. There the
queries favour the token that the numbers favour, by a factor that makes all other probabilities 0.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from lowbit.arrays import F64, Array
from lowbit.attention.stored import attend_stored, attend_stored_bound, in_heads
from lowbit.numbers.floats import FLOATS, Name, rounded
from lowbit.tensor_formats.stored import FORMATS, Stored
from lowbit.tensor_formats.table import Sizes
from lowbit_conformance.isolation.remote import Remote
from lowbit_conformance.suite.bounded import Record, arithmetic, limit_of
from lowbit_conformance.suite.cases import Case
from lowbit_conformance.suite.clauses.test_types import judged
from lowbit_conformance.suite.compare import assert_array, assert_same_bits, assert_within, refuses
from lowbit_conformance.suite.format_inputs import FormatCase, allows, drawn
from lowbit_conformance.suite.marking import Settings, checks

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
"""The formats of keys and values that servers use together."""

SHAPES = ((1, 1, 1, 1, 32, 0), (1, 37, 4, 2, 32, 0), (5, 5, 6, 3, 64, 0), (3, 70, 4, 1, 64, 0), (2, 130, 8, 2, 32, 40))
"""Queries, tokens, query heads, key-value heads, channels of a head, and the window; 0 is none."""
INPUTS: tuple[Name, ...] = ("float32", "float16", "bfloat16")
MOST_SCORE = 2.0**14
"""So that a score fits float16."""


@dataclass(frozen=True)
class StoredCase(Case):
    """The last T of S tokens over a cache in two formats, which have the same options where both have them."""

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
        """Whether both formats allow a cache of such heads. On the lattice a drawn token must also win by far in most
        heads, unless it is the only one that is seen."""
        rows, formats = self.kv_heads * self.head_dim, (self.keys, self.values)
        if not all(allows(FORMATS[name], rows, self.length, options_of(self, name)) for name in formats):
            return False
        return self.tier != "lattice" or self.size == 1 or drawn_winners(self).known

    @property
    def window(self) -> int | None:
        return self.size or None


def shapes(clause: str, tier: str, variant: str = "") -> Iterator[StoredCase]:
    """Every pair of formats in every shape, the types of queries and the bits of KIVI taking turns."""
    for turn, (keys, values) in enumerate(CACHES):
        for step, shape in enumerate(SHAPES):
            bits = (2, 4)[step % 2] if keys.startswith("kivi") else 0
            yield StoredCase(clause, tier, variant, *shape, keys, values, INPUTS[(turn + step) % 3], bits)


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


def without_scales(given: Stored) -> Stored:
    """The same with every third scale 0."""
    fields = given.table.fields_of(given.by_name)
    changed = {}
    for row in given.table.fields:
        array = np.array(fields[row.name])
        if row.role == "scale":
            array.reshape(-1)[::3] = 0
        changed[row.name] = array
    return replace(given, tensors=given.table.tensors_of(changed, given.sizes))


def queries(case: StoredCase) -> Array:
    """Small random numbers, since stored keys are large."""
    shape = (case.tokens, case.heads, case.head_dim)
    return typed(case, case.generator().normal(size=shape) / 8)


def typed(case: StoredCase, numbers: F64) -> Array:
    name = case.inputs
    return rounded(numbers, name)


def assert_values(backend: Remote, case: StoredCase, given: object, expected: F64, judged: Array) -> None:
    """The result is these values, where a token takes all; zeros may have either sign."""
    __tracebackhide__ = True
    if not known(case, expected, judged):
        raise RuntimeError("the lattice of this case is not exact; this is a defect of the suite")
    array = assert_array("the result", given, FLOATS[case.inputs].dtype, expected.shape)
    wrong = (array.astype(np.float64) != expected) & judged
    if wrong.any():
        place = tuple(int(i) for i in np.unravel_index(int(np.argmax(wrong)), wrong.shape))
        text = f"{int(wrong.sum())} of {int(judged.sum())} elements differ; first at {list(place)}"
        raise AssertionError(f"WRONG on the lattice: {text}: {array[place]}, expected {expected[place]}")


def known(case: StoredCase, expected: F64, judged: Array) -> bool:
    """Whether the type of the result holds the values that are judged, and these are at least half of all."""
    right = typed(case, expected).astype(np.float64) == expected
    return bool(right[judged].all() and judged.mean() >= 0.5)


def one_token(clause: str, settings: Settings) -> Iterator[StoredCase]:
    for case in shapes(clause, "lattice"):
        yield replace(case, size=1)


@checks("attention.attend_stored/C1", one_token)
def test_one_token_is_its_stored_value(backend: Remote, case: StoredCase) -> None:
    """With a window of 1 each token takes its own value, by the head of its group."""
    keys, values = cache(case, case.keys, "keys"), cache(case, case.values, "values")
    given = backend.run(case.operation, queries(case), keys, values, 1)
    own = in_heads(values.values, case.head_dim)[:, case.length - case.tokens :]
    expected = np.repeat(own, case.heads // case.kv_heads, axis=0).swapaxes(0, 1)
    assert_values(backend, case, given, expected, np.ones(expected.shape, bool))


@dataclass(frozen=True, eq=False)
class Winners:
    """Queries that favour the token that the stored numbers favour.

    Attributes:
        queries, keys, values: the arguments of a call.
        expected: float64, T × H × d_h: the values of the tokens of the greatest scores.
        judged: which elements are those of a token whose score lies far above all others.
        known: whether enough are.
    """

    queries: Array
    keys: Stored
    values: Stored
    expected: F64
    judged: Array
    known: bool


def drawn_winners(case: StoredCase) -> Winners:
    keys, values = cache(case, case.keys, "keys"), cache(case, case.values, "values")
    signs = case.generator().choice((-1.0, 1.0), (case.tokens, case.heads, case.head_dim))
    read, wanted = (in_heads(each.values, case.head_dim) for each in (keys, values))
    group = np.arange(case.heads) // (case.heads // case.kv_heads)
    scores = np.einsum("thd,hsd->ths", signs, read[group]) / np.sqrt(case.head_dim)
    factor = 2.0 ** np.floor(np.log2(MOST_SCORE / max(np.abs(scores).max(), 1.0)))
    back = np.arange(case.length - case.tokens, case.length)[:, None] - np.arange(case.length)
    hidden = (back < 0) | (back >= (case.window or case.length))
    ranked = np.where(hidden[:, None], -np.inf, scores * factor)
    winner, order = ranked.argmax(axis=-1), np.sort(ranked, axis=-1)
    sure = np.ones(winner.shape, bool) if case.length == 1 else ~(order[..., -1] - order[..., -2] < 256)
    expected = wanted[group[None], winner]
    judged = np.broadcast_to(sure[..., None], expected.shape)
    asked = typed(case, signs * factor)
    return Winners(asked, keys, values, expected, judged, known(case, expected, judged))


def winners(clause: str, settings: Settings) -> Iterator[StoredCase]:
    yield from shapes(clause, "lattice")


@checks("attention.attend_stored/C2", winners)
def test_one_stored_score_above_all(backend: Remote, case: StoredCase) -> None:
    """The value of the token with the greatest score comes back, where the others lie far below."""
    drawn = drawn_winners(case)
    given = backend.run(case.operation, drawn.queries, drawn.keys, drawn.values, case.window)
    assert_values(backend, case, given, drawn.expected, drawn.judged)


def bounded(clause: str, settings: Settings) -> Iterator[StoredCase]:
    """Every pair of formats in every shape; in one of them with scales of 0, and with queries of every type."""
    yield from shapes(clause, "random")
    for case in shapes(clause, "edge", "zero-scales"):
        if case.length == SHAPES[1][1]:
            yield case
    # A backend may declare one type of queries, and meet heads that have scales of their own in some type only.
    for case in shapes(clause, "edge", "types"):
        if case.length == SHAPES[1][1]:
            yield from (replace(case, inputs=each) for each in INPUTS if each != case.inputs)


@checks("attention.attend_stored/C3", bounded)
def test_attention_over_stored_numbers(backend: Remote, case: StoredCase, record_property: Record) -> None:
    """Random bytes and queries stay within the chained bound."""
    keys, values = cache(case, case.keys, "keys"), cache(case, case.values, "values")
    asked, declared = queries(case), arithmetic(backend, case)
    given = backend.run(case.operation, asked, keys, values, case.window)
    exact = attend_stored(asked, keys, values, case.window)
    bound = limit_of(lambda: attend_stored_bound(asked, keys, values, declared, exact, case.window))
    record_property("share", assert_within(*judged(given, exact, bound), FLOATS[case.inputs].dtype))


def hidden(clause: str, settings: Settings) -> Iterator[StoredCase]:
    """Several queries, the first of which does not see all tokens; with a window and without."""
    for case in shapes(clause, "random"):
        if case.tokens > 1:
            yield replace(case, size=case.size or (0, 9)[case.heads % 4 == 0])


@checks("attention.attend_stored/C4", hidden)
def test_what_is_not_seen_changes_nothing(backend: Remote, case: StoredCase) -> None:
    """Other codes and scales of what the first query does not see: its result keeps its bits."""
    keys, values = cache(case, case.keys, "keys"), cache(case, case.values, "values")
    asked, end = queries(case), case.length - case.tokens + 1
    seen = slice(max(0, end - case.size) if case.size else 0, end)
    first = asked_of(backend, case, asked, keys, values)
    other = (cache(replace(case, variant="other"), each.format, "other") for each in (keys, values))
    changed = (elsewhere(each, new, seen) for each, new in zip((keys, values), other, strict=True))
    again = asked_of(backend, case, asked, *changed)
    assert_same_bits(first[0], again[0], "what the first query does not see was changed")


def asked_of(backend: Remote, case: StoredCase, asked: Array, keys: Stored, values: Stored) -> Array:
    __tracebackhide__ = True
    given = backend.run(case.operation, asked, keys, values, case.window)
    return assert_array("the result", given, FLOATS[case.inputs].dtype, asked.shape)


def elsewhere(given: Stored, other: Stored, seen: slice) -> Stored:
    """A cache whose tokens outside `seen` are those of another, as far as they have scales of their own."""
    mixed = tuple(
        outside(row.shape, array, new, given.sizes, seen)
        for row, array, new in zip(given.table.tensors, given.tensors, other.tensors, strict=True)
    )
    found = replace(given, tensors=mixed)
    if not (found.values == given.values)[:, seen].all():
        raise RuntimeError("a token that is seen was changed; this is a defect of the suite")
    return found


def outside(shape: tuple[str | int, ...], array: Array, other: Array, at: Sizes, seen: slice) -> Array:
    """Elements of `other` where an axis of tokens, of groups of tokens or of words of codes is not that of `seen`."""
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


def mistakes(clause: str, settings: Settings) -> Iterator[StoredCase]:
    for variant in MISTAKES:
        yield StoredCase(clause, "edge", variant, 2, 5, 4, 2, 32, 0, "q8_0", "q8_0", "float32")


@checks("attention.attend_stored/H8", mistakes)
def test_sizes_that_do_not_belong_together(backend: Remote, case: StoredCase) -> None:
    """Values of other tokens or channels than the keys, heads that do not divide, and more queries than keys."""
    asked, keys, values = queries(case), cache(case, case.keys, "keys"), cache(case, case.values, "values")
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
