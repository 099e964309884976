"""Checks of numbers below the least normal one: float32 loses them a bit at a time, and nothing takes them for zero.

Below :math:`2^{-126}` the numbers of float32 are the multiples of :math:`2^{-149}`. A processor can be told to take
them for zero, for speed, and compilers do so with an option. A sum whose terms are such multiples, and fewer than
:math:`2^{24}` of them, is exact in float32 as any other is, so the clauses of the lattice hold for it without change.
Each case keeps one kind of number there: scales, minima, the weights that normal scales and minima leave between them,
or the products of normal numbers; of operations without codes, all that they are linear in.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np

from lowbit.arrays import F32, F64
from lowbit.quantization import hqq
from lowbit.quantization.affine import CONVENTIONS, QuantizedMatrix
from lowbit.quantization.bfp import Blocks
from lowbit.quantization.hqq_numbers import decode
from lowbit.quantization.packing import BITS
from lowbit_conformance.isolation.remote import Remote
from lowbit_conformance.suite import deep_inputs
from lowbit_conformance.suite.bounded import assert_on_lattice, assert_reference
from lowbit_conformance.suite.cases import GROUPS_IN_USE, MatrixCase
from lowbit_conformance.suite.clauses import test_rope
from lowbit_conformance.suite.clauses.test_attention import AttendCase
from lowbit_conformance.suite.clauses.test_blocks import RowsCase
from lowbit_conformance.suite.clauses.test_blocks import lattice as norm_lattice
from lowbit_conformance.suite.clauses.test_experts import lattice_experts, of_first_expert
from lowbit_conformance.suite.clauses.test_gptq import LayerCase, exact_factor
from lowbit_conformance.suite.clauses.test_hqq import BlocksCase, RealZeroCase, assert_rows, weights_and_grid
from lowbit_conformance.suite.clauses.test_integer import assert_lattice
from lowbit_conformance.suite.clauses.test_linear import run_rows
from lowbit_conformance.suite.clauses.test_shaped_attention import ShapedCase
from lowbit_conformance.suite.compare import assert_equal_values
from lowbit_conformance.suite.inputs import FLOAT32_INTEGERS
from lowbit_conformance.suite.integer_cases import IntegerCase, of
from lowbit_conformance.suite.marking import Settings, checks, grid
from lowbit_conformance.suite.routing_cases import RoutingCase

LEAST = 2.0**-149
LIVE = 3  # nonzero activations of a row

# **Products with quantised weights.**

UNITS = {"scales": (0, -149), "minima": (0, -136), "weights": (0, -136), "products": (-70, -79)}
"""For each kind the exponents of the units of activations and of scales and minima; their sum is at least −149."""

HALF_UNITS = (-125, -24)
"""The same exponents for products of normal activations and float16 numbers."""


def matrices(clause: str, settings: Settings) -> Iterator[MatrixCase]:
    """Every kind with every width and convention that allows it; products also with common group sizes."""
    wide, integers = clause.startswith("linear.qgemm"), clause.startswith("linear.qgemm_bfp/")
    found = []
    for kind, bits, convention in product(UNITS, BITS, CONVENTIONS):
        if convention == "minimum" or kind in ("scales", "products"):
            found.append(MatrixCase(clause, "lattice", f"underflow-{kind}", bits, 96, 35, 40, convention))
    for convention, size in product(CONVENTIONS, GROUPS_IN_USE):
        shape = (2 * size, 19, size)
        found.append(MatrixCase(clause, "lattice", "underflow-products", 4, *shape, convention, "float16"))
    for case in found:
        yield of(case, 4) if integers else replace(case, vectors=4 * wide)


def lattice(case: MatrixCase) -> tuple[F64, int, QuantizedMatrix]:
    """Four rows of integers, few of them nonzero, the exponent of their unit, and a matrix.

    In *minima* and *weights* scales are the least normal number, :math:`2^{10}` units. The minima of *weights* cancel
    one code times its scale up to less than a scale, and most codes are that code.
    """
    rng, kind, top = case.generator(), case.variant.removeprefix("underflow-"), 2**case.bits - 1
    exponent, unit = HALF_UNITS if case.scale_dtype == "float16" else UNITS[kind]
    shape = (-(-case.rows // case.group_size), case.columns)
    codes = rng.integers(0, top + 1, (case.rows, case.columns))
    if kind in ("minima", "weights"):
        amplitude, own = 3, rng.integers(0, top + 1, shape) * (kind == "weights")
        scales = np.full(shape, 2.0**10)
        zeros = deep_inputs.odd(rng, 2**10 - 1, shape) - own * scales
        if kind == "weights":
            most = np.repeat(own, case.group_size, axis=0)[: case.rows]
            codes = np.where(rng.random(codes.shape) < 0.8, most, codes)
    else:
        room = FLOAT32_INTEGERS // (LIVE * 2 * top)
        amplitude, significand = room // 2**6, 2**6 - 1
        scales = np.abs(deep_inputs.odd(rng, significand, shape)).astype(np.float64)
        zeros = (
            deep_inputs.odd(rng, significand, shape)
            if case.convention == "minimum"
            else rng.integers(0, top + 1, shape)
        )
    x = np.zeros((4, case.rows))
    for row, place in zip(x, deep_inputs.places(case.rows, LIVE, 4), strict=True):
        row[place] = deep_inputs.odd(rng, min(amplitude, 127), len(place))
    zeros = zeros * 2.0**unit if case.convention == "minimum" else zeros
    return x, exponent, deep_inputs.matrix_of(case, codes, scales * 2.0**unit, zeros)


@checks(("linear.qgemv/C1", "linear.qgemm/C1"), matrices)
def test_products_below_the_normal_numbers(backend: Remote, case: MatrixCase) -> None:
    """Subnormal scales, minima, weights and products: the result equals the reference's."""
    integers, exponent, matrix = lattice(case)
    x = np.ldexp(integers, exponent).astype(np.float32)
    assert_equal_values(run_rows(backend, x, matrix, case), deep_inputs.product(x, matrix))


