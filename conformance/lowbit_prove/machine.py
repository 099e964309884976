"""The machine of proofs: the specification's interpreter on symbols, with integer sums kept as sums.

A program runs in `lowbit.kernels.interpreter` as it does on numbers, each word by its one definition. Some words also
get an obligation. `cvt_int_float` is defined for integers below 2^31, `cvt_int_subnormal` for those below 2^24. `dot4`,
`dot4_pairs`, `add_pairs` and `dot2` must give the exact sum of their operands: nothing wraps at 32 bits or at 16, and
nothing saturates. After that, the result is a new variable of which two things are known: its sum and its range. So a
sum of any length is proved one instruction at a time.

The obligation of an instruction depends only on the ranges of its operands. It is proved once for each combination of
ranges, by the solver and on the word's own definition, for all operands within them (`exact`).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import z3

from lowbit.kernels.interpreter import Machine
from lowbit.kernels.program import Instruction, Program
from lowbit.kernels.vector import VOCABULARY
from lowbit_prove import symbols, terms
from lowbit_prove.reals import MANTISSA, REAL, Polynomial, Reader, constant, sum_of
from lowbit_prove.solver import satisfied
from lowbit_prove.symbols import Symbols

DEFINED_BELOW: Mapping[str, int] = {"cvt_int_float": 2**31, "cvt_int_subnormal": 2**24}
"""Words that are defined only for integers below a number."""

Range = tuple[int, int]
"""The smallest and the largest of some integers."""


@dataclass(frozen=True)
class Operands:
    """How a word for sums interprets its operands and its result.

    Attributes:
        added: bits of the numbers that are added unchanged: of the first operand, or of both.
        multiplied: bits of the numbers that are multiplied; 0 if none are.
        result: bits of each sum.
        unsigned: whether the first factor is unsigned.
    """

    added: int
    multiplied: int
    result: int
    unsigned: bool = False


SUMS: Mapping[str, Operands] = {
    "dot4": Operands(32, 8, 32, unsigned=True),
    "dot4_pairs": Operands(0, 8, 16, unsigned=True),
    "add_pairs": Operands(16, 0, 16),
    "dot2": Operands(32, 16, 32),
}


@dataclass(frozen=True)
class Number:
    """An integer in a register.

    Attributes:
        bits: its bits in the register.
        range: the interval in which it lies.
        meaning: its value as a polynomial; computed on request, because few are needed.
    """

    bits: Any
    range: Range
    meaning: Callable[[], Polynomial]


class InexactError(Exception):
    """An obligation that may not hold: `numbers` are the solver's, with sums as any number of their range."""

    def __init__(self, what: str, numbers: Mapping[str, int]) -> None:
        super().__init__(what)
        self.numbers = numbers


