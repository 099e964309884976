"""Column panels: everything has one place, and the layout can be inverted."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from lowbit.affine import CONVENTIONS, QuantizedMatrix
from lowbit.linear import group_offsets
from lowbit.packing import BITS, CODES_PER_UNIT, unpack
from lowbit_cppyy.layout import ALIGNMENT, PanelLayout, scales_and_offsets


@st.composite
def matrices(draw: st.DrawFn) -> QuantizedMatrix:
    """Any bits, convention and dtype; K of one to four units; any group size; N of one to forty."""
    bits = draw(st.sampled_from(BITS))
    rows = CODES_PER_UNIT[bits] * draw(st.integers(1, 4))
    columns, group_size = draw(st.integers(1, 40)), draw(st.integers(1, rows))
    convention = draw(st.sampled_from(CONVENTIONS))
    dtype = draw(st.sampled_from((np.float32, np.float16)))
    random = np.random.default_rng(draw(st.integers(0, 99)))
    shape = (-(-rows // group_size), columns)
    words = random.integers(0, 2**32, (rows * bits // 32, columns), np.uint32)
    scales = (random.random(shape) + 0.01).astype(dtype)
    if convention == "minimum":
        return QuantizedMatrix(
            words, scales, random.standard_normal(shape).astype(dtype), bits, rows, group_size, convention
        )
    zeros = random.integers(0, 2**bits, shape).astype(np.uint8)
    return QuantizedMatrix(words, scales, zeros, bits, rows, group_size, convention)


PANELS = st.sampled_from((8, 16, 32))


@given(matrices(), PANELS)
def test_invert_gives_back_what_was_applied(matrix: QuantizedMatrix, panel: int) -> None:
    """Words to the bit; scales widened to float32; offsets within one rounding of minus scale times zero."""
    layout = PanelLayout.of(matrix, panel)
    words, scales, offsets = layout.invert(layout.apply(matrix))
    np.testing.assert_array_equal(words, matrix.words)
    np.testing.assert_array_equal(scales, matrix.scales.astype(np.float32))
    np.testing.assert_array_equal(offsets, group_offsets(matrix).astype(np.float32))


@given(matrices(), PANELS)
def test_index_finds_every_code_scale_and_offset(matrix: QuantizedMatrix, panel: int) -> None:
    """`index` says independently of `apply` where things lie; no two codes share a bit."""
    layout = PanelLayout.of(matrix, panel)
    stream = layout.apply(matrix).reshape(-1)
    codes, (scales, offsets) = unpack(matrix.words, matrix.bits), scales_and_offsets(matrix)
    seen = set()
    for row in range(matrix.rows):
        for column in range(0, matrix.columns, 7):
            element, bit = layout.index(row, column)
            seen.add((element, bit))
            value = int(stream[element]) >> bit
            if bit + matrix.bits > 32:
                value |= int(stream[element + panel]) << (32 - bit)
            assert value % 2**matrix.bits == codes[row, column]
            group = row // matrix.group_size
            place = layout.index_scale(group, column)
            assert stream[place : place + 1].view(np.float32)[0] == scales[group, column]
            assert stream[place + panel : place + panel + 1].view(np.float32)[0] == offsets[group, column]
    assert len(seen) == matrix.rows * len(range(0, matrix.columns, 7))


@given(matrices(), PANELS)
def test_what_is_filled_up_is_zero(matrix: QuantizedMatrix, panel: int) -> None:
    """The bits set in the stream are those of the codes, scales and offsets, and no others; nbytes counts them all."""
    layout = PanelLayout.of(matrix, panel)
    stream = layout.apply(matrix)
    assert stream.nbytes == layout.nbytes and stream.ctypes.data % ALIGNMENT == 0
    held = [matrix.words, *(values.view(np.uint32) for values in scales_and_offsets(matrix))]
    ones = sum(int(np.bitwise_count(values).sum()) for values in held)
    assert int(np.bitwise_count(stream).sum()) == ones


@pytest.mark.parametrize("bits", BITS)
def test_whole_groups_cost_no_filling(bits: int) -> None:
    """With groups of whole units and whole panels, the stream is words, scales and offsets, and nothing else."""
    layout = PanelLayout(bits, rows=256, columns=96, group_size=64, panel=32)
    assert layout.nbytes == 96 * (256 * bits // 8 + 4 * 2 * 4)
