r"""Micro-kernels: QIGen's Algorithms 1, 2 and 3 as programs that a generator writes.

The innermost loop of a quantised product loads words, extracts their codes, and multiplies and adds. The best number of
codes and registers to handle at once differs between processors. So a *generator* writes the loop: a function of the
bits, the sizes and the lanes whose result is a program. The programs here run in `lowbit.kernels.interpreter`. A
backend that generates kernels writes programs of its own in the same vocabulary (`lowbit.kernels.program`), with its
own loops and layouts, and lowers them to instructions of a processor.

Lanes are neighbouring output columns (errata Q5). In register names, :math:`j` counts adjacent registers, each of
:math:`L` columns, and :math:`r` counts rows of activations.

**What the paper's algorithms leave out.** Algorithm 2 is for 4 bits; in general, the shift of code :math:`c` is
:math:`bc \bmod 32`, and a code that straddles two words is joined first. Algorithm 3 steps :math:`i` by :math:`m_u` and
addresses row :math:`\lfloor i/8 \rfloor` of words, so a shift would depend on :math:`i` unless :math:`m_u` is a
multiple of the codes in a word. An iteration of the loop here covers the least common multiple of :math:`m_u` and a
unit, in micro-steps of :math:`m_u`, so every shift is a constant. Its rows of words are :math:`\lfloor i b/32 \rfloor`
to :math:`\lfloor ((i + m_u) b - 1)/32 \rfloor`, and its loop ends at :math:`m_b` (errata Q7).

Source: QIGen §3, algorithms 1 to 3; figure 2; errata Q5, Q7, Q8, Q10.
"""

from collections.abc import Callable, Iterator
from math import lcm

from lowbit.contract.checks import check_choice, check_integer
from lowbit.errors import ArgumentError
from lowbit.kernels.program import Address, Advance, Comment, Instruction, Loop, Program, Step
from lowbit.quantization.packing import BITS, CODES_PER_UNIT, WORD_BITS, WORDS_PER_UNIT, check_rows

# **Part one: unpack.** One code of a unit: shift, mask, convert. Steps without effect are omitted: the shift of a code
# at the bottom of a word, the mask of one at the top.


def load_mask(bits: int) -> Iterator[Step]:
    """The mask that `unpack_code` needs: a broadcast of :math:`2^b - 1`, once before all loops.

    Source: QIGen algorithm 2, line 3.
    """
    yield Instruction("broadcast_int", "mask", (2**bits - 1,))


def unpack_code(bits: int, code: int, word: str, following: str, *, a: str, b: str, to: str) -> Iterator[Step]:
    """Take one code out of its word.

    >>> for step in unpack_code(4, 2, "w", "", a="a", b="b", to="l"):
    ...     print(step.target, "=", step.word, *step.arguments)
    a = srli w 8
    a = and a mask
    l = cvt_int_float a

    Args:
        bits: b, the width of a code.
        code: its index in the unit, or in any run of codes that starts at the beginning of a word.
        word: the register with the word in which the code begins.
        following: the register with the next word, read only if the code straddles.
        a: register for the code.
        b: register for the upper part of a code that straddles.
        to: register for the code as float32.

    Source: QIGen algorithm 2; errata Q10.
    """
    shift = code * bits % WORD_BITS
    if shift > 0:
        yield Instruction("srli", a, (word, shift))
        word = a
    if shift + bits > WORD_BITS:
        yield Instruction("slli", b, (following, WORD_BITS - shift))
        yield Instruction("or", a, (word, b))
        word = a
    if shift + bits != WORD_BITS:
        yield Instruction("and", a, (word, "mask"))
    yield Instruction("cvt_int_float", to, (a,))


# **Part two: one unit, streamed.** Every word is loaded once, when its first code is needed, and each code is used as
# soon as it is unpacked. So apart from the sums only the words, one activation and one code are live, whatever the
# number of codes. This order suits memory-bound kernels.


