r"""Generating a kernel: QIGen's Algorithm 4, from a machine to a product.

The chapters before this one each cover one part: which tiles fit the registers and which blocks the cache
(`blocking`), in what order the blocks lie (`layouts`), and what a kernel does with a tile (`microkernel`). This chapter
combines them. For a machine and a matrix, Algorithm 4

1. takes the machine's :math:`\gamma` (bits of its first cache) and :math:`\eta` (its registers);
2. finds the tile, :math:`m_u` and :math:`t_u`, by trying every tile that fits and comparing a *cost*;
3. finds the block, :math:`m_b` and :math:`t_b`, that fills the cache best;
4. generates the micro-kernel.

A backend's cost is time. Here it is the number of instructions that the interpreter executes for each register of
products, so the choice is the same on every machine and can be reproduced.

>>> avx2 = Machine(cache_bits=32 * 1024 * 8, registers=16, lanes=8)
>>> plan = generate(4, rows=4096, columns=11008, group_size=128, machine=avx2)
>>> plan.tile, plan.block.m_b, plan.block.t_b
(Tile(order='streamed', m_u=8, t_u=6), 16, 1632)

The paper's Algorithm 3 loads every word once for each of its codes and holds all of a tile's weights in registers at
once. Streaming the codes needs fewer loads and fewer registers, and costs less:

>>> {order: round(min(cost for tile, cost in costs(4, avx2).items() if tile.order == order), 2)
...  for order in ("printed", "streamed")}
{'printed': 4.89, 'streamed': 4.04}

Source: QIGen §3, algorithm 4; equations 4 and 5; errata Q7, Q8.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import numpy as np

from lowbit.arrays import F32
from lowbit.contract.checks import check_array, check_choice, check_instance, check_integer
from lowbit.errors import ArgumentError
from lowbit.kernels.blocking import CacheBlock, solve_extended, tiles
from lowbit.kernels.interpreter import run
from lowbit.kernels.layouts import ZCurve, apply
from lowbit.kernels.microkernel import (
    algorithm_3,
    algorithm_3_streamed,
    check_multiple,
    codes_per_iteration,
    epilogue,
)
from lowbit.kernels.program import Program, live_registers
from lowbit.linear.linear import group_offsets
from lowbit.quantization.affine import QuantizedMatrix
from lowbit.quantization.packing import BITS, CODES_PER_UNIT, WORD_BITS, Words

Order = Literal["printed", "streamed"]


@dataclass(frozen=True)
class Machine:
    """The parameters of a processor that the models use.

    Attributes:
        cache_bits: γ, the size of its first data cache in bits.
        registers: η, the number of its vector registers.
        lanes: L, 32-bit numbers in one of them.

    Raises:
        ArgumentError: a size below 1.
    """

    cache_bits: int
    registers: int
    lanes: int

    def __post_init__(self) -> None:
        for name, size in vars(self).items():
            check_integer(name, size, 1)


@dataclass(frozen=True)
class Tile:
    """A tile of a micro-kernel, and the order in which it is computed.

    Attributes:
        order: ``printed``, as Algorithm 3 in the paper; or ``streamed``, code by code.
        m_u: codes of a micro-step; for a streamed tile, the codes of a unit.
        t_u: registers of columns.
    """

    order: Order
    m_u: int
    t_u: int

    def kernel(self, bits: int, lanes: int, stride: int) -> Program:
        """The micro-kernel of this tile, for words whose rows are `stride` elements apart."""
        if self.order == "streamed":
            return algorithm_3_streamed(bits, self.t_u, lanes=lanes, stride=stride)
        return algorithm_3(bits, self.m_u, self.t_u, lanes=lanes, stride=stride)


# **The search for the tile** (line 2). Equation 4 gives the tiles to try, and the program itself determines whether a
# tile fits.


def candidates(bits: int, registers: int) -> Iterator[Tile]:
    """Every tile whose program needs at most this many registers.

    Source: QIGen algorithm 4, line 2; equation 4; errata Q8.
    """
    pairs = tiles(registers)
    wanted = [Tile("printed", m_u, t_u) for m_u, t_u in pairs]
    wanted += [Tile("streamed", CODES_PER_UNIT[bits], t_u) for t_u in sorted({t_u for _, t_u in pairs})]
    yield from (tile for tile in wanted if live_registers(tile.kernel(bits, 1, tile.t_u)) <= registers)


def instructions(bits: int, tile: Tile) -> float:
    """The cost of a tile: the executed instructions of its loop per register of products."""
    codes = codes_per_iteration(bits, tile.m_u)
    memory = {
        "w": np.zeros(codes * bits // WORD_BITS * tile.t_u, np.uint32),
        "x": np.zeros(codes, np.float32),
        "y": np.zeros(tile.t_u, np.float32),
    }
    one, none = (run(tile.kernel(bits, 1, tile.t_u), memory, {"iterations": count}) for count in (1, 0))
    return (one.instructions - none.instructions).total() / (codes * tile.t_u)


Cost = Callable[[int, Tile], float]


def costs(bits: int, machine: Machine, cost: Cost = instructions) -> dict[Tile, float]:
    """The cost of every candidate.

    Args:
        bits: b, the width of a code.
        machine: the machine whose registers the tiles use.
        cost: the cost function of bits and a tile; lower is better.

    Raises:
        ArgumentError: wrong bits, or no tile fits.
    """
    check_choice("bits", bits, BITS)
    found = {tile: cost(bits, tile) for tile in candidates(bits, machine.registers)}
    if not found:
        raise ArgumentError("registers", machine.registers, "at least as many as the smallest tile needs")
    return found


# **The plan** (lines 1 to 4).


@dataclass(frozen=True)
class KernelPlan:
    """All choices for one matrix on one machine.

    Attributes:
        bits: b, the width of a code.
        rows: K, rows of codes.
        columns: N, columns.
        group_size: g, rows of a group.
        machine: the machine.
        tile: of the micro-kernel.
        block: of the cache.
    """

    bits: int
    rows: int
    columns: int
    group_size: int
    machine: Machine
    tile: Tile
    block: CacheBlock

    @property
    def layout(self) -> ZCurve:
        """The blocks along the Z-curve."""
        words = self.bits * self.rows // WORD_BITS, self.bits * self.block.m_b // WORD_BITS
        return ZCurve(words[0], self.columns, words[1], self.block.t_b)


def generate(
    bits: int, rows: int, columns: int, group_size: int, machine: Machine, cost: Cost = instructions
) -> KernelPlan:
    """Algorithm 4.

    Args:
        bits: b, the width of a code.
        rows: K, whole groups.
        columns: N, whole registers.
        group_size: g, whole iterations of the micro-kernel's loop; K for one group.
        machine: γ, η and L.
        cost: see `costs`; among equal costs the tile with the most columns is chosen.

    Raises:
        ArgumentError: wrong bits, sizes that are not whole, or nothing fits.

    Source: QIGen algorithm 4.
    """
    found = costs(bits, machine, cost)
    check_multiple("rows", rows, group_size, "whole groups")
    check_multiple("columns", columns, machine.lanes, "whole registers")
    fitting = [tile for tile in found if group_size % codes_per_iteration(bits, tile.m_u) == 0]
    if not fitting:
        raise ArgumentError("group_size", group_size, f"a multiple of {CODES_PER_UNIT[bits]}, whole units")
    tile = min(fitting, key=lambda tile: (found[tile], -tile.t_u))
    block = solve_extended(
        bits, machine.cache_bits, group_size, tile.m_u, tile.t_u, lanes=machine.lanes, rows=rows, columns=columns
    )
    return KernelPlan(bits, rows, columns, group_size, machine, tile, block)


# **The product.** Block by block in the order of the stream, and tile by tile within a block, the micro-kernel adds to
# the sums of each group. At the end, the scale and offset of each group are applied. This is a whole quantised GEMV in
# the words of the chapter `vector`, except for the sums of x.


def multiply(plan: KernelPlan, x: F32, matrix: QuantizedMatrix) -> F32:
    """``y = x W`` by the interpreter; slow, for reading and testing.

    >>> from lowbit.quantization.affine import quantize
    >>> weights = np.arange(8 * 4, dtype=np.float32).reshape(8, 4) % 16
    >>> small = generate(4, rows=8, columns=4, group_size=8, machine=Machine(4096, registers=16, lanes=2))
    >>> multiply(small, np.ones(8, np.float32), quantize(weights, bits=4, group_size=8))
    array([48., 56., 64., 72.], dtype=float32)

    Args:
        plan: a plan for such a matrix.
        x: float32, K.
        matrix: K × N.

    Returns:
        float32, N.

    Raises:
        ArgumentError: the matrix does not match the plan, or x is not K float32 numbers.

    Source: QIGen algorithms 3 and 4; equation 2.
    """
    check_instance("matrix", matrix, QuantizedMatrix)
    check_array("x", x, np.float32, (plan.rows,))
    for name in ("bits", "rows", "columns", "group_size"):
        if getattr(matrix, name) != getattr(plan, name):
            raise ArgumentError(f"{name} of the matrix", getattr(matrix, name), f"{getattr(plan, name)}, as planned")
    sums = np.zeros((matrix.groups, plan.columns), np.float32)
    stream = apply(matrix.words, plan.layout)
    for (down, right), start in plan.layout.starts.items():
        word_rows, columns = plan.layout.spans(down, right)
        words = stream[start : start + len(word_rows) * len(columns)]
        codes = range(down * plan.block.m_b, down * plan.block.m_b + len(word_rows) * WORD_BITS // plan.bits)
        _multiply_block(plan, x, words, codes, columns, sums)
    return _apply_scales(plan, x, matrix, sums)


def _multiply_block(plan: KernelPlan, x: F32, words: Words, codes: range, columns: range, sums: F32) -> None:
    """Add the products of one block to the sums of the groups that it overlaps: a Mini-GEMV."""
    step = codes_per_iteration(plan.bits, plan.tile.m_u)
    for first in range(codes.start, codes.stop, plan.group_size):  # a block is within a group, or whole groups
        part = range(first, min(first + plan.group_size, codes.stop))
        above = (part.start - codes.start) * plan.bits // WORD_BITS * len(columns)
        registers = len(columns) // plan.machine.lanes
        for left in range(0, registers, plan.tile.t_u):
            column = left * plan.machine.lanes
            y = sums[part.start // plan.group_size, columns.start + column :]
            memory = {"w": words[above + column :], "x": x[part.start : part.stop], "y": y}
            tile = replace(plan.tile, t_u=min(plan.tile.t_u, registers - left))  # the last one may be narrower
            kernel = _kernel(tile, plan.bits, plan.machine.lanes, len(columns))
            run(kernel, memory, {"iterations": len(part) // step}, registers=plan.machine.registers)


@cache
def _kernel(tile: Tile, bits: int, lanes: int, stride: int) -> Program:
    return tile.kernel(bits, lanes, stride)


def _apply_scales(plan: KernelPlan, x: F32, matrix: QuantizedMatrix, sums: F32) -> F32:
    """Apply the scale and offset of every group, one register of columns at a time."""
    y = np.zeros(plan.columns, np.float32)
    scales, offsets = matrix.scales.astype(np.float32), group_offsets(matrix).astype(np.float32)
    program = epilogue(1, lanes=plan.machine.lanes)
    for group in range(matrix.groups):
        X = np.full(1, np.sum(x[matrix.group_rows(group)], dtype=np.float64), np.float32)
        for left in range(0, plan.columns, plan.machine.lanes):
            parts = {"acc": sums, "s": scales, "o": offsets}
            memory = {name: array[group, left:] for name, array in parts.items()}
            run(program, {**memory, "X": X, "y": y[left:]}, registers=plan.machine.registers)
    return y
