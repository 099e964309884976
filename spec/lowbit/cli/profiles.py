"""``lowbit profiles``: what a backend can be certified for."""

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column, Table

from lowbit.cli.backends import said
from lowbit.contract.operation import sentence
from lowbit.profiles import PROFILES, Profile


def profiles(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")] = False,
) -> None:
    """List the profiles that a backend can claim and be certified for."""
    if as_json:
        print(json.dumps({id: describe(profile) for id, profile in PROFILES.items()}))
        return
    name = Column("profile", min_width=max(map(len, PROFILES)))  # whole: it is typed into --profile
    table = Table(name, "clauses", show_lines=True)
    for id, profile in PROFILES.items():
        limits = said(profile.told_parameters) or "all parameters"
        table.add_row(f"{id}\n{profile.title}: {limits}", "\n".join(said_clauses(profile.clauses)))
    Console().print(table)


def describe(profile: Profile) -> dict[str, object]:
    """One profile as in the JSON answer; the habits of its operations are part of it."""
    return {
        "title": profile.title,
        "digest": profile.digest,
        "clauses": {clause: sentence(clause) for clause in profile.clauses},
        "habits": {habit: sentence(habit) for habit in profile.habits},
        "parameters": profile.told_parameters,
    }


def said_clauses(clauses: tuple[str, ...]) -> list[str]:
    """Clauses in words, one operation on a line.

    >>> said_clauses(("packing.pack/C1", "packing.pack/C2", "packing.unpack/C1"))
    ['packing.pack C1 C2', 'packing.unpack C1']
    """
    lines: dict[str, list[str]] = {}
    for clause in clauses:
        operation, _, number = clause.rpartition("/")
        lines.setdefault(operation, []).append(number)
    return [" ".join((operation, *numbers)) for operation, numbers in lines.items()]
