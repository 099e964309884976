"""The simulated device keeps the port: memory, budget, what kernels are given, graphs, and what is refused."""

import gc
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from math import isnan
from typing import Any

import numpy as np
import pytest
from sim_programs import combine, scale

from lowbit.arrays import F32, I32, U8, Array
from lowbit.errors import ArgumentError
from lowbit_cuda.port import DeviceError, DeviceMemoryError, DevicePort, Event, Memory, Parameter, Span
from lowbit_gpusim.meanings import Meant
from lowbit_gpusim.sim.clock import Task
from lowbit_gpusim.sim.device import SimDevice
from lowbit_gpusim.sim.machines import MACHINES, Machine
from lowbit_gpusim.sim.memory import Ranges
from lowbit_gpusim.sim.schedule import SCHEDULES

N = 8
BYTES = 4 * N
NUMBERS = np.arange(N, dtype=np.float32)


def filled(device: SimDevice, what: str, data: F32 = NUMBERS) -> Memory:
    """Device memory with numbers in it."""
    pinned, memory, stream = device.pin(data.nbytes, "source"), device.allocate(data.nbytes, what), device.stream("s")
    device.write(pinned.span(), data)
    device.copy(memory.span(), pinned.span(), stream)
    device.finish()
    return memory


def contents(device: SimDevice, memory: Memory) -> F32:
    """What device memory holds, when everything is done."""
    device.finish()
    pinned, stream = device.pin(memory.nbytes, "look"), device.stream("look")
    device.copy(pinned.span(), memory.span(), stream)
    device.synchronize(device.record(stream))
    return device.read(pinned.span(), np.float32, (memory.nbytes // 4,))


# **Memory and budget.**


def test_the_budget_is_counted_to_the_byte() -> None:
    """Each allocation rounded up to 256; what goes beyond is refused, says so, and changes nothing."""
    device: DevicePort = SimDevice(budget=1024)
    first, second = device.allocate(1, "a"), device.allocate(257, "b")
    assert (device.used, device.peak, device.budget) == (256 + 512, 768, 1024)
    with pytest.raises(DeviceMemoryError) as caught:
        device.allocate(257, "a third")
    assert str(caught.value) == "device memory for a third: 257 bytes asked, 256 of 1024 left"
    assert (caught.value.what, caught.value.asked, caught.value.used, caught.value.budget) == (
        "a third",
        257,
        768,
        1024,
    )
    assert (device.used, device.peak) == (768, 768)
    device.free(first)
    assert (device.used, device.peak) == (512, 768)
    device.allocate(512, "fits")
    assert (device.used, device.peak) == (1024, 1024)
    device.free(second)
    device.free(second)
    assert (device.used, device.pinned) == (512, 0)
    device.allocate(1, "less")
    assert (device.used, device.peak) == (768, 1024)
    with pytest.raises(DeviceMemoryError):
        SimDevice(budget=255).allocate(1, "a byte, which counts as 256")


def test_pinned_memory_is_counted_apart() -> None:
    """Not in the budget, and with a limit of its own."""
    device = SimDevice(budget=0, host_memory=512)
    device.pin(257, "a")
    assert (device.used, device.pinned) == (0, 512)
    with pytest.raises(DeviceMemoryError):
        device.pin(1, "b")


@pytest.mark.parametrize("nbytes", [0, -1, 1.5, True])
def test_odd_sizes_are_refused(nbytes: int) -> None:
    """With what is allowed; nothing is counted."""
    device = SimDevice()
    for take in (device.allocate, device.pin):
        with pytest.raises(ArgumentError, match="nbytes"):
            take(nbytes, "odd")
    assert device.used == device.pinned == device.calls == 0


def test_the_budget_is_the_machines_by_default() -> None:
    """All of its memory; and an unknown machine or link is refused with those that there are."""
    assert SimDevice("rtx3060").budget == 12 << 30
    assert SimDevice("t4", link="pcie5").describe()["link"] == "pcie5"
    with pytest.raises(ArgumentError, match="a100, rtx3080-mobile, rtx3060 or t4"):
        SimDevice("gtx")
    odd: list[dict[str, Any]] = [
        {"link": "isa"},
        {"schedule": "never"},
        {"budget": -1},
        {"on_race": "ask"},
        {"log_limit": -1},
    ]
    for wrong in odd:
        with pytest.raises(ArgumentError):
            SimDevice(**wrong)


def test_unwritten_memory_reads_as_nan_and_is_noticed() -> None:
    """On the device and in pinned memory; counted, or an error that names the first such byte."""
    device = SimDevice()
    memory = device.allocate(BYTES, "slot")
    assert all(isnan(number) for number in contents(device, memory))
    assert device.unwritten == {"copy slot → look reads what nobody wrote of slot": 1}
    contents(device, memory)
    assert device.unwritten == {"copy slot → look reads what nobody wrote of slot": 2}
    assert isnan(device.read(device.pin(4, "p").span(), np.float32, (1,))[0])
    assert device.unwritten["read p reads what nobody wrote of p"] == 1
    strict = SimDevice(on_unwritten="raise")
    memory, pinned, stream = strict.allocate(BYTES, "slot"), strict.pin(BYTES, "expert"), strict.stream("s")
    strict.write(pinned.span(), NUMBERS[:5])
    strict.copy(memory.span(0, 20), pinned.span(0, 20), stream)
    with pytest.raises(DeviceError, match="reads byte 20 of expert, which nobody wrote"):
        strict.copy(memory.span(), pinned.span(), stream)


def test_memory_is_not_zeroed_by_being_given_again() -> None:
    """What was freed is gone: the next memory is unwritten too."""
    device = SimDevice(budget=256)
    device.free(filled(device, "first"))
    assert np.isnan(contents(device, device.allocate(BYTES, "second"))).all()


def test_ranges_know_what_is_missing() -> None:
    """Against a set of single bytes."""
    draws = np.random.default_rng(5)
    for _ in range(50):
        ranges, bytes_ = Ranges(), set[int]()
        for _ in range(8):
            begin = int(draws.integers(0, 30))
            end = begin + int(draws.integers(0, 6))
            ranges.add(begin, end)
            bytes_ |= set(range(begin, end))
            at = int(draws.integers(0, 30))
            to = at + int(draws.integers(0, 12))
            assert ranges.missing(at, to) == next((byte for byte in range(at, to) if byte not in bytes_), None)


def test_use_after_free_is_refused() -> None:
    """By every call that takes memory, graphs among them; freeing twice is harmless."""
    device = SimDevice()
    slot, other, pinned, stream = device.allocate(BYTES, "slot"), filled(device, "x"), device.pin(BYTES, "p"), "s"
    work = device.stream(stream)
    with device.capture(work) as graph:
        device.launch(scale, {"x": other.span(), "y": slot.span(), "n": N}, work)
    for memory in (slot, pinned):
        device.free(memory)
        device.free(memory)
    uses: list[Callable[[], object]] = [
        lambda: device.copy(slot.span(), other.span(), work),
        lambda: device.copy(other.span(), slot.span(), work),
        lambda: device.launch(scale, {"x": other.span(), "y": slot.span(), "n": N}, work),
        lambda: device.replay(graph(), work),
        lambda: device.write(pinned.span(), NUMBERS),
        lambda: device.read(pinned.span(), np.float32, (N,)),
        lambda: device.on_host("look", [pinned.span()], lambda data: None),
    ]
    for use in uses:
        with pytest.raises(DeviceError, match=r"use after free: (slot|p)"):
            use()


def test_what_belongs_to_another_device_is_refused() -> None:
    """Memory, a copy of a `Memory`, streams, events and graphs."""
    device, other = SimDevice(), SimDevice()
    mine, theirs = filled(device, "mine"), filled(other, "theirs")
    stream, foreign = device.stream("s"), other.stream("t")
    with other.capture(foreign) as graph:
        pass
    for memory in (theirs, replace(mine), Memory("made up", BYTES, "device")):
        with pytest.raises(DeviceError, match="memory of another device"):
            device.copy(mine.span(), memory.span(), stream)
        with pytest.raises(DeviceError, match="memory of another device"):
            device.free(memory)
    assert other.used == device.used == 256
    uses: list[Callable[[], object]] = [
        lambda: device.record(foreign),
        lambda: device.wait(stream, other.record(foreign)),
        lambda: device.synchronize(other.record(foreign)),
        lambda: device.replay(graph(), stream),
        lambda: device.copy(mine.span(), mine.span(), foreign),
    ]
    for use in uses:
        with pytest.raises(ArgumentError):
            use()


def test_leaks_are_listed() -> None:
    """What was not freed until now; after closing, what closing had to free. Closing twice is harmless."""
    with SimDevice() as device:
        device.pin(1, "pinned")
        device.free(device.allocate(1, "freed"))
        device.allocate(1, "forgotten")
        assert device.leaks() == ("pinned", "forgotten")
    device.close()
    assert device.leaks() == ("pinned", "forgotten")
    assert device.used == device.pinned == 0
    with pytest.raises(DeviceError, match="closed"):
        device.allocate(1, "late")


# **Copies, kernels and the host.**


def test_odd_copies_are_refused() -> None:
    """Unequal lengths, host to host, onto itself; nothing was given to the stream."""
    device = SimDevice()
    stream, memory, pinned = device.stream("s"), device.allocate(BYTES, "m"), device.pin(BYTES, "p")
    for target, source, name in (
        (memory.span(0, 8), pinned.span(0, 4), "target is 8 bytes; allowed: the source's 4"),
        (pinned.span(0, 4), pinned.span(4, 4), "both on the host"),
        (memory.span(0, 8), memory.span(7, 8), "overlapping in m"),
    ):
        with pytest.raises(ArgumentError, match=name):
            device.copy(target, source, stream)
    device.finish()
    assert [record.kind for record in device.log] == ["finish"]


def test_a_kernel_gets_what_it_declares() -> None:
    """Arrays of its kinds and extents in place, what it reads read only, numbers rounded to their kinds, and what it
    writes without reading not to be relied on."""
    seen: dict[str, object] = {}

    def meaning(x: F32, y: F32, n: int, by: float) -> None:
        seen.update(n=n, by=by, x=x.copy(), y=y.copy(), fixed=not x.flags.writeable, aligned=x.ctypes.data % 256)
        y[:] = by

    parameters = (*combine.parameters[:1], replace(combine.parameters[1], access="write"), *combine.parameters[2:])
    kernel = replace(combine, parameters=parameters, meaning=meaning)
    device = SimDevice()
    x, y = filled(device, "x"), filled(device, "y")
    device.launch(kernel, {"x": x.span(), "y": y.span(), "n": 5, "by": 0.1}, device.stream("s"))
    assert type(seen["n"]) is int and seen["by"] == float(np.float32(0.1))
    assert seen["fixed"] is True and seen["aligned"] == 0
    assert np.array_equal(np.asarray(seen["x"]), NUMBERS[:5]) and np.isnan(np.asarray(seen["y"])).all()
    assert np.array_equal(contents(device, y), [np.float32(0.1)] * 5 + [5, 6, 7])


def test_an_extent_that_is_a_most() -> None:
    """What is outside of what was really written stays; and reading up to it is no reading of unwritten bytes."""

    def meaning(cache: F32, position: I32) -> None:
        cache[position[0]] = 7

    kernel = Meant(
        "append",
        "",
        (
            Parameter("cache", "float32", "write", lambda n: N, exact=False),
            Parameter("position", "int32", "read", lambda n: 1),
        ),
        lambda n: (1, 1, 1),
        32,
        meaning=meaning,
    )
    look = replace(scale, parameters=(replace(scale.parameters[0], exact=False), *scale.parameters[1:]))
    device = SimDevice(on_unwritten="raise")
    stream, cache = device.stream("s"), filled(device, "cache")
    position, fresh = (
        filled(device, "position", np.array([2], np.int32).view(np.float32)),
        device.allocate(BYTES, "new"),
    )
    device.launch(kernel, {"cache": cache.span(), "position": position.span()}, stream)
    device.launch(look, {"x": fresh.span(), "y": filled(device, "y").span(), "n": N}, stream)
    assert contents(device, cache).tolist() == [0, 1, 7, 3, 4, 5, 6, 7]


def test_odd_launches_are_refused() -> None:
    """Arguments that alias, a grid, block or shared memory beyond the device; nothing was given to the stream."""
    device = SimDevice("t4")
    x, stream = filled(device, "x"), device.stream("s")
    before = device.calls
    with pytest.raises(ArgumentError, match="x and y of scale is overlapping in x"):
        device.launch(scale, {"x": x.span(0, 8), "y": x.span(4, 8), "n": 2}, stream)
    with pytest.raises(ArgumentError, match="x of scale is 7 bytes; allowed: at least 8"):
        device.launch(scale, {"x": x.span(0, 7), "y": x.span(8, 8), "n": 2}, stream)
    arguments: dict[str, Span | int | float] = {"x": x.span(0, 8), "y": x.span(8, 8), "n": 2}
    odd = (
        replace(scale, grid=lambda n: (0, 1, 1)),
        replace(scale, grid=lambda n: (1, 65536, 1)),
        replace(scale, block=1025),
        replace(scale, shared=lambda n: (64 << 10) + 1),
    )
    for kernel in odd:
        with pytest.raises(DeviceError, match=r"launch of scale: .* allowed"):
            device.launch(kernel, arguments, stream)
    assert device.calls == before
    device.launch(replace(scale, shared=lambda n: 64 << 10), arguments, stream)


def test_each_launch_is_looked_at_by_its_own_numbers() -> None:
    """What is remembered of a kernel's earlier numbers is not taken for others; numbers refused once are refused."""

    def even(numbers: Mapping[str, int | float]) -> None:
        if numbers["columns"] % 2:
            raise ArgumentError("columns", numbers["columns"], "an even number")

    x = Parameter("x", "uint8", "write", lambda numbers: int(numbers["rows"] * numbers["columns"]))
    numbers = Parameter("rows", "int32"), Parameter("columns", "int32")

    def meaning(x: Array, rows: int, columns: int) -> None:
        x.fill(1)

    kernel = Meant("k", "", (x, *numbers), lambda n: (1, 1, 1), 32, meaning=meaning, check=even)
    device = SimDevice()
    memory, stream = device.allocate(12, "m").span(), device.stream("s")
    for _ in range(2):
        device.launch(kernel, {"x": memory, "rows": 3, "columns": 4}, stream)
        with pytest.raises(ArgumentError, match="x of k is 12 bytes; allowed: at least 18"):
            device.launch(kernel, {"x": memory, "rows": 3, "columns": 6}, stream)
        with pytest.raises(ArgumentError, match="columns is 3"):
            device.launch(kernel, {"x": memory, "rows": 3, "columns": 3}, stream)


def test_odd_reads_and_writes_are_refused() -> None:
    """More bytes than the span has, device memory, arrays that are no plain bytes."""
    device = SimDevice()
    pinned, memory = device.pin(BYTES, "p").span(), device.allocate(BYTES, "m").span()
    uses: list[Callable[[], object]] = [
        lambda: device.write(pinned, np.zeros(N + 1, np.float32)),
        lambda: device.write(pinned, np.zeros((4, 4), np.uint8)[:, ::2]),
        lambda: device.write(pinned, np.array([None])),
        lambda: device.write(memory, NUMBERS),
        lambda: device.read(memory, np.float32, (1,)),
        lambda: device.read(pinned, np.float32, (1 << 60,)),
        lambda: device.read(pinned, np.float32, (-1,)),
        lambda: device.on_host("look", [memory], lambda data: None),
    ]
    for use in uses:
        with pytest.raises(ArgumentError):
            use()


def test_too_many_bytes_for_a_span() -> None:
    """By how many, of what."""
    device = SimDevice()
    pinned = device.pin(BYTES, "p").span()
    with pytest.raises(ArgumentError, match="data is 33 bytes; allowed: at most the span's 32"):
        device.write(pinned, np.zeros(33, np.uint8))
    with pytest.raises(ArgumentError, match="dtype and shape is 33 bytes; allowed: at most the span's 32"):
        device.read(pinned, np.uint8, (33,))


def test_the_host_reads_in_place_and_only_reads() -> None:
    """`on_host` hands out the bytes themselves, read only, and returns what the function returns; `read` a copy."""
    device = SimDevice()
    pinned = device.pin(BYTES, "p").span()
    device.write(pinned.part(4), NUMBERS[:3].reshape(3, 1))
    copied = device.read(pinned.part(4), np.float32, (3, 1))

    def look(data: U8) -> tuple[int, bool, list[float]]:
        return data.size, data.flags.writeable, data.view(np.float32)[1:4].tolist()

    device.write(pinned.part(4, 4), np.array([9], np.float32))
    assert device.on_host("look", [pinned], look) == (BYTES, False, [9, 1, 2])
    assert copied.tolist() == [[0], [1], [2]]
    device.write(pinned, NUMBERS)  # its bytes are writeable still


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_error_of_a_meaning_reaches_the_program(schedule: str) -> None:
    """At the launch or when it is waited for; the device goes on, and closing gives everything back."""

    def fail(x: F32, y: F32, n: int) -> None:
        raise ArithmeticError("wrong")

    device = SimDevice(schedule=schedule)
    x, y, stream = filled(device, "x"), device.allocate(BYTES, "y"), device.stream("s")
    with pytest.raises(ArithmeticError):
        device.launch(replace(scale, meaning=fail), {"x": x.span(), "y": y.span(), "n": N}, stream)
        device.finish()
    device.launch(scale, {"x": x.span(), "y": y.span(), "n": N}, stream)
    assert np.array_equal(contents(device, y), 2 * NUMBERS)
    device.close()
    assert device.used == 0


def test_random_order_is_of_the_seed() -> None:
    """What streams leave open is done in an order that depends on the seed and on nothing else."""

    def order(seed: int) -> list[str]:
        done, device = list[str](), SimDevice(schedule="random", seed=seed)
        for name in "abcdefgh":
            kernel = Meant(name, "", (), lambda n: (1, 1, 1), 32, meaning=partial(done.append, name))
            device.launch(kernel, {}, device.stream(name))
        device.finish()
        return done

    orders = [order(seed) for seed in range(6)]
    assert orders == [order(seed) for seed in range(6)]
    assert len({tuple(done) for done in orders}) > 1 and all(sorted(done) == list("abcdefgh") for done in orders)


# **Graphs.**


def test_a_graph_is_kept_and_replayed() -> None:
    """Nothing runs during a capture; each replay runs all, in any stream, with what memory then holds."""
    device = SimDevice()
    x, y, stream, other = filled(device, "x"), filled(device, "y"), device.stream("s"), device.stream("t")
    with device.capture(stream) as graph:
        device.launch(combine, {"x": x.span(), "y": y.span(), "n": N, "by": 1}, stream)
        with pytest.raises(ArgumentError, match="still being captured"):
            graph()
    assert np.array_equal(contents(device, y), NUMBERS)
    device.replay(graph(), stream)
    device.replay(graph(), stream)
    device.wait(other, device.record(stream))
    device.replay(graph(), other)
    assert np.array_equal(contents(device, y), 4 * NUMBERS)


def test_a_capture_keeps_copies_and_launches_only() -> None:
    """Everything else with its stream is refused meanwhile, and what it uses is not freed; other streams go on. A block
    that fails makes no graph and leaves the stream usable."""
    device = SimDevice()
    x, y, stream, other = filled(device, "x"), filled(device, "y"), device.stream("s"), device.stream("t")
    event = device.record(stream)
    with device.capture(other) as empty:
        pass
    with pytest.raises(KeyError), device.capture(stream) as graph:
        device.copy(y.span(), x.span(), stream)
        uses: list[Callable[[], object]] = [
            lambda: device.record(stream),
            lambda: device.wait(stream, event),
            lambda: device.replay(empty(), stream),
            lambda: device.capture(stream).__enter__(),
            lambda: device.finish(),
            lambda: device.free(x),
        ]
        for use in uses:
            with pytest.raises(ArgumentError, match=r"being captured|capturing a graph"):
                use()
        device.wait(other, event)
        device.synchronize(event)
        raise KeyError
    with pytest.raises(ArgumentError):
        graph()
    assert np.array_equal(contents(device, y), NUMBERS)
    device.copy(y.span(), x.span(), stream)
    device.free(x)


# **Costs here.**


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_long_run_needs_little_memory(schedule: str) -> None:
    """Operations leave nothing but the log, which has a limit, if the host follows; an event that a program
    keeps does not keep what came after it."""
    device = SimDevice(replace(MACHINES["t4"], kernel_latency=1e-3), schedule=schedule, log_limit=10)
    x, y, stream = filled(device, "x"), filled(device, "y"), device.stream("s")
    arguments: dict[str, Span | int | float] = {"x": x.span(), "y": y.span(), "n": N}

    def turns(count: int) -> list[Event]:
        events: list[Event] = []
        for turn in range(count):
            device.launch(scale, arguments, stream)
            events.append(device.record(stream))
            if turn > 3:
                device.synchronize(events[turn - 3])  # the device never runs out of work
        return events[:2]

    def living() -> int:
        gc.collect()
        return sum(type(thing) is Task for thing in gc.get_objects())

    kept = turns(20)
    before = living()
    turns(50)
    assert living() <= before + 10
    device.finish()
    assert len(device.log) == 10 and len(kept) == 2


def test_machines_can_be_made() -> None:
    """A preset is a place to begin."""
    machine: Machine = replace(MACHINES["t4"], name="mine", memory=1000)
    assert SimDevice(machine).describe()["device"] == "simulated mine"
    assert SimDevice(machine).budget == 1000
