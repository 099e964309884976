"""Loading: copying a model's weights to where they are used, one layer at a time.

Resident weights go to the device and experts to the engine. Only the embedding stays on the host: a token
reads one row of it. The number of slots is computed from the first layer (`budget`), because in swap mode the host has
no place for the experts that start on the device.
"""

from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from functools import reduce

from lowbit.arrays import F32
from lowbit.backend import load as load_backend
from lowbit.backend.whole_model import DeviceSettings
from lowbit.errors import ArgumentError, NotDeclaredError
from lowbit.model.caches import Keys
from lowbit.model.config import LlamaConfig
from lowbit.model.decoder import Rows
from lowbit.model.step import Step
from lowbit.model.weights import NORMS, GatedWeights, LayeredWeights, LayerWeights, Progress, SparseWeights
from lowbit.moe.offload import Arrangement
from lowbit_cuda.engine.cost import Rates
from lowbit_cuda.engine.engine import Engine
from lowbit_cuda.kernels.attention import BFP_BLOCK, MOST_HEAD_DIM
from lowbit_cuda.kernels.layouts import DenseLayout
from lowbit_cuda.model.arena import Arena, charged
from lowbit_cuda.model.block import DeviceBlock, Gate
from lowbit_cuda.model.budget import Need
from lowbit_cuda.model.cold import ColdExperts, measure
from lowbit_cuda.model.matrices import ExpertLayout, Layout, Resident, layout_of
from lowbit_cuda.model.sparse import Sparse
from lowbit_cuda.model.workspace import FLOAT, Sizes, Workspace, allocate
from lowbit_cuda.port import Span

BACKEND = "cuda"
"""The name of this backend in messages."""


@dataclass(frozen=True, eq=False)
class Loaded:
    """A model on a device.

    Attributes:
        config: its configuration, with the requested context.
        embedding: vocabulary × hidden; gives the rows of tokens as float32.
        blocks: its blocks, in order.
        norm: the gain of the last norm.
        head: the matrix that computes logits.
        work: the workspace.
        engine: the offload engine; None for a dense model.
        sparse: the sparse part of all blocks; None for a dense model.
    """

    config: LlamaConfig
    embedding: Rows
    blocks: tuple[DeviceBlock, ...]
    norm: Span
    head: Resident
    work: Workspace
    engine: Engine | None
    sparse: Sparse | None


def check_model(config: LlamaConfig, keys: Keys) -> None:
    """Refuse a model that the kernels do not support with keys of this type.

    Raises:
        NotDeclaredError: the model is not supported; the message says why.
    """
    if config.activation != "silu":
        raise NotDeclaredError(BACKEND, "whole models", f"gates that go through {config.activation}")
    if [line.kind for line in Step(config, ()).last] != ["norm", "product"] or config.shaped:
        raise NotDeclaredError(BACKEND, "whole models", "scores or logits with a soft cap, a factor or sinks")
    if config.residual_scale != 1:
        raise NotDeclaredError(BACKEND, "whole models", "a factor of what the parts of a block add")
    if any(each.scaling is not None and each.scaling.channels is not None for each in config.frequencies):
        raise NotDeclaredError(BACKEND, "whole models", "rotations of a part of each head")
    for name in ("hidden", "feed_forward"):
        if getattr(config, name) % 8:
            raise NotDeclaredError(
                BACKEND, "whole models", f"{name} {getattr(config, name)}, which is not a multiple of 8"
            )
    unit = BFP_BLOCK if keys == "bfp12" else 4
    if config.head_dim % unit or config.head_dim > MOST_HEAD_DIM:
        detail = f"head_dim {config.head_dim} with keys in {keys}: not a multiple of {unit} up to {MOST_HEAD_DIM}"
        raise NotDeclaredError(BACKEND, "whole models", detail)


def check_layer(config: LlamaConfig, layer: LayerWeights) -> None:
    """Refuse a layer that is not supported, or that does not match the configuration."""
    check_norms([name for name in NORMS if getattr(layer, name) is not None])
    supported = {*NORMS, "query", "key", "value", "output", "feed_forward", "program"}
    for field in fields(layer):
        if field.name not in supported and getattr(layer, field.name) is not None:
            raise NotDeclaredError(BACKEND, "whole models", f"layers with a {field.name}")
    sparse = isinstance(layer.feed_forward, SparseWeights)
    if sparse != (config.routing is not None):
        raise ArgumentError("feed_forward", "sparse" if sparse else "dense", "the kind that the configuration says")


def check_norms(vectors: Collection[str]) -> None:
    """Refuse a layer without a norm in front of its feed-forward part, which reads a buffer that only a norm writes.

    Raises:
        NotDeclaredError: it lacks one.
    """
    if "feed_forward_norm" not in vectors:
        raise NotDeclaredError(BACKEND, "whole models", "layers without a feed_forward_norm")


