"""compute-sanitizer over the part `kernels`: memcheck, racecheck, synccheck, where it works.

On some machines the tool is missing, or refuses the device (a container's kernel may not let it). That is said, and is
no failure; a finding is.
"""

import re
import shutil
import subprocess
import tempfile
from glob import glob
from pathlib import Path
from typing import Any

from gpu.parts import ANSWER, Answer, Setting, Skipped
from lowbit.system.interpreters import python_command, python_environment

TOOLS = ("memcheck", "racecheck", "synccheck")
FOUND = 86
"""The status with which the tool ends when it has found something."""
PLACES = ("/usr/local/cuda*/bin/compute-sanitizer", "/opt/nvidia/compute-sanitizer/*/compute-sanitizer")
REFUSED = re.compile(
    "Device not supported|not supported on this|Unable to (?:start|attach)|failed to initialize"
    "|Internal Sanitizer Error|before first instrumented API call",
    re.I,
)
LIMIT = 55
"""Seconds for each tool."""


def run(setting: Setting) -> Answer:
    """Each tool."""
    if setting.simulate:
        raise Skipped("there is nothing to watch on a simulated device")
    program = shutil.which("compute-sanitizer") or next(
        (path for place in PLACES for path in sorted(glob(place))), None
    )
    if program is None:
        raise Skipped("compute-sanitizer was not found; it comes with the CUDA toolkit")
    results = dict[str, dict[str, Any]]()
    for tool in TOOLS:
        results[tool] = watched(program, tool, setting)
        setting.so_far(results)
        if results[tool]["verdict"] == "refused":  # so would the others be
            break
    bad = [tool for tool, result in results.items() if result["verdict"] in ("found", "failed")]
    worked = [tool for tool, result in results.items() if result["verdict"] == "clean"]
    if bad:
        return Answer("failed", f"{', '.join(bad)}: see the output", results)
    if not worked:
        return Answer("skipped", f"compute-sanitizer does not work here: {results['memcheck']['why']}", results)
    return Answer("passed", f"clean: {', '.join(worked)}", results)


def watched(program: str, tool: str, setting: Setting) -> dict[str, Any]:
    """One tool over the part `kernels`."""
    command = [program, "--tool", tool, "--error-exitcode", str(FOUND)]
    command += python_command("-m", "gpu.measure", str(setting.out), "--child", "kernels")
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, f"{tool}.json")
        environment = python_environment() | {ANSWER: str(answer)}
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, errors="replace", timeout=LIMIT, check=False
            )
        except subprocess.TimeoutExpired:
            return {"verdict": "unfinished", "why": f"it took more than {LIMIT} seconds", "output": ""}
        finished = answer.exists()
    output = done.stdout + done.stderr
    return judged(done.returncode, output, finished=finished)


def judged(status: int, output: str, *, finished: bool) -> dict[str, Any]:
    """What a tool's end means.

    >>> judged(0, "========= ERROR SUMMARY: 0 errors", finished=True)["verdict"]
    'clean'
    >>> judged(0, "========= Error: Device not supported", finished=True)["verdict"]
    'refused'
    >>> judged(86, "========= Invalid __global__ write of size 4 bytes", finished=True)["verdict"]
    'found'
    """
    said = [line for line in output.splitlines() if line.startswith("=========")]
    tail = {"output": output[-3000:]}
    if refused := next((line for line in said if REFUSED.search(line)), ""):
        return {"verdict": "refused", "why": refused.strip("= ")} | tail
    if status == FOUND:
        return {"verdict": "found", "why": next(iter(said), "")} | tail
    if status or not finished:
        return {"verdict": "failed", "why": f"it ended with status {status}"} | tail
    if not any("SUMMARY: 0 " in line for line in said):
        return {"verdict": "failed", "why": "it gave no summary"} | tail
    return {"verdict": "clean", "why": next(line for line in said if "SUMMARY" in line).strip("= ")} | tail
