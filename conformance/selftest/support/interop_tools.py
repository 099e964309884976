"""The tools that `interop` reads with: what each makes of a model that lowbit has written.

A function loads a directory or file, and gives what its tool has: numbers of matrices, tokens, logits. Each also says
how its arithmetic rounds. A package is imported where it is used, so one that is missing costs its own rows only.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lowbit.arrays import F32
from lowbit.formats.gguf.reader import open_gguf
from lowbit.runtime.stored import open_model

TEXT = "The rabbit-hole went straight on like a tunnel for some way, and then dipped suddenly down."
HALF = 2.0**-11
"""A rounding to float16, over the number."""
INT8 = 0.005
"""The relative error of a product whose inputs are rounded to 8 bits in blocks of 32."""
NOISE = {"F32": 0.0, "F16": HALF / 2, "BF16": 2.0**-9}
"""That of a product of llama.cpp, whose inputs are rounded to the type of the weights; `INT8` for quantised ones."""


@dataclass(frozen=True)
class Found:
    """What a tool makes of a model; None for what it does not give.

    Attributes:
        weight: the numbers of a module, N × K.
        tokens: those of `TEXT`.
        logits: after each of them.
        rounding: a number of `weight` may differ by this part of it.
        noise: the relative error of a product beside that of float32.
    """

    weight: Callable[[str], F32] | None = None
    tokens: list[int] | None = None
    logits: F32 | None = None
    rounding: float = 0.0
    noise: float = 0.0


def of_transformers(path: Path) -> Found:
    """transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, device_map="cpu").eval()
    tokens = AutoTokenizer.from_pretrained(path)(TEXT)["input_ids"]
    return Found(tokens=tokens, logits=_run(path, model))


def of_transformers_codes(path: Path) -> Found:
    """transformers with GPTQModel."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, device_map="cpu").eval()
    tokens = AutoTokenizer.from_pretrained(path)(TEXT)["input_ids"]
    return Found(_weight_of(model), tokens, _run(path, model), rounding=HALF, noise=HALF / 2)


def of_transformers_gguf(path: Path) -> Found:
    """transformers with gguf."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    return Found(logits=_run(path, model))  # its tokenizers of GGUF leave parts of the pre-tokenizers out


def of_compressed(path: Path) -> Found:
    """transformers with compressed-tensors."""
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    config = CompressedTensorsConfig(run_compressed=False)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, quantization_config=config).eval()

    def weight(module: str) -> F32:
        found: F32 = model.get_submodule(module).weight.detach().float().numpy()
        return found

    return Found(weight=weight, logits=_run(path, model), rounding=HALF, noise=HALF / 2)


def _run(path: Path, model: Any) -> F32:
    """The logits of a model of torch after every token of `TEXT`."""
    with torch.no_grad():
        logits: F32 = model(torch.tensor([open_model(path).tokenizer.encode(TEXT)])).logits[0].float().numpy()
    return logits


def of_hqq(path: Path) -> Found:
    """hqq."""
    from hqq.core.quantize import HQQLinear
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(path)
    del config.quantization_config  # transformers 5.24 reads it and makes no layer of hqq of it
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    tensors = {name: each for file in sorted(path.glob("*.safetensors")) for name, each in load_file(file).items()}
    modules = {name.removesuffix(".W_q") for name in tensors if name.endswith(".W_q")}
    for module in modules:
        own = {name.removeprefix(f"{module}."): tensors.pop(name) for name in list(tensors) if name.startswith(module)}
        layer = HQQLinear(None, None, compute_dtype=torch.float32, device="cpu", initialize=False)
        layer.load_state_dict(own)
        layer.meta |= {"scale": layer.meta["scale"].float(), "zero": layer.meta["zero"].float()}
        layer.compute_dtype = layer.meta["compute_dtype"] = torch.float32
        layer.ready = True
        model.set_submodule(module, layer)
    missing = model.load_state_dict(tensors, strict=False)
    left = [name for name in missing.missing_keys if name.rpartition(".")[0] not in modules]
    assert left in ([], ["lm_head.weight"]) and not missing.unexpected_keys, missing
    model.tie_weights()

    def weight(module: str) -> F32:
        found: F32 = model.get_submodule(module).dequantize().detach().float().numpy()
        return found

    return Found(weight=weight, logits=_run(path, model))


def of_gptqmodel(path: Path) -> Found:
    """GPTQModel."""
    from gptqmodel import BACKEND, GPTQModel

    model = GPTQModel.load(str(path), device="cpu", backend=BACKEND.TORCH, dtype=torch.float16).model
    return Found(_weight_of(model), logits=_run(path, model), rounding=HALF, noise=HALF)


def _weight_of(model: Any) -> Callable[[str], F32] | None:
    """The matrices of a model of GPTQModel; its layers of AWQ have no method that gives them."""

    def weight(module: str) -> F32:
        found: F32 = model.get_submodule(module).dequantize_weight().T.float().numpy()
        return found

    layers = [module for name, module in model.named_modules() if name.endswith("q_proj")]
    return weight if all(hasattr(layer, "dequantize_weight") for layer in layers) else None


def of_llama_cpp(path: Path) -> Found:
    """llama.cpp."""
    from llama_cpp import GGML_TYPE_F32, Llama

    own = open_model(path).tokenizer.encode(TEXT)
    kinds = {"type_k": GGML_TYPE_F32, "type_v": GGML_TYPE_F32}
    model = Llama(str(path), n_ctx=256, n_batch=256, n_gpu_layers=0, logits_all=True, verbose=False, **kinds)
    model.eval(own)
    logits = np.array(model.scores[: len(own)], np.float32)
    tokens = model.tokenize(TEXT.encode(), add_bos=True, special=True)
    tensors = open_gguf(path).header.tensors.values()
    return Found(tokens=tokens, logits=logits, noise=max(NOISE.get(each.type.name, INT8) for each in tensors))


TOOLS: dict[str, tuple[Callable[[Path], Found], ...]] = {
    "gptq-v2": (of_gptqmodel, of_transformers_codes),
    "gptq-v1": (of_gptqmodel, of_transformers_codes),
    "awq": (of_gptqmodel, of_transformers_codes),
    "compressed-tensors": (of_compressed,),
    "hqq": (of_hqq,),
    "gguf": (of_transformers_gguf, of_llama_cpp),
    "floats": (of_transformers,),
}
