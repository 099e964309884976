"""Accesses: where a program reads and writes, for all sizes at once.

A pointer of a program moves by constants. So before an iteration of a loop it is where the loop began, plus a constant
for each earlier iteration; and, where the body has a loop of ``turns[g]`` iterations, plus a constant times the sum of
``turns`` below g. Both are linear in integers: the counters of the loops, the sizes, and for each list of sizes its
element, the sum of those before it, and the sum of all. `Walk` traverses a program once, each loop in one iteration
that represents all, and gives every access as such a linear expression.

>>> from lowbit.kernels.program import Loop, Program
>>> row = Instruction("load_int", "a", (Address("w", 8),))
>>> walk = Walk(Program(4, (Loop("g", "groups", (row, Advance("w", 12))),)))
>>> [(each.pointer, each.base, each.first, each.last) for each in walk.accesses]
[('w', 12*g, 8, 11)]
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import z3

from lowbit.kernels.program import Address, Advance, Count, Element, Instruction, Loop, Program, Step
from lowbit.kernels.vector import VOCABULARY
from lowbit_prove.terms import UndecidedError

Facts = tuple[Any, ...]
"""Conditions on integers."""


def element(name: str, index: str) -> Any:
    """The size from a list that bounds a loop with this index in its current iteration."""
    return z3.Int(f"{name}[{index}]")


def before(name: str, index: str) -> Any:
    """The sum of the sizes of a list below an index."""
    return z3.Int(f"sum of {name} below {index}")


def total(name: str) -> Any:
    """The sum of a list of sizes."""
    return z3.Int(f"sum of {name}")


@dataclass(frozen=True)
class Access:
    """Elements that are read or written in the general iteration of a loop.

    Attributes:
        pointer: the pointer to the memory.
        base: the position of the pointer, without its constant part.
        first, last: the first and the last element, relative to `base`.
        facts: conditions on the integers at this access.
    """

    pointer: str
    base: Any
    first: int
    last: int
    facts: Facts


Displacement = dict[Any, int]
"""How far a block moves a pointer: a constant under the key 1, and for each size its factor."""


class Walk:
    """The accesses of a program; those at one place through one pointer are joined.

    Args:
        program: any program whose sizes are numbers, names, or elements indexed by the enclosing loop.
        known: for the index of a loop, what else is known in its iterations.

    Raises:
        UndecidedError: a pointer moves by a product of sizes.
    """

    def __init__(self, program: Program, known: Mapping[str, Facts] | None = None) -> None:
        self.lanes, self.known = program.lanes, known or {}
        self._found: dict[Any, Access] = {}
        self._block(program.body, {}, ())

    @property
    def accesses(self) -> Iterator[Access]:
        """Every access with the facts of its place."""
        return iter(self._found.values())

    def _block(self, steps: tuple[Step, ...], start: Mapping[str, Any], facts: Facts) -> None:
        bases, moved = dict(start), dict[str, int]()
        for step in steps:
            if isinstance(step, Advance):
                moved[step.pointer] = moved.get(step.pointer, 0) + step.step
            elif isinstance(step, Instruction):
                self._instruction(step, bases, moved, facts)
            elif isinstance(step, Loop):
                here = {pointer: bases.get(pointer, 0) + by for pointer, by in moved.items()}
                bases, moved = self._loop(step, bases | here, facts), {}

    def _instruction(self, step: Instruction, bases: Mapping[str, Any], moved: Mapping[str, int], facts: Facts) -> None:
        word = VOCABULARY[step.word]
        for argument, operand in zip(step.arguments, word.takes, strict=True):
            if isinstance(argument, Address) and word.function is not None:  # a prefetch reads nothing
                length = self.lanes * word.lane_bytes // 4 if operand == "address" else 1
                first = moved.get(argument.pointer, 0) + argument.offset
                base = z3.simplify(bases.get(argument.pointer, 0) + z3.IntVal(0))
                self._add(Access(argument.pointer, base, first, first + length - 1, facts))

    def _add(self, access: Access) -> None:
        """Widen the existing access of a place, or add a new one."""
        key = access.pointer, access.base.get_id(), len(access.facts), tuple(each.get_id() for each in access.facts)
        old = self._found.get(key, access)
        self._found[key] = Access(
            *(access.pointer, old.base, min(old.first, access.first), max(old.last, access.last), old.facts)
        )

    def _loop(self, loop: Loop, start: Mapping[str, Any], facts: Facts) -> dict[str, Any]:
        """Add the accesses of a loop; returns the positions of the pointers after it."""
        index, count = z3.Int(loop.index), _size(loop.count)
        inside, after = dict(start), dict(start)
        own: list[Any] = [index >= 0, index < count, *self.known.get(loop.index, ())]
        for pointer, moved in _displacements(loop.body).items():
            inside[pointer], after[pointer] = (start.get(pointer, 0) + each for each in _through(moved, loop))
        for name in _lists(loop.body, loop.index):
            own += [element(name, loop.index) >= 0, before(name, loop.index) >= 0]
            own.append(before(name, loop.index) + element(name, loop.index) <= total(name))
        self._block(loop.body, inside, (*facts, *own))
        return after


def _size(count: Count) -> Any:
    if isinstance(count, Element):
        return element(count.name, count.index)
    return z3.IntVal(count) if isinstance(count, int) else z3.Int(count)


def _displacements(steps: tuple[Step, ...]) -> dict[str, Displacement]:
    """How far a block moves each pointer."""
    found = dict[str, Displacement]()
    for step in steps:
        if isinstance(step, Advance):
            moves = {step.pointer: {1: step.step}}
        elif isinstance(step, Loop):
            moves = {pointer: _repeated(moved, step) for pointer, moved in _displacements(step.body).items()}
        else:
            continue
        for pointer, moved in moves.items():
            have = found.setdefault(pointer, {})
            for size, by in moved.items():
                have[size] = have.get(size, 0) + by
    return found


def _repeated(moved: Displacement, loop: Loop) -> Displacement:
    """How far a loop moves a pointer, from how far its body moves it."""
    if isinstance(loop.count, int):
        return {size: by * loop.count for size, by in moved.items()}
    if any(by for size, by in moved.items() if size != 1):
        raise UndecidedError(f"a pointer moves by a product of sizes in the loop over {loop.index}")
    return {loop.count: moved.get(1, 0)}


def _through(moved: Displacement, loop: Loop) -> tuple[Any, Any]:
    """How far a loop has moved a pointer before an iteration, and after the last one."""
    inside = moved.get(1, 0) * z3.Int(loop.index)
    after = moved.get(1, 0) * _size(loop.count)
    for size, by in moved.items():
        if size == 1 or by == 0:
            continue
        if not isinstance(size, Element) or size.index != loop.index:
            raise UndecidedError(f"a pointer moves by a product of sizes in the loop over {loop.index}")
        inside, after = inside + by * before(size.name, size.index), after + by * total(size.name)
    return inside, after


def _lists(steps: tuple[Step, ...], index: str) -> Iterator[str]:
    """The lists of sizes whose elements with this index bound loops."""
    for step in steps:
        if isinstance(step, Loop):
            if isinstance(step.count, Element) and step.count.index == index:
                yield step.count.name
            yield from _lists(step.body, index)