def streamed_unit(bits: int, *, rows: int, registers: int, lanes: int, stride: int) -> Iterator[Step]:
    """The codes of one unit in order: unpack, then one multiply-add for each row of x; then the next unit.

    Reads from the pointers ``w`` (rows of words) and ``x`` (for each code the elements of all rows side by side), and
    adds to the registers ``acc_r_j``.

    Args:
        bits: b, the width of a code.
        rows: rows of x.
        registers: registers side by side, :math:`t_u`.
        lanes: L, lanes of a register.
        stride: elements from one row of words to the next.

    Source: QIGen algorithm 1, lines 5 to 12; algorithm 2.
    """
    loaded = 0
    for code in range(CODES_PER_UNIT[bits]):
        while loaded * WORD_BITS < (code + 1) * bits:  # the word that this code ends in, when first needed
            for j in range(registers):
                yield Instruction("load_int", f"w{loaded}_{j}", (Address("w", loaded * stride + j * lanes),))
            loaded += 1
        yield Comment(f"code {code}")
        for r in range(rows):
            yield Instruction("broadcast_float", f"x_{r}", (Address("x", code * rows + r),))
        word = code * bits // WORD_BITS
        for j in range(registers):
            yield from unpack_code(bits, code, f"w{word}_{j}", f"w{word + 1}_{j}", a=f"a_{j}", b=f"b_{j}", to=f"l_{j}")
            for r in range(rows):
                yield Instruction("fmadd", f"acc_{r}_{j}", (f"x_{r}", f"l_{j}", f"acc_{r}_{j}"))
    yield Advance("w", WORDS_PER_UNIT[bits] * stride)
    yield Advance("x", CODES_PER_UNIT[bits] * rows)


# **Part three: scale and offset.** The remaining work of a group after its dot product: equation 2's :math:`y
# \mathrel{+}= s \cdot acc + o \hat x`, where :math:`o = -s z` is the offset of the chapter `linear`, and :math:`\hat x`
# the sum of the group's activations.


Place = Callable[[int], Address]


def scale_and_offset(rows: int, registers: int, sums: Place, scales: Place, offsets: Place) -> Iterator[Step]:
    """Add one group to the registers ``y_r_j``, from its sums of products in ``acc_r_j``.

    Args:
        rows: rows of x.
        registers: registers side by side.
        sums: the address of the sum of row r of x over the group.
        scales: the address of the scales of register j.
        offsets: the address of the offsets of register j.

    Source: QIGen algorithm 1, line 13; equation 2; errata Q3, Q5.
    """
    yield Comment("y += acc * s + X * o")
    for r in range(rows):
        yield Instruction("broadcast_float", f"X_{r}", (sums(r),))
    for j in range(registers):
        yield Instruction("load_float", f"s_{j}", (scales(j),))
        yield Instruction("load_float", f"o_{j}", (offsets(j),))
        for r in range(rows):
            yield Instruction("fmadd", f"y_{r}_{j}", (f"acc_{r}_{j}", f"s_{j}", f"y_{r}_{j}"))
            yield Instruction("fmadd", f"y_{r}_{j}", (f"X_{r}", f"o_{j}", f"y_{r}_{j}"))


def set_to_zero(register: str) -> Instruction:
    """``register = broadcast(0)``, the start of every sum."""
    return Instruction("broadcast_float", register, (0.0,))


# **Algorithm 1: the GEMV.** One register of columns at a time, down all rows. Its memories are ``w``, the words in the
# layout of the chapter `packing`; ``x``; ``X``, the sum of each group's activations; ``s`` and ``o``, scales and
# offsets, G × N; and ``y``. With one group this is equation 1 and the algorithm as printed; with more, equation 2.


