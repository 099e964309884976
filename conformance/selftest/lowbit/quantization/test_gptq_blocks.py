"""GPTQ by blocks gives the codes, scales, zeros and groups of the chapter, which rounds row by row."""

import numpy as np
import pytest

from lowbit.arrays import F32, F64
from lowbit.errors import ArgumentError
from lowbit.quantization import gptq
from lowbit.quantization.coded import Grid
from lowbit.quantization.gptq_blocks import Inputs, rounded
from lowbit.quantization.packing import unpack


def layer(seed: int, rows: int = 96, columns: int = 40) -> tuple[F32, F64]:
    """Weights, and the Hessian of correlated inputs, two of which are always 0."""
    rng = np.random.default_rng(seed)
    mixed = rng.standard_normal((200, rows // 3)) @ rng.standard_normal((rows // 3, rows))
    x = (mixed + 0.3 * rng.standard_normal((200, rows))).astype(np.float32)
    x[:, [3, rows - 1]] = 0
    return rng.standard_normal((rows, columns)).astype(np.float32), x.astype(np.float64).T @ x.astype(np.float64)


CHOICES = [
    (bits, group_size, act_order, symmetric)
    for bits, group_size in ((2, 32), (3, 32), (4, 40), (8, 96))
    for act_order in (False, True)
    for symmetric in (False, True)
]


@pytest.mark.parametrize(("bits", "group_size", "act_order", "symmetric"), CHOICES)
def test_the_codes_are_those_of_the_chapter(bits: int, group_size: int, act_order: bool, symmetric: bool) -> None:
    """Also where the last group is short, and where inputs are dead."""
    weights, hessian = layer(bits)
    expected = gptq.quantize(
        weights,
        hessian,
        bits=bits,
        group_size=group_size,
        act_order=act_order,
        symmetric=symmetric,
        scale_dtype="float16",
    )
    inputs = Inputs.of(hessian, act_order=act_order, damping=gptq.DAMPING)
    found = rounded(weights, inputs, bits, Grid(group_size, symmetric))
    codes = np.empty_like(found.codes)
    codes[expected.order] = unpack(expected.matrix.words, bits)
    np.testing.assert_array_equal(found.codes, codes)
    np.testing.assert_array_equal(found.scales, expected.matrix.scales)
    np.testing.assert_array_equal(found.offsets, expected.matrix.zeros)
    np.testing.assert_array_equal(found.g_idx, expected.g_idx)
    np.testing.assert_array_equal(found.floats, expected.dequantize())


@pytest.mark.parametrize("block_size", (16, 48, 128))
@pytest.mark.parametrize("act_order", (False, True))
def test_blocks_of_several_groups(block_size: int, act_order: bool) -> None:
    """Ranges do not see the errors of their own block, as in the authors' code. One that is no multiple is refused."""
    weights, hessian = layer(7)
    expected = gptq.quantize(
        weights,
        hessian,
        bits=3,
        group_size=16,
        act_order=act_order,
        scale_dtype="float16",
        block_size=block_size,
    )
    inputs = Inputs.of(hessian, act_order=act_order, damping=gptq.DAMPING)
    found = rounded(weights, inputs, 3, Grid(16), block_size)
    np.testing.assert_array_equal(found.floats, expected.dequantize())
    assert block_size == 16 or (found.floats != rounded(weights, inputs, 3, Grid(16)).floats).any()
    with pytest.raises(
        ArgumentError, match=f"block_size is {block_size + 8}; allowed: a multiple of the group size, 16"
    ):
        rounded(weights, inputs, 3, Grid(16), block_size + 8)


def test_the_factor_is_that_of_the_chapter() -> None:
    """The bound is that of a product of triangular factors in float64, with room for the condition of H."""
    _, hessian = layer(0)
    expected = gptq.factor(gptq.damped(hessian, gptq.DAMPING))
    found = Inputs.of(hessian, act_order=False, damping=gptq.DAMPING).factor
    assert not np.tril(found, -1).any()
    condition = np.linalg.cond(gptq.damped(hessian, gptq.DAMPING))
    limit = len(hessian) ** 2 * condition * np.finfo(np.float64).eps * np.abs(expected).max()
    assert np.abs(found - expected).max() <= limit < 1e-6


def test_a_singular_hessian_is_refused() -> None:
    """As where damping is 0 and an input is always 0."""
    _, hessian = layer(0)
    with pytest.raises(ArgumentError, match="hessian of the calibration is singular"):
        Inputs.of(hessian, act_order=False, damping=0.0)
