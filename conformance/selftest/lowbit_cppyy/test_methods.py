"""The methods of the kernels: each is a transformation of the plain one, `shift`, equal in the sense that it states."""

import numpy as np
import pytest
from kernel_runs import Compiled, assert_same_bits, interpreted, some_blocks, some_matrix, some_rows

from lowbit.arrays import F32
from lowbit.contract.rounding import Arithmetic
from lowbit.linear.bounds import linear_bound
from lowbit.linear.linear import qgemv
from lowbit.quantization.affine import CONVENTIONS, Convention, QuantizedMatrix
from lowbit.quantization.packing import BITS, CODES_PER_UNIT
from lowbit_cppyy import CppyyBackend
from lowbit_cppyy.backend import roundings
from lowbit_cppyy.codegen.isa import PLAIN
from lowbit_cppyy.codegen.unpacking import exact_range, lowest_bit, power
from lowbit_cppyy.recipe import Method, Recipe
from lowbit_cppyy.runtime.compiler import INEXACT

MASKED: tuple[Method, ...] = ("fold", "subnormal")
"""The methods with powers of two in the activations."""


def extremes(method: Method) -> tuple[np.float32, np.float32]:
    """The least and the largest activation for which the powers of two of a method are exact."""
    least, beyond = exact_range(method)
    return np.float32(least), np.nextafter(np.float32(beyond), np.float32(0))


def case(bits: int, convention: Convention = "minimum") -> QuantizedMatrix:
    return some_matrix(bits, 64, 19, 40, convention)


def run(matrix: QuantizedMatrix, x: F32, method: Method, **choices: int) -> F32:
    """By the interpreter, in long registers; with chains such that every method adds a code to the same one."""
    sizes = {"registers": 1, "panel": 32, "chains": 2, **choices}
    recipe = Recipe(matrix.bits, "float32", matrix.convention, method, **sizes)
    return interpreted(matrix, x, recipe, 16)


# **fold** and **subnormal**: codes masked in place.


@pytest.mark.parametrize("bits", BITS)
def test_powers_of_two_never_leave_the_range(bits: int) -> None:
    """A code in place is below 2^31 and converts as a positive integer, or below 2^24 and is the bits of a float. The
    factors of the least and the largest activation for which a method is exact give normal, finite numbers."""
    codes = range(CODES_PER_UNIT[bits])
    for method, width in zip(MASKED, (31, 24), strict=True):
        recipe = Recipe(bits, "float32", "minimum", method)
        lowest = [lowest_bit(recipe, code) for code in codes]
        assert all((2**bits - 1) * 2**bit < 2**width for bit in lowest)
        powers = [power(method, bit) for bit in lowest]
        least, most = extremes(method)
        assert np.ldexp(least, -max(powers)) >= np.finfo(np.float32).tiny
        assert np.isfinite(np.ldexp(most, -min(powers)))
    assert np.ldexp(extremes("fold")[0], -28) == np.finfo(np.float32).tiny
    assert all(lowest_bit(Recipe(bits, "float32", "minimum", "shift"), code) == 0 for code in codes)


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("method", MASKED)
def test_masked_codes_have_the_bits_of_shift(method: Method, bits: int, convention: Convention) -> None:
    """With random activations, with the largest and the least that count, with both zeros."""
    matrix, (least, most) = case(bits, convention), extremes(method)
    for x in (some_rows(1, 64), np.resize(np.array([most, least, -least, 0.0, -0.0, 1.0], np.float32), (1, 64))):
        assert_same_bits(run(matrix, x, method), run(matrix, x, "shift"))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("method", MASKED)
def test_small_sums_keep_their_bits(method: Method, bits: int) -> None:
    """Activations near the least one that cancel: sums of all sizes below it are exact, as they are by `shift`."""
    matrix, (least, _) = case(bits), extremes(method)
    random = np.random.default_rng(bits)
    for _ in range(20):
        x = (least * random.uniform(1, 4, (1, 64)) * random.choice((-1, 1), (1, 64))).astype(np.float32)
        x[:, 1::2] = -x[:, ::2] * np.float32(1 + 2**-20)
        assert_same_bits(run(matrix, x, method), run(matrix, x, "shift"))


@pytest.mark.parametrize("bits", BITS)
def test_infinity_and_nan_are_passed_on(bits: int) -> None:
    """`fold` gives what `shift` gives; `subnormal` is not called with them."""
    matrix = case(bits)
    for special in (np.inf, np.nan):
        x = some_rows(1, 64)
        x[0, 41] = special
        assert_same_bits(run(matrix, x, "fold"), run(matrix, x, "shift"))
        assert not np.isfinite(run(matrix, x, "fold")).any()


@pytest.mark.parametrize("method", MASKED)
def test_beyond_the_extremes_a_method_would_round(method: Method) -> None:
    """So the status `INEXACT` is needed: just below the least activation, some 2-bit code loses its last bit to the
    power of two; the next one after the largest becomes infinite."""
    matrix, (least, _) = case(2), extremes(method)
    x = np.full((1, 64), np.nextafter(least, np.float32(0)), np.float32)
    assert (run(matrix, x, method) != run(matrix, x, "shift")).any()
    if method == "subnormal":
        x = np.full((1, 64), exact_range(method)[1], np.float32)
        assert not np.isfinite(run(matrix, x, method)).any() and np.isfinite(run(matrix, x, "shift")).all()