@checks("linear.qgemm_bfp/C1", matrices)
def test_integer_products_below_the_normal_numbers(backend: Remote, case: IntegerCase) -> None:
    """The same for blocks of integers, whose exponents replace the unit of activations."""
    integers, exponent, matrix = lattice(case)
    exponents = np.full((len(integers), case.format.blocks(case.rows)), exponent, np.int16)
    assert_lattice(backend, Blocks(integers.astype(case.format.dtype), exponents, case.format), matrix)


# **Real zeros.**


def real_zeros(clause: str, settings: Settings) -> Iterator[RealZeroCase]:
    for kind, bits, axis in product(("scales", "activations"), BITS, hqq.AXES):
        if kind == "scales" or clause.startswith("hqq.qgemv"):
            yield RealZeroCase(clause, "lattice", f"underflow-{kind}", bits, 96, 16, 32, axis, "float32")


def real_zero_lattice(case: RealZeroCase) -> tuple[F32, hqq.HqqMatrix]:
    """Zeros are odd multiples of a half, so the unit is twice the least number."""
    rng, kind = case.generator(), case.variant.removeprefix("underflow-")
    shape = (case.bits, case.rows, case.columns, case.group_size, case.axis)
    x, matrix = deep_inputs.hqq_lattice(rng, kind, *shape)
    if kind == "activations":
        return (x * np.float32(2 * LEAST)), matrix
    tiny = decode(matrix.scales) * np.float32(2 * LEAST)
    return x, replace(matrix, scales=tiny)


@checks("hqq.qgemv/C1", real_zeros)
def test_real_zeros_below_the_normal_numbers(backend: Remote, case: RealZeroCase) -> None:
    """Subnormal scales or activations: the result equals the reference's."""
    assert_rows(backend, *real_zero_lattice(case))


@checks("hqq.dequantize/C1", real_zeros)
def test_weights_of_subnormal_scales(backend: Remote, case: RealZeroCase) -> None:
    """Subnormal scales give the reference's weights."""
    assert_reference(backend, case, "weights", real_zero_lattice(case)[1])


BLOCKS = [(bits, *shape) for bits, shape in product(BITS, ((16, 5), (33, 17)))]


@checks("hqq.codes/C1", grid(BlocksCase, "lattice", ["underflow"], *BLOCKS))
def test_codes_of_subnormal_weights(backend: Remote, case: BlocksCase) -> None:
    """Subnormal weights over subnormal scales have normal quotients and give the reference's codes."""
    weights, scales, zeros = weights_and_grid(case)
    arguments = weights * np.float32(2.0**-128), scales * np.float32(2.0**-128), zeros
    assert_reference(backend, case, "codes", *arguments, case.bits)


# **Layers of routing.**

LAYERS = ((3, 33, 8, 3, 17), (2, 16, 5, 5, 9))


GATE_UNITS = {
    "underflow-activations": (-149, 0),
    "underflow-router": (0, -149),
    "underflow-products": (-70, -79),
}


