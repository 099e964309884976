"""The placement of the CUDA backend's engine against the specification: event by event, always."""

from typing import Any

import pytest
from engine_runs import runs, walk
from hypothesis import given, settings

from lowbit.moe.offload import Arrangement, Request, Trace, trace
from lowbit_cuda.engine.placement import LayerCache, Placement


def decided(arrangement: Arrangement, requests: list[Request]) -> Trace:
    """The events of the engine's placement."""
    placement = Placement(arrangement)
    return tuple(event for request in requests for event in placement.step(request))


@settings(max_examples=300)
@given(runs())
def test_any_run(run: tuple[Arrangement, list[Request]]) -> None:
    """Whatever is asked for, the events are the specification's."""
    arrangement, requests = run
    assert decided(arrangement, requests) == trace(arrangement, requests)


@pytest.mark.parametrize("memory", ["mirror", "swap"])
@pytest.mark.parametrize("slots", [1, 2, 4, 8])
def test_long_walks(memory: Any, slots: int) -> None:
    """A long run like a program's, request by request: the events of each are the specification's."""
    arrangement = Arrangement(6, 8, slots, 4, memory)
    requests = walk(arrangement, slots, 600)
    machine = Placement(arrangement)
    assert [e for request in requests for e in machine.step(request)] == list(trace(arrangement, requests))


def test_a_wrong_order_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the order of LRU wrong (a hit does not count as a use) the walk above is no longer the specification's."""
    monkeypatch.setattr(LayerCache, "run", lambda cache, expert: cache._slot_of[expert])
    arrangement = Arrangement(6, 8, 4, 4)
    requests = walk(arrangement, 0, 100)
    assert decided(arrangement, requests) != trace(arrangement, requests)


def test_location() -> None:
    """What a request would find is told without changing anything."""
    machine = Placement(Arrangement(2, 4, 1, 2, "swap"))
    machine.step(Request(0, (2,), (3,)))
    found = [[machine.location(layer, expert) for expert in range(4)] for layer in range(2)]
    assert found == [["host", "host", "slot", "host"], ["slot", "host", "host", "buffer"]]
    assert [machine.host(0, expert) for expert in range(4)] == [1, 0, None, 2]
