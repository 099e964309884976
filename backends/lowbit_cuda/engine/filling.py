"""Filling: storing each expert for the first time.

In mirror mode each expert goes to its place on the host. In swap mode the host has no place for the experts that start
on the device. They are copied there through a pinned staging buffer of one expert, which is freed after the last one.
"""

import numpy as np

from lowbit.arrays import Array
from lowbit.contract.checks import check_integer
from lowbit.errors import ArgumentError
from lowbit.moe.offload import Arrangement
from lowbit.text import kind_of
from lowbit_cuda.engine.storage import DeviceStorage, Expert, ExpertStorage, HostStorage
from lowbit_cuda.engine.transfers import Transfers
from lowbit_cuda.port import DevicePort, Memory


class Filling:
    """Fills the storage of each expert once.

    Attributes:
        filled: the experts that were stored.
    """

    def __init__(
        self,
        port: DevicePort,
        arrangement: Arrangement,
        host: HostStorage,
        device_storage: DeviceStorage,
        transfers: Transfers,
    ) -> None:
        self._port, self._arrangement, self._transfers = port, arrangement, transfers
        self._nbytes = device_storage.all[0].span.nbytes
        self._host, self._device_storage = host, device_storage
        self._staging: Memory | None = None
        self._busy = False  # whether a copy may still read the staging buffer
        # The number of experts of a layer that start on the device.
        self._start_on_device = arrangement.slots if arrangement.memory == "swap" else 0
        self.filled = set[Expert]()

    @property
    def complete(self) -> bool:
        """Whether every expert was stored."""
        return len(self.filled) == self._arrangement.layers * self._arrangement.experts

    def fill(self, layer: int, expert: int, data: Array) -> None:
        """See `Engine.fill`."""
        check_integer("layer", layer, 0, self._arrangement.layers - 1)
        check_integer("expert", expert, 0, self._arrangement.experts - 1)
        if not isinstance(data, np.ndarray) or not data.flags.c_contiguous:
            raise ArgumentError("data", kind_of(data), "a C-contiguous array")
        if data.nbytes != self._nbytes:
            raise ArgumentError("data", f"{data.nbytes} bytes", f"{self._nbytes}, the size of every expert")
        if (layer, expert) in self.filled:
            raise ArgumentError("expert", f"{expert} of layer {layer}, which was filled already", "each expert once")
        if expert < self._start_on_device:
            storage = self._device_storage.all[layer * self._start_on_device + expert]
            self._copy_through_staging((layer, expert), storage, data)
        else:
            storage = self._host.places[layer][expert - self._start_on_device]
            self._port.write(storage.span, data)
            storage.holds = layer, expert
        self.filled.add((layer, expert))
        if self.complete:
            self.close()

    def _copy_through_staging(self, expert: Expert, storage: ExpertStorage, data: Array) -> None:
        if self._busy:  # an earlier copy was interrupted
            self._port.finish()
        if self._staging is None:
            self._staging = self._port.pin(self._nbytes, "staging an expert")
        staging = ExpertStorage("staging buffer", self._staging.span())
        self._port.write(staging.span, data)
        self._busy = True
        self._port.synchronize(self._transfers.copy(expert, storage, staging))
        self._busy = False

    def close(self) -> None:
        """Free the staging buffer."""
        if self._staging is not None:
            self._port.free(self._staging)
            self._staging = None
