"""lowbit's own kernels: the backend cppyy, by instruction set and contract."""

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np

from lowbit.arrays import F32
from lowbit.backend import Backend, PreparedLinear
from lowbit.errors import LowbitError, UnavailableError
from lowbit.quantization.affine import QuantizedMatrix, dequantize
from lowbit_cppyy.backend import CppyyBackend
from lowbit_cppyy.codegen.isa import TABLES
from peers.base import AbsentError, Contestant, Plan, Rotation, Weights

INTEGER = "linear.qgemm_bfp"
ONLY_DOTS = {"avxvnni": "avx2", "avx512vnni": "avx512"}
"""Instruction sets that add products of bytes to another; with float32 activations they are that other."""
KINDS = 5
"""Rows of activations from which on the backend has no other kernels."""


def instruction_sets() -> list[str]:
    """Those that this processor has, in the backend's order."""
    return [isa for isa in TABLES if CppyyBackend(isa=isa).availability().usable]


def contracts(isa: str) -> tuple[str, ...]:
    """By which contracts an instruction set is measured: one that only adds products of bytes, by integers alone."""
    return ("integer",) if isa in ONLY_DOTS else ("float32", "integer")


def ways(isas: Sequence[str], brief: bool) -> list[tuple[str, str]]:
    """Instruction set and contract of each of lowbit's contestants.

    >>> ways(["avxvnni", "avx2", "plain"], brief=True)
    [('avxvnni', 'integer'), ('avx2', 'float32')]

    Args:
        isas: those of this processor.
        brief: leave out plain C++, and integers where another instruction set adds products of bytes to the same.
    """
    found = [(isa, contract) for isa in isas for contract in contracts(isa)]
    beaten = {(ONLY_DOTS[isa], "integer") for isa in isas if isa in ONLY_DOTS}
    return [way for way in found if not brief or (way[0] != "plain" and way not in beaten)]


class Store:
    """A matrix prepared by one backend, many times."""

    def __init__(self, backend: Backend, matrix: QuantizedMatrix, plan: Plan) -> None:
        self.backend, first = backend, backend.prepare(matrix)
        self.nbytes, self.products = first.nbytes, plan.products(first.nbytes)
        self.bursts = plan.bursts(first.nbytes)
        more = (backend.prepare(matrix) for _ in range(self.products * self.bursts - 1))
        self.rotation: Rotation[PreparedLinear] = Rotation([first, *more])


class OurContestant(Contestant):
    """Products by one instruction set, with float32 activations or, where the backend declares it, integers."""

    def __init__(self, weights: Weights, plan: Plan, isa: str, contract: str, tile: QuantizedMatrix) -> None:
        backend = plan.store(f"backend {isa}", lambda: CppyyBackend(isa=isa, threads=plan.threads))
        if contract == "integer" and INTEGER not in backend.capabilities().operations:
            raise AbsentError(f"the backend does not declare {INTEGER} with {isa}")
        name = f"{isa} {tile.bits} {tile.group_size} {tile.convention} {tile.scales.dtype}"
        try:
            store = plan.store(name, lambda: Store(backend, weights.whole(tile), plan))
        except UnavailableError as error:
            raise AbsentError(str(error)) from error
        self._store: Store = store
        self.nbytes, self.products, self.bursts = store.nbytes, store.products, store.bursts
        self._rotation, self._tile, self._integer = store.rotation, tile, contract == "integer"
        self._columns = weights.columns

    @property
    def store(self) -> object:
        return self._store

    def prepare(self, x: F32) -> None:
        try:
            self._use(x[:KINDS])
            for _ in range(self.bursts):  # every matrix gets its kernels when it first sees so many rows
                self.run()
        except LowbitError as error:
            raise AbsentError(str(error)) from error
        self._use(x)

    def _use(self, x: F32) -> None:
        self._x, self._out = x, np.empty((len(x), self._columns), np.float32)

    def run(self) -> None:
        rotation, x, out = self._rotation, self._x, self._out
        for _ in range(self.products):
            linear = rotation.next()
            if self._integer:
                linear.qgemm_cast(x, out)
            elif len(x) == 1:
                linear.qgemv(x[0], out[0])
            else:
                linear.qgemm(x, out)

    def result(self) -> F32:
        return copy.copy(self._out)

    def held(self) -> F32:
        return dequantize(self._tile)


def details() -> dict[str, Any]:
    """Version and toolchain, for the report."""
    return dict(CppyyBackend().capabilities().details or {})
