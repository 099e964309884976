r"""Architectures in GGUF: the names of the parts of each kind of decoder, and what the files omit.

A GGUF file names its *architecture*; the keys of its numbers begin with that name, and its tensors have names that most
architectures share. The differences are values here: the vectors that a block has, whether query and key rows are
permuted, which matrices are stored as one tensor, and what a reader has to know because no file says it.

**What files of Gemma 3 omit.** The gate is a GELU in its tanh form; the embedding is scaled by
:math:`\sqrt{\mathrm{hidden}}`; and, in the files at hand, every sixth layer is full, and local layers rotate with base
10000. The published gains are meant as :math:`1 + g`; files store that sum. Scores are divided by :math:`\sqrt{d_h}`
as everywhere, but by the root of the width of the stream over the heads in the largest model, which has 62 layers.
**Gemma 2** has the same gate, embedding and gains; every second layer is full, all layers rotate alike, and the largest
model, with other divisors, has 46 layers.

**What files of SmolLM3, OLMo 2 and Phi-3 omit.** Every fourth layer of SmolLM3 is not rotated. OLMo 2 norms all query
heads together, and all key heads; OLMo 3 is written as ``olmo2`` with a window, and every fourth layer is full, unless
a list says which layers are not. Its local layers rotate with the base of full ones and without their scaling. Phi-3
stores queries, keys and values as one tensor, and gate above up as another. Its window is part of the model; llama.cpp
ignores it.

**What files of Granite omit.** A file may omit all factors but the one by which the logits are divided. Scores then
have the usual one, and the others are 1.

**What files of GPT-OSS omit.** Gates are clamped at 7, every second layer is full, and the ramp of YaRN is not rounded
to whole pairs, as the published configuration says; llama.cpp rounds it. The experts of a layer are three tensors of
three dimensions, with biases of two, and the norm before them is named ``post_attention_norm``.

Source: the GGUF specification of the ggml project and its model definitions ``llama``, ``qwen2``, ``qwen3``,
``gemma2``, ``gemma3``, ``smollm3``, ``granite``, ``gpt-oss``, ``olmo2`` and ``phi3``, and its converter.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from lowbit.model.config import Activation

ATTENTION = {"query": "attn_q", "key": "attn_k", "value": "attn_v", "output": "attn_output"}
FEED_FORWARD = {f"feed_forward.{part}": f"ffn_{part}" for part in ("gate", "up", "down")}
FUSED = dict.fromkeys(("query", "key", "value"), "attn_qkv") | {"feed_forward.gate": "ffn_up"}

NORMS = {"attention_norm": "attn_norm.weight", "feed_forward_norm": "ffn_norm.weight"}
BIASES = {"query_bias": "attn_q.bias", "key_bias": "attn_k.bias", "value_bias": "attn_v.bias"}
HEAD_NORMS = {"query_norm": "attn_q_norm.weight", "key_norm": "attn_k_norm.weight"}
POST_NORMS = {"attention_post_norm": "post_attention_norm.weight", "feed_forward_post_norm": "post_ffw_norm.weight"}

GPT_OSS_NORMS = {"attention_norm": "attn_norm.weight", "feed_forward_norm": "post_attention_norm.weight"}
ROUTER = "ffn_gate_inp"
GPT_OSS_VECTORS = {
    "output_bias": "attn_output.bias",
    "sinks": "attn_sinks.weight",
    "router_bias": f"{ROUTER}.bias",
}

ROTARY_FACTORS = "rope_freqs.weight"
"""The divisors of the frequencies of all pairs, as for Llama 3.1 (`lowbit.attention.rope_scaling`)."""
SHORT_FACTORS, LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"
"""Those of Phi-3 for texts up to the context of the first training, and for longer ones."""


class Number(NamedTuple):
    """The metadata key of a number of the configuration, and its default. If the default is 0, 0 means no number."""

    key: str
    kind: type[int] | type[float]
    default: float | None = None


def held_together(matrices: Mapping[str, str]) -> dict[str, list[str]]:
    """The names of matrices by the tensor that holds them.

    >>> held_together({"gate": "gate_up", "up": "gate_up", "down": "down"})
    {'gate_up': ['gate', 'up'], 'down': ['down']}
    """
    found: dict[str, list[str]] = {}
    for name, stored in matrices.items():
        found.setdefault(stored, []).append(name)
    return found


@dataclass(frozen=True)
class Architecture:
    """The properties of one architecture.

    Attributes:
        vectors: the vectors of a block, by their names in `lowbit.model.weights.LayerWeights`; a file has all of them.
        matrices: the matrices of a block, by the names of `lowbit.model.weights.linear_shapes`; several may be the rows
            of one tensor, in this order.
        experts: the tensors of the experts of a layer, by the parts of a gated unit; None for a dense model.
        interleaved: rows of query and key projections are stored with the channels of each rotary pair side by side.
        numbers: those that only this architecture has, by their names in `lowbit.model.config.LlamaConfig`.
        fields: further keys, each with its only supported value, which is also the default.
        alternating: whether layers alternate between local and full ones if there is a window.
        full_every: every n-th layer is full if they alternate and no key says which.
        unrotated_every: every n-th layer is not rotated; 0 if all are.
        heads_normed_together: whether one norm spans all heads.
        activation: of the gate.
        scaled_embedding: whether the embedding is multiplied by the root of the width of the stream.
        rotary_factors: the tensors of rotary factors that a file may hold.
        partial: whether a part of a head may be rotated.
        capped: whether there are soft caps, of scores and of logits.
        largest: the number of layers of the model size whose scores are divided by the root of the width of the stream
            over the heads; None if there is none.
        sinks: whether each query head has a sink.
        whole_ramp: whether the ramp of YaRN begins and ends at whole pairs
            (`lowbit.attention.rope_scaling.yarn_scaling`).
        rules: the rules by which metadata may scale the rotary frequencies.
    """

    vectors: Mapping[str, str]
    matrices: Mapping[str, str] = field(default_factory=lambda: MappingProxyType(ATTENTION | FEED_FORWARD))
    experts: Mapping[str, str] | None = None
    interleaved: bool = False
    numbers: Mapping[str, Number] = field(default_factory=dict)
    fields: Mapping[str, bool] = field(default_factory=dict)
    alternating: bool = False
    full_every: int = 4
    unrotated_every: int = 0
    heads_normed_together: bool = False
    activation: Activation = "silu"
    scaled_embedding: bool = False
    rotary_factors: tuple[str, ...] = ()
    partial: bool = False
    capped: bool = False
    largest: int | None = None
    sinks: bool = False
    whole_ramp: bool = True
    rules: tuple[str, ...] = ("none", "linear", "yarn")

    @property
    def held(self) -> dict[str, list[str]]:
        """The names of the matrices by the tensor that holds them."""
        return held_together(self.matrices)


WINDOW = {"window": Number("attention.sliding_window", int, 0)}
GRANITE_FACTORS = {
    "embedding_scale": Number("embedding_scale", float, 1.0),
    "score_scale": Number("attention.scale", float, 0.0),
    "residual_scale": Number("residual_scale", float, 1.0),
    "logit_divisor": Number("logit_scale", float),
}

ARCHITECTURES = {
    "llama": Architecture(NORMS, interleaved=True, rotary_factors=(ROTARY_FACTORS,)),
    "qwen2": Architecture(NORMS | BIASES),
    "qwen3": Architecture(NORMS | HEAD_NORMS),
    "gemma2": Architecture(
        NORMS | POST_NORMS,
        numbers={"window": Number("attention.sliding_window", int, 4096)},
        alternating=True,
        full_every=2,
        activation="gelu",
        scaled_embedding=True,
        capped=True,
        largest=46,
    ),
    "gemma3": Architecture(
        NORMS | HEAD_NORMS | POST_NORMS,
        numbers={
            "window": Number("attention.sliding_window", int),
            "local_rope_base": Number("rope.freq_base_swa", float, 10000.0),
        },
        alternating=True,
        full_every=6,
        activation="gelu",
        scaled_embedding=True,
        largest=62,
    ),
    "smollm3": Architecture(NORMS, interleaved=True, unrotated_every=4),
    "granite": Architecture(
        NORMS,
        interleaved=True,
        numbers=GRANITE_FACTORS,
        fields={"rope.scaling.finetuned": True},  # marks a Granite without rotations for llama.cpp
        rotary_factors=(ROTARY_FACTORS,),
    ),
    "olmo2": Architecture(
        HEAD_NORMS | POST_NORMS,
        numbers=WINDOW | {"local_rope_base": Number("rope.freq_base", float, 10000.0)},
        alternating=True,
        heads_normed_together=True,
    ),
    "gpt-oss": Architecture(
        GPT_OSS_NORMS | BIASES | GPT_OSS_VECTORS,
        ATTENTION | {"feed_forward.router": ROUTER},
        experts={part: f"ffn_{part}_exps" for part in ("gate", "up", "down")},
        numbers={"window": Number("attention.sliding_window", int)},
        alternating=True,
        full_every=2,
        activation="clamped",
        sinks=True,
        whole_ramp=False,
    ),
    "phi3": Architecture(
        NORMS,
        ATTENTION | FEED_FORWARD | FUSED,
        numbers=WINDOW,
        rotary_factors=(SHORT_FACTORS, LONG_FACTORS),
        partial=True,
    ),
}
