r"""The theorems of layouts: every word has one place, and every place one word.

For each order of blocks of the specification (`lowbit.kernels.layouts`) and each matrix of words up to a size,

.. math:: \{\mathrm{index}(r, c) : r < R,\ c < N\} = \{0, \dots, RN - 1\} ,

and `apply` puts the word at (r, c) there. For a *prepared* matrix (`lowbit_cppyy.layout.panels`), the fields of all
codes, the scales and the zeros lie inside the stream, and no two of them share a bit.

Sizes are enumerated, up to the ones below, with every size of panels and blocks: these are claims about those sizes and
no others.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from dataclasses import fields as dataclass_fields
from functools import partial
from inspect import getsource
from itertools import product

import numpy as np

from lowbit.errors import ArgumentError
from lowbit.kernels import layouts
from lowbit.kernels.layouts import ColumnPanels, Layout, NestedPanels, ZCurve
from lowbit.quantization.affine import CONVENTIONS, SCALE_DTYPES
from lowbit.quantization.packing import BITS, CODES_PER_UNIT
from lowbit_cppyy.layout import interleaving, panels
from lowbit_cppyy.layout.panels import PanelLayout
from lowbit_cppyy.recipe import PANELS
from lowbit_prove.theorem import Numbers, Outcome, Proof, Refutation, Theorem

MOST_ROWS, MOST_COLUMNS = 9, 9
"""The largest matrices of column panels and of blocks along the Z-curve."""
MOST_UNITS = 3
"""The most units of nested panels, in rows and in columns, and the most groups and units of a prepared matrix."""


def theorems() -> Iterator[Theorem]:
    """One theorem for each order of blocks, and one for each width of a prepared matrix."""
    for order, (sizes, _) in ORDERS.items():
        statement = f"index is one to one onto 0 … RN − 1, and apply puts each word there; for {sizes}"
        run = partial(ran, order)
        yield Theorem("layouts", order, statement, partial(getsource, layouts), partial(decide, order), run)
    for bits in BITS:
        statement = "codes, scales and zeros lie in the stream, and no two share a bit; for 1 to 3 units of rows"
        run = partial(ran_prepared, bits)
        yield Theorem("layouts", f"prepared-u{bits}", statement, partial(_subject, bits), partial(prepared, bits), run)


def _column_panels() -> Iterator[Layout]:
    for rows, columns in product(range(1, MOST_ROWS + 1), range(1, MOST_COLUMNS + 1)):
        yield from (ColumnPanels(rows, columns, panel) for panel in range(1, columns + 2))


def _z_curve() -> Iterator[Layout]:
    for rows, columns in product(range(1, MOST_ROWS + 1), range(1, MOST_COLUMNS + 1)):
        for height, width in product(range(1, rows + 1), range(1, columns + 1)):
            yield ZCurve(rows, columns, height, width)


def _nested_panels() -> Iterator[Layout]:
    for rows, columns, panel in product(range(1, MOST_UNITS + 1), repeat=3):
        yield NestedPanels(3 * rows, 8 * columns, 8 * panel)


ORDERS: dict[str, tuple[str, Callable[[], Iterator[Layout]]]] = {
    ColumnPanels.order: ("1 to 9 rows and columns and all panels", _column_panels),
    ZCurve.order: ("1 to 9 rows and columns and all blocks", _z_curve),
    NestedPanels.order: ("1 to 3 units of rows and of columns and all panels", _nested_panels),
}
"""For each order, the sizes that are enumerated, as text and as layouts."""


def decide(order: str) -> Outcome:
    """Check every layout of an order."""
    steps = 0
    for layout in ORDERS[order][1]():
        if (found := one_to_one(layout)) is not None:
            return found
        steps += layout.size
    return Proof(steps, "enumeration")


def one_to_one(layout: Layout) -> Refutation | None:
    """A refutation if two words have one place, or if `apply` puts a word elsewhere."""
    words = np.arange(layout.size, dtype=np.uint32).reshape(layout.rows, layout.columns)
    stream, taken = layouts.apply(words, layout), dict[int, tuple[int, int]]()
    for row, column in np.ndindex(words.shape):
        place = layout.index(row, column)
        numbers = {**vars(layout), "place": place}
        if not 0 <= place < layout.size:
            return Refutation(f"{layout}: the place of ({row}, {column}) is outside the stream", numbers)
        if place in taken:
            return Refutation(f"{layout}: ({row}, {column}) and {taken[place]} have one place", numbers)
        taken[place] = row, column
        if stream[place] != words[row, column]:
            return Refutation(f"{layout}: apply puts ({row}, {column}) elsewhere", numbers)
    return None


def ran(order: str, numbers: Numbers) -> Refutation | None:
    """Check only the layout of a refutation."""
    for layout in ORDERS[order][1]():
        if vars(layout).items() <= numbers.items():
            return one_to_one(layout)
    raise ArgumentError("numbers", dict(numbers), f"the sizes of a layout of order {order}")


# **Prepared matrices.**


@dataclass
class Taken:
    """The bits of a stream that are already taken, by element."""

    bits: list[int]

    def take(self, element: int, mask: int) -> bool:
        """Take bits; returns whether they were free and inside the stream."""
        free = 0 <= element < len(self.bits) and not self.bits[element] & mask
        if free:
            self.bits[element] |= mask
        return free


def prepared(bits: int) -> Outcome:
    """Check every prepared matrix of a width, up to some groups and units, also with groups that are not whole
    units."""
    steps = 0
    for layout in _prepared(bits):
        if (found := disjoint(layout)) is not None:
            return found
        steps += layout.rows * layout.columns
    return Proof(steps, "enumeration")


def ran_prepared(bits: int, numbers: Numbers) -> Refutation | None:
    """Check only the prepared matrix of a refutation."""
    for layout in _prepared(bits):
        if _sizes(layout).items() <= numbers.items():
            return disjoint(layout)
    raise ArgumentError("numbers", dict(numbers), f"the sizes of a prepared matrix of {bits} bits")


def _sizes(layout: PanelLayout) -> dict[str, int | str]:
    return {each.name: getattr(layout, each.name) for each in dataclass_fields(layout)}


def _prepared(bits: int) -> Iterator[PanelLayout]:
    unit = CODES_PER_UNIT[bits]
    for units, size in product(range(1, MOST_UNITS + 1), (unit // 2, unit, unit + 1, 2 * unit)):
        for scales, convention, panel in product(SCALE_DTYPES, CONVENTIONS, PANELS):
            yield PanelLayout(bits, units * unit, panel + 1, min(size, units * unit), scales, convention, panel)


def disjoint(layout: PanelLayout) -> Refutation | None:
    """A refutation if a code, a scale or a zero shares a bit with another, or lies outside the stream."""
    taken = Taken([0] * (layout.nbytes // 4))
    for row, column in product(range(layout.rows), range(layout.columns)):
        for element, field in layout.index(row, column):
            if not taken.take(element, field.mask):
                numbers = {**_sizes(layout), "element": element}
                return Refutation(f"{layout}: bits of the code at ({row}, {column}) are taken", numbers)
    for group, panel in product(range(layout.groups), range(layout.panels)):
        first = layout.index_scale(group, panel)
        for element in range(first, first + layout.scale_elements + layout.zero_elements):
            if not taken.take(element, 2**32 - 1):
                numbers = {**_sizes(layout), "element": element}
                return Refutation(f"{layout}: scales or zeros of group {group} are taken", numbers)
    return None


def _subject(bits: int) -> str:
    return f"{bits} bits\n{getsource(panels)}{getsource(interleaving)}"
