"""A stored matrix that is ready to be multiplied by, and what is declared of such products."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np

from lowbit.arrays import F32, Activations, Array
from lowbit.backend import Declaration
from lowbit.backend.prepared_stored import PreparedStored
from lowbit.contract.rounding import Arithmetic
from lowbit.tensor_formats.stored import FORMATS, RESULTS, Stored
from lowbit_cppyy.codegen.isa import InstructionSet
from lowbit_cppyy.recipe import Purpose
from lowbit_cppyy.runtime import processor
from lowbit_cppyy.runtime.compiler import FIRST_CALLS, INEXACT, Linear, Pool, Route, raise_failure, runtime
from lowbit_cppyy.runtime.products import SEVERAL, Product, Routes, integer_purpose, rows_purpose
from lowbit_cppyy.stored.activations import StoredActivations
from lowbit_cppyy.stored.casts import KINDS, SCALES, CastCalls, raise_for
from lowbit_cppyy.stored.formats import PARTS
from lowbit_cppyy.stored.kernel import StoredKernel
from lowbit_cppyy.stored.layout import StoredLayout, layout_of
from lowbit_cppyy.stored.parts import Parts
from lowbit_cppyy.stored.recipe import StoredRecipe, default_recipe, separate_recipe
from lowbit_cppyy.stored.types import TYPES, as_bytes

PANEL = 64
BLOCKS = tuple({block for name in KINDS if (block := FORMATS[name].block)})
"""The numbers of rows that share a scale in the formats of activations in which not all rows share one."""


def roundings(rows: int, run: int) -> int:
    """The largest number of roundings of a term of a product in float32, for runs of n rows that share a scale.

    A product rounds once, or is fused with its addition; it takes at most n additions in its run, one where two chains
    are combined, and one for the start of a sum. A sum of activations takes ⌈n/8⌉ + 2. Then each is multiplied by an
    integer of its run and added, at most 2·16 times, multiplied by the scale, 2 with an offset of zero times scale, and
    added to y, which is 0 at first, twice for each group. A sum without runs may begin with a sum of activations times
    a center, whose terms meet all n additions after those of that sum.
    """
    n = min(rows, run)
    return n + 2 + max(2 * 16, -(-n // 8) + 3) + 2 + 2 * -(-rows // n)


def cast_roundings(rows: int, run: int) -> int:
    """The same for activations of 8 bits: the integers of a run of at least 16 rows are exact. Turning their sum into
    a float rounds once, and so do the scales of activations and of the run, and each addition.

    Where weights are floats, or the rows of a run have several scales, activations are floats: a term is rounded once
    as x, once as a product unless that is fused, at most ⌈n/8⌉ times in its chain and 3 times where eight chains are
    added. A chain may begin with the sum of activations times a center. A term of that is rounded once as x, ⌈n/8⌉ + 2
    times in the sum and once by the center, and then as all terms of the chain. Each is multiplied by the scale and
    added to y, which is 0 at first, at most twice for a group.
    """
    n = min(rows, run)
    return 2 * -(-n // 8) + 7 + 2 * -(-rows // n)


OF_FLOATS = Arithmetic("factored", "float32", roundings)
OF_BYTES = Arithmetic("factored", "float32", cast_roundings)

DECLARED: Mapping[str, Declaration] = MappingProxyType(
    {
        **dict.fromkeys(
            ("linear.gemv", "linear.gemm"),
            Declaration({"format": tuple(PARTS), "activations": RESULTS, "result": RESULTS}, OF_FLOATS),
        ),
        "linear.gemm_cast": Declaration(
            {"format": tuple(PARTS), "activations": tuple(KINDS), "result": RESULTS}, OF_BYTES
        ),
    }
)


class CppyyStored(PreparedStored):
    """A stored matrix in panels. A kernel is compiled when a product needs it for the first time."""

    def __init__(self, weights: Stored, table: InstructionSet, pool: Pool, casts: Callable[[], CastCalls]) -> None:
        multiply, multiply_bytes = functions()
        self._multiply, self._multiply_bytes, self._casts = multiply, multiply_bytes, casts
        parts = PARTS[weights.format](weights)
        layout = layout_of(parts, PANEL)
        self._linear = Linear(layout, layout.apply(parts), pool)
        parts = parts.without_numbers()
        self._handle, self._routes = self._linear.handle, Routes(partial(_route, parts, layout, table))
        recipes = {each: default_recipe(parts.structure, table, each, PANEL) for each in SEVERAL}
        self._rows_of = {each: recipe.rows for each, recipe in recipes.items()}
        self._separate = Routes(partial(_separate_route, parts, layout, table))
        self._exact = {each: has_integers(parts, layout, each) for each in (*BLOCKS, weights.rows)}
        super().__init__("cppyy", weights, layout.nbytes)

    def _gemv(self, x: Activations, out: Array) -> None:
        self._product(x, out, 1, "vector")

    def _gemm(self, x: Activations, out: Array) -> None:
        self._product(x, out, len(x), rows_purpose(len(x), self._rows_of))

    def _gemm_cast(self, x: Stored, out: Array) -> None:
        codes, scales, each = bytes_of(x)
        route = self._route_of_bytes(each, x.columns).handle
        arguments = as_bytes(codes), scales, each, as_bytes(out), TYPES[out.dtype], x.columns
        if status := self._multiply_bytes(self._handle, route, *arguments):
            raise_failure(status)

    def _cast_and_multiply(self, x: Activations, activations: str, out: Array) -> None:
        route = self._route_of_bytes(self._scaled_together(activations), len(x)).handle
        arguments = as_bytes(x), TYPES[x.dtype], as_bytes(out), TYPES[out.dtype], len(x)
        kinds = KINDS[activations], SCALES.get(activations, 0)
        if status := self._casts().multiply(self._handle, route, *kinds, *arguments):
            raise_for(status, x)

    def _scaled_together(self, activations: str) -> int:
        """The number of rows of activations in this format that share a scale."""
        return FORMATS[activations].block or self.rows

    def _route_of_bytes(self, each: int, tokens: int) -> Route:
        """The kernel for activations of 8 bits with a scale for every `each` rows."""
        if self._exact[each]:
            return self._routes.of(integer_purpose(tokens))
        return self._separate.of("rows")

    def _product(self, x: Activations, out: Array, count: int, purpose: Purpose) -> None:
        arguments = as_bytes(x), TYPES[x.dtype], as_bytes(out), TYPES[out.dtype], count
        status = self._multiply(self._handle, self._routes.of(purpose).handle, *arguments)
        if status == INEXACT:
            status = self._multiply(self._handle, self._routes.of(purpose, exact=True).handle, *arguments)
        if status:
            raise_failure(status)

    def product(self, tokens: int, activations: str | None, *, exact: bool = False) -> Product:
        """The product of a compiled step for a number of tokens: the choice of `gemv`, `gemm` and
        `cast_and_multiply`."""
        if activations is not None:
            route, cast = self._route_of_bytes(self._scaled_together(activations), tokens), KINDS[activations]
        else:
            purpose = "vector" if tokens == 1 else rows_purpose(tokens, self._rows_of)
            route, cast = self._routes.of(purpose, exact=exact), -1
        return Product(self._handle, route, True, cast, self.nbytes, PANEL)


def _route(parts: Parts, layout: StoredLayout, table: InstructionSet, purpose: Purpose, exact: bool) -> Route:
    recipe = default_recipe(parts.structure, table, purpose, PANEL)
    return _with_recipe(recipe.exact if exact else recipe, parts, layout, table)


def _separate_route(parts: Parts, layout: StoredLayout, table: InstructionSet, *_: object) -> Route:
    return _with_recipe(separate_recipe(parts.structure, PANEL), parts, layout, table)


def _with_recipe(recipe: StoredRecipe, parts: Parts, layout: StoredLayout, table: InstructionSet) -> Route:
    return Route(StoredKernel(recipe, table), StoredActivations(recipe, layout, parts))


def has_integers(parts: Parts, layout: StoredLayout, each: int) -> bool:
    """Whether sums of integers are exact if every `each` rows of activations share a scale: codes are integers, and the
    rows of each run share one scale."""
    if parts.structure.is_floats:
        return False
    if each >= parts.rows:
        return True
    return parts.order is None and all(first // each == last // each for first, last in layout.runs())


def bytes_of(x: Stored) -> tuple[Array, F32, int]:
    """The signed bytes of stored activations, T × K, their scales, and the number of rows that share one."""
    fields = x.table.fields_of(x.by_name)
    codes = fields["qs"] if "qs" in fields else fields["codes"]
    scales = fields["d"] if "d" in fields else fields["scale"]
    each = x.table.block or x.rows
    return np.ascontiguousarray(codes).reshape(x.columns, -1), scales.reshape(-1).astype(np.float32), each


def functions() -> tuple[Callable[..., int], Callable[..., int]]:
    """The functions of ``cpp/stored.h``, compiled with their cppyy wrappers at the first request."""
    compiled = runtime()
    bridge: Any = compiled.bridge

    def called() -> None:
        nothing, floats = np.zeros(1, np.uint8), np.zeros(1, np.float32)
        for function in (bridge.multiply_stored, bridge.multiply_stored_bytes):
            function.__release_gil__ = True
        for _ in range(FIRST_CALLS):
            bridge.multiply_stored(0, 0, nothing, 0, nothing, 0, 0)
            bridge.multiply_stored_bytes(0, 0, nothing, floats, 0, nothing, 0, 0)
            numbers, addresses = np.zeros(15, np.int64), np.zeros(6, np.uint64)
            bridge.destroy_stored_route(bridge.create_stored_route(0, numbers, addresses, numbers, 0))

    compiled.include("stored.h", called)
    return bridge.multiply_stored, bridge.multiply_stored_bytes


class StoredProducts:
    """The hooks of products with stored matrices."""

    _isa: str | None
    _casts: CastCalls
    _require_pool: Callable[[], Pool]

    def _prepare_stored(self, weights: Stored) -> PreparedStored:
        table = processor.choose_table(self._isa)  # before anything is compiled
        return CppyyStored(weights, table, self._require_pool(), lambda: self._casts)
