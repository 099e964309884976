"""Comparing two models: each number against its definition written out once more, on decoders of random weights."""

from dataclasses import replace

import numpy as np
import pytest
from tiny_gguf import CONFIG, published, write

from lowbit.arrays import F64
from lowbit.errors import ArgumentError
from lowbit.formats.gguf.reader import open_gguf, read_llama
from lowbit.model.comparison import Comparison, Estimate, Window, compare, estimate, log_probabilities
from lowbit.model.decoder import Decoder
from lowbit.model.matrices import to_float
from lowbit.model.perplexity import perplexity
from lowbit.model.weights import LlamaWeights

TOKENS = [int(token) for token in np.random.default_rng(5).integers(0, CONFIG.vocabulary, 43)]
WINDOW = 12


def decoder(weights: LlamaWeights) -> Decoder:
    return Decoder(weights, lambda matrix: lambda x: x @ to_float(matrix))


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> tuple[LlamaWeights, LlamaWeights]:
    """Two models of one shape and other numbers."""
    folder = tmp_path_factory.mktemp("comparison")
    a, b = (read_llama(open_gguf(write(folder / f"{seed}.gguf", published(seed)))) for seed in (0, 1))
    return a, b


@pytest.fixture(scope="module")
def found(weights: tuple[LlamaWeights, LlamaWeights]) -> Comparison:
    a, b = weights
    return compare((decoder(a), decoder(b)), TOKENS, WINDOW)


def pieces() -> list[list[int]]:
    return [TOKENS[start : start + WINDOW] for start in range(0, len(TOKENS), WINDOW)]


def logits(weights: LlamaWeights, piece: list[int]) -> F64:
    """The logits of all positions that predict a token of the piece."""
    model = decoder(weights)
    return model.logits(model.hidden(piece[:-1], model.new_state())).astype(np.float64)


def test_losses_are_those_of_perplexity(weights: tuple[LlamaWeights, LlamaWeights], found: Comparison) -> None:
    """Of each model the same sum over the same positions."""
    for model, number in zip(weights, (0, 1), strict=True):
        alone = perplexity(decoder(model), TOKENS, WINDOW)
        assert found.count == alone.count
        assert sum(window.losses[number] for window in found.windows) == pytest.approx(alone.nll, rel=1e-12)
        assert found.perplexities[number].mean == pytest.approx(alone.value, rel=1e-12)


def test_divergence_and_agreement(weights: tuple[LlamaWeights, LlamaWeights], found: Comparison) -> None:
    """The sum over tokens of p ln(p / q), position by position."""
    for window, piece in zip(found.windows, pieces(), strict=True):
        divergence, agreed = 0.0, 0
        for a, b in zip(logits(weights[0], piece), logits(weights[1], piece), strict=True):
            p, q = (np.exp(each - each.max()) / np.exp(each - each.max()).sum() for each in (a, b))
            divergence += sum(float(x) * np.log(x / y) for x, y in zip(p, q, strict=True))
            agreed += int(a.argmax() == b.argmax())
        assert window.divergence == pytest.approx(divergence, rel=1e-9)
        assert (window.agreed, window.count) == (agreed, len(piece) - 1)
    assert found.divergence.mean > 0.01


def test_layers(weights: tuple[LlamaWeights, LlamaWeights], found: Comparison) -> None:
    """The stream behind a block is what a model of the blocks up to it would norm."""
    assert found.layers is not None
    for layer, error in enumerate(found.layers):
        apart = whole = 0.0
        for piece in pieces():
            streams = [stream(model, piece[:-1], layer) for model in weights]
            apart += float(((streams[1] - streams[0]) ** 2).sum())
            whole += float((streams[0] ** 2).sum())
        assert error == pytest.approx((apart / whole) ** 0.5, rel=1e-12)


