"""The bits of a result depend on its row of x and the matrix, and neither on other rows nor on threads."""

import numpy as np
import pytest
from kernel_runs import HERE, assert_same_bits, some_blocks, some_matrix, some_rows

from lowbit.arrays import F32
from lowbit.linear.integer import ACTIVATIONS
from lowbit.quantization.bfp import Blocks, cast
from lowbit.quantization.packing import BITS
from lowbit_cppyy import CppyyBackend
from lowbit_cppyy.codegen.isa import InstructionSet
from lowbit_cppyy.tuning import outcomes

COUNTS = (*range(1, 21), *range(63, 71))


@pytest.fixture(autouse=True)
def nothing_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels do not depend on searches on this machine."""
    monkeypatch.setenv(outcomes.VARIABLE, "off")


def some_of(x: Blocks, rows: slice) -> Blocks:
    return Blocks(x.mantissas[rows].copy(), x.exponents[rows].copy(), x.format)


@pytest.mark.parametrize("table", HERE, ids=lambda table: table.name)
def test_a_row_has_the_same_bits_alone_and_among_others(table: InstructionSet) -> None:
    """For one to seventy rows, with kernels for few and for many of them, and K of two blocks of a panel. The rows
    beside it may be anything: infinite, NaN, tiny, huge."""
    matrix = some_matrix(BITS[HERE.index(table) % len(BITS)], 2048, 20, 100, "zero_point")
    x, blocks = some_rows(70, 2048), some_blocks(70, 2048)
    with CppyyBackend(table.name, threads=1) as backend:
        prepared = backend.prepare(matrix)
        alone = np.concatenate([prepared.qgemm(row[None]) for row in x])
        alone_in_blocks = np.concatenate([prepared.qgemm_bfp(some_of(blocks, slice(t, t + 1))) for t in range(70)])
        for count in COUNTS:
            assert_same_bits(prepared.qgemm(x[:count]), alone[:count])
            assert_same_bits(prepared.qgemm_bfp(some_of(blocks, slice(count))), alone_in_blocks[:count])
        beside = x.copy()
        beside[1::2] = np.resize(np.array([np.inf, np.nan, 2.0**-140, 3e38, 0], np.float32), beside[1::2].shape)
        for count in (3, 70):
            assert_same_bits(prepared.qgemm(beside[:count])[::2], alone[:count:2])


@pytest.mark.parametrize(
    ("table", "bits"), [(HERE[0], 2), (HERE[-1], 4)], ids=lambda value: getattr(value, "name", value)
)
def test_results_do_not_depend_on_the_number_of_threads(table: InstructionSet, bits: int) -> None:
    """All four products, large enough for threads to be woken."""
    matrix = some_matrix(bits, 512, 5000, 100)
    x, blocks = some_rows(9, 512), some_blocks(9, 512)
    results = set()
    for threads in (1, 2, 5):
        with CppyyBackend(table.name, threads=threads) as backend:
            prepared = backend.prepare(matrix)
            answers = [prepared.qgemv(x[0]), prepared.qgemm(x), prepared.qgemm_bfp(blocks), prepared.qgemm_cast(x)]
            results.add(b"".join(answer.tobytes() for answer in answers))
    assert len(results) == 1


def extreme_rows() -> F32:
    """A row of 64 for every exponent of float32, with difficult numbers for a cast: ties, saturation, both zeros."""
    mantissas = np.array([1, 1.5, 127 / 64, 127.5 / 64, 127.75 / 64, 2 - 2.0**-23, -1, -1.9921875, 0, -0.0], np.float64)
    steps = np.array([0.5, 1.5, 2.5, 126.5, -0.5, -2.5, 1, 0.25]) / 64
    row = np.resize(np.concatenate([mantissas, steps]), 64)
    row[32:] *= np.resize([1, 2.0**-8, 2.0**-30], 32)
    with np.errstate(over="ignore"):
        x = np.ldexp(row, np.arange(-149, 128)[:, None]).astype(np.float32)
    return np.where(np.isfinite(x), x, np.finfo(np.float32).max)


@pytest.mark.parametrize("table", (HERE[0], HERE[-1]), ids=lambda table: table.name)
def test_cast_and_product_are_the_two_one_by_one(table: InstructionSet) -> None:
    """From subnormal numbers to the largest, together and row by row, to the bit."""
    x = extreme_rows()
    with CppyyBackend(table.name, threads=1) as backend:
        prepared = backend.prepare(some_matrix(4, 64, 19, 40))
        expected = prepared.qgemm_bfp(cast(x, ACTIVATIONS))
        assert_same_bits(prepared.qgemm_cast(x), expected)
        for t in (0, 1, 30, 148, len(x) - 1):
            assert_same_bits(prepared.qgemm_cast(x[t : t + 1]), prepared.qgemm_bfp(cast(x[t : t + 1], ACTIVATIONS)))
