"""The account: counts of what the engine did.

The counts of experts follow from events, so they can be compared with a trace. `lowbit generate` reports them at the
end: hits, loads, right and wrong guesses, bytes in each direction.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from lowbit.moe.offload import Event
from lowbit_cuda.engine.prefetch_trial import Measurement
from lowbit_cuda.port import DeviceError, DeviceLostError


@dataclass
class Account:
    """Counts since the engine was created.

    Attributes:
        hits: needed experts that were in slots.
        loads: needed experts that were copied when they were needed.
        staged: experts that were copied because of a guess.
        promoted: staged experts that were needed.
        dropped: staged experts that were not needed.
        on_host: needed experts that the host computed.
        bytes_to_device, bytes_to_host: bytes copied, except for filling.
        tokens: passes whose time was measured.
        measurements: the measured benefit of guessing.
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

    def add(self, events: Sequence[Event], expert_bytes: int, on_host: int) -> None:
        """Count one step."""
        kinds = Counter(event.kind for event in events)
        self.hits += kinds["hit"]
        self.loads += kinds["load"]
        self.staged += kinds["stage"]
        self.dropped += kinds["drop"]
        self.promoted += sum(event.kind == "promote" and event.cause == "guess" for event in events)
        self.on_host += on_host
        self.bytes_to_device += expert_bytes * (kinds["load"] + kinds["stage"])
        self.bytes_to_host += expert_bytes * sum(event.kind == "evict" and event.host is not None for event in events)


class EngineError(DeviceError):
    """The device failed during an operation of the engine.

    Attributes:
        operation: what the engine was doing, in words.
        layer, expert: the expert that it concerned, or None.
    """

    def __init__(self, operation: str, layer: int | None, expert: int | None, reason: object) -> None:
        which = "" if expert is None else f" expert {expert} of layer {layer}"
        super().__init__(f"{operation}{which}: {reason}")
        self.operation, self.layer, self.expert = operation, layer, expert


class EngineLostError(EngineError, DeviceLostError):
    """The device, or the only copy of an expert, is lost: load the model again, after a lost GPU in a new process."""
