"""One decoder block on a device, without its experts.

The kernels are launched in the order of the chapter `lowbit.model.block`. For a single token the launches are captured
once and replayed: only memory contents change from token to token, because kernels read the token's position from
device memory.

A sparse block ends with the scores of its gate and with those of the next block's gate for the same input, which
predict the next block's experts (MoE offloading §3.2; errata M5). Both are one product: the routers of all layers are
stored one after another.

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
    """The gate at the end of a sparse block.

    Attributes:
        routers: the router of this block and, if there are 2 E columns, of the next: float32, column by column.
        columns: E or 2 E.
        inputs: whether the gate's input is also copied to the host.
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
        """Issue the kernels, which add their result to the residual stream."""
        spare = work.device.get("spare")
        self._layout.run(self._arena, self._packed, work["out"], work["normed"], work["inner"], spare, tokens)
        count = tokens * work.sizes.config.hidden
        self._arena.launch(kernel("add"), y=work["x"], x=work["out"], count=count)


class DeviceBlock:
    """One decoder block on a device: its resident weights and its launches."""

    def __init__(self, arena: Arena, config: LlamaConfig, number: int, layer: LayerWeights, keys: Keys) -> None:
        """Copy its weights to the device, and load its kernels."""
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
        """Issue everything up to the gate's scores; for a dense block, everything."""
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
        """Append the tokens to the cache, attend, and add the result to the residual stream."""
        config, arena = self._config, self._arena
        for linear, name in ((self._query, "queries"), (self._key, "keys"), (self._value, "values")):
            linear(work[name], work["normed"], tokens)
        self._rotate(work, tokens)
        self._attend(work, tokens)
        self._output(work["out"], work["mixed"], tokens)
        arena.launch(kernel("add"), y=work["x"], x=work["out"], count=tokens * config.hidden)

    def _rotate(self, work: Workspace, tokens: int) -> None:
        """Rotate queries and keys by their positions."""
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
        """Append keys and values to the cache, and attend."""
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
        """Write scores directly to the host: a copy would wait behind an expert that is being copied back."""
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
    """Issue the norm of the residual stream, with a gain."""
    arena.launch(
        kernel("rms_norm"),
        y=work["normed"],
        x=work["x"],
        gain=gain,
        tokens=tokens,
        columns=config.hidden,
        epsilon=config.rms_epsilon,
    )
