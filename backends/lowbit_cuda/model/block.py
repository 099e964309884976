"""One block of the decoder on a device: everything but its experts.

The sequence of kernels is that of the chapter `lowbit.model.block`, and where a sequence of launches is long for a
single token, it is captured once and run again: nothing in it but memory changes from token to token, because the
position of a token is read from the device's memory.

A sparse block ends with the scores of its gate, and with those that the next block's gate would give for the same
input, from which the next block's experts are guessed (MoE offloading §3.2; errata M5). Both come of one product: the
routers of all layers lie one after the other.

Source: the chapters `lowbit.model.block`, `lowbit.attention.rope`, `lowbit.attention.attention`; MoE offloading §3.2.
"""

from dataclasses import dataclass

from lowbit.backend.whole_model import Keys
from lowbit.model.config import LlamaConfig
from lowbit.model.weights import GatedWeights, LayerWeights
from lowbit_cuda.kernels.table import kernel
from lowbit_cuda.model.arena import Arena
from lowbit_cuda.model.matrices import ExpertLayout, Resident
from lowbit_cuda.model.workspace import Workspace
from lowbit_cuda.port import Number, Span


@dataclass(frozen=True)
class Gate:
    """What a sparse block ends with.

    Attributes:
        routers: of this block and, if columns are for two, of the next: float32, column by column.
        columns: how many: E, or 2 E.
        inputs: whether what the gate was given is wanted on the host too.
    """

    routers: Span
    columns: int
    inputs: bool


class DenseFeedForward:
    """The feed-forward part of a dense block."""

    def __init__(self, arena: Arena, weights: GatedWeights, what: str) -> None:
        self._arena, self._layout = arena, ExpertLayout.of(weights)
        arena.load(*self._layout.kernels())
        self._packed = arena.store(self._layout.apply(weights), what)

    def enqueue(self, work: Workspace, tokens: int) -> None:
        """Add its answer to the stream."""
        spare = work.device.get("spare")
        self._layout.run(self._arena, self._packed, work["out"], work["normed"], work["inner"], spare, tokens)
        count = tokens * work.sizes.config.hidden
        self._arena.launch(kernel("add"), y=work["x"], x=work["out"], count=count)


class DeviceBlock:
    """The weights of one block that stay on the device, and what is launched for them."""

    def __init__(self, arena: Arena, config: LlamaConfig, number: int, layer: LayerWeights, keys: Keys) -> None:
        """Bring its weights to the device, and its kernels."""
        self._arena, self._config, self._number = arena, config, number
        self._plain = "float32" if keys == "float32" else "float16"
        self._appends = {"keys": kernel("append", keys=keys), "values": kernel("append", keys=self._plain)}
        self._attends = kernel("attend", keys=keys, values=self._plain)
        arena.load(*self._appends.values(), self._attends)
        arena.load(kernel("rms_norm"), kernel("rope"), kernel("add"), kernel("dense", weights="float32"))
        self._attention_norm = arena.store(layer.attention_norm, f"norm of layer {number}")
        self._feed_forward_norm = arena.store(layer.feed_forward_norm, f"norm of layer {number}")
        self._query, self._key, self._value, self._output = (
            Resident(arena, matrix, f"{name} of layer {number}")
            for name, matrix in zip(
                ("query", "key", "value", "output"), (layer.query, layer.key, layer.value, layer.output), strict=True
            )
        )
        self._dense = None
        if isinstance(layer.feed_forward, GatedWeights):
            self._dense = DenseFeedForward(arena, layer.feed_forward, f"feed-forward part of layer {number}")
        self._keys = keys
        self.gate: Gate | None = None

    def enqueue(self, work: Workspace, tokens: int) -> None:
        """Everything up to the scores of its gate; of a dense block, everything."""
        self._norm(work, self._attention_norm, tokens)
        self._attention(work, tokens)
        self._norm(work, self._feed_forward_norm, tokens)
        if self._dense is not None:
            self._dense.enqueue(work, tokens)
        if self.gate is not None:
            self._scores(work, self.gate, tokens)

    def _norm(self, work: Workspace, gain: Span, tokens: int) -> None:
        norm(self._arena, self._config, work, gain, tokens)

    def _attention(self, work: Workspace, tokens: int) -> None:
        """Read the past, after adding the tokens to it; and add what was read to the stream."""
        config, arena = self._config, self._arena
        for linear, name in ((self._query, "queries"), (self._key, "keys"), (self._value, "values")):
            linear(work[name], work["normed"], tokens)
        self._rotate(work, tokens)
        self._attend(work, tokens)
        self._output(work["out"], work["mixed"], tokens)
        arena.launch(kernel("add"), y=work["x"], x=work["out"], count=tokens * config.hidden)

    def _rotate(self, work: Workspace, tokens: int) -> None:
        """Turn queries and keys by their positions."""
        for name, heads in (("queries", self._config.heads), ("keys", self._config.kv_heads)):
            self._arena.launch(
                kernel("rope"),
                x=work[name],
                table=work.tables[self._config.layer_rope_base(self._number)],
                position=work["position"],
                tokens=tokens,
                heads=heads,
                head_dim=self._config.head_dim,
                context=work.sizes.context,
            )

    def _attend(self, work: Workspace, tokens: int) -> None:
        """Add keys and values to the cache, and read it."""
        config, cache, launch = self._config, work.caches[self._number], self._arena.launch
        sized: dict[str, Span | Number] = {
            "position": work["position"],
            "tokens": tokens,
            "kv_heads": config.kv_heads,
            "head_dim": config.head_dim,
            "capacity": work.sizes.context,
        }
        exponents: dict[str, Span | Number] = {}
        if self._keys == "bfp12":
            exponents["exponents"] = cache["exponents"]
        launch(self._appends["keys"], cache=cache["keys"], x=work["keys"], **exponents, **sized)
        launch(self._appends["values"], cache=cache["values"], x=work["values"], **sized)
        launch(
            self._attends,
            y=work["mixed"],
            queries=work["queries"],
            keys=cache["keys"],
            values=cache["values"],
            heads=config.heads,
            window=config.layer_window(self._number) or 0,
            **exponents,
            **sized,
        )

    def _scores(self, work: Workspace, gate: Gate, tokens: int) -> None:
        """Straight to the host: a copy would wait behind an expert that is being copied back."""
        hidden = self._config.hidden
        self._arena.launch(
            kernel("dense", weights="float32"),
            y=work.host["scores"],
            x=work["normed"],
            weights=gate.routers,
            tokens=tokens,
            rows=hidden,
            columns=gate.columns,
        )
        if gate.inputs:
            self._arena.copy(work.host["normed"], work.rows("normed", tokens, hidden))


def norm(arena: Arena, config: LlamaConfig, work: Workspace, gain: Span, tokens: int) -> None:
    """The stream, normed, with a gain."""
    arena.launch(
        kernel("rms_norm"),
        y=work["normed"],
        x=work["x"],
        gain=gain,
        tokens=tokens,
        columns=config.hidden,
        epsilon=config.rms_epsilon,
    )
