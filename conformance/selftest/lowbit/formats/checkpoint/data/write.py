"""Write the directories beside this script: tiny random models, and their logits by the code of ``transformers``.

Usage: ``python write.py [NAME ...]``. It needs torch, numpy and transformers; the files are of torch 2.13.0 on a CPU
and transformers 5.24.0.

Weights are random float16 numbers with a fixed seed, the model computes in float32, and `expected.npz` holds the tokens
that it read and the logits after each of them. A model with a window or a scaled rotation reads more tokens than those
say, so that each of them counts.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

HERE = Path(__file__).parent
TOKENS = 40

SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 48,
    "max_position_embeddings": 64,
    "rope_theta": 5000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
}
LLAMA = SIZES | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}

MODELS: dict[str, dict[str, Any]] = {
    "llama3": LLAMA | {"rope_scaling": LLAMA3 | {"rope_type": "llama3"}, "tie_word_embeddings": True},
    "llama-linear": LLAMA | {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama-yarn": LLAMA
    | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
    "llama-dynamic": LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 4.0}, "max_position_embeddings": 16},
    "llama-long": LLAMA
    | {
        "rope_scaling": {
            "rope_type": "longrope",
            "short_factor": [1.0, 1.25, 2.0, 3.0],
            "long_factor": [1.0, 2.5, 6.0, 9.0],
            "factor": 8.0,
            "attention_factor": 1.25,
            "original_max_position_embeddings": 64,
        },
        "max_position_embeddings": 128,
    },
    "llama-proportional": {name: value for name, value in LLAMA.items() if name != "rope_theta"}
    | {"rope_parameters": {"rope_type": "proportional", "rope_theta": 50.0, "partial_rotary_factor": 0.5}},
    "llama-newer": {name: value for name, value in LLAMA.items() if name != "rope_theta"}
    | {"rope_parameters": LLAMA3 | {"rope_type": "llama3", "rope_theta": 5000.0}},
    "qwen2": SIZES
    | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True}
    | {
        "use_sliding_window": False,
        "sliding_window": 8,
        "max_window_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": None,
    },
    "qwen3": SIZES
    | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 12, "attention_bias": False}
    | {"use_sliding_window": False, "sliding_window": None, "max_window_layers": 2},
    "mistral": SIZES | {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 8},
    "mixtral": SIZES
    | {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "sliding_window": None}
    | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3-moe": SIZES
    | {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "moe_intermediate_size": 16}
    | {"num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": True, "decoder_sparse_step": 1}
    | {"mlp_only_layers": [], "use_sliding_window": False},
    "gemma3": {name: value for name, value in SIZES.items() if name != "tie_word_embeddings"}
    | {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 4}
    | {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 8, "sliding_window": 8}
    | {"sliding_window_pattern": 3, "rope_local_base_freq": 100.0, "attn_logit_softcapping": None}
    | {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "gemma2": {name: value for name, value in SIZES.items() if name not in ("tie_word_embeddings", "rope_theta")}
    | {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "num_hidden_layers": 3, "rope_theta": 5000.0}
    | {"hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh", "query_pre_attn_scalar": 4}
    | {
        "sliding_window": 8,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "cache_implementation": "hybrid",
    },
    "gemma3-scaled": {name: value for name, value in SIZES.items() if name != "tie_word_embeddings"}
    | {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 2}
    | {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 3, "sliding_window": 8}
    | {"sliding_window_pattern": 2, "rope_local_base_freq": 100.0},
    "gemma3-kinds": {name: value for name, value in SIZES.items() if name not in ("tie_word_embeddings", "rope_theta")}
    | {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 2}
    | {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 8, "sliding_window": 8}
    | {"layer_types": ["sliding_attention", "full_attention"]}
    | {
        "rope_parameters": {
            "sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0},
            "full_attention": {
                "rope_type": "proportional",
                "factor": 2.0,
                "rope_theta": 50.0,
                "partial_rotary_factor": 0.5,
            },
        }
    },
    "smollm3": SIZES
    | {"model_type": "smollm3", "architectures": ["SmolLM3ForCausalLM"], "num_hidden_layers": 3}
    | {"no_rope_layers": [1, 0, 1], "no_rope_layer_interval": 2, "use_sliding_window": False, "mlp_bias": False}
    | {"layer_types": ["full_attention"] * 3, "tie_word_embeddings": True, "pad_token_id": 0},
    "olmo2": SIZES
    | {"model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"], "attention_bias": False, "pad_token_id": 0},
    "olmo3": SIZES
    | {"model_type": "olmo3", "architectures": ["Olmo3ForCausalLM"], "num_hidden_layers": 5, "sliding_window": 8}
    | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}}
    | {"attention_bias": False, "pad_token_id": 0}
    | {"rope_theta": 500000.0},  # local layers take this number in transformers 5.24, whatever the file says
    "phi3": SIZES
    | {"model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "sliding_window": 12, "rope_scaling": None}
    | {
        "original_max_position_embeddings": 64,
        "partial_rotary_factor": 1.0,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": None,
        "pad_token_id": 0,
    },
}
MODELS["granite"] = SIZES | {
    "model_type": "granite",
    "architectures": ["GraniteForCausalLM"],
    "attention_bias": False,
    "mlp_bias": False,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.25,
    "residual_multiplier": 0.6,
    "logits_scaling": 0.7,
}
MODELS["smollm3-usual"] = {
    name: value for name, value in MODELS["smollm3"].items() if name not in ("no_rope_layers", "layer_types")
} | {"num_hidden_layers": 5, "no_rope_layer_interval": 4}
MODELS["phi3-partial"] = MODELS["phi3"] | {"partial_rotary_factor": 0.75, "sliding_window": None, "rope_theta": 50.0}
MODELS["gpt-oss"] = SIZES | {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "experts_per_token": 2,
    "sliding_window": 8,
    "attention_bias": True,
    "hidden_act": "silu",
    "swiglu_limit": 1.5,
    "initial_context_length": 16,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 1024,
        "truncate": False,
    },
}
MODELS["gpt-oss-mxfp4"] = MODELS["gpt-oss"] | {
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
}
LONG = {"type": "longrope", "short_factor": [1.0, 1.5, 4.0], "long_factor": [2.0, 3.0, 9.0]}
MODELS["phi3-short"] = MODELS["phi3-partial"] | {"rope_scaling": LONG, "max_position_embeddings": 256}
MODELS["phi3-long"] = MODELS["phi3-short"] | {"original_max_position_embeddings": 16}


def weights_of(name: str, shape: torch.Size, make: torch.Generator) -> torch.Tensor:
    """Random weights, large enough that attention is not uniform and every logit is."""
    if len(shape) == 1 or name.endswith("_bias"):
        return torch.randn(shape, generator=make) * (0.5 if "bias" in name else 0.2) + (0.0 if "bias" in name else 1.0)
    gain = 1.0 if "embed_tokens" in name else (2.0 if "q_proj" in name or "k_proj" in name else 1.2)
    return gain * torch.randn(shape, generator=make) / (1.0 if "embed_tokens" in name else shape[1] ** 0.5)


def coded_experts(model: Any, make: torch.Generator) -> dict[str, torch.Tensor]:
    """Experts in MXFP4 with random codes, and their numbers in the model."""
    found: dict[str, torch.Tensor] = {}
    for part, weights in model.named_parameters():
        if part.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, rows, columns = weights.shape
            shape = (experts, columns, rows // 32)
            blocks = torch.randint(0, 256, (*shape, 16), generator=make, dtype=torch.uint8)
            scales = torch.randint(122, 126, shape, generator=make, dtype=torch.uint8)
            weights.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).reshape(weights.shape))
            found |= {f"{part}_blocks": blocks, f"{part}_scales": scales}
    return found


def save_gpt_oss(model: Any, folder: Path, coded: dict[str, torch.Tensor]) -> None:
    """The tensors as they are published, which are those of the model, with experts as they were coded."""
    kept = {name: part.half().contiguous() for name, part in model.named_parameters() if f"{name}_blocks" not in coded}
    save_file(kept | coded, folder / "model.safetensors", {"format": "pt"})


def write(name: str) -> None:
    """One directory."""
    folder = HERE / name
    folder.mkdir(exist_ok=True)
    given = {
        key: value
        for key, value in MODELS[name].items()
        if key not in ("head_dim", "no_rope_layers", "layer_types") or value is not None
    }
    (folder / "config.json").write_text(json.dumps(given, indent=1) + "\n")
    config = AutoConfig.from_pretrained(folder, attn_implementation="eager")
    config.dtype, config.quantization_config = torch.float32, None
    model = AutoModelForCausalLM.from_config(config).float().eval()
    make = torch.Generator().manual_seed(sum(name.encode()))
    with torch.no_grad():
        for part, weights in model.named_parameters():
            weights.copy_(weights_of(part, weights.shape, make).half().float())
        coded = coded_experts(model, make) if "quantization_config" in given else {}
        tokens = torch.randint(0, config.vocab_size, (1, TOKENS), generator=make)
        logits = model(tokens).logits[0]
    if config.model_type == "gpt_oss":
        save_gpt_oss(model, folder, coded=coded)
    else:
        model.half().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(given, indent=1) + "\n")  # as it is published, not as it is kept now
    (folder / "generation_config.json").unlink(missing_ok=True)
    np.savez(folder / "expected.npz", tokens=tokens[0].numpy(), logits=logits.numpy())


if __name__ == "__main__":
    for each in sys.argv[1:] or MODELS:
        write(each)
