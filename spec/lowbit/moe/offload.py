r"""Offloading: experts that do not fit in memory are copied when they are needed, or a little before.

The experts of a sparse model are nearly all of its weights, and each token uses a few. So the experts stay in the large
memory of the host, the device keeps a small number of slots, and experts are copied in as layers ask for them. Copying
takes longer than computing, so all rules here serve to copy less, and earlier. One state machine decides which expert
lies where, what is copied when, and what is evicted. It computes nothing and moves nothing: it writes a *trace*, a list
of events, and the trace is a function of the requests alone. An engine that moves real bytes keeps to the specification
if its events are these.

**Slots: what was used lately** (MoE offloading §3.1). Each layer has :math:`k` slots on the device and keeps the
:math:`k` experts that ran last; a newcomer replaces the one that ran longest ago. (The copy at hand prints "keep *k*
least recently used"; errata M1.)

.. plot:: figures/offload_pattern.py

The figure is the paper's figure 1 redrawn from synthetic routing (`lowbit.model.replay.residual_walk`).

**Guesses: what will be used next** (§3.2). As soon as a layer's experts are loaded, the next layer's gate is applied to
*this* layer's gate input, and the experts that it scores best are copied ahead (errata M5,
`lowbit.model.replay.guess`). They do not go into slots, where they would displace experts known to be useful; they wait
in *buffers*.

**Buffers: where copies land** (§3.3). There are :math:`b` of them, as large as an expert each, shared by all layers.
Every copy from the host lands in one, whether demanded or guessed, so a copy never overwrites an expert in use.

**A layer, step by step** (errata M2, M3). A request names the experts that a layer needs, and the guesses for the next
layer, likeliest first.

1. Needed experts in slots are *hits*. They run first, by ascending id, before anything is copied.
2. The others follow, by ascending id. One that waits in a buffer is *promoted* into a slot. One that does not is
   *loaded* into a free buffer first. With no buffer free, the oldest guess that this layer does not need is *dropped*;
   if the layer needs every one of them, the oldest is promoted at once, which frees its buffer.
3. A promotion takes a free slot, or *evicts* the expert that ran longest ago. All needed experts in slots have run
   by then, so what is evicted never waits to run. Where a layer needs more than :math:`k`, as a prompt does, experts
   stream through and the :math:`k` that ran last remain.
4. The guesses are *staged*, in their order, each into a free buffer and into no other. A guess that is already in a
   slot or a buffer copies nothing. The last layer has none.
5. Guesses of this layer that were not used are dropped, oldest first.

Guesses are staged (4) as soon as copying has ended and old ones are dropped (5) when the layer has run, so two old and
two new guesses need the paper's :math:`b = 4` buffers.

A layer may need nothing from the device, if the host computes what is missing faster than a copy takes. Its request
then only has its guesses staged and the guesses for it dropped.

An expert runs when its *hit* or its *promote* is written, and from the slot named there. That determines the order of
use; the order in which results are *added* is fixed in `lowbit.moe.routing` and does not depend on it.

**Memory** (errata M4). *mirror*: the host keeps a copy of every expert, so an eviction forgets; slots begin empty.
*swap* (the paper's): layers × experts places in all, :math:`k` a layer on the device and the rest on the host, each
expert in one of them. A promotion and its eviction exchange places: the victim is copied to the host place from which
the newcomer was loaded. Slot :math:`s` begins with expert :math:`s`, the lowest as the longest unused, and host place
:math:`h` with expert :math:`k + h`.

Source: MoE offloading §3.1 to §3.3, figure 1; errata M1 to M5, M9.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from lowbit.contract.checks import check_choice, check_instance, check_integer
from lowbit.contract.operation import EXACT, Parameters, operation
from lowbit.contract.signature import checked
from lowbit.errors import ArgumentError

Memory = Literal["mirror", "swap"]
MEMORIES: tuple[Memory, ...] = get_args(Memory)

MOST_PLACED = 2**18
"""The most experts of all layers together; the largest models have some 25,000."""
MOST_BUFFERS = 2**16

Kind = Literal["hit", "load", "evict", "stage", "promote", "drop"]


@dataclass(frozen=True)
class Arrangement:
    """The experts to place, and the places.

    Attributes:
        layers: sparse layers of the model; times E, at most `MOST_PLACED`.
        experts: E, experts of a layer.
        slots: k, experts of each layer that the device keeps; 1 to E.
        buffers: b, staging buffers shared by all layers; 1 to `MOST_BUFFERS`.
        memory: ``mirror`` or ``swap``.

    Raises:
        ArgumentError: a number out of range.
    """

    layers: int
    experts: int
    slots: int
    buffers: int = 4
    memory: Memory = "mirror"

    def __post_init__(self) -> None:
        check_integer("layers", self.layers, 1, MOST_PLACED)
        check_integer("experts", self.experts, 1, MOST_PLACED // self.layers)
        check_integer("slots", self.slots, 1, self.experts)
        check_integer("buffers", self.buffers, 1, MOST_BUFFERS)
        check_choice("memory", self.memory, MEMORIES)

    @property
    def parameters(self) -> Parameters:
        """All attributes: the choices that an engine may limit."""
        return vars(self)


@dataclass(frozen=True)
class Request:
    """The experts that one layer requests in one pass over one token, or over the tokens of a prompt.

    Attributes:
        layer: from 0. A pass goes from layer 0 upwards one by one; it may end early, and the next begins at 0.
        needed: the experts to run: distinct, in any order; empty if the host computes all of the layer's experts.
        guesses: experts of the next layer, likeliest first, perhaps with repeats if there are several tokens; empty at
            the last layer.
    """

    layer: int
    needed: tuple[int, ...]
    guesses: tuple[int, ...] = ()


@dataclass(frozen=True)
class Event:
    """One decision. Its place in the trace is its order.

    Attributes:
        step: number of the request, from 0, that caused it.
        kind: ``hit``: the needed expert was in `slot`, and runs. ``load``: it is copied from `host` to `buffer`.
            ``stage``: the same for a guess. ``evict``: the expert leaves `slot`, to `host` under swap. ``promote``:
            the needed expert goes from `buffer` to `slot`, and runs. ``drop``: a guess leaves `buffer` unused.
        layer: the layer of the expert; for a guess, the layer after that of the request.
        expert: which.
        slot: of this layer, 0 to k − 1, or None if no slot is involved.
        buffer: 0 to b − 1, or None.
        host: the place on the host, or None: under mirror the expert's own number, under swap 0 to E − k − 1.
        cause: ``request`` for a hit; ``miss`` for a load; ``guess`` for a stage; ``miss`` or ``guess`` for a promote
            and its evict, by how the new expert was copied; for a drop ``unused`` (its layer has run), ``buffer`` (a
            load took its buffer) or ``abandoned`` (its pass ended early).
    """

    step: int
    kind: Kind
    layer: int
    expert: int
    slot: int | None
    buffer: int | None
    host: int | None
    cause: str


Trace = tuple[Event, ...]


# **Valid requests** depend on the previous one: a pass takes the layers one after another.


def check_request(request: Request, arrangement: Arrangement, last: int) -> None:
    """Refuse what `Offload.step` cannot place; `last` is the layer of the previous request, −1 at the beginning."""
    check_instance("request", request, Request)
    check_integer("layer", request.layer, 0, arrangement.layers - 1)
    if request.layer not in (0, last + 1):
        next_layer = f"0, or {last + 1} after {last}" if last >= 0 else "0 at first"
        raise ArgumentError("layer", request.layer, "0" if last + 1 == arrangement.layers else next_layer)
    for name, experts in (("needed", request.needed), ("guesses", request.guesses)):
        check_instance(name, experts, tuple, list)
        for expert in experts:
            check_integer(f"an expert in {name}", expert, 0, arrangement.experts - 1)
    if len(set(request.needed)) < len(request.needed):
        raise ArgumentError("needed", request.needed, "distinct experts")
    if request.guesses and request.layer == arrangement.layers - 1:
        raise ArgumentError("guesses", request.guesses, "none at the last layer")


# **The state**: the contents of each slot and buffer. The slots of a layer are ordered by when their experts last ran.


@dataclass
class Resident:
    """An expert in a slot."""

    expert: int
    slot: int


@dataclass
class Staged:
    """An expert in a buffer, its place on the host, and the cause of the copy."""

    layer: int
    expert: int
    buffer: int
    host: int
    cause: str


class Offload:
    """The state machine; `step` returns the events of one request.

    Attributes:
        arrangement: what it places.
        slots: for each layer the experts in slots, least recently run first.
        staged: the contents of the buffers, oldest first.
    """

    def __init__(self, arrangement: Arrangement) -> None:
        k, hosted = arrangement.slots, range(arrangement.slots, arrangement.experts)
        self.arrangement, self.staged = arrangement, list[Staged]()
        if arrangement.memory == "mirror":
            self.slots = [list[Resident]() for _ in range(arrangement.layers)]
            self._host = [{expert: expert for expert in range(arrangement.experts)} for _ in range(arrangement.layers)]
        else:
            self.slots = [[Resident(expert, expert) for expert in range(k)] for _ in range(arrangement.layers)]
            self._host = [{expert: expert - k for expert in hosted} for _ in range(arrangement.layers)]
        self._step, self._layer = -1, -1
        self._events: list[Event] = []

    def step(self, request: Request) -> Trace:
        """The events of one request.

        Raises:
            ArgumentError: experts or layers that do not exist, or a layer out of order; the state is unchanged.
        """
        check_request(request, self.arrangement, self._layer)
        return self._answer(request)

    def _answer(self, request: Request) -> Trace:
        self._step, self._layer, self._events = self._step + 1, request.layer, []
        if request.layer == 0:
            for guess in list(self.staged):
                self._drop(guess, "abandoned")
        pending = self._run_residents(request)
        while pending:
            pending.remove(self._bring(request.layer, pending))
        self._stage(request)
        for guess in [staged for staged in self.staged if staged.layer == request.layer]:
            self._drop(guess, "unused")
        return tuple(self._events)

    # The steps.

    def _run_residents(self, request: Request) -> list[int]:
        """Step 1; returns the needed experts that are elsewhere, ascending."""
        missing = []
        for expert in sorted(request.needed):
            resident = next((r for r in self.slots[request.layer] if r.expert == expert), None)
            if resident is None:
                missing.append(expert)
            else:
                self._write("hit", request.layer, expert, "request", slot=resident.slot)
                self._mark_used(request.layer, resident)
        return missing

    def _bring(self, layer: int, pending: list[int]) -> int:
        """Steps 2 and 3 for the first pending expert, or for one that must precede it; returns which."""
        expert = pending[0]
        staged = self._find_staged(layer, expert)
        if staged is None and self._free_buffer() is None:
            unneeded = [guess for guess in self.staged if guess.expert not in pending]
            if unneeded:
                self._drop(unneeded[0], "buffer")
            else:
                staged = self.staged[0]
        if staged is None:
            staged = self._copy_in("load", layer, expert, "miss")
        self._promote(staged)
        return staged.expert

    def _promote(self, newcomer: Staged) -> None:
        """Step 3: into a free slot, or in place of the least recently run expert."""
        layer, residents = newcomer.layer, self.slots[newcomer.layer]
        if len(residents) == self.arrangement.slots:
            victim = residents.pop(0)
            slot, host = victim.slot, None
            if self.arrangement.memory == "swap":
                host = self._host[layer][victim.expert] = self._host[layer].pop(newcomer.expert)
            self._write("evict", layer, victim.expert, newcomer.cause, slot=slot, host=host)
        else:
            taken = {resident.slot for resident in residents}
            slot = next(slot for slot in range(self.arrangement.slots) if slot not in taken)
        self.staged.remove(newcomer)
        self._write("promote", layer, newcomer.expert, newcomer.cause, slot=slot, buffer=newcomer.buffer)
        residents.append(Resident(newcomer.expert, slot))

    def _stage(self, request: Request) -> None:
        """Step 4."""
        layer = request.layer + 1
        for expert in request.guesses:
            resident = any(r.expert == expert for r in self.slots[layer])
            if self._free_buffer() is not None and not resident and self._find_staged(layer, expert) is None:
                self._copy_in("stage", layer, expert, "guess")

    # Parts of the steps.

    def _mark_used(self, layer: int, resident: Resident) -> None:
        self.slots[layer].remove(resident)
        self.slots[layer].append(resident)

    def _copy_in(self, kind: Kind, layer: int, expert: int, cause: str) -> Staged:
        """From the host into the lowest free buffer."""
        buffer = self._free_buffer()
        assert buffer is not None
        staged = Staged(layer, expert, buffer, self._host[layer][expert], cause)
        self.staged.append(staged)
        self._write(kind, layer, expert, cause, buffer=buffer, host=staged.host)
        return staged

    def _drop(self, guess: Staged, cause: str) -> None:
        self.staged.remove(guess)
        self._write("drop", guess.layer, guess.expert, cause, buffer=guess.buffer)

    def _free_buffer(self) -> int | None:
        taken = {staged.buffer for staged in self.staged}
        return next((buffer for buffer in range(self.arrangement.buffers) if buffer not in taken), None)

    def _find_staged(self, layer: int, expert: int) -> Staged | None:
        return next((s for s in self.staged if (s.layer, s.expert) == (layer, expert)), None)

    def _write(
        self,
        kind: Kind,
        layer: int,
        expert: int,
        cause: str,
        *,
        slot: int | None = None,
        buffer: int | None = None,
        host: int | None = None,
    ) -> None:
        self._events.append(Event(self._step, kind, layer, expert, slot, buffer, host, cause))


# **The trace** of a whole run. The chapter `lowbit.model.replay` computes the recall of cache and guesses from it.


def _check_trace(arrangement: Arrangement, requests: Sequence[Request]) -> None:
    if not requests:
        raise ArgumentError("requests", "empty", "a sequence of at least one")
    last = -1
    for request in requests:
        check_request(request, arrangement, last)
        last = request.layer


@checked(also=_check_trace)
def trace(arrangement: Arrangement, requests: Sequence[Request]) -> Trace:
    """All events of a run that begins with an empty cache.

    One layer, two slots; expert 2 replaces expert 0, which ran least recently:

    >>> requests = [Request(0, (0, 1)), Request(0, (1, 2))]
    >>> for event in trace(Arrangement(layers=1, experts=4, slots=2), requests):
    ...     print(event.step, event.kind, event.expert, event.slot, event.buffer)
    0 load 0 None 0
    0 promote 0 0 0
    0 load 1 None 0
    0 promote 1 1 0
    1 hit 1 1 None
    1 load 2 None 0
    1 evict 0 0 None
    1 promote 2 0 0

    Args:
        arrangement: what is placed and where.
        requests: in order, at least one.

    Raises:
        ArgumentError: a request for experts or layers that do not exist, or for a layer out of order.

    Source: MoE offloading §3; errata M1 to M4.
    """
    machine = Offload(arrangement)
    return tuple(event for request in requests for event in machine._answer(request))


# **What a backend promises.** The whole run is one call, from all requests to all events. The chapter `offload_engine`
# promises the same, request by request.

operation(
    "offload.trace",
    "Which expert lies where, event by event",
    trace,
    promise=EXACT,
    source="MoE offloading §3; errata M1 to M5, M9",
    clauses={
        "C1": "Without guesses, each request writes its hits and then, for each other needed expert, load, evict if no "
        "slot is free, and promote, by ascending id; what is evicted is the expert of that layer that ran longest ago.",
        "C2": "Guesses are staged after the last promote of their request, in their order, into the lowest free "
        "buffers; one that is in a slot or a buffer, or finds no buffer, is not; one that its layer needs is promoted "
        "without a load, the others are dropped when the layer has run.",
        "C3": "A load that finds no free buffer takes that of the oldest guess that its layer does not need; if all "
        "are needed, the oldest is promoted first.",
        "C4": "Where a request needs more experts than there are slots, they stream through and those that ran last "
        "remain.",
        "C5": "Under swap slots begin with the lowest experts, and an evict names the host place that its newcomer "
        "left; under mirror slots begin empty and an evict names none.",
        "C6": "A pass that ends early leaves its guesses to be dropped when the next begins, before anything else.",
    },
)
