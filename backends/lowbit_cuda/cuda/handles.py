"""What `CudaDevice` gives out: streams, events and graphs, which whoever asked for them only hands back.

Source: lowbit's own.
"""

from typing import TYPE_CHECKING, Any

from lowbit.errors import ArgumentError
from lowbit_cuda.port import Memory

if TYPE_CHECKING:
    from lowbit_cuda.cuda.device import CudaDevice


class CudaStream:
    """A stream.

    Attributes:
        core: cuda.core's stream.
        device: whose it is.
        capture: the memory that a graph in the making uses; None while none is made.
    """

    def __init__(self, name: str, core: Any, device: "CudaDevice") -> None:
        self._name, self.core, self.device = name, core, device
        self.capture: set[Memory] | None = None

    @property
    def name(self) -> str:
        """As errors call it."""
        return self._name

    def used(self, *memories: Memory) -> None:
        """It was given work with these, which may not go back before it is done."""
        for memory in memories:
            if self.capture is None:
                memory.handle.users.add(self)
            else:
                self.capture.add(memory)


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
