"""Write the directories beside this script: tiny random models, quantised by the tools that own the formats, on a CPU.

Usage: ``python write.py [NAME ...]``. It needs torch, numpy, transformers and each tool: gptqmodel, auto-round,
autoawq, compressed-tensors, bitsandbytes, hqq. The files are of torch 2.13.0, transformers 5.24.0, gptqmodel 7.7.0,
auto-round 0.16.1, autoawq 0.2.9, compressed-tensors 0.20.0, bitsandbytes 0.50.2 and hqq 0.2.8.

Each tool quantises or packs the linear layers of a float model, and dequantises them again with its own code, in
float32 where it can. ``expected.npz`` holds the SHA-256 of each dequantised matrix (float32, N x K, without negative
zeros), in the order of ``names``, and the tokens and logits of the float model that is made of these matrices, by the
code of ``transformers``.
Codes, scales and zeros are random where a tool only packs them: what is tested is how they are stored.
"""

import hashlib
import json
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

torch.set_grad_enabled(False)
HERE = Path(__file__).parent
TOKENS, GROUP = 20, 32
Tensors = dict[str, torch.Tensor]
Made = tuple[Tensors, torch.Tensor]
"""The tensors of a matrix by the ends of their names, and what the tool dequantises: float32, N x K."""
Tool = Callable[[torch.nn.Linear, str], Made]
"""Quantises a linear layer of some name."""

SIZES: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "rope_theta": 5000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
}
ONE: dict[str, Any] = {"num_hidden_layers": 1}
QWEN2: dict[str, Any] = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False}
MIXTRAL: dict[str, Any] = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "sliding_window": None}
MIXTRAL |= {"num_local_experts": 2, "num_experts_per_tok": 1, "num_hidden_layers": 1}
BF16: dict[str, Any] = {"torch_dtype": "bfloat16"}
WIDE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 4, "head_dim": 32}
ROWS: dict[str, Any] = {"intermediate_size": 128}
"""On a CPU bitsandbytes 0.50.2 undoes its own casts only where blocks of 64 fill rows."""
PHI3: dict[str, Any] = {
    "model_type": "phi3",
    "architectures": ["Phi3ForCausalLM"],
    "num_hidden_layers": 1,
    "sliding_window": None,
}
PHI3 |= {"original_max_position_embeddings": 64, "pad_token_id": 0, "num_key_value_heads": 4}


def drawn(weight: torch.Tensor, bits: int, *, symmetric: bool = False, least_zero: int = 0) -> tuple[torch.Tensor, ...]:
    """Scales and zeros of each row and group (N x G) by the range of the group, in float16."""
    groups = weight.float().reshape(len(weight), -1, GROUP)
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    if symmetric:
        scale = torch.maximum(-low, high) / (2 ** (bits - 1) - 0.5)
        return scale.half(), torch.full_like(scale, 2 ** (bits - 1))
    scale = ((high - low) / (2**bits - 1)).half()
    return scale, (-low / scale.float()).round().clamp(least_zero, 2**bits - 1)


# **GPTQ**, by gptqmodel.


def gptq(bits: int, version: int, *, order: bool = False, symmetric: bool = False) -> Tool:
    kind = import_module("gptqmodel.nn_modules.qlinear.torch").TorchLinear
    to_version_1 = import_module("gptqmodel.utils.model").convert_gptq_v2_to_v1_format_module
    config_of = import_module("gptqmodel").QuantizeConfig

    def made(linear: torch.nn.Linear, name: str) -> Made:
        own = 8 if bits == 4 and name.endswith("lm_head") else bits
        scale, zero = drawn(linear.weight, own, symmetric=symmetric, least_zero=1)
        rows = linear.in_features
        index = torch.arange(rows) // GROUP
        if order:
            index = index[torch.randperm(rows, generator=torch.Generator().manual_seed(rows))]
        packed = kind(
            bits=own,
            group_size=GROUP,
            sym=symmetric,
            desc_act=order,
            in_features=rows,
            out_features=linear.out_features,
            bias=False,
            pack_dtype=torch.int32,
            register_buffers=True,
        )
        packed.pack_original(linear, scale, zero, index.int())
        packed.optimize = lambda: None  # which compiles for minutes
        packed.post_init()
        packed.scales = packed.scales.float()
        values = packed.dequantize_weight().T.float().clone()
        packed.scales = packed.scales.half()
        if version == 1:
            to_version_1(packed, config_of(bits=own, group_size=GROUP))
        return {part: getattr(packed, part) for part in ("qweight", "qzeros", "scales", "g_idx")}, values

    return made


