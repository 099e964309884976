"""Order: a check that the requested waits are sufficient, whatever the timing of the device.

A program with a missing wait may give right results a thousand times, because a copy happened to be fast. So this check
does not look at when operations run. For any two operations that touch the same bytes, one of them writing, it asks
whether the host's requests *order* one before the other. If not, that is a *race*, and an error as soon as the second
operation is issued. It is found in every schedule, even where every result is right.

**What creates order.** Operations of one stream are ordered as issued. Everything that a stream was given before
`record` is before everything that any stream is given after a `wait` for that event, and before everything that the
host does after it knows that the event is reached. The host's own work is before everything that it issues later; a
function that it runs, once that has returned. Order is transitive, and nothing else creates it.

**Vector clocks.** Operations are numbered. Each stream *s*, and the host *h*, has a clock :math:`C_s`: for each stream
*u* the number :math:`C_s[u]` of the last operation of *u* before all future operations of *s*. Issuing operation *n* to
*s* sets :math:`C_s \\leftarrow \\max(C_s, C_h)`, since the host issues it, and :math:`C_s[s] \\leftarrow n`. An event
stores the clock of its stream when it is recorded, :math:`C_e`; waiting for it sets
:math:`C_s \\leftarrow \\max(C_s, C_e)`, and on the host :math:`C_h \\leftarrow \\max(C_h, C_e)`. An access by operation
*m* of stream *u* is ordered before an operation of *s* if and only if :math:`m \\le C_s[u]`.

**Forgetting.** All future operations are ordered after everything that the host has waited for. So an access with
:math:`m \\le C_h[u]` cannot conflict any more and is dropped. An access is also dropped for bytes that a later access,
ordered after it, uses at least as strongly (a write is stronger than a read): whatever is unordered with the first is
unordered with the second. A run of any length needs memory only for accesses that the host has not waited for.

Vector clocks are those of the literature on race detection.
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
"""The stream number for reads of a function on the host: nothing issued while it runs is ordered after it."""


@dataclass(frozen=True, slots=True)
class Access:
    """Bytes that an operation uses.

    Attributes:
        begin, end: the range of bytes in the memory, without `end`.
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
    """Two unordered operations on the same bytes, one of them writing.

    Attributes:
        first, second: the operations, in the order in which they were issued.
        what: the memory.
        begin, end: the range of bytes.
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
    """The wait that would order them, and how far existing waits go."""
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
        """The clock of operation `number` when the host issues it to a stream, or does it itself."""
        clock = self.clocks[stream]
        if stream != HOST:
            join(clock, self.clocks[HOST])
            clock[stream] = number
        return clock

    def wait(self, stream: int, reached: Clock) -> None:
        """Order all later work of a stream, or of the host, after `reached`."""
        join(self.clocks[stream], reached)

    def check(self, earlier: Sequence[Access], access: Access) -> Access | None:
        """An earlier access to the same memory with which this one races, or None."""
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
        """The last operation of another stream that a stream waits for, or 0."""
        return self.clocks[stream].get(other, 0)

    def remember(self, earlier: Sequence[Access], access: Access) -> list[Access]:
        """The accesses that may still conflict with later ones, including this one."""
        clock, host = self.clocks[access.stream], self.clocks[HOST]
        kept: list[Access] = []
        for old in earlier:
            if host.get(old.stream, 0) >= old.task.number:
                continue
            covered = (access.writes or not old.writes) and clock.get(old.stream, 0) >= old.task.number
            kept.extend(_outside(old, access) if covered else (old,))
        if access.stream != HOST and access.begin < access.end:
            kept.append(access)  # the host's own work is complete before it issues more
        return kept

    def pending(self, earlier: Sequence[Access]) -> list[Access]:
        """The accesses that the host has not waited for."""
        host = self.clocks[HOST]
        return [old for old in earlier if host.get(old.stream, 0) < old.task.number]


def join(clock: Clock, other: Clock) -> None:
    """Set a clock to the later of the two, stream by stream."""
    for stream, number in other.items():
        if clock.get(stream, 0) < number:
            clock[stream] = number


def _outside(old: Access, new: Access) -> list[Access]:
    """The parts of an access outside another."""
    if old.end <= new.begin or new.end <= old.begin:
        return [old]
    before = (old.begin, min(old.end, new.begin))
    after = (max(old.begin, new.end), old.end)
    return [Access(b, e, old.writes, old.stream, old.task) for b, e in (before, after) if b < e]
