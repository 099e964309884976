"""Failures asked for happen where they were asked for, once, and leave the simulated device as it was."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from sim_programs import scale

from lowbit.errors import ArgumentError
from lowbit_cuda.port import DeviceError, DeviceLostError, DeviceMemoryError, Memory, Span
from lowbit_gpusim.sim.device import SimDevice
from lowbit_gpusim.sim.faults import CALLS, KINDS, Failure, Faults
from lowbit_gpusim.sim.schedule import SCHEDULES

N = 8
NUMBERS = np.arange(N, dtype=np.float32)


@contextmanager
def taken(device: SimDevice, *, pinned: bool, what: str) -> Iterator[Memory]:
    """Memory that goes back, whatever happens."""
    memory = device.pin(4 * N, what) if pinned else device.allocate(4 * N, what)
    try:
        yield memory
    finally:
        device.free(memory)


def every_call(device: SimDevice) -> list[float]:
    """A program that makes every call there is, and frees what it took: twice `NUMBERS`."""
    with (
        taken(device, pinned=True, what="in") as first,
        taken(device, pinned=True, what="out") as last,
        taken(device, pinned=False, what="x") as x,
        taken(device, pinned=False, what="y") as y,
    ):
        copies, compute = device.stream("copies"), device.stream("compute")
        device.load([scale])
        device.write(first.span(), NUMBERS)
        device.copy(x.span(), first.span(), copies)
        device.wait(compute, device.record(copies))
        with device.capture(compute) as graph:
            device.launch(scale, {"x": x.span(), "y": y.span(), "n": N}, compute)
        device.replay(graph(), compute)
        device.copy(last.span(), y.span(), compute)
        event = device.record(compute)
        device.reached(event)
        device.synchronize(event)
        device.on_host("look", [last.span()], lambda data: None)
        device.finish()
        return [float(number) for number in device.read(last.span(), np.float32, (N,))]


def counted() -> tuple[int, dict[str, int]]:
    device = SimDevice("t4", budget=4096)
    every_call(device)
    return device.calls, dict(device.calls_by_kind)


def test_every_call_is_counted() -> None:
    """The program of these tests makes each kind of call, and the count is the same again."""
    calls, by_kind = counted()
    assert set(by_kind) == set(CALLS)
    assert sum(by_kind.values()) == calls == counted()[0]


@pytest.mark.parametrize("schedule", ["eager", "late"])
@pytest.mark.parametrize("kind", ["error", "interrupt"])
def test_each_call_in_turn(kind: str, schedule: str) -> None:
    """The n-th call fails and no other; what the program took goes back, and the next run of it is right."""
    for at in range(1, counted()[0] + 1):
        device = SimDevice("t4", budget=4096, schedule=schedule, fail=Failure(at, kind))
        with pytest.raises(KeyboardInterrupt if kind == "interrupt" else DeviceError):
            every_call(device)
        assert device.calls == at and device.failed
        assert device.used == device.pinned == 0 and device.leaks() == ()
        assert every_call(device) == [2 * number for number in range(N)]
        device.close()


@pytest.mark.parametrize("of", CALLS)
def test_a_failure_of_one_kind(of: str) -> None:
    """`of` counts only these calls; memory is refused as memory is, everything else as a failed operation."""
    times = counted()[1][of]
    device = SimDevice("t4", budget=4096, fail=Failure(times, of=of))
    with pytest.raises(DeviceError) as caught:
        every_call(device)
    assert device.calls_by_kind[of] == times
    assert isinstance(caught.value, DeviceMemoryError) == (of in ("allocate", "pin"))
    device = SimDevice("t4", budget=4096, fail=Failure(times + 1, of=of))
    every_call(device)
    assert not device.failed


@pytest.mark.parametrize("later", [1, 3, 1000])
def test_a_lost_device_stays_lost(later: int) -> None:
    """Each call loses the device in turn: the error says so, so does every later call, memory is counted off, and
    closing is quiet."""
    for at in range(1, counted()[0] + 1):
        device = SimDevice("t4", budget=4096, fail=Failure(at, "lost", later=later))
        try:
            every_call(device)
        except DeviceLostError as error:
            assert "an earlier" in str(error)
            for call, arguments in ((device.allocate, (1, "more")), (device.finish, ()), (device.load, ([scale],))):
                with pytest.raises(DeviceLostError, match="lost since an earlier error: an earlier"):
                    call(*arguments)
        else:
            assert not device.failed
        assert (device.used, device.pinned) == (0, 0)
        device.close()


DONE_LATER = ("copy", "launch", "replay")


class Listening(Faults):
    """Remembers which calls there were, in their order."""

    def __init__(self, failure: Failure | None) -> None:
        super().__init__(failure)
        self.kinds: list[str] = []

    def call(self, kind: str, what: str, memory: tuple[int, int, int] = (0, 0, 0)) -> bool:
        self.kinds.append(kind)
        return super().call(kind, what, memory)


@pytest.mark.parametrize("later", [1, 3, 100])
def test_late_failures_are_told_later(later: int) -> None:
    """The call itself returns; the one so many calls later says what had failed and changes nothing. It is told
    earlier where the program waits for what was not done, or would make a graph of it."""
    device = SimDevice("t4", budget=4096)
    device._faults = faults = Listening(None)
    every_call(device)
    kinds = faults.kinds
    made, waits = kinds.index("end capture"), kinds.index("synchronize")
    # The call that cannot go on without what a copy, a launch or a replay should have done.
    last = {at: made if kind == "launch" else waits for at, kind in enumerate(kinds) if kind in DONE_LATER}
    for at in range(len(kinds)):
        told = min(at + later, last.get(at, len(kinds)))
        device = SimDevice("t4", budget=4096, fail=Failure(at + 1, "late", later=later))
        if told >= len(kinds):
            every_call(device)
            continue
        with pytest.raises(DeviceError, match=rf"an earlier {kinds[at]} of .* has failed"):
            every_call(device)
        assert device.calls == told + 1 and device.failed and device.used == device.pinned == 0
        assert every_call(device) == [2 * number for number in range(N)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_nothing_behind_a_late_failure_is_done(schedule: str) -> None:
    """What its stream is given afterwards and what waits for that does not begin, its events are never reached, and
    other streams go on; the first wait tells. From then on all streams do what they are given."""
    device = SimDevice("t4", schedule=schedule, seed=1)
    a, b, c = (device.stream(name) for name in "abc")
    pinned = device.pin(4 * N, "in").span()
    broken, behind, waiting, apart, after = (device.allocate(4 * N, f"memory {i}").span() for i in range(5))
    for number, memory in enumerate((broken, behind, waiting)):
        device.write(pinned, NUMBERS + 10 * number)
        device.copy(memory, pinned, a)
        device.finish()
    device.write(pinned, NUMBERS)
    before = device.record(a)
    device._faults = Faults(Failure(1, "late", of="copy", later=1000))

    device.copy(broken, pinned, a)
    device.copy(behind, pinned, a)
    never = [device.record(a)]
    device.wait(b, never[0])
    device.copy(waiting, pinned, b)
    never.append(device.record(b))
    device.copy(apart, pinned, c)
    fine = device.record(c)
    for _ in range(50):
        assert not any(map(device.reached, never))
    assert device.reached(before) and device.reached(fine)
    device.synchronize(fine)
    with pytest.raises(DeviceError, match="an earlier copy of in → memory 0 has failed"):
        device.synchronize(never[1])
    assert device.failed

    device.finish()
    device.copy(after, pinned, a)
    held = [contents(device, memory) for memory in (broken, behind, waiting, apart, after)]
    assert np.isnan(held[0]).all()
    assert [list(found) for found in held[1:]] == [list(NUMBERS + 10), list(NUMBERS + 20), list(NUMBERS), list(NUMBERS)]
    for event in never:
        assert not device.reached(event)
        for wait in (lambda event: device.wait(c, event), device.synchronize):
            with pytest.raises(DeviceError, match="an earlier copy of in → memory 0 has failed"):
                wait(event)
    device.close()


def contents(device: SimDevice, span: Span) -> list[float]:
    """What device memory holds."""
    device.finish()
    pinned, stream = device.pin(span.nbytes, "look"), device.stream("look")
    device.copy(pinned.span(), span, stream)
    device.synchronize(device.record(stream))
    return [float(number) for number in device.read(pinned.span(), np.float32, (span.nbytes // 4,))]


@pytest.mark.parametrize("way", ["finish", "free", "close"])
def test_the_ways_out_of_a_late_failure(way: str) -> None:
    """`finish` tells, and then what was not done is neither waited for nor has it a time; `free` and `close`, which
    wait too, give memory back in silence."""
    device = SimDevice("t4", schedule="late", fail=Failure(1, "late", of="copy", later=1000))
    stream, pinned, memory = device.stream("a"), device.pin(4 * N, "in"), device.allocate(4 * N, "slot")
    device.write(pinned.span(), NUMBERS)
    device.copy(memory.span(), pinned.span(), stream)
    event = device.record(stream)
    if way == "finish":
        with pytest.raises(DeviceError, match="an earlier copy"):
            device.finish()
        device.finish()
        with pytest.raises(ArgumentError, match="not known to be reached"):
            device.seconds(event, event)
    if way == "free":
        device.free(memory)
        device.free(pinned)
        assert device.used == device.pinned == 0 and not device.failed
    device.close()


def test_a_refused_call_changes_nothing() -> None:
    """Neither memory nor streams: a copy that was refused is not made, and conflicts with nothing."""
    device = SimDevice("t4", fail=Failure(1, of="copy"))
    a, b = device.stream("a"), device.stream("b")
    pinned, slot = device.pin(4 * N, "in").span(), device.allocate(4 * N, "slot").span()
    device.write(pinned, NUMBERS)
    with pytest.raises(DeviceError, match="copy of in → slot: failed as asked for, call 1"):
        device.copy(slot, pinned, a)
    device.copy(slot, pinned, b)
    device.finish()
    assert [record.stream for record in device.log if record.kind == "copy"] == ["b"]


def test_freeing_and_closing_do_not_fail() -> None:
    """They are not counted: a program must get out."""
    device = SimDevice("t4", fail=Failure(2))
    memory = device.allocate(1, "a")
    device.free(memory)
    device.close()
    assert device.calls == 1 and not device.failed


@pytest.mark.parametrize(
    "arguments", [{"at": 0}, {"at": 1, "kind": "sometimes"}, {"at": 1, "of": "free"}, {"at": 1, "later": 0}]
)
def test_odd_failures_are_refused(arguments: dict[str, object]) -> None:
    """With what is allowed."""
    with pytest.raises(ArgumentError):
        Failure(**arguments)  # type: ignore[arg-type]  # odd on purpose
    assert KINDS == ("error", "interrupt", "late", "lost")
