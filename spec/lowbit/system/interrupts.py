"""Ctrl-C while a device works: it takes effect between two layers or two tokens, not during a call to the device.

Python raises `KeyboardInterrupt` between any two instructions, even between the call that allocates device memory and
the assignment that records it. Such memory could neither be used nor freed. So while a model is on a device, an
interrupt is only noted, and raised at the next point at which the records are complete: after a layer, or between two
tokens. A second interrupt is raised at once, in case no such point comes.
"""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from types import FrameType

Progress = Callable[[int, int], None]
"""Called with the work done and the total work."""


class Interrupts:
    """The state of interrupts.

    Attributes:
        waiting: an interrupt has arrived, and `KeyboardInterrupt` has not been raised for it yet.
    """

    def __init__(self) -> None:
        self.waiting = False

    def check(self) -> None:
        """Raise a pending interrupt; called where the records are complete.

        Raises:
            KeyboardInterrupt: one is pending.
        """
        if self.waiting:
            self.waiting = False
            raise KeyboardInterrupt

    def checked(self, progress: Progress | None) -> Progress:
        """A progress callback that also checks, for work that reports where the records are complete."""

        def report(done: int, total: int) -> None:
            if progress is not None:
                progress(done, total)
            self.check()

        return report


@contextmanager
def deferred() -> Iterator[Interrupts]:
    """Record interrupts while the block runs; one still pending at its end is raised there."""
    interrupts = Interrupts()
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler or current_thread() is not main_thread():
        yield interrupts  # another handler takes them, or they go to another thread
        return

    def note(number: int, frame: FrameType | None) -> None:
        if interrupts.waiting:
            raise KeyboardInterrupt
        interrupts.waiting = True

    signal.signal(signal.SIGINT, note)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)
    interrupts.check()
