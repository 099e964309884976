"""Placement: which expert is in which slot and which staging buffer, and which one is evicted.

These are the decisions of the paper's section 3 without the copies: a request goes in, and a list of events comes out,
in the order in which they are to be carried out. The engine carries them out.

**Expert locality and LRU caching** (§3.1). Each layer has its own slots (`LayerCache`) and keeps in them the experts
that ran most recently.

**Speculative expert loading** (§3.2). Guesses for the next layer are copied as soon as this layer's experts are loaded.
They wait in staging buffers (`Buffers`) and replace nothing. A guess that turns out to be needed replaces the expert of
its layer that ran longest ago; a wrong guess is dropped.

**Staging buffers** (§3.3) are shared by all layers, and every copy goes into one.

**Host and device memory** (§3.3). Where the host cannot hold every expert (*swap*), the expert that leaves a slot takes
the place on the host that the newcomer left.

Where the paper is silent, the chapter `lowbit.moe.offload` (errata M1 to M5) rules on the order of events. This file is
a second implementation of the same rules, and it is compared with that chapter event by event.

Source: MoE offloading §3.1 to §3.3; errata M1 to M5.
"""

import heapq
from collections import OrderedDict
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from lowbit.moe.offload import Arrangement, Event, Kind, Request, Trace

Fields = tuple[Kind, int, int, int | None, int | None, int | None, str]
"""An event without its step: kind, layer, expert, slot, buffer, host, cause."""

T = TypeVar("T")
Deciding = Generator[Fields, None, T]


class LayerCache:
    """The slots of one layer: at most k experts; the one that ran longest ago is evicted first."""

    def __init__(self, slots: int, residents: Sequence[int] = ()) -> None:
        """Start with `residents` in the first slots, the least recently used first."""
        self._slot_of = OrderedDict((expert, slot) for slot, expert in enumerate(residents))
        self._free = list(range(len(residents), slots))

    def __contains__(self, expert: int) -> bool:
        return expert in self._slot_of

    def run(self, expert: int) -> int:
        """Mark the expert as used now; returns its slot."""
        self._slot_of.move_to_end(expert)
        return self._slot_of[expert]

    def admit(self, expert: int) -> tuple[int, int | None]:
        """Give the expert a slot and mark it as used; returns the slot and the expert that left it, if any."""
        victim = None
        if self._free:
            slot = self._free.pop(0)
        else:
            victim, slot = self._slot_of.popitem(last=False)
        self._slot_of[expert] = slot
        return slot, victim


@dataclass(frozen=True)
class Waiting:
    """An expert in a staging buffer; `cause` says whether it was missed or guessed."""

    layer: int
    expert: int
    buffer: int
    cause: str


class Buffers:
    """The staging buffers of all layers and the experts in them, the oldest first."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count))
        self._waiting: OrderedDict[tuple[int, int], Waiting] = OrderedDict()

    def __iter__(self) -> Iterator[Waiting]:
        return iter(list(self._waiting.values()))

    @property
    def full(self) -> bool:
        """Whether no buffer is free."""
        return not self._free

    def find(self, layer: int, expert: int) -> Waiting | None:
        """The entry of an expert, or None."""
        return self._waiting.get((layer, expert))

    def fill(self, layer: int, expert: int, cause: str) -> Waiting:
        """Take the lowest free buffer."""
        waiting = Waiting(layer, expert, heapq.heappop(self._free), cause)
        self._waiting[layer, expert] = waiting
        return waiting

    def release(self, waiting: Waiting) -> None:
        """Free the expert's buffer."""
        del self._waiting[waiting.layer, waiting.expert]
        heapq.heappush(self._free, waiting.buffer)


class Placement:
    """Slots, staging buffers and host places of one arrangement.

    Attributes:
        arrangement: the sizes and the memory mode.
        steps: number of requests answered.
    """

    def __init__(self, arrangement: Arrangement) -> None:
        """The initial placement: in mirror mode nothing is cached; in swap mode slot s holds expert s."""
        experts, k = range(arrangement.experts), arrangement.slots
        self.arrangement, self.steps = arrangement, 0
        self._swap = arrangement.memory == "swap"
        first = k if self._swap else 0  # the first expert on the host
        self._caches = [LayerCache(k, experts[:first]) for _ in range(arrangement.layers)]
        self._buffers = Buffers(arrangement.buffers)
        self._host = [{expert: expert - first for expert in experts[first:]} for _ in range(arrangement.layers)]

    def location(self, layer: int, expert: int) -> str:
        """Where the expert is now: ``slot``, ``buffer`` or ``host``."""
        if expert in self._caches[layer]:
            return "slot"
        return "buffer" if self._buffers.find(layer, expert) else "host"

    def host(self, layer: int, expert: int) -> int | None:
        """The expert's place on the host, or None."""
        return self._host[layer].get(expert)

    def step(self, request: Request) -> Trace:
        """The events of one request, which `lowbit.moe.offload.check_request` must accept."""
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
        old = list(self._buffers)  # what is still in buffers was guessed for this layer
        yield from self._stage(layer + 1, request.guesses)
        yield from self._drop(old, "unused")

    def _make_room(self, missing: Sequence[int]) -> Deciding[Waiting | None]:
        """All buffers hold guesses for this layer: drop the oldest wrong one. If all are right, return the oldest."""
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
            if not self._buffers.full and self.location(layer, expert) == "host":
                yield from self._copy("stage", layer, expert, "guess")

    def _drop(self, unused: Sequence[Waiting], cause: str) -> Deciding[None]:
        for waiting in unused:
            self._buffers.release(waiting)
            yield "drop", waiting.layer, waiting.expert, None, waiting.buffer, None, cause
