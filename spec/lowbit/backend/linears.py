"""A decoder on a backend: every matrix of the model handed to the backend, and an account of those it did not take.

A backend that does not declare 8 bits cannot multiply by an 8-bit head. Answering with another kernel in silence
would make its numbers mean something else, so nothing is silent here: such a matrix is dequantised exactly, numpy
multiplies by it in float32, and `BackendLinears.float_matrices` says how many matrices went that way and why.

**The contract** is the caller's choice too: ``float32``, by `linear.qgemv` and `linear.qgemm`, or ``integer``, by
`linear.qgemm_bfp` of activations that are cast to Block Floating Point first (the chapter `integer` says what that
loses).

Source: lowbit's own.
"""

from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

import numpy as np

from lowbit.arrays import F32
from lowbit.backend.base import Backend
from lowbit.contract.checks import check_choice
from lowbit.errors import NotDeclaredError
from lowbit.model.block import FORMULAS, Linear, plain_linear
from lowbit.model.decoder import Decoder
from lowbit.model.elementwise import ElementwiseOps
from lowbit.model.weights import LlamaWeights, Matrix, Progress, matrices, to_float

Contract = Literal["float32", "integer"]
CONTRACTS: tuple[Contract, ...] = ("float32", "integer")


class BackendLinears:
    """Makes linear layers that run on one backend; give it to a `lowbit.model.decoder.Decoder` as its `linear`.

    Args:
        backend: one that is usable.
        contract: ``float32`` or ``integer``.

    Raises:
        ArgumentError: another contract.
        NotDeclaredError: the integer contract of a backend that does not declare `linear.qgemm_bfp`.
    """

    def __init__(self, backend: Backend, contract: Contract = "float32") -> None:
        check_choice("contract", contract, CONTRACTS)
        if contract == "integer" and "linear.qgemm_bfp" not in backend.capabilities().operations:
            raise NotDeclaredError(backend.name, "linear.qgemm_bfp")
        self.backend, self.contract = backend, contract
        self._prepared = self._bytes = 0
        self._float: Counter[str] = Counter()

    def __call__(self, matrix: Matrix) -> Linear:
        """The function that multiplies by this matrix: in float32, `linear.qgemv` for one token and `linear.qgemm` for
        more; in integers, `linear.qgemm_bfp` for any number.

        Raises:
            UnavailableError: the backend's own, where preparing fails.
        """
        if isinstance(matrix, np.ndarray):
            return self._plain(matrix, "stored in a format that is not an affine grouping")
        try:
            prepared = self.backend.prepare(matrix)
        except NotDeclaredError as error:
            return self._plain(to_float(matrix), str(error))
        self._prepared += 1
        self._bytes += prepared.nbytes

        if self.contract == "integer":
            return prepared.qgemm_cast

        def linear(x: F32) -> F32:
            return prepared.qgemv(x[0])[np.newaxis] if len(x) == 1 else prepared.qgemm(x)

        return linear

    @property
    def prepared(self) -> int:
        """How many matrices the backend took."""
        return self._prepared

    @property
    def read_bytes(self) -> int:
        """Bytes of weights that one token reads: what the backend prepared, and the float32 of the others.

        Of a sparse model it counts every expert, which is what a long prompt reads.
        """
        return self._bytes

    @property
    def float_matrices(self) -> Mapping[str, int]:
        """Why matrices were multiplied by numpy in float32 instead, and how many for each reason."""
        return MappingProxyType(self._float)

    def _plain(self, matrix: F32, reason: str) -> Linear:
        self._float[reason] += 1
        self._bytes += matrix.nbytes
        return plain_linear(matrix)


def backend_linear(backend: Backend, contract: Contract = "float32") -> BackendLinears:
    """The factory of linear layers on this backend.

    >>> from lowbit.backend.base import load
    >>> factory = backend_linear(load("reference"))
    >>> factory(np.eye(2, dtype=np.float32))(np.array([[1.0, 2.0]], np.float32))
    array([[1., 2.]], dtype=float32)
    >>> factory.prepared, dict(factory.float_matrices)
    (0, {'stored in a format that is not an affine grouping': 1})
    """
    return BackendLinears(backend, contract)


def build(
    weights: LlamaWeights,
    backend: Backend,
    progress: Progress | None = None,
    contract: Contract = "float32",
    steps: ElementwiseOps = FORMULAS,
) -> tuple[Decoder, BackendLinears]:
    """A decoder on a backend, and the account of which matrices the backend took.

    Args:
        weights: the model.
        backend: one that is usable, see `lowbit.backend.base.load`.
        progress: called after each matrix; preparing may lay weights out anew or compile.
        contract: by which linear layers are multiplied.
        steps: the elementwise operations: the formulas, or those of `lowbit.runtime.elementwise.on_backend`.

    Raises:
        NotDeclaredError: the integer contract of a backend that does not declare it.
    """
    factory = backend_linear(backend, contract)
    total, done = sum(1 for _ in matrices(weights)), 0

    def linear(matrix: Matrix) -> Linear:
        nonlocal done
        function = factory(matrix)
        done += 1
        if progress is not None:
            progress(done, total)
        return function

    return Decoder(weights, linear, ops=steps), factory
