"""Numbers of a GGUF file: from its metadata to the shape of a decoder.

They stand under the name of the architecture. Unsupported features are refused: another rule by which metadata scale
the rotary embedding, or a layer of experts would silently make it another model. A Llama 3.1 holds the factors of its
rotary frequencies as a tensor, and a Phi-3 two lists of them, between which the context decides as
`lowbit.formats.checkpoint.rope` says.

Source: the GGUF specification of the ggml project.
"""

import math
from typing import Any, Protocol

import numpy as np

from lowbit.errors import ArgumentError, FormatError
from lowbit.formats.gguf import rope
from lowbit.formats.gguf.architectures import ARCHITECTURES, Architecture
from lowbit.formats.gguf.header import TensorInfo, Value
from lowbit.formats.gguf.rope import read_rotary
from lowbit.model.config import LlamaConfig, Routing, unusual_scale

DEFAULT_ROPE_BASE = 10000.0


class Source(rope.Source, Protocol):
    """What is read of a file."""

    @property
    def architecture(self) -> str:
        """The kind of model, a name in `ARCHITECTURES`."""

    @property
    def context(self) -> int | None:
        """The longest text that the caller requests; None for the model's default."""

    def info(self, name: str) -> TensorInfo:
        """The header's entry for a tensor."""


