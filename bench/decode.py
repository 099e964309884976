"""Tokens a second of a whole model, beside other engines: ``nox -s bench -- --decode`` (the paper's Figure 4).

    python bench/decode.py --decode
    python bench/decode.py --decode --threads 2 --repetitions 5 --tokens 64 --prompt 128 --prompt 512
    python bench/decode.py --decode --model gemma3-270m --model qwen2.5-coder-0.5b --only flash --only lowbit

All read the same GGUF file, or the same in Q4_0 where their name says so, and continue the same prompt greedily on the
same number of threads, in turns: one repetition of each, then the next, the order changing. Each runs in a process of
its own (`engine_process`), and none while another is measured. Each turn waits until the cores are free of neighbours
(`quiet.Watch`), up to two minutes for all turns of a prompt. The first token, before which the prompt is read, is timed
apart from those that follow. Before each repetition memory is read for a while, so that what one token must read
at least stands beside what it takes. Writes decode.json and decode.svg into bench/results; ``--keep`` copies them into
docs/data. With ``--model``, which may be repeated, the files are models.json and models.svg. nox runs `growth` after
it, so that one command measures and draws everything. An interrupt loses only the prompt that is being measured: the
others are written, and the status is 130.
"""

import argparse
import itertools
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from engine_process import Process, running
from engines import Setting
from limits import MemoryReader
from peers.base import AbsentError
from quiet import Watch, settle
from whole_model import INTERRUPTED, READ, children, give, report_of, shared, tell, write

from lowbit.formats import fetch as data
from lowbit.runtime import open_model
from lowbit_bench.intervals import interval

TOKENS, PROMPTS = 64, (128, 512)
PATIENCE = 120.0  # seconds that the turns after a prompt wait for free cores, together


def measure(threads: int, options: argparse.Namespace) -> None:
    """Give the runs of all engines on a number of threads, in turns: a run for each model and prompt."""
    reader, files = MemoryReader(threads), options.model or [data.fetch(data.DEFAULT_MODEL)]
    watch, runs = Watch(reader), list[dict[str, Any]]()
    for file in files:
        for run in of_model(file, reader, watch, options):
            runs.append(run)
            give({"runs": runs}, options)


def of_model(file: Path, reader: MemoryReader, watch: Watch, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The runs of a model."""
    words = open_model(file).tokenizer.encode(data.read_text(data.fetch(data.DEFAULT_TEXT)))
    threads, length = reader.threads, -(-(max(options.prompt) + options.tokens) // 256) * 256
    with running(Setting(file, threads, length, onnx=options.onnx), options.isa, options.only) as (engines, absent):
        model = {"threads": threads, "model": file.name, "model_bytes": file.stat().st_size}
        for count in options.prompt:
            run = of_prompt(engines, words[:count], reader, watch, options)
            yield model | run | {"absent": absent | {each.name: each.failure for each in engines if each.failure}}


def of_prompt(
    engines: list[Process], prompt: list[int], reader: MemoryReader, watch: Watch, options: argparse.Namespace
) -> dict[str, Any]:
    """The repetitions of every engine after a prompt."""
    spin, pids = reader.freedom(), [each.pid for each in engines]
    runs: list[list[dict[str, Any]]] = [[] for _ in engines]
    patience, free = PATIENCE, list[bool]()
    for repetition in range(options.repetitions + 1):  # the first warms everything and is dropped
        tell(f"  prompt of {len(prompt)} tokens, repetition {repetition} of {options.repetitions}")
        for place in range(len(engines)):
            index = (place + repetition) % len(engines)
            settle(pids)
            patience -= watch.wait(patience)
            read = READ / reader.seconds(READ) / 1e9
            with suppress(AbsentError):  # one that ends takes no further part
                runs[index].append(asdict(engines[index].continued(prompt, options.tokens)) | {"read_gbps": read})
            free.append(watch.fast())
    whole = [(each, mine) for each, mine in zip(engines, runs, strict=True) if len(mine) == options.repetitions + 1]
    return {
        "spin_before": round(spin, 3),
        "spin_after": round(reader.freedom(), 3),
        "turns": len(free),
        "free_turns": sum(free),
        "prompt_tokens": len(prompt),
        "generators": [summary(each, mine[1:]) for each, mine in whole],
        "equal_tokens": [common(whole[0][1][-1]["tokens"], mine[-1]["tokens"]) for _, mine in whole],
    }


def summary(engine: Process, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the repetitions, and all of them."""
    steady = [(len(run["tokens"]) - 1) / run["after"] for run in runs]
    return {
        "name": engine.name,
        "version": engine.version,
        "model_bytes": engine.model_bytes,
        "peak_megabytes": round(engine.peak),
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
    shared(parser, models="append")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="generated in each repetition")
    parser.add_argument("--prompt", type=int, action="append", default=[], help="tokens of a prompt, from alice29")
    options, _ = parser.parse_known_args(arguments)  # nox gives all programs the same
    options.prompt = options.prompt or list(PROMPTS)
    return options


def main() -> None:
    options = parsed(sys.argv[1:])
    if options.child:
        measure(options.child, options)
        return
    from decode_report import draw, show

    found, interrupted = children(__file__, options)
    runs = [run for each in found for run in each["runs"]]
    if runs:
        report = report_of("decode", options, ("repetitions", "tokens", "prompt"), runs)
        show(report)
        write("models" if options.model else "decode", report, draw, options.keep and not interrupted)
    sys.exit(INTERRUPTED if interrupted else 0)


if __name__ == "__main__":
    main()
