"""A model of Mixtral-8x7B's shape on a device, with numbers that mean nothing: it costs what the real one costs.

All of a layer but its experts is the model's own (`lowbit_cuda.model.block`), and so are the kernels of an expert. The
weights are random codes, the same in every layer but each in its own place, so that no cache helps. Which experts run
is not up to the gate: its scores are computed and waited for as always, and then a recording is followed.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from gpu.gemv import random_parts
from lowbit.arrays import U8
from lowbit.formats.checkpoint.random import SHAPES
from lowbit.model.config import LlamaConfig
from lowbit.model.weights import GatedWeights, LayerWeights, SparseWeights
from lowbit.moe.offload import Arrangement, Request
from lowbit_cuda.engine.engine import Engine
from lowbit_cuda.kernels.layouts import DenseLayout, MatrixLayout
from lowbit_cuda.kernels.table import kernel
from lowbit_cuda.model.arena import Arena
from lowbit_cuda.model.block import DeviceBlock, Gate, norm
from lowbit_cuda.model.matrices import ExpertLayout, multiply
from lowbit_cuda.model.workspace import Sizes, allocate
from lowbit_cuda.port import DevicePort, Graph, Span, Stream

GROUP = 64
"""Weights of a group, in experts and attention; scales and minima are float16."""
ATTENTION_BITS = 4
SLOTS, BUFFERS = 4, 4
"""The paper's k for the A100, and b (§3.3)."""


def mixtral(context: int, layers: int = 32) -> LlamaConfig:
    """Mixtral-8x7B, with a shorter context."""
    return replace(SHAPES["mixtral-8x7b"], layers=layers, context=context)


def expert_layout(config: LlamaConfig, bits: int) -> ExpertLayout:
    """Three matrices of so many bits."""
    first = MatrixLayout(bits, config.hidden, config.feed_forward, GROUP)
    return ExpertLayout(first, first, MatrixLayout(bits, config.feed_forward, config.hidden, GROUP))


def random_matrix(layout: MatrixLayout, random: np.random.Generator) -> U8:
    """The bytes of some matrix."""
    return np.concatenate([part.view(np.uint8) for part in random_parts(layout, random)])


def layer_of(config: LlamaConfig, expert: GatedWeights, random: np.random.Generator) -> LayerWeights:
    """A layer of random numbers, whose experts are all the same."""
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes = (config.hidden, queries), (config.hidden, keys), (config.hidden, keys), (queries, config.hidden)
    layouts = [MatrixLayout(ATTENTION_BITS, *shape, GROUP) for shape in shapes]
    query, key, value, output = (layout.restore(random_matrix(layout, random)) for layout in layouts)
    gain = np.ones(config.hidden, np.float32)
    assert config.routing is not None
    router = random.standard_normal((config.hidden, config.routing.experts)).astype(np.float32)
    sparse = SparseWeights(router, (expert,) * config.routing.experts)
    return LayerWeights(gain, query, key, value, output, gain, sparse)


class Shaped:
    """The model.

    Attributes:
        engine: what brings its experts; all are there.
        expert_bytes: of one.
    """

    def __init__(self, port: DevicePort, config: LlamaConfig, bits: int) -> None:
        random = np.random.default_rng(3)
        self._config, self._arena, self._layout = config, Arena(port, "model"), expert_layout(config, bits)
        routing, arena = config.routing, self._arena
        assert routing is not None
        self.expert_bytes = self._layout.nbytes
        self._work = allocate(arena, Sizes(config, config.context, "float16", self._layout))
        parts = self._layout.gate, self._layout.up, self._layout.down
        data = np.concatenate([random_matrix(part, random) for part in parts])  # type: ignore[arg-type]  # all are quantised
        layer = layer_of(config, self._layout.restore(data), random)
        assert isinstance(layer.feed_forward, SparseWeights)
        self._blocks = [DeviceBlock(arena, config, number, layer, "float16") for number in range(config.layers)]
        both = DenseLayout(config.hidden, 2 * routing.experts)
        routers = arena.store(both.apply(np.hstack([layer.feed_forward.router] * 2)), "routers")
        for block in self._blocks:
            block.gate = Gate(routers, both.columns, inputs=False)
        assert layer.attention_norm is not None
        self._norm = arena.store(layer.attention_norm, "last norm")
        self._head = DenseLayout(config.hidden, config.vocabulary, "float16")
        self._packed_head = arena.store(np.zeros(self._head.nbytes, np.uint8), "head")
        arena.drop_upload()
        self._graphs: dict[int, Graph] = {}
        arrangement = Arrangement(config.layers, routing.experts, SLOTS, BUFFERS, "mirror")
        self.engine = Engine(port, arrangement, self.expert_bytes, arena.stream, prefetch="on", record=False)
        for number in range(config.layers):
            for expert in range(routing.experts):
                self.engine.fill(number, expert, data)

    def token(self, position: int, requests: Sequence[Request], chosen: Sequence[Sequence[int]]) -> float:
        """One token, as `mixtral.following` asks for it; answers with its seconds on the host's clock."""
        port, work, arena = self._arena.port, self._work, self._arena
        began = port.now()
        port.write(work.host["x"], np.ones(self._config.hidden, np.float32))
        port.write(work.host["position"], np.array([position], np.int32))
        for request, experts in zip(requests, chosen, strict=True):
            self._give(request.layer)
            arena.wait()
            port.read(work.host["scores"], np.float32, (16,))
            port.write(work.host["probabilities"], np.array([0.5, 0.5], np.float32))
            self.engine.run(request.layer, request.needed, request.guesses, partial(self._expert, tuple(experts)))
        self._give(self._config.layers)
        arena.wait()
        port.read(work.host["logits"], np.float32, (self._config.vocabulary,))
        return port.now() - began

    def _expert(self, chosen: tuple[int, ...], expert: int, packed: Span, stream: Stream) -> None:
        if expert in chosen:
            place = self._work.rows("answers", 1, self._config.hidden, first=chosen.index(expert))
            self._layout.run(self._arena, packed, place, self._work["normed"], self._work["inner"], None, 1)

    def _give(self, stage: int) -> None:
        if stage not in self._graphs:
            with self._arena.port.capture(self._arena.stream) as captured:
                self._enqueue(stage)
            self._graphs[stage] = captured()
        self._arena.port.replay(self._graphs[stage], self._arena.stream)

    def _enqueue(self, stage: int) -> None:
        arena, work, hidden = self._arena, self._work, self._config.hidden
        if stage == 0:
            arena.copy(work["position"], work.host["position"])
            arena.copy(work.rows("x", 1, hidden), work.host["x"])
        else:
            sized, weights = {"tokens": 1, "experts": 2, "columns": hidden}, work.host["probabilities"]
            arena.launch(kernel("combine"), y=work["x"], answers=work["answers"], weights=weights, **sized)
        if stage < len(self._blocks):
            self._blocks[stage].enqueue(work, 1)
            return
        norm(arena, self._config, work, self._norm, 1)
        multiply(arena, self._head, self._packed_head, work["logits"], work["normed"], 1)
        arena.copy(work.host["logits"], work.rows("logits", 1, self._config.vocabulary))

    def close(self) -> None:
        """Give everything back."""
        self._arena.port.finish()
        self.engine.close()
        self._arena.close()
