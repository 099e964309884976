"""What `CudaDevice` gives out: streams, events and graphs, which whoever asked for them only hands back.

Source: lowbit's own.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lowbit.errors import ArgumentError
from lowbit_cuda.port import Memory

if TYPE_CHECKING:
    from lowbit_cuda.cuda.device import CudaDevice


@dataclass(frozen=True)
class Capture:
    """A graph in the making: what it will do, and the memory that it works on."""

    steps: list[Callable[[], object]] = field(default_factory=list)
    memories: set[Memory] = field(default_factory=set)


class CudaStream:
    """A stream.

    Attributes:
        core: cuda.core's stream.
        device: whose it is.
        capture: a graph in the making, or None.
    """

    def __init__(self, name: str, core: Any, device: "CudaDevice") -> None:
        self._name, self.core, self.device = name, core, device
        self.capture: Capture | None = None

    @property
    def name(self) -> str:
        """As errors call it."""
        return self._name

    def give(self, step: Callable[[], object], memories: Iterable[Memory]) -> None:
        """Work with these, which may not go back before it is done; while a graph is made, it is kept for that."""
        if self.capture is not None:
            self.capture.steps.append(step)
            self.capture.memories.update(memories)
            return
        step()
        for memory in memories:
            memory.handle.users.add(self)


class CudaEvent:
    """A place in a stream.

    Attributes:
        core: cuda.core's event.
        device: whose it is.
    """

    __slots__ = ("core", "device")

    def __init__(self, core: Any, device: "CudaDevice") -> None:
        self.core, self.device = core, device


class CudaGraph:
    """Operations that a stream was given.

    Attributes:
        core: cuda.core's graph; None when it was closed.
        memories: what they work on.
        device: whose it is.
    """

    def __init__(self, core: Any, memories: set[Memory], device: "CudaDevice") -> None:
        self.core, self.memories, self.device = core, memories, device

    def close(self) -> None:
        """Give it back."""
        core, self.core = self.core, None
        if core is not None:
            core.close()


def graph_of(made: list[CudaGraph]) -> CudaGraph:
    """The graph, if its block has ended."""
    if not made:
        raise ArgumentError("graph", "in the making", "asked for when the block that captures it has ended")
    return made[0]