def auto_round(module: str) -> Tool:
    kind = import_module(f"auto_round_extension.torch.{module}").QuantLinear

    def made(linear: torch.nn.Linear, name: str) -> Made:
        scale, zero = drawn(linear.weight, 4, least_zero=1)
        packed = kind(4, GROUP, linear.in_features, linear.out_features, False)
        packed.device = "cpu"  # which one of the two classes asks for
        packed.pack(linear, scale.float(), zero.float())
        parts = {part: getattr(packed, part) for part in ("qweight", "qzeros", "scales")}
        packed.scales = packed.scales.float()
        return parts, packed.forward(torch.eye(linear.in_features)).T

    return made


# **AWQ**, by autoawq.


def awq(layout: str) -> Tool:
    kind = getattr(import_module(f"awq.modules.linear.{layout}"), f"WQLinear_{layout.upper()}")
    dequantize_gemm = import_module("awq.utils.packing_utils").dequantize_gemm

    def made(linear: torch.nn.Linear, name: str) -> Made:
        scale, zero = drawn(linear.weight, 4)
        given = (scale, zero.to(torch.int32))
        if layout == "gemv":
            # The tool has no code for a CPU that dequantises this layout; the grid is what it packs.
            wide = [each.float().repeat_interleave(32, 1) for each in given]
            values = ((linear.weight / wide[0]).round() + wide[1]).clamp(0, 15).sub(wide[1]) * wide[0]
            source = torch.nn.Linear(linear.in_features, linear.out_features, bias=False)
            source.weight.data = values
            packed = kind.from_linear(source, 4, 32, False, *given)
        else:
            packed = kind.from_linear(linear, 4, 32, False, *(each.T.contiguous() for each in given))
            arrays = (packed.qweight, packed.qzeros, packed.scales.float(), 4, 32)
            values = dequantize_gemm(*arrays).T.float()
        return {part: getattr(packed, part) for part in ("qweight", "qzeros", "scales")}, values

    return made


# **compressed-tensors**: scales by its own rules, in the type of the model.


def compressed(kind: torch.dtype, format: str, weights: dict[str, Any]) -> Tool:
    quantization = import_module("compressed_tensors.quantization")
    helpers = import_module("compressed_tensors.quantization.utils.helpers")
    tool = import_module("compressed_tensors.compressors.base").BaseCompressor.get_value_from_registry(format)
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=quantization.QuantizationArgs(**weights))

    def made(linear: torch.nn.Linear, name: str) -> Made:
        weight, args = linear.weight.to(kind), scheme.weights
        parts: Tensors = {"weight": weight}
        axis = None if args.strategy == "tensor" else -1
        x = weight if args.group_size is None else weight.reshape(len(weight), -1, args.group_size)
        low, high = (x.amin(), x.amax()) if axis is None else (x.amin(-1), x.amax(-1))
        low, high = (each.reshape(1) if axis is None else each.reshape(len(weight), -1) for each in (low, high))
        if format == "nvfp4-pack-quantized":
            parts["weight_global_scale"] = helpers.generate_gparam(weight.amin().reshape(1), weight.amax().reshape(1))
        scale, zero = helpers.calculate_qparams(low, high, args, parts.get("weight_global_scale"))
        parts["weight_scale"] = scale
        if not args.symmetric:
            parts["weight_zero_point"] = zero.to(torch.int8)
        packed = tool.compress(parts, scheme)
        wide = {part: each.float() if each.dtype == kind else each for part, each in packed.items()}
        if format == "nvfp4-pack-quantized":  # whose code dequantises in bfloat16, whatever the types of scales
            codes = import_module("compressed_tensors.compressors.nvfp4.helpers").unpack_fp4_from_uint8
            elements = codes(packed["weight_packed"], *weight.shape).float()
            given = {"global_scale": packed["weight_global_scale"], "dtype": torch.float32}
            return packed, quantization.dequantize(elements, packed["weight_scale"].float(), args=args, **given)
        return packed, tool.decompress(wide, scheme)["weight"].float()

    return made


