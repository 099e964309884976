"""Checks of `blocking.apply` and `blocking.invert`, all of them exact.

A layout only moves words, so the words of most cases are their own places: then a wrong stream shows by itself which
word went where.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from lowbit.kernels import layouts
from lowbit.kernels.layouts import ColumnPanels, Layout, NestedPanels, ZCurve
from lowbit.quantization.packing import Words
from lowbit_conformance.isolation.remote import Remote
from lowbit_conformance.suite.bounded import assert_reference
from lowbit_conformance.suite.cases import Case
from lowbit_conformance.suite.compare import assert_array, assert_exact
from lowbit_conformance.suite.marking import Settings, checks

ANY_BLOCK = (ColumnPanels.order, ZCurve.order)
"""The orders with blocks of any size."""


@dataclass(frozen=True)
class LayoutCase(Case):
    """A case with a layout.

    Attributes:
        order: its name.
        rows: rows of words.
        columns: N.
        height: rows of a block; not used by panels.
        width: columns of a block or panel.
    """

    order: str
    rows: int
    columns: int
    height: int
    width: int

    @property
    def label(self) -> str:
        block = f"{self.height}x{self.width}" if self.order == ZCurve.order else f"p{self.width}"
        return f"{self.order.replace('_', '-')}-{block}-{self.rows}x{self.columns}"

    @property
    def layout(self) -> Layout:
        if self.order == ColumnPanels.order:
            return ColumnPanels(self.rows, self.columns, self.width)
        if self.order == NestedPanels.order:
            return NestedPanels(self.rows, self.columns, self.width)
        return ZCurve(self.rows, self.columns, self.height, self.width)


# Grids of one block, of a row or a column of blocks, squares of a power of two, and others; with and without smaller
# blocks at the edges.
SIZES = ((1, 1), (4, 4), (3, 5), (8, 8), (5, 13), (16, 4), (4, 16), (7, 33), (24, 96))
BLOCKS = ((1, 1), (1, 4), (2, 3), (4, 8), (3, 32), (64, 128))
PANELS = (1, 2, 3, 8, 32, 128)


def shapes(clause: str, settings: Settings) -> Iterator[LayoutCase]:
    """Every size with every block, the size of a real matrix, then shapes from the seeds."""
    for rows, columns in SIZES:
        for height, width in BLOCKS:
            yield LayoutCase(clause, "lattice", "", ZCurve.order, rows, columns, height, width)
        for width in PANELS:
            yield LayoutCase(clause, "lattice", "", ColumnPanels.order, rows, columns, rows, width)
    for order in ANY_BLOCK:
        yield LayoutCase(clause, "lattice", "large", order, 512, 11008, 24, 312)
        yield LayoutCase(clause, "lattice", "many-blocks", order, 3, 1300, 1 if order == ZCurve.order else 3, 4)
        for seed in settings.seeds:
            rng = np.random.Generator(np.random.PCG64([seed, ANY_BLOCK.index(order)]))
            sizes = (int(size) for size in rng.integers(1, (60, 200, 20, 40)))
            yield LayoutCase(clause, "random", "drawn", order, *sizes, seed=seed)


# Kernels have special loops for widths that fill their registers, and a general loop for all others.
EVERY = (*range(1, 35), 40, 48, 56, 63, 64, 65, 72, 80, 96, 112, 127, 128, 129, 160, 192, 256, 257, 512)


def every_block(clause: str, settings: Settings) -> Iterator[LayoutCase]:
    """Panels and blocks of every width, blocks of every height, and square blocks; three side by side, the last one
    smaller."""
    for size in EVERY:
        beside = 2 * size + (size + 1) // 2
        yield LayoutCase(clause, "lattice", "every-width", ColumnPanels.order, 3, beside, 3, size)
        yield LayoutCase(clause, "lattice", "every-width", ZCurve.order, 5, beside, 2, size)
        yield LayoutCase(clause, "lattice", "every-height", ZCurve.order, beside, 5, size, 2)
        if size <= 64:
            yield LayoutCase(clause, "lattice", "every-square", ZCurve.order, beside, beside, size, size)


def nested(clause: str, settings: Settings) -> Iterator[LayoutCase]:
    """Panels of blocks of 3 × 8 words: one block, one or several units and panels, with and without a narrower last
    panel."""

    def case(variant: str, rows: int, columns: int, panel: int) -> LayoutCase:
        return LayoutCase(clause, "lattice", variant, NestedPanels.order, rows, columns, 3, panel)

    for rows, columns in ((3, 8), (3, 16), (6, 8), (6, 24), (9, 40), (24, 96)):
        for panel in (8, 16, 24, 32, 128):
            yield case("", rows, columns, panel)
    for panel in (size for size in EVERY if size % 8 == 0):
        yield case("every-width", 6, 2 * panel + 8, panel)
    yield case("large", 384, 11008, 64)
    yield case("many-blocks", 3, 4096, 8)
    yield case("many-units", 3 * 300, 16, 16)
    for seed in settings.seeds:
        rng = np.random.Generator(np.random.PCG64([seed, 2]))
        units, blocks, width = (int(size) for size in rng.integers(1, (20, 30, 10)))
        yield LayoutCase(clause, "random", "drawn", NestedPanels.order, 3 * units, 8 * blocks, 3, 8 * width, seed=seed)


def places(case: LayoutCase) -> Words:
    """Distinct words: the index of each place, row by row, times an odd number."""
    count = case.rows * case.columns
    return (np.arange(count, dtype=np.uint32) * np.uint32(2654435761)).reshape(case.rows, case.columns)


@checks("blocking.apply/C1", every_block)
@checks("blocking.apply/C1", nested)
@checks("blocking.apply/C1", shapes)
def test_apply_equals_the_reference(backend: Remote, case: LayoutCase) -> None:
    """Distinct words are at the same places in the stream as in the reference's, and the argument is unchanged."""
    assert_reference(backend, case, "stream", places(case), case.layout)


@checks("blocking.apply/C2", nested)
@checks("blocking.apply/C2", shapes)
def test_apply_loses_nothing_and_adds_nothing(backend: Remote, case: LayoutCase) -> None:
    """Random words with every bit in use are all in the stream, each as often as in the matrix."""
    words = case.generator().integers(0, 2**32, (case.rows, case.columns), dtype=np.uint32)
    stream = assert_array("stream", backend.run("blocking.apply", words, case.layout), np.uint32, (words.size,))
    assert_exact("sorted stream", np.sort(stream), np.sort(words, axis=None))


@checks("blocking.invert/C1", every_block)
@checks("blocking.invert/C1", nested)
@checks("blocking.invert/C1", shapes)
def test_invert_equals_the_reference(backend: Remote, case: LayoutCase) -> None:
    """Distinct elements return to the same rows and columns as in the reference's."""
    assert_reference(backend, case, "words", places(case).reshape(-1), case.layout)


@checks("blocking.invert/C2", nested)
@checks("blocking.invert/C2", shapes)
def test_invert_is_the_inverse(backend: Remote, case: LayoutCase) -> None:
    """A stream that the backend inverts and the specification lays out again is unchanged."""
    stream = places(case).reshape(-1)
    words = backend.run("blocking.invert", stream, case.layout)
    assert_array("words", words, np.uint32, (case.rows, case.columns))
    assert_exact("stream", layouts.apply(np.ascontiguousarray(words), case.layout), stream)
