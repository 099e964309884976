"""Checks of the habits that every operation must keep (`lowbit.contract.operation.HABITS`).

Most habits are watched in every case: where a call reads and writes, that it comes back, what it does to the process.
Here are those that take more than one call: the same call again after a hundred others, in turns with others, with
arrays at every offset, with other contents in the same arrays, beside other threads, and so often that a leak shows.
The calls are those of the operation's own cases, recorded while their tests run, so an operation needs nothing here to
be covered.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from typing import Any

from lowbit.errors import ArgumentError
from lowbit.operations import OPERATIONS
from lowbit_conformance.isolation.calls import Call, Variant
from lowbit_conformance.isolation.equal_bits import difference, same
from lowbit_conformance.isolation.remote import Remote
from lowbit_conformance.isolation.verdicts import BrokenPromiseError
from lowbit_conformance.suite.cases import CONCURRENT, HABIT, Case
from lowbit_conformance.suite.fitting import moved
from lowbit_conformance.suite.marking import MARKS, Settings, checks

RECORDED = 40  # cases of each test
GOLDEN = (5**0.5 - 1) / 2
OTHERS = 100  # number of calls between a call and its repetition
MANY_TIMES = 300
SMALL = 1 << 16  # bytes of the arguments of a call that is repeated often
BATCHES, TIMES = 4, 25  # of repeated calls, after three to warm up
LONGER = 250  # if the first measurement is suspicious
BYTES = "bytes of malloc"
SLOW = {BYTES, "Python objects"}
LEAST_BYTES = 16  # least leak per call; the allocator hands out no less


@dataclass(frozen=True)
class HabitCase(Case):
    """A habit of one operation; the variant says which aspect of it."""

    @property
    def label(self) -> str:
        return ""

    def parameters(self) -> dict[str, object]:
        return {}


def every(variant: str, *, stateful: bool = False) -> Callable[[str, Settings], Iterator[HabitCase]]:
    """One case for each operation; results of a stateful one depend on earlier steps, so its own clauses cover H4."""

    def generator(clause: str, settings: Settings) -> Iterator[HabitCase]:
        for name, operation in OPERATIONS.items():
            if stateful or not operation.stateful:
                yield HabitCase(clause.replace("*", name), HABIT, variant)

    return generator


def loading(clause: str, settings: Settings) -> Iterator[HabitCase]:
    yield HabitCase(clause, HABIT, "loading")


@checks("backend/H6", loading)
def test_loading(backend: Remote, case: HabitCase) -> None:
    """Importing and creating the backend, and asking for its capabilities, do not change the state of the process."""
    for verdict, text in backend.breaches:
        when = "" if verdict == "DECLARATION_REFUSED" else " (while it was loaded)"
        raise BrokenPromiseError(f"{verdict}: {text}{when}")


def recorded(backend: Remote, operation: str) -> Iterator[Call]:
    """The successful calls of the operation's own cases, as its tests make them.

    Raises:
        AssertionError: the error of the first call, if none succeeded except those that prepare a matrix or open a
            session.
    """
    failure: Exception | None = None
    made = 0
    for mark in [mark for mark in MARKS if mark.clause.rpartition("/")[0] == operation]:
        own = list(mark.generator(mark.clause, Settings(range(1))))
        own += moved(own, backend.capabilities().operations[operation])
        cases = list(_declared(backend, operation, own))
        for case in spread(cases)[:RECORDED]:
            with backend.recording() as calls:
                try:
                    mark.run(backend, case)
                except (AssertionError, ArgumentError) as error:
                    failure = failure or error
            made += sum(call.result is not None and call.what != "prepare" for call in calls)
            yield from (call for call in calls if call.result is not None and call.nbytes <= SMALL)
    if failure is not None and not made:
        raise failure


def _declared(backend: Remote, operation: str, cases: list[Case]) -> Iterator[Case]:
    declaration = backend.capabilities().operations[operation]
    for case in cases:
        if case.tier in ("lattice", "random") and case.variant != CONCURRENT and not case.large:
            with suppress(ArgumentError):
                if not declaration.lacks(case.parameters()):
                    yield case


def spread(cases: list[Case]) -> list[Case]:
    """The cases, reordered so that any first few are spread over all of them and differ in every parameter."""
    return [case for _, case in sorted(enumerate(cases), key=lambda pair: pair[0] * GOLDEN % 1)]


def own_calls(backend: Remote, operation: str, count: int) -> list[Call]:
    """The first calls of an operation.

    Raises:
        AssertionError: none succeeded, see `recorded`.
    """
    calls = list(islice((call for call in recorded(backend, operation) if _proper(call, operation)), count))
    if not calls:
        raise BrokenPromiseError(f"WRONG: no call of {operation} succeeded")
    return calls


def _proper(call: Call, operation: str) -> bool:
    return call.operation == operation and call.what not in ("prepare", "open", "step")


@checks("*/H4", every("again"))
def test_again_after_others(backend: Remote, case: HabitCase) -> None:
    """The first calls of an operation give the same bits again after a hundred other calls."""
    calls = own_calls(backend, case.operation, 5)
    for call in calls:
        backend.repeat(call, 1, OTHERS // len(calls))
    for call in calls:
        again = _again(backend, call)
        if not same(call.result, again):
            text = f"the same call after {OTHERS} others: {difference(call.result, again)}"
            raise BrokenPromiseError(f"NONDETERMINISTIC: {text}")


def _again(backend: Remote, call: Call) -> Any:
    return backend.perform(replace(call, result=None))


@checks("*/H4", every("many-times"))
def test_the_same_call_many_times(backend: Remote, case: HabitCase) -> None:
    """The first call of an operation gives the same bits each time, often enough for an 8-bit counter to wrap."""
    (call,) = own_calls(backend, case.operation, 1)
    again = replace(call, result=None)
    for number, given in enumerate(backend.elsewhere(again, [Variant(handle=0)] * MANY_TIMES)):
        if isinstance(given, BrokenPromiseError):
            raise given
        if not same(call.result, given):
            text = f"the same call for the {number + 2}th time: {difference(call.result, given)}"
            raise BrokenPromiseError(f"NONDETERMINISTIC: {text}")


@checks("*/H4", every(CONCURRENT))
def test_beside_threads(backend: Remote, case: HabitCase) -> None:
    """Calls made at once from four threads give the same bits as each alone, if the backend declares threads."""
    calls = own_calls(backend, case.operation, 4)
    for call, results in zip(calls, backend.together(calls, 25), strict=True):
        for result in results:
            if not same(call.result, result):
                text = f"the same call beside other threads: {difference(call.result, result)}"
                raise BrokenPromiseError(f"NONDETERMINISTIC: {text}")


@checks("*/H6", every("leak", stateful=True))
def test_nothing_grows(backend: Remote, case: HabitCase) -> None:
    """Repeated calls leave nothing behind: no memory, open file, thread or mapping."""
    calls = list(islice(recorded(backend, case.operation), 12))
    chosen = {call.what: call for call in reversed(calls) if call.what != "step"}
    for what in sorted(chosen):
        grown = _growing(backend.repeat(chosen[what], BATCHES, TIMES), TIMES)
        if grown and set(grown) <= SLOW:  # a cache fills up once, so measure longer
            grown = _growing(backend.repeat(chosen[what], BATCHES, LONGER), LONGER)
        for name, text in grown.items():
            raise BrokenPromiseError(f"LEAKED: {name} grow by {text.format(what)}")


def _growing(counts: list[dict[str, int]], times: int) -> dict[str, str]:
    """What grew in every batch of calls, and by how much. For memory two batches count as one, because small leaks do
    not show in every batch."""
    found = {}
    for name in counts[0]:
        stride, each = (2, LEAST_BYTES) if name == BYTES else (1, 1)
        least = min(after[name] - before[name] for before, after in pairwise(counts[::stride]))
        if least >= stride * times * each:
            found[name] = f"{least / (stride * times):g} with each call of {{}}: {_series(counts, name)}"
    return found


def _series(counts: list[dict[str, int]], name: str) -> str:
    return " ".join(str(count[name]) for count in counts)
