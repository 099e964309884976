"""`tune`: Algorithm 4 for one purpose of one kind of matrix on this machine, from η to an outcome on disk.

=================================== =================================================================
η from the table                    `lowbit_cppyy.codegen.isa`
candidates that fit the registers   `lowbit_cppyy.tuning.candidates`, by `lowbit_cppyy.tuning.prediction`
the fastest of them                 `lowbit_cppyy.tuning.search`, by `lowbit_cppyy.tuning.stopwatch`
kept for the backend                `lowbit_cppyy.tuning.outcomes`
=================================== =================================================================

Source: QIGen algorithm 4.
"""

import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lowbit_cppyy.codegen.kernels import Kernel
from lowbit_cppyy.recipe import Recipe
from lowbit_cppyy.tuning import outcomes
from lowbit_cppyy.tuning.prediction import Prediction, predict
from lowbit_cppyy.tuning.search import Found, Location, Stopwatch, Trial, Watch, search
from lowbit_cppyy.tuning.stopwatch import Clock, Problem


@dataclass(frozen=True)
class Tuned:
    """One search and its result.

    Attributes:
        problem: what was measured.
        found: the candidates, and the fastest.
        compile_seconds: compilation times by the kernel's name.
        seconds: the duration of the search.
    """

    problem: Problem
    found: Found
    compile_seconds: Mapping[str, float]
    seconds: float

    def rate(self, recipe: Recipe, location: Location) -> float | None:
        """Gigabytes of codes, scales and zeros per second."""
        seconds = self.found.trials[recipe].seconds(location)
        return replace(self.problem.layout, panel=recipe.panel).nbytes / seconds / 1e9 if seconds else None

    def prediction(self, recipe: Recipe) -> Prediction:
        """The models' prediction for a candidate."""
        return predict(recipe, replace(self.problem.layout, panel=recipe.panel), self.problem.table)

    def kernel(self, recipe: Recipe) -> str:
        """The name of a candidate's kernel."""
        return Kernel(recipe, self.problem.table).name

    def document(self) -> dict[str, Any]:
        """Everything for JSON: predictions and measurements."""
        problem, layout, found = self.problem, self.problem.layout, self.found
        return {
            "instruction_set": problem.table.name,
            "lanes": problem.table.lanes,
            "bits": layout.bits,
            "rows": layout.rows,
            "columns": layout.columns,
            "group_size": layout.group_size,
            "scales": layout.scales,
            "convention": layout.convention,
            "purpose": problem.purpose,
            "vectors": problem.vectors,
            "threads": problem.threads,
            "eta": problem.table.registers,
            "default": self.kernel(found.default),
            "chosen": self.kernel(found.chosen),
            "times_faster_than_default": _rounded(found.faster),
            "trials": [self._trial(*each) for each in found.trials.items()],
            "seconds": _rounded(self.seconds),
        }

    def _trial(self, recipe: Recipe, trial: Trial) -> dict[str, Any]:
        name = self.kernel(recipe)
        return {
            "kernel": name,
            "step": trial.step,
            "predicted": {name: _rounded(number) for name, number in vars(self.prediction(recipe)).items()},
            "compile_seconds": _rounded(self.compile_seconds.get(name)),
            "cache_gb_per_s": _rounded(self.rate(recipe, "cache")),
            "memory_gb_per_s": _rounded(self.rate(recipe, "memory")),
            "samples": {location: len(samples) for location, samples in trial.samples.items()},
        }

    def keep(self) -> Path:
        """Write the outcome for the backend.

        Raises:
            UnavailableError: the folder cannot be written.
        """
        found, problem = self.found, self.problem
        evidence = {
            "made": datetime.now(UTC).isoformat(timespec="seconds"),
            "lowbit": version("lowbit"),
            "threads": problem.threads,
            "shape": [problem.layout.rows, problem.layout.columns, problem.layout.group_size],
            "kernel": self.kernel(found.chosen),
            "default": self.kernel(found.default),
            "times_faster_than_default": found.faster,
            "memory_gb_per_s": self.rate(found.chosen, "memory"),
        }
        key = outcomes.Key.of(problem.purpose, problem.layout, problem.table)
        return outcomes.write(key, found.chosen, evidence)


def _rounded(number: float | None) -> float | None:
    """Round to four digits; more would be noise."""
    return number if number is None or isinstance(number, int) else float(f"{number:.4g}")


def tune(problem: Problem, watch: Watch, stopwatch: Stopwatch | None = None) -> Tuned:
    """Search for one purpose.

    Args:
        problem: what for.
        watch: called with the progress.
        stopwatch: measures the candidates; by default a `Clock` of this machine.

    Raises:
        UnavailableError: nothing can be compiled here.
    """
    if stopwatch is None:
        with closing(Clock(problem)) as clock:
            return replace(tune(problem, watch, clock), compile_seconds=clock.compile_seconds)
    start = time.perf_counter()
    found = search(problem.purpose, problem.layout, problem.table, stopwatch, watch)
    return Tuned(problem, found, {}, time.perf_counter() - start)