def read_config(source: Source) -> LlamaConfig:
    """The shape of the model.

    Raises:
        FormatError: another architecture, a number missing or out of range, or a feature that is not supported.
    """
    name = source.architecture
    architecture = ARCHITECTURES[name]

    def integer(key: str, default: int | None = None) -> int:
        return source.value(f"{name}.{key}", int, default)

    def real(key: str, default: float | None = None) -> float:
        return source.value(f"{name}.{key}", float, default)

    heads = integer("attention.head_count")
    hidden = integer("embedding_length")
    head_dim = integer("attention.key_length", hidden // max(1, heads))
    _refuse_other_features(source, name, architecture, head_dim)
    layers = integer("block_count")
    rotary = read_rotary(source, name, architecture, head_dim, source.context)
    if layers > len(source.header.tensors):
        allowed = f"at most the {len(source.header.tensors)} tensors of the file"
        raise FormatError(source.file, f"{name}.block_count", layers, allowed)
    embedding = source.info("token_embd.weight")
    computed: dict[str, Any] = {
        "embedding_scale": math.sqrt(max(0, hidden)) if architecture.scaled_embedding else 1.0,
        "score_scale": _score_scale(architecture, layers, heads, hidden, head_dim),
    }
    try:
        return LlamaConfig(
            layers=layers,
            hidden=hidden,
            feed_forward=integer("expert_feed_forward_length" if architecture.experts else "feed_forward_length"),
            heads=heads,
            kv_heads=integer("attention.head_count_kv", heads),
            head_dim=head_dim,
            vocabulary=embedding.shape[0],
            context=rotary.context,
            rope_base=real("rope.freq_base", DEFAULT_ROPE_BASE),
            rope_scaling=rotary.scaling,
            rms_epsilon=real("attention.layer_norm_rms_epsilon"),
            routing=Routing(integer("expert_count"), integer("expert_used_count")) if architecture.experts else None,
            activation=architecture.activation,
            sinks=architecture.sinks,
            heads_normed_together=architecture.heads_normed_together,
            unrotated=_unrotated(architecture, layers),
            score_cap=_cap(source, f"{name}.attn_logit_softcapping", architecture),
            logit_cap=_cap(source, f"{name}.final_logit_softcapping", architecture),
            **computed | _further_numbers(source, name, architecture, layers, head_dim),
        )
    except ArgumentError as error:
        own = architecture.numbers.get(error.argument)
        key = error.argument if own is None else f"{name}.{own.key}"
        raise FormatError(source.file, key, error.given, error.allowed) from error


def _score_scale(architecture: Architecture, layers: int, heads: int, hidden: int, head_dim: int) -> float | None:
    """The factor of the scores: None for one over the root of the channels of a head."""
    if layers != architecture.largest or hidden // max(1, heads) in (0, head_dim):
        return None
    return float((hidden // heads) ** -0.5)


def _cap(source: Source, key: str, architecture: Architecture) -> float | None:
    """A soft cap; 0 means none."""
    return (source.value(key, float, 0.0) if architecture.capped else 0.0) or None


def _unrotated(architecture: Architecture, layers: int) -> tuple[int, ...]:
    every = architecture.unrotated_every
    return tuple(range(every - 1, layers, every)) if every else ()


SHAPE = {
    "layers": "block_count",
    "hidden": "embedding_length",
    "feed_forward": "feed_forward_length",
    "heads": "attention.head_count",
    "kv_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "vocabulary": "vocab_size",
    "context": "context_length",
    "experts": "expert_count",
    "top_k": "expert_used_count",
}
"""The keys of a shape, which all architectures share."""


def claimed_shape(source: Source) -> dict[str, int | None]:
    """The shape of a model of any architecture, as in its metadata; None for missing numbers.

    If layers differ in a number, it is a list in the metadata and None here.
    """
    name = source.header.metadata.get("general.architecture")
    given = {part: source.header.metadata.get(f"{name}.{key}") for part, key in SHAPE.items()}
    shape = {part: number if type(number) is int else None for part, number in given.items()}
    if shape["kv_heads"] is None and given["kv_heads"] is None:
        shape["kv_heads"] = shape["heads"]
    if shape["head_dim"] is None and shape["hidden"] and shape["heads"]:
        shape["head_dim"] = shape["hidden"] // shape["heads"]
    embedding = source.header.tensors.get("token_embd.weight")
    if embedding is not None:
        shape["vocabulary"] = embedding.shape[0]
    return shape


PATTERN = "attention.sliding_window_pattern"


def _further_numbers(
    source: Source, name: str, architecture: Architecture, layers: int, head_dim: int
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for argument, number in architecture.numbers.items():
        value = source.value(f"{name}.{number.key}", number.kind, number.default)
        found[argument] = None if value == 0 == number.default else value
    if found.get("score_scale") is not None:
        found["score_scale"] = unusual_scale(found["score_scale"], head_dim)
    if found.get("window") is None:
        return found | {"window": None, "local_rope_base": None}
    if architecture.alternating:
        found["full_every"] = _full_every(source, f"{name}.{PATTERN}", architecture.full_every, layers)
    return found


def _full_every(source: Source, key: str, usual: int, layers: int) -> int | None:
    """n, if every n-th layer is full; the metadata hold n, or a list that says for each layer whether it is local."""
    given = source.header.metadata.get(key, usual)
    if not isinstance(given, np.ndarray):
        return source.value(key, int, usual)
    local = [bool(each) for each in given]
    every = local.index(False) + 1 if False in local else None
    if local != [every is None or (layer + 1) % every != 0 for layer in range(layers)]:
        raise FormatError(
            source.file, key, local, f"for each of {layers} layers whether it is local, all but every n-th"
        )
    return every


def _refuse_other_features(source: Source, name: str, architecture: Architecture, head_dim: int) -> None:
    """Refuse metadata that would make this another model; each has only one supported value."""
    supported: dict[str, Value] = {
        "attention.value_length": head_dim,
        "attention.causal": True,
        "attention.scale": 0.0,
        **architecture.fields,
    }
    if architecture.experts is None:
        supported["expert_count"] = 0
    if not architecture.capped:
        supported |= {"attn_logit_softcapping": 0.0, "final_logit_softcapping": 0.0}
    for number in architecture.numbers.values():
        supported.pop(number.key, None)
    for key, value in supported.items():
        given = source.header.metadata.get(f"{name}.{key}", value)
        if type(given) is not type(value) or given != value:
            raise FormatError(source.file, f"{name}.{key}", given, str(value))
