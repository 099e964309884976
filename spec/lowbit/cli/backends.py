"""``lowbit backends``: which backends are installed, and which can run here."""

import json
import sys
from contextlib import redirect_stdout
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lowbit import backend as registry
from lowbit.backend import Backend
from lowbit.check import spoken
from lowbit.errors import UnavailableError, words_of
from lowbit.text import one_line


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
            lines = [one_line(f"{op}: {said(limits)}") for op, limits in description["operations"].items()]
            table.add_row(escape(one_line(name)), "[green]yes[/]", escape("\n".join(lines)))
        else:
            why = one_line(f"{description['reason']}; {description['remedy']}")
            table.add_row(escape(one_line(name)), "[red]no[/]", escape(why))
    Console().print(table)


def describe(name: str) -> dict[str, Any]:
    """One backend as the JSON answer has it: usable or not and why, and the limits of each operation.

    One that fails when it is asked is not usable, and the others are listed all the same. What one prints goes to
    standard error, since standard output holds the answer.
    """
    try:
        with redirect_stdout(sys.stderr):
            return _asked(registry.find(name))
    except UnavailableError as error:
        return {"usable": False, "reason": error.reason, "remedy": error.remedy}
    except (KeyboardInterrupt, MemoryError):
        raise
    except BaseException as error:
        reason = f"it fails with {words_of(error)}"
        return {"usable": False, "reason": reason, "remedy": "repair or reinstall its package"}


def _asked(backend: Backend) -> dict[str, Any]:
    """What a backend says of itself, in types that JSON has."""
    state = backend.availability()
    if not state.usable:
        return {"usable": False, "reason": str(state.reason), "remedy": str(state.remedy)}
    capabilities = backend.capabilities()
    operations = {
        operation: {name: list(allowed) for name, allowed in declared.limits.items()}
        for operation, declared in capabilities.operations.items()
    }
    answer = {"usable": True, "operations": operations, "details": dict(capabilities.details or {})}
    json.dumps(answer)
    return answer


def said(limits: dict[str, list[object]]) -> str:
    """The limits of one operation as one says them.

    >>> said({"bits": [2, 4]}), said({})
    ('bits 2 or 4', 'all of it')
    """
    return "; ".join(f"{name} {spoken(allowed)}" for name, allowed in limits.items()) or "all of it"
