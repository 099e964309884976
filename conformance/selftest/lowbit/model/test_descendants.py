"""Tiny Qwen2, Qwen3 and Gemma 3 models from files, against a second model written head by head from the formulas."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_gguf import CONFIG, Published, published, write

from lowbit.arrays import F64
from lowbit.attention.rope import Frequencies, Scaling
from lowbit.backend import load
from lowbit.errors import ArgumentError, FormatError
from lowbit.formats.gguf.reader import open_gguf, read_llama
from lowbit.model.config import LlamaConfig
from lowbit.model.decoder import Decoder, next_logits
from lowbit.model.generation import generate
from lowbit.model.layers import gelu
from lowbit.model.weights import LlamaWeights
from lowbit.runtime import BackendLinears

GEMMA = replace(
    CONFIG,
    layers=4,
    head_dim=32,
    rope_base=50000.0,
    rms_epsilon=float(np.float32(1e-6)),
    window=4,
    full_every=3,
    local_rope_base=100.0,
    activation="gelu",
    embedding_scale=8.0,
)
QWEN = replace(CONFIG, rms_epsilon=float(np.float32(1e-6)))
CONFIGS = {"qwen2": QWEN, "qwen3": replace(QWEN, head_dim=24), "gemma3": GEMMA}
PROMPT = [5, 99, 7, 7, 200, 31, 12, 64, 3, 180, 41]


@pytest.fixture(scope="module", params=list(CONFIGS))
def model(request: pytest.FixtureRequest) -> Published:
    return published(seed=8, config=CONFIGS[request.param], architecture=request.param)


@pytest.fixture(scope="module")
def weights(model: Published, tmp_path_factory: pytest.TempPathFactory) -> LlamaWeights:
    return read_llama(open_gguf(write(tmp_path_factory.mktemp("descendants") / "m.gguf", model)))


@pytest.fixture(scope="module")
def decoder(weights: LlamaWeights) -> Decoder:
    return Decoder(weights, BackendLinears(load("numpy")))


def second_model(model: Published, tokens: Sequence[int]) -> F64:
    """Logits of every position, T × vocabulary: each model as its paper describes it, without a cache."""
    config, gemma, normed_heads = model.config, model.architecture == "gemma3", model.architecture != "qwen2"
    tensors = {name: tensor.astype(float) for name, tensor in model.tensors.items()}
    d, group = config.head_dim, config.heads // config.kv_heads

    def norm(row: F64, gain: str) -> F64:
        root = math.sqrt(math.fsum(row * row) / len(row) + config.rms_epsilon)
        scaled: F64 = row / root * tensors[gain]
        return scaled

    def heads(row: F64, block: str, part: str, position: int, base: float) -> list[F64]:
        flat = tensors[f"{block}.attn_{part}"] @ row
        if not normed_heads:
            flat = flat + tensors[f"{block}.attn_{part}.bias"]
        made = []
        for head in flat.reshape(-1, d):
            if part != "v":
                head = norm(head, f"{block}.attn_{part}_norm") if normed_heads else head
                plane = head[: d // 2] + 1j * head[d // 2 :]
                plane = plane * np.exp(1j * position * base ** (-np.arange(0, d, 2) / d))
                head = np.concatenate([plane.real, plane.imag])
            made.append(head)
        return made

    def act(a: F64) -> F64:
        z = 2 * math.sqrt(2 / math.pi) * (a + 0.044715 * a**3) if gemma else a
        share: F64 = 1 / (1 + np.exp(-z))  # which is also (1 + tanh(z/2)) / 2
        return a * share

    scale = math.sqrt(config.hidden) if gemma else 1.0
    stream = [scale * tensors["token_embd"][token] for token in tokens]
    for i in range(config.layers):
        block, local = f"blk.{i}", gemma and i != 2
        base = 100.0 if local else config.rope_base
        normed = [norm(row, f"{block}.attn_norm") for row in stream]
        q, k, v = ([heads(x, block, part, t, base) for t, x in enumerate(normed)] for part in "qkv")
        for t, row in enumerate(stream):
            seen = range(max(0, t - 3) if local else 0, t + 1)
            mixed = []
            for h in range(config.heads):
                power = np.exp([q[t][h] @ k[u][h // group] / math.sqrt(d) for u in seen])
                mixed.append(sum(p * v[u][h // group] for p, u in zip(power / power.sum(), seen, strict=True)))
            part = tensors[f"{block}.attn_output"] @ np.concatenate(mixed)
            row = row + (norm(part, f"{block}.post_attention_norm") if gemma else part)
            x = norm(row, f"{block}.ffn_norm")
            part = act(tensors[f"{block}.ffn_gate"] @ x) * (tensors[f"{block}.ffn_up"] @ x)
            part = tensors[f"{block}.ffn_down"] @ part
            stream[t] = row + (norm(part, f"{block}.post_ffw_norm") if gemma else part)
    return np.stack([tensors["token_embd"] @ norm(row, "output_norm") for row in stream])


def test_the_file_gives_its_configuration(model: Published, weights: LlamaWeights) -> None:
    """Numbers that are stored and choices that are not, all as the model was made."""
    assert weights.config == model.config


def test_logits_of_every_position(model: Published, decoder: Decoder) -> None:
    """Prefill gives the second model's logits, past the window and around the full layer."""
    logits = decoder.logits(decoder.hidden(PROMPT, decoder.new_state()))
    expected = second_model(model, PROMPT)
    assert float(np.abs(expected).max()) > 1.0
    np.testing.assert_allclose(logits, expected, rtol=0, atol=3e-5)


