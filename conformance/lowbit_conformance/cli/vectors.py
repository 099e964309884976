"""``lowbit vectors export DIR`` and ``lowbit vectors check DIR``."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from lowbit.contract.checks import check_choice
from lowbit.errors import ArgumentError
from lowbit.operations import OPERATIONS
from lowbit.text import one_line

app = typer.Typer(
    help="Write or check test vectors: the suite's inputs, the specification's results.", no_args_is_help=True
)

AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]
SHOWN = 10


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(help="The folder to write to; created if it does not exist.")],
    op: Annotated[list[str] | None, typer.Option(help="Only this operation; repeatable.")] = None,
    seeds: Annotated[int, typer.Option(min=0, help="The number of seeds of the random tier.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Write one file of test vectors for each operation, and their JSON Schema."""
    from lowbit_conformance.vectors import files  # it imports all tests of the suite

    for name in op or []:
        check_choice("op", name, sorted(OPERATIONS))
    operations = op or sorted(OPERATIONS)
    told: dict[str, Any] = {}
    terminal = Console(stderr=True)
    with Progress(console=terminal, transient=True, disable=not terminal.is_interactive) as progress:
        task = progress.add_task("vectors", total=len(operations))
        for recorded in files.export(folder, operations, seeds):
            told[recorded.operation] = {"vectors": len(recorded.vectors), "left_out": dict(recorded.left_out)}
            progress.advance(task)
    if as_json:
        print(json.dumps({"folder": str(folder), "operations": told}))
        return
    table = Table("operation", "vectors", "left out")
    for name, counts in told.items():
        table.add_row(name, str(counts["vectors"]), str(sum(counts["left_out"].values())))
    Console().print(table)


@app.command()
def check(
    folder: Annotated[
        Path,
        typer.Argument(help="A folder that `lowbit vectors export` has written, with this version or an older one."),
    ],
    as_json: AsJson = False,
) -> None:
    """Check that this version of the specification gives the answers that the files state.

    It tests no backend. Exit status: 0 all answers are the same, 1 some differ, 2 a wrong argument.
    """
    from lowbit_conformance.vectors import checking, files

    paths = sorted(path for path in folder.glob("*.json") if path.name != files.SCHEMA_FILE)
    if not paths:
        raise ArgumentError("folder", str(folder), "a folder with files of vectors")
    found, checked = [], 0
    terminal = Console(stderr=True)
    with Progress(console=terminal, transient=True, disable=not terminal.is_interactive) as progress:
        for path in progress.track(paths, description="vectors"):
            document = files.read(path)
            checked += len(document.vectors)
            found += [
                {"file": document.file, "id": id, "message": text} for id, text in checking.disagreements(document)
            ]
    if as_json:
        print(json.dumps({"checked": checked, "disagreements": found}))
    else:
        for each in found[:SHOWN]:
            line = one_line(f"{each['file']}: {each['id']}: {each['message']}")
            Console().print(line, soft_wrap=True, markup=False)
        if len(found) > SHOWN:
            Console().print(f"… and {len(found) - SHOWN} more (--json lists all)")
        Console().print(f"{checked} vectors, {len(found)} of them answered otherwise by this version")
    raise typer.Exit(1 if found else 0)
