"""The command line ``lowbit``.

Each command that answers something takes ``--json`` and then prints one JSON object on standard output; progress goes
to standard error. Exit status: 0 done, 1 a check failed, 2 a wrong argument or something unavailable, 130 interrupted.

Other packages add commands by an entry point in the group ``lowbit.commands``, a function or a `typer.Typer` with
commands of its own; the conformance suite comes in that way, since the specification knows nothing of the suite.
"""

import sys
from importlib.metadata import entry_points

import typer

from lowbit.cli import backends, demo, model, new_weights, profiles
from lowbit.errors import LowbitError

COMMANDS = "lowbit.commands"
USAGE_ERROR, INTERRUPTED = 2, 130

app = typer.Typer(
    help="The executable specification of low-bit LLM inference.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (backends.backends, profiles.profiles, demo.demo, model.generate, model.logits, model.perplexity):
    app.command()(command)
app.command()(new_weights.new_weights)
for entry in sorted(entry_points(group=COMMANDS), key=lambda found: found.name):
    loaded = entry.load()
    if isinstance(loaded, typer.Typer):
        app.add_typer(loaded, name=entry.name)
    else:
        app.command(entry.name)(loaded)


def main() -> None:
    """Run the command line and leave with a status that means something."""
    try:
        app()
    except (LowbitError, OSError) as error:  # such as a full disk
        print(f"lowbit: {error}", file=sys.stderr)
        sys.exit(USAGE_ERROR)
    except SystemExit as end:  # typer ends every command so, an interrupted one with a status of its own
        if end.code == INTERRUPTED:
            print("lowbit: interrupted", file=sys.stderr)
        raise
