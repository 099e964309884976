"""Whatever fails, and wherever: a clear error, nothing leaked, no expert lost, and the engine usable afterwards.

A program is run once to count its calls to the device, and then again for each call, with a failure there: the call is
refused, or interrupted, or fails without a word until a later call. After the failure the same engine must do a whole
run rightly, and give everything back.
"""

import sys
from itertools import product
from pathlib import Path
from types import FrameType
from typing import Any, Literal, Self

import numpy as np
import pytest
from engine_failures import (
    LATER,
    LONG,
    REQUESTS,
    SHORT,
    after_a_failure,
    built,
    calls_of,
    check_each_call,
    check_lost,
    program,
    survive,
    swapped,
)
from engine_rig import NBYTES, Rig, expert_data, room_for
from engine_runs import walk

from lowbit.errors import ArgumentError
from lowbit.moe.offload import Arrangement
from lowbit_cuda.engine.account import EngineError, EngineLostError
from lowbit_cuda.engine.cost import Rates
from lowbit_cuda.engine.engine import Engine
from lowbit_cuda.engine.storage import device_bytes
from lowbit_cuda.port import DeviceError, DeviceLostError, DeviceMemoryError, Memory, Span, Stream
from lowbit_gpusim.sim.device import SimDevice
from lowbit_gpusim.sim.faults import Failure, Faults

EACH = list(product(("error", "interrupt", "late"), ("mirror", "swap"), ("eager", "late"), range(len(LATER))))


@pytest.mark.parametrize("each", EACH, ids=lambda each: "-".join(map(str, each)))
def test_each_call_in_turn(each: tuple[str, str, str, int]) -> None:
    """Each call of a run and of a `reset` fails once: afterwards the engine starts again and all is right."""
    check_each_call(*each)


@pytest.mark.parametrize("kind", ["error", "interrupt", "late"])
@pytest.mark.parametrize("memory", ["mirror", "swap"])
def test_closed_where_it_failed(kind: str, memory: str) -> None:
    """Whichever call fails, and with copies still on their way: closing gives all back, and the budget was kept."""
    arrangement = SHORT if memory == "mirror" else swapped(SHORT)
    for at in range(1, calls_of(arrangement, True) + 1):
        device, rig = built(arrangement, Failure(at, kind, later=LATER[at % len(LATER)]), "late")
        survive(lambda rig=rig: program(rig, True))
        assert device.peak == device.budget
        rig.close()


@pytest.mark.parametrize("of", ["copy", "launch"])
@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("memory", ["mirror", "swap"])
def test_reported_only_at_the_end(of: str, slots: int, memory: Literal["mirror", "swap"]) -> None:
    """A copy or a kernel fails, and the engine, which waits for nothing, continues for many requests before the failure
    is reported. In mirror mode it recovers, twice. In swap mode it recovers or says which expert is lost; it never
    takes wrong bytes for an expert's."""
    arrangement = Arrangement(2, 5, slots, 2, memory)
    requests, lost = walk(arrangement, slots, 24), 0
    for at in range(1, 24, 2):
        device, rig = built(arrangement, None)
        try:
            for again in (at, 25 - at):
                device._faults = Faults(Failure(again, "late", of=of, later=10**6))
                for request in requests:
                    rig.ask(request)
                assert not device.failed
                with pytest.raises(DeviceError, match=f"an earlier {of}"):
                    device.finish()
                rig.engine.reset()
                rig.forget()
                rig.check_storage()
            after_a_failure(rig)
        except EngineLostError as error:
            check_lost(rig, error, memory == "swap")
            lost += 1
    assert (lost > 0) == (memory == "swap")


@pytest.mark.parametrize("memory", ["mirror", "swap"])
def test_a_device_is_lost_at_each_call(memory: str) -> None:
    """The engine says so, and again at each later call, of which the device hears nothing; closing is quiet."""
    arrangement = SHORT if memory == "mirror" else swapped(SHORT)
    for at in range(1, calls_of(arrangement, True) + 1):
        device, rig = built(arrangement, Failure(at, "lost", later=LATER[at % len(LATER)]))
        try:
            program(rig, True)
            rig.wait()
        except EngineLostError as error:
            assert "the device is lost to this process" in str(error)
        except DeviceLostError:  # told where the test waits; the engine learns of it now
            with pytest.raises(EngineLostError, match="lost since an earlier error"):
                rig.engine.reset()
        else:
            assert not device.failed
            continue
        calls = device.calls
        for call in (rig.engine.reset, lambda rig=rig: rig.ask(REQUESTS[0])):
            with pytest.raises(EngineLostError, match="using the engine: it is lost"):
                call()
        assert device.calls == calls
        rig.engine.close()
        device.close()


