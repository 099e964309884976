"""MoE offloading, table 1: size and perplexity by the bits of attention and those of the experts, by HQQ.

Groups are 64 rows, and 16 at 2 bits, as in the paper. The router, embedding, head and norms stay floats.
"""

from functools import partial
from typing import Any

from experiments.measuring import SPARSE, losses, subject
from experiments.running import Experiment, Row
from lowbit.arrays import F32
from lowbit.model.decoder import Decoder
from lowbit.model.matrices import Matrix, to_float
from lowbit.rewriting.methods import Rounding

BITS = (16, 4, 3, 2)
GROUP = {4: 64, 3: 64, 2: 16}


def rows(quick: bool) -> list[Row]:
    """Every pair of widths, for each model."""
    widths = BITS[::3] if quick else BITS
    return [
        Row(
            {"model": model, "attention": attention, "experts": experts},
            partial(measured, model, attention, experts, quick),
        )
        for model in (SPARSE[:1] if quick else SPARSE)
        for attention in widths
        for experts in widths
    ]


def measured(model: str, attention: int, experts: int, quick: bool) -> dict[str, Any]:
    """The losses, and the bytes of the matrices of attention and experts."""
    it, stored = subject(model, quick), 0.0

    def rounded(name: str, matrix: Matrix) -> F32:
        nonlocal stored
        weights = to_float(matrix)
        bits = experts if name.startswith("feed_forward.") else attention
        stored += weights.size * (bits if bits == 16 else bits + 32 / GROUP[bits])
        if bits == 16:
            return weights
        return Rounding("hqq", GROUP[bits], real_zeros=True)(weights, bits).floats

    new = it.weights.changed(rounded)
    return losses(Decoder(new), it.windows) | {"bytes": int(stored / 8)}


EXPERIMENT = Experiment(
    "mixed", "Size and perplexity by bits of attention and of experts (MoE offloading, table 1).", rows
)
