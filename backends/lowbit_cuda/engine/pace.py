"""Pace: how long tokens take, so that it is known whether guesses pay (`lowbit_cuda.engine.speculation`).

A token's time runs from its first layer's request to the end of its last layer's experts, on the device's clock: what
the user does between two tokens is not in it, and waiting for copies is. It is read when the next token begins, by
which time the device has long reached its end; where it has not, the token is not counted. Nor is a prompt, nor a token
for which no guesses were offered, nor a pass that ended early.
"""

from collections.abc import Callable
from typing import Literal

from lowbit_cuda.engine.account import Account
from lowbit_cuda.engine.speculation import Plan, Trial
from lowbit_cuda.port import DevicePort, Event, Stream


class Pace:
    """Measures passes, and answers whether the present one is guessed for."""

    def __init__(
        self,
        port: DevicePort,
        stream: Stream,
        prefetch: Literal["auto", "on", "off"],
        plan: Plan | None,
        account: Account,
        on_note: Callable[[str], None] | None,
    ) -> None:
        self._port, self._stream, self._account, self._on_note = port, stream, account, on_note
        self._trial = Trial(plan) if prefetch == "auto" else None
        self._guessing = prefetch != "off"
        self.forget()

    def forget(self) -> None:
        """The present pass will not be measured."""
        self._first: Event | None = None
        self._last: Event | None = None
        self._counts = False

    def guesses(self, offered: tuple[int, ...], tokens: int) -> tuple[int, ...]:
        """Those of the guesses that are used in this pass: all or none."""
        self._counts = self._counts or bool(offered)
        if tokens > 1:
            self.forget()
        return offered if self._guessing else ()

    def begin(self) -> None:
        """A pass begins, and the one before it is looked at."""
        if self._trial is None:
            return
        self._look()
        self.forget()
        self._guessing = self._trial.guessing
        self._first = self._port.record(self._stream)

    def end(self) -> None:
        """The pass has asked for everything."""
        if self._first is not None and self._counts:
            self._last = self._port.record(self._stream)

    def _look(self) -> None:
        assert self._trial is not None
        first, last = self._first, self._last
        if first is None or last is None or not self._port.reached(last):
            return
        self._account.tokens += 1
        note = self._trial.token(self._port.seconds(first, last), self._guessing)
        self._account.measurements = self._trial.measurements
        if note:
            self._account.notes.append(note)
            if self._on_note:
                self._on_note(note)
