"""Checks of every two sizes of Block Floating Point, its caches and offloading (`lowbit_conformance.suite.pairs`).

A backend may declare some blocks and mantissas only, so each format has a case of its own; what is not declared of a
format is the numbers of rows and columns, which take turns within it.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from itertools import product

import numpy as np

from lowbit.moe.offload import MEMORIES, Arrangement, Request
from lowbit.moe.offload_engine import engine
from lowbit.quantization import bfp, bfp_dot, bfp_storage
from lowbit_conformance.isolation.remote import Remote
from lowbit_conformance.suite.bounded import assert_reference
from lowbit_conformance.suite.clauses import test_bfp, test_kvcache
from lowbit_conformance.suite.clauses.test_bfp import BfpCase, MixedCase
from lowbit_conformance.suite.clauses.test_engine import EngineCase, assert_events
from lowbit_conformance.suite.clauses.test_kvcache import CacheCase
from lowbit_conformance.suite.clauses.test_offload import OffloadCase, assert_traced
from lowbit_conformance.suite.compare import assert_exact
from lowbit_conformance.suite.marking import Record, Settings, checks, grid
from lowbit_conformance.suite.pairs import EVERY_PAIR, SIZES, Pairs, each_of, rows

NEW = ("exhaustive", EVERY_PAIR)

# **Formats.**

BLOCKS = (1, 2, 3, 4, 5, 7, 8, 12, 16, 17, 20, 24, 32, 48, 64, 128)
MANTISSAS = range(2, 26)
WHOLE = (8, 16, 32, 64, 128)
"""Blocks in use."""


def formats(clause: str, settings: Settings) -> Iterator[BfpCase]:
    """Every block with every mantissa, with alternating exponents."""
    storable = clause.startswith(("bfp.store/", "bfp.load/"))
    exponents = (8, 7, 5, 8, 6, 8, 1) if storable else (8, 7, 9, 8, 10, 8, 1)
    for number, (block, mantissa) in enumerate(product(BLOCKS, MANTISSAS)):
        yield BfpCase(clause, *NEW, 2, block + 1, block, mantissa, exponents[number % len(exponents)])


def sizes_of(case: BfpCase) -> Iterator[BfpCase]:
    """The calls of a format: three numbers of rows, each with a number of blocks and a different remainder."""
    turn = case.block * 5 + case.mantissa
    for step in range(3):
        count, blocks = SIZES[(turn + 8 * step) % 23], (1, 2, 3, 4, 8)[(turn + step) % 5]
        tail = (0, 1, case.block // 2, case.block - 1)[(turn + step) % 4]
        columns = max(1, min(blocks * case.block, 256) - case.block * (tail > 0) + tail)
        yield BfpCase(case.clause, *NEW, count, columns, case.block, case.mantissa, case.exponent)


def _stored(backend: Remote, case: BfpCase) -> None:
    some = test_bfp.blocks(case)
    given, wanted = test_bfp.stored(backend, some), bfp_storage.store(some)
    assert_exact("mantissas", given.mantissas, wanted.mantissas)
    assert_exact("exponents", given.exponents, wanted.exponents)


EVERY: Mapping[str, Callable[..., None]] = {
    "bfp.cast/C1": test_bfp.test_cast_equals_the_reference,
    "bfp.decode/C1": test_bfp.test_decode_equals_the_reference,
    "bfp.store/C1": _stored,
    "bfp.load/C1": test_bfp.test_load_is_the_inverse,
}


@checks(EVERY, formats)
def test_every_format(backend: Remote, case: BfpCase, record_property: Record) -> None:
    """Random rows, mantissas and exponents give the reference's results."""
    each_of(backend, sizes_of(case), record_property, EVERY[case.clause])


