"""Order: proof that what was asked for is enough, whatever the device makes of it.

A program that forgets to wait may be right a thousand times, because a copy happened to be fast. So the simulation does
not look at when things run. It asks of any two operations that touch the same bytes, one of them writing, whether one
is *ordered before* the other by what the host asked for; if not, that is a *race*, and an error as soon as the second
is given to the device. It is found in every schedule, and where every result is right.

**What orders.** Operations of one stream, by their turn. What a stream was given before `record`, before everything
that any stream is given after a `wait` for the event, and before everything that the host does after it knows the event
as reached. What the host did, before everything that it gives to a stream later; a function that it runs, when that has
returned. All this follows on, and there is nothing else.

**Vector clocks.** Operations are numbered. For each stream *s*, and for the host *h*, there is a clock :math:`C_s`: for
each stream *u* the number :math:`C_s[u]` of the last operation of *u* that everything to come in *s* is ordered after.
Operation *n* given to *s* sets :math:`C_s \\leftarrow \\max(C_s, C_h)`, since the host has just spoken, and
:math:`C_s[s] \\leftarrow n`. An event keeps the clock of its stream as it is recorded, :math:`C_e`; waiting for it sets
:math:`C_s \\leftarrow \\max(C_s, C_e)`, and on the host :math:`C_h \\leftarrow \\max(C_h, C_e)`. An access by operation
*m* of stream *u* is ordered before an operation of *s* if and only if :math:`m \\le C_s[u]`.

**Forgetting.** Everything to come is ordered after what the host knows. So an access with :math:`m \\le C_h[u]`
conflicts with nothing any more and is forgotten. Nor is an access needed for bytes that a later one, ordered after it,
touches as strongly (a write is as strong as both): what is not ordered after the first is not ordered after the second
either. A run of any length needs memory only for what the host has not waited for.

Source: lowbit's own; vector clocks are those of the literature on race detection.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from lowbit_cuda.port import DeviceError
from lowbit_gpusim.sim.clock import Task

Clock = dict[int, int]
"""For each stream, by its number, the last operation that is ordered before."""

HOST = 0
"""The number of the host among streams."""

FUNCTION = -1
"""The number under which a function that the host runs reads: nothing that is given meanwhile is ordered after it."""


@dataclass(frozen=True, slots=True)
class Access:
    """Bytes that an operation touches.

    Attributes:
        begin, end: from which byte of the memory to before which.
        writes: whether it may change them.
        stream: the number of its stream.
        task: the operation.
    """

    begin: int
    end: int
    writes: bool
    stream: int
    task: Task


class RaceError(DeviceError):
    """Two operations on the same bytes, one of them writing, with nothing that orders them.

    Attributes:
        first, second: as they were given to the device.
        what: which memory.
        begin, end: which bytes of it.
    """

    def __init__(self, first: Access, second: Access, what: str, waited: int) -> None:
        self.first, self.second, self.what = first.task, second.task, what
        self.begin, self.end = max(first.begin, second.begin), min(first.end, second.end)
        super().__init__(
            f"race on bytes {self.begin} to {self.end} of {what}: {second.task} {_verb(second)} them, and {first.task} "
            f"{_verb(first)} them and may not be done; {_missing(first, second, waited)}"
        )


def _verb(access: Access) -> str:
    return "writes" if access.writes else "reads"


def _missing(first: Access, second: Access, waited: int) -> str:
    """Which wait would have ordered them, and how far those go that there are."""
    if first.stream == FUNCTION:
        return "missing: the function must have returned"
    name = first.task.stream
    waiter = "the host" if second.stream == HOST else second.task.stream
    so_far = f"it waits for {name} only up to #{waited}" if waited else f"it waits for nothing of {name}"
    return f"missing: {waiter} must wait for an event recorded in {name} after #{first.task.number} ({so_far})"


class Order:
    """The clocks of the host and of all streams."""

    def __init__(self) -> None:
        self.clocks: dict[int, Clock] = {HOST: {}}

    def add(self, stream: int) -> None:
        """A new stream."""
        self.clocks[stream] = {}

    def give(self, stream: int, number: int) -> Clock:
        """The clock of operation `number` as the host gives it to a stream, or does it itself."""
        clock = self.clocks[stream]
        if stream != HOST:
            join(clock, self.clocks[HOST])
            clock[stream] = number
        return clock

    def wait(self, stream: int, reached: Clock) -> None:
        """What a stream is given from now on, or what the host does, is ordered after `reached`."""
        join(self.clocks[stream], reached)

    def check(self, earlier: Sequence[Access], access: Access) -> Access | None:
        """One of the earlier accesses to the same memory with which this one races, if there is any."""
        clock = self.clocks[access.stream]
        for old in earlier:
            if (
                (access.writes or old.writes)
                and max(old.begin, access.begin) < min(old.end, access.end)
                and clock.get(old.stream, 0) < old.task.number
            ):
                return old
        return None

    def waited(self, stream: int, other: int) -> int:
        """The last operation of another stream that a stream waits for, 0 if for none."""
        return self.clocks[stream].get(other, 0)

    def remember(self, earlier: Sequence[Access], access: Access) -> list[Access]:
        """The accesses that may still conflict with something, this one among them."""
        clock, host = self.clocks[access.stream], self.clocks[HOST]
        kept: list[Access] = []
        for old in earlier:
            if host.get(old.stream, 0) >= old.task.number:
                continue
            covered = (access.writes or not old.writes) and clock.get(old.stream, 0) >= old.task.number
            kept.extend(_outside(old, access) if covered else (old,))
        if access.stream != HOST and access.begin < access.end:
            kept.append(access)  # what the host does is done when it gives the next operation: nothing can race with it
        return kept

    def pending(self, earlier: Sequence[Access]) -> list[Access]:
        """The accesses that the host does not know as done."""
        host = self.clocks[HOST]
        return [old for old in earlier if host.get(old.stream, 0) < old.task.number]


def join(clock: Clock, other: Clock) -> None:
    """Set a clock to the later of the two, stream by stream."""
    for stream, number in other.items():
        if clock.get(stream, 0) < number:
            clock[stream] = number


def _outside(old: Access, new: Access) -> list[Access]:
    """What of an access lies outside another."""
    if old.end <= new.begin or new.end <= old.begin:
        return [old]
    before = (old.begin, min(old.end, new.begin))
    after = (max(old.begin, new.end), old.end)
    return [Access(b, e, old.writes, old.stream, old.task) for b, e in (before, after) if b < e]
