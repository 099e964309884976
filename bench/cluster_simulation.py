"""How long quantising a large model takes on many machines: a simulation whose costs were measured on one.

Usage: ``python bench/cluster_simulation.py``; the answer is JSON, a row for each number of machines. A task is a block.
It reads its weights, makes its part, and writes it to storage that all machines share, or sends it to the process that
was started, which writes it. Machines take tasks as they get free. Links and storage serve one task at a time at their
full rate, so tasks wait for each other there. At the end the process that was started reads and checks everything on
all its processors.

Costs of the work are those of ``cluster_costs.py``. Rates of networks and storage are assumptions, named `ASSUMED`.
"""

import heapq
import json
import sys
from dataclasses import dataclass

MEASURED = {
    "hqq": 6.9e-8,  # seconds of a processor for each weight
    "rtn": 5.7e-8,
    "check hqq": 1.3e-8,
    "check rtn": 2.2e-8,
    "keep": 2.7e-9,  # seconds for each byte that the journal writes and digests
    "byte": 1.8e-9,  # seconds for each byte of a result, without a network
    "task": 1.8e-3,  # seconds for each task of Ray
}
ASSUMED = {"network": 10e9 / 8, "storage": 4e9, "processors": 16}
"""Bytes per second: of the link of the process that was started, and of shared storage. Processors of a machine."""
SOURCE, RESULT = 2.0, 4.5 / 8
"""Bytes of a weight: float16, and codes of 4 bits with scales and zeros in groups of 64."""


@dataclass
class Server:
    """Something that serves one task at a time."""

    free: float = 0.0
    busy: float = 0.0

    def serve(self, ready: float, seconds: float) -> float:
        """When it is done with a task that is ready then."""
        self.free = max(self.free, ready) + seconds
        self.busy += seconds
        return self.free


@dataclass(frozen=True)
class Job:
    """What is quantised.

    Attributes:
        weights: of the model.
        blocks: that have all of them.
        method: ``rtn`` or ``hqq``.
        shared: whether machines write to shared storage.
    """

    weights: float
    blocks: int
    method: str
    shared: bool

    def run(self, machines: int) -> dict[str, float]:
        """Seconds until the last block is kept, and until all is checked; and how busy each part was meanwhile."""
        each = self.weights / self.blocks
        read, octets = each * SOURCE / ASSUMED["storage"], each * RESULT
        compute = each * MEASURED[self.method] / ASSUMED["processors"]
        send = octets * (1 / ASSUMED["network"] + MEASURED["byte"] + MEASURED["keep"])
        storage, driver, left, last = Server(), Server(), self.blocks, 0.0
        events = [(0.0, number, "begin") for number in range(machines)]
        while events:
            now, number, stage = heapq.heappop(events)
            last = max(last, now) if stage in ("begin", "kept") else last
            if stage == "begin" and left:
                left -= 1
                heapq.heappush(events, (storage.serve(now + MEASURED["task"], read), number, "read"))
            elif stage == "read":
                heapq.heappush(events, (now + compute, number, "computed"))
            elif stage == "computed" and self.shared:
                heapq.heappush(events, (now + octets * MEASURED["keep"], number, "digested"))
            elif stage == "computed":
                heapq.heappush(events, (driver.serve(now, send), number, "kept"))
                heapq.heappush(events, (now, number, "begin"))
            elif stage == "digested":
                heapq.heappush(events, (storage.serve(now, octets / ASSUMED["storage"]), number, "begin"))
        computing = self.blocks * compute
        check = self.weights * (MEASURED[f"check {self.method}"] / ASSUMED["processors"])
        check = max(check, self.weights * RESULT / ASSUMED["storage"])
        return {
            "machines": machines,
            "blocks": round(last),
            "all": round(last + check),
            "machines busy": round(computing / machines / last, 2),
            "storage busy": round(storage.busy / last, 2),
            "first process busy": round(driver.busy / last, 2),
        }


def main() -> None:
    """Print the rows of a model of 671 billion weights in 61 blocks."""
    rows = {
        f"{method}, {'shared storage' if shared else 'results sent'}": [
            Job(671e9, 61, method, shared).run(machines) for machines in (1, 2, 4, 8, 16, 32, 64)
        ]
        for method in ("rtn", "hqq")
        for shared in (False, True)
    }
    json.dump({"measured": MEASURED, "assumed": ASSUMED, "rows": rows}, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
