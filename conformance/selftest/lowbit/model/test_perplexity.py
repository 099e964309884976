"""The protocols of perplexity, each against a plain re-statement of its owner's program."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from lowbit.arrays import F32, F64
from lowbit.errors import ArgumentError
from lowbit.model.config import LlamaConfig
from lowbit.model.perplexity import PROTOCOLS, Perplexity, Protocol, ProtocolName, perplexity

VOCABULARY, BOS, CONTEXT = 40, 1, 64
RNG = np.random.Generator(np.random.PCG64(0))
TABLE, HEAD = RNG.normal(size=(VOCABULARY, 8)), RNG.normal(size=(8, VOCABULARY))
TOKENS: list[int] = RNG.integers(2, VOCABULARY, 61).tolist()


def features(tokens: Sequence[int]) -> F64:
    """What the toy model makes of a sequence: every token before counts, the nearest most."""
    rows, row = [], np.zeros(8)
    for token in tokens:
        row = 0.8 * row + TABLE[token]
        rows.append(row)
    return np.array(rows)


class Toy:
    """A decoder whose logits depend on all tokens before; it notes what it read."""

    config = LlamaConfig(1, 8, 8, 1, 1, 8, VOCABULARY, CONTEXT, 1e4, 1e-5)

    def __init__(self) -> None:
        self.read: list[list[int]] = []

    def new_state(self, capacity: int = 64) -> Any:
        return []

    def hidden(self, tokens: Sequence[int], state: Any, progress: Any = None) -> F64:
        self.read.append(list(tokens))
        return features(tokens)

    def logits(self, hidden: F64) -> F32:
        return (hidden @ HEAD).astype(np.float32)


def losses(tokens: Sequence[int]) -> F64:
    """The negative log-likelihood of every token but the first."""
    scores = (features(tokens[:-1]) @ HEAD).astype(np.float32).astype(np.float64)
    logs = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
    result: F64 = -logs[np.arange(len(tokens) - 1), list(tokens[1:])]
    return result


# **The owners' programs**, each a function of the tokens, the length of a window and BOS.


def gptq(tokens: list[int], length: int, bos: int | None) -> tuple[float, int]:
    """The mean over whole windows of the mean over a window's tokens; what is left of the text is dropped."""
    text = [*([] if bos is None else [bos]), *tokens]
    count = len(text) // length
    means = [losses(text[i * length : (i + 1) * length]).mean() * length for i in range(count)]
    return math.exp(sum(means) / (count * length)), count * (length - 1)


