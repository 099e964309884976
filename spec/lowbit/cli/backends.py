"""``lowbit backends``: which backends are installed, and which can run here."""

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lowbit import backend as registry
from lowbit.check import spoken
from lowbit.errors import UnavailableError


def backends(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """List the installed backends: what they declare, and why one cannot run here."""
    found = {name: describe(name) for name in registry.names()}
    if as_json:
        print(json.dumps(found))
        return
    table = Table("backend", "usable", "declares")
    for name, description in found.items():
        if description["usable"]:
            declares = "\n".join(f"{op}: {said(limits)}" for op, limits in description["operations"].items())
            table.add_row(name, "[green]yes[/]", declares)
        else:
            table.add_row(name, "[red]no[/]", escape(f"{description['reason']}; {description['remedy']}"))
    Console().print(table)


def describe(name: str) -> dict[str, Any]:
    """One backend as the JSON answer has it: usable or not and why, and the limits of each operation."""
    try:
        backend = registry.find(name)
        state = backend.availability()
        if not state.usable:
            return {"usable": False, "reason": state.reason, "remedy": state.remedy}
        capabilities = backend.capabilities()
    except UnavailableError as error:
        return {"usable": False, "reason": error.reason, "remedy": error.remedy}
    operations = {
        operation: {name: list(allowed) for name, allowed in declared.limits.items()}
        for operation, declared in capabilities.operations.items()
    }
    return {"usable": True, "operations": operations, "details": dict(capabilities.details or {})}


def said(limits: dict[str, list[object]]) -> str:
    """The limits of one operation as one says them.

    >>> said({"bits": [2, 4]}), said({})
    ('bits 2 or 4', 'all of it')
    """
    return "; ".join(f"{name} {spoken(allowed)}" for name, allowed in limits.items()) or "all of it"
