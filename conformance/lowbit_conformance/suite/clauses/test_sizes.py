"""Checks of every small size: a kernel has a loop of its own for sizes that fill its registers, and one for each tail.

The shapes of other cases lie about the commonest registers. Here one size of an operation goes through all numbers up
to 70, and on to those that tiles and models have, while the others stay small; widths of codes, conventions and formats
take turns, so that none of them always meets the same tail.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from lowbit.quantization.affine import CONVENTIONS
from lowbit.quantization.packing import BITS, CODES_PER_UNIT
from lowbit_conformance.isolation.remote import Remote
from lowbit_conformance.suite.bounded import assert_bounded, assert_reference
from lowbit_conformance.suite.cases import Case, MatrixCase, conventions
from lowbit_conformance.suite.clauses import (
    test_affine,
    test_attention,
    test_blocks,
    test_clamped,
    test_experts,
    test_gptq,
    test_hqq,
    test_integer,
    test_ksort,
    test_linear,
    test_packing,
    test_pooling,
    test_rope,
    test_routing,
    test_shaped_attention,
)
from lowbit_conformance.suite.clauses.test_attention import AttendCase
from lowbit_conformance.suite.clauses.test_blocks import RowsCase
from lowbit_conformance.suite.clauses.test_clamped import LimitedCase
from lowbit_conformance.suite.clauses.test_gptq import LayerCase
from lowbit_conformance.suite.clauses.test_hqq import BlocksCase
from lowbit_conformance.suite.clauses.test_ksort import HeadCase
from lowbit_conformance.suite.clauses.test_pooling import HeadsCase
from lowbit_conformance.suite.clauses.test_rope import RopeCase
from lowbit_conformance.suite.clauses.test_shaped_attention import SHAPINGS, ShapedCase, shaped
from lowbit_conformance.suite.compare import assert_exact
from lowbit_conformance.suite.integer_cases import IntegerCase, of
from lowbit_conformance.suite.marking import Generator, Record, Settings, call, checks
from lowbit_conformance.suite.pairs import LONG
from lowbit_conformance.suite.routing_cases import RoutingCase, routes

FEW = (*range(1, 35), 40, 48, 63, 64, 65)
MANY = (*range(1, 71), 80, 96, 112, 127, 128, 129, 160, 192, 255, 256, 257)
EVERY = "every-size"

# **Codes and their products.**


def matrices(clause: str, settings: Settings) -> Iterator[MatrixCase]:
    """Every N, and for several vectors every T; the width of a code cycles, shifted by one every sixteen sizes."""
    vectors, own = 3 if clause.startswith("linear.qgemm") else 0, conventions(clause)
    for turn, columns in enumerate(MANY):
        bits, convention = BITS[(columns + turn // 16) % 4], own[turn // 2 % len(own)]
        rows = 2 * CODES_PER_UNIT[bits]
        case = MatrixCase(clause, "exhaustive", f"{EVERY}-full", bits, rows, columns, rows // 2 + 1, convention)
        if clause.startswith("packing."):
            case = replace(case, group_size=0)
        yield replace(case, vectors=vectors)
    for turn, count in enumerate((*FEW, 96, 128, 129) if vectors else ()):
        bits, convention = BITS[(count + turn // 16) % 4], CONVENTIONS[turn // 2 % 2]
        yield MatrixCase(clause, "exhaustive", f"{EVERY}-dense", bits, 64, 21, 24, convention, vectors=count)


def quantized(backend: Remote, case: MatrixCase) -> None:
    """Normal weights give the reference's scales, zeros and codes."""
    __tracebackhide__ = True
    weights = case.generator().normal(size=(case.rows, case.columns)).astype(np.float32)
    test_affine.assert_quantized(backend, case, weights)


def integer_matrices(clause: str, settings: Settings) -> Iterator[IntegerCase]:
    yield from (of(case, case.vectors) for case in matrices(clause, settings))


