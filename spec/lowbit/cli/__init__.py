"""The command line ``lowbit``.

Each command with an answer takes ``--json`` and then prints one JSON object on standard output; progress goes to
standard error. Exit status: 0 done, 1 a check failed or standard output was closed before all of the answer was read, 2
a wrong argument, something unavailable or too little memory, 130 interrupted.

Other packages add commands by an entry point in the group ``lowbit.commands``: a function, or a `typer.Typer` with
commands of its own. The conformance suite adds its command so, because the specification does not import the suite.
A command is imported when it is called (`lowbit.cli.commands`), so a broken package breaks its own commands only.
"""

import io
import os
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated

import typer

from lowbit import __version__
from lowbit.cli.commands import Commands
from lowbit.errors import LowbitError
from lowbit.text import one_line

UNREAD, USAGE_ERROR, INTERRUPTED = 1, 2, 130
GONE = "the current folder no longer exists; change to another one"
WIDTHS = range(10, 1001)  # columns in which a table can be read
NO_THREAD = "can't start new thread"  # Python's message, in an error without its own class

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _show_version(asked: bool) -> None:
    if asked:
        print(f"lowbit {__version__}")
        raise typer.Exit


@app.callback()
def lowbit(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    """The executable specification of low-bit LLM inference."""


def main() -> None:
    """Run the command line and exit with the status of the command."""
    answered(app)


def answered(run: Callable[[], object]) -> None:
    """Run a program of commands; an expected error becomes one line on standard error and an exit status."""
    _check_width()
    if isinstance(sys.stdout, io.TextIOWrapper):  # text that the terminal's encoding lacks is escaped, not an error
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            with warnings.catch_warnings():
                warnings.showwarning = _show_warning
                run()
        finally:
            _written_out()
    except BrokenPipeError:  # the reader has closed the pipe, as with `| head`; typer exits in the same way
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
    except SystemExit as end:  # typer ends every command so, an interrupted one with its own status
        if end.code == INTERRUPTED:
            print("lowbit: interrupted", file=sys.stderr)
        raise


def _show_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: object, **__: object
) -> None:
    """Print a warning on one line, like all remarks; the place in the code is shown for warnings of other packages."""
    place = "" if category.__module__.startswith("lowbit") or category is UserWarning else f" ({filename}:{lineno})"
    with suppress(OSError):
        print(f"lowbit: {one_line(str(message))}{place}", file=sys.stderr, flush=True)


def _check_width() -> None:
    """Drop widths that no terminal has: with 0 columns an answer is empty, and a huge width fills the memory."""
    for name in ("COLUMNS", "TERMINAL_WIDTH"):  # of rich, and of typer, which fails if it is not a number
        given = os.environ.get(name, "")
        if not (given.isascii() and given.isdecimal() and int(given[:9]) in WIDTHS):
            os.environ.pop(name, None)


def _is_gone() -> bool:
    """Whether the current folder has been deleted."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


def _written_out() -> None:
    """Flush the rest of the answer now: Python would do so at exit, and fail with a traceback."""
    try:
        sys.stdout.flush()
    except OSError:
        with open(os.devnull, "wb") as nowhere:  # otherwise Python would try to flush the rest again
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        raise


def _fail(sentence: str) -> None:
    with suppress(OSError):  # if standard error cannot be written either, the exit status still tells
        print(f"lowbit: {one_line(sentence)}", file=sys.stderr, flush=True)
    sys.exit(USAGE_ERROR)
