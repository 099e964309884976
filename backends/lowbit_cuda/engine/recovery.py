"""Recovery: return every expert to its initial place, wherever it is now.

A trace starts from a fixed placement: in swap mode experts 0 to k − 1 of each layer are in its slots and the others on
the host. After an interrupt, a refused call, or a few tokens they are elsewhere. This module moves them back with the
exchange that a promotion makes, under the same ordering rules (`lowbit_cuda.engine.transfers`). It can fail at any copy
and be tried again.

**Why no expert is lost.** An exchange is two copies: the newcomer from its place on the host into free device storage,
then the victim from its device storage into that place. The second overwrites the place only after the first has
arrived, and the victim's storage is reused only after the second has arrived. Once the device has finished everything
that was issued, at most one copy is in doubt, the one that was being issued, and its source still holds the expert.

Only a copy that *fails* after it was issued can lose an expert in swap mode. A GPU whose work has failed is lost to the
process anyway (`lowbit_cuda.cuda.driver`), so the model has to be loaded again in either case.

The order of the places on the host does not matter: "place h" is only a name.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from lowbit_cuda.engine.storage import Expert, ExpertStorage
from lowbit_cuda.engine.transfers import Transfers


@dataclass
class Inventory:
    """Where one layer's experts are.

    Attributes:
        on_host: the storage of each expert on the host.
        on_device: the storage of each expert that is on the device and not on the host.
        free: places on the host that hold no expert.
    """

    on_host: dict[int, ExpertStorage] = field(default_factory=dict)
    on_device: dict[int, ExpertStorage] = field(default_factory=dict)
    free: list[ExpertStorage] = field(default_factory=list)


def inventories(places: Sequence[Sequence[ExpertStorage]], device_storage: Sequence[ExpertStorage]) -> list[Inventory]:
    """The inventory of each layer, from what its storage holds."""
    found = [Inventory() for _ in places]
    for layer, stored in enumerate(places):
        for storage in stored:
            if storage.holds:
                found[layer].on_host[storage.holds[1]] = storage
            else:
                found[layer].free.append(storage)
    for storage in device_storage:
        if storage.holds and storage.holds[1] not in found[storage.holds[0]].on_host:
            found[storage.holds[0]].on_device[storage.holds[1]] = storage
    return found


def missing(found: Sequence[Inventory], experts: int) -> Iterator[Expert]:
    """The experts that no storage holds."""
    for layer, inventory in enumerate(found):
        for expert in range(experts):
            if expert not in inventory.on_host and expert not in inventory.on_device:
                yield layer, expert


def recover(
    transfers: Transfers, device_storage: Sequence[ExpertStorage], found: Sequence[Inventory], slots: int
) -> None:
    """In swap mode, move the lowest `slots` experts of each layer to the device and the others to the host.

    Keeps the inventories up to date; no other copy may be in progress. There is always storage to exchange through:
    once the free places are filled, exactly k experts of each layer are on the device only, which leaves the storage of
    the b staging buffers.
    """
    kept = {storage for inventory in found for storage in inventory.on_device.values()}
    spare = deque(storage for storage in device_storage if storage not in kept)

    def fill_places(layer: int, inventory: Inventory) -> None:
        for expert in sorted(expert for expert in inventory.on_device if expert >= slots)[: len(inventory.free)]:
            place, storage = inventory.free.pop(), inventory.on_device[expert]
            transfers.copy((layer, expert), place, storage)
            inventory.on_host[expert] = place
            spare.append(inventory.on_device.pop(expert))

    for layer, inventory in enumerate(found):
        fill_places(layer, inventory)
    for layer, inventory in enumerate(found):
        for expert in sorted(expert for expert in inventory.on_host if expert < slots):
            place, storage = inventory.on_host[expert], spare.popleft()
            transfers.copy((layer, expert), storage, place)
            inventory.free.append(inventory.on_host.pop(expert))
            inventory.on_device[expert] = storage
            fill_places(layer, inventory)
