"""The progress bar and the remarks of all commands: on standard error, so that standard output holds only answers."""

import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Column

from lowbit.text import one_line

LABEL_WIDTH = 40


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show the progress of one task: call the yielded function with the work done and the total work."""
    with changing_bar() as report:
        report(what, 0, 1)
        yield lambda done, total: report(what, done, total)


@contextmanager
def changing_bar() -> Iterator[Callable[[str, int, int], None]]:
    """Show one task after another, in a line of at most 80 columns that is erased at the end.

    It appears with the first report: it draws on its own thread, and some backends must start before there is one. If
    standard error is not a terminal, each new task gets its own line.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines()
        return
    label = TextColumn("{task.description}", markup=False, table_column=Column(width=LABEL_WIDTH, no_wrap=True))
    columns = (label, BarColumn(bar_width=20), TaskProgressColumn(), TimeRemainingColumn(compact=True))
    progress = Progress(*columns, console=console, transient=True)
    task = progress.add_task("", total=None)

    def report(what: str, done: int, total: int) -> None:
        what = one_line(what)
        if progress.tasks[0].description != what:
            progress.reset(task, description=what)
        progress.update(task, completed=done, total=total)
        progress.start()

    try:
        yield report
    finally:
        if progress.live.is_started:
            progress.stop()


def _lines() -> Callable[[str, int, int], None]:
    said: list[str] = []

    def report(what: str, done: int, total: int) -> None:
        if said[-1:] != [what]:
            said.append(what)
            print(f"lowbit: {one_line(what)}", file=sys.stderr, flush=True)

    return report


def note(sentence: str) -> None:
    """A remark on an answer or a model, on standard error; on a terminal in lines of its width."""
    width = shutil.get_terminal_size().columns if sys.stderr.isatty() else 2**30
    sentence = f"lowbit: {one_line(sentence)}"
    print(textwrap.fill(sentence, width, subsequent_indent="  ", break_on_hyphens=False), file=sys.stderr)
