"""GGUF files of tiny checkpoint directories, with the names and numbers that llama.cpp's converter writes."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter
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
    **dict.fromkeys(("smollm3", "phi3"), PARTS),
    **dict.fromkeys(("olmo2", "olmo3"), PARTS | POST_NORMS),
    "gemma2": PARTS | GEMMA_NORMS,
}
WRITTEN = {"olmo3": "olmo2"}
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
        writer.add_tensor(tensor, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tensors(folder: Path, kind: str, config: dict[str, Any]) -> dict[str, Array]:
    """The tensors of a file: vectors in float32, and rotary pairs side by side where llama.cpp has them so."""
    found: dict[str, Array] = {}
    for stored, data in load_file(folder / "model.safetensors").items():
        name, given = renamed(stored, NAMES[kind]), data
        if kind == "gemma2" and stored.endswith("norm.weight"):
            given = 1 + data.astype(np.float32)
        if kind == "smollm3" and name.endswith(("attn_q.weight", "attn_k.weight")):
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


# **What a kind of model adds to the numbers that all have.**


def _smollm3(config: dict[str, Any]) -> dict[str, Any]:
    head_dim = config["head_dim"]
    lengths = dict.fromkeys(("attention.key_length", "attention.value_length"), head_dim)
    return {"vocab_size": config["vocab_size"], "rope.dimension_count": head_dim, **lengths}


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


EXTRA = {"gemma2": _gemma2, "smollm3": _smollm3, "olmo2": _olmo, "olmo3": _olmo, "phi3": _phi3}
