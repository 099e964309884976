"""`tune`: Algorithm 4 for one purpose of one kind of matrix on this machine, from γ and η to an outcome on disk.

=================================== =================================================================
γ from the system, η from the table `lowbit_cppyy.runtime.hardware`, `lowbit_cppyy.codegen.isa`
what fits the registers             `lowbit_cppyy.tuning.candidates`, by `lowbit_cppyy.tuning.prediction`
which of it is fastest              `lowbit_cppyy.tuning.search`, by `lowbit_cppyy.tuning.stopwatch`
kept for the backend                `lowbit_cppyy.tuning.outcomes`
=================================== =================================================================

Source: QIGen algorithm 4.
"""

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lowbit_cppyy.codegen.kernels import Kernel
from lowbit_cppyy.runtime.hardware import Cache, cache_of_level
from lowbit_cppyy.tuning import outcomes
from lowbit_cppyy.tuning.candidates import Candidate
from lowbit_cppyy.tuning.search import Found, Place, Stopwatch, Trial, Watch, search
from lowbit_cppyy.tuning.stopwatch import Clock, Problem


@dataclass(frozen=True)
class Tuned:
    """One search and what it came to.

    Attributes:
        problem: what was measured.
        cache: γ, and who says so.
        found: what was tried, and what is fastest.
        compile_seconds: by the kernel's name.
        seconds: that the search took.
    """

    problem: Problem
    cache: Cache
    found: Found
    compile_seconds: Mapping[str, float]
    seconds: float

    def rate(self, candidate: Candidate, place: Place) -> float | None:
        """Gigabytes of codes, scales and zeros per second."""
        seconds = self.found.trials[candidate].seconds(place)
        return candidate.layout(self.problem.layout).nbytes / seconds / 1e9 if seconds else None

    def kernel(self, candidate: Candidate) -> str:
        """The name of a candidate's kernel."""
        return Kernel(candidate.recipe, self.problem.table).name

    def document(self) -> dict[str, Any]:
        """All of it for JSON: predictions beside measurements."""
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
            "gamma": {"bytes": self.cache.bytes, "source": self.cache.source},
            "eta": problem.table.registers,
            "default": self.kernel(found.default),
            "chosen": self.kernel(found.chosen),
            "chosen_block": _block(found.chosen),
            "times_faster_than_default": _rounded(found.faster),
            "equation_5": _block(found.block) if found.block else None,
            "trials": [self._trial(trial) for trial in found.trials.values()],
            "seconds": _rounded(self.seconds),
        }

    def _trial(self, trial: Trial) -> dict[str, Any]:
        candidate = trial.candidate
        name = self.kernel(candidate)
        return {
            "kernel": name,
            "block": _block(candidate),
            "step": trial.step,
            "predicted": {name: _rounded(number) for name, number in vars(trial.prediction).items()},
            "compile_seconds": _rounded(self.compile_seconds.get(name)),
            "cache_gb_per_s": _rounded(self.rate(candidate, "cache")),
            "memory_gb_per_s": _rounded(self.rate(candidate, "memory")),
            "samples": {place: len(samples) for place, samples in trial.samples.items()},
        }

    def outcome(self) -> outcomes.Outcome:
        """What is kept of it."""
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
        return outcomes.Outcome(found.chosen.recipe, found.chosen.block_groups, found.chosen.block_panels, evidence)

    def keep(self) -> Path:
        """Write the outcome for the backend.

        Raises:
            UnavailableError: the folder cannot be written.
        """
        key = outcomes.Key.of(self.problem.purpose, self.problem.layout, self.problem.table)
        return outcomes.write(key, self.outcome())


def _rounded(number: float | None) -> float | None:
    """Four digits: more would be noise."""
    return number if number is None or isinstance(number, int) else float(f"{number:.4g}")


def _block(candidate: Candidate) -> dict[str, int] | None:
    if candidate.block_groups is None:
        return None
    return {"groups": candidate.block_groups, "panels": candidate.block_panels}


def tune(problem: Problem, watch: Watch, stopwatch: Stopwatch | None = None) -> Tuned:
    """Search for one purpose.

    Args:
        problem: what for.
        watch: told of the progress.
        stopwatch: what measures; this machine's clock if ``None``.

    Raises:
        UnavailableError: nothing can be compiled here.
    """
    start, cache = time.perf_counter(), cache_of_level(1)
    watches: Stopwatch
    with ExitStack() as end:
        compiled: Mapping[str, float] = {}
        if stopwatch is None:
            watches = clock = Clock(problem)
            compiled = clock.compile_seconds
            end.callback(clock.close)
        else:
            watches = stopwatch
        found = search(problem.purpose, problem.layout, problem.table, cache.bits, watches, watch)
    return Tuned(problem, cache, found, compiled, time.perf_counter() - start)
