"""Methods: the codes are those of the chapters."""

import numpy as np
import pytest

from lowbit.quantization import affine, hqq
from lowbit.quantization.coded import Grid
from lowbit.quantization.hqq_published import RECIPES, Recipe
from lowbit.quantization.packing import unpack
from lowbit.rewriting.methods import Rounding, by_hqq, to_nearest

WEIGHTS = np.random.default_rng(0).standard_normal((64, 24)).astype(np.float32)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_rounding_to_the_nearest_is_that_of_affine(bits: int) -> None:
    """With zero-points and scales in float16."""
    expected = affine.quantize(WEIGHTS, bits=bits, group_size=16, convention="zero_point", scale_dtype="float16")
    found = to_nearest(WEIGHTS, bits, Grid(16))
    np.testing.assert_array_equal(found.codes, unpack(expected.words, bits))
    np.testing.assert_array_equal(found.scales, expected.scales)
    np.testing.assert_array_equal(found.offsets, expected.zeros)
    np.testing.assert_array_equal(found.floats, affine.dequantize(expected))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_hqq_is_that_of_the_solver(bits: int) -> None:
    """Codes, scales and zeros; the numbers differ by the roundings of float32 products, of which there are two."""
    expected = hqq.quantize(WEIGHTS, bits=bits, group_size=16, scale_dtype="float16")
    found = by_hqq(WEIGHTS, bits, 16, real_zeros=True)
    np.testing.assert_array_equal(found.codes, unpack(expected.words, bits))
    limit = 2**-23 * np.abs(found.values) + 2**-24 * found.scales.max() * 2**bits
    assert (np.abs(found.values - hqq.dequantize(expected)) <= limit).all()


@pytest.mark.parametrize("recipe", [each for each in RECIPES if each != "ruled"])
@pytest.mark.parametrize("bits", [3, 4])
def test_a_recipe_of_hqq_is_that_of_its_chapter(bits: int, recipe: Recipe) -> None:
    """Code for code."""
    expected = hqq.quantize(WEIGHTS, bits=bits, group_size=16, scale_dtype="float16", recipe=recipe)
    found = Rounding("hqq", 16, recipe=recipe, real_zeros=True)(WEIGHTS, bits)
    np.testing.assert_array_equal(found.codes, unpack(expected.words, bits))
    limit = 2**-23 * np.abs(found.values) + 2**-24 * found.scales.max() * 2**bits
    assert (np.abs(found.values - hqq.dequantize(expected)) <= limit).all()


def test_whole_zeros_of_hqq() -> None:
    """They are codes, and each weight has the code that is nearest with its rounded zero."""
    found, real = by_hqq(WEIGHTS, 4, 16, real_zeros=False), by_hqq(WEIGHTS, 4, 16, real_zeros=True)
    assert ((found.offsets == np.rint(found.offsets)) & (found.offsets >= 0) & (found.offsets <= 15)).all()
    assert (real.offsets != np.rint(real.offsets)).any()
    step = found.scales.astype(np.float64)[found.g_idx]
    inside = (found.codes > 0) & (found.codes < 15)
    assert (np.abs(found.values - WEIGHTS)[inside] <= 0.5001 * step[inside]).all()


def test_without_inputs_gptq_rounds_to_the_nearest() -> None:
    """As of an expert that no token was sent to."""
    found = Rounding("gptq", 16)(WEIGHTS, 4)
    np.testing.assert_array_equal(found.values, to_nearest(WEIGHTS, 4, Grid(16)).values)


def test_symmetric_zeros() -> None:
    """All in the middle."""
    assert (to_nearest(WEIGHTS, 3, Grid(16, symmetric=True)).offsets == 4).all()
