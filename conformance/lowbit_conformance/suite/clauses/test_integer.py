"""Checks of `linear.qgemm_bfp`: exact integers show on the lattice; elsewhere the bound is that of segments."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from lowbit.arrays import F32, Array
from lowbit.linear import integer
from lowbit.quantization.affine import CONVENTIONS, QuantizedMatrix
from lowbit.quantization.bfp import Blocks
from lowbit_conformance.isolation.remote import Remote
from lowbit_conformance.suite import inputs, integer_cases
from lowbit_conformance.suite.bounded import share_used
from lowbit_conformance.suite.cases import CONCURRENT, MatrixCase, drawn, edges, in_use, large
from lowbit_conformance.suite.clauses.test_linear import assert_together, read_only
from lowbit_conformance.suite.compare import assert_equal_values, assert_same_bits, refuses
from lowbit_conformance.suite.integer_cases import (
    FORMATS,
    IntegerCase,
    extreme,
    extreme_cases,
    of,
    random_cases,
    shapes,
)
from lowbit_conformance.suite.marking import Record, Settings, checks


def run(backend: Remote, x: Blocks, matrix: QuantizedMatrix) -> F32:
    """One guarded call."""
    return backend.prepare(matrix).guarded_blocks(x)


# Equal on the lattice.


def lattice_cases(clause: str, settings: Settings) -> Iterator[IntegerCase]:
    """Every shape dense; shapes with one unit of rows or with several blocks also full."""
    for case in shapes(clause, settings):
        for density in ("dense", "full"):
            yield replace(case, tier="lattice", variant=f"{case.variant}-{density}".lstrip("-"))


def assert_lattice(backend: Remote, x: Blocks, matrix: QuantizedMatrix) -> None:
    __tracebackhide__ = True
    given = run(backend, x, matrix)
    assert_equal_values(given, integer.qgemm_bfp(x, matrix))


@checks("linear.qgemm_bfp/C1", lattice_cases)
def test_integer_product_on_the_lattice(backend: Remote, case: IntegerCase) -> None:
    """With every partial sum exact, the result equals the reference's."""
    assert_lattice(backend, *integer_cases.lattice(case, dense=case.variant.endswith("dense")))


def model_shapes(clause: str, settings: Settings) -> Iterator[IntegerCase]:
    """The numbers of rows, columns and rows of X of layers and prompts."""
    for bits, rows, columns, group_size, vectors in (
        (4, 64, 131072, 64, 1),
        (4, 28672, 40, 128, 2),
        (2, 28672, 24, 64, 1),
        (4, 256, 72, 64, 512),
    ):
        shape = (rows, columns, group_size)
        yield of(MatrixCase(clause, "lattice", "large-model-dense", bits, *shape, "minimum", "float16"), vectors)


@checks("linear.qgemm_bfp/C1", model_shapes)
def test_integer_product_of_the_size_of_models(backend: Remote, case: IntegerCase) -> None:
    """With the rows and columns of real layers the result equals the reference's."""
    assert_lattice(backend, *integer_cases.lattice(case, dense=True))


@checks("linear.qgemm_bfp/C1", extreme_cases)
def test_integer_product_of_the_largest(backend: Remote, case: IntegerCase) -> None:
    """The largest mantissas times the largest codes, with signs that fill an accumulator fastest; all sums are
    exact."""
    assert_lattice(backend, *extreme(case))


# Within the bound.


@checks("linear.qgemm_bfp/C2", random_cases)
def test_integer_product_within_the_bound(
    backend: Remote, case: IntegerCase, record_property: Record, model_matrices: dict[str, QuantizedMatrix]
) -> None:
    """Random and special inputs stay within the bound derived from their integers and the declared arithmetic."""
    x, matrix = integer_cases.random(case)
    if case.tier == "model":
        matrix = model_matrices[case.variant]
    assert_bounded(backend, x, matrix, case, record_property)


def assert_bounded(
    backend: Remote, x: Blocks, matrix: QuantizedMatrix, case: IntegerCase, record_property: Record
) -> None:
    __tracebackhide__ = True
    record_property("share", share_used(backend, case, run(backend, x, matrix), x, matrix))


# Repetition.


