"""Tiny random models of every kind against their logits by the code of ``transformers`` (``data/write.py``)."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lowbit.arrays import F32
from lowbit.attention.rope import Scaling, yarn_scaling
from lowbit.errors import ArgumentError, FormatError
from lowbit.formats.checkpoint.cache import quantized
from lowbit.formats.checkpoint.reader import open_checkpoint
from lowbit.model.block import Linear
from lowbit.model.config import Routing
from lowbit.model.decoder import Decoder
from lowbit.model.matrices import Matrix, to_float
from lowbit.model.quantization_plan import Plan, planned
from lowbit.model.weights import LlamaWeights, in_memory, vector_sizes

DATA = Path(__file__).parent / "data"
MODELS = sorted(path.name for path in DATA.iterdir() if (path / "expected.npz").exists())
LIMIT = 1e-5
"""Of the largest logit; both sides compute in float32 and hold angles of up to 40 radians in it, which are rounded by
up to 2e-6."""
CONTEXTS = {"llama-dynamic": 40, "phi3-long": 40}
"""Of models whose rotation depends on the length of the text: that of the texts that they read."""


def as_floats(matrix: Matrix) -> Linear:
    """A product with the numbers of a matrix, however it is stored."""
    numbers = to_float(matrix)
    return lambda x: x @ numbers


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(name: str) -> None:
    """After every token, whether the tokens are read at once or one by one."""
    with np.load(DATA / name / "expected.npz") as held:
        tokens, expected = [int(token) for token in held["tokens"]], held["logits"]
    decoder = Decoder(in_memory(open_checkpoint(DATA / name, context=CONTEXTS.get(name))), as_floats)
    largest = float(np.abs(expected).max())
    assert largest > 1
    found = decoder.logits(decoder.hidden(tokens, decoder.new_state()))
    np.testing.assert_allclose(found, expected, rtol=0, atol=LIMIT * largest)
    state = decoder.new_state()
    for token, row in zip(tokens, expected, strict=True):
        np.testing.assert_allclose(decoder.logits(decoder.hidden([token], state))[0], row, rtol=0, atol=LIMIT * largest)


def logits_of(weights: LlamaWeights, name: str) -> tuple[F32, F32]:
    """Those of the tokens of a model, by lowbit and by ``transformers``."""
    with np.load(DATA / name / "expected.npz") as held:
        tokens, expected = [int(token) for token in held["tokens"]], held["logits"]
    decoder = Decoder(weights, as_floats)
    return decoder.logits(decoder.hidden(tokens, decoder.new_state())), expected


OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("llama3", {"rope_scaling": None}),
    ("llama-linear", {"rope_scaling": None}),
    ("llama-yarn", {"rope_scaling": None}),
    ("llama-newer", {"rope_scaling": None}),
    ("llama-dynamic", {"rope_scaling": None}),
    ("llama-long", {"rope_scaling": None}),
    ("llama-long", {"rope_scaling": Scaling((1.0, 1.25, 2.0, 3.0))}),
    ("llama-long", {"rope_scaling": Scaling((1.0, 2.5, 6.0, 9.0), 1.25)}),
    ("llama-proportional", {"rope_scaling": None}),
    ("llama-proportional", {"rope_scaling": Scaling((1.0, 1.0, math.inf, math.inf), channels=4)}),
    ("phi3-partial", {"rope_scaling": None}),
    ("phi3-partial", {"rope_scaling": Scaling((1.0, 1.0, 1.0, math.inf))}),
    ("phi3-short", {"rope_scaling": Scaling((2.0, 3.0, 9.0, math.inf), 1.17260394, channels=6)}),
    ("phi3-long", {"rope_scaling": Scaling((1.0, 1.5, 4.0, math.inf), 1.25992, channels=6)}),
    ("gemma3-kinds", {"rope_scaling": None}),
    ("gemma3-kinds", {"local_rope_scaling": None}),
    ("gpt-oss", {"sinks": False}),
    ("gpt-oss", {"activation_limit": 7.0}),
    ("gpt-oss", {"routing": Routing(4, 1)}),
    ("gpt-oss", {"full_every": None}),
    ("gpt-oss", {"rope_scaling": None}),
    ("gpt-oss", {"rope_scaling": yarn_scaling(8, 5000.0, 4.0, 1024)}),
    ("gpt-oss-mxfp4", {"sinks": False}),
    ("gemma2", {"score_scale": None}),
    ("gemma2", {"score_cap": None}),
    ("gemma2", {"logit_cap": None}),
    ("gemma2", {"full_every": None}),
    ("gemma2", {"window": None}),
    ("gemma3-scaled", {"score_scale": None}),
    ("gemma3", {"rope_scaling": None}),
    ("gemma3", {"local_rope_base": None}),
    ("gemma3", {"window": None}),
    ("gemma3", {"full_every": None}),
    ("gemma3", {"activation": "silu"}),
    ("gemma3", {"embedding_scale": 1.0}),
    ("granite", {"embedding_scale": 1.0}),
    ("granite", {"score_scale": None}),
    ("granite", {"residual_scale": 1.0}),
    ("granite", {"logit_divisor": 1.0}),
    ("smollm3", {"unrotated": ()}),
    ("smollm3", {"unrotated": (0,)}),
    ("smollm3-usual", {"unrotated": ()}),
    ("smollm3-usual", {"unrotated": (3, 4)}),
    ("olmo3", {"window": None}),
    ("olmo3", {"full_every": 3}),
    ("olmo3", {"local_rope_base": None}),
    ("phi3", {"window": None}),
    ("mistral", {"window": None}),
    ("mixtral", {"routing": Routing(4, 1)}),
    ("qwen3-moe", {"routing": Routing(6, 2)}),
]


@pytest.mark.parametrize(("name", "change"), OPTIONS)
def test_every_option_counts(name: str, change: dict[str, Any]) -> None:
    """Each choice changes the logits by far more than the limit, so the comparison above sees it."""
    weights = in_memory(open_checkpoint(DATA / name, context=CONTEXTS.get(name)))
    found, expected = logits_of(replace(weights, config=replace(weights.config, **change)), name)
    assert float(np.abs(found - expected).max()) > 1e-2 * float(np.abs(expected).max())


VECTORS = {"qwen2": "query_bias key_bias value_bias", "qwen3": "query_norm key_norm"}
EXPERTS = "router_bias expert_gate_bias expert_up_bias expert_down_bias"
VECTORS |= {"gpt-oss": f"query_bias key_bias value_bias output_bias {EXPERTS}"}
VECTORS |= {"olmo2": "query_norm key_norm", "gemma3": "query_norm key_norm attention_post_norm feed_forward_post_norm"}


@pytest.mark.parametrize("name", VECTORS)
def test_every_vector_counts(name: str) -> None:
    """Each bias and each further norm changes the logits when it is left out."""
    weights = in_memory(open_checkpoint(DATA / name))
    for vector in VECTORS[name].split():
        less: dict[str, Any] = {vector: None}
        layers = tuple(replace(layer, **less) for layer in weights.layers)
        found, expected = logits_of(replace(weights, layers=layers), name)
        assert float(np.abs(found - expected).max()) > 1e-2 * float(np.abs(expected).max()), vector


def test_a_quantised_copy_has_the_same_parts(tmp_path: Path) -> None:
    """Vectors and fused matrices of every kind come back from the cache of quantised weights."""
    for name in MODELS:
        source = open_checkpoint(DATA / name)
        plan = Plan.uniform(4, 8)
        expected, found = planned(in_memory(source), plan), in_memory(quantized(source, plan, tmp_path / name))
        for ours, theirs in zip(found.layers, expected.layers, strict=True):
            for vector in vector_sizes(source.config):
                np.testing.assert_array_equal(getattr(ours, vector), getattr(theirs, vector))
            for matrix, weights in ours.linears().items():
                np.testing.assert_array_equal(to_float(weights), to_float(theirs.linears()[matrix]))


def test_the_context_decides(tmp_path: Path) -> None:
    """The usual context is the short one; a longer one chooses the factors of a text of its length."""
    short = open_checkpoint(DATA / "phi3-long").config
    assert (short.context, short.rope_scaling) == (
        16,
        replace(short.rope_scaling or Scaling(()), factors=(1.0, 1.5, 4.0, math.inf)),
    )
    for context, factors in (
        (1, (1.0, 1.5, 4.0)),
        (16, (1.0, 1.5, 4.0)),
        (17, (2.0, 3.0, 9.0)),
        (256, (2.0, 3.0, 9.0)),
    ):
        config = open_checkpoint(DATA / "phi3-long", context=context).config
        assert config.context == context and config.rope_scaling is not None
        assert config.rope_scaling.rotated == factors
    dynamic = open_checkpoint(DATA / "llama-dynamic").config
    assert dynamic.context == 16 and dynamic.rope_scaling == Scaling((1.0,) * 4)
    for name, context, most in (
        ("phi3-long", 257, 256),
        ("llama-dynamic", 65, 64),
        ("llama3", 65, 64),
        ("llama3", 0, 64),
    ):
        with pytest.raises(ArgumentError, match=f"context is {context}; allowed: an integer from 1 to {most}"):
            open_checkpoint(DATA / name, context=context)


# Refused.

LONG = json.loads((DATA / "llama-long" / "config.json").read_text())["rope_scaling"]

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("qwen2", {"use_sliding_window": True}, "use_sliding_window is True; allowed: False"),
    ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, r"layer_types\[1\] is 'sliding_attention'"),
    ("qwen2", {"layer_types": ["full_attention"]}, "layer_types is a list of 1; allowed: a list of 2"),
    ("qwen2", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; allowed: 'silu'"),
    ("qwen3", {"attention_bias": True}, "attention_bias is True; allowed: False"),
    ("qwen3", {"head_dim": None}, "head_dim is missing"),
    ("qwen3", {"rope_theta": None}, "rope_theta is missing"),
    ("qwen3-moe", {"norm_topk_prob": False}, "norm_topk_prob is False; allowed: True"),
    ("qwen3-moe", {"norm_topk_prob": None}, "norm_topk_prob is missing; it must be True"),
    ("qwen3-moe", {"decoder_sparse_step": 2}, "decoder_sparse_step is 2; allowed: 1"),
    ("qwen3-moe", {"mlp_only_layers": [0]}, r"mlp_only_layers is \[0\]; allowed: \[\]"),
    ("qwen3-moe", {"num_experts": None}, "num_experts is missing"),
    ("qwen3-moe", {"num_experts_per_tok": 7}, "num_experts_per_tok is 7"),
    ("qwen3-moe", {"moe_intermediate_size": 24}, r"shape of tensor .*experts\.0\.\S+ is"),
    ("gemma3", {"model_type": "gemma3"}, "model_type is 'gemma3'; allowed: 'mixtral'"),
    ("gemma3", {"hidden_activation": "gelu"}, "hidden_activation is 'gelu'; allowed: 'gelu_pytorch_tanh'"),
    ("gemma3", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0.0; allowed: a number above 0"),
    ("llama3", {"query_pre_attn_scalar": 168}, "query_pre_attn_scalar is 168.0; allowed: head_dim, 8"),
    ("gpt-oss", {"attention_bias": False}, "attention_bias is False; allowed: True"),
    ("gpt-oss", {"swiglu_alpha": 1.5}, "swiglu_alpha is 1.5; allowed: 1.702"),
    ("gpt-oss", {"swiglu_limit": 0}, "activation_limit is 0.0; allowed: a number from 2"),
    ("gpt-oss", {"rope_scaling": None}, "rope_scaling is missing"),
    ("gpt-oss", {"num_local_experts": 5}, r"shape of tensor 'model\.layers\.0\.mlp\.\S+ is"),
    ("gpt-oss", {"quantization_config": {"quant_method": "mxfp4"}}, r"gate_up_proj_blocks' is missing"),
    ("gpt-oss-mxfp4", {"quantization_config": None}, r"type of tensor \S+ is U8"),
    ("gpt-oss-mxfp4", {"intermediate_size": 64}, r"shape of tensor \S+gate_up_proj\S+ is"),
    ("gemma2", {"attn_logit_softcapping": 0}, "attn_logit_softcapping is 0.0; allowed: a number above 0, or null"),
    ("gemma2", {"final_logit_softcapping": 1e-46}, "logit_cap is 1e-46; allowed: a number from 2"),
    ("gemma2", {"attn_logit_softcapping": 1e39}, "score_cap is 1e[+]39; allowed: a number from 2"),
    ("gemma2", {"final_logit_softcapping": "30"}, "final_logit_softcapping is "),
    ("gemma2", {"rope_local_base_freq": 100.0}, "rope_local_base_freq is 100.0"),
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
    ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0; allowed: absent"),
    ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0; allowed: absent"),
    ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
    ("gemma3", {"rope_local_base_freq": None}, "rope_local_base_freq is missing"),
    ("gemma3", {"sliding_window": None}, "sliding_window is missing"),
    ("gemma3", {"sliding_window_pattern": 0}, "full_every is 0"),
    ("gemma3", {"layer_types": [*["sliding_attention"] * 3, "other"]}, r"layer_types\[3\] is 'other'"),
    ("llama3", {"rope_local_base_freq": 100.0}, "rope_local_base_freq is 100.0"),
    ("llama3", {"layer_types": ["sliding_attention"] * 2}, r"layer_types\[0\] is 'sliding_attention'"),
    ("smollm3", {"no_rope_layers": [1, 0]}, r"no_rope_layers is \[1, 0\]; allowed: 0 or 1 for each of the 3 layers"),
    ("smollm3", {"no_rope_layers": [1, 0, 2]}, "no_rope_layers is "),
    ("smollm3", {"no_rope_layers": None, "no_rope_layer_interval": 0}, "no_rope_layer_interval is 0"),
    ("smollm3", {"no_rope_layers": None, "num_hidden_layers": 2**50, "layer_types": None}, "at most 65536"),
    ("olmo2", {"attention_bias": True}, "attention_bias is True"),
    ("olmo2", {"sliding_window": 8}, "sliding_window is 8; allowed: absent"),
    ("llama3", {"partial_rotary_factor": 0.75}, "partial_rotary_factor is 0.75; allowed: 1.0 for this kind of model"),
    ("llama-long", {"rope_scaling": LONG | {"rope_type": "long"}}, "rope_type is 'long'; allowed: 'default', 'lin"),
    ("llama-long", {"rope_scaling": LONG | {"long_factor": None}}, "long_factor is missing"),
    ("llama-long", {"rope_scaling": LONG | {"short_factor": [1.0] * 3}}, "short_factor is a list of 3; allowed: 4 nu"),
    ("llama-long", {"rope_scaling": LONG | {"short_factor": [1, 2, "3", 4]}}, r"short_factor\[2\] is "),
    (
        "llama-long",
        {"rope_scaling": LONG | {"short_factor": [1, 2, 0, 4]}},
        "factor is 0.0; allowed: finite numbers ab",
    ),
    ("llama-long", {"rope_scaling": LONG | {"attention_factor": -1.0}}, "scaling of the rotation is -1.0"),
    ("llama-long", {"rope_scaling": LONG | {"beta_fast": 1.0}}, "beta_fast is 1.0; allowed: absent from a scaling of"),
    ("llama-long", {"original_max_position_embeddings": 32}, "original_max_position_embeddings is 32 and 64; allowed"),
    ("llama-dynamic", {"rope_scaling": {"type": "dynamic"}}, "factor is missing"),
    ("llama-dynamic", {"rope_scaling": {"type": "dynamic", "factor": 0.5}}, "factor is 0.5; allowed: a finite number"),
    *(
        ("granite", {name: number}, f"{name} is {number}; allowed: a number from 2\\^-32 to 2\\^32")
        for name in ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
        for number in (0.0, -0.5, 1e12)
    ),
    ("granite", {"residual_multiplier": "0.6"}, "residual_multiplier is '0.6'; allowed: a number"),
    ("granite", {"attention_bias": True}, "attention_bias is True; allowed: False"),
    ("phi3", {"partial_rotary_factor": 0.0}, "partial_rotary_factor is 0.0; allowed: a number above 0 and at most 1"),
    ("phi3", {"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5"),
    ("phi3", {"partial_rotary_factor": 0.4}, "partial_rotary_factor is 3; allowed"),
    ("phi3-long", {"original_max_position_embeddings": None}, "original_max_position_embeddings is missing"),
    ("phi3-long", {"partial_rotary_factor": 1.0}, "short_factor is a list of 3; allowed: 4 numbers, one for each pair"),
    ("phi3", {"model_type": "llama", "architectures": None, "sliding_window": None}, "q_proj.weight' is missing"),
]


@pytest.mark.parametrize(("name", "change", "message"), REFUSED)
def test_what_is_refused(name: str, change: dict[str, Any], message: str, tmp_path: Path) -> None:
    """A feature that is not supported, or a field that a kind of model needs, is named in one line."""
    config = json.loads((DATA / name / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(DATA / name / "model.safetensors")
    with pytest.raises(FormatError, match=message) as caught:
        open_checkpoint(tmp_path)
    assert str(caught.value).isprintable()


SAME: list[tuple[str, dict[str, Any]]] = [
    ("gemma3", {"layer_types": ["sliding_attention"] * 2 + ["full_attention", "sliding_attention"]}),
    ("smollm3", {"no_rope_layers": None}),
    ("olmo3", {"layer_types": [*["sliding_attention"] * 3, "full_attention", "sliding_attention"]}),
    ("phi3", {"layer_types": ["sliding_attention"] * 2}),
    ("llama3", {"layer_types": ["full_attention"] * 2}),
    (
        "gemma3",
        {
            "rope_theta": None,
            "rope_scaling": None,
            "rope_local_base_freq": None,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
]


@pytest.mark.parametrize(("name", "change"), SAME)
def test_other_fields_say_the_same(name: str, change: dict[str, Any], tmp_path: Path) -> None:
    """Lists of layers and newer objects give the same configuration as the older fields."""
    config = json.loads((DATA / name / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(DATA / name / "model.safetensors")
    assert open_checkpoint(tmp_path).config == open_checkpoint(DATA / name).config
