"""Tiny random models of every kind against their logits by the code of ``transformers`` (``data/write.py``)."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lowbit.formats.checkpoint.reader import open_checkpoint
from lowbit.model.decoder import Decoder
from lowbit.model.weights import in_memory

DATA = Path(__file__).parent / "data"
MODELS = sorted(path.name for path in DATA.iterdir() if (path / "expected.npz").exists())
LIMIT = 1e-5
"""Of the largest logit; both sides compute in float32 and hold angles of up to 40 radians in it, which are rounded by
up to 2e-6."""


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(name: str) -> None:
    """After every token, whether the tokens are read at once or one by one."""
    with np.load(DATA / name / "expected.npz") as held:
        tokens, expected = [int(token) for token in held["tokens"]], held["logits"]
    decoder = Decoder(in_memory(open_checkpoint(DATA / name)))
    largest = float(np.abs(expected).max())
    assert largest > 1
    found = decoder.logits(decoder.hidden(tokens, decoder.new_state()))
    np.testing.assert_allclose(found, expected, rtol=0, atol=LIMIT * largest)
    state = decoder.new_state()
    for token, row in zip(tokens, expected, strict=True):
        np.testing.assert_allclose(decoder.logits(decoder.hidden([token], state))[0], row, rtol=0, atol=LIMIT * largest)


def test_the_scaling_counts() -> None:
    """Without it the logits are others, so the comparison above sees it."""
    for name in ("llama3", "llama-linear", "llama-yarn"):
        weights = in_memory(open_checkpoint(DATA / name))
        plain = replace(weights, config=replace(weights.config, rope_scaling=None))
        with np.load(DATA / name / "expected.npz") as held:
            tokens, expected = [int(token) for token in held["tokens"]], held["logits"]
        decoder = Decoder(plain)
        found = decoder.logits(decoder.hidden(tokens, decoder.new_state()))
        assert float(np.abs(found - expected).max()) > 1e-2 * float(np.abs(expected).max())
