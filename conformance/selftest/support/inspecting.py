"""Runs ``lowbit inspect`` and reads its answer."""

import json
from typing import Any

from typer.testing import CliRunner, Result

from lowbit.cli import app


def run(*arguments: object) -> Result:
    """The command, asking the backend numpy where it names none."""
    backend = [] if "--backend" in arguments else ["--backend", "numpy"]
    return CliRunner().invoke(app, [str(argument) for argument in ["inspect", *arguments, *backend]])


def answer(*arguments: object) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, (result.output, result.exception)
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def rows(found: dict[str, Any]) -> dict[tuple[str, str], tuple[int, int, int]]:
    """The table, by part and type."""
    return {(row["part"], row["type"]): (row["tensors"], row["parameters"], row["bytes"]) for row in found["parts"]}
