"""Placement: which expert lies in which slot and which buffer, and what gives way to what.

The decisions of the paper's section 3, without a byte being moved: a request goes in, and what is to be done comes out
as a list of events, in the order in which it is to be done. The engine carries them out.

**Expert locality and LRU caching** (§3.1). Each layer has slots of its own (`LayerCache`) and keeps in them the experts
that ran last.

**Speculative expert loading** (§3.2). Guesses for the next layer are copied as soon as this layer's experts are loaded.
They wait in buffers (`Buffers`) and replace nothing; one that turns out to be needed replaces the expert of its layer
that ran longest ago, and one that does not is dropped.

**Buffers** (§3.3) are shared by all layers, and every copy lands in one.

**Host and device memory** (§3.3). Where the host cannot hold every expert (*swap*), the expert that leaves a slot takes
the place on the host that the newcomer left.

What a layer may and may not do in which order, where the paper is silent, is ruled in the chapter `lowbit.moe.offload`,
errata M1 to M5. This file is a second answer to the same rules and is held to the first one event by event.

Source: MoE offloading §3.1 to §3.3; errata M1 to M5.
"""

import heapq
from collections import OrderedDict
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from lowbit.moe.offload import Arrangement, Event, Kind, Request, Trace

Fields = tuple[Kind, int, int, int | None, int | None, int | None, str]
"""Of an event, all but its step: kind, layer, expert, slot, buffer, host, cause."""

T = TypeVar("T")
Deciding = Generator[Fields, None, T]


class LayerCache:
    """The slots of one layer: at most k experts, of which the one that ran longest ago is the first to go."""

    def __init__(self, slots: int, residents: Sequence[int] = ()) -> None:
        """With `residents` in the first slots, the first of them unused for longest."""
        self._slot_of = OrderedDict((expert, slot) for slot, expert in enumerate(residents))
        self._free = list(range(len(residents), slots))

    def __contains__(self, expert: int) -> bool:
        return expert in self._slot_of

    def run(self, expert: int) -> int:
        """The expert runs now; answers with its slot."""
        self._slot_of.move_to_end(expert)
        return self._slot_of[expert]

    def admit(self, expert: int) -> tuple[int, int | None]:
        """Give the expert a slot, and let it run; answers with the slot, and who left it."""
        victim = None
        if self._free:
            slot = self._free.pop(0)
        else:
            victim, slot = self._slot_of.popitem(last=False)
        self._slot_of[expert] = slot
        return slot, victim


@dataclass(frozen=True)
class Waiting:
    """An expert in a buffer; `cause` says whether it was missed or guessed."""

    layer: int
    expert: int
    buffer: int
    cause: str


class Buffers:
    """The staging buffers of all layers, and what waits in them, the oldest first."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count))
        self._waiting: OrderedDict[tuple[int, int], Waiting] = OrderedDict()

    def __iter__(self) -> Iterator[Waiting]:
        return iter(list(self._waiting.values()))

    @property
    def full(self) -> bool:
        """Whether nothing can be copied before something leaves."""
        return not self._free

    def find(self, layer: int, expert: int) -> Waiting | None:
        """Where an expert waits, if it does."""
        return self._waiting.get((layer, expert))

    def fill(self, layer: int, expert: int, cause: str) -> Waiting:
        """Take the lowest free buffer."""
        waiting = Waiting(layer, expert, heapq.heappop(self._free), cause)
        self._waiting[layer, expert] = waiting
        return waiting

    def release(self, waiting: Waiting) -> None:
        """The expert leaves its buffer."""
        del self._waiting[waiting.layer, waiting.expert]
        heapq.heappush(self._free, waiting.buffer)


class Placement:
    """Slots, buffers and host places of one arrangement.

    Attributes:
        arrangement: what is placed.
        steps: how many requests were answered.
    """

    def __init__(self, arrangement: Arrangement) -> None:
        """As at the beginning: under mirror nothing is cached; under swap slot s holds expert s."""
        experts, k = range(arrangement.experts), arrangement.slots
        self.arrangement, self.steps = arrangement, 0
        self._swap = arrangement.memory == "swap"
        first = k if self._swap else 0  # the first expert that lies on the host
        self._caches = [LayerCache(k, experts[:first]) for _ in range(arrangement.layers)]
        self._buffers = Buffers(arrangement.buffers)
        self._host = [{expert: expert - first for expert in experts[first:]} for _ in range(arrangement.layers)]

    def whereabouts(self, layer: int, expert: int) -> str:
        """``slot``, ``buffer`` or ``host``: what asking for the expert now would find."""
        if expert in self._caches[layer]:
            return "slot"
        return "buffer" if self._buffers.find(layer, expert) else "host"

    def host(self, layer: int, expert: int) -> int | None:
        """The place on the host where an expert lies, or None."""
        return self._host[layer].get(expert)

    def step(self, request: Request) -> Trace:
        """What one request brings about; the request is one that `lowbit.moe.offload.check_request` passes."""
        number, self.steps = self.steps, self.steps + 1
        return tuple(Event(number, *what) for what in self._decide(request))

    def _decide(self, request: Request) -> Iterator[Fields]:
        layer, cache = request.layer, self._caches[request.layer]
        if layer == 0:
            yield from self._drop(list(self._buffers), "abandoned")
        hits = [expert for expert in sorted(request.needed) if expert in cache]
        for expert in hits:
            yield "hit", layer, expert, cache.run(expert), None, None, "request"
        missing = sorted(set(request.needed).difference(hits))
        while missing:
            newcomer = self._buffers.find(layer, missing[0])
            if newcomer is None and self._buffers.full:
                newcomer = yield from self._make_room(missing)
            if newcomer is None:
                newcomer = yield from self._copy("load", layer, missing[0], "miss")
            yield from self._promote(newcomer)
            missing.remove(newcomer.expert)
        old = list(self._buffers)  # what is left in buffers now was guessed for this layer
        yield from self._stage(layer + 1, request.guesses)
        yield from self._drop(old, "unused")

    def _make_room(self, missing: Sequence[int]) -> Deciding[Waiting | None]:
        """All buffers hold guesses for this layer: drop the oldest wrong one. If all are right, the oldest is next."""
        wrong = [waiting for waiting in self._buffers if waiting.expert not in missing]
        yield from self._drop(wrong[:1], "buffer")
        return None if wrong else next(iter(self._buffers))

    def _copy(self, kind: Kind, layer: int, expert: int, cause: str) -> Deciding[Waiting]:
        waiting = self._buffers.fill(layer, expert, cause)
        yield kind, layer, expert, None, waiting.buffer, self._host[layer][expert], cause
        return waiting

    def _promote(self, newcomer: Waiting) -> Deciding[None]:
        layer, expert = newcomer.layer, newcomer.expert
        slot, victim = self._caches[layer].admit(expert)
        if victim is not None:
            host = None
            if self._swap:
                host = self._host[layer][victim] = self._host[layer].pop(expert)
            yield "evict", layer, victim, slot, None, host, newcomer.cause
        self._buffers.release(newcomer)
        yield "promote", layer, expert, slot, newcomer.buffer, None, newcomer.cause

    def _stage(self, layer: int, guesses: Sequence[int]) -> Deciding[None]:
        for expert in guesses:
            if not self._buffers.full and self.whereabouts(layer, expert) == "host":
                yield from self._copy("stage", layer, expert, "guess")

    def _drop(self, unused: Sequence[Waiting], cause: str) -> Deciding[None]:
        for waiting in unused:
            self._buffers.release(waiting)
            yield "drop", waiting.layer, waiting.expert, None, waiting.buffer, None, cause
