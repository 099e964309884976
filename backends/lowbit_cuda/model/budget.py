r"""The budget: what a model needs on a device at least, and how many experts it keeps there.

Of the bytes given, what must be there takes its part first: the weights that stay, the cache of the context, the
workspace, b buffers for experts. What is left becomes slots, the same number for each layer:

.. math:: k = \left\lfloor \frac{\text{budget} - \text{what stays} - b \cdot \text{expert}}
   {\text{layers} \cdot \text{expert}} \right\rfloor, \qquad k \le E.

All of it is counted as the device takes it, larger allocations in pieces of two MiB (`lowbit_cuda.port.charge`).

It is reckoned from the first layer, before the others are read, taking them to be like it. Should a later one be larger
after all, the device refuses it when it comes.

Source: lowbit's own; MoE offloading §3.3 for slots and buffers.
"""

from dataclasses import dataclass

from lowbit.backend.whole_model import spoken_bytes
from lowbit.errors import ArgumentError
from lowbit_cuda.engine.storage import slots_within, stride
from lowbit_cuda.port import charge


@dataclass(frozen=True)
class Need:
    """What a model takes on a device.

    Attributes:
        stays: bytes that are always there.
        layers: sparse layers; 0 for a dense model.
        experts: E.
        expert: bytes of one.
        buffers: b.
    """

    stays: int
    layers: int
    experts: int
    expert: int
    buffers: int

    @property
    def least(self) -> int:
        """Bytes with which it runs, with one slot for each layer."""
        return self.stays + charge((self.layers + self.buffers) * stride(self.expert)) if self.layers else self.stays

    @property
    def most(self) -> int:
        """Bytes of which it can make use, with every expert in a slot."""
        blocks = self.layers * self.experts + self.buffers
        return self.stays + charge(blocks * stride(self.expert)) if self.layers else self.stays

    def slots(self, budget: int) -> int:
        """k within a budget; 0 for a dense model.

        Raises:
            ArgumentError: the budget is too small; the message says what is needed at least.
        """
        if budget < self.least:
            allowed = f"at least {self.least} bytes ({spoken_bytes(self.least)}): {self._in_words()}"
            raise ArgumentError("device memory", f"{budget} bytes ({spoken_bytes(budget)})", allowed)
        if not self.layers:
            return 0
        return slots_within(budget - self.stays, self.expert, self.layers, self.experts, self.buffers)

    def _in_words(self) -> str:
        words = f"{spoken_bytes(self.stays)} for weights that stay, the context and work"
        if self.layers:
            blocks = self.layers + self.buffers
            words += f", and {blocks} experts of {spoken_bytes(self.expert)}, one for each of {self.layers} layers and "
            words += f"{self.buffers} buffers"
        return words
