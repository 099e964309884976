"""The report as a JSON document: the form for programs, described by ``schema/report.schema.json``."""

import json
from pathlib import Path
from typing import Any

from lowbit.system.storage import write_whole
from lowbit_conformance.report.model import Report, as_json

SCHEMA_FILE = Path(__file__).parent / "schema" / "report.schema.json"


def write_json(report: Report, path: Path) -> None:
    """Write the report as JSON, to a complete file or none."""
    write_whole(path, (text_of(report) + "\n").encode())


def text_of(report: Report) -> str:
    """The document as text with one line per case, so that two reports can be compared line by line."""
    lines = ",\n".join(f'  "{key}": {_value(value)}' for key, value in as_json(report).items())
    return f"{{\n{lines}\n}}"


def _value(value: Any) -> str:
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join(f"    {json.dumps(item)}" for item in value) + "\n  ]"
    return json.dumps(value)
