"""Deciding: the outcomes of many theorems, from certificates and by parallel processes.

Theorems that say the same about the same program are decided once. The longest start first, so that the last processes
end at about the same time.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from multiprocessing import get_context
from time import monotonic
from typing import Any

from lowbit.cli.progress import changing_bar
from lowbit_prove import catalogue, certificates
from lowbit_prove.theorem import Outcome, Proof, Theorem

LONGEST = ("casts", "encoding", "offload", "steps")
"""The kinds of theorems that take longest, the slowest first."""
FEW = 8
"""Up to this many theorems are decided in this process, because other processes take a second to start."""


@dataclass(frozen=True)
class Choice:
    """A selection of theorems in the terms of the command line, so that another process finds the same.

    Attributes:
        names: of kernels, formats, theorems or kinds; empty for all.
        sample: one in this many of them is decided.
    """

    names: tuple[str, ...] = ()
    sample: int = 1

    @property
    def theorems(self) -> list[Theorem]:
        return _theorems(self)


@cache
def _theorems(choice: Choice) -> list[Theorem]:
    return catalogue.chosen(list(choice.names))[:: choice.sample]


@dataclass(frozen=True)
class Decided:
    """A theorem with its outcome, the seconds it took, and whether the proof comes from a certificate."""

    theorem: Theorem
    outcome: Outcome
    seconds: float
    certified: bool

    @property
    def document(self) -> dict[str, Any]:
        """For ``--json``."""
        outcome = {"outcome": type(self.outcome).__name__.lower(), **asdict(self.outcome)}
        told = {"theorem": self.theorem.id, "statement": self.theorem.statement, **outcome}
        return told | {"seconds": round(self.seconds, 3), "certified": self.certified}


def decided(choice: Choice, *, fresh: bool, jobs: int = 1) -> list[Decided]:
    """Each theorem of a choice with its outcome, in order; proofs are kept.

    Args:
        choice: of theorems.
        fresh: whether certificates are ignored.
        jobs: the maximum number of processes.
    """
    wanted = [certificates.certificate(each) for each in choice.theorems]
    first = {each.key: number for number, each in reversed(list(enumerate(wanted)))}
    known = {} if fresh else {key: proof for key, n in first.items() if (proof := certificates.kept(wanted[n]))}
    found: dict[str, tuple[Outcome, float]] = {key: (proof, 0.0) for key, proof in known.items()}
    pending = sorted((n for key, n in first.items() if key not in known), key=lambda n: (_order(choice.theorems[n]), n))
    with changing_bar() as report:
        report("proving", 0, len(pending))
        for done, (number, outcome, seconds) in enumerate(_outcomes(choice, pending, jobs), 1):
            report("proving", done, len(pending))
            found[wanted[number].key] = outcome, seconds
            if isinstance(outcome, Proof):
                certificates.keep(wanted[number], outcome)
    return [
        Decided(theorem, *found[each.key], each.key in known)
        for theorem, each in zip(choice.theorems, wanted, strict=True)
    ]


def _order(theorem: Theorem) -> int:
    return LONGEST.index(theorem.kind) if theorem.kind in LONGEST else len(LONGEST)


def _outcomes(choice: Choice, numbers: list[int], jobs: int) -> Iterator[tuple[int, Outcome, float]]:
    """The outcomes of theorems, by their numbers in the choice, in any order."""
    jobs = min(jobs, len(numbers)) if len(numbers) > FEW else 1
    work = [(choice, number) for number in numbers]
    if jobs == 1:
        yield from map(_outcome, work)
        return
    with get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap_unordered(_outcome, work)


def _outcome(work: tuple[Choice, int]) -> tuple[int, Outcome, float]:
    choice, number = work
    started = monotonic()
    outcome = choice.theorems[number].decide()
    return number, outcome, monotonic() - started
