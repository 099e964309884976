"""The roundings that the backend declares, counted in its programs, term by term.

A program is run on numbers that are not numbers but counts: a value is, for each term that went into it, how often
that term was rounded on the way. An operation on an exact zero rounds nothing; every other one rounds once, even where
its result would happen to be exact. The most that any term of a result met must be no more than is declared, for
programs whose multiply-add rounds once and for those where it rounds twice.
"""

from collections.abc import Iterator
from functools import reduce
from itertools import pairwise, product
from typing import Any

import pytest
from kernel_runs import term

from lowbit.kernels.program import Address, Advance, Element, Instruction, Loop, Program, Step
from lowbit.quantization.affine import CONVENTIONS
from lowbit.quantization.packing import BITS
from lowbit_cppyy.backend import integer_roundings, roundings
from lowbit_cppyy.codegen.microkernel import micro_kernel
from lowbit_cppyy.codegen.steps import TABLE
from lowbit_cppyy.recipe import METHODS_FOR, PURPOSES, Recipe

Count = dict[Any, int]
"""For each term, its roundings so far; under `None`, those of a number that is a factor of terms."""

ZERO: Count = {}
EXACT: Count = {None: 0}


def times(a: Count, b: Count) -> Count:
    """A product, not rounded yet."""
    return {s if s is not None else t: m + n for s, m in a.items() for t, n in b.items()}


def rounded(a: Count) -> Count:
    return {term: count + 1 for term, count in a.items()}


def either(a: Count, b: Count) -> Count:
    return {term: max(a.get(term, 0), b.get(term, 0)) for term in a | b}


def plus(a: Count, b: Count) -> Count:
    return rounded(either(a, b)) if a and b else a or b


class Machine:
    """Runs a program on counts; codes, scales and zeros are exact, y begins as zero."""

    def __init__(
        self, program: Program, x: list[Count], turns: list[int], back: list[int], ends: list[int], *, fused: bool
    ) -> None:
        self.x, self.at, self.fused = x, 0, fused
        self.sizes: dict[str, Any] = {"turns": turns, "back": back, "ends": ends}
        self.sizes |= {"groups": len(turns), "segments": len(turns)}
        self.registers: dict[str, Count] = {}
        self.indices: dict[str, int] = {}
        self.stored: list[Count] = []
        self.block(program.body)

    def block(self, steps: tuple[Step, ...]) -> None:
        for step in steps:
            if isinstance(step, Advance) and step.pointer == "x":
                self.at += step.step
            elif isinstance(step, Loop):
                size = self.sizes[step.count.name if isinstance(step.count, Element) else str(step.count)]
                for turn in range(size[self.indices[step.count.index]] if isinstance(step.count, Element) else size):
                    self.indices[step.index] = turn
                    self.block(step.body)
            elif isinstance(step, Instruction) and step.word == "store":
                self.stored.append(self.registers[str(step.arguments[1])])
            elif isinstance(step, Instruction) and step.target:
                self.registers[step.target] = self.result(step)

    def result(self, step: Instruction) -> Count:
        word, arguments = step.word, step.arguments
        operands = [self.registers.get(str(argument), EXACT) for argument in arguments]
        if word == "fmadd":
            multiplied = times(*operands[:2])
            if not multiplied or not self.fused:
                return plus(rounded(multiplied), operands[2])
            return rounded(either(multiplied, operands[2]))
        if word in ("add", "multiply"):
            if "raise" in arguments:  # a power of two
                return operands[0]
            return plus(*operands) if word == "add" else rounded(times(*operands))
        if word == "permute":
            return operands[0]
        if word in ("broadcast_float", "load_float"):
            return self.read(word, arguments[0])
        return EXACT  # integers, conversions of them, and scales in memory: nothing rounds

    def read(self, word: str, argument: Any) -> Count:
        if not isinstance(argument, Address):
            return ZERO if argument == 0 else EXACT
        if argument.pointer != "x":
            return ZERO if argument.pointer == "y" else EXACT
        place = self.at + argument.offset
        return self.x[place] if word == "broadcast_float" else reduce(either, self.x[place : place + TABLE])


# **Streams of counts**, like the streams of numbers of `kernel_runs`.


def group_sum(terms: list[Count]) -> Count:
    """Eight running sums, then a tree."""
    sums = [reduce(plus, terms[lane::8], ZERO) for lane in range(8)]
    half = [plus(sums[lane], sums[lane + 4]) for lane in range(4)]
    return plus(plus(half[0], half[2]), plus(half[1], half[3]))


