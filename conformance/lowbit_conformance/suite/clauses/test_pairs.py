"""Checks of every two sizes of heads, norms, gates and layers together (`lowbit_conformance.suite.pairs`).

The inputs are those of `test_sizes`, where one size at a time goes through more values.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from lowbit.attention.pooling import Method
from lowbit.kernels.layouts import ColumnPanels
from lowbit.quantization.packing import BITS
from lowbit_conformance.isolation.remote import Remote
from lowbit_conformance.suite.cases import Case
from lowbit_conformance.suite.clauses import (
    test_attention,
    test_blocks,
    test_clamped,
    test_experts,
    test_gptq,
    test_hqq,
    test_layouts,
    test_pooling,
    test_rope,
    test_routing,
    test_shaped_attention,
    test_sizes,
)
from lowbit_conformance.suite.clauses.test_attention import AttendCase
from lowbit_conformance.suite.clauses.test_attention import RowsCase as ScoresCase
from lowbit_conformance.suite.clauses.test_blocks import RowsCase
from lowbit_conformance.suite.clauses.test_clamped import LimitedCase
from lowbit_conformance.suite.clauses.test_gptq import LayerCase
from lowbit_conformance.suite.clauses.test_hqq import BlocksCase
from lowbit_conformance.suite.clauses.test_layouts import ANY_BLOCK, LayoutCase
from lowbit_conformance.suite.clauses.test_pooling import HeadsCase
from lowbit_conformance.suite.clauses.test_rope import RopeCase
from lowbit_conformance.suite.clauses.test_shaped_attention import SHAPINGS, shaped
from lowbit_conformance.suite.marking import Record, Settings, checks
from lowbit_conformance.suite.pairs import EVERY_PAIR, PRIME, SIZES, Pairs, each_of
from lowbit_conformance.suite.routing_cases import RoutingCase

NEW = ("exhaustive", EVERY_PAIR)
"""The tier and the variant of all cases here."""


# **Heads.**

SCORES = Pairs(lambda clause, *sizes: ScoresCase(clause, *NEW, *sizes), [SIZES, SIZES])


MOST_ROWS = 64
"""Heads times tokens; larger cases have one token only, because the bound is computed for each."""


def attended(clause: str, head_dim: int, length: int, kv_heads: int, group: int, tokens: int, size: int) -> AttendCase:
    """A call of attention; a window of 0 means none, and −1 means all tokens."""
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
    """A prompt, or its end, with one head."""
    length = max(tokens, length)
    window = length if size < 0 else size
    return AttendCase(clause, "exhaustive", f"{EVERY_PAIR}-prompt", tokens, length, 1, 1, head_dim, window)


FEWER = (1, 2, 3, 4, 8, 15, 16, 17, 32, 33, 64, 65, 128)
# The last have fewer channels than a register has lanes, so that one load covers several rows.
PROMPTS = Pairs(prompted, [FEWER, FEWER, (16, 32, 48, 64, 80, 128), WINDOWS], 13)
NARROW = Pairs(prompted, [FEWER, FEWER, (2, 4, 6, 8), WINDOWS], 13)


SHAPED_HEADS = Pairs(
    lambda clause, shaping, *sizes: shaped(attended(clause, *sizes), list(SHAPINGS)[shaping]),
    [range(5), *HEADS.values],
    prime=13,
)


SHAPED_PROMPTS = Pairs(
    lambda clause, shaping, *sizes: shaped(prompted(clause, *sizes), list(SHAPINGS)[shaping]),
    [range(5), *PROMPTS.values],
    13,
)


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
LIMITED = Pairs(lambda clause, *sizes: LimitedCase(clause, *NEW, *sizes), [SIZES, SIZES])


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


# **Parts of GPTQ, and blocks of HQQ**, whose widths of codes may be undeclared, so that each width has its own cases.

LAYER = Pairs(lambda clause, *sizes: LayerCase(clause, *NEW, *sizes), [SIZES, SIZES])


def coded(bits: int, clause: str, *sizes: int) -> BlocksCase:
    return BlocksCase(clause, "exhaustive", f"{EVERY_PAIR}-small", bits, *sizes)


CODES = [Pairs(partial(coded, bits), [SIZES, SIZES]) for bits in BITS]


# **Layouts.**


def laid(order: str, clause: str, width: int, height: int, columns: int, count: int) -> LayoutCase:
    own = count if order == ColumnPanels.order else height
    return LayoutCase(clause, *NEW, order, count, columns, own, width)


LAID = [Pairs(partial(laid, order), [SIZES, SIZES, SIZES, (*SIZES[:18], 64, 80, 96, 128, 256)]) for order in ANY_BLOCK]


EVERY: Mapping[str, tuple[Sequence[Pairs[Any]], Callable[..., None]]] = {
    "attention.softmax/C2": ([SCORES], test_attention.test_shares_within_the_bound),
    "attention.attend/C3": ([PROMPTS, NARROW, HEADS], test_attention.test_attention_within_the_bound),
    "attention.attend_shaped/C3": (
        [SHAPED_PROMPTS, SHAPED_HEADS],
        test_shaped_attention.test_shaped_attention_within_the_bound,
    ),
    "rope.rotate/C1": ([TURNS], test_rope.test_quarter_turns_are_exact),
    "pooling.pool/C1": ([MEANS], test_pooling.test_pooled_heads),
    "pooling.pool/C2": ([FIRSTS], test_pooling.test_pooled_heads),
    "blocks.rms_norm/C2": ([TOKENS], test_blocks.test_norm_of_an_exact_sum),
    "blocks.swiglu/C1": ([TOKENS], test_blocks.test_gated_on_the_lattice),
    "blocks.geglu/C1": ([TOKENS], test_blocks.test_gated_on_the_lattice),
    "blocks.clamped_swiglu/C1": ([LIMITED], test_clamped.test_clamped_on_the_lattice),
    "blocks.soft_cap/C2": ([LIMITED], test_clamped.test_capped_within_the_bound),
    "routing.gate/C1": ([GATES], test_routing.test_gate_on_the_lattice),
    "routing.top_k/C1": ([CHOICES], test_sizes.choices),
    "routing.weights/C1": ([CHOICES], test_sizes.weights),
    "routing.expert/C1": ([EXPERTS], test_experts.test_expert_on_the_lattice),
    "routing.sparse/C1": ([LAYERS], test_experts.test_layer_on_the_lattice),
    "gptq.hessian/C1": ([LAYER], test_gptq.test_hessian_on_the_lattice),
    "gptq.targets/C1": ([LAYER], test_gptq.test_targets_on_the_lattice),
    "hqq.codes/C1": (CODES, test_hqq.test_codes_equal_the_reference),
    "hqq.step/C2": (CODES, test_hqq.test_step_within_the_bound),
    "blocking.apply/C1": (LAID, test_layouts.test_apply_equals_the_reference),
    "blocking.invert/C1": (LAID, test_layouts.test_invert_equals_the_reference),
}
"""For each clause its cases, and the test of single sizes that runs on each of their calls."""


def every_case(clause: str, settings: Settings) -> Iterator[Case]:
    for pairs in EVERY[clause][0]:
        yield from pairs.cases(clause, settings)


@checks(EVERY, every_case)
def test_every_pair(backend: Remote, case: Case, record_property: Record) -> None:
    """As the tests of single sizes, for every combination of two sizes."""
    several, test = EVERY[case.clause]
    own = next(pairs for pairs in several if case in pairs.cases(case.clause, Settings(range(0))))
    each_of(backend, own.calls(case), record_property, test)
