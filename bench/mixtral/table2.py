"""The paper's Table 2 in virtual time: its four machines, its rows, a recorded routing, and nothing fitted.

    cd bench
    export PYTHONPATH=../conformance/selftest/support
    python -m mixtral.table2      # a few minutes; writes mixtral/table2.json

The engine runs on the simulated device with the sizes of Mixtral-8x7B quantised as the paper did it, and is asked for
the experts that a trained model asked for (`mixtral.recordings`): 32 layers are two passages' 16, one above the other,
with no guesses from one to the other. The machines' numbers are those of data sheets (`lowbit_gpusim.sim.machines`).

============================ ======================================================================================
row                          what the engine is asked for
============================ ======================================================================================
full, one or two guesses     the two experts, and one or two guesses for the next layer; k slots (the paper: "1-2")
without pre-loading          the same without guesses
without LRU and pre-loading  two experts that are not there: those that ran longest ago, whichever the token's are
naive                        all eight experts, of which the token's two run, everything forgotten before each token
============================ ======================================================================================

**Memory.** The paper's experts lie in one place each and are exchanged with the host's (*swap*). The rows named
*mirror* are the same with a copy of every expert on the host. Naive loading exchanges nothing and is always mirror.

**What comes out.** In all eight columns the rows have the paper's order, with one guess and with two. Pre-loading gains
for a reason that the paper does not name: under swap the gate's scores, on their way to the host, wait behind the
expert that goes back there, and a guess is copied meanwhile. Under mirror nothing waits, and there is little for a
guess to hide behind, since computing a layer takes a twentieth (A100) to an eighth (T4) of the time of copying one
expert: one guess changes tokens a second by −1 to +3 %, and two lose 5 to 12 %, because one copy in six is wrong.

**What is left** is listed for each cell in seconds a token (`residual_seconds`). The simulated machine copies and
computes at the full rate of its parts and its host costs it almost nothing, so it is faster than the paper's in every
cell but one. On the A100 the rows above naive leave nearly the same, 0.23 to 0.24 s or 7 ms a layer: work of the
paper's software that is no copy and does not depend on the cache. On the other machines they leave 0.15 to 0.45 s. The
naive row of the 3060 leaves nothing at 2 bits, and at 3 bits (read as errata M8 has it) it is faster than its link can
carry the experts as they were stored. A cost that is one number for a machine does not explain this: between the
paper's last two rows there is less time than its links need for the bytes in which they differ
(`mixtral.paper.implied_gb`), so the upper of the two holds time that naive does not. Therefore nothing is fitted.
"""

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from training.files import write_json

from lowbit.moe.offload import Arrangement
from lowbit.quantization.hqq_table1 import mixtral
from lowbit_gpusim.sim.device import SimDevice
from mixtral.following import SIMULATED, Plan, Row, follow, pairs
from mixtral.paper import (
    COLUMNS,
    EXPERTS,
    LAYERS,
    ROWS,
    Column,
    attention_bytes,
    expert_bytes,
    implied_gb,
    printed,
    read,
)
from mixtral.recordings import FILE, Recordings
from mixtral.replaying import Part, Replay, Sizes

RESULT = Path(__file__).parent / "table2.json"
CONTEXT = 512


FULL = ("full, one guess", "full, two guesses")


