"""Programs for the simulated device, and a slow proof of which of their operations are ordered.

`combine` is the kernel of the tests. A `Program` is a list of operations on five memories and three streams, of which a
test says only what they do; `complete` finds by plain reachability in the graph of all operations, and not by clocks,
which waits it needs to be right; `run` gives it to a device with the waits that a test chooses.
"""

from dataclasses import dataclass, replace

import hypothesis.strategies as st
import numpy as np
from hypothesis import settings

from lowbit.arrays import F32
from lowbit_cuda.port import Event, Memory, Numbers, Parameter, Span, Stream
from lowbit_gpusim.meanings import Meant
from lowbit_gpusim.sim.device import SimDevice

FLOAT = 4
STREAMS = ("a", "b", "c")
HOST = "host"
DEVICE_MEMORIES, PINNED, CELLS = 3, 2, 6


def count(numbers: Numbers) -> int:
    """How many numbers a launch works on."""
    return int(numbers["n"])


def _combine(x: F32, y: F32, n: int, by: float) -> None:
    y[:] = np.float32(by) * y + x


combine = Meant(
    name="combine",
    source="",
    parameters=(
        Parameter("x", "float32", "read", count),
        Parameter("y", "float32", "update", count),
        Parameter("n", "int32"),
        Parameter("by", "float32"),
    ),
    grid=lambda numbers: (1, 1, 1),
    block=32,
    meaning=_combine,
)
"""y ← by·y + x, on n float32."""


def _scale(x: F32, y: F32, n: int) -> None:
    y[:] = 2 * x


scale = Meant(
    name="scale",
    source="",
    parameters=(
        Parameter("x", "float32", "read", count),
        Parameter("y", "float32", "write", count),
        Parameter("n", "int32"),
    ),
    grid=lambda numbers: (1, 1, 1),
    block=32,
    meaning=_scale,
)
"""y ← 2·x, on n float32."""


@dataclass(frozen=True)
class Part:
    """Cells of a memory: the first `DEVICE_MEMORIES` memories lie on the device, the others are pinned."""

    memory: int
    begin: int
    end: int

    def touches(self, other: "Part") -> bool:
        """Whether they have a cell in common."""
        return self.memory == other.memory and self.begin < other.end and other.begin < self.end


@dataclass(frozen=True)
class Step:
    """One operation: ``copy`` or ``combine`` from `source` to `target`, or by the host ``write`` or ``read``."""

    kind: str
    lane: str
    source: Part | None = None
    target: Part | None = None

    def conflicts(self, other: "Step") -> bool:
        """Whether they touch the same cells, one of them writing."""
        pairs = ((self.target, other.target), (self.target, other.source), (self.source, other.target))
        return any(one is not None and two is not None and one.touches(two) for one, two in pairs)


@dataclass(frozen=True)
class Program:
    """Steps and, for each, which earlier ones its lane waits for just before it."""

    steps: tuple[Step, ...]
    waits: tuple[tuple[int, ...], ...] = ()

    def without(self, step: int, wait: int) -> "Program":
        """The same without one wait."""
        kept = tuple(w for w in self.waits[step] if w != wait)
        return replace(self, waits=(*self.waits[:step], kept, *self.waits[step + 1 :]))


def before(program: Program) -> list[set[int]]:
    """For each step all that are ordered before it, by following every edge."""
    answer: list[set[int]] = []
    for number, step in enumerate(program.steps):
        found: set[int] = set()
        for other in range(number):
            # A lane's own steps; what the host did; and what the host, or this lane, waited for until now.
            if program.steps[other].lane in (step.lane, HOST):
                found |= {other} | answer[other]
        for waiter in range(number + 1):
            if program.steps[waiter].lane in (step.lane, HOST) and program.waits:
                for wait in program.waits[waiter]:
                    found |= {wait} | answer[wait]
        answer.append(found)
    return answer


def races(program: Program) -> list[tuple[int, int]]:
    """All pairs of steps that conflict without being ordered."""
    order = before(program)
    steps = program.steps
    return [(i, j) for j in range(len(steps)) for i in range(j) if i not in order[j] and steps[i].conflicts(steps[j])]


