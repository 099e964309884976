"""GGUF files of tiny checkpoint directories, with the names and numbers that llama.cpp's converter writes."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from safetensors.numpy import load_file
from tiny_gguf import add

from lowbit.arrays import Array

NUMBERS = {
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rope_theta": "rope.freq_base",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
TENSORS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.sinks": "attn_sinks",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
POST_NORMS = {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"}
GEMMA_NORMS = POST_NORMS | {"pre_feedforward_layernorm": "ffn_norm"}
NAMES = {
    **dict.fromkeys(("smollm3", "granite", "phi3"), PARTS),
    **dict.fromkeys(("olmo2", "olmo3"), PARTS | POST_NORMS),
    "gemma2": PARTS | GEMMA_NORMS,
    "gpt_oss": PARTS | {"post_attention_layernorm": "post_attention_norm", "mlp.router": "ffn_gate_inp"},
}
WRITTEN = {"olmo3": "olmo2", "gpt_oss": "gpt-oss"}
"""Architectures that are not named as in the directory."""


def converted(folder: Path, path: Path, **change: Any) -> Path:
    """Write the file of a directory.

    Args:
        folder: the directory.
        path: where.
        change: metadata by key, with ``__`` for a dot, instead of those of the directory; None leaves a key out.
    """
    config = json.loads((folder / "config.json").read_text())
    kind = config["model_type"]
    name = WRITTEN.get(kind, kind)
    writer = GGUFWriter(path, name)
    values = {key: config[field] for field, key in NUMBERS.items()} | EXTRA.get(kind, lambda _: {})(config)
    values |= {key.replace("__", "."): value for key, value in change.items()}
    for key, value in values.items():
        add(writer, f"{name}.{key}", value)
    for tensor, data in tensors(folder, kind, config).items():
        coded = data.dtype == np.uint8
        writer.add_tensor(tensor, data, raw_dtype=GGMLQuantizationType.MXFP4 if coded else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tensors(folder: Path, kind: str, config: dict[str, Any]) -> dict[str, Array]:
    """The tensors of a file: vectors in float32, and rotary pairs side by side where llama.cpp has them so."""
    found: dict[str, Array] = {}
    held = load_file(folder / "model.safetensors")
    if kind == "gpt_oss":
        found, held = _experts(held), {name: data for name, data in held.items() if ".experts." not in name}
        held = {name.replace("sinks", "sinks.weight"): data for name, data in held.items()}
    for stored, data in held.items():
        name, given = renamed(stored, NAMES[kind]), data
        if kind == "gemma2" and stored.endswith("norm.weight"):
            given = 1 + data.astype(np.float32)
        if kind in ("smollm3", "granite") and name.endswith(("attn_q.weight", "attn_k.weight")):
            head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
            given = data.reshape(-1, 2, head_dim // 2, data.shape[1]).swapaxes(1, 2).reshape(data.shape)
        found[name] = np.ascontiguousarray(given if given.ndim > 1 else given.astype(np.float32))
    scaling = config.get("rope_scaling") or {}
    for length in ("short", "long"):
        if f"{length}_factor" in scaling:
            found[f"rope_factors_{length}.weight"] = np.array(scaling[f"{length}_factor"], np.float32)
    return found


def renamed(stored: str, parts: dict[str, str]) -> str:
    """The name of a tensor in the file."""
    if stored in TENSORS:
        return TENSORS[stored]
    _, _, number, rest = stored.split(".", 3)
    part, _, ending = rest.rpartition(".")
    return f"blk.{number}.{parts[part]}.{ending}"


def _experts(held: dict[str, Array]) -> dict[str, Array]:
    """The tensors of stacked experts: gate and up apart, outputs before inputs, and blocks in ggml's order."""
    found: dict[str, Array] = {}
    for stored, data in held.items():
        number, _, part = stored.removeprefix("model.layers.").partition(".mlp.experts.")
        if stored.endswith("_scales") or not part:
            continue
        whole, kind = data, "bias" if part.endswith("_bias") else "weight"
        if part.endswith("_blocks"):
            whole = _blocks(data, held[stored.replace("_blocks", "_scales")])
        elif kind == "weight":
            whole = data.swapaxes(1, 2)
        names = ("gate", "up") if part.startswith("gate_up") else ("down",)
        for place, name in enumerate(names):
            own = np.ascontiguousarray(whole[:, place :: len(names)])
            found[f"blk.{number}.ffn_{name}_exps.{kind}"] = own.astype(np.float32) if kind == "bias" else own
    return found