def few_cases(clause: str, settings: Settings) -> Iterator[IntegerCase]:
    """One drawn shape for each width and convention, and for 4 bits the large ones."""
    yield from (of(case, max(2, case.vectors)) for case in drawn(clause, "random", 0))
    for convention in CONVENTIONS:
        yield from (of(case, 3) for case in large(clause, 4, convention, tier="random"))
    yield from (of(case, 4) for case in in_use(clause, "random", "in-use"))


def concurrent_cases(clause: str, settings: Settings) -> Iterator[IntegerCase]:
    """A small shape and one for which a backend uses its own threads."""
    for rows, columns in ((64, 33), (1024, 1100)):
        yield of(MatrixCase(clause, "random", CONCURRENT, 4, rows, columns, 64), 3)


@checks("linear.qgemm_bfp/C3", concurrent_cases)
def test_integer_product_from_several_threads(backend: Remote, case: IntegerCase) -> None:
    """Threads that multiply at once, each by its own X, get the same bits as each alone."""
    x, matrix = integer_cases.random(case)
    prepared = backend.prepare(matrix)
    assert_together(backend, [partial(prepared.guarded_blocks, shifted(x, by)) for by in (0, 1, -3, 2)])


def shifted(x: Blocks, by: int) -> Blocks:
    """The blocks times a power of two; if its exponent is odd, the rows are reordered."""
    order = slice(None, None, -1 if by % 2 else 1)
    exponents = (x.exponents[order] + by).clip(-x.format.reach, x.format.reach).astype(np.int16)
    return Blocks(np.ascontiguousarray(x.mantissas[order]), np.ascontiguousarray(exponents), x.format)


@checks("linear.qgemm_bfp/C3", few_cases)
def test_integer_product_repeats_itself(backend: Remote, case: IntegerCase) -> None:
    """The same call gives the same bits: repeated, after other calls, with weights prepared again, and row by row."""
    assert_rows_alone(backend, case)
    x, matrix = integer_cases.random(case)
    prepared = backend.prepare(matrix)
    first = prepared.guarded_blocks(x)
    assert_same_bits(first, prepared.guarded_blocks(x), "the same call again")
    assert_same_bits(first, prepared.qgemm_bfp(x), "the same call without out")
    _, other = integer_cases.random(replace(case, seed=case.seed + 1))
    beside = backend.prepare(other)
    second = beside.guarded_blocks(x)
    assert_same_bits(first, prepared.guarded_blocks(x), "the same call after another matrix was prepared")
    assert_same_bits(second, beside.guarded_blocks(x), "that other matrix after the first was used")
    for by in (1, -2):
        prepared.guarded_blocks(shifted(x, by))
    assert_same_bits(first, prepared.guarded_blocks(x), "the same call after others")
    assert_same_bits(first, backend.prepare(matrix).guarded_blocks(x), "weights prepared anew")


def assert_rows_alone(backend: Remote, case: IntegerCase) -> None:
    """A row of Y does not depend on the mantissas or exponents of other rows of X."""
    __tracebackhide__ = True
    x, matrix = integer_cases.random(case)
    prepared = backend.prepare(matrix)
    together = prepared.guarded_blocks(x)
    for row in (0, x.rows - 1):
        others = np.arange(x.rows) != row
        mantissas, exponents = x.mantissas.copy(), x.exponents.copy()
        mantissas[others] = -mantissas[others][:, ::-1]
        exponents[others] = (exponents[others] + 9).clip(-x.format.reach, x.format.reach)
        changed = prepared.guarded_blocks(Blocks(mantissas, exponents, x.format))
        text = f"row {row} changed when the other rows of X did"
        assert_same_bits(together[row : row + 1], changed[row : row + 1], text)


# Zeros and single mantissas.


def zero_cases(clause: str, settings: Settings) -> Iterator[IntegerCase]:
    """A small shape for each width, a shape of many blocks and groups, and all formats."""
    yield from (of(case, 3) for case in edges(clause, ("zero-x", "one-hot")))
    for variant in ("zero-x", "one-hot"):
        yield from (of(case, 3) for case in in_use(clause, "edge", variant, 2))
        for choice in FORMATS:
            yield of(MatrixCase(clause, "edge", variant, 4, 136, 9, 24), 3, choice)


