r"""Block Floating Point: the hooks of the chapters `lowbit.quantization.bfp` and `lowbit.quantization.bfp_dot`, and a
kernel of integer products.

**The kernel** multiplies a row of 8-bit mantissas by many others, read from end to end, four bytes a lane. `dot4`
takes unsigned bytes with signed ones, so 128 is added to those of the one row, and what that adds is taken away:

.. math:: \sum_i a_i b_i = \sum_i (a_i + 128)\, b_i - \sum_i 128\, b_i ,

both sums by the same instruction, exact in 32 bits for blocks of less than 2^15 elements. Nothing saturates: the
instruction that does (`dot4_pairs`) is not used, as 255 times 127 twice is too much for it.

A register holds :math:`4L` mantissas, so the lanes of a block are neighbours. They are added by `add_neighbours_int`,
L blocks at once until each has one lane, or several registers to one block first. So the kernel takes L blocks a turn,
and these must be whole rows; other shapes are left to a loop written by hand, which takes mantissas of any width.
"""

from collections.abc import Callable
from typing import ClassVar

import numpy as np

from lowbit.arrays import F32
from lowbit.backend import Declaration
from lowbit.kernels.program import Address, Advance, Instruction, Loop, Program, Step
from lowbit.quantization.bfp import Blocks, Format
from lowbit.quantization.bfp_dot import BlockSums
from lowbit_cppyy.codegen.isa import InstructionSet
from lowbit_cppyy.codegen.pieces import Piece
from lowbit_cppyy.lazily import cached_property
from lowbit_cppyy.runtime import processor
from lowbit_cppyy.runtime.compiler import Pool, preparing
from lowbit_cppyy.runtime.passes import BYTES, FLOATS, INTS, NUMBERS, SHORTS, Calls, Passes, done

LARGEST_BLOCK = 4096
BYTES_OF_128 = 0x80808080