def algorithm_1(bits: int, rows: int, columns: int, group_size: int, *, lanes: int) -> Program:
    """The program of ``y = x W``.

    Args:
        bits: 2, 3, 4 or 8.
        rows: K, whole groups.
        columns: N, whole registers.
        group_size: rows of a group, whole units; K for one group.
        lanes: L, lanes of a register.

    Raises:
        ArgumentError: wrong bits, or sizes that are not whole.

    Source: QIGen algorithm 1; equations 1 and 2; errata Q4, Q5.
    """
    check_sizes(bits, lanes=lanes)
    check_rows("group_size", group_size, bits)
    check_multiple("rows", rows, group_size, "whole groups")
    check_multiple("columns", columns, lanes, "whole registers")
    groups, word_rows = rows // group_size, rows * bits // WORD_BITS
    unit = tuple(streamed_unit(bits, rows=1, registers=1, lanes=lanes, stride=columns))
    group = (
        set_to_zero("acc_0_0"),
        Loop("i", group_size // CODES_PER_UNIT[bits], unit),
        *scale_and_offset(1, 1, lambda r: Address("X"), lambda j: Address("s"), lambda j: Address("o")),
        Advance("X", 1),
        Advance("s", columns),
        Advance("o", columns),
    )
    register = (
        set_to_zero("y_0_0"),
        Loop("g", groups, group),
        Instruction("store", "", (Address("y"), "y_0_0")),
        Advance("w", lanes - word_rows * columns),  # to the first row, one register to the right
        Advance("x", -rows),
        Advance("X", -groups),
        Advance("s", lanes - groups * columns),
        Advance("o", lanes - groups * columns),
        Advance("y", lanes),
    )
    return Program(lanes, (*load_mask(bits), Loop("j", columns // lanes, register)))


# **Algorithm 2: unpack**, for any number of bits: reads one unit of words from ``v`` and writes its codes to ``l``.


def algorithm_2(bits: int, *, lanes: int) -> Program:
    """The program that unpacks the codes of one unit of L columns.

    Memories: ``v``, the words of the unit, a register each; ``l``, its codes as float32, a register each.

    Raises:
        ArgumentError: wrong bits or lanes.

    Source: QIGen algorithm 2; errata Q10.
    """
    check_sizes(bits, lanes=lanes)
    steps: list[Step] = [*load_mask(bits)]
    for word in range(WORDS_PER_UNIT[bits]):
        steps.append(Instruction("load_int", f"v{word}", (Address("v", word * lanes),)))
    for code in range(CODES_PER_UNIT[bits]):
        word = code * bits // WORD_BITS
        steps += unpack_code(bits, code, f"v{word}", f"v{word + 1}", a="a", b="b", to="l")
        steps.append(Instruction("store", "", (Address("l", code * lanes), "l")))
    return Program(lanes, tuple(steps))


# **Algorithm 3: the μGEMV.** It adds the products of a block of :math:`m_b` codes by :math:`t_u L` columns to y, which
# stays in registers; scale and offset follow after the last block of a group. Memories: ``w``, the block's words,
# `stride` elements a row; ``x``; ``y``. The size ``iterations`` is the number of iterations of `codes_per_iteration`
# codes that make :math:`m_b`.


def codes_per_iteration(bits: int, m_u: int) -> int:
    """The number of codes of one iteration of Algorithm 3's loop: the smallest that is whole micro-steps and whole
    units.

    >>> codes_per_iteration(4, m_u=3)
    24
    """
    return lcm(CODES_PER_UNIT[bits], m_u)


def algorithm_3(bits: int, m_u: int, t_u: int, *, lanes: int, stride: int) -> Program:
    r"""Algorithm 3 to the letter: first all words and all activations of a micro-step, then the arithmetic.

    Each of the :math:`m_u t_u` registers ``w_c_j`` gets the word in which its own code lies and unpacks it in place.
    These, :math:`m_u` activations and :math:`t_u` sums are the registers of equation 4. The mask is an additional
    register; so is, with 3 bits, the second word of a code that straddles. A word is loaded again for each of its
    codes.

    Args:
        bits: 2, 3, 4 or 8.
        m_u: codes of a micro-step.
        t_u: registers side by side.
        lanes: L, lanes of a register.
        stride: elements from one row of words to the next.

    Raises:
        ArgumentError: wrong bits, or a size below 1.

    Source: QIGen algorithm 3; figure 2; equation 4; errata Q7, Q8.
    """
    check_sizes(bits, lanes=lanes, m_u=m_u, t_u=t_u, stride=stride)
    codes, steps = codes_per_iteration(bits, m_u), list[Step]()
    for first in range(0, codes, m_u):
        steps += _micro_step(bits, range(first, first + m_u), t_u, lanes, stride)
    steps += [Advance("w", codes * bits // WORD_BITS * stride), Advance("x", codes)]
    return _accumulating(bits, "y_{}", t_u, lanes, steps)


def _micro_step(bits: int, codes: range, t_u: int, lanes: int, stride: int) -> Iterator[Step]:
    """Load words, load activations, compute."""
    tile = [(code, c, j) for c, code in enumerate(codes) for j in range(t_u)]
    for code, c, j in tile:
        yield Instruction("load_int", f"w_{c}_{j}", (Address("w", code * bits // WORD_BITS * stride + j * lanes),))
    for c, code in enumerate(codes):
        yield Instruction("broadcast_float", f"x_{c}", (Address("x", code),))
    for code, c, j in tile:
        if code * bits % WORD_BITS + bits > WORD_BITS:
            place = (code * bits // WORD_BITS + 1) * stride + j * lanes
            yield Instruction("load_int", "v", (Address("w", place),))
        yield from unpack_code(bits, code, f"w_{c}_{j}", "v", a=f"w_{c}_{j}", b="v", to=f"l_{c}_{j}")
        yield Instruction("fmadd", f"y_{j}", (f"x_{c}", f"l_{c}_{j}", f"y_{j}"))


def algorithm_3_streamed(bits: int, t_u: int, *, lanes: int, stride: int) -> Program:
    """The same sums in the order of `streamed_unit`: :math:`m_u` is a unit, and no word is loaded twice.

    Args and errors: as `algorithm_3`.

    Source: QIGen algorithm 3; errata Q7, Q8.
    """
    check_sizes(bits, lanes=lanes, t_u=t_u, stride=stride)
    steps = list(streamed_unit(bits, rows=1, registers=t_u, lanes=lanes, stride=stride))
    return _accumulating(bits, "acc_0_{}", t_u, lanes, steps)


def _accumulating(bits: int, name: str, t_u: int, lanes: int, iteration: list[Step]) -> Program:
    """The frame of Algorithm 3: load y into registers, loop, store y."""
    places = [(name.format(j), Address("y", j * lanes)) for j in range(t_u)]
    return Program(
        lanes,
        (
            *load_mask(bits),
            *(Instruction("load_float", register, (place,)) for register, place in places),
            Loop("i", "iterations", tuple(iteration)),
            *(Instruction("store", "", (place, register)) for register, place in places),
        ),
    )


def epilogue(t_u: int, *, lanes: int) -> Program:
    """What follows Algorithm 3 at the end of a group: ``y += acc * s + X * o`` for :math:`t_u` registers.

    Memories: ``acc``, ``s``, ``o`` and ``y``, :math:`t_u L` elements each; ``X``, one.

    Source: QIGen algorithm 1, line 13; equation 2.
    """
    check_integer("t_u", t_u, 1)

    def at(pointer: str) -> Place:
        return lambda j: Address(pointer, j * lanes)

    loads = [
        Instruction("load_float", f"{register}_0_{j}", (at(register)(j),))
        for register in ("acc", "y")
        for j in range(t_u)
    ]
    stores = [Instruction("store", "", (at("y")(j), f"y_0_{j}")) for j in range(t_u)]
    return Program(lanes, (*loads, *scale_and_offset(1, t_u, at("X"), at("s"), at("o")), *stores))


def check_sizes(bits: int, **sizes: int | None) -> None:
    """Refuse widths that codes do not have, and sizes below 1; a size may be None."""
    check_choice("bits", bits, BITS)
    for name, size in sizes.items():
        if size is not None:
            check_integer(name, size, 1)


def check_multiple(argument: str, given: int, of: int, why: str) -> None:
    """Refuse a size that is not a multiple of another, and say why it must be."""
    check_integer(argument, given, 1)
    if given % of:
        raise ArgumentError(argument, given, f"a multiple of {of} ({why})")
