"""The streams, events and graphs of a `CudaDevice`, opaque to their users, who pass them back to it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from lowbit.errors import ArgumentError
from lowbit_cuda.port import Memory


@dataclass(frozen=True)
class Capture:
    """A graph being captured: its operations, and the memory that they use."""

    steps: list[Callable[[], object]] = field(default_factory=list)
    memories: set[Memory] = field(default_factory=set)


class CudaStream:
    """A stream.

    Attributes:
        core: cuda.core's stream.
        device: the device that created it; it accepts no other device's streams.
        capture: the graph being captured, or None.
    """

    def __init__(self, name: str, core: Any, device: object) -> None:
        self._name, self.core, self.device = name, core, device
        self.capture: Capture | None = None

    @property
    def name(self) -> str:
        """Its name in errors."""
        return self._name

    def give(self, step: Callable[[], object], memories: Iterable[Memory]) -> None:
        """Run an operation on these memories, which cannot be freed before it ends; during a capture, record it."""
        if self.capture is not None:
            self.capture.steps.append(step)
            self.capture.memories.update(memories)
            return
        step()
        for memory in memories:
            memory.handle.users.add(self)


class CudaEvent:
    """A mark in a stream.

    Attributes:
        core: cuda.core's event.
        device: the device that created it.
    """

    __slots__ = ("core", "device")

    def __init__(self, core: Any, device: object) -> None:
        self.core, self.device = core, device


class CudaGraph:
    """Captured operations.

    Attributes:
        core: cuda.core's graph; None after it was closed.
        memories: the memory that the operations use.
        device: the device that created it.
    """

    def __init__(self, core: Any, memories: set[Memory], device: object) -> None:
        self.core, self.memories, self.device = core, memories, device

    def close(self) -> None:
        """Release it."""
        core, self.core = self.core, None
        if core is not None:
            core.close()


def graph_of(made: list[CudaGraph]) -> CudaGraph:
    """The graph, after its capture block has ended."""
    if not made:
        raise ArgumentError("graph", "still being captured", "asked for after its capture block has ended")
    return made[0]
