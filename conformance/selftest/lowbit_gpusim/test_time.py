"""Virtual time, against cases small enough for a pencil, and against what must hold of any."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from sim_programs import DRAWN, Step, complete, run, scale, steps

from lowbit.errors import ArgumentError
from lowbit_cuda.port import Parameter, Stream
from lowbit_gpusim.meanings import Meant
from lowbit_gpusim.sim.device import SimDevice
from lowbit_gpusim.sim.log import Record, timeline
from lowbit_gpusim.sim.machines import LINKS, MACHINES, Link, Machine

MEGA = 10**6
ROUND = Machine(
    name="round",
    link=Link("round", bandwidth=1e9, latency=1e-3),
    memory=1 << 30,
    memory_bandwidth=10e9,
    float32_rate=1e12,
    shared=1 << 15,
    host_bandwidth=2e9,
    kernel_latency=2e-3,
    call=0.0,
)
"""A megabyte over the link takes 1 + 1 ms; a kernel on a megabyte takes 2 + 0.1 ms; calls take nothing."""


def _nothing(x: object) -> None:
    """A kernel's meaning, where only its time matters."""


def _nothing_with(x: object, y: object) -> None:
    """The same for two spans."""


def kernel(name: str, access: str, flops: float = 0.0) -> Meant:
    """A kernel on ten million bytes."""
    assert access in ("read", "write", "update")
    parameter = Parameter("x", "uint8", access, lambda numbers: 10 * MEGA)  # type: ignore[arg-type]  # checked above
    return Meant(name, "", (parameter,), lambda n: (1, 1, 1), 32, meaning=_nothing, flops=lambda numbers: flops)


class Desk:
    """A device of round numbers, with memory and streams."""

    def __init__(self, machine: Machine = ROUND) -> None:
        self.device = SimDevice(machine, backed=False)
        self.a, self.b, self.c = (self.device.stream(name) for name in "abc")
        self.hosts = [self.device.pin(10 * MEGA, f"host {i}").span() for i in range(3)]
        self.memories = [self.device.allocate(10 * MEGA, f"memory {i}").span() for i in range(3)]

    def load(self, number: int, stream: Stream, megabytes: int = 10) -> None:
        size = megabytes * MEGA
        self.device.copy(self.memories[number].part(0, size), self.hosts[number].part(0, size), stream)

    def store(self, number: int, stream: Stream) -> None:
        self.device.copy(self.hosts[number], self.memories[number], stream)

    def launch(self, number: int, stream: Stream, access: str = "read", flops: float = 0.0) -> None:
        self.device.launch(kernel(f"k{number}", access, flops), {"x": self.memories[number]}, stream)

    def times(self) -> list[tuple[str, float, float]]:
        """What the engines did: its name, and begin and end in milliseconds."""
        self.device.finish()
        return [
            (f"{r.kind} {r.what}", round(1e3 * r.begin, 6), round(1e3 * r.end, 6)) for r in self.device.log if r.engine
        ]


def test_the_presets_are_the_published_figures() -> None:
    """Line rates less the line code, and the paper's links: PCIe 3 for T4 and 3060, 4 for the others."""
    rates = {name: round(link.bandwidth / 1e9, 3) for name, link in LINKS.items()}
    assert rates == {"pcie3": 15.754, "pcie4": 31.508, "pcie5": 63.015, "nvlink-c2c": 450.0}
    links = {name: machine.link.name for name, machine in MACHINES.items()}
    assert links == {"a100": "pcie4", "rtx3080-mobile": "pcie4", "rtx3060": "pcie3", "t4": "pcie3"}


def test_one_copy() -> None:
    """Latency and bytes by bandwidth."""
    desk = Desk()
    desk.load(0, desk.a)
    assert desk.times() == [("copy host 0 → memory 0", 0, 11)]
    assert desk.device.now() == pytest.approx(11e-3)


@pytest.mark.parametrize(("access", "flops", "end"), [("read", 0, 3), ("update", 0, 4), ("read", 5e9, 7)])
def test_one_kernel(access: str, flops: float, end: float) -> None:
    """Latency and the longer of bytes and operations; what is updated counts twice."""
    desk = Desk()
    desk.launch(0, desk.a, access, flops)
    assert desk.times() == [("launch k0", 0, end)]


def test_a_kernel_that_reaches_the_host() -> None:
    """It pays for the link as well as for the device's memory, and waits for no copy that is on its way."""
    desk = Desk()
    here = Parameter("y", "uint8", "update", lambda numbers: MEGA, host=True)
    reaching = replace(kernel("k", "read"), parameters=(*kernel("k", "read").parameters, here), meaning=_nothing_with)
    desk.store(0, desk.a)
    desk.device.launch(reaching, {"x": desk.memories[1], "y": desk.hosts[1]}, desk.b)
    assert desk.times() == [("copy memory 0 → host 0", 0, 11), ("launch k", 0, 6)]


def test_a_copy_on_the_device_moves_bytes_twice() -> None:
    """It takes the engine of kernels, for reading and for writing."""
    desk = Desk()
    desk.device.copy(desk.memories[0], desk.memories[1], desk.a)
    desk.launch(2, desk.b)
    assert desk.times() == [("copy memory 1 → memory 0", 0, 4), ("launch k2", 4, 7)]


