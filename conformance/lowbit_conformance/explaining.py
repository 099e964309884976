"""From a failed case to the mistake: its calls are put before the defect bank, one after another.

The calls of a case are recorded while its test runs. The first of them whose result a defect of the bank explains
gives the diagnosis; if none does, the first whose result is visibly not the reference's is described.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lowbit.contract import Promise
from lowbit.operations import OPERATIONS
from lowbit_conformance.bank.description import describe
from lowbit_conformance.bank.diagnosis import diagnose
from lowbit_conformance.remote import Call, RemoteLinear, RemoteSession

MOST_BYTES = 1 << 20
MOST_CALLS = 6


@dataclass(frozen=True)
class Asked:
    """A call as the reference is asked for it: a prepared matrix is an argument, a session is all its steps."""

    operation: str
    arguments: tuple[Any, ...]
    choices: Mapping[str, Any]
    given: Any
    steps: tuple[tuple[Any, ...], ...] = ()


@dataclass(frozen=True)
class Explanation:
    """What a report says of a failure besides the failure: where it begins, and which mistake it looks like."""

    where: Mapping[str, Any] = field(default_factory=dict)
    diagnosis: str = ""


def explain(calls: list[Call]) -> Explanation:
    """What is known of the first wrong result among the calls of a case."""
    described = Explanation()
    for asked in list(asked_of(calls))[:MOST_CALLS]:
        # A report that cannot explain is still a report: arguments that were wrong on purpose end here.
        with contextlib.suppress(Exception), np.errstate(all="ignore"):
            found = diagnose(asked.operation, asked.arguments, asked.choices, asked.given, steps_taken=asked.steps)
            if found:
                return Explanation(found.where, found.text)
            described = described if described.where else _described(asked)
    return described


def _described(asked: Asked) -> Explanation:
    if asked.steps:
        return Explanation()
    operation = OPERATIONS[asked.operation]
    expected = operation.reference(*asked.arguments, **asked.choices)
    seen = describe(asked.operation, asked.arguments, asked.given, expected)
    if operation.promise is Promise.BOUNDED and not seen.where:
        return Explanation()
    return Explanation(seen.where, f"no defect of the bank explains it; {seen.text}" if seen.text else "")


def asked_of(calls: list[Call]) -> Iterator[Asked]:
    """The calls of a case that answered, as the reference is asked for them."""
    sessions: dict[int, list[Call]] = {}
    for call in calls:
        if call.nbytes > MOST_BYTES or call.result is None:
            continue
        if call.what == "run":
            yield Asked(call.operation, call.arguments, call.choices, call.result)
        elif isinstance(call.owner, RemoteLinear):
            yield Asked(call.operation, (call.arguments[0], call.owner.matrix), {}, call.result)
        elif isinstance(call.owner, RemoteSession):
            sessions.setdefault(id(call.owner), []).append(call)
    for steps in sessions.values():
        owner = steps[0].owner
        assert isinstance(owner, RemoteSession)
        given = tuple(step.result for step in steps)
        yield Asked(owner.operation, owner.opened_with, {}, given, tuple(step.arguments for step in steps))
