"""How a model's speed grows with context, prompt and batch, beside other engines: ``nox -s bench -- --growth``.

    python bench/growth.py --growth
    python bench/growth.py --growth --threads 2 --contexts 64 1024 --batches 1 8

All engines read the same GGUF file and run in one process, in turns, as in `decode`. A *context* is the number
of tokens of a prompt, from alice29: the time until its first token gives the prompt's tokens a second, and the tokens
after it give those of decoding. A *batch* is a number of sequences, each of which gets a token in every round. The
time of the command, from its start to its first token, and its peak memory are taken from processes of their own.
Writes growth.json and growth.svg into bench/results; ``--keep`` copies them into docs/data.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from engines import Generator, Lowbit, Stepwise, beside
from limits import MemoryReader
from quiet import settle
from whole_model import READ, child, report_of, thread_counts, write

from lowbit.formats import fetch as data
from lowbit.runtime import Contract, open_model
from lowbit_bench.intervals import interval

CONTEXTS, BATCHES = (16, 64, 256, 1024, 2000), (1, 2, 4, 8, 16, 32)
TOKENS, ROUNDS, SHORT = 16, 8, 32
CONTRACTS: tuple[Contract, ...] = ("float32", "integer")
COMMANDS = 5  # starts of the command that are timed


def engines(file: Path, threads: int, length: int, sequences: int) -> tuple[list[Generator], dict[str, str]]:
    """The engines that can run here, and why others cannot."""
    model = open_model(file)
    own: list[Generator] = [Lowbit(model, threads, None, contract, "compiled") for contract in CONTRACTS]
    others, absent = beside(file, threads, length, sequences)
    return [*own, *others], absent


def in_turns(makers: list[Any], repetitions: int, reader: MemoryReader) -> tuple[list[list[Any]], list[float]]:
    """The answers of each, one repetition after the other, of which the first is dropped; and what memory gave."""
    answers: list[list[Any]] = [[] for _ in makers]
    speeds = []
    for repetition in range(repetitions + 1):
        for place in range(len(makers)):
            index = (place + repetition) % len(makers)
            settle()
            speeds.append(READ / reader.seconds(READ) / 1e9)
            answers[index].append(makers[index]())
    return [each[1:] for each in answers], speeds


def measured(threads: int, options: argparse.Namespace) -> dict[str, Any]:
    """All engines on a number of threads."""
    file = options.model or data.fetch(data.DEFAULT_MODEL)
    words = open_model(file).tokenizer.encode(data.read_text(data.fetch(data.DEFAULT_TEXT)))
    longest = -(-(max(options.contexts) + TOKENS) // 256) * 256
    reader = MemoryReader(threads)
    spin = reader.freedom()
    found, absent = engines(file, threads, longest, 1)
    points = []
    for context in options.contexts:
        runs = [lambda each=each, context=context: each.continued(words[:context], TOKENS) for each in found]
        answers, speeds = in_turns(runs, options.repetitions, reader)
        for engine, own in zip(found, answers, strict=True):
            after = [(TOKENS - 1) / run.after for run in own]
            prompt = [context / run.first for run in own]
            rates = {"tokens_per_second": list(interval(after)), "prompt_per_second": list(interval(prompt))}
            points.append({"engine": engine.name, "context": context, **rates, "read_gbps": median_of(speeds)})
    del found
    together, _ = engines(file, threads, SHORT + 2 * ROUNDS, max(options.batches))
    found = [each for each in together if isinstance(each, Stepwise)]
    for batch in options.batches:
        prompts = [words[n * SHORT : (n + 1) * SHORT - n % 3] for n in range(batch)]
        rounds = [lambda each=each, prompts=prompts: each.rounds(prompts, ROUNDS) for each in found]
        answers, speeds = in_turns(rounds, options.repetitions, reader)
        for engine, own in zip(found, answers, strict=True):
            rate = list(interval([batch * ROUNDS / seconds for seconds in own]))
            points.append(
                {"engine": engine.name, "batch": batch, "tokens_per_second": rate, "read_gbps": median_of(speeds)}
            )
    return {
        "threads": threads,
        "spin_before": round(spin, 3),
        "spin_after": round(reader.freedom(), 3),
        "model": file.name,
        "model_bytes": file.stat().st_size,
        "points": points,
        "absent": absent,
    }


def median_of(values: list[float]) -> float:
    return float(interval(values)[0])


def command(file: Path, threads: int, contract: Contract) -> dict[str, Any]:
    """`lowbit generate` from its start to its first token, after a first run, and its peak memory in MB."""
    words = [sys.executable, "-P", "-m", "lowbit", "generate", "--model", str(file), "--backend", "cppyy"]
    words += ["--contract", contract, "--prompt", "The capital of France is", "--tokens", "8"]
    limits = os.environ | {"LOWBIT_NUM_THREADS": str(threads)}
    subprocess.run(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=limits, check=True)
    seconds, peak = [], 0.0
    for _ in range(COMMANDS):
        start = time.perf_counter()
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=limits) as process:
            assert process.stdout is not None
            process.stdout.read(1)  # the peak of a child is at least that of its parent, which is why `main` starts it
            seconds.append(time.perf_counter() - start)
            process.stdout.read()
            _, _, used = os.wait4(process.pid, 0)
            process.returncode = 0
            peak = max(peak, used.ru_maxrss / 1e3)
    return {"contract": contract, "first_token_seconds": list(interval(seconds)), "peak_megabytes": round(peak)}


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--growth", action="store_true", help="what this program does; accepted for nox")
    parser.add_argument("--model", type=Path, help="a GGUF file; SmolLM2-135M-Instruct is fetched without")
    parser.add_argument("--threads", type=int, action="append", default=[], help="by default 1 and all processors")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--contexts", type=int, nargs="+", default=list(CONTEXTS), help="tokens of prompts")
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES), help="sequences at once")
    parser.add_argument("--keep", action="store_true", help="copy the results into docs/data")
    parser.add_argument("--not-installed", type=json.loads, default={}, help=argparse.SUPPRESS)
    parser.add_argument("--child", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> None:
    options = parsed(sys.argv[1:])
    if options.child:
        print(json.dumps(measured(options.child, options)))
        return
    file = options.model or data.fetch(data.DEFAULT_MODEL)
    counts = thread_counts(options)
    starts = {threads: [command(file, threads, contract) for contract in CONTRACTS] for threads in counts}
    runs = [child(__file__, threads) | {"commands": starts[threads]} for threads in counts]
    from growth_report import draw, show  # after the commands: it makes this process larger

    report = report_of("growth", options, ("repetitions", "contexts", "batches"), runs)
    show(report)
    write("growth", report, draw, options.keep)


if __name__ == "__main__":
    main()
