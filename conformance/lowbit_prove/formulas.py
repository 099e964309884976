"""Formulas: functions of integers, run on unknowns.

A backend declares its roundings as a plain Python function of numbers of rows. To compare it with a program for all
numbers, it runs on unknown integers (`Whole`). Where it compares two of them, as ``min`` and ``max`` do, both outcomes
are followed in turn. Each path through the function is a `Way`, with the conditions that lead to it.

>>> for way in ways(lambda rows: max(rows, 8), z3.Int("rows")):
...     print(way.conditions, way.result)
(rows < 8,) 8
(Not(rows < 8),) rows
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import z3

from lowbit_prove.accesses import Facts
from lowbit_prove.terms import UndecidedError

MOST_WAYS = 64


@dataclass(frozen=True)
class Way:
    """One path through a function: its result, under conditions."""

    conditions: Facts
    result: Any


class _Run:
    """One run of a function with given answers to its first comparisons; later ones are answered with True."""

    def __init__(self, answers: list[bool]) -> None:
        self.answers, self.conditions, self.asked = answers, list[Any](), 0

    def answer(self, condition: Any) -> bool:
        if self.asked == len(self.answers):
            self.answers.append(True)
        chosen = self.answers[self.asked]
        self.asked += 1
        self.conditions.append(condition if chosen else z3.Not(condition))
        return chosen


class Whole:
    """An unknown integer; a quotient by an unknown is a variable with known sign and known first values."""

    def __init__(self, run: _Run, expression: Any) -> None:
        self.run, self.expression = run, expression

    def _of(self, expression: Any) -> "Whole":
        return Whole(self.run, expression)

    def __add__(self, other: "Whole | int") -> "Whole":
        return self._of(self.expression + _plain(other))

    __radd__ = __add__

    def __sub__(self, other: "Whole | int") -> "Whole":
        return self._of(self.expression - _plain(other))

    def __rsub__(self, other: int) -> "Whole":
        return self._of(other - self.expression)

    def __neg__(self) -> "Whole":
        return self._of(-self.expression)

    def __mul__(self, other: "Whole | int") -> "Whole":
        if isinstance(other, Whole):
            raise UndecidedError("a formula multiplies two sizes")
        return self._of(self.expression * other)

    __rmul__ = __mul__

    def __floordiv__(self, other: "Whole | int") -> "Whole":
        if isinstance(other, int) and other > 0:
            return self._of(self.expression / other)  # z3's quotient, which rounds down for a positive divisor
        return self._of(quotient(self.run, self.expression, _plain(other)))

    def __rfloordiv__(self, other: int) -> "Whole":
        return self._of(quotient(self.run, z3.IntVal(other), self.expression))

    def __mod__(self, other: "Whole | int") -> "Whole":
        if isinstance(other, int) and other > 0:
            return self._of(self.expression % other)
        raise UndecidedError("a formula takes a remainder by a size")

    def __rmod__(self, other: int) -> "Whole":
        """The remainder of a number by an unknown, by cases; if the unknown is larger, it is the number."""
        rest = z3.Int(f"{other} mod {self.expression}")
        smaller = [z3.Implies(self.expression == by, rest == other % by) for by in range(1, other + 1)]
        self.run.conditions += [*smaller, z3.Implies(self.expression > other, rest == other)]
        return self._of(rest)

    def __lt__(self, other: "Whole | int") -> bool:
        return self.run.answer(self.expression < _plain(other))

    def __gt__(self, other: "Whole | int") -> bool:
        return self.run.answer(self.expression > _plain(other))

    def __eq__(self, other: object) -> bool:
        return self.run.answer(self.expression == _plain(other))

    __hash__ = None  # type: ignore[assignment]  # equality is a question to the solver


def _plain(number: Any) -> Any:
    return number.expression if isinstance(number, Whole) else number


def quotient(run: _Run, number: Any, by: Any) -> Any:
    """``number // by`` for a positive unknown: a variable with known sign and known first values."""
    found = z3.Int(f"{number} // {by}")
    run.conditions += [z3.Implies(number < 0, found <= -1), z3.Implies(z3.And(number < 0, -number <= by), found == -1)]
    run.conditions += [z3.Implies(z3.And(number < 0, -number > by), found <= -2)]
    return found


def ways(function: Callable[..., Any], *unknowns: Any) -> Iterator[Way]:
    """Every path through a function of integers.

    Args:
        function: of integers, with sums, products with numbers, quotients that round down, and comparisons.
        unknowns: the arguments: z3's expressions of integers, or numbers.

    Raises:
        UndecidedError: it does something else, or has more than `MOST_WAYS` paths.
    """
    pending, count = [list[bool]()], 0
    while pending:
        if (count := count + 1) > MOST_WAYS:
            raise UndecidedError(f"a formula has more than {MOST_WAYS} ways")
        known = pending.pop()
        run = _Run(list(known))
        result = function(*(each if isinstance(each, int) else Whole(run, each) for each in unknowns))
        yield Way(tuple(run.conditions), _plain(result))
        pending += [[*run.answers[:place], False] for place in range(len(known), len(run.answers))]
