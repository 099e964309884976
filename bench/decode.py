"""Tokens a second of a whole model, beside other engines: ``nox -s bench -- --decode`` (the paper's Figure 4).

    python bench/decode.py --decode
    python bench/decode.py --decode --threads 2 --repetitions 5 --tokens 64

All read the same GGUF file and prompt, and continue it greedily on the same number of threads, in one process and
in turns: one repetition of each, then the next, the order changing. The first token, before which the prompt is read,
is timed apart from those that follow. Before each repetition memory is read for a while, so that what one token must
read at least stands beside what it takes. Writes decode.json and decode.svg into bench/results; ``--keep`` copies them
into docs/data.
"""

import argparse
import itertools
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from engines import Generator, Lowbit, beside
from limits import MemoryReader
from quiet import settle
from whole_model import READ, child, report_of, thread_counts, write

from lowbit.formats import fetch as data
from lowbit.runtime import Contract, open_model
from lowbit.runtime.language_model import StepChoice
from lowbit_bench.intervals import interval

REPETITIONS, TOKENS, PROMPT = 5, 64, 128


def measured(threads: int, options: argparse.Namespace) -> dict[str, Any]:
    """All generators on a number of threads, in turns."""
    file = options.model or data.fetch(data.DEFAULT_MODEL)
    model = open_model(file)
    text = data.read_text(data.fetch(data.DEFAULT_TEXT))
    prompt = model.tokenizer.encode(text)[: options.prompt]
    length = -(-(options.prompt + options.tokens) // 256) * 256
    ways: list[tuple[Contract, StepChoice]] = [
        ("float32", "compiled"),
        ("integer", "compiled"),
        ("float32", "operations"),
    ]
    generators: list[Generator] = [Lowbit(model, threads, isa, *way) for isa in options.isa or [None] for way in ways]
    others, absent = beside(file, threads, length)
    generators += others
    reader = MemoryReader(threads)
    spin = reader.freedom()
    runs: list[list[dict[str, Any]]] = [[] for _ in generators]
    for repetition in range(options.repetitions + 1):  # the first warms everything and is dropped
        for place in range(len(generators)):
            index = (place + repetition) % len(generators)
            settle()
            read = READ / reader.seconds(READ) / 1e9
            runs[index].append(asdict(generators[index].continued(prompt, options.tokens)) | {"read_gbps": read})
    return {
        "threads": threads,
        "spin_before": round(spin, 3),
        "spin_after": round(reader.freedom(), 3),
        "model": file.name,
        "model_bytes": file.stat().st_size,
        "prompt_tokens": len(prompt),
        "generators": [summary(each.name, mine[1:]) for each, mine in zip(generators, runs, strict=True)],
        "equal_tokens": [common(runs[0][-1]["tokens"], mine[-1]["tokens"]) for mine in runs],
        "absent": absent,
    }


def summary(name: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the repetitions, and all of them."""
    steady = [(len(run["tokens"]) - 1) / run["after"] for run in runs]
    return {
        "name": name,
        "first_seconds": list(interval([run["first"] for run in runs])),
        "tokens_per_second": list(interval(steady)),
        "read_gbps": float(np.median([run["read_gbps"] for run in runs])),
        "repetitions": [
            {"first_seconds": run["first"], "tokens_per_second": s} for run, s in zip(runs, steady, strict=True)
        ],
    }


def common(a: list[int], b: list[int]) -> int:
    """How many tokens two sequences begin with alike."""
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))))


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--decode", action="store_true", help="what this program does; accepted for nox")
    parser.add_argument("--model", type=Path, help="a GGUF file; SmolLM2-135M-Instruct is fetched without")
    parser.add_argument("--threads", type=int, action="append", default=[], help="by default 1 and all processors")
    parser.add_argument("--isa", action="append", default=[], help="instruction sets of cppyy; the best by default")
    parser.add_argument("--repetitions", type=int, default=REPETITIONS)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="generated in each")
    parser.add_argument("--prompt", type=int, default=PROMPT, help="tokens of the prompt, from alice29")
    parser.add_argument("--keep", action="store_true", help="copy the results into docs/data")
    parser.add_argument("--not-installed", type=json.loads, default={}, help=argparse.SUPPRESS)
    parser.add_argument("--child", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> None:
    options = parsed(sys.argv[1:])
    if options.child:
        print(json.dumps(measured(options.child, options)))
        return
    from decode_report import draw, show

    runs = [child(__file__, threads) for threads in thread_counts(options)]
    report = report_of("decode", options, ("repetitions", "tokens", "prompt"), runs)
    show(report)
    write("decode", report, draw, options.keep)


if __name__ == "__main__":
    main()
