r"""The budget: the device memory that a model needs, and the number of expert slots that fit.

The resident weights, the cache of the context, the workspace and b staging buffers take their part of the budget first.
The rest becomes slots, the same number for each layer:

.. math:: k = \left\lfloor \frac{\text{budget} - \text{resident} - b \cdot \text{expert}}
   {\text{layers} \cdot \text{expert}} \right\rfloor, \qquad k \le E.

All bytes are counted as the device takes them, larger allocations in pieces of two MiB (`lowbit_cuda.port.charge`).

The result is computed from the first layer, before the others are read, on the assumption that all layers are equal. If
a later layer is larger, its allocation fails.

Source: MoE offloading §3.3 for slots and buffers.
"""

from dataclasses import dataclass

from lowbit.backend.whole_model import spoken_bytes
from lowbit.errors import ArgumentError
from lowbit_cuda.engine.storage import stride
from lowbit_cuda.port import charge, largest


@dataclass(frozen=True)
class Need:
    """The device memory that a model needs.

    Attributes:
        resident: bytes of everything but experts.
        layers: number of sparse layers; 0 for a dense model.
        experts: E.
        expert: bytes of one expert.
        buffers: b.
    """

    resident: int
    layers: int
    experts: int
    expert: int
    buffers: int

    @property
    def least(self) -> int:
        """Bytes of the smallest budget, with one slot for each layer."""
        experts = charge((self.layers + self.buffers) * stride(self.expert)) if self.layers else 0
        return self.resident + experts

    def slots(self, budget: int) -> int:
        """k within a budget; 0 for a dense model.

        A budget of twelve experts of 256 bytes: four staging buffers, and two slots for each of four layers.

        >>> Need(resident=0, layers=4, experts=8, expert=250, buffers=4).slots(12 * 256)
        2

        Raises:
            ArgumentError: the budget is too small; the message states the minimum.
        """
        if budget < self.least:
            allowed = f"at least {self.least} bytes ({spoken_bytes(self.least)}): {self._in_words()}"
            raise ArgumentError("device memory", f"{budget} bytes ({spoken_bytes(budget)})", allowed)
        if not self.layers:
            return 0
        fitting = largest(budget - self.resident) // stride(self.expert)
        return min((fitting - self.buffers) // self.layers, self.experts)

    def _in_words(self) -> str:
        words = f"{spoken_bytes(self.resident)} for resident weights, the context and the workspace"
        if self.layers:
            count = self.layers + self.buffers
            words += f", and {count} experts of {spoken_bytes(self.expert)}: "
            words += f"one slot for each of {self.layers} layers and {self.buffers} buffers"
        return words
