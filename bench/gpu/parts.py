"""What a part is given and what it answers with.

A part is a module of this package with a function `run(setting)`. It runs in a process of its own and answers with an
`Answer`; what it raises is its verdict too.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from lowbit.system.storage import write_whole
from lowbit_cuda.port import DevicePort

ANSWER = "LOWBIT_GPU_ANSWER"
"""The variable of the environment that names the file for a part's answer."""

Word = Literal["passed", "failed", "measured", "simulated", "skipped", "timed out", "crashed"]


@dataclass(frozen=True)
class Setting:
    """How a part is to run.

    Attributes:
        simulate: on a simulated device, to try the script.
        out: the folder of the results.
    """

    simulate: bool
    out: Path

    @property
    def measured(self) -> Word:
        """The verdict on a number."""
        return "simulated" if self.simulate else "measured"

    def so_far(self, result: Mapping[str, Any]) -> None:
        """What was found by now, in case the part does not come to its end."""
        if answer := os.environ.get(ANSWER):
            write(Path(answer), asdict(Answer("crashed", "it did not come to its end", result)))

    def device(self, *, bytes_there: bool = True) -> DevicePort:
        """The device; simulated, its memory has sizes and no bytes where `bytes_there` is False."""
        if self.simulate:
            from lowbit_gpusim.sim.device import SimDevice

            return SimDevice("a100", backed=bytes_there, log_limit=0)
        from lowbit_cuda.cuda.device import CudaDevice

        return CudaDevice()


@dataclass(frozen=True)
class Answer:
    """What came of a part.

    Attributes:
        verdict: in a word.
        why: in a sentence, where the word needs one.
        result: what was found, for JSON.
    """

    verdict: Word
    why: str = ""
    result: Mapping[str, Any] = field(default_factory=dict)


def write(file: Path, content: Any) -> None:
    """Write JSON under a temporary name and rename it."""
    write_whole(file, (json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode())


class Skipped(Exception):  # noqa: N818  # it is no error
    """The part cannot run here, and why."""
