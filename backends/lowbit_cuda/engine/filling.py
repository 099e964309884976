"""Filling: how experts come to their homes for the first time.

Under mirror each goes to its place on the host. Under swap the host has no place for those that begin on the device;
they go there through one piece of pinned memory as large as one expert, which is given back when the last is through.
"""

import numpy as np

from lowbit.arrays import Array
from lowbit.contract.checks import check_integer
from lowbit.errors import ArgumentError
from lowbit.moe.offload import Arrangement
from lowbit_cuda.engine.blobs import Blocks, Expert, Home, HostMemory
from lowbit_cuda.engine.traffic import Traffic
from lowbit_cuda.port import DevicePort, Memory


class Filling:
    """Fills each home once.

    Attributes:
        filled: the experts that are there.
    """

    def __init__(
        self, port: DevicePort, arrangement: Arrangement, host: HostMemory, blocks: Blocks, traffic: Traffic
    ) -> None:
        self._port, self._arrangement, self._traffic = port, arrangement, traffic
        self._nbytes = blocks.all[0].span.nbytes
        self._host, self._blocks = host, blocks
        self._passage: Memory | None = None
        self._busy = False  # whether a copy may still read the passage
        # How many experts of a layer begin on the device.
        self._begin_there = arrangement.slots if arrangement.memory == "swap" else 0
        self.filled = set[Expert]()

    @property
    def complete(self) -> bool:
        """Whether every expert is there."""
        return len(self.filled) == self._arrangement.layers * self._arrangement.experts

    def fill(self, layer: int, expert: int, data: Array) -> None:
        """See `Engine.fill`."""
        check_integer("layer", layer, 0, self._arrangement.layers - 1)
        check_integer("expert", expert, 0, self._arrangement.experts - 1)
        if not isinstance(data, np.ndarray) or not data.flags.c_contiguous:
            raise ArgumentError("data", f"a {type(data).__name__}", "a C-contiguous array")
        if data.nbytes != self._nbytes:
            raise ArgumentError("data", f"{data.nbytes} bytes", f"{self._nbytes}, as all experts have")
        if (layer, expert) in self.filled:
            raise ArgumentError("expert", f"{expert} of layer {layer}, which is there", "one that was not filled")
        if expert < self._begin_there:
            home = self._blocks.all[layer * self._begin_there + expert]
            self._pass_through((layer, expert), home, data)
        else:
            home = self._host.places[layer][expert - self._begin_there]
            self._port.write(home.span, data)
        home.holds = layer, expert
        self.filled.add((layer, expert))
        if self.complete:
            self.close()

    def _pass_through(self, expert: Expert, block: Home, data: Array) -> None:
        if self._busy:  # an earlier one was interrupted
            self._port.finish()
        if self._passage is None:
            self._passage = self._port.pin(self._nbytes, "an expert on its way to the device")
        passage = Home("the passage", self._passage.span())
        self._port.write(passage.span, data)
        self._busy = True
        self._port.synchronize(self._traffic.copy(expert, block, passage))
        self._busy = False

    def close(self) -> None:
        """Give the passage back."""
        if self._passage is not None:
            self._port.free(self._passage)
            self._passage = None
