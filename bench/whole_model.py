"""What the programs that measure a whole model have in common: a process for each number of threads, and the report."""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from machine import described, description

from lowbit.formats import fetch as data
from lowbit.system.storage import write_whole

HERE = Path(__file__).parent
RESULTS, KEPT = HERE / "results", HERE.parent / "docs/data"
LIMITS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
READ = 2**28  # bytes of a reading


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


def tell(sentence: str) -> None:
    """Say on standard error what is measured now."""
    print(sentence, file=sys.stderr, flush=True)


def child(program: str, threads: int) -> dict[str, Any]:
    """What a program finds on a number of threads, in a process whose libraries are limited to them."""
    tell(f"measuring on {threads} thread(s)")
    words = [sys.executable, program, *sys.argv[1:], "--child", str(threads)]
    limits = os.environ | dict.fromkeys(LIMITS, str(threads))
    answer = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True, env=limits).stdout
    found: dict[str, Any] = json.loads(answer.splitlines()[-1])
    return found


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
