"""Compiled steps with keys and values in fewer bits: the bits of the operations, and the bytes of the formats."""

from dataclasses import replace

import numpy as np
import pytest
from kernel_runs import HERE
from step_runs import EDGES, MODELS, answers, compiled, edge, edge_answers, logits, model, operations

from lowbit.arrays import F32
from lowbit.errors import ArgumentError
from lowbit.model.caches import KEYS, Keys
from lowbit.quantization.bfp import bfp12, cast
from lowbit.quantization.bfp_storage import store
from lowbit.runtime.linears import Contract
from lowbit_cppyy import CppyyBackend
from lowbit_cppyy.codegen.isa import InstructionSet

pytestmark = pytest.mark.toolchain
FEWER: tuple[Keys, ...] = ("float16", "bfp12")


@pytest.mark.parametrize("keys", FEWER)
@pytest.mark.parametrize("name", MODELS)
def test_every_logit_has_the_bits_of_the_operations(name: str, keys: Keys) -> None:
    """Prompts of one token, a few and many, tokens after them, and batches; on one thread and on three."""
    expected: list[F32] = []
    for threads in (1, 3):
        with CppyyBackend(threads=threads) as backend:
            decoder = operations(backend, model(name), keys=keys)
            expected = expected or answers(decoder)
            for ours, theirs in zip(answers(compiled(backend, decoder)), expected, strict=True):
                np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("contract", ("float32", "integer"))
@pytest.mark.parametrize("keys", FEWER)
def test_a_long_prompt_in_several_parts(keys: Keys, contract: Contract) -> None:
    """300 tokens and some after them: tiles of tokens that are full, and one that is not, in a cache that grows."""
    tokens = [int(token) for token in np.random.default_rng(0).integers(0, 265, 303)]
    with CppyyBackend(threads=2) as backend:
        decoder = operations(backend, model("llama"), contract, keys=keys)
        own = compiled(backend, decoder)
        states = decoder.new_state(2), own.new_state(2)
        for part in (tokens[:300], *([token] for token in tokens[300:])):
            np.testing.assert_array_equal(own.hidden(part, states[1]), decoder.hidden(part, states[0]))


@pytest.mark.parametrize("keys", FEWER)
@pytest.mark.parametrize("name", EDGES)
def test_sizes_at_which_something_ends(name: str, keys: Keys) -> None:
    """Heads of 4, 6, 8 and 66 channels, of which the last block has two; windows, and states that are full."""
    with CppyyBackend(threads=2) as backend:
        decoder = operations(backend, edge(name), keys=keys)
        for ours, theirs in zip(edge_answers(compiled(backend, decoder)), edge_answers(decoder), strict=True):
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("keys", FEWER)
@pytest.mark.parametrize("table", HERE, ids=lambda table: table.name)
def test_every_instruction_set(table: InstructionSet, keys: Keys) -> None:
    """Each with the bits of its own operations."""
    with CppyyBackend(isa=table.name, threads=2) as backend:
        decoder = operations(backend, model("odd"), keys=keys)
        np.testing.assert_array_equal(logits(compiled(backend, decoder), 5, 4), logits(decoder, 5, 4))


def test_the_formats_differ() -> None:
    """Each keeps other numbers, so no two have the same logits."""
    with CppyyBackend(threads=1) as backend:
        found = [logits(compiled(backend, operations(backend, model("llama"), keys=keys)), 3, 2) for keys in KEYS]
    for n, ours in enumerate(found):
        assert all(not np.array_equal(ours, other) for other in found[:n])


def test_a_state_has_the_bytes_of_the_formats() -> None:
    """Each row of a state is what storing the key or value gives; the first block's keys are those of float32."""
    config = model("llama").config
    states = {}
    with CppyyBackend(threads=2) as backend:
        for keys in KEYS:
            own = compiled(backend, operations(backend, model("llama"), keys=keys))
            states[keys] = own.new_state(4)
            own.hidden([5, 7, 1], states[keys])
    plain = {name: getattr(states["float32"], name)[0, :, :3].view(np.float32) for name in ("keys", "values")}
    for name, rows in plain.items():
        halves = getattr(states["float16"], name)[0, :, :3].view(np.float16)
        np.testing.assert_array_equal(halves, rows.astype(np.float16))
    values = [states[keys].values[0, :, :3] for keys in FEWER]
    np.testing.assert_array_equal(values[0], values[1], strict=True)
    kept = store(cast(np.ascontiguousarray(plain["keys"].reshape(-1, config.head_dim)), bfp12(32)))
    expected = np.concatenate([kept.mantissas, kept.exponents], axis=1)
    np.testing.assert_array_equal(states["bfp12"].keys[0, :, :3].reshape(expected.shape), expected)


def test_a_state_of_another_format_is_refused() -> None:
    """Before any of its memory is touched."""
    with CppyyBackend(threads=1) as backend:
        one, other = (compiled(backend, operations(backend, edge("narrow"), keys=keys)) for keys in FEWER)
        with pytest.raises(ArgumentError, match="state is of another decoder"):
            one.hidden([1], other.new_state())


@pytest.mark.parametrize("keys", FEWER)
def test_keys_and_values_that_cannot_be_kept_are_an_error(keys: Keys) -> None:
    """As of the decoder that runs operations; the state stays as it was."""
    weights = model("llama")
    huge = [replace(layer, attention_norm=np.full_like(layer.attention_norm, 1e6)) for layer in weights.layers]
    with CppyyBackend(threads=2) as backend:
        decoder = operations(backend, replace(weights, layers=tuple(huge)), keys=keys)
        own = compiled(backend, decoder)
        state, theirs = own.new_state(), decoder.new_state()
        with pytest.raises(ArgumentError, match="too large for float16"):
            decoder.hidden([1, 2], theirs)
        with pytest.raises(ArgumentError, match="keys or values is too large for float16"):
            own.hidden([1, 2], state)
        assert len(state) == 0
