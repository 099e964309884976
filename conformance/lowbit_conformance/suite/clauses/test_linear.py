"""Checks of `linear.qgemv` and `linear.qgemm`: equal on the lattice, within the derived bound elsewhere."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from lowbit.arrays import F32
from lowbit.linear import linear
from lowbit.linear.bounds import linear_bound
from lowbit.quantization.affine import CONVENTIONS, QuantizedMatrix
from lowbit.quantization.packing import BITS, CODES_PER_UNIT
from lowbit_conformance.isolation.remote import Remote
from lowbit_conformance.suite import inputs
from lowbit_conformance.suite.bounded import arithmetic, limit_of
from lowbit_conformance.suite.cases import CONCURRENT, MatrixCase, drawn, edges, in_use, large, models, systematic
from lowbit_conformance.suite.compare import assert_equal_values, assert_same_bits, assert_within, refuses
from lowbit_conformance.suite.marking import Record, Settings, checks

VECTORS = (1, 2, 3, 4, 5, 8, 17)


def lattice_cases(clause: str, settings: Settings) -> Iterator[MatrixCase]:
    """The systematic shapes, the shape of every random case and those of the model, each dense and full."""
    shapes = [*with_vectors(systematic(clause)), *tall(clause), *model_cases(clause, settings)]
    for seed in settings.seeds:
        shapes += drawn(clause, "lattice", seed)
    for groups, tail in ((1, 0), (1, 8), (2, 24), (4, 0)):
        shapes += with_vectors(in_use(clause, "lattice", "in-use", groups, tail))
    for case in shapes:
        for density in ("dense", "full"):
            yield replace(case, tier="lattice", variant=f"{case.variant}-{density}".lstrip("-"))


def random_cases(clause: str, settings: Settings) -> Iterator[MatrixCase]:
    """Every special input, shapes and inputs from the seeds, and the model's own weights."""
    yield from with_vectors(edges(clause, inputs.EDGES))
    for seed in settings.seeds:
        yield from drawn(clause, "random", seed)
    yield from model_cases(clause, settings)
    for variant in inputs.EDGES:
        if variant != inputs.SUBNORMAL_RESULT:  # scales would underflow float16
            yield from with_vectors(in_use(clause, "edge", variant))
    yield from with_vectors(in_use(clause, "random", "in-use"))


def model_cases(clause: str, settings: Settings) -> Iterator[MatrixCase]:
    wide = clause.startswith("linear.qgemm")
    yield from (case.of(clause) for case in settings.model if bool(case.vectors) == wide)


def with_vectors(cases: Iterator[MatrixCase]) -> Iterator[MatrixCase]:
    """Give each case of qgemm a different number of vectors; leave cases of qgemv unchanged."""
    for turn, case in enumerate(cases):
        vectors = 5 if case.variant == "large" else VECTORS[turn % len(VECTORS)]
        yield replace(case, vectors=vectors) if case.operation == "linear.qgemm" else case


def tall(clause: str) -> Iterator[MatrixCase]:
    """For qgemm, more rows of x than a kernel processes at once, as in a prompt."""
    if clause.startswith("linear.qgemm"):
        for bits in BITS:
            for convention in CONVENTIONS:
                yield MatrixCase(clause, "lattice", "tall", bits, 64, 40, 48, convention, vectors=131)


def run(backend: Remote, x: F32, matrix: QuantizedMatrix, case: MatrixCase) -> F32:
    """One guarded call, as T × N."""
    return np.atleast_2d(backend.prepare(matrix).guarded(x, case.vectors))


def run_rows(backend: Remote, x: F32, matrix: QuantizedMatrix, case: MatrixCase) -> F32:
    """The product of all rows: in one call of qgemm, or in a call of qgemv for each."""
    rows = [x] if case.vectors else [x[t : t + 1] for t in range(len(x))]
    prepared = backend.prepare(matrix)
    return np.concatenate([np.atleast_2d(prepared.guarded(each, case.vectors)) for each in rows])


