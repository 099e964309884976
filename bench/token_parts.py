"""Where the time of a token goes, part by part of the compiled step, beside the time that reading its bytes takes.

    python bench/token_parts.py --decode
    python bench/token_parts.py --decode --keep

lowbit generates tokens in float32 and with activations cast to 8 bits, on one thread and on all processors, in turns.
Each number is a median of repetitions, each the mean of some tokens. Writes token_parts.json and token_parts.svg into
bench/results; ``--keep`` copies them into docs/data.
"""

import argparse
import sys
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, cast

from limits import MemoryReader
from whole_model import READ, report_of, shared, tell, thread_counts, write

from lowbit.formats import fetch as data
from lowbit.model.decoder import Decoder
from lowbit.runtime import Contract, Options, load
from lowbit_cppyy.backend import CppyyBackend
from lowbit_cppyy.cli.token_time import measured

CONTRACTS: tuple[Contract, ...] = ("float32", "integer")
AFTER, TOKENS = 128, 32


def runs_of(file: Path, counts: list[int], repetitions: int) -> list[dict[str, Any]]:
    """A run for each number of threads and each contract, all in turns."""
    with ExitStack() as opened:
        entries = []
        for threads in counts:
            backend, reader = opened.enter_context(CppyyBackend(threads=threads)), MemoryReader(threads)
            for contract in CONTRACTS:
                model = opened.enter_context(load(file, backend, Options(contract=contract, step="operations")))
                decoder = cast(Decoder, model.decoder)  # one that runs operations
                entries.append((contract, threads, backend.timed(decoder), reader))
        answers: list[list[dict[str, Any]]] = [[] for _ in entries]
        speeds: list[list[float]] = [[] for _ in entries]
        for repetition in range(repetitions):
            tell(f"  repetition {repetition + 1} of {repetitions}")
            for place in range(len(entries)):
                index = (place + repetition) % len(entries)
                _, _, timed, reader = entries[index]
                speeds[index].append(READ / reader.seconds(READ) / 1e9)
                answers[index].append(measured(timed, AFTER, TOKENS))
    return [
        {"contract": contract, "read_gbps": round(median(read), 2)} | summed_up(own)
        for (contract, *_), own, read in zip(entries, answers, speeds, strict=True)
    ]


def summed_up(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """The medians of repeated measurements."""
    first = answers[0]
    parts = [
        part | {name: round(median(each["parts"][n][name] for each in answers), 5) for name in ("ms", "wait_ms")}
        for n, part in enumerate(first["parts"])
    ]
    return (
        first
        | {"parts": parts}
        | {name: round(median(each[name] for each in answers), 5) for name in ("ms", "outside_ms")}
    )


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shared(parser)
    return parser.parse_known_args(arguments)[0]


def main() -> None:
    options = parsed(sys.argv[1:])
    file = options.model or data.fetch(data.DEFAULT_MODEL)
    runs = runs_of(file, thread_counts(options), options.repetitions)
    report = report_of("token-parts", options, ("repetitions",), runs) | {"model": file.name}
    from token_parts_report import draw, show

    show(report)
    write("token_parts", report, draw, options.keep)


if __name__ == "__main__":
    main()
