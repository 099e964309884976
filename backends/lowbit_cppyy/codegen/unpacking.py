"""Unpacking: the steps by which each method takes one code out of the words of a unit.

The steps leave one code in a register, as a float. That float may be too large by a power of two; `folded` says by
which, and its activation is scaled down by the same.

Source: QIGen §3, algorithm 2. `lowbit_cppyy.recipe` describes the methods that go beyond it.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

from lowbit.kernels.program import Instruction, Loop, Step
from lowbit_cppyy.layout.interleaving import Field, fields


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


class Unpacked(Protocol):
    """What unpacking needs from a recipe: the width of a code, and how codes become products."""

    @property
    def bits(self) -> int: ...

    @property
    def method(self) -> str: ...


def folded(recipe: Unpacked, code: int) -> int:
    """The power of two by which an unpacked code of this recipe is too large."""
    position = fields(recipe.bits, code)[0].position
    return position if recipe.method == "fold" and position + recipe.bits <= 31 else 0


def unpack(recipe: Unpacked, code: int, words: list[str], a: str, b: str, to: str) -> Iterator[Step]:
    """Unpack one code to the register `to`.

    Args:
        recipe: with a method that multiplies.
        code: its number in the unit.
        words: the registers that hold the words of the unit.
        a: a scratch register.
        b: a second scratch register, for the upper plane of a code.
        to: the register for the float.
    """
    parts = fields(recipe.bits, code)
    if len(parts) == 2:
        yield from _join(parts[0], parts[1], folded(recipe, code), words, a, b)
        yield Instruction("cvt_int_float", to, (a,))
    elif recipe.method == "table":
        steps, word = shifted(words[parts[0].word], parts[0].position, a)
        yield from steps
        yield Instruction("permute", to, ("table", word))
    else:
        yield from _single(parts[0], folded(recipe, code), words[parts[0].word], a)
        yield Instruction("cvt_int_float", to, (a,))


def _single(field: Field, power: int, word: str, a: str) -> Iterator[Step]:
    """A code masked in place, or shifted first; at the top of a word it needs no mask."""
    steps, register = shifted(word, field.position - power, a)
    yield from steps
    if field.position + field.width < 32 or power:
        yield Instruction("and", a, (register, mask(((1 << field.width) - 1) << power)))


def _join(low: Field, high: Field, power: int, words: list[str], a: str, b: str) -> Iterator[Step]:
    """Join the two planes of a code; the lowest bit goes to `power`."""
    steps, register = shifted(words[low.word], low.position - power, a)
    yield from steps
    yield Instruction("and", a, (register, mask(((1 << low.width) - 1) << power)))
    steps, register = shifted(words[high.word], high.position - power - high.first, b)
    yield from steps
    yield Instruction("and_or", a, (register, mask(((1 << high.width) - 1) << power + high.first), a))


def four_codes(bits: int, number: int, words: list[str], a: str, b: str) -> tuple[list[Step], str]:
    """The steps that put codes ``4 * number`` to ``4 * number + 3`` of a unit into the bytes of each lane, and the
    register of the result."""
    parts = fields(bits, 4 * number)
    low, ones = parts[0], 0x01010101
    if bits == 8:
        return [], words[low.word]
    steps, register = shifted(words[low.word], low.position, a)
    steps.append(Instruction("and", a, (register, mask(((1 << low.width) - 1) * ones))))
    if len(parts) == 2:
        high = parts[1]
        more, register = shifted(words[high.word], high.position - high.first, b)
        steps += [*more, Instruction("and_or", a, (register, mask(((1 << high.width) - 1 << high.first) * ones), a))]
    return steps, a
