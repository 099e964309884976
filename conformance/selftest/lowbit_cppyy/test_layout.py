"""Interleaving and layouts: every bit of every code, scale and zero lies somewhere, once, and can be found again."""

from itertools import pairwise
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from lowbit.arrays import Array
from lowbit.quantization.affine import CONVENTIONS, SCALE_DTYPES, QuantizedMatrix
from lowbit.quantization.packing import BITS, CODES_PER_UNIT, WORDS_PER_UNIT, pack, unpack
from lowbit_cppyy.layout.interleaving import Field, fields, interleave
from lowbit_cppyy.layout.memory import ALIGNMENT, HUGE_PAGE, SLAB, aligned
from lowbit_cppyy.layout.panels import LINE, PanelLayout


def matrix_of(
    bits: int, rows: int, columns: int, group_size: int, convention: Any, dtype: Any, seed: int = 0
) -> QuantizedMatrix:
    """Random words, scales and zeros."""
    random = np.random.default_rng(seed)
    shape = (-(-rows // group_size), columns)
    words = random.integers(0, 2**32, (rows * bits // 32, columns), np.uint32)
    scales = (random.random(shape) + 0.01).astype(dtype)
    zeros: Any = random.standard_normal(shape).astype(dtype)
    if convention == "zero_point":
        zeros = random.integers(0, 2**bits, shape).astype(np.uint8)
    return QuantizedMatrix(words, scales, zeros, bits, rows, group_size, convention)


@st.composite
def matrices(draw: st.DrawFn) -> QuantizedMatrix:
    """Any bits, convention and dtype; K of one to four units; any group size; N of one to three panels of 32."""
    bits = draw(st.sampled_from(BITS))
    rows = CODES_PER_UNIT[bits] * draw(st.integers(1, 4))
    columns, group_size = draw(st.integers(1, 100)), draw(st.integers(1, rows))
    kind = draw(st.sampled_from(CONVENTIONS)), draw(st.sampled_from(SCALE_DTYPES))
    return matrix_of(bits, rows, columns, group_size, *kind, draw(st.integers(0, 99)))


@st.composite
def layouts(draw: st.DrawFn) -> tuple[QuantizedMatrix, PanelLayout]:
    """A matrix with one of its layouts: panels of two to eight lines, whole or cut into blocks."""
    matrix = draw(matrices())
    panel = draw(st.sampled_from((32, 64, 128)))
    if draw(st.booleans()):
        return matrix, PanelLayout.of(matrix, panel)
    return matrix, PanelLayout.of(matrix, panel, block_rows=draw(st.integers(1, matrix.rows)))


# **Interleaving**: where in a unit the codes lie.


@pytest.mark.parametrize("bits", BITS)
def test_the_codes_of_a_unit_fill_its_words_without_overlap(bits: int) -> None:
    """Every bit of every word belongs to one bit of one code; four neighbours lie in four bytes, at the same place."""
    taken = [0] * WORDS_PER_UNIT[bits]
    for code in range(CODES_PER_UNIT[bits]):
        for field in fields(bits, code):
            assert taken[field.word] & field.mask == 0 and field.mask < 2**32
            taken[field.word] |= field.mask
            assert field.position // 8 == code % 4 == (field.position + field.width - 1) // 8
            first = fields(bits, code - code % 4)[fields(bits, code).index(field)]
            moved = Field(first.word, first.position + 8 * (code % 4), first.width, first.first)
            assert moved == field
        assert sorted(f.first + n for f in fields(bits, code) for n in range(f.width)) == list(range(bits))
    assert taken == [2**32 - 1] * WORDS_PER_UNIT[bits]


def test_eight_codes_of_three_bits_lie_alike_in_both_planes() -> None:
    """Four bits apart or eight, so that each plane needs one shift and one mask for all of them."""
    for code in range(CODES_PER_UNIT[3]):
        first = [(field.word, field.position) for field in fields(3, code - code % 8)]
        apart = 8 * (code % 4) + 4 * (code % 8 // 4)
        assert [(field.word, field.position - apart) for field in fields(3, code)] == first


@pytest.mark.parametrize("bits", BITS)
def test_interleave_puts_every_code_into_its_fields(bits: int) -> None:
    """Code by code against `fields`, two units and three columns."""
    codes = np.random.default_rng(bits).integers(0, 2**bits, (2 * CODES_PER_UNIT[bits], 3)).astype(np.uint8)
    words = pack(codes, bits)
    interleaved = interleave(words, bits)
    for k, column in np.ndindex(*codes.shape):
        unit, code = divmod(k, CODES_PER_UNIT[bits])
        first = unit * WORDS_PER_UNIT[bits]
        parts = [
            (int(interleaved[first + f.word, column]) & f.mask) >> f.position << f.first for f in fields(bits, code)
        ]
        assert sum(parts) == codes[k, column]


# **Layouts.**


@settings(max_examples=60)
@given(layouts())
def test_index_finds_every_code_scale_and_zero(case: tuple[QuantizedMatrix, PanelLayout]) -> None:
    """`index` says independently of `apply` where things lie; no two of them share a bit."""
    matrix, layout = case
    stream = layout.apply(matrix)
    codes = unpack(matrix.words, matrix.bits)
    taken = np.zeros_like(stream)
    panel, lane = np.divmod(np.arange(matrix.columns), layout.panel)
    for row in range(matrix.rows):
        values: Array = np.zeros(matrix.columns, np.uint32)
        last = layout.index(row, matrix.columns - 1)
        for (first, field), (end, _) in zip(layout.index(row, 0), last, strict=True):
            elements = first + panel * layout.panel_elements + lane
            assert elements[-1] == end and not (taken[elements] & np.uint32(field.mask)).any()
            taken[elements] |= np.uint32(field.mask)
            values |= (stream[elements] & np.uint32(field.mask)) >> np.uint32(field.position) << np.uint32(field.first)
        np.testing.assert_array_equal(values, codes[row])
    for group, panel in np.ndindex(layout.groups, layout.panels):
        at = layout.index_scale(group, panel)
        columns = slice(panel * layout.panel, min((panel + 1) * layout.panel, layout.columns))
        for values, size in ((matrix.scales, layout.scale_elements), (matrix.zeros, layout.zero_elements)):
            held = stream[at : at + size].view(values.dtype)[: columns.stop - columns.start]
            np.testing.assert_array_equal(held, values[group, columns])
            assert not taken[at : at + size].any()
            at += size


def ones(values: Array) -> int:
    return int(np.bitwise_count(values.view(f"u{values.dtype.itemsize}")).sum(dtype=np.int64))


@settings(max_examples=60)
@given(layouts())
def test_what_is_filled_up_is_zero(case: tuple[QuantizedMatrix, PanelLayout]) -> None:
    """The bits set in the stream are those of codes, scales and zeros, and no others; `nbytes` counts the stream."""
    matrix, layout = case
    stream = layout.apply(matrix)
    assert stream.nbytes == layout.nbytes and stream.ctypes.data % ALIGNMENT == 0
    assert ones(stream) == ones(matrix.words) + ones(matrix.scales) + ones(matrix.zeros)


@settings(max_examples=60)
@given(layouts())
def test_everything_begins_on_a_line_of_the_cache(case: tuple[QuantizedMatrix, PanelLayout]) -> None:
    """Blocks, units, scales, zeros; the blocks follow each other without a gap."""
    _, layout = case
    sizes = (layout.unit_elements, layout.scale_elements, layout.zero_elements)
    assert all(size % LINE == 0 for size in (*sizes, *layout.starts.reshape(-1)))
    blocks = []
    for panel, block in np.ndindex(layout.panels, layout.blocks):
        last = min((block + 1) * layout.block_groups, layout.groups) - 1
        stop = layout.index_scale(last, panel) + layout.scale_elements + layout.zero_elements
        blocks.append((int(layout.starts[panel, block]), stop))
    ends = [0, *(stop for _, stop in sorted(blocks))]
    assert [start for start, _ in sorted(blocks)] == ends[:-1]
    assert 4 * ends[-1] == layout.nbytes


@pytest.mark.parametrize("bits", BITS)
def test_whole_groups_cost_no_filling(bits: int) -> None:
    """With groups of whole units and whole panels, the stream is as long as what it holds."""
    for convention in CONVENTIONS:
        for dtype in SCALE_DTYPES:
            matrix = matrix_of(bits, 256, 128, 64, convention, dtype)
            held = matrix.words.nbytes + matrix.scales.nbytes + matrix.zeros.nbytes
            assert PanelLayout.of(matrix, 64).nbytes == held


def test_streams_lie_on_lines_and_side_by_side_on_huge_pages() -> None:
    """A long one begins at a huge page; short ones follow each other in a slab, on lines, and never overlap."""
    assert aligned(SLAB // 4).ctypes.data % HUGE_PAGE == 0
    rooms = [aligned(elements) for elements in (17, 1, SLAB // 8, SLAB // 16, 100_000, SLAB // 8, 16)]
    assert [len(room) for room in rooms] == [17, 1, SLAB // 8, SLAB // 16, 100_000, SLAB // 8, 16]
    spans = sorted((room.ctypes.data, room.ctypes.data + room.nbytes) for room in rooms)
    assert all(start % ALIGNMENT == 0 for start, _ in spans)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    for number, room in enumerate(rooms):
        room[:] = number
    assert [int(room[-1]) for room in rooms] == list(range(7))
