"""Vectors as files: one JSON object for each operation, one line for each vector.

The form is written down in ``schema/vectors.schema.json``, which `export` puts beside the files. The same vectors give
the same bytes, on every host.
"""

import json
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path
from typing import Any

from lowbit.bounds import Arithmetic
from lowbit.contract import OPERATIONS
from lowbit.errors import ArgumentError, FormatError
from lowbit.storage import write_whole
from lowbit.values import Tree
from lowbit_conformance.marking import Settings
from lowbit_conformance.vectors.judging import STATED
from lowbit_conformance.vectors.record import Vectors, record

SCHEMA = "lowbit-vectors/1"
SCHEMA_FILE = "vectors.schema.json"
MOST_FILE = 1 << 28
"""Bytes of a file that is read."""


def schema_text() -> str:
    """The JSON Schema of a file."""
    return (files("lowbit_conformance.vectors") / "schema" / SCHEMA_FILE).read_text()


def export(folder: Path, operations: Iterable[str], seeds: int) -> Iterable[Vectors]:
    """Write the files of some operations and the schema, and give each operation's vectors once its file is there.

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
        "arithmetic": _stated(STATED.get(operation.id)),
        "clauses": dict(operation.clauses),
        "seeds": seeds,
        "left_out": dict(sorted(recorded.left_out.items())),
    }
    lines = [f"{json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}" for name, value in head.items()]
    vectors = ",\n".join(json.dumps(vector, ensure_ascii=False, allow_nan=False) for vector in recorded.vectors)
    return "{\n" + ",\n".join(lines) + f',\n"vectors": [\n{vectors}\n]\n}}\n'


def _stated(arithmetic: Arithmetic | None) -> dict[str, str] | None:
    if arithmetic is None:
        return None
    return {"form": arithmetic.form, "accumulator": arithmetic.accumulator, "roundings": arithmetic.roundings.__name__}


def read(path: Path) -> dict[str, Any]:
    """The contents of one file, of which only the outer form has been looked at.

    Raises:
        FormatError: no file of vectors of this version, or of an operation that does not exist.
    """
    name = path.name
    try:
        size = path.stat().st_size
        if size > MOST_FILE:
            raise FormatError(name, "size", size, f"at most {MOST_FILE} bytes")
        document = json.loads(path.read_bytes().decode())
    except OSError as error:
        raise FormatError(name, "file", error.strerror, "one that can be read") from None
    except (ValueError, RecursionError) as error:
        raise FormatError(name, "text", error, "JSON") from None
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise FormatError(name, "schema", document.get("schema") if isinstance(document, dict) else "none", SCHEMA)
    if document.get("operation") not in OPERATIONS:
        raise FormatError(name, "operation", document.get("operation"), "an operation of the specification")
    vectors = document.get("vectors")
    if not isinstance(vectors, list) or not all(_whole(vector) for vector in vectors):
        raise FormatError(name, "vectors", "a list with something else in it", "a list of vectors, see the schema")
    return document


def _whole(vector: Tree) -> bool:
    return (
        isinstance(vector, dict)
        and isinstance(vector.get("id"), str)
        and isinstance(vector.get("arguments"), dict)
        and isinstance(vector.get("flags"), list)
        and isinstance(vector.get("steps", []), list)
        and all(isinstance(step, dict) and isinstance(step.get("arguments"), dict) for step in vector.get("steps", []))
    )
