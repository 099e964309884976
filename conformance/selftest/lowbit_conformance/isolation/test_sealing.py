"""The rule of sealing: while the code under test runs, the right answer exists nowhere.

Every check of the suite is run here in one process against a backend that is right, and two things are watched. No
reference function may have computed the answer to a call that the backend has not yet been asked. And no variable of
the check, nor of what it calls, may hold that answer while the backend is at work, as one that was computed by hand
would.
"""

import dataclasses
import functools
import hashlib
import inspect
import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import product
from types import FrameType, ModuleType
from typing import Any

import numpy as np
import pytest

from lowbit import backend as backends
from lowbit.backend import Backend, wire
from lowbit.errors import ArgumentError
from lowbit.operations import OPERATIONS
from lowbit.quantization import packing
from lowbit_conformance.isolation.calls import Call
from lowbit_conformance.suite.cases import CONCURRENT, Case
from lowbit_conformance.suite.clauses import load_suite
from lowbit_conformance.suite.marking import MARKS, Mark, Settings
from lowbit_conformance.suite.plugin import not_declared

load_suite()

# Habits are left out: there a backend is compared with itself, in calls that the other checks have made.
CHECKS = [mark for mark in MARKS if mark.clause.partition("/")[0] in OPERATIONS]
CASES_OF_A_TIER = 2

Key = tuple[str, ...]


def digest(value: object) -> str:
    """A number that two values share if and only if lowbit writes them down alike."""
    tree = wire.encode(value, lambda array: {"bytes": hashlib.sha256(array.tobytes()).hexdigest()})
    return hashlib.sha256(json.dumps(tree).encode()).hexdigest()


def key_of(operation: str, *arguments: Any, **choices: Any) -> Key | None:
    """A call by its operation and arguments, however they were passed; None for those that no operation takes."""
    try:
        bound = inspect.signature(OPERATIONS[operation].reference).bind(*arguments, **choices)
        bound.apply_defaults()
        return operation, *(digest(argument) for argument in bound.arguments.values())
    except (TypeError, ArgumentError):
        return None


def followed_by(key: Key | None, arguments: tuple[Any, ...]) -> Key | None:
    """The call that a step is: what opened the session, all steps before, and this one."""
    try:
        before = None if key is None else hashlib.sha256(repr((*key, *map(digest, arguments))).encode()).hexdigest()
        return None if key is None or before is None else (key[0], "step", before)
    except ArgumentError:
        return None


