"""Checks of `gptq.hessian`, `gptq.factor` and `gptq.targets`: equal on the lattice, within the bounds elsewhere.

What a rounding depends on is supplied by the suite, so a difference of one rounding never changes a later case.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from lowbit.arrays import F32, F64
from lowbit.quantization import gptq
from lowbit.quantization.gptq_bounds import factor_bound
from lowbit_conformance.isolation.remote import Remote
from lowbit_conformance.suite.bounded import arithmetic, assert_bounded, assert_on_lattice, limit_of
from lowbit_conformance.suite.cases import Case
from lowbit_conformance.suite.compare import assert_array, assert_equal_values, assert_exact, assert_within, refuses
from lowbit_conformance.suite.marking import Record, Settings, checks, grid


@dataclass(frozen=True)
class LayerCase(Case):
    """A layer and its calibration inputs.

    Attributes:
        rows: K.
        columns: N, or T for the Hessian.
        dtype: of a given Hessian.
    """

    rows: int
    columns: int
    dtype: str = "float32"

    @property
    def label(self) -> str:
        return f"{self.rows}x{self.columns}-{self.dtype}"


SHAPES = ((1, 1), (2, 3), (3, 2), (7, 9), (8, 1), (16, 33), (33, 16), (64, 64), (100, 7))
LARGE = ((20, 300), (150, 9))  # more than the 128 rows or columns that kernels process at once


def shapes(clause: str, tier: str, settings: Settings, variants: tuple[str, ...] = ("",)) -> Iterator[LayerCase]:
    for variant in variants:
        for rows, columns in SHAPES:
            yield LayerCase(clause, tier, variant, rows, columns)
        for rows, columns in LARGE:
            yield LayerCase(clause, tier, f"{variant}-large".lstrip("-"), rows, columns)
        for seed in settings.seeds:
            rng = np.random.Generator(np.random.PCG64(seed))
            rows, columns = (int(size) for size in rng.integers(1, 128, 2))
            yield LayerCase(clause, tier, f"{variant}-drawn".lstrip("-"), rows, columns, seed=seed)


def lattice_cases(clause: str, settings: Settings) -> Iterator[LayerCase]:
    yield from shapes(clause, "lattice", settings)


def random_cases(clause: str, settings: Settings) -> Iterator[LayerCase]:
    yield from shapes(clause, "random", settings, ("", "correlated"))


def run(backend: Remote, case: LayerCase, *arrays: F32 | F64) -> F32:
    """The result as K × K for the Hessian and its factor, as K × N for targets."""
    __tracebackhide__ = True
    shape = (case.rows, case.columns if case.operation == "gptq.targets" else case.rows)
    return assert_array("the result", backend.run(case.operation, *arrays), np.float32, shape)


# **Inputs.**


def calibration(case: LayerCase) -> F32:
    """T × K inputs with very different channels; *correlated* inputs follow a few common factors."""
    rng = case.generator()
    x = rng.normal(size=(case.columns, case.rows))
    if "correlated" in case.variant:
        x = 0.1 * x + rng.normal(size=(case.columns, 3)) @ rng.normal(size=(3, case.rows))
    return (x * np.exp(rng.normal(0, 1, case.rows))).astype(np.float32)


def exact_factor(case: LayerCase) -> F32:
    """An upper triangular factor of small integers, with powers of two on the diagonal, so that quotients are exact."""
    rng = case.generator()
    integers = np.triu(rng.integers(-3, 4, (case.rows, case.rows)), 1)
    return (integers + np.diag(2.0 ** rng.integers(0, 3, case.rows))).astype(np.float32)


def exact_product(case: LayerCase) -> F32:
    """The product of this factor with its transpose."""
    factor = exact_factor(case).astype(np.float64)
    return np.ascontiguousarray(factor @ factor.T, np.float32)


def positive_definite(case: LayerCase) -> F32 | F64:
    """A typical damped Hessian, in the case's dtype."""
    return gptq.damped(gptq.hessian(calibration(case)), damping=0.01).astype(case.dtype)


# **The Hessian.**


def hessian_cases(clause: str, settings: Settings) -> Iterator[LayerCase]:
    """The lattice, and as many inputs as in a calibration."""
    cases = list(lattice_cases(clause, settings))
    yield from cases
    yield replace(cases[0], variant="many-inputs", rows=8, columns=5000)


