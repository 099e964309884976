"""The deep inputs of the suite: exact in every legal order and form, and sensitive to narrow operands everywhere."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any

import numpy as np
import pytest
from in_process import InProcess
from kills.trial import run

from lowbit.arrays import F32
from lowbit.attention.rope import Rotation
from lowbit.contract.operation import Promise
from lowbit.linear import linear
from lowbit.moe import routing
from lowbit.operations import OPERATIONS
from lowbit_conformance import packing
from lowbit_conformance.defects import steps
from lowbit_conformance.defects.backends import right, rounded
from lowbit_conformance.defects.bank import BANK
from lowbit_conformance.defects.roundings import bfloat16, half, tensor_float
from lowbit_conformance.suite import deep_inputs
from lowbit_conformance.suite.cases import MatrixCase
from lowbit_conformance.suite.clauses import load_suite, test_depth_layers
from lowbit_conformance.suite.marking import MARKS, Mark, Settings

# **Exact in every order.** A lattice that were not would fail a right kernel.


def in_order(terms: F32, order: str) -> F32:
    """Float32 sums of R × N terms, one of the ways in which kernels add."""
    if order == "backwards":
        terms = terms[::-1]
    if order == "pairwise":
        while len(terms) > 1:
            even = np.vstack([terms, np.zeros((len(terms) % 2, terms.shape[1]), np.float32)])
            terms = even[0::2] + even[1::2]
        return np.asarray(terms[0])
    lanes = 8 if order == "lanes" else 1
    total = np.zeros((lanes, terms.shape[1]), np.float32)
    for row, term in enumerate(terms):
        total[row % lanes] += term
    return np.asarray(total.sum(axis=0, dtype=np.float32))


@dataclass(frozen=True)
class Built:
    """The lattice of a case: x of M × K, of each weight its code, scale and offset, K × N, and the exact product."""

    bits: int
    x: F32
    codes: F32
    scale: F32
    offset: F32
    exact: Any


@cache
def built(case: MatrixCase) -> Built:
    x, matrix = deep_inputs.lattice(case)
    codes = packing.unpack(matrix.words, matrix.bits).astype(np.float32)
    group = steps.groups(matrix)
    offset = linear.group_offsets(matrix).astype(np.float32)[group]
    return Built(matrix.bits, x, codes, steps.scales(matrix)[group], offset, deep_inputs.product(x, matrix))


def terms_of(row: F32, weights: Built, form: str) -> F32:
    """What a form sums for a row of x, in float32, one rounding an operation."""
    used = np.flatnonzero(row)
    own, codes, scale, offset = row[used, None], weights.codes[used], weights.scale[used], weights.offset[used]
    if form == "dequantised":
        return np.asarray(own * (scale * codes + offset))
    center = np.float32(2 ** (weights.bits - 1) if form == "offset" else 0)
    return np.concatenate([scale * (own * (codes - center)), own * (offset + scale * center)])


CASES = [case for case in deep_inputs.matrices("linear.qgemm/C1") if case.rows <= 4096 and case.columns < 1000]


@pytest.mark.parametrize("order", ["forwards", "backwards", "pairwise", "lanes"])
@pytest.mark.parametrize("form", ["dequantised", "factored", "offset"])
def test_a_deep_lattice_is_exact_in_every_order(form: str, order: str) -> None:
    """Whatever is summed, and in whatever order, float32 loses nothing."""
    for case in CASES:
        lattice = built(case)
        for row, expected in zip(lattice.x, lattice.exact, strict=True):
            assert (in_order(terms_of(row, lattice, form), order) == expected).all(), case.id


def test_the_sparse_product_is_that_of_the_chapter() -> None:
    """Leaving out rows that meet an activation of 0 changes nothing."""
    for case in islice(CASES, 0, None, 9):
        x, matrix = deep_inputs.lattice(case)
        assert (deep_inputs.product(x, matrix) == linear.qgemm(x, matrix)).all()


def test_deep_operands_need_their_bits() -> None:
    """Each kind loses its result when its own operand is rounded to 11 bits, at every depth."""
    for case in CASES:
        kind = case.variant.partition("-")[2]
        x, matrix = deep_inputs.lattice(case)
        weights = steps.RIGHT.weights(matrix)
        narrow = (tensor_float(x), weights) if kind == "activations" else (x, half(weights))
        if kind == "activations" or (kind == "scales" and case.scale_dtype == "float32"):
            assert (steps.product(*narrow) != deep_inputs.product(x, matrix)).mean() > 0.3, case.id


@pytest.mark.parametrize("kind", ["gate", "up", "down"])
@pytest.mark.parametrize("backwards", [False, True])
def test_deep_experts_are_exact_in_float32(kind: str, backwards: bool) -> None:
    """Sums of float32 from either end give the reference's result."""
    x, gate, up, down = deep_inputs.expert_lattice(np.random.default_rng(1), kind, 3, 130, 1, 90)

    def product(a: F32, b: F32) -> F32:
        return np.stack([in_order(row[:, None] * b, "backwards" if backwards else "forwards") for row in a])

    a, b = product(x, gate[0]), product(x, up[0])
    given = product((a * b).astype(np.float32), down[0])  # silu is the identity here
    assert (given == routing.expert(x, gate[0], up[0], down[0])).all()


