"""Compiled steps at the ends of what is allowed: sizes of one, full caches, activations that cannot be cast, forks,
interrupts, and two decoders at once."""

import os
import signal
import threading
from dataclasses import replace

import numpy as np
import pytest
from step_runs import EDGES, compiled, edge, edge_answers, logits, model, operations

from lowbit.arrays import F32, F64
from lowbit.attention.rope import Frequencies
from lowbit.errors import ArgumentError, UnavailableError
from lowbit.runtime.linears import Contract
from lowbit_cppyy import CppyyBackend
from lowbit_cppyy.step.decoder import State

pytestmark = pytest.mark.toolchain


@pytest.mark.parametrize("contract", ("float32", "integer"))
@pytest.mark.parametrize("name", EDGES)
def test_sizes_at_which_something_ends(name: str, contract: Contract) -> None:
    """The bits of the operations, on one thread and on three."""
    for threads in (1, 3):
        with CppyyBackend(threads=threads) as backend:
            decoder = operations(backend, edge(name), contract)
            pairs = zip(edge_answers(compiled(backend, decoder)), edge_answers(decoder), strict=True)
            for found, expected in pairs:
                np.testing.assert_array_equal(found, expected)


def test_a_state_has_room_for_a_token() -> None:
    """As those of the decoder that runs operations."""
    with CppyyBackend(threads=1) as backend:
        decoder = operations(backend, edge("smallest"))
        for each in (decoder, compiled(backend, decoder)):
            with pytest.raises(ArgumentError, match="capacity is 0; allowed: an integer of at least 1"):
                each.new_state(0)


def test_a_state_of_another_decoder_is_refused() -> None:
    """Before any of its memory is touched, and it stays as it was."""
    with CppyyBackend(threads=1) as backend:
        one, other = (compiled(backend, operations(backend, edge(name))) for name in ("narrow", "routed"))
        theirs = operations(backend, edge("narrow"))
        foreign = other.new_state()
        other.hidden([1], foreign)
        with pytest.raises(ArgumentError, match="state is of another decoder"):
            one.hidden([1], foreign)
        with pytest.raises(ArgumentError, match=r"states\[1\] is of another decoder"):
            one.hidden_batch([1, 2], [one.new_state(), foreign])
        with pytest.raises(ArgumentError, match="state is of another decoder"):
            one.hidden([1], theirs.new_state())  # type: ignore[arg-type]  # what is refused
        assert len(foreign) == 1


def test_hidden_states_of_another_shape_are_refused() -> None:
    """Before the head reads them; those of another layout have the same logits."""
    with CppyyBackend(threads=1) as backend:
        own = compiled(backend, operations(backend, edge("narrow")))
        hidden = np.random.default_rng(5).normal(size=(4, 24))
        for given in (hidden[:, :23], hidden[:0], hidden[0], np.zeros((2, 3, 24))):
            with pytest.raises(ArgumentError, match=r"shape of hidden is .*any x 24"):
                own.logits(given)
        np.testing.assert_array_equal(own.logits(np.asfortranarray(hidden)), own.logits(hidden))


@pytest.mark.parametrize("name", ("llama", "mixed"))
def test_an_activation_that_overflows_inside_a_step_is_an_error(name: str) -> None:
    """It has no cast, to blocks or to the formats of GGUF: an error in words, and the state stays as it was."""
    weights = model(name)
    huge = [replace(layer, attention_norm=np.full_like(layer.attention_norm, 3e38)) for layer in weights.layers]
    with CppyyBackend(threads=2) as backend:
        own = compiled(backend, operations(backend, replace(weights, layers=tuple(huge)), "integer"))
        state = own.new_state()
        for tokens in ([1], [1, 2, 3]):
            with pytest.raises(ArgumentError, match="an activation inside the step is not finite"):
                own.hidden(tokens, state)
        assert len(state) == 0


