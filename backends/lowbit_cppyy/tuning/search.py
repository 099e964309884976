"""The search: Algorithm 4 with time as its cost.

Times on a shared machine scatter by more than kernels differ, and they drift. So candidates are never measured one
after another. They alternate, one sample each per round, and a candidate is judged by the median of its samples. Then
the slower half is dropped and the others get more rounds (*successive halving*), until few are left.

`Stopwatch` gives the samples; a test gives its own.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Literal, Protocol

from lowbit_cppyy.codegen.isa import InstructionSet
from lowbit_cppyy.layout.panels import PanelLayout
from lowbit_cppyy.recipe import Purpose, Recipe
from lowbit_cppyy.tuning.candidates import aheads, panels, tiles, unrolled

Location = Literal["cache", "memory"]
"""The location of the matrix while a candidate is measured."""

FIRST_ROUNDS: Mapping[Location, int] = {"cache": 5, "memory": 20}
"""The number of samples of each candidate before half of the candidates are dropped; samples from memory scatter
more."""

KEPT = 3
"""The number of candidates that each step passes to the next."""

FINAL_ROUNDS = 100
PATIENCE = 1.0
"""The rounds of a step end after this many seconds of samples from memory, once each candidate has `FEWEST_ROUNDS`."""

FEWEST_ROUNDS = 5
WORTH = 1.02
"""A candidate replaces the default only if it is this many times as fast; a smaller difference may be chance."""


class Stopwatch(Protocol):
    """Measures candidates for one purpose, one shape and one number of threads."""

    def sample(self, recipe: Recipe, location: Location) -> float:
        """Seconds of one call on the whole matrix, measured once.

        Args:
            recipe: the candidate; compiled at its first sample.
            location: ``cache`` for a part of the matrix that stays in the cache, extrapolated to the whole;
                ``memory`` for the whole matrix, which no cache holds.
        """


Watch = Callable[[str, int, int], None]
"""``watch(step, done, total)`` reports the progress of a step."""


@dataclass(frozen=True)
class Trial:
    """The measurements of one candidate.

    Attributes:
        step: the step of the search in which it was first tried.
        samples: seconds of a call, in the cache and from memory, in the order of measurement.
    """

    step: str
    samples: Mapping[Location, list[float]] = field(default_factory=lambda: {"cache": [], "memory": []})

    def seconds(self, location: Location) -> float | None:
        """The median of the samples; ``None`` without samples."""
        return median(self.samples[location]) if self.samples[location] else None


@dataclass(frozen=True)
class Found:
    """The result of a search.

    Attributes:
        default: the recipe that is used without a search.
        chosen: the fastest recipe; the default, unless another is faster by the factor `WORTH`.
        faster: the median over rounds of the time of the default divided by that of the fastest.
        trials: all candidates that were tried.
    """

    default: Recipe
    chosen: Recipe
    faster: float
    trials: Mapping[Recipe, Trial]


def search(
    purpose: Purpose,
    layout: PanelLayout,
    table: InstructionSet,
    stopwatch: Stopwatch,
    watch: Watch = lambda step, done, total: None,
) -> Found:
    """Find the fastest recipe for a purpose, and the best panel if the purpose is one row of x.

    Args:
        purpose: what for.
        layout: of the matrix. Purposes other than ``vector`` keep its panel, because a matrix is prepared once for all
            purposes.
        table: the instruction set; its registers are η.
        stopwatch: measures the candidates.
        watch: called with the progress.

    Source: QIGen algorithm 4.
    """
    race = _Race(stopwatch, watch)
    default, *others = tiles(purpose, layout, table)
    best = race.run("tile", [default, *others], "cache")
    best = race.run("unroll", [*best, *(each for one in best for each in unrolled(one, layout, table))], "cache")[:2]
    best = race.run("ahead", [default, *best, *(each for one in best for each in aheads(one))], "memory")[:2]
    if purpose == "vector":
        best = race.run("panel", [*best, *(each for one in best for each in panels(one, layout, table))], "memory")
    return _final(race, default, best[0])


def _final(race: "_Race", default: Recipe, fastest: Recipe) -> Found:
    """Compare the fastest with the default, sample by sample."""
    if fastest == default:
        return Found(default, default, 1.0, race.trials)
    pairs = race.rounds("last", [default, fastest], "memory", FINAL_ROUNDS)
    faster = median(ours / theirs for ours, theirs in zip(pairs[default], pairs[fastest], strict=True))
    return Found(default, fastest if faster >= WORTH else default, faster, race.trials)


class _Race:
    """Rounds of samples, and the candidates tried so far."""

    def __init__(self, stopwatch: Stopwatch, watch: Watch) -> None:
        self.stopwatch, self.watch = stopwatch, watch
        self.trials: dict[Recipe, Trial] = {}

    def run(self, step: str, candidates: Iterable[Recipe], location: Location) -> list[Recipe]:
        """Run successive halving. Returns the remaining candidates, the fastest first."""
        running, rounds = list(dict.fromkeys(candidates)), FIRST_ROUNDS[location]
        while True:
            samples = self.rounds(step, running, location, rounds)
            running.sort(key=lambda each: median(samples[each]))
            if len(running) <= KEPT:
                return running
            running, rounds = running[: max(KEPT, -(-len(running) // 2))], 2 * rounds

    def rounds(self, step: str, running: list[Recipe], location: Location, rounds: int) -> dict[Recipe, list[float]]:
        """This many samples of each candidate, interleaved; fewer if they take long."""
        samples: dict[Recipe, list[float]] = {each: [] for each in running}
        for done in range(rounds):
            spent = sum(map(sum, samples.values())) if location == "memory" else 0.0
            if done >= FEWEST_ROUNDS and spent > PATIENCE:
                break
            first = done % len(running)  # otherwise each would always follow the same one, and read the same copies
            for number, each in enumerate(running[first:] + running[:first]):
                self.watch(step, done * len(running) + number, rounds * len(running))
                samples[each].append(self.stopwatch.sample(each, location))
        for each, seconds in samples.items():
            self.trials.setdefault(each, Trial(step)).samples[location].extend(seconds)
        return samples
