"""The prefetch trial: measuring whether guesses pay.

The paper always guesses, and its tables show a gain on every machine. There need not be one. A wrong guess occupies the
link, and a needed expert must wait until that copy has ended. Where the cache is large, guesses are poor, or computing
takes longer than copying, a token may take longer with guesses than without.

So the engine measures, on the device's clock and during the run itself. Tokens are grouped into windows, alternately
with guesses and without, so that both kinds see the same text and the same state of the machine. The first token of a
window still finds what the previous window cached and is not counted. The medians are compared, because a token is
occasionally delayed by something else. If tokens are faster without guesses, prefetching is switched off and a note
says so. After many tokens the measurement is repeated, because the text or the cache may have changed.

Only the time depends on this: a guess never changes what is computed.

Source: MoE offloading §3.2 for the guesses; the measurement is not in the paper.
"""

from dataclasses import dataclass
from statistics import median

from lowbit.contract.checks import check_integer


@dataclass(frozen=True)
class TrialSchedule:
    """How many tokens a trial measures, and when.

    Attributes:
        warmup: tokens with guesses before the first measurement, while the cache fills.
        window: counted tokens in a window, after one that is not counted.
        rounds: windows of each kind in a measurement.
        patience: tokens from one measurement to the next.

    Raises:
        ArgumentError: a number is out of range.
    """

    warmup: int = 16
    window: int = 4
    rounds: int = 4
    patience: int = 1024

    def __post_init__(self) -> None:
        check_integer("warmup", self.warmup, least=0)
        for name in ("window", "rounds", "patience"):
            check_integer(name, getattr(self, name), least=1)


@dataclass(frozen=True)
class Measurement:
    """The measured benefit of guessing.

    Attributes:
        with_guesses: median seconds per token with guesses.
        without: median seconds per token without them.
        tokens: number of tokens of each kind.
    """

    with_guesses: float
    without: float
    tokens: int

    @property
    def benefit(self) -> float:
        """Seconds that guessing saves per token; negative where it costs time."""
        return self.without - self.with_guesses


class PrefetchTrial:
    """Decides for each token whether the next one uses guesses.

    Attributes:
        guessing: whether the next token uses guesses.
        measurements: the results so far.
    """

    def __init__(self, schedule: TrialSchedule) -> None:
        self.guessing, self.measurements = True, list[Measurement]()
        self._schedule, self._verdict = schedule, True
        self._rest = schedule.warmup  # tokens until the next measurement begins
        self._begin()

    def _begin(self) -> None:
        self._times: dict[bool, list[float]] = {True: [], False: []}
        self._fresh = True  # whether the next token is the first of its window

    def token(self, seconds: float, guessed: bool) -> str | None:
        """Count the time of a token; returns a sentence when prefetching is switched on or off.

        A token of the other kind than `guessing` is not counted: a device may run some tokens behind its host.
        """
        if self._rest:
            self._rest -= 1
        elif guessed == self.guessing:
            self._count(seconds)
        wanted = self._schedule.window * self._schedule.rounds
        return self._conclude(wanted) if min(map(len, self._times.values())) >= wanted else None

    def _count(self, seconds: float) -> None:
        if self._fresh:
            self._fresh = False
            return
        times = self._times[self.guessing]
        times.append(seconds)
        if len(times) % self._schedule.window == 0:
            self.guessing, self._fresh = not self.guessing, True

    def _conclude(self, tokens: int) -> str | None:
        guessed, plain = median(self._times[True]), median(self._times[False])
        found = Measurement(guessed, plain, tokens)
        self.measurements.append(found)
        before, self._verdict = self._verdict, found.benefit >= 0
        self.guessing, self._rest = self._verdict, self._schedule.patience
        self._begin()
        if self._verdict == before:
            return None
        return (
            f"prefetching is switched {'on again' if self._verdict else 'off'}: a token takes {guessed * 1e3:.3g} ms "
            f"with it and {plain * 1e3:.3g} ms without (medians of {tokens} tokens each); it is measured again "
            f"after {self._schedule.patience} tokens"
        )
