r"""Architectures in GGUF: the names of the parts of each kind of decoder, and what the files omit.

A GGUF file names its *architecture*; the keys of its numbers begin with that name, and its tensors have names that most
architectures share. The differences are values here: the vectors that a block has, whether query and key rows are
permuted, and what a reader has to know because no file says it. The four matrices of attention and the three of the
feed-forward part are the same everywhere.

**What files of Gemma 3 omit.** The gate is a GELU in its tanh form; the embedding is scaled by
:math:`\sqrt{\mathrm{hidden}}`; and, in the files at hand, every sixth layer is full, and local layers rotate with base
10000. The published gains are meant as :math:`1 + g`; files store that sum. Scores are divided by :math:`\sqrt{d_h}`
as everywhere; the larger models of Gemma 3 divide by another number, and are refused because they also scale their
rotary embedding.

Source: the GGUF specification of the ggml project and its model definitions ``llama``, ``qwen2``, ``qwen3`` and
``gemma3``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from lowbit.model.config import Activation

ATTENTION_MATRICES = {"query": "attn_q", "key": "attn_k", "value": "attn_v", "output": "attn_output"}
FEED_FORWARD_MATRICES = {"gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down"}

NORMS = {"attention_norm": "attn_norm.weight", "feed_forward_norm": "ffn_norm.weight"}
BIASES = {"query_bias": "attn_q.bias", "key_bias": "attn_k.bias", "value_bias": "attn_v.bias"}
HEAD_NORMS = {"query_norm": "attn_q_norm.weight", "key_norm": "attn_k_norm.weight"}
POST_NORMS = {"attention_post_norm": "post_attention_norm.weight", "feed_forward_post_norm": "post_ffw_norm.weight"}

ROTARY_FACTORS = "rope_freqs.weight"
"""The factors by which the frequencies of all pairs are divided, as for Llama 3.1 (`lowbit.attention.rope`)."""


class Number(NamedTuple):
    """The key of a number of the configuration in the metadata, and its default."""

    key: str
    kind: type[int] | type[float]
    default: float | None = None


@dataclass(frozen=True)
class Architecture:
    """What sets one architecture apart.

    Attributes:
        vectors: the vectors of a block, by their names in `lowbit.model.weights.LayerWeights`; a file has all of them.
        interleaved: rows of query and key projections are stored with the channels of each rotary pair side by side.
        numbers: those that only this architecture has, by their names in `lowbit.model.config.LlamaConfig`.
        activation: of the gate.
        scaled_embedding: whether the embedding is multiplied by the root of the width of the stream.
        rotary_factors: whether a file may hold the tensor `ROTARY_FACTORS`.
    """

    vectors: Mapping[str, str]
    interleaved: bool = False
    numbers: Mapping[str, Number] = field(default_factory=dict)
    activation: Activation = "silu"
    scaled_embedding: bool = False
    rotary_factors: bool = False


ARCHITECTURES = {
    "llama": Architecture(NORMS, interleaved=True, rotary_factors=True),
    "qwen2": Architecture(NORMS | BIASES),
    "qwen3": Architecture(NORMS | HEAD_NORMS),
    "gemma3": Architecture(
        NORMS | HEAD_NORMS | POST_NORMS,
        numbers={
            "window": Number("attention.sliding_window", int),
            "full_every": Number("attention.sliding_window_pattern", int, 6),
            "local_rope_base": Number("rope.freq_base_swa", float, 10000.0),
        },
        activation="gelu",
        scaled_embedding=True,
    ),
}