def operands(clause: str, settings: Settings) -> Iterator[BfpCase]:
    """The formats whose sums stay below 2^53, and common block sizes with mantissas of different widths."""
    yield from (case for case in formats(clause, settings) if case.block * case.format.top**2 < bfp_dot.LARGEST_SUM)
    for block, mantissa, other in product(WHOLE, (2, 4, 8, 12), (3, 4, 6, 8, 16)):
        if mantissa != other:
            sizes = (2, block + 1, block, mantissa)
            yield MixedCase(clause, "exhaustive", f"{EVERY_PAIR}-mixed", *sizes, mantissa_b=other, exponent_b=8)


def _multiplied(backend: Remote, case: BfpCase) -> None:
    a, b = test_bfp.two(case)
    given, wanted = test_bfp.dotted(backend, a, b), bfp_dot.dot(a, b)
    assert_exact("sums", given.sums, wanted.sums)
    assert_exact("exponents", given.exponents, wanted.exponents)


@checks("bfp.dot/C1", operands)
def test_dots(backend: Remote, case: BfpCase, record_property: Record) -> None:
    """Random mantissas give the reference's sums."""
    each_of(backend, [case] if isinstance(case, MixedCase) else sizes_of(case), record_property, _multiplied)


@dataclass(frozen=True)
class RowsCase(BfpCase):
    """A product of two operands with different numbers of rows."""

    others: int = 1

    @property
    def operands(self) -> tuple[bfp.Blocks, bfp.Blocks]:
        one, two = (
            BfpCase(self.clause, self.tier, name, count, self.columns, self.block, self.mantissa, seed=self.seed)
            for name, count in (("a", self.rows), ("b", self.others))
        )
        return test_bfp.blocks(one), test_bfp.blocks(two)


def of_rows(clause: str, count: int, others: int, blocks: int) -> RowsCase:
    return RowsCase(clause, *NEW, count, 4 * blocks, 4, 4, others=others)


ROWS = Pairs(of_rows, [SIZES, SIZES, (1, 2, 3, 4, 5, 7, 8, 12, 15, 16, 17, 24, 32, 33, 64)])


def _multiplied_rows(backend: Remote, case: RowsCase) -> None:
    a, b = case.operands
    assert_exact("sums", test_bfp.dotted(backend, a, b).sums, bfp_dot.dot(a, b).sums)


@checks("bfp.dot/C1", ROWS.cases)
def test_dots_of_many_rows(backend: Remote, case: RowsCase, record_property: Record) -> None:
    """Every number of rows of a, of rows of b and of blocks, in pairs, gives the reference's sums."""
    each_of(backend, ROWS.calls(case), record_property, _multiplied_rows)


def _totalled(backend: Remote, case: RowsCase) -> None:
    assert_reference(backend, case, "totals", bfp_dot.dot(*case.operands))


@checks("bfp.total/C1", ROWS.cases)
def test_totals_of_many_rows(backend: Remote, case: RowsCase, record_property: Record) -> None:
    """Every number of rows with every number of columns and of blocks gives the reference's totals."""
    each_of(backend, ROWS.calls(case), record_property, _totalled)


# **Caches.**

HEADS = (1, 2, 3, 4, 5, 8, 16, 32)
WIDTHS = (4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 256)
MOST_CHANNELS = 1024
"""Channels of all heads; wider cases have one head."""
KEPT = (
    (16, 8),
    (32, 8),
    (64, 8),
    (128, 8),
    (16, 4),
    (32, 4),
    (64, 4),
    (128, 4),
    (8, 9),
    (16, 16),
    (4, 6),
    (2, 3),
    (32, 12),
)
"""Block and mantissa."""


def kept(clause: str, settings: Settings) -> Iterator[CacheCase]:
    """Every format of keys with every format of values, every width of a head and number of heads."""
    for turn in range(13):
        for key, value, head_dim, heads in rows(turn, [range(13), range(13), WIDTHS, HEADS], 13):
            heads = heads if heads * head_dim <= MOST_CHANNELS else 1
            yield CacheCase(clause, *NEW, heads, head_dim, *KEPT[key], 8, *KEPT[value], 8, 4)


