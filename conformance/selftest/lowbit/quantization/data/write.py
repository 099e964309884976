"""Write ``hqq.npz`` beside this script with the authors' package, on a CPU.

Usage: ``python write.py 0.2.8``, then ``python write.py 0.1.1`` in an environment that has that version of hqq (its
sources; it asks for a GPU only to run layers). Needs torch and numpy. The second run adds to what the first wrote.

The weights are drawn once and kept. Some groups are constant, nearly constant, or zero.

hqq 0.2.8.post1 and 0.1.1, torch 2.13.
"""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import hqq.core.optimize
import numpy as np
import torch
from hqq.core.quantize import Quantizer

FILE = Path(__file__).with_name("hqq.npz")
ROWS, COLUMNS, GROUP, META_GROUP = 64, 16, 16, 32


def drawn() -> Any:
    """Weights K × N with heavy tails; three groups along K are special."""
    rng = np.random.Generator(np.random.PCG64(17))
    weights = rng.standard_t(4, size=(ROWS, COLUMNS)).astype(np.float32)
    weights[:GROUP, 0] = 0.3
    weights[:GROUP, 1] = np.float32(0.3) + np.float32(1e-6) * np.arange(GROUP, dtype=np.float32)
    weights[:GROUP, 2] = 0
    return weights


def quantized(version: str, weights: Any, bits: int, axis: int) -> tuple[Any, Any]:
    """Codes g × G and what is stored beside them."""
    own = {"nbits": bits, "group_size": GROUP, "optimize": True, "round_zero": bits == 4, "axis": axis}
    tensor = torch.from_numpy(weights.T.copy())
    if version != "0.1.1":
        codes, meta = Quantizer.quantize(tensor, device="cpu", bitpack=False, **own)
    else:
        codes, meta = Quantizer.quantize(tensor, **own)
        codes = Quantizer.unpack[meta["packing"]](codes)
        whole = GROUP if axis == 0 else weights.size // GROUP
        codes = codes[:whole]  # 3-bit codes are padded
    codes = codes.numpy().astype(np.uint8)
    return (codes if axis == 0 else codes.T), meta


def in_8_bits(version: str, name: str, numbers: Any, channel_wise: bool) -> dict[str, Any]:
    """Scales or zeros, quantised themselves as HQQLinear does."""
    own: dict[str, Any] = {"nbits": 8, "channel_wise": channel_wise, "optimize": False}
    own["group_size"] = META_GROUP if channel_wise else None
    more = {} if version == "0.1.1" else {"device": "cpu"}
    codes, meta = Quantizer.quantize(numbers, **own, **more)
    found = {"codes": codes.numpy().reshape(-1), "scales": meta["scale"].numpy().reshape(-1)}
    found["zeros"] = meta["zero"].numpy().reshape(-1)
    return {f"{name}-{part}": array for part, array in found.items()}


def main() -> None:
    """Write the results of one version."""
    version = sys.argv[1]
    if version == "0.1.1":
        solver = partial(hqq.core.optimize.optimize_weights_proximal, device="cpu")
        Quantizer.optimize_weights = staticmethod(solver)
    kept = dict(np.load(FILE)) if FILE.exists() else {"weights": drawn()}
    for size in (1, 64):
        weights = kept["weights"] / np.float32(size)
        for bits in (2, 3, 4, 8):
            for axis in (0, 1):
                codes, meta = quantized(version, weights, bits, axis)
                name = f"{version}-{size}-{bits}-{axis}"
                kept |= {f"{name}-codes": codes, f"{name}-scales": meta["scale"].numpy().reshape(-1)}
                kept[f"{name}-zeros"] = meta["zero"].numpy().reshape(-1)
                if (bits, size) == (2, 64):
                    kept |= in_8_bits(version, f"{name}-eight-scales", meta["scale"], channel_wise=True)
                    kept |= in_8_bits(version, f"{name}-eight-zeros", meta["zero"], channel_wise=False)
    np.savez_compressed(FILE, **kept)


if __name__ == "__main__":
    main()
