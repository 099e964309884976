"""One process of a comparison: all contests of one shape on one number of threads, reported line by line.

``python bench/worker.py SPECIFICATION`` is started by compare.py, with the variables that limit the threads of the
libraries. It writes lines of JSON to standard output, each with its ``event``; what the libraries print goes to
standard error. That it is a process of its own gives all memory back between shapes, and when a library ends the
process, compare.py knows which contestant it was and goes on without it.
"""

import json
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from accuracy import class_of, error
from contests import BURST, Contest, between
from limits import MemoryReader
from measure import Rounds, measure
from peers.base import Contestant, Plan, Weights
from peers.registry import Entry
from quiet import Watch

from lowbit.arrays import F32
from lowbit.system.memory import available_bytes
from lowbit_bench.intervals import interval, ratios
from lowbit_bench.worker import Say, in_words, sayer

SLOW = 0.5  # seconds; thirty pairs of what is slower would take as long as everything else
SUSPECT = 4  # rows of activations whose error is looked at; those of more rows are alike


def main() -> None:
    """Measure what the first argument says, a JSON object: contests, threads, pairs, patience, left_out, peers."""
    # A library that ends the process by a signal leaves no core file in the folder of the user.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    given, say = json.loads(sys.argv[1]), sayer()
    say("starting")
    reader = MemoryReader(given["threads"])
    say("machine", ceilings=reader.ceilings())
    watch = Watch(reader)
    for fields in given["contests"]:
        hold(Contest(**fields | {"batches": tuple(fields["batches"])}), given, reader, watch, say)


def hold(contest: Contest, given: dict[str, Any], reader: MemoryReader, watch: Watch, say: Say) -> None:
    """One contest: everyone is built, then measured for each batch."""
    if all(f"{contest.id} {batch}" in given["done"] for batch in contest.batches):
        return
    entries = [entry for entry in contest.entries() if wanted(entry, given["peers"])]
    missing: dict[str, str] = {}
    with built(contest, entries, given, missing, say) as present:
        known: list[dict[str, Any]] = []
        for batch in contest.batches:
            if f"{contest.id} {batch}" not in given["done"]:
                slow = too_slow(known, batch)
                able = [(entry, contestant) for entry, contestant in present if entry.id not in slow]
                known.append(problem(contest, batch, able, missing | slow, given, reader, watch, say))
                say("problem", **known[-1])


def too_slow(known: Sequence[dict[str, Any]], batch: int) -> dict[str, str]:
    """Whose measurement would take more than half a second, by what smaller batches took; and that reason.

    >>> row = {"id": "a", "products": 2, "ms": [100, 0, 0]}
    >>> too_slow([{"batch": 4, "contestants": [row, row | {"id": "b", "products": 1}]}], 16)
    {'a': 'a measurement would take about 0.8 s, as a product of 4 rows takes 100 ms'}
    """
    found = {}
    for problem in known:
        for row in problem["contestants"]:
            seconds = row["ms"][0] / 1e3 * row["products"] * batch / problem["batch"]
            if seconds > SLOW:
                rows = "one row" if problem["batch"] == 1 else f"{problem['batch']} rows"
                taken = f"a product of {rows} takes {row['ms'][0]:.0f} ms"
                found[row["id"]] = f"a measurement would take about {seconds:.1f} s, as {taken}"
    return found


def wanted(entry: Entry, parts: list[str]) -> bool:
    """Whether an entry is asked for: all are where nothing is, lowbit's own always."""
    return not parts or entry.project.name == "lowbit" or any(part in entry.id for part in parts)


@contextmanager
def built(
    contest: Contest, entries: Sequence[Entry], given: dict[str, Any], missing: dict[str, str], say: Say
) -> Iterator[list[tuple[Entry, Contestant]]]:
    """All contestants that can be built, closed in the end; `missing` gets the others, each with its reason."""
    weights = Weights(contest.rows, contest.columns, contest.group_size)
    available = available_bytes() or 2**31  # where the system does not say
    rotation = contest.rotation(available, entries, given["rotation"])
    plan, present = Plan(given["threads"], rotation, BURST), list[tuple[Entry, Contestant]]()
    try:
        for number, entry in enumerate(entries):
            say("building", id=entry.id, done=number, total=len(entries))
            if reason := given["left_out"].get(entry.id) or entry.project.missing():
                missing[entry.id] = given["not_installed"].get(entry.project.name) or reason_of_missing(reason)
                continue
            try:
                present.append((entry, entry.build(weights, plan)))
            except Exception as failure:
                missing[entry.id] = in_words(failure)
        yield present
    finally:
        for _, contestant in present:
            contestant.close()