class Loader:
    """Loads one model onto one device."""

    def __init__(self, arena: Arena, weights: LayeredWeights, settings: DeviceSettings, record: bool = False) -> None:
        check_model(weights.config, settings.keys)
        self._arena, self._weights, self._settings, self._record = arena, weights, settings, record
        own = weights.config.context
        self._config = replace(weights.config, context=min(own, settings.context or own))
        self._first: LayerWeights | None = weights.layer(0)
        check_layer(self._config, self._first)
        self._expert = expert_layout(self._first)
        self._sizes = Sizes(self._config, self._config.context, settings.keys, self._expert)
        self._engine: Engine | None = None

    def load(self, closing: ExitStack, progress: Progress | None = None) -> Loaded:
        """Load the model.

        Args:
            closing: closes the engine with the model, also after a failure.
            progress: called after each layer.

        Raises:
            ArgumentError: the budget is too small, or layers are stored differently.
            DeviceError: the device failed.
        """
        arena, config, head = self._arena, self._config, self._weights.head
        slots = self._need(layout_of(head)).slots(arena.port.budget - arena.port.used)
        work = allocate(arena, self._sizes)
        last, norm = Resident(arena, head, "head"), arena.store(self._weights.norm, "last norm")
        sparse = None
        if config.routing:
            cold, rates = self._cold(work)
            arrangement = Arrangement(
                config.layers, config.routing.experts, slots, self._settings.buffers, self._settings.mode
            )
            self._engine = Engine(
                arena.port,
                arrangement,
                self._expert.nbytes,
                arena.stream,
                prefetch=self._settings.prefetch,
                rates=rates,
                record=self._record,
            )
            closing.callback(self._engine.close)
            sparse = Sparse(arena, config, self._expert, self._engine, cold)
        blocks = self._blocks(progress)
        arena.drop_upload()
        if self._engine is not None:
            self._engine.reset()
        return Loaded(config, self._weights.embedding, blocks, norm, last, work, self._engine, sparse)

    def _need(self, head: Layout) -> Need:
        """What the model needs if all layers equal the first."""
        config, first = self._config, self._first
        assert first is not None
        gain = FLOAT * config.hidden
        attention = [layout_of(matrix).nbytes for matrix in (first.query, first.key, first.value, first.output)]
        dense = [self._expert.nbytes] if config.routing is None else []
        layer = charged([gain, gain, *attention, *dense])
        resident = self._sizes.total + config.layers * layer + charged([head.nbytes, gain, *self._router_bytes()])
        if config.routing is None:
            return Need(resident, 0, 0, 0, 0)
        return Need(resident, config.layers, config.routing.experts, self._expert.nbytes, self._settings.buffers)

    def _router_bytes(self) -> list[int]:
        """Bytes of all routers, which are stored as one matrix."""
        if self._config.routing is None:
            return []
        return [self._config.layers * DenseLayout(self._config.hidden, self._config.routing.experts).nbytes]

    def _cold(self, work: Workspace) -> tuple[ColdExperts | None, Rates | None]:
        """The backend that runs experts on the host, and its speed, measured before slots take all memory."""
        if self._settings.cold_experts is None:
            return None, None
        assert self._first is not None
        cold = ColdExperts(load_backend(self._settings.cold_experts), self._expert)
        return cold, measure(self._arena, work, cold, self._expert.apply(experts_of(self._first)[0]))

    def _blocks(self, progress: Progress | None) -> tuple[DeviceBlock, ...]:
        config, arena = self._config, self._arena
        routers = [arena.allocate(nbytes, "routers") for nbytes in self._router_bytes()]
        blocks = []
        for number in range(config.layers):
            layer = self._first or self._weights.layer(number)
            self._first = None  # keeps one layer at a time in memory
            check_layer(config, layer)
            block = DeviceBlock(arena, config, number, layer, self._settings.keys)
            if isinstance(layer.feed_forward, SparseWeights):
                block.gate = self._gate(number, layer.feed_forward.router, routers[0])
                self._fill(number, layer.feed_forward)
            blocks.append(block)
            if progress is not None:
                progress(number + 1, config.layers)
        return tuple(blocks)

    def _gate(self, number: int, router: F32, routers: Span) -> Gate:
        """Copy a router to the device; the next layer's router follows it in memory."""
        layout = DenseLayout(*router.shape)
        guessing = self._settings.prefetch != "off" and number + 1 < self._config.layers
        first = number * layout.nbytes
        self._arena.upload(routers.part(first, layout.nbytes), layout.apply(router))
        count = 2 if guessing else 1
        own = routers.part(first, count * layout.nbytes)
        return Gate(own, count * layout.columns, inputs=self._settings.cold_experts is not None)

    def _fill(self, number: int, part: SparseWeights) -> None:
        assert self._engine is not None
        for expert, weights in enumerate(part.experts):
            self._engine.fill(number, expert, self._expert.apply(weights))


def experts_of(layer: LayerWeights) -> tuple[GatedWeights, ...]:
    """The experts of a layer; for a dense layer, its feed-forward part."""
    part = layer.feed_forward
    return part.experts if isinstance(part, SparseWeights) else (part,)


def expert_layout(layer: LayerWeights) -> ExpertLayout:
    """The layout that holds all experts of a layer."""
    return reduce(ExpertLayout.wider, map(ExpertLayout.of, experts_of(layer)))
