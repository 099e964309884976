"""Certificates: whether a run shows that a backend keeps a profile of the specification.

A certificate answers for *every* case that the suite has for the profile, so what was left out by an option counts
against it just as what failed. The judgement is made in the process that ran the cases: if that process does not end
in good order there is no certificate.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lowbit.profiles import Profile
from lowbit_conformance.cases import Case
from lowbit_conformance.tally import Verdict

OWN_CASES = ("H4", "H6")
"""The habits that have cases of their own; the others are watched in every case."""

LEAST_SEEDS = 5
"""A certificate is worth something only with random cases: as many seeds as a run has that asks for nothing else."""


@dataclass(frozen=True)
class Certificate:
    """What a run says of one profile.

    Attributes:
        profile: its id.
        certified: whether every case of every clause has run and passed.
        missing: if not, why not, a line for each clause or habit concerned.
        cases: how many cases the profile has in this suite.
    """

    profile: str
    certified: bool
    missing: tuple[str, ...]
    cases: int

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        if self.certified:
            return f"{self.profile}: certified, {self.cases} cases"
        return f"{self.profile}: not certified; " + "; ".join(self.missing)


def selects(profile: Profile, case: Case) -> bool:
    """Whether a case of the suite belongs to a profile."""
    return profile.selects(case.clause, case.parameters())


def certify(profile: Profile, cases: Iterable[Case], verdicts: Iterable[Verdict], seeds: int) -> Certificate:
    """Judge a run by a profile.

    Args:
        profile: what is to be certified.
        cases: all cases of the suite, whether or not they were run; those of other profiles are passed over.
        verdicts: what came of those that were run.
        seeds: how many seeds the random tier had.

    Returns:
        The certificate, granted or not.
    """
    wanted = {case.id: case for case in cases if selects(profile, case)}
    given = {verdict.id: verdict for verdict in verdicts}
    own = [habit for habit in profile.habits if habit.rpartition("/")[2] in OWN_CASES]
    missing = []
    for clause in (*profile.clauses, *own):
        ids = [id for id, case in wanted.items() if case.clause == clause]
        missing += [f"{clause}: {reason}" for reason in _reasons(ids, given)]
    if seeds < LEAST_SEEDS:
        missing.append(f"the random tier: {seeds} seeds, at least {LEAST_SEEDS} are needed")
    return Certificate(profile.id, not missing, tuple(missing), len(wanted))


def _reasons(ids: Sequence[str], given: dict[str, Verdict]) -> Iterable[str]:
    """Why the cases of one clause do not certify it; nothing if they do."""
    if not ids:
        yield "the suite has no case of it"
    failed = [id for id in ids if id in given and given[id].outcome == "failed"]
    if failed:
        yield f"{len(failed)} of {len(ids)} cases failed, first {failed[0]}"
    undeclared = Counter(given[id].message for id in ids if id in given and given[id].outcome == "not declared")
    if undeclared:
        what, _ = undeclared.most_common(1)[0]
        yield f"{undeclared.total()} of {len(ids)} cases are not declared ({what})"
    if absent := sum(id not in given for id in ids):
        yield f"{absent} of {len(ids)} cases were not run"
