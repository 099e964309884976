"""Errata: where a paper cannot be followed as printed, what lowbit specifies instead, and a check of each.

A specification that corrects its sources must prove each correction. So every ruling here is a function that
*computes*: it shows that the form as printed in the copy at hand does not hold, or that the paper leaves two readings
that differ, and that the ruled form holds and is what the chapters do. A ruling whose check fails fails the tests.

The copies at hand were extracted from PDF, so an error may come from the extraction and not from the authors.

>>> @ruling("X0", printed="1 + 1 = 3", ruled="1 + 1 = 2")
... def arithmetic() -> None:
...     assert 1 + 1 != 3
...     assert 1 + 1 == 2
>>> RULINGS["X0"].check()
>>> _ = _rulings.pop("X0")
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from lowbit.errors import ArgumentError


@dataclass(frozen=True)
class Ruling:
    """One ruling.

    Attributes:
        id: its number: ``Q3``.
        printed: what the copy at hand says, or does not say.
        ruled: what lowbit specifies.
        check: computes both and asserts; returns nothing.
    """

    id: str
    printed: str
    ruled: str
    check: Callable[[], None]


_rulings: dict[str, Ruling] = {}

RULINGS: Mapping[str, Ruling] = MappingProxyType(_rulings)
"""The rulings of the papers imported so far, by id."""


def ruling(id: str, *, printed: str, ruled: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Register the decorated function as the check of a ruling.

    Raises:
        ValueError: the id is taken.
    """

    def register(check: Callable[[], None]) -> Callable[[], None]:
        if id in _rulings:
            raise ValueError(f"ruling {id} stands twice")
        _rulings[id] = Ruling(id, printed, ruled, check)
        return check

    return register


def check_refused(call: Callable[[], object]) -> None:
    """Assert that a call raises `ArgumentError`."""
    try:
        call()
    except ArgumentError:
        return
    raise AssertionError("this must be refused")
