"""Stacked experts: those of GPT-OSS, which lie in a few tensors of a layer, one expert after another.

Gate and up projections are one tensor whose columns alternate: the even ones are the gate's and the odd ones those of
the other side. As floats, ``gate_up_proj`` is E × K × 2m and ``down_proj`` E × m × K, with inputs before outputs,
unlike any other matrix of a checkpoint; floats of 16 bits stay so. Quantised, each is two tensors of bytes with outputs
before inputs: blocks of 32 elements of MXFP4, ``…_blocks``, and the exponents of their scales, ``…_scales``. Those are
the bytes of the format ``mxfp4`` (`lowbit.tensor_formats.microscaling`), so they stay as they are. Biases are floats,
one row for each expert.

Source: the published checkpoints of GPT-OSS; the ``transformers`` library.
"""

from collections.abc import Callable, Iterator

import numpy as np

from lowbit.arrays import F32, Array
from lowbit.formats.checkpoint.stored_matrix import OF_16_BITS, floats_of_16_bits
from lowbit.formats.checkpoint.tensors import Table, read_coded, read_floats
from lowbit.model.config import LlamaConfig
from lowbit.model.matrices import Matrix
from lowbit.numbers.floats import FLOATS
from lowbit.tensor_formats.stored import Stored

FORMAT, BLOCK = "mxfp4", 32
GATE_UP, DOWN = "gate_up_proj", "down_proj"
CODED = ("_blocks", "_scales")
BIASES = {GATE_UP: ("gate_bias", "up_bias"), DOWN: ("down_bias",)}
"""The vectors of each tensor of biases, whose columns alternate between them."""

Shape = tuple[int, ...]


def shapes(config: LlamaConfig, prefix: str, *, coded: bool) -> dict[str, Shape]:
    """The tensors of the experts of a layer with their shapes.

    Args:
        config: of the model.
        prefix: of their names.
        coded: whether they are MXFP4.
    """
    experts = 0 if config.routing is None else config.routing.experts
    found: dict[str, Shape] = {}
    inner = config.feed_forward
    for name, rows, columns in ((GATE_UP, config.hidden, 2 * inner), (DOWN, inner, config.hidden)):
        if coded:
            blocks = (experts, columns, rows // BLOCK)
            found |= {f"{prefix}.{name}_blocks": (*blocks, BLOCK // 2), f"{prefix}.{name}_scales": blocks}
        else:
            found[f"{prefix}.{name}"] = (experts, rows, columns)
        found[f"{prefix}.{name}_bias"] = (experts, columns)
    return found


def biases(table: Table, prefix: str) -> dict[str, F32]:
    """The biases of the experts of a layer, by the names of `lowbit.model.weights.LayerWeights`."""
    found = {}
    for tensor, names in BIASES.items():
        rows = read_floats(table, f"{prefix}.{tensor}_bias")
        for place, name in enumerate(names):
            found[f"expert_{name}"] = np.ascontiguousarray(rows[:, place :: len(names)]).reshape(-1)
    return found


def matrices(table: Table, prefix: str, *, coded: bool) -> Iterator[tuple[str, Matrix]]:
    """The matrices of the experts of a layer, by the names of `lowbit.model.weights.LayerWeights.linears`."""
    read = _coded if coded else _floats
    for tensor, names in ((GATE_UP, ("gate", "up")), (DOWN, ("down",))):
        matrix, experts = read(table, f"{prefix}.{tensor}"), table[f"{prefix}.{tensor}_bias"].shape[0]
        for place, name in enumerate(names):
            for expert in range(experts):
                yield f"feed_forward.experts[{expert}].{name}", matrix(expert, slice(place, None, len(names)))


Columns = Callable[[int, slice], Matrix]
"""Returns the matrix of an expert and a choice of its columns."""


def _floats(table: Table, name: str) -> Columns:
    if (place := table[name]).type not in OF_16_BITS:
        whole = read_floats(table, name)
        return lambda expert, columns: np.ascontiguousarray(whole[expert][:, columns])
    numbers = read_coded(table, name)
    return lambda expert, columns: floats_of_16_bits(place, name, np.ascontiguousarray(numbers[expert][:, columns].T))


def _coded(table: Table, name: str) -> Columns:
    blocks, scales = (read_coded(table, name + ending) for ending in CODED)

    def columns_of(expert: int, columns: slice) -> Matrix:
        elements: Array = np.ascontiguousarray(blocks[expert, columns]).reshape(-1, blocks.shape[2] * BLOCK // 2)
        scale: Array = np.ascontiguousarray(scales[expert, columns]).view(FLOATS["float8_e8m0fnu"].dtype)
        return Stored(FORMAT, blocks.shape[2] * BLOCK, len(elements), (elements, scale))

    return columns_of
