r"""Unpacking: the steps by which each method takes one code out of the words of a unit.

The steps leave one code in a register, as a float. That float may be too large or too small by a power of two; `power`
says by which, and its activation is multiplied by the inverse.

**Subnormal numbers.** The bits of an integer :math:`a < 2^{24}`, taken as those of a float32, are
:math:`a \cdot 2^{-149}`, so a masked code needs no conversion. Activations then are :math:`2^{99}` times as large, and
sums :math:`2^{-50}` times, which is undone once a group. `exact_range` says for which activations all this is exact. A
processor for which subnormal operands are slow should not use it.

Source: QIGen §3, algorithm 2. `lowbit_cppyy.recipe` describes the methods that go beyond it.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

from lowbit.kernels.program import Instruction, Loop, Step
from lowbit_cppyy.layout.interleaving import PLANES, Field, fields


def mask(value: int) -> str:
    """The register that holds a constant; `constants` fills it."""
    return f"m_{value:x}"


def constants(steps: Sequence[Step]) -> Iterator[Step]:
    """A broadcast for each constant that the steps use."""
    pending, wanted = list(steps), set[int]()
    while pending:
        step = pending.pop()
        if isinstance(step, Loop):
            pending.extend(step.body)
        elif isinstance(step, Instruction):
            wanted |= {int(name[2:], 16) for name in step.reads() if name.startswith("m_")}
    for value in sorted(wanted):
        yield Instruction("broadcast_int", mask(value), (value,))


def shifted(word: str, by: int, to: str) -> tuple[list[Step], str]:
    """The steps that shift a word right, or left if `by` is negative, and the register of the result."""
    if by == 0:
        return [], word
    return [Instruction("srli" if by > 0 else "slli", to, (word, abs(by)))], to


SUBNORMAL = 149
"""The bits of an integer below 2^24, as a float32, are the integer times 2^-149."""
LOWERED = 50
"""By which power of two the sums of method `subnormal` are too small."""
LOOKED_UP = 16
"""The number of floats in a register that a code is looked up in; two of them hold the values of five bits."""
BELOW = {"fold": 31, "subnormal": 24}
"""Each method that masks a code in place, and the bits up to which it may lie there."""


class Unpacked(Protocol):
    """What unpacking needs from a recipe: the width of a code, and how codes become products."""

    @property
    def bits(self) -> int: ...

    @property
    def method(self) -> str: ...


def joined_codes(bits: int) -> int:
    """The number of codes of two planes that are joined at once: one or two in each byte of a word."""
    return 8 if bits <= 4 else 4


def two_planes(bits: int) -> bool:
    """Whether the bits of a code lie in two words."""
    return len(PLANES[bits]) > 1


def joined_position(bits: int, code: int) -> int:
    """The bit of its lane at which a code of two planes begins when they are joined."""
    return 8 * (code % 4) + 4 * (code % joined_codes(bits) // 4)


def lowest_bit(recipe: Unpacked, code: int) -> int:
    """The bit of its lane at which a code begins when it is unpacked, before it becomes a float."""
    position = joined_position(recipe.bits, code) if two_planes(recipe.bits) else fields(recipe.bits, code)[0].position
    return position if position + recipe.bits <= BELOW.get(recipe.method, 0) else 0


def power(method: str, lowest: int) -> int:
    """By which power of two a code that begins at a bit is too large, or too small, in its product."""
    return lowest - SUBNORMAL + LOWERED if method == "subnormal" else lowest


def exact_range(method: str) -> tuple[float, float]:
    r"""The magnitudes of activations, from the first to below the second, for which powers of two round nothing.

    - Folded codes begin up to bit 28. An activation times :math:`2^{-28}` must be normal.
    - With `subnormal`, an activation times :math:`2^{99}` must be finite. One of at least :math:`2^{-76}` is a multiple
      of :math:`2^{-99}`, so all products and sums are multiples of :math:`2^{-149}`, and exact where they are smaller
      than normal numbers.
    """
    return (2.0**-76, 2.0**29) if method == "subnormal" else (2.0**-98, float("inf"))


def unpack(recipe: Unpacked, code: int, words: list[str], j: int) -> Iterator[Step]:
    """Unpack one code of a unit to the register ``l_{j}``.

    Of a code of two planes, several are joined in ``v_{j}`` at once (`joined_codes`), so codes must come in order.

    Args:
        recipe: with a method that multiplies.
        code: its number in the unit.
        words: the registers that hold the words of the unit.
        j: the number of the register of columns; ``a_{j}`` and ``b_{j}`` are scratch registers.
    """
    part = fields(recipe.bits, code)[0]
    if recipe.method == "table":
        yield from _looked_up(recipe, code, words, j)
    elif two_planes(recipe.bits):
        if code % joined_codes(recipe.bits) == 0:
            yield from joined(recipe.bits, code, joined_codes(recipe.bits), words, f"v_{j}", f"b_{j}")[0]
        yield from _masked(recipe, code, f"v_{j}", joined_position(recipe.bits, code), j)
    else:
        yield from _masked(recipe, code, words[part.word], part.position, j)


def _looked_up(recipe: Unpacked, code: int, words: list[str], j: int) -> Iterator[Step]:
    """Look a code up. A look-up ignores the bits above its index, so only shifts are needed, and nothing is masked."""
    part = fields(recipe.bits, code)[0]
    word, position = words[part.word], part.position
    if two_planes(recipe.bits):
        if code % joined_codes(recipe.bits) == 0:
            yield from _indices(recipe.bits, code, words, j)
        word, position = f"v_{j}", joined_position(recipe.bits, code)
    steps, index = shifted(word, position, f"a_{j}")
    yield from steps
    if 2**recipe.bits > LOOKED_UP:
        yield Instruction("permute_pair", f"l_{j}", ("table", index, "table_2"))
    else:
        yield Instruction("permute", f"l_{j}", ("table", index))


def _indices(bits: int, code: int, words: list[str], j: int) -> Iterator[Step]:
    """Join this code and those that follow (`joined_codes`) in ``v_{j}``; the bits between them may be anything."""
    low, high = fields(bits, code)
    steps, lower = shifted(words[low.word], low.position, f"a_{j}")
    more, upper = shifted(words[high.word], high.position - high.first, f"b_{j}")
    yield from (*steps, *more, Instruction("select", f"v_{j}", (_ones(high, joined_codes(bits)), upper, lower)))


def _ones(plane: Field, codes: int) -> str:
    """The mask of a plane of four or eight joined codes."""
    return mask(((1 << plane.width) - 1 << plane.first) * (0x01010101 if codes == 4 else 0x11111111))


def _masked(recipe: Unpacked, code: int, word: str, position: int, j: int) -> Iterator[Step]:
    """Mask a code in place, or shift it first, and convert it. At the top of a word it needs no mask after a shift."""
    a, lowest = f"a_{j}", lowest_bit(recipe, code)
    top = joined_position(recipe.bits, joined_codes(recipe.bits) - 1) if two_planes(recipe.bits) else 32 - recipe.bits
    steps, register = shifted(word, position - lowest, a)
    yield from steps
    if position < top or lowest:
        yield Instruction("and", a, (register, mask(((1 << recipe.bits) - 1) << lowest)))
    yield Instruction("cvt_int_subnormal" if recipe.method == "subnormal" else "cvt_int_float", f"l_{j}", (a,))


def four_codes(bits: int, number: int, words: list[str], a: str, b: str) -> tuple[list[Step], str]:
    """The steps that put codes ``4 * number`` to ``4 * number + 3`` of a unit into the bytes of each lane, and the
    register of the result."""
    return joined(bits, 4 * number, 4, words, a, b)


def joined(bits: int, code: int, codes: int, words: list[str], a: str, b: str) -> tuple[list[Step], str]:
    """The steps that put four codes into the bytes of each lane, or eight into the halves of its bytes, with zeros in
    between; and the register of the result.

    Args:
        bits: the width of a code.
        code: the number of the first in its unit.
        codes: four, or eight.
        words: the registers that hold the words of the unit.
        a: a register for the result.
        b: a scratch register.
    """
    low, *upper = fields(bits, code)
    if bits == 8:
        return [], words[low.word]
    steps, register = shifted(words[low.word], low.position, a)
    steps.append(Instruction("and", a, (register, _ones(low, codes))))
    for high in upper:
        more, register = shifted(words[high.word], high.position - high.first, b)
        steps += [*more, Instruction("and_or", a, (register, _ones(high, codes), a))]
    return steps, a