@pytest.mark.parametrize("memory", ["mirror", "swap"])
@pytest.mark.parametrize("kind", ["error", "interrupt", "late"])
def test_building(memory: str, kind: str) -> None:
    """Each call while the engine is made fails once: nothing is kept, and it can be made again."""
    arrangement = SHORT if memory == "mirror" else swapped(SHORT)
    for at in range(1, 7):  # two streams, the device_storage, the places of two layers, and one that is not reached
        device = SimDevice(budget=device_bytes(arrangement, NBYTES))
        stream = device.stream("compute")
        device._faults = Faults(Failure(at, kind))
        try:
            engine = Engine(device, arrangement, NBYTES, stream)
        except (DeviceError, KeyboardInterrupt):
            assert device.leaks() == ()
            engine = Engine(device, arrangement, NBYTES, stream)
        engine.close()
        assert device.leaks() == ()


@pytest.mark.parametrize("memory", ["mirror", "swap"])
@pytest.mark.parametrize("kind", ["error", "interrupt", "late"])
def test_filling(memory: str, kind: str) -> None:
    """Each call while the engine is filled fails once: it is filled on from there, and all is right."""
    arrangement, at, failed = SHORT if memory == "mirror" else swapped(SHORT), 0, True
    while failed:
        at += 1
        rig = Rig(arrangement, device=SimDevice(on_unwritten="raise", budget=room_for(arrangement)), fill=False)
        rig.device._faults = Faults(Failure(at, kind))
        for _ in range(2):
            survive(rig.fill)
        assert rig.engine._filling.complete
        failed, rig.device._faults = rig.device.failed, Faults(None)
        after_a_failure(rig)
    assert at >= 2 * 4, "there is a call for each expert at least"


def test_reset_continues_after_an_earlier_failure() -> None:
    """What the device reports when `reset` waits for it failed earlier: `reset` continues and the engine is as new."""
    rig = Rig(SHORT, rates=Rates(1.0, float, float))
    rig.device._faults = Faults(Failure(1, "late", of="copy", later=10**6))
    rig.run(0, [1])
    rig.engine.reset()
    assert rig.device.failed
    assert not rig.engine._on_host._pending, "no copy is counted as in progress"
    after_a_failure(rig)


