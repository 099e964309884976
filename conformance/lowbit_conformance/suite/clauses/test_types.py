"""Checks of norms, rotations, attention, gates and experts in float16 and bfloat16.

The other modules check these operations in float32. What is special about a type of 16 bits is small: its range, its
rounding, and what a kernel keeps in it between its steps. So each operation has a few shapes here, on a lattice that
both types hold exactly and on random numbers within the bound.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lowbit.arrays import F32, F64, Activations
from lowbit.attention import rope
from lowbit.contract.rounding import Bound
from lowbit.numbers.floats import FLOATS, Name, rounded
from lowbit.operations import OPERATIONS
from lowbit.tensor_formats.stored import FORMATS
from lowbit_conformance.bounds import bound_of
from lowbit_conformance.isolation.remote import Remote
from lowbit_conformance.suite.bounded import arithmetic, assert_reference, limit_of
from lowbit_conformance.suite.cases import Case
from lowbit_conformance.suite.clauses.test_formats import fitted, options_of
from lowbit_conformance.suite.clauses.test_quantize import KINDS, assert_cast, normal
from lowbit_conformance.suite.clauses.test_rope import quarters
from lowbit_conformance.suite.clauses.test_shaped_attention import SHAPINGS, WIDE_CAP
from lowbit_conformance.suite.compare import assert_equal_values, assert_within
from lowbit_conformance.suite.format_inputs import FormatCase
from lowbit_conformance.suite.marking import Generator, Record, Settings, checks

Random = np.random.Generator
Arguments = tuple[Any, ...]
INPUTS: tuple[Name, ...] = ("float16", "bfloat16")


PLACE_OF_HEAD_DIM = {"rope.rotate": 2, "attention.attend": 4, "attention.attend_shaped": 4}
"""The position of the head size among the sizes of a case, for operations with heads."""


@dataclass(frozen=True)
class TypedCase(Case):
    """A case whose arrays have a 16-bit type.

    Attributes:
        inputs: the type.
        sizes: of the arrays, in the order in which the operation's own cases have them.
        choice: one of the operation's choices; may be empty.
    """

    inputs: Name
    sizes: tuple[int, ...]
    choice: str = ""

    @property
    def label(self) -> str:
        return "-".join(word for word in (self.inputs, self.choice, "x".join(map(str, self.sizes))) if word)

    @property
    def head_dim(self) -> int:
        """The head size of attention and rotations."""
        return self.sizes[PLACE_OF_HEAD_DIM[self.operation]]

    @property
    def movable(self) -> Mapping[str, str]:
        return {"head_dim": "head_dim"} if self.operation in PLACE_OF_HEAD_DIM else {}

    def with_sizes(self, sizes: Mapping[str, int]) -> "TypedCase":
        place = PLACE_OF_HEAD_DIM[self.operation]
        return replace(
            self, sizes=(*self.sizes[:place], sizes.get("head_dim", self.head_dim), *self.sizes[place + 1 :])
        )

    @property
    def possible(self) -> bool:
        return self.operation != "rope.rotate" or self.head_dim % 2 == 0  # pairings of channels

    def parameters(self) -> dict[str, object]:
        return dict(OPERATIONS[self.operation].parameters(*arguments_of(self)))


# **Arguments**: in float64, by operation; those of the lattice are exact in both types, and so are their results.


def norm(case: TypedCase, rng: Random, exact: bool) -> Arguments:
    """On the lattice the root of every row is 2 or 4, as in `test_blocks`."""
    shape, n = case.sizes, case.sizes[1]
    if not exact:
        return rng.normal(size=shape) * np.exp(rng.normal(size=n)), rng.normal(1, 0.5, n), 1e-5
    sizes = np.resize((3, 3, 3, 5), n) * rng.choice((-1, 1), shape)
    return rng.permuted(sizes, axis=1).astype(np.float64), rng.integers(1, 10, n).astype(np.float64), 3.0


def gates(case: TypedCase, rng: Random, exact: bool) -> Arguments:
    """On the lattice gates are so large in magnitude that the activation is the identity or 0."""
    if not exact:
        return tuple(rng.normal(size=(2, *case.sizes)) * np.array([[[3.0]], [[1.0]]]))
    gate = np.where(rng.random(case.sizes) < 0.6, rng.integers(40, 61, case.sizes), -768 * rng.integers(1, 4))
    return gate.astype(np.float64), 2.0 ** rng.integers(-2, 3, case.sizes) * rng.choice((-1, 1), case.sizes)


def clamped(case: TypedCase, rng: Random, exact: bool) -> Arguments:
    """On the lattice gates are around the limit of 48, or the sigmoid is 0; a clamped up plus 1 is a power of two."""
    gate, up = gates(case, rng, exact)
    return (gate, rng.choice((0, 1, 3, -2, -5), case.sizes).astype(np.float64), 48.0) if exact else (gate, 3 * up, 7.0)


def capped(case: TypedCase, rng: Random, exact: bool) -> Arguments:
    """On the lattice numbers have magnitudes of at least 32 caps."""
    if not exact:
        return rng.normal(size=case.sizes) * 40, 30.0
    return rng.choice((-1, 1), case.sizes) * 128.0 * 2.0 ** rng.integers(0, 8, case.sizes), 4.0


def heads(case: TypedCase, rng: Random, exact: bool) -> Arguments:
    """On the lattice angles are quarter turns, and channels are integers."""
    count, several, head_dim = case.sizes
    layout = (rope.half_split if case.choice == "half-split" else rope.interleaved)(head_dim)
    if exact:
        return quarters(rng, layout, count, several)
    start = int(rng.integers(0, 5000))
    x = rng.normal(size=case.sizes) * np.exp(rng.normal(size=head_dim))
    return x, rope.rotation(layout, 10000.0, start, count)


def scores(case: TypedCase, rng: Random, exact: bool) -> Arguments:
    """On the lattice one score of a row is 800 above the others."""
    if not exact:
        return (rng.normal(size=case.sizes) * 3,)
    found = np.full(case.sizes, -800.0)
    found[np.arange(case.sizes[0]), rng.integers(0, case.sizes[1], case.sizes[0])] = 0
    return (found + 32 * rng.integers(-3, 4, (case.sizes[0], 1)),)


def tokens(case: TypedCase, rng: Random, exact: bool) -> Arguments:
    """On the lattice each query favours one of the tokens that all can see; a window of 0 means none."""
    count, length, heads, kv_heads, head_dim, window = case.sizes
    queries = rng.normal(size=(count, heads, head_dim))
    keys, values = rng.normal(size=(2, kv_heads, length, head_dim))
    if exact:
        queries, keys = np.zeros_like(queries), np.zeros_like(keys)
        last = length - count
        first = max(0, length - window) if window else 0
        keys[np.arange(kv_heads), rng.integers(first, max(first, last) + 1, kv_heads), 0] = 1024 * np.sqrt(head_dim)
        queries[:, :, 0] = 1
    return queries, keys, values, window or None


def shaped_tokens(case: TypedCase, rng: Random, exact: bool) -> Arguments:
    """The same with one of the shapings; on the lattice caps are wide, and sinks have both signs."""
    factor, cap, sunk = SHAPINGS[case.choice]
    queries, keys, values, window = tokens(case, rng, exact)
    if exact:
        keys *= 1 / (np.sqrt(case.head_dim) * (factor or 1 / np.sqrt(case.head_dim)))
        cap = None if cap is None else WIDE_CAP
    sinks = 2 * rng.normal(size=case.sizes[2]) if sunk else None
    return queries, keys, values, window, factor, cap, sinks


def routed(case: TypedCase, rng: Random, exact: bool) -> Arguments:
    """On the lattice logits are integers that both types hold."""
    count, hidden, experts = case.sizes
    if not exact:
        return rng.normal(size=(count, hidden)), rng.normal(size=(hidden, experts)), case.choice
    x = np.zeros((count, hidden))
    for row in x:
        row[rng.permutation(hidden)[:20]] = rng.choice((-1, 1), min(20, hidden))
    return x, rng.integers(-9, 10, (hidden, experts)).astype(np.float64), case.choice


def chosen(case: TypedCase, rng: Random, exact: bool) -> Arguments:
    """On the lattice all scores are equal, and their chosen number is a power of two."""
    count, experts, k = case.sizes
    ids = np.argsort(rng.random((count, experts)), axis=1)[:, :k].astype(np.int64)
    given = np.full((count, experts), 0.25) if exact else rng.normal(size=(count, experts)) * 2
    return (np.exp2(given) if case.choice == "before" else given), ids, case.choice


def few_of(rng: Random, shape: tuple[int, ...], count: int) -> F64:
    """±1 at `count` places of each row, and 0 elsewhere."""
    signs, places = rng.choice((-1.0, 1.0), shape), np.argsort(rng.random(shape), axis=-1)
    return np.where(places < count, signs, 0.0)


def expert(case: TypedCase, rng: Random, exact: bool) -> Arguments:
    """On the lattice gates are 56, 64 or 72, where silu is the identity, or about −768, where it is 0; ups are at most
    3, and each column of the last matrix reads one of their products."""
    count, hidden, inner = case.sizes[:3]
    experts = case.sizes[3:4]
    sizes = ((*experts, hidden, inner), (*experts, hidden, inner), (*experts, inner, hidden))
    if not exact:
        scales = (3 / np.sqrt(hidden), 1 / np.sqrt(hidden), 1 / np.sqrt(inner))
        return rng.normal(size=(count, hidden)), *(rng.normal(size=n) * s for n, s in zip(sizes, scales, strict=True))
    x = few_of(rng, (count, hidden), 3)
    x[:, 0] = 1
    gate, up = np.zeros(sizes[0]), rng.integers(-1, 2, sizes[1]).astype(np.float64)
    gate[..., 1:, :] = 8 * few_of(rng, (*experts, inner, hidden - 1), 1).swapaxes(-1, -2) if hidden > 1 else 0
    gate[..., 0, :] = np.where(rng.random((*experts, inner)) < 0.7, 64, -768)
    return x, gate, up, few_of(rng, (*experts, hidden, inner), 1).swapaxes(-1, -2).copy()


def sparse(case: TypedCase, rng: Random, exact: bool) -> Arguments:
    """Experts as above, weighted by 1/2 and 1 on the lattice."""
    count, _, _, experts, k = case.sizes
    ids = np.argsort(rng.random((count, experts)), axis=1)[:, :k].astype(np.int64)
    factors = rng.choice((0.5, 1.0), ids.shape) if exact else rng.dirichlet(np.ones(k), count)
    return *expert(case, rng, exact), ids, factors


def ranked(case: TypedCase, rng: Random, exact: bool) -> Arguments:
    """Scores that are neighbours in the type, some of them equal."""
    count, experts, k = case.sizes
    return 1 + rng.integers(-experts, experts, (count, experts)) * 2.0**-7, k


MAKERS: Mapping[str, Callable[[TypedCase, Random, bool], Arguments]] = {
    "blocks.rms_norm": norm,
    "blocks.swiglu": gates,
    "blocks.geglu": gates,
    "blocks.clamped_swiglu": clamped,
    "blocks.soft_cap": capped,
    "rope.rotate": heads,
    "attention.softmax": scores,
    "attention.attend": tokens,
    "attention.attend_shaped": shaped_tokens,
    "routing.gate": routed,
    "routing.weights": chosen,
    "routing.top_k": ranked,
    "routing.expert": expert,
    "routing.sparse": sparse,
}


def arguments_of(case: TypedCase) -> Arguments:
    """The arguments: arrays of floats in the type of the case."""
    kind = case.inputs
    made = MAKERS[case.operation](case, case.generator(), case.tier == "lattice")

    return tuple(
        rounded(part, kind) if isinstance(part, np.ndarray) and part.dtype.kind == "f" else part for part in made
    )


Shapes = tuple[tuple[int, ...], ...]

# **Shapes**: small, ragged, and as models have them. The second line of each has what 16-bit kernels treat separately:
# remainders of a register of eight, rows beyond one tile, wide heads, long contexts and many experts.

ROWS = (
    *((1, 1), (3, 7), (2, 33), (5, 576), (1, 4096)),
    *((17, 10), (64, 11), (9, 12), (6, 13), (32, 14), (2, 4100), (1, 11008)),
)
POWERS = (
    *((1, 8), (3, 16), (2, 64), (5, 1024), (1, 4096)),
    *((17, 12), (64, 20), (2, 5120), (1, 8192)),
)
ATTENTION = (
    *((1, 1, 1, 1, 4, 0), (5, 5, 4, 4, 8, 0), (4, 9, 6, 2, 16, 4), (1, 33, 9, 3, 64, 0), (3, 300, 4, 2, 64, 100)),
    *((1, 40, 4, 2, 80, 0), (2, 33, 4, 1, 96, 0), (1, 65, 4, 2, 128, 0), (3, 20, 2, 1, 256, 0)),
    *((1, 1025, 4, 1, 64, 0), (1, 4096, 2, 1, 128, 0), (2, 1025, 2, 1, 64, 512)),
    *((16, 48, 2, 1, 128, 0), (64, 64, 2, 2, 32, 0), (128, 130, 2, 1, 64, 0)),
)
GATES = (
    *((1, 1, 1), (3, 33, 8), (7, 576, 64)),
    *((1, 64, 128), (8, 40, 256), (64, 24, 16), (17, 1000, 60), (2, 4096, 8)),
)
EXPERTS = (
    *((1, 1, 1), (3, 33, 8), (2, 64, 96)),
    *((4, 64, 128), (17, 128, 24), (5, 40, 256), (64, 24, 16)),
)
LAYERS = (
    *((1, 1, 1, 1, 1), (3, 33, 8, 4, 2), (5, 24, 40, 6, 4)),
    *((8, 64, 32, 8, 2), (17, 128, 24, 16, 4), (64, 24, 16, 4, 2)),
)
CHOSEN = (
    *((1, 1, 1), (3, 8, 2), (2, 60, 4), (5, 128, 8)),
    *((8, 256, 8), (64, 16, 2), (17, 384, 4), (1, 512, 1)),
)


PAIRINGS = ("half-split", "interleaved")
HEADS = (
    *((1, 1, 2), (3, 2, 6), (5, 3, 16), (2, 9, 64)),
    *((2, 3, 80), (1, 4, 96), (2, 4, 128), (3, 2, 128), (1, 2, 256), (64, 2, 64), (17, 8, 128)),
)
NONE = ("",)
SHAPED = ("all", "cap", "sinks", "factor")
LATTICE: Mapping[str, tuple[Shapes, tuple[str, ...]]] = {
    "blocks.rms_norm/C1": (POWERS, NONE),
    "blocks.swiglu/C1": (ROWS, NONE),
    "blocks.geglu/C1": (ROWS, NONE),
    "blocks.clamped_swiglu/C1": (ROWS, NONE),
    "blocks.soft_cap/C1": (ROWS, NONE),
    "rope.rotate/C1": (HEADS, PAIRINGS),
    "attention.softmax/C1": (ROWS, NONE),
    "attention.attend/C2": (ATTENTION, NONE),
    "attention.attend_shaped/C2": (ATTENTION, SHAPED),
    "routing.gate/C1": (GATES, ("logits",)),
    "routing.weights/C3": (CHOSEN, ("after", "before")),
    "routing.expert/C1": (EXPERTS, NONE),
    "routing.sparse/C1": (LAYERS, NONE),
}
RANDOM: Mapping[str, tuple[Shapes, tuple[str, ...]]] = {
    "blocks.rms_norm/C3": (ROWS, NONE),
    "blocks.swiglu/C2": (ROWS, NONE),
    "blocks.geglu/C2": (ROWS, NONE),
    "blocks.clamped_swiglu/C2": (ROWS, NONE),
    "blocks.soft_cap/C2": (ROWS, NONE),
    "rope.rotate/C2": (HEADS, PAIRINGS),
    "attention.softmax/C2": (ROWS, NONE),
    "attention.attend/C3": (ATTENTION, NONE),
    "attention.attend_shaped/C3": (ATTENTION, SHAPED),
    "routing.gate/C2": (GATES, ("logits",)),
    "routing.gate/C3": (GATES, ("probabilities",)),
    "routing.weights/C1": (CHOSEN, ("after",)),
    "routing.weights/C2": (CHOSEN, ("before",)),
    "routing.expert/C2": (EXPERTS, NONE),
    "routing.sparse/C2": (LAYERS, NONE),
}
"""For each clause the shapes of its cases, and the choices that alternate among them."""


def typed(tier: str, table: Mapping[str, tuple[Shapes, tuple[str, ...]]]) -> Generator:
    """Each shape of a clause in both types."""

    def generator(clause: str, settings: Settings) -> Iterator[TypedCase]:
        shapes, choices = table[clause]
        for inputs in INPUTS:
            for turn, sizes in enumerate(shapes):
                yield TypedCase(clause, tier, "", inputs, sizes, choices[turn % len(choices)])

    return generator


@checks(LATTICE, typed("lattice", LATTICE))
def test_on_the_lattice(backend: Remote, case: TypedCase) -> None:
    """The result is exact in the type of the inputs; zeros may have either sign."""
    arguments = arguments_of(case)
    given = backend.run(case.operation, *arguments)
    assert_equal_values(given, OPERATIONS[case.operation].compute(*arguments), case.inputs)


@checks(RANDOM, typed("random", RANDOM))
def test_within_the_bound(backend: Remote, case: TypedCase, record_property: Record) -> None:
    """Random inputs stay within the bound for the declared types and accumulator."""
    arguments, declared = arguments_of(case), arithmetic(backend, case)
    given = backend.run(case.operation, *arguments)
    exact: F64 = OPERATIONS[case.operation].compute(*arguments)
    bound = limit_of(lambda: bound_of(case.operation, arguments, declared, exact))
    record_property("share", assert_within(*judged(given, exact, bound), FLOATS[case.inputs].dtype))


def judged(given: Any, exact: F64, bound: Bound) -> tuple[Any, F64, Bound]:
    """The elements in which a right kernel cannot overflow; all others are set to 0 in both arrays."""
    sure = np.isfinite(bound.limit)
    if sure.all() or not isinstance(given, np.ndarray) or given.shape != exact.shape:
        return given, exact, bound
    return np.where(sure, given, given.dtype.type(0)), np.where(sure, exact, 0), bound


@checks("routing.top_k/C2", typed("edge", {"routing.top_k/C2": (CHOSEN, NONE)}))
def test_neighbours_and_ties(backend: Remote, case: TypedCase) -> None:
    """For scores that are neighbours in the type, many of them equal, experts are ordered by score, then by id."""
    assert_reference(backend, case, "chosen", *arguments_of(case))


# **Casts** widen their numbers, so 16 bits are float32 numbers of few bits.


@dataclass(frozen=True)
class TypedFormatCase(FormatCase):
    """A cast of numbers of 16 bits."""

    inputs: Name = "float16"

    @property
    def label(self) -> str:
        return f"{self.inputs}-{super().label}"

    def parameters(self) -> dict[str, object]:
        return super().parameters() | {"inputs": self.inputs}


def typed_casts(clause: str, settings: Settings) -> Iterator[TypedFormatCase]:
    for table in FORMATS.values():
        if table.encode:
            options = options_of(table, 0)
            rows, columns = fitted(table, 2 * (table.block or 32), 5, options)
            for inputs in INPUTS:
                yield TypedFormatCase(clause, "random", "", table.name, rows, columns, options=options, inputs=inputs)


def typed_kinds(clause: str, settings: Settings) -> Iterator[TypedFormatCase]:
    """Every kind of numbers for every format with alternating types, and a deep and a wide matrix."""
    for turn, table in enumerate(table for table in FORMATS.values() if table.encode):
        unit, options = table.block or 32, options_of(table, 0)
        sizes = [("edge", kind, 4 * unit, 20) for kind in KINDS]
        sizes += [("random", "deep", 1280, 5), ("random", "wide", unit, 66)]
        for number, (tier, variant, deep, wide) in enumerate(sizes):
            rows, columns = fitted(table, deep, wide, options)
            inputs = INPUTS[(turn + number) % 2]
            yield TypedFormatCase(clause, tier, variant, table.name, rows, columns, options=options, inputs=inputs)


@checks("formats.quantize/C1", typed_casts)
def test_casts_of_16_bits(backend: Remote, case: TypedFormatCase) -> None:
    """All fields equal those of one choice in the format's table."""
    assert_cast(backend, case, in_16_bits(case, normal))


@checks("formats.quantize/C1", typed_kinds)
def test_casts_of_every_kind_in_16_bits(backend: Remote, case: TypedFormatCase) -> None:
    """Ties, zeros, huge numbers and other kinds are cast as the same numbers in float32."""
    assert_cast(backend, case, in_16_bits(case, KINDS.get(case.variant, normal)))


def in_16_bits(case: TypedFormatCase, kind: Callable[[Random, int, int], F32]) -> Activations:
    """Numbers of a kind, rounded to the type of the case."""
    numbers = kind(case.generator(), case.rows, case.columns)
    return np.ascontiguousarray(rounded(numbers.astype(np.float64), case.inputs))
