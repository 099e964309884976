"""lowbit's products with stored matrices: in the types of ggml, which makes the blocks for both, and of checkpoints.

The float32 contract multiplies float32 activations, the bfloat16 contract such of 16 bits, with results alike. The
integer contract casts activations to 8 bits first, in the format that ggml takes for each type; both time that as a
part of the product.
"""

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from lowbit.arrays import F32, F64, Array
from lowbit.backend.prepared_stored import PreparedStored
from lowbit.errors import LowbitError
from lowbit.numbers.floats import FLOATS
from lowbit.tensor_formats.stored import FORMATS, Result, Stored
from lowbit_cppyy.backend import CppyyBackend
from peers import checkpoints, ggml
from peers.base import AbsentError, Contestant, Plan, Rotation, Weights

ACTIVATIONS: Mapping[str, str] = MappingProxyType({"q4_1": "q8_1", "q5_1": "q8_1"})
"""The formats of activations that ggml takes, beside Q8_K for K-quants and Q8_0 for others."""


def format_of(kind: str) -> str:
    """The specification's name of a type of ggml."""
    name = kind.lower()
    return own if (own := f"gguf-{name}") in FORMATS else name


def activations_of(kind: str) -> str:
    return ACTIVATIONS.get(kind, "q8_k" if kind.endswith("_K") else "q8_0")


def blocks_of(kind: str, weights: Weights) -> tuple[Stored, Stored]:
    """The tile of some weights in a type of ggml, and all of them."""
    if weights.rows % ggml.BLOCK[kind]:
        raise AbsentError(f"its blocks are {ggml.BLOCK[kind]} codes long, which do not divide {weights.rows} rows")
    blocks = ggml.quantized(kind, weights.tile)
    tile = Stored(format_of(kind), weights.rows, len(blocks), (blocks,))
    return tile, Stored(format_of(kind), weights.rows, weights.columns, (weights.spread(blocks, 0),))


class StoredContestant(Contestant):
    """Products with a matrix in the bytes of a type of ggml or of a checkpoint, by one instruction set."""

    def __init__(self, weights: Weights, plan: Plan, isa: str, contract: str, kind: str) -> None:
        backend = plan.store(f"backend {isa}", lambda: CppyyBackend(isa=isa, threads=plan.threads))
        matrices = checkpoints.matrices if kind in checkpoints.MAKERS else blocks_of
        self._tile, whole = matrices(kind, weights)

        def made() -> Rotation[PreparedStored]:
            first = backend.prepare_stored(whole)
            copies = plan.products(first.nbytes) * plan.bursts(first.nbytes)
            return Rotation([first, *(backend.prepare_stored(whole) for _ in range(copies - 1))])

        self._rotation: Rotation[PreparedStored] = plan.store(f"{isa} {kind}", made)
        self.nbytes = self._rotation.items[0].nbytes
        self.products, self.bursts = plan.products(self.nbytes), plan.bursts(self.nbytes)
        self._activations = activations_of(kind) if contract == "integer" else ""
        self._result: Result = "bfloat16" if contract == "bfloat16" else "float32"

    @property
    def store(self) -> object:
        return self._rotation

    def prepare(self, x: F32) -> None:
        self._x: Array = x if self._activations else x.astype(FLOATS[self._result].dtype)
        try:
            for _ in range(self.bursts):  # every matrix gets its kernels when it is first multiplied by
                self.run()
        except LowbitError as error:
            raise AbsentError(str(error)) from error

    def run(self) -> None:
        for _ in range(self.products):
            matrix = self._rotation.next()
            if self._activations:
                self._out = matrix.cast_and_multiply(self._x, self._activations)
            elif len(self._x) == 1:
                self._out = matrix.gemv(self._x[0], self._result)[None]
            else:
                self._out = matrix.gemm(self._x, self._result)

    def result(self) -> F32:
        return np.asarray(self._out, np.float32)

    def held(self) -> F64:
        return self._tile.values.astype(np.float64)
