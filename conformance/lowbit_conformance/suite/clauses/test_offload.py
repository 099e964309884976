"""Checks of `offload.trace`: the trace of a backend is the reference's, event by event.

The state is inside one call, so a case is a whole run: an arrangement, and requests with the locality of real routing,
each clause with the arrangements and requests in which it can be broken.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import numpy as np

from lowbit.moe import offload
from lowbit.moe.offload import MEMORIES, Event, Request
from lowbit_conformance.isolation.remote import Remote
from lowbit_conformance.suite.compare import refuses
from lowbit_conformance.suite.marking import Settings, checks, grid
from lowbit_conformance.suite.walks import ArrangedCase


@dataclass(frozen=True)
class OffloadCase(ArrangedCase):
    """A run of `passes` through the layers."""

    passes: int

    @property
    def label(self) -> str:
        return f"{super().label}-p{self.passes}"


def requests_of(case: OffloadCase) -> list[Request]:
    """Experts that often repeat those of the previous pass, and guesses that are often right.

    Passes end early in `ragged` runs; in `idle` runs every third request needs nothing.
    """
    rng = case.generator()
    plan: list[tuple[int, tuple[int, ...]]] = []
    last = [rng.permutation(case.experts)[: case.needed] for _ in range(case.layers)]
    for _ in range(case.passes):
        end = int(rng.integers(1, case.layers + 1)) if case.variant == "ragged" else case.layers
        for layer in range(end):
            fresh = rng.permutation(case.experts)[: int(rng.integers(1, case.needed + 1))]
            kept = [e for e in last[layer] if rng.random() < 0.6]
            last[layer] = rng.permutation(sorted({*kept, *fresh}))[: case.needed]
            plan.append((layer, tuple(map(int, last[layer]))))
    requests = []
    for number, (layer, needed) in enumerate(plan):
        follows = number + 1 < len(plan) and plan[number + 1][0] == layer + 1
        likely = [e for e in plan[number + 1][1] if rng.random() < 0.7] if follows else []
        others = [e for e in rng.permutation(case.experts) if e not in likely]
        guesses = tuple(int(e) for e in rng.permutation([*likely, *likely[:1], *others[:2]]))[: case.guesses]
        idle = case.variant == "idle" and number % 3 == 1
        requests.append(Request(layer, () if idle else needed, guesses if layer + 1 < case.layers else ()))
    return requests


Sizes = tuple[int, int, int, int, int, int]  # experts, slots, buffers, needed, guesses, layers

RUNS: dict[str, tuple[Sizes, ...]] = {
    "C1": ((8, 2, 4, 2, 0, 4), (8, 4, 4, 2, 0, 3), (5, 3, 1, 3, 0, 1), (3, 3, 2, 2, 0, 2), (1, 1, 1, 1, 0, 2)),
    "C2": ((8, 2, 4, 2, 2, 4), (8, 4, 4, 2, 1, 5), (16, 6, 6, 4, 3, 3), (8, 2, 2, 2, 1, 4)),
    "C3": ((8, 2, 1, 2, 1, 4), (8, 4, 2, 4, 3, 3), (6, 3, 1, 3, 2, 4), (9, 5, 3, 5, 4, 3)),
    "C4": ((8, 2, 4, 8, 0, 3), (8, 4, 4, 7, 2, 3), (6, 1, 1, 6, 2, 3)),
    "C5": ((8, 2, 4, 2, 2, 4), (8, 4, 1, 6, 2, 3), (4, 4, 2, 3, 1, 3), (6, 1, 2, 3, 2, 3)),
    "C6": ((8, 2, 4, 2, 2, 5), (6, 3, 2, 4, 2, 4)),
}
"""For each clause: no guesses; guesses that are right, wrong, resident or without a buffer; no more buffers than
guesses; more needed experts than slots; both kinds of memory; abandoned passes."""


def runs(clause: str, settings: Settings) -> Iterator[OffloadCase]:
    """Short runs, in which the first difference is easy to read, then long ones, and one from each seed."""
    number = clause.rpartition("/")[2]
    variant = "ragged" if number == "C6" else ""
    for experts, slots, buffers, needed, guesses, layers in RUNS[number]:
        for memory in MEMORIES:
            sizes = (layers, experts, slots, buffers, memory, needed, guesses)
            for tier, passes, seeds in (
                ("lattice", 4, range(1)),
                ("lattice", 40, range(1)),
                ("random", 12, settings.seeds),
            ):
                for seed in seeds:
                    yield OffloadCase(clause, tier, variant, *sizes, passes, seed=seed)
                    if number in ("C1", "C2") and tier == "lattice":
                        yield OffloadCase(clause, tier, "idle", *sizes, passes, seed=seed)


def assert_traced(backend: Remote, case: OffloadCase, requests: list[Request]) -> None:
    """The backend's trace of these requests equals the reference's."""
    __tracebackhide__ = True
    given = backend.run("offload.trace", case.arrangement, requests)
    assert_trace(given, offload.trace(case.arrangement, requests))


def assert_trace(given: object, expected: Sequence[Event]) -> None:
    """``list(given) == list(expected)``; the message names the first event that differs and the one before it."""
    __tracebackhide__ = True
    if not isinstance(given, (tuple, list)):
        raise AssertionError(f"WRONG: the trace is a {type(given).__name__}, not a sequence of events")
    for number, (mine, right) in enumerate(zip_longest(given, expected)):
        if not same(mine, right):
            before = f"; the event before: {expected[number - 1]}" if number else ""
            raise AssertionError(f"WRONG: event {number} is {mine or 'missing'}, expected {right or 'none'}{before}")


def same(mine: object, right: object) -> bool:
    """Whether two events are equal; never true with an array in a field, which would compare elementwise."""
    if not (isinstance(mine, Event) and isinstance(right, Event)):
        return False
    return not any(isinstance(part, np.ndarray) for part in vars(mine).values()) and mine == right


@checks((f"offload.trace/{number}" for number in RUNS), runs)
def test_runs(backend: Remote, case: OffloadCase) -> None:
    """In runs that depend on the clause every event is the reference's."""
    assert_traced(backend, case, requests_of(case))


