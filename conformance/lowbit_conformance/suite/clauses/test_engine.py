"""Checks of `offload.engine`: a state machine walks through a backend's engines, and every step is compared.

The events of a step are compared as soon as it has answered, and only then does the reference take the same step; so
up to any step the trace of the backend equals the reference's, or the case has failed at the first event that differs.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np

from lowbit.moe.offload import MEMORIES, Event, Request
from lowbit.moe.offload_engine import engine
from lowbit_conformance.isolation.remote import Remote
from lowbit_conformance.suite.clauses.test_offload import CLOCKS, STAY, same, stays
from lowbit_conformance.suite.compare import assert_kind, refuses
from lowbit_conformance.suite.marking import Settings, checks
from lowbit_conformance.suite.walks import WRONG_ARRANGEMENTS, ArrangedCase, Walk


@dataclass(frozen=True)
class EngineCase(ArrangedCase):
    """A walk of `steps` requests."""

    steps: int

    @property
    def label(self) -> str:
        return f"{super().label}-{self.steps}steps"


class Pair:
    """An engine of the backend, the reference's engine, and a walk for both."""

    def __init__(self, backend: Remote, case: EngineCase, rng: np.random.Generator) -> None:
        self.session = backend.open("offload.engine", case.arrangement)
        self.reference = engine(case.arrangement)
        self.walk = Walk(case.arrangement, case.needed, case.guesses, rng)

    def step(self) -> None:
        """Make one request to the backend and to the reference, and compare the events."""
        __tracebackhide__ = True
        request = self.walk.next()
        given = self.session.step(request)
        assert_events(request, given, self.reference.step(request))

    def close(self) -> None:
        self.session.close()


def assert_events(request: Request, given: object, expected: Sequence[Event]) -> None:
    """``tuple(given) == tuple(expected)``; the message names the request and the first event that differs."""
    __tracebackhide__ = True
    events: Sequence[Any] = assert_kind("what a step answers with", given, (tuple, list))  # type: ignore[arg-type]  # isinstance takes a tuple of classes too
    for number, (mine, right) in enumerate(zip_longest(events, expected)):
        if not same(mine, right):
            place = f"event {number} of {request}"
            raise AssertionError(f"WRONG: {place} is {mine or 'missing'}, expected {right or 'none'}")


# experts, slots, buffers, needed, guesses, layers: Mixtral's; few buffers; everything fits; one of everything.
SIZES = (
    (8, 2, 4, 2, 2, 4),
    (8, 4, 2, 4, 3, 3),
    (6, 3, 1, 3, 2, 5),
    (4, 4, 2, 3, 1, 2),
    (16, 6, 6, 4, 3, 3),
    (1, 1, 1, 1, 1, 1),
)


def walks(clause: str, settings: Settings) -> Iterator[EngineCase]:
    """Short walks, in which the first difference is easy to read, then a longer one from each seed."""
    for experts, slots, buffers, needed, guesses, layers in SIZES:
        for memory in MEMORIES:
            yield EngineCase(clause, "lattice", "", layers, experts, slots, buffers, memory, needed, guesses, 8)
    for seed in settings.seeds:
        yield drawn(clause, seed, seed)


def many_walks(clause: str, settings: Settings) -> Iterator[EngineCase]:
    """The same, longer walks of every size from each seed and, for each kind of memory, one very long run."""
    yield from walks(clause, settings)
    for seed in settings.seeds:
        for other in range(1, len(SIZES)):
            yield drawn(clause, seed, seed + other)
    for memory in MEMORIES:
        yield EngineCase(clause, "lattice", "long", 4, 8, 2, 4, memory, 2, 2, 200)


def drawn(clause: str, seed: int, number: int) -> EngineCase:
    """A walk drawn from a seed, with one of the sizes."""
    experts, slots, buffers, needed, guesses, layers = SIZES[number % len(SIZES)]
    sizes = (layers, experts, slots, buffers, MEMORIES[seed % len(MEMORIES)], needed, guesses)
    return EngineCase(clause, "random", "", *sizes, 16, seed=seed)


@checks("offload.engine/C1", many_walks)
def test_every_step_answers_with_the_events_of_the_trace(backend: Remote, case: EngineCase) -> None:
    """Requests with right and wrong guesses, abandoned passes and prompts: every event is the trace's."""
    with closing(Pair(backend, case, case.generator())) as pair:
        for _ in range(case.steps):
            pair.step()


def clocks(clause: str, settings: Settings) -> Iterator[EngineCase]:
    for bits in CLOCKS:
        variant, memory = "clock" if bits == 8 else "clock-large", MEMORIES[bits % 2]
        yield EngineCase(clause, "exhaustive", variant, 1, 3, 2, 1, memory, 1, 0, 2**bits)


