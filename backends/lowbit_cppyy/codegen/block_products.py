r"""The kernel of integer products of Block Floating Point.

It multiplies one row of 8-bit mantissas by many others, stored one after the other, four bytes a lane. `dot4` takes
unsigned bytes times signed ones. So 128 is added to the bytes of the one row, and its contribution is subtracted:

.. math:: \sum_i a_i b_i = \sum_i (a_i + 128)\, b_i - \sum_i 128\, b_i ,

both sums by the same instruction, exact in 32 bits for blocks of less than 2^15 elements. Nothing saturates: the
saturating instruction (`dot4_pairs`) is not used, because 255 times 127 twice is too much for it.

A register holds :math:`4L` mantissas, so the lanes of a block are neighbours. They are added by `add_neighbours_int`,
L blocks at once, until each block has one lane; where a block is several registers, these are added first. So the
kernel takes L blocks an iteration, which must be whole rows. ``cpp/blocks.h`` has a loop for all other shapes, and for
mantissas of any width.
"""

from lowbit.kernels.program import Address, Advance, Instruction, Loop, Program, Step
from lowbit_cppyy.codegen.elementwise import ProgramKernel
from lowbit_cppyy.codegen.isa import InstructionSet

LARGEST_BLOCK = 4096
BYTES_OF_128 = 0x80808080


def fits(columns: int, block: int, lanes: int) -> bool:
    """Whether there is a kernel: L blocks fill whole rows, a row fills whole registers, and a block is a power of two.

    >>> fits(64, 32, lanes=16), fits(64, 64, lanes=8), fits(96, 32, lanes=8), fits(64, 20, lanes=8)
    (True, True, False, False)
    """
    whole = columns % block == 0 and columns % (4 * lanes) == 0 and lanes % (columns // block) == 0
    return whole and block & (block - 1) == 0 and 4 <= block <= LARGEST_BLOCK


def block_products(columns: int, block: int, table: InstructionSet) -> ProgramKernel:
    """The integer dot products of ``groups`` times L blocks.

    Args:
        columns: n, elements of a row.
        block: elements of a block; one that `fits`.
        table: the instruction set.
    """
    lanes = table.lanes
    registers, each = block * lanes // (4 * lanes), max(1, block // (4 * lanes))  # of an iteration, and of a block
    steps: list[Step] = []
    waiting: list[tuple[int, int]] = []  # runs of sums that share a register: the first, their number
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
    return ProgramKernel(f"block_products_n{columns}b{block}", summary, Program(lanes, body), table)


def _products(number: int, each: int, lanes: int, columns: int) -> list[Step]:
    """The products of `each` registers, added in ``d_{number}``."""
    total, steps = f"d_{number}", list[Step]()
    for part in range(each):
        offset = (number * each + part) * lanes
        earlier = (total, "c") if part else ("none", "none")
        steps.append(Instruction("load_int", "b", (Address("w", offset),)))
        steps.append(Instruction("load_int", "a", (Address("s", offset % (columns // 4)),)))
        steps.append(Instruction("dot4", total, (earlier[0], "a", "b")))
        steps.append(Instruction("dot4", "c", (earlier[1], "m_128", "b")))
    return [*steps, Instruction("subtract_int", total, (total, "c"))]
