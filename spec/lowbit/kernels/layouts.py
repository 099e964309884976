r"""Layouts: the order in which a matrix of words lies in memory.

The chapter `packing` says which bits of which word a code occupies; it leaves the words in rows of N. A kernel that
computes a few registers of columns and goes down all rows would access a new page of memory at every step. So a
kernel's words are stored in the order in which it reads them. Such an order is a *layout*: a value that says where each
word goes. `apply` stores a matrix in it, and `invert` reads it back; they move words without changing them.

**Blocks, one after the other.** The layouts here cut the matrix into blocks and store one block after the other, each
row by row. They differ in the shape of the blocks and in their order:

- *column panels*: a block is P columns wide and as high as the matrix; panels from left to right. The authors'
  published code does this at 2 and 4 bits, and it suits kernels that keep a panel's sums in registers.
- *nested panels*: the authors' published code does this at 3 bits. Panels have P columns again, but a panel is cut into
  units of 3 rows, which hold 32 codes of each column, and a unit into blocks of 8 columns. So the three vectors of 8
  words that hold 32 codes of 8 columns are adjacent. The word at row :math:`r` and column :math:`c` of :math:`R \times
  N` words lies at

  .. math:: jPR + 3w \lfloor r/3 \rfloor + 24 \lfloor (c - jP)/8 \rfloor + 8\,(r \bmod 3) + c \bmod 8, \qquad
     j = \lfloor c/P \rfloor, \quad w = \min(P, N - jP),

  and its bits are those of the chapter `packing`: codes 10 and 21 of a unit straddle two words.
- *Z-curve*: blocks of any height and width, as the cache model of the chapter `blocking` chooses them, in the order of
  their *Morton codes*, the numbers that interleave the bits of block row :math:`r` and block column :math:`c`,

  .. math:: z(r, c) = \sum_i \bigl(2\,r_i + c_i\bigr)\,4^{\,i}, \qquad r = \sum_i r_i 2^i, \quad c = \sum_i c_i 2^i.

  Blocks that are near each other in the matrix are then near each other in memory, at every scale: an aligned square of
  :math:`2^k \times 2^k` blocks is one run. The paper claims this order (errata Q11).

.. plot:: figures/z_curve.py

**Why they are permutations.** The blocks cut the matrix into parts that do not overlap and leave nothing out. Each gets
as many places in the stream as it has words, beginning where the last one ended; so these runs do not overlap either,
and leave nothing out. Row by row is one to one within a block. Hence every word has one place and every place one word,
whatever the order of the blocks. There is no padding: blocks at the edges are smaller.

Source: QIGen §3 (Mini-GEMV); errata Q6, Q11; G. M. Morton, A computer oriented geodetic data base, 1966.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Annotated, ClassVar

import numpy as np

from lowbit.contract.checks import check_integer
from lowbit.contract.operation import EXACT, Parameters, operation
from lowbit.contract.signature import Shape, checked
from lowbit.errors import ArgumentError
from lowbit.quantization.packing import Words


def morton(row: int, column: int) -> int:
    """The interleaved bits of two numbers; each bit of the column is below that of the row.

    >>> [morton(row, column) for row in range(2) for column in range(4)]
    [0, 1, 4, 5, 2, 3, 6, 7]

    Source: errata Q11.
    """
    bits = range(max(row, column).bit_length())
    return sum((row >> i & 1) << 2 * i + 1 | (column >> i & 1) << 2 * i for i in bits)


# **A layout as a value.** The common part of all layouts; each layout defines the shape and the order of its blocks.


@dataclass(frozen=True)
class Layout(ABC):
    """The position of each word of a matrix of `rows` × `columns` words in a stream of equal length.

    Attributes:
        rows: rows of words.
        columns: N, columns.
        order: the name of the order in a backend's declaration.
    """

    rows: int
    columns: int
    order: ClassVar[str]

    @property
    @abstractmethod
    def block(self) -> tuple[int, int]:
        """Rows and columns of a block; those at the lower and right edge may have fewer."""

    @abstractmethod
    def walk(self, block_rows: int, block_columns: int) -> Iterator[tuple[int, int]]:
        """The blocks of a grid of this many rows and columns, each once, in the order of the stream."""

    def __post_init__(self) -> None:
        for name, size in vars(self).items():
            check_integer(name, size, 1)

    @property
    def size(self) -> int:
        """Words of the matrix, and of the stream."""
        return self.rows * self.columns

    @property
    def parameters(self) -> Parameters:
        """The parameters by which a backend declares the layouts that it handles."""
        return {"order": self.order}

    @cached_property
    def starts(self) -> dict[tuple[int, int], int]:
        """The start of each block in the stream, by its row and column in the grid; in the order of the stream."""
        height, width = self.block
        starts, place = dict[tuple[int, int], int](), 0
        for block in self.walk(-(-self.rows // height), -(-self.columns // width)):
            starts[block] = place
            rows, columns = self.spans(*block)
            place += len(rows) * len(columns)
        return starts

    def spans(self, block_row: int, block_column: int) -> tuple[range, range]:
        """The rows and the columns of a block."""
        height, width = self.block
        top, left = block_row * height, block_column * width
        return range(top, min(top + height, self.rows)), range(left, min(left + width, self.columns))

    def index(self, row: int, column: int) -> int:
        """The index in the stream of the word at (row, column).

        Raises:
            ArgumentError: there is no such row or column.
        """
        check_integer("row", row, 0, self.rows - 1)
        check_integer("column", column, 0, self.columns - 1)
        block = row // self.block[0], column // self.block[1]
        rows, columns = self.spans(*block)
        return self.starts[block] + (row - rows.start) * len(columns) + column - columns.start

    def parts(self, words: Words, stream: Words) -> Iterator[tuple[Words, Words]]:
        """The words of each block in the matrix and in the stream, as views of equal shape."""
        for block, start in self.starts.items():
            rows, columns = self.spans(*block)
            part = words[rows.start : rows.stop, columns.start : columns.stop]
            yield part, stream[start : start + part.size].reshape(part.shape)


@dataclass(frozen=True)
class ColumnPanels(Layout):
    """Panels of `panel` columns, from left to right.

    >>> apply(np.arange(10, dtype=np.uint32).reshape(2, 5), ColumnPanels(2, 5, panel=2))
    array([0, 1, 5, 6, 2, 3, 7, 8, 4, 9], dtype=uint32)

    Attributes:
        panel: P, columns of a panel.

    Raises:
        ArgumentError: a size below 1.

    Source: errata Q11.
    """

    panel: int
    order: ClassVar[str] = "column_panels"

    @property
    def block(self) -> tuple[int, int]:
        """All rows, P columns."""
        return self.rows, self.panel

    def walk(self, block_rows: int, block_columns: int) -> Iterator[tuple[int, int]]:
        """From left to right."""
        yield from product(range(block_rows), range(block_columns))


@dataclass(frozen=True)
class ZCurve(Layout):
    """Blocks in the order of their Morton codes.

    >>> layout = ZCurve(4, 4, block_rows=1, block_columns=1)
    >>> np.array([[layout.index(row, column) for column in range(4)] for row in range(4)])
    array([[ 0,  1,  4,  5],
           [ 2,  3,  6,  7],
           [ 8,  9, 12, 13],
           [10, 11, 14, 15]])

    Attributes:
        block_rows: rows of words of a block, :math:`b m_b / 32`.
        block_columns: columns of a block, :math:`t_b`.

    Raises:
        ArgumentError: a size below 1.

    Source: QIGen §3 (Mini-GEMV); errata Q6, Q11.
    """

    block_rows: int
    block_columns: int
    order: ClassVar[str] = "z_curve"

    @property
    def block(self) -> tuple[int, int]:
        """The given rows and columns."""
        return self.block_rows, self.block_columns

    def walk(self, block_rows: int, block_columns: int) -> Iterator[tuple[int, int]]:
        """By Morton code. If the grid is not a square whose side is a power of two, codes outside it are skipped."""
        yield from sorted(product(range(block_rows), range(block_columns)), key=lambda block: morton(*block))


UNIT_ROWS, UNIT_COLUMNS = 3, 8
"""The words of 32 3-bit codes, and the columns of a 256-bit vector."""


@dataclass(frozen=True)
class NestedPanels(Layout):
    """Panels of `panel` columns, cut into blocks of 3 rows × 8 columns: for words of 3-bit codes.

    >>> layout = NestedPanels(6, 16, panel=16)
    >>> [layout.index(row, 0) for row in range(6)], [layout.index(0, column) for column in (1, 7, 8, 15)]
    ([0, 8, 16, 48, 56, 64], [1, 7, 24, 31])

    Attributes:
        rows: rows of words, a multiple of 3: whole units.
        columns: N, a multiple of 8.
        panel: P, columns of a panel, a multiple of 8; the last panel may have fewer.

    Raises:
        ArgumentError: a size below 1; rows or columns that do not fill blocks.

    Source: errata Q11.
    """

    panel: int
    order: ClassVar[str] = "nested_panels"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, size, whole in (
            ("rows", self.rows, UNIT_ROWS),
            ("columns", self.columns, UNIT_COLUMNS),
            ("panel", self.panel, UNIT_COLUMNS),
        ):
            if size % whole != 0:
                raise ArgumentError(name, size, f"a multiple of {whole} in nested panels")

    @property
    def block(self) -> tuple[int, int]:
        """3 rows, 8 columns."""
        return UNIT_ROWS, UNIT_COLUMNS

    def walk(self, block_rows: int, block_columns: int) -> Iterator[tuple[int, int]]:
        """Panel by panel from left to right, and in each panel row by row."""
        width = self.panel // UNIT_COLUMNS
        for left in range(0, block_columns, width):
            yield from product(range(block_rows), range(left, min(left + width, block_columns)))


ORDERS = (ColumnPanels.order, ZCurve.order, NestedPanels.order)


# **Conversion and its inverse**, as operations that a backend may implement.


@checked
def apply(words: Annotated[Words, Shape("layout.rows", "layout.columns")], layout: Layout) -> Words:
    """Store the words of a matrix in the order of a layout.

    Args:
        words: uint32, rows × N of the layout.
        layout: where each word goes.

    Returns:
        uint32, rows · N: element ``layout.index(row, column)`` is ``words[row, column]``.

    Raises:
        ArgumentError: no layout, or words of another dtype, shape or contiguity.

    Source: QIGen §3 (Mini-GEMV); errata Q11.
    """
    stream = np.empty(layout.size, np.uint32)
    for part, run in layout.parts(words, stream):
        run[...] = part
    return stream


@checked
def invert(stream: Annotated[Words, Shape("layout.size")], layout: Layout) -> Words:
    """Read a stream back into rows of words; the inverse of `apply`.

    Args:
        stream: uint32, rows · N of the layout.
        layout: where each word went.

    Returns:
        uint32, rows × N.

    Raises:
        ArgumentError: no layout, or a stream of another dtype, length or contiguity.

    Source: QIGen §3 (Mini-GEMV); errata Q11.
    """
    words = np.empty((layout.rows, layout.columns), np.uint32)
    for part, run in layout.parts(words, stream):
        part[...] = run
    return words


# **What a backend promises.**

operation(
    "blocking.apply",
    "Words to the order of a layout",
    apply,
    promise=EXACT,
    source="QIGen §3; errata Q6, Q11",
    clauses={
        "C1": "Element index(row, column) of the stream is the word at (row, column), for every row and column.",
        "C2": "The stream is uint32 and has as many elements as the matrix has words: none is filled up.",
    },
)

operation(
    "blocking.invert",
    "The order of a layout to words",
    invert,
    promise=EXACT,
    source="QIGen §3; errata Q6, Q11",
    clauses={
        "C1": "The word at (row, column) is element index(row, column) of the stream, for every row and column.",
        "C2": "The result is uint32, rows × N, and applying the layout to it gives the stream back.",
    },
)
