"""How a model's speed grows with context, prompt and batch, beside other engines: ``nox -s bench -- --growth``.

    python bench/growth.py --growth
    python bench/growth.py --growth --threads 2 --contexts 64 1024 --batches 1 8

All engines read the same GGUF file and run in turns, as in `decode`. A *context* is the number of tokens of a prompt,
from alice29, at most the model's own context less the tokens that follow: the time until its first token gives the
prompt's tokens a second, and the tokens after it give those of decoding. An engine that would need more than
``--longest`` seconds for a prompt is not given it, and the report says so; where one repetition of all engines takes
longer than that, it is the only one. A *batch* is a number of sequences, each of which gets a token in every round. The
time of the command, from its start to its first token, and its peak memory are taken from processes of their own.
Writes growth.json and growth.svg into bench/results; ``--keep`` copies them into docs/data. An interrupt loses only the
context or batch that is being measured: the others are written, and the status is 130.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from engine_process import Process, running
from engines import Setting
from limits import MemoryReader
from peers.base import AbsentError
from quiet import settle
from whole_model import INTERRUPTED, READ, children, give, report_of, shared, tell, thread_counts, write

from lowbit.formats import fetch as data
from lowbit.runtime import Contract, open_model
from lowbit_bench.intervals import interval

CONTEXTS, BATCHES = (64, 256, 1024, 2048, 4096, 8192), (1, 2, 4, 8, 16, 32)
TOKENS, ROUNDS, SHORT = 16, 8, 32
CONTRACTS: tuple[Contract, ...] = ("float32", "integer")
Found = tuple[list[dict[str, Any]], dict[str, str]]  # points, and why engines have none
COMMANDS = 5  # starts of the command that are timed


def in_turns(
    makers: Sequence[Callable[[], Any]], pids: Sequence[int], options: argparse.Namespace, reader: MemoryReader
) -> tuple[list[list[Any]], list[float]]:
    """The answers of each, one repetition after the other, of which the first is dropped; and what memory gave.

    One whose process ends has no more answers. A counted repetition that takes longer than `longest` is the last.
    """
    answers: list[list[Any]] = [[] for _ in makers]
    speeds = []
    for repetition in range(options.repetitions + 1):
        start = time.perf_counter()
        for place in range(len(makers)):
            index = (place + repetition) % len(makers)
            settle(pids)
            speeds.append(READ / reader.seconds(READ) / 1e9)
            with suppress(AbsentError):
                answers[index].append(makers[index]())
        if repetition and time.perf_counter() - start > options.longest:
            break
    return [each[1:] for each in answers], speeds


def measure(threads: int, options: argparse.Namespace) -> None:
    """Give the points of all engines on a number of threads, after each context and each batch."""
    file = options.model or data.fetch(data.DEFAULT_MODEL)
    stored = open_model(file)
    words = stored.tokenizer.encode(data.read_text(data.fetch(data.DEFAULT_TEXT)))
    contexts = sorted({min(each, stored.config.context - TOKENS) for each in options.contexts})
    setting = Setting(file, threads, -(-(max(contexts) + TOKENS) // 256) * 256, onnx=options.onnx)
    together = replace(setting, length=SHORT + 2 * ROUNDS, sequences=max(options.batches))
    reader = MemoryReader(threads)
    points, absent = list[dict[str, Any]](), dict[str, str]()
    model = {"threads": threads, "model": file.name, "model_bytes": file.stat().st_size}
    before = round(reader.freedom(), 3)
    for found, left_out in chain(
        along_contexts(setting, words, contexts, reader, options), along_batches(together, words, reader, options)
    ):
        points += found
        absent |= left_out
        spins = {"spin_before": before, "spin_after": round(reader.freedom(), 3)}
        give(model | spins | {"points": points, "absent": absent}, options)


def along_contexts(
    setting: Setting, words: list[int], contexts: list[int], reader: MemoryReader, options: argparse.Namespace
) -> Iterator[Found]:
    """The points after each context."""
    points: list[dict[str, Any]] = []
    with running(setting, options.isa, options.only) as (engines, absent):
        for context in contexts:
            tell(f"  {context} tokens of context")
            late = too_slow(points, context, options.longest)
            absent |= {f"{name}, {context} tokens of context": why for name, why in late.items()}
            able = [each for each in engines if not each.failure and each.name not in late]
            found = list(of_context(able, words[:context], reader, options))
            points += found
            settle([each.pid for each in able])  # before `measure` looks whether the cores are free
            yield found, absent | {each.name: each.failure for each in engines if each.failure}


def along_batches(
    setting: Setting, words: list[int], reader: MemoryReader, options: argparse.Namespace
) -> Iterator[Found]:
    """The points of each batch."""
    with running(setting, options.isa, options.only) as (engines, _):
        for batch in options.batches:
            tell(f"  batches of {batch}")
            able = [each for each in engines if each.batches and not each.failure]
            found = list(of_batch(able, words, batch, reader, options))
            settle([each.pid for each in able])
            yield found, {f"{each.name}, in batches": each.failure for each in engines if each.failure}


def whole(engines: list[Process], answers: list[list[Any]]) -> Iterator[tuple[Process, list[Any]]]:
    """The engines that have not failed, with their answers."""
    return ((engine, own) for engine, own in zip(engines, answers, strict=True) if own and not engine.failure)


def of_context(
    engines: list[Process], prompt: list[int], reader: MemoryReader, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """A point of each engine after a prompt."""
    runs = [partial(each.continued, prompt, TOKENS) for each in engines]
    answers, speeds = in_turns(runs, [each.pid for each in engines], options, reader)
    for engine, own in whole(engines, answers):
        yield {
            "engine": engine.name,
            "context": len(prompt),
            "tokens_per_second": list(interval([(TOKENS - 1) / run.after for run in own])),
            "prompt_per_second": list(interval([len(prompt) / run.first for run in own])),
            "repetitions": len(own),
            "peak_megabytes": round(engine.peak),
            "read_gbps": median_of(speeds),
        }


def too_slow(points: list[dict[str, Any]], context: int, longest: float) -> dict[str, str]:
    """The engines that would need more than `longest` seconds for a context at the speed of their last one, and why."""
    found = {}
    for name, point in {each["engine"]: each for each in points}.items():
        seconds = context / point["prompt_per_second"][0] + TOKENS / point["tokens_per_second"][0]
        if seconds > longest:
            found[name] = f"left out, as {seconds:.0f} s a turn are expected from {point['context']} tokens"
    return found


def of_batch(
    engines: list[Process], words: list[int], batch: int, reader: MemoryReader, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """A point of each engine that continues several sequences at once."""
    prompts = [words[n * SHORT : (n + 1) * SHORT - n % 3] for n in range(batch)]
    rounds = [partial(each.rounds, prompts, ROUNDS) for each in engines]
    answers, speeds = in_turns(rounds, [each.pid for each in engines], options, reader)
    for engine, own in whole(engines, answers):
        rate = list(interval([batch * ROUNDS / seconds for seconds in own]))
        yield {"engine": engine.name, "batch": batch, "tokens_per_second": rate, "read_gbps": median_of(speeds)}


def median_of(values: list[float]) -> float:
    return float(interval(values)[0])


def command(file: Path, threads: int, contract: Contract) -> dict[str, Any]:
    """`lowbit generate` from its start to its first token, after a first run, and its peak memory in MB.

    The first run compiles the Python modules, as the installation of a package does, whatever the settings of the user.
    """
    words = [sys.executable, "-P", "-m", "lowbit", "generate", "--model", str(file), "--backend", "cppyy"]
    words += ["--contract", contract, "--prompt", "The capital of France is", "--tokens", "8"]
    limits = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    seconds, peak = [], 0.0
    with TemporaryDirectory() as compiled:
        limits |= {"LOWBIT_NUM_THREADS": str(threads), "PYTHONPYCACHEPREFIX": compiled}
        subprocess.run(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=limits, check=True)
        for _ in range(COMMANDS):
            start = time.perf_counter()
            with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=limits) as process:
                assert process.stdout is not None
                process.stdout.read(1)  # the peak of a child is at least that of its parent: thus `main` starts it
                seconds.append(time.perf_counter() - start)
                process.stdout.read()
                _, _, used = os.wait4(process.pid, 0)
                process.returncode = 0
                peak = max(peak, used.ru_maxrss / 1e3)
    return {"contract": contract, "first_token_seconds": list(interval(seconds)), "peak_megabytes": round(peak)}


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shared(parser)
    parser.add_argument("--contexts", type=int, nargs="+", default=list(CONTEXTS), help="tokens of prompts")
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES), help="sequences at once")
    parser.add_argument("--longest", type=float, default=120, help="the most seconds of a turn with a prompt")
    options, _ = parser.parse_known_args(arguments)  # nox gives all programs the same
    return options


def main() -> None:
    options = parsed(sys.argv[1:])
    if options.child:
        measure(options.child, options)
        return
    file = options.model or data.fetch(data.DEFAULT_MODEL)
    counts = thread_counts(options)
    starts = {threads: [command(file, threads, contract) for contract in CONTRACTS] for threads in counts}
    found, interrupted = children(__file__, options)
    from growth_report import draw, show  # after the commands: it makes this process larger

    if found:
        runs = [each | {"commands": starts[each["threads"]]} for each in found]
        report = report_of("growth", options, ("repetitions", "contexts", "batches", "longest"), runs)
        show(report)
        write("growth", report, draw, options.keep and not interrupted)
    sys.exit(INTERRUPTED if interrupted else 0)


if __name__ == "__main__":
    main()
