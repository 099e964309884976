"""The paper's Table 2 as ratios, on a device: Mixtral-8x7B's shape, experts of 2 and 3 bits, a recorded routing.

The rows, and what each asks the engine for, are those of `mixtral.following`. `mixtral.table2` has the same in virtual
time; here the kernels run and the copies are real (`gpu.shaped`). Every expert has its place on the host (*mirror*), so
nothing is copied back. Ratios are to naive loading, which brings every expert of a layer.

Beside each row stands the time that its *misses* take at least: the bytes of experts that ran and were not in a slot,
by the bandwidth of copies of one expert after another that is measured in the same run. Wrong guesses are not in it.
What the row takes longer is what it did not hide.
"""

from statistics import median
from typing import Any

from mixtral.following import SIMULATED, Plan, Row, follow
from mixtral.paper import COLUMNS, ROWS, read
from mixtral.recordings import FILE, Recordings

from gpu.parts import Answer, Setting, Skipped
from gpu.shaped import BUFFERS, SLOTS, Shaped, expert_layout, mixtral
from lowbit_cuda.port import DeviceMemoryError, DevicePort

CONTEXT = 512
GOAL, GOAL_OF_COPIES = 2.6, 0.9
LISTED = tuple(row for row in SIMULATED if row.memory == "mirror")


REAL, TRIED = Plan(tokens=24, warm=8, pairs=2), Plan(tokens=2, warm=1, pairs=1)


def run(setting: Setting) -> Answer:
    """Both kinds of experts."""
    config, plan, columns = mixtral(CONTEXT), TRIED if setting.simulate else REAL, []
    for bits in (2, 3):
        needed = config.layers * 8 * expert_layout(config, bits).nbytes
        if not setting.simulate and needed > 0.8 * (there := available()):
            raise Skipped(
                f"its experts of {bits} bits need {needed >> 30} GiB of the host, of which {there >> 30} are free"
            )
        try:
            with setting.device(bytes_there=False) as device:
                columns.append(column(device, bits, plan))
            setting.so_far(summed(columns))
        except DeviceMemoryError as error:
            raise Skipped(str(error)) from error
        print(columns[-1], flush=True)
    words = "; ".join(f"{one['bits']} bits: {', '.join(str(row['ratio']) for row in one['rows'])}" for one in columns)
    return Answer(setting.measured, words, summed(columns))


def summed(columns: list[dict[str, Any]]) -> dict[str, Any]:
    """The result, of both kinds of experts or the first."""
    names = [row.name for row in LISTED]
    return {"goal": GOAL, "goal_of_copies": GOAL_OF_COPIES, "rows": names, "columns": columns}


def available() -> int:
    """Bytes of the host's memory that can be had."""
    with open("/proc/meminfo") as file:
        lines = dict(line.split(":", 1) for line in file)
    return int(lines.get("MemAvailable", lines["MemFree"]).split()[0]) << 10


def column(device: DevicePort, bits: int, plan: Plan) -> dict[str, Any]:
    """All rows for experts of so many bits."""
    recordings, config = Recordings.load(FILE), mixtral(CONTEXT)
    model = Shaped(device, config, bits)
    try:
        bandwidth = copied_in_a_second(device, model.expert_bytes)
        cells = {row: cell(model, row, recordings, plan) for row in LISTED}
    finally:
        model.close()
    naive = next(one["seconds"] for row, one in cells.items() if row.whole)
    listed = []
    for row, one in cells.items():
        paper = read(COLUMNS[0], bits, row.paper) / read(COLUMNS[0], bits, ROWS[3])
        at_least = one["missed_bytes"] / bandwidth
        listed.append(
            {"row": row.name, **one, "tokens_per_second": round(1 / one["seconds"], 3)}
            | {"ratio": round(naive / one["seconds"], 3), "paper_ratio": round(paper, 3)}
            | {"seconds_of_misses": at_least, "share_of_misses": round(at_least / one["seconds"], 3)}
        )
    return {
        **{"bits": bits, "expert_bytes": model.expert_bytes, "slots": SLOTS, "buffers": BUFFERS},
        "host_to_device_gb": round(bandwidth / 1e9, 2),
        "peak_bytes": device.peak,
        "rows": listed,
    }


def cell(model: Shaped, row: Row, recordings: Recordings, plan: Plan) -> dict[str, Any]:
    """One row: the mean seconds of a token, and the bytes that were copied for it, and that were missing."""
    followed = follow(model, row, recordings, plan)
    missed = followed.missed * model.expert_bytes // len(followed.seconds)
    return {
        **{"seconds": followed.mean, "median_seconds": median(followed.seconds)},
        **{"copied_bytes": followed.copied_a_token, "missed_bytes": missed},
    }


def copied_in_a_second(device: DevicePort, nbytes: int, times: int = 16) -> float:
    """Bytes of pinned memory that reach the device in a second, an expert at a time, one after another."""
    host, there = device.pin(times * nbytes, "experts"), device.allocate(nbytes, "expert")
    stream, rounds = device.stream("copies"), []
    for _ in range(5):
        first = device.record(stream)
        for number in range(times):
            device.copy(there.span(), host.span(number * nbytes, nbytes), stream)
        last = device.record(stream)
        device.synchronize(first)
        device.synchronize(last)
        rounds.append(device.seconds(first, last))
    device.free(host)
    device.free(there)
    return times * nbytes / median(rounds)
