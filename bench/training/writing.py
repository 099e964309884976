"""Writing a trained model as a checkpoint directory, in the form in which such models are published.

Weights are float16 in two shards with an index, `config.json` names the architecture, and `tokenizer.json` is a
byte-level tokenizer of 256 tokens without merges: the token of a byte is the byte. Every file is written to a temporary
name and renamed.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save

from lowbit.formats.checkpoint.tokenizer import byte_tokenizer
from lowbit.system.storage import write_whole
from training.files import as_json
from training.models import Shape
from training.network import Parameters, Tensor

SHARDS = 2


def write_model(folder: Path, parameters: Parameters, shape: Shape, balance: float) -> dict[str, dict[str, Any]]:
    """Write the directory; answers with size and sum of each file."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.detach().half().contiguous() for name, value in cut(parameters).items()}
    index, contents = dict[str, str](), dict[str, bytes]()
    for number, names in enumerate(shards(tensors)):
        file = f"model-{number + 1:05}-of-{SHARDS:05}.safetensors"
        index |= dict.fromkeys(names, file)
        contents[file] = save({name: tensors[name] for name in names}, metadata={"format": "pt"})
    total = sum(2 * tensor.numel() for tensor in tensors.values())
    listed = {"metadata": {"total_size": total}, "weight_map": dict(sorted(index.items()))}
    contents["model.safetensors.index.json"] = as_json(listed)
    contents["config.json"] = as_json(config(shape, balance))
    contents["tokenizer.json"] = byte_tokenizer()
    for name, content in contents.items():
        write_whole(folder / name, content)
    return {name: {"bytes": len(c), "sha256": hashlib.sha256(c).hexdigest()} for name, c in sorted(contents.items())}


def cut(parameters: Parameters) -> dict[str, Tensor]:
    """The stacked experts one by one, under the names that a checkpoint has for them."""
    result = dict[str, Tensor]()
    for name, value in parameters.items():
        before, stacked, after = name.partition(".experts.")
        if stacked:
            result |= {f"{before}.experts.{number}.{after}": matrix for number, matrix in enumerate(value)}
        else:
            result[name] = value
    return result


def shards(tensors: Mapping[str, Tensor]) -> list[list[str]]:
    """The names in order, cut where a shard has its part of the elements."""
    part = sum(tensor.numel() for tensor in tensors.values()) / SHARDS
    result: list[list[str]] = [[] for _ in range(SHARDS)]
    written = 0
    for name, tensor in tensors.items():
        result[min(int(written / part), SHARDS - 1)].append(name)
        written += tensor.numel()
    return result


def config(shape: Shape, balance: float) -> dict[str, Any]:
    """`config.json`."""
    router = {"output_router_logits": False, "router_aux_loss_coef": balance, "router_jitter_noise": 0.0}
    return {
        "architectures": ["MixtralForCausalLM" if shape.sparse else "LlamaForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": None,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "model_type": "mixtral" if shape.sparse else "llama",
        **(router if shape.sparse else {}),
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "use_cache": True,
        **shape.numbers(),
    }
