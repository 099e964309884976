"""The authors' recipes of HQQ against what their package wrote, and each of the four choices by itself."""

from pathlib import Path

import numpy as np
import pytest

from lowbit.arrays import F32, Array
from lowbit.errors import ArgumentError
from lowbit.quantization.hqq import AXES, Axis, dequantize, quantize, to_blocks
from lowbit.quantization.hqq_numbers import EightBit, decode
from lowbit.quantization.hqq_published import MOST_INVERSE, RECIPES, VERSIONS, Recipe, inverse_grid, last_zeros
from lowbit.quantization.hqq_solver import Solver, solve
from lowbit.quantization.packing import BITS, unpack

GROUP, META_GROUP = 16, 32
PUBLISHED = [recipe for recipe in RECIPES if recipe != "ruled"]
OWN_NAMES = {"hqq-0.1.1": "0.1.1", "hqq-0.2.8": "0.2.8"}


@pytest.fixture(scope="module")
def theirs() -> dict[str, Array]:
    """What data/write.py kept: weights K × N, and codes, scales and zeros of the package."""
    return dict(np.load(Path(__file__).with_name("data") / "hqq.npz"))


def zero_bound(blocks: F32, codes: Array, scales: F32, zeros: F32) -> Array:
    """How far the float32 mean of a group may be from the exact one, in any order, where no error survives shrinking.

    A mean of g terms has g − 1 additions and a division, each with a rounding; ours has one. Terms are
    ``q − w/s``, of which each is given.
    """
    terms = codes + np.abs(blocks.astype(np.float64)) / scales
    unit = 2.0**-24
    relative = len(blocks) * unit / (1 - len(blocks) * unit) + unit
    bound: Array = relative * terms.mean(axis=0)
    return bound


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("size", [1, 64])
@pytest.mark.parametrize("recipe", PUBLISHED)
def test_codes_are_the_packages(recipe: Recipe, size: int, bits: int, axis: Axis, theirs: dict[str, Array]) -> None:
    """Every code and, to the bit, every scale; zeros within the rounding of their sums, where these are all there is.

    At the smaller size of the weights (divided by 64) no error reaches the threshold of the shrinking.
    """
    weights = np.divide(theirs["weights"], size, dtype=np.float32)
    found = quantize(weights, bits=bits, group_size=GROUP, axis=axis, recipe=recipe)
    name = f"{OWN_NAMES[recipe]}-{size}-{bits}-{axis}"
    codes = to_blocks(unpack(found.words, bits), GROUP, axis)
    np.testing.assert_array_equal(codes, theirs[f"{name}-codes"])
    np.testing.assert_array_equal(found.scales, theirs[f"{name}-scales"])
    if size == 64:
        blocks = to_blocks(weights, GROUP, axis)
        bound = zero_bound(blocks, codes, decode(found.scales), decode(found.zeros))
        assert (np.abs(decode(found.zeros) - theirs[f"{name}-zeros"]) <= 2 * bound).all()


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("recipe", PUBLISHED)
def test_scales_and_zeros_in_8_bits_are_the_packages(recipe: Recipe, axis: Axis, theirs: dict[str, Array]) -> None:
    """Their codes, and the scales and zeros of those, as HQQLinear quantises them; the codes of the weights stay."""
    weights = np.divide(theirs["weights"], 64, dtype=np.float32)
    plain, found = (
        quantize(weights, bits=2, group_size=GROUP, axis=axis, meta_group=meta_group, recipe=recipe)
        for meta_group in (None, META_GROUP)
    )
    np.testing.assert_array_equal(found.words, plain.words)
    for part in ("scales", "zeros"):
        numbers = getattr(found, part)
        assert isinstance(numbers, EightBit)
        name = f"{OWN_NAMES[recipe]}-64-2-{axis}-eight-{part}"
        np.testing.assert_array_equal(numbers.codes, theirs[f"{name}-codes"])
        np.testing.assert_allclose(numbers.scales, theirs[f"{name}-scales"], rtol=1e-6)
        np.testing.assert_allclose(numbers.zeros, theirs[f"{name}-zeros"], rtol=1e-6)