class Prover(Machine):
    """Runs a program on symbols and proves the obligations of its instructions.

    Attributes:
        reader: reads floats as polynomials.

    Raises:
        InexactError: from `block`: an obligation that may not hold.
    """

    def __init__(self, program: Program, memory: Mapping[str, Symbols], sizes: Mapping[str, Any]) -> None:
        super().__init__(program, memory, sizes)
        self.reader = Reader()
        self._numbers: dict[tuple[int, bool], Number] = {}
        self._origins: dict[int, Any] = {}
        self._cuts: dict[tuple[int, int, bool], tuple[Any, list[Number]]] = {}
        self._without_sums: dict[int, Any] = {}

    def declare(self, number: Any, least: int, greatest: int) -> None:
        """Assume that an integer of memory, or a part of one, is signed and between these numbers."""
        plain = z3.simplify(number)
        self._numbers[plain.get_id(), True] = Number(plain, (least, greatest), partial(self.reader.leaf, plain))

    def execute(self, step: Instruction, operands: list[Any]) -> Any:
        given = [symbols.of(each) if isinstance(each, np.ndarray) else each for each in operands]
        if step.word in DEFINED_BELOW:
            self._below(given[0], DEFINED_BELOW[step.word])
        if step.word not in SUMS:
            return super().execute(step, given)
        lanes = [self._exactly(step.word, [each.data[lane] for each in given]) for lane in range(self.lanes)]
        return Symbols(np.array([*lanes, None], object)[:-1], np.uint32)

    def _below(self, register: Symbols, limit: int) -> None:
        for number in register.data:
            if not terms.known(number) and 2 ** terms.magnitude(z3.simplify(z3.ZeroExt(1, number))) > limit:
                self._refuse(f"an integer of {limit} or more is converted", z3.UGE(number, limit))

    def _refuse(self, what: str, wrong: Any) -> None:
        if (numbers := satisfied(wrong)) is not None:
            raise InexactError(what, numbers)

    def _exactly(self, word: str, lane: list[Any]) -> Any:
        """Execute a word for sums in one lane: prove its obligation and return variables for its results."""
        kind = SUMS[word]
        added, factors = self._operands(kind, lane)
        ranges = tuple(each.range for each in added), tuple((a.range, b.range) for a, b in factors)
        if not exact(word, *ranges):
            self._refuse(f"{word} wraps or saturates", self._inexact(word, lane, added, factors))
        parts = []
        origins = [self.origin(terms.expression(each, np.dtype(np.uint32))) for each in lane]
        for place in range(32 // kind.result):
            sum_ = _sum(f"sum_{len(self._numbers)}", kind, added, factors, place)
            self._numbers[sum_.bits.get_id(), True] = sum_
            self._origins[sum_.bits.get_id()] = _origin(f"{word}_{place}", kind.result, origins)
            if max(map(abs, sum_.range)) <= 2**MANTISSA:
                self.reader.means(sum_.bits, sum_.meaning)
            parts.append(sum_.bits)
        return terms.joined(parts, kind.result)

    def origin(self, number: Any) -> Any:
        """An expression in which the variables of sums are replaced by the sums themselves."""
        if not self._origins:  # a program of floats has no sums of integers, and the search takes half of its proof
            return number
        if number.get_id() in self._origins:
            return self._origins[number.get_id()]
        sums = self._sums_of(number)
        return number if not sums else z3.substitute(number, *((each, self._origins[each.get_id()]) for each in sums))

    def _sums_of(self, number: Any) -> list[Any]:
        """The variables of sums in an expression. Words of memory hold none, and many codes are parts of one word."""
        seen, pending, found = dict[int, Any](), [number], []
        while pending:
            node = pending.pop()
            key = node.get_id()
            if key in seen or key in self._without_sums:
                continue
            seen[key] = node
            if key in self._origins:
                found.append(node)
            else:
                pending.extend(node.children())
        if not found:
            self._without_sums |= seen
        return found

    def _operands(self, kind: Operands, lane: list[Any]) -> tuple[list[Number], list[tuple[Number, Number]]]:
        """The numbers that are added unchanged, and the factors, from the lowest bits up."""
        factors = lane[-2:] if kind.multiplied else []
        rest = lane[: len(lane) - len(factors)]
        added = [number for each in rest for number in self._cut(each, kind.added, True)]
        signs = (not kind.unsigned, True)
        pairs = [self._cut(each, kind.multiplied, signed) for each, signed in zip(factors, signs, strict=False)]
        return added, list(zip(*pairs, strict=True))

    def _cut(self, register: Any, each: int, signed: bool) -> list[Number]:
        """The numbers of `each` bits in a lane, the lowest first."""
        if terms.known(register):
            return [self._number(part, signed=signed) for part in _parts(register, each)]
        key = register.get_id(), each, signed
        if key not in self._cuts:
            self._cuts[key] = register, [self._number(part, signed=signed) for part in _parts(register, each)]
        return self._cuts[key][1]

    def _number(self, bits: Any, *, signed: bool) -> Number:
        """A part of a register; known parts are constants of programs, which are positive."""
        if terms.known(bits):
            return Number(bits, (bits, bits), partial(constant, float(bits)))
        plain = z3.simplify(bits)
        key = plain.get_id(), signed
        if key not in self._numbers:
            kind = np.dtype(f"{'i' if signed else 'u'}{plain.size() // 8}")
            most = 1 << terms.magnitude(plain if signed else z3.simplify(z3.ZeroExt(1, plain)))
            meaning = partial(_constant, plain, kind)
            self._numbers[key] = Number(plain, (-most if signed else 0, most - 1), meaning)
        return self._numbers[key]

    def _inexact(self, word: str, lane: list[Any], added: list[Number], factors: list[tuple[Number, Number]]) -> Any:
        """The condition under which a sum differs from the mathematical sum."""
        numbers = [*added, *(each for pair in factors for each in pair)]
        signed = [each for each in numbers if not terms.known(each.bits) and each.range[0] < 0]
        within = [_within(each.bits, each.range) for each in signed]
        return z3.And(*within, _differs(word, lane, [n.bits for n in added], [(a.bits, b.bits) for a, b in factors]))


def _origin(name: str, bits: int, operands: list[Any]) -> Any:
    sorts = [each.sort() for each in operands]
    return z3.Function(name, *sorts, z3.BitVecSort(bits))(*operands)


def _parts(bits: Any, each: int) -> Iterator[Any]:
    return (terms.part(bits, first, each) for first in range(0, 32, each))


def _constant(bits: Any, dtype: terms.Dtype) -> Polynomial:
    return constant(terms.cast(bits, dtype, REAL))


def _sum(name: str, kind: Operands, added: list[Number], factors: list[tuple[Number, Number]], place: int) -> Number:
    """One result of a word: a new variable, the sum that it stands for, and the range of the sum."""
    results = 32 // kind.result
    run = len(factors) // results
    mine, products = added[place::results], factors[place * run : (place + 1) * run]
    bounds = [each.range for each in mine]
    for a, b in products:
        corners = [x * y for x in a.range for y in b.range]
        bounds.append((min(corners), max(corners)))

    def meaning() -> Polynomial:
        return sum_of([*(each.meaning() for each in mine), *(a.meaning() * b.meaning() for a, b in products)])

    values = sum(least for least, _ in bounds), sum(greatest for _, greatest in bounds)
    return Number(z3.BitVec(name, kind.result), values, meaning)


# **The obligation.**


@cache
def exact(word: str, added: tuple[Range, ...], factors: tuple[tuple[Range, Range], ...]) -> bool:
    """Whether a word for sums is exact for all operands in these ranges, by its definition in the vocabulary.

    >>> byte, mantissa = (0, 255), (-127, 127)
    >>> exact("dot4", ((0, 2**24),), ((byte, mantissa),) * 4), exact("dot4_pairs", (), ((byte, mantissa),) * 4)
    (True, False)

    Args:
        word: one of `SUMS`.
        added: the ranges of the numbers that are added unchanged.
        factors: the ranges of each pair of numbers that are multiplied.
    """
    kind = SUMS[word]
    plain = [z3.BitVec(f"c{n}", kind.added) for n in range(len(added))]
    pairs = [(z3.BitVec(f"a{n}", kind.multiplied), z3.BitVec(f"b{n}", kind.multiplied)) for n in range(len(factors))]
    per = 32 // (kind.added or 32)
    lane = [terms.joined(plain[first : first + per], kind.added) for first in range(0, len(plain), per)]
    lane += [terms.joined(list(each), kind.multiplied) for each in zip(*pairs, strict=True)]
    solver = z3.Solver()
    solver.add(*(_within(*each) for each in zip(plain, added, strict=True)))
    for (a, b), (first, second) in zip(pairs, factors, strict=True):
        solver.add(_within(a, first, unsigned=kind.unsigned), _within(b, second))
    solver.add(_differs(word, lane, plain, pairs))
    return bool(solver.check() == z3.unsat)


WIDE = 48
"""Bits of the sums with which results are compared: more than any result needs."""


def _differs(word: str, lane: list[Any], added: list[Any], factors: list[tuple[Any, Any]]) -> Any:
    """The condition that a result of a word differs from the mathematical sum."""
    kind, function = SUMS[word], VOCABULARY[word].function
    assert function is not None
    register = function(*(Symbols(np.array([each, None], object)[:-1], np.uint32) for each in lane))
    results = list(_parts(register.data[0], kind.result))
    different = []
    for place, result in enumerate(results):
        run = len(factors) // len(results)
        total = sum((_wide(each) for each in added[place :: len(results)]), z3.BitVecVal(0, WIDE))
        for a, b in factors[place * run : (place + 1) * run]:
            total = total + terms.product(_wide(a, unsigned=kind.unsigned), _wide(b))
        different.append(_wide(result) != total)
    return z3.Or(*different)


def _wide(number: Any, unsigned: bool = False) -> Any:
    if terms.known(number):
        return z3.BitVecVal(number, WIDE)
    return (z3.ZeroExt if unsigned else z3.SignExt)(WIDE - number.size(), number)


def _within(number: Any, values: Range, unsigned: bool = False) -> Any:
    if unsigned:
        return z3.And(z3.UGE(number, values[0]), z3.ULE(number, values[1]))
    return z3.And(number >= values[0], number <= values[1])