def test_generation_token_by_token(model: Published, decoder: Decoder) -> None:
    """Greedy tokens through the cache are the argmax of the second model that reads everything anew."""
    read = list(PROMPT)
    for step in generate(decoder, PROMPT, 6):
        expected = second_model(model, read)[-1]
        np.testing.assert_allclose(step.logits, expected, rtol=0, atol=3e-5)
        assert step.token == int(np.argmax(expected))
        read.append(step.token)


def test_every_vector_counts(model: Published, weights: LlamaWeights, decoder: Decoder) -> None:
    """Each bias and each further norm changes the answer when it is left out."""
    optional = ["query_bias", "key_bias", "value_bias", "query_norm", "key_norm"]
    optional += ["attention_post_norm", "feed_forward_post_norm"]
    present = [name for name in optional if getattr(weights.layers[0], name) is not None]
    assert len(present) == {"qwen2": 3, "qwen3": 2, "gemma3": 4}[model.architecture]
    whole = next_logits(decoder, PROMPT)
    for name in present:
        less: dict[str, Any] = {name: None}
        layers = tuple(replace(layer, **less) for layer in weights.layers)
        other = next_logits(Decoder(replace(weights, layers=layers), BackendLinears(load("numpy"))), PROMPT)
        assert float(np.abs(other - whole).max()) > 1e-2, name


OPTIONS: list[dict[str, Any]] = [
    {"window": None},
    {"window": 5},
    {"full_every": None},
    {"full_every": 2},
    {"local_rope_base": None},
    {"activation": "silu"},
    {"embedding_scale": 1.0},
]


@pytest.mark.parametrize("change", OPTIONS)
@pytest.mark.parametrize("model", ["gemma3"], indirect=True)
def test_every_option_counts(change: dict[str, Any], weights: LlamaWeights, decoder: Decoder) -> None:
    """Each choice of Gemma 3 changes the answer when it is another."""
    other = replace(weights, config=replace(weights.config, **change))
    difference = next_logits(Decoder(other, BackendLinears(load("numpy"))), PROMPT) - next_logits(decoder, PROMPT)
    assert float(np.abs(difference).max()) > 1e-2


def test_which_layers_are_local() -> None:
    """Of six layers the last is full, with the base of full layers; without a window none is local."""
    config = replace(GEMMA, layers=13, full_every=6)
    assert [layer for layer in range(13) if not config.is_local(layer)] == [5, 11]
    assert (config.layer_window(4), config.layer_window(5)) == (4, None)
    assert [config.layer_frequencies(layer) for layer in (4, 5)] == [Frequencies(100.0), Frequencies(50000.0)]
    assert config.frequencies == [Frequencies(100.0), Frequencies(50000.0)]
    assert all(CONFIG.layer_window(layer) is None for layer in range(2))
    everywhere = replace(CONFIG, window=3)
    assert [everywhere.layer_window(layer) for layer in range(2)] == [3, 3]
    assert everywhere.frequencies == [Frequencies(CONFIG.rope_base)]


def test_gelu_is_close_to_its_definition() -> None:
    """The tanh form differs from a·Φ(a) by less than 0.0005, and by more than nothing."""
    a = np.linspace(-6, 6, 2001)
    exact = np.array([x * (1 + math.erf(x / math.sqrt(2))) / 2 for x in a])
    assert 1e-4 < float(np.abs(gelu(a) - exact).max()) < 5e-4


