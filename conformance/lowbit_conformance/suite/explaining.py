"""From failed cases to the mistake: all failures of an operation are compared with the known defects together.

The calls of each case are recorded while the suite runs. At the end the failures of an operation are examined together:
a defect names the mistake if it gives every wrong result, and the right ones where the backend was right. One wrong
element is not enough, since too many mistakes could give it. A result may also be that of another call: of the matrix
that was prepared before, or of the activations before. Failures without a name are described one by one.
"""

import contextlib
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lowbit.contract.operation import Promise
from lowbit.operations import OPERATIONS
from lowbit_conformance.defects.description import describe
from lowbit_conformance.defects.diagnosis import MOST_SEARCHED, known_defects, located, sentence, unwritten
from lowbit_conformance.defects.likeness import leaves, nearly
from lowbit_conformance.defects.old_output import of_moving_sums
from lowbit_conformance.defects.running import of_kept_sums
from lowbit_conformance.defects.seen import Seen, compared
from lowbit_conformance.isolation.calls import Call, RemoteLinear, RemoteSession

MOST_BYTES = 1 << 20  # of one call that is examined
MOST_KEPT = 1 << 28  # of all calls that are kept
MOST_CALLS = 6  # of a case
MOST_FAILURES = 16  # failures of an operation that are compared with the bank
MOST_PASSES = 8  # right calls of an operation
DESCRIBED = 20  # failures of each clause
LEAST_WRONG = 3  # least number of wrong elements for which a mistake is named
BEFORE = 4  # number of earlier calls that a stale result may belong to

MOVING = ("NONDETERMINISTIC", "STALE_OUTPUT")
"""Verdicts on results that differ between two equal calls; an unwritten element can hold anything."""

STALE = {
    "matrix": "the result is that of a matrix that was prepared before",
    "x": "the result is that of the activations of a call before",
    "call": "the result is that of a call before",
}


@dataclass(frozen=True, eq=False)
class Asked:
    """A call in the form for the reference: a prepared matrix is an argument, a session is all its steps."""

    operation: str
    arguments: tuple[Any, ...]
    choices: Mapping[str, Any]
    given: Any
    steps: tuple[tuple[Any, ...], ...] = ()
    nbytes: int = 0
    again: Any = None


@dataclass(frozen=True)
class Explanation:
    """What a report adds to a failure: the first wrong element, and the mistake that explains it."""

    where: Mapping[str, Any] = field(default_factory=dict)
    diagnosis: str = ""
    defects: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Failure:
    """A failed case: its calls and the earlier calls of the chapter; no calls if many others are kept."""

    id: str
    calls: tuple[Asked, ...]
    before: tuple[Asked, ...]

    @property
    def clause(self) -> str:
        return "/".join(self.id.split("/")[:2])