def scheme(bits: int, kind: str = "int", *, group_size: int | None = None, **others: Any) -> dict[str, Any]:
    strategy = others.pop("strategy", "channel" if group_size is None else "group")
    told = {"num_bits": bits, "type": kind, "strategy": strategy, "group_size": group_size, "symmetric": True}
    return told | others


TOKENWISE = scheme(8, strategy="token", dynamic=True)
TOKENWISE = scheme(8, strategy="token", dynamic=True)
ASYMMETRIC = scheme(8, group_size=32, symmetric=False)
NVFP4 = scheme(4, "float", group_size=16, strategy="tensor_group", scale_dtype="torch.float8_e4m3fn")
MXFP4 = scheme(4, "float", group_size=32, scale_dtype="torch.uint8")


def of_scheme(format: str, weights: dict[str, Any], activations: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {"format": format, "config_groups": {"group_0": group}}


def of_hqq(bits: int, axis: int) -> dict[str, Any]:
    return {"quant_config": {"weight_quant_params": {"nbits": bits, "group_size": 32, "axis": axis}}}


# **bitsandbytes**, **hqq**, and the FP8 of transformers.


def bitsandbytes(kind: str, double: bool) -> Tool:
    functional = import_module("bitsandbytes.functional")

    def made(linear: torch.nn.Linear, name: str) -> Made:
        packed, state = functional.quantize_4bit(linear.weight.half(), None, None, 64, double, kind)
        parts = {"weight": packed} | {f"weight.{part}": each for part, each in state.as_dict(packed=True).items()}
        state.dtype = torch.float32
        return parts, functional.dequantize_4bit(packed, state).float()

    return made


def hqq(bits: int, axis: int) -> Tool:
    tools = import_module("hqq.core.quantize")
    config = tools.BaseQuantizeConfig(nbits=bits, group_size=32, axis=axis)

    def made(linear: torch.nn.Linear, name: str) -> Made:
        layer = tools.HQQLinear(linear, config, compute_dtype=torch.float16, device="cpu")
        parts = dict(layer.state_dict())
        meta = layer.meta | {"scale": layer.meta["scale"].float(), "zero": layer.meta["zero"].float()}
        return parts, tools.Quantizer.dequantize(layer.W_q, meta | {"compute_dtype": torch.float32}).float()

    return made


def fp8() -> Tool:
    fp8s = import_module("transformers.integrations.finegrained_fp8")
    settings = import_module("transformers").FineGrainedFP8Config(weight_block_size=(128, 128))
    tool = fp8s.Fp8Quantize(SimpleNamespace(quantization_config=settings))

    def made(linear: torch.nn.Linear, name: str) -> Made:
        found = tool.convert({"weight": linear.weight})
        parts = {part.rpartition(".")[2]: each for part, each in found.items()}
        return parts, fp8s._dequantize_fp8_weight(*parts.values(), (128, 128), torch.float32)

    return made


MODELS: dict[str, tuple[dict[str, Any], dict[str, Any], Callable[[], Tool] | None]] = {
    "gptq-v1-4": (SIZES, {"bits": 4, "checkpoint_format": "gptq", "desc_act": True}, lambda: gptq(4, 1, order=True)),
    "gptq-v2-4": (
        SIZES | QWEN2,
        {"bits": 4, "checkpoint_format": "gptq_v2", "sym": True, "lm_head": True}
        | {"dynamic": {"+:lm_head": {"bits": 8}}},
        lambda: gptq(4, 2, symmetric=True),
    ),
    "gptq-v1-3": (SIZES | ONE, {"bits": 3, "checkpoint_format": "gptq"}, lambda: gptq(3, 1)),
    "gptq-v2-2": (SIZES | ONE, {"bits": 2, "checkpoint_format": "gptq_v2"}, lambda: gptq(2, 2)),
    "gptq-v1-8-phi3": (SIZES | PHI3, {"bits": 8, "checkpoint_format": "gptq"}, lambda: gptq(8, 1)),
    "autoround-v1": (
        SIZES | ONE,
        {"packing_format": "auto_round:auto_gptq"},
        lambda: auto_round("qlinear_torch_zp"),
    ),
    "autoround-v2": (SIZES | ONE, {"packing_format": "auto_round"}, lambda: auto_round("qlinear_torch")),
    "awq-gemm": (SIZES | MIXTRAL, {"version": "gemm", "modules_to_not_convert": ["gate"]}, lambda: awq("gemm")),
    "awq-gemv": (SIZES | ONE, {"version": "gemv"}, lambda: awq("gemv")),
    "ct-pack": (SIZES | BF16, of_scheme("pack-quantized", scheme(4, group_size=32)), None),
    "ct-pack-asym": (SIZES | BF16 | ONE, of_scheme("pack-quantized", ASYMMETRIC), None),
    "ct-pack-f16": (SIZES | ONE, of_scheme("pack-quantized", scheme(3, group_size=32)), None),
    "ct-pack-asym-f16": (SIZES | ONE, of_scheme("pack-quantized", ASYMMETRIC), None),
    "ct-int-f16": (SIZES | ONE, of_scheme("int-quantized", scheme(8)), None),
    "ct-int": (SIZES | BF16 | ONE, of_scheme("int-quantized", scheme(8), TOKENWISE), None),
    "ct-naive": (SIZES | BF16 | ONE, of_scheme("naive-quantized", scheme(4, group_size=32)), None),
    "ct-fp8-channel": (SIZES | BF16 | ONE, of_scheme("float-quantized", scheme(8, "float")), None),
    "ct-fp8-tensor": (SIZES | BF16 | ONE, of_scheme("float-quantized", scheme(8, "float", strategy="tensor")), None),
    "ct-nvfp4": (SIZES | BF16 | ONE, of_scheme("nvfp4-pack-quantized", NVFP4), None),
    "ct-mxfp4": (SIZES | BF16 | ONE, of_scheme("mxfp4-pack-quantized", MXFP4), None),
    "bitsandbytes-nf4": (
        SIZES | QWEN2 | ONE | ROWS,
        {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
        lambda: bitsandbytes("nf4", True),
    ),
    "bitsandbytes-fp4": (SIZES | PHI3 | ROWS, {"bnb_4bit_quant_type": "fp4"}, lambda: bitsandbytes("fp4", False)),
    "bitsandbytes-nf4-phi3": (
        SIZES | PHI3 | ROWS,
        {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
        lambda: bitsandbytes("nf4", True),
    ),
    "hqq-4": (SIZES | ONE, of_hqq(4, 1), lambda: hqq(4, 1)),
    "hqq-3": (SIZES | ONE, of_hqq(3, 0), lambda: hqq(3, 0)),
    "fp8-block": (SIZES | ONE | WIDE, {"weight_block_size": [128, 128], "activation_scheme": "dynamic"}, fp8),
}
COMMON: dict[str, dict[str, Any]] = {
    "gptq": {"quant_method": "gptq", "group_size": 32, "desc_act": False, "sym": False, "lm_head": False},
    "autoround": {"quant_method": "auto-round", "bits": 4, "group_size": 32, "data_type": "int"},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True},
    "ct": {"quant_method": "compressed-tensors", "quantization_status": "compressed", "ignore": ["lm_head"]},
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True, "llm_int8_skip_modules": ["lm_head"]},
    "hqq": {"quant_method": "hqq", "skip_modules": ["lm_head"]},
    "fp8": {"quant_method": "fp8", "modules_to_not_convert": ["lm_head"]},
}


def float_model(fields: dict[str, Any], name: str) -> Any:
    """A model of random weights in float32, each a number of the type in which the model is published."""
    config = AutoConfig.for_model(**fields)
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    make, kind = torch.Generator().manual_seed(sum(name.encode())), getattr(torch, fields["torch_dtype"])
    for part, weights in model.named_parameters():
        noise = torch.randn(weights.shape, generator=make)
        if weights.ndim == 1:
            noise = 0.5 * noise if "bias" in part else 1 + 0.2 * noise
        elif "embed_tokens" not in part:
            noise *= 2 / weights.shape[-1] ** 0.5
        weights.copy_(noise.to(kind).float())
    return model


def published(model: Any) -> Tensors:
    """The tensors of a model under the names with which such models are published."""
    found: Tensors = {}
    for name, tensor in model.state_dict().items():
        prefix, _, part = name.partition(".mlp.experts.")
        if part == "gate_up_proj":
            for number, both in enumerate(tensor):
                w1, w3 = both.chunk(2)
                found[f"{prefix}.block_sparse_moe.experts.{number}.w1.weight"] = w1
                found[f"{prefix}.block_sparse_moe.experts.{number}.w3.weight"] = w3
        elif part == "down_proj":
            for number, w2 in enumerate(tensor):
                found[f"{prefix}.block_sparse_moe.experts.{number}.w2.weight"] = w2
        else:
            found[name.replace(".mlp.gate.", ".block_sparse_moe.gate.")] = tensor
    return found


def is_quantised(name: str, tensor: torch.Tensor, config: dict[str, Any]) -> bool:
    if tensor.ndim != 2 or "embed_tokens" in name or "moe.gate." in name:
        return False
    return config.get("lm_head", False) or not name.startswith("lm_head")


def write(name: str) -> None:
    """One directory."""
    folder = HERE / name
    folder.mkdir(exist_ok=True)
    fields, own, tool = MODELS[name]
    config = COMMON[name.partition("-")[0]] | own
    kind = getattr(torch, fields["torch_dtype"])
    if tool is None:
        quantise = compressed(kind, own["format"], own["config_groups"]["group_0"]["weights"])
    else:
        quantise = tool()
    model = float_model(fields, name)
    tensors, names, digests = Tensors(), list[str](), list[str]()
    for stored, tensor in published(model).items():
        if not is_quantised(stored, tensor, config):
            tensors[stored] = tensor.to(getattr(torch, fields["torch_dtype"]))
            continue
        linear = torch.nn.Linear(tensor.shape[1], tensor.shape[0], bias=False)
        linear.weight.data = tensor.clone()
        module = stored.removesuffix(".weight")
        parts, values = quantise(linear, module)
        assert values.shape == tensor.shape and 1e-4 < (values - tensor).abs().max() < 2 * tensor.abs().max(), stored
        tensor.copy_(values)  # which belongs to the model, or to its experts
        tensors |= {f"{module}.{part}": each for part, each in parts.items()}
        names.append(module)
        digests.append(hashlib.sha256((values + 0.0).contiguous().numpy().tobytes()).hexdigest())
    save_file({key: each.detach().contiguous().clone() for key, each in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(fields | {"quantization_config": config}, indent=1) + "\n")
    make = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, fields["vocab_size"], (1, TOKENS), generator=make)
    logits = model(tokens).logits[0]
    found = {"tokens": tokens[0].numpy(), "logits": logits.numpy(), "names": np.array(names), "sums": np.array(digests)}
    np.savez_compressed(folder / "expected.npz", **found)


if __name__ == "__main__":
    for each in sys.argv[1:] or MODELS:
        write(each)
