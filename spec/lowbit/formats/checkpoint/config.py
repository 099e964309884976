"""Configuration of a checkpoint: from ``config.json`` to the shape of a decoder.

The kinds of model are ``mixtral``, whose blocks have experts, and ``llama`` and ``mistral``, which are the same decoder
with a dense feed-forward part. The numbers have the names that the ``transformers`` library gave them.

**Unsupported features are refused.** Such a file may ask for features that this decoder does not have: a rotary
embedding scaled by another rule (`lowbit.formats.checkpoint.rope`), biases in attention, another activation, weights
that are quantised already. Ignoring any of these would give a model that still produces text, but not the model that
was trained. `SUPPORTED` lists each with the one value that is supported. Fields about training and about the library
itself change nothing and are ignored.

Mixtral's softmax is written before the choice of experts, and the chosen probabilities are scaled to a sum of 1. That
equals the softmax over the chosen scores, as in `routing`.

Source: the published ``config.json`` of Mixtral 8x7B; Mixtral (arXiv 2401.04088) §2.1.
"""

from typing import Any

from lowbit.contract.checks import spoken
from lowbit.errors import ArgumentError, FormatError
from lowbit.formats.checkpoint.rope import read_rotary
from lowbit.model.config import LlamaConfig, Routing
from lowbit.system.json_files import Fields, described
from lowbit.text import quoted

ARCHITECTURES = {"mixtral": "MixtralForCausalLM", "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"}
"""The kinds of model, and what each calls the whole decoder with its head."""

WINDOWED = ("mixtral", "mistral")
FIRST_ROPE_BASE = 10000.0
"""The base of the first Llama, whose configuration does not say it."""

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
"""What the numbers of `LlamaConfig` and, the last two, of its `Routing` are called in the file."""
ROUTED = ("experts", "top_k")

SUPPORTED: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
    "layer_types": None,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
}
"""Fields that would make it another model, each with the only value that is supported; absent is the same."""


def kind_of(fields: Fields) -> str:
    """The kind of model: a key of `ARCHITECTURES`.

    Raises:
        FormatError: another kind, or a part of one.
    """
    kind = fields.value("model_type", str)
    if kind not in ARCHITECTURES:
        allowed = spoken([repr(known) for known in ARCHITECTURES])
        raise FormatError(fields.file, "model_type", quoted(kind), allowed)
    named = fields.value("architectures", list, [ARCHITECTURES[kind]])
    if named != [ARCHITECTURES[kind]]:
        raise FormatError(fields.file, "architectures", described(named), f"[{ARCHITECTURES[kind]!r}]")
    return kind


def read_config(fields: Fields) -> LlamaConfig:
    """The shape of the model.

    Raises:
        FormatError: another kind of model, a number that is missing or out of range, or a feature that is not
            understood.
    """
    kind = kind_of(fields)
    _refuse_other_features(fields, kind)
    heads, hidden = fields.value(KEYS["heads"], int), fields.value(KEYS["hidden"], int)
    head_dim = fields.value(KEYS["head_dim"], int, hidden // max(1, heads))
    rotary = read_rotary(fields, head_dim, FIRST_ROPE_BASE if kind == "llama" else None)
    try:
        return LlamaConfig(
            layers=fields.value(KEYS["layers"], int),
            hidden=hidden,
            feed_forward=fields.value(KEYS["feed_forward"], int),
            heads=heads,
            kv_heads=fields.value(KEYS["kv_heads"], int, heads if kind == "llama" else None),
            head_dim=head_dim,
            vocabulary=fields.value(KEYS["vocabulary"], int),
            context=fields.value(KEYS["context"], int),
            rope_base=rotary.base,
            rope_scaling=rotary.scaling,
            rms_epsilon=fields.value(KEYS["rms_epsilon"], float),
            routing=Routing(fields.value(KEYS["experts"], int), fields.value(KEYS["top_k"], int))
            if kind == "mixtral"
            else None,
            window=fields.optional(KEYS["window"], int) if kind in WINDOWED else None,
        )
    except ArgumentError as error:
        raise FormatError(fields.file, KEYS.get(error.argument, error.argument), error.given, error.allowed) from error


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
        "architectures": [ARCHITECTURES[kind]],
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


def is_tied(fields: Fields) -> bool:
    """Whether the head is the embedding over again."""
    return fields.value("tie_word_embeddings", bool, default=False)


def _refuse_other_features(fields: Fields, kind: str) -> None:
    for key, only in SUPPORTED.items():
        given = fields.values.get(key)
        if given is not None and given != only:
            allowed = "absent" if only is None else repr(only)
            raise FormatError(fields.file, key, described(given), allowed)
    if kind not in WINDOWED and fields.values.get("sliding_window") is not None:
        raise FormatError(fields.file, "sliding_window", described(fields.values["sliding_window"]), "absent")
