"""The shape of a decoder: the numbers and choices that define its structure.

They are Llama's, from which the others descend. Each change in a descendant is an option with Llama's choice as its
default, so one decoder class serves them all:

========= ==========================================================================================================
Mixtral   experts (`routing`), in some versions a window
Llama 3.1 scaled rotary frequencies
Phi-3     the same, and a rotation of a part of each head
Qwen2     nothing here; its biases are weights, and so are the norms of heads in Qwen3
Gemma 3   a window in five layers of six and a rotary base for them, a GELU in the gates, a scaled embedding
SmolLM3   no rotation in every fourth layer
Gemma 2   a soft cap of scores and of logits, and a factor of scores
GPT-OSS   a sink beside the scores of each head, biases of router and experts, a clamped gate
Granite   factors of the embedding, of scores and of what a part of a block adds, and a divisor of logits
OLMo 2    one norm for all heads; its blocks have norms after their parts and not before, which are weights
========= ==========================================================================================================

**Local and full layers.** A layer with a window is *local*: a token sees itself and the few before it, which bounds
what the layer has to keep. Every `full_every`-th layer is *full* and sees the whole sequence. Two tokens in a window
are never far apart, so local layers may rotate their channels faster than full ones, with a smaller base.

Source: Llama (arXiv 2302.13971) §2.2; Mixtral (arXiv 2401.04088) §2; Gemma 3 (arXiv 2503.19786) §2; Qwen3
(arXiv 2505.09388) §2; OLMo 2 (arXiv 2501.00656) §3; NoPE (arXiv 2305.19466), which SmolLM3 uses in every fourth layer.
"""

from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Literal, get_args

import numpy as np

from lowbit.attention.rope import Frequencies
from lowbit.attention.rope_scaling import Scaling
from lowbit.attention.shaped import MOST
from lowbit.contract.checks import check_choice, check_integer
from lowbit.errors import ArgumentError, FormatError
from lowbit.moe.routing import SOFTMAXES, Softmax

Activation = Literal["silu", "gelu", "clamped"]
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)


@dataclass(frozen=True)
class Routing:
    """How the sparse layers of a model choose among their experts (`lowbit.moe.routing`).

    Attributes:
        experts: E, the experts of a layer.
        top_k: how many of them each token runs, 1 to E.
        softmax: whether the gate's softmax comes ``before`` or ``after`` the choice.

    Raises:
        ArgumentError: a number that no model can have.
    """

    experts: int
    top_k: int
    softmax: Softmax = "after"

    def __post_init__(self) -> None:
        check_integer("experts", self.experts, least=1)
        check_integer("top_k", self.top_k, 1, self.experts)
        check_choice("softmax", self.softmax, SOFTMAXES)


