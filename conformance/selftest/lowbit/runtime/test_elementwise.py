"""Elementwise operations on a backend: the same model, within a few roundings of float32."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_gguf import CONFIG, published, write

from lowbit.arrays import F32
from lowbit.backend import Backend, Capabilities, Declaration, load
from lowbit.contract.rounding import Arithmetic, any_order
from lowbit.errors import ArgumentError, NotDeclaredError
from lowbit.formats.checkpoint.reader import open_checkpoint
from lowbit.formats.gguf.reader import open_gguf, read_llama
from lowbit.model.block import FORMULAS
from lowbit.model.caches import Float32Cache
from lowbit.model.config import LlamaConfig
from lowbit.model.decoder import Decoder
from lowbit.model.generation import generate
from lowbit.model.weights import LlamaWeights, in_memory
from lowbit.runtime import BackendLinears
from lowbit.runtime.elementwise import ROUTING, Steps, check_all, needed, on_backend

PROMPT = [5, 99, 7, 7, 200, 31, 12, 64, 3, 180, 41]
GEMMA = replace(CONFIG, layers=3, head_dim=32, window=4, full_every=3, local_rope_base=100.0, activation="gelu")
MODELS: dict[str, LlamaConfig] = {"llama": CONFIG, "gemma3": GEMMA}


@pytest.fixture(scope="module", params=list(MODELS))
def weights(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LlamaWeights:
    model = published(seed=3, config=MODELS[request.param], architecture=request.param)
    return read_llama(open_gguf(write(tmp_path_factory.mktemp("elementwise") / "m.gguf", model)))


@pytest.mark.parametrize("name", ("numpy", pytest.param("cppyy", marks=pytest.mark.toolchain)))
def test_logits_are_those_of_the_formulas_but_for_roundings(weights: LlamaWeights, name: str) -> None:
    """A prompt and forty tokens, so that caches grow, with a sliding window and heads that are normed in one model:
    every logit within 1e-4 of the largest, and the steps are those that the backend declares."""
    with load(name) as backend:
        steps = on_backend(backend, weights.config, FORMULAS)
        assert set(steps.names) <= set(backend.capabilities().operations)
        if name == "cppyy":
            assert set(steps.names) == set(needed(weights.config)) & set(backend.capabilities().operations)
        runs: list[list[F32]] = []
        forced = [int(token) for token in np.random.default_rng(0).integers(0, weights.config.vocabulary, 40)]
        count = min(41, weights.config.context - len(PROMPT))
        for ops in (FORMULAS, steps.ops):
            decoder = Decoder(weights, BackendLinears(backend), ops=ops)
            runs.append([step.logits for step in generate(decoder, PROMPT, count, forced=forced)])
    formulas, own = np.stack(runs[0]), np.stack(runs[1])
    assert (formulas != own).any()
    np.testing.assert_allclose(own, formulas, atol=1e-4 * np.abs(formulas).max(), rtol=0)


DATA = Path(__file__).parents[1] / "formats/checkpoint/data"
SHAPED: dict[str, tuple[str, ...]] = {
    "gemma2": ("attention.attend_shaped", "blocks.geglu", "blocks.rms_norm", "blocks.soft_cap", "rope.rotate"),
    "gpt-oss-mxfp4": (
        "attention.attend_shaped",
        "blocks.clamped_swiglu",
        "blocks.rms_norm",
        "rope.rotate",
        *ROUTING,
    ),
}
"""Models with shaped scores, and the operations that they have."""


@pytest.mark.parametrize("name", SHAPED)
def test_models_with_shaped_scores(name: str) -> None:
    """A backend computes all operations, and together they give the logits of the model; a step without one of them is
    not compiled."""
    weights = in_memory(open_checkpoint(DATA / name))
    with np.load(DATA / name / "expected.npz") as held:
        tokens, expected = [int(token) for token in held["tokens"]], held["logits"]
    with load("numpy") as backend:
        steps = on_backend(backend, weights.config, FORMULAS)
        assert steps.names == tuple(sorted(SHAPED[name])) == tuple(sorted(needed(weights.config)))
        decoder = Decoder(weights, BackendLinears(backend), ops=steps.ops)
        found = decoder.logits(decoder.hidden(tokens, decoder.new_state()))
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * np.abs(expected).max())
        check_all(backend, weights.config, steps.names)
        with pytest.raises(NotDeclaredError, match=r"compiled steps without attention\.attend_shaped"):
            check_all(backend, weights.config, steps.names[1:])


class Some(Backend):
    """Declares a norm, and attention for heads of 7 channels only; what it computes is plainly its own."""

    name = "some"

    def capabilities(self) -> Capabilities:
        arithmetic = Arithmetic("direct", "float32", any_order)
        limited = Declaration({"head_dim": (7,)}, arithmetic)
        return Capabilities({"blocks.rms_norm": Declaration({}, arithmetic), "attention.attend": limited})

    def _blocks_rms_norm(self, x: F32, gain: F32, epsilon: float) -> F32:
        return np.full_like(x, 42)

    def _attention_attend(self, *arguments: Any) -> F32:
        raise AssertionError("not declared for these heads")


def test_what_is_not_declared_stays_with_the_formulas() -> None:
    """Also where it is declared for other heads than the model's; its results are rounded to float32."""
    steps = on_backend(Some(), CONFIG, FORMULAS)
    assert steps.names == ("blocks.rms_norm",) and steps.ops.dtype == np.float32
    assert (steps.ops.norm(np.ones(4, np.float32), 1e-5)(np.ones((3, 4), np.float32)) == 42).all()
    gate, up = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)
    for part in ("swiglu", "geglu"):
        exact = getattr(FORMULAS, part)(gate.astype(np.float64), up.astype(np.float64))
        np.testing.assert_array_equal(getattr(steps.ops, part)(gate, up), exact.astype(np.float32))
    assert steps.ops.cache is not Float32Cache  # whose attention is an operation of the backend


