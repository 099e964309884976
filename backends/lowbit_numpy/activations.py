"""Norm and activation of whole arrays, in float32."""

from typing import ClassVar

import numpy as np

from lowbit.arrays import F32
from lowbit.backend import Declaration
from lowbit.contract.rounding import Arithmetic, any_order
from lowbit.model.layers import SLOPE
from lowbit_numpy.widening import TYPES, widened

DIRECT = Declaration(TYPES, Arithmetic("direct", "float32", any_order))


class ActivationOperations:
    """The hooks of the chapter `lowbit.model.layers`."""

    declared: ClassVar[dict[str, Declaration]] = dict.fromkeys(
        ("blocks.rms_norm", "blocks.swiglu", "blocks.geglu", "blocks.clamped_swiglu", "blocks.soft_cap"), DIRECT
    )

    @widened
    def _blocks_rms_norm(self, x: F32, gain: F32, epsilon: float) -> F32:
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            root = np.sqrt(np.square(x).mean(axis=1) + np.float32(epsilon))
            root[np.isinf(root) & np.isfinite(x).all(axis=1)] = np.nan  # an overflow would give a row of zeros
            result: F32 = x / root[:, None] * gain
        return result

    @widened
    def _blocks_swiglu(self, gate: F32, up: F32) -> F32:
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            result: F32 = gate / (1 + np.exp(-gate)) * up
        return result

    @widened
    def _blocks_geglu(self, gate: F32, up: F32) -> F32:
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            cubic = gate * (1 + np.float32(0.044715) * gate * gate)
            result: F32 = gate / (1 + np.exp(np.float32(-2 * np.sqrt(2 / np.pi)) * cubic)) * up
        return result

    @widened
    def _blocks_clamped_swiglu(self, gate: F32, up: F32, limit: float) -> F32:
        most = np.float32(limit)
        a, b = np.minimum(gate, most), np.clip(up, -most, most)
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            result: F32 = a / (1 + np.exp(np.float32(-SLOPE) * a)) * (b + 1)
        return result

    @widened
    def _blocks_soft_cap(self, x: F32, cap: float) -> F32:
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            result: F32 = np.float32(cap) * np.tanh(x / np.float32(cap))
        return result
