"""The backend: it prepares matrices and calls the kernels compiled for them."""

import weakref
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

from lowbit.arrays import F32
from lowbit.backend import Availability, Backend, Capabilities, Declaration
from lowbit.backend.base import StepRequest
from lowbit.backend.prepared import PreparedLinear
from lowbit.contract.checks import check_choice, check_integer
from lowbit.contract.rounding import Arithmetic
from lowbit.errors import UnavailableError
from lowbit.linear.integer_bounds import integer_loop
from lowbit.model.decoder import AnyDecoder, Decoder
from lowbit.quantization import bfp
from lowbit.quantization.affine import QuantizedMatrix
from lowbit_cppyy.codegen.isa import TABLES, InstructionSet
from lowbit_cppyy.codegen.kernels import Kernel
from lowbit_cppyy.kept.image import KeptParts
from lowbit_cppyy.kept.steps import Made, Wanted, kept
from lowbit_cppyy.layout.panels import PanelLayout
from lowbit_cppyy.recipe import SEGMENT, Purpose
from lowbit_cppyy.runtime import processor
from lowbit_cppyy.runtime.activations import ActivationStream
from lowbit_cppyy.runtime.compiler import INEXACT, Linear, Pool, Route, preparing, raise_failure, runtime
from lowbit_cppyy.runtime.decode_operations import DecodeOperations
from lowbit_cppyy.runtime.products import SEVERAL, Product, Routes, integer_purpose, rows_purpose
from lowbit_cppyy.runtime.routing_operations import RoutingOperations
from lowbit_cppyy.runtime.toolchain import check_toolchain
from lowbit_cppyy.step.decoder import CompiledDecoder
from lowbit_cppyy.step.embedding import described
from lowbit_cppyy.step.parts import StepParts
from lowbit_cppyy.step.timing import TimedStep
from lowbit_cppyy.stored.casts import Casts
from lowbit_cppyy.stored.linear import DECLARED, StoredProducts
from lowbit_cppyy.tuning import outcomes
from lowbit_cppyy.tuning.choices import layout_for, recipe_for