def test_the_inverse_is_bounded_and_small_ranges_are_guarded() -> None:
    """A range of 7e-5 at 8 bits: 20000 in 0.1.1, so that codes end at 1; 1 in 0.2.8, so that all codes are alike."""
    blocks = np.array([[0.0], [3e-5], [7e-5]], np.float32)
    inverses = [float(inverse_grid(blocks, 8, VERSIONS[recipe])[0][0]) for recipe in PUBLISHED]
    assert inverses == [float(MOST_INVERSE), 1.0]
    column = np.resize(blocks, (8, 1))
    codes = [unpack(quantize(column, bits=8, group_size=8, recipe=recipe).words, 8) for recipe in RECIPES]
    assert codes[0].max() == 255 and codes[1].max() == 1 and codes[2].max() == 0


def test_the_last_zeros_are_kept_and_not_the_best() -> None:
    """The step that does not lower the error counts: its zeros are not those of the least error."""
    rng = np.random.Generator(np.random.PCG64(4))
    blocks = rng.standard_t(4, size=(32, 4)).astype(np.float32) / np.float32(64)
    version = VERSIONS["hqq-0.1.1"]
    inverse, zeros = inverse_grid(blocks, 2, version)
    last = last_zeros(blocks, inverse, zeros, 2, Solver(), version)
    best = solve(blocks, np.reciprocal(inverse), zeros, 2)
    assert len(best.errors) < 21  # it stopped because the error rose
    assert np.abs(last - best.zeros).max() > 1e-3


def test_the_penalty_grows_only_in_the_older_version() -> None:
    """With errors beyond the threshold the two versions find other zeros; with κ = 1 they find the same."""
    rng = np.random.Generator(np.random.PCG64(4))
    blocks = (4 * rng.standard_t(4, size=(16, 8))).astype(np.float32)
    versions = [VERSIONS[recipe] for recipe in PUBLISHED]
    inverse, zeros = inverse_grid(blocks, 2, versions[0])
    for kappa, same in ((1.5, False), (1.0, True)):
        solver = Solver(kappa=kappa, steps=3)
        older, newer = (last_zeros(blocks, inverse, zeros, 2, solver, version) for version in versions)
        assert np.array_equal(older, newer) == same


def test_codes_are_found_before_scales_are_stored() -> None:
    """In float16 the authors' codes are those of float32, and some are not the nearest to what is stored."""
    rng = np.random.Generator(np.random.PCG64(5))
    weights = rng.standard_t(4, size=(64, 64)).astype(np.float32)
    for recipe in PUBLISHED:
        half, single = (
            quantize(weights, bits=8, group_size=64, scale_dtype=dtype, recipe=recipe)
            for dtype in ("float16", "float32")
        )
        np.testing.assert_array_equal(half.words, single.words)
        errors = np.abs(dequantize(half).astype(np.float64) - weights)
        scales = np.repeat(decode(half.scales), 64).reshape(64, 64).T
        assert (errors / scales).max() > 0.51


def test_a_zero_that_float16_cannot_hold_is_refused() -> None:
    """A constant group of 5 has 1/scale 20000 in 0.1.1, and a zero of −100000."""
    weights = np.full((16, 1), 5, np.float32)
    with pytest.raises(ArgumentError, match="zeros"):
        quantize(weights, bits=4, group_size=16, scale_dtype="float16", recipe="hqq-0.1.1")
    assert (dequantize(quantize(weights, bits=4, group_size=16, recipe="hqq-0.2.8")) == 5).all()
    with pytest.raises(ArgumentError, match=r"recipe is 'hqq'; allowed: ruled, hqq-0\.1\.1 or hqq-0\.2\.8"):
        quantize(weights, bits=4, group_size=16, recipe="hqq")  # type: ignore[arg-type]  # wrong on purpose
