"""What an installation would have written down: lowbit's commands and backends, for Python to find them by name.

Where lowbit is not installed, its files are used from the repository, and only this is missing.
"""

import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).parents[2]


def write(site: Path) -> None:
    """Write the metadata of lowbit into a folder that Python searches."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    folder = site / f"{project['name']}-{project['version']}.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    lines = ["[console_scripts]", *(f"{name} = {place}" for name, place in project["scripts"].items())]
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {place}" for name, place in entries.items())]
    (folder / "entry_points.txt").write_text("\n".join(lines) + "\n")


def main() -> None:
    """Write it, unless lowbit is installed."""
    try:
        version("lowbit")
    except PackageNotFoundError:
        write(Path(sys.argv[1]))


if __name__ == "__main__":
    main()
