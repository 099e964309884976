"""Whatever fails, and wherever: a clear error, nothing leaked, no expert lost, and the engine usable afterwards.

A program is run once to count its calls to the device, and then again for each call, with a failure there: the call is
refused, or interrupted, or fails without a word until a later call. After the failure the same engine must do a whole
run rightly, and give everything back.
"""

import sys
from pathlib import Path
from types import FrameType
from typing import Any, Self

import numpy as np
import pytest
from engine_house import NBYTES, House, blob, room_for
from engine_runs import walk

from lowbit.errors import ArgumentError
from lowbit.moe.offload import Arrangement, Request
from lowbit_cuda.engine import Engine, EngineError, EngineLostError, Rates, device_bytes
from lowbit_cuda.port import DeviceError, DeviceLostError, DeviceMemoryError, Memory, Span, Stream
from lowbit_gpusim.sim import SimDevice
from lowbit_gpusim.sim.faults import Failure, Faults

LONG, SHORT = Arrangement(3, 5, 2, 2, "mirror"), Arrangement(2, 4, 1, 2, "mirror")


def swapped(arrangement: Arrangement) -> Arrangement:
    """The same under swap."""
    return Arrangement(arrangement.layers, arrangement.experts, arrangement.slots, arrangement.buffers, "swap")


REQUESTS = [
    Request(0, (1, 2, 3), (0,)),  # more than there are slots
    Request(1, (0, 3)),
    Request(0, (2,), (1,)),  # a pass that ends here
    Request(0, (0, 1), (2, 1)),
    Request(1, (2,)),
]


def built(arrangement: Arrangement, failure: Failure | None, schedule: str = "eager") -> tuple[SimDevice, House]:
    """A house with room for itself and no byte more, in which failures are counted from the first `run` on, so that
    filling is over."""
    device = SimDevice(schedule=schedule, seed=3, on_unwritten="raise", budget=room_for(arrangement))
    house = House(arrangement, device=device)
    device._faults = Faults(failure)
    return device, house


LATER = (1, 3, 50)
"""How many calls later a late failure is told, unless something waits for it: at once, soon, or only then."""


def calls_of(arrangement: Arrangement, reset: bool) -> int:
    """How many calls the program below makes."""
    device, house = built(arrangement, None)
    program(house, reset)
    return device.calls


def program(house: House, reset: bool) -> None:
    """What fails: a run, and perhaps the return to the beginning."""
    for request in REQUESTS:
        house.ask(request)
        house.wait()
    if reset:
        house.engine.reset()


@pytest.mark.parametrize("part", range(len(LATER)))
@pytest.mark.parametrize("kind", ["error", "interrupt", "late"])
@pytest.mark.parametrize("memory", ["mirror", "swap"])
@pytest.mark.parametrize("schedule", ["eager", "late"])
def test_each_call_in_turn(kind: str, memory: str, schedule: str, part: int) -> None:
    """Each call of a run and of a `reset` fails once: afterwards the engine begins anew and all is right."""
    arrangement = SHORT if memory == "mirror" else swapped(SHORT)
    for at in range(1 + part, calls_of(arrangement, True) + 1, len(LATER)):
        device, house = built(arrangement, Failure(at, kind, later=LATER[part]), schedule)
        try:
            program(house, True)
        except EngineError as error:
            assert kind != "interrupt" and "failed" in str(error)
        except KeyboardInterrupt:
            assert kind == "interrupt"
        except DeviceError:  # of the test's own wait, not of the engine's doing: what it says may still concern it
            assert kind != "interrupt"
            house.engine.reset()
        else:
            # `reset` and the first run wait a second time where a wait fails; or it was the last call of all.
            assert device.calls_by_kind["finish"] == 3 or (kind == "late" and not device.failed)
            device._faults = Faults(None)
        after_a_failure(house)


@pytest.mark.parametrize("kind", ["error", "interrupt", "late"])
@pytest.mark.parametrize("memory", ["mirror", "swap"])
def test_closed_where_it_failed(kind: str, memory: str) -> None:
    """Whichever call fails, and with copies still on their way: closing gives all back, and the budget was kept."""
    arrangement = SHORT if memory == "mirror" else swapped(SHORT)
    for at in range(1, calls_of(arrangement, True) + 1):
        device, house = built(arrangement, Failure(at, kind, later=LATER[at % len(LATER)]), "late")
        survive(lambda house=house: program(house, True))
        assert device.peak == device.budget
        house.close()


