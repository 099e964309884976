"""Configuration of a checkpoint: from ``config.json`` to the shape of a decoder.

The kinds of model are those of `lowbit.formats.checkpoint.architectures`. The blocks of ``mixtral`` and ``qwen3_moe``
have experts; the others are the same decoder with a dense feed-forward part, each with some choices of its own. The
numbers have the names that the ``transformers`` library gave them.

**Unsupported features are refused.** Such a file may ask for features that this decoder does not have: a rotary
embedding scaled by another rule (`lowbit.formats.checkpoint.rope`), biases in attention, another activation. Ignoring
any of these would give a model that still produces text, but not the model that was trained. `SUPPORTED` lists each
with the one value that is supported. Fields about training and about the library itself change nothing and are ignored.

**Sorted key channels.** A model whose key channels stand in another order has the vector ``key_order`` in each block
(`lowbit.model.weights`). A tool that does not know of it would load such a model and rotate wrong pairs. So its
``model_type`` is one that no other tool has, and the kind that it is otherwise stands in a field of its own.

The softmax of both is written before the choice of experts, and the chosen probabilities are scaled to a sum of 1. That
equals the softmax over the chosen scores, as in `routing`.

Source: the published ``config.json`` of Mixtral 8x7B; Mixtral (arXiv 2401.04088) §2.1.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lowbit.contract.checks import spoken
from lowbit.errors import ArgumentError, FormatError
from lowbit.formats.checkpoint.architectures import ARCHITECTURES, KEY_ORDER, Architecture
from lowbit.formats.checkpoint.rope import FULL, KEPT, LOCAL, LOCAL_BASE, OLD, read_rotary
from lowbit.model.config import LlamaConfig, Routing, unusual_scale
from lowbit.system.json_files import LARGEST_INTEGER, Fields, described
from lowbit.text import quoted

KEYS = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "feed_forward": "intermediate_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocabulary": "vocab_size",
    "context": "max_position_embeddings",
    "rope_base": "rope_theta",
    "rms_epsilon": "rms_norm_eps",
    "window": "sliding_window",
    "experts": "num_local_experts",
    "top_k": "num_experts_per_tok",
}
"""The file's names for the numbers of `LlamaConfig` and, the last two, of its `Routing`."""
ROUTED = ("experts", "top_k")
SHAPE = tuple(name for name in KEYS if name not in ("rope_base", "rms_epsilon", "window"))
"""The numbers of `claimed_shape`."""

SUPPORTED: dict[str, Any] = {
    "attention_bias": False,
    "mlp_bias": False,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
}
"""Fields that would make it another model, each with its only supported value, which is also the default."""


SORTED, SORTED_DECODER = "lowbit_ksort", "LowbitKSortForCausalLM"
"""The ``model_type`` of a model with sorted key channels, also the name of the field that holds its original kind; and
its ``architectures``."""
WINDOW, LAYER_TYPES = "sliding_window", "layer_types"
PATTERN = "sliding_window_pattern"
MOST_LAYERS = 2**16
"""The most layers for which a list is made before the tensors are checked."""
UNROTATED, UNROTATED_EVERY, USUAL_UNROTATED_EVERY = "no_rope_layers", "no_rope_layer_interval", 4


def architecture_of(fields: Fields) -> Architecture:
    """The kind of model.

    Raises:
        FormatError: another kind, or a part of one.
    """
    if not is_sorted(fields):
        return _named(fields)
    if (named := fields.value("architectures", list)) != [SORTED_DECODER]:
        raise FormatError(fields.file, "architectures", described(named), f"[{SORTED_DECODER!r}]")
    inner = _named(Fields(f"{fields.file}: {SORTED}", fields.value(SORTED, dict)))
    return replace(inner, vectors={**inner.vectors, **KEY_ORDER})


def is_sorted(fields: Fields) -> bool:
    """Whether the key channels are sorted."""
    return fields.value("model_type", str) == SORTED


