"""The contract of the port as programs: each asks a device for something small and looks whether it got it.

They know nothing of the device but `DevicePort`. The tests give them to the simulation under each of its schedules, to
the device for GPUs over a stand-in for NVIDIA's driver, and, where there is a GPU, to that.
"""

import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from port_kernels import COUNT, KERNELS, add, fetched, fill, ramp, reaching, refused, sent, turn, until_reached

from lowbit.arrays import U8
from lowbit.errors import ArgumentError
from lowbit_cuda.port import (
    PIECE,
    SHARED,
    DeviceError,
    DeviceMemoryError,
    DevicePort,
    Memory,
)

__all__ = ["BUDGET", "COUNT", "KERNELS", "PROGRAMS", "add", "fetched", "fill", "ramp", "sent", "turn", "until_reached"]

BUDGET = 4 * PIECE

Program = Callable[[DevicePort], None]
PROGRAMS: dict[str, Program] = {}


def program(function: Program) -> Program:
    PROGRAMS[function.__name__] = function
    return function


# **Memory.**


@program
def what_is_copied_comes_back(device: DevicePort) -> None:
    """Host to device, device to device, device to host; parts of it, at odd places, and nothing beside them."""
    stream = device.stream("copies")
    first = sent(device, stream, np.arange(1000, dtype=np.uint8))
    second = sent(device, stream, np.zeros(1000, np.uint8))
    device.copy(second.span(3, 501), first.span(7, 501), stream)
    wanted = np.zeros(1000, np.uint8)
    wanted[3:504] = np.arange(1000, dtype=np.uint8)[7:508]
    assert np.array_equal(fetched(device, stream, second.span(), np.uint8), wanted)
    assert np.array_equal(fetched(device, stream, second.span(500, 7), np.uint8), wanted[500:507])


@program
def the_budget_is_counted_as_the_device_takes_it(device: DevicePort) -> None:
    """A small allocation counts as a multiple of 256, one of a MiB or more as pieces of two MiB; one byte too many is
    refused and changes nothing."""
    assert (device.budget, device.used, device.peak, device.pinned) == (BUDGET, 0, 0, 0)
    small = device.allocate(1, "small")
    large = device.allocate(PIECE + 1, "large")
    assert (small.nbytes, device.used) == (1, 256 + 2 * PIECE)
    medium = device.allocate(SHARED, "just large")
    assert device.used == 256 + 3 * PIECE
    refused(DeviceMemoryError, device.allocate, SHARED, "a piece too much")
    halves = [device.allocate(SHARED - 256, f"half a piece {number}") for number in range(2)]
    pinned = device.pin(257, "beside it")
    assert (device.used, device.peak, device.pinned) == (BUDGET - 256, BUDGET - 256, 512)
    with pytest.raises(DeviceMemoryError) as caught:
        device.allocate(257, "too much")
    error = caught.value
    assert (error.what, error.asked, error.used, error.budget) == ("too much", 257, BUDGET - 256, BUDGET)
    assert (device.used, device.peak) == (BUDGET - 256, BUDGET - 256)
    last = device.allocate(256, "just enough")
    assert device.used == device.peak == BUDGET
    for memory in (small, large, medium, *halves, last, last, pinned, pinned):
        device.free(memory)
    assert (device.used, device.peak, device.pinned) == (0, BUDGET, 0)
    for nbytes in (0, -1, 1.5, None, True):
        refused(ArgumentError, device.allocate, nbytes, "nothing")
        refused(ArgumentError, device.pin, nbytes, "nothing")


@program
def memory_that_is_freed_is_waited_for_and_then_refused(device: DevicePort) -> None:
    """What was given before `free` is done, in a graph too; what is given after it is refused, as is such a graph."""
    stream = device.stream("copies")
    kept, host = device.allocate(4 * COUNT, "kept"), device.pin(4 * COUNT, "host")
    device.write(host.span(), ramp())
    device.copy(kept.span(), host.span(), stream)
    device.free(host)
    assert np.array_equal(fetched(device, stream, kept.span()), ramp())
    refused(DeviceError, device.copy, kept.span(), host.span(), stream)
    refused(DeviceError, device.write, host.span(), ramp())
    refused(DeviceError, device.read, host.span(), np.float32, (1,))
    host = device.pin(4 * COUNT, "host")
    device.write(host.span(), ramp(7))
    with device.capture(stream) as copying:
        device.copy(kept.span(), host.span(), stream)
    device.replay(copying(), stream)
    device.free(host)
    assert np.array_equal(fetched(device, stream, kept.span()), ramp(7))
    refused(DeviceError, device.replay, copying(), stream)
    with device.capture(stream) as graph:
        device.launch(fill, {"y": kept.span(), "n": COUNT, "first": 0.0, "step": 1}, stream)
        refused(ArgumentError, device.free, kept)
    device.free(kept)
    refused(DeviceError, device.replay, graph(), stream)
    refused(DeviceError, device.launch, fill, {"y": kept.span(), "n": COUNT, "first": 0.0, "step": 1}, stream)
    assert (device.used, device.pinned) == (0, 0)