@pytest.mark.parametrize("of", ["copy", "launch"])
@pytest.mark.parametrize("slots", [1, 2])
def test_told_only_at_the_end(of: str, slots: int) -> None:
    """Under swap, a copy or a kernel fails and the engine, which waits for nothing, goes on for many requests before it
    is told: no expert is lost, although most of what was asked for since has not begun. Nor when it happens again."""
    arrangement = Arrangement(2, 5, slots, 2, "swap")
    requests = walk(arrangement, slots, 24)
    for at in range(1, 24, 2):
        device, house = built(arrangement, None)
        for again in (at, 25 - at):
            device._faults = Faults(Failure(again, "late", of=of, later=10**6))
            for request in requests:
                house.ask(request)
            assert not device.failed
            with pytest.raises(DeviceError, match=f"an earlier {of}"):
                device.finish()
            house.engine.reset()
            house.forget()
            house.check_homes()
            assert all(home.left is None or home.left.known for home in house.engine._homes()), "no doubt is left"
        after_a_failure(house)


@pytest.mark.parametrize("memory", ["mirror", "swap"])
def test_a_device_is_lost_at_each_call(memory: str) -> None:
    """The engine says so, and again at each later call, of which the device hears nothing; closing is quiet."""
    arrangement = SHORT if memory == "mirror" else swapped(SHORT)
    for at in range(1, calls_of(arrangement, True) + 1):
        device, house = built(arrangement, Failure(at, "lost", later=LATER[at % len(LATER)]))
        try:
            program(house, True)
            house.wait()
        except EngineLostError as error:
            assert "the device is lost to this process" in str(error)
        except DeviceLostError:  # told where the test waits; the engine learns of it now
            with pytest.raises(EngineLostError, match="lost since an earlier error"):
                house.engine.reset()
        else:
            assert not device.failed
            continue
        calls = device.calls
        for call in (house.engine.reset, lambda house=house: house.ask(REQUESTS[0])):
            with pytest.raises(EngineLostError, match="using the engine: it is lost with its device"):
                call()
        assert device.calls == calls
        house.engine.close()
        device.close()


def after_a_failure(house: House) -> None:
    """The engine is as new: a whole run is right, every expert where it should be, and nothing is left over."""
    house.forget()
    if house.engine.requests and house.engine._whole:
        house.engine.reset()
    for request in REQUESTS:
        house.ask(request)
    house.check(REQUESTS)
    house.check_homes()
    house.close()


@pytest.mark.parametrize("memory", ["mirror", "swap"])
@pytest.mark.parametrize("kind", ["error", "interrupt", "late"])
def test_building(memory: str, kind: str) -> None:
    """Each call while the engine is made fails once: nothing is kept, and it can be made again."""
    arrangement = SHORT if memory == "mirror" else swapped(SHORT)
    for at in range(1, 7):  # two streams, the blocks, the places of two layers, and one that is not reached
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
        house = House(arrangement, device=SimDevice(on_unwritten="raise", budget=room_for(arrangement)), fill=False)
        house.device._faults = Faults(Failure(at, kind))
        for _ in range(2):
            survive(house.fill)
        assert house.engine._filling.complete
        failed, house.device._faults = house.device.failed, Faults(None)
        after_a_failure(house)
    assert at >= 2 * 4, "there is a call for each expert at least"


def survive(function: Any) -> Any:
    """What a function answers, or None where the device failed it."""
    try:
        return function()
    except (DeviceError, KeyboardInterrupt):
        return None


@pytest.mark.parametrize("memory", ["mirror", "swap"])
def test_old_news_is_no_failure_of_reset(memory: str) -> None:
    """What the device tells when `reset` waits for it was the past's: `reset` goes on, and the engine is as new."""
    arrangement = SHORT if memory == "mirror" else swapped(SHORT)
    house = House(arrangement, rates=Rates(1.0, float, float))
    house.device._faults = Faults(Failure(1, "late", of="copy", later=10**6))
    house.run(0, [1])
    house.engine.reset()
    assert house.device.failed
    assert not house.engine._on_host._coming, "nothing is believed to be on its way"
    after_a_failure(house)


