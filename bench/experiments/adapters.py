"""The suite on the kernels of other projects, for the page of the docs.

    python bench/experiments/adapters.py
    python bench/experiments/adapters.py onnxruntime --folder docs/data/adapters

Runs ``lowbit conformance NAME --json`` for each adapter whose library is installed, and keeps of every report what the
page shows: the counts of the operations that are declared, and the failures, those of one kind together. The file is
named after the backend and the version of its library, so that another version stands beside it.
"""

import argparse
import json
import re
import subprocess
from pathlib import Path
from typing import Any

from lowbit import backend as registry
from lowbit.system.interpreters import python_command, python_environment
from lowbit.system.storage import write_whole

LIBRARY = {
    "ggml": "llama-cpp-python",
    "gguf": "gguf",
    "onnxruntime": "onnxruntime",
    "onnxruntime-minimum": "onnxruntime",
    "torch": "torch",
}
FOLDER = Path(__file__).parents[2] / "docs/data/adapters"
KEPT = ("backend", "verdict", "counts", "id", "settings", "started")
MOST_TEXT = 800
NUMBER = re.compile(r"[-+]?\d[\d.]*(e[-+]?\d+)?|\b(nan|inf)\b")


def report_of(name: str) -> dict[str, Any]:
    """What ``lowbit conformance NAME --json`` answers."""
    command = python_command("-m", "lowbit", "conformance", name, "--json")
    done = subprocess.run(command, env=python_environment(), stdout=subprocess.PIPE, text=True, check=False)
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def trimmed(report: dict[str, Any]) -> dict[str, Any]:
    """What of a report the page shows."""
    kept = {key: report[key] for key in KEPT}
    kept |= {"suite": report["suite"]["version"], "machine": report["machine"], "details": report["build"]["details"]}
    kept["operations"] = [
        {key: row[key] for key in ("operation", "passed", "declared", "specified", "bound_used")}
        for row in report["operations"]
        if row["declared"]
    ]
    return kept | {"findings": findings(report["failures"])}


def findings(failures: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Failures of one kind together: one of them, how many there are, and which bits and groups they have."""
    kinds: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for failure in failures:
        kinds.setdefault(kind_of(failure), []).append(failure)
    return [finding(operation, verdict, alike) for (operation, verdict, _), alike in kinds.items()]


def kind_of(failure: dict[str, Any]) -> tuple[str, str, str]:
    """Operation, verdict, and the message but for its numbers; after a crash it is only what was printed last."""
    said = "" if failure["verdict"].startswith("CRASHED") else NUMBER.sub("#", failure["message"])
    return failure["id"].partition("/")[0], failure["verdict"], said


def finding(operation: str, verdict: str, alike: list[dict[str, Any]]) -> dict[str, Any]:
    """Failures of one kind as the page shows them: by the one that says it shortest."""
    shown = min(alike, key=lambda failure: len(failure["message"]))
    return {
        "operation": operation,
        "verdict": verdict,
        "cases": len(alike),
        "bits": distinct(alike, "bits"),
        "group_sizes": distinct(alike, "group_size"),
        "case": shown["id"],
        "message": shown["message"][:MOST_TEXT],
        "diagnosis": shown["diagnosis"],
    }


def distinct(failures: list[dict[str, Any]], parameter: str) -> list[int]:
    """The values of one parameter among failures, in order; none where their cases make no choices."""
    return sorted({failure["parameters"][parameter] for failure in failures if parameter in failure["parameters"]})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="adapters; all whose library is installed by default")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the files are written")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for name in options.names or LIBRARY:
        state = registry.find(name).availability()
        if not state.usable:
            print(f"{name}: {state.reason}")
            continue
        kept = trimmed(report_of(name))
        file = options.folder / f"{name}-{kept['details'][LIBRARY[name]].partition('+')[0]}.json"
        write_whole(file, (json.dumps(kept, indent=1, ensure_ascii=False) + "\n").encode())
        print(f"{file.name}: {kept['verdict']}, {kept['counts']}, {len(kept['findings'])} findings")


if __name__ == "__main__":
    main()