def stream(weights: LlamaWeights, tokens: list[int], layer: int) -> F64:
    """The residual stream behind a block, by a model that ends there and has a norm that changes nothing but size."""
    seen: list[F64] = []
    config = replace(weights.config, layers=layer + 1)
    short = decoder(replace(weights, config=config, layers=weights.layers[: layer + 1]))
    short.hidden(tokens, short.new_state(), watch=lambda number, x: seen.append(x))
    return seen[-1]


def test_a_model_and_itself(weights: tuple[LlamaWeights, LlamaWeights]) -> None:
    """Nothing differs, to the bit."""
    model = decoder(weights[0])
    same = compare((model, model), TOKENS, WINDOW)
    assert same.difference == Estimate(0.0, 0.0) == same.divergence
    assert same.agreement == Estimate(1.0, 0.0)
    assert same.layers == (0.0,) * CONFIG.layers


def test_a_mark_of_the_beginning(weights: tuple[LlamaWeights, LlamaWeights]) -> None:
    """With BOS each token of a window is scored, the first included."""
    a, b = map(decoder, weights)
    begun = compare((a, b), TOKENS, WINDOW, bos=1)
    assert [window.count for window in begun.windows] == [len(piece) for piece in pieces()]
    assert begun.losses[1].mean == pytest.approx(perplexity(b, TOKENS, WINDOW, bos=1).nll / len(TOKENS), rel=1e-12)


def test_streams_of_other_shapes_are_not_compared(weights: tuple[LlamaWeights, LlamaWeights]) -> None:
    """Everything else is."""
    a, b = weights
    short = replace(b, config=replace(b.config, layers=1), layers=b.layers[:1])
    other = compare((decoder(a), decoder(short)), TOKENS, WINDOW)
    assert other.layers is None and other.divergence.mean > 0


def test_standard_errors() -> None:
    """Of windows of one size it is that of the mean of their means; a constant has none."""
    sums = [3.0, 5.0, 10.0, 6.0]
    means = np.array(sums) / 8
    found = estimate(sums, [8] * 4)
    assert found.mean == pytest.approx(means.mean(), rel=1e-15)
    assert found.error == pytest.approx(means.std(ddof=1) / 2, rel=1e-14)
    assert estimate([2.0, 6.0], [1, 3]) == Estimate(2.0, 0.0)
    assert estimate([2.0], [4]) == Estimate(0.5, None)


def test_perplexities_beyond_float64() -> None:
    """They are infinite, and so is what is known of their errors; those of the other model stay."""
    windows = [Window(4, (losses, 2.0), 0.1, 4) for losses in (4000.0, 4000.0)]
    a, b = Comparison(tuple(windows), None).perplexities
    assert a == Estimate(np.inf, np.inf)
    assert b.mean == pytest.approx(np.exp(0.5), rel=1e-14) and b.error == 0
    assert Comparison(tuple(windows[:1]), None).perplexities[0] == Estimate(np.inf, None)
    assert Comparison(tuple(windows), None).difference == Estimate(-999.5, 0.0)


def test_log_probabilities_of_large_logits() -> None:
    """They do not overflow, and their exponentials sum to 1."""
    found = log_probabilities(np.array([[3e38, 3e38, -3e38]], np.float32))
    assert found[0, :2] == pytest.approx([-np.log(2)] * 2)
    assert np.exp(found).sum() == pytest.approx(1, rel=1e-15)


def test_refused(weights: tuple[LlamaWeights, LlamaWeights]) -> None:
    """Windows that do not fit either model, texts that are too short, other vocabularies."""
    a, b = map(decoder, weights)
    for window, tokens in ((1, TOKENS), (CONFIG.context + 1, TOKENS), (WINDOW, TOKENS[:1])):
        with pytest.raises(ArgumentError):
            compare((a, b), tokens, window)
    smaller = replace(b.config, vocabulary=CONFIG.vocabulary - 1)
    b.config = smaller
    with pytest.raises(ArgumentError, match="vocabulary of B"):
        compare((a, b), TOKENS, WINDOW)
