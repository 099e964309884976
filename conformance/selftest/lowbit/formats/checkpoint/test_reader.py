"""Reading checkpoint directories: what a sound one says, and what a configuration may not say."""

import json
import math
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_checkpoint import DENSE, MIXTRAL, Published, copied, published, write
from tracing import traced

from lowbit.arrays import F64
from lowbit.attention.rope import llama3_scaling
from lowbit.errors import ArgumentError, FormatError
from lowbit.formats.checkpoint.reader import open_checkpoint
from lowbit.model.config import LlamaConfig, Routing
from lowbit.model.decoder import Decoder
from lowbit.model.matrices import to_float
from lowbit.model.weights import LayeredWeights, LlamaWeights, in_memory
from lowbit.tensor_formats.stored import Stored

PROMPT = [5, 259, 7, 7, 20, 31, 12, 3]
STORED = {"query": "self_attn.q_proj", "key": "self_attn.k_proj", "value": "self_attn.v_proj"}
STORED |= {"output": "self_attn.o_proj", "feed_forward.router": "block_sparse_moe.gate"}
EXPERT = {"gate": "w1", "up": "w3", "down": "w2"}


@pytest.fixture(scope="module")
def model() -> Published:
    return published()


@pytest.fixture(scope="module")
def folder(model: Published, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("checkpoint") / "tiny", model)


# A sound directory.


def test_the_configuration(folder: Path) -> None:
    """Every number of ``config.json`` arrives under its name here."""
    expected = LlamaConfig(2, 32, 64, 4, 2, 8, 260, 64, 1e6, 1e-5, Routing(4, 2))
    assert open_checkpoint(folder).config == expected


FORMATS = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}


@pytest.mark.parametrize("shards", [1, 2, 5])
def test_weights_come_as_published(shards: int, model: Published, tmp_path: Path) -> None:
    """Every matrix is the published one, transposed, to the bit, in its own type, from any shards."""
    source = open_checkpoint(write(tmp_path / "m", model, shards))
    assert set(model.types.values()) == {"F16", "BF16", "F32"}
    for number in range(2):
        layer, at = source.layer(number), f"model.layers.{number}"
        names = STORED | {
            f"feed_forward.experts[{e}].{name}": f"block_sparse_moe.experts.{e}.{part}"
            for e in range(4)
            for name, part in EXPERT.items()
        }
        assert layer.linears().keys() == names.keys()
        for name, stored in names.items():
            matrix, tensor = layer.linears()[name], f"{at}.{stored}.weight"
            np.testing.assert_array_equal(to_float(matrix), model.tensors[tensor].T, err_msg=name)
            wanted = "float32" if name == "feed_forward.router" else FORMATS[model.types[tensor]]
            assert (matrix.format if isinstance(matrix, Stored) else "float32") == wanted, name
        np.testing.assert_array_equal(layer.attention_norm, model.tensors[f"{at}.input_layernorm.weight"])
        np.testing.assert_array_equal(layer.feed_forward_norm, model.tensors[f"{at}.post_attention_layernorm.weight"])
    np.testing.assert_array_equal(source.embedding, model.tensors["model.embed_tokens.weight"])
    np.testing.assert_array_equal(source.norm, model.tensors["model.norm.weight"])
    np.testing.assert_array_equal(to_float(source.head), model.tensors["lm_head.weight"].T)


