"""The search: Algorithm 4 with time as its cost.

Times on a shared machine scatter by more than kernels differ, and drift. So candidates are never measured one after the
other: they take turns, one sample each in every round, and what counts is the median of a candidate's samples. Then
the slower half is dropped and the others go on with more rounds (*successive halving*), until few are left.

`Stopwatch` gives the samples; a test gives its own.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Literal, Protocol

from lowbit_cppyy.codegen.isa import InstructionSet
from lowbit_cppyy.layout.layout import PanelLayout
from lowbit_cppyy.recipe.recipe import Purpose
from lowbit_cppyy.tuning.candidates import Candidate, aheads, block, panels, tiles, turns
from lowbit_cppyy.tuning.prediction import Prediction, predict

Place = Literal["cache", "memory"]

FIRST_ROUNDS: Mapping[Place, int] = {"cache": 5, "memory": 20}
"""Samples of each candidate before the first half is dropped; those from memory scatter more."""

KEPT = 3
"""Candidates that each step hands to the next one."""

FINAL_ROUNDS = 100
PATIENCE = 1.0
"""Seconds of samples from memory after which a step's rounds end, if each candidate has `FEWEST_ROUNDS`."""

FEWEST_ROUNDS = 5
WORTH = 1.02
"""How many times faster than the default a candidate must be to take its place; less may be chance."""


class Stopwatch(Protocol):
    """Measures candidates for one purpose, one shape and one number of threads."""

    def sample(self, candidate: Candidate, place: Place) -> float:
        """Seconds of one call on the whole matrix, as measured once.

        Args:
            candidate: what to measure; compiled when it is first asked for.
            place: ``cache`` for a part of the matrix that stays in the cache, carried over to the whole;
                ``memory`` for the whole matrix, which no cache holds.
        """


Watch = Callable[[str, int, int], None]
"""``watch(step, done, total)`` is told how far a step is."""


@dataclass(frozen=True)
class Trial:
    """One candidate, as predicted and as measured.

    Attributes:
        candidate: what.
        step: of the search in which it was tried first.
        prediction: what the models say of it.
        samples: seconds of a call, in the cache and in memory, in the order in which they were measured.
    """

    candidate: Candidate
    step: str
    prediction: Prediction
    samples: Mapping[Place, list[float]] = field(default_factory=lambda: {"cache": [], "memory": []})

    def seconds(self, place: Place) -> float | None:
        """The median of the samples; ``None`` without any."""
        return median(self.samples[place]) if self.samples[place] else None


@dataclass(frozen=True)
class Found:
    """What a search came to.

    Attributes:
        default: the recipe that would be taken without a search.
        chosen: the fastest; the default, if no other is `WORTH` it.
        block: the Z-curve of equation 5, if it was tried.
        faster: median over rounds of the default's time by that of the fastest.
        trials: all that was tried.
    """

    default: Candidate
    chosen: Candidate
    block: Candidate | None
    faster: float
    trials: Mapping[Candidate, Trial]


def search(
    purpose: Purpose,
    layout: PanelLayout,
    table: InstructionSet,
    cache_bits: int,
    stopwatch: Stopwatch,
    watch: Watch = lambda step, done, total: None,
) -> Found:
    """Find the fastest recipe for a purpose, and for one row of x the layout.

    Args:
        purpose: what for.
        layout: of the matrix in column panels; for other purposes than ``vector`` its panel is kept, since a matrix is
            prepared once for all.
        table: the instruction set; its registers are η.
        cache_bits: γ.
        stopwatch: what measures.
        watch: told of the progress.

    Source: QIGen algorithm 4.
    """
    race = _Race(layout, table, stopwatch, watch)
    predicted = tiles(purpose, layout, table)
    default = Candidate(next(iter(predicted)))
    best = race.run("tile", map(Candidate, predicted), "cache")
    wider = [replace(each, recipe=recipe) for each in best for recipe in turns(each.recipe, layout, table)]
    best = race.run("turn", [*best, *wider], "cache")[:2]
    others = [replace(each, recipe=recipe) for each in best for recipe in aheads(each.recipe)]
    best = race.run("ahead", [default, *best, *others], "memory")[:2]
    blocked = None
    if purpose == "vector":
        wide = [replace(each, recipe=recipe) for each in best for recipe in panels(each.recipe, layout, table)]
        best = race.run("panel", [*best, *wide], "memory")[:2]
        blocked = block(best[0], layout, table, cache_bits)
    if blocked:
        best = race.run("block", [*best, blocked], "memory")
    return _last(race, default, best[0], blocked)


def _last(race: "_Race", default: Candidate, fastest: Candidate, blocked: Candidate | None) -> Found:
    """The fastest against the default, pair by pair."""
    if fastest == default:
        return Found(default, default, blocked, 1.0, race.trials)
    pairs = race.rounds("last", [default, fastest], "memory", FINAL_ROUNDS)
    faster = median(ours / theirs for ours, theirs in zip(pairs[default], pairs[fastest], strict=True))
    return Found(default, fastest if faster >= WORTH else default, blocked, faster, race.trials)


class _Race:
    """Rounds of samples, and what has been tried so far."""

    def __init__(self, layout: PanelLayout, table: InstructionSet, stopwatch: Stopwatch, watch: Watch) -> None:
        self.layout, self.table, self.stopwatch, self.watch = layout, table, stopwatch, watch
        self.trials: dict[Candidate, Trial] = {}

    def run(self, step: str, candidates: Iterable[Candidate], place: Place) -> list[Candidate]:
        """Successive halving; the fastest that are left, the fastest first."""
        running, rounds = list(dict.fromkeys(candidates)), FIRST_ROUNDS[place]
        while True:
            samples = self.rounds(step, running, place, rounds)
            running.sort(key=lambda each: median(samples[each]))
            if len(running) <= KEPT:
                return running
            running, rounds = running[: max(KEPT, -(-len(running) // 2))], 2 * rounds

    def rounds(self, step: str, running: list[Candidate], place: Place, rounds: int) -> dict[Candidate, list[float]]:
        """So many samples of each, taken in turns; fewer where they take long."""
        samples: dict[Candidate, list[float]] = {each: [] for each in running}
        for done in range(rounds):
            spent = sum(map(sum, samples.values())) if place == "memory" else 0.0
            if done >= FEWEST_ROUNDS and spent > PATIENCE:
                break
            first = done % len(running)  # or each would always follow the same one, and read the same copies
            for number, each in enumerate(running[first:] + running[:first]):
                self.watch(step, done * len(running) + number, rounds * len(running))
                samples[each].append(self.stopwatch.sample(each, place))
        for each, seconds in samples.items():
            self._trial(step, each).samples[place].extend(seconds)
        return samples

    def _trial(self, step: str, candidate: Candidate) -> Trial:
        if candidate not in self.trials:
            prediction = predict(candidate.recipe, candidate.layout(self.layout), self.table)
            self.trials[candidate] = Trial(candidate, step, prediction)
        return self.trials[candidate]
