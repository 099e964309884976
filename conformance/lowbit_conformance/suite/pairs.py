r"""Every two sizes together: a kernel may be wrong only where heads of 128 channels meet groups of 8.

All combinations of several sizes are too many, but every *pair* of values of every two sizes fits into few calls. With
a prime p and sizes of at most p values each, let the calls be numbered by two numbers a and b below p, and let size
number j have value number :math:`a + j b` modulo p. For two sizes i and j any two value numbers u and v determine a and
b, since :math:`(i - j)\, b = u - v` has one solution modulo a prime. So each pair occurs, in :math:`p^2` calls.

A case is one a; it stands for the p calls of all b.

Source: Bush, *Orthogonal arrays of index unity*, 1952.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from lowbit_conformance.isolation.remote import Remote
from lowbit_conformance.suite.cases import Case
from lowbit_conformance.suite.marking import Record, Settings, call

Own = TypeVar("Own", bound=Case)

SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 17, 24, 31, 32, 33, 48, 64, 65, 80, 96, 128)
"""Powers of two and their neighbours, and multiples of the sizes of registers and tiles."""

HUNDREDS = (160, 192, 224, 256, 288, 300, 320, 384, 400, 448, 500, 511, 512, 513, 576, 640)
THOUSANDS = (704, 768, 896, 960, 1000, 1023, 1024, 1025, 1152, 1280, 1408, 1536, 1792, 1920, 2000, 2047, 2048, 2049)
LONG = (*HUNDREDS, *THOUSANDS, *(2304, 2560, 3072, 3584, 4095, 4096, 4097, 5120, 6144, 7168, 8192, 11008, 14336, 16384))
"""Lengths of contexts and widths of models, each combined with small sizes only."""

PRIME = 23
EVERY_PAIR = "every-pair"


def rows(turn: int, values: Sequence[Sequence[int]], prime: int = PRIME) -> Iterator[tuple[int, ...]]:
    """The calls of one turn: a value of every size for each call.

    >>> table = [row for turn in range(3) for row in rows(turn, [(1, 2, 3)] * 3, prime=3)]
    >>> all(len({(row[i], row[j]) for row in table}) == 9 for i, j in ((0, 1), (0, 2), (1, 2)))
    True
    """
    for step in range(prime):
        yield tuple(own[(turn + number * step) % prime % len(own)] for number, own in enumerate(values))


@dataclass(frozen=True)
class Pairs(Generic[Own]):
    """The cases of one operation in which every two values of two sizes occur together.

    Attributes:
        made: makes the case of a clause from a value of each size.
        values: of each size, in the order in which `made` takes them; at most `prime` of each.
        prime: see the top of this file.
    """

    made: Callable[..., Own]
    values: Sequence[Sequence[int]]
    prime: int = PRIME

    def cases(self, clause: str, settings: Settings) -> Iterator[Own]:
        """One case for each turn, which is its seed."""
        for turn in range(self.prime):
            yield self._case(clause, turn, next(rows(turn, self.values, self.prime)))

    def calls(self, case: Own) -> Iterator[Own]:
        """The calls that a case stands for, as cases of their own."""
        for row in rows(case.seed, self.values, self.prime):
            yield self._case(case.clause, case.seed, row)

    def _case(self, clause: str, turn: int, row: tuple[int, ...]) -> Own:
        return replace(self.made(clause, *row), tier="exhaustive", seed=turn)


def each_of(backend: Remote, cases: Iterable[Case], record_property: Record, test: Callable[..., None]) -> None:
    """Run a test on each of these cases that the backend declares; a failure names its case, and the largest fraction
    of the bound is recorded."""
    __tracebackhide__ = True
    shares: list[float] = []
    for case in cases:
        declaration = backend.capabilities().operations.get(case.operation)
        if declaration is not None and declaration.lacks(case.parameters()):
            continue
        try:
            call(test, backend, case, lambda name, share: shares.append(float(str(share))))
        except AssertionError as error:
            raise type(error)(f"{error} (at {case.label})") from error
    if shares:
        record_property("share", max(shares))
