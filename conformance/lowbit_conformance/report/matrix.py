"""The matrix of a report: operations × widths × groups, each cell with its three counts."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from lowbit_conformance.suite.tally import Verdict

State = Literal["passed", "failed", "partly declared", "not declared"]

COLUMN, OTHER, NONE = "column", "other", ""
GROUPS = ("32", "64", "128", COLUMN, OTHER, NONE)
"""The kinds of group in the order of the lines: usual sizes, one group per column, any other size, no groups."""


@dataclass
class Cell:
    """The counts of cases for one operation, width and kind of group."""

    passed: int = 0
    declared: int = 0
    specified: int = 0

    @property
    def failed(self) -> int:
        return self.declared - self.passed

    @property
    def state(self) -> State:
        if self.failed:
            return "failed"
        if not self.declared:
            return "not declared"
        return "passed" if self.declared == self.specified else "partly declared"

    def counts(self) -> dict[str, int]:
        return {"passed": self.passed, "declared": self.declared, "specified": self.specified}

    def add(self, other: "Cell") -> None:
        self.passed += other.passed
        self.declared += other.declared
        self.specified += other.specified


@dataclass
class Line:
    """A line of the matrix.

    Attributes:
        operation: the operation's id.
        groups: one of `GROUPS`, or several of them in words after lines were merged.
        cells: by width; the key is None for cases without a width.
    """

    operation: str
    groups: str
    cells: dict[int | None, Cell] = field(default_factory=dict)


def kind_of_group(parameters: Mapping[str, object]) -> str:
    """Which of `GROUPS` a case belongs to.

    >>> [kind_of_group({"group_size": size, "rows": 96}) for size in (0, 31, 32, 96)]
    ['', 'other', '32', 'column']
    """
    size = parameters.get("group_size")
    if not size:
        return NONE
    if size == parameters.get("rows"):
        return COLUMN
    return str(size) if str(size) in GROUPS else OTHER


def width_of(parameters: Mapping[str, object]) -> int | None:
    bits = parameters.get("bits")
    return bits if isinstance(bits, int) else None


def matrix(verdicts: Iterable[Verdict]) -> list[Line]:
    """All lines, by operation and then in the order of `GROUPS`; all lines of an operation have the same widths."""
    lines: dict[tuple[str, str], Line] = {}
    widths: dict[str, set[int | None]] = {}
    for verdict in verdicts:
        key = (verdict.operation, kind_of_group(verdict.parameters))
        bits = width_of(verdict.parameters)
        widths.setdefault(verdict.operation, set()).add(bits)
        cell = lines.setdefault(key, Line(*key)).cells.setdefault(bits, Cell())
        declared = verdict.outcome != "not declared"
        cell.add(Cell(verdict.outcome == "passed", declared, 1))
    for line in lines.values():
        ordered = sorted(widths[line.operation], key=lambda bits: (bits is None, bits or 0))
        line.cells = {bits: line.cells.get(bits, Cell()) for bits in ordered}
    return sorted(lines.values(), key=lambda line: (line.operation, GROUPS.index(line.groups)))


def folded(lines: Iterable[Line]) -> list[Line]:
    """Merge lines of one operation that have equal cells, unless one of them contains a failure."""
    shown: list[Line] = []
    for line in lines:
        alike = next((each for each in shown if _alike(each, line)), None)
        if alike is None:
            shown.append(Line(line.operation, line.groups, {bits: Cell() for bits in line.cells}))
            alike = shown[-1]
        else:
            alike.groups = f"{alike.groups}, {line.groups}"
        for bits, cell in line.cells.items():
            alike.cells[bits].add(cell)
    return shown


def _alike(first: Line, second: Line) -> bool:
    if first.operation != second.operation or NONE in (first.groups, second.groups):
        return False
    if any(cell.failed for line in (first, second) for cell in line.cells.values()):
        return False
    shared = [bits for bits in first.cells if first.cells[bits].specified and second.cells[bits].specified]
    return all(first.cells[bits].state == second.cells[bits].state for bits in shared)
