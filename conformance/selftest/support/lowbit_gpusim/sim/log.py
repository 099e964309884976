"""The log: each operation with its begin and end in virtual seconds, for traces and figures."""

from collections.abc import Iterable
from dataclasses import dataclass

from lowbit_gpusim.sim.clock import ENGINES, Task


@dataclass(frozen=True)
class Record:
    """One line of the log.

    Attributes:
        number: of the operation, from 1, in the order in which the host issued or did them.
        stream: its name, or ``host``.
        kind: ``copy``, ``launch``, ``record``, ``wait``; by the host ``write``, ``read``, ``on_host``, ``free``,
            ``synchronize`` and ``finish``.
        what: for a copy from which memory to which, for a launch the kernel.
        engine: ``to device``, ``to host`` or ``compute``; for events and the host an empty text.
        given: virtual seconds when the host issued or began it.
        begin, end: virtual seconds.
    """

    number: int
    stream: str
    kind: str
    what: str
    engine: str
    given: float
    begin: float
    end: float


def records(tasks: Iterable[Task]) -> tuple[Record, ...]:
    """The records of tasks whose times are settled, by number."""
    return tuple(
        Record(task.number, task.stream, task.kind, task.what, task.engine or "", task.given, task.begin, task.end)
        for task in tasks
        if task.begin is not None and task.end is not None
    )


def timeline(log: Iterable[Record]) -> dict[str, list[tuple[float, float, str]]]:
    """The busy intervals of the host and of each engine, with their operations, sorted by time."""
    rows: dict[str, list[tuple[float, float, str]]] = {"host": [], **{engine: [] for engine in ENGINES}}
    for record in log:
        row = record.engine or ("host" if record.stream == "host" else "")
        if row and record.end > record.begin:
            rows[row].append((record.begin, record.end, f"{record.kind} {record.what}"))
    return {name: sorted(row) for name, row in rows.items()}