def sizes(bits: int) -> Sizes:
    """Mixtral-8x7B: experts of so many bits, attention of 4, the rest of 16, keys and values of 16."""
    hidden, vocabulary, weights = 4096, 32000, mixtral()
    return Sizes(
        expert=Part(expert_bytes(bits), weights.experts // (LAYERS * EXPERTS)),
        attention=Part(attention_bytes(), weights.attention // LAYERS),
        gate=Part(2 * 2 * EXPERTS * hidden, 2 * EXPERTS * hidden),
        head=Part(2 * vocabulary * hidden, vocabulary * hidden),
        token_bytes=2 * 2 * 8 * 128,
        hidden=hidden,
        experts=EXPERTS,
        vocabulary=vocabulary,
        context=CONTEXT,
    )


def run(column: Column, bits: int, row: Row, recordings: Recordings, plan: Plan) -> dict[str, Any]:
    """One cell: tokens a second, and what was copied."""
    arrangement = Arrangement(LAYERS, EXPERTS, column.slots, memory=row.memory)
    with SimDevice(column.preset, backed=False, log_limit=0) as device:
        model = Replay(device, sizes(bits), arrangement, prefetch=row.guesses > 0)
        followed, peak = follow(model, row, recordings, plan), device.peak
    return {
        "tokens_per_second": round(1 / followed.mean, 3),
        "seconds": followed.mean,
        "copied_bytes": followed.copied_a_token,
        "link_seconds": followed.copied_bytes / len(followed.seconds) / column.machine.link.bandwidth,
        "peak_bytes": peak,
    }


def cells(column: Column, bits: int, recordings: Recordings, plan: Plan) -> Iterator[dict[str, Any]]:
    """The rows of one column, each beside the paper's."""
    found = {row: run(column, bits, row, recordings, plan) for row in SIMULATED}
    naive = next(cell["seconds"] for row, cell in found.items() if row.name == "naive")
    for row, cell in found.items():
        paper = read(column, bits, row.paper)
        yield {
            "row": row.name,
            **{name: rounded(value) for name, value in cell.items()},
            "ratio": round(naive / cell["seconds"], 3),
            "printed": printed(column, bits, row.paper),
            "paper": paper,
            "paper_ratio": round(paper / read(column, bits, "naive"), 3),
            "residual_seconds": round(1 / paper - cell["seconds"], 4),
        }


def table(recordings: Recordings, plan: Plan) -> dict[str, Any]:
    """All of it."""
    columns = []
    for column in COLUMNS:
        for bits in (2, 3):
            listed = list(cells(column, bits, recordings, plan))
            columns.append(
                {
                    "machine": column.name,
                    "preset": asdict(column.machine),
                    "bits": bits,
                    "slots": column.slots,
                    "expert_bytes": expert_bytes(bits),
                    "implied_gb": round(implied_gb(column, bits), 1),
                    "link_gb": round(column.machine.link.bandwidth / 1e9, 2),
                    "rows": listed,
                }
            )
            show(columns[-1])
    return {
        "about": "virtual time, nothing measured and nothing fitted; see mixtral/table2.py",
        "routings": {"weights": recordings.header["weights"], "pairs": pairs(recordings)[: plan.pairs]},
        "plan": asdict(plan),
        "columns": columns,
    }


def show(column: dict[str, Any]) -> None:
    """A column on the terminal."""
    print(
        f"{column['machine']}, {column['bits']}-bit experts of {column['expert_bytes'] / 1e6:.1f} MB, k = "
        f"{column['slots']}; the last two rows imply {column['implied_gb']} GB/s of a link of {column['link_gb']}"
    )
    for row in column["rows"]:
        print(
            f"  {row['row']:35} {row['tokens_per_second']:7.3f} tokens/s {row['ratio']:6.2f}   "
            f"paper {row['paper']:.3f} {row['paper_ratio']:5.2f}   residual {row['residual_seconds'] * 1e3:5.0f} ms",
            flush=True,
        )


def rounded(value: float) -> float:
    return value if isinstance(value, int) else round(value, 6)


def in_order(column: dict[str, Any], full: str = "full, one guess", memory: str = "") -> bool:
    """Whether the rows are as fast one after the other as the paper's.

    Args:
        column: of the table.
        full: which of the rows is the paper's first.
        memory: empty for the paper's, or ``, mirror``.
    """
    speed = {row["row"]: row["tokens_per_second"] for row in column["rows"]}
    names = (f"{full}{memory}", f"{ROWS[1]}{memory}", f"{ROWS[2]}{memory}", ROWS[3])
    return all(speed[faster] > speed[slower] for faster, slower in pairwise(names))


def main() -> None:
    """Simulate and write."""
    parser = argparse.ArgumentParser(description="Table 2 in virtual time.", allow_abbrev=False)
    parser.add_argument("--tokens", type=int, default=Plan.tokens, help="of each pair of passages")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    if not 1 <= options.tokens <= CONTEXT - Plan.warm:
        parser.error(f"--tokens is {options.tokens}; allowed: 1 to {CONTEXT - Plan.warm}")
    result = table(Recordings.load(FILE), Plan(options.tokens))
    write_json(options.out, result)
    for memory in ("", ", mirror"):
        for full in FULL:
            count = sum(in_order(column, full, memory) for column in result["columns"])
            print(f"{full}{memory}: rows in the paper's order in {count} of {len(result['columns'])} columns")


if __name__ == "__main__":
    main()