def complete(steps: tuple[Step, ...]) -> Program:
    """A program without races: each step waits for what it conflicts with, if nothing orders them already."""
    program = Program(steps, ((),) * len(steps))
    while found := races(program):
        i, j = found[0]
        waits = list(program.waits)
        waits[j] = (*waits[j], i)
        program = replace(program, waits=tuple(waits))
    return program


def run(program: Program, device: SimDevice) -> list[F32]:
    """All that the host read, and at the end all memories; an event is recorded after every step."""
    memories = [device.allocate(FLOAT * CELLS, f"device {i}") for i in range(DEVICE_MEMORIES)]
    memories += [device.pin(FLOAT * CELLS, f"pinned {i}") for i in range(PINNED)]
    streams = {name: device.stream(name) for name in STREAMS}
    events: list[Event | None] = []
    results: list[F32] = []
    for number, step in enumerate(program.steps):
        for wait in program.waits[number]:
            event = events[wait]
            assert event is not None
            if step.lane == HOST:
                device.synchronize(event)
            else:
                device.wait(streams[step.lane], event)
        stream = streams.get(step.lane)
        results += _do(step, number, device, memories, stream)
        events.append(None if stream is None else device.record(stream))
    device.finish()
    return results + _contents(device, memories)


def _do(step: Step, number: int, device: SimDevice, memories: list[Memory], stream: Stream | None) -> list[F32]:
    """One step; what the host read."""
    if stream is None and step.source is not None:
        return [device.read(_span(memories, step.source), np.float32, (step.source.end - step.source.begin,))]
    assert step.target is not None
    cells, target = step.target.end - step.target.begin, _span(memories, step.target)
    if stream is None:
        device.write(target, np.arange(number, number + cells, dtype=np.float32))
    elif step.source is not None and step.kind == "copy":
        device.copy(target, _span(memories, step.source), stream)
    elif step.source is not None:
        device.launch(combine, {"x": _span(memories, step.source), "y": target, "n": cells, "by": 0.5}, stream)
    return []


def _span(memories: list[Memory], part: Part) -> Span:
    return memories[part.memory].span(FLOAT * part.begin, FLOAT * (part.end - part.begin))


def _contents(device: SimDevice, memories: list[Memory]) -> list[F32]:
    """What all memories hold, after everything was finished."""
    out, stream = device.pin(FLOAT * CELLS, "out"), device.stream("out")
    contents = []
    for memory in memories:
        if memory.place == "host":
            contents.append(device.read(memory.span(), np.float32, (CELLS,)))
        else:
            device.copy(out.span(), memory.span(), stream)
            device.synchronize(device.record(stream))
            contents.append(device.read(out.span(), np.float32, (CELLS,)))
    return contents


# **Drawing programs.**


@st.composite
def steps(draw: st.DrawFn) -> tuple[Step, ...]:
    """Copies, launches, and what the host does, on few and overlapping bytes."""

    def part(memory: int, cells: int) -> Part:
        begin = draw(st.integers(0, CELLS - cells))
        return Part(memory, begin, begin + cells)

    def one() -> Step:
        lane = draw(st.sampled_from((*STREAMS, *STREAMS, HOST)))
        cells = draw(st.integers(1, CELLS))
        if lane == HOST:
            pinned = part(DEVICE_MEMORIES + draw(st.integers(0, PINNED - 1)), cells)
            return Step("write", lane, target=pinned) if draw(st.booleans()) else Step("read", lane, source=pinned)
        device = draw(st.permutations(range(DEVICE_MEMORIES)))
        if draw(st.booleans()):
            return Step("combine", lane, part(device[0], cells), part(device[1], cells))
        other = draw(st.sampled_from((device[1], *range(DEVICE_MEMORIES, DEVICE_MEMORIES + PINNED))))
        source, target = draw(st.permutations((device[0], other)))
        return Step("copy", lane, part(source, cells), part(target, cells))

    return tuple(one() for _ in range(draw(st.integers(2, 12))))


DRAWN = settings(max_examples=80)