@pytest.mark.parametrize("method", MASKED)
def test_a_call_refuses_exactly_what_is_inexact(method: Method) -> None:
    """The status is `INEXACT` for one such activation among others, and only then; nothing is written."""
    matrix, (least, most) = case(2), extremes(method)
    kernel = Compiled(matrix, Recipe(2, "float32", "minimum", method, rows=4, registers=1), PLAIN)
    below, beyond = np.nextafter(least, np.float32(0)), np.float32(exact_range(method)[1])
    refused = (below, np.finfo(np.float32).tiny, 2.0**-149, beyond, np.inf, np.nan)
    for value, status in (*((each, INEXACT) for each in refused), *((each, 0) for each in (least, most, 0.0, 1.0))):
        for sign in (1, -1):
            x, out = some_rows(3, 64), np.full((3, 19), 7, np.float32)
            x[2, 63] = sign * value
            assert kernel.status(x, out) == status
            assert (out == 7).all() == (status == INEXACT)
    shift = Compiled(matrix, Recipe(2, "float32", "minimum", "shift", rows=4, registers=1), PLAIN)
    for value in refused:
        assert shift.status(np.full((3, 64), value, np.float32), np.empty((3, 19), np.float32)) == 0


@pytest.mark.parametrize("bits", BITS)
def test_tiny_activations_are_multiplied_as_well_as_others(bits: int) -> None:
    """Through the backend: subnormal ones, a single one among large ones, and rows beside them keep their bits."""
    matrix = case(bits)
    with CppyyBackend("plain", threads=1) as backend:
        prepared = backend.prepare(matrix)
        x = some_rows(3, 64)
        whole = prepared.qgemm(x)
        x[1, 5] = 2.0**-140
        beside = prepared.qgemm(x)
        assert_same_bits(beside[[0, 2]], whole[[0, 2]])
        for row in (x[1], x[1] * np.float32(2.0**-130), np.full(64, 2.0**-149, np.float32), 0 * x[1]):
            for y in (prepared.qgemv(row), prepared.qgemm(row[None])[0]):
                exact = qgemv(row, matrix)
                bound = linear_bound(row, matrix, Arithmetic("factored", "float32", roundings), exact)
                assert (np.abs(y - exact) <= bound.limit).all()


# **table**, and the integer methods: to the bit.


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_table_has_the_bits_of_shift(convention: Convention) -> None:
    """For one row and for three, with infinity and NaN too."""
    matrix = case(4, convention)
    for rows in (1, 3):
        x = some_rows(rows, 64)
        assert_same_bits(run(matrix, x, "table", rows=rows), run(matrix, x, "shift", rows=rows))
        x[0, 7], x[-1, 9] = np.inf, np.nan
        assert_same_bits(run(matrix, x, "table", rows=rows), run(matrix, x, "shift", rows=rows))


@pytest.mark.parametrize("bits", [bits for bits in BITS if bits < 8])
def test_pairs_have_the_bits_of_dot4(bits: int) -> None:
    """Groups that cut blocks and units, the largest mantissas in a block of the largest codes among them."""
    matrix, x = case(bits), some_blocks(2, 64)
    matrix.words[: matrix.words.shape[0] // 2, 0] = 2**32 - 1
    x.mantissas[0, :32] = 127
    answers = [
        interpreted(matrix, x, Recipe(bits, "float32", "minimum", method, rows=2, registers=1, panel=32), 8)
        for method in ("dot4", "pairs")
    ]
    assert_same_bits(*answers)


def test_products_of_eight_bits_are_kept_out_of_sixteen() -> None:
    """`pairs` is refused for them: two products of the largest exceed 2^15, and saturate."""
    assert 2 * 255 * 127 > 2**15 - 1 >= 8 * 2 * 15 * 127
    assert Recipe(8, "float32", "minimum", "pairs").fits(8) and not Recipe(4, "float32", "minimum", "pairs").fits(8)


# **sums**: exactly on the lattice, elsewhere within the declared bound.


@pytest.mark.parametrize("bits", (2, 3, 4))
def test_sums_are_equal_to_shift_on_the_lattice(bits: int) -> None:
    """Small integers: no sum rounds, so whatever is summed in whatever order is equal to the bit."""
    for convention in CONVENTIONS:
        matrix, x = some_matrix(bits, 64, 19, 40, convention, lattice=True), some_rows(1, 64, lattice=True)
        np.testing.assert_array_equal(run(matrix, x, "sums"), run(matrix, x, "shift"))


@pytest.mark.parametrize("bits", (2, 3, 4))
def test_sums_keep_the_declared_bound(bits: int) -> None:
    """Also where activations cancel: one large pair of opposite ones in every four."""
    matrix = case(bits)
    for x in (some_rows(1, 64), some_rows(1, 64) + np.resize(np.array([1e4, -1e4, 0, 0], np.float32), (1, 64))):
        exact = qgemv(x[0], matrix)
        bound = linear_bound(x[0], matrix, Arithmetic("factored", "float32", roundings), exact)
        assert (np.abs(run(matrix, x, "sums")[0] - exact) <= bound.limit).all()