def test_attention_by_its_formula_over_values_in_float32() -> None:
    """The cache takes the float32 of a backend that declares no attention, and the formula is that of those numbers."""
    ops, rng = on_backend(Some(), CONFIG, FORMULAS).ops, np.random.default_rng(5)
    keys, values, queries = rng.standard_normal((3, 5, 2, 4)).astype(np.float32)
    caches = ops.cache(2, 4, 1), FORMULAS.cache(2, 4, 1)
    for cache in caches:
        cache.append(keys.astype(cache.dtype), values.astype(cache.dtype))
    exact = FORMULAS.attend(queries.astype(np.float64), caches[1], 3)
    np.testing.assert_array_equal(ops.attend(queries, caches[0], 3), exact.astype(np.float32))


def test_what_is_not_asked_of_the_backend_stays_with_the_formulas() -> None:
    """Also where the backend declares it."""
    with load("numpy") as backend:
        steps = on_backend(backend, CONFIG, FORMULAS, ("attention.attend",))
        assert steps.names == ("attention.attend",) and steps.ops.cache is Float32Cache
        assert on_backend(backend, CONFIG, FORMULAS, ()) == Steps(FORMULAS, ())
        assert on_backend(backend, CONFIG, FORMULAS).names == tuple(sorted(needed(CONFIG)))


def test_unchecked_operations_are_declared_ones() -> None:
    """An operation without checks is handed out only where it is declared, for the choices that are named."""
    backend = Some()
    assert backend.unchecked("attention.attend", {"head_dim": 7, "window": "none"}) == backend._attention_attend
    with pytest.raises(NotDeclaredError, match="head_dim 8"):
        backend.unchecked("attention.attend", {"head_dim": 7}, {"head_dim": 8})
    with pytest.raises(NotDeclaredError):
        backend.unchecked("blocks.swiglu")


def test_the_cache_stays_float32_when_it_grows() -> None:
    """Beyond its first room, in one step and token by token."""
    cache = Float32Cache(kv_heads=2, head_dim=3, capacity=1)
    tokens = np.random.default_rng(1).standard_normal((9, 2, 3))
    cache.append(tokens[:5], -tokens[:5])
    for token in tokens[5:]:
        cache.append(token[np.newaxis], -token[np.newaxis])
    assert cache.keys.dtype == cache.values.dtype == np.float32
    np.testing.assert_array_equal(cache.keys, tokens.swapaxes(0, 1).astype(np.float32))
    np.testing.assert_array_equal(cache.values, -cache.keys)
    with pytest.raises(ArgumentError):
        cache.append(np.ones((1, 2, 4)), np.ones((1, 2, 4)))