def test_a_stream_does_one_thing_after_another() -> None:
    """Also on different engines."""
    desk = Desk()
    desk.load(0, desk.a)
    desk.launch(0, desk.a)
    desk.store(0, desk.a)
    assert [(begin, end) for _, begin, end in desk.times()] == [(0, 11), (11, 14), (14, 25)]


def test_streams_overlap_on_different_engines() -> None:
    """Copies each way and kernels at once; copies one way, and kernels, one after another."""
    desk = Desk()
    desk.load(0, desk.a)
    desk.store(1, desk.b)
    desk.launch(2, desk.c)
    desk.load(2, desk.c)
    desk.launch(1, desk.b)
    assert [(begin, end) for _, begin, end in desk.times()] == [(0, 11), (0, 11), (0, 3), (11, 22), (11, 14)]


def test_kernels_of_different_streams_do_not_overlap() -> None:
    """Stated by the model."""
    desk = Desk()
    desk.launch(0, desk.a)
    desk.launch(1, desk.b)
    assert [(begin, end) for _, begin, end in desk.times()] == [(0, 3), (3, 6)]


def test_an_event_holds_back() -> None:
    """A stream that waits goes on when the event is reached, and what came before its wait is not held back."""
    desk = Desk()
    desk.load(0, desk.a)
    event = desk.device.record(desk.a)
    desk.load(1, desk.a)
    desk.launch(2, desk.b)
    desk.device.wait(desk.b, event)
    desk.launch(0, desk.b)
    assert [(begin, end) for _, begin, end in desk.times()] == [(0, 11), (11, 22), (0, 3), (11, 14)]


def test_an_engine_takes_what_is_ready() -> None:
    """A copy that waits for a kernel does not hold up one of another stream that was given later; it is held up."""
    desk = Desk()
    desk.launch(0, desk.a)
    desk.load(0, desk.a)
    desk.load(1, desk.b)
    assert [(begin, end) for _, begin, end in desk.times()] == [(0, 3), (11, 22), (0, 11)]
    assert [what for _, _, what in timeline(desk.device.log)["to device"]] == [
        "copy host 1 → memory 1",
        "copy host 0 → memory 0",
    ]


def test_of_two_that_are_ready_the_first_given_goes_first() -> None:
    """Two streams wait for one event."""
    desk = Desk()
    desk.load(0, desk.a)
    event = desk.device.record(desk.a)
    for number, stream in ((1, desk.b), (2, desk.c)):
        desk.device.wait(stream, event)
        desk.launch(number, stream)
    assert [(begin, end) for _, begin, end in desk.times()] == [(0, 11), (11, 14), (14, 17)]


def test_two_events_hold_back_until_the_later() -> None:
    """Although it begins first."""
    desk = Desk()
    desk.launch(0, desk.a)
    desk.load(0, desk.a)
    desk.launch(1, desk.b)
    for stream in (desk.a, desk.b):
        desk.device.wait(desk.c, desk.device.record(stream))
    desk.launch(0, desk.c)
    assert [(begin, end) for _, begin, end in desk.times()] == [(0, 3), (3, 14), (3, 6), (14, 17)]


def test_what_the_host_gives_later_is_later() -> None:
    """A call costs the host; a wait moves it to the end of what it waits for; nothing begins before it is given."""
    desk = Desk(Machine(**{**vars(ROUND), "call": 0.5e-3}))
    assert desk.device.now() == pytest.approx(9 * 0.5e-3)
    desk.load(0, desk.a)
    event = desk.device.record(desk.a)
    assert desk.device.now() == pytest.approx(5.5e-3)
    desk.device.synchronize(event)
    assert desk.device.now() == pytest.approx(16e-3)
    desk.launch(0, desk.b)
    assert desk.times() == [("copy host 0 → memory 0", 5, 16), ("launch k0", 16.5, 19.5)]
    before = desk.device.now()
    desk.device.write(desk.hosts[0], np.zeros(2, np.uint8))
    assert desk.device.now() - before == pytest.approx(1e-9)


def test_what_has_begun_is_settled() -> None:
    """When the host has waited, the log has everything that has begun by then, and nothing that has not."""
    desk = Desk()
    desk.load(0, desk.a)
    event = desk.device.record(desk.a)
    desk.load(1, desk.a)
    desk.load(2, desk.a)
    desk.device.synchronize(event)
    assert [r.what for r in desk.device.log if r.engine] == ["host 0 → memory 0", "host 1 → memory 1"]


