"""Checks of `C3` of the products over the life of prepared matrices: a result depends on x and the matrix alone.

Here it must not depend on what was prepared before: on a matrix that was read from the same arrays, on one that lay at
the same addresses and has been released, on others that are alive, on the same x multiplied by another matrix, or on
another number of rows of x at the same place. Inputs lie on the lattice, so every result is one that is known.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from lowbit.arrays import F32, Array
from lowbit.linear import integer, linear
from lowbit.quantization.affine import CONVENTIONS, SCALE_DTYPES, QuantizedMatrix
from lowbit.quantization.bfp import Blocks
from lowbit.quantization.packing import BITS, CODES_PER_UNIT
from lowbit_conformance.isolation.calls import RemoteLinear, Variant
from lowbit_conformance.isolation.remote import Remote
from lowbit_conformance.suite import inputs, integer_cases
from lowbit_conformance.suite.cases import CONCURRENT, MatrixCase, in_use
from lowbit_conformance.suite.compare import assert_equal_values
from lowbit_conformance.suite.integer_cases import IntegerCase, of
from lowbit_conformance.suite.marking import Settings, checks

Numbers = F32 | Blocks
VECTORS = 6


CLAUSES = ("linear.qgemv/C3", "linear.qgemm/C3", "linear.qgemm_bfp/C3")


def cases(variant: str, clause: str) -> Iterator[MatrixCase]:
    """A small shape and one with larger K for each width, and common group sizes."""
    for bits in BITS:
        for turn, (rows, columns, group_size) in enumerate(((3, 19, 10), (9, 33, 24))):
            shape = (rows * CODES_PER_UNIT[bits], columns, group_size)
            case = MatrixCase(clause, "lattice", variant, bits, *shape, CONVENTIONS[turn], SCALE_DTYPES[turn])
            yield with_vectors(case, VECTORS)
    yield from (with_vectors(case, VECTORS) for case in in_use(clause, "lattice", variant, 2, 8))


def with_vectors(case: MatrixCase, count: int) -> MatrixCase:
    """The case with this number of rows of x or of blocks, if the operation takes several."""
    if case.operation == "linear.qgemm_bfp":
        return of(case, count)
    return replace(case, vectors=count if case.operation == "linear.qgemm" else 0)


def drawn(case: MatrixCase) -> tuple[list[Numbers], QuantizedMatrix]:
    """Six activations of one shape, each different from the previous in at least one element, and a matrix.

    The second differs in the last element, the third has the same elements in another order, the fourth differs in the
    middle, the fifth in the first element; the last equals the first.
    """
    if isinstance(case, IntegerCase):
        x, matrix = integer_cases.lattice(case, dense=True)
        return [Blocks(each, x.exponents, x.format) for each in _changed(x.mantissas)], matrix
    rows, matrix = inputs.lattice(case, dense=True)
    return list(_changed(rows if case.vectors else rows[0])), matrix


def _changed(first: Array) -> Iterator[Array]:
    """See `drawn`; an element is negated, so that sums stay exact."""
    yield first
    for change in ("last", "order", "middle", "first"):
        x = first.copy()
        if change == "order":
            x[..., [0, -1]] = x[..., [-1, 0]]
            x[..., 1:-1] = x[..., -2:0:-1]
        else:
            x[..., {"last": -1, "middle": x.shape[-1] // 2, "first": 0}[change]] *= -1
        yield x
    yield first


def other_matrices(case: MatrixCase, matrix: QuantizedMatrix) -> Iterator[QuantizedMatrix]:
    """Matrices of the same shape with one difference: the last word, a word in the middle, the order of columns, one
    scale, or one zero; then one that differs everywhere."""
    words, scales, zeros = matrix.words.copy(), matrix.scales.copy(), matrix.zeros.copy()
    words[-1, -1] ^= np.uint32(0x01000000)
    yield replace(matrix, words=words)
    words = matrix.words.copy()
    words[len(words) // 2, words.shape[1] // 2] ^= np.uint32(1)
    yield replace(matrix, words=words)
    yield replace(matrix, words=np.ascontiguousarray(matrix.words[:, ::-1]))
    scales[-1, -1] *= 2
    yield replace(matrix, scales=scales)
    zeros[-1, -1] = zeros[-1, -1] * 0 if zeros[-1, -1] else zeros[-1, -1] + 1
    yield replace(matrix, zeros=zeros)
    yield inputs.lattice(replace(case, seed=case.seed + 1), dense=False)[1]


def multiplied(prepared: RemoteLinear, x: Numbers) -> F32:
    """The product, written to the caller's array, as rows."""
    if isinstance(x, Blocks):
        return prepared.guarded_blocks(x)
    return np.atleast_2d(prepared.guarded(np.atleast_2d(x), len(x) if x.ndim == 2 else 0))


