"""The C++ of one decoder's step: its model, and tables of the products that a call may need."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any

import numpy as np

from lowbit.arrays import U64, Array
from lowbit.attention.rope import half_split
from lowbit.errors import NotDeclaredError
from lowbit.model.caches import CACHES, Keys
from lowbit.model.decoder import Decoder
from lowbit.runtime.linears import BackendLinear
from lowbit_cppyy.codegen.elementwise import pass_kernel
from lowbit_cppyy.codegen.isa import InstructionSet
from lowbit_cppyy.runtime.calls import BYTES, DOUBLES, FLOATS, KernelSet
from lowbit_cppyy.runtime.compiler import FIRST_CALLS, Made, Pool, preparing, runtime
from lowbit_cppyy.runtime.decode_operations import DecodeKernels
from lowbit_cppyy.runtime.products import Product
from lowbit_cppyy.step.decoder import MOST_FREQUENCIES
from lowbit_cppyy.step.source import StepSource

GATES = {"silu": "gated", "gelu": "gelu_gated", "clamped": "clamped_gated"}
KEPT: Mapping[Keys, tuple[int, int]] = MappingProxyType({"float32": (0, 0), "float16": (1, 1), "bfp12": (3, 1)})
"""How keys and values are stored, as ``cpp/cache.h`` numbers it: a `Type`, or BFP12."""


class StepParts:
    """The arguments of a decoder's step, made from a decoder that runs the same step one operation at a time.

    Attributes:
        source: the C++ of the step.
        keys: the number format of keys and values.
        model: its address.
        run: `run_step` of ``cpp/step.h``.
        run_on, run_batch: likewise.
        score: `score_rows`.
        choose: `choose_token` of ``cpp/sampling.h``.
    """

    def __init__(
        self,
        backend: str,
        decoder: Decoder,
        table: InstructionSet,
        kernels: DecodeKernels,
        pool: Pool,
        timed: int = 0,
    ) -> None:
        """Compile the step of a decoder; `timed` as in `StepSource`.

        Raises:
            NotDeclaredError: the step has a part that is not compiled.
            UnavailableError: it cannot be compiled here.
        """
        self.keys = _keys_of(backend, decoder)
        self.source = StepSource(decoder.step, table, timed)
        if (kinds := len(self.source.frequencies)) > MOST_FREQUENCIES:
            raise NotDeclaredError(backend, f"a compiled step with {kinds} kinds of rotations")
        if len({None if each.scaling is None else each.scaling.channels for each in self.source.frequencies}) > 1:
            raise NotDeclaredError(backend, "a compiled step with rotations of several numbers of channels")
        matrices = [
            _linear(backend, block.linears[name])
            for program, block in zip(decoder.step.blocks, decoder.blocks, strict=True)
            for name in self.source.parameters(program)[0]
        ]
        self._matrices = [*matrices, _linear(backend, decoder.scores.linears["head"])]
        if len({product_of(each, 1, exact=False).panel for each in self._matrices}) > 1:
            raise NotDeclaredError(backend, "compiled steps with panels of several sizes")
        self._products: dict[tuple[int, bool], _Products] = {}
        self.run, self.run_on, self.run_batch, self.score, self.choose = _functions()
        self._model = _Model(decoder, self.source, KEPT[self.keys], table, kernels, pool)
        self.model = self._model.handle
        self.table_of(1)

    def address(self, array: Array) -> int:
        """The address of an array for the step; the caller keeps the array alive."""
        return runtime().address(array)

    def written(self, arrays: Sequence[Array]) -> AbstractContextManager[U64]:
        """The addresses of arrays that the step writes to, valid while the context lasts."""
        return runtime().written(arrays)

    def table_of(self, purpose: int, *, exact: bool = False) -> int:
        """The address of the products for calls with a number of tokens; `exact` selects kernels without powers of
        two."""
        if (purpose, exact) not in self._products:
            with preparing:
                products = [product_of(each, purpose, exact=exact) for each in self._matrices]
                self._products[purpose, exact] = _Products(products)
        return self._products[purpose, exact].handle


class _Products(Made):
    """A table of products."""

    def __init__(self, products: Sequence[Product]) -> None:
        layouts: dict[bytes, int] = {}
        numbers = [
            [
                each.linear,
                each.route.handle,
                each.stored,
                each.cast,
                layouts.setdefault(each.route.laid_out, len(layouts)) + (each.cast + 2) * len(products),
                each.nbytes,
            ]
            for each in products
        ]
        super().__init__("products", np.array(numbers, np.int64).reshape(-1), len(products), kept=products)


class _Model(Made):
    """A step and its vectors."""

    def __init__(
        self,
        decoder: Decoder,
        source: StepSource,
        kept: tuple[int, int],
        table: InstructionSet,
        kernels: DecodeKernels,
        pool: Pool,
    ) -> None:
        compiled, config = runtime(), decoder.config
        with preparing:
            passes = [("squares", "normed"), (GATES[config.activation],), ("rotated",)]
            sets = [KernelSet([pass_kernel(name, table) for name in names], pool) for names in passes]
            step = compiled.kernel(source)
        layout = source.frequencies[0].layout(config.head_dim) if source.frequencies else half_split(config.head_dim)
        partners = np.ascontiguousarray(layout.partner, np.int64)
        vectors = [
            np.ascontiguousarray(block.parameters[name], np.float32)
            for program, block in zip(decoder.step.blocks, decoder.blocks, strict=True)
            for name in source.parameters(program)[1]
        ] + [decoder.norm.parameters["norm"]]
        handles = [pool.handle, step, *(each.handle for each in sets), kernels.heads(config.head_dim)]
        places = [compiled.address(partners), *(compiled.address(vector) for vector in vectors)]
        addresses = np.array([*handles, *places], np.uint64)
        ends = {line.kind: line for line in decoder.step.last}
        factor = ends["scale"].setting("factor") if "scale" in ends else 1
        bits = [int(np.float32(number).view(np.uint32)) for number in (factor, config.logit_cap or 0)]
        routing = (0, 0) if config.routing is None else (config.routing.experts, config.routing.top_k)
        heads = config.head_dim, config.heads, config.kv_heads
        sizes = [config.hidden, *heads, source.value_columns, *kept, *bits, *routing]
        used = sets, partners, vectors, pool, kernels
        super().__init__("model", np.array(sizes, np.int64), addresses, len(vectors), kept=used)


def _functions() -> tuple[Callable[..., int], ...]:
    """The functions of ``cpp/step.h`` that run steps, compiled with their cppyy wrappers at the first request."""
    compiled = runtime()
    bridge: Any = compiled.bridge

    def called() -> None:
        numbers, addresses = np.zeros(11, np.int64), np.zeros(8, np.uint64)
        arrays = FLOATS, addresses, FLOATS
        for function in (bridge.run_step, bridge.run_on, bridge.run_batch, bridge.score_rows, bridge.choose_token):
            function.__release_gil__ = True
        for _ in range(FIRST_CALLS):
            bridge.destroy_products(bridge.create_products(numbers, 0))
            bridge.destroy_model(bridge.create_model(numbers, addresses, 0))
            caches = BYTES.view(np.uint8), BYTES.view(np.uint8)
            bridge.run_step(0, addresses, 0, *arrays, 0, 0, *caches, FLOATS, 0)
            choosing = DOUBLES, addresses, numbers, numbers, 0, 0, 0, numbers
            bridge.run_on(0, addresses, 0, *arrays, numbers, numbers, addresses, addresses, FLOATS, 0, *choosing)
            bridge.run_batch(0, addresses, 0, *arrays, numbers, numbers, addresses, addresses)
            bridge.score_rows(0, addresses, 0, FLOATS, FLOATS)
            bridge.choose_token(FLOATS, 0, DOUBLES, 0, addresses)

    compiled.include("step.h", called)
    return bridge.run_step, bridge.run_on, bridge.run_batch, bridge.score_rows, bridge.choose_token


def _keys_of(backend: str, decoder: Decoder) -> Keys:
    """The number format of keys and values. Refuses a decoder whose elementwise operations are not the backend's."""
    for keys, cache in CACHES.items():
        if decoder.ops.dtype == np.float32 and decoder.ops.cache is cache:
            return keys
    raise NotDeclaredError(backend, "compiled steps with elementwise operations of another")


def product_of(linear: BackendLinear, tokens: int, *, exact: bool) -> Product:
    """The product of a linear layer of this backend for a number of tokens."""
    prepared: Any = linear.prepared
    product: Product = prepared.product(tokens, linear.activations, exact=exact)
    return product


def _linear(backend: str, linear: object) -> BackendLinear:
    if not isinstance(linear, BackendLinear):
        raise NotDeclaredError(backend, "compiled steps with matrices that numpy multiplies by")
    return linear
