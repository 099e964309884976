"""The backend ``cuda``: kernels for NVIDIA GPUs as operations of the specification, and whole models on them.

The operations exist so that the suite can test the kernels: each copies its arrays to the device and its results back
(`calls`). The purpose of the kernels is a model that stays on the device (`lowbit_cuda.model`), which `decoder` makes.

A `PortBackend` runs on any `lowbit_cuda.port.DevicePort`. `CudaBackend` opens a GPU; another package derives a backend
on a simulated device from the same class.
"""

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np

from lowbit.arrays import F32
from lowbit.attention.rope import Rotation
from lowbit.backend import Availability, Backend, Capabilities, Declaration
from lowbit.backend.prepared import PreparedLinear
from lowbit.backend.whole_model import DeviceSettings
from lowbit.model.weights import LayeredWeights, Progress
from lowbit.moe.offload import Arrangement, Request, Trace
from lowbit.moe.routing import Scores
from lowbit.quantization.affine import QuantizedMatrix
from lowbit_cuda.arithmetic import ATTENTION, DENSE, ELEMENTS, NORMS, PRODUCTS, ROTATIONS
from lowbit_cuda.calls import Calls
from lowbit_cuda.cuda.availability import availability
from lowbit_cuda.engine.placement import Placement
from lowbit_cuda.kernels.layouts import up
from lowbit_cuda.kernels.table import kernel
from lowbit_cuda.linears import DeviceLinear, dequantized
from lowbit_cuda.model.decoder import Decoder
from lowbit_cuda.port import DevicePort

GROUPS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
"""The declared group sizes: groups end where units of codes do, for every number of bits."""

GROUPED = {"group_size": GROUPS}

DECLARED = {
    "affine.dequantize": Declaration(GROUPED),
    "linear.qgemv": Declaration(GROUPED, PRODUCTS),
    "linear.qgemm": Declaration(GROUPED, PRODUCTS),
    "routing.gate": Declaration({"scores": ("logits",)}, DENSE),
    "blocks.rms_norm": Declaration(arithmetic=NORMS),
    "blocks.swiglu": Declaration(arithmetic=ELEMENTS),
    "rope.rotate": Declaration(arithmetic=ROTATIONS),
    "attention.attend": Declaration({"head_dim": tuple(range(4, 257, 4))}, ATTENTION),
    "offload.trace": Declaration(),
    "offload.engine": Declaration(),
}


class PortBackend(Backend):
    """The operations and models on any device."""

    def __init__(self) -> None:
        self._opened: Calls | None = None

    @abstractmethod
    def open_port(self, budget: int | None) -> DevicePort:
        """Open a device with a budget of device memory; None for all that is free."""

    def capabilities(self) -> Capabilities:
        return Capabilities(DECLARED, profiles=("lowbit-1.1/qgemv-4", "lowbit-1.1/moe-offload"))

    def decoder(self, weights: LayeredWeights, settings: DeviceSettings, progress: Progress | None = None) -> Decoder:
        """A decoder on its own device, which is closed with the decoder."""
        return Decoder(self.open_port(settings.memory), weights, settings, progress, owns_port=True)

    def warm_up(self, operation: str) -> None:
        """Open the device."""
        if operation in DECLARED and not operation.startswith("offload."):
            _ = self._calls

    def close(self) -> None:
        """Close the device."""
        if self._opened is not None:
            calls, self._opened = self._opened, None
            try:
                calls.close()
            finally:
                calls.arena.port.close()

    @property
    def _calls(self) -> Calls:
        if self._opened is None:
            self._opened = Calls(self.open_port(None))
        return self._opened

    # The operations.

    def _prepare(self, matrix: QuantizedMatrix) -> PreparedLinear:
        return DeviceLinear(self.name, self._calls, matrix)

    def _affine_dequantize(self, matrix: QuantizedMatrix) -> F32:
        return dequantized(self._calls, matrix)

    def _routing_gate(self, x: F32, router: F32, scores: Scores = "logits") -> F32:
        rows = up(len(router), 8)  # rows of zeros change no sum
        wide = np.pad(x, ((0, 0), (0, rows - len(router))))
        columns = np.ascontiguousarray(np.pad(router, ((0, rows - len(router)), (0, 0))).T)
        y = np.empty((len(x), router.shape[1]), np.float32)
        dense = kernel("dense", weights="float32")
        self._calls(dense, {"y": y, "x": wide, "weights": columns}, tokens=len(x), rows=rows, columns=y.shape[1])
        return y

    def _blocks_rms_norm(self, x: F32, gain: F32, epsilon: float) -> F32:
        y = np.empty_like(x)
        sized = {"tokens": len(x), "columns": x.shape[1], "epsilon": float(epsilon)}
        self._calls(kernel("rms_norm"), {"y": y, "x": x, "gain": gain}, **sized)
        return y

    def _blocks_swiglu(self, gate: F32, up: F32) -> F32:
        y = np.empty_like(gate)
        self._calls(kernel("swiglu"), {"y": y, "gate": gate, "up": up}, count=gate.size)
        return y

    def _rope_rotate(self, x: F32, turn: Rotation) -> F32:
        """Permute pairs to the half-split layout, rotate, and permute back."""
        sign, pair = turn.layout.sign, turn.layout.pair
        order = np.lexsort((pair, sign))  # the first channels of all pairs, then their partners
        tokens, heads, head_dim = x.shape
        half = head_dim // 2
        first = order[:half]
        table = np.concatenate([turn.cos[:, first], turn.sin[:, order[half:]]], axis=1).astype(np.float32)
        rotated = np.ascontiguousarray(x[..., order])
        given = {"x": rotated, "table": table, "position": np.zeros(1, np.int32)}
        sized = {"tokens": tokens, "heads": heads, "head_dim": head_dim, "context": tokens}
        self._calls(kernel("rope"), given, **sized)
        y = np.empty_like(x)
        y[..., order] = rotated
        return y

    def _attention_attend(self, queries: F32, keys: F32, values: F32, window: int | None = None) -> F32:
        tokens, heads, head_dim = queries.shape
        kv_heads, length, _ = keys.shape
        y = np.empty_like(queries)
        attend = kernel("attend", keys="float32", values="float32")
        position = np.array([length - tokens], np.int32)
        self._calls(
            attend,
            {"y": y, "queries": queries, "keys": keys, "values": values, "position": position},
            tokens=tokens,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            capacity=length,
            window=min(window or 0, length),
        )
        return y

    def _offload_engine(self, arrangement: Arrangement) -> Placement:
        return Placement(arrangement)

    def _offload_trace(self, arrangement: Arrangement, requests: Sequence[Request]) -> Trace:
        placement = Placement(arrangement)
        return tuple(event for request in requests for event in placement.step(request))


class CudaBackend(PortBackend):
    """The backend for NVIDIA GPUs."""

    name = "cuda"

    def availability(self) -> Availability:
        return availability()

    def open_port(self, budget: int | None) -> DevicePort:
        from lowbit_cuda.cuda.device import CudaDevice

        return CudaDevice(budget)
