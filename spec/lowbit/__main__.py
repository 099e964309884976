"""``python -m lowbit`` is ``lowbit``: the command line, and an interrupt before it is there and after it has ended.

Python puts the system's own reaction to Ctrl-C back when it ends, which kills the process without a word. That takes a
tenth of a second or more where much is imported. So the process is ended here, after the functions of `atexit` have run
and everything is written.
"""

import atexit
import os
import signal
import sys
import threading
from contextlib import suppress
from types import FrameType
from typing import NoReturn

USAGE_ERROR, INTERRUPTED = 2, 130


class Interrupts:
    """Counts interrupts in place of raising an exception in the midst of the end."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.count += 1


def main() -> NoReturn:
    """Run the command line and end the process; the imports take long enough to be interrupted."""
    try:
        status = status_of_run()
        end(status, Interrupts(0))
    except KeyboardInterrupt:
        end(INTERRUPTED, Interrupts(1))


def status_of_run() -> int:
    """Run the command line; its exit status."""
    try:
        from lowbit.cli import main as run

        run()
    except SystemExit as leaving:
        if leaving.code is None or isinstance(leaving.code, int):
            return leaving.code or 0
        print(leaving.code, file=sys.stderr)
        return 1
    return 0


def end(status: int, interrupts: Interrupts) -> NoReturn:
    """End the process after everything is written; an interrupt until then counts."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, interrupts)
    atexit._run_exitfuncs()
    with suppress(OSError):  # of standard error
        try:
            sys.stdout.flush()
        except OSError as error:  # a full disk, or nobody reads the pipe
            status = status or USAGE_ERROR
            print(f"lowbit: {error}", file=sys.stderr)
        if interrupts.count:
            status = INTERRUPTED
            print("lowbit: interrupted", file=sys.stderr)
        sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
