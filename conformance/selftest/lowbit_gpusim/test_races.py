"""The simulated device finds every pair of operations that nothing orders, and no other, whatever it runs first."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from sim_programs import DRAWN, Program, Step, complete, races, run, scale, steps

from lowbit.arrays import U8
from lowbit.errors import ArgumentError
from lowbit_cuda.port import Span, Stream
from lowbit_gpusim.sim.device import SimDevice
from lowbit_gpusim.sim.faults import Failure
from lowbit_gpusim.sim.order import RaceError
from lowbit_gpusim.sim.schedule import SCHEDULES

N = 8
BYTES = 4 * N
NUMBERS = np.arange(N, dtype=np.float32)
reading = replace(scale, parameters=tuple(replace(one, host=one.access is not None) for one in scale.parameters))
"""`scale`, of which both arrays may lie on the host."""


class Scene:
    """A device with what an offload engine has: an expert on the host, two places for it, an output, two streams."""

    def __init__(self, schedule: str) -> None:
        self.device = SimDevice("t4", budget=4096, schedule=schedule)
        self.copies, self.compute = self.device.stream("copies"), self.device.stream("compute")
        self.expert, self.result = (self.device.pin(BYTES, what).span() for what in ("expert", "result"))
        self.slot, self.other, self.output = (
            self.device.allocate(BYTES, what).span() for what in ("slot", "other slot", "output")
        )
        self.device.write(self.expert, NUMBERS)

    def launch(self, source: Span, target: Span) -> None:
        self.device.launch(scale, {"x": source, "y": target, "n": N}, self.compute)

    def then(self, first: Stream, second: Stream) -> None:
        """What is asked of the second from now on comes after what was asked of the first."""
        self.device.wait(second, self.device.record(first))

    def settle(self, stream: Stream) -> None:
        self.device.synchronize(self.device.record(stream))

    def load_and_run(self) -> None:
        """As it should be."""
        self.device.copy(self.slot, self.expert, self.copies)
        self.then(self.copies, self.compute)
        self.launch(self.slot, self.output)


# **Planted races**: each is one forgotten wait in something that an offload engine does.


def missing_wait_for_a_copy(scene: Scene) -> None:
    scene.device.copy(scene.slot, scene.expert, scene.copies)
    scene.launch(scene.slot, scene.output)


def copy_over_what_a_kernel_reads(scene: Scene) -> None:
    scene.load_and_run()
    scene.device.copy(scene.slot, scene.expert, scene.copies)


def host_reads_too_early(scene: Scene) -> None:
    scene.load_and_run()
    scene.device.copy(scene.result, scene.output, scene.compute)
    scene.device.read(scene.result, np.float32, (N,))


def host_looks_too_early(scene: Scene) -> None:
    scene.load_and_run()
    scene.device.copy(scene.result, scene.output, scene.compute)
    scene.device.on_host("look", [scene.result], lambda data: None)


def function_writes_what_it_reads(scene: Scene) -> None:
    """While a function reads, it asks the device to overwrite that."""
    scene.load_and_run()
    scene.settle(scene.compute)
    scene.device.on_host("look", [scene.expert], lambda data: scene.device.write(scene.expert, NUMBERS))


def function_asks_for_what_overwrites(scene: Scene) -> None:
    scene.load_and_run()
    scene.device.write(scene.result, NUMBERS)
    scene.device.on_host(
        "look", [scene.result], lambda data: scene.device.copy(scene.result, scene.output, scene.compute)
    )


def host_waits_for_the_wrong_stream(scene: Scene) -> None:
    scene.load_and_run()
    scene.device.copy(scene.result, scene.output, scene.compute)
    scene.settle(scene.copies)
    scene.device.read(scene.result, np.float32, (N,))


def host_writes_what_is_being_copied(scene: Scene) -> None:
    scene.device.copy(scene.slot, scene.expert, scene.copies)
    scene.device.write(scene.expert, NUMBERS)


def event_recorded_before_the_work(scene: Scene) -> None:
    event = scene.device.record(scene.copies)
    scene.device.copy(scene.slot, scene.expert, scene.copies)
    scene.device.wait(scene.compute, event)
    scene.launch(scene.slot, scene.output)


def wait_given_after_the_work(scene: Scene) -> None:
    scene.device.copy(scene.slot, scene.expert, scene.copies)
    event = scene.device.record(scene.copies)
    scene.launch(scene.slot, scene.output)
    scene.device.wait(scene.compute, event)


def buffer_reused(scene: Scene) -> None:
    """A staging buffer is promoted by a copy in one stream and filled anew by the other."""
    scene.device.copy(scene.slot, scene.expert, scene.copies)
    scene.then(scene.copies, scene.compute)
    scene.device.copy(scene.other, scene.slot, scene.compute)
    scene.device.copy(scene.slot, scene.expert, scene.copies)


def host_writes_what_a_kernel_reads(scene: Scene) -> None:
    """A kernel that reads pinned memory, and a host that knows only that what came before it is done."""
    scene.load_and_run()
    before = scene.device.record(scene.compute)
    scene.device.launch(reading, {"x": scene.expert, "y": scene.output, "n": N}, scene.compute)
    scene.device.synchronize(before)
    scene.device.write(scene.expert, NUMBERS)


def host_reads_what_a_kernel_writes(scene: Scene) -> None:
    scene.load_and_run()
    before = scene.device.record(scene.compute)
    scene.device.launch(reading, {"x": scene.expert, "y": scene.result, "n": N}, scene.compute)
    scene.device.synchronize(before)
    scene.device.read(scene.result, np.float32, (N,))


def two_writers(scene: Scene) -> None:
    scene.device.copy(scene.slot, scene.expert, scene.copies)
    scene.device.copy(scene.slot, scene.expert, scene.compute)


def one_byte_in_common(scene: Scene) -> None:
    scene.device.copy(scene.slot.part(0, 17), scene.expert.part(0, 17), scene.copies)
    scene.device.copy(scene.slot.part(16), scene.expert.part(16), scene.compute)


def one_byte_in_common_below(scene: Scene) -> None:
    scene.device.copy(scene.slot.part(16), scene.expert.part(16), scene.copies)
    scene.device.copy(scene.slot.part(0, 17), scene.expert.part(0, 17), scene.compute)


def last_byte_before_what_was_overwritten(scene: Scene) -> None:
    """Of the first copy only the bytes before 17 still matter: a later one, ordered after it, wrote the rest."""
    scene.device.copy(scene.slot, scene.expert, scene.copies)
    scene.then(scene.copies, scene.compute)
    scene.device.copy(scene.slot.part(17), scene.expert.part(17), scene.compute)
    scene.device.copy(scene.other.part(0, 1), scene.slot.part(16, 1), scene.device.stream("third"))


def first_byte_behind_what_was_overwritten(scene: Scene) -> None:
    scene.device.copy(scene.slot, scene.expert, scene.copies)
    scene.then(scene.copies, scene.compute)
    scene.device.copy(scene.slot.part(0, 16), scene.expert.part(0, 16), scene.compute)
    scene.device.copy(scene.other.part(0, 1), scene.slot.part(16, 1), scene.device.stream("third"))


def replay_without_a_wait(scene: Scene) -> None:
    with scene.device.capture(scene.compute) as graph:
        scene.launch(scene.slot, scene.output)
    scene.device.copy(scene.slot, scene.expert, scene.copies)
    scene.device.replay(graph(), scene.compute)


def replay_over_what_is_copied(scene: Scene) -> None:
    """The second replay writes the output while the other stream still copies what the first wrote."""
    with scene.device.capture(scene.compute) as graph:
        scene.launch(scene.slot, scene.output)
    scene.load_and_run()
    scene.device.replay(graph(), scene.compute)
    scene.then(scene.compute, scene.copies)
    scene.device.copy(scene.result, scene.output, scene.copies)
    scene.device.replay(graph(), scene.compute)


PLANTED: dict[Callable[[Scene], None], str] = {
    missing_wait_for_a_copy: "compute must wait for an event recorded in copies after #2 (it waits for nothing",
    copy_over_what_a_kernel_reads: "copies must wait for an event recorded in compute after #5 (it waits for nothing",
    host_reads_too_early: "the host must wait for an event recorded in compute after #6",
    host_looks_too_early: "the host must wait for an event recorded in compute after #6",
    function_writes_what_it_reads: "#9 write expert (the host) writes them, and #8 on_host look (the host) reads them "
    "and may not be done; missing: the function must have returned",
    function_asks_for_what_overwrites: "and #7 on_host look (the host) reads them and may not be done; missing: the fu",
    host_waits_for_the_wrong_stream: "the host must wait for an event recorded in compute after #6",
    host_writes_what_is_being_copied: "the host must wait for an event recorded in copies after #2",
    event_recorded_before_the_work: "recorded in copies after #3 (it waits for copies only up to #2)",
    wait_given_after_the_work: "compute must wait for an event recorded in copies after #2",
    buffer_reused: "copies must wait for an event recorded in compute after #5",
    host_writes_what_a_kernel_reads: "the host must wait for an event recorded in compute after #7",
    host_reads_what_a_kernel_writes: "the host must wait for an event recorded in compute after #7",
    two_writers: "compute must wait for an event recorded in copies after #2",
    one_byte_in_common: "compute must wait for an event recorded in copies after #2",
    one_byte_in_common_below: "compute must wait for an event recorded in copies after #2",
    last_byte_before_what_was_overwritten: "third must wait for an event recorded in copies after #2",
    first_byte_behind_what_was_overwritten: "third must wait for an event recorded in copies after #2",
    replay_without_a_wait: "compute must wait for an event recorded in copies after #2",
    replay_over_what_is_copied: "compute must wait for an event recorded in copies after #9",
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_planted_races_are_found(plant: Callable[[Scene], None], schedule: str) -> None:
    """Each forgotten wait is an error that says which wait it is, the same under every schedule."""
    with pytest.raises(RaceError) as caught:
        plant(Scene(schedule))
    assert PLANTED[plant] in str(caught.value)


def test_what_a_race_says() -> None:
    """Both operations, their streams, the memory and the bytes in common."""
    with pytest.raises(RaceError) as caught:
        one_byte_in_common(Scene("eager"))
    race = caught.value
    assert (race.first.number, race.first.stream, race.second.number, race.second.stream) == (2, "copies", 3, "compute")
    assert (race.what, race.begin, race.end) == ("slot", 16, 17)
    assert str(race).startswith(
        "race on bytes 16 to 17 of slot: #3 copy expert → slot (stream compute) writes them, "
        "and #2 copy expert → slot (stream copies) writes them and may not be done; missing: "
    )


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_right_program_has_none(schedule: str) -> None:
    """The same work with every wait is no error, three times over, also when given as a graph."""
    scene = Scene(schedule)
    with scene.device.capture(scene.compute) as graph:
        scene.launch(scene.slot, scene.output)
        scene.device.copy(scene.result, scene.output, scene.compute)
    for turn in range(3):
        scene.device.write(scene.expert, NUMBERS + turn)
        scene.then(scene.compute, scene.copies)
        scene.device.copy(scene.slot, scene.expert, scene.copies)
        scene.then(scene.copies, scene.compute)
        scene.device.replay(graph(), scene.compute)
        scene.settle(scene.compute)
        assert np.array_equal(scene.device.read(scene.result, np.float32, (N,)), 2 * (NUMBERS + turn))


def test_reads_do_not_conflict() -> None:
    """Two streams and the host may read the same bytes at once."""
    scene = Scene("late")
    scene.device.copy(scene.slot, scene.expert, scene.copies)
    scene.device.copy(scene.other, scene.expert, scene.compute)
    assert np.array_equal(scene.device.read(scene.expert, np.float32, (N,)), NUMBERS)


def test_an_event_that_is_reached_is_a_wait() -> None:
    """Once `reached` has said yes the host may rely on it, and not before; in virtual time it becomes so by asking."""
    scene = Scene("late")
    scene.load_and_run()
    scene.device.copy(scene.result, scene.output, scene.compute)
    event = scene.device.record(scene.compute)
    assert not scene.device.reached(event)
    with pytest.raises(RaceError):
        scene.device.read(scene.result, np.float32, (N,))
    asked = 0
    while not scene.device.reached(event):
        asked += 1
        assert asked < 100
    assert np.array_equal(scene.device.read(scene.result, np.float32, (N,)), 2 * NUMBERS)


def test_what_a_function_does_besides() -> None:
    """A function may use the device: read the same bytes, write others, and overwrite these when it has returned. What
    it reads cannot be freed meanwhile; and arrays that it keeps do not show later bytes."""
    scene = Scene("eager")
    device, kept = scene.device, list[U8]()

    def look(data: U8) -> float:
        assert np.array_equal(device.read(scene.expert, np.float32, (N,)), NUMBERS)
        device.write(scene.result, NUMBERS)
        device.copy(scene.slot, scene.expert, scene.copies)
        with pytest.raises(ArgumentError, match="memory for expert is being read by a function"):
            device.free(scene.expert.memory)
        kept.append(data)
        return float(data.view(np.float32).sum())

    assert device.on_host("look", [scene.expert], look) == NUMBERS.sum()
    scene.settle(scene.copies)
    device.write(scene.expert, NUMBERS)
    assert (kept[0] == 0xFF).all()
    with pytest.raises(ZeroDivisionError):
        device.on_host("fail", [scene.expert], lambda data: 1 // 0)
    device.write(scene.expert, NUMBERS)
    device.free(scene.expert.memory)


def test_no_bytes_conflict_with_nothing() -> None:
    """Spans of no bytes may lie anywhere."""
    scene = Scene("late")
    device = scene.device
    device.copy(scene.slot, scene.expert, scene.copies)
    device.write(scene.expert.part(4, 0), NUMBERS[:0])
    device.copy(scene.slot.part(4, 0), scene.other.part(0, 0), scene.compute)
    device.copy(scene.other.part(4, 4), scene.expert.part(0, 4), scene.compute)
    device.copy(scene.slot.part(5, 0), scene.slot.part(0, 0), scene.compute)
    device.on_host("look", [scene.expert.part(3, 0)], lambda data: device.write(scene.result, NUMBERS))
    device.finish()


def test_races_can_be_listed_instead() -> None:
    """With `on_race="list"` the program goes on, and late execution shows what it would have read."""
    device = SimDevice("t4", schedule="late", on_race="list")
    stream = device.stream("copies")
    pinned, out, slot = device.pin(BYTES, "in"), device.pin(BYTES, "out"), device.allocate(BYTES, "slot")
    device.write(pinned.span(), NUMBERS)
    device.copy(slot.span(), pinned.span(), stream)
    device.copy(out.span(), slot.span(), stream)
    assert np.isnan(device.read(out.span(), np.float32, (N,))).all()
    assert [race.what for race in device.races] == ["out"]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_free_waits_for_what_uses_the_memory(schedule: str) -> None:
    """Memory goes back when the work with it is done, and the result of that work is right."""
    scene = Scene(schedule)
    scene.load_and_run()
    scene.device.free(scene.slot.memory)
    scene.device.copy(scene.result, scene.output, scene.compute)
    scene.settle(scene.compute)
    assert np.array_equal(scene.device.read(scene.result, np.float32, (N,)), 2 * NUMBERS)


def test_free_while_in_use_can_be_refused() -> None:
    """With `free_waits=False` a free that has to wait is a race, and one after a wait is not."""
    device = SimDevice("t4", free_waits=False)
    stream, slot, pinned = device.stream("copies"), device.allocate(BYTES, "slot"), device.pin(BYTES, "expert")
    device.write(pinned.span(), NUMBERS)
    device.copy(slot.span(), pinned.span(), stream)
    for memory in (slot, pinned):
        with pytest.raises(RaceError, match="free"):
            device.free(memory)
    device.synchronize(device.record(stream))
    device.free(slot)
    device.free(pinned)
    assert device.used == device.pinned == 0


def test_that_a_free_waits_orders_nothing_else() -> None:
    """A program that uses `free` to wait for other memory has a race: the port promises no such order."""
    scene = Scene("eager")
    scene.load_and_run()
    scene.device.copy(scene.result, scene.output, scene.compute)
    scene.device.free(scene.output.memory)
    with pytest.raises(RaceError):
        scene.device.read(scene.result, np.float32, (N,))


def test_a_long_run_forgets() -> None:
    """What is remembered of a memory stays small in a run that the host follows, and in one that it does not."""
    scene = Scene("eager")
    for turn in range(400):
        if turn < 200:
            scene.device.write(scene.expert, NUMBERS)
        scene.then(scene.compute, scene.copies)
        scene.device.copy(scene.slot.part(4 * (turn % N), 4), scene.expert.part(0, 4), scene.copies)
        scene.then(scene.copies, scene.compute)
        scene.launch(scene.slot, scene.output)
        if turn < 200:
            scene.settle(scene.compute)
        for span in (scene.slot, scene.output, scene.expert):
            assert len(span.memory.handle.accesses) <= 2 * N


def test_what_the_host_knows_as_done_is_forgotten() -> None:
    """Bytes that are touched once and never again leave nothing behind."""
    device = SimDevice("t4")
    stream, pinned, slot = device.stream("copies"), device.pin(256, "expert"), device.allocate(256, "slot")
    for turn in range(256):
        device.copy(slot.span(turn, 1), pinned.span(turn, 1), stream)
        device.synchronize(device.record(stream))
        assert len(slot.handle.accesses) == len(pinned.handle.accesses) == 1


def test_a_failed_copy_counts_as_a_copy() -> None:
    """A copy that fails late is checked like any other: the program did not know."""
    device = SimDevice("t4", fail=Failure(1, "late", of="copy", later=3))
    a, b = device.stream("a"), device.stream("b")
    pinned, slot = device.pin(BYTES, "expert"), device.allocate(BYTES, "slot")
    device.copy(slot.span(), pinned.span(), a)
    with pytest.raises(RaceError):
        device.copy(slot.span(), pinned.span(), b)


# **Drawn programs**, against reachability in the graph of their operations.


def has_race(program: Program, schedule: str) -> bool:
    try:
        run(program, SimDevice("t4", schedule=schedule, seed=1))
    except RaceError:
        return True
    return False


@given(steps())
@DRAWN
def test_no_race_is_found_where_there_is_none(drawn: tuple[Step, ...]) -> None:
    """A program with all its waits has no race, and its results and times are the same under every schedule."""
    program = complete(drawn)
    devices = [SimDevice("t4", schedule=name, seed=seed) for name, seed in (*product(SCHEDULES, (0,)), ("random", 1))]
    first, *others = [run(program, device) for device in devices]
    for other in others:
        for one, two in zip(first, other, strict=True):
            np.testing.assert_array_equal(one, two)
    assert all(device.log == devices[0].log for device in devices)


@given(steps())
@DRAWN
def test_every_race_is_found(drawn: tuple[Step, ...]) -> None:
    """A program without any wait, and each with one wait less than it needs, is refused if and only if two operations
    of it conflict that no path orders."""
    program = complete(drawn)
    programs = [Program(drawn, ((),) * len(drawn))]
    programs += [program.without(step, wait) for step, waits in enumerate(program.waits) for wait in waits]
    for turn, fewer in enumerate(programs):
        assert has_race(fewer, SCHEDULES[turn % 3]) == bool(races(fewer))
