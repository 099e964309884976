"""One engine in a process: ``python bench/engine_worker.py NAME SETTING``, which `engine_process` starts.

It answers a line of JSON for each line of JSON that it reads: first whether it can run, then what is asked of it.
"""

import json
import os
import sys
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from engines import OTHERS, Generator, Setting, Stepwise, own, qualities


def peak_megabytes() -> float:
    """The most memory that this process had in use, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return float(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024 / 1e6


def answer(generator: Generator, asked: dict[str, Any]) -> dict[str, Any]:
    """What a line asks for: a continued prompt, the seconds of rounds of several, or the nats of a window."""
    if "window" in asked:
        assert isinstance(generator, Stepwise)
        return {"nats": generator.nats(asked["window"])}
    if "rounds" in asked:
        assert isinstance(generator, Stepwise)
        return {"seconds": generator.rounds(asked["prompts"], asked["rounds"])}
    return asdict(generator.continued(asked["prompt"], asked["count"])) | {"peak_megabytes": peak_megabytes()}


def main() -> None:
    name, isa, text = sys.argv[1:]
    told = json.loads(text)
    given = told | {key: told[key] and Path(told[key]) for key in ("file", "onnx")}
    engine = next(each for each in (*own(isa or None), *OTHERS, *qualities()) if each.name == name)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer

    def say(what: dict[str, Any]) -> None:
        answers.write(json.dumps(what) + "\n")
        answers.flush()

    try:
        generator = engine.made(Setting(**given))
        say({"version": version(engine.distribution), "batches": isinstance(generator, Stepwise)})
    except (ImportError, OSError, AttributeError, RuntimeError, PackageNotFoundError) as failure:
        say({"absent": f"{type(failure).__name__}: {(str(failure).strip().splitlines() or [''])[0][:200]}"})
        return
    for line in sys.stdin:
        say(answer(generator, json.loads(line)))


if __name__ == "__main__":
    main()
