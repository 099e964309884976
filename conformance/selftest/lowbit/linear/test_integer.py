"""The integer contract: segments, exact integers, the product over rationals, its bound, and declarations."""

from fractions import Fraction

import numpy as np
import pytest
from integer_casts import assert_cast_is_composition

from lowbit.backend import Backend, Capabilities, Declaration, PreparedLinear, load
from lowbit.contract.rounding import Arithmetic, one_loop
from lowbit.errors import ArgumentError, NotDeclaredError
from lowbit.linear import integer
from lowbit.linear.bounds import linear_bound
from lowbit.linear.integer import ACTIVATIONS, code_sums, qgemm_bfp, segments
from lowbit.linear.integer_bounds import integer_bound, integer_loop, segments_of_group
from lowbit.linear.linear import group_offsets, qgemm
from lowbit.quantization import bfp
from lowbit.quantization.affine import CONVENTIONS, QuantizedMatrix, dequantize, quantize
from lowbit.quantization.bfp import Blocks, Format, bfp16, cast
from lowbit.quantization.packing import unpack

LOOP = Arithmetic("integer", "float32", integer_loop(1))


def made(bits: int = 4, rows: int = 96, group_size: int = 40, convention: str = "minimum") -> QuantizedMatrix:
    weights = np.random.default_rng(1).standard_normal((rows, 7)).astype(np.float32)
    return quantize(weights, bits=bits, group_size=group_size, convention=convention)  # type: ignore[arg-type]  # a str that is a convention


def activations(rows: int = 96, format: Format = ACTIVATIONS) -> Blocks:
    return cast(np.random.default_rng(2).standard_normal((3, rows)).astype(np.float32), format)


