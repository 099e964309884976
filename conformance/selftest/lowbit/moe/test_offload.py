"""The offload state machine against memory that really moves, and against a second machine."""

from collections.abc import Sequence
from dataclasses import astuple
from itertools import chain

import hypothesis.strategies as st
import numpy as np
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from lowbit.moe.offload import Arrangement, Event, Offload, Request, trace

Expert = tuple[int, int]  # layer and id


# A memory that does what the events say and nothing else. What lies in a place is an expert, or None.


class MovingMemory:
    """Slots, buffers and host of an arrangement; each event must find what it speaks of."""

    def __init__(self, arrangement: Arrangement) -> None:
        self.arrangement, k = arrangement, arrangement.slots
        swap = arrangement.memory == "swap"
        self.slots: list[list[Expert | None]] = [
            [(layer, slot) if swap else None for slot in range(k)] for layer in range(arrangement.layers)
        ]
        self.buffers: list[Expert | None] = [None] * arrangement.buffers
        first = k if swap else 0
        self.host = [[(layer, e) for e in range(first, arrangement.experts)] for layer in range(arrangement.layers)]

    def apply(self, event: Event) -> None:
        expert, slots = (event.layer, event.expert), self.slots[event.layer]
        if event.kind in ("load", "stage"):
            assert event.buffer is not None and event.host is not None and event.slot is None
            assert self.buffers[event.buffer] is None, "a copy overwrites a buffer in use"
            assert self.host[event.layer][event.host] == expert
            self.buffers[event.buffer] = expert
        elif event.kind == "drop":
            assert event.buffer is not None
            assert self.buffers[event.buffer] == expert
            self.buffers[event.buffer] = None
        elif event.kind == "evict":
            assert event.slot is not None and slots[event.slot] == expert
            slots[event.slot] = None
            assert (event.host is not None) == (self.arrangement.memory == "swap")
            if event.host is not None:
                assert self.host[event.layer][event.host] in self.buffers, "an expert is overwritten and lost"
                self.host[event.layer][event.host] = expert
        elif event.kind == "promote":
            assert event.slot is not None and event.buffer is not None
            assert slots[event.slot] is None and self.buffers[event.buffer] == expert
            slots[event.slot], self.buffers[event.buffer] = expert, None
        else:
            assert event.slot is not None and slots[event.slot] == expert

    def check(self, settled: bool) -> None:
        """No expert twice on the device; between requests, each expert in as many places as the memory promises."""
        in_slots, on_host = list(chain.from_iterable(self.slots)), list(chain.from_iterable(self.host))
        on_device = [e for e in [*in_slots, *self.buffers] if e is not None]
        assert len(set(on_device)) == len(on_device), "an expert is resident twice"
        everything = {(layer, e) for layer in range(self.arrangement.layers) for e in range(self.arrangement.experts)}
        if settled and self.arrangement.memory == "swap":
            places = [*in_slots, *on_host]
            assert len(places) == len(everything)
            assert set(places) == everything, "layers x experts places hold each expert once"
        if self.arrangement.memory == "mirror":
            assert set(on_host) == everything


ARRANGEMENTS = st.builds(
    lambda layers, experts, slots, buffers, memory: Arrangement(layers, experts, min(slots, experts), buffers, memory),
    st.integers(1, 4),
    st.integers(1, 7),
    st.integers(1, 7),
    st.integers(1, 4),
    st.sampled_from(["mirror", "swap"]),
)


