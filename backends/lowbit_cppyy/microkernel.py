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

In the paper's terms, the codes of a unit are :math:`m_u` and the vector registers side by side :math:`t_u`.

Source: QIGen §3, Algorithms 2 and 3, equation 2; errata Q3, Q5, Q7.
"""

from collections.abc import Iterator

from lowbit.packing import CODES_PER_UNIT, WORD_BITS, WORDS_PER_UNIT
from lowbit_cppyy.program import Address, Advance, Comment, Instruction, Loop, Program, Step

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
    return Program(bits, lanes, rows, columns, panel, tuple(_Tile(bits, lanes, panel, columns, rows).kernel()))


class _Tile:
    """What the steps of one program have in common: its sizes and the names of its registers."""

    def __init__(self, bits: int, lanes: int, panel: int, columns: int, rows: int) -> None:
        self.bits, self.lanes, self.panel, self.columns = bits, lanes, panel, columns
        self.rows, self.registers = range(rows), range(columns // lanes)
        self.tile = [(r, j) for r in self.rows for j in self.registers]

    def kernel(self) -> Iterator[Step]:
        """Algorithm 3 over all groups; the results stay in registers until the end."""
        yield Instruction("broadcast_int", "mask", (2**self.bits - 1,))
        for r, j in self.tile:
            yield Instruction("broadcast_float", f"y_{r}_{j}", (0.0,))
        yield Loop("g", "groups", tuple(self.group()))
        for r, j in self.tile:
            yield Instruction("store", "", (Address("y", r * self.panel + j * self.lanes), f"y_{r}_{j}"))

    def group(self) -> Iterator[Step]:
        """One term of equation 2: the dot product with the codes, then scale and offset."""
        for r, j in self.tile:
            yield Instruction("broadcast_float", f"acc_{r}_{j}", (0.0,))
        yield Loop("u", "units[g]", tuple(self.unit()))
        yield Comment("y += acc * s + X * o")
        for r in self.rows:
            yield Instruction("broadcast_float", f"X_{r}", (Address("x", r),))
        for j in self.registers:
            yield Instruction("load_float", f"s_{j}", (Address("w", j * self.lanes),))
            yield Instruction("load_float", f"o_{j}", (Address("w", self.panel + j * self.lanes),))
            for r in self.rows:
                yield Instruction("fmadd", f"y_{r}_{j}", (f"acc_{r}_{j}", f"s_{j}", f"y_{r}_{j}"))
                yield Instruction("fmadd", f"y_{r}_{j}", (f"X_{r}", f"o_{j}", f"y_{r}_{j}"))
        yield Advance("w", 2 * self.panel)
        yield Advance("x", len(self.rows))

    def unit(self) -> Iterator[Step]:
        """The codes of one unit in order: unpack, then one multiply-add for each row of x."""
        codes, words = CODES_PER_UNIT[self.bits], WORDS_PER_UNIT[self.bits]
        for word in range(words):
            for place in range(0, self.columns, LINE):
                yield Instruction("prefetch", "", (Address("w", word * self.panel + place + AHEAD),))
        loaded = 0
        for code in range(codes):
            while loaded * WORD_BITS < (code + 1) * self.bits:  # the word that this code ends in, when first needed
                for j in self.registers:
                    place = loaded * self.panel + j * self.lanes
                    yield Instruction("load_int", f"w{loaded}_{j}", (Address("w", place),))
                loaded += 1
            yield Comment(f"code {code}")
            for r in self.rows:
                yield Instruction("broadcast_float", f"x_{r}", (Address("x", code * len(self.rows) + r),))
            for j in self.registers:
                yield from self.unpack(code, j)
                for r in self.rows:
                    yield Instruction("fmadd", f"acc_{r}_{j}", (f"x_{r}", f"l_{j}", f"acc_{r}_{j}"))
        yield Advance("w", words * self.panel)
        yield Advance("x", codes * len(self.rows))

    def unpack(self, code: int, j: int) -> Iterator[Step]:
        """Algorithm 2 for one code: shift, mask, convert. A code that straddles two words joins them first."""
        word, shift = divmod(code * self.bits, WORD_BITS)
        register = f"w{word}_{j}"
        if shift > 0:
            yield Instruction("srli", f"a_{j}", (register, shift))
            register = f"a_{j}"
        if shift + self.bits > WORD_BITS:
            yield Instruction("slli", f"b_{j}", (f"w{word + 1}_{j}", WORD_BITS - shift))
            yield Instruction("or", f"a_{j}", (register, f"b_{j}"))
        if shift + self.bits != WORD_BITS:  # the last code of a word is alone after its shift
            yield Instruction("and", f"a_{j}", (register, "mask"))
        yield Instruction("cvt_int_float", f"l_{j}", (f"a_{j}",))