# **Order.**


@program
def streams_wait_for_events(device: DevicePort) -> None:
    """A copy on one stream, a kernel that needs it on another, and the next copy into the same place after that."""
    copies, compute = device.stream("copies"), device.stream("compute")
    hosts = [device.pin(4 * COUNT, f"host {i}") for i in range(3)]
    for i, host in enumerate(hosts):
        device.write(host.span(), ramp(1000.0 * i))
    staging, total = device.allocate(4 * COUNT, "staging"), device.allocate(4 * COUNT, "total")
    device.launch(fill, {"y": total.span(), "n": COUNT, "first": 0.5, "step": 0}, compute)
    for host in hosts:
        device.wait(copies, device.record(compute))
        device.copy(staging.span(), host.span(), copies)
        device.wait(compute, device.record(copies))
        device.launch(add, {"x": staging.span(), "y": total.span(), "n": COUNT, "by": 2.0}, compute)
    wanted = np.full(COUNT, 0.5, np.float32)
    for i in range(3):
        wanted = wanted + np.float32(2) * ramp(1000.0 * i)
    assert np.array_equal(fetched(device, compute, total.span()), wanted)


@program
def the_host_may_write_again_when_it_has_waited(device: DevicePort) -> None:
    """One pinned buffer, used three times."""
    stream = device.stream("copies")
    host, places = device.pin(4 * COUNT, "host"), [device.allocate(4 * COUNT, f"place {i}") for i in range(3)]
    for i, place in enumerate(places):
        device.write(host.span(), ramp(10.0 * i))
        device.copy(place.span(), host.span(), stream)
        event = device.record(stream)
        if i % 2:
            device.synchronize(event)
        else:
            until_reached(device, event)
    for i, place in enumerate(places):
        assert np.array_equal(fetched(device, stream, place.span()), ramp(10.0 * i))


@program
def an_event_marks_one_place(device: DevicePort) -> None:
    """Recording again makes another event; both have a time, the later not before the earlier."""
    stream, other = device.stream("first"), device.stream("second")
    memory = device.allocate(4 * COUNT, "memory")
    numbers: Mapping[str, Any] = {"y": memory.span(), "n": COUNT, "first": 0.0, "step": 1}
    first = device.record(stream)
    device.launch(fill, numbers, stream)
    second = device.record(stream)
    device.wait(other, second)
    third = device.record(other)
    device.synchronize(third)
    for event in (first, second, third):
        until_reached(device, event)
        device.synchronize(event)
    assert 0 <= device.seconds(first, second) < 10
    assert device.seconds(second, second) == 0
    before = device.now()
    device.finish()
    assert device.now() >= before


# **Kernels.**


@program
def numbers_arrive_as_their_kinds(device: DevicePort) -> None:
    """An int64, a float32 and a negative int32 side by side; spans that begin within an allocation."""
    stream = device.stream("compute")
    memory = sent(device, stream, np.full(COUNT + 20, -7, np.float32))
    span = memory.span(40, 4 * COUNT)
    device.launch(fill, {"y": span, "n": COUNT, "first": 0.1, "step": -3}, stream)
    wanted = np.full(COUNT + 20, -7, np.float32)
    wanted[10 : 10 + COUNT] = np.float32(0.1) + (-3 * np.arange(COUNT)).astype(np.float32)
    assert np.array_equal(fetched(device, stream, memory.span()), wanted)


@program
def blocks_have_the_shared_memory_they_ask_for(device: DevicePort) -> None:
    """A little, and more than a block has without asking."""
    stream = device.stream("compute")
    for n in (COUNT, 15000, COUNT):
        values = np.arange(n, dtype=np.int32)
        x, y = sent(device, stream, values), device.allocate(4 * n, "turned")
        device.launch(turn, {"x": x.span(), "y": y.span(), "n": n}, stream)
        assert np.array_equal(fetched(device, stream, y.span(), np.int32), values[::-1])
        device.free(x)
        device.free(y)


