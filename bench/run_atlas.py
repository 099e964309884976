"""Public kernels of other projects under the suite, for the atlas of the docs.

    python bench/run_atlas.py bitsandbytes
    python bench/run_atlas.py bitsandbytes --function nf4 --case formats.dequantize/C1/edge/nf4-b64-64x3-float32-s0
    python bench/run_atlas.py --list

Without a project each one runs in a process of its own, and those that are not installed are named. What a run found is
kept in ``docs/data/atlas``, in a file named after project and version, so that another version stands beside it. With
``--function`` and ``--case`` nothing is kept; the failures are printed.
"""

import argparse
import json
import os
import pkgutil
import subprocess
import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import atlas
from atlas.entry import Entry, Project

from lowbit.system.storage import write_whole

FOLDER = Path(__file__).parents[1] / "docs/data/atlas"
SHARED = ("entry", "record")
QUIET = {"TORCHDYNAMO_DISABLE": "1", "MKL_CBWR": "AUTO", "CUDA_VISIBLE_DEVICES": "", "CI": "true"}
"""torch.compile compiles in a first call and changes the process; what it would compile runs as it is written. MKL's
sums depend on the addresses of arrays unless it is told otherwise (docs/examples/adapters/torch_alignment.py). Without
CI the import of OpenVINO sends a message about its use from a process of its own."""


def modules() -> list[str]:
    """The names of the modules that hold a project."""
    return [each.name for each in pkgutil.iter_modules(atlas.__path__) if each.name not in SHARED]


def project_of(name: str) -> Project:
    """The project of a module."""
    found: Project = import_module(f"atlas.{name}").PROJECT
    return found


def run_project(name: str, function: str | None, case: str | None, folder: Path) -> int:
    """Run the entries of a project, or those of one function; 1 if it is not installed."""
    from atlas.record import recorded

    project = project_of(name)
    try:
        versions = project.versions
    except PackageNotFoundError as error:
        print(f"{name}: {error.name} is not installed")
        return 1
    entries = [each for each in project.entries if function in (None, each.function)]
    rows, report = [], dict[str, Any]()
    for entry in entries:
        row, report = recorded(f"atlas.{name}", entry, case)
        rows.append(row)
        print(said_of(entry, row), flush=True)
        for each in row["findings"]:
            print(f"    {each['case']}: {each['message']}", flush=True)
    if function is None and case is None:
        kept = {
            "schema": "lowbit-atlas/1",
            "project": project.name,
            "module": name,
            "versions": versions,
            "suite": report["suite"]["version"],
            "started": report["started"],
            "machine": report["machine"],
            "rows": rows,
        }
        file = folder / f"{name}-{versions[project.packages[0]].partition('+')[0]}.json"
        write_whole(file, (json.dumps(kept, indent=1, ensure_ascii=False) + "\n").encode())
    return 0


def said_of(entry: Entry, row: dict[str, Any]) -> str:
    """An entry in a line."""
    types = ", ".join(row["types"])
    counts = f"{row['passed']} of {row['declared']}, bound used {row['bound_used']}"
    return f"{entry.function} {entry.operation} {', '.join(entry.formats)} {types}: {row['verdict']}, {counts}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("project", nargs="?", choices=modules(), help="one project; all by default")
    parser.add_argument("--function", help="only the entries of this function; nothing is kept")
    parser.add_argument("--case", help="only this case; nothing is kept")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the files are written")
    parser.add_argument("--list", action="store_true", help="print the projects and what is to be installed for each")
    parser.add_argument("--packages", action="store_true", help="print what is to be installed for the project")
    options = parser.parse_args()
    if options.list:
        for name in modules():
            print(name, *project_of(name).packages)
        return 0
    if options.packages and options.project:
        print(*project_of(options.project).packages)
        return 0
    if options.project is None:
        command = [sys.executable, __file__, "--folder", str(options.folder)]
        for name in modules():
            subprocess.run([*command, name], check=False)
        return 0
    folder = str(Path(__file__).parent)
    os.environ |= QUIET | {"PYTHONPATH": os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])}
    return run_project(options.project, options.function, options.case, options.folder)


if __name__ == "__main__":
    sys.exit(main())
