"""Checks of `attention.attend_residual`: attention over stored tokens and new ones.

Stored tokens are drawn as for `attention.attend_stored`. New ones are tokens of the same formats, read and rounded to
the type of the queries, so that a token of either part may win.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from lowbit.arrays import F64, Array
from lowbit.attention.residual import all_numbers, attend_residual, attend_residual_bound
from lowbit.attention.stored import in_heads
from lowbit.numbers.floats import FLOATS, rounded
from lowbit.tensor_formats.stored import FORMATS, Stored
from lowbit_conformance.isolation.remote import Remote
from lowbit_conformance.suite.bounded import arithmetic, limit_of
from lowbit_conformance.suite.clauses.test_stored_attention import (
    CACHES,
    INPUTS,
    StoredCase,
    assert_winners,
    cache,
    elsewhere,
    known,
    options_of,
    queries,
)
from lowbit_conformance.suite.clauses.test_types import judged
from lowbit_conformance.suite.compare import assert_array, assert_same_bits, assert_within, refuses
from lowbit_conformance.suite.format_inputs import allows
from lowbit_conformance.suite.marking import Record, Settings, checks

SHAPES = (
    ((1, 34, 4, 2, 32, 0), (1, 2)),
    ((1, 70, 4, 1, 64, 0), (6, 33)),
    ((3, 40, 6, 3, 32, 0), (8, 8)),
    ((9, 130, 8, 2, 32, 0), (40, 20)),
    ((1, 416, 4, 2, 128, 0), (128, 32)),
    ((17, 80, 2, 1, 128, 0), (16, 17)),
    ((64, 130, 2, 1, 64, 0), (66, 64)),
)
"""Queries, tokens, query heads, key-value heads, channels of a head and no window; new keys and new values."""
MOST_NEW = 2.0**12
"""The largest magnitude, so that scores and sums of new numbers fit float16."""

Call = tuple[Array, Stored, Stored, Array, Array]


@dataclass(frozen=True)
class ResidualCase(StoredCase):
    """A case with the last T of S tokens, of which the newest keys and values are not stored."""

    new_keys: int = 1
    new_values: int = 1

    @property
    def label(self) -> str:
        return f"r{self.new_keys}and{self.new_values}-{super().label}"

    def parameters(self) -> dict[str, object]:
        return {name: value for name, value in super().parameters().items() if name != "window"}

    @property
    def possible(self) -> bool:
        """Whether both formats allow such heads and, on the lattice, the drawn tokens have the greatest scores by
        far."""
        rows = self.kv_heads * self.head_dim
        parts = ((self.keys, self.new_keys), (self.values, self.new_values))
        fit = (allows(FORMATS[name], rows, self.length - new, options_of(self, name)) for name, new in parts)
        return all(fit) and (self.tier != "lattice" or known(self, *numbers(call_of(self))))


def shapes(clause: str, tier: str, variant: str = "") -> Iterator[ResidualCase]:
    """Every pair of formats in every shape, with alternating types of queries and bits of KIVI."""
    for turn, (keys, values) in enumerate(CACHES):
        for step, (shape, new) in enumerate(SHAPES):
            bits = (2, 4)[step % 2] if keys.startswith("kivi") else 0
            inputs = INPUTS[(turn + step) % 3]
            yield ResidualCase(clause, tier, variant, *shape, keys, values, inputs, bits, *new)


def call_of(case: ResidualCase) -> Call:
    """The arguments of a call, with queries of small random numbers."""
    keys = cache(replace(case, length=case.length - case.new_keys), case.keys, "keys")
    values = cache(replace(case, length=case.length - case.new_values), case.values, "values")
    newest_keys = newest(case, case.new_keys, case.keys, "new-keys")
    return queries(case), keys, values, newest_keys, newest(case, case.new_values, case.values, "new-values")


def newest(case: ResidualCase, count: int, name: str, part: str) -> Array:
    """New tokens, tokens × G × d_h, in the type of the queries, drawn as stored ones are."""
    drawn = in_heads(cache(replace(case, length=count), name, part).values, case.head_dim)
    return rounded(np.ascontiguousarray(drawn.swapaxes(0, 1)).clip(-MOST_NEW, MOST_NEW), case.inputs)


def numbers(call: Call) -> tuple[F64, F64]:
    """The numbers of keys and of values, G × S × d_h."""
    _, keys, values, newest_keys, newest_values = call
    return all_numbers(keys, newest_keys), all_numbers(values, newest_values)


def lattice(clause: str, settings: Settings) -> Iterator[ResidualCase]:
    yield from shapes(clause, "lattice")


@checks("attention.attend_residual/C1", lattice)
def test_one_score_above_all_others(backend: Remote, case: ResidualCase) -> None:
    """The result is the value of the token with the greatest score, whether it is stored or new."""
    _, *cached = call = call_of(case)
    assert_winners(backend, case, *numbers(call), *cached)


def bounded(clause: str, settings: Settings) -> Iterator[ResidualCase]:
    """Every pair of formats in every shape, and one shape with queries of every type."""
    yield from shapes(clause, "random")
    # A backend may declare one type of queries; then it gets heads with their own scales in some type only.
    for case in shapes(clause, "edge", "types"):
        if case.length == SHAPES[0][0][1]:
            yield from (replace(case, inputs=each) for each in INPUTS if each != case.inputs)


@checks("attention.attend_residual/C2", bounded)
def test_attention_over_both_parts(backend: Remote, case: ResidualCase, record_property: Record) -> None:
    """Random bytes, new tokens and queries stay within the chained bound."""
    call, declared = call_of(case), arithmetic(backend, case)
    given = backend.run(case.operation, *call)
    exact = attend_residual(*call)
    bound = limit_of(lambda: attend_residual_bound(*call, declared, exact))
    record_property("share", assert_within(*judged(given, exact, bound), FLOATS[case.inputs].dtype))


def hidden(clause: str, settings: Settings) -> Iterator[ResidualCase]:
    """Several queries, of which the first does not see all tokens."""
    for case in shapes(clause, "random"):
        if case.tokens > 1:
            yield case


@checks("attention.attend_residual/C3", hidden)
def test_later_tokens_change_nothing(backend: Remote, case: ResidualCase) -> None:
    """Changing the tokens after the first query, and unused bits, does not change the bits of its result."""
    asked, keys, values, newest_keys, newest_values = call = call_of(case)
    _, other_keys, other_values, *_ = call_of(replace(case, variant="other"))
    later = case.tokens - 1
    changed = (
        elsewhere(keys, other_keys, slice(0, keys.columns)),
        elsewhere(values, other_values, slice(0, values.columns)),
        *(with_last(part, later) for part in (newest_keys, newest_values)),
    )
    first, again = (
        assert_array("the result", given, FLOATS[case.inputs].dtype, asked.shape)
        for given in (backend.run(case.operation, *call), backend.run(case.operation, asked, *changed))
    )
    assert_same_bits(first[0], again[0], "tokens hidden from the first query were changed")


def with_last(part: Array, count: int) -> Array:
    """New tokens, of which the last `count` have the opposite sign and half the magnitude."""
    changed = part.copy()
    changed[-count:] *= np.asarray(-0.5, changed.dtype)
    return changed


MISTAKES = ("more-keys", "other-channels", "heads", "other-type", "more-queries")


def mistakes(clause: str, settings: Settings) -> Iterator[ResidualCase]:
    for variant in MISTAKES:
        yield ResidualCase(clause, "edge", variant, 2, 5, 4, 2, 32, 0, "q8_0", "q8_0", "float32", 0, 2, 3)


@checks("attention.attend_residual/H8", mistakes)
def test_parts_that_do_not_belong_together(backend: Remote, case: ResidualCase) -> None:
    """More keys than values, new tokens with other heads or another type, head counts that do not divide, and too many
    queries raise ArgumentError."""
    asked, keys, values, newest_keys, newest_values = call_of(case)
    if case.variant == "more-keys":
        newest_keys = np.concatenate([newest_keys] * 2)
    if case.variant == "other-channels":
        newest_keys, newest_values = (np.concatenate([each] * 2, axis=1) for each in (newest_keys, newest_values))
    if case.variant == "heads":
        asked = np.ascontiguousarray(asked[:, :3])
    if case.variant == "other-type":
        newest_values = newest_values.astype(np.float16)
    if case.variant == "more-queries":
        asked = np.concatenate([asked] * 3)
    with refuses():
        backend.run(case.operation, asked, keys, values, newest_keys, newest_values)