def roundings(rows: int, group_size: int) -> int:
    """The largest number of roundings of a term, for G groups of at most n codes, with or without fused multiply-adds.

    A product x·q rounds once. It takes at most n − 1 further additions, in the group's sums and between them, because
    the first addition is to 0. With method `sums`, a table takes at most 2 additions, and tables are added instead of
    products: at most one for each 2-bit or 4-bit code. A 3-bit code needs two tables, of which a unit of n codes has at
    most min(n, 16) and min(n, 8). A term of X takes ⌈n/8⌉ − 1 additions to a running sum and 3 between the eight; an
    offset of −scale·zero rounds once. Then each is multiplied, which rounds once, and added to y, which starts at 0, at
    most 2·G − 1 times.
    """
    groups, n = -(-rows // group_size), min(rows, group_size)
    looked_up = 1 + max(n, min(n, 16) + min(n, 8))
    return max(looked_up, -(-n // 8) + 4) + 2 * groups


def integer_roundings(rows: int, group_size: int) -> int:
    """The same for integers: the roundings of a loop over segments, and one for an offset of −scale·zero."""
    return integer_loop(SEGMENT)(rows, group_size) + 1


class CppyyLinear(PreparedLinear):
    """A matrix in panels. The kernel for one vector is compiled immediately, others when they are first needed."""

    def __init__(self, matrix: QuantizedMatrix, layout: PanelLayout, table: InstructionSet, pool: Pool) -> None:
        super().__init__("cppyy", matrix.rows, matrix.columns, layout.nbytes)
        self._panel = layout.panel
        self._linear = Linear(layout, layout.apply(matrix), pool)
        self._handle, self._routes = self._linear.handle, Routes(partial(_route, layout, table))
        self._rows_of = {purpose: recipe_for(purpose, layout, table).rows for purpose in SEVERAL}
        compiled = runtime()
        self._multiply, self._cast, self._blocks = compiled.multiply, compiled.multiply_cast, compiled.multiply_blocks
        self._vector = self._routes.of("vector").handle

    def _qgemv(self, x: F32, out: F32) -> None:
        if status := self._multiply(self._handle, self._vector, x, out, 1):
            self._failed(status, "vector", x, out, 1)

    def _qgemm(self, x: F32, out: F32) -> None:
        purpose = rows_purpose(len(x), self._rows_of)
        if status := self._multiply(self._handle, self._routes.of(purpose).handle, x, out, len(x)):
            self._failed(status, purpose, x, out, len(x))

    def _qgemm_bfp(self, x: bfp.Blocks, out: F32) -> None:
        route = self._routes.of(integer_purpose(x.rows)).handle
        if status := self._blocks(self._handle, route, x.mantissas.view(np.uint8), x.exponents, out, x.rows):
            raise_failure(status)

    def _qgemm_cast(self, x: F32, out: F32) -> None:
        if status := self._cast(self._handle, self._routes.of(integer_purpose(len(x))).handle, x, out, len(x)):
            raise_failure(status)

    def product(self, tokens: int, activations: str | None, *, exact: bool = False) -> Product:
        """The product of a compiled step for a number of tokens, as the operations choose it; `activations` is None for
        the float32 contract."""
        if activations is not None:
            route = self._routes.of(integer_purpose(tokens))
        else:
            route = self._routes.of("vector" if tokens == 1 else rows_purpose(tokens, self._rows_of), exact=exact)
        return Product(self._handle, route, False, -1, self.nbytes, self._panel)

    def _failed(self, status: int, purpose: Purpose, x: F32, out: F32, rows: int) -> None:
        """Use the kernel without powers of two if an activation is outside their range; otherwise raise the error."""
        if status == INEXACT:
            exact = self._routes.of(purpose, exact=True).handle
            status = self._multiply(self._handle, exact, x, out, rows)
        if status:
            raise_failure(status)


def _route(layout: PanelLayout, table: InstructionSet, purpose: Purpose, exact: bool) -> Route:
    recipe = recipe_for(purpose, layout, table)
    if exact:
        recipe = replace(recipe, method="shift")
    return Route(Kernel(recipe, table), ActivationStream(recipe, layout))


class CppyyBackend(DecodeOperations, RoutingOperations, StoredProducts, Casts, Backend):
    """Kernels generated as C++ and compiled at run time for this processor.

    Several threads may call it at once: the first uses the threads of the pool, the others compute alone. Results
    depend neither on that nor on the number of threads.

    Args:
        isa: one of `lowbit_cppyy.codegen.isa.TABLES`; by default that of ``LOWBIT_CPPYY_ISA``, or else the best.
        threads: the number of threads, including the caller's; by default ``LOWBIT_NUM_THREADS``, or else as many as
            affinity, quotas and ``OMP_NUM_THREADS`` allow (`lowbit_cppyy.runtime.processor.choose_threads`).

    Raises:
        ArgumentError: an unknown instruction set, or less than one thread.
    """

    name = "cppyy"

    def __init__(self, isa: str | None = None, threads: int | None = None) -> None:
        if isa is not None:
            check_choice("isa", isa, tuple(TABLES))
        if threads is not None:
            check_integer("threads", threads, 1, processor.MOST_THREADS)
        self._isa, self._threads = isa, threads
        self._pool: Pool | None = None
        self._kept: weakref.WeakSet[KeptParts] = weakref.WeakSet()
        self._closed = False

    def availability(self) -> Availability:
        try:
            check_toolchain()
            processor.choose_table(self._isa)
            processor.choose_threads(self._threads)
            outcomes.active()
        except UnavailableError as error:
            return Availability(False, error.reason, error.remedy)
        return Availability(True)

    def capabilities(self) -> Capabilities:
        declaration = Declaration(arithmetic=Arithmetic("factored", "float32", roundings))
        operations = dict.fromkeys(("linear.qgemv", "linear.qgemm"), declaration)
        integer = Arithmetic("integer", "float32", integer_roundings)
        form = {"block": (SEGMENT,), "mantissa": (8,), "exponent": (8,)}
        operations["linear.qgemm_bfp"] = Declaration(form, integer)
        operations |= DecodeOperations.declared | RoutingOperations.declared | dict(DECLARED) | Casts.declared
        return Capabilities(operations, concurrent=True, details=self._details(), profiles=("lowbit-1.1/qgemv-4",))

    def _details(self) -> dict[str, str]:
        """Details for reports; none if the backend is unavailable."""
        try:
            table = processor.choose_table(self._isa)
            threads = processor.choose_threads(self._threads)
            kernels = outcomes.described(table)
            return {
                "instruction set": table.name,
                "threads": str(threads),
                "cppyy": version("cppyy"),
                "kernels": kernels,
            }
        except (UnavailableError, PackageNotFoundError, ImportError):
            return {}

    def _prepare(self, matrix: QuantizedMatrix) -> PreparedLinear:
        table = processor.choose_table(self._isa)  # before anything is compiled
        return CppyyLinear(matrix, layout_for(matrix, table), table, self._require_pool())

    def compiled(self, decoder: Decoder) -> AnyDecoder:
        parts = StepParts(self.name, decoder, self._table, self._decode, self._require_pool())
        rows = described(decoder.embedding, decoder.config)
        return CompiledDecoder(decoder.config, decoder.embedding, rows, parts)

    def timed(self, decoder: Decoder) -> TimedStep:
        """A compiled step that adds up the seconds of its parts.

        Raises:
            NotDeclaredError, UnavailableError: as `compiled`.
        """
        threads = processor.choose_threads(self._threads)
        return TimedStep(
            decoder, StepParts(self.name, decoder, self._table, self._decode, self._require_pool(), threads)
        )

    def kept_step(self, request: StepRequest) -> tuple[AnyDecoder, Mapping[str, Any]] | None:
        table, threads = processor.choose_table(self._isa), processor.choose_threads(self._threads)
        recorded = CppyyBackend(table.name, threads=1)

        def make() -> Made:
            decoder, facts = request.make(recorded)
            parts = StepParts(self.name, decoder, table, recorded._decode, recorded._require_pool())
            return Made(decoder.embedding, parts, facts)

        found = kept(Wanted(request.identity, request.config, table, request.step, make), threads)
        if found is None:
            return None
        decoder, parts, facts = found
        with preparing:
            if self._closed:
                raise_failure(3)
            self._kept.add(parts)
        return decoder, facts

    def _require_pool(self) -> Pool:
        """The pool of this backend, created when it is first needed."""
        threads = processor.choose_threads(self._threads)
        with preparing:
            if self._closed:
                raise_failure(3)
            if self._pool is None:
                self._pool = Pool(threads)
            return self._pool

    def close(self) -> None:
        """End the threads. Matrices prepared by this backend can then no longer be used."""
        with preparing:
            self._closed, pool, kept = True, self._pool, list(self._kept)
        for owner in kept:
            owner.stop()
        if pool is not None:
            pool.stop()