@checks(("linear.qgemv/C1", "linear.qgemm/C1"), lattice_cases)
def test_products_on_the_lattice(backend: Remote, case: MatrixCase) -> None:
    """If every partial sum is exact, the result equals the reference's, row by row."""
    assert_lattice(backend, case)


def model_shapes(clause: str, settings: Settings) -> Iterator[MatrixCase]:
    """The shapes of real layers; for qgemm also prompts of hundreds of tokens."""
    wide = clause.startswith("linear.qgemm")
    yield from models(clause, 2 if wide else 0)
    for rows, columns, vectors in ((256, 72, 512), (1088, 40, 300)) if wide else ():
        shape = (rows, columns, 64)
        yield MatrixCase(clause, "lattice", "large-prompt-dense", 4, *shape, "minimum", "float16", vectors)


@checks(("linear.qgemv/C1", "linear.qgemm/C1"), model_shapes)
def test_products_of_the_size_of_models(backend: Remote, case: MatrixCase) -> None:
    """With the rows and columns of real layers, and the rows of X of prompts, the result equals the reference's."""
    assert_lattice(backend, case)


def assert_lattice(backend: Remote, case: MatrixCase) -> None:
    __tracebackhide__ = True
    dense, sparse = (case.variant.endswith(each) for each in ("dense", "sparse"))
    assert_product(backend, case, *inputs.lattice(case, dense=dense, sparse=sparse))


def assert_product(backend: Remote, case: MatrixCase, x: F32, matrix: QuantizedMatrix) -> None:
    """The product, in which every partial sum is exact, equals the reference's."""
    __tracebackhide__ = True
    given = run(backend, x, matrix, case)
    assert_equal_values(given, linear.qgemm(x, matrix))


@checks(("linear.qgemv/C2", "linear.qgemm/C2"), random_cases)
def test_products_within_the_bound(
    backend: Remote, case: MatrixCase, record_property: Record, model_matrices: dict[str, QuantizedMatrix]
) -> None:
    """Random and special inputs stay within the bound derived from the declared arithmetic, row by row."""
    x, matrix = inputs.edge(case) if case.tier == "edge" else inputs.random(case)
    if case.tier == "model":
        matrix = model_matrices[case.variant]
    assert_rows_bounded(backend, case, record_property, x, matrix)


def assert_rows_bounded(
    backend: Remote, case: MatrixCase, record_property: Record, x: F32, matrix: QuantizedMatrix
) -> None:
    """Each row of a product is within the bound of its own row of x."""
    __tracebackhide__ = True
    record_property("share", share_of_rows(backend, case, run(backend, x, matrix, case), x, matrix))


def share_of_rows(backend: Remote, case: MatrixCase, given: F32, x: F32, matrix: QuantizedMatrix) -> float:
    """The largest fraction of its bound that a row of a product uses."""
    __tracebackhide__ = True
    declared, shares = arithmetic(backend, case), []
    for row, result, exact in zip(x, given, linear.qgemm(x, matrix), strict=True):
        bound = limit_of(partial(linear_bound, row, matrix, declared, exact))
        shares.append(assert_within(result, exact, bound))
    return max(shares)


def few_cases(clause: str, settings: Settings) -> Iterator[MatrixCase]:
    """One drawn shape for each width and convention, and for 4 bits the large ones."""
    yield from drawn(clause, "random", 0)
    for convention in CONVENTIONS:
        yield from with_vectors(large(clause, 4, convention, tier="random"))
    yield from with_vectors(in_use(clause, "random", "in-use"))


def concurrent_cases(clause: str, settings: Settings) -> Iterator[MatrixCase]:
    """A small shape and one for which a backend uses its own threads."""
    for rows, columns in ((64, 33), (1024, 1100)):
        case = MatrixCase(clause, "random", CONCURRENT, 4, rows, columns, 64)
        yield replace(case, vectors=3) if clause.startswith("linear.qgemm") else case


@checks(("linear.qgemv/C3", "linear.qgemm/C3"), concurrent_cases)
def test_products_from_several_threads(backend: Remote, case: MatrixCase) -> None:
    """Threads that multiply at once, each by its own x, get the same bits as each alone."""
    x, matrix = inputs.random(case)
    prepared = backend.prepare(matrix)
    own = [x * np.float32(factor) for factor in (1, -2, 0.5, 3)]
    assert_together(backend, [partial(prepared.guarded, each, case.vectors) for each in own])