@checks("gptq.hessian/C1", hessian_cases)
def test_hessian_on_the_lattice(backend: Remote, case: LayerCase) -> None:
    """Small integers have an exact Hessian."""
    x = case.generator().integers(-9, 10, (case.columns, case.rows)).astype(np.float32)
    assert_on_lattice(backend, case, x)


@checks("gptq.hessian/C2", random_cases)
def test_hessian_within_the_bound(backend: Remote, case: LayerCase, record_property: Record) -> None:
    """Inputs with very different channels, correlated or not, stay within the bound."""
    assert_bounded(backend, case, record_property, calibration(case))


# **The factor.**


def small_lattice(clause: str, settings: Settings) -> Iterator[LayerCase]:
    """Shapes for which every partial sum of the factorisation is an integer below 2^24."""
    yield from (case for case in lattice_cases(clause, settings) if case.rows <= 150)


@checks("gptq.factor/C1", small_lattice)
def test_factor_on_the_lattice(backend: Remote, case: LayerCase) -> None:
    """The factor of the product of an exact factor with its transpose is that factor."""
    given = run(backend, case, exact_product(case))
    assert_equal_values(given, exact_factor(case).astype(np.float64))


def wide_lattice(clause: str, settings: Settings) -> Iterator[LayerCase]:
    """The same shapes for a Hessian in float64, whose elements have as many bits as the declared accumulator."""
    for case in small_lattice(clause, settings):
        yield replace(case, variant=f"wide-{case.variant}".rstrip("-"), dtype="float64")


def wide_factor(backend: Remote, case: LayerCase) -> F64:
    """M with 18-bit elements if the accumulator holds their products; generated again for the judge."""
    factor = exact_factor(case)
    if arithmetic(backend, case).accumulator == "float64":
        wide = np.triu(case.generator().integers(-(2**18), 2**18, factor.shape), 1)
        factor = (wide + np.diag(factor.diagonal())).astype(np.float32)
    return factor.astype(np.float64)


def own_product(factor: F64) -> F64:
    return np.ascontiguousarray(factor @ factor.T)


@checks("gptq.factor/C1", wide_lattice)
def test_factor_of_wide_numbers(backend: Remote, case: LayerCase) -> None:
    """18-bit elements of M, if the accumulator holds their products, detect narrower arithmetic."""
    given = run(backend, case, own_product(wide_factor(backend, case)))
    assert_equal_values(given, wide_factor(backend, case))


def both_dtypes(clause: str, settings: Settings) -> Iterator[LayerCase]:
    """Random layers in float32, then in float64, which is a separate entry point of kernels."""
    cases = list(random_cases(clause, settings))
    yield from cases
    yield from (replace(case, dtype="float64") for case in cases if not case.seed)


@checks("gptq.factor/C2", both_dtypes)
def test_factor_within_the_bound(backend: Remote, case: LayerCase, record_property: Record) -> None:
    """M M^T equals the damped Hessian of calibration inputs within the bound."""
    assert_factor(backend, case, positive_definite(case), record_property)


def assert_factor(backend: Remote, case: LayerCase, hessian: F32 | F64, record_property: Record) -> None:
    __tracebackhide__ = True
    given = run(backend, case, hessian)
    square = given.astype(np.float64) @ given.T.astype(np.float64)
    bound = limit_of(lambda: factor_bound(hessian, arithmetic(backend, case), given))
    record_property("share", assert_within(square, hessian.astype(np.float64), bound, np.float64))


def fading(case: LayerCase) -> F32 | F64:
    """A Hessian whose factor has ones on its diagonal and elements of 2^-13 beside them.

    Each subtracts 2^-26 from a pivot of 1, which float32 rounds back to 1. One is less than a rounding; a row has many,
    and all have the same sign.
    """
    factor = np.eye(case.rows) + np.triu(np.full((case.rows, case.rows), 2.0**-13), 1)
    wide = factor @ factor.T
    np.fill_diagonal(wide, 1)
    return np.ascontiguousarray(wide, case.dtype)


FADING = product((40, 100, 150), [1], ("float32", "float64"))


