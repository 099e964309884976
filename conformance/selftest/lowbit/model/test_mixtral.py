"""A tiny Mixtral against a second one, written token by token from the formulas, without a cache."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from lowbit.arrays import F32, F64
from lowbit.backend import load
from lowbit.errors import ArgumentError
from lowbit.model.block import Linear
from lowbit.model.config import LlamaConfig, Routing
from lowbit.model.decoder import Decoder, next_logits
from lowbit.model.generation import generate
from lowbit.model.matrices import Matrix, to_float
from lowbit.model.quantization_plan import Plan, planned
from lowbit.model.weights import (
    GatedWeights,
    LayerWeights,
    LlamaWeights,
    SparseWeights,
    linear_shapes,
    matrices,
    weight_bytes,
)
from lowbit.moe.routing import Ids, Softmax
from lowbit.quantization.affine import QuantizedMatrix
from lowbit.runtime import BackendLinears

CONFIG = LlamaConfig(
    layers=3,
    hidden=32,
    feed_forward=48,
    heads=4,
    kv_heads=2,
    head_dim=8,
    vocabulary=50,
    context=40,
    rope_base=1000.0,
    rms_epsilon=1e-5,
    routing=Routing(experts=5, top_k=2),
)
PROMPT = [5, 49, 7, 7, 20, 31, 12, 3, 3, 40, 11]


def mixtral(seed: int, config: LlamaConfig = CONFIG) -> LlamaWeights:
    """Random weights; routers large enough that choices are clear."""
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> F32:
        return (gain * rng.standard_normal((rows, columns)) / math.sqrt(rows)).astype(np.float32)

    def norm() -> F32:
        return rng.uniform(0.5, 1.5, config.hidden).astype(np.float32)

    assert config.routing is not None
    layers = []
    for _ in range(config.layers):
        made = {name: matrix(*shape, 3.0 if "router" in name else 1.0) for name, shape in linear_shapes(config).items()}
        experts = tuple(
            GatedWeights(*(made[f"feed_forward.experts[{e}].{part}"] for part in ("gate", "up", "down")))
            for e in range(config.routing.experts)
        )
        sparse = SparseWeights(made["feed_forward.router"], experts)
        query, key, value, output = (made[name] for name in ("query", "key", "value", "output"))
        layers.append(LayerWeights(norm(), query, key, value, output, norm(), sparse))
    embedding = rng.standard_normal((config.vocabulary, config.hidden)).astype(np.float32)
    return LlamaWeights(config, embedding, tuple(layers), norm(), matrix(config.hidden, config.vocabulary))


def second_mixtral(weights: LlamaWeights, tokens: Sequence[int]) -> tuple[F64, list[list[list[int]]]]:
    """Logits of every position, and the experts of every layer and position, by ascending id.

    Softmax comes before the choice here and is renormalised, as one public implementation has it; the decoder under
    test does it the other way round.
    """
    config = weights.config
    routing = config.routing
    assert routing is not None
    head_dim, half, group = config.head_dim, config.head_dim // 2, config.heads // config.kv_heads

    def norm(row: F64, gain: F32) -> F64:
        return row / math.sqrt(float(row @ row) / len(row) + config.rms_epsilon) * gain

    def turned(row: F64, position: int) -> F64:
        plane = (row[:half] + 1j * row[half:]) * np.exp(1j * position * config.rope_base ** (-np.arange(half) / half))
        return np.concatenate([plane.real, plane.imag])

    stream = [np.asarray(weights.embedding)[token].astype(float) for token in tokens]
    chosen: list[list[list[int]]] = []
    for layer in weights.layers:
        keys, values = [], []
        chosen.append([])
        part = layer.feed_forward
        assert isinstance(part, SparseWeights)
        assert layer.attention_norm is not None and layer.feed_forward_norm is not None
        for t, row in enumerate(stream):
            x = norm(row, layer.attention_norm)
            q, k, v = (x @ to_float(m).astype(float) for m in (layer.query, layer.key, layer.value))
            keys.append([turned(k[j * head_dim : (j + 1) * head_dim], t) for j in range(config.kv_heads)])
            values.append(v.reshape(config.kv_heads, head_dim))
            first = 0 if config.window is None else max(0, t + 1 - config.window)
            heads = []
            for h in range(config.heads):
                query = turned(q[h * head_dim : (h + 1) * head_dim], t)
                power = [
                    math.exp(float(query @ keys[u][h // group]) / math.sqrt(head_dim)) for u in range(first, t + 1)
                ]
                heads.append(sum(p * values[first + i][h // group] for i, p in enumerate(power)) / sum(power))
            row = row + np.concatenate(heads) @ to_float(layer.output).astype(float)
            x = norm(row, layer.feed_forward_norm)
            logits = x @ part.router.astype(float)
            p = np.exp(logits) / np.exp(logits).sum()
            best = sorted(range(routing.experts), key=lambda e: -p[e])[: routing.top_k]
            chosen[-1].append(sorted(best))
            for e in best:
                gate, up, down = (to_float(m).astype(float) for m in vars(part.experts[e]).values())
                a = x @ gate
                row = row + p[e] / sum(p[i] for i in best) * ((a / (1 + np.exp(-a)) * (x @ up)) @ down)
            stream[t] = row
    final = np.stack([norm(row, weights.norm) for row in stream])
    return final @ to_float(weights.head).astype(float), chosen


@pytest.mark.parametrize("softmax", ["after", "before"])
@pytest.mark.parametrize("window", [None, 1, 4])
def test_logits_and_routes_of_every_position(softmax: Softmax, window: int | None) -> None:
    """Prefill gives the second model's logits, and every token goes to the same experts, with and without a window."""
    config = replace(CONFIG, routing=Routing(5, 2, softmax), window=window)
    model, seen = mixtral(1, config), {}

    def observe(layer: int, x: F64, experts: Ids) -> None:
        seen[layer] = experts
        assert x.shape == (len(PROMPT), CONFIG.hidden)

    decoder = Decoder(model, observe=observe)
    logits = decoder.logits(decoder.hidden(PROMPT, decoder.new_state()))
    expected, chosen = second_mixtral(model, PROMPT)
    assert float(np.abs(expected).max()) > 1
    np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-5)
    assert [np.sort(seen[layer]).tolist() for layer in range(3)] == chosen
    assert len({tuple(pair) for layer in chosen for pair in layer}) > 5  # the routing is not constant