def test_the_hosts_own_work() -> None:
    """Reading and writing pinned memory take bytes by bandwidth and no call; the device goes on meanwhile."""
    desk = Desk()
    desk.load(0, desk.a)
    desk.device.write(desk.hosts[1], np.zeros(2 * MEGA, np.uint8))
    desk.device.read(desk.hosts[1], np.uint8, (MEGA,))
    assert desk.device.on_host("sum", [desk.hosts[1], desk.hosts[2].part(0, MEGA)], lambda a, b: a.size + b.size) == (
        11 * MEGA
    )
    assert desk.device.now() == pytest.approx((1 + 0.5 + 5.5) * 1e-3)
    assert desk.times() == [("copy host 0 → memory 0", 0, 11)]
    assert desk.device.now() == pytest.approx(11e-3)
    desk.device.finish()  # which takes no time, and is in no row
    rows = timeline(desk.device.log)
    assert [what for _, _, what in rows["host"]] == ["write host 1", "read host 1", "on_host sum", "finish all streams"]
    assert len(rows["to device"]) == 1
    assert rows["to host"] == rows["compute"] == []


def test_a_graph_is_one_call() -> None:
    """Its operations take the same time as if they had been given, and the host one call."""
    desk = Desk(Machine(**{**vars(ROUND), "call": 0.5e-3}))
    with desk.device.capture(desk.a) as graph:
        desk.load(0, desk.a)
        desk.launch(0, desk.a)
    assert desk.device.log == ()
    start = desk.device.now()
    desk.device.replay(graph(), desk.a)
    assert desk.device.now() - start == pytest.approx(0.5e-3)
    first = 1e3 * desk.device.now()
    assert desk.times() == [
        ("copy host 0 → memory 0", round(first, 6), round(first + 11, 6)),
        ("launch k0", round(first + 11, 6), round(first + 14, 6)),
    ]


def test_time_between_events() -> None:
    """On the device's clock, when the host knows both as reached; refused before."""
    desk = Desk()
    first = desk.device.record(desk.a)
    desk.load(0, desk.a)
    second = desk.device.record(desk.a)
    third = desk.device.record(desk.a)
    with pytest.raises(ArgumentError, match="not known to be reached"):
        desk.device.seconds(first, second)
    desk.device.synchronize(second)
    assert desk.device.seconds(first, second) == pytest.approx(11e-3)
    with pytest.raises(ArgumentError, match="not known to be reached"):
        desk.device.seconds(first, third)


def test_copying_ahead_hides_copies() -> None:
    """Two loads and two kernels: the second load while the first kernel runs, or after it."""

    def total(ahead: bool) -> float:
        desk = Desk()
        for number in (0, 1):
            desk.load(number, desk.a)
            desk.device.wait(desk.b, desk.device.record(desk.a))
            desk.launch(number, desk.b, "read", 10e9)
            if not ahead:
                desk.device.wait(desk.a, desk.device.record(desk.b))
        desk.device.finish()
        return desk.device.now()

    assert total(ahead=False) == pytest.approx(46e-3)
    assert total(ahead=True) == pytest.approx(35e-3)


def test_a_model_without_bytes() -> None:
    """With `backed=False` large memory costs nothing here and moves nothing; small memory still works, also through
    large memory, out of which come zeros."""
    device = SimDevice("a100", backed=False, small=64)
    stream, control = device.stream("a"), device.pin(64, "control")
    large, small = device.allocate(70 << 30, "experts"), device.allocate(64, "small")
    assert device.used == (70 << 30) + 256
    device.write(control.span(), np.arange(16, dtype=np.int32))
    device.copy(small.span(), control.span(), stream)
    device.copy(control.span(), small.span(), stream)
    device.finish()
    assert device.read(control.span(), np.int32, (16,)).tolist() == list(range(16))
    device.copy(control.span(), large.span(0, 64), stream)
    device.launch(scale, {"x": large.span(), "y": small.span(), "n": 16}, stream)
    device.finish()
    assert device.read(control.span(), np.int32, (16,)).tolist() == [0] * 16
    device.copy(control.span(), small.span(), stream)
    device.finish()
    assert device.read(control.span(), np.int32, (16,)).tolist() == [0] * 16
    expert = device.pin(1 << 20, "expert").span()
    assert device.on_host("look", [expert], lambda data: int(data.sum())) == 0
    assert not device.read(expert, np.uint8, (100,)).any()


@given(steps())
@DRAWN
def test_engines_do_what_is_ready_first(drawn: tuple[Step, ...]) -> None:
    """In drawn programs: an engine does one thing at a time, nothing begins before it is ready, and what is ready only
    ever waits for an engine that is busy with what was ready before it, or with what it had begun."""
    device = SimDevice("t4")
    run(complete(drawn), device)
    log = device.log
    ready = {record.number: ready_at(record, log) for record in log}
    for record in (record for record in log if record.engine):
        others = [other for other in log if other.engine == record.engine and other is not record]
        assert all(other.end <= record.begin or record.end <= other.begin for other in others)
        assert record.begin >= ready[record.number]
        time = ready[record.number]
        for other in sorted(others, key=lambda other: other.begin):
            if other.begin <= time < other.end and other.end <= record.begin:
                first = (ready[other.number], other.number) < (ready[record.number], record.number)
                assert first or other.begin < ready[record.number]
                time = other.end
        assert time == record.begin, "the engine was idle"


def ready_at(record: Record, log: Sequence[Record]) -> float:
    """When it was given and the operation before it in its stream had ended."""
    earlier = [other.end for other in log if other.stream == record.stream and other.number < record.number]
    return max([record.given, *earlier[-1:]])