@pytest.mark.parametrize("name", ("llama", "odd"))
def test_a_token_that_is_not_finite_changes_no_token_before_it(name: str) -> None:
    """Tokens of a prompt attend together, and a kernel reads the row behind those that a token sees."""
    weights, tokens = model(name), [1, 2, 3, 4, 5, 6] * 12
    embedding = weights.embedding[np.arange(weights.embedding.shape[0])]
    embedding[7] = np.inf
    with CppyyBackend(threads=2) as backend:
        own = compiled(backend, operations(backend, replace(weights, embedding=embedding)))
        alone = own.hidden(tokens, own.new_state())
        for place in (30, 33, 63, 64, 71):
            found = own.hidden([*tokens[:place], 7, *tokens[place + 1 :]], own.new_state())
            assert np.isnan(found[place:]).any(axis=1).all()
            np.testing.assert_array_equal(found[:place], alone[:place])


def test_an_interrupt_while_tables_of_angles_grow_leaves_them_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next call makes them again."""
    tokens = [int(token) for token in np.random.default_rng(3).integers(0, 265, 70)]
    with CppyyBackend(threads=1) as backend:
        decoder = operations(backend, model("llama"))
        expected = compiled(backend, decoder).hidden(tokens, compiled(backend, decoder).new_state())
        own = compiled(backend, decoder)
        own.hidden([1], own.new_state())

        def interrupted(*_: object) -> None:
            raise KeyboardInterrupt

        state = own.new_state()
        with monkeypatch.context() as patch:
            patch.setattr(Frequencies, "rotation", interrupted)
            with pytest.raises(KeyboardInterrupt):
                own.hidden(tokens, state)
        assert len(state) == 0
        np.testing.assert_array_equal(own.hidden(tokens, state), expected)


@pytest.mark.parametrize("name", ("run", "run_batch"))
def test_an_interrupt_after_a_step_adds_no_token(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caches have grown and hold the token, but no state counts it: the same call again has the same answer."""
    with CppyyBackend(threads=2) as backend:
        own = compiled(backend, operations(backend, edge("narrow")))
        states = [own.new_state(1), own.new_state(1)]
        untouched = [own.new_state(9), own.new_state(9)]
        for pair in (states, untouched):
            own.hidden([4], pair[0])
            own.hidden([1, 2], pair[1])

        def call(pair: list[State]) -> F64:
            return own.hidden([3], pair[1]) if name == "run" else own.hidden_batch([3, 0], pair)

        run = getattr(own.parts, name)

        def interrupted(*arguments: object) -> int:
            run(*arguments)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(own.parts, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                call(states)
        assert [len(state) for state in states] == [1, 2]
        np.testing.assert_array_equal(call(states), call(untouched))
        np.testing.assert_array_equal(call(states), call(untouched))


def test_a_child_forked_during_a_step_is_told() -> None:
    """A thread of the parent is in a step, and holds the lock of the decoder. The child has no such thread: it gets an
    error, and no wait without end."""
    with CppyyBackend(threads=2) as backend:
        own = compiled(backend, operations(backend, model("llama")))
        own.hidden([1], own.new_state())
        inside, forked = threading.Event(), threading.Event()
        run = own.parts.run

        def held(*arguments: object) -> int:
            inside.set()
            forked.wait()
            return run(*arguments)

        own.parts.run = held
        thread = threading.Thread(target=own.hidden, args=([1], own.new_state()))
        thread.start()
        inside.wait()
        child = os.fork()
        if child == 0:
            signal.alarm(20)  # ends the child if it waits
            try:
                own.hidden([1], own.new_state())
            except UnavailableError as error:
                os._exit(0 if "fork" in str(error) else 2)
            os._exit(3)
        forked.set()
        thread.join()
        assert os.waitpid(child, 0)[1] == 0


def test_two_decoders_at_once() -> None:
    """In two threads, with the threads of one backend: each as alone."""
    with CppyyBackend(threads=2) as backend:
        own = {name: compiled(backend, operations(backend, model(name))) for name in ("llama", "odd")}
        alone = {name: logits(each, 7, 12) for name, each in own.items()}
        found: dict[str, list[F32]] = {name: [] for name in own}

        def run(name: str) -> None:
            found[name] += [logits(own[name], 7, 12) for _ in range(5)]

        threads = [threading.Thread(target=run, args=(name,)) for name in own]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for name, expected in alone.items():
            assert len(found[name]) == 5
            for each in found[name]:
                np.testing.assert_array_equal(each, expected)
