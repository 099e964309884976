"""Cases at the sizes that a declaration allows.

The suite's own sizes are fixed, and a kernel may handle none of them: multiples of 24 columns only, say, or batches of
two. Where fewer than `ENOUGH` cases of a test lie within a declaration, the test's other cases are moved: each size
that is limited becomes one near it that the declaration and the format of the weights allow (`near`). The rest stays.

What a moved case is follows from its id, as for every other, since the id says its sizes. Which cases are moved follows
from the declaration and from the test's cases, so `--case` finds a moved case again, under the same declaration.
"""

from collections.abc import Iterable
from functools import lru_cache
from itertools import product
from math import prod
from typing import Any

from lowbit.backend import Declaration, Range
from lowbit_conformance.suite.cases import Case

ENOUGH = 4
TIERS = ("lattice", "edge", "random")
MOST_NUMBERS = 2**24
"""The largest product of the sizes of a moved case: a matrix of 4096 by 4096."""
DOUBLINGS = 10
"""Multiples of a limit that are tried: 1, 2, 4 and so on, because sizes of blocks, groups and words are powers of
two."""


def moved(cases: Iterable[Case], declaration: Declaration | None) -> list[Case]:
    """The cases that a declaration adds to those of a test; none if enough of these satisfy it.

    Args:
        cases: of one test, of one operation.
        declaration: of that operation; None if there is none.

    Returns:
        Cases that satisfy the declaration and are not among the cases of the test.
    """
    own = [case for case in cases if case.tier in TIERS and not case.large and case.movable]
    if declaration is None or not any(name in declaration.limits for case in own[:1] for name in case.movable):
        return []
    outside = [case for case in own if declaration.lacks(case.parameters())]
    if len(own) - len(outside) >= ENOUGH:
        return []
    seen = {case.id for case in own}
    found: dict[str, Case] = {}
    for case in outside:
        there = nearest(case, declaration)
        if there is not None and there.id not in seen:
            found.setdefault(there.id, there)
    return list(found.values())


def nearest(case: Case, declaration: Declaration) -> Case | None:
    """The case at the nearest sizes that a declaration allows; None if there are none, or if anything else is not
    declared."""
    others = {name: value for name, value in case.parameters().items() if name not in case.movable}
    if declaration.lacks(others):
        return None
    fields = {name: part for name, part in case.movable.items() if name in declaration.limits}
    choices = [near(declaration.limits[name], getattr(case, part)) for name, part in fields.items()]
    for sizes in product(*choices):
        changes: dict[str, Any] = dict(zip(fields.values(), sizes, strict=True))
        there = case.with_sizes(changes)
        if prod(getattr(there, part) for part in case.movable.values()) <= MOST_NUMBERS and there.possible:
            return there
    return None


def why_none(cases: Iterable[Case], declaration: Declaration) -> str:
    """Why no case of an operation satisfies a declaration, as part of a sentence."""
    own = [case for case in cases if case.tier in TIERS]
    parameters = [case.parameters() for case in own]
    for name, allowed in declaration.limits.items():
        values = {each[name] for each in parameters if name in each}
        if any(value in allowed for value in values) or not values:
            continue
        movable = [case for case in own if name in case.movable]
        sizes = {size for case in movable for size in near(allowed, getattr(case, case.movable[name]))}
        if sizes and min(sizes) > MOST_NUMBERS:
            return f"{name} of {min(sizes)} or more, and a case has at most {MOST_NUMBERS} numbers"
        return f"cases have {name} {_few(values)} and cannot have what it allows"
    return f"each of {', '.join(declaration.limits)} is met by some case, and all of them by none"


def _few(values: Iterable[object]) -> str:
    """A few values, sorted if possible."""
    shown = sorted(map(str, values), key=lambda each: (len(each), each))
    return ", ".join(shown[:6]) + (" …" if len(shown) > 6 else "")


@lru_cache(maxsize=4096)
def near(allowed: tuple[object, ...] | Range, size: int) -> list[int]:
    """Sizes near a given one that a limit allows: among all sizes, then among multiples of 2, of 4 and so on.

    From a range, it takes the least size not below the given one, or the largest if all are below; from a list, the
    nearest.

    >>> near(Range(24), 32)[:4], near(Range(24, most=40), 100), near((7, 30, 64), 32)
    ([48, 96, 192, 384], [24], [30, 64])
    """
    found: list[int] = []
    for doubling in range(DOUBLINGS):
        if not isinstance(allowed, Range):
            listed = [each for each in allowed if isinstance(each, int) and each > 0 and each % (1 << doubling) == 0]
            found += sorted(listed, key=lambda each: (abs(each - size), each))[:1]
            continue
        step = allowed.multiple << doubling
        above = -(-max(size, allowed.least) // step) * step
        found.append(above if above in allowed else (allowed.most or 0) // step * step)
    return [each for each in dict.fromkeys(found) if each in allowed]
