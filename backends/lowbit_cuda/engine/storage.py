"""Storage for experts: each expert is one contiguous buffer, in pinned host memory or on the device.

"To speed up offloading in practice, we allocate all expert parameters in a contiguous memory buffer that can be moved
as a single host-to-device copy" (§3.3). This package never looks into that buffer. All buffers have the same size, so
any expert fits into any `ExpertStorage`.

**On the host** experts lie in pinned memory, which copies can read while the host continues. Mirror mode has
layers × experts places there, swap mode layers × (experts − k).

**On the device** there is storage for k · layers + b experts. Slots and staging buffers are roles: the placement
assigns storage to them, so promoting an expert from a staging buffer to a slot moves no bytes. A copy is given the
storage that has been free for longest, because whatever used it before has most likely ended.

Source: MoE offloading §3.3.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from lowbit.moe.offload import Arrangement
from lowbit_cuda.port import ALIGNMENT, DevicePort, Event, Memory, Span, Stream

Expert = tuple[int, int]
"""Layer and number."""


def stride(expert_bytes: int) -> int:
    """Bytes from the start of one expert to the start of the next, so that each start is aligned.

    >>> stride(1), stride(256), stride(257)
    (256, 256, 512)
    """
    return -(-expert_bytes // ALIGNMENT) * ALIGNMENT


def device_bytes(arrangement: Arrangement, expert_bytes: int) -> int:
    """Bytes of all device storage, which the engine allocates at once; the budget counts their `charge`.

    >>> device_bytes(Arrangement(layers=32, experts=8, slots=2), expert_bytes=1000)
    69632
    """
    return (arrangement.slots * arrangement.layers + arrangement.buffers) * stride(expert_bytes)


@dataclass(eq=False)
class ExpertStorage:
    """Memory for one expert, and what is known about its contents.

    Attributes:
        name: shown in errors.
        span: the memory.
        holds: the expert whose bytes it contains once `written` is reached; None where that is not known.
        written: reached when the last copy into it has ended; None where there is nothing to wait for.
        seen: streams that need not wait for `written` any more.
        read: for each stream that has read it since then, by identity, an event that is reached when the last of
            those reads has ended.
    """

    name: str
    span: Span
    holds: Expert | None = None
    written: Event | None = None
    seen: list[Stream] = field(default_factory=list)
    read: dict[int, tuple[Stream, Event]] = field(default_factory=dict)

    @property
    def on_device(self) -> bool:
        """Whether it is device memory."""
        return self.span.memory.place == "device"

    def settle(self, port: DevicePort) -> None:
        """Record what it contains, after the device has finished everything: nothing known, if its last copy failed."""
        if self.written is not None and not port.reached(self.written):
            self.holds = None
        self.written = None
        self.seen, self.read = [], {}


def divide(memory: Memory, count: int, expert_bytes: int, name: str) -> list[ExpertStorage]:
    """Divide memory into storage for `count` experts."""
    step = stride(expert_bytes)
    return [ExpertStorage(f"{name} {place}", memory.span(place * step, expert_bytes)) for place in range(count)]


class HostStorage:
    """Storage on the host: one allocation of pinned memory for each layer.

    Attributes:
        places: the storage of each layer.
    """

    def __init__(self, port: DevicePort, arrangement: Arrangement, expert_bytes: int) -> None:
        """Pin the memory; on failure, release what was already pinned.

        Raises:
            DeviceMemoryError: the host does not have enough memory to pin.
        """
        count = arrangement.experts - (arrangement.slots if arrangement.memory == "swap" else 0)
        self._port, self._memories = port, list[Memory]()
        self.places: list[list[ExpertStorage]] = []
        try:
            for layer in range(arrangement.layers):
                name = f"place of layer {layer}"
                if count:
                    self._memories.append(port.pin(count * stride(expert_bytes), f"experts of layer {layer}"))
                self.places.append(divide(self._memories[-1], count, expert_bytes, name) if count else [])
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Release the memory; a failure to free one part does not stop the others, and closing can be repeated."""
        with ExitStack() as rest:
            for memory in self._memories:
                rest.callback(self._port.free, memory)


class DeviceStorage:
    """Storage on the device, and which of it is free.

    Attributes:
        all: the storage of every slot and staging buffer.
    """

    def __init__(self, port: DevicePort, arrangement: Arrangement, expert_bytes: int) -> None:
        """Allocate it.

        Raises:
            DeviceMemoryError: it does not fit into the budget.
        """
        count = arrangement.slots * arrangement.layers + arrangement.buffers
        self._port, self._memory = port, port.allocate(device_bytes(arrangement, expert_bytes), "expert slots")
        self.all: Sequence[ExpertStorage] = divide(self._memory, count, expert_bytes, "slot storage")
        self._free = deque(self.all)

    def take(self) -> ExpertStorage:
        """The storage that has been free for longest. The placement asks only while some is free."""
        return self._free.popleft()

    def give(self, storage: ExpertStorage) -> None:
        """Mark storage as free, although copies and kernels that were issued may still use it."""
        self._free.append(storage)

    def free_all_but(self, used: Iterable[ExpertStorage]) -> None:
        """Mark all storage as free except `used`."""
        kept = set(used)
        self._free = deque(storage for storage in self.all if storage not in kept)

    def close(self) -> None:
        """Release the memory."""
        self._port.free(self._memory)