def assert_together(backend: Remote, products: list[Callable[[], F32]]) -> None:
    """Products made at once, each in its own thread, have the same bits as each alone."""
    __tracebackhide__ = True
    with backend.recording() as calls:
        alone = [product() for product in products]
    for expected, results in zip(alone, backend.together(calls, 25), strict=True):
        for result in results:
            assert_same_bits(expected, result, "the same call beside others")


@checks("linear.qgemv/C3", few_cases)
def test_qgemv_repeats_itself(backend: Remote, case: MatrixCase) -> None:
    """The same call gives the same bits: repeated, after other calls, and with weights prepared again."""
    assert_repeats(backend, case)


@checks("linear.qgemm/C3", few_cases)
def test_qgemm_repeats_itself(backend: Remote, case: MatrixCase) -> None:
    """The same call gives the same bits, and a row does not depend on its neighbours."""
    assert_repeats(backend, case)
    x, matrix = inputs.random(case)
    prepared = backend.prepare(matrix)
    together = prepared.guarded(x, case.vectors)
    changed = x.copy()
    changed[1:] += 1
    alone = prepared.guarded(changed, case.vectors)
    assert_same_bits(together[:1], alone[:1], "row 0 changed when the other rows of x did")


def assert_repeats(backend: Remote, case: MatrixCase) -> None:
    __tracebackhide__ = True
    x, matrix = inputs.random(case)
    prepared = backend.prepare(matrix)
    first = prepared.guarded(x, case.vectors)
    assert_same_bits(first, prepared.guarded(x, case.vectors), "the same call again")
    allocated = prepared.qgemm(x) if case.vectors else prepared.qgemv(x[0])
    assert_same_bits(first, allocated, "the same call without out")
    _, other = inputs.random(replace(case, seed=case.seed + 1))
    beside = backend.prepare(other)
    second = beside.guarded(x, case.vectors)
    assert_same_bits(first, prepared.guarded(x, case.vectors), "the same call after another matrix was prepared")
    assert_same_bits(second, beside.guarded(x, case.vectors), "that other matrix after the first was used")
    for factor in (2, -1, 0):
        prepared.guarded(x * np.float32(factor), case.vectors)
    assert_same_bits(first, prepared.guarded(x, case.vectors), "the same call after others")
    assert_same_bits(first, backend.prepare(matrix).guarded(x, case.vectors), "weights prepared anew")


def exact_edges(clause: str, settings: Settings) -> Iterator[MatrixCase]:
    variants = ("zero-x", "one-hot-first", "one-hot-last", "one-hot-group")
    yield from edges(clause, variants)
    for variant in variants:
        yield from in_use(clause, "edge", variant)


@checks("linear.qgemv/C4", exact_edges)
def test_qgemv_zero_and_one_hot(backend: Remote, case: MatrixCase, record_property: Record) -> None:
    """Activations of zero give zeros; a single 1 gives a row of the dequantised matrix within the bound."""
    x, matrix = inputs.edge(case)
    x = np.sign(x)
    given = run(backend, x, matrix, case)
    if case.variant == "zero-x":
        assert_equal_values(given, np.zeros(given.shape))
        return
    record_property("share", share_of_rows(backend, case, given, x, matrix))


def non_finite_cases(clause: str, settings: Settings) -> Iterator[MatrixCase]:
    """Each non-finite value at the small shape of the edge cases, and at larger ones."""
    vectors = 5 if clause.startswith("linear.qgemm") else 0
    yield from edges(clause, tuple(inputs.NON_FINITE), vectors)
    for variant in inputs.NON_FINITE:
        for convention in CONVENTIONS:
            for rows, columns in ((576, 40), (2048, 9)):
                yield MatrixCase(clause, "edge", variant, 4, rows, columns, 64, convention, vectors=vectors)
        yield from (replace(case, vectors=vectors) for case in in_use(clause, "edge", variant))