def hqq_blocks(clause: str, settings: Settings) -> Iterator[BlocksCase]:
    """Every group size and every number of groups."""
    for turn, size in enumerate(MANY):
        bits = BITS[(size + turn // 16) % 4]
        yield BlocksCase(clause, "exhaustive", f"{EVERY}-small", bits, size, 5)
        yield BlocksCase(clause, "exhaustive", f"{EVERY}-small", bits, 6, size)


# **Layers of routing.**


def layers(clause: str, settings: Settings) -> Iterator[RoutingCase]:
    """Every number of tokens and of experts, hidden size and inner width, and every number of chosen experts."""
    small = RoutingCase(clause, "exhaustive", EVERY, 2, 9, 5, 2, 6)
    experts = clause.startswith(("routing.expert/", "routing.sparse/"))
    for size in MANY:
        if not clause.startswith("routing.expert/") and size > 1:
            yield replace(small, experts=size)
            if size < 35:
                yield replace(small, tokens=1 + size % 3, experts=size, k=size)
        if size < 66 and not clause.startswith(("routing.top_k/", "routing.weights/")):
            yield replace(small, hidden=size)
        if experts:
            yield replace(small, inner=size)
    for size in LONG[:-2] if clause.startswith(("routing.gate/", "routing.top_k/", "routing.weights/")) else ():
        yield from (replace(small, experts=size), replace(small, tokens=size, hidden=7))
        if clause.startswith("routing.gate/"):
            yield replace(small, hidden=size)
    if experts:
        yield from (replace(small, inner=size) for size in LONG[::3])
    yield from (replace(small, tokens=size, hidden=7) for size in (*FEW, 96, 128, 256))


def choices(backend: Remote, case: RoutingCase) -> None:
    """Random scores, some of them equal, give the reference's experts."""
    __tracebackhide__ = True
    scores = case.generator().integers(0, 99, (case.tokens, case.experts)).astype(np.float32)
    assert_reference(backend, case, "experts", scores, case.k)


def weights(backend: Remote, case: RoutingCase, record_property: Record) -> None:
    """The softmax of the chosen logits stays within the bound."""
    __tracebackhide__ = True
    rng = case.generator()
    scores = (3 * rng.normal(size=(case.tokens, case.experts))).astype(np.float32)
    arguments = scores, routes(case, rng)[0], case.softmax
    assert_bounded(backend, case, record_property, *arguments)


# **Heads, norms and gates.**


def heads(clause: str, settings: Settings) -> Iterator[AttendCase]:
    """Every context, head size, number of heads and of heads in a group; windows as long as the context and longer."""
    small = AttendCase(clause, "exhaustive", EVERY, 2, 9, 4, 2, 8)
    for size in (511, 512, 513, 1023, 1024, 2048, 4096):
        yield replace(small, length=size, tokens=1)
    for size in MANY:
        yield replace(small, length=size + 1)
        if size > 1:
            yield replace(small, head_dim=size)
    for size in FEW[:34]:
        yield replace(small, tokens=size, length=size + 3)
        yield replace(small, heads=size, kv_heads=1)
        yield replace(small, heads=size, kv_heads=size, tokens=1)
        yield replace(small, heads=2 * size, kv_heads=2, tokens=1)
    for window in (2, 7, 8, 9, 10, 16, 64):
        yield replace(small, size=window)
    for size in (40, 48, 63, 64, 65, 96, 128, 192):  # whole tiles of queries of several heads
        yield replace(small, tokens=size, length=size + 3)


def shaped_heads(clause: str, settings: Settings) -> Iterator[ShapedCase]:
    """The same sizes, with alternating shapings."""
    for turn, case in enumerate(heads(clause, settings)):
        yield shaped(case, list(SHAPINGS)[turn % 5])


def rows(kind: Callable[..., Case]) -> Generator:
    """Every width, and every number of rows."""

    def generator(clause: str, settings: Settings) -> Iterator[Case]:
        for size in (*MANY, *LONG):
            yield kind(clause, "exhaustive", EVERY, 2, size)
        for size in (*FEW, 96, 128, 256, 512, 1024):
            yield kind(clause, "exhaustive", EVERY, size, 5)

    return generator


def turns(clause: str, settings: Settings) -> Iterator[RopeCase]:
    """Every even head size, number of heads and of tokens."""
    for size in (512, 1024):
        yield RopeCase(clause, "exhaustive", "half-split", size, 2, 6)
    for turn, size in enumerate(MANY):
        pairing = test_rope.PAIRINGS[(turn + turn // 4) % 4]
        yield RopeCase(clause, "exhaustive", pairing, 2, 2, 2 * size)
        if size < 66 or size % 64 == 0:
            yield RopeCase(clause, "exhaustive", pairing, size, 2, 6)
            yield RopeCase(clause, "exhaustive", pairing, 2, size, 10)


def pooled(clause: str, settings: Settings) -> Iterator[HeadsCase]:
    """Every number of heads in a group, of groups, head size and number of rows."""
    for size in FEW:
        for count, members, groups, head_dim in ((2, size, 1, 3), (2, size, size, 2), (2, 4, 2, size), (size, 4, 2, 3)):
            yield HeadsCase(clause, "exhaustive", f"{EVERY}-wide", count, members, groups, head_dim, "mean")
    for size in MANY[-13:]:
        for count, members, groups, head_dim in ((2, 8, 2, size), (size, 4, 2, 3)):
            yield HeadsCase(clause, "exhaustive", f"{EVERY}-wide", count, members, groups, head_dim, "mean")


# **Parts of GPTQ.**


def gptq_layers(clause: str, settings: Settings) -> Iterator[LayerCase]:
    for size in (*FEW, 96, 128, 129):
        yield LayerCase(clause, "exhaustive", EVERY, size, 5)
        if not clause.startswith("gptq.factor/"):
            yield LayerCase(clause, "exhaustive", EVERY, 6, size)
    for size in (256, 512, 1024, 2048) if not clause.startswith("gptq.factor/") else ():
        yield LayerCase(clause, "exhaustive", EVERY, 6, size)
    if clause.startswith("gptq.hessian/"):
        yield LayerCase(clause, "exhaustive", EVERY, 256, 3)


# **Orders.**


def channels(clause: str, settings: Settings) -> Iterator[HeadCase]:
    for size in (*MANY[:-3], 192, 256, 512):
        yield HeadCase(clause, "exhaustive", "half-split" if "relabel" in clause else EVERY, 2 * size)


def relabelled(backend: Remote, case: HeadCase) -> None:
    """Channel c has the frequency, the sign and the partner that channel order[c] had."""
    __tracebackhide__ = True
    layout, order, moved = test_ksort.relabelled(backend, case)
    assert_exact("pair", moved.pair, layout.pair[order])
    assert_exact("sign", moved.sign, layout.sign[order])
    assert_exact("old names of the partners", order[moved.partner], layout.partner[order])


EACH: Mapping[str, tuple[Generator, Callable[..., None]]] = {
    "packing.pack/C2": (matrices, test_packing.test_pack_equals_the_reference),
    "packing.unpack/C1": (matrices, test_packing.test_unpack_equals_the_reference),
    "affine.quantize/C1": (matrices, quantized),
    "affine.dequantize/C1": (matrices, test_affine.test_dequantize),
    "affine.dequantize/C2": (matrices, test_affine.test_dequantize),
    "linear.qgemv/C1": (matrices, test_linear.test_products_on_the_lattice),
    "linear.qgemm/C1": (matrices, test_linear.test_products_on_the_lattice),
    "linear.qgemm_bfp/C1": (integer_matrices, test_integer.test_integer_product_on_the_lattice),
    "hqq.codes/C1": (hqq_blocks, test_hqq.test_codes_equal_the_reference),
    "routing.gate/C1": (layers, test_routing.test_gate_on_the_lattice),
    "routing.top_k/C1": (layers, choices),
    "routing.weights/C1": (layers, weights),
    "routing.expert/C1": (layers, test_experts.test_expert_on_the_lattice),
    "routing.sparse/C1": (layers, test_experts.test_layer_on_the_lattice),
    "attention.attend/C3": (heads, test_attention.test_attention_within_the_bound),
    "attention.attend_shaped/C3": (shaped_heads, test_shaped_attention.test_shaped_attention_within_the_bound),
    "attention.softmax/C2": (rows(test_attention.RowsCase), test_attention.test_shares_within_the_bound),
    "rope.rotate/C1": (turns, test_rope.test_quarter_turns_are_exact),
    "blocks.swiglu/C1": (rows(RowsCase), test_blocks.test_gated_on_the_lattice),
    "blocks.geglu/C1": (rows(RowsCase), test_blocks.test_gated_on_the_lattice),
    "blocks.clamped_swiglu/C1": (rows(LimitedCase), test_clamped.test_clamped_on_the_lattice),
    "blocks.soft_cap/C2": (rows(LimitedCase), test_clamped.test_capped_within_the_bound),
    "blocks.rms_norm/C2": (rows(RowsCase), test_blocks.test_norm_of_an_exact_sum),
    "pooling.pool/C1": (pooled, test_pooling.test_pooled_heads),
    "gptq.hessian/C1": (gptq_layers, test_gptq.test_hessian_on_the_lattice),
    "gptq.factor/C1": (gptq_layers, test_gptq.test_factor_on_the_lattice),
    "gptq.targets/C1": (gptq_layers, test_gptq.test_targets_on_the_lattice),
    "ksort.permutation/C3": (channels, test_ksort.test_every_channel_once),
    "ksort.relabel/C2": (channels, relabelled),
}
"""For each clause its cases, and the test of other sizes that runs on them; a few have their own inputs."""


@checks(EACH, lambda clause, settings: EACH[clause][0](clause, settings))
def test_every_size(backend: Remote, case: Case, record_property: Record) -> None:
    """As the tests of other sizes, for every small size."""
    call(EACH[case.clause][1], backend, case, record_property)
