"""Checkpoint directories small enough to write by hand: their weights as published, and the files that hold them."""

import json
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tiny_gguf import ALPHABET

from lowbit.arrays import F32, Array

TYPES = {"F16": 2, "BF16": 2, "F32": 4}
BYTES = TYPES | {"I32": 4, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E8M0": 1}
INDEX = "model.safetensors.index.json"

MIXTRAL: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 260,
    "max_position_embeddings": 64,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
    "eos_token_id": 2,
}
DENSE = {name: value for name, value in MIXTRAL.items() if "expert" not in name} | {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
}

TOKENIZER: dict[str, Any] = {
    "version": "1.0",
    "truncation": {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0},
    "padding": None,
    "added_tokens": [
        {"id": number, "content": text, "special": True, "normalized": False}
        | {"single_word": False, "lstrip": False, "rstrip": False}
        for number, text in ((1, "<s>"), (2, "</s>"))
    ],
    "normalizer": None,
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    "post_processor": {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    },
    "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    "model": {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "vocab": {"<unk>": 0, "<s>": 1, "</s>": 2}
        | {text: 3 + byte for byte, text in enumerate(ALPHABET)}
        | {"he": 259},
        "merges": ["h e"],
    },
}


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors that such a model is published with, written out once more."""
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    queries, keys = heads * config["head_dim"], config["num_key_value_heads"] * config["head_dim"]
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for number in range(config["num_hidden_layers"]):
        at = f"model.layers.{number}"
        found |= {f"{at}.input_layernorm.weight": (hidden,), f"{at}.post_attention_layernorm.weight": (hidden,)}
        found |= {f"{at}.self_attn.q_proj.weight": (queries, hidden), f"{at}.self_attn.k_proj.weight": (keys, hidden)}
        found |= {f"{at}.self_attn.v_proj.weight": (keys, hidden), f"{at}.self_attn.o_proj.weight": (hidden, queries)}
        if "num_local_experts" not in config:
            found |= {f"{at}.mlp.{part}_proj.weight": (inner, hidden) for part in ("gate", "up")}
            found |= {f"{at}.mlp.down_proj.weight": (hidden, inner)}
            continue
        found |= {f"{at}.block_sparse_moe.gate.weight": (config["num_local_experts"], hidden)}
        for expert in range(config["num_local_experts"]):
            prefix = f"{at}.block_sparse_moe.experts.{expert}"
            found |= {f"{prefix}.w1.weight": (inner, hidden), f"{prefix}.w3.weight": (inner, hidden)}
            found |= {f"{prefix}.w2.weight": (hidden, inner)}
    found |= {"model.norm.weight": (hidden,)}
    return found | ({} if config.get("tie_word_embeddings") else {"lm_head.weight": (config["vocab_size"], hidden)})


@dataclass
class Published:
    """A model as it is published: N × K, each number one that its type can store."""

    config: dict[str, Any]
    tensors: dict[str, F32]
    types: dict[str, str] = field(default_factory=dict)


def published(config: dict[str, Any] | None = None, seed: int = 0) -> Published:
    """Random weights in all three types; routers large enough that choices are clear."""
    config = dict(MIXTRAL if config is None else config)
    rng, tensors, types = np.random.default_rng(seed), dict[str, F32](), dict[str, str]()
    for number, (name, shape) in enumerate(shapes(config).items()):
        types[name] = tuple(TYPES)[number % 3]
        gain = 3.0 if "moe.gate" in name else 1.0
        weights = (
            rng.uniform(0.5, 1.5, shape) if len(shape) == 1 else gain * rng.standard_normal(shape) / shape[1] ** 0.5
        )
        tensors[name] = widened(narrowed(weights.astype(np.float32), types[name]), types[name])
    return Published(config, tensors, types)


def narrowed(weights: F32, kind: str) -> bytes:
    """As they lie in a file; bfloat16 by cutting off the lower half."""
    if kind == "BF16":
        return (weights.view(np.uint32) >> 16).astype("<u2").tobytes()
    return weights.astype({"F16": "<f2", "F32": "<f4"}[kind]).tobytes()


def widened(data: bytes, kind: str) -> Array:
    if kind == "BF16":
        return np.array([struct.unpack("<f", b"\0\0" + data[i : i + 2])[0] for i in range(0, len(data), 2)], np.float32)
    return np.frombuffer(data, {"F16": "<f2", "F32": "<f4"}[kind]).astype(np.float32)


def shard(tensors: dict[str, F32], types: dict[str, str]) -> bytes:
    """A safetensors file by its definition."""
    header, data = dict[str, Any](), b""
    for name, weights in tensors.items():
        stored = narrowed(weights, types[name])
        place = [len(data), len(data) + len(stored)]
        header[name] = {"dtype": types[name], "shape": list(weights.shape), "data_offsets": place}
        data += stored
    return crafted(header, data)


def crafted(header: dict[str, Any] | bytes, data: bytes = b"") -> bytes:
    """Any header before any data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def empty(tensors: dict[str, tuple[str, list[int]]]) -> tuple[dict[str, Any], bytes]:
    """The header and the zeros of a safetensors file with tensors of these types and shapes."""
    header, end = dict[str, Any](), 0
    for name, (kind, shape) in tensors.items():
        begin, end = end, end + int(np.prod(shape)) * BYTES[kind]
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
    return header, bytes(end)


def write(
    folder: Path, model: Published | None = None, shards: int = 2, tokenizer: dict[str, Any] | None = None
) -> Path:
    """Write the directory: one file or, with an index, several."""
    model = published() if model is None else model
    folder.mkdir(parents=True, exist_ok=True)
    names = list(model.tensors)
    for name, shape in shapes(model.config).items():
        if name in model.tensors:
            model.tensors[name] = model.tensors[name].reshape(shape)
    files = [f"model-{number + 1:05}-of-{shards:05}.safetensors" for number in range(shards)]
    files = ["model.safetensors"] if shards == 1 else files
    weight_map = {name: files[number * len(files) // len(names)] for number, name in enumerate(names)}
    for file in files:
        held = {name: model.tensors[name] for name in names if weight_map[name] == file}
        (folder / file).write_bytes(shard(held, model.types))
    if shards > 1:
        (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(model.config))
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER if tokenizer is None else tokenizer))
    return folder


def copied(
    folder: Path, to: Path, files: dict[str, bytes] | None = None, *, config: dict[str, Any] | None = None
) -> Path:
    """The directory again, with some of its files replaced."""
    path = to / "copy"
    path.mkdir()
    for file in folder.iterdir():
        (path / file.name).symlink_to(file)
    replaced = (files or {}) | ({} if config is None else {"config.json": json.dumps(config).encode()})
    for name, content in replaced.items():
        (path / name).unlink(missing_ok=True)
        (path / name).write_bytes(content)
    return path
