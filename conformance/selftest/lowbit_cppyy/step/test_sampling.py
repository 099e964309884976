"""Sampling in C++ draws the tokens of the chapter, alone and at the end of a step: every filter, ties, the ends of what
is allowed."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from step_runs import EDGES, compiled, edge, model, operations

from lowbit.arrays import F32
from lowbit.errors import ArgumentError
from lowbit.model.generation import chosen, generate, generate_batch
from lowbit.model.matrices import to_float
from lowbit.model.sampling import GREEDY, Sampling, choose, kept
from lowbit.quantization.affine import quantize
from lowbit_cppyy import CppyyBackend
from lowbit_cppyy.step.decoder import CompiledDecoder

pytestmark = pytest.mark.toolchain


@pytest.fixture(scope="module")
def decoder() -> Iterator[CompiledDecoder]:
    with CppyyBackend(threads=1) as backend:
        yield compiled(backend, operations(backend, edge("narrow")))


def some_logits() -> dict[str, F32]:
    """Of a vocabulary, of few tokens, with many ties, far apart, and of both infinities of what float32 holds."""
    rng = np.random.default_rng(15)
    return {
        "many": rng.normal(scale=4, size=50_000).astype(np.float32),
        "few": rng.normal(size=3).astype(np.float32),
        "one": np.zeros(1, np.float32),
        "ties": rng.integers(0, 4, 2000).astype(np.float32),
        "equal": np.zeros(300, np.float32),
        "apart": np.array([0, -30.5, -63.9, -64.1, 3e38, -3e38, 3e38, 5], np.float32),
    }


TEMPERATURES, TOP_K, TOP_P = (1.0, 0.3, 7.5, 1e-30), (0, 1, 40, 10**30), (1.0, 0.9, 0.5, 1e-9)
MIN_P = (0.0, 0.05, 1.0, 1e-40)
SETTINGS = list(itertools.product(TEMPERATURES, TOP_K, TOP_P, MIN_P))


@pytest.mark.parametrize("name", some_logits())
def test_every_draw_is_that_of_the_chapter(name: str, decoder: CompiledDecoder) -> None:
    """Whatever the filters, with draws of several seeds, positions and sequences."""
    logits, settings = some_logits()[name], SETTINGS[::5] if name == "many" else SETTINGS
    for number, (temperature, top_k, top_p, min_p) in enumerate(settings):
        how = Sampling(temperature, top_k, top_p, min_p, seed=2**64 - 1 - number)
        for position, sequence in ((number, 0), (2**64 - 1, 3)):
            assert decoder.choose(logits, how, position, sequence) == choose(logits, how, position, sequence), how


def test_draws_reach_every_token_that_is_kept(decoder: CompiledDecoder) -> None:
    """And no other: of 5 tokens each is drawn, in the order of the chapter."""
    logits = np.log(np.array([1, 4, 2, 4, 3], np.float32))
    for how in (Sampling(seed=1), Sampling(top_k=3, seed=1), Sampling(top_p=0.7, seed=1), Sampling(min_p=0.6, seed=1)):
        drawn = [decoder.choose(logits, how, position) for position in range(200)]
        assert drawn == [choose(logits, how, position) for position in range(200)]
        assert set(drawn) == set(kept(logits, how)[0].tolist())


def test_what_cannot_be_drawn_from_is_refused(decoder: CompiledDecoder) -> None:
    """In the words of the chapter."""
    wrong = (np.array([np.nan, 1], np.float32), 0), (np.zeros(0, np.float32), 0), (np.zeros(2, np.float32), 2**64)
    for (logits, position), how in itertools.product(wrong, (Sampling(), GREEDY)):
        if how is GREEDY and position:
            continue  # the likeliest token depends on no draw
        with pytest.raises(ArgumentError) as theirs:
            choose(logits, how, position)
        with pytest.raises(ArgumentError) as ours:
            decoder.choose(logits, how, position)
        assert str(ours.value) == str(theirs.value)


def test_generation_is_that_of_the_operations() -> None:
    """The same seed gives the same tokens, of one sequence and of several."""
    with CppyyBackend(threads=2) as backend:
        plain = operations(backend, model("llama"))
        own, how = compiled(backend, plain), Sampling(temperature=1.5, top_k=50, top_p=0.95, min_p=0.01, seed=7)
        tokens = [[step.token for step in generate(each, [1, 2], 20, sampling=how)] for each in (own, plain)]
        assert tokens[0] == tokens[1] and len(set(tokens[0])) > 3
        batches = [generate_batch(each, [[5], [7, 1]], 6, sampling=how) for each in (own, plain)]
        assert batches[0] == batches[1]


HOWS = (GREEDY, Sampling(temperature=1.3, top_k=20, top_p=0.9, min_p=0.01, seed=3), Sampling(temperature=1e-30, seed=9))


@pytest.mark.parametrize("name", (*EDGES, "llama", "gemma3", "sparse"))
def test_a_step_that_ends_with_the_choice_has_the_bits_of_its_parts(name: str) -> None:
    """On one thread and on three, of which some may have no columns of the head."""
    weights = edge(name) if name in EDGES else model(name)
    for threads in (1, 3):
        with CppyyBackend(threads=threads) as backend:
            own = compiled(backend, operations(backend, weights))
            for how in HOWS:
                states = [own.new_state(), own.new_state()]
                for token, position in ((0, 2**64 - 1), (weights.config.vocabulary - 1, 7)):
                    (step,) = own.follow(token, states[0], how, position)
                    expected = chosen(own, own.hidden([token], states[1]), how, position)
                    assert step.token == expected.token
                    np.testing.assert_array_equal(step.logits, expected.logits)
                assert len(states[0]) == 2


@pytest.mark.parametrize("threads", (1, 2, 3, 4))
def test_of_equal_logits_the_first_is_chosen(threads: int) -> None:
    """Wherever the columns of threads, and the rows of a vector, begin and end."""
    weights = model("llama")
    head, hidden = to_float(weights.head), weights.config.hidden
    with CppyyBackend(threads=threads) as backend:
        for likeliest in ([0, 264], [63, 64], [15, 16, 17], [100, 200], [263, 264], [133, 132]):
            columns = np.zeros_like(head)
            columns[:, likeliest] = head[:, :1]
            for sign in (1, -1):  # in one of the two they are above the zeros
                made = quantize(np.ascontiguousarray(sign * columns), bits=4, group_size=hidden)
                own = compiled(backend, operations(backend, replace(weights, head=made)))
                (step,) = own.follow(3, own.new_state(), GREEDY, 1)
                assert step.token == int(np.argmax(step.logits))


def test_a_step_without_a_choice_adds_no_token() -> None:
    """A token or a position that is refused, or a logit that is not finite: in the words of the parts."""
    huge = replace(model("llama"), norm=np.full_like(model("llama").norm, 3e38))
    with CppyyBackend(threads=2) as backend:
        own = compiled(backend, operations(backend, huge))
        state = own.new_state()
        for token, position in ((265, 1), (-1, 1), (1, 2**64)):
            with pytest.raises(ArgumentError, match=f"(tokens.0.|position) is {max(token, position)}|is -1"):
                own.follow(token, state, GREEDY, position)
        for how in HOWS:
            with pytest.raises(ArgumentError, match="a logit is not finite"):
                own.follow(1, state, how, 1)
        assert len(state) == 0
