"""What a measurement was made on: the machine, and the build of each project."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lowbit_conformance.report.gather import machine

FLAGS = (
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512bw",
    "avx512vl",
    "avx512vbmi",
    "avx_vnni",
    "avx512_vnni",
    "avx512_bf16",
)
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def description() -> dict[str, Any]:
    """The machine as the reports of the suite have it, and what decides speed besides."""
    return asdict(machine()) | {
        "flags": flags(),
        "caches": caches(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "huge_pages": text(HUGE_PAGES),
        "compiler": first_line("c++", "--version"),
    }


def flags() -> list[str]:
    """The instruction sets that matter here and that the processor has."""
    lines = text(Path("/proc/cpuinfo")).splitlines()
    found = next((line.split() for line in lines if line.startswith("flags")), [])
    return [flag for flag in FLAGS if flag in found]


def caches() -> dict[str, str]:
    """Level and kind of each cache of the first processor to its size."""
    found = {}
    for index in sorted(CACHES.glob("index*")):
        level, kind = text(index / "level"), text(index / "type")
        if kind != "Instruction":
            found[f"L{level}"] = text(index / "size")
    return found


def text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def first_line(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return ""


def projects(not_installed: Mapping[str, str]) -> list[dict[str, Any]]:
    """Every project with its version and build flags, or with the reason why it is absent.

    Args:
        not_installed: project to why it could not be installed, where that is known.
    """
    from peers.registry import PROJECTS

    rows = []
    for project in PROJECTS:
        row: dict[str, Any] = {"name": project.name, "versions": versions(project.distributions)}
        if missing := project.missing():
            row["absent"] = not_installed.get(project.name, f"{missing} not installed")
        else:
            try:
                row["details"] = project.details()
            except Exception as failure:
                row["absent"] = f"{type(failure).__name__}: {failure}"[:300]
        rows.append(row)
    return rows


def described(not_installed: Mapping[str, str]) -> list[dict[str, Any]]:
    """`projects`, asked in another process, since that imports all libraries."""
    command = [sys.executable, __file__, json.dumps(not_installed)]
    answer = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True).stdout
    found: list[dict[str, Any]] = json.loads(answer.splitlines()[-1])
    return found


def versions(distributions: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for name in distributions:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    print(json.dumps(projects(json.loads(sys.argv[1]))))
