"""Finding out what a report must say besides its verdicts: of the suite, of the backend's build, of the machine.

Nothing here imports a backend; what it is built from is read from the metadata and the files of its package.
"""

import hashlib
import importlib
import os
import platform
import shlex
import shutil
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import numpy as np

import lowbit
import lowbit_conformance
from lowbit import theorems
from lowbit.backend import ENTRY_POINTS
from lowbit.system.entries import entries
from lowbit.system.threads import usable_processors
from lowbit.text import cleaned
from lowbit_conformance.report.model import Build, Machine, Report, Suite
from lowbit_conformance.suite.tally import Tally, plain

MOST_FILES = 5000
MOST_BYTES = 2**29


def report_of(tally: Tally, target: Sequence[str], settings: Mapping[str, Any], started: datetime) -> Report:
    """The report of a run that has just ended.

    Args:
        tally: its verdicts.
        target: the command-line arguments that named the backend.
        settings: the options of the run.
        started: when it began, with a time zone.
    """
    seconds = round((datetime.now(UTC) - started).total_seconds(), 3)
    when = started.astimezone(UTC).isoformat(timespec="seconds")
    build = build_of(tally, target)
    found = [entry.value for entry in entries(ENTRY_POINTS) if entry.name == target[0]]
    known = tuple(theorems.of_backend(found[0], build.details)) if found else ()
    return Report(suite(), build, machine(), plain(settings), when, seconds, tally, known)


def suite() -> Suite:
    """The version of lowbit and a checksum of the files that determine what a verdict means."""
    folders = [Path(file).parent for module in (lowbit, lowbit_conformance) if (file := module.__file__)]
    return Suite(lowbit.__version__, _sum_of(folders))


def machine() -> Machine:
    """What is known about this machine."""
    try:
        with warnings.catch_warnings(action="ignore"):  # where there is no /proc/cpuinfo
            microarchitecture = str(importlib.import_module("archspec.cpu").host().name)
    except ImportError:
        microarchitecture = ""
    return Machine(
        cpu=_processor(),
        microarchitecture=microarchitecture,
        cores=usable_processors(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=f"{platform.python_implementation()} {platform.python_version()}",
        numpy=np.__version__,
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return cleaned(" ".join((names or [platform.processor() or platform.machine()])[0].split()))


def build_of(tally: Tally, target: Sequence[str]) -> Build:
    """The package, version and files behind a name, a library or a command."""
    distribution, release, files = "", "", list[Path]()
    if target[0] == "--library":
        files = [Path(target[1])]
    elif target[0] == "--command":
        words = [shutil.which(word) or word for word in shlex.split(target[1])]
        files = [Path(word) for word in words if Path(word).is_file()]
    else:
        found = [entry for entry in entries(ENTRY_POINTS) if entry.name == target[0]]
        if found and found[0].dist:
            distribution, release = found[0].dist.name, found[0].dist.version
        files = _files_of_module(found[0].module if found else target[0].partition(":")[0])
    details = plain(tally.details)
    return Build(
        cleaned(tally.backend), tuple(target), distribution, release, _sum_of(files), details, plain(tally.claims)
    )


def _files_of_module(name: str) -> list[Path]:
    """The folders or the single file of the package that a module belongs to; empty if it has no files."""
    found = PathFinder.find_spec(name.partition(".")[0], [*sys.path, os.getcwd()])
    if found is None:
        return []
    folders = [Path(folder) for folder in found.submodule_search_locations or ()]
    return folders or ([Path(found.origin)] if found.origin else [])


def _sum_of(places: Iterable[Path]) -> str:
    """One checksum of files and of all files in folders; empty if there are none, or too many to read quickly."""
    total, count, size = hashlib.sha256(), 0, 0
    for name, path in _files(places):
        count, size = count + 1, size + path.stat().st_size
        if count > MOST_FILES or size > MOST_BYTES:
            return ""
        total.update(name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest() if count else ""


def _files(places: Iterable[Path]) -> Iterator[tuple[str, Path]]:
    """Files with their names in the checksum: paths relative to their folder, so that its location does not matter."""
    for place in places:
        if place.is_file():
            yield place.name, place
        for path in sorted(place.rglob("*")) if place.is_dir() else ():
            if path.is_file() and path.suffix != ".pyc":
                yield f"{place.name}/{path.relative_to(place).as_posix()}", path