def fits(columns: int, block: int, lanes: int) -> bool:
    """Whether the kernel can be made: L blocks are whole rows, a row is whole registers, a block a power of two.

    >>> fits(64, 32, lanes=16), fits(64, 64, lanes=8), fits(96, 32, lanes=8), fits(64, 20, lanes=8)
    (True, True, False, False)
    """
    whole = columns % block == 0 and columns % (4 * lanes) == 0 and lanes % (columns // block) == 0
    return whole and block & (block - 1) == 0 and 4 <= block <= LARGEST_BLOCK


def block_products(columns: int, block: int, table: InstructionSet) -> Piece:
    """Integers of L blocks a turn, ``groups`` turns.

    Args:
        columns: n, elements of a row.
        block: elements of a block; one that `fits`.
        table: the instruction set.
    """
    lanes = table.lanes
    registers, each = block * lanes // (4 * lanes), max(1, block // (4 * lanes))  # of a turn, and of a block
    steps: list[Step] = []
    waiting: list[tuple[int, int]] = []  # the first of so many sums that are in one register
    for number in range(registers // each):
        steps += _products(number, each, lanes, columns)
        count, first = 1, number
        while waiting and waiting[-1][1] == count:
            earlier, _ = waiting.pop()
            pair = (f"d_{earlier}", f"d_{first}")
            steps.append(Instruction("add_neighbours_int", pair[0], pair))
            first, count = earlier, 2 * count
        waiting.append((first, count))
    steps += [Instruction("as_float", "f", ("d_0",)), Instruction("store", "", (Address("y"), "f"))]
    steps += [Advance("w", registers * lanes), Advance("y", lanes)]
    start = (Instruction("broadcast_int", "m_128", (BYTES_OF_128,)), Instruction("broadcast_int", "none", (0,)))
    summary = f"integers of blocks of {block} at w, rows of {columns}, with the row at s, to which 128 was added"
    body = (*start, Loop("i", "groups", tuple(steps)))
    return Piece(f"block_products_n{columns}b{block}", summary, Program(lanes, body), table)


def _products(number: int, each: int, lanes: int, columns: int) -> list[Step]:
    """The products of some registers in one, ``d_{number}``."""
    total, steps = f"d_{number}", list[Step]()
    for part in range(each):
        place = (number * each + part) * lanes
        earlier = (total, "c") if part else ("none", "none")
        steps.append(Instruction("load_int", "b", (Address("w", place),)))
        steps.append(Instruction("load_int", "a", (Address("s", place % (columns // 4)),)))
        steps.append(Instruction("dot4", total, (earlier[0], "a", "b")))
        steps.append(Instruction("dot4", "c", (earlier[1], "m_128", "b")))
    return [*steps, Instruction("subtract_int", total, (total, "c"))]


class BlockKernels(Calls):
    """The functions of ``cpp/blocks.h``."""

    def __init__(self, table: InstructionSet, pool: Pool) -> None:
        super().__init__("blocks.h", table, pool)
        self._products: dict[tuple[int, int], Passes] = {}

    @cached_property
    def cast(self) -> Callable[..., int]:
        return self._function("cast", 0, FLOATS, 0, 0, 0, 0, 0, 0, BYTES, SHORTS)

    @cached_property
    def decode(self) -> Callable[..., int]:
        return self._function("decode", 0, BYTES, SHORTS, 0, 0, 0, 0, FLOATS)

    @cached_property
    def dot(self) -> Callable[..., int]:
        return self._function("dot", 0, BYTES, SHORTS, 0, BYTES, SHORTS, 0, 0, 0, NUMBERS, INTS)

    @cached_property
    def dot_bytes(self) -> Callable[..., int]:
        return self._function("dot_bytes", 0, BYTES, SHORTS, 0, BYTES, SHORTS, 0, 0, 0, NUMBERS, INTS)

    @cached_property
    def total(self) -> Callable[..., int]:
        return self._function("total", 0, NUMBERS, INTS, 0, 0, FLOATS)

    def products(self, columns: int, block: int) -> int:
        """The kernel of `dot_bytes` for rows and blocks of so many elements; 0 if there is none."""
        made = self._products.get((columns, block))
        if made is None:
            if not fits(columns, block, self._table.lanes):
                return 0
            with preparing:
                made = Passes([block_products(columns, block, self._table)], self._pool)
                made = self._products.setdefault((columns, block), made)
        return made.handle

    @property
    def pool(self) -> int:
        """The threads."""
        return self._pool.handle


class BlockOperations:
    """The hooks. Nothing is limited: what no kernel is made for is slower, and as exact."""

    declared: ClassVar[dict[str, Declaration]] = dict.fromkeys(
        ("bfp.cast", "bfp.decode", "bfp.dot", "bfp.total"), Declaration()
    )
    _isa: str | None
    _threads_of_this: Callable[[], Pool]

    @cached_property
    def _table_of_this(self) -> InstructionSet:
        return processor.choose_table(self._isa)

    @cached_property
    def _blocks(self) -> BlockKernels:
        return BlockKernels(self._table_of_this, self._threads_of_this())

    def _bfp_cast(self, x: F32, format: Format) -> Blocks:
        mantissas = np.empty(x.shape, format.dtype)
        exponents = np.empty((len(x), format.blocks(x.shape[1])), np.int16)
        sizes = *x.shape, format.block, format.mantissa, format.reach, mantissas.itemsize
        done(self._blocks.cast(self._blocks.pool, x, *sizes, mantissas, exponents), None)
        return Blocks(mantissas, exponents, format)

    def _bfp_decode(self, blocks: Blocks) -> F32:
        out, mantissas = np.empty(blocks.mantissas.shape, np.float32), blocks.mantissas
        sizes = *out.shape, blocks.format.block, mantissas.itemsize
        return done(self._blocks.decode(self._blocks.pool, mantissas, blocks.exponents, *sizes, out), out)

    def _bfp_dot(self, a: Blocks, b: Blocks) -> BlockSums:
        columns, block = a.columns, min(a.format.block, a.columns)
        shape = (a.rows, b.rows, a.exponents.shape[1])
        sums, exponents = np.empty(shape, np.int64), np.empty(shape, np.int32)
        narrow = a.mantissas.itemsize == 1 and b.mantissas.itemsize == 1
        if narrow and (kernel := self._blocks.products(columns, block)):
            both = (a.mantissas, a.exponents, a.rows, b.mantissas, b.exponents, b.rows)
            done(self._blocks.dot_bytes(kernel, *both, columns, shape[2], sums, exponents), None)
            return BlockSums(sums, exponents)
        wide = [x.mantissas.astype(np.int32, copy=False) for x in (a, b)]
        both = (wide[0], a.exponents, a.rows, wide[1], b.exponents, b.rows)
        done(self._blocks.dot(self._blocks.pool, *both, columns, block, sums, exponents), None)
        return BlockSums(sums, exponents)

    def _bfp_total(self, blocks: BlockSums) -> F32:
        out = np.empty(blocks.sums.shape[:2], np.float32)
        count, parts = out.size, blocks.sums.shape[2]
        return done(self._blocks.total(self._blocks.pool, blocks.sums, blocks.exponents, count, parts, out), out)
