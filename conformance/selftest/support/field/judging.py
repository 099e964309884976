"""The suite and its diagnosis on one kernel: what `lowbit conformance --function` finds, with one process less."""

import re
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from kills.trial import run

from lowbit.backend.function import Claim, described
from lowbit_conformance.isolation.remote import Remote
from lowbit_conformance.suite.cases import HABIT
from lowbit_conformance.suite.clauses import load_suite
from lowbit_conformance.suite.explaining import Explainer, asked_of
from lowbit_conformance.suite.marking import MARKS, Settings
from lowbit_conformance.suite.plugin import not_declared

NAMED = re.compile(r"all wrong results are what (.+) gives: ")
DEADLINE = 60.0


@dataclass
class Judgement:
    """What the suite says of a kernel.

    Attributes:
        executed: how many cases were run.
        failures: what each failed case says, by its id.
        names: the defects that the diagnosis names, and for how many failures.
        texts: the sentences of the diagnosis, and for how many failures.
    """

    executed: int = 0
    failures: dict[str, str] = field(default_factory=dict)
    names: Counter[str] = field(default_factory=Counter)
    texts: Counter[str] = field(default_factory=Counter)


def judge(function: Callable[..., Any] | str, claim: Claim, seeds: int = 1, first: int = 0) -> Judgement:
    """Run the cases that a function declares, but for those of habits.

    Args:
        function: the kernel, or ``module:function``.
        claim: what it computes.
        seeds: of the random tier.
        first: the first of them.
    """
    load_suite()
    found, explainer = Judgement(), Explainer()
    with closing(Remote("function", described(function, claim), DEADLINE)) as remote:
        remote.load()
        for mark in MARKS:
            if not mark.clause.startswith(f"{claim.operation}/C"):
                continue
            for case in mark.generator(mark.clause, Settings(range(first, first + seeds))):
                if case.tier == HABIT or not_declared(claim.declaration, case):
                    continue
                found.executed += 1
                with remote.recording() as calls:
                    message = run(mark, case, remote)
                if message:
                    found.failures[case.id] = message
                explainer.note(case.id, asked_of(calls), re.split("[^A-Z_]", message)[0])
    for _, explanation in explainer.explanations():
        if explanation.diagnosis:
            found.texts[explanation.diagnosis] += 1
        if named := NAMED.match(explanation.diagnosis):
            found.names.update(named[1].split(" or "))
    return found
