r"""The theorems of offloading: no request makes the state machine lose an expert or copy onto one that is in use.

The machine places the experts of a layer in slots, in staging buffers and on the host (`lowbit.moe.offload`,
`lowbit_cuda.engine.placement`). A state is *sound* if

- a layer has at most k experts in slots, and no two in one slot;
- at most b experts are in buffers, no two in one buffer, and each is also on the host and in no slot;
- every expert of a layer is in a slot or on the host, and no two are in one place of the host.

The theorem is one step of an induction: for every sound state of the layer and every request for it, the events can be
carried out one after the other on the memories, and the state after them is sound. To carry out an event, what it
copies must be where it says, and what it copies to must be free; an expert that is evicted is not one of those that the
request needs; and where experts are swapped, the place on the host that the evicted one takes is that of the newcomer,
which a buffer still holds. As the first state is sound, all are.

Sizes are Mixtral's: 8 experts of which 2 are needed, 2 slots and 4 buffers. All orders of use are
enumerated, all sequences of guesses that wait in buffers, and all pairs of needed experts. Slots, buffers and places on
the host are numbered in the order of their experts: the machine does not compare these numbers.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from inspect import getsource
from itertools import combinations, islice, permutations
from typing import Any, Literal, TypeAlias

from lowbit.errors import ArgumentError
from lowbit.moe import offload
from lowbit.moe.offload import Arrangement, Event, Offload, Request, Resident, Staged, Trace
from lowbit_cuda.engine import placement
from lowbit_cuda.engine.placement import Buffers, LayerCache, Placement
from lowbit_prove.theorem import Numbers, Outcome, Proof, Refutation, Theorem, whole

EXPERTS, NEEDED, BUFFERS, LAYERS = 8, 2, 4, 3
SLOTS = (2,)
LAYER = 1
"""The layer of the request: not the first, which drops waiting experts, and not the last, which has no guesses."""
GUESSES = (0, 5, 0, 7)
"""The guessed experts of the next layer, in every request."""

Memory: TypeAlias = Literal["mirror", "swap"]


class LostError(Exception):
    """An event that cannot be carried out, or a state that is not sound."""


@dataclass
class State:
    """The locations of the experts.

    Attributes:
        slots: the expert in each slot of the layer, the one that ran longest ago first.
        waiting: the layer and the expert in each buffer, the oldest first.
        host: the place of each expert of the layer that is on the host.
    """

    slots: dict[int, int]
    waiting: dict[int, tuple[int, int]]
    host: dict[int, int] = field(default_factory=dict)

    def check(self, arrangement: Arrangement) -> None:
        """Raise an error if the state is not sound."""
        own = [expert for layer, expert in self.waiting.values() if layer == LAYER]
        places = list(self.host.values())
        for fault, why in (
            (len(self.slots) > arrangement.slots or not set(self.slots) <= set(range(arrangement.slots)), "slots"),
            (len(self.waiting) > arrangement.buffers or not set(self.waiting) <= set(range(BUFFERS)), "buffers"),
            (len(set(self.slots.values())) < len(self.slots), "an expert in two slots"),
            (len(set(self.waiting.values())) < len(self.waiting), "an expert in two buffers"),
            (not set(own) <= self.host.keys() or set(own) & set(self.slots.values()), "an expert in a buffer"),
            ({*self.slots.values(), *self.host} != set(range(EXPERTS)), "an expert is lost"),
            (len(set(places)) < len(places), "two experts in one place of the host"),
        ):
            if fault:
                raise LostError(f"the state is not sound: {why}")


def theorems() -> Iterator[Theorem]:
    """One theorem for each implementation, kind of memory and number of slots."""
    for name, (build, module) in MACHINES.items():
        for memory in ("mirror", "swap"):
            for slots in SLOTS:
                text = f"{name} {memory} {slots}\n{getsource(module)}"
                statement = f"every request to a sound state leads to a sound state; {slots} slots, {memory}"
                decision = partial(decide, build, memory, slots)
                run = partial(ran, build, memory, slots)
                yield Theorem("offload", f"{name}-{memory}-{slots}", statement, partial(str, text), decision, run)


def decide(build: "Build", memory: Memory, slots: int, every: int = 1) -> Outcome:
    """Try every request on every sound state, or every `every`-th of these cases."""
    arrangement, steps = Arrangement(LAYERS, EXPERTS, slots, BUFFERS, memory), 0
    for number, (state, request) in enumerate(cases(memory, slots, every)):
        try:
            carried_out(build(arrangement, state)(request), state, request, arrangement)
        except LostError as error:
            before, _ = next(islice(cases(memory, slots, every), number, None))
            told: Numbers = {"number": number * every, "state": repr(before), "needed": str(request.needed)}
            return Refutation(str(error), told)
        steps += 1
    return Proof(steps, "enumeration")


def ran(build: "Build", memory: Memory, slots: int, numbers: Numbers) -> Refutation | None:
    """Try only the request of a refutation, on its state."""
    number, arrangement = whole(numbers, "number"), Arrangement(LAYERS, EXPERTS, slots, BUFFERS, memory)
    found = next(islice(cases(memory, slots), number, None), None)
    if found is None:
        raise ArgumentError("number", number, "the number of a state and a request")
    state, request = found
    try:
        carried_out(build(arrangement, state)(request), state, request, arrangement)
    except LostError as error:
        return Refutation(str(error))
    return None


def cases(memory: Memory, slots: int, every: int = 1) -> Iterator[tuple[State, Request]]:
    """Every sound state, with every request for it; or every `every`-th of these."""
    for residents, own, waiting, needed in islice(_chosen(memory, slots), 0, None, every):
        staged = {buffer: (LAYER, expert) for buffer, expert in enumerate(waiting)}
        host = {expert: place for place, expert in enumerate(own)}
        yield State(dict(enumerate(residents)), staged, host), Request(LAYER, needed, GUESSES)


Experts: TypeAlias = tuple[int, ...]


def _chosen(memory: Memory, slots: int) -> Iterator[tuple[Experts, Experts, Experts, Experts]]:
    """The experts in slots, on the host, in buffers, and the needed ones."""
    for count in range(slots + 1) if memory == "mirror" else (slots,):
        for residents in permutations(range(EXPERTS), count):
            rest = tuple(expert for expert in range(EXPERTS) if expert not in residents)
            own = tuple(range(EXPERTS)) if memory == "mirror" else rest
            for guessed in range(BUFFERS + 1):
                for waiting in permutations(rest, guessed):
                    for needed in combinations(range(EXPERTS), NEEDED):
                        yield residents, own, waiting, needed


# **Carrying out** the events of a request on the memories.


def carried_out(events: Trace, state: State, request: Request, arrangement: Arrangement) -> None:
    """Carry out the events, and check the state at the end.

    Raises:
        LostError: an event that cannot be carried out, a needed expert that is in no slot, or an unsound state.
    """
    for event in events:
        ACTIONS[event.kind](state, event, request)
    if not set(request.needed) <= set(state.slots.values()):
        raise LostError("an expert that is needed is in no slot")
    if any(layer != LAYER + 1 for layer, _ in state.waiting.values()):
        raise LostError("a guess for this layer still waits")
    state.check(arrangement)


def _require(condition: bool, event: Event, what: str) -> None:
    if not condition:
        raise LostError(f"{event.kind} of expert {event.expert}: {what}")


def _hit(state: State, event: Event, request: Request) -> None:
    _require(event.slot is not None and state.slots.get(event.slot) == event.expert, event, "it is not in the slot")


def _copied(state: State, event: Event, request: Request) -> None:
    assert event.buffer is not None
    _require(event.buffer not in state.waiting, event, "the buffer is in use")
    if event.layer == LAYER:
        _require(state.host.get(event.expert) == event.host, event, "it is not at this place of the host")
    state.waiting[event.buffer] = event.layer, event.expert


def _evict(state: State, event: Event, request: Request) -> None:
    assert event.slot is not None
    _require(state.slots.get(event.slot) == event.expert, event, "it is not in the slot")
    _require(event.expert not in request.needed, event, "it is needed")
    if event.host is not None:
        owner = next((expert for expert, place in state.host.items() if place == event.host), None)
        held = (LAYER, owner) in state.waiting.values()
        _require(owner is not None and held, event, "the place on the host has the only copy of another")
        assert owner is not None
        del state.host[owner]
        state.host[event.expert] = event.host
    del state.slots[event.slot]


def _promote(state: State, event: Event, request: Request) -> None:
    assert event.slot is not None and event.buffer is not None
    _require(event.slot not in state.slots, event, "the slot is in use")
    _require(state.waiting.get(event.buffer) == (event.layer, event.expert), event, "it is not in the buffer")
    del state.waiting[event.buffer]
    state.slots[event.slot] = event.expert


def _drop(state: State, event: Event, request: Request) -> None:
    assert event.buffer is not None
    _require(state.waiting.get(event.buffer) == (event.layer, event.expert), event, "it is not in the buffer")
    del state.waiting[event.buffer]


ACTIONS: dict[str, Callable[[State, Event, Request], None]] = {
    **{"hit": _hit, "load": _copied, "stage": _copied},
    **{"evict": _evict, "promote": _promote, "drop": _drop},
}


# **The machines**, put into a state.

Build: TypeAlias = Callable[[Arrangement, State], Callable[[Request], Trace]]


def of_specification(arrangement: Arrangement, state: State) -> Callable[[Request], Trace]:
    """The specification's machine."""
    machine = Offload(arrangement)
    machine.slots[LAYER] = [Resident(expert, slot) for slot, expert in state.slots.items()]
    machine.staged = [
        Staged(layer, expert, buffer, state.host[expert], "guess") for buffer, (layer, expert) in state.waiting.items()
    ]
    machine._host[LAYER], machine._layer = dict(state.host), LAYER - 1
    return machine.step


def of_engine(arrangement: Arrangement, state: State) -> Callable[[Request], Trace]:
    """The machine of `lowbit_cuda`'s engine."""
    machine: Any = Placement(arrangement)
    machine._caches[LAYER] = LayerCache(arrangement.slots, list(state.slots.values()))
    buffers = Buffers(arrangement.buffers)
    for layer, expert in state.waiting.values():
        buffers.fill(layer, expert, "guess")
    machine._buffers, machine._host[LAYER] = buffers, dict(state.host)
    step: Callable[[Request], Trace] = machine.step
    return step


MACHINES: dict[str, tuple[Build, Any]] = {
    "specification": (of_specification, offload),
    "engine": (of_engine, placement),
}
