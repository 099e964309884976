"""What tasks on processes and machines cost beside the work: measured here, as JSON for the page on several machines.

Usage: ``python bench/cluster_costs.py [--address HOST:PORT]``. With an address the tasks also run on that Ray cluster.

- *a task*: seconds that each of many tasks that do nothing takes, once the processes are there;
- *a byte*: seconds for each byte of a result, from another process to this one;
- *to keep a byte*: of a part that the journal writes, digests and records;
- *to keep a window*: its numbers, when those of a thousand windows are kept already;
- *a weight*: seconds of one processor to quantise a weight, for each method, and to check it in the end.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lowbit.quantization.coded import digest
from lowbit.rewriting.journal import journal
from lowbit.rewriting.layouts import LAYOUTS
from lowbit.rewriting.methods import Rounding
from lowbit.system.on_ray import OnRay
from lowbit.system.records import Kept
from lowbit.system.tasks import Executor, Processes

TASKS, RESULTS, MEGABYTES = 400, 12, 64
SHAPE = (4096, 2048)
"""Of a matrix that is quantised."""


def nothing(item: int, threads: int) -> int:
    return item


def megabytes(item: int, threads: int) -> Any:
    return np.full(MEGABYTES * 2**20, item, np.uint8)


def timed(results: Iterator[Any]) -> float:
    """Seconds from the first result, when the processes are there, to the last."""
    next(results)
    begun = time.perf_counter()
    for _ in results:
        pass
    return time.perf_counter() - begun


def of_executor(executor: Executor) -> dict[str, float]:
    """The costs of tasks and of their results."""
    a_task = timed(executor.run(nothing, range(TASKS))) / (TASKS - 1)
    a_byte = timed(executor.run(megabytes, range(RESULTS))) / ((RESULTS - 1) * MEGABYTES * 2**20)
    return {"task": a_task, "byte": a_byte}


def of_keeping() -> float:
    """Seconds for each byte of a part that the journal keeps."""
    tensors = {"part": np.random.default_rng(0).integers(0, 256, 512 * 2**20, np.uint8)}
    with tempfile.TemporaryDirectory() as folder, journal(Path(folder) / "new", {}) as parts:
        begun = time.perf_counter()
        parts.commit("part.safetensors", tensors, None)
        seconds = time.perf_counter() - begun
        parts.discard("part.safetensors")
    return seconds / tensors["part"].nbytes


def of_record() -> float:
    """Seconds for each window whose numbers are kept, on the disk, behind those of a thousand others."""
    with tempfile.TemporaryDirectory() as folder:
        kept = Kept(Path(folder) / "kept", {})
        kept.results |= {f"before {number}": [117.33498765432101] * 8 for number in range(1000)}
        begun = time.perf_counter()
        for number in range(RESULTS):
            kept.add(str(number), [117.33498765432101] * 8)
        return (time.perf_counter() - begun) / RESULTS


def of_weights() -> dict[str, float]:
    """Seconds for each weight: of the methods with all that makes a part, and of the final check."""
    weights, found = np.random.default_rng(0).standard_normal(SHAPE, np.float32) / np.float32(64), {}
    for method, layout in (("rtn", "gptq-v2"), ("hqq", "hqq")):
        rounding = Rounding(method, 64, real_zeros=layout == "hqq")  # type: ignore[arg-type]  # both are methods
        begun = time.perf_counter()
        coded = rounding(weights, 4)
        stored = LAYOUTS[layout].stored(coded, symmetric=False)
        digest(coded.floats)
        found[method] = (time.perf_counter() - begun) / weights.size
        begun = time.perf_counter()
        digest(stored.values.astype(np.float32))
        found[f"check {method}"] = (time.perf_counter() - begun) / weights.size
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--address", help="of a Ray cluster")
    given = parser.parse_args()
    costs: dict[str, Any] = {"keep": of_keeping(), "window": of_record(), "weight": of_weights()}
    costs["processes"] = of_executor(Processes(2))
    if given.address:
        costs["ray"] = of_executor(OnRay(given.address))
    json.dump(costs, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
