"""Fuzzing in a process of its own, whose memory and time are bounded.

``python fuzzing.py TARGET SEED COUNT`` gives COUNT mutated inputs to one reader of `TARGETS`, and writes one JSON
object: how many ended how, the peak of memory, the longest time, and every fault with the mutation that caused it. A
fault is any exception but a `LowbitError`, an error that is not one line or shows control characters, a warning, and a
mutation that takes more than `SECONDS`. A reader that hangs in C ends the process, with a traceback on standard error.

``LOWBIT_MUTATIONS`` says how many mutations each test makes; `soak` and a person who looks for more set it.
"""

import faulthandler
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from lowbit.errors import LowbitError
from lowbit.system.interpreters import python_command, python_environment
from lowbit.text import UNSAFE

SECONDS = 5.0
"""For one mutation."""
ADDRESS_SPACE = 4 << 30
Attempt = Callable[[random.Random], str]
"""Makes one mutation, gives it to the reader, and answers in a word how that ended."""

TARGETS = {
    "vectors": "fuzz_vectors",
    "sizes": "fuzz_vectors",
    "trees": "fuzz_vectors",
    "declared": "fuzz_foreign",
    "lines": "fuzz_foreign",
    "results": "fuzz_foreign",
    "stored": "fuzz_foreign",
    "checkpoint": "fuzz_files",
    "shards": "fuzz_files",
    "gguf": "fuzz_files",
    "inspected": "fuzz_files",
    "prequantised": "fuzz_files",
    "quantized": "fuzz_files",
    "outcome": "fuzz_caches",
    "cubin": "fuzz_caches",
    "kills": "fuzz_caches",
    "recordings": "fuzz_caches",
}
"""By name the module that makes the attempts: its function ``TARGET(folder)`` answers with an `Attempt`."""


class TooLateError(BaseException):
    """The time of one mutation is over."""


def fuzzed(target: str, seed: int, count: int, space: int = ADDRESS_SPACE) -> dict[str, Any]:
    """What a child process that made these mutations found."""
    count = int(os.environ.get("LOWBIT_MUTATIONS", count))
    here = Path(__file__).parent
    folders = str(here), str(here.parents[2] / "bench"), os.environ.get("PYTHONPATH", "")
    path = os.pathsep.join(each for each in folders if each)
    child = subprocess.run(
        python_command(str(Path(__file__)), target, str(seed), str(count), str(space)),
        env=python_environment() | {"PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        text=True,
    )
    assert child.returncode == 0, child.stderr[-4000:]
    found: dict[str, Any] = json.loads(child.stdout)
    return found


def check_text(text: str) -> None:
    """Refuse a message that is more than one line, or that a terminal would obey."""
    if "\n" in text or "\t" in text or UNSAFE.search(text):
        raise AssertionError(f"a message with control characters: {text!r}")


def run(target: str, seed: int, count: int) -> dict[str, Any]:
    """Make the mutations."""
    warnings.simplefilter("error")
    signal.signal(signal.SIGALRM, _too_late)
    chance, ends, faults, longest = random.Random(f"{target} {seed}"), Counter[str](), dict[str, Any](), 0.0
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        attempt: Attempt = getattr(import_module(TARGETS[target]), target)(Path(folder))
        before = peak()
        for number in range(count):
            begun = time.perf_counter()
            faulthandler.dump_traceback_later(4 * SECONDS, exit=True)
            signal.setitimer(signal.ITIMER_REAL, SECONDS)
            try:
                ended = _one(attempt, chance)
            except (Exception, TooLateError) as error:
                ended = _fault(faults, number, error)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            longest = max(longest, time.perf_counter() - begun)
            ends[ended] += 1
        faulthandler.cancel_dump_traceback_later()
    return {"ends": ends, "faults": faults, "longest": longest, "grown": peak() - before}


def _one(attempt: Attempt, chance: random.Random) -> str:
    try:
        return attempt(chance)
    except LowbitError as error:
        check_text(str(error))
        return type(error).__name__


def _fault(faults: dict[str, Any], number: int, error: BaseException) -> str:
    """Keep the first of each kind of fault."""
    last = next((f for f in reversed(traceback.extract_tb(error.__traceback__)) if "lowbit" in f.filename), None)
    where = f"{Path(last.filename).name}:{last.lineno}" if last else "?"
    faults.setdefault(f"{type(error).__name__} in {where}: {ascii(str(error))[:200]}", number)
    return "fault"


def _too_late(number: int, frame: object) -> None:
    raise TooLateError(f"more than {SECONDS} s")


def peak() -> int:
    """The most memory that this process has had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[4]), int(sys.argv[4])))
    print(json.dumps(run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