def reason_of_missing(reason: str) -> str:
    return reason if " " in reason else f"{reason} is not installed"


def problem(
    contest: Contest,
    batch: int,
    present: Sequence[tuple[Entry, Contestant]],
    missing: dict[str, str],
    given: dict[str, Any],
    reader: MemoryReader,
    watch: Watch,
    say: Say,
) -> dict[str, Any]:
    """One batch of a contest, as the report holds it."""
    weights, started = Weights(contest.rows, contest.columns, contest.group_size), time.perf_counter()
    x, lacking, ready = weights.activations(batch), dict(missing), list[tuple[Entry, Contestant, dict[str, Any]]]()
    for entry, contestant in present:
        say("calling", id=entry.id)
        try:
            contestant.prepare(x)
            ready.append((entry, contestant, errors_of(contestant, x, weights)))
            contestant.rest()
        except Exception as failure:
            lacking[entry.id] = in_words(failure)
    say("calling", id="")
    contestants = [contestant for _, contestant, _ in ready]
    spin_before = reader.freedom()
    reader.try_again(max((each.nbytes * each.products for each in contestants), default=2**20))

    def progress(done: int, total: int) -> None:
        say("round", done=done, total=total)

    rounds = measure(contestants, reader, watch, given["pairs"], progress, patience=given["patience"])
    return {
        "contest": contest.id,
        "rows": contest.rows,
        "columns": contest.columns,
        "family": contest.family,
        "batch": batch,
        "threads": given["threads"],
        "spin_before": round(spin_before, 3),
        "spin_after": round(reader.freedom(), 3),
        "rounds": len(rounds.free),
        "free_rounds": sum(rounds.free),
        "arithmetic": round(watch.arithmetic(), 3),
        "restless_turns": rounds.restless,
        "turns_again": rounds.again,
        "reader": reader.fastest,
        "contestants": rows_of(ready, rounds, given["pairs"]),
        "absent": [{"id": id, "reason": reason} for id, reason in sorted(lacking.items())],
        "seconds": round(time.perf_counter() - started, 2),
    }


def errors_of(contestant: Contestant, x: F32, weights: Weights) -> dict[str, Any]:
    """Errors of the first rows of a product against float64: on the weights held, and on those before quantising."""
    contestant.run()
    result, few = contestant.result()[:SUSPECT], x[:SUSPECT].astype(np.float64)
    exact = (few @ matrix.astype(np.float64) for matrix in (contestant.held(), weights.tile))
    own, original = (error(result, np.take(product, weights.source, 1)) for product in exact)
    return {
        "error": {"rms": own.rms, "max": own.max},
        "original": {"rms": original.rms, "max": original.max},
        "accuracy": class_of(own.rms),
    }


def rows_of(
    ready: Sequence[tuple[Entry, Contestant, dict[str, Any]]], rounds: Rounds, pairs: int
) -> list[dict[str, Any]]:
    """One object for each contestant: who it is, what it moves, how long it took and how far off it is."""
    kept, rows = rounds.kept(pairs), []
    apart = between([contestant for _, contestant, _ in ready], [times.warm for times in rounds.times])
    for (entry, contestant, errors), times, distance in zip(ready, rounds.times, apart, strict=True):
        runs, reads = ([values[n] for n in kept] for values in (times.runs, times.reads))
        per_product = interval([1e3 * run / contestant.products for run in runs])
        rows.append(
            {
                "id": entry.id,
                "project": entry.project.name,
                "title": entry.title,
                "bits": entry.bits,
                "bytes": contestant.nbytes,
                "products": contestant.products,
                "rotation_bytes": contestant.nbytes * contestant.products * contestant.bursts,
                "bytes_between_uses": distance,
                "ms": rounded(per_product),
                "share": rounded(interval(ratios(reads, runs))),
                "read_gbps": round(contestant.nbytes * contestant.products / float(np.median(reads)) / 1e9, 2),
                "gbps": round(contestant.nbytes / per_product.median / 1e6, 2),
                **errors,
                "ms_of_rounds": [float(f"{1e3 * run / contestant.products:.4g}") for run in runs],
            }
        )
    return rows


def rounded(values: Sequence[float]) -> list[float]:
    return [float(f"{value:.5g}") for value in values]


if __name__ == "__main__":
    main()
