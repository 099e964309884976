"""Taking codes out of words: the steps of each method for one code of a unit.

Each function gives the steps that leave one code, as a float, in a register, and says by what power of two that float
is too large, so that its activation is made as much too small.

Source: QIGen §3, algorithm 2; what goes beyond it is told in `lowbit_cppyy.recipe.recipe`.
"""

from collections.abc import Iterator, Sequence

from lowbit.kernels.program import Instruction, Loop, Step
from lowbit_cppyy.recipe.places import Field, fields
from lowbit_cppyy.recipe.recipe import Recipe

MANTISSA = 23  # bits of a float32's significand that are stored


def mask(value: int) -> str:
    """The register that holds this constant; `constants` fills it."""
    return f"m_{value:x}"


def constants(steps: Sequence[Step]) -> Iterator[Step]:
    """A broadcast for each constant that these steps use."""
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
    """A word moved right by so many bits, or left; and the register that it is in then."""
    if by == 0:
        return [], word
    return [Instruction("srli" if by > 0 else "slli", to, (word, abs(by)))], to


def folded(recipe: Recipe, code: int) -> int:
    """The power of two by which a code of this recipe is too large."""
    places = fields(recipe.bits, code)
    if recipe.method != "fold":
        return 0
    return 0 if places[0].position + recipe.bits > 31 else places[0].position


def unpack(recipe: Recipe, code: int, words: list[str], a: str, b: str, to: str) -> Iterator[Step]:
    """One code to the register `to`.

    Args:
        recipe: with any method that multiplies.
        code: its number in the unit.
        words: the registers that hold the words of the unit.
        a: register to work in.
        b: another one, for the upper bit of a 3-bit code.
        to: register for the float.
    """
    places = fields(recipe.bits, code)
    if len(places) == 2:
        yield from _join(places[0], places[1], folded(recipe, code), words, a, b)
        yield Instruction("cvt_int_float", to, (a,))
    elif recipe.method == "mantissa":
        yield from _mantissa(places[0], words[0], a, to)
    elif recipe.method == "table":
        steps, word = shifted(words[0], places[0].position, a)
        yield from steps
        yield Instruction("permute", to, ("table", word))
    else:
        yield from _single(places[0], folded(recipe, code), words[0], a)
        yield Instruction("cvt_int_float", to, (a,))


def _single(place: Field, power: int, word: str, a: str) -> Iterator[Step]:
    """A code masked where it stands, or shifted first; at the top of a word it needs no mask."""
    steps, register = shifted(word, place.position - power, a)
    yield from steps
    if place.position + place.width < 32 or power:
        yield Instruction("and", a, (register, mask(((1 << place.width) - 1) << power)))


def _join(low: Field, high: Field, power: int, words: list[str], a: str, b: str) -> Iterator[Step]:
    """The planes of a 3-bit code put together, the lowest bit at `power`."""
    steps, register = shifted(words[low.word], low.position - power, a)
    yield from steps
    yield Instruction("and", a, (register, mask(3 << power)))
    steps, register = shifted(words[high.word], high.position - power - 2, b)
    yield from steps
    yield Instruction("and_or", a, (register, mask(4 << power), a))


def _mantissa(place: Field, word: str, a: str, to: str) -> Iterator[Step]:
    """The code in the top bits of the mantissa under the exponent of 2^b: the float 2^b + q."""
    top = MANTISSA - place.width
    steps, register = shifted(word, place.position - top, a)
    yield from steps
    exponent = (127 + place.width) << MANTISSA
    yield Instruction("and_or", a, (register, mask(((1 << place.width) - 1) << top), mask(exponent)))
    yield Instruction("as_float", to, (a,))


def four_codes(bits: int, number: int, words: list[str], a: str, b: str) -> tuple[list[Step], str]:
    """Codes ``4 * number`` to ``4 * number + 3`` of a unit as the four bytes of a register; and which register."""
    places = fields(bits, 4 * number)
    low, ones = places[0], 0x01010101
    if bits == 8:
        return [], words[low.word]
    steps, register = shifted(words[low.word], low.position, a)
    steps.append(Instruction("and", a, (register, mask(((1 << low.width) - 1) * ones))))
    if len(places) == 2:
        more, register = shifted(words[places[1].word], places[1].position - 2, b)
        steps += [*more, Instruction("and_or", a, (register, mask(4 * ones), a))]
    return steps, a