@checks("offload.engine/C1", clocks)
def test_what_is_oldest_when_a_clock_goes_round(backend: Remote, case: EngineCase) -> None:
    """One expert until a counter of this width would wrap, then three in turn: every event is the trace's."""
    with closing(Pair(backend, case, case.generator())) as pair:
        again, before = Request(0, (0,)), case.steps - 2 * STAY
        backend.walk(pair.session, [(again,)], before)
        for _ in range(before):
            pair.reference.step(again)
        for request in stays(6 * STAY):
            assert_events(request, pair.session.step(request), pair.reference.step(request))


MANY = 100_000
"""Number of steps, more than 16 bits can count."""


def many_steps(clause: str, settings: Settings) -> Iterator[EngineCase]:
    yield EngineCase(clause, "exhaustive", "large-run", 1, 3, 2, 1, "swap", 1, 0, MANY)
    yield EngineCase(clause, "exhaustive", "large-model", 2, 300, 40, 3, "mirror", 8, 2, 40)


@checks("offload.engine/C1", many_steps)
def test_a_long_run_answers_with_the_events_of_the_trace(backend: Remote, case: EngineCase) -> None:
    """After a hundred thousand steps, and with more experts than a byte can count, every event is the trace's.

    The many steps repeat the same few, and only the steps after them are compared.
    """
    with closing(Pair(backend, case, case.generator())) as pair:
        if case.steps == MANY:
            few = [Request(0, (expert,)) for expert in (0, 1, 1, 2, 0)]
            backend.walk(pair.session, [(request,) for request in few], MANY // len(few))
            for _ in range(MANY // len(few)):
                for request in few:
                    pair.reference.step(request)
        for _ in range(40):
            pair.step()


def mistakes(clause: str, settings: Settings) -> Iterator[EngineCase]:
    """Each mistake when the engine is opened; each mistake in a request, at the first step and after others."""
    for variant in WRONG_ARRANGEMENTS:
        yield EngineCase(clause, "edge", f"arrangement-{variant}", 3, 4, 2, 2, "mirror", 2, 1, 0)
    for layers in (1, 2, 3):
        for steps in range(layers + 1):
            yield EngineCase(clause, "edge", "requests", layers, 4, 2, 2, "swap", 2, 1, steps)


@checks("offload.engine/C2", mistakes)
def test_engine_refuses(backend: Remote, case: EngineCase) -> None:
    """Each mistake raises ArgumentError, whichever steps came before."""
    kind, _, variant = case.variant.partition("-")
    if kind == "arrangement":
        with refuses():
            backend.open("offload.engine", WRONG_ARRANGEMENTS[variant](case.arrangement))
        return
    with closing(Pair(backend, case, case.generator())) as pair:
        for _ in range(case.steps):
            pair.step()
        for wrong in pair.walk.mistakes():
            with refuses():
                pair.session.step(wrong)


@checks("offload.engine/C3", walks)
def test_a_refused_request_changes_nothing(backend: Remote, case: EngineCase) -> None:
    """Refused requests in between, one or two at a time, do not change the answers to the others."""
    rng = case.generator()
    with closing(Pair(backend, case, rng)) as pair:
        for _ in range(case.steps):
            for _ in range(int(rng.integers(0, 3))):
                with refuses():
                    pair.session.step(pair.walk.wrong())
            pair.step()


@checks("offload.engine/C4", walks)
def test_engines_do_not_disturb_each_other(backend: Remote, case: EngineCase) -> None:
    """Four engines, two with the same arrangement, take steps in random order; one closes early and one opens late."""
    rng = case.generator()
    larger = EngineCase(case.clause, case.tier, "", 5, 9, 3, 3, case.memory, 3, 3, case.steps)
    pairs = [Pair(backend, kind, rng) for kind in (case, case, larger)]
    for number in range(2 * case.steps):
        pairs[int(rng.integers(len(pairs)))].step()
        if number == case.steps // 2:
            pairs.append(Pair(backend, case, rng))
        if number == case.steps:
            pairs.pop(0).close()
    for pair in pairs:
        pair.step()
        pair.close()


@checks("offload.engine/C5", walks)
def test_an_engine_begins_afresh(backend: Remote, case: EngineCase) -> None:
    """After one engine was closed and another left open, each in the middle of a pass, a new engine has nothing cached
    or staged and counts from 0."""
    rng = case.generator()
    left_open: list[Pair] = []
    for turn in range(4):
        pair = Pair(backend, case, rng)
        for _ in range(max(1, case.steps // 3 + turn)):
            pair.step()
        if turn % 2:
            left_open.append(pair)
        else:
            pair.close()
    for pair in left_open:
        pair.close()
