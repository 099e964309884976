"""Run the parts one after the other, each in a process of its own with a time limit, and write what came of each.

    python -m gpu.measure FOLDER [--simulate] [--only PART]... [--limit SECONDS]

A part that fails, hangs or takes the whole process with it loses only its own results. The exit status is 0 if no part
failed. `run.sh` sets up what this needs.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

from gpu.machine import description
from gpu.parts import Answer, Setting, Skipped

PARTS: dict[str, tuple[str, float]] = {
    "compiled": ("every kernel compiled for the device, and what it takes of a processor", 300),
    "conformance": ("the port's contract and the suite, on the device", 420),
    "kernels": ("each kernel on small arrays against its meaning in numpy", 180),
    "traces": ("the engine's events on the device and on the simulation", 180),
    "sanitizer": ("compute-sanitizer over small arrays: memcheck, racecheck, synccheck", 300),
    "gemv": ("bandwidth of products by bits and shape, against a device copy", 240),
    "peers": ("the same for another project's 4-bit product", 120),
    "table2": ("the paper's Table 2 as ratios, on experts of Mixtral-8x7B's shape", 300),
}
"""Each part, what it is, and its limit in seconds."""

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
    summary = {}
    for name in options.only or PARTS:
        record = part(name, options)
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
    parser.add_argument("--child", choices=list(PARTS), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.limit is not None and not options.limit > 0:
        parser.error(f"--limit is {options.limit}; allowed: more than 0")
    options.out = options.out.resolve()
    return options


def part(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run one part in a process of its own; whatever it does, there is a record."""
    what, limit = PARTS[name]
    limit = options.limit or limit
    answer_file = options.out / f".{name}.{os.getpid()}.json"
    command = [sys.executable, "-m", "gpu.measure", str(options.out), "--child", name]
    environment = os.environ | {"LOWBIT_GPU_ANSWER": str(answer_file), "PYTHONUNBUFFERED": "1"}
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
    record = {"part": name, "what": what, "simulated": options.simulate}
    record |= answered(answer_file, process.returncode, limit if late else None)
    record |= {"seconds": round(time.monotonic() - began, 2), "limit": limit, "output": output[-TAIL:]}
    return record


def answered(file: Path, status: int, limit: float | None) -> dict[str, Any]:
    """What the child left behind, or what its end says."""
    try:
        found: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError):
        found = asdict(Answer("crashed", f"it ended with status {status} and said nothing"))
    file.unlink(missing_ok=True)
    return found if limit is None else asdict(Answer("timed out", f"it took more than {limit:g} seconds"))


def child(name: str, setting: Setting) -> None:
    """In the child: run the part and leave its answer."""
    try:
        answer = import_module(f"gpu.{name}").run(setting)
    except Skipped as reason:
        answer = Answer("skipped", str(reason))
    except Exception as error:
        traceback.print_exc()
        answer = Answer("failed", f"{type(error).__name__}: {error}")
    write(Path(os.environ["LOWBIT_GPU_ANSWER"]), asdict(answer))


def write(file: Path, content: Any) -> None:
    """Write JSON under a temporary name and rename it."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}.part")
    temporary.write_text(json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    os.replace(temporary, file)


if __name__ == "__main__":
    main()
