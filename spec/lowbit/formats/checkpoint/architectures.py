"""Kinds of model in checkpoint directories: the names of their parts, and what their files omit or mean differently.

``config.json`` names a kind in ``model_type``. All kinds are the decoder of the chapter `lowbit.model.decoder`, and
most fields and tensors have the same names for all of them. The differences are values here: the vectors that a block
has, matrices that are stored as one tensor, the fields that mean a window, the activation, and the defaults of the
``transformers`` library.

- **Qwen2** has biases of queries, keys and values; **Qwen3** has norms of heads instead. In **Qwen3 MoE** every
  layer is sparse, as in Mixtral, under other names.
- **Gemma 2** stores gains, scales the embedding and alternates as Gemma 3 does, and has soft caps; every second layer
  is full, and all layers rotate alike.
- **Gemma 3** stores gains :math:`g` that mean :math:`1 + g`, scales the embedding by :math:`\\sqrt{\\mathrm{hidden}}`,
  has a GELU in its gates, and alternates between local and full layers.
- **SmolLM3** does not rotate queries and keys in every fourth layer, or in those that ``no_rope_layers`` marks with 0.
- **Granite** is Llama with factors of the embedding, of scores and of what each part of a block adds, and a divisor of
  the logits.
- **OLMo 2** norms the result of each part of a block and not what goes in, and all heads of a token together.
  **OLMo 3** also alternates between local and full layers, and scales the rotation of full ones alone.
- **GPT-OSS** has a sink for each query head and biases in attention, in the router and in the experts, whose units are
  clamped and which lie stacked in a few tensors, in MXFP4 or as floats. Every second layer is full.
- **Phi-3** stores queries, keys and values as one tensor, and gate and up projections as another; it may rotate a part
  of each head.

Source: the published checkpoints of each kind; the ``transformers`` library.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from lowbit.model.config import Activation
from lowbit.model.layers import SLOPE
from lowbit.model.step import EXPERT_BIASES

NORMS = {"attention_norm": "input_layernorm.weight", "feed_forward_norm": "post_attention_layernorm.weight"}
BIASES = {f"{part}_bias": f"self_attn.{part[0]}_proj.bias" for part in ("query", "key", "value")}
HEAD_NORMS = {"query_norm": "self_attn.q_norm.weight", "key_norm": "self_attn.k_norm.weight"}
POST_NORMS = {
    "attention_post_norm": "post_attention_layernorm.weight",
    "feed_forward_post_norm": "post_feedforward_layernorm.weight",
}
GEMMA_NORMS = {
    "attention_norm": "input_layernorm.weight",
    "feed_forward_norm": "pre_feedforward_layernorm.weight",
    **POST_NORMS,
}

GPT_OSS_VECTORS = {
    "output_bias": "self_attn.o_proj.bias",
    "sinks": "self_attn.sinks",
    "router_bias": "mlp.router.bias",
}
KEY_ORDER = {"key_order": "self_attn.key_order"}

ATTENTION = {part: f"self_attn.{part[0]}_proj" for part in ("query", "key", "value", "output")}
DENSE = {f"feed_forward.{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")}
FUSED = dict.fromkeys(("query", "key", "value"), "self_attn.qkv_proj") | dict.fromkeys(
    ("feed_forward.gate", "feed_forward.up"), "mlp.gate_up_proj"
)


@dataclass(frozen=True)
class Sparse:
    """How a kind of model names the parts of its sparse layers.

    Attributes:
        router: the tensor of the router.
        experts: the prefix of the names of the experts' tensors, before their number.
        parts: the tensors of an expert, by their names in `lowbit.model.weights.GatedWeights`.
        stacked: whether a few tensors hold all experts, one after another (`lowbit.formats.checkpoint.stacked`).
    """

    router: str
    experts: str
    parts: Mapping[str, str]
    stacked: bool = False


MIXTRAL_EXPERTS = Sparse("block_sparse_moe.gate", "block_sparse_moe.experts", {"gate": "w1", "up": "w3", "down": "w2"})
QWEN_EXPERTS = Sparse("mlp.gate", "mlp.experts", {part: f"{part}_proj" for part in ("gate", "up", "down")})

GPT_OSS_EXPERTS = Sparse("mlp.router", "mlp.experts", {}, stacked=True)

Window = Literal["never", "always", "unused", "alternating"]
"""What ``sliding_window`` means: a field that the kind does not have, a window in every layer, a window only if
``use_sliding_window`` is set, or a window in all but every n-th layer."""


@dataclass(frozen=True)
class Architecture:
    """The properties of one kind of model.

    Attributes:
        decoder: the library's name for the whole decoder with its head.
        vectors: the tensors of the vectors of a block, by their names in `lowbit.model.weights.LayerWeights`.
        matrices: those of its dense matrices, likewise; several matrices may be the rows of one tensor, in this order.
        sparse: the names of the parts of sparse layers, if every layer is sparse; None if no layer is.
        keys: fields of numbers whose names differ from those in `lowbit.formats.checkpoint.config.KEYS`.
        gain_offset: what is added to the gain of a norm.
        window: what ``sliding_window`` means.
        full_every: every n-th layer is full if layers alternate and no field says which.
        local_rotation: how local layers rotate: with their ``own`` base, with that of full layers but ``unscaled`` if
            no field gives another, or the ``same`` as full layers.
        scaled_scores: whether scores are divided by the root of ``query_pre_attn_scalar``.
        capped: whether there are soft caps, of scores and of logits.
        activation: of the gate.
        activation_field: the name of the field of the activation, and its only value.
        factors: fields of factors, by their names in `lowbit.model.config.LlamaConfig`; an absent one is 1.
        scaled_embedding: whether the embedding is multiplied by the root of the width of the stream.
        unrotated: whether ``no_rope_layers`` marks layers without rotation.
        heads_normed_together: whether one norm spans all heads (`lowbit.model.config`).
        fields: further fields, each with its only supported value, which is also the default.
        needed: the same for fields that are required.
        partial: whether every rule may rotate only a part of a head (`lowbit.formats.checkpoint.rope`).
        sinks: whether each query head has a sink.
        scaled: whether the file must say how the rotary frequencies are scaled.
        rope_base: the base if no field gives it; None if one must.
        divides_width: whether an absent ``head_dim`` means the width of the stream divided by the heads.
        one_each: whether an absent number of key-value heads means that of the query heads.
        tied: whether the head is the embedding if no field says so.
    """

    decoder: str
    vectors: Mapping[str, str] = field(default_factory=lambda: MappingProxyType(NORMS))
    matrices: Mapping[str, str] = field(default_factory=lambda: MappingProxyType(ATTENTION | DENSE))
    sparse: Sparse | None = None
    keys: Mapping[str, str] = field(default_factory=dict)
    gain_offset: float = 0.0
    window: Window = "never"
    full_every: int = 6
    local_rotation: Literal["own", "unscaled", "same"] = "own"
    scaled_scores: bool = False
    capped: bool = False
    activation: Activation = "silu"
    activation_field: tuple[str, str] = ("hidden_act", "silu")
    factors: Mapping[str, str] = field(default_factory=dict)
    scaled_embedding: bool = False
    unrotated: bool = False
    heads_normed_together: bool = False
    fields: Mapping[str, Any] = field(default_factory=dict)
    needed: Mapping[str, Any] = field(default_factory=dict)
    partial: bool = False
    sinks: bool = False
    scaled: bool = False
    rope_base: float | None = None
    divides_width: bool = True
    one_each: bool = False
    tied: bool = False

    @property
    def all_vectors(self) -> tuple[str, ...]:
        """The vectors of a block by their names in `LayerWeights`, those of stacked experts included."""
        stacked = self.sparse is not None and self.sparse.stacked
        return (*self.vectors, *(f"expert_{bias}" for bias in EXPERT_BIASES if stacked))


GRANITE_FACTORS = {
    "embedding_scale": "embedding_multiplier",
    "score_scale": "attention_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_divisor": "logits_scaling",
}
UNUSED_WINDOW = {"use_sliding_window": False}

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "mixtral": Architecture("MixtralForCausalLM", sparse=MIXTRAL_EXPERTS, window="always"),
        "llama": Architecture("LlamaForCausalLM", rope_base=10000.0, one_each=True),
        "mistral": Architecture("MistralForCausalLM", window="always"),
        "qwen2": Architecture("Qwen2ForCausalLM", NORMS | BIASES, window="unused", fields=UNUSED_WINDOW),
        "qwen3": Architecture(
            "Qwen3ForCausalLM", NORMS | HEAD_NORMS, window="unused", fields=UNUSED_WINDOW, divides_width=False
        ),
        "qwen3_moe": Architecture(
            "Qwen3MoeForCausalLM",
            NORMS | HEAD_NORMS,
            sparse=QWEN_EXPERTS,
            keys={"experts": "num_experts", "feed_forward": "moe_intermediate_size"},
            window="unused",
            fields=UNUSED_WINDOW | {"decoder_sparse_step": 1, "mlp_only_layers": []},
            needed={"norm_topk_prob": True},
            divides_width=False,
        ),
        "gemma2": Architecture(
            "Gemma2ForCausalLM",
            GEMMA_NORMS,
            gain_offset=1.0,
            window="alternating",
            full_every=2,
            local_rotation="same",
            activation="gelu",
            activation_field=("hidden_activation", "gelu_pytorch_tanh"),
            scaled_embedding=True,
            scaled_scores=True,
            capped=True,
            fields={"use_bidirectional_attention": False},
            rope_base=10000.0,
            divides_width=False,
            tied=True,
        ),
        "gemma3_text": Architecture(
            "Gemma3ForCausalLM",
            GEMMA_NORMS | HEAD_NORMS,
            gain_offset=1.0,
            window="alternating",
            activation="gelu",
            activation_field=("hidden_activation", "gelu_pytorch_tanh"),
            scaled_embedding=True,
            scaled_scores=True,
            fields={
                "attn_logit_softcapping": None,
                "final_logit_softcapping": None,
                "use_bidirectional_attention": False,
            },
            divides_width=False,
            tied=True,
        ),
        "smollm3": Architecture("SmolLM3ForCausalLM", window="unused", unrotated=True, fields=UNUSED_WINDOW, tied=True),
        "granite": Architecture("GraniteForCausalLM", factors=GRANITE_FACTORS, rope_base=10000.0, one_each=True),
        "olmo2": Architecture("Olmo2ForCausalLM", POST_NORMS | HEAD_NORMS, heads_normed_together=True, one_each=True),
        "olmo3": Architecture(
            "Olmo3ForCausalLM",
            POST_NORMS | HEAD_NORMS,
            window="alternating",
            full_every=4,
            local_rotation="unscaled",
            heads_normed_together=True,
            one_each=True,
        ),
        "gpt_oss": Architecture(
            "GptOssForCausalLM",
            NORMS | BIASES | GPT_OSS_VECTORS,
            sparse=GPT_OSS_EXPERTS,
            window="alternating",
            full_every=2,
            local_rotation="same",
            activation="clamped",
            fields={"attention_bias": True, "swiglu_alpha": SLOPE},
            sinks=True,
            scaled=True,
            divides_width=False,
        ),
        "phi3": Architecture(
            "Phi3ForCausalLM", matrices=ATTENTION | DENSE | FUSED, window="always", partial=True, one_each=True
        ),
    }
)
"""The kinds of model by ``model_type``."""
