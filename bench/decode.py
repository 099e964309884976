"""Tokens a second of a whole model, beside llama.cpp: ``nox -s bench -- --decode`` (the paper's Figure 4).

    python bench/decode.py --decode
    python bench/decode.py --decode --threads 2 --repetitions 5 --tokens 64

Both read the same GGUF file, the same prompt and continue it greedily on the same number of threads, in one process and
in turns: one repetition of each, then the next, the order changing. The first token, before which the prompt is read,
is timed apart from those that follow. Before each repetition memory is read for a while, so that what one token must
read at least stands beside what it takes. Writes decode.json and decode.svg into bench/results; ``--keep`` copies them
into docs/data.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from limits import MemoryReader
from machine import described, description
from quiet import settle

from lowbit.formats import fetch as data
from lowbit.runtime import Contract, Options, StoredModel, load, open_model
from lowbit.runtime.language_model import StepChoice
from lowbit.system.storage import write_whole
from lowbit_bench.intervals import interval
from lowbit_cppyy.backend import CppyyBackend

HERE = Path(__file__).parent
RESULTS, KEPT = HERE / "results", HERE.parent / "docs/data"
FILES = ("decode.json", "decode.svg")
REPETITIONS, TOKENS, PROMPT = 5, 64, 128
NAMES: dict[StepChoice, str] = {"compiled": "", "operations": ", step by operations", "formulas": ", products only"}
LIMITS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
READ = 2**28  # bytes of a reading


class Generator(ABC):
    """A model that is loaded and continues prompts, greedily."""

    name: str

    @abstractmethod
    def tokens(self, prompt: list[int], count: int) -> Iterator[int]:
        """So many tokens after a prompt, each computed when it is asked for."""

    @abstractmethod
    def rounds(self, prompts: list[list[int]], count: int) -> float:
        """Seconds of so many rounds, in each of which every sequence gets a token; the prompts were read before."""


class Lowbit(Generator):
    """`lowbit generate --backend cppyy`, with a step that is compiled, or operation by operation, or with products only
    and the formulas of the specification between them; and by one of the contracts of linear layers."""

    def __init__(self, model: StoredModel, threads: int, isa: str | None, contract: Contract, step: StepChoice) -> None:
        backend = CppyyBackend(isa=isa, threads=threads)
        self.model = load(model, backend, Options(contract=contract, step=step))
        best = (backend.capabilities().details or {})["instruction set"]
        self.name = f"lowbit {best} {contract}{NAMES[step]}"

    def tokens(self, prompt: list[int], count: int) -> Iterator[int]:
        return (step.token for step in self.model.generate(prompt, count, stop=()))

    def rounds(self, prompts: list[list[int]], count: int) -> float:
        decoder: Any = self.model.decoder
        states = [decoder.new_state() for _ in prompts]
        ends = [decoder.logits(decoder.hidden(each, state)[-1:]) for each, state in zip(prompts, states, strict=True)]
        tokens = [int(each[0].argmax()) for each in ends]
        start = time.perf_counter()
        for _ in range(count):
            tokens = decoder.logits(decoder.hidden_batch(tokens, states)).argmax(axis=1).tolist()
        return time.perf_counter() - start


class LlamaCpp(Generator):
    """llama.cpp through the functions of its own interface; the likeliest token is found by numpy, as in lowbit."""

    name = "llama.cpp"

    def __init__(self, file: Path, threads: int, length: int, sequences: int = 1) -> None:
        import llama_cpp

        self._api, self._quiet = llama_cpp, llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._quiet, None)
        llama_cpp.llama_backend_init()
        model = llama_cpp.llama_model_default_params()
        model.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(str(file).encode(), model)
        context = llama_cpp.llama_context_default_params()
        context.n_ctx, context.n_batch, context.n_ubatch = length * sequences, length, min(length, 512)
        context.n_seq_max = sequences
        context.n_threads = context.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, context)
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))

    def tokens(self, prompt: list[int], count: int) -> Iterator[int]:
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)
        token = self._next(prompt)
        yield token
        for _ in range(count - 1):
            token = self._next([token])
            yield token

    def rounds(self, prompts: list[list[int]], count: int) -> float:
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)
        batch = self._api.llama_batch_init(max(len(prompts), *map(len, prompts)), 0, 1)
        try:
            tokens = []
            for sequence, prompt in enumerate(prompts):
                self._fill(batch, [(token, place, sequence) for place, token in enumerate(prompt)])
                tokens.append(self._likeliest(len(prompt) - 1))
            start = time.perf_counter()
            for number in range(count):
                places = [len(prompt) + number for prompt in prompts]
                self._fill(batch, list(zip(tokens, places, range(len(prompts)), strict=True)))
                tokens = [self._likeliest(place) for place in range(len(prompts))]
            return time.perf_counter() - start
        finally:
            self._api.llama_batch_free(batch)

    def _fill(self, batch: Any, rows: list[tuple[int, int, int]]) -> None:
        """Read tokens, each with its place and its sequence; all their logits are wanted."""
        batch.n_tokens = len(rows)
        for n, (token, place, sequence) in enumerate(rows):
            batch.token[n], batch.pos[n], batch.n_seq_id[n], batch.logits[n] = token, place, 1, 1
            batch.seq_id[n][0] = sequence
        if self._api.llama_decode(self._context, batch):
            raise RuntimeError("llama_decode failed")

    def _next(self, read: list[int]) -> int:
        given = (self._api.llama_token * len(read))(*read)
        if self._api.llama_decode(self._context, self._api.llama_batch_get_one(given, len(read))):
            raise RuntimeError("llama_decode failed")
        return self._likeliest(-1)

    def _likeliest(self, row: int) -> int:
        logits = self._api.llama_get_logits_ith(self._context, row)
        return int(np.ctypeslib.as_array(logits, (self._vocabulary,)).argmax())


def measured(threads: int, options: argparse.Namespace) -> dict[str, Any]:
    """All generators on so many threads, in turns."""
    file = options.model or data.fetch(data.DEFAULT_MODEL)
    model, absent = open_model(file), dict[str, str]()
    text = data.read_text(data.fetch(data.DEFAULT_TEXT))
    prompt = model.tokenizer.encode(text)[: options.prompt]
    length = -(-(options.prompt + options.tokens) // 256) * 256
    ways: list[tuple[Contract, StepChoice]] = [
        ("float32", "compiled"),
        ("integer", "compiled"),
        ("float32", "operations"),
    ]
    generators: list[Generator] = [Lowbit(model, threads, isa, *way) for isa in options.isa or [None] for way in ways]
    try:
        generators.append(LlamaCpp(file, threads, length))
    except (ImportError, OSError, AttributeError) as failure:
        absent["llama.cpp"] = f"{type(failure).__name__}: {failure}"
    reader = MemoryReader(threads)
    spin = reader.freedom()
    runs: list[list[dict[str, Any]]] = [[] for _ in generators]
    for repetition in range(options.repetitions + 1):  # the first warms everything and is dropped
        for place in range(len(generators)):
            index = (place + repetition) % len(generators)
            settle()
            read = READ / reader.seconds(READ) / 1e9
            runs[index].append(repeated(generators[index], prompt, options.tokens) | {"read_gbps": read})
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


def repeated(generator: Generator, prompt: list[int], count: int) -> dict[str, Any]:
    """One repetition: seconds to the first token, and of those after it."""
    start = time.perf_counter()
    tokens = generator.tokens(prompt, count)
    found = [next(tokens)]
    first = time.perf_counter()
    found += tokens
    return {"tokens": found, "first": first - start, "after": time.perf_counter() - first}


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

    cores = len(os.sched_getaffinity(0))
    report: dict[str, Any] = {
        "schema": "lowbit-bench-decode/1",
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": description(),
        "projects": described(options.not_installed),
        "settings": {name: getattr(options, name) for name in ("repetitions", "tokens", "prompt")},
        "runs": [child(threads) for threads in options.threads or sorted({1, min(2, cores)})],
    }
    RESULTS.mkdir(exist_ok=True)
    text = (json.dumps(report, indent=1, ensure_ascii=False) + "\n").encode()
    write_whole(RESULTS / FILES[0], text)
    show(report)
    draw(report, RESULTS / FILES[1])
    if options.keep:
        for name in FILES:
            write_whole(KEPT / name, (RESULTS / name).read_bytes())
    print(f"written to {RESULTS}: {', '.join(FILES)}")


def child(threads: int) -> dict[str, Any]:
    """One number of threads, in a process whose libraries are limited to it."""
    print(f"decoding on {threads} thread(s)", file=sys.stderr, flush=True)
    command = [sys.executable, __file__, *sys.argv[1:], "--child", str(threads)]
    limits = dict.fromkeys(LIMITS, str(threads))
    answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=os.environ | limits).stdout
    found: dict[str, Any] = json.loads(answer.splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
