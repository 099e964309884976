"""Defects of layouts: where the words of a matrix go."""

from collections.abc import Callable

import numpy as np

from lowbit.arrays import Array
from lowbit.kernels import layouts
from lowbit.kernels.layouts import ColumnPanels, Layout
from lowbit.quantization.packing import Words
from lowbit_conformance.defects.defect import Defect, arithmetical, of

# **Layouts**: where each word of a matrix goes, as a list of places; a defect gives another list.

Order = Callable[[Layout], Array]


def row_by_row(layout: Layout) -> Array:
    """For each place of the stream, the number of its word in the matrix."""
    numbers = np.arange(layout.rows * layout.columns, dtype=np.uint32).reshape(layout.rows, layout.columns)
    return layouts.apply(numbers, layout).astype(np.int64)


def narrow_morton(layout: Layout) -> Array:
    """Only the low 8 bits of a block's row and column are interleaved."""
    if isinstance(layout, ColumnPanels):
        return row_by_row(layout)
    height, width = layout.block
    grid = [(r, c) for r in range(-(-layout.rows // height)) for c in range(-(-layout.columns // width))]
    return by_blocks(layout, sorted(grid, key=lambda block: layouts.morton(block[0] % 256, block[1] % 256)))


def other_morton(layout: Layout) -> Array:
    """Bits of the column above those of the row."""
    if isinstance(layout, ColumnPanels):
        return row_by_row(layout)
    height, width = layout.block
    grid = [(r, c) for r in range(-(-layout.rows // height)) for c in range(-(-layout.columns // width))]
    return by_blocks(layout, sorted(grid, key=lambda block: layouts.morton(block[1], block[0])))


def plain_order(layout: Layout) -> Array:
    """Blocks one after another in rows of blocks, without a curve."""
    height, width = layout.block
    grid = [(r, c) for r in range(-(-layout.rows // height)) for c in range(-(-layout.columns // width))]
    return by_blocks(layout, grid)


def by_blocks(layout: Layout, blocks: list[tuple[int, int]], turned: bool = False) -> Array:
    numbers = np.arange(layout.rows * layout.columns).reshape(layout.rows, layout.columns)
    parts = []
    for block in blocks:
        rows, columns = layout.spans(*block)
        part = numbers[rows.start : rows.stop, columns.start : columns.stop]
        parts.append((part.T if turned else part).reshape(-1))
    return np.concatenate(parts)


def inside_turned(layout: Layout) -> Array:
    return by_blocks(layout, list(layout.starts), turned=True)


def applied(words: Words, layout: Layout, order: Order) -> Words:
    return words.reshape(-1)[order(layout)]


def inverted(stream: Words, layout: Layout, order: Order) -> Words:
    words = np.empty_like(stream)
    words[order(layout)] = stream
    return words.reshape(layout.rows, layout.columns)


REFERENCES = "blocking.apply/C1 blocking.invert/C1"


def moved(name: str, cause: str, order: Order, clauses: str = f"{REFERENCES} blocking.invert/C2") -> Defect:
    return arithmetical(
        name,
        cause,
        clauses,
        {
            "blocking.apply": lambda words, layout: applied(words, layout, order),
            "blocking.invert": lambda stream, layout: inverted(stream, layout, order),
        },
    )


def at_one_size(wrong: Callable[[int, int], bool]) -> Order:
    """Right but for blocks of some sizes, in each of which the first two words change places."""

    def order(layout: Layout) -> Array:
        places, (height, width) = row_by_row(layout), layout.block
        if wrong(height, width):
            for block, start in layout.starts.items():
                _, columns = layout.spans(*block)
                if len(columns) > 1:
                    places[[start, start + 1]] = places[[start + 1, start]]
        return places

    return order


def of_width(width: int) -> Defect:
    cause = f"Blocks of exactly {width} columns have a loop of their own, which is wrong."
    return moved(f"blocks-of-{width}-columns", cause, at_one_size(lambda height, own: own == width), REFERENCES)


def of_height(height: int) -> Defect:
    cause = f"Blocks of exactly {height} rows, and fewer columns, have a loop of their own, which is wrong."
    wrong = at_one_size(lambda own, width: own == height and width < height)
    return moved(f"blocks-of-{height}-rows", cause, wrong, REFERENCES)


def square(size: int) -> Defect:
    cause = f"Blocks of exactly {size} by {size} words have a loop of their own, which is wrong."
    wrong = at_one_size(lambda height, width: height == width == size)
    return moved(f"square-blocks-of-{size}", cause, wrong, REFERENCES)


SIZES = (8, 16, 32, 64)


def padded(words: Words, layout: Layout) -> Words:
    """Blocks at the edges are filled up with zeros."""
    height, width = layout.block
    whole = np.zeros((-(-layout.rows // height) * height, -(-layout.columns // width) * width), np.uint32)
    whole[: layout.rows, : layout.columns] = words
    if whole.size == words.size:
        return layouts.apply(words, layout)
    parts = [whole[r * height : (r + 1) * height, c * width : (c + 1) * width].reshape(-1) for r, c in layout.starts]
    return np.concatenate(parts)


def edge_repeated(words: Words, layout: Layout) -> Words:
    """The last row of a block at the lower edge is stored twice, and the first words of the next block are lost."""
    stream = layouts.apply(words, layout)
    if stream.size > 1:
        stream[-1] = stream[-2]
    return stream


DEFECTS = (
    moved("z-curve-other-bit-first", "The bits of the column are put above those of the row.", other_morton),
    moved("z-curve-of-256-blocks", "The row and column of a block keep 8 bits on the curve.", narrow_morton),
    moved("z-curve-missing", "Blocks follow each other row by row, without the curve.", plain_order),
    *(each(size) for each in (of_width, of_height, square) for size in SIZES),
    moved("blocks-column-by-column", "Inside a block words go column by column.", inside_turned),
    of("blocking.apply", "edge-blocks-filled-up", "Blocks at the edges are filled up with zeros.", "C1 C2", padded),
    of("blocking.apply", "last-word-lost", "The last word of the stream is the one before it.", "C1 C2", edge_repeated),
    of(
        "blocking.invert",
        "stream-taken-for-rows",
        "The stream is cut into rows as it is.",
        "C1 C2",
        lambda stream, layout: stream.reshape(layout.rows, layout.columns).copy(),
    ),
)