def assert_product(prepared: RemoteLinear, x: Numbers, matrix: QuantizedMatrix, what: str) -> None:
    __tracebackhide__ = True
    assert_result(multiplied(prepared, x), x, matrix, what)


def assert_result(given: F32, x: Numbers, matrix: QuantizedMatrix, what: str) -> None:
    __tracebackhide__ = True
    right = integer.qgemm_bfp(x, matrix) if isinstance(x, Blocks) else linear.qgemm(np.atleast_2d(x), matrix)
    try:
        assert_equal_values(given, right)
    except AssertionError as error:
        raise AssertionError(f"{error} ({what})") from None


# One matrix, and new activations in the same memory.


def first_rows(x: Numbers, count: int) -> Numbers:
    if isinstance(x, Blocks):
        return Blocks(x.mantissas[:count].copy(), x.exponents[:count].copy(), x.format)
    return x[:count].copy()


@checks(CLAUSES, lambda clause, settings: cases("decoding", clause))
def test_a_decoding_loop(backend: Remote, case: MatrixCase) -> None:
    """Activations that differ in one element or in order, in the same array, times two alternating matrices: all
    exact."""
    activations, matrix = drawn(case)
    _, other = drawn(replace(case, seed=case.seed + 1))
    prepared, beside = backend.prepare(matrix), backend.prepare(other)
    with backend.same_arrays():
        for x in activations:
            assert_product(prepared, x, matrix, "x was written where the x of other calls had been")
        for x in activations[:3]:
            assert_product(beside, x, other, "the same x had been multiplied by another matrix")
            assert_product(prepared, x, matrix, "the same x had been multiplied by another matrix")
    for turn, count in enumerate((case.vectors, 1, 3, case.vectors, 2) if case.vectors else ()):
        x = first_rows(activations[turn], count)
        call = prepared.call(case.operation.partition(".")[2], x)
        (given,) = backend.elsewhere(call, [Variant(side=1)])  # at one address, because both begin at the same page
        assert_result(given, x, matrix, "another number of rows had been multiplied before")


# Matrices that replace each other in memory.


@checks(CLAUSES, lambda clause, settings: cases("replaced", clause))
def test_matrices_in_one_place(backend: Remote, case: MatrixCase) -> None:
    """Matrices that differ in a word, a scale or a zero, each in the memory of a released one or in the same arrays."""
    activations, first = drawn(case)
    matrices = [first, *other_matrices(case, first), first]
    x = activations[0]
    for matrix in matrices:  # each at the addresses of the previous one, which has been released
        assert_product(backend.prepare(matrix), x, matrix, "another matrix had lain at the same addresses")
    with backend.same_arrays():
        alive = []
        for matrix in matrices[:4]:
            alive.append(backend.prepare(matrix))
            assert_product(alive[-1], x, matrix, "another matrix had been prepared from the same arrays")
        for prepared, matrix in zip(alive, matrices, strict=False):
            text = "the arrays it was prepared from hold another matrix: it must have copies"
            assert_product(prepared, activations[1], matrix, text)
    for number in (1, 2, 0):
        del alive[number], prepared
        del matrices[number]
        for prepared, matrix in zip(alive, matrices, strict=False):
            assert_product(prepared, x, matrix, "other matrices had been released")


# Concurrent first calls.

FRESH = 6  # matrices, because a race is possible only in the first call


def fresh_cases(clause: str, settings: Settings) -> Iterator[MatrixCase]:
    for rows, columns, group_size in ((96, 17, 24), (512, 160, 64)):
        yield with_vectors(MatrixCase(clause, "lattice", CONCURRENT, 4, rows, columns, group_size), 3)


@checks(CLAUSES, fresh_cases)
def test_first_calls_at_once(backend: Remote, case: MatrixCase) -> None:
    """Four threads make the first calls to a matrix at once, for one matrix after another: all exact."""
    activations, matrix = drawn(case)
    what = case.operation.partition(".")[2]
    for _ in range(FRESH):
        prepared = backend.prepare(matrix)
        calls = [prepared.call(what, x) for x in activations[:4]]
        for x, results in zip(activations, backend.together(calls, 2), strict=False):
            for given in results:
                assert_result(np.atleast_2d(given), x, matrix, "beside the first calls of other threads")
