"""The account: what the engine did, counted, and what it has to say.

What it counts of experts follows from events, so it can be compared with a trace. It is what `lowbit generate` reports
at the end: hits, loads, guesses that were right and wrong, bytes each way.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from lowbit.moe.offload import Event
from lowbit_cuda.engine.speculation import Measurement
from lowbit_cuda.port import DeviceError, DeviceLostError


@dataclass
class Account:
    """Counts since the engine was made.

    Attributes:
        hits: needed experts that were in slots.
        loads: needed experts that were copied when they were needed.
        staged: experts that were copied because of a guess.
        promoted: of these, how many were needed.
        dropped: of these, how many were not.
        on_host: needed experts that the host computed.
        bytes_to_device, bytes_to_host: what was copied for all this, without the filling at the start.
        tokens: passes whose time was measured.
        measurements: what guessing was found to be worth.
        notes: sentences for the user.
    """

    hits: int = 0
    loads: int = 0
    staged: int = 0
    promoted: int = 0
    dropped: int = 0
    on_host: int = 0
    bytes_to_device: int = 0
    bytes_to_host: int = 0
    tokens: int = 0
    measurements: list[Measurement] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, events: Sequence[Event], blob_bytes: int, on_host: int) -> None:
        """Count one step."""
        for event in events:
            if event.kind == "hit":
                self.hits += 1
            elif event.kind == "load":
                self.loads += 1
                self.bytes_to_device += blob_bytes
            elif event.kind == "stage":
                self.staged += 1
                self.bytes_to_device += blob_bytes
            elif event.kind == "promote":
                self.promoted += event.cause == "guess"
            elif event.kind == "drop":
                self.dropped += 1
            elif event.host is not None:
                self.bytes_to_host += blob_bytes
        self.on_host += on_host


class EngineError(DeviceError):
    """The device failed while the engine did something.

    Attributes:
        doing: what, in words.
        layer, expert: for whom; None where it was for none.
    """

    def __init__(self, doing: str, layer: int | None, expert: int | None, reason: object) -> None:
        whom = "" if expert is None else f" expert {expert} of layer {layer}"
        super().__init__(f"{doing}{whom}: {reason}")
        self.doing, self.layer, self.expert = doing, layer, expert


class EngineLostError(EngineError, DeviceLostError):
    """The device is lost, and the engine with it: its experts must be filled into a new engine in a new process."""