def test_a_window_changes_the_answer() -> None:
    """The option does something: with a window of 4 the later logits differ and the first four do not."""
    full, narrow = Decoder(mixtral(1)), Decoder(mixtral(1, replace(CONFIG, window=4)))
    a, b = (d.logits(d.hidden(PROMPT, d.new_state())) for d in (full, narrow))
    np.testing.assert_allclose(a[:4], b[:4], rtol=0, atol=1e-5)
    assert (np.abs(a[4:] - b[4:]).max(axis=1) > 1e-3).all()


def test_generation_token_by_token() -> None:
    """Greedy tokens through the cache are the argmax of the second model that reads everything anew."""
    model = mixtral(2, replace(CONFIG, window=6))
    read = list(PROMPT)
    for step in generate(Decoder(model), PROMPT, 8):
        expected = second_mixtral(model, read)[0][-1]
        np.testing.assert_allclose(step.logits, expected, rtol=0, atol=2e-5)
        assert step.token == int(np.argmax(expected))
        read.append(step.token)


def test_quantised_experts_on_a_backend() -> None:
    """Experts and attention go to the backend, the router stays float32, and the answer is the quantised model's."""
    model = planned(mixtral(3), Plan.uniform(4, 16))
    for name, matrix in matrices(model):
        assert isinstance(matrix, QuantizedMatrix) == ("router" not in name and name != "head"), name
    account = BackendLinears(load("reference"))
    decoder = Decoder(model, account)
    assert account.prepared == 3 * (4 + 5 * 3)
    assert sum(account.float_matrices.values()) == 1  # the head
    routers = sum(matrix.nbytes for name, matrix in matrices(model) if "router" in name)
    assert account.read_bytes == weight_bytes(model).total - routers
    np.testing.assert_allclose(next_logits(decoder, PROMPT), second_mixtral(model, PROMPT)[0][-1], rtol=0, atol=2e-5)


def test_a_token_reads_only_its_experts() -> None:
    """In decode, two of the five experts of a layer are called, once each."""
    called: list[Matrix] = []

    def linear(matrix: Matrix) -> Linear:
        def multiply(x: F32) -> F32:
            called.append(matrix)
            return x @ to_float(matrix)

        return multiply

    decoder = Decoder(mixtral(4), linear)
    decoder.hidden([1], decoder.new_state())
    assert len(called) == 3 * (4 + 2 * 3)


def test_weights_of_another_kind_are_named() -> None:
    """Experts without a routing, a routing without experts, too few of them, impossible numbers."""
    model = mixtral(0)
    message = r"layers\[0\]\.feed_forward\.\S+ is missing; it must be one of the matrices of a dense block"
    with pytest.raises(ArgumentError, match=message):
        replace(model, config=replace(CONFIG, routing=None))
    part = model.layers[1].feed_forward
    assert isinstance(part, SparseWeights)
    fewer = replace(model.layers[1], feed_forward=replace(part, experts=part.experts[:4]))
    message = r"layers\[1\]\.feed_forward\.experts\[4\]\.down is missing; it must be one of .* of 5 experts"
    with pytest.raises(ArgumentError, match=message):
        replace(model, layers=(model.layers[0], fewer, model.layers[2]))
    dense = replace(model.layers[1], feed_forward=part.experts[0])
    with pytest.raises(ArgumentError, match=r"layers\[1\]\.feed_forward\.\S+ is "):
        replace(model, layers=(model.layers[0], dense, model.layers[2]))
    with pytest.raises(ArgumentError, match="top_k is 6; allowed: an integer from 1 to 5"):
        Routing(5, 6)
    with pytest.raises(ArgumentError, match="softmax is 'never'"):
        Routing(5, 2, "never")  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(ArgumentError, match="window is 0"):
        replace(CONFIG, window=0)


def test_a_router_that_overflows_is_an_error() -> None:
    """A score that is not finite has no rank; the decoder says so instead of choosing by chance."""
    model = mixtral(0)
    part = model.layers[0].feed_forward
    assert isinstance(part, SparseWeights)
    broken = replace(model.layers[0], feed_forward=replace(part, router=np.sign(part.router) * np.float32(3e38)))
    decoder = Decoder(replace(model, layers=(broken, *model.layers[1:])))
    with pytest.raises(ArgumentError, match="a router's score is not finite"):
        next_logits(decoder, PROMPT)
