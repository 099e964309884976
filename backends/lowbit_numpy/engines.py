"""The offload engine as tables: the expert in each slot and each buffer, and since when; the earliest leaves first."""

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from lowbit.arrays import I64
from lowbit.backend import Declaration
from lowbit.moe.offload import Arrangement, Event, Kind, Request, Trace

Table = I64
EMPTY = -1


class Engine:
    """Slots and buffers of one arrangement; `step` processes a request."""

    def __init__(self, arrangement: Arrangement) -> None:
        layers, experts, slots = arrangement.layers, arrangement.experts, arrangement.slots
        self._swap = arrangement.memory == "swap"
        self._resident: Table = np.full((layers, slots), EMPTY)  # the expert in each slot
        self._used: Table = np.full((layers, slots), EMPTY)  # when it last ran
        self._place: Table = np.tile(np.arange(experts), (layers, 1))  # place of each expert on the host
        if self._swap:
            self._resident[:] = np.arange(slots)
            self._used[:] = np.arange(slots) - slots
            self._place -= slots
        # In each buffer: layer and expert, when it came, and whether it was a guess.
        self._buffers: Table = np.full((arrangement.buffers, 2), EMPTY)
        self._since: Table = np.zeros(arrangement.buffers, np.int64)
        self._guessed = np.zeros(arrangement.buffers, np.bool_)
        self._time, self._number = 0, -1
        self._events: list[Event] = []

    def step(self, request: Request) -> Trace:
        """Process one request; returns its events."""
        self._number, self._events = self._number + 1, []
        layer = request.layer
        if layer == 0:
            self._drop(self._filled(), "abandoned")
        missing = self._hit(layer, np.sort(np.array(request.needed, np.int64)))
        while missing.size:
            missing = missing[missing != self._fetch(layer, missing)]
        old = self._filled()
        for expert in request.guesses:
            self._guess(layer + 1, expert)
        self._drop(old, "unused")
        return tuple(self._events)

    def _hit(self, layer: int, needed: Table) -> Table:
        """Run the experts that are in slots; return the others."""
        here = np.isin(needed, self._resident[layer])
        for expert in needed[here]:
            slot = np.flatnonzero(self._resident[layer] == expert)[0]
            self._run(layer, slot)
            self._write("hit", layer, expert, "request", slot=slot)
        return needed[~here]

    def _fetch(self, layer: int, missing: Table) -> int:
        """Load one missing expert into a slot: the lowest, or one whose buffer the lowest needs."""
        expert = int(missing[0])
        waiting = self._where(layer, expert)
        if not waiting.size and (self._buffers >= 0).all():
            filled = self._filled()
            unneeded = filled[~np.isin(self._buffers[filled, 1], missing)]
            self._drop(unneeded[:1], "buffer")
            if not unneeded.size:
                waiting = filled[:1]
        buffer = int(waiting[0]) if waiting.size else self._copy("load", layer, expert)
        self._move_in(layer, buffer)
        return int(self._resident[layer, self._used[layer].argmax()])

    def _move_in(self, layer: int, buffer: int) -> None:
        """Move an expert from a buffer into an empty slot, or into the one that was unused for longest."""
        slot = int(self._used[layer].argmin())  # empty slots count as used at −1, before all others, the lowest first
        expert, victim = int(self._buffers[buffer, 1]), int(self._resident[layer, slot])
        cause = "guess" if self._guessed[buffer] else "miss"
        if victim != EMPTY:
            if self._swap:
                self._place[layer, victim] = self._place[layer, expert]
            host = int(self._place[layer, victim]) if self._swap else None
            self._write("evict", layer, victim, cause, slot=slot, host=host)
        self._resident[layer, slot] = expert
        self._buffers[buffer] = EMPTY
        self._run(layer, slot)
        self._write("promote", layer, expert, cause, slot=slot, buffer=buffer)

    def _guess(self, layer: int, expert: int) -> None:
        known = (self._resident[layer] == expert).any() or self._where(layer, expert).size
        if not known and (self._buffers < 0).any():
            self._copy("stage", layer, expert)

    def _copy(self, kind: Kind, layer: int, expert: int) -> int:
        """Copy an expert from the host into the lowest free buffer."""
        buffer = int(np.flatnonzero(self._buffers[:, 0] == EMPTY)[0])
        self._time += 1
        self._buffers[buffer], self._since[buffer] = (layer, expert), self._time
        self._guessed[buffer] = kind == "stage"
        cause = "guess" if kind == "stage" else "miss"
        self._write(kind, layer, expert, cause, buffer=buffer, host=self._place[layer, expert])
        return buffer

    def _drop(self, buffers: Table, cause: str) -> None:
        for buffer in buffers:
            layer, expert = self._buffers[buffer]
            self._buffers[buffer] = EMPTY
            self._write("drop", layer, expert, cause, buffer=buffer)

    def _run(self, layer: int, slot: int) -> None:
        self._time += 1
        self._used[layer, slot] = self._time

    def _filled(self) -> Table:
        """The buffers that hold something, the oldest first."""
        filled = np.flatnonzero(self._buffers[:, 0] >= 0)
        return filled[np.argsort(self._since[filled])]

    def _where(self, layer: int, expert: int) -> Table:
        """The buffer in which an expert waits, or None."""
        return np.flatnonzero((self._buffers == (layer, expert)).all(axis=1))

    def _write(
        self,
        kind: Kind,
        layer: int,
        expert: int,
        cause: str,
        slot: int | None = None,
        buffer: int | None = None,
        host: int | None = None,
    ) -> None:
        slot, buffer, host = (None if place is None else int(place) for place in (slot, buffer, host))
        self._events.append(Event(self._number, kind, int(layer), int(expert), slot, buffer, host, cause))


class OffloadOperations:
    """The hooks of `offload.trace` and `offload.engine`."""

    declared: ClassVar[dict[str, Declaration]] = dict.fromkeys(("offload.trace", "offload.engine"), Declaration())

    def _offload_engine(self, arrangement: Arrangement) -> Engine:
        return Engine(arrangement)

    def _offload_trace(self, arrangement: Arrangement, requests: Sequence[Request]) -> Trace:
        engine = Engine(arrangement)
        return tuple(event for request in requests for event in engine.step(request))