@program
def a_kernel_reaches_pinned_memory(device: DevicePort) -> None:
    """Where its description allows it: what the host wrote before, at an odd place; and the host finds the answer."""
    stream = device.stream("compute")
    values, answers = device.pin(4 * COUNT + 40, "values"), device.pin(4 * COUNT, "answers")
    x, y = values.span(36, 4 * COUNT), answers.span()
    there = sent(device, stream, ramp())
    device.write(y, ramp())
    with device.capture(stream) as graph:
        device.launch(reaching, {"x": x, "y": y, "n": COUNT, "by": 2.0}, stream)
        device.launch(reaching, {"x": x, "y": there.span(), "n": COUNT, "by": 1.0}, stream)
    for times in (1, 2, 3):
        device.write(x, ramp(10.0 * times))
        device.replay(graph(), stream)
        device.synchronize(device.record(stream))
        wanted = ramp() * (1 + 2 * times) + 10 * times * (times + 1)
        assert np.array_equal(device.read(y, np.float32, (COUNT,)), wanted)
    device.launch(reaching, {"x": y, "y": x, "n": COUNT, "by": 0.0}, stream)
    device.free(values)
    wanted = ramp() * 4 + 60
    assert np.array_equal(fetched(device, stream, there.span()), wanted)


# **Graphs.**


@program
def a_graph_runs_when_it_is_replayed(device: DevicePort) -> None:
    """Not when it is captured; as often as asked, on what memory holds then."""
    stream = device.stream("compute")
    x, y = sent(device, stream, ramp()), sent(device, stream, np.zeros(COUNT, np.float32))
    host = device.pin(4 * COUNT, "host")
    device.write(host.span(), np.zeros(COUNT, np.float32))
    with device.capture(stream) as graph:
        refused(ArgumentError, graph)
        device.launch(add, {"x": x.span(), "y": y.span(), "n": COUNT, "by": 1.0}, stream)
        device.copy(host.span(), y.span(), stream)
        device.launch(add, {"x": x.span(), "y": y.span(), "n": COUNT, "by": 1.0}, stream)
    device.finish()
    assert not device.read(host.span(), np.float32, (COUNT,)).any()
    for times in (1, 2):
        device.replay(graph(), stream)
        device.synchronize(device.record(stream))
        assert np.array_equal(device.read(host.span(), np.float32, (COUNT,)), ramp() * (2 * times - 1))
    assert np.array_equal(fetched(device, stream, y.span()), ramp() * 4)
    device.replay(graph(), other := device.stream("another"))
    assert np.array_equal(fetched(device, other, y.span()), ramp() * 6)


@program
def a_stream_that_makes_a_graph_does_nothing_else(device: DevicePort) -> None:
    """And what goes wrong in the block leaves the stream as it was; other streams go on meanwhile."""
    stream, other = device.stream("captured"), device.stream("other")
    y = device.allocate(4 * COUNT, "y")
    arguments: Mapping[str, Any] = {"y": y.span(), "n": COUNT, "first": 0.0, "step": 1}
    event = device.record(other)
    with device.capture(stream) as graph:
        device.launch(fill, arguments, stream)
    with device.capture(stream):
        refused(ArgumentError, device.record, stream)
        refused(ArgumentError, device.wait, stream, event)
        refused(ArgumentError, device.finish)
        refused(ArgumentError, device.replay, graph(), stream)
        refused(ArgumentError, device.capture(stream).__enter__)
        until_reached(device, device.record(other))
    with pytest.raises(ZeroDivisionError), device.capture(stream) as broken:
        device.launch(fill, arguments, stream)
        raise ZeroDivisionError
    refused(ArgumentError, broken)
    device.launch(fill, arguments, stream)
    assert np.array_equal(fetched(device, stream, y.span()), ramp())


# **The host.**


