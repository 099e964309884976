"""What the programs that measure a whole model have in common: a process for each number of threads, and the report."""

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from machine import described, description

from lowbit.formats import fetch as data
from lowbit.system.storage import write_whole

HERE = Path(__file__).parent
RESULTS, KEPT = HERE / "results", HERE.parent / "docs/data"
LIMITS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
READ = 2**28  # bytes of a reading
INTERRUPTED = 130  # the status of a program that was interrupted, as a shell gives it


def thread_counts(options: argparse.Namespace) -> list[int]:
    """The numbers of threads that are asked for: by default one, and two where there are two processors."""
    chosen: list[int] = options.threads or sorted({1, min(2, len(os.sched_getaffinity(0)))})
    return chosen


def model_file(given: str) -> Path:
    """The file of a model: one that is named so, or one that lowbit fetches."""
    return data.fetch(given) if given in data.TABLE else Path(given)


def shared(parser: argparse.ArgumentParser, models: Literal["store", "append"] = "store") -> None:
    """The options that these programs have in common; `models` says whether one may be given or several."""
    parser.add_argument("--decode", action="store_true", help="run this program and growth.py; for nox")
    parser.add_argument("--growth", action="store_true", help="run growth.py only; for nox")
    known = (
        f"a GGUF file, or one of {', '.join(name for name in data.TABLE if data.TABLE[name].file.endswith('.gguf'))}"
    )
    parser.add_argument("--model", action=models, type=model_file, help=f"{known}; {data.DEFAULT_MODEL} without")
    parser.add_argument("--onnx", type=Path, help="the same model for ONNX Runtime GenAI, as engine_onnx.py says")
    parser.add_argument("--threads", type=int, action="append", default=[], help="by default 1 and all processors")
    parser.add_argument("--isa", action="append", default=[], help="instruction sets of lowbit; the best by default")
    parser.add_argument("--only", action="append", default=[], help="engines with this word in their name; all without")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--keep", action="store_true", help="copy the results into docs/data")
    parser.add_argument("--not-installed", type=json.loads, default={}, help=argparse.SUPPRESS)
    parser.add_argument("--child", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--found", type=Path, help=argparse.SUPPRESS)


def tell(sentence: str) -> None:
    """Say on standard error what is measured now."""
    print(sentence, file=sys.stderr, flush=True)


def give(found: dict[str, Any], options: argparse.Namespace) -> None:
    """Keep all that a process has found so far for the one that started it (`children`)."""
    write_whole(options.found, json.dumps(found).encode())


def children(program: str, options: argparse.Namespace) -> tuple[list[dict[str, Any]], bool]:
    """What a program finds on each number of threads, and whether an interrupt ended it early.

    Each number has a process, whose libraries are limited to as many threads. Of one that is interrupted, what it gave
    last (`give`) counts.

    Raises:
        subprocess.CalledProcessError: a process failed.
    """
    with TemporaryDirectory() as folder:
        files, interrupted = [Path(folder, str(threads)) for threads in thread_counts(options)], False
        try:
            for threads, file in zip(thread_counts(options), files, strict=True):
                tell(f"measuring on {threads} thread(s)")
                child([program, *sys.argv[1:], "--child", str(threads), "--found", str(file)], threads)
        except KeyboardInterrupt:
            tell("interrupted: what is finished is kept")
            interrupted = True
        return [json.loads(file.read_bytes()) for file in files if file.exists()], interrupted


def child(words: list[str], threads: int) -> None:
    """Run a process to its end."""
    limits = os.environ | dict.fromkeys(LIMITS, str(threads))
    # A group of its own: an interrupt from the terminal reaches only this process, which then ends it and its engines.
    with subprocess.Popen([sys.executable, *words], env=limits, process_group=0) as process:
        try:
            process.wait()
        except KeyboardInterrupt:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, words)


def report_of(name: str, options: argparse.Namespace, settings: tuple[str, ...], runs: list[Any]) -> dict[str, Any]:
    """The report of a program: machine, versions, settings and runs."""
    return {
        "schema": f"lowbit-bench-{name}/1",
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": description(),
        "projects": described(options.not_installed),
        "settings": {each: getattr(options, each) for each in settings},
        "runs": runs,
    }


def write(name: str, report: dict[str, Any], draw: Callable[[dict[str, Any], Path], None], keep: bool) -> None:
    """Write a report and its picture into bench/results, and copy them into docs/data."""
    files = f"{name}.json", f"{name}.svg"
    RESULTS.mkdir(exist_ok=True)
    write_whole(RESULTS / files[0], (json.dumps(report, indent=1, ensure_ascii=False) + "\n").encode())
    draw(report, RESULTS / files[1])
    if keep:
        for each in files:
            write_whole(KEPT / each, (RESULTS / each).read_bytes())
    print(f"written to {RESULTS}: {', '.join(files)}")
