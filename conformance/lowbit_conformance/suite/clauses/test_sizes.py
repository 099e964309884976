"""Checks of every small size: a kernel has a loop of its own for sizes that fill its registers, and one for each tail.

The shapes of other cases lie about the commonest registers. Here one size of an operation goes through all numbers up
to 70, and on to those that tiles and models have, while the others stay small; widths of codes, conventions and formats
take turns, so that none of them always meets the same tail.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from lowbit.attention import ksort
from lowbit.moe import routing
from lowbit.quantization import affine, gptq, packing
from lowbit.quantization.affine import CONVENTIONS, Convention
from lowbit.quantization.packing import BITS, CODES_PER_UNIT
from lowbit_conformance.isolation.remote import Remote
from lowbit_conformance.suite import inputs
from lowbit_conformance.suite.bounded import Record, assert_bounded, run
from lowbit_conformance.suite.cases import MatrixCase
from lowbit_conformance.suite.clauses import (
    test_affine,
    test_attention,
    test_blocks,
    test_gptq,
    test_hqq,
    test_integer,
    test_ksort,
    test_linear,
    test_packing,
    test_pooling,
    test_rope,
)
from lowbit_conformance.suite.clauses.test_attention import AttendCase
from lowbit_conformance.suite.clauses.test_blocks import RowsCase
from lowbit_conformance.suite.clauses.test_experts import lattice_experts
from lowbit_conformance.suite.clauses.test_gptq import LayerCase
from lowbit_conformance.suite.clauses.test_hqq import BlocksCase
from lowbit_conformance.suite.clauses.test_ksort import HeadCase
from lowbit_conformance.suite.clauses.test_pooling import HeadsCase
from lowbit_conformance.suite.clauses.test_rope import RopeCase
from lowbit_conformance.suite.compare import assert_equal_values, assert_exact
from lowbit_conformance.suite.integer_cases import IntegerCase, lattice, of
from lowbit_conformance.suite.marking import Settings, checks
from lowbit_conformance.suite.pairs import LONG
from lowbit_conformance.suite.routing_cases import RoutingCase, routes

FEW = (*range(1, 35), 40, 48, 63, 64, 65)
MANY = (*range(1, 71), 80, 96, 112, 127, 128, 129, 160, 192, 255, 256, 257)
EVERY = "every-size"

# **Codes and their products.**


def matrices(clause: str, settings: Settings) -> Iterator[MatrixCase]:
    """Every N, and of several vectors every T; the width of a code moves on by one more with every sixteen sizes."""
    vectors = 3 if clause.startswith("linear.qgemm") else 0
    own: dict[str, Convention] = {"affine.dequantize/C1": "minimum", "affine.dequantize/C2": "zero_point"}
    wanted = own.get(clause)
    for turn, columns in enumerate(MANY):
        bits, convention = BITS[(columns + turn // 16) % 4], wanted or CONVENTIONS[turn // 2 % 2]
        rows = 2 * CODES_PER_UNIT[bits]
        case = MatrixCase(clause, "exhaustive", f"{EVERY}-full", bits, rows, columns, rows // 2 + 1, convention)
        if clause.startswith("packing."):
            case = replace(case, group_size=0)
        yield replace(case, vectors=vectors)
    for turn, count in enumerate((*FEW, 96, 128, 129) if vectors else ()):
        bits, convention = BITS[(count + turn // 16) % 4], CONVENTIONS[turn // 2 % 2]
        yield MatrixCase(clause, "exhaustive", f"{EVERY}-dense", bits, 64, 21, 24, convention, vectors=count)


@checks("packing.pack/C2", matrices)
def test_pack_every_width(backend: Remote, case: MatrixCase) -> None:
    """Random codes give the reference's words."""
    codes = test_packing.random_codes(case)
    assert_exact("words", backend.run("packing.pack", codes, case.bits), packing.pack(codes, case.bits))