@checks("gptq.factor/C2", grid(LayerCase, "edge", ["fading"], *FADING))
def test_factor_of_what_fades(backend: Remote, case: LayerCase, record_property: Record) -> None:
    """Many products, each too small to change a float32 pivot, stay within the bound of the declared accumulator."""
    assert_factor(backend, case, fading(case), record_property)


@checks("gptq.factor/C3", random_cases)
def test_factor_is_upper_triangular(backend: Remote, case: LayerCase) -> None:
    """The factor has zeros below its diagonal and a positive diagonal."""
    given = run(backend, case, positive_definite(case))
    below = np.tril_indices(case.rows, -1)
    assert_exact("the part below the diagonal", np.abs(given[below]), np.zeros(len(below[0]), np.float32))
    assert (given.diagonal() > 0).all(), "WRONG: the diagonal of M is not positive"


HESSIAN_MISTAKES: dict[str, Callable[[F32 | F64], object]] = {
    "nan": lambda h: h * np.float32(np.nan),
    "infinity": lambda h: np.where(h == h.max(), np.float32(np.inf), h),
    "indefinite": lambda h: h - np.float32(2 * h.max()) * np.eye(len(h), dtype=np.float32),
    "zero": np.zeros_like,
    "asymmetric": lambda h: h + np.triu(np.ones_like(h), 1),
    "oblong": lambda h: np.ascontiguousarray(h[:, :-1]),
    "int64": lambda h: h.astype(np.int64),
    "strided": lambda h: np.repeat(h, 2, axis=1)[:, ::2],
    "vector": lambda h: h[0],
}


@checks("gptq.factor/C4", grid(LayerCase, "edge", HESSIAN_MISTAKES, (6, 5)))
def test_factor_refuses(backend: Remote, case: LayerCase) -> None:
    """Each mistake raises ArgumentError, including a matrix that turns out to be indefinite."""
    with refuses():
        backend.run("gptq.factor", HESSIAN_MISTAKES[case.variant](positive_definite(case)))


# **The targets.**


def layer(case: LayerCase) -> tuple[F32, F32, F32]:
    """Weights, the factor of a damped Hessian in float32, and values that are the weights rounded to steps of 0.1."""
    rng = case.generator()
    weights = rng.normal(size=(case.rows, case.columns)).astype(np.float32)
    values = (np.rint(weights * 10) / 10).astype(np.float32)
    return weights, gptq.factor(positive_definite(case)).astype(np.float32), values


@checks("gptq.targets/C1", lattice_cases)
def test_targets_on_the_lattice(backend: Remote, case: LayerCase) -> None:
    """Integers, quarters and a factor with powers of two on its diagonal give exact targets."""
    rng = case.generator()
    shape = (case.rows, case.columns)
    weights = (rng.integers(-64, 65, shape) / 4).astype(np.float32)
    values = rng.integers(-16, 17, shape).astype(np.float32)
    assert_on_lattice(backend, case, weights, exact_factor(case), values)


@checks("gptq.targets/C2", random_cases)
def test_targets_within_the_bound(backend: Remote, case: LayerCase, record_property: Record) -> None:
    """Weights and values of a layer with the factor of its own Hessian stay within the bound."""
    assert_bounded(backend, case, record_property, *layer(case))


@checks("gptq.targets/C3", random_cases)
def test_targets_look_back_only(backend: Remote, case: LayerCase) -> None:
    """Changing values from the middle row on does not change the targets up to that row."""
    weights, triangle, values = layer(case)
    middle = case.rows // 2
    before = run(backend, case, weights, triangle, values)
    changed = values.copy()
    changed[middle:] += 1
    after = run(backend, case, weights, triangle, changed)
    assert_exact("targets of the rows before the change", after[: middle + 1], before[: middle + 1])


LAYER_MISTAKES: dict[str, Callable[[F32, F32, F32], tuple[F32, F32, F32]]] = {
    "lower": lambda w, m, v: (w, np.ascontiguousarray(m.T), v),
    "negative": lambda w, m, v: (w, -m, v),
}


@checks("gptq.targets/H8", grid(LayerCase, "edge", LAYER_MISTAKES, (6, 5)))
def test_targets_refuse(backend: Remote, case: LayerCase) -> None:
    """A factor that is not upper triangular with a positive diagonal raises ArgumentError."""
    with refuses():
        backend.run("gptq.targets", *LAYER_MISTAKES[case.variant](*layer(case)))