@checks("routing.gate/C1", grid(RoutingCase, "lattice", GATE_UNITS, *LAYERS))
def test_logits_below_the_normal_numbers(backend: Remote, case: RoutingCase) -> None:
    """Subnormal activations, weights and products: the logits are equal."""
    rng, exponents = case.generator(), GATE_UNITS[case.variant]
    shapes = (case.tokens, case.hidden), (case.hidden, case.experts)
    x, router = (
        np.ldexp(rng.integers(-9, 10, shape), unit).astype(np.float32)
        for shape, unit in zip(shapes, exponents, strict=True)
    )
    assert_on_lattice(backend, case, x, router, case.scores)


@checks("routing.expert/C1", grid(RoutingCase, "lattice", ["underflow-down"], *LAYERS))
def test_an_expert_below_the_normal_numbers(backend: Remote, case: RoutingCase) -> None:
    """Weights of the last matrix are subnormal, multiples of four times the least number: the result is equal."""
    x, gate, up, down = lattice_experts(case)
    assert_on_lattice(backend, case, *of_first_expert(x, gate, up, down * np.float32(4 * LEAST)))


# **Heads, norms and gates.**


HEADS = ((1, 1, 1, 1, 2, 1), (4, 9, 6, 2, 16, 1), (1, 33, 9, 3, 64, 1))
"""With a window of 1."""


@checks("attention.attend/C1", grid(AttendCase, "lattice", ["underflow"], *HEADS))
@checks("attention.attend_shaped/C1", grid(partial(ShapedCase, shaping="cap"), "lattice", ["underflow"], *HEADS))
def test_subnormal_values_come_back(backend: Remote, case: AttendCase) -> None:
    """With a window of 1 the result of each token is its own value, which is subnormal."""
    rng = case.generator()
    queries = rng.normal(size=(case.tokens, case.heads, case.head_dim)).astype(np.float32)
    keys = rng.normal(size=(case.kv_heads, case.length, case.head_dim)).astype(np.float32)
    values = (deep_inputs.odd(rng, 2**20, keys.shape) * LEAST).astype(np.float32)
    shape = (case.factor, case.cap) if isinstance(case, ShapedCase) else ()
    assert_on_lattice(backend, case, queries, keys, values, case.window, *shape)


PAIRINGS = [f"underflow-{pairing}" for pairing in test_rope.PAIRINGS]


@checks("rope.rotate/C1", grid(test_rope.RopeCase, "lattice", PAIRINGS, (3, 2, 6), (2, 9, 64)))
def test_subnormal_heads_turn(backend: Remote, case: test_rope.RopeCase) -> None:
    """Multiples of the least number keep their magnitudes in quarter turns."""
    pairing = replace(case, variant=case.variant.removeprefix("underflow-"))
    x, turn = test_rope.quarter_turns(pairing)
    assert_on_lattice(backend, case, x * np.float32(LEAST), turn)


@checks("blocks.rms_norm/C1", grid(RowsCase, "lattice", ["underflow"], (2, 4), (4, 16), (3, 64), (2, 256)))
def test_a_norm_with_subnormal_gain(backend: Remote, case: RowsCase) -> None:
    """The root is 2 or 4, and the gain is a subnormal multiple of sixteen times the least number: the result is
    equal."""
    x, gain, epsilon = norm_lattice(case)
    assert_on_lattice(backend, case, x, gain * np.float32(16 * LEAST), epsilon)


# **Parts of GPTQ.**


gptq_layers = grid(LayerCase, "lattice", ["underflow"], (7, 9), (33, 16))


@checks("gptq.hessian/C1", gptq_layers)
def test_a_hessian_below_the_normal_numbers(backend: Remote, case: LayerCase) -> None:
    """Normal inputs with subnormal products have an exact Hessian."""
    x = np.ldexp(case.generator().integers(-9, 10, (case.columns, case.rows)), -74).astype(np.float32)
    assert_on_lattice(backend, case, x)


@checks("gptq.targets/C1", gptq_layers)
def test_targets_below_the_normal_numbers(backend: Remote, case: LayerCase) -> None:
    """Weights and values that are subnormal multiples of sixteen times the least number give exact targets."""
    rng, shape = case.generator(), (case.rows, case.columns)
    weights, values = (np.float32(16 * LEAST) * rng.integers(-64, 65, shape).astype(np.float32) for _ in range(2))
    assert_on_lattice(backend, case, weights, exact_factor(case), values)