def second_model(model: Published, tokens: list[int]) -> F64:
    """Logits of the last position from the published tensors, token by token, without a cache and without lowbit."""
    config, head_dim = model.config, model.config["head_dim"]
    half, group = head_dim // 2, config["num_attention_heads"] // config["num_key_value_heads"]

    def tensor(name: str) -> F64:
        return model.tensors[f"{name}.weight"].astype(np.float64)

    def norm(row: F64, gain: F64) -> F64:
        return row / math.sqrt(float(row @ row) / len(row) + config["rms_norm_eps"]) * gain

    def turned(row: F64, position: int) -> F64:
        angles = position * config["rope_theta"] ** (-np.arange(half) / half)
        return np.concatenate(
            [
                row[:half] * np.cos(angles) - row[half:] * np.sin(angles),
                row[half:] * np.cos(angles) + row[:half] * np.sin(angles),
            ]
        )

    def gated(x: F64, w1: F64, w3: F64, w2: F64) -> F64:
        a = w1 @ x
        y: F64 = w2 @ (a / (1 + np.exp(-a)) * (w3 @ x))
        return y

    stream = [tensor("model.embed_tokens")[token] for token in tokens]
    for number in range(config["num_hidden_layers"]):
        at, keys, values = f"model.layers.{number}", list[F64](), list[F64]()
        for t, row in enumerate(stream):
            x = norm(row, tensor(f"{at}.input_layernorm"))
            q, k, v = (tensor(f"{at}.self_attn.{part}_proj") @ x for part in "qkv")
            keys.append(np.stack([turned(head, t) for head in k.reshape(-1, head_dim)]))
            values.append(v.reshape(-1, head_dim))
            heads = []
            for h, head in enumerate(q.reshape(-1, head_dim)):
                scores = [float(turned(head, t) @ key[h // group]) / math.sqrt(head_dim) for key in keys]
                p = np.exp(scores) / np.exp(scores).sum()
                heads.append(sum(share * value[h // group] for share, value in zip(p, values, strict=True)))
            row = row + tensor(f"{at}.self_attn.o_proj") @ np.concatenate(heads)
            x = norm(row, tensor(f"{at}.post_attention_layernorm"))
            if "num_local_experts" not in config:
                stream[t] = row + gated(x, *(tensor(f"{at}.mlp.{part}_proj") for part in ("gate", "up", "down")))
                continue
            p = np.exp(tensor(f"{at}.block_sparse_moe.gate") @ x)
            best = np.argsort(-p)[: config["num_experts_per_tok"]]
            for e in best:
                parts = (tensor(f"{at}.block_sparse_moe.experts.{e}.{part}") for part in ("w1", "w3", "w2"))
                row = row + p[e] / p[best].sum() * gated(x, *parts)
            stream[t] = row
    name = "model.embed_tokens" if config["tie_word_embeddings"] else "lm_head"
    logits: F64 = tensor(name) @ norm(stream[-1], tensor("model.norm"))
    return logits


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("config", [MIXTRAL, DENSE], ids=["mixtral", "mistral"])
def test_logits_are_those_of_the_published_weights(config: dict[str, Any], tied: bool, tmp_path: Path) -> None:
    """The decoder over a directory gives what a second one computes from the tensors as they were published."""
    made = published(config | {"tie_word_embeddings": tied}, seed=5)
    source = open_checkpoint(write(tmp_path / "m", made))
    decoder = Decoder(in_memory(source))
    logits = decoder.logits(decoder.hidden(PROMPT, decoder.new_state()))[-1]
    assert float(np.abs(logits).max()) > 1
    np.testing.assert_allclose(logits, second_model(made, PROMPT), rtol=0, atol=3e-5)


def test_a_tied_head_that_is_stored_too(tmp_path: Path) -> None:
    """It has to be the embedding over again."""
    made = published(MIXTRAL)
    made.config |= {"tie_word_embeddings": True}
    made.tensors["lm_head.weight"] = made.tensors["lm_head.weight"].reshape(260, 32)
    made.types["lm_head.weight"] = made.types["model.embed_tokens.weight"]
    with pytest.raises(
        FormatError, match=r"tensor 'lm_head\.weight' is another matrix; allowed: that of the embedding"
    ):
        _ = open_checkpoint(write(tmp_path / "other", made)).head
    made.tensors["lm_head.weight"] = made.tensors["model.embed_tokens.weight"].reshape(260, 32)
    source = open_checkpoint(write(tmp_path / "same", made))
    np.testing.assert_array_equal(to_float(source.head), made.tensors["model.embed_tokens.weight"].T)


def test_in_memory_and_layer_by_layer(folder: Path) -> None:
    """A whole model is the blocks one by one, reports them, and hands them out again as it holds them."""
    source: LayeredWeights = open_checkpoint(folder)
    seen: list[tuple[int, int]] = []
    whole = in_memory(source, lambda *work: seen.append(work))
    assert isinstance(whole, LlamaWeights)
    assert (seen, in_memory(whole)) == ([(1, 2), (2, 2)], whole)
    assert whole.layer(1) is whole.layers[1]
    for model in (source, whole):
        for number in (-1, 2, True):
            with pytest.raises(ArgumentError, match="layer is"):
                model.layer(number)


def test_a_block_is_read_one_matrix_at_a_time(tmp_path: Path) -> None:
    """Opening reads no weights, and what `change` drops is not kept: the peak is some copies of the largest matrix."""
    config = MIXTRAL | {"hidden_size": 128, "intermediate_size": 256, "num_local_experts": 8, "head_dim": 32}
    path, largest = write(tmp_path / "m", published(config), 2), 128 * 256 * 4
    open_checkpoint(path).layer(0)  # what is imported and kept on first use
    with traced():
        source = open_checkpoint(path)
        opened = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        source.layer(1, lambda name, matrix: np.zeros(1, np.float32))
        dropped = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        source.layer(1)
        whole = tracemalloc.get_traced_memory()[1]
    assert opened < largest
    assert dropped < 5 * largest
    assert 16 * largest < whole < 28 * largest  # one of the two blocks, of which two thirds are 16-bit floats


# A directory of another kind.

LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "phimoe"}, "model_type is 'phimoe'; allowed: 'mixtral', 'llama', 'mistral', 'qwen2'"),
    ({"model_type": None}, "model_type is missing"),
    ({"architectures": ["MixtralForTokenClassification"]}, "architectures is "),
    ({"rope_scaling": {"type": "linear"}}, "rope_scaling: factor is missing"),
    ({"rope_scaling": {"type": "linear", "factor": 0}}, "scaling of the rotation is 0.0"),
    ({"rope_scaling": {"type": "linear", "rope_type": "yarn"}}, "rope_type is 'yarn'; allowed"),
    ({"rope_scaling": {"type": "ntk", "factor": 2.0}}, "rope_type is 'ntk'; allowed: 'default', 'linear', 'l"),
    ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}}, "original_max_position_embeddings is missing"),
    ({"rope_scaling": {"mrope_section": [1, 2]}}, "mrope_section is .*; allowed: absent from a scaling of type 'def"),
    ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4}}, r"high_freq_factor is 4\.0; allowed: above low"),
    ({"rope_scaling": LLAMA3 | {"factor": 0}}, r"factor is 0\.0"),
    ({"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 0}}, "original_max_position_embeddings is 0"),
    ({"rope_scaling": LLAMA3 | {"rope_type": "yarn", "mscale": 1.0}}, "is .*; allowed: absent from a scaling of type"),
    ({"rope_scaling": LLAMA3, "rope_parameters": {"rope_type": "linear", "factor": 2}}, "the same scaling"),
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "original_max_position_embeddings is missing"),
    ({"rope_parameters": {"rope_theta": 1e4}}, "rope_theta is 1000000.0 and 10000.0; allowed: one number"),
    ({"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
    ({"rope_parameters": {"full_attention": {}}}, "sliding_attention is missing"),
    ({"rope_theta": None}, "rope_theta is missing"),
    ({"rope_theta": "1e6"}, "rope_theta is '1e6'; allowed: a number"),
    ({"rope_theta": 10**400}, "rope_theta is an integer of 1329 bits"),
    ({"rope_theta": 0.0}, "rope_theta is 0.0"),
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; allowed: 'silu'"),
    ({"attention_bias": True}, "attention_bias is True; allowed: False"),
    ({"mlp_bias": True}, "mlp_bias is True"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config is given; it must be absent where"),
    ({"layer_types": ["sliding_attention"] * 2}, r"layer_types\[0\] is 'sliding_attention'"),
    ({"num_hidden_layers": None}, "num_hidden_layers is missing; it must be an integer"),
    ({"num_hidden_layers": True}, "num_hidden_layers is True; allowed: an integer"),
    ({"num_hidden_layers": 2.0}, "num_hidden_layers is 2.0; allowed: an integer"),
    ({"num_hidden_layers": 0}, "layers is 0"),
    ({"num_hidden_layers": 3}, r"'model\.layers\.2\.\S+' is missing"),
    ({"num_hidden_layers": 1}, r"tensor is 'model\.layers\.1\."),
    ({"num_hidden_layers": 2**40}, "shape of the model is 1099511627776 layers of 4 experts"),
    ({"num_hidden_layers": 10**300}, "num_hidden_layers is an integer of 997 bits"),
    ({"num_local_experts": 2**40}, "shape of the model is 2 layers of 1099511627776 experts"),
    (
        {"num_local_experts": 5},
        r"shape of tensor 'model\.layers\.0\.block_sparse_moe\.gate\.weight' is \(4, 32\)|missing",
    ),
    ({"num_local_experts": 3}, r"shape of tensor 'model\.layers\.0\.block_sparse_moe\.gate\.weight'"),
    ({"num_local_experts": None}, "num_local_experts is missing"),
    ({"num_experts_per_tok": 5}, "num_experts_per_tok is 5"),
    ({"num_attention_heads": 3}, "heads is 3"),
    ({"num_key_value_heads": None}, "num_key_value_heads is missing"),
    ({"head_dim": 7}, "head_dim is 7"),
    (
        {"head_dim": 16},
        r"shape of tensor 'model\.layers\.0\.self_attn\.q_proj\.weight' is \(32, 32\); allowed: 64 x 32",
    ),
    ({"vocab_size": 261}, r"shape of tensor 'model\.embed_tokens\.weight'"),
    ({"vocab_size": 2**50}, r"shape of tensor 'model\.embed_tokens\.weight'"),
    ({"sliding_window": 0}, "window is 0"),
    ({"rms_norm_eps": -1e-5}, "rms_norm_eps is -1e-05"),
]


@pytest.mark.parametrize(
    ("change", "message"), REFUSED, ids=[f"{n}-{change}"[:60] for n, (change, _) in enumerate(REFUSED)]
)
def test_a_configuration_that_is_refused(change: dict[str, Any], message: str, folder: Path, tmp_path: Path) -> None:
    """What is missing, out of range, of another kind, or means another model, is named in one line."""
    with pytest.raises(FormatError, match=message) as caught:
        open_checkpoint(copied(folder, tmp_path, config=MIXTRAL | change))
    assert str(caught.value).isprintable() and len(str(caught.value)) < 400


@pytest.mark.parametrize("kind", ["mistral", "llama"])
def test_dense_kinds(kind: str, tmp_path: Path) -> None:
    """Both dense kinds are read; Llama's first base and key-value heads may be left out, and a window means nothing."""
    architecture = {"mistral": "MistralForCausalLM", "llama": "LlamaForCausalLM"}[kind]
    config = DENSE | {"model_type": kind, "architectures": [architecture], "num_key_value_heads": 4}
    path = write(tmp_path / "m", published(config))
    assert open_checkpoint(path).config.routing is None
    sparse = config | {"rope_theta": None, "num_key_value_heads": None, "head_dim": None}
    (path / "config.json").write_text(json.dumps(sparse))
    if kind == "llama":
        assert open_checkpoint(path).config.rope_base == 10000.0
    else:
        with pytest.raises(FormatError, match="missing"):
            open_checkpoint(path)
    (path / "config.json").write_text(json.dumps(config | {"sliding_window": 9}))
    if kind == "mistral":
        assert open_checkpoint(path).config.window == 9
    else:
        with pytest.raises(FormatError, match="sliding_window is 9; allowed: absent"):
            open_checkpoint(path)


def test_a_rotary_base_of_the_newer_form(folder: Path, tmp_path: Path) -> None:
    """``rope_parameters`` without stretching says the same as ``rope_theta``."""
    config = {name: value for name, value in MIXTRAL.items() if name != "rope_theta"}
    config |= {"rope_parameters": {"rope_type": "default", "rope_theta": 5000}}
    assert open_checkpoint(copied(folder, tmp_path, config=config)).config.rope_base == 5000.0


def test_a_scaled_rotation(folder: Path, tmp_path: Path) -> None:
    """Old and new fields say the same, and may say it twice; a rotation that is not scaled has no scaling."""
    expected = llama3_scaling(8, 1e6, 8.0, 1.0, 4.0, 32)
    for number, change in enumerate(
        (
            {"rope_scaling": LLAMA3},
            {"rope_parameters": LLAMA3 | {"rope_theta": 1e6}},
            {"rope_parameters": LLAMA3, "rope_scaling": LLAMA3},
        )
    ):
        (to := tmp_path / str(number)).mkdir()
        assert open_checkpoint(copied(folder, to, config=MIXTRAL | change)).config.rope_scaling == expected
    assert open_checkpoint(folder).config.rope_scaling is None


JSON = {
    "nothing": (b"", "content is "),
    "no JSON": (b"{'a': 1}", "content is .*; allowed: JSON in UTF-8"),
    "no UTF-8": (b'{"model_type": "\xff"}', "content is .*; allowed: JSON in UTF-8"),
    "a list": (b"[1, 2]", r"content is \[1, 2\]; allowed: an object"),
    "deep": (b'{"a": ' + b"[" * 100_000, "content is "),
    "a key twice": (b'{"model_type": "mixtral", "model_type": "llama"}', "the key 'model_type' is there twice"),
    "no number": (b'{"rope_theta": NaN}', "the number NaN"),
    "too many digits": (b'{"rope_theta": ' + b"1" * 5000 + b"}", "content is "),
    "too large": (b'{"a": "' + b"x" * 2**20 + b'"}', "size is more than 1048576 bytes"),
}


@pytest.mark.parametrize("name", JSON)
def test_configurations_that_are_no_json(name: str, folder: Path, tmp_path: Path) -> None:
    """Each is refused in a line before anything is made of it."""
    content, message = JSON[name]
    with pytest.raises(FormatError, match=message) as caught:
        open_checkpoint(copied(folder, tmp_path, {"config.json": content}))
    assert str(caught.value).startswith("config.json: ") and str(caught.value).isprintable()
