"""Whether a result at the size that is timed is right: a kernel that skips a part of a large matrix would seem fast.

The suite runs small matrices. So the first result of each backend is compared here with the specification's own, within
the bound that follows from the arithmetic that the backend declares.

**Columns.** Those of a wide matrix repeat (`lowbit_bench.inputs.TILE`), so the bounds of the first ones are those of
all. Formats whose columns share bytes are drawn whole; of a wide one, `TILE` columns are compared, the first and the
last among them.

**Rows of activations.** The bound of a product with the specification's own matrix grows with the magnitude of each
activation. So the bound of one vector, the largest magnitudes of all rows, holds for each row. Of an integer product,
whose bound does not, `MOST_ROWS` rows are compared.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from lowbit.arrays import F64
from lowbit.backend import Backend
from lowbit.contract.rounding import Arithmetic, Bound
from lowbit.errors import LowbitError
from lowbit.linear.bounds import linear_bound
from lowbit.linear.integer_bounds import integer_bound
from lowbit.linear.linear import group_offsets
from lowbit.linear.stored_bounds import of_sums, stored_bound
from lowbit.numbers.floats import FLOATS
from lowbit.operations import OPERATIONS
from lowbit.quantization.affine import QuantizedMatrix
from lowbit.quantization.bfp import Blocks
from lowbit.quantization.packing import unpack
from lowbit.tensor_formats import dense
from lowbit.tensor_formats.stored import Result, Stored
from lowbit.tensor_formats.table import Terms
from lowbit_bench.inputs import TILE, Problem
from lowbit_conformance.suite.compare import assert_array, assert_within

MOST_ROWS = 8
MOST_ELEMENTS = 2**27
"""Largest number of weights of a matrix that is drawn whole; they take a gigabyte in float64."""
MARGIN = TILE // 8
"""Number of columns at each end."""

Index = npt.NDArray[np.intp]
Check = Callable[[Backend, object], None]
"""Takes a backend and its first result, and raises `WrongResultError`, or `ArgumentError` for its declaration."""


class WrongResultError(LowbitError):
    """The first result of a backend is wrong at the size that is timed."""


def wrong(error: AssertionError) -> WrongResultError:
    """The suite's verdict on a result, as an error of a comparison."""
    return WrongResultError(f"wrong result: {str(error).removeprefix('WRONG: ')}")


def arithmetic_of(backend: Backend, operation: str) -> Arithmetic:
    """The arithmetic that a backend declares.

    Raises:
        AssertionError: there is none, and the operation is bounded.
    """
    declared = backend.capabilities().operations[operation].arithmetic
    if declared is None:
        raise AssertionError(f"{operation} is bounded, and the backend declares no arithmetic for it")
    return declared


def assert_bounded(given: object, exact: F64, bound: Bound, dtype: npt.DTypeLike) -> None:
    """Check that a result is finite and within its bound; elements with an infinite bound, which may overflow, are not
    judged.

    Raises:
        AssertionError: it is not.
    """
    array = assert_array("the result", given, dtype, exact.shape)
    if not np.isfinite(array.astype(np.float64)).all():
        raise AssertionError("the result is not finite")
    judged = np.isfinite(bound.limit)
    numbers = np.where(judged, array, np.zeros((), array.dtype))
    assert_within(numbers, np.where(judged, exact, 0), bound, array.dtype)


# **Products.**


@dataclass(frozen=True)
class Part:
    """The columns of a matrix that are compared.

    Attributes:
        columns: their indices in the matrix.
        places: for each, the column of `terms` with its numbers.
        terms: the numbers.
        matrix: for the specification's own layout, the columns of `terms` as a matrix.
    """

    columns: Index
    places: Index
    terms: Terms
    matrix: QuantizedMatrix | None = None

    @property
    def deviation(self) -> float:
        """The root of the mean square of the weights."""
        return float(np.sqrt(np.mean(np.square(self.terms.values))))


