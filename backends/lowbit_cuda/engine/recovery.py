"""Recovery: how the engine comes back to where it began, from wherever it is.

A trace is told from the beginning, so an engine that starts anew must lie as the specification has it: under swap with
experts 0 to k − 1 of each layer in its slots and the others on the host. After an error, and after nothing more than a
few tokens, they lie otherwise. This moves them back, by the same exchange that a promotion makes and under the same
rules (`lowbit_cuda.engine.traffic`), and it can fail at any copy and be tried again.

The host's places need no order among themselves: which of them is "place h" is only a name.

Source: lowbit's own.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from lowbit_cuda.engine.blobs import Expert, Home
from lowbit_cuda.engine.traffic import Traffic


@dataclass
class Inventory:
    """One layer's experts.

    Attributes:
        on_host: for each expert on the host, where.
        on_device: for each that lies on the device and not on the host, where.
        free: places of the host that hold nothing.
    """

    on_host: dict[int, Home] = field(default_factory=dict)
    on_device: dict[int, Home] = field(default_factory=dict)
    free: list[Home] = field(default_factory=list)


def inventories(places: Sequence[Sequence[Home]], blocks: Sequence[Home]) -> list[Inventory]:
    """Count all layers, as homes hold them."""
    found = [Inventory() for _ in places]
    for layer, homes in enumerate(places):
        for home in homes:
            if home.holds:
                found[layer].on_host[home.holds[1]] = home
            else:
                found[layer].free.append(home)
    for block in blocks:
        if block.holds and block.holds[1] not in found[block.holds[0]].on_host:
            found[block.holds[0]].on_device[block.holds[1]] = block
    return found


def missing(found: Sequence[Inventory], experts: int) -> Iterator[Expert]:
    """The experts that lie nowhere."""
    for layer, counted in enumerate(found):
        for expert in range(experts):
            if expert not in counted.on_host and expert not in counted.on_device:
                yield layer, expert


class Recovery:
    """Brings experts back under swap: the lowest `slots` of each layer to the device, the others to the host."""

    def __init__(self, traffic: Traffic, blocks: Sequence[Home]) -> None:
        self._traffic, self._blocks = traffic, blocks
        self._spare: deque[Home] = deque()

    def run(self, found: Sequence[Inventory], slots: int) -> None:
        """Bring all back, and keep the inventories true; nothing else may be on its way.

        There is always a way: first the places that are free are filled, and then each layer has exactly k experts
        that lie on the device only, so that the b blocks of the buffers are left to exchange the others through.
        """
        kept = {block.name for counted in found for block in counted.on_device.values()}
        self._spare = deque(block for block in self._blocks if block.name not in kept)
        for layer, counted in enumerate(found):
            self._fill_places(layer, counted, slots)
        for layer, counted in enumerate(found):
            for expert in sorted(expert for expert in counted.on_host if expert < slots):
                self._bring(layer, expert, counted)
                self._fill_places(layer, counted, slots)

    def _fill_places(self, layer: int, counted: Inventory, slots: int) -> None:
        for expert in sorted(expert for expert in counted.on_device if expert >= slots)[: len(counted.free)]:
            place, block = counted.free.pop(), counted.on_device[expert]
            self._traffic.copy((layer, expert), place, block)
            counted.on_host[expert] = place
            self._spare.append(counted.on_device.pop(expert))

    def _bring(self, layer: int, expert: int, counted: Inventory) -> None:
        """Bring an expert to the device, and free its place."""
        place, block = counted.on_host[expert], self._spare.popleft()
        self._traffic.copy((layer, expert), block, place)
        counted.free.append(counted.on_host.pop(expert))
        counted.on_device[expert] = block
