"""Ctrl-C while a device works: taken between two layers, not in the midst of what is kept of its memory.

Python raises `KeyboardInterrupt` between any two of its instructions, also between the call that gives memory of a
device and the note of it. What is left then can be neither gone on with nor given back. So while a model is on a device
an interrupt is only noted, and raised at the next point at which everything is in order: after a layer, or between two
tokens. A second one is raised at once, for the case that no such point comes.
"""

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import current_thread, main_thread
from types import FrameType
from typing import Any

from lowbit.arrays import F32, F64
from lowbit.backend.whole_model import DeviceAccount, DeviceDecoder
from lowbit.model.config import LlamaConfig
from lowbit.model.weights import Progress


class Interrupts:
    """Whether there was one.

    Attributes:
        waiting: there was, and nobody has been told.
    """

    def __init__(self) -> None:
        self.waiting = False

    def check(self) -> None:
        """Everything is in order here.

        Raises:
            KeyboardInterrupt: there was one.
        """
        if self.waiting:
            self.waiting = False
            raise KeyboardInterrupt

    def checked(self, progress: Progress | None) -> Progress:
        """The same progress, which is reported where everything is in order."""

        def report(done: int, total: int) -> None:
            if progress is not None:
                progress(done, total)
            self.check()

        return report


@contextmanager
def deferred() -> Iterator[Interrupts]:
    """Note interrupts for as long as the block runs; one that nobody was told of is raised at its end."""
    interrupts = Interrupts()
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler or current_thread() is not main_thread():
        yield interrupts  # somebody else sees to them, or they come to another thread
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


class Interruptible:
    """A decoder on a device that is interrupted between layers and tokens only; it does what the decoder does."""

    def __init__(self, decoder: DeviceDecoder, interrupts: Interrupts) -> None:
        self._decoder, self._interrupts = decoder, interrupts

    @property
    def config(self) -> LlamaConfig:
        """The decoder's."""
        return self._decoder.config

    def new_state(self) -> Any:
        """The decoder's."""
        return self._decoder.new_state()

    def hidden(self, tokens: Sequence[int], state: Any, progress: Progress | None = None) -> F64:
        """The decoder's."""
        self._interrupts.check()
        return self._decoder.hidden(tokens, state, self._interrupts.checked(progress))

    def logits(self, hidden: F64) -> F32:
        """The decoder's."""
        self._interrupts.check()
        return self._decoder.logits(hidden)

    def account(self) -> DeviceAccount:
        """The decoder's."""
        return self._decoder.account()
