"""The command line ``lowbit``.

Each command that answers something takes ``--json`` and then prints one JSON object on standard output; progress goes
to standard error. Exit status: 0 done, 1 a check failed or standard output was closed before all of the answer was
read, 2 a wrong argument, something unavailable or too little memory, 130 interrupted.

Other packages add commands by an entry point in the group ``lowbit.commands``, a function or a `typer.Typer` with
commands of its own; the conformance suite comes in that way, since the specification knows nothing of the suite.
A command is imported when it is asked for (`lowbit.cli.commands`), so a package that is broken breaks no other command.
"""

import io
import os
import sys
from collections.abc import Callable
from contextlib import suppress

import typer

from lowbit.cli.commands import Commands
from lowbit.errors import LowbitError
from lowbit.text import one_line

UNREAD, USAGE_ERROR, INTERRUPTED = 1, 2, 130
GONE = "the current folder does not exist any more; change to another one"
WIDTHS = range(10, 1001)  # columns in which a table can be read
NO_THREAD = "can't start new thread"  # Python's words, in an error that has no class of its own

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def lowbit() -> None:
    """The executable specification of low-bit LLM inference."""


def main() -> None:
    """Run the command line and leave with a status that means something."""
    answered(app)


def answered(run: Callable[[], object]) -> None:
    """Run a program of commands; what goes wrong on purpose is a line on standard error and a status."""
    _check_width()
    if isinstance(sys.stdout, io.TextIOWrapper):  # text that the terminal's encoding lacks is escaped, not an error
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            run()
        finally:
            _written_out()
    except BrokenPipeError:  # nobody reads the answer any more, as behind `| head`; typer ends in the same way
        sys.exit(UNREAD)
    except (LowbitError, OSError) as error:  # such as a full disk
        _fail(GONE if isinstance(error, FileNotFoundError) and _is_gone() else str(error))
    except MemoryError as error:
        _fail(f"out of memory: {str(error) or 'an allocation failed'}; free some, or ask for less")
    except RecursionError:
        _fail("the input is nested too deeply")
    except RuntimeError as error:
        if str(error) != NO_THREAD:
            raise
        _fail("out of memory or of threads: no thread could be started; raise the limits that `ulimit -a` shows")
    except SystemExit as end:  # typer ends every command so, an interrupted one with a status of its own
        if end.code == INTERRUPTED:
            print("lowbit: interrupted", file=sys.stderr)
        raise


def _check_width() -> None:
    """Drop widths that no terminal has. In 0 columns an answer is empty, and a huge number of them fills the memory."""
    for name in ("COLUMNS", "TERMINAL_WIDTH"):  # of rich, and of typer, which fails if it is no number
        given = os.environ.get(name, "")
        if not (given.isascii() and given.isdecimal() and int(given[:9]) in WIDTHS):
            os.environ.pop(name, None)


def _is_gone() -> bool:
    """Whether the folder in which the user stands has been deleted."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


def _written_out() -> None:
    """Write what is left of the answer now: Python would do so at its end, and fail with a trace."""
    try:
        sys.stdout.flush()
    except OSError:
        with open(os.devnull, "wb") as nowhere:  # or Python would try to write the same again
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        raise


def _fail(sentence: str) -> None:
    with suppress(OSError):  # where standard error cannot be written either, the status says it
        print(f"lowbit: {one_line(sentence)}", file=sys.stderr, flush=True)
    sys.exit(USAGE_ERROR)
