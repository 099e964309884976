"""Blobs: experts as single runs of bytes, on the host in pinned memory and on the device in blocks.

"To speed up offloading in practice, we allocate all expert parameters in a contiguous memory buffer that can be moved
as a single host-to-device copy" (§3.3): an expert is a *blob* here, and nothing in this package knows what is in it.
All blobs are of one size, so that any expert fits into any `Home`.

**On the host** an expert lies in pinned memory, where a copy can reach it while the host goes on. Under mirror there
are layers × experts places, under swap layers × (experts − k).

**On the device** there are k · layers + b *blocks*. The slots and the buffers of the placement are names; what stands
behind a name is a block, and a promotion only gives a block another name. Which block a free buffer has does not matter
to the placement, so a copy is given the block that has been free for longest: what used it before is then likely done.

Source: MoE offloading §3.3.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lowbit.contract.checks import check_integer
from lowbit.errors import ArgumentError
from lowbit.moe.offload import Arrangement
from lowbit_cuda.port import ALIGNMENT, DevicePort, Event, Memory, Span, Stream, charge, largest

if TYPE_CHECKING:
    from lowbit_cuda.engine.journal import Move

Expert = tuple[int, int]
"""Layer and number."""


def stride(blob_bytes: int) -> int:
    """Bytes from one blob to the next, so that each begins aligned.

    >>> stride(1), stride(256), stride(257)
    (256, 256, 512)
    """
    return -(-blob_bytes // ALIGNMENT) * ALIGNMENT


def device_bytes(arrangement: Arrangement, blob_bytes: int) -> int:
    """Bytes of all blocks, which the engine asks for as one allocation; the budget counts their `charge`.

    >>> device_bytes(Arrangement(layers=32, experts=8, slots=2), blob_bytes=1000)
    69632
    """
    return (arrangement.slots * arrangement.layers + arrangement.buffers) * stride(blob_bytes)


def slots_within(budget_bytes: int, blob_bytes: int, layers: int, experts: int, buffers: int = 4) -> int:
    """k, the most slots a layer for which blocks of slots and buffers fit into a budget.

    Twelve blobs of 256 bytes: four for buffers, and two for each of four layers.

    >>> slots_within(12 * 256, 250, layers=4, experts=8)
    2

    Args:
        budget_bytes: of device memory that is free for experts.
        blob_bytes: of one expert.
        layers: sparse layers.
        experts: E, more than which k need not be.
        buffers: b.

    Raises:
        ArgumentError: a number out of range, or a budget too small for one slot a layer.
    """
    for name, value in (("blob_bytes", blob_bytes), ("layers", layers), ("experts", experts), ("buffers", buffers)):
        check_integer(name, value, least=1)
    check_integer("budget_bytes", budget_bytes, least=0)
    slots = (largest(budget_bytes) // stride(blob_bytes) - buffers) // layers
    if slots < 1:
        least = charge((layers + buffers) * stride(blob_bytes))
        raise ArgumentError(
            "budget_bytes", budget_bytes, f"at least {least}: a slot for each of {layers} layers and {buffers} buffers"
        )
    return min(slots, experts)


@dataclass(eq=False)
class Home:
    """Room for one expert, and what is known about its bytes.

    Attributes:
        name: as errors call it.
        span: its bytes; always the same object, so that it can stand for the home.
        holds: the expert that is known to lie in it, None where nothing is. Copies that are on their way do not count
            (`lowbit_cuda.engine.journal`).
        written: reached when the last copy into it has ended; None where there is nothing to wait for.
        seen: the streams that need not wait for `written` any more.
        read: for each stream that reads it since then, by identity, an event that is reached when its last reader has
            ended.
        left: the last copy out of it, where a journal is kept.
    """

    name: str
    span: Span
    holds: Expert | None = None
    written: Event | None = None
    seen: list[Stream] = field(default_factory=list)
    read: dict[int, tuple[Stream, Event]] = field(default_factory=dict)
    left: "Move | None" = None

    @property
    def on_device(self) -> bool:
        """Whether it is a block."""
        return self.span.memory.place == "device"

    def settle(self) -> None:
        """Everything that used it has ended, and the host knows."""
        self.written = self.left = None
        self.seen, self.read = [], {}


def homes(memory: Memory, count: int, blob_bytes: int, name: str) -> list[Home]:
    """As many homes in one memory, one after the other."""
    step = stride(blob_bytes)
    return [Home(f"{name} {place}", memory.span(place * step, blob_bytes)) for place in range(count)]


class HostMemory:
    """The experts on the host, a run of pinned memory for each layer.

    Attributes:
        places: for each layer its homes.
    """

    def __init__(self, port: DevicePort, arrangement: Arrangement, blob_bytes: int) -> None:
        """Pins it; where the host does not have it, what was pinned is given back.

        Raises:
            DeviceMemoryError: it does not have it.
        """
        here = arrangement.experts - (arrangement.slots if arrangement.memory == "swap" else 0)
        self._port, self._memories = port, list[Memory]()
        self.places: list[list[Home]] = []
        try:
            for layer in range(arrangement.layers):
                name = f"place of layer {layer}"
                if here:
                    self._memories.append(port.pin(here * stride(blob_bytes), f"experts of layer {layer}"))
                self.places.append(homes(self._memories[-1], here, blob_bytes, name) if here else [])
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give it back; what cannot be given back stops nothing else, and can be tried again."""
        with ExitStack() as rest:
            for memory in self._memories:
                rest.callback(self._port.free, memory)


class Blocks:
    """The blocks on the device, and which of them are free.

    Attributes:
        all: every block.
    """

    def __init__(self, port: DevicePort, arrangement: Arrangement, blob_bytes: int) -> None:
        """Allocates them.

        Raises:
            DeviceMemoryError: the budget does not have them.
        """
        count = arrangement.slots * arrangement.layers + arrangement.buffers
        self._port, self._memory = port, port.allocate(device_bytes(arrangement, blob_bytes), "expert blocks")
        self.all: Sequence[Home] = homes(self._memory, count, blob_bytes, "block")
        self._free = deque(self.all)

    def take(self) -> Home:
        """The block that has been free for longest. The placement never asks for one when there is none."""
        return self._free.popleft()

    def give(self, block: Home) -> None:
        """A block is free, though copies and kernels that were asked for may still use it."""
        self._free.append(block)

    def free_all_but(self, used: Iterable[Home]) -> None:
        """Exactly these are not free."""
        names = {block.name for block in used}
        self._free = deque(block for block in self.all if block.name not in names)

    def close(self) -> None:
        """Give them back."""
        self._port.free(self._memory)