class Watch:
    """What the reference functions have answered, and which calls the backend has answered before."""

    def __init__(self) -> None:
        self.computed: set[Key] = set()
        self.answered: set[Key] = set()
        self.calls = 0
        self.recorded: list[Callable[[], Any]] = []
        self._answers: list[np.ndarray[Any, Any]] = []
        self._inside = threading.local()

    @contextmanager
    def references(self) -> Iterator[None]:
        """Within it every reference function, under every name that a module has for it, notes what it computes."""
        noting = {name: self._noting(name, operation.reference) for name, operation in OPERATIONS.items()}
        with pytest.MonkeyPatch().context() as patch:
            for module, name, operation in places_of_references(imported()):
                patch.setattr(module, name, noting[operation])
            yield

    def _noting(self, operation: str, reference: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(reference)
        def noting(*arguments: Any, **choices: Any) -> Any:
            result = reference(*arguments, **choices)
            key = key_of(operation, *arguments, **choices)
            if OPERATIONS[operation].stateful:
                return self._noting_steps(result, key)
            self.note(key)
            return result

        return noting

    def _noting_steps(self, session: Any, key: Key | None) -> Any:
        """A session of the reference; a step is known by all that were taken before it."""
        step, taken = session.step, [key]

        def noting(*arguments: Any) -> Any:
            result = step(*arguments)
            taken[0] = followed_by(taken[0], arguments)
            self.note(taken[0])
            return result

        session.step = noting
        return session

    def note(self, key: Key | None) -> None:
        """A reference function has computed this; what a backend computes with is its own affair."""
        if key is not None and not getattr(self._inside, "backend", False):
            self.computed.add(key)

    def ask(self, keys: list[Key], arguments: tuple[Any, ...], call: Callable[[], Any]) -> Any:
        """Make one call to the backend, whose answer must not be known yet, and note that it was made."""
        self.calls += 1
        self.recorded.append(call)
        for key in keys:
            known = key in self.computed and key not in self.answered
            assert not known, f"NOT SEALED: the reference computed {key[0]} of these arguments before the backend did"
        self._inside.backend = True
        try:
            answer = call()
        finally:
            self._inside.backend = False
        if not (keys and keys[0] in self.answered):
            holder = holder_of(answer, [*arrays_in(arguments), *self._answers], sys._getframe(1))
            assert not holder, f"NOT SEALED: the right answer was in {holder} while the backend ran"
        self.answered.update(keys)
        self._answers += arrays_in(answer)
        return answer


def imported() -> tuple[str, ...]:
    """The modules whose names for the reference functions count."""
    return tuple(name for name in sys.modules if name.startswith(("lowbit.", "lowbit_conformance")))


@functools.cache
def places_of_references(modules: tuple[str, ...]) -> list[tuple[ModuleType, str, str]]:
    """Every name that these modules have for a reference function: the module, the name, and the operation."""
    operations = {id(specified.reference): operation for operation, specified in OPERATIONS.items()}
    return [
        (sys.modules[module], name, operations[id(value)])
        for module in modules
        for name, value in vars(sys.modules[module]).items()
        if id(value) in operations
    ]


# **Hand-made answers**: arrays that the check holds while it waits.


def holder_of(answer: object, given: list[np.ndarray[Any, Any]], frame: FrameType | None) -> str:
    """The variable of the calling check that holds the answer, or an array of it; empty if there is none.

    An answer may well be there that says little, or that was `given`: an argument, or an answer of the backend's own to
    another call. And it is in what was written to.
    """
    telling = [part for part in arrays_in(answer) if tells(part) and not any(same(part, other) for other in given)]
    while frame is not None and frame.f_code.co_name != "check_sealed":
        if frame.f_globals["__name__"].startswith(("lowbit_conformance", __name__)) and telling:
            for name, value in frame.f_locals.items():
                pairs = product(arrays_in(value), telling)
                if any(same(held, part) and not np.may_share_memory(held, part) for held, part in pairs):
                    return f"{name} of {frame.f_code.co_name}"
        frame = frame.f_back
    return ""


def tells(answer: np.ndarray[Any, Any]) -> bool:
    """Whether an array is more than what one meets everywhere: a few values, or 0, 1, 2 and so on."""
    flat = answer.ravel()
    return len(np.unique(flat)) > 3 and not np.array_equal(flat, np.arange(flat.size))


def same(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
    """Whether two arrays hold the same numbers in the same order, of whatever shape and precision."""
    return one.size == other.size and np.array_equal(one.ravel().astype(np.float64), other.ravel().astype(np.float64))


def arrays_in(value: object, depth: int = 3) -> Iterator[np.ndarray[Any, Any]]:
    """The arrays of numbers in a value, in its parts, and in the parts of these."""
    if isinstance(value, np.ndarray):
        if value.dtype.kind in "biuf":
            yield value
    elif depth and isinstance(value, (list, tuple)):
        if value and all(isinstance(part, (int, float, list)) for part in value):
            try:
                yield from arrays_in(np.array(value, np.float64))
            except (ValueError, OverflowError):  # ragged, or numbers of Python's own size
                return
        else:
            for part in value:
                yield from arrays_in(part, depth - 1)
    elif depth and dataclasses.is_dataclass(value) and not isinstance(value, type):
        for part in vars(value).values():
            yield from arrays_in(part, depth - 1)


# **The backend that is watched.**


class Watched:
    """A backend whose calls go through the watch; all else is its own."""

    def __init__(self, backend: Backend, watch: Watch) -> None:
        self._backend, self._watch = backend, watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def run(self, operation: str, *arguments: Any, **choices: Any) -> Any:
        key = key_of(operation, *arguments, **choices)
        given = (*arguments, *choices.values())
        return self._watch.ask([key] if key else [], given, lambda: self._backend.run(operation, *arguments, **choices))

    def prepare(self, matrix: Any) -> Any:
        return WatchedLinear(self._backend.prepare(matrix), matrix, self._watch)

    @contextmanager
    def recording(self) -> Iterator[list[Callable[[], Any]]]:
        """The calls that are made inside, to be made again."""
        yield self._watch.recorded

    def together(self, calls: list[Callable[[], Any]], times: int) -> list[list[Any]]:
        """One answer to each of these calls, so many times over."""
        return [[call()] * times for call in calls]

    def same_arrays(self) -> AbstractContextManager[None]:
        """Calls from the same arrays; here every call has those it is given."""
        return nullcontext()

    def elsewhere(self, call: Any, variants: list[Any]) -> list[Any]:
        """One call for all variants; a session stands for as many as there are."""
        if not isinstance(call, Call):
            return [call()] * len(variants)
        if call.what == "open":
            return [self.open(call.operation, *call.arguments)]
        owner: Any = call.owner
        return [owner.step(*call.arguments)] * len(variants)

    def walk(self, session: "WatchedSession", steps: list[tuple[Any, ...]], times: int) -> None:
        """Steps whose answers nobody looks at."""
        for _ in range(times):
            for arguments in steps:
                session.pass_by(*arguments)

    def open(self, operation: str, *arguments: Any, **choices: Any) -> Any:
        key = key_of(operation, *arguments, **choices)
        given = (*arguments, *choices.values())
        session = self._watch.ask([], given, lambda: self._backend.open(operation, *arguments, **choices))
        return WatchedSession(session, key, self._watch)


class WatchedSession:
    """A session whose steps go through the watch; one that was refused is none."""

    def __init__(self, session: Any, key: Key | None, watch: Watch) -> None:
        self._session, self._key, self._watch = session, key, watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def pass_by(self, *arguments: Any) -> None:
        """A step whose answer nobody looks at."""
        self._session.step(*arguments)
        self._key = followed_by(self._key, arguments)

    def step(self, *arguments: Any) -> Any:
        key = followed_by(self._key, arguments)
        answer = self._watch.ask([key] if key else [], arguments, lambda: self._session.step(*arguments))
        self._key = key
        return answer


class WatchedLinear:
    """Prepared weights whose products go through the watch."""

    def __init__(self, prepared: Any, matrix: Any, watch: Watch) -> None:
        self._prepared, self._matrix, self._watch = prepared, matrix, watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._prepared, name)

    def call(self, what: str, x: Any) -> Callable[[], Any]:
        """A product, to be made later."""
        return lambda: getattr(self, what)(x)

    def guarded(self, x: Any, vectors: int) -> Any:
        """As the prepared weights in a host process have it."""
        return self.qgemm(x) if vectors else self.qgemv(x[0])

    def qgemv(self, x: Any, out: Any = None) -> Any:
        key = key_of("linear.qgemv", x, self._matrix)
        given = (x, self._matrix)
        return self._watch.ask([key] if key else [], given, lambda: self._prepared.qgemv(x, out))

    def qgemm(self, x: Any, out: Any = None) -> Any:
        """A row of the answer is an answer, too."""
        calls = [key_of("linear.qgemm", x, self._matrix)]
        if isinstance(x, np.ndarray) and x.ndim == 2:
            calls += [key_of("linear.qgemv", row, self._matrix) for row in x]
        given = (x, self._matrix)
        return self._watch.ask([key for key in calls if key], given, lambda: self._prepared.qgemm(x, out))

    def guarded_blocks(self, x: Any) -> Any:
        """As `guarded`."""
        return self.qgemm_bfp(x)

    def qgemm_bfp(self, x: Any, out: Any = None) -> Any:
        key = key_of("linear.qgemm_bfp", x, self._matrix)
        return self._watch.ask([key] if key else [], (x, self._matrix), lambda: self._prepared.qgemm_bfp(x, out))


# **Running a check.**


def cases_of(mark: Mark) -> list[Case]:
    """The first cases of each tier."""
    chosen: dict[str, list[Case]] = {}
    for case in mark.generator(mark.clause, Settings(range(1))):
        tier = chosen.setdefault(case.tier, [])
        if len(tier) < CASES_OF_A_TIER:
            tier.append(case)
    return [case for tier in chosen.values() for case in tier]


@functools.cache
def loaded(name: str) -> Backend:
    return backends.load(name)


def backend_for(case: Case) -> Backend:
    """The fast backend where it declares the case, otherwise the reference."""
    fast = loaded("numpy")
    capabilities = fast.capabilities()
    lacks = not_declared(capabilities.operations.get(case.operation), case)
    if lacks or (case.variant == CONCURRENT and not capabilities.concurrent):
        return loaded("reference")
    return fast


def check_sealed(test: Callable[..., None], case: Case, backend: Backend) -> int:
    """Run one check on one case under watch; how many calls the backend got."""
    watch = Watch()
    fixtures = {
        "backend": Watched(backend, watch),
        "case": case,
        "record_property": lambda name, value: None,
        "model_matrices": {},
    }
    with watch.references():
        test(**{name: fixtures[name] for name in inspect.signature(test).parameters})
    return watch.calls


@pytest.mark.parametrize(
    "mark",
    CHECKS,
    ids=lambda mark: "-".join(
        (mark.clause, mark.generator.__name__, mark.test.__module__.rpartition(".")[2], mark.test.__name__)
    ),
)
def test_answers_are_computed_after_the_reply(mark: Mark) -> None:
    """No check knows, in either of the two ways, what the backend is about to be asked; and each asks something."""
    for case in cases_of(mark):
        assert check_sealed(mark.test, case, backend_for(case)) > 0, case.id


# **The watch itself**: checks that break the rule, and are found.


def reference_first(backend: Backend) -> None:
    codes = np.random.default_rng(1).integers(0, 16, (8, 8)).astype(np.uint8)
    expected = packing.pack(codes, 4).sum()  # the array itself is gone
    assert backend.run("packing.pack", codes, bits=4).sum() == expected


def by_hand_first(backend: Backend) -> None:
    codes = np.random.default_rng(1).integers(0, 256, (4, 8)).astype(np.uint8)
    expected = [
        [
            int(codes[0, n]) + 256 * int(codes[1, n]) + 65536 * int(codes[2, n]) + 2**24 * int(codes[3, n])
            for n in range(8)
        ]
    ]
    assert backend.run("packing.pack", codes, 8).tolist() == expected


def one_row_first(backend: Backend) -> None:
    from lowbit.linear import linear
    from lowbit.quantization import affine

    matrix = affine.quantize(np.eye(8, dtype=np.float32), bits=4, group_size=8)
    x = np.ones((2, 8), np.float32)
    expected = float(linear.qgemv(x[1], matrix).sum())
    assert float(backend.prepare(matrix).qgemm(x)[1].sum()) == pytest.approx(expected)


def asked_twice(backend: Backend) -> None:
    codes = np.random.default_rng(1).integers(0, 16, (8, 8)).astype(np.uint8)
    first = backend.run("packing.pack", codes, 4)
    assert np.array_equal(first, packing.pack(codes, 4))
    assert np.array_equal(first, backend.run("packing.pack", codes, 4))


@pytest.mark.parametrize("check", [reference_first, by_hand_first, one_row_first])
def test_a_check_that_knows_beforehand_is_found(check: Callable[..., None]) -> None:
    """An answer of the reference, one made by hand, and the answer for one row of many: each is noticed."""
    with pytest.raises(AssertionError, match="NOT SEALED"):
        check_sealed(check, Case("packing.pack/C1", "lattice", ""), loaded("numpy"))


def test_asking_again_is_no_breach() -> None:
    """What the backend has already answered may be known when it is asked again."""
    assert check_sealed(asked_twice, Case("packing.pack/C1", "lattice", ""), loaded("numpy")) == 2
