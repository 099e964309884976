"""Vectors as files: one JSON object for each operation, one line for each vector.

The form is written down in ``schema/vectors.schema.json``, which `export` puts beside the files. The same vectors give
the same bytes, on every host.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from lowbit.backend.reference import STORED_PRODUCTS
from lowbit.backend.wire import MOST_DEPTH, Tree
from lowbit.contract.operation import OPERATIONS, Operation
from lowbit.errors import ArgumentError, FormatError
from lowbit.system.json_files import Fields, described, parsed, read_bytes
from lowbit.system.storage import write_whole
from lowbit.text import quoted
from lowbit_conformance.suite.marking import Settings
from lowbit_conformance.vectors.judging import STATED
from lowbit_conformance.vectors.record import MOST_TEXT, Vectors, record

SCHEMA = "lowbit-vectors/1"
SCHEMA_FILE = "vectors.schema.json"
MOST_FILE = 1 << 27
"""Largest size of a file that is read, in bytes."""


def schema_text() -> str:
    """The JSON Schema of the files."""
    return (files("lowbit_conformance.vectors") / "schema" / SCHEMA_FILE).read_text("utf-8")


def export(folder: Path, operations: Iterable[str], seeds: int) -> Iterable[Vectors]:
    """Write the files of some operations and the schema; yields each operation's vectors after its file is written.

    Raises:
        ArgumentError: the folder cannot be made or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / SCHEMA_FILE, schema_text().encode())
        for operation in operations:
            recorded = record(operation, Settings(range(seeds)))
            write_whole(folder / f"{operation}.json", as_text(recorded, seeds).encode())
            yield recorded
    except OSError as error:
        raise ArgumentError("folder", f"{folder} ({error.strerror})", "a folder that can be written to") from None


def as_text(recorded: Vectors, seeds: int) -> str:
    """The file of one operation."""
    operation = OPERATIONS[recorded.operation]
    head = {
        "schema": SCHEMA,
        "operation": operation.id,
        "title": operation.title,
        "source": operation.source,
        "promise": operation.promise.value,
        "arithmetic": _stated(operation.id),
        "clauses": dict(operation.clauses),
        "seeds": seeds,
        "left_out": dict(sorted(recorded.left_out.items())),
    }
    lines = [f"{json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}" for name, value in head.items()]
    vectors = ",\n".join(json.dumps(vector, ensure_ascii=False, allow_nan=False) for vector in recorded.vectors)
    return "{\n" + ",\n".join(lines) + f',\n"vectors": [\n{vectors}\n]\n}}\n'


def _stated(operation: str) -> dict[str, str] | None:
    arithmetic = STATED.get(operation)
    if arithmetic is None:
        return None
    names = {"form": arithmetic.form, "accumulator": arithmetic.accumulator}
    weights = {"weights": "activations"} if operation in STORED_PRODUCTS else {}
    return names | {"roundings": arithmetic.roundings.__name__} | weights


# **Reading** checks everything. The outer form is checked here: kinds of fields, sizes, depth. Values stay trees, which
# `lowbit.backend.wire` checks when it decodes them.


@dataclass(frozen=True)
class Step:
    """One step of a stateful operation.

    Attributes:
        arguments: by name, as trees.
        result: the tree of the result; None for a refused step.
        refused: whether the step is one that must be refused.
    """

    arguments: dict[str, Tree]
    result: Tree
    refused: bool


@dataclass(frozen=True)
class Vector:
    """One vector.

    Attributes:
        id: of the suite's case.
        flags: its special properties.
        arguments: by name, as trees.
        answer: the trees of ``result``, ``exact`` and ``bound`` that are present.
        steps: of a stateful operation.
    """

    id: str
    flags: frozenset[str]
    arguments: dict[str, Tree]
    answer: dict[str, Tree]
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Document:
    """One file.

    Attributes:
        file: its name.
        operation: whose vectors they are.
        vectors: in the order of the file.
    """

    file: str
    operation: Operation
    vectors: tuple[Vector, ...]


def read(path: Path) -> Document:
    """The contents of one file.

    Raises:
        FormatError: see `parse`; or the file is too large.
        ArgumentError: it cannot be read.
    """
    return parse(path.name, read_bytes(path, MOST_FILE, "folder"))


def parse(file: str, data: bytes) -> Document:
    """The contents of one file, given its bytes.

    Raises:
        FormatError: not a file of vectors of this version, an operation that does not exist, or a field of a vector
            that is missing, of the wrong kind or too large.
    """
    name = quoted(file)[1:-1]
    fields = parsed(name, data)
    if (schema := fields.value("schema", str)) != SCHEMA:
        raise FormatError(name, "schema", quoted(schema), SCHEMA)
    if (operation := fields.value("operation", str)) not in OPERATIONS:
        raise FormatError(name, "operation", quoted(operation), "an operation of the specification")
    vectors = enumerate(fields.value("vectors", list))
    return Document(name, OPERATIONS[operation], tuple(_vector(f"{name}: vector {at}", each) for at, each in vectors))


def _vector(where: str, tree: Tree) -> Vector:
    fields = _object(where, "vector", tree)
    if (size := _size(tree)) > MOST_TEXT:
        raise FormatError(where, "size", f"{size} characters or nested too deeply", f"at most {MOST_TEXT} characters")
    flags = fields.value("flags", list)
    if not all(isinstance(flag, str) for flag in flags):
        raise FormatError(where, "flags", described(flags), "a list of texts")
    steps = enumerate(fields.value("steps", list, []))
    return Vector(
        fields.value("id", str),
        frozenset(flags),
        fields.value("arguments", dict),
        {key: fields.values[key] for key in ("result", "exact", "bound") if key in fields.values},
        tuple(_step(f"{where}, step {at}", each) for at, each in steps),
    )


def _step(where: str, tree: Tree) -> Step:
    fields = _object(where, "step", tree)
    refused = fields.value("refused", bool, False)
    return Step(fields.value("arguments", dict), fields.values.get("result"), refused)


def _object(where: str, field: str, tree: Tree) -> Fields:
    if not isinstance(tree, dict):
        raise FormatError(where, field, described(tree), "an object")
    return Fields(where, tree)


def _size(tree: Tree) -> int:
    """About the number of characters of a tree in its file; more than allowed if it is nested too deeply."""
    waiting, size = [(tree, 0)], 0
    while waiting:
        part, depth = waiting.pop()
        if depth > 2 * MOST_DEPTH or size > MOST_TEXT:  # a value of `lowbit.backend.wire` under one of these keys
            return MOST_TEXT + 1
        size += 1
        if isinstance(part, str):
            size += len(part)
        elif isinstance(part, list):
            waiting += [(inner, depth + 1) for inner in part]
        elif isinstance(part, dict):
            size += sum(map(len, part))
            waiting += [(inner, depth + 1) for inner in part.values()]
    return size
