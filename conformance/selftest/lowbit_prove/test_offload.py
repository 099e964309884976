"""The theorems of offloading: both machines keep every expert, and a machine with a mistake is refuted."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from lowbit.moe.offload import Arrangement, Event, Request, Trace
from lowbit_cuda.engine.placement import LayerCache
from lowbit_prove import offload
from lowbit_prove.offload import Build, Memory, State
from lowbit_prove.theorem import Proof, Refutation

SOME = 9973
"""One state and request in so many."""


@pytest.mark.parametrize("memory", ("mirror", "swap"))
@pytest.mark.parametrize("name", offload.MACHINES)
def test_sound_states_lead_to_sound_states(name: str, memory: Memory) -> None:
    found = offload.decide(offload.MACHINES[name][0], memory, 2, SOME)
    assert isinstance(found, Proof) and found.steps > 50


def test_every_state_that_is_tried_is_sound() -> None:
    arrangement = Arrangement(offload.LAYERS, offload.EXPERTS, 2, offload.BUFFERS, "swap")
    for state, _ in offload.cases("swap", 2, SOME):
        state.check(arrangement)


def changed(change: Callable[[Event], Event | None]) -> Build:
    """The engine's machine, with another event in the place of each, or none."""

    def build(arrangement: Arrangement, state: State) -> Callable[[Request], Trace]:
        step = offload.of_engine(arrangement, state)
        return lambda request: tuple(each for event in step(request) if (each := change(event)) is not None)

    return build


def not_evicted(event: Event) -> Event | None:
    return None if event.kind == "evict" else event


def not_dropped(event: Event) -> Event | None:
    return None if event.kind == "drop" else event


def in_one_buffer(event: Event) -> Event | None:
    return event if event.buffer is None else replace(event, buffer=0)


def in_one_slot(event: Event) -> Event | None:
    return event if event.slot is None else replace(event, slot=0)


def to_another_place(event: Event) -> Event | None:
    return replace(event, host=(event.host + 1) % 6) if event.kind == "evict" and event.host is not None else event


def from_another_place(event: Event) -> Event | None:
    return replace(event, host=(event.host + 1) % 6) if event.kind == "load" and event.host is not None else event


def not_promoted(event: Event) -> Event | None:
    return None if event.kind == "promote" else event


MISTAKES = (not_evicted, not_dropped, in_one_buffer, in_one_slot, to_another_place, from_another_place, not_promoted)


@pytest.mark.parametrize("change", MISTAKES, ids=lambda change: change.__name__)
def test_a_mistake_is_refuted_with_a_state(change: Callable[[Event], Event | None]) -> None:
    found = offload.decide(changed(change), "swap", 2, 997)
    assert isinstance(found, Refutation) and "State" in str(found.numbers["state"])


def test_the_expert_that_ran_last_may_not_be_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    def admit(self: LayerCache, expert: int) -> tuple[int, int | None]:
        victim, slot = self._slot_of.popitem(last=True)
        self._slot_of[expert] = slot
        return slot, victim

    monkeypatch.setattr(LayerCache, "admit", admit)
    found = offload.decide(offload.of_engine, "swap", 2, 997)
    assert isinstance(found, Refutation) and "it is needed" in found.reason
