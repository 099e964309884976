"""Casts of activations to 8 bits (``cpp/casts.h``): each row of x becomes a column of a stored matrix."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import ClassVar

import numpy as np

from lowbit.arrays import Activations
from lowbit.backend import Declaration
from lowbit.contract.checks import check_finite
from lowbit.errors import ArgumentError
from lowbit.tensor_formats.stored import FORMATS, RESULTS, Stored
from lowbit_cppyy.caching import cached_property
from lowbit_cppyy.codegen.isa import InstructionSet
from lowbit_cppyy.runtime.calls import FLOATS as NO_FLOATS
from lowbit_cppyy.runtime.calls import Calls, done
from lowbit_cppyy.runtime.compiler import Pool
from lowbit_cppyy.stored.types import TYPES, as_bytes

KINDS: Mapping[str, int] = MappingProxyType(
    {"q8_0": 0, "q8_1": 1, "q8_k": 2, **dict.fromkeys(("int8-token", "int8-token-f16", "int8-token-bf16"), 3)}
)
"""The formats, as ``cpp/casts.h`` numbers them."""
SCALES: Mapping[str, int] = MappingProxyType({"int8-token-f16": 1, "int8-token-bf16": 2})
"""The types of int8's scales, as ``cpp/stored.h`` numbers them; formats that are not listed have float32."""

TOO_SMALL, TOO_LARGE, NOT_FINITE = 6, 7, 8
"""Statuses of a cast."""

INSIDE = "an activation inside the step is not finite: the weights overflow float32; the model file may be damaged"

Options = tuple[tuple[str, int], ...]


class CastCalls(Calls):
    """The functions of ``cpp/casts.h``."""

    def __init__(self, table: InstructionSet, pool: Pool) -> None:
        super().__init__("casts.h", table, pool)
        self.pool = pool.handle
        nothing = np.zeros(1, np.uint8)
        self.cast = self._function("cast_activations", 0, 0, nothing, 0, 0, 0, nothing, NO_FLOATS)
        self.multiply = self._function("multiply_stored_cast", 0, 0, 0, 0, nothing, 0, nothing, 0, 0)


def raise_for(status: int, x: Activations) -> None:
    """Refuse numbers x that have no cast, as the specification does.

    Raises:
        ArgumentError: a number of x, or one that a step made from x, is not finite; a block is so small that a quotient
            is infinite, or so large that its scale is infinite.
        UnavailableError: no memory, a forked process, a closed backend.
    """
    if status == TOO_SMALL:
        raise ArgumentError("x", "a block of numbers so small that a quotient is infinite", "larger numbers, or zeros")
    if status == TOO_LARGE:
        raise ArgumentError("x", "a block whose scale or sum is infinite in its type", "smaller numbers")
    if status == NOT_FINITE:
        check_finite("x", x)
        raise ArgumentError("weights", "too large", "weights that do not overflow float32", INSIDE)
    done(status, None)


class Casts:
    """The hook of `formats.quantize`."""

    declared: ClassVar[dict[str, Declaration]] = {
        "formats.quantize": Declaration({"format": tuple(KINDS), "inputs": RESULTS})
    }
    _table: InstructionSet
    _require_pool: Callable[[], Pool]

    @cached_property
    def _casts(self) -> CastCalls:
        return CastCalls(self._table, self._require_pool())

    def _formats_quantize(self, x: Activations, format: str, options: Options = ()) -> Stored:
        (count, rows), kind = x.shape, KINDS[format]
        table = FORMATS[format]
        tensors = [np.empty(each.sizes(table.sizes(rows, count, {})), each.dtype) for each in table.tensors]
        scales = np.empty(count, np.float32)
        arguments = as_bytes(x), TYPES[x.dtype], count, rows, as_bytes(tensors[0]), scales
        if status := self._casts.cast(self._casts.pool, kind, *arguments):
            raise_for(status, x)
        if len(tensors) > 1:
            with np.errstate(over="ignore"):
                tensors[1][:, 0] = scales  # `Stored` refuses an infinite scale
        return Stored(format, rows, count, tuple(tensors))