@checks("linear.qgemv/C5", non_finite_cases)
def test_qgemv_passes_non_finite_on(backend: Remote, case: MatrixCase) -> None:
    """A NaN or an infinity in any row of x reaches every column."""
    x, matrix = inputs.random(case)
    prepared = backend.prepare(matrix)
    for row in (0, 1, case.rows // 2, case.rows - 1):
        x, _ = inputs.random(case)
        x[0, row] = inputs.NON_FINITE[case.variant]
        given = np.atleast_2d(prepared.guarded(x, case.vectors))
        finite = np.flatnonzero(np.isfinite(given[0]))
        assert len(finite) == 0, f"WRONG: x[{row}] is {x[0, row]}, and y is finite at columns {finite[:6].tolist()}"


@checks("linear.qgemm/C4", non_finite_cases)
def test_qgemm_keeps_non_finite_to_its_row(backend: Remote, case: MatrixCase) -> None:
    """A NaN or an infinity in one row of X reaches every column of that row of Y, and no other row."""
    _, matrix = inputs.random(case)
    prepared = backend.prepare(matrix)
    for row, place in ((0, case.rows - 1), (2, case.rows // 2), (case.vectors - 1, 0)):
        x, _ = inputs.random(case)
        x[row, place] = inputs.NON_FINITE[case.variant]
        finite = np.isfinite(prepared.guarded(x, case.vectors))
        assert not finite[row].any(), f"WRONG: row {row} of X is not finite, and row {row} of Y has finite elements"
        others = np.delete(finite, row, axis=0)
        assert others.all(), "WRONG: a finite row of X gave a row of Y that is not finite"


Call = tuple[object, object]  # x and out
MISTAKES: dict[str, Callable[[F32, F32], Call]] = {
    "x-short": lambda x, out: (x[..., :-1].copy(), out),
    "x-long": lambda x, out: (np.concatenate([x, x], axis=-1), out),
    "x-dimensions": lambda x, out: (x[None], out),
    "x-float64": lambda x, out: (x.astype(np.float64), out),
    "x-list": lambda x, out: (x.tolist(), out),
    "x-strided": lambda x, out: (np.repeat(x, 2, axis=-1)[..., ::2], out),
    "x-foreign-order": lambda x, out: (x.astype(x.dtype.newbyteorder()), out),
    "out-short": lambda x, out: (x, out[..., :-1].copy()),
    "out-float64": lambda x, out: (x, out.astype(np.float64)),
    "out-read-only": lambda x, out: (x, read_only(out)),
    "out-strided": lambda x, out: (x, np.repeat(out, 2, axis=-1)[..., ::2]),
    "out-overlapping": lambda x, out: _overlapping(x, out),
}


def read_only(out: F32) -> F32:
    out.setflags(write=False)
    return out


def _overlapping(x: F32, out: F32) -> Call:
    both = np.zeros(x.size + out.size - 1, np.float32)
    return both[: x.size].reshape(x.shape), both[x.size - 1 :].reshape(out.shape)


def mistakes(clause: str, settings: Settings) -> Iterator[MatrixCase]:
    for variant in MISTAKES:
        rows = 2 * CODES_PER_UNIT[4]
        vectors = 3 * clause.startswith("linear.qgemm")
        yield MatrixCase(clause, "edge", variant, 4, rows, 5, 8, vectors=vectors)
        yield from (replace(case, vectors=vectors) for case in in_use(clause, "edge", variant))


@checks(("linear.qgemv/H8", "linear.qgemm/H8"), mistakes)
def test_products_refuse(backend: Remote, case: MatrixCase) -> None:
    """Each mistake raises ArgumentError and leaves out unchanged."""
    x, matrix = inputs.random(case)
    out = np.full((len(x), case.columns), 7, np.float32)
    given = MISTAKES[case.variant](x, out) if case.vectors else MISTAKES[case.variant](x[0], out[0])
    prepared = backend.prepare(matrix)
    call = prepared.qgemm if case.vectors else prepared.qgemv
    before = np.array(given[1], copy=True)
    with refuses():
        call(*given)
    assert np.array_equal(before, np.asarray(given[1])), "WRONG: out was written although the call was refused"
