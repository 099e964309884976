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
from transformers import AutoConfig, AutoModelForCausalLM

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
}


def weights_of(name: str, shape: torch.Size, make: torch.Generator) -> torch.Tensor:
    """Random weights, large enough that attention is not uniform and every logit is."""
    if len(shape) == 1:
        return torch.randn(shape, generator=make) * (0.5 if "bias" in name else 0.2) + (0.0 if "bias" in name else 1.0)
    gain = 1.0 if "embed_tokens" in name else (2.0 if "q_proj" in name or "k_proj" in name else 1.2)
    return gain * torch.randn(shape, generator=make) / (1.0 if "embed_tokens" in name else shape[1] ** 0.5)


def write(name: str) -> None:
    """One directory."""
    folder = HERE / name
    folder.mkdir(exist_ok=True)
    given = MODELS[name]
    (folder / "config.json").write_text(json.dumps(given, indent=1) + "\n")
    config = AutoConfig.from_pretrained(folder, attn_implementation="eager")
    config.dtype = torch.float32
    model = AutoModelForCausalLM.from_config(config).float().eval()
    make = torch.Generator().manual_seed(list(MODELS).index(name))
    with torch.no_grad():
        for part, weights in model.named_parameters():
            weights.copy_(weights_of(part, weights.shape, make).half().float())
        tokens = torch.randint(0, config.vocab_size, (1, TOKENS), generator=make)
        logits = model(tokens).logits[0]
    model.half().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(given, indent=1) + "\n")  # as it is published, not as it is kept now
    (folder / "generation_config.json").unlink(missing_ok=True)
    np.savez(folder / "expected.npz", tokens=tokens[0].numpy(), logits=logits.numpy())


if __name__ == "__main__":
    for each in sys.argv[1:] or MODELS:
        write(each)
