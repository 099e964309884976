"""Checks of every two sizes of heads, norms, gates and layers together (`lowbit_conformance.suite.pairs`).

The inputs are those of `test_sizes`, where one size at a time goes through more values.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from lowbit.attention.pooling import Method
from lowbit.kernels import layouts
from lowbit.kernels.layouts import ORDERS, ColumnPanels
from lowbit.quantization.packing import BITS
from lowbit_conformance.isolation.remote import Remote
from lowbit_conformance.suite.bounded import Record
from lowbit_conformance.suite.cases import Case
from lowbit_conformance.suite.clauses import test_hqq, test_pooling, test_rope, test_sizes
from lowbit_conformance.suite.clauses.test_attention import AttendCase
from lowbit_conformance.suite.clauses.test_attention import RowsCase as ScoresCase
from lowbit_conformance.suite.clauses.test_blocks import RowsCase
from lowbit_conformance.suite.clauses.test_gptq import LayerCase
from lowbit_conformance.suite.clauses.test_hqq import BlocksCase
from lowbit_conformance.suite.clauses.test_layouts import LayoutCase, places
from lowbit_conformance.suite.clauses.test_pooling import HeadsCase
from lowbit_conformance.suite.clauses.test_rope import RopeCase
from lowbit_conformance.suite.compare import assert_exact
from lowbit_conformance.suite.marking import Settings, call, checks
from lowbit_conformance.suite.pairs import EVERY_PAIR, PRIME, SIZES, Pairs
from lowbit_conformance.suite.routing_cases import RoutingCase

NEW = ("exhaustive", EVERY_PAIR)
"""The tier and the variant of all cases here."""


# **Heads.**

SCORES = Pairs(lambda clause, *sizes: ScoresCase(clause, *NEW, *sizes), [SIZES, SIZES])


MOST_ROWS = 64
"""Heads times tokens: what has more has one token only, since the bound is computed for each of them."""


def attended(clause: str, head_dim: int, length: int, kv_heads: int, group: int, tokens: int, size: int) -> AttendCase:
    """A call of attention; a window of 0 is none, and of −1 as long as all tokens."""
    heads = group * kv_heads
    tokens = min(tokens, length) if tokens * heads <= MOST_ROWS else 1
    return AttendCase(clause, *NEW, tokens, length, heads, kv_heads, head_dim, length if size < 0 else size)


WINDOWS = (0, -1, 0, 2, 0, 16, 0, 32, 0, 64, 0, 128, 0)
HEADS = Pairs(
    attended,
    [
        (2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 256),
        (1, 2, 4, 8, 16, 17, 31, 32, 33, 48, 64, 128, 256),
        (1, 2, 3, 4, 5, 6, 8, 16),
        (1, 2, 3, 4, 5, 7, 8),
        (1, 2, 3, 4, 8, 9, 16, 17, 32, 33, 64),
        WINDOWS,
    ],
    prime=13,
)


def prompted(clause: str, tokens: int, length: int, head_dim: int, size: int) -> AttendCase:
    """A prompt, or the end of one, of one head."""
    length = max(tokens, length)
    window = length if size < 0 else size
    return AttendCase(clause, "exhaustive", f"{EVERY_PAIR}-prompt", tokens, length, 1, 1, head_dim, window)


FEWER = (1, 2, 3, 4, 8, 15, 16, 17, 32, 33, 64, 65, 128)
PROMPTS = Pairs(prompted, [FEWER, FEWER, (16, 32, 48, 64, 80, 128), WINDOWS], 13)
NARROW = Pairs(prompted, [FEWER, FEWER, (2, 4, 6, 8), WINDOWS], 13)


@checks("attention.attend/C3", PROMPTS.cases)
def test_prompts(backend: Remote, case: AttendCase, record_property: Record) -> None:
    """The same for every number of queries with every number of keys."""
    PROMPTS.each(case, record_property, lambda each, own: test_sizes.test_heads_of_every_size(backend, each, own))


@checks("attention.attend/C3", NARROW.cases)
def test_prompts_of_narrow_heads(backend: Remote, case: AttendCase, record_property: Record) -> None:
    """The same for heads of fewer channels than a register has lanes, where what is read of a row is several rows."""
    NARROW.each(case, record_property, lambda each, own: test_sizes.test_heads_of_every_size(backend, each, own))


def turned(clause: str, head_dim: int, heads: int, tokens: int, pairing: int) -> RopeCase:
    return RopeCase(clause, "exhaustive", test_rope.PAIRINGS[pairing], tokens, heads, 2 * head_dim)


TURNS = Pairs(turned, [SIZES, SIZES[:19], SIZES[:19], range(4)])


def pooled(method: Method) -> Pairs[HeadsCase]:
    def made(clause: str, head_dim: int, groups: int, members: int, count: int) -> HeadsCase:
        return HeadsCase(clause, "exhaustive", f"{EVERY_PAIR}-wide", count, members * groups, groups, head_dim, method)

    return Pairs(made, [(*SIZES[:21], 128, 256), (1, 2, 3, 4, 5, 6, 7, 8), (1, 2, 3, 4, 5, 6, 7, 8, 12, 16), SIZES])


MEANS, FIRSTS = pooled("mean"), pooled("first")


# **Norms and gates.**

TOKENS = Pairs(lambda clause, *sizes: RowsCase(clause, *NEW, *sizes), [SIZES, SIZES])


# **Layers of routing.**


def layers(
    tokens: Sequence[int] = SIZES,
    hidden: Sequence[int] = (9,),
    experts: Sequence[int] = (5,),
    chosen: Sequence[int] = (2,),
    inner: Sequence[int] = (6,),
    prime: int = PRIME,
) -> Pairs[RoutingCase]:
    def made(clause: str, *sizes: int) -> RoutingCase:
        count, width, own, k, depth = sizes
        return RoutingCase(clause, *NEW, count, width, own, min(k, own), depth)

    return Pairs(made, [tokens, hidden, experts, chosen, inner], prime)


GATES, CHOICES = layers(hidden=SIZES, experts=SIZES), layers(experts=SIZES, chosen=SIZES[:19])
EXPERTS = layers(hidden=SIZES, experts=(1,), chosen=(1,), inner=SIZES)
LAYERS = layers(
    (1, 2, 8, 16, 17, 32, 64),
    (2, 8, 16, 17, 32, 64, 9),
    (2, 4, 8, 12, 16, 32, 64),
    (1, 2, 3, 4, 6, 8, 16),
    (2, 8, 9, 16, 17, 32, 64),
    7,
)


# **Parts of GPTQ, and blocks of HQQ.**

LAYER = Pairs(lambda clause, *sizes: LayerCase(clause, *NEW, *sizes), [SIZES, SIZES])


EVERY: Mapping[str, tuple[Pairs[Any], Callable[..., None]]] = {
    "attention.softmax/C2": (SCORES, test_sizes.test_softmax_of_every_size),
    "attention.attend/C3": (HEADS, test_sizes.test_heads_of_every_size),
    "rope.rotate/C1": (TURNS, test_sizes.test_turns_of_every_size),
    "pooling.pool/C1": (MEANS, test_pooling.assert_pooled),
    "pooling.pool/C2": (FIRSTS, test_pooling.assert_pooled),
    "blocks.rms_norm/C2": (TOKENS, test_sizes.test_norms_of_every_size),
    "blocks.swiglu/C1": (TOKENS, test_sizes.test_gated_rows_of_every_size),
    "blocks.geglu/C1": (TOKENS, test_sizes.test_gated_rows_of_every_size),
    "routing.gate/C1": (GATES, test_sizes.test_gates_of_every_size),
    "routing.top_k/C1": (CHOICES, test_sizes.test_choices_of_every_size),
    "routing.weights/C1": (CHOICES, test_sizes.test_weights_of_every_size),
    "routing.expert/C1": (EXPERTS, test_sizes.test_experts_of_every_size),
    "routing.sparse/C1": (LAYERS, test_sizes.test_layers_of_every_size),
    "gptq.hessian/C1": (LAYER, test_sizes.test_hessians_of_every_size),
    "gptq.targets/C1": (LAYER, test_sizes.test_targets_of_every_size),
}
"""For each clause its cases, and the test of one size at a time that is run on each of their calls."""


def every_case(clause: str, settings: Settings) -> Iterator[Case]:
    return EVERY[clause][0].cases(clause, settings)


@checks(EVERY, every_case)
def test_every_pair(backend: Remote, case: Case, record_property: Record) -> None:
    """The same as for one size at a time."""
    pairs, test = EVERY[case.clause]
    pairs.each(case, record_property, lambda each, own: call(test, backend=backend, case=each, record_property=own))


def of_bits() -> dict[int, Pairs[BlocksCase]]:
    """A width of codes may be undeclared, so each has cases of its own."""

    def made(bits: int, clause: str, *sizes: int) -> BlocksCase:
        return BlocksCase(clause, "exhaustive", f"{EVERY_PAIR}-small", bits, *sizes)

    return {bits: Pairs(partial(made, bits), [SIZES, SIZES]) for bits in BITS}


CODES = of_bits()


def code_cases(clause: str, settings: Settings) -> Iterator[Case]:
    for pairs in CODES.values():
        yield from pairs.cases(clause, settings)


@checks("hqq.codes/C1", code_cases)
def test_codes(backend: Remote, case: BlocksCase, record_property: Record) -> None:
    """Random weights give the reference's codes."""
    CODES[case.bits].each(case, record_property, lambda each, own: test_sizes.test_codes_of_every_group(backend, each))


