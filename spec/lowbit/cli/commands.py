"""The commands of ``lowbit``, its own and those of other packages, each imported when it is called.

The description of a command in ``lowbit --help`` is read from its source, which is parsed and not run. So help is fast,
and a package cannot break it.
"""

import ast
import gc
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer
from rich.markup import escape
from typer.core import TyperCommand, TyperGroup

from lowbit.errors import UnavailableError, words_of
from lowbit.system.entries import loaded, read, single
from lowbit.system.memory import check_address_space
from lowbit.system.threads import usable_processors
from lowbit.text import one_line, quoted

GROUP = "lowbit.commands"
OWN = {
    "backends": "lowbit.cli.backends:backends",
    "profiles": "lowbit.cli.profiles:profiles",
    "demo": "lowbit.cli.demo:demo",
    "generate": "lowbit.cli.generate:generate",
    "chat": "lowbit.cli.chat:chat",
    "logits": "lowbit.cli.logits:logits",
    "perplexity": "lowbit.cli.perplexity:perplexity",
    "compare": "lowbit.cli.compare:compare",
    "step": "lowbit.cli.step:step",
    "inspect": "lowbit.cli.inspection:inspect",
    "quantize": "lowbit.cli.quantize:quantize",
    "convert": "lowbit.cli.convert:convert",
    "pool": "lowbit.cli.pool:pool",
    "uptrain": "lowbit.cli.uptrain:uptrain",
    "ksort": "lowbit.cli.ksort:ksort",
    "new-weights": "lowbit.cli.new_weights:new_weights",
}
"""The commands of this package, which no other package can replace."""
PLAIN = re.compile(r"[\w.-]+", re.ASCII)
MOST_SOURCE_BYTES = 2**20
IMPORT_BYTES, IMPORT_BYTES_A_THREAD = 160 * 2**20, 40 * 2**20
"""Address space that numpy needs; with less, its OpenBLAS ends the process or sends it an interrupt."""


class Lazy(TyperCommand):
    """A command that is not imported yet.

    Args:
        name: of the command.
        offers: the entry points of this name; one, unless several packages offer it.
    """

    def __init__(self, name: str, offers: list[EntryPoint]) -> None:
        super().__init__(name=name if PLAIN.fullmatch(name) else quoted(name))
        self._asked, self._offers = name, offers

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Import the command; its context replaces this one.

        Garbage collection resumes there but skips the imported objects: scanning them took a tenth of a second of
        ``lowbit generate``.
        """
        command = self.imported()
        gc.freeze()
        gc.enable()
        return command.make_context(info_name, args, parent=parent, **extra)

    def describe(self) -> None:
        """Fill in its description for help."""
        if len(self._offers) == 1:
            told = summary(self._offers[0]) or f"from {self._offers[0].value}"
        else:
            told = "offered by several packages"
        self.help = escape(one_line(told))

    def imported(self) -> Any:
        """The command itself.

        Raises:
            UnavailableError: its package is broken.
        """
        what = f"command {quoted(self._asked)}"
        entry = single(self._offers, what)
        check_address_space("lowbit", IMPORT_BYTES + IMPORT_BYTES_A_THREAD * usable_processors())
        found = loaded(entry, what)
        remedy = "repair or reinstall its package"
        if not callable(found):
            reason = f"{entry.value} is of type {type(found).__name__}, not a function or a typer.Typer"
            raise UnavailableError(what, reason, remedy)
        try:
            if isinstance(found, typer.Typer):
                return typer.main.get_group(found)
            alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
            alone.command(entry.name)(found)
            return typer.main.get_command(alone)
        except Exception as error:
            reason = f"{entry.value} is not a command: {words_of(error)}"
            raise UnavailableError(what, reason, remedy) from error


class Commands(TyperGroup):
    """All commands: lowbit's own in their order, then those of other packages by name."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        offers = {name: [EntryPoint(name, value, GROUP)] for name, value in OWN.items()}
        found = read(GROUP)
        for sentence in found.broken:
            with suppress(OSError):  # if standard error cannot be written, the command still runs
                print(f"lowbit: {one_line(sentence)}", file=sys.stderr)
        for entry in found.entries:
            if entry.name not in OWN:
                offers.setdefault(entry.name, []).append(entry)
        for name, offered in offers.items():
            self.add_command(Lazy(name, offered), name)

    def list_commands(self, ctx: Any) -> list[str]:
        """Their names, for help."""
        for command in self.commands.values():
            if isinstance(command, Lazy):
                command.describe()
        return super().list_commands(ctx)


# **From the source.**


def summary(entry: EntryPoint) -> str:
    """The first line of the docstring or help text of a command; empty if its source does not show it.

    >>> summary(EntryPoint("backends", OWN["backends"], GROUP))
    'List the installed backends: what each declares, or why it cannot run here.'
    """
    with suppress(Exception), warnings.catch_warnings(action="ignore"):
        for path in _sources(entry.module):
            body = _parsed(path).body
            return next((told.strip().splitlines()[0] for node in body if (told := _told(node, entry.attr))), "")
    return ""


@cache
def _parsed(path: Path) -> ast.Module:
    """The source of a module, parsed once: several commands may be in it."""
    with path.open("rb") as stream:
        return ast.parse(stream.read(MOST_SOURCE_BYTES))


def _sources(module: str) -> Iterator[Path]:
    """The file of a module, found without importing its packages."""
    package, *rest = module.split(".")
    spec = find_spec(package)
    if spec is None:
        return
    if not rest and spec.has_location and spec.origin is not None:
        yield Path(spec.origin)
    for folder in spec.submodule_search_locations or ():
        place = Path(folder, *rest)
        yield from (path for path in (place.with_suffix(".py"), place / "__init__.py") if path.is_file())


def _told(node: ast.stmt, name: str) -> str | None:
    """The docstring of the function `name`, or the help of the `typer.Typer` that is assigned to it."""
    if isinstance(node, ast.FunctionDef) and node.name == name:
        return ast.get_docstring(node)
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
        if name not in [target.id for target in node.targets if isinstance(target, ast.Name)]:
            return None
        for keyword in node.value.keywords:
            if keyword.arg == "help" and isinstance(keyword.value, ast.Constant):
                return str(keyword.value.value)
    return None
