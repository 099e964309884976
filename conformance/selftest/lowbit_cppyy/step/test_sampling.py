"""Sampling in C++ draws the tokens of the chapter: every filter, ties, the ends of what is allowed."""

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from step_runs import compiled, edge, model, operations

from lowbit.arrays import F32
from lowbit.errors import ArgumentError
from lowbit.model.decoder import generate, generate_batch
from lowbit.model.sampling import GREEDY, Sampling, choose, kept
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
