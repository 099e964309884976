"""The trained model as the specification's decoder reads it: float16 weights, taken as float32."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from lowbit.config import LlamaConfig, Routing
from lowbit.weights import Floats, GatedWeights, LayerWeights, LlamaWeights, SparseWeights

MODEL = Path(__file__).parent / "model"


def load_model(folder: Path = MODEL) -> LlamaWeights:
    """Every tensor of the directory, K × N."""
    told = json.loads((folder / "config.json").read_text("utf-8"))
    config = LlamaConfig(
        layers=told["num_hidden_layers"],
        hidden=told["hidden_size"],
        feed_forward=told["intermediate_size"],
        heads=told["num_attention_heads"],
        kv_heads=told["num_key_value_heads"],
        head_dim=told["head_dim"],
        vocabulary=told["vocab_size"],
        context=told["max_position_embeddings"],
        rope_base=told["rope_theta"],
        rms_epsilon=told["rms_norm_eps"],
        routing=Routing(told["num_local_experts"], told["num_experts_per_tok"]),
    )
    tensors = {name: array for file in sorted(folder.glob("*.safetensors")) for name, array in load_file(file).items()}

    def vector(name: str) -> Floats:
        return tensors[f"{name}.weight"].astype(np.float32)

    def matrix(name: str) -> Floats:
        return np.ascontiguousarray(vector(name).T)

    layers = []
    for number in range(config.layers):
        block = f"model.layers.{number}"
        sparse = f"{block}.block_sparse_moe"
        experts = tuple(
            GatedWeights(*(matrix(f"{sparse}.experts.{expert}.{part}") for part in ("w1", "w3", "w2")))
            for expert in range(told["num_local_experts"])
        )
        query, key, value, output = (matrix(f"{block}.self_attn.{part}_proj") for part in "qkvo")
        norms = (vector(f"{block}.{part}_layernorm") for part in ("input", "post_attention"))
        feed_forward = SparseWeights(matrix(f"{sparse}.gate"), experts)
        layers.append(LayerWeights(next(norms), query, key, value, output, next(norms), feed_forward))
    embedding = vector("model.embed_tokens")
    return LlamaWeights(config, embedding, tuple(layers), vector("model.norm"), matrix("lm_head"))