class Explainer:
    """Records the cases of a run, and explains the failed ones at its end."""

    def __init__(self) -> None:
        self._failures: dict[str, list[Failure]] = defaultdict(list)
        self._moving: dict[str, list[Failure]] = defaultdict(list)
        self._passes: dict[str, list[Asked]] = defaultdict(list)
        self._before: dict[str, deque[Asked]] = defaultdict(lambda: deque(maxlen=BEFORE))
        self._clauses: Counter[str] = Counter()
        self._room = MOST_KEPT

    def note(self, id: str, calls: Iterable[Asked], verdict: str) -> None:
        """Record a case that passed, or whose results may show why it failed.

        Args:
            id: the case.
            calls: its calls that returned a result.
            verdict: of the case; empty if it passed. Verdicts on memory and processes are ignored.
        """
        if verdict not in ("", "WRONG", *MOVING):
            return
        operation, wrong = id.partition("/")[0], bool(verdict)
        taken = [call for call in calls if call.operation == operation or wrong][:MOST_CALLS]
        history = self._before[operation.partition(".")[0]]
        size = sum(call.nbytes for call in [*taken, *(history if wrong else ())])
        if wrong and taken:
            failure = Failure(id, tuple(taken), tuple(history))
            self._clauses[failure.clause] += 1
            kept = self._clauses[failure.clause] <= DESCRIBED and size <= self._room
            failures = self._moving if verdict in MOVING else self._failures
            failures[operation].append(failure if kept else Failure(id, (), ()))
            self._room -= size if kept else 0
        elif not wrong and taken and len(self._passes[operation]) < MOST_PASSES and size <= self._room:
            self._passes[operation].append(taken[0])
            self._room -= size
        history.extend(taken[-BEFORE:])

    def explanations(self) -> Iterator[tuple[str, Explanation]]:
        """The explanation of each failed case that has one."""
        kept = {operation: told for operation in self._moving if (told := self._kept_sums(operation))}
        for operation, told in kept.items():
            for failure in (*self._moving[operation], *self._failures.get(operation, ())):
                yield failure.id, told
        for operation, failures in self._failures.items():
            # An error here must not prevent the report; deliberately wrong arguments can cause one.
            with contextlib.suppress(Exception), np.errstate(all="ignore"):
                yield from self._of_operation(operation, failures if operation not in kept else [])
        for operation, failures in self._moving.items():
            with contextlib.suppress(Exception), np.errstate(all="ignore"):
                yield from self._of_moving(operation, failures if operation not in kept else [])

    def _kept_sums(self, operation: str) -> Explanation | None:
        """Explain nondeterministic results that grow by the right result with each call; this explains all others
        too."""
        with contextlib.suppress(Exception), np.errstate(all="ignore"):
            failures = _spread([failure for failure in self._moving[operation] if failure.calls], MOST_FAILURES)
            if found := of_kept_sums([Seen.of(operation, failure.calls[-1]) for failure in failures]):
                return Explanation({}, sentence(found), tuple(each.name for each in found))
        return None

    def _of_moving(self, operation: str, failures: list[Failure]) -> Iterator[tuple[str, Explanation]]:
        """The places of all changing wrong elements, if a loop may leave out these places."""
        some = _spread([failure for failure in failures if failure.calls], MOST_FAILURES)
        seen = [first for failure in some if (first := _first_wrong(failure, last=True))]
        passes = [Seen.of(each.operation, each) for each in _spread(self._passes[operation], MOST_PASSES)]
        found = unwritten(operation, seen, [each for each in passes if each.finite])
        last = [failure.calls[-1] for failure in some]
        if found := found or of_moving_sums([Seen.of(each.operation, each) for each in last]):
            told = Explanation({}, sentence(found), tuple(each.name for each in found))
            yield from ((failure.id, told) for failure in failures)

    def _of_operation(self, operation: str, failures: list[Failure]) -> Iterator[tuple[str, Explanation]]:
        seen: dict[str, tuple[Failure, Seen]] = {}
        for failure in _spread([failure for failure in failures if failure.calls], MOST_FAILURES):
            if first := _first_wrong(failure):
                seen[failure.id] = failure, first
        name = Explanation()
        with contextlib.suppress(Exception):
            name = self._common(operation, list(seen.values()))
        for failure in failures:
            if not failure.calls:
                if name.diagnosis:
                    yield failure.id, Explanation({}, name.diagnosis, name.defects)
                continue
            here = seen[failure.id][1] if failure.id in seen else _first_wrong(failure)
            if here is None:
                continue
            found = describe(operation, here.arguments, here.given, here.right)
            text = name.diagnosis
            if not text and (found.where or OPERATIONS[operation].promise is not Promise.BOUNDED):
                text = f"no known mistake explains this result; {found.text}" if found.text else ""
            if text or found.where:
                yield failure.id, Explanation(found.where, text, name.defects)

    def _common(self, operation: str, seen: list[tuple[Failure, Seen]]) -> Explanation:
        """The single mistake that explains all failures, if there is one and they suffice to tell it from others."""
        clear = [pair for pair in seen if pair[1].wrong] or seen
        # If x is infinite, the order of a sum decides between NaN and infinity, which says nothing about a defect; if
        # only the result is infinite, it may. The most informative failures are compared with the bank first.
        meant, finite = ([pair for pair in clear if getattr(pair[1], kind)] for kind in ("meant_finite", "finite"))
        several: list[list[tuple[Failure, Seen]]] = []
        for some in (meant, finite, clear if _wrong(finite) < LEAST_WRONG else []):
            if _wrong(some) >= LEAST_WRONG and some not in several:
                several.append(some)
        if several and min(each.size for _, each in several[0]) > MOST_SEARCHED:
            several.insert(0, [pair for pair in seen if pair[1].finite])  # small ones distinguish many mistakes
        if text := next((text for some in several if (text := _stale(some))), ""):
            return Explanation({}, text)
        passes = [Seen.of(each.operation, each) for each in _spread(self._passes[operation], MOST_PASSES)]
        right = [each for each in passes if each.finite]
        for find in (known_defects, located):
            for some in several:
                if found := find(operation, [each for _, each in some], right):
                    return Explanation({}, sentence(found), tuple(each.name for each in found))
        if several or not finite or operation in self._moving:
            return Explanation()
        # Results within the bound may show which roundings were made; only a mistake that gives their bits counts.
        unequal = [each for each in right if each.unequal and not each.wrong]
        bits = [*(each for _, each in finite), *unequal]
        known = known_defects(operation, bits, right) if unequal else ()
        named = tuple(each for each in known if each.wrong)
        return Explanation({}, sentence(named), tuple(each.name for each in named)) if named else Explanation()