@checks("hqq.step/C2", code_cases)
def test_steps(backend: Remote, case: BlocksCase, record_property: Record) -> None:
    """A step under several norms stays within the bound."""
    CODES[case.bits].each(
        case, record_property, lambda each, own: test_hqq.test_step_within_the_bound(backend, each, own)
    )


# **Layouts.**


def laid(order: str) -> Pairs[LayoutCase]:
    def made(clause: str, width: int, height: int, columns: int, count: int) -> LayoutCase:
        own = count if order == ColumnPanels.order else height
        return LayoutCase(clause, *NEW, order, count, columns, own, width)

    return Pairs(made, [SIZES, SIZES, SIZES, (*SIZES[:18], 64, 80, 96, 128, 256)])


LAID = {order: laid(order) for order in ORDERS}


def layout_cases(clause: str, settings: Settings) -> Iterator[Case]:
    for pairs in LAID.values():
        yield from pairs.cases(clause, settings)


def _streamed(backend: Remote, case: LayoutCase) -> None:
    words = places(case)
    given = backend.run("blocking.apply", words, case.layout)
    assert_exact("stream", given, layouts.apply(words, case.layout))


def _restored(backend: Remote, case: LayoutCase) -> None:
    stream = places(case).reshape(-1)
    given = backend.run("blocking.invert", stream, case.layout)
    assert_exact("words", given, layouts.invert(stream, case.layout))


@checks("blocking.apply/C1", layout_cases)
def test_streams(backend: Remote, case: LayoutCase, record_property: Record) -> None:
    """Words that are all different lie in the stream where the reference has them."""
    LAID[case.order].each(case, record_property, lambda each, own: _streamed(backend, each))


@checks("blocking.invert/C1", layout_cases)
def test_matrices_of_streams(backend: Remote, case: LayoutCase, record_property: Record) -> None:
    """Elements that are all different come to the rows and columns where the reference has them."""
    LAID[case.order].each(case, record_property, lambda each, own: _restored(backend, each))