def llama_cpp(tokens: list[int], length: int, bos: int | None) -> tuple[float, int]:
    """The second half of each window, from the logits at length/2 to length − 2; BOS overwrites the first token."""
    text = [*([] if bos is None else [bos]), *tokens]
    assert len(text) >= 2 * length
    total, count, first = 0.0, 0, length // 2
    for chunk in range(len(text) // length):
        window = text[chunk * length : (chunk + 1) * length]
        if bos is not None:
            window[0] = bos
        total += losses(window)[first:].sum()
        count += length - first - 1
    return math.exp(total / count), count


def transformers(tokens: list[int], length: int, bos: int | None, stride: int) -> tuple[float, int]:
    """A sliding window: targets that an earlier window had are masked, and so is what nothing predicts."""
    text = [*([] if bos is None else [bos]), *tokens]
    total, count, previous = 0.0, 0, 0
    for begin in range(0, len(text), stride):
        end = min(begin + length, len(text))
        targets = [*range(begin, end)]
        masked = {*range(begin, end - (end - previous)), begin}
        kept = [loss for place, loss in zip(targets[1:], losses(text[begin:end]), strict=True) if place not in masked]
        total, count, previous = total + sum(kept), count + len(kept), end
        if end == len(text):
            break
    return math.exp(total / count), count


def lowbit(tokens: list[int], length: int, bos: int | None) -> tuple[float, int]:
    """Windows apart, each after BOS if there is one; the last may be short."""
    kept: list[float] = []
    for start in range(0, len(tokens), length):
        window = [*([] if bos is None else [bos]), *tokens[start : start + length]]
        kept += losses(window).tolist() if len(window) > 1 else []
    return math.exp(sum(kept) / len(kept)), len(kept)


OWNERS: dict[ProtocolName, Callable[[list[int], int, int | None], tuple[float, int]]] = {
    "lowbit": lowbit,
    "gptq": gptq,
    "llama.cpp": llama_cpp,
}


@pytest.mark.parametrize("bos", [None, BOS])
@pytest.mark.parametrize("length", [5, 12, 16, 20])
@pytest.mark.parametrize("name", OWNERS)
def test_protocols_are_their_owners(name: ProtocolName, length: int, bos: int | None) -> None:
    """Value and count are those of the owner's program, with whole and broken last windows, odd and even lengths."""
    for count in (40, 41, 60, 61):
        found = perplexity(Toy(), TOKENS[:count], length, bos=bos, protocol=name)
        value, scored = OWNERS[name](TOKENS[:count], length, bos)
        assert found.count == scored
        assert found.value == pytest.approx(value, rel=1e-9)


@pytest.mark.parametrize("bos", [None, BOS])
@pytest.mark.parametrize(("length", "stride"), [(16, 8), (16, 5), (10, 9), (60, 59)])
def test_windows_that_overlap(length: int, stride: int, bos: int | None) -> None:
    """Every token is scored once, in the first window that has it; without BOS the first of all is not."""
    sliding = Protocol(1024, stride=stride, short=True)
    for count in (30, 40, 61):
        found = perplexity(Toy(), TOKENS[:count], length, bos=bos, protocol=sliding)
        value, scored = transformers(TOKENS[:count], length, bos, stride)
        assert found.count == scored == count - (bos is None)
        assert found.value == pytest.approx(value, rel=1e-9)


def test_named_protocols_have_their_owners_lengths() -> None:
    """The windows that each reads by default, of a text in which all fit."""
    lengths = {name: protocol.window for name, protocol in PROTOCOLS.items()}
    assert lengths == {"lowbit": 512, "gptq": 2048, "llama.cpp": 512, "transformers": 1024}
    assert PROTOCOLS["transformers"].stride == 512
    pieces = [*PROTOCOLS["transformers"].pieces(range(1600), 1024, None)]
    assert [(piece[0], len(piece), first) for piece, first, _ in pieces] == [
        (0, 1024, 1),
        (512, 1024, 512),
        (1024, 576, 512),
    ]


def test_protocols_give_other_numbers_for_one_text() -> None:
    """The same model and text: no two protocols agree, which is why a number without one says little."""
    found = {name: perplexity(Toy(), TOKENS, 16, bos=BOS, protocol=name).value for name in OWNERS}
    assert len({round(value, 3) for value in found.values()}) == len(found)


@pytest.mark.parametrize("name", OWNERS)
def test_progress_ends_with_what_was_read(name: ProtocolName) -> None:
    """It never falls, and never says more than there is; a last window that is not read is not counted."""
    done: list[tuple[int, int]] = []
    perplexity(Toy(), TOKENS, 16, bos=BOS, protocol=name, progress=lambda *work: done.append(work))
    assert done == sorted(done)
    assert done[-1] == ((61, 61) if name == "lowbit" else (47, 61))


def test_where_bos_stands() -> None:
    """The tokens that are read of 8, in windows of 4."""
    for name, read in {
        "lowbit": [[BOS, 2, 3, 4], [BOS, 6, 7, 8]],
        "gptq": [[BOS, 2, 3], [5, 6, 7]],
        "llama.cpp": [[BOS, 2, 3], [BOS, 6, 7]],
    }.items():
        toy = Toy()
        perplexity(toy, [2, 3, 4, 5, 6, 7, 8, 9], 4, bos=BOS, protocol=name)  # type: ignore[arg-type]  # a key of OWNERS
        assert toy.read == read


@pytest.mark.parametrize(
    ("name", "count", "window", "bos", "message"),
    [
        ("gptq", 15, 16, None, "number of tokens is 15; allowed: at least 16"),
        ("gptq", 14, 16, BOS, "number of tokens is 14; allowed: at least 15"),
        ("llama.cpp", 31, 16, None, "number of tokens is 31; allowed: at least 32"),
        ("llama.cpp", 60, 2, None, "window is 2; allowed: an integer from 3 to 64"),
        ("gptq", 60, 65, BOS, "window is 65; allowed: an integer from 2 to 64"),
        ("lowbit", 60, 64, BOS, "window is 64; allowed: an integer from 1 to 63"),
        (
            "transformers",
            60,
            64,
            None,
            "this protocol needs a context of at least 513 tokens, and the model has 64",
        ),
        ("best", 60, 16, None, "protocol is 'best'; allowed: lowbit, gptq, llama"),
    ],
)
def test_what_cannot_be_counted_is_refused(name: Any, count: int, window: int, bos: int | None, message: str) -> None:
    """Too short a text, windows that score nothing or do not fit, and names that no protocol has."""
    with pytest.raises(ArgumentError, match=message):
        perplexity(Toy(), TOKENS[:count], window, bos=bos, protocol=name)


def test_beyond_float64() -> None:
    """A perplexity that float64 cannot hold is infinite, without a warning; the sum that it is made of stays."""
    found = Perplexity(nll=71000.0, count=100)
    assert (found.value, found.nll) == (math.inf, 71000.0)
    assert Perplexity(nll=70900.0, count=100).value == pytest.approx(math.exp(709), rel=1e-14)
