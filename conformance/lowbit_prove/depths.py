r"""Depths: how many roundings the terms of a result go through, found by running a program on counts.

The specification's interpreter runs a program with a count in place of each number: the most roundings of any term in
it. Codes, scales and activations have none. A product has those of both its factors plus one, a sum the larger count
plus one. Three things round nothing, and are treated as such:

- a sum with a zero, as the first of every sum is, and a product with a zero, as those of padding are;
- a product with a power of two, as the scales of segments are;
- sums and conversions of the integers of codes, which float32 holds, also as multiples of the least positive float32.

So the count of y at the end is :math:`D` for this matrix, with this many codes, groups and segments. As all sums are of
terms, and each term is counted where it enters, this is Higham's :math:`D` for the order in which the program adds.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lowbit.kernels.interpreter import Machine, Sizes
from lowbit.kernels.program import Address, Argument, Instruction, Program
from lowbit.kernels.vector import VOCABULARY, Operand
from lowbit_cppyy.codegen.steps import x_elements
from lowbit_prove.prepared_setting import PreparedSetting
from lowbit_prove.terms import UndecidedError


@dataclass(frozen=True)
class Count:
    """What is known about a number.

    Attributes:
        roundings: the most roundings of any of its terms; -1 for zero.
        integer: whether it is an integer of few bits, so that sums of such numbers are exact.
        power: whether it is a power of two.
        subnormal: whether it is such an integer times the least positive float32.
    """

    roundings: int
    integer: bool = False
    power: bool = False
    subnormal: bool = False


ZERO, EXACT, INTEGER, POWER = Count(-1), Count(0), Count(0, integer=True), Count(0, power=True)
SUBNORMAL = Count(0, subnormal=True)


def multiplied(a: Count, b: Count) -> Count:
    """The count of a product."""
    if ZERO in (a, b):
        return ZERO
    rounds = not (a.power or b.power)
    return Count(a.roundings + b.roundings + rounds)


def added(a: Count, b: Count) -> Count:
    """The count of a sum."""
    if ZERO in (a, b):
        return a if b == ZERO else b
    if a.integer and b.integer:
        return INTEGER
    if a.subnormal and b.subnormal:
        return SUBNORMAL
    return Count(max(a.roundings, b.roundings) + 1)


def fused(a: Count, b: Count, c: Count) -> Count:
    """The count of a multiply-add that rounds once."""
    if ZERO in (a, b):
        return c
    if c == ZERO:
        return multiplied(a, b)
    return Count(max(a.roundings + b.roundings, c.roundings) + 1)


def _constant(number: Any) -> Count:
    if number == 0:
        return ZERO
    power = float(number).hex().startswith(("0x1.0000000000000p", "-0x1.0000000000000p"))
    subnormal = abs(number) < 2.0**-126  # then it is a multiple of the least positive float32
    return Count(0, integer=float(number).is_integer() or not power, power=power, subnormal=subnormal)


def one_of(a: Count, b: Count) -> Count:
    """The count of a number that is one of two."""
    return a if a == b else Count(max(a.roundings, b.roundings))


RULES: Mapping[str, Callable[..., Count]] = {
    **dict.fromkeys(("load_float", "load_half", "broadcast_float"), lambda a: a),
    **dict.fromkeys(("add", "add_neighbours"), added),
    "multiply": multiplied,
    "permute": lambda table, index: table,
    "permute_pair": lambda first, index, second: one_of(first, second),
    "maximum": one_of,
    **dict.fromkeys(("cvt_int_float", "cvt_signed_float"), lambda a: INTEGER),
    "cvt_int_subnormal": lambda a: SUBNORMAL,
}
"""The counts of words with float results, except `fmadd`; the roundings of words not listed here are not counted."""


class Depths(Machine):
    """Runs a program on counts.

    Args:
        program: any.
        memory: counts of the elements of x and of y; all elements of other pointers are exact.
        sizes: of the call.
        once: whether `fmadd` rounds once.

    Raises:
        UndecidedError: from `block`: a word whose roundings are not counted.
    """

    def __init__(self, program: Program, memory: Mapping[str, list[Count]], sizes: Sizes, *, once: bool) -> None:
        super().__init__(program, memory, sizes, once)
        self.pointers |= {"w": 0, "s": 0, "z": 0}

    def value(self, step: Instruction, argument: Argument, operand: Operand) -> Any:
        if VOCABULARY[step.word].gives == "int":
            return None
        if isinstance(argument, Address):
            return self._at(step, argument, operand)
        if operand == "scalar":
            return _constant(argument)
        return self.registers[str(argument)]

    def _at(self, step: Instruction, address: Address, operand: Operand) -> Any:
        memory = self.memory.get(address.pointer)
        if memory is None:
            return EXACT
        first = self.pointers[address.pointer] + address.offset
        if step.word == "store":
            return first
        values = memory[first : first + (self.lanes if operand == "address" else 1)]
        return max(values, key=lambda each: each.roundings)

    def execute(self, step: Instruction, operands: list[Any]) -> Any:
        if step.word == "store":
            first, value = operands
            self.memory["y"][first : first + self.lanes] = [value] * self.lanes
            return None
        if VOCABULARY[step.word].gives == "int":
            return None
        if step.word == "fmadd":
            a, b, c = operands
            return fused(a, b, c) if self.fused else added(multiplied(a, b), c)
        if step.word not in RULES:
            raise UndecidedError(f"the roundings of {step.word} are not counted")
        return RULES[step.word](*operands)


def depth(program: Program, x: list[Count], sizes: Sizes, y: int, *, once: bool) -> int:
    """The most roundings of any term of y, if y starts at zero.

    Args:
        program: the program to run.
        x: the counts of its activations.
        sizes: of the call.
        y: elements of y.
        once: whether `fmadd` rounds once.
    """
    results = [ZERO] * y
    machine = Depths(program, {"x": x, "y": results}, sizes, once=once)
    machine.block(program.body)
    return max(each.roundings for each in results)


# **Activations**, as ``cpp/activations.h`` writes them.


def of_sum(terms: int) -> Count:
    """The count of a sum of activations: eight running sums, the first activation of each exact, and three
    additions."""
    return Count(-(-terms // 8) - 1 + 3) if terms else ZERO


def of_table(terms: int) -> Count:
    """The count of a table entry of method `sums`: a sum of at most four activations, added in pairs."""
    return Count((-1, 0, 1, 2, 2)[terms])


def activations(setting: PreparedSetting) -> Iterator[Count]:
    """The counts of the stream of activations of a prepared matrix."""
    parts = [[len(meaning.parts) for _, meaning in each.numbers] for each in setting.x_elements()]
    yield from [INTEGER] * setting.activations.head
    place, rows = setting.activations.head, setting.recipe.rows
    for codes, sums in _runs(setting):
        for _ in range(codes * rows):
            yield EXACT if setting.recipe.integer else of_table(parts[place][0])
            place += 1
        if setting.recipe.integer:
            yield from [POWER] * rows
            place += rows
        if sums is not None:
            yield from [sums] * rows
            place += rows


def _runs(setting: PreparedSetting) -> Iterator[tuple[int, Count | None]]:
    """For each group or segment: the elements of a row before its scale, and the sum that follows, if any."""
    stream, each = setting.activations, x_elements(setting.recipe)
    if not setting.recipe.integer:
        for group, units in enumerate(stream.units):
            held = min(setting.layout.group_size, setting.layout.rows - group * setting.layout.group_size)
            yield units * each, of_sum(held)
        return
    segments = 0
    for segment in stream.segments:
        segments += 1
        yield segment.units * each, Count(segments - 1) if segment.ends else None
        segments = 0 if segment.ends else segments


def of_matrix(setting: PreparedSetting, *, once: bool) -> int:
    """D of a kernel for one matrix."""
    y = setting.recipe.rows * setting.recipe.panel
    return depth(setting.program, list(activations(setting)), setting.sizes, y, once=once)
