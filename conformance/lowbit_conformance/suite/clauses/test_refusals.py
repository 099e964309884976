"""Checks of habit H8: wrong arguments are refused.

The mistakes follow from the declarations (`lowbit_conformance.suite.mistakes`), the right call that each is made in
from the operation's own cases. Mistakes that annotations do not tell, and those of an ``out``, stand beside the cases
of the operation's clauses.
"""

from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

from lowbit.operations import OPERATIONS
from lowbit_conformance.isolation.calls import Call, RemoteLinear
from lowbit_conformance.isolation.remote import Remote
from lowbit_conformance.isolation.verdicts import BrokenPromiseError
from lowbit_conformance.suite.cases import HABIT
from lowbit_conformance.suite.clauses.test_habits import HabitCase, recorded
from lowbit_conformance.suite.compare import refuses
from lowbit_conformance.suite.marking import Settings, checks
from lowbit_conformance.suite.mistakes import made, mistakes

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

ENOUGH = 60
"""The number of right calls to try for each mistake."""

_known: "WeakKeyDictionary[Remote, dict[str, tuple[list[Arguments], Iterator[Arguments]]]]" = WeakKeyDictionary()


def derived(clause: str, settings: Settings) -> Iterator[HabitCase]:
    """One case for each mistake with each argument of each operation."""
    for name, operation in OPERATIONS.items():
        for variant in mistakes(operation.signature):
            yield HabitCase(clause.replace("*", name), HABIT, variant)


@checks("*/H8", derived)
def test_wrong_arguments_are_refused(backend: Remote, case: HabitCase) -> None:
    """A call in which one argument has a kind, shape or value other than declared raises ArgumentError."""
    signature = OPERATIONS[case.operation].signature
    mistake = mistakes(signature)[case.variant]
    for arguments, choices in right_calls(backend, case.operation):
        if wrong := made(signature, mistake, arguments, choices):
            positional, named = wrong
            with refuses():
                if OPERATIONS[case.operation].stateful:
                    backend.open(case.operation, *positional, *named.values())  # a session takes no names
                else:
                    backend.run(case.operation, *positional, **named)
            return
    raise BrokenPromiseError(f"WRONG: no call of {case.operation} succeeded that {case.variant} could be made in")


def right_calls(backend: Remote, operation: str) -> Iterator[Arguments]:
    """The arguments of successful calls, kept for the next mistake."""
    of_backend = _known.setdefault(backend, {})
    if operation not in of_backend:
        of_backend[operation] = [], (_arguments(call) for call in recorded(backend, operation) if _whole(call))
    kept, more = of_backend[operation]
    yield from kept
    while len(kept) < ENOUGH and (found := next(more, None)):
        kept.append(found)
        yield found


def _whole(call: Call) -> bool:
    """Whether the call has all the arguments of an operation."""
    return call.what not in ("prepare", "step")


def _arguments(call: Call) -> Arguments:
    """The arguments for the reference; a product takes its matrix from the prepared one."""
    if isinstance(call.owner, RemoteLinear):
        return (call.arguments[0], call.owner.matrix), {}
    return call.arguments, call.choices