def _blocks(pairs: Array, scales: Array) -> Array:
    """Blocks of ggml: a scale and 16 bytes with elements j and j + 16, from bytes with elements 2j and 2j + 1."""
    codes = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(*pairs.shape[:-1], 32)
    packed = codes[..., :16] | codes[..., 16:] << 4
    blocks: Array = np.concatenate([scales[..., np.newaxis], packed], axis=-1)
    return blocks.reshape(*pairs.shape[:2], -1)


# **What a kind of model adds to the numbers that all have.**


def _smollm3(config: dict[str, Any]) -> dict[str, Any]:
    head_dim = config["head_dim"]
    lengths = dict.fromkeys(("attention.key_length", "attention.value_length"), head_dim)
    return {"vocab_size": config["vocab_size"], "rope.dimension_count": head_dim, **lengths}


def _granite(config: dict[str, Any]) -> dict[str, Any]:
    return _smollm3(config) | {
        "attention.scale": config["attention_multiplier"],
        "embedding_scale": config["embedding_multiplier"],
        "residual_scale": config["residual_multiplier"],
        "logit_scale": config["logits_scaling"],
    }


def _olmo(config: dict[str, Any]) -> dict[str, Any]:
    values = dict.fromkeys(("attention.key_length", "attention.value_length"), config["head_dim"])
    if "sliding_window" in config:
        local = [(layer + 1) % 4 != 0 for layer in range(config["num_hidden_layers"])]
        values |= {"attention.sliding_window": config["sliding_window"], "attention.sliding_window_pattern": local}
    scaling = config.get("rope_scaling")
    if scaling:
        values |= {"rope.scaling.type": scaling["rope_type"], "rope.scaling.factor": scaling["factor"]}
        values |= {"rope.scaling.original_context_length": scaling["original_max_position_embeddings"]}
    return values


def _phi3(config: dict[str, Any]) -> dict[str, Any]:
    original, most = config["original_max_position_embeddings"], config["max_position_embeddings"]
    values: dict[str, Any] = {
        "rope.scaling.original_context_length": original,
        "rope.dimension_count": int(config["partial_rotary_factor"] * config["hidden_size"])
        // config["num_attention_heads"],
        "attention.sliding_window": config["sliding_window"] or 0,
    }
    if config["rope_scaling"]:
        values["rope.scaling.attn_factor"] = math.sqrt(1 + math.log(most / original) / math.log(original))
    return values


def _gemma2(config: dict[str, Any]) -> dict[str, Any]:
    values = dict.fromkeys(("attention.key_length", "attention.value_length"), config["head_dim"])
    caps = {name: config[name] for name in ("attn_logit_softcapping", "final_logit_softcapping")}
    return values | caps | {"attention.sliding_window": config["sliding_window"]}


def _gpt_oss(config: dict[str, Any]) -> dict[str, Any]:
    scaling = config["rope_scaling"]
    return {
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.sliding_window": config["sliding_window"],
        "expert_count": config["num_local_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_feed_forward_length": config["intermediate_size"],
        "rope.scaling.type": scaling["rope_type"],
        "rope.scaling.factor": scaling["factor"],
        "rope.scaling.original_context_length": scaling["original_max_position_embeddings"],
        "rope.scaling.yarn_beta_fast": scaling["beta_fast"],
        "rope.scaling.yarn_beta_slow": scaling["beta_slow"],
    }


EXTRA = {
    "gpt_oss": _gpt_oss,
    "gemma2": _gemma2,
    "smollm3": _smollm3,
    "granite": _granite,
    "olmo2": _olmo,
    "olmo3": _olmo,
    "phi3": _phi3,
}