def stream(recipe: Recipe, first: int, stop: int) -> Iterator[Count]:
    """One group of float32 activations: each is a term of the products and a term of their sum."""
    unit = recipe.unit_codes
    x: list[Count] = [{("q", k): 0} for k in range(first, stop)]
    x += [ZERO] * (-len(x) % unit)
    if recipe.method != "sums":
        yield from x
    for start in range(0, len(x), unit) if recipe.method == "sums" else ():
        for word, place in product(range(recipe.unit_words), range(0, 32, 4)):
            a, b, c, d = (x[start + term(recipe.bits, word, place + n)[0]] for n in range(4))
            yield from (plus(low, high) for high in (ZERO, c, d, plus(c, d)) for low in (ZERO, a, b, plus(a, b)))
    yield group_sum([{("o", k): 0} for k in range(first, stop)])


def segments_of(first: int, stop: int) -> list[tuple[int, int]]:
    """The segments of one group of an integer product, blocks being of 32."""
    return list(pairwise([first, *range(first // 32 * 32 + 32, stop, 32), stop]))


def segment_stream(recipe: Recipe, first: int, stop: int) -> Iterator[tuple[list[Count], int]]:
    """The same of integers: mantissas, which are exact, and for each segment a term of either kind; and its units."""
    total = ZERO
    for start, end in segments_of(first, stop):
        units = -(-(end - first) // recipe.unit_codes) - (start - first) // recipe.unit_codes
        total = plus(total, {("o", start): 0})
        part = [EXACT] * (units * recipe.unit_codes // 4) + [{("q", start): 0}]
        yield part + [total] * (end == stop), units


def most_roundings(recipe: Recipe, rows: int, group_size: int, *, fused: bool) -> int:
    """The most roundings of any term, in a matrix of this many rows."""
    x, turns, back, ends = [EXACT] * (TABLE if recipe.method == "table" else 0), list[int](), list[int](), list[int]()
    for first in range(0, rows, group_size):
        stop = min(first + group_size, rows)
        if recipe.integer:
            for part, units in segment_stream(recipe, first, stop):
                x += part
                turns.append(units)
                back.append(0)
                ends.append(0)
            ends[-1] = 1
        else:
            x += stream(recipe, first, stop)
            turns.append(-(-(stop - first) // recipe.unit_codes))
    machine = Machine(micro_kernel(recipe, 16), x, turns, back, ends, fused=fused)
    (y,) = machine.stored
    assert len(y) == 2 * rows or recipe.integer
    return max(y.values())


# **The declarations.**


def kinds(bits: int, *, integer: bool) -> list[Recipe]:
    """The recipes that the backend may use for a width, of one register and one row; others round as often."""
    found = set()
    for purpose, convention, chains in product(PURPOSES, CONVENTIONS, (1, 3)):
        for method in METHODS_FOR[purpose]:
            recipe = Recipe(bits, "float32", convention, method, registers=1, chains=chains, panel=16, ahead=0)
            if recipe.integer == integer and not recipe.fits(16) and (purpose == "vector" or chains == 1):
                found.add(recipe)
    return sorted(found, key=lambda recipe: recipe.name)


SIZES = (*range(1, 7), 8, 9, 16, 17, 31, 32, 33, 36)


@pytest.mark.parametrize("bits", BITS)
def test_no_term_meets_more_roundings_than_are_declared(bits: int) -> None:
    """Groups of every size up to some units, alone and followed by a short one, fused and not."""
    spare = []
    for recipe, n, fused in product(kinds(bits, integer=False), SIZES, (True, False)):
        for rows in (n, 2 * n + n // 2):
            spare.append(roundings(rows, n) - most_roundings(recipe, rows, n, fused=fused))
    assert min(spare) == (0 if bits == 4 else 1)  # one function is declared for all widths


@pytest.mark.parametrize("bits", BITS)
def test_no_segment_meets_more_roundings_than_are_declared(bits: int) -> None:
    """The same for integer products, whose blocks and groups cut each other."""
    spare = []
    for recipe, n in product(kinds(bits, integer=True), (1, 7, 31, 32, 33, 34, 64, 65, 96, 98)):
        for rows, fused in product((n, 2 * n + n // 2), (True, False)):
            spare.append(integer_roundings(rows, n) - most_roundings(recipe, rows, n, fused=fused))
    assert 0 <= min(spare) <= 3  # the declaration of every backend's loop has three that do not occur here