def sorted_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of ``config.json`` for the kind of a model with sorted key channels.

    >>> sorted_fields({"model_type": "qwen2", "hidden_size": 8})
    {'model_type': 'lowbit_ksort', 'architectures': ['LowbitKSortForCausalLM'], 'lowbit_ksort': {'model_type': 'qwen2'}}
    """
    inner = {key: fields[key] for key in ("model_type", "architectures") if key in fields}
    return {"model_type": SORTED, "architectures": [SORTED_DECODER], SORTED: inner}


def _named(fields: Fields) -> Architecture:
    kind = fields.value("model_type", str)
    if kind not in ARCHITECTURES:
        allowed = spoken([repr(known) for known in ARCHITECTURES])
        raise FormatError(fields.file, "model_type", quoted(kind), allowed)
    decoder = ARCHITECTURES[kind].decoder
    named = fields.value("architectures", list, [decoder])
    if named != [decoder]:
        raise FormatError(fields.file, "architectures", described(named), f"[{decoder!r}]")
    return ARCHITECTURES[kind]


def read_config(fields: Fields, context: int | None = None) -> LlamaConfig:
    """The shape of the model.

    Args:
        fields: of ``config.json``.
        context: the longest text that the caller requests; None for the default (`lowbit.formats.checkpoint.rope`).

    Raises:
        ArgumentError: a context that the model does not have.
        FormatError: another kind of model, a number that is missing or out of range, or a feature that is not
            supported.
    """
    architecture = architecture_of(fields)
    keys = KEYS | dict(architecture.keys) | dict(architecture.factors)
    layers, heads, hidden = (fields.value(KEYS[name], int) for name in ("layers", "heads", "hidden"))
    head_dim = fields.value(KEYS["head_dim"], int, hidden // max(1, heads) if architecture.divides_width else None)
    _refuse_other_features(fields, architecture, head_dim)
    if architecture.scaled and not (fields.values.get(OLD) or fields.values.get(KEPT)):
        raise FormatError(fields.file, OLD, "missing", "there, for the scaling of rotary frequencies")
    rotary = read_rotary(fields, head_dim, architecture.rope_base, context, partial=architecture.partial)
    window, full_every = _window(fields, architecture)
    local_base = rotary.local_base
    if local_base is None and architecture.local_rotation == "unscaled":
        local_base = rotary.base
    if (local_base is None) != (architecture.window != "alternating" or architecture.local_rotation == "same"):
        given = "missing" if local_base is None else local_base
        raise FormatError(fields.file, LOCAL_BASE, given, "a number where layers alternate, and absent elsewhere")
    try:
        config = LlamaConfig(
            layers=layers,
            hidden=hidden,
            feed_forward=fields.value(keys["feed_forward"], int),
            heads=heads,
            kv_heads=fields.value(KEYS["kv_heads"], int, heads if architecture.one_each else None),
            head_dim=head_dim,
            vocabulary=fields.value(KEYS["vocabulary"], int),
            context=rotary.context,
            rope_base=rotary.base,
            rms_epsilon=fields.value(KEYS["rms_epsilon"], float),
            routing=Routing(fields.value(keys["experts"], int), fields.value(keys["top_k"], int))
            if architecture.sparse
            else None,
            window=window,
            full_every=full_every,
            local_rope_base=local_base,
            local_rope_scaling=rotary.local_scaling,
            activation=architecture.activation,
            activation_limit=_limit(fields, architecture),
            sinks=architecture.sinks,
            rope_scaling=rotary.scaling,
            heads_normed_together=architecture.heads_normed_together,
            unrotated=_unrotated(fields, layers) if architecture.unrotated else (),
            score_cap=_cap(fields, architecture, CAPS[0], 50.0),
            logit_cap=_cap(fields, architecture, CAPS[1], 30.0),
            **_factors(fields, architecture, hidden, head_dim),
        )
    except ArgumentError as error:
        raise FormatError(fields.file, keys.get(error.argument, error.argument), error.given, error.allowed) from error
    _check_layer_types(fields, config)
    return config


def written_config(config: LlamaConfig) -> dict[str, Any]:
    """The ``config.json`` of a shape, for `read_config` and any other reader; the head is untied.

    >>> config = LlamaConfig(1, 8, 16, 2, 1, 4, 50, 32, 1e6, 1e-5, Routing(4, 2))
    >>> read_config(Fields("config.json", written_config(config))) == config
    True

    Raises:
        ArgumentError: a choice that these kinds of model do not have.
    """
    kind = "mistral" if config.routing is None else "mixtral"
    written: dict[str, Any] = {
        "architectures": [ARCHITECTURES[kind].decoder],
        "model_type": kind,
        **{key: getattr(config, name) for name, key in KEYS.items() if name not in ROUTED},
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
    }
    if config.routing is not None:
        written |= {KEYS[name]: getattr(config.routing, name) for name in ROUTED}
    if read_config(Fields("config.json", written)) != config:
        raise ArgumentError("config", config, f"the choices of model type '{kind}'")
    return written


def claimed_shape(fields: Fields) -> dict[str, int | None]:
    """The shape of a model of any kind, as in its configuration; None for missing numbers.

    A model of text and images keeps the numbers of its decoder in ``text_config``.
    """
    nested = fields.values.get("text_config")
    values = fields.values if not isinstance(nested, dict) else {**fields.values, **nested}
    shape = {name: _integer(values.get(KEYS[name])) for name in SHAPE}
    if shape["kv_heads"] is None:
        shape["kv_heads"] = shape["heads"]
    if shape["head_dim"] is None and shape["hidden"] and shape["heads"]:
        shape["head_dim"] = shape["hidden"] // shape["heads"]
    return shape


def _integer(value: object) -> int | None:
    return value if type(value) is int and abs(value) <= LARGEST_INTEGER else None


def is_tied(fields: Fields) -> bool:
    """Whether the head is tied to the embedding."""
    return fields.value("tie_word_embeddings", bool, architecture_of(fields).tied)


def _refuse_other_features(fields: Fields, architecture: Architecture, head_dim: int) -> None:
    name, activation = architecture.activation_field
    supported = SUPPORTED | {name: activation} | dict(architecture.fields)
    if architecture.window == "never":
        supported[WINDOW] = None
    for key, only in supported.items():
        given = fields.values.get(key)
        if given is not None and given != only:
            allowed = "absent" if only is None else repr(only)
            raise FormatError(fields.file, key, described(given), allowed)
    for key, only in architecture.needed.items():
        if (given := fields.values.get(key)) != only:
            raise FormatError(fields.file, key, "missing" if given is None else described(given), repr(only))
    if not architecture.scaled_scores and (divisor := fields.value(DIVISOR, float, head_dim)) != head_dim:
        raise FormatError(fields.file, DIVISOR, divisor, f"head_dim, {head_dim}")


LIMIT, USUAL_LIMIT = "swiglu_limit", 7.0
CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
"""The soft caps of scores and of logits."""
DIVISOR, USUAL_DIVISOR = "query_pre_attn_scalar", 256.0


def _limit(fields: Fields, architecture: Architecture) -> float:
    """The limit of a clamped gated unit."""
    return fields.value(LIMIT, float, USUAL_LIMIT) if architecture.activation == "clamped" else USUAL_LIMIT


def _score_scale(fields: Fields, architecture: Architecture, head_dim: int) -> float | None:
    """The factor of the scores: None for one over the root of the channels of a head."""
    divisor = fields.value(DIVISOR, float, USUAL_DIVISOR) if architecture.scaled_scores else float(head_dim)
    if not divisor > 0:
        raise FormatError(fields.file, DIVISOR, divisor, "a number above 0")
    return None if divisor == head_dim else divisor**-0.5


def _factors(fields: Fields, architecture: Architecture, hidden: int, head_dim: int) -> dict[str, Any]:
    """The factors of a decoder: from its kind and sizes, or from its fields."""
    found: dict[str, Any] = {
        "embedding_scale": math.sqrt(max(0, hidden)) if architecture.scaled_embedding else 1.0,
        "score_scale": _score_scale(fields, architecture, head_dim),
    }
    found |= {name: fields.value(key, float, 1.0) for name, key in architecture.factors.items()}
    if "score_scale" in architecture.factors:
        found["score_scale"] = unusual_scale(found["score_scale"], head_dim)
    return found


def _cap(fields: Fields, architecture: Architecture, key: str, usual: float) -> float | None:
    """A soft cap, which a field may turn off by null."""
    if not architecture.capped or (key in fields.values and fields.values[key] is None):
        return None
    cap = fields.value(key, float, usual)
    if not cap > 0:
        raise FormatError(fields.file, key, cap, "a number above 0, or null for no cap")
    return cap


# **What differs from layer to layer.**


def _window(fields: Fields, architecture: Architecture) -> tuple[int | None, int | None]:
    """The window of local layers, and which layer is full (`LlamaConfig`)."""
    if architecture.window in ("never", "unused"):
        return None, None
    if architecture.window == "always":
        return fields.optional(WINDOW, int), None
    listed = fields.optional(LAYER_TYPES, list)
    if listed is None:
        return fields.value(WINDOW, int), fields.value(PATTERN, int, architecture.full_every)
    return fields.value(WINDOW, int), listed.index(FULL) + 1 if FULL in listed else None


def _check_layer_types(fields: Fields, config: LlamaConfig) -> None:
    """Refuse a list of local and full layers that contradicts the configuration."""
    given = fields.optional(LAYER_TYPES, list)
    if given is None:
        return
    if len(given) != config.layers:
        raise FormatError(
            fields.file, LAYER_TYPES, f"a list of {len(given)}", f"a list of {config.layers}, one a layer"
        )
    for layer, each in enumerate(given):
        if each != (kind := LOCAL if config.is_local(layer) else FULL):
            allowed = f"'{kind}' where the other fields say so"
            raise FormatError(fields.file, f"{LAYER_TYPES}[{layer}]", described(each), allowed)


def _unrotated(fields: Fields, layers: int) -> tuple[int, ...]:
    """The layers whose queries and keys are not rotated: every n-th, or those that a list marks with 0."""
    marks = fields.optional(UNROTATED, list)
    if marks is None:
        every = fields.value(UNROTATED_EVERY, int, USUAL_UNROTATED_EVERY)
        if every < 1:
            raise FormatError(fields.file, UNROTATED_EVERY, every, "at least 1")
        if layers > MOST_LAYERS:
            raise FormatError(fields.file, KEYS["layers"], layers, f"at most {MOST_LAYERS}")
        return tuple(range(every - 1, layers, every))
    if len(marks) != layers or not all(type(mark) is int and mark in (0, 1) for mark in marks):
        raise FormatError(fields.file, UNROTATED, described(marks), f"0 or 1 for each of the {layers} layers")
    return tuple(layer for layer, mark in enumerate(marks) if mark == 0)
