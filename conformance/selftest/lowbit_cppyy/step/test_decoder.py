"""Compiled steps: every logit has the bits of the operations one by one, whatever the model and the threads."""

import os
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import step_runs
from kernel_runs import HERE
from step_runs import DIRECTORIES, MODELS, PROMPTS, answers, directory, logits, model, operations

from lowbit.arrays import F32
from lowbit.errors import ArgumentError, NotDeclaredError, UnavailableError
from lowbit.model.block import Linear, plain_linear
from lowbit.model.decoder import Decoder
from lowbit.model.generation import generate
from lowbit.model.matrices import Matrix, to_float
from lowbit.runtime.linears import BackendLinears, Contract
from lowbit_cppyy import CppyyBackend
from lowbit_cppyy.codegen.isa import InstructionSet
from lowbit_cppyy.step.decoder import CompiledDecoder
from lowbit_cppyy.step.source import StepSource

pytestmark = pytest.mark.toolchain


@pytest.mark.parametrize("contract", ("float32", "integer"))
@pytest.mark.parametrize("name", MODELS)
def test_every_logit_has_the_bits_of_the_operations(name: str, contract: Contract) -> None:
    """Prompts of one token, a few and many, and tokens after them, on one thread, two and three."""
    weights, expected = model(name), dict[int, F32]()
    for threads in (1, 2, 3):
        with CppyyBackend(threads=threads) as backend:
            decoder = operations(backend, weights, contract)
            compiled = backend.compiled(decoder)
            for prompt in PROMPTS:
                if prompt not in expected:
                    expected[prompt] = logits(decoder, prompt, 6)
                np.testing.assert_array_equal(logits(compiled, prompt, 6), expected[prompt])


@pytest.mark.parametrize("folder", DIRECTORIES, ids=lambda folder: folder.name)
def test_directories_of_every_kind(folder: Path) -> None:
    """Kinds of model that only directories hold: answers and batches, of shaped scores and clamped units too."""
    with CppyyBackend(threads=2) as backend:
        decoder = operations(backend, directory(folder))
        for ours, theirs in zip(answers(step_runs.compiled(backend, decoder)), answers(decoder), strict=True):
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("table", HERE, ids=lambda table: table.name)
def test_every_instruction_set_compiles_steps(table: InstructionSet) -> None:
    """Each with the bits of its own operations."""
    with CppyyBackend(isa=table.name, threads=2) as backend:
        decoder = operations(backend, model("odd"))
        np.testing.assert_array_equal(logits(backend.compiled(decoder), 5, 4), logits(decoder, 5, 4))


def test_a_prompt_of_several_parts() -> None:
    """300 tokens: more than are read at once, more than are laid out at once, in a cache that grows."""
    with CppyyBackend(threads=2) as backend:
        decoder = operations(backend, model("llama"))
        compiled = backend.compiled(decoder)
        tokens = [int(token) for token in np.random.default_rng(0).integers(0, 265, 300)]
        done: list[tuple[int, int]] = []
        states = decoder.new_state(), compiled.new_state()
        read = compiled.hidden(tokens, states[1], lambda *work: done.append(work))
        np.testing.assert_array_equal(read, decoder.hidden(tokens, states[0]))
        np.testing.assert_array_equal(compiled.logits(read[250:]), decoder.logits(read[250:]))
        assert done == [(512, 600), (600, 600)] and len(states[1]) == 300


@pytest.mark.parametrize("contract", ("float32", "integer"))
def test_activations_that_powers_of_two_would_round(contract: Contract) -> None:
    """An embedding so small that a kernel with folded powers of two refuses it: other kernels compute that step."""
    weights = model("llama")
    small = replace(weights, embedding=np.asarray(weights.embedding) * np.float32(1e-35))
    with CppyyBackend(threads=2) as backend:
        decoder = operations(backend, small, contract)
        compiled = backend.compiled(decoder)
        for prompt in PROMPTS:
            np.testing.assert_array_equal(logits(compiled, prompt, 3), logits(decoder, prompt, 3))


@pytest.mark.parametrize("contract", ("float32", "integer"))
@pytest.mark.parametrize("name", ("llama", "qwen2", "gemma3", "granite", "sparse"))
def test_a_batch_has_the_bits_of_the_operations(name: str, contract: Contract) -> None:
    """Sequences of different lengths, some of one token, in batches of two and seven; each state stays its own."""
    with CppyyBackend(threads=2) as backend:
        decoder = operations(backend, model(name), contract)
        compiled, rng = backend.compiled(decoder), np.random.default_rng(1)
        assert isinstance(compiled, CompiledDecoder)
        for size in (2, 7):
            prompts = [[int(token) for token in rng.integers(0, 265, 1 + 3 * n)] for n in range(size)]
            theirs, own = [decoder.new_state(2) for _ in prompts], [compiled.new_state(2) for _ in prompts]
            for prompt, one, other in zip(prompts, theirs, own, strict=True):
                decoder.hidden(prompt, one)
                compiled.hidden(prompt, other)
            for _ in range(3):
                tokens = [int(token) for token in rng.integers(0, 265, size)]
                expected = decoder.hidden_batch(tokens, theirs)
                np.testing.assert_array_equal(compiled.hidden_batch(tokens, own), expected)
            assert [len(state) for state in own] == [4 + 3 * n for n in range(size)]