def part_of(problem: Problem, weights: Any) -> Part | None:
    """The columns of a matrix that are compared; None if it is too large."""
    every = np.arange(problem.columns)
    if isinstance(weights, QuantizedMatrix):
        own = {name: getattr(weights, name)[:, :TILE].copy() for name in ("words", "scales", "zeros")}
        first = replace(weights, **own)
        return Part(every, every % TILE, terms_of(first), first)
    if weights.table.block is not None:
        return Part(every, every % TILE, weights.with_columns(every[:TILE]).terms)
    if problem.rows * problem.columns > MOST_ELEMENTS:
        return None
    some = some_of(problem.columns, TILE, MARGIN)
    return Part(some, np.arange(len(some)), terms_at(weights, some))


def terms_of(matrix: QuantizedMatrix) -> Terms:
    """The numbers of a matrix in the specification's own layout."""
    group = np.arange(matrix.rows) // matrix.group_size
    scales, offsets = matrix.scales.astype(np.float64)[group], group_offsets(matrix)[group]
    return Terms(scales * unpack(matrix.words, matrix.bits), offsets)


def terms_at(weights: Stored, columns: Index) -> Terms:
    """The numbers of some columns."""
    if weights.format in dense.NAMES:
        return weights.with_columns(columns).terms
    terms = weights.terms
    offsets = np.broadcast_to(terms.offsets, terms.products.shape)
    return Terms(terms.products[:, columns], offsets[:, columns])


def some_of(count: int, most: int, margin: int) -> Index:
    """At most this many indices, ascending: the first ones, the last ones, and some between.

    >>> some_of(3, 8, 2), some_of(100, 6, 2)[[0, 1, -2, -1]]
    (array([0, 1, 2]), array([ 0,  1, 98, 99]))
    """
    if count <= most:
        return np.arange(count)
    between = np.random.default_rng(count).choice(count - 2 * margin, most - 2 * margin, replace=False) + margin
    return np.sort(np.concatenate([np.arange(margin), between, np.arange(count - margin, count)]))


def check_of(problem: Problem, weights: Any, x: Any, part: Part | None) -> Check | None:
    """The check of a product's result; None if the matrix is too large."""
    if part is None:
        return None
    rows = some_of(problem.batch, MOST_ROWS, 1) if isinstance(x, Blocks) else np.arange(problem.batch)
    exact, limit = answer_of(problem, weights, x, part, rows)
    shape = (problem.batch, problem.columns)

    def spread(values: F64, other: float) -> F64:
        """An array in the shape of the result, with `other` where nothing is compared."""
        whole = np.full(shape, other)
        whole[np.ix_(rows, part.columns)] = np.broadcast_to(values, exact.shape)[:, part.places]
        return whole[0] if problem.operation.endswith("gemv") else whole

    def check(backend: Backend, given: object) -> None:
        try:
            bound = limit(arithmetic_of(backend, problem.operation))
            whole = Bound(spread(bound.limit, np.inf), bound.gauge, bound.derivation)
            assert_bounded(given, spread(exact, 0.0), whole, FLOATS[problem.result].dtype)
        except AssertionError as error:
            raise wrong(error) from None

    return check


def answer_of(
    problem: Problem, weights: Any, x: Any, part: Part, rows: Index
) -> tuple[F64, Callable[[Arithmetic], Bound]]:
    """The exact product of the compared rows and columns, and a function from a declared arithmetic to its bound."""
    if isinstance(x, Blocks):
        assert part.matrix is not None
        some, matrix = Blocks(x.mantissas[rows], x.exponents[rows], x.format), part.matrix
        exact = OPERATIONS[problem.operation].compute(some, matrix)
        return exact, lambda declared: integer_bound(some, matrix, declared, exact)
    wide: F64 = x.values.T if isinstance(x, Stored) else np.atleast_2d(x).astype(np.float64)
    total = wide @ part.terms.values
    if part.matrix is None:
        sums = of_sums(x, weights, part.terms) if isinstance(x, Stored) else 0.0
        result = cast("Result", problem.result)  # which `problem` has checked
        return total, lambda declared: stored_bound(wide, weights, result, declared, total, sums, part.terms)
    own, largest = part.matrix, np.abs(wide).max(axis=0).astype(np.float32)
    return total, lambda declared: linear_bound(largest, own, declared, np.abs(total).max(axis=0))