# Files.


def gemma(tmp_path: Path, **changes: Any) -> LlamaConfig:
    model = published(config=GEMMA, architecture="gemma3")
    metadata = {f"gemma3.{key.replace('__', '.')}": value for key, value in changes.items()}
    return open_gguf(write(tmp_path / "g.gguf", model, metadata=metadata)).config


def test_what_gemma_files_leave_unsaid(tmp_path: Path) -> None:
    """Without a pattern every sixth layer is full, and without a base local layers turn by 10000."""
    config = gemma(tmp_path, attention__sliding_window_pattern=None, rope__freq_base_swa=None)
    assert (config.full_every, config.local_rope_base) == (6, 10000.0)


REFUSED = [
    ({"attention__sliding_window": None}, r"gemma3\.attention\.sliding_window is missing"),
    ({"attention__sliding_window": 0}, "window is 0"),
    ({"attention__sliding_window_pattern": "LLLLLG"}, "sliding_window_pattern is a str; allowed: an integer"),
    ({"rope__freq_base_swa": -1.0}, r"gemma3\.rope\.freq_base_swa is -1\.0"),
    ({"rope__scaling__type": "linear"}, r"gemma3\.rope\.scaling\.factor is missing"),
    ({"attn_logit_softcapping": 50.0}, r"gemma3\.attn_logit_softcapping is 50\.0; allowed: 0\.0"),
    ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    ({"attention__scale": 0.25}, "attention.scale"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_numbers_of_another_model_are_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    """A number that is missing or that this decoder would have to ignore is an error."""
    with pytest.raises(FormatError, match=message):
        gemma(tmp_path, **changes)


def test_vectors_that_are_missing_or_too_many(tmp_path: Path) -> None:
    """A Qwen2 needs its biases, has no norm of heads, and a bias is as long as what it is added to."""
    model = published(config=QWEN, architecture="qwen2")

    def read(**changes: Any) -> None:
        tensors = {name: tensor for name, tensor in (model.tensors | changes).items() if tensor is not None}
        changed = replace(
            model, tensors=tensors, types=model.types | dict.fromkeys(changes, model.types["output_norm"])
        )
        read_llama(open_gguf(write(tmp_path / "q.gguf", changed)))

    read()
    with pytest.raises(FormatError, match=r"tensor 'blk\.1\.attn_k\.bias' is missing"):
        read(**{"blk.1.attn_k.bias": None})
    with pytest.raises(
        FormatError, match=r"'blk\.0\.attn_q_norm\.weight'; allowed: the tensors of architecture 'qwen2'"
    ):
        read(**{"blk.0.attn_q_norm": np.ones(16, np.float32)})
    with pytest.raises(FormatError, match=r"layers\[0\]\.value_bias"):
        read(**{"blk.0.attn_v.bias": np.ones(33, np.float32)})


BAD_CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"full_every": 0}, "full_every is 0"),
    ({"local_rope_base": float("nan")}, "local_rope_base is nan"),
    ({"activation": "relu"}, "activation is 'relu'; allowed: silu, gelu or clamped"),
    ({"embedding_scale": 0.0}, r"embedding_scale is 0\.0"),
    *(({name: 0.0}, rf"{name} is 0\.0") for name in ("score_scale", "score_cap", "logit_cap", "activation_limit")),
    ({"score_cap": float("inf")}, "score_cap is inf"),
    *(
        ({name: number}, rf"{name} is {number}; allowed: a number from 2\^-32 to 2\^32")
        for name in ("embedding_scale", "residual_scale", "logit_divisor")
        for number in (0.0, -1.0, float("nan"), float("inf"), 2.0**40)
    ),
    (
        {"local_rope_base": None, "local_rope_scaling": Scaling((1.0,) * 16)},
        "local_rope_scaling is .*; allowed: None without local_rope_base",
    ),
    ({"unrotated": (4,)}, r"unrotated is \(4,\); allowed: layers from 0 to 3"),
    ({"unrotated": (1, 1)}, r"unrotated is \(1, 1\)"),
    ({"rope_scaling": Scaling((1.0,) * 15)}, "number of factors in rope_scaling is 15; allowed: 16"),
]


@pytest.mark.parametrize(("change", "message"), BAD_CONFIGS)
def test_options_that_no_model_has(change: dict[str, Any], message: str) -> None:
    """An option that cannot be is named when the configuration is made."""
    with pytest.raises(ArgumentError, match=message):
        replace(GEMMA, **change)