@program
def the_host_works_on_pinned_memory_in_place(device: DevicePort) -> None:
    """It is shown each span's bytes, read only; its answer and its errors come back."""
    host, memory = device.pin(4 * COUNT, "host"), device.allocate(4, "memory")
    device.write(host.span(), ramp())

    def work(first: U8, second: U8) -> float:
        assert first.dtype == second.dtype == np.uint8
        refused(ValueError, first.__setitem__, 0, 1)
        return float(first.view(np.float32).sum() + second.view(np.float32)[0])

    assert device.on_host("adding", (host.span(), host.span(8, 4)), work) == ramp().sum() + 2
    refused(ArgumentError, device.on_host, "adding", (memory.span(),), lambda x: None)
    with pytest.raises(ZeroDivisionError):
        device.on_host("failing", (), lambda: 1 // 0)
    device.write(host.span(4), np.array([[9], [8]], np.float32))
    assert device.read(host.span(), np.float32, (2, 2)).tolist() == [[0, 9], [8, 3]]


@program
def any_thread_may_use_it(device: DevicePort) -> None:
    """One at a time: what one thread was given, the next goes on with."""
    stream, found = device.stream("compute"), list[object]()
    memory = sent(device, stream, ramp())

    def work() -> None:
        try:
            device.launch(fill, {"y": memory.span(), "n": COUNT, "first": 5.0, "step": 1}, stream)
            found.append(fetched(device, stream, memory.span()))
            device.allocate(256, "by another thread")
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(found) == 1, found
    assert np.array_equal(fetched(device, stream, memory.span()), ramp(5))
    assert device.used == 1280 + 256


# **What is refused.**


@program
def what_cannot_be_meant_is_refused(device: DevicePort) -> None:
    """With an error that says what is allowed, before anything runs."""
    stream, x, y = device.stream("compute"), device.allocate(64, "x"), device.allocate(64, "y")
    host = device.pin(64, "host")
    numbers: Mapping[str, Any] = {"x": x.span(), "y": y.span(), "n": 16, "by": 1.0}
    wrong: tuple[Mapping[str, Any], ...] = (
        {"x": x.span(0, 60)},
        {"x": host.span()},
        {"x": 3},
        {"n": x.span()},
        {"n": 17},
        {"extra": 1},
        {"x": x.span(2, 62), "n": 15},
    )
    for change in wrong:
        refused(ArgumentError, device.launch, add, {**numbers, **change}, stream)
    refused(ArgumentError, device.launch, add, {"x": x.span()}, stream)
    for change in ({"n": 15.5}, {"n": 2**40}, {"step": -(2**31) - 1}, {"step": float("nan")}, {"step": True}):
        refused(ArgumentError, device.launch, fill, {"y": y.span(), "n": 1, "first": 0.0, "step": 1, **change}, stream)
    refused(DeviceError, device.launch, add, {**numbers, "n": 0}, stream)
    for target, source in (
        (x.span(0, 8), y.span(0, 9)),
        (host.span(0, 8), host.span(8, 8)),
        (x.span(0, 8), x.span(4, 8)),
    ):
        refused(ArgumentError, device.copy, target, source, stream)
    for call, arguments in (
        (device.copy, (x.span(), y.span(), "compute")),
        (device.launch, (add, numbers, None)),
        (device.record, (None,)),
        (device.wait, (stream, stream)),
        (device.replay, (stream, stream)),
        (device.synchronize, (stream,)),
        (device.reached, (None,)),
        (device.write, (x.span(), np.zeros(1))),
        (device.write, (host.span(), np.zeros(9))),
        (device.write, (host.span(), np.zeros((8, 8), np.uint8)[:, :1])),
        (device.write, (host.span(), [1, 2])),
        (device.read, (x.span(), np.uint8, (1,))),
        (device.read, (host.span(), np.float64, (3, 3))),
    ):
        refused(ArgumentError, call, *arguments)
    refused(ArgumentError, x.span, 65)
    refused(ArgumentError, x.span().part, 60, 5)
    refused(DeviceError, device.copy, x.span(), Memory("nobody's", 64, "device").span(), stream)
    device.finish()


@program
def after_its_end_it_does_nothing(device: DevicePort) -> None:
    """Closing twice and freeing late are harmless; everything else is an error that says so."""
    stream = device.stream("compute")
    memory, event = sent(device, stream, ramp()), device.record(stream)
    device.close()
    device.close()
    device.free(memory)
    for call, arguments in (
        (device.allocate, (1, "more")),
        (device.pin, (1, "more")),
        (device.stream, ("more",)),
        (device.record, (stream,)),
        (device.synchronize, (event,)),
        (device.finish, ()),
        (device.reached, (event,)),
        (device.copy, (memory.span(0, 8), memory.span(8, 8), stream)),
    ):
        refused(DeviceError, call, *arguments)
    assert device.used == 0
