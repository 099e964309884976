"""``lowbit backends``: which backends are installed, and which can run here."""

import json
import sys
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lowbit.backend import registry
from lowbit.backend.asking import MOST_SAID, ask
from lowbit.contract.checks import spoken
from lowbit.contract.ranges import Range
from lowbit.text import cleaned, one_line


def backends(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")] = False,
) -> None:
    """List the installed backends: what each declares, or why it cannot run here."""
    found = {}
    for name, description, printed in ask(registry.names()):
        found[name] = description
        if printed:  # standard output holds the answer
            print(cleaned(printed.rstrip("\n"), MOST_SAID), file=sys.stderr)
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


def said(limits: dict[str, Any]) -> str:
    """The limits of one operation in words.

    >>> said({"bits": [2, 4]}), said({})
    ('bits 2 or 4', 'all of it')
    >>> said({"columns": {"multiple": 8, "least": 1, "most": None}})
    'columns multiples of 8 from 1'
    """
    words = {name: str(Range(**each)) if isinstance(each, dict) else spoken(each) for name, each in limits.items()}
    return "; ".join(f"{name} {each}" for name, each in words.items()) or "all of it"