@checks("packing.unpack/C1", matrices)
def test_unpack_every_width(backend: Remote, case: MatrixCase) -> None:
    """Random words give the reference's codes."""
    words = case.generator().integers(0, 2**32, (case.rows * case.bits // 32, case.columns), dtype=np.uint32)
    assert_exact("codes", backend.run("packing.unpack", words, case.bits), packing.unpack(words, case.bits))


@checks("affine.quantize/C1", matrices)
def test_quantize_every_width(backend: Remote, case: MatrixCase) -> None:
    """Normal weights give the reference's scales, zeros and codes."""
    weights = case.generator().normal(size=(case.rows, case.columns)).astype(np.float32)
    given = test_affine.quantize(backend, weights, case)
    test_affine.assert_same_matrix(given, test_affine.expected(weights, case), weights)


@checks(("affine.dequantize/C1", "affine.dequantize/C2"), matrices)
def test_dequantize_of_every_width(backend: Remote, case: MatrixCase) -> None:
    """Random codes, scales and zeros give the reference's weights."""
    matrix = inputs.random(case)[1]
    assert_exact("weights", backend.run("affine.dequantize", matrix), affine.dequantize(matrix))


@checks(("linear.qgemv/C1", "linear.qgemm/C1"), matrices)
def test_products_of_every_width(backend: Remote, case: MatrixCase) -> None:
    """On the lattice the result equals the reference's, for every number of columns and of rows of X."""
    test_linear.assert_lattice(backend, case)


def integer_matrices(clause: str, settings: Settings) -> Iterator[IntegerCase]:
    yield from (of(case, case.vectors) for case in matrices(clause, settings))


@checks("linear.qgemm_bfp/C1", integer_matrices)
def test_integer_product_of_every_width(backend: Remote, case: IntegerCase) -> None:
    """The same for blocks of integers."""
    test_integer.assert_lattice(backend, *lattice(case, dense=case.variant.endswith("dense")))


def hqq_blocks(clause: str, settings: Settings) -> Iterator[BlocksCase]:
    """Every group size and every number of groups."""
    for turn, size in enumerate(MANY):
        bits = BITS[(size + turn // 16) % 4]
        yield BlocksCase(clause, "exhaustive", f"{EVERY}-small", bits, size, 5)
        yield BlocksCase(clause, "exhaustive", f"{EVERY}-small", bits, 6, size)


@checks("hqq.codes/C1", hqq_blocks)
def test_codes_of_every_group(backend: Remote, case: BlocksCase) -> None:
    """Random weights give the reference's codes."""
    test_hqq.assert_codes(backend, case)


# **Layers of routing.**


def layers(clause: str, settings: Settings) -> Iterator[RoutingCase]:
    """Every number of tokens and of experts, hidden size and inner width, and as many experts chosen as there are."""
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


@checks("routing.gate/C1", layers)
def test_gates_of_every_size(backend: Remote, case: RoutingCase) -> None:
    """Small integers give equal logits."""
    rng = case.generator()
    x, router = (rng.integers(-9, 10, size) for size in ((case.tokens, case.hidden), (case.hidden, case.experts)))
    arguments = x.astype(np.float32), router.astype(np.float32)
    assert_equal_values(run(backend, case, *arguments), routing.gate(*arguments))


@checks("routing.top_k/C1", layers)
def test_choices_of_every_size(backend: Remote, case: RoutingCase) -> None:
    """Random scores, some of them equal, give the reference's experts."""
    scores = case.generator().integers(0, 99, (case.tokens, case.experts)).astype(np.float32)
    assert_exact("experts", run(backend, case, scores, case.k), routing.top_k(scores, case.k))


@checks("routing.weights/C1", layers)
def test_weights_of_every_size(backend: Remote, case: RoutingCase, record_property: Record) -> None:
    """The softmax of the chosen logits stays within the bound."""
    rng = case.generator()
    scores = (3 * rng.normal(size=(case.tokens, case.experts))).astype(np.float32)
    arguments = scores, routes(case, rng)[0], case.softmax
    assert_bounded(backend, case, record_property, *arguments)


@checks("routing.expert/C1", layers)
def test_experts_of_every_size(backend: Remote, case: RoutingCase) -> None:
    """Where silu is the identity or zero, the result is equal."""
    x, *parts = lattice_experts(case)
    arguments = (x, *(part[0].copy() for part in parts))
    assert_equal_values(run(backend, case, *arguments), routing.expert(*arguments))


@checks("routing.sparse/C1", layers)
def test_layers_of_every_size(backend: Remote, case: RoutingCase) -> None:
    """Exact experts with weights of 1/4, 1/2 and 1 give an equal sum."""
    rng = case.generator()
    chosen, weights = routes(case, rng)
    arguments = *lattice_experts(case), chosen, rng.choice((0.25, 0.5, 1), weights.shape).astype(np.float32)
    assert_equal_values(run(backend, case, *arguments), routing.sparse(*arguments))


# **Heads, norms and gates.**


def heads(clause: str, settings: Settings) -> Iterator[AttendCase]:
    """Every context, head size, number of heads and of heads of a group; windows as long as the context and longer."""
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


@checks("attention.attend/C3", heads)
def test_heads_of_every_size(backend: Remote, case: AttendCase, record_property: Record) -> None:
    """Random queries, keys and values stay within the chained bound."""
    arrays = test_attention.inputs(case)
    assert_bounded(backend, case, record_property, *arrays, case.window)


def rows(clause: str, settings: Settings) -> Iterator[test_attention.RowsCase]:
    for size in (*MANY, *LONG):
        yield test_attention.RowsCase(clause, "exhaustive", EVERY, 2, size)
    for size in (*FEW, 96, 128, 256, 512, 1024):
        yield test_attention.RowsCase(clause, "exhaustive", EVERY, size, 5)


@checks("attention.softmax/C2", rows)
def test_softmax_of_every_size(backend: Remote, case: test_attention.RowsCase, record_property: Record) -> None:
    """Plain scores stay within the bound."""
    scores = (case.generator().normal(size=(case.rows, case.columns)) * 3).astype(np.float32)
    assert_bounded(backend, case, record_property, scores)


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


@checks("rope.rotate/C1", turns)
def test_turns_of_every_size(backend: Remote, case: RopeCase) -> None:
    """Integers turned by quarters give equal integers."""
    test_rope.test_quarter_turns_are_exact(backend, case)


def tokens(clause: str, settings: Settings) -> Iterator[RowsCase]:
    for size in (*MANY, *LONG):
        yield RowsCase(clause, "exhaustive", EVERY, 2, size)
    for size in (*FEW, 96, 128, 256, 512, 1024):
        yield RowsCase(clause, "exhaustive", EVERY, size, 5)


@checks("blocks.swiglu/C1", tokens)
@checks("blocks.geglu/C1", tokens)
def test_gated_rows_of_every_size(backend: Remote, case: RowsCase) -> None:
    """Where the activation is the identity or zero, the result is equal."""
    test_blocks.test_gated_on_the_lattice(backend, case)


@checks("blocks.rms_norm/C2", tokens)
def test_norms_of_every_size(backend: Remote, case: RowsCase, record_property: Record) -> None:
    """Small integers, whose squares have an exact sum, leave a few roundings."""
    norm = test_blocks.integers(case, (1, 2, 3)), test_blocks.gain_of(case), 1e-5
    test_blocks.assert_normed(backend, case, record_property, norm, summed_exactly=True)


def pooled(clause: str, settings: Settings) -> Iterator[HeadsCase]:
    """Every number of members, of groups, head size and number of rows."""
    for size in FEW:
        for count, members, groups, head_dim in ((2, size, 1, 3), (2, size, size, 2), (2, 4, 2, size), (size, 4, 2, 3)):
            yield HeadsCase(clause, "exhaustive", f"{EVERY}-wide", count, members, groups, head_dim, "mean")
    for size in MANY[-13:]:
        for count, members, groups, head_dim in ((2, 8, 2, size), (size, 4, 2, 3)):
            yield HeadsCase(clause, "exhaustive", f"{EVERY}-wide", count, members, groups, head_dim, "mean")


@checks("pooling.pool/C1", pooled)
def test_means_of_every_size(backend: Remote, case: HeadsCase) -> None:
    """Heads of very different size give the reference's mean."""
    test_pooling.assert_pooled(backend, case)


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


@checks("gptq.hessian/C1", gptq_layers)
def test_hessians_of_every_size(backend: Remote, case: LayerCase) -> None:
    """Small integers have an exact Hessian."""
    x = case.generator().integers(-9, 10, (case.columns, case.rows)).astype(np.float32)
    assert_equal_values(test_gptq.run(backend, case, x), gptq.hessian(x))


@checks("gptq.factor/C1", gptq_layers)
def test_factors_of_every_size(backend: Remote, case: LayerCase) -> None:
    """The product of an exact factor with its transpose gives this very factor."""
    given = test_gptq.run(backend, case, test_gptq.exact_product(case))
    assert_equal_values(given, test_gptq.exact_factor(case).astype(np.float64))


@checks("gptq.targets/C1", gptq_layers)
def test_targets_of_every_size(backend: Remote, case: LayerCase) -> None:
    """Integers, quarters and a factor with powers of two on its diagonal have exact targets."""
    rng, shape = case.generator(), (case.rows, case.columns)
    weights = (rng.integers(-64, 65, shape) / 4).astype(np.float32)
    values = rng.integers(-16, 17, shape).astype(np.float32)
    triangle = test_gptq.exact_factor(case)
    given = test_gptq.run(backend, case, weights, triangle, values)
    assert_equal_values(given, gptq.targets(weights, triangle, values))


# **Orders.**


def channels(clause: str, settings: Settings) -> Iterator[HeadCase]:
    for size in (*MANY[:-3], 192, 256, 512):
        yield HeadCase(clause, "exhaustive", "half-split" if "relabel" in clause else EVERY, 2 * size)


@checks("ksort.permutation/C3", channels)
def test_orders_of_every_size(backend: Remote, case: HeadCase) -> None:
    """Random sizes give the reference's order."""
    sizes = np.abs(case.generator().normal(size=case.head_dim))
    assert_exact("order", test_ksort.ordered(backend, sizes), ksort.permutation(sizes))


@checks("ksort.relabel/C2", channels)
def test_relabelled_heads_of_every_size(backend: Remote, case: HeadCase) -> None:
    """Channel c has the frequency and the sign that channel order[c] had."""
    layout, order, moved = test_ksort.relabelled(backend, case)
    assert_exact("pair", moved.pair, layout.pair[order])
    assert_exact("sign", moved.sign, layout.sign[order])
    assert_exact("old names of the partners", order[moved.partner], layout.partner[order])