@checks("kvcache.bfp/C1", kept)
def test_caches(backend: Remote, case: CacheCase) -> None:
    """After steps of three tokens and of one, the cache holds each token, cast row by row."""
    steps = list(test_kvcache.parts(test_kvcache.drawn(case, case.generator()), [3, 1]))
    with closing(backend.open("kvcache.bfp", *case.opening)) as session:
        for step in steps:
            answer = test_kvcache.taken(session, step)
    test_kvcache.assert_holds(case, answer, steps)


LENGTHS = {
    "doubling": (1, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512),
    "sizes": tuple(size for size in SIZES for _ in range(2)),
    **{f"by-{size}": (size,) * 5 for size in (2, 3, 4, 8, 16, 24, 32, 48, 64, 100, 128, 256)},
    **{f"after-{size}": (size, 1, 1, 16, 1, size) for size in (7, 8, 15, 16, 31, 32, 63, 64, 127, 128, 255, 256)},
}
"""The number of tokens of each step: totals that are powers of two, every length twice, and one length repeatedly."""


def grown(clause: str, settings: Settings) -> Iterator[CacheCase]:
    for variant, lengths in LENGTHS.items():
        for heads, head_dim, keys, values in ((1, 4, (32, 4, 8), (64, 8, 8)), (2, 8, (4, 8, 8), (4, 8, 8))):
            yield CacheCase(clause, "exhaustive", f"steps-{variant}", heads, head_dim, *keys, *values, sum(lengths))


@checks("kvcache.bfp/C1", grown)
def test_steps_of_every_length(backend: Remote, case: CacheCase) -> None:
    """After steps of many lengths the cache holds all tokens so far, including the results of earlier steps."""
    steps = list(test_kvcache.parts(test_kvcache.drawn(case, case.generator()), LENGTHS[case.variant[6:]]))
    held: test_kvcache.Tokens | tuple[()] = ()
    with closing(backend.open("kvcache.bfp", *case.opening)) as session:
        for step in steps:
            answer = test_kvcache.taken(session, step)
            for name, old, new in zip(test_kvcache.NAMES, held, answer, strict=False):
                assert_exact(f"{name} of the tokens before", np.ascontiguousarray(new[:, : old.shape[1]]), old)
            held = answer
    test_kvcache.assert_holds(case, answer, steps)


SAME = ("tokens-zeros", "tokens-again", "tokens-keys-are-values", "tokens-negative")


@checks("kvcache.bfp/C1", grid(CacheCase, "exhaustive", SAME, (2, 33, 32, 4, 8, 32, 4, 8, 8)))
def test_tokens_that_are_alike(backend: Remote, case: CacheCase) -> None:
    """The cache holds zero tokens among others, repeated tokens, keys equal to the values, and negative numbers
    only."""
    steps = list(test_kvcache.parts(test_kvcache.drawn(case, case.generator()), [2, 2, 2, 1, 1]))
    kind = case.variant.removeprefix("tokens-")
    if kind == "zeros":
        steps[2] = (0 * steps[2][0], 0 * steps[2][1])
    elif kind == "again":
        steps[2:4] = [steps[1], steps[1]]
    elif kind == "negative":
        steps = [(-np.abs(keys), -np.abs(values)) for keys, values in steps]
    else:
        steps = [(keys, keys.copy()) for keys, _ in steps]
    given = []
    with closing(backend.open("kvcache.bfp", *case.opening)) as session:
        for step in steps:
            given.append(step)
            test_kvcache.assert_holds(case, test_kvcache.taken(session, step), given)


# **Offloading.**

FEWER = (1, 2, 3, 4, 8, 12, 16, 17, 32, 33, 64, 65, 128)