def test_sequences_do_not_meet() -> None:
    """Two in turns, and two threads that generate at once with one model, as each alone."""
    with CppyyBackend(threads=2) as backend:
        compiled = backend.compiled(operations(backend, model("llama")))
        alone = {prompt: logits(compiled, prompt, 20) for prompt in (2, 9)}
        one, other = ([5, 7], compiled.new_state()), ([31, 2, 8], compiled.new_state())
        first = [compiled.hidden(tokens, state) for tokens, state in (one, other)]
        again = [compiled.hidden(tokens, compiled.new_state()) for tokens, _ in (one, other)]
        for mine, theirs in zip(first, again, strict=True):
            np.testing.assert_array_equal(mine, theirs)
        found: dict[int, F32] = {}

        def run(prompt: int) -> None:
            found[prompt] = logits(compiled, prompt, 20)

        threads = [threading.Thread(target=run, args=(prompt,)) for prompt in alone]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for prompt, expected in alone.items():
            np.testing.assert_array_equal(found[prompt], expected)


def test_a_token_that_fails_leaves_the_state_as_it_was() -> None:
    """Tokens that are refused, and a backend that was closed, add nothing to the cache."""
    with CppyyBackend(threads=2) as backend:
        compiled = backend.compiled(operations(backend, model("llama")))
        state = compiled.new_state()
        compiled.hidden([1, 2], state)
        with pytest.raises(ArgumentError, match=r"tokens\[0\] is 9999"):
            compiled.hidden([9999], state)
        with pytest.raises(ArgumentError, match="number of tokens is 0"):
            compiled.hidden([], state)
        assert len(state) == 2
    with pytest.raises(UnavailableError, match="closed"):
        compiled.hidden([3], state)
    assert len(state) == 2


def test_a_cache_grows_no_further_than_the_context() -> None:
    """By doubling, up to the rows that tokens can use."""
    weights = step_runs.edge("narrow")
    with CppyyBackend(threads=1) as backend:
        decoder = step_runs.compiled(backend, operations(backend, weights))
        state = decoder.new_state(3)
        capacities = []
        for token in range(weights.config.context):
            decoder.hidden([token % 5], state)
            capacities.append(state.keys.shape[2])
    assert capacities == [3, 3, 3, 6, 6, 6, 9, 9, 9]


def test_a_forked_child_is_told() -> None:
    """It has none of the threads: an error, and no wait without end."""
    with CppyyBackend(threads=2) as backend:
        compiled = backend.compiled(operations(backend, model("llama")))
        compiled.hidden([1], compiled.new_state())
        child = os.fork()
        if child == 0:
            try:
                compiled.hidden([1], compiled.new_state())
            except UnavailableError as error:
                os._exit(0 if "fork" in str(error) else 2)
            os._exit(3)
        assert os.waitpid(child, 0)[1] == 0


def test_weights_that_overflow_are_an_error() -> None:
    """As of the decoder that runs operations: no NaN is taken for the likeliest."""
    weights = model("llama")
    huge = replace(weights, norm=weights.norm * np.float32(2e38))
    with CppyyBackend(threads=1) as backend:
        compiled = backend.compiled(operations(backend, huge))
        with pytest.raises(ArgumentError, match="a logit is not finite"):
            next(generate(compiled, [1], 1))


def test_what_is_not_compiled_is_named() -> None:
    """Matrices of numpy, formulas between the products: the reason, and not another decoder."""
    weights = model("llama")

    def floats(matrix: Matrix) -> Linear:
        return plain_linear(to_float(matrix))

    with CppyyBackend(threads=1) as backend:
        steps = operations(backend, weights).ops
        with pytest.raises(NotDeclaredError, match="compiled steps with matrices that numpy multiplies by"):
            backend.compiled(Decoder(weights, floats, ops=steps))
        with pytest.raises(NotDeclaredError, match="compiled steps with elementwise operations of another"):
            backend.compiled(Decoder(weights, BackendLinears(backend)))
        order = np.tile(np.arange(weights.config.head_dim, dtype=np.float32), weights.config.kv_heads)
        moved = replace(weights, layers=tuple(replace(layer, key_order=order) for layer in weights.layers))
        with pytest.raises(NotDeclaredError, match=r"a compiled step with the line .*rotate_sorted"):
            backend.compiled(operations(backend, moved))


def test_the_text_of_a_step_says_its_lines() -> None:
    """The C++ has every line of the program as a comment; one name belongs to one text."""
    with CppyyBackend(threads=1) as backend:
        sources = {}
        for name in MODELS:
            decoder = operations(backend, step_runs.model(name))
            source = StepSource(decoder.step, backend._table)
            lines = [line for program in decoder.step.blocks for line in program]
            assert all(f"// {line}\n" in source.source for line in (*lines, *decoder.step.last))
            sources[source.source] = source.name
        assert len(set(sources.values())) == len(sources)
