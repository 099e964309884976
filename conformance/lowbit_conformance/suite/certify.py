"""Certificates: whether a run shows that a backend keeps a profile of the specification.

A certificate answers for *every* case that the suite has for the profile, so what was left out by an option counts
against it just as what failed. The judgement is made in the process that ran the cases: if that process does not end
in good order there is no certificate.

Two things are not asked of everyone: calls from several threads, which a backend may decline, and `H4` of a stateful
operation, whose own clauses say what repetition means.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from lowbit.profiles import Profile
from lowbit_conformance.suite.cases import CONCURRENT, LOADING, Case
from lowbit_conformance.suite.tally import Certificate, Verdict

LEAST_SEEDS = 5
"""A certificate needs random cases: at least as many seeds as a run has by default."""


def selects(profile: Profile, case: Case) -> bool:
    """Whether a case of the suite belongs to a profile; the case that loads the backend belongs to all."""
    return case.operation == LOADING or profile.selects(case.clause, case.parameters())


def certify(profile: Profile, cases: Iterable[Case], verdicts: Iterable[Verdict], seeds: int) -> Certificate:
    """Judge a run against a profile.

    Args:
        profile: the profile to certify.
        cases: all cases of the suite, whether or not they were run; those of other profiles are ignored.
        verdicts: of the cases that were run.
        seeds: how many seeds the random tier had.

    Returns:
        The certificate, granted or not.
    """
    given = {verdict.id: verdict for verdict in verdicts}
    wanted = [case for case in cases if selects(profile, case) and not _declined(case, given)]
    missing = []
    for clause in dict.fromkeys((*profile.clauses, *(case.clause for case in wanted))):
        ids = [case.id for case in wanted if case.clause == clause]
        missing += [f"{clause}: {reason}" for reason in _reasons(ids, given)]
    if seeds < LEAST_SEEDS:
        missing.append(f"the random tier: {seeds} seeds, at least {LEAST_SEEDS} are needed")
    return Certificate(profile.id, not missing, tuple(missing), len(wanted))


def _declined(case: Case, given: Mapping[str, Verdict]) -> bool:
    return case.variant == CONCURRENT and case.id in given and given[case.id].outcome == "not declared"


UNDECLARED = re.compile(r"([\w.]+)/\w+: (\d+) of \d+ cases are not declared \((.*)\)")


def folded(missing: Iterable[str]) -> list[str]:
    """The lines of a certificate for a terminal: what is not declared, in one line per operation and not per clause.

    >>> folded(["a.b/C1: 2 of 9 cases are not declared (bits 2)", "a.b/C2: 1 of 4 cases are not declared (bits 2)"])
    ['a.b: 3 cases are not declared (bits 2)']
    """
    counts: Counter[tuple[str, str]] = Counter()
    lines: dict[str, None] = {}
    for line in missing:
        if found := UNDECLARED.fullmatch(line):
            counts[found[1], found[3]] += int(found[2])
        else:
            lines[line] = None
    undeclared = [
        f"{operation}: {count} cases are not declared ({what})" for (operation, what), count in counts.items()
    ]
    return [*undeclared, *lines]


def _reasons(ids: Sequence[str], given: Mapping[str, Verdict]) -> Iterable[str]:
    """Why the cases of one clause do not certify it; empty if they do."""
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