@pytest.mark.parametrize("block", [1, 7, 16, 32, 64, 100])
@pytest.mark.parametrize("group_size", [1, 16, 24, 32, 33, 96])
def test_segments_are_a_partition(block: int, group_size: int) -> None:
    """Every row lies in one segment, that of its block and group; no two neighbours could be one; and no group has
    more of them than the bound assumes."""
    runs = list(segments(96, block, group_size))
    owner = [(run.block, run.group) for run in runs for _ in range(run.rows.stop - run.rows.start)]
    assert owner == [(row // block, row // group_size) for row in range(96)]
    assert len({(run.block, run.group) for run in runs}) == len(runs)
    most = max(sum(run.group == group for run in runs) for group in range(-(-96 // group_size)))
    assert most <= segments_of_group(block, group_size)


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("format", [ACTIVATIONS, Format(20, 6, 7), Format(3, 25, 10)], ids=lambda format: format.name)
def test_the_product_over_rationals(format: Format, convention: str) -> None:
    """The reference is the sum of products of decoded activations and weights, to some float64 roundings; its integers
    are sums of Python's own."""
    matrix, x = made(convention=convention), activations(format=format)
    codes, offsets = unpack(matrix.words, matrix.bits), group_offsets(matrix)
    y, sums = qgemm_bfp(x, matrix), code_sums(x, matrix)
    for t in range(x.rows):
        for n in range(matrix.columns):
            exact = Fraction(0)
            for k in range(matrix.rows):
                value = int(x.mantissas[t, k]) * Fraction(2) ** int(x.exponents[t, k // format.block])
                group = k // matrix.group_size
                weight = Fraction(float(matrix.scales[group, n])) * int(codes[k, n]) + Fraction(offsets[group, n])
                exact += value * weight
            assert abs(Fraction(y[t, n]) - exact) <= Fraction(2) ** -44
    for number, run in enumerate(segments(matrix.rows, format.block, matrix.group_size)):
        own = range(run.rows.start, run.rows.stop)
        assert sums.products[1, number, 2] == sum(int(x.mantissas[1, k]) * int(codes[k, 2]) for k in own)
        assert sums.mantissas[1, number] == sum(int(x.mantissas[1, k]) for k in own)
        assert (sums.exponents[1, number], sums.groups[number]) == (x.exponents[1, run.block], run.group)


def test_what_the_cast_costs() -> None:
    """A layer's results are off by 0.8 % of their size, as the chapter says, and most lie outside the bound of float32
    activations, so that a backend that answers `linear.qgemm` this way is found."""
    rng = np.random.default_rng(3)
    matrix = quantize(rng.standard_normal((512, 64)).astype(np.float32), bits=4, group_size=128)
    x = rng.standard_normal((8, 512)).astype(np.float32)
    exact, given = qgemm(x, matrix), qgemm_bfp(cast(x, ACTIVATIONS), matrix)
    assert 0.006 < np.linalg.norm(given - exact) / np.linalg.norm(exact) < 0.010
    bound = linear_bound(x[0], matrix, Arithmetic("factored", "float32", one_loop), exact[0])
    assert (np.abs(given[0] - exact[0]) > bound.limit).mean() > 0.8


def kernel(x: Blocks, matrix: QuantizedMatrix, *, scale_first: bool = False) -> np.ndarray:
    """What a kernel does, in float32: one rounding a segment, then scale and offset."""
    sums, y = code_sums(x, matrix), np.zeros((x.rows, matrix.columns), np.float32)
    scales, offsets = matrix.scales.astype(np.float32), group_offsets(matrix).astype(np.float32)
    for group in range(matrix.groups):
        acc, x_sum = np.zeros_like(y), np.zeros((x.rows, 1), np.float32)
        for run in np.flatnonzero(sums.groups == group):
            power = np.exp2(sums.exponents[:, run, None]).astype(np.float32)
            products, mantissas = sums.products[:, run].astype(np.float32), sums.mantissas[:, run, None]
            if scale_first:
                y += (power * scales[group]) * products
                y += (power * offsets[group]) * mantissas.astype(np.float32)
            else:
                acc += power * products
                x_sum += power * mantissas.astype(np.float32)
        y += scales[group] * acc
        y += offsets[group] * x_sum
    return y


@pytest.mark.parametrize("shift", [0, -115, -122], ids=["usual", "small", "subnormal"])
@pytest.mark.parametrize("scale_first", [False, True], ids=["scale-last", "scale-first"])
@pytest.mark.parametrize("bits", [4, 8])
def test_the_bound_holds_for_a_float32_kernel(bits: int, scale_first: bool, shift: int) -> None:
    """Down to where products are subnormal, in both orders of scaling; and it is used, so it is not too wide."""
    matrix, x = made(bits), activations()
    exponents = np.maximum(x.exponents + shift, -127).astype(np.int16)
    x = Blocks(x.mantissas, exponents, x.format)
    segments_in_all = 2 * len(list(segments(matrix.rows, 32, matrix.group_size))) + 3
    roundings = Arithmetic("integer", "float32", lambda rows, group_size: segments_in_all)
    exact = qgemm_bfp(x, matrix)
    bound = integer_bound(x, matrix, roundings if scale_first else LOOP, exact)
    share = np.abs(kernel(x, matrix, scale_first=scale_first) - exact) / bound.limit
    assert 0.002 < share.max() <= 1


def test_the_bound_is_narrower_than_that_of_a_decoded_product() -> None:
    """The gauge of segments lies well below that of single products, and the roundings are fewer."""
    matrix = made(rows=512, group_size=128)
    x = activations(512)
    decoded, exact = bfp.decode(x), qgemm_bfp(x, matrix)
    own = integer_bound(x, matrix, Arithmetic("integer", "float32", integer_loop(32)), exact)
    factored = linear_bound(decoded[0], matrix, Arithmetic("factored", "float32", one_loop), exact[0])
    assert (10 * own.limit[0] < factored.limit).all()


def test_the_bound_refuses() -> None:
    """A form that does not have the integers, and roundings that would let anything pass."""
    matrix, x = made(), activations()
    exact = qgemm_bfp(x, matrix)
    with pytest.raises(ArgumentError, match="form of an integer product"):
        integer_bound(x, matrix, Arithmetic("factored"), exact)
    for roundings in (0, 4000, 10**7):
        with pytest.raises(ArgumentError, match="declared roundings"):
            integer_bound(x, matrix, Arithmetic("integer", "float32", lambda k, g, n=roundings: n), exact)  # type: ignore[misc]  # a default argument binds the loop variable
    with pytest.raises(ArgumentError):
        integer_loop(0)


def test_refusals() -> None:
    """Each names the argument and what is allowed."""
    matrix, x = made(), activations()
    with pytest.raises(ArgumentError, match=r"x is an ndarray; allowed: a lowbit.quantization.bfp.Blocks"):
        qgemm_bfp(np.zeros((1, 96), np.float32), matrix)  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(ArgumentError, match="elements of a row of x is 64; allowed: 96"):
        qgemm_bfp(activations(64), matrix)
    rows = 2**21 + 2**16
    wide = Blocks(np.zeros((1, rows), np.int32), np.zeros((1, 1), np.int16), Format(rows, 25))
    with pytest.raises(ArgumentError, match=r"a block of x is 2162688 products .*; allowed: sums below 2\^53"):
        integer.check_activations(wide, rows)
    prepared = load("numpy").prepare(matrix)
    with pytest.raises(ArgumentError, match="shape of out"):
        prepared.qgemm_bfp(x, np.zeros((3, 8), np.float32))
    with pytest.raises(ArgumentError, match=r"x\[1, 5\] is nan"):
        spoilt = np.zeros((2, 96), np.float32)
        spoilt[1, 5] = np.nan
        prepared.qgemm_cast(spoilt)
    with pytest.raises(ArgumentError, match="overlapping"):
        both = np.zeros((1, 103), np.float32)
        prepared.qgemm_cast(both[:, :96].reshape(1, 96), both[:, 90:97].reshape(1, 7))


@pytest.mark.parametrize("name", ["reference", "numpy"])
def test_cast_and_product_in_one(name: str) -> None:
    """``qgemm_cast`` gives the bits of the cast and the product one after the other."""
    assert assert_cast_is_composition(load(name)) == 24 * 8


class Narrow(Backend):
    """Declares the integer product for 4 bits and one format, and the float32 one for 2 bits."""

    name = "narrow"

    def capabilities(self) -> Capabilities:
        integers = Declaration({"bits": (4,), "block": (32, 64), "mantissa": (8,)}, LOOP)
        floats = Declaration({"bits": (2,)}, Arithmetic("factored", "float32", one_loop))
        return Capabilities({"linear.qgemm_bfp": integers, "linear.qgemv": floats})

    def _prepare(self, matrix: QuantizedMatrix) -> PreparedLinear:
        return NarrowLinear(self.name, matrix.rows, matrix.columns, matrix.nbytes)


class NarrowLinear(PreparedLinear):
    def _qgemm_bfp(self, x: Blocks, out: np.ndarray) -> None:
        out[:] = 1

    def _qgemv(self, x: np.ndarray, out: np.ndarray) -> None:
        out[:] = 2


def test_each_product_is_declared_by_itself() -> None:
    """A matrix is prepared for what is declared of it; the rest is refused by name when it is asked for."""
    backend, x = Narrow(), np.zeros(96, np.float32)
    four, two = backend.prepare(made(4)), backend.prepare(made(2))
    assert four.qgemm_bfp(activations())[0, 0] == 1 and two.qgemv(x)[0] == 2
    assert backend.run("linear.qgemm_bfp", activations(), made(4))[0, 0] == 1
    with pytest.raises(NotDeclaredError, match=r"linear.qgemv for bits 4"):
        four.qgemv(x)
    with pytest.raises(NotDeclaredError, match=r"linear.qgemm_bfp for bits 2"):
        two.qgemm_bfp(activations())
    with pytest.raises(NotDeclaredError, match=r"linear.qgemm_bfp for bits 2"):
        two.qgemm_cast(x[None])
    with pytest.raises(NotDeclaredError, match=r"linear.qgemv for bits 8"):
        backend.prepare(made(8))
    with pytest.raises(NotDeclaredError, match=r"linear.qgemm"):
        four.qgemm(x[None])


def test_formats_are_declared_too() -> None:
    """The format of activations is known with the call, and refused there: prepared or not."""
    prepared = Narrow().prepare(made(4))
    assert prepared.qgemm_bfp(activations(format=bfp16(64)))[0, 0] == 1
    for format, text in ((bfp16(16), "block 16"), (Format(32, 4), "mantissa 4")):
        with pytest.raises(NotDeclaredError, match=text):
            prepared.qgemm_bfp(activations(format=format))
        with pytest.raises(NotDeclaredError, match=text):
            Narrow().run("linear.qgemm_bfp", activations(format=format), made(4))


def test_one_mantissa_gives_a_row_of_weights() -> None:
    """A block with a single 1 is that row of the dequantised matrix, times a power of two."""
    matrix = made(convention="zero_point")
    mantissas = np.eye(96, dtype=np.int8)
    x = Blocks(mantissas, np.full((96, 3), -4, np.int16), ACTIVATIONS)
    np.testing.assert_allclose(qgemm_bfp(x, matrix), dequantize(matrix) / 16, rtol=2**-23)
