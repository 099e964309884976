"""Calibration: the streams between blocks are those of the whole decoder, to the bit."""

from dataclasses import replace
from math import inf

import numpy as np
import pytest
import tiny_gguf

from lowbit.arrays import F64
from lowbit.attention.rope import Scaling
from lowbit.model.calibration import Streams
from lowbit.model.decoder import Decoder
from lowbit.model.matrices import to_float
from lowbit.model.weights import LlamaWeights
from lowbit.runtime import open_model

TOKENS = [5, 17, 250, 3, 99, 42, 7, 7, 130, 12, 60, 201]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> LlamaWeights:
    return open_model(tiny_gguf.write(tmp_path_factory.mktemp("model") / "a.gguf")).weights


@pytest.mark.parametrize("scaling", [None, Scaling((1.0,) * 4 + (inf,) * 4, channels=8)])
def test_streams_are_those_of_the_decoder(scaling: Scaling | None, weights: LlamaWeights) -> None:
    """Behind every block, in both windows of a text; also where half of each head is rotated."""
    model = replace(weights, config=replace(weights.config, rope_scaling=scaling))
    decoder = Decoder(model, lambda matrix: lambda x: x @ to_float(matrix))
    expected: list[list[F64]] = [[] for _ in model.layers]
    for start in (0, 8):
        decoder.hidden(
            TOKENS[start : start + 8], decoder.new_state(), watch=lambda number, x: expected[number].append(x)
        )
    streams = Streams.of(model.config, model.embedding, TOKENS, window=8)
    for number, layer in enumerate(model.layers):
        seen, behind = streams.passed(number, layer)
        again = streams.through(number, layer)
        for found, other, wanted in zip(behind.windows, again.windows, expected[number], strict=True):
            np.testing.assert_array_equal(found, wanted)
            np.testing.assert_array_equal(other, wanted)
        assert [len(part) for part in seen.parts["query"]] == [8, 4]
        streams = behind
