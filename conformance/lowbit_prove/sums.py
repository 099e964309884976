"""Sums: two sums of integers compared part by part.

Terms of a sum that share no bit of an unknown do not depend on each other. So two sums are equal if, for each group of
terms that share bits, the terms of the one and of the other add up to the same. Each group is a smaller question to the
solver: of four products of bytes, one product at a time. Where the solver would search for long, because a product of
two bytes is written in another way, it is asked about each value of one byte.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import z3

from lowbit_prove.solver import variables

Bits = frozenset[tuple[str, int]]
BITWISE = (z3.Z3_OP_BAND, z3.Z3_OP_BOR, z3.Z3_OP_BXOR, z3.Z3_OP_BNOT)


@dataclass(frozen=True)
class Question:
    """Whether groups of terms differ.

    Attributes:
        condition: under which they differ.
        byte: an unknown below 256 for which the solver should be called value by value; empty for none.
        shifts: the number of bits by which the condition's unknowns are shifted left to give those of the sums.
    """

    condition: Any
    byte: str = ""
    shifts: Mapping[str, int] = field(default_factory=dict)


def differences(a: Any, b: Any) -> Iterator[Question]:
    """Questions, of which at least one holds wherever two integers of equal width differ.

    >>> x, y = z3.BitVecs("x y", 32)
    >>> sorted(str(each.condition) for each in differences(x + y + 7, y + 8 + x))
    ['False', 'False', 'True']
    """
    groups = list[tuple[Bits, Any]]()
    for term in (*_terms(a), *(-each for each in _terms(b))):
        shared, total = _bits(term, 0, term.size()), term
        apart = list[tuple[Bits, Any]]()
        for bits, other in groups:
            if bits & shared or not bits | shared:
                shared, total = bits | shared, other + total
            else:
                apart.append((bits, other))
        groups = [*apart, (shared, total)]
    yield from (_question(bits, z3.simplify(total != 0, som=True)) for bits, total in groups)


def _question(bits: Bits, different: Any) -> Question:
    """For two bytes, a condition independent of their positions; for other unknowns, the condition unchanged."""
    first = {name: min(bit for of, bit in bits if of == name) for name, _ in bits}
    found = list(variables(different))
    bytes_ = {(name, low + bit) for name, low in first.items() for bit in range(8)}
    if len(first) != 2 or bits != bytes_ or {*map(str, found)} != {*first}:
        return Question(different)
    moved = [(each, each << first[str(each)]) for each in found]
    below = [z3.ULT(each, 256) for each in found]
    return Question(z3.And(z3.simplify(z3.substitute(different, *moved)), *below), min(first), first)


def _terms(number: Any) -> Iterator[Any]:
    """The integers whose sum is this one, modulo a power of two."""
    kind, parts = number.decl().kind(), number.children()
    if kind == z3.Z3_OP_BADD:
        for each in parts:
            yield from _terms(each)
    elif kind == z3.Z3_OP_BSHL and z3.is_bv_value(parts[1]):
        yield from (each << parts[1] for each in _terms(parts[0]))
    elif kind == z3.Z3_OP_EXTRACT and number.params()[1] == 0:
        yield from (z3.Extract(number.size() - 1, 0, each) for each in _terms(parts[0]))
    else:
        yield number


def _bits(number: Any, first: int, end: int) -> Bits:
    """The bits of unknowns on which a run of bits of an expression depends; possibly a superset."""
    kind, parts = number.decl().kind(), number.children()
    if z3.is_bv_value(number):
        return frozenset()
    if not parts:
        return frozenset((str(number), bit) for bit in range(first, end))
    if kind == z3.Z3_OP_EXTRACT:
        low = number.params()[1]
        return _bits(parts[0], first + low, end + low)
    if kind in BITWISE:
        return frozenset[tuple[str, int]]().union(*(_bits(each, first, end) for each in parts))
    found = frozenset[tuple[str, int]]()
    if kind == z3.Z3_OP_CONCAT:
        place = 0
        for each in reversed(parts):
            if first < place + each.size() and place < end:
                found |= _bits(each, max(first - place, 0), min(end - place, each.size()))
            place += each.size()
        return found
    return found.union(*(_bits(each, 0, each.size() if z3.is_bv(each) else 1) for each in parts))
