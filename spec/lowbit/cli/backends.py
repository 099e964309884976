"""``lowbit backends``: which backends are installed, and which can run here."""

import json
import sys
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lowbit.backend import registry
from lowbit.backend.asking import MOST_SAID, Description, ask
from lowbit.contract.checks import spoken
from lowbit.contract.ranges import Range
from lowbit.text import cleaned, one_line


def backends(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME", help="Only these backends, with the limits of their operations."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")] = False,
) -> None:
    """List the installed backends: what each declares, or why it cannot run here."""
    found = descriptions(chosen(names))
    if as_json:
        print(json.dumps(found))
        return
    table = Table("backend", "usable", "declares")
    for name, description in found.items():
        if description["usable"]:
            lines = details(description["operations"]) if names else [summary(description["operations"])]
            table.add_row(escape(one_line(name)), "[green]yes[/]", escape("\n".join(map(one_line, lines))))
        else:
            why = one_line(f"{description['reason']}; {description['remedy']}")
            table.add_row(escape(one_line(name)), "[red]no[/]", escape(why))
    Console().print(table)


def chosen(names: list[str] | None) -> list[str]:
    """The backends of these names, each once; without names, all that are installed.

    Raises:
        ArgumentError: a name that no installed package offers.
    """
    asked = list(dict.fromkeys(names)) if names else registry.names()
    for name in asked:
        registry.check_name(name)
    return asked


def descriptions(names: list[str]) -> dict[str, Description]:
    """The backends' own descriptions; their output goes to standard error, because standard output holds the answer."""
    found = {}
    for name, description, printed in ask(names):
        found[name] = description
        if printed:
            print(cleaned(printed.rstrip("\n"), MOST_SAID), file=sys.stderr)
    return found


def summary(operations: dict[str, dict[str, Any]]) -> str:
    """How many operations are declared, and how many of them with limits.

    >>> summary({"packing.pack": {}, "packing.unpack": {"bits": [4]}})
    '2 operations, 1 of them with limits'
    """
    limited = sum(map(bool, operations.values()))
    number = f"{len(operations)} operation{'s' * (len(operations) != 1)}"
    return f"{number}, {limited} of them with limits" if limited else number


def details(operations: dict[str, dict[str, Any]]) -> list[str]:
    """A line for all operations that have the same limits; those without limits come first.

    >>> details({"packing.pack": {}, "packing.unpack": {"bits": [4]}})
    ['packing.pack: no limits', 'packing.unpack: bits 4']
    """
    alike: dict[str, list[str]] = {"no limits": []}
    for name, limits in operations.items():
        alike.setdefault(said(limits) or "no limits", []).append(name)
    return [f"{', '.join(names)}: {limits}" for limits, names in alike.items() if names]


def said(limits: dict[str, Any]) -> str:
    """The limits of one operation in words.

    >>> said({"bits": [2, 4]})
    'bits 2 or 4'
    >>> said({"columns": {"multiple": 8, "least": 1, "most": None}})
    'columns multiples of 8 from 1'
    """
    words = {name: str(Range(**each)) if isinstance(each, dict) else spoken(each) for name, each in limits.items()}
    return "; ".join(f"{name} {each}" for name, each in words.items())
