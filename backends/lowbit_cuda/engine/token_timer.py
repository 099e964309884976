"""The time of each token, by which the engine decides whether guesses pay (`lowbit_cuda.engine.prefetch_trial`).

A token's time runs from the request of its first layer to the end of the experts of its last layer, on the device's
clock. It includes waiting for copies and excludes what the caller does between tokens. The time is read when the next
token starts; by then the device has normally finished, and where it has not, the token is not counted. Prompts, tokens
without guesses, and passes that end early are not counted either.
"""

from lowbit.backend.whole_model import Prefetch
from lowbit_cuda.engine.account import Account
from lowbit_cuda.engine.prefetch_trial import PrefetchTrial, TrialSchedule
from lowbit_cuda.port import DevicePort, Event, Stream


class TokenTimer:
    """Measures passes, and says whether the current one uses guesses."""

    def __init__(
        self,
        port: DevicePort,
        stream: Stream,
        prefetch: Prefetch,
        schedule: TrialSchedule,
        account: Account,
    ) -> None:
        self._port, self._stream, self._account = port, stream, account
        self._trial = PrefetchTrial(schedule) if prefetch == "auto" else None
        self._guessing = prefetch != "off"
        self.forget()

    def forget(self) -> None:
        """Do not measure the current pass."""
        self._first: Event | None = None
        self._last: Event | None = None
        self._counts = False

    def guesses(self, offered: tuple[int, ...], tokens: int) -> tuple[int, ...]:
        """The guesses that this pass uses: all or none."""
        self._counts = self._counts or bool(offered)
        if tokens > 1:
            self.forget()
        return offered if self._guessing else ()

    def begin(self) -> None:
        """Start a pass, and evaluate the one before it."""
        if self._trial is None:
            return
        self._evaluate()
        self.forget()
        self._guessing = self._trial.guessing
        self._first = self._port.record(self._stream)

    def end(self) -> None:
        """End the pass: all its work has been issued."""
        if self._first is not None and self._counts:
            self._last = self._port.record(self._stream)

    def _evaluate(self) -> None:
        assert self._trial is not None
        first, last = self._first, self._last
        if first is None or last is None or not self._port.reached(last):
            return
        self._account.tokens += 1
        note = self._trial.token(self._port.seconds(first, last), self._guessing)
        self._account.measurements = self._trial.measurements
        if note:
            self._account.notes.append(note)