def crowded(arrangement: Arrangement, rng: np.random.Generator) -> list[Request]:
    """Passes through all layers that need as many experts as there are slots and more, and guess as many as there are
    buffers and more: passes with one expert per request, with many, none and two, and the first pass again."""
    requests: list[Request] = []
    layers, experts = arrangement.layers, arrangement.experts

    def some(count: int) -> tuple[int, ...]:
        return tuple(int(expert) for expert in rng.permutation(experts)[: max(0, min(count, experts))])

    passes = [1, arrangement.slots + 1, 0, 2]
    for most in np.roll(passes, rng.integers(4)).tolist():
        guesses: tuple[int, ...] = ()
        for layer in range(layers):
            needed = (*guesses[: most // 2 + 1], *(one for one in some(most) if one not in guesses))[:most]
            guesses = some(arrangement.buffers + 1) if layer + 1 < layers else ()
            requests.append(Request(layer, needed, guesses))
    if layers < 9 and requests[-1].needed:
        requests += requests[:layers]
    return [*requests, Request(0, (), some(arrangement.buffers + 1))] if layers > 1 else requests


def traced(clause: str, layers: int, experts: int, buffers: int, slots: int, memory: int) -> OffloadCase:
    return OffloadCase(clause, *NEW, layers, experts, min(slots, experts), buffers, MEMORIES[memory], 1, 1, 1)


ARRANGED = Pairs(traced, [(1, 2, 3, 4, 8, 12, 16, 17, 24, 32, 33, 2, 3), FEWER, FEWER, FEWER, (0, 1)], 13)
DEEP = (
    (65, 4, 2, 3),
    (129, 3, 1, 2),
    (257, 2, 1, 2),
    (520, 2, 1, 1),
    (2, 1100, 3, 2),
    (2, 300, 260, 3),
    (2, 300, 3, 270),
)
"""Layers, experts, slots and buffers."""


def trace_cases(clause: str, settings: Settings) -> Iterator[OffloadCase]:
    yield from ARRANGED.cases(clause, settings)
    for number, (layers, experts, slots, buffers) in enumerate(DEEP):
        yield OffloadCase(clause, "exhaustive", "far", layers, experts, slots, buffers, MEMORIES[number % 2], 1, 1, 1)


def arrangements(case: OffloadCase) -> Iterator[OffloadCase]:
    yield from [case] if case.variant == "far" else ARRANGED.calls(case)


def _traced(backend: Remote, case: OffloadCase) -> None:
    assert_traced(backend, case, crowded(case.arrangement, case.generator()))


@checks("offload.trace/C2", trace_cases)
def test_traces(backend: Remote, case: OffloadCase, record_property: Record) -> None:
    """All slots and buffers are in use; the events are the reference's."""
    each_of(backend, arrangements(case), record_property, _traced)


def engine_cases(clause: str, settings: Settings) -> Iterator[EngineCase]:
    yield from (engine_case(case.of(clause)) for case in trace_cases(clause, settings))


def engine_case(case: OffloadCase) -> EngineCase:
    sizes = (case.layers, case.experts, case.slots, case.buffers, case.memory)
    return EngineCase(case.clause, case.tier, case.variant, *sizes, 1, 1, 1, seed=case.seed)


def some_arrangements(case: EngineCase) -> Iterator[EngineCase]:
    """Every third arrangement of the trace, because an engine answers step by step."""
    sizes = (case.layers, case.experts, case.slots, case.buffers, case.memory)
    trace = OffloadCase(case.clause, case.tier, case.variant, *sizes, 1, 1, 1, seed=case.seed)
    yield from (engine_case(each) for each in list(arrangements(trace))[::3])


def _walked(backend: Remote, case: EngineCase) -> None:
    requests, reference = crowded(case.arrangement, case.generator()), engine(case.arrangement)
    with closing(backend.open("offload.engine", case.arrangement)) as session:
        for request in requests:
            given = session.step(request)
            assert_events(request, given, reference.step(request))


@checks("offload.engine/C1", engine_cases)
def test_engines(backend: Remote, case: EngineCase, record_property: Record) -> None:
    """The events, request by request, are the reference's."""
    each_of(backend, some_arrangements(case), record_property, _walked)