@dataclass(frozen=True)
class LlamaConfig:
    """The numbers that define a decoder: Llama's, followed by the options of its descendants.

    Attributes:
        layers: how many blocks of attention and feed-forward.
        hidden: width of the residual stream.
        feed_forward: width inside the feed-forward part, or inside each expert.
        heads: H, query heads.
        kv_heads: G, key-value heads; divides `heads`.
        head_dim: d_h, channels of a head; even.
        vocabulary: number of tokens.
        context: the longest sequence the model was made for.
        rope_base: base of the rotary frequencies.
        rms_epsilon: added under the root of the norm.
        routing: how experts are chosen; None for a dense model.
        window: how many tokens a token attends to in a local layer, itself included; None if no layer is local.
        full_every: every n-th layer is full, for n = `full_every`; None if every layer is local.
        local_rope_base: base of the rotary frequencies in local layers; None for the same as in full layers.
        activation: the function that is applied to the gate of a feed-forward part.
        activation_limit: of both sides of a clamped gated unit (`lowbit.model.layers.clamped_swiglu`).
        embedding_scale: the factor of a token's row of the embedding.
        rope_scaling: of the rotary frequencies (`lowbit.attention.rope_scaling`), except those with their own base;
            None if they are not scaled.
        local_rope_scaling: of the rotary frequencies in local layers that have their own base; None likewise.
        unrotated: the layers whose queries and keys are not rotated, from 0, ascending.
        heads_normed_together: whether queries and keys are normed over all heads of a token, not head by head.
        score_scale: the factor of the attention scores; None for 1/√d_h.
        score_cap: the soft cap of these scores (`lowbit.attention.shaped`); None for none.
        sinks: whether each query head has a sink beside its scores.
        logit_cap: the soft cap of the logits; None for none.
        residual_scale: the factor of the output that each part of a block adds to the residual stream.
        logit_divisor: the divisor of the logits, before their soft cap.

    Raises:
        ArgumentError: a number that no model can have.
    """

    layers: int
    hidden: int
    feed_forward: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    context: int
    rope_base: float
    rms_epsilon: float
    routing: Routing | None = None
    window: int | None = None
    full_every: int | None = None
    local_rope_base: float | None = None
    activation: Activation = "silu"
    activation_limit: float = 7.0
    embedding_scale: float = 1.0
    rope_scaling: Scaling | None = None
    local_rope_scaling: Scaling | None = None
    unrotated: tuple[int, ...] = ()
    heads_normed_together: bool = False
    score_scale: float | None = None
    score_cap: float | None = None
    sinks: bool = False
    logit_cap: float | None = None
    residual_scale: float = 1.0
    logit_divisor: float = 1.0

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "feed_forward", "heads", "kv_heads", "head_dim", "vocabulary", "context"):
            check_integer(name, getattr(self, name), least=1)
        for name in ("window", "full_every"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), least=1)
        if self.heads % self.kv_heads != 0:
            raise ArgumentError("heads", self.heads, f"a multiple of the {self.kv_heads} key-value heads")
        if self.head_dim % 2 != 0:
            raise ArgumentError("head_dim", self.head_dim, "an even number: channels rotate in pairs")
        for name in ("rope_base", "rms_epsilon", "local_rope_base"):
            value = getattr(self, name)
            if value is not None and not (np.isfinite(value) and value > 0):
                raise ArgumentError(name, value, "a finite number above 0")
        factors = ("embedding_scale", "score_scale", "residual_scale", "logit_divisor")
        for name in ("activation_limit", "score_cap", "logit_cap", *factors):
            value = getattr(self, name)
            if value is not None and not 1 / MOST <= value <= MOST:
                raise ArgumentError(name, value, "a number from 2^-32 to 2^32, as the operations take it")
        check_choice("activation", self.activation, ACTIVATIONS)
        for name in ("rope_scaling", "local_rope_scaling"):
            scaling = getattr(self, name)
            if scaling is not None and len(scaling.factors) != self.head_dim // 2:
                allowed = f"{self.head_dim // 2}, one for each pair of channels"
                raise ArgumentError(f"number of factors in {name}", len(scaling.factors), allowed)
        if self.local_rope_scaling is not None and self.local_rope_base is None:
            raise ArgumentError("local_rope_scaling", self.local_rope_scaling, "None without local_rope_base")
        between = (-1, *self.unrotated, self.layers)
        if not all(before < after for before, after in pairwise(between)):
            raise ArgumentError("unrotated", self.unrotated, f"layers from 0 to {self.layers - 1}, ascending")

    def is_local(self, layer: int) -> bool:
        """Whether this layer, counted from 0, attends only within the window."""
        return self.window is not None and (self.full_every is None or (layer + 1) % self.full_every != 0)

    def layer_window(self, layer: int) -> int | None:
        """How many tokens a token attends to in this layer; None for all."""
        return self.window if self.is_local(layer) else None

    def layer_frequencies(self, layer: int) -> Frequencies | None:
        """The rotary frequencies of this layer; None if nothing is rotated."""
        if layer in self.unrotated:
            return None
        if self.local_rope_base is not None and self.is_local(layer):
            return Frequencies(self.local_rope_base, self.local_rope_scaling)
        return Frequencies(self.rope_base, self.rope_scaling)

    @property
    def shaped(self) -> bool:
        """Whether attention scores are anything but products of queries and keys over √d_h."""
        return self.sinks or self.score_scale is not None or self.score_cap is not None

    @property
    def frequencies(self) -> list[Frequencies]:
        """Those of all layers, each once."""
        each = map(self.layer_frequencies, range(self.layers))
        return list(dict.fromkeys(frequencies for frequencies in each if frequencies is not None))


def unusual_scale(factor: float, head_dim: int) -> float | None:
    """A factor of scores as in `LlamaConfig`: None if it is 1/√d_h.

    >>> unusual_scale(0.25, head_dim=16), unusual_scale(0.25, head_dim=8)
    (None, 0.25)
    """
    return None if factor == max(1, head_dim) ** -0.5 else factor


def differing(one: LlamaConfig, other: LlamaConfig) -> list[str]:
    """The names of the fields in which two configurations differ."""
    return [each.name for each in fields(LlamaConfig) if getattr(one, each.name) != getattr(other, each.name)]


def check_meant(name: str, found: LlamaConfig, meant: LlamaConfig) -> None:
    """Refuse a model on this machine that is not the intended one.

    Args:
        name: of the file or directory.
        found: the shape of the model on this machine.
        meant: that of the model on the machine that started the command.

    Raises:
        FormatError: they differ.
    """
    if lost := differing(found, meant):
        allowed = "the model that the command was started with, on every machine"
        raise FormatError(name, "shape of the model", f"another in {', '.join(lost)}", allowed)