@checks("linear.qgemm_bfp/C4", zero_cases)
def test_integer_product_of_zeros_and_of_one(backend: Remote, case: IntegerCase, record_property: Record) -> None:
    """Rows of zeros give zeros; a single mantissa, at the ends of blocks and groups, gives its row of weights."""
    _, matrix = inputs.random(case)
    if case.variant == "zero-x":
        given = run(backend, integer_cases.empty(case), matrix)
        assert_equal_values(given, np.zeros((case.vectors, case.columns)))
        return
    for row in sorted({0, case.block - 1, case.block, case.group_size - 1, case.group_size, case.rows - 1}):
        if row < case.rows:
            assert_bounded(backend, integer_cases.one_hot(case, row), matrix, case, record_property)


# Mistakes.

Call = tuple[object, object]  # x and out
MISTAKES: dict[str, Callable[[Blocks, F32], Call]] = {
    "x-short": lambda x, out: (Blocks(x.mantissas[:, :-1].copy(), x.exponents, x.format), out),
    "x-long": lambda x, out: (_twice(x), out),
    "x-floats": lambda x, out: (x.mantissas.astype(np.float32), out),
    "x-mantissas": lambda x, out: (x.mantissas, out),
    "x-parts": lambda x, out: ((x.mantissas, x.exponents, x.format), out),
    "x-format": lambda x, out: (x.format, out),
    "out-short": lambda x, out: (x, out[:, :-1].copy()),
    "out-of-one-row": lambda x, out: (x, out[0].copy()),
    "out-of-more-rows": lambda x, out: (x, np.concatenate([out, out])),
    "out-float64": lambda x, out: (x, out.astype(np.float64)),
    "out-read-only": lambda x, out: (x, read_only(out)),
    "out-strided": lambda x, out: (x, np.repeat(out, 2, axis=-1)[..., ::2]),
    "out-over-mantissas": lambda x, out: _over(x, out, "mantissas"),
    "out-over-exponents": lambda x, out: _over(x, out, "exponents"),
}


def _twice(x: Blocks) -> Blocks:
    mantissas, exponents = (np.concatenate([each, each], axis=1) for each in (x.mantissas, x.exponents))
    return Blocks(mantissas, exponents[:, : x.format.blocks(2 * x.columns)].copy(), x.format)


def _over(x: Blocks, out: F32, part: str) -> Call:
    """An out that begins in the last bytes of the mantissas or the exponents."""
    own: Array = getattr(x, part)
    last = (own.nbytes - 1) // 4
    both = np.zeros(last + out.size, np.float32)
    there = both.view(own.dtype)[: own.size].reshape(own.shape)
    there[...] = own
    parts = {"mantissas": x.mantissas, "exponents": x.exponents, part: there}
    return Blocks(parts["mantissas"], parts["exponents"], x.format), both[last:].reshape(out.shape)


def mistakes(clause: str, settings: Settings) -> Iterator[IntegerCase]:
    for variant in MISTAKES:
        yield of(MatrixCase(clause, "edge", variant, 4, 64, 5, 8), 3)
        yield from (of(case, 3) for case in in_use(clause, "edge", variant, 2, 0))
    yield of(MatrixCase(clause, "edge", "sums-of-2-to-53", 2, WIDE_ROWS, 1, WIDE_ROWS), 1, (WIDE_ROWS, 25, 8))


WIDE_ROWS = 2105392
"""The least number of rows, in whole units of 2 bits, for which products of 25-bit mantissas and 8-bit codes reach
2^53."""


@checks("linear.qgemm_bfp/H8", mistakes)
def test_integer_product_refuses(backend: Remote, case: IntegerCase) -> None:
    """Each mistake raises ArgumentError and leaves out unchanged."""
    x, matrix = integer_cases.random(case)
    out = np.full((case.vectors, case.columns), 7, np.float32)
    given = MISTAKES[case.variant](x, out) if case.variant in MISTAKES else (x, out)
    prepared = backend.prepare(matrix)
    before = np.array(given[1], copy=True)
    with refuses():
        prepared.qgemm_bfp(*given)
    assert before.tobytes() == np.asarray(given[1]).tobytes(), "WRONG: out was written although the call was refused"