CLOCKS = (8, 15, 16)
"""Bits of a counter that wraps within a run."""
STAY = 50


def stays(steps: int) -> list[Request]:
    """One of three experts repeatedly, then the next equally often, so that one of two slots becomes the oldest.

    Each request is one step, one use and nearly always one event, so a counter of any of these wraps while one expert
    stays. The slot that was used earlier then has the larger time, and the next expert shows which slot is replaced.
    """
    return [Request(0, (number // STAY % 3,)) for number in range(steps)]


def clocks(clause: str, settings: Settings) -> Iterator[OffloadCase]:
    for bits in CLOCKS:
        variant, memory = "clock" if bits == 8 else "clock-large", MEMORIES[bits % 2]
        yield OffloadCase(clause, "exhaustive", variant, 1, 3, 2, 1, memory, 1, 0, 2**bits)


@checks("offload.trace/C1", clocks)
def test_what_is_oldest_when_a_clock_goes_round(backend: Remote, case: OffloadCase) -> None:
    """Empty requests until a counter of this width would wrap, then three experts in turn in two slots.

    Steps without an event keep the trace short; tests of `offload.engine`, which answers step by step, make uses
    instead.
    """
    assert_traced(backend, case, [Request(0, ())] * (case.passes - 2 * STAY) + stays(6 * STAY))


RIGHT = [Request(0, (1, 2), (3,)), Request(1, (3, 0)), Request(0, (2,), (1,))]

Spoil = Callable[[list[Request]], Any]
MISTAKES: dict[str, Spoil] = {
    "empty": lambda requests: [],
    "not-a-request": lambda requests: [(0, (1,), ())],
    "layer-high": lambda requests: [*requests[:1], replace(requests[1], layer=2)],
    "layer-low": lambda requests: [replace(requests[0], layer=-1)],
    "layer-first": lambda requests: requests[1:],
    "layer-twice": lambda requests: [*requests[:2], requests[1]],
    "needed-high": lambda requests: [replace(requests[0], needed=(1, 4))],
    "needed-low": lambda requests: [replace(requests[0], needed=(-1,))],
    "needed-float": lambda requests: [Request(0, (1.0,))],  # type: ignore[arg-type]  # wrong on purpose
    "needed-twice": lambda requests: [replace(requests[0], needed=(1, 1))],
    "guess-high": lambda requests: [replace(requests[0], guesses=(4,))],
    "guess-last": lambda requests: [requests[0], replace(requests[1], guesses=(1,))],
}


@checks("offload.trace/H8", grid(OffloadCase, "edge", (*MISTAKES, "arrangement"), (2, 4, 2, 2, "mirror", 2, 1, 1)))
def test_trace_refuses(backend: Remote, case: OffloadCase) -> None:
    """Each mistake raises ArgumentError, even after right requests."""
    arrangement: object = case.arrangement
    requests = RIGHT
    if case.variant == "arrangement":
        arrangement = (2, 4, 2, 2, "mirror")
    else:
        requests = MISTAKES[case.variant](RIGHT)
    with refuses():
        backend.run("offload.trace", arrangement, requests)