@pytest.mark.parametrize("at", range(1, 5))
def test_memory_that_the_device_does_not_take_back(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """A port may fail to free: the error comes out, everything else is given back, and closing again gives the rest."""
    rig = Rig(swapped(SHORT), fill=False)
    rig.engine.fill(0, 0, expert_data(0, 0))  # so that there are device_storage, two runs of places, and the staging
    held, free = len(rig.device.leaks()), rig.device.free
    calls = list[Memory]()

    def fail(memory: Memory) -> None:
        calls.append(memory)
        if len(calls) == at:
            raise DeviceError("giving back: failed")
        free(memory)

    monkeypatch.setattr(rig.device, "free", fail)
    with pytest.raises(DeviceError, match="giving back"):
        rig.engine.close()
    assert len(rig.device.leaks()) == held - 3 and len(calls) == 4
    rig.engine.close()
    rig.close()


# **What the error says.**


def test_it_says_what_was_being_done() -> None:
    """A copy that fails: which expert of which layer, whether it was needed or guessed, and the device's own words."""
    for of, at, words in [
        ("copy", 1, "loading expert 1 of layer 0: copy of experts of layer 0"),
        ("copy", 4, "prefetching expert 0 of layer 1: copy of experts of layer 1"),
        ("launch", 1, "running expert 1 of layer 0: launch of show"),
    ]:
        _, rig = built(LONG, Failure(at, "error", of=of))
        with pytest.raises(EngineError, match=words) as caught:
            program(rig, False)
        assert (caught.value.layer, caught.value.expert) == ((1, 0) if at == 4 else (0, 1))
        assert isinstance(caught.value.__cause__, DeviceError)
    device, rig = built(swapped(LONG), Failure(2, "error", of="copy"))
    with pytest.raises(EngineError, match="copying back expert 0 of layer 0: copy of expert slots"):
        rig.run(0, [2, 3])
    rig.run(0, [2, 3])
    rig.engine._consistent = False
    device._faults = Faults(Failure(1, "error", of="copy"))
    with pytest.raises(EngineError, match="returning experts to their places: copy of experts of layer 0") as caught:
        rig.run(0, [2])
    assert str(caught.value).startswith("returning") and caught.value.layer is None
    assert not isinstance(caught.value.__cause__, EngineError)


@pytest.mark.parametrize("memory", ["mirror", "swap"])
def test_work_that_fails(memory: str) -> None:
    """An allocation that fails among the caller's kernels, or an error of the caller's, ends the pass and no more."""
    arrangement = LONG if memory == "mirror" else swapped(LONG)
    _, rig = built(arrangement, None)

    def greedy(expert: int, span: Span, stream: Stream) -> None:
        rig.device.allocate(1 << 50, "activations")

    def wrong(expert: int, span: Span, stream: Stream) -> None:
        raise ArgumentError("weight", float("nan"), "finite")

    for work, error, words in [
        (greedy, EngineError, "running expert 1 of layer 0: device memory for activations"),
        (wrong, ArgumentError, "weight is nan"),
    ]:
        with pytest.raises(error, match=words) as caught:
            rig.engine.run(0, [1, 2, 3], [0], work)
        if error is EngineError:
            assert isinstance(caught.value.__cause__, DeviceMemoryError)
        with pytest.raises(ArgumentError, match="0 at first"):
            rig.engine.run(1, [0], [], rig.work)
        for request in REQUESTS:
            rig.ask(request)
        rig.check(REQUESTS)
        rig.check_storage()
        rig.forget()
    rig.close()


def test_late_schedule_and_cancelled_pass() -> None:
    """A generation that simply stops asking leaves nothing that the next one must clean up."""
    for memory in (LONG, swapped(LONG)):
        _, rig = built(memory, None, "late")
        for layer in (0, 1, 0, 0, 1, 2, 0):
            rig.run(layer, [layer, 4], [2, 3] if layer < 2 else [])
        rig.check()
        rig.check_storage()
        rig.close()


def test_an_expert_that_is_lost_is_not_made_up() -> None:
    """Where a device lies about a copy so that an expert lies nowhere, the engine refuses to go on without it."""
    _, rig = built(swapped(SHORT), None)
    rig.run(0, [2])
    rig.device.finish()
    for storage in rig.engine._all_storage():
        if storage.holds == (0, 2):
            storage.holds = None
    with pytest.raises(EngineLostError, match="restoring expert 2 of layer 0") as caught:
        rig.engine.reset()
    check_lost(rig, caught.value, True)


def test_numpy_is_not_kept() -> None:
    """What was filled is the engine's own: the caller's array may change afterwards."""
    rig = Rig(SHORT, fill=False)
    data = np.zeros(NBYTES, np.uint8)
    rig.engine.fill(0, 0, data)
    data[:] = 1
    assert (rig.device.read(rig.engine._host.places[0][0].span, np.uint8, (NBYTES,)) == 0).all()
    rig.close()


class Interrupt:
    """Interrupts the n-th line that the engine's own files run."""

    def __init__(self, at: int) -> None:
        self.lines, self._at = 0, at

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        """See `sys.settrace`."""
        if HERE not in frame.f_code.co_filename:
            return None
        if event == "line":
            self.lines += 1
            if self.lines == self._at:
                raise KeyboardInterrupt
        return self

    def __enter__(self) -> Self:
        self._before = sys.gettrace()
        sys.settrace(self)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(self._before)


HERE = str(Path("lowbit_cuda") / "engine")
STEP = 29
"""The test interrupts every 29th line. The number is prime, so that over the runs every kind of line is interrupted."""


@pytest.mark.parametrize("memory", ["mirror", "swap"])
def test_an_interrupt_anywhere(memory: str) -> None:
    """Ctrl-C does not wait for a call to the device: interrupted at any line of its own, the engine begins anew."""
    arrangement, at, interrupted = SHORT if memory == "mirror" else swapped(SHORT), 1, True
    while interrupted:
        _, rig = built(arrangement, None)
        interrupted = False
        try:
            with Interrupt(at):
                program(rig, True)
        except KeyboardInterrupt:
            interrupted = True
        after_a_failure(rig)
        at += STEP
    assert at > 20 * STEP
