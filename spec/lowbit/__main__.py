"""``python -m lowbit`` is ``lowbit``: the command line, and Ctrl-C before and after a command."""

import os
import sys

if __name__ == "__main__" and not sys.flags.safe_path and sys.path[0] == os.getcwd():
    del sys.path[0]  # the current folder, in which a numpy.py or signal.py would be run instead of the real module

import atexit
import gc
import signal
from types import FrameType

INTERRUPTED = 130
LINE = "lowbit: interrupted"


def main() -> None:
    """Run the command line.

    An interrupt is handled while modules are imported, which takes a while, and also at the end, while Python waits for
    threads; then there is nothing left to clean up.
    """
    atexit.register(_ignore)  # registered first, it runs last
    gc.disable()  # while modules are imported, of which nothing becomes garbage (`lowbit.cli.commands`)
    try:
        _open_standard_streams()
        from lowbit.cli import main as run

        run()
    except KeyboardInterrupt:
        print(LINE, file=sys.stderr)
        sys.exit(INTERRUPTED)
    finally:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, _leave)


def _open_standard_streams() -> None:
    """Connect each standard stream that the caller has closed to the null device.

    Python has no object for a closed stream. The next file that is opened would get its number, and then a message of a
    library or a child process would be written into that file.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free, which is this one
            os.set_inheritable(opened, True)
            setattr(sys, name, os.fdopen(opened, mode, closefd=False))


def _ignore() -> None:
    """Ignore interrupts: Python is about to drop its handler, and the signal would then end the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _leave(number: int, frame: FrameType | None) -> None:
    os.write(sys.__stderr__.fileno() if sys.__stderr__ is not None else 2, f"{LINE}\n".encode())
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()