class OffloadMachine(RuleBasedStateMachine):
    """Any requests on any arrangement: what the chapter promises holds after every event."""

    @initialize(arrangement=ARRANGEMENTS, seed=st.integers(0, 2**32))
    def begin(self, arrangement: Arrangement, seed: int) -> None:
        self.arrangement = arrangement
        self.machine, self.unguessed = Offload(arrangement), Offload(arrangement)
        self.memory, self.plain = MovingMemory(arrangement), MovingMemory(arrangement)
        self.requests: list[Request] = []
        self.events: list[Event] = []
        self.layer, self.most_guesses = -1, 0
        rng = np.random.default_rng(seed)
        shape = (arrangement.layers, arrangement.experts)
        self.answers, self.weights = rng.standard_normal(shape), rng.standard_normal(shape)

    @rule(data=st.data(), restart=st.sampled_from([False, False, False, True]))
    def visit(self, data: st.DataObject, restart: bool) -> None:
        layer = 0 if restart or self.layer + 1 == self.arrangement.layers else self.layer + 1
        experts = st.integers(0, self.arrangement.experts - 1)
        needed = data.draw(st.lists(experts, min_size=1, unique=True))
        last = layer == self.arrangement.layers - 1
        guesses = [] if last else data.draw(st.lists(experts, max_size=4))
        request = Request(layer, tuple(needed), tuple(guesses))
        self.layer, self.most_guesses = layer, max(self.most_guesses, len(guesses))
        self.requests.append(request)
        events = self.machine.step(request)
        self.events += events
        output = self.run(self.memory, request, events)
        without = Request(layer, tuple(needed))
        assert output == self.run(self.plain, without, self.unguessed.step(without)), "prefetching changed the output"
        direct = 0.0
        for e in sorted(needed):
            direct += self.weights[layer, e] * self.answers[layer, e]
        assert output == direct, "the output is not the sum over the needed experts"

    def run(self, memory: MovingMemory, request: Request, events: Sequence[Event]) -> float:
        """Let the events move memory and run experts from their slots; the answers are added by ascending id."""
        pending, answers = set(request.needed), {}
        for event in events:
            if event.kind == "evict":
                assert event.layer == request.layer
                assert event.expert not in pending, "an expert in use is a victim"
            memory.apply(event)
            memory.check(settled=False)
            if event.kind in ("hit", "promote"):
                assert event.layer == request.layer and event.slot is not None
                pending.remove(event.expert)  # fails where an expert runs twice or unasked
                found = memory.slots[event.layer][event.slot]
                assert found is not None
                answers[event.expert] = self.weights[found] * self.answers[found]
        assert not pending, "a needed expert did not run"
        memory.check(settled=True)
        total = 0.0
        for e in sorted(answers):
            total += answers[e]
        return total

    @invariant()
    def the_machine_knows_where_things_are(self) -> None:
        """Its own state is the memory's."""
        if hasattr(self, "machine"):
            for residents, slots in zip(self.machine.slots, self.memory.slots, strict=True):
                assert {(r.slot, r.expert) for r in residents} == {(s, e[1]) for s, e in enumerate(slots) if e}
            staged = {(s.buffer, (s.layer, s.expert)) for s in self.machine.staged}
            assert staged == {(b, e) for b, e in enumerate(self.memory.buffers) if e}
            assert all(s.layer == self.layer + 1 for s in self.machine.staged)

    @invariant()
    def enough_buffers_leave_the_cache_alone(self) -> None:
        """With more buffers than guesses, what is resident does not depend on guessing at all."""
        if hasattr(self, "machine") and self.arrangement.buffers > self.most_guesses:
            for mine, plain in zip(self.machine.slots, self.unguessed.slots, strict=True):
                assert mine == plain

    def teardown(self) -> None:
        """The trace is a function of the requests: made anew it is the same, and agrees with the second machine."""
        if getattr(self, "requests", None):
            assert trace(self.arrangement, self.requests) == tuple(self.events)
            assert [astuple(e) for e in self.events] == second_trace(self.arrangement, self.requests)


OffloadMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=25)
TestOffload = OffloadMachine.TestCase


# A second machine, written from the errata: one table of places, one clock, and no lists in order of use.


def second_trace(arrangement: Arrangement, requests: Sequence[Request]) -> list[tuple[object, ...]]:
    """Events as tuples in the order of the fields of `Event`."""
    k, swap = arrangement.slots, arrangement.memory == "swap"
    place: dict[Expert, tuple[str, int]] = {}
    host: dict[Expert, int] = {}
    ran: dict[Expert, int] = {}
    origin: dict[Expert, tuple[int, str, int]] = {}  # of what is staged: when, why, from where
    for expert in ((la, e) for la in range(arrangement.layers) for e in range(arrangement.experts)):
        host[expert] = expert[1] - k if swap else expert[1]
        if swap and expert[1] < k:
            place[expert], ran[expert] = ("slot", expert[1]), expert[1] - k
    out: list[tuple[object, ...]] = []
    clock = 0

    def free(kind: str, count: int, layer: int | None = None) -> list[int]:
        taken = [n for e, (what, n) in place.items() if what == kind and (layer is None or e[0] == layer)]
        return [n for n in range(count) if n not in taken]

    def buffered() -> list[Expert]:
        return sorted((e for e, (what, _) in place.items() if what == "buffer"), key=lambda e: origin[e][0])

    for step, request in enumerate(requests):
        la = request.layer

        def write(kind: str, e: Expert, slot: object, buffer: object, where: object, cause: str, n: int = step) -> None:
            out.append((n, kind, *e, slot, buffer, where, cause))

        def drop(e: Expert, cause: str) -> None:
            write("drop", e, None, place.pop(e)[1], None, cause)

        def copy(kind: str, e: Expert, cause: str) -> None:
            place[e] = ("buffer", free("buffer", arrangement.buffers)[0])
            origin[e] = (len(out), cause, host[e])
            write(kind, e, None, place[e][1], host[e], cause)

        if la == 0:
            for e in buffered():
                drop(e, "abandoned")
        wanted = sorted((la, e) for e in request.needed)
        left = [e for e in wanted if place.get(e, ("", 0))[0] != "slot"]
        for e in wanted:
            if e not in left:
                clock += 1
                ran[e] = clock
                write("hit", e, place[e][1], None, None, "request")
        while left:
            e = left[0]
            if e not in place and not free("buffer", arrangement.buffers):
                useless = [g for g in buffered() if g not in left]
                if useless:
                    drop(useless[0], "buffer")
                else:
                    e = buffered()[0]
            if e not in place:
                copy("load", e, "miss")
            left.remove(e)
            buffer, cause, where = place[e][1], origin[e][1], origin[e][2]
            if not free("slot", k, la):
                victim = min((v for v in place if v[0] == la and place[v][0] == "slot"), key=lambda v: ran[v])
                write("evict", victim, place.pop(victim)[1], None, where if swap else None, cause)
                if swap:
                    host[victim] = where
            slot = free("slot", k, la)[0]
            place[e] = ("slot", slot)
            clock += 1
            ran[e] = clock
            write("promote", e, slot, buffer, None, cause)
        for g in ((la + 1, guess) for guess in request.guesses):
            if g not in place and free("buffer", arrangement.buffers):
                copy("stage", g, "guess")
        for e in buffered():
            if e[0] == la:
                drop(e, "unused")
    return out
