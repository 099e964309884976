"""Decoders small enough to write by hand: their published weights, and the GGUF files that hold them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quants

from lowbit.arrays import F32
from lowbit.model.config import LlamaConfig

Change = Callable[[GGUFWriter], None]

GGML_F32, Q4_1 = GGMLQuantizationType.F32, GGMLQuantizationType.Q4_1

# GPT-2's alphabet: a printable character for each byte. Bytes that print stand for themselves, in order of value.
PRINTING = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
ALPHABET = [chr(byte) if byte in PRINTING else "" for byte in range(256)]
for number, byte in enumerate(byte for byte in range(256) if byte not in PRINTING):
    ALPHABET[byte] = chr(256 + number)

SPECIAL = ["<|end|>", "<|begin|>"]
MERGED = ["he", "ll", "hell", "hello", "Ġhello", "Ġ1", "12"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ hello", "Ġ 1", "1 2"]
TOKENS = [*SPECIAL, *ALPHABET, *MERGED]

CONFIG = LlamaConfig(
    layers=2,
    hidden=64,
    feed_forward=96,
    heads=4,
    kv_heads=2,
    head_dim=16,
    vocabulary=len(TOKENS),
    context=64,
    rope_base=10000.0,
    rms_epsilon=1e-5,
)


@dataclass(frozen=True)
class Published:
    """Weights as they are published: N × K, half-split channels, exactly representable in their stored type.

    The gains of a Gemma are those that multiply, as its files have them.
    """

    config: LlamaConfig
    tensors: dict[str, F32]
    types: dict[str, GGMLQuantizationType] = field(default_factory=dict)
    architecture: str = "llama"


def published(
    seed: int = 0,
    config: LlamaConfig = CONFIG,
    kind: GGMLQuantizationType = Q4_1,
    head_kind: GGMLQuantizationType = GGMLQuantizationType.Q8_0,
    tied: bool = True,
    architecture: str = "llama",
) -> Published:
    """Random weights, rounded to what `kind` (the blocks) and `head_kind` (embedding and head) can store.

    The vectors are those of the architecture: biases for ``qwen2``, further norms for ``qwen3`` and ``gemma3``.
    """
    rng = np.random.default_rng(seed)
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    hidden, inner = config.hidden, config.feed_forward
    shapes = {"token_embd": (config.vocabulary, hidden)} | ({} if tied else {"output": (config.vocabulary, hidden)})
    for i in range(config.layers):
        shapes |= {f"blk.{i}.attn_q": (queries, hidden), f"blk.{i}.attn_k": (keys, hidden)}
        shapes |= {f"blk.{i}.attn_v": (keys, hidden), f"blk.{i}.attn_output": (hidden, queries)}
        shapes |= {f"blk.{i}.ffn_gate": (inner, hidden), f"blk.{i}.ffn_up": (inner, hidden)}
        shapes |= {f"blk.{i}.ffn_down": (hidden, inner)}
    norms = ["output_norm", *(f"blk.{i}.{n}" for i in range(config.layers) for n in ("attn_norm", "ffn_norm"))]
    tensors: dict[str, F32] = {}
    types: dict[str, GGMLQuantizationType] = {}
    for name, (outputs, inputs) in shapes.items():
        types[name] = head_kind if name in ("token_embd", "output") else kind
        weights = rng.standard_normal((outputs, inputs)).astype(np.float32) / np.float32(np.sqrt(inputs))
        tensors[name] = quants.dequantize(quants.quantize(weights, types[name]), types[name])
    for name in norms:
        types[name], tensors[name] = GGML_F32, rng.uniform(0.5, 1.5, hidden).astype(np.float32)
    for i in range(config.layers):
        if architecture in ("qwen3", "gemma3"):
            sizes = dict.fromkeys(("attn_q_norm", "attn_k_norm"), config.head_dim)
            if architecture == "gemma3":
                sizes |= dict.fromkeys(("post_attention_norm", "post_ffw_norm"), hidden)
            for name, size in sizes.items():
                tensors[f"blk.{i}.{name}"] = rng.uniform(0.5, 1.5, size).astype(np.float32)
        if architecture == "qwen2":
            for name, size in {"attn_q": queries, "attn_k": keys, "attn_v": keys}.items():
                tensors[f"blk.{i}.{name}.bias"] = rng.standard_normal(size).astype(np.float32)
    return Published(config, tensors, dict.fromkeys(tensors, GGML_F32) | types, architecture)


def write(
    path: Path,
    model: Published | None = None,
    *,
    architecture: str | None = None,
    tokens: list[str] = TOKENS,
    merges: list[str] = MERGES,
    metadata: dict[str, Any] | None = None,
    change: Change | None = None,
) -> Path:
    """Write the GGUF file that a converter would make: for a Llama with rows permuted to interleaved pairs.

    Args:
        path: where.
        model: what; by default `published()`.
        architecture: its name, that of the model if it is not given; keys are under it.
        tokens: the vocabulary.
        merges: its merges.
        metadata: by key, instead of what stands below; None leaves a key out.
        change: called with the writer before the file is written.
    """
    model = published() if model is None else model
    config, architecture = model.config, architecture or model.architecture
    types = [3 if token in SPECIAL else 1 for token in tokens]
    values: dict[str, Any] = {
        "block_count": config.layers,
        "context_length": config.context,
        "embedding_length": config.hidden,
        "feed_forward_length": config.feed_forward,
        "attention.head_count": config.heads,
        "attention.head_count_kv": config.kv_heads,
        "rope.freq_base": config.rope_base,
        "attention.layer_norm_rms_epsilon": config.rms_epsilon,
    }
    if architecture in ("qwen3", "gemma3"):
        values |= {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}
    if architecture == "gemma3":
        values |= {"attention.sliding_window": config.window, "attention.sliding_window_pattern": config.full_every}
        values |= {"rope.freq_base_swa": config.local_rope_base}
    values = {f"{architecture}.{key}": value for key, value in values.items()}
    values |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm"}
    values |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": merges, "tokenizer.ggml.token_type": types}
    values |= {"tokenizer.ggml.eos_token_id": 0, "tokenizer.ggml.bos_token_id": 1}
    writer = GGUFWriter(path, architecture)
    for key, value in (values | (metadata or {})).items():
        add(writer, key, value)
    for name, weights in model.tensors.items():
        kind = model.types[name]
        stored = weights
        for part, heads in (("attn_q", config.heads), ("attn_k", config.kv_heads)):
            if name.endswith(part) and model.architecture == "llama":
                stored = weights.reshape(heads, 2, config.head_dim // 2, -1).swapaxes(1, 2).reshape(weights.shape)
        data = np.ascontiguousarray(stored) if kind == GGML_F32 else quants.quantize(np.ascontiguousarray(stored), kind)
        writer.add_tensor(name if name.endswith(".bias") else f"{name}.weight", data, raw_dtype=kind)
    if config.rope_scaling is not None:
        writer.add_tensor("rope_freqs.weight", np.array(config.rope_scaling.factors, np.float32))
    if change is not None:
        change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add(writer: GGUFWriter, key: str, value: Any) -> None:
    """Add a number, a text or a list to the metadata; None for nothing."""
    kinds: dict[type, Callable[[str, Any], None]] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    if value is not None:
        kinds[type(value)](key, value)
