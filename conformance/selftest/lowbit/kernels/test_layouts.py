"""Layouts are permutations: by going through every word, and by second definitions of both orders."""

from itertools import product

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from lowbit.errors import ArgumentError
from lowbit.kernels.layouts import ColumnPanels, Layout, NestedPanels, ZCurve, apply, invert, morton


@st.composite
def any_layout(draw: st.DrawFn) -> Layout:
    rows, columns = draw(st.integers(1, 12)), draw(st.integers(1, 20))
    if draw(st.booleans()):
        return NestedPanels(3 * (rows // 3 + 1), 8 * (columns // 5 + 1), 8 * draw(st.integers(1, 6)))
    if draw(st.booleans()):
        return ColumnPanels(rows, columns, draw(st.integers(1, 24)))
    return ZCurve(rows, columns, draw(st.integers(1, 14)), draw(st.integers(1, 24)))


@given(any_layout())
def test_every_word_has_one_place_and_every_place_one_word(layout: Layout) -> None:
    """`index` takes each value once, and `apply` and `invert` do what `index` says."""
    words = np.random.default_rng(0).integers(0, 2**32, (layout.rows, layout.columns), np.uint32)
    stream = apply(words, layout)
    cells = list(product(range(layout.rows), range(layout.columns)))
    places = [layout.index(*cell) for cell in cells]
    assert sorted(places) == list(range(len(cells)))
    assert [stream[place] for place in places] == [words[cell] for cell in cells]
    np.testing.assert_array_equal(invert(stream, layout), words)


def test_small_layouts_without_exception() -> None:
    """Every matrix up to 5 × 5 with every block up to 6 × 6: a permutation each time."""
    for rows, columns in product(range(1, 6), repeat=2):
        words = np.arange(rows * columns, dtype=np.uint32).reshape(rows, columns)
        layouts: list[Layout] = [ColumnPanels(rows, columns, panel) for panel in range(1, 7)]
        layouts += [ZCurve(rows, columns, *block) for block in product(range(1, 7), repeat=2)]
        for layout in layouts:
            assert sorted(apply(words, layout).tolist()) == list(range(rows * columns)), layout


def by_quadrants(top: int, left: int, size: int) -> list[tuple[int, int]]:
    """The Z-curve as one draws it: each quarter of the square in turn, upper left first, and so within each."""
    if size == 1:
        return [(top, left)]
    half = size // 2
    quarters = product((top, top + half), (left, left + half))
    return [cell for corner in quarters for cell in by_quadrants(*corner, half)]


@pytest.mark.parametrize("shape", ((1, 1), (8, 8), (5, 7), (3, 16), (9, 2)))
def test_the_z_curve_is_the_curve_through_the_quadrants(shape: tuple[int, int]) -> None:
    """The Morton order is the recursive one, with what lies outside the matrix left out."""
    rows, columns = shape
    drawn = [cell for cell in by_quadrants(0, 0, 16) if cell[0] < rows and cell[1] < columns]
    assert list(ZCurve(rows, columns, 1, 1).walk(rows, columns)) == drawn
    layout = ZCurve(3 * rows, 5 * columns, 3, 5)
    assert list(layout.starts) == drawn
    assert list(layout.starts.values()) == [15 * number for number in range(rows * columns)]


@given(st.integers(0, 2**40), st.integers(0, 2**40))
def test_a_morton_code_has_the_bits_of_both_numbers_in_turn(row: int, column: int) -> None:
    """Taking every second digit of the code, in base 2, gives the numbers back."""
    digits = f"{morton(row, column):0100b}"
    assert (int(digits[0::2], 2), int(digits[1::2], 2)) == (row, column)


@given(st.integers(1, 9), st.integers(1, 40), st.integers(1, 41))
def test_panels_by_formula_and_as_blocks_of_full_height(rows: int, columns: int, panel: int) -> None:
    """The place of a word in panels has a closed form; and panels are the Z-curve of blocks as high as the matrix."""
    layout, curve = ColumnPanels(rows, columns, panel), ZCurve(rows, columns, rows, panel)
    for row, column in product(range(rows), range(columns)):
        number, lane = divmod(column, panel)
        width = min(panel, columns - number * panel)
        assert layout.index(row, column) == number * panel * rows + row * width + lane == curve.index(row, column)


@given(st.integers(1, 4), st.integers(1, 9), st.integers(1, 10))
def test_nested_panels_by_formula(units: int, blocks: int, width: int) -> None:
    """The place of a word in nested panels has a closed form, the chapter's."""
    rows, columns, panel = 3 * units, 8 * blocks, 8 * width
    layout = NestedPanels(rows, columns, panel)
    for row, column in product(range(rows), range(columns)):
        number, lane = divmod(column, panel)
        wide = min(panel, columns - number * panel)
        place = number * panel * rows + 3 * wide * (row // 3) + 24 * (lane // 8) + 8 * (row % 3) + column % 8
        assert layout.index(row, column) == place


def test_a_layout_refuses_what_it_has_no_place_for() -> None:
    """Sizes below 1, rows and columns outside, arrays of another size."""
    layout = ZCurve(2, 3, 1, 2)
    words = np.zeros((2, 3), np.uint32)
    for call, message in (
        (lambda: ColumnPanels(2, 3, 0), "panel is 0; allowed: an integer of at least 1"),
        (lambda: ZCurve(2, 3, 1, 2.0), "block_columns is 2.0"),  # type: ignore[arg-type]  # wrong on purpose
        (lambda: NestedPanels(4, 8, 8), "rows is 4; allowed: a multiple of 3 in nested panels"),
        (lambda: NestedPanels(3, 12, 8), "columns is 12; allowed: a multiple of 8"),
        (lambda: NestedPanels(3, 8, 4), "panel is 4; allowed: a multiple of 8"),
        (lambda: NestedPanels(0, 8, 8), "rows is 0; allowed: an integer of at least 1"),
        (lambda: layout.index(2, 0), "row is 2; allowed: an integer from 0 to 1"),
        (lambda: layout.index(0, 3), "column is 3"),
        (lambda: apply(words[:1], layout), "shape of words"),
        (lambda: invert(np.zeros(7, np.uint32), layout), "shape of stream"),
    ):
        with pytest.raises(ArgumentError, match=message):
            call()