# **Sensitive.** In several cases of every bounded clause a rounding of the operands to a narrower format takes more
# than the bound. Where it did not, a kernel of that format would pass.


class Narrow(InProcess):
    """Right, of operands that are rounded first."""

    def __init__(self, operation: str, narrow: Callable[[Any], Any]) -> None:
        super().__init__(next(name for name, defect in BANK.items() if operation in defect.wrong))
        self._narrow = narrow

    def run(self, operation: str, *arguments: Any, **choices: Any) -> Any:
        with np.errstate(all="ignore"):
            given = [self._rounded(argument) for argument in arguments]
            return rounded(operation, right(operation)(*given, **choices))

    def _rounded(self, argument: Any) -> Any:
        if isinstance(argument, Rotation):
            cos, sin = (
                self._narrow(part.astype(np.float32)).astype(np.float64) for part in (argument.cos, argument.sin)
            )
            return Rotation(argument.layout, cos, sin)
        return self._narrow(argument) if getattr(argument, "dtype", None) == np.float32 else argument


def bounded_marks() -> dict[str, list[Mark]]:
    """The tests that judge by a bound, by clause; products with quantised weights have defects of their own.

    Those of special sizes and contents run the tests of others, exact ones too, and are left out.
    """
    load_suite()
    found: dict[str, list[Mark]] = {}
    for mark in MARKS:
        operation = mark.clause.rpartition("/")[0]
        bounded = operation in OPERATIONS and OPERATIONS[operation].promise is Promise.BOUNDED
        by_bound = "record_property" in mark.test.__code__.co_varnames
        own = not mark.test.__module__.rpartition(".")[2].startswith(("test_pairs", "test_sizes", "test_contents"))
        if bounded and by_bound and own and not operation.startswith("linear."):
            found.setdefault(mark.clause, []).append(mark)
    return found


ENOUGH = 3


@pytest.mark.parametrize("narrow", [tensor_float, half, bfloat16])
@pytest.mark.parametrize("clause", bounded_marks())
def test_narrow_operands_exceed_the_bound(clause: str, narrow: Callable[[Any], Any]) -> None:
    """TF32, half and bfloat16 operands fail several cases of each clause that has a bound."""
    owner: Any = Narrow(clause.rpartition("/")[0], narrow)
    failed = []
    for mark in bounded_marks()[clause]:
        for case in mark.generator(mark.clause, Settings(range(1))):
            if run(mark, case, owner).startswith("WRONG"):
                failed.append(case.id)
            if len(failed) == ENOUGH:
                return
    pytest.fail(f"only {len(failed)} cases of {clause} notice")


# **Placed well.**


def test_deep_rows_begin_and_end_where_kernels_do() -> None:
    """The first row, the last one and the middle have activations, alone and among neighbours."""
    case = MatrixCase("linear.qgemm/C1", "lattice", "deep-activations", 4, 4096, 7, 128, vectors=8)
    x, _ = deep_inputs.lattice(case)
    used = [np.flatnonzero(row).tolist() for row in x]
    assert used[:4] == [[0], [4095], [0, 1, 2], [4093, 4094, 4095]]
    assert 2048 in used[4] and all(len(row) <= 3 for row in used)


def test_every_pair_of_heads_cancels_somewhere() -> None:
    """No pair of heads of a group is left out."""
    for case in test_depth_layers.pairs("pooling.pool/C1", Settings(range(1))):
        members = case.heads // case.groups
        assert case.rows * case.head_dim >= members * (members - 1) // 2
