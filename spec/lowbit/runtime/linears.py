"""Linear layers on a backend, and a list of the matrices that the backend cannot multiply by.

A backend that does not declare 8 bits cannot multiply by an 8-bit head. If another kernel did it silently, measurements
of the backend would be wrong. So such a matrix is dequantised to float32 and multiplied by numpy, and
`BackendLinears.float_matrices` counts these matrices and says why.

**The contract** is the caller's choice: ``float32``, by `linear.qgemv` and `linear.qgemm`, or ``integer``, by
`linear.qgemm_bfp` of activations that are cast to Block Floating Point first (the chapter `integer` says what that
loses). Matrices in the bytes of a format use `linear.gemv`, `linear.gemm` and `linear.gemm_cast` in their place.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lowbit.arrays import F32
from lowbit.backend.base import Backend
from lowbit.backend.prepared import PreparedLinear
from lowbit.backend.prepared_stored import PreparedStored
from lowbit.contract.checks import check_choice
from lowbit.errors import NotDeclaredError
from lowbit.model.block import Linear, plain_linear
from lowbit.model.matrices import Matrix, in_bytes, is_float, to_float
from lowbit.quantization.affine import QuantizedMatrix
from lowbit.tensor_formats.gguf_k import BLOCK
from lowbit.tensor_formats.stored import FORMATS, Stored
from lowbit.tensor_formats.table import Format

Contract = Literal["float32", "integer"]
BLOCKS = "bfp"
"""Activations of `linear.qgemm_bfp`: blocks of 32 with mantissas of 8 bits (the chapter `integer`)."""
FLOATS = "stored as floats"
"""The reason why numpy multiplies by a matrix that is not quantised."""
CONTRACTS: tuple[Contract, ...] = ("float32", "integer")


def cast_for(table: Format) -> str:
    """The format that activations are cast to before integers are multiplied: Q8_K for blocks of 256, else Q8_0.

    llama.cpp does the same, except that it takes Q8_1 for weights with a minimum: the codes and scales of Q8_0, plus
    sums.
    """
    return "q8_k" if table.block == BLOCK else "q8_0"


def has_whole_blocks(rows: int, activations: str) -> bool:
    """Whether this number of activations fills whole blocks of a format, so that they can be cast to it.

    >>> has_whole_blocks(64, "q8_0"), has_whole_blocks(48, "q8_0")
    (True, False)
    """
    return rows % (FORMATS[activations].block or 1) == 0


@dataclass(frozen=True, eq=False)
class BackendLinear:
    """A linear layer on a backend: float32, T × K, to float32, T × N.

    In float32 it calls `linear.qgemv` or `linear.gemv` for one token and `linear.qgemm` or `linear.gemm` for more; in
    integers it calls `linear.qgemm_bfp` or `linear.gemm_cast` for any number of tokens.

    Attributes:
        prepared: the matrix.
        activations: the format that activations are cast to; None for float32.
    """

    prepared: PreparedLinear | PreparedStored
    activations: str | None

    def __call__(self, x: F32) -> F32:
        prepared, activations = self.prepared, self.activations
        if isinstance(prepared, PreparedLinear):
            if activations is not None:
                return prepared.qgemm_cast(x)
            return prepared.qgemv(x[0])[np.newaxis] if len(x) == 1 else prepared.qgemm(x)
        if activations is not None:
            return prepared.cast_and_multiply(x, activations)
        return prepared.gemv(x[0])[np.newaxis] if len(x) == 1 else prepared.gemm(x)


class BackendLinears:
    """Makes linear layers that run on one backend; give it to a `lowbit.model.decoder.Decoder` as its `linear`.

    >>> from lowbit.backend.registry import load
    >>> linears = BackendLinears(load("reference"))
    >>> linears(np.eye(2, dtype=np.float32))(np.array([[1.0, 2.0]], np.float32))
    array([[1., 2.]], dtype=float32)
    >>> linears.prepared, dict(linears.float_matrices)
    (0, {'stored as floats': 1})

    Args:
        backend: one that can run here.
        contract: ``float32`` or ``integer``.

    Attributes:
        prepared: how many matrices the backend prepared.
        read_bytes: bytes of weights that one token reads: those that the backend prepared, and the others as float32.
            In a sparse model every expert counts, because a long prompt reads all of them.
        float_matrices: why matrices were multiplied by numpy in float32 instead, and how many for each reason.

    Raises:
        ArgumentError: another contract.
        NotDeclaredError: the integer contract of a backend that does not declare `linear.qgemm_bfp`.
    """

    def __init__(self, backend: Backend, contract: Contract = "float32") -> None:
        check_choice("contract", contract, CONTRACTS)
        if contract == "integer" and "linear.qgemm_bfp" not in backend.capabilities().operations:
            raise NotDeclaredError(backend.name, "linear.qgemm_bfp")
        self.backend, self.contract = backend, contract
        self.prepared = self.read_bytes = 0
        self.float_matrices: Counter[str] = Counter()

    def __call__(self, matrix: Matrix) -> Linear:
        """The function that multiplies by this matrix: a `BackendLinear`, or numpy's product in float32.

        Raises:
            UnavailableError: raised by the backend if it cannot prepare the matrix.
        """
        if isinstance(matrix, np.ndarray):
            if not self.backend.prepares_stored:
                return self._plain(matrix, FLOATS)
            matrix = in_bytes(matrix)
        try:
            prepared, activations = self._prepared(matrix)
        except NotDeclaredError as error:
            return self._plain(to_float(matrix), FLOATS if is_float(matrix) else str(error))
        self.prepared += 1
        self.read_bytes += prepared.nbytes
        return BackendLinear(prepared, activations)

    def _prepared(self, matrix: QuantizedMatrix | Stored) -> tuple[PreparedLinear | PreparedStored, str | None]:
        """A matrix on the backend, and the format that activations are cast to.

        Raises:
            NotDeclaredError: the backend does not declare these products.
        """
        integer = self.contract == "integer"
        if isinstance(matrix, QuantizedMatrix):
            return self.backend.prepare(matrix), BLOCKS if integer else None
        if not integer:
            return self.backend.prepare_stored(matrix), None
        activations = cast_for(matrix.table)
        if not has_whole_blocks(matrix.rows, activations):
            raise NotDeclaredError(self.backend.name, "linear.gemm_cast", f"rows {matrix.rows} of {activations}")
        prepared = self.backend.prepare_stored(matrix)
        self.backend.unchecked("linear.gemm_cast", {**matrix.parameters, "activations": activations})
        return prepared, activations

    def _plain(self, matrix: F32, reason: str) -> Linear:
        self.float_matrices[reason] += 1
        self.read_bytes += matrix.nbytes
        return plain_linear(matrix)
