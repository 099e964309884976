"""lowbit's products with stored matrices, beside ggml's with the same bytes: ggml makes the blocks for both.

The float32 contract multiplies float32 activations. The integer contract casts them to 8 bits first, in the format that
ggml takes for each type; both time that as a part of the product.
"""

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from lowbit.arrays import F32, F64
from lowbit.backend.prepared_stored import PreparedStored
from lowbit.errors import LowbitError
from lowbit.tensor_formats.stored import FORMATS, Stored
from lowbit_cppyy.backend import CppyyBackend
from peers import ggml
from peers.base import AbsentError, Contestant, Plan, Rotation, Weights

ACTIVATIONS: Mapping[str, str] = MappingProxyType({"q4_1": "q8_1", "q5_1": "q8_1"})
"""The formats of activations that ggml takes, beside Q8_K for K-quants and Q8_0 for others."""


def format_of(kind: str) -> str:
    """The specification's name of a type of ggml."""
    name = kind.lower()
    return own if (own := f"gguf-{name}") in FORMATS else name


def activations_of(kind: str) -> str:
    return ACTIVATIONS.get(kind, "q8_k" if kind.endswith("_K") else "q8_0")


class StoredContestant(Contestant):
    """Products with a matrix in the bytes of a type of ggml, by one instruction set."""

    def __init__(self, weights: Weights, plan: Plan, isa: str, contract: str, kind: str) -> None:
        if weights.rows % ggml.BLOCK[kind]:
            raise AbsentError(f"its blocks are {ggml.BLOCK[kind]} codes long, which do not divide {weights.rows} rows")
        backend = plan.store(f"backend {isa}", lambda: CppyyBackend(isa=isa, threads=plan.threads))
        blocks = ggml.quantized(kind, weights.tile)
        self._tile = Stored(format_of(kind), weights.rows, len(blocks), (blocks,))
        whole = Stored(format_of(kind), weights.rows, weights.columns, (weights.spread(blocks, 0),))

        def made() -> Rotation[PreparedStored]:
            first = backend.prepare_stored(whole)
            copies = plan.products(first.nbytes) * plan.bursts(first.nbytes)
            return Rotation([first, *(backend.prepare_stored(whole) for _ in range(copies - 1))])

        self._rotation: Rotation[PreparedStored] = plan.store(f"{isa} {kind}", made)
        self.nbytes = self._rotation.items[0].nbytes
        self.products, self.bursts = plan.products(self.nbytes), plan.bursts(self.nbytes)
        self._activations = activations_of(kind) if contract == "integer" else ""

    @property
    def store(self) -> object:
        return self._rotation

    def prepare(self, x: F32) -> None:
        self._x = x
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
                self._out = matrix.gemv(self._x[0])[None]
            else:
                self._out = matrix.gemm(self._x)

    def result(self) -> F32:
        return np.asarray(self._out, np.float32)

    def held(self) -> F64:
        return self._tile.values.astype(np.float64)
