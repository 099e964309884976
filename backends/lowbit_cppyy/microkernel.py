r"""The generator: one micro-kernel program for every width of code and every size of tile.

This is QIGen's Algorithm 3 with Algorithm 2 inside it, for groups (equation 2). Over one panel of columns it computes,
for each of its rows of x and each column j,

.. math:: y_j = \sum_g s_{gj} \Bigl(\sum_{k \in g} x_k\, q_{kj}\Bigr) + o_{gj}\, X_g ,
   \qquad X_g = \sum_{k \in g} x_k ,

where the offset :math:`o` is the group's minimum, or minus scale times zero. Lanes are columns, so no register is
ever summed across its lanes. Two streams feed it, each read once from front to back:

- ``w``, of 32-bit elements (`lowbit_cppyy.layout`): for each group, its units of words, a row of scales and a row of
  offsets, each row as wide as the panel;
- ``x``, of float32: for each group, the activations of its codes in order, zeros where a unit is not full, then
  :math:`X_g`; with several rows of x, their elements lie side by side.

A group is whole units, filled up with zeros on both sides, so the program has no tails. How many groups there are, and
how many units each has, are arguments of the call (``groups``, ``units``): one kernel serves every group size.

In the paper's terms, the codes of a unit are :math:`m_u` and the vector registers side by side :math:`t_u`. The parts
are those of the chapter `lowbit.microkernel`; what is added here is the order of the two streams, and prefetching.

Source: QIGen §3, Algorithms 2 and 3, equation 2; errata Q3, Q5, Q7.
"""

from collections.abc import Iterator

from lowbit.microkernel import load_mask, scale_and_offset, set_to_zero, streamed_unit
from lowbit.packing import WORDS_PER_UNIT
from lowbit.program import Address, Advance, Element, Instruction, Loop, Program, Step

LINE = 16  # elements in a line of the cache
AHEAD = 1024  # elements, one page: the processor's own prefetch stops at the end of a page


def micro_kernel(bits: int, *, lanes: int, panel: int, columns: int, rows: int) -> Program:
    """The program for `rows` rows of x and `columns` columns of a panel.

    Args:
        bits: 2, 3, 4 or 8.
        lanes: numbers in one vector register.
        panel: columns in a panel: elements from one row of words to the next.
        columns: columns computed at once; a multiple of `lanes` that divides `panel`.
        rows: rows of x computed at once.
    """
    assert columns % lanes == 0 and panel % columns == 0
    tile = [(r, j) for r in range(rows) for j in range(columns // lanes)]
    return Program(
        lanes,
        (
            *load_mask(bits),
            *(set_to_zero(f"y_{r}_{j}") for r, j in tile),
            Loop("g", "groups", tuple(_group(bits, lanes, panel, columns, rows))),
            *(Instruction("store", "", (Address("y", r * panel + j * lanes), f"y_{r}_{j}")) for r, j in tile),
        ),
    )


def _group(bits: int, lanes: int, panel: int, columns: int, rows: int) -> Iterator[Step]:
    """One term of equation 2: the dot product with the codes, then scale and offset."""
    registers = columns // lanes
    for r in range(rows):
        for j in range(registers):
            yield set_to_zero(f"acc_{r}_{j}")
    unit = streamed_unit(bits, rows=rows, registers=registers, lanes=lanes, stride=panel)
    yield Loop("u", Element("units", "g"), (*_prefetch(bits, panel, columns), *unit))
    yield from scale_and_offset(
        rows,
        registers,
        sums=lambda r: Address("x", r),
        scales=lambda j: Address("w", j * lanes),
        offsets=lambda j: Address("w", panel + j * lanes),
    )
    yield Advance("w", 2 * panel)
    yield Advance("x", rows)


def _prefetch(bits: int, panel: int, columns: int) -> Iterator[Step]:
    """Ask for the lines of the words that lie a page further on."""
    for word in range(WORDS_PER_UNIT[bits]):
        for place in range(0, columns, LINE):
            yield Instruction("prefetch", "", (Address("w", word * panel + place + AHEAD),))
