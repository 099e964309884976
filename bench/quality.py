"""Perplexity against tokens a second, by bits and group size: ``nox -s bench -- --quality`` (QIGen, figures 3 and 4).

    python bench/quality.py --quality
    python bench/quality.py --quality --threads 2 --windows 33 --repetitions 5

A model is quantised to each number of bits in groups of each size, and lowbit runs it with compiled steps and real
kernels, by either contract; beside it llama.cpp runs the same model in its own types of files, which its own quantiser
writes. Both begin with the numbers of one GGUF file. Perplexity is that of windows of lcet10, in which every token but
the first is scored, by the same kernels that are timed. It is scored with the most threads and holds for fewer too: how
many threads there are changes no result.

Speed is measured in *pairs*: each engine in turns with lowbit on the file as it is, one repetition of each after the
other, so that what else the machine does meets both. Writes quality.json and quality.svg into bench/results, a row at a
time: an interrupted run resumes with the rows that are missing; ``--fresh`` measures all. ``--quick`` takes one row of
each kind and little text.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from math import exp
from pathlib import Path
from typing import Any

from engine_process import Process, started
from engines import Engine, Setting, own, qualities
from machine import description
from peers.base import AbsentError
from quiet import settle
from whole_model import RESULTS, report_of, shared, thread_counts, write

from lowbit.formats import fetch as data
from lowbit.runtime import open_model
from lowbit.system.storage import write_whole
from lowbit_bench.intervals import interval

TEXT, WINDOW, WINDOWS = "lcet10", 512, 33
TOKENS, PROMPT = 64, 128


def rows(options: argparse.Namespace) -> list[tuple[Engine, int]]:
    """The engines with their numbers of threads, the most threads first."""
    wanted = [each for each in qualities() if not options.only or any(word in each.name for word in options.only)]
    if options.quick:
        kinds = {(each.made_by, each.options.get("contract")): each for each in wanted}
        wanted = list(kinds.values())
    return [(engine, threads) for threads in sorted(thread_counts(options), reverse=True) for engine in wanted]


def measured(engine: Engine, threads: int, options: argparse.Namespace, nats: list[float]) -> dict[str, Any]:
    """One row: the loss in windows, and the speed beside lowbit's on the file as it is; or why there is none.

    Args:
        nats: of the windows, where they were scored before; empty where not.
    """
    file = options.model or data.fetch(data.DEFAULT_MODEL)
    tokenizer = open_model(file).tokenizer
    words = tokenizer.encode(data.read_text(data.fetch(TEXT)), begin=False)
    setting = Setting(file, threads, max(options.window, PROMPT + options.tokens))
    try:
        with started(engine, setting) as ours, started(own()[0], setting) as base:
            windows = [words[start : start + options.window] for start in range(0, len(words), options.window)]
            nats = nats or [ours.nats(window) for window in windows[: options.windows]]
            count = len(nats) * (options.window - 1)
            return {
                "nats": [round(each, 6) for each in nats],
                "perplexity": exp(sum(nats) / count),
                "scored": count,
                **in_pairs(ours, base, words[:PROMPT], options),
            }
    except AbsentError as failure:
        return {"absent": str(failure)}


def in_pairs(ours: Process, base: Process, prompt: list[int], options: argparse.Namespace) -> dict[str, Any]:
    """Tokens a second of an engine, and over those of lowbit on the file as it is, repetition by repetition."""
    speeds: dict[str, list[float]] = {"ours": [], "base": []}
    for repetition in range(options.repetitions + 1):  # the first warms everything and is dropped
        order = [("ours", ours), ("base", base)]
        for name, engine in order if repetition % 2 else order[::-1]:
            settle((ours.pid, base.pid))
            speeds[name].append((options.tokens - 1) / engine.continued(prompt, options.tokens).after)
    pairs = list(zip(speeds["ours"][1:], speeds["base"][1:], strict=True))
    return {
        "version": ours.version,
        "peak_megabytes": round(ours.peak),
        "tokens_per_second": list(interval([one for one, _ in pairs])),
        "over_file": list(interval([one / other for one, other in pairs])),
    }


def all_rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Each row with its settings; those that are kept are not measured again."""
    kept, nats = [] if options.fresh else earlier(same(options)), dict[str, list[float]]()
    for engine, threads in rows(options):
        settings = {"engine": engine.name, "threads": threads}
        found = next((row for row in kept if row["settings"] == settings and "absent" not in row), None)
        if found is None:
            print(f"measuring {engine.name} on {threads} thread(s)", file=sys.stderr, flush=True)
            found = {"settings": settings, **measured(engine, threads, options, nats.get(engine.name, []))}
        nats[engine.name] = found.get("nats", [])
        yield found


def same(options: argparse.Namespace) -> dict[str, Any]:
    """What must be the same for kept rows to stand beside new ones."""
    given = {name: getattr(options, name) for name in ("windows", "window", "tokens", "repetitions")}
    machine = description()
    return given | {"model": str(options.model), "machine": [machine["cpu"], machine["flags"]]}


def earlier(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of an earlier run with these settings."""
    try:
        told = json.loads(partial_file().read_text())
    except (OSError, ValueError):
        return []
    return list(told["rows"]) if told["settings"] == settings else []


def partial_file() -> Path:
    """Where the rows of an unfinished run are kept."""
    return RESULTS / "quality.partial.json"


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shared(parser)
    parser.add_argument("--quality", action="store_true", help="what this program does; accepted for nox")
    parser.add_argument("--windows", type=int, default=WINDOWS, help="windows of the text that are scored")
    parser.add_argument("--window", type=int, default=WINDOW, help="tokens of a window")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="generated in each repetition")
    parser.add_argument("--quick", action="store_true", help="a row of each kind and little text, to see it work")
    parser.add_argument("--fresh", action="store_true", help="measure rows anew that are there")
    options = parser.parse_args(arguments)
    if options.quick:
        options.windows, options.window, options.tokens, options.repetitions = 1, 64, 8, 1
    return options


def main() -> None:
    options = parsed(sys.argv[1:])
    from quality_report import draw, show

    RESULTS.mkdir(exist_ok=True)
    done: list[dict[str, Any]] = []
    for row in all_rows(options):
        done.append(row)
        kept = {"settings": same(options), "rows": done}
        write_whole(partial_file(), json.dumps(kept).encode())
    report = report_of("quality", options, ("repetitions", "tokens", "window", "windows"), done)
    show(report)
    write("quality", report, draw, options.keep and not options.quick)


if __name__ == "__main__":
    main()
