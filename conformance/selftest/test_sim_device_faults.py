"""Failures asked for happen where they were asked for, once, and leave the simulated device as it was."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from sim_programs import scale

from lowbit.errors import ArgumentError
from lowbit_cuda.port import DeviceError, DeviceMemoryError, Memory
from lowbit_cuda.sim import Failure, SimDevice
from lowbit_cuda.sim.faults import CALLS, KINDS

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


@pytest.mark.parametrize("later", [1, 3])
def test_late_failures_are_told_later(later: int) -> None:
    """The call itself returns; the one so many calls later says what had failed and changes nothing."""
    calls = counted()[0]
    for at in range(1, calls + 1):
        device = SimDevice("t4", budget=4096, fail=Failure(at, "late", later=later))
        if at + later > calls:
            every_call(device)
            continue
        with pytest.raises(DeviceError, match=r"an earlier .* has failed"):
            every_call(device)
        assert device.calls == at + later and device.failed and device.used == device.pinned == 0
        assert every_call(device) == [2 * number for number in range(N)]


@pytest.mark.parametrize("of", ["copy", "replay"])
@pytest.mark.parametrize("schedule", ["eager", "late"])
def test_what_failed_late_was_not_done(of: str, schedule: str) -> None:
    """A copy or a graph that fails late leaves its target undefined, as NaN."""
    device = SimDevice("t4", schedule=schedule, fail=Failure(1, "late", of=of, later=100))
    assert np.isnan(every_call(device)).all()


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
    assert KINDS == ("error", "interrupt", "late")
