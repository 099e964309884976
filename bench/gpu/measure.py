"""Run the parts one after the other, each in a process of its own with a time limit, and write what came of each.

    python -m gpu.measure FOLDER [--simulate] [--only PART]... [--limit SECONDS] [--total SECONDS]

A part that fails, hangs or takes the whole process with it loses only its own results, and those of `gemv` and `table2`
are kept as far as they came. All parts together have a limit too, so what may hang comes last. The exit status is 0 if
no part failed. `run.sh` sets up what this needs.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

from gpu.machine import description
from gpu.parts import ANSWER, Answer, Setting, Skipped, write
from lowbit.system.interpreters import python_command, python_environment

PARTS: dict[str, tuple[str, float]] = {
    "compiled": ("every kernel compiled for the device, and what it takes of a processor", 120),
    "kernels": ("each kernel on small arrays against its meaning in numpy", 60),
    "gemv": ("bandwidth of products by bits and shape, against a device copy", 150),
    "table2": ("the paper's Table 2 as ratios, on experts of Mixtral-8x7B's shape", 240),
    "traces": ("the engine's events on the device and on the simulation", 90),
    "conformance": ("the port's contract and the suite, on the device", 180),
    "peers": ("the same for another project's 4-bit product", 60),
    "sanitizer": ("compute-sanitizer over small arrays: memcheck, racecheck, synccheck", 180),
}
"""Each part, what it is, and its limit in seconds."""

TOTAL = 540.0
"""Seconds for all of them."""
LEAST = 2.0
"""Seconds with which it is worth while to begin a part."""

GOOD = ("passed", "measured", "simulated", "skipped")
TAIL = 4000


def main() -> None:
    """Run what was asked for."""
    options = parsed(sys.argv[1:])
    options.out.mkdir(parents=True, exist_ok=True)
    if options.child:
        child(options.child, Setting(options.simulate, options.out))
        return
    write(options.out / "machine.json", description(options.simulate))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the part that runs is ended too
    summary, end = {}, time.monotonic() + options.total
    for name in options.only or PARTS:
        record = part(name, options, end - time.monotonic())
        write(options.out / f"{name}.json", record)
        summary[name] = {key: record[key] for key in ("verdict", "why", "seconds")}
        print(f"{name:12} {record['verdict']:10} {record['seconds']:6.1f} s  {record['why']}", flush=True)
        write(options.out / "summary.json", {"simulated": options.simulate, "parts": summary})
    sys.exit(0 if all(found["verdict"] in GOOD for found in summary.values()) else 1)


def parsed(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    listed = "; ".join(f"{name}: {what}" for name, (what, _) in PARTS.items())
    parser = argparse.ArgumentParser(prog="run.sh", description=f"The parts: {listed}.", allow_abbrev=False)
    parser.add_argument("out", type=Path, metavar="FOLDER", help="where the results are written")
    parser.add_argument("--simulate", action="store_true", help="try the script on a simulated device")
    parser.add_argument("--only", action="append", choices=list(PARTS), metavar="PART", help="repeatable")
    parser.add_argument("--limit", type=float, help="seconds for each part, instead of its own limit")
    parser.add_argument("--total", type=float, default=TOTAL, help=f"seconds for all parts, by default {TOTAL:g}")
    parser.add_argument("--child", choices=list(PARTS), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    for name in ("limit", "total"):
        if (given := getattr(options, name)) is not None and not given > 0:
            parser.error(f"--{name} is {given}; allowed: more than 0")
    options.out = options.out.resolve()
    return options


def part(name: str, options: argparse.Namespace, left: float) -> dict[str, Any]:
    """Run one part in a process of its own; whatever it does, there is a record.

    Args:
        name: which.
        options: of the command line.
        left: seconds for it and all that come after it.
    """
    what, limit = PARTS[name]
    limit = min(options.limit or limit, left)
    record: dict[str, Any] = {"part": name, "what": what, "simulated": options.simulate}
    if left < LEAST:
        none_left = Answer("timed out", f"of the {options.total:g} seconds for all parts none were left")
        return record | asdict(none_left) | {"seconds": 0.0, "limit": 0.0, "output": ""}
    with tempfile.TemporaryDirectory() as folder:
        answer_file = Path(folder, f"{name}.json")
        command = python_command("-m", "gpu.measure", str(options.out), "--child", name)
        environment = python_environment() | {ANSWER: str(answer_file), "PYTHONUNBUFFERED": "1"}
        began = time.monotonic()
        with subprocess.Popen(
            command + ["--simulate"] * options.simulate,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as process:
            try:
                output, _ = process.communicate(timeout=limit)
                late = False
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # and what it has started
                output, _ = process.communicate()
                late = True
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                raise
        record |= answered(answer_file, process.returncode, limit if late else None)
    record |= {"seconds": round(time.monotonic() - began, 2), "limit": limit, "output": output[-TAIL:]}
    return record


def answered(file: Path, status: int, limit: float | None) -> dict[str, Any]:
    """What the child left behind, or what its end says."""
    try:
        found: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError):
        found = asdict(Answer("crashed", f"it ended with status {status} and said nothing"))
    if limit is None:
        return found
    return asdict(Answer("timed out", f"it took more than {limit:.0f} seconds", found.get("result", {})))


def child(name: str, setting: Setting) -> None:
    """In the child: run the part and leave its answer."""
    try:
        answer = import_module(f"gpu.{name}").run(setting)
    except Skipped as reason:
        answer = Answer("skipped", str(reason))
    except Exception as error:
        traceback.print_exc()
        answer = Answer("failed", f"{type(error).__name__}: {error}")
    write(Path(os.environ[ANSWER]), asdict(answer))


if __name__ == "__main__":
    main()
