"""Speculation: whether guessing pays, found out by measuring it.

The paper guesses always, and its tables show a gain on every machine. It need not be one. A wrong guess occupies the
link to the device, and an expert that is needed must wait until the copy has ended; where the cache is large, where
guesses are poor, or where computing takes longer than copying, a token may take longer with guesses than without.

So the engine measures, on the device's clock and on the run at hand. Tokens are taken in windows, in turn with guesses
and without, so that both see the same text and the same state of the machine; the first token of a window still finds
what the last one left and is not counted. The medians are compared, because now and then a token is held up by
something else. If tokens are faster without, guessing is switched off, and a sentence says so. After a long while it
is measured again: the text may have changed, or the cache.

Nothing but the clock depends on this: a guess never changes what is computed.

Source: lowbit's own, about MoE offloading §3.2.
"""

from dataclasses import dataclass
from statistics import median

from lowbit.contract.checks import check_integer


@dataclass(frozen=True)
class Plan:
    """How many tokens are measured, and when.

    Attributes:
        warmup: tokens with guesses before the first measurement, while the cache fills.
        window: counted tokens of a window, after one that is not counted.
        rounds: windows of either kind in a measurement.
        patience: tokens from one measurement to the next.

    Raises:
        ArgumentError: a number out of range.
    """

    warmup: int = 16
    window: int = 4
    rounds: int = 4
    patience: int = 1024

    def __post_init__(self) -> None:
        check_integer("warmup", self.warmup, least=0)
        check_integer("window", self.window, least=1)
        check_integer("rounds", self.rounds, least=1)
        check_integer("patience", self.patience, least=1)


@dataclass(frozen=True)
class Measurement:
    """What guessing was found to be worth.

    Attributes:
        token: number of the token after which it was known.
        with_guesses: seconds a token, median.
        without: the same without guesses.
        tokens: how many of either kind were counted.
    """

    token: int
    with_guesses: float
    without: float
    tokens: int

    @property
    def benefit(self) -> float:
        """Seconds that guessing saves a token; negative where it costs."""
        return self.without - self.with_guesses


class Trial:
    """Decides token by token whether the next one is guessed for.

    Attributes:
        guessing: whether it is.
        measurements: what was found so far.
    """

    def __init__(self, plan: Plan | None = None) -> None:
        self.plan = Plan() if plan is None else plan
        self.guessing, self.measurements = True, list[Measurement]()
        self._token, self._verdict = 0, True
        self._rest = self.plan.warmup  # tokens until the next measurement begins
        self._begin()

    def _begin(self) -> None:
        self._times: dict[bool, list[float]] = {True: [], False: []}
        self._fresh = True  # whether the next token is the first of its window

    @property
    def measuring(self) -> bool:
        """Whether tokens are being counted now."""
        return self._rest == 0

    def token(self, seconds: float, guessed: bool) -> str | None:
        """A token has taken so long, with guesses or without; answers with a sentence when guessing changes for long.

        A token of the other kind than the one asked for is not counted: a device may run some tokens behind its host.
        """
        self._token += 1
        if not self.measuring:
            self._rest -= 1
        elif guessed == self.guessing:
            self._count(seconds)
        if min(map(len, self._times.values())) >= self.plan.window * self.plan.rounds:
            return self._conclude()
        return None

    def _count(self, seconds: float) -> None:
        if self._fresh:
            self._fresh = False
            return
        times = self._times[self.guessing]
        times.append(seconds)
        if len(times) % self.plan.window == 0:
            self.guessing, self._fresh = not self.guessing, True

    def _conclude(self) -> str | None:
        guessed, plain = median(self._times[True]), median(self._times[False])
        found = Measurement(self._token, guessed, plain, self.plan.window * self.plan.rounds)
        self.measurements.append(found)
        before, self._verdict = self._verdict, found.benefit >= 0
        self.guessing, self._rest = self._verdict, self.plan.patience
        self._begin()
        if self._verdict == before:
            return None
        return (
            f"prefetching is switched {'on again' if self._verdict else 'off'}: a token takes {guessed * 1e3:.3g} ms "
            f"with it and {plain * 1e3:.3g} ms without (medians of {found.tokens} tokens each); it is measured again "
            f"after {self.plan.patience} tokens"
        )
