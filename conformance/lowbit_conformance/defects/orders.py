"""Defects of layouts: where the words of a matrix go."""

from collections.abc import Callable

import numpy as np

from lowbit.arrays import Array
from lowbit.kernels import layouts
from lowbit.kernels.layouts import ColumnPanels, Layout, NestedPanels, ZCurve
from lowbit.quantization.packing import Words
from lowbit_conformance.defects.defect import COMMON, Declaring, Defect, arithmetical, of_operation

DEFECTS: list[Defect] = []
of_apply, of_invert = of_operation(DEFECTS, "blocking.apply"), of_operation(DEFECTS, "blocking.invert")

# **Layouts**: the place of each word of a matrix, as a list; a defect gives another list.

Order = Callable[[Layout], Array]


def row_by_row(layout: Layout) -> Array:
    """For each place in the stream, the index of its word in the matrix."""
    numbers = np.arange(layout.rows * layout.columns, dtype=np.uint32).reshape(layout.rows, layout.columns)
    return layouts.apply(numbers, layout).astype(np.int64)


def by_blocks(layout: Layout, blocks: list[tuple[int, int]], turned: bool = False) -> Array:
    numbers = np.arange(layout.rows * layout.columns).reshape(layout.rows, layout.columns)
    parts = []
    for block in blocks:
        rows, columns = layout.spans(*block)
        part = numbers[rows.start : rows.stop, columns.start : columns.stop]
        parts.append((part.T if turned else part).reshape(-1))
    return np.concatenate(parts)


def along(key: Callable[[int, int], int]) -> Order:
    """Blocks in the order of a key from their row and column."""

    def order(layout: Layout) -> Array:
        if not isinstance(layout, ZCurve):
            return row_by_row(layout)
        height, width = layout.block
        grid = [(r, c) for r in range(-(-layout.rows // height)) for c in range(-(-layout.columns // width))]
        return by_blocks(layout, sorted(grid, key=lambda block: key(*block)))

    return order


def inverted(stream: Words, layout: Layout, order: Order) -> Words:
    words = np.empty_like(stream)
    words[order(layout)] = stream
    return words.reshape(layout.rows, layout.columns)


REFERENCES = "blocking.apply/C1 blocking.invert/C1"
ALL = f"{REFERENCES} blocking.invert/C2"


def moved(name: str, cause: str, clauses: str, order: Order, seen: str = COMMON) -> Defect:
    wrong = {
        "blocking.apply": lambda words, layout: words.reshape(-1)[order(layout)],
        "blocking.invert": lambda stream, layout: inverted(stream, layout, order),
    }
    return arithmetical(name, cause, clauses, wrong, seen)


of_order = Declaring(DEFECTS, moved)
of_order.add(
    "z-curve-other-bit-first",
    "The bits of the column are put above those of the row.",
    ALL,
    along(lambda row, column: layouts.morton(column, row)),
)
of_order.add(
    "z-curve-of-256-blocks",
    "The row and column of a block keep 8 bits on the curve.",
    ALL,
    along(lambda row, column: layouts.morton(row % 256, column % 256)),
)


@of_order(ALL)
def z_curve_missing(layout: Layout) -> Array:
    """Blocks follow each other row by row, without the curve."""
    if not isinstance(layout, ZCurve):
        return row_by_row(layout)
    height, width = layout.block
    return by_blocks(
        layout, [(r, c) for r in range(-(-layout.rows // height)) for c in range(-(-layout.columns // width))]
    )


@of_order(ALL)
def blocks_column_by_column(layout: Layout) -> Array:
    """Inside a block words go column by column."""
    return by_blocks(layout, list(layout.starts), turned=True)


def of_nested(wrong: Order) -> Order:
    """Right in all layouts but nested panels."""
    return lambda layout: wrong(layout) if isinstance(layout, NestedPanels) else row_by_row(layout)


def down_the_panel(layout: Layout) -> Array:
    assert isinstance(layout, NestedPanels)
    blocks = sorted(layout.starts, key=lambda block: (block[1] * 8 // layout.panel, block[1], block[0]))
    return by_blocks(layout, blocks)


for name, cause, nested in (
    (
        "nested-panels-plain",
        "A panel of 3-bit words is stored row by row, without blocks of 3 × 8 words.",
        lambda layout: row_by_row(ColumnPanels(layout.rows, layout.columns, layout.panel)),
    ),
    (
        "nested-panels-as-wide-as-the-matrix",
        "Units of 3 rows go through all columns, without panels.",
        lambda layout: row_by_row(NestedPanels(layout.rows, layout.columns, layout.columns)),
    ),
    ("nested-panels-down-first", "The blocks of a panel go down its columns before they go right.", down_the_panel),
    (
        "nested-panels-words-of-a-column-first",
        "In a block the 3 words of a column are neighbours instead of the 8 words of a row.",
        lambda layout: by_blocks(layout, list(layout.starts), turned=True),
    ),
):
    of_order.add(name, cause, ALL, of_nested(nested))


def at_one_size(wrong: Callable[[int, int], bool]) -> Order:
    """Right except for blocks of some sizes, in which the first two words are swapped."""

    def order(layout: Layout) -> Array:
        places, (height, width) = row_by_row(layout), layout.block
        if wrong(height, width):
            for block, start in layout.starts.items():
                _, columns = layout.spans(*block)
                if len(columns) > 1:
                    places[[start, start + 1]] = places[[start + 1, start]]
        return places

    return order


for size in (8, 16, 32, 64):
    for name, words, wrong in (
        (f"blocks-of-{size}-columns", f"{size} columns", lambda height, width, size=size: width == size),
        (f"blocks-of-{size}-rows", f"{size} rows, and fewer columns,", lambda h, w, size=size: h == size and w < size),
        (
            f"square-blocks-of-{size}",
            f"{size} by {size} words",
            lambda height, width, size=size: height == width == size,
        ),
    ):
        cause = f"Blocks of exactly {words} have a special loop, which is wrong."
        of_order.add(name, cause, REFERENCES, at_one_size(wrong))


@of_apply("C1 C2")
def edge_blocks_filled_up(words: Words, layout: Layout) -> Words:
    """Blocks at the edges are filled up with zeros."""
    height, width = layout.block
    whole = np.zeros((-(-layout.rows // height) * height, -(-layout.columns // width) * width), np.uint32)
    whole[: layout.rows, : layout.columns] = words
    if whole.size == words.size:
        return layouts.apply(words, layout)
    parts = [whole[r * height : (r + 1) * height, c * width : (c + 1) * width].reshape(-1) for r, c in layout.starts]
    return np.concatenate(parts)


@of_apply("C1 C2")
def last_word_lost(words: Words, layout: Layout) -> Words:
    """The last word of the stream is the one before it."""
    stream = layouts.apply(words, layout)
    if stream.size > 1:
        stream[-1] = stream[-2]
    return stream


of_invert.add(
    "stream-taken-for-rows",
    "The stream is cut into rows as it is.",
    "C1 C2",
    lambda stream, layout: stream.reshape(layout.rows, layout.columns).copy(),
)
