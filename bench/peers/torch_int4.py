"""PyTorch's int4 product of its CPU build, with activations in bfloat16, as models use it, and in float32."""

from typing import Any

import numpy as np

from lowbit.arrays import F32, F64
from lowbit_adapters import torch_int4 as adapter
from lowbit_adapters.layout import padded
from peers.base import AbsentError, Contestant, Plan, Rotation, Weights


class TorchContestant(Contestant):
    """``_weight_int4pack_mm_for_cpu``; codes are packed once and cloned."""

    def __init__(self, weights: Weights, plan: Plan, dtype: str) -> None:
        import torch

        torch.set_num_threads(plan.threads)
        self._type = getattr(torch, dtype)
        tile = weights.quantized()
        if tile.group_size not in adapter.GROUPS:
            raise AbsentError(f"groups of {tile.group_size}; it takes {', '.join(map(str, adapter.GROUPS))}")
        self._multiply, self._weights, self._tile = torch.ops.aten._weight_int4pack_mm_for_cpu, weights, tile
        codes = torch.from_numpy(weights.spread(adapter.codes_of(tile)[: tile.columns], 0))
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        self._scales = adapter.scales_and_zeros(tile)
        scales = torch.from_numpy(weights.spread(self._scales[:, : tile.columns], 1)).to(self._type)
        self.nbytes = packed.nbytes + scales.nbytes
        self.products, self.bursts = plan.products(self.nbytes), plan.bursts(self.nbytes)
        copies = range(self.products * self.bursts)
        self._rotation = Rotation([(packed.clone(), scales.clone()) for _ in copies])

    def prepare(self, x: F32) -> None:
        import torch

        whole = np.ascontiguousarray(padded(x, self._tile.group_size, 0))
        self._x = torch.from_numpy(whole).to(self._type)

    def run(self) -> None:
        for _ in range(self.products):
            codes, scales = self._rotation.next()
            self._out = self._multiply(self._x, codes, self._tile.group_size, scales)

    def result(self) -> F32:
        found: F32 = self._out.float().numpy()[:, : self._weights.columns]
        return found

    def held(self) -> F64:
        import torch

        columns, size = self._tile.columns, self._tile.group_size
        both = torch.from_numpy(self._scales[:, :columns]).to(self._type).double().numpy()
        scales, zeros = (np.repeat(both[..., n], size, axis=0)[: self._tile.rows] for n in (0, 1))
        codes = adapter.codes_of(self._tile)[:columns, : self._tile.rows].T
        held: F64 = scales * (codes - adapter.CENTER) + zeros
        return held


def details() -> dict[str, Any]:
    """Version and build flags."""
    import torch

    lines = [line.strip(" -") for line in torch.__config__.show().splitlines()]
    kept = [line for line in lines if line.startswith(("GCC", "CPU capability", "OpenMP", "Intel"))]
    return {"torch": torch.__version__, "build": "; ".join(kept)}
