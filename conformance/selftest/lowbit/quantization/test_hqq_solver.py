"""The solver of HQQ against its two halves, one after the other, and its sum against Python's own."""

from math import fsum

import numpy as np
import pytest

from lowbit.arrays import F32
from lowbit.quantization import hqq_solver
from lowbit.quantization.hqq_solver import Solver, codes, exact_sum, residual, solve, step

SOLVERS = {
    "usual": Solver(),
    "other norm": Solver(p=1.0, beta=0.5, kappa=1.3, steps=6),
    "no step": Solver(steps=0),
}


def halves(weights: F32, scales: F32, zeros: F32, bits: int, solver: Solver) -> tuple[F32, list[float]]:
    """The zeros of the least error and the errors up to the first that does not fall, by the chapter's formulas."""
    beta, best, errors = solver.beta, zeros, list[float]()
    for number in range(solver.steps + 1):
        found = codes(weights, scales, zeros, bits)
        sums = np.add.reduce(np.abs(residual(weights, found, scales, zeros)), axis=0)
        errors.append(fsum(sums.tolist()) / weights.size)
        if number > 0 and not errors[-1] < min(errors[:-1]):
            break
        best, zeros = zeros, step(weights, found, scales, zeros, solver.p, beta).astype(np.float32)
        beta *= solver.kappa
    return best, errors


@pytest.mark.parametrize("name", SOLVERS)
@pytest.mark.parametrize("size", [1 / 64, 1.0, 1e30])
@pytest.mark.parametrize(("rows", "groups"), [(1, 1), (3, 2), (16, 7), (64, 600)])
def test_the_solver_is_its_halves(
    rows: int, groups: int, size: float, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit: with all errors below the threshold, with some above, and over the edges of parts."""
    monkeypatch.setattr(hqq_solver, "WEIGHTS_AT_A_TIME", 5000)
    rng, bits = np.random.default_rng(rows), 3
    weights = (rng.standard_t(3, (rows, groups)) * size).astype(np.float32)
    ranges = np.maximum(weights.max(axis=0) - weights.min(axis=0), np.float32(1e-6 * size))
    scales = (ranges / np.float32(2**bits - 1)).astype(np.float32)
    zeros = (-weights.min(axis=0) / scales).astype(np.float32)
    found = solve(weights, scales, zeros, bits, SOLVERS[name])
    expected, errors = halves(weights, scales, zeros, bits, SOLVERS[name])
    assert list(found.errors) == errors
    np.testing.assert_array_equal(found.zeros.view(np.uint32), expected.view(np.uint32))


def test_the_sum_is_rounded_once() -> None:
    """Numbers of the same and of very different sizes, subnormal ones among them, and none at all."""
    rng = np.random.default_rng(0)
    cases = [np.abs(rng.standard_normal(count)) * 10.0 ** rng.integers(-5, 5, count) for count in range(200)]
    cases += [np.ldexp(rng.uniform(1, 2, count), rng.integers(-1073, 1000, count)) for count in range(200)]
    cases += [np.array([1.0, 2.0**-53, 2.0**-1074]), np.array([1.0, 2.0**-53]), np.full(100_000, 0.1)]
    for numbers in cases:
        assert exact_sum(numbers) == fsum(numbers.tolist())
