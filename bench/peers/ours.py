"""lowbit's own kernels: the backend cppyy, by instruction set and contract."""

import copy
from typing import Any

import numpy as np

from lowbit.affine import Floats, QuantizedMatrix, dequantize
from lowbit.backend import Backend, PreparedLinear
from lowbit.errors import LowbitError, UnavailableError
from lowbit_cppyy.backend import CppyyBackend
from lowbit_cppyy.isa import TABLES
from peers.base import AbsentError, Contestant, Plan, Rotation, Weights

INTEGER = "linear.qgemm_bfp"


def instruction_sets() -> list[str]:
    """Those that this processor has, in the backend's order."""
    return [isa for isa in TABLES if CppyyBackend(isa=isa).availability().usable]


def contracts(isa: str) -> tuple[str, ...]:
    """By which contracts an instruction set is measured: one that only adds products of bytes, by integers alone."""
    return ("integer",) if getattr(TABLES[isa], "byte_dots", False) else ("float32", "integer")


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

    def prepare(self, x: Floats) -> None:
        self._x = x
        self._out = np.empty((len(x), self._columns), np.float32)
        try:
            self.run()
        except LowbitError as error:
            raise AbsentError(str(error)) from error

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

    def result(self) -> Floats:
        return copy.copy(self._out)

    def held(self) -> Floats:
        return dequantize(self._tile)


def details() -> dict[str, Any]:
    """Version and toolchain, for the report."""
    return dict(CppyyBackend().capabilities().details or {})