@pytest.mark.parametrize("at", range(1, 5))
def test_memory_that_the_device_does_not_take_back(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """A port may fail to free: the error comes out, everything else is given back, and closing again gives the rest."""
    house = House(swapped(SHORT), fill=False)
    house.engine.fill(0, 0, blob(0, 0))  # so that there are blocks, two runs of places, and the passage
    held, free = len(house.device.leaks()), house.device.free
    calls = list[Memory]()

    def fail(memory: Memory) -> None:
        calls.append(memory)
        if len(calls) == at:
            raise DeviceError("giving back: failed")
        free(memory)

    monkeypatch.setattr(house.device, "free", fail)
    with pytest.raises(DeviceError, match="giving back"):
        house.engine.close()
    assert len(house.device.leaks()) == held - 3 and len(calls) == 4
    house.engine.close()
    house.close()


# **What the error says.**


def test_it_says_what_was_being_done() -> None:
    """A copy that fails: which expert of which layer, whether it was needed or guessed, and the device's own words."""
    for of, at, words in [
        ("copy", 1, "loading expert 1 of layer 0: copy of experts of layer 0"),
        ("copy", 4, "prefetching expert 0 of layer 1: copy of experts of layer 1"),
        ("launch", 1, "running expert 1 of layer 0: launch of show"),
    ]:
        _, house = built(LONG, Failure(at, "error", of=of))
        with pytest.raises(EngineError, match=words) as caught:
            program(house, False)
        assert (caught.value.layer, caught.value.expert) == ((1, 0) if at == 4 else (0, 1))
        assert isinstance(caught.value.__cause__, DeviceError)
    device, house = built(swapped(LONG), Failure(2, "error", of="copy"))
    with pytest.raises(EngineError, match="taking back expert 0 of layer 0: copy of expert blocks"):
        house.run(0, [2, 3])
    house.run(0, [2, 3])
    house.engine._whole = False
    device._faults = Faults(Failure(1, "error", of="copy"))
    with pytest.raises(EngineError, match="bringing experts back: copy of experts of layer 0") as caught:
        house.run(0, [2])
    assert str(caught.value).startswith("bringing") and caught.value.layer is None
    assert not isinstance(caught.value.__cause__, EngineError)


@pytest.mark.parametrize("memory", ["mirror", "swap"])
def test_work_that_fails(memory: str) -> None:
    """An allocation that fails among the caller's kernels, or an error of the caller's, ends the pass and no more."""
    arrangement = LONG if memory == "mirror" else swapped(LONG)
    _, house = built(arrangement, None)

    def greedy(expert: int, span: Span, stream: Stream) -> None:
        house.device.allocate(1 << 50, "activations")

    def wrong(expert: int, span: Span, stream: Stream) -> None:
        raise ArgumentError("weight", float("nan"), "finite")

    for work, error, words in [
        (greedy, EngineError, "running expert 1 of layer 0: device memory for activations"),
        (wrong, ArgumentError, "weight is nan"),
    ]:
        with pytest.raises(error, match=words) as caught:
            house.engine.run(0, [1, 2, 3], [0], work)
        if error is EngineError:
            assert isinstance(caught.value.__cause__, DeviceMemoryError)
        with pytest.raises(ArgumentError, match="0 at first"):
            house.engine.run(1, [0], [], house.work)
        for request in REQUESTS:
            house.ask(request)
        house.check(REQUESTS)
        house.check_homes()
        house.forget()
    house.close()


def test_late_schedule_and_cancelled_pass() -> None:
    """A generation that simply stops asking leaves nothing that the next one must clean up."""
    for memory in (LONG, swapped(LONG)):
        _, house = built(memory, None, "late")
        for layer in (0, 1, 0, 0, 1, 2, 0):
            house.run(layer, [layer, 4], [2, 3] if layer < 2 else [])
        house.check()
        house.check_homes()
        house.close()


def test_an_expert_that_is_lost_is_not_made_up() -> None:
    """Where a device lies about a copy so that an expert lies nowhere, the engine refuses to go on without it."""
    _, house = built(swapped(SHORT), None)
    house.run(0, [2])
    house.device.finish()
    engine = house.engine
    for home in engine._homes():
        if home.holds == (0, 2):
            home.holds = None
    assert engine._journal is not None
    engine._journal._moves.clear()
    with pytest.raises(EngineError, match="looking for expert 2 of layer 0: its bytes are lost"):
        engine.reset()
    house.close()


def test_numpy_is_not_kept() -> None:
    """What was filled is the engine's own: the caller's array may change afterwards."""
    house = House(SHORT, fill=False)
    data = np.zeros(NBYTES, np.uint8)
    house.engine.fill(0, 0, data)
    data[:] = 1
    assert (house.device.read(house.engine._host.places[0][0].span, np.uint8, (NBYTES,)) == 0).all()
    house.close()


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
"""Each so many lines are tried: a prime, so that every kind of line has its turn."""


@pytest.mark.parametrize("memory", ["mirror", "swap"])
def test_an_interrupt_anywhere(memory: str) -> None:
    """Ctrl-C does not wait for a call to the device: interrupted at any line of its own, the engine begins anew."""
    arrangement, at, interrupted = SHORT if memory == "mirror" else swapped(SHORT), 1, True
    while interrupted:
        _, house = built(arrangement, None)
        interrupted = False
        try:
            with Interrupt(at):
                program(house, True)
        except KeyboardInterrupt:
            interrupted = True
        after_a_failure(house)
        at += STEP
    assert at > 20 * STEP
