"""The conformance suite on the backends of ``lowbit demo``: which can take part, and what the suite says of them.

The specification does not import the suite; its command is run like any other program.
"""

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from lowbit.backend import registry
from lowbit.backend.base import Backend
from lowbit.errors import NotDeclaredError, UnavailableError
from lowbit.model.config import LlamaConfig
from lowbit.model.weights import LlamaWeights, matrices
from lowbit.quantization.affine import QuantizedMatrix
from lowbit.runtime.elementwise import needed
from lowbit.system.interpreters import python_command, python_environment
from lowbit.system.threads import side_by_side, usable_processors
from lowbit.text import one_line

PROFILE = "lowbit-1.1/qgemv-4"  # of the first step
PRODUCTS = ("affine.quantize", "affine.dequantize", "linear.qgemv", "linear.qgemm")
CASES = "The cases are a few of each clause, and all that this model's own shapes and weights make."
LOADING = "backend"  # the suite's name for the operation of loading the backend
SPECIFICATION = "reference"  # the backend of the specification itself
BASELINE = (SPECIFICATION, "numpy")  # others are compared with the first of them that takes part


def usable_backends(console: Console, weights: LlamaWeights) -> list[str]:
    """The names of the backends that can run here and take the model's matrices; for the others, prints why not."""
    names = []
    for name in registry.names():
        try:
            with registry.load(name) as backend:
                if missing := lacking(backend, weights):
                    raise missing
            names.append(name)
        except (UnavailableError, NotDeclaredError) as error:
            console.print(f"[yellow]not shown:[/] {escape(str(error))}")
    return sorted(names, key=lambda name: (BASELINE.index(name) if name in BASELINE else len(BASELINE), name))


def lacking(backend: Backend, weights: LlamaWeights) -> NotDeclaredError | None:
    """The first matrix of a model by which a backend does not declare a product, as an error; None if there is none."""
    declared = backend.capabilities().operations.get("linear.qgemv")
    if declared is None:
        return NotDeclaredError(backend.name, "linear.qgemv")
    for _, matrix in matrices(weights):
        if isinstance(matrix, QuantizedMatrix) and (missing := declared.lacks(matrix.parameters)):
            return NotDeclaredError(backend.name, "linear.qgemv", missing)
    return None


def certified_for_profile(names: Sequence[str], console: Console) -> dict[str, int]:
    """The backends that the suite certifies for `PROFILE`, and how many cases each passed.

    Each verdict is shown as soon as it is known.
    """

    def certified(name: str) -> int | None:
        report = suite(name, "--profile", PROFILE)
        granted = all(certificate["certified"] for certificate in report["certificates"])
        passed: int = report["counts"]["passed"]
        said = f"{name}: {'certified' if granted else 'not certified'} for {PROFILE}, {passed} cases passed"
        console.print(one_line(said), markup=False, highlight=False)
        return passed if granted else None

    found = side_by_side(certified, names, usable_processors())
    return {name: passed for name, passed in zip(names, found, strict=True) if passed is not None}


def operations_of(config: LlamaConfig) -> tuple[str, ...]:
    """The operations with which the demo runs a model."""
    return *PRODUCTS, *needed(config)


def certify(name: str, model: Path, config: LlamaConfig, html: Path | None = None) -> dict[str, Any]:
    """The report of the suite on the operations that a model needs: a few cases of each clause, and all cases from the
    model's own matrices.

    Args:
        name: of the backend.
        model: a GGUF file.
        config: of that model.
        html: where the report is also written as a page; None for no page.
    """
    operations = [word for operation in operations_of(config) for word in ("--op", operation)]
    page = ["--html", str(html)] if html else []
    return suite(name, "--quick", "--seeds", "1", *operations, "--model", str(model), *page)


def suite(name: str, *arguments: str) -> dict[str, Any]:
    """The report of ``lowbit conformance NAME`` with these arguments.

    Raises:
        UnavailableError: the command prints no report.
    """
    command = python_command("-m", "lowbit", "conformance", name, "--json", *arguments)
    done = subprocess.run(command, env=python_environment(), capture_output=True, text=True, check=False)
    try:
        report: dict[str, Any] = json.loads(done.stdout)
    except ValueError as error:
        said = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        reason = f"it ended with status {done.returncode} and printed: {said}"
        remedy = f"run `lowbit conformance {name}` to see why"
        raise UnavailableError("the conformance suite", reason, remedy) from error
    return report


COLUMNS = ("operation", "passed", "declared", "specified", "bound used")


def rows_of(verdict: Mapping[str, Any]) -> list[list[str]]:
    """The cells under `COLUMNS`, for each declared operation of a verdict."""
    return [
        [
            "loading" if row["operation"] == LOADING else row["operation"],
            *(str(row[key]) for key in ("passed", "declared", "specified", "bound_used")),
        ]
        for row in verdict["operations"]
        if row["declared"]
    ]


def show_verdicts(console: Console, verdicts: Sequence[dict[str, Any]]) -> None:
    """A table of the verdicts, operation by operation; then the backends that are left out."""
    console.print(f"[bold]Conformance.[/] {CASES}")
    table = Table("backend", COLUMNS[0])
    for column in COLUMNS[1:]:
        table.add_column(column, justify="right")
    for verdict in verdicts:
        style = "green" if verdict["verdict"] == "passed" else "red"
        for row in rows_of(verdict):
            table.add_row(Text(one_line(verdict["backend"]), style), *row)
        table.add_section()
    console.print(table)
    for verdict in verdicts:
        if verdict["verdict"] != "passed":
            name = escape(one_line(verdict["backend"]))
            console.print(f"[red]{name}: {verdict['verdict']}[/], so it is not compared below")


def verdict_lines(answer: Mapping[str, Any]) -> list[str]:
    """For each backend, whether it is certified, and of how many cases."""
    lines = []
    for verdict in answer["conformance"]:
        name, counts = verdict["backend"], verdict["counts"]
        if name in answer["certified"]:
            cases = answer["with_profile"][name] + counts["passed"]
            lines.append(f"{name}: certified for {answer['profile']}; {cases} cases passed")
        elif name not in answer["with_profile"]:
            lines.append(f"{name}: not certified for {answer['profile']}, and so not compared")
        else:
            wrong = f"{counts['declared'] - counts['passed']} of {counts['declared']} cases did not pass"
            lines.append(f"{name}: {verdict['verdict']}, and so not compared; {wrong}")
    return lines