def _wrong(pairs: list[tuple[Failure, Seen]]) -> int:
    """How many elements show which mistake was made."""
    return sum(each.telling or each.unequal for _, each in pairs)


def _spread(given: list[Any], most: int) -> list[Any]:
    """Some elements of a list, evenly spread, including the first."""
    return given[:: max(1, -(-len(given) // most))]


def _first_wrong(failure: Failure, last: bool = False) -> Seen | None:
    """The first call of a case whose result is visibly wrong; if there is none, the first with wrong bits.

    With `last`, only the last call is examined, which ended the case.
    """
    weak = None
    for call in failure.calls[-1:] if last else failure.calls:
        with contextlib.suppress(Exception):
            seen = Seen.of(call.operation, call)
            if seen.wrong:
                return seen
            weak = weak or (seen if seen.unequal else None)
    return weak


def _stale(seen: list[tuple[Failure, Seen]]) -> str:
    """A sentence that names the earlier call to which the wrong results belong; empty if they are not stale."""
    kinds = [_stale_kinds(failure, each) for failure, each in seen]
    shared = set.intersection(*kinds) if kinds else set()
    return next((STALE[kind] for kind in STALE if kind in shared), "")


def _stale_kinds(failure: Failure, seen: Seen) -> set[str]:
    """The parts of an earlier call from which the result was computed."""
    found = set()
    earlier = [*failure.before, *[call for call in failure.calls if call is not seen.call]]
    for call in earlier:
        if (
            call.operation == seen.operation
            and not call.steps
            and _is_other(seen, compared(call.operation, call.given))
        ):
            found.add("call")
        if len(seen.arguments) == len(call.arguments) == 2 and seen.operation.startswith("linear."):
            for kind, pair in (
                ("matrix", (seen.arguments[0], call.arguments[1])),
                ("x", (call.arguments[0], seen.arguments[1])),
            ):
                with contextlib.suppress(Exception):
                    if _is_other(seen, OPERATIONS[seen.operation].reference(*pair)):
                        found.add(kind)
    return found


def _is_other(seen: Seen, other: Any) -> bool:
    """Whether the wrong result equals this one, which is not right; zeros and NaN may have any source.

    So may numbers that cannot be distinguished from zeros here.
    """
    arrays = [np.nan_to_num(part) for _, part in leaves(other) if isinstance(part, np.ndarray) and part.size]
    if not any(part.any() for part in arrays) or not nearly(seen.given, other, seen.limits):
        return False
    zero = isinstance(other, np.ndarray) and nearly(np.zeros_like(arrays[0]), arrays[0], seen.limits)
    return not zero and not nearly(other, seen.right, seen.limits)


def asked_of(calls: list[Call]) -> Iterator[Asked]:
    """The calls of a case that returned, in the form for the reference."""
    sessions: dict[int, list[Call]] = {}
    for call in calls:
        if call.nbytes > MOST_BYTES or call.result is None:
            continue
        if call.what == "run":
            own, size = call.arguments, call.nbytes
            yield Asked(call.operation, own, call.choices, call.result, nbytes=size, again=call.again)
        elif isinstance(call.owner, RemoteLinear):
            pair = call.arguments[0], call.owner.matrix
            yield Asked(call.operation, pair, {}, call.result, nbytes=call.nbytes + call.owner.matrix.nbytes)
        elif isinstance(call.owner, RemoteSession):
            sessions.setdefault(id(call.owner), []).append(call)
    for steps in sessions.values():
        owner = steps[0].owner
        assert isinstance(owner, RemoteSession)
        given, size = tuple(step.result for step in steps), sum(step.nbytes for step in steps)
        yield Asked(owner.operation, owner.opened_with, {}, given, tuple(step.arguments for step in steps), size)
