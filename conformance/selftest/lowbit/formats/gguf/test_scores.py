"""Tokenizers that GGUF describes by scores (kind ``llama``), against merging by hand; the words of ``qwen2``."""

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from scored_gguf import BYTES, LETTERS, OTHERS, WORDS, scored
from tiny_gguf import TOKENS, write

from lowbit.errors import FormatError
from lowbit.formats.gguf.reader import open_gguf
from lowbit.formats.gguf.tokenizer import LONGEST_TOKEN, read_tokenizer
from lowbit.formats.tokenizer import Tokenizer


def tokenizer(tmp_path: Path, words: list[str] = WORDS, **metadata: Any) -> Tokenizer:
    return read_tokenizer(open_gguf(scored(tmp_path / "s.gguf", words, **metadata)))


def by_hand(text: str, words: list[str]) -> list[str]:
    """Merge the neighbours that make the word of the best score, the leftmost of equals, until none do."""
    parts = list(text.replace(" ", "▁"))
    while True:
        pairs = [(words.index(a + b), at) for at, (a, b) in enumerate(pairwise(parts)) if a + b in words]
        if not pairs:
            break
        _, at = min(pairs)
        parts[at : at + 2] = ["".join(parts[at : at + 2])]
    return [piece for part in parts for piece in ([part] if part in words + LETTERS else bytes_of(part))]


def bytes_of(character: str) -> list[str]:
    return [f"<0x{byte:02X}>" for byte in character.encode()]


def test_merges_by_score(tmp_path: Path) -> None:
    """Random texts in a vocabulary in which orders of merging compete, characters among them that are no token."""
    made, rng = tokenizer(tmp_path), random.Random(0)
    vocabulary = [*OTHERS, *BYTES, *WORDS, *LETTERS]
    several = 0
    for _ in range(300):
        text = "".join(rng.choice("aaabbbccé 🙂") for _ in range(rng.randint(0, 25))).replace("  ", " ")
        pieces = [vocabulary[token] for token in made.encode(text, begin=False)]
        assert pieces == by_hand(text, WORDS), text
        assert made.decode(made.encode(text, begin=False)) == text
        several += any(len(piece) == 3 for piece in pieces)
    assert several > 50


def test_the_score_decides_and_not_the_order_of_tokens(tmp_path: Path) -> None:
    """The same words with scores the other way round are merged the other way round."""
    words = ["ab", "bc"]
    scores = [-1000.0] * len(OTHERS) + [0.0] * 256 + [-2.0, -1.0] + [-9.0] * len(LETTERS)
    vocabulary = [*OTHERS, *BYTES, *words, *LETTERS]
    assert [vocabulary[token] for token in tokenizer(tmp_path, words).encode("abc", begin=False)] == ["ab", "c"]
    turned = tokenizer(tmp_path, words, scores=scores)
    assert [vocabulary[token] for token in turned.encode("abc", begin=False)] == ["a", "bc"]


def test_whole_tokens_bos_and_stop(tmp_path: Path) -> None:
    """Special and user-defined tokens are found first and never merged; BOS begins, and the ends are named."""
    made = tokenizer(tmp_path)
    assert (made.bos, made.stop) == (0, (1,))
    assert made.encode("") == [0]
    assert made.encode("<bos>\n\n  ", begin=False) == [0, 2, 3]
    assert made.decode([2, 3, 1]) == "\n\n  <eos>"
    first = len(OTHERS) + len(BYTES)
    assert made.encode("<eos>a", begin=False) == [1, first + len(WORDS)]


def test_what_files_that_do_not_number_mean(tmp_path: Path) -> None:
    """A text begins with token 1 and ends with token 2, as in llama.cpp, and keys overrule both."""
    made = tokenizer(tmp_path, add_bos_token=None, bos_token_id=None, eos_token_id=None)
    assert (made.bos, made.stop, made.encode("")) == (1, (2, 1), [1])  # 1 is <eos>, an end by its text
    assert tokenizer(tmp_path, add_bos_token=None).bos == 0
    assert tokenizer(tmp_path, add_bos_token=False).bos is None
    named = tokenizer(tmp_path, bos_token_id=None, eos_token_id=None, chat="{{ bos_token }}|{{ eos_token }}")
    assert named.chat is not None and dict(named.chat.tokens) == {"bos_token": "<eos>", "eos_token": "\n\n"}


@pytest.mark.parametrize("given", [{"add_space_prefix": None}, {"add_space_prefix": True}], ids=["missing", "true"])
def test_a_space_in_front(given: dict[str, Any], tmp_path: Path) -> None:
    """Before a text and after each token that is found as a whole, and not before nothing; the text has one less."""
    made = tokenizer(tmp_path, **given)
    vocabulary = [*OTHERS, *BYTES, *WORDS, *LETTERS]

    def pieces(text: str) -> list[str]:
        return [vocabulary[token] for token in made.encode(text, begin=False)]

    assert pieces("") == []
    assert pieces("ab") == ["▁ab"]
    assert pieces(" ab") == ["▁", "▁ab"]
    assert pieces("c<bos>ab<eos>") == ["▁", "c", "<bos>", "▁ab", "<eos>"]
    for text in ("ab", " ab", "ab ab\n", "🙂a"):
        tokens = made.encode(text, begin=False)
        assert made.decode(tokens) == "".join(made.stream(tokens)) == text


def test_text_as_it_comes(tmp_path: Path) -> None:
    """A character of several byte tokens appears when something else follows."""
    made = tokenizer(tmp_path)
    assert [piece for piece in made.stream(made.encode("a🙂b", begin=False)) if piece] == ["a", "🙂b"]
    assert "".join(made.stream(made.encode("ab ab", begin=False))) == "ab ab"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"scores": None}, r"tokenizer\.ggml\.scores is missing or of another length; allowed: \d+ floats"),
    ({"scores": [1.0, 2.0]}, r"tokenizer\.ggml\.scores is missing or of another length"),
    ({"token_type": [1, 2]}, r"tokenizer\.ggml\.token_type is missing or of another length"),
    ({"words": ["a" * (LONGEST_TOKEN + 1)]}, r"tokens is one of 257 characters; allowed: at most 256"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_what_is_not_supported_is_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    """A vocabulary without scores, or with a token that would take long."""
    with pytest.raises(FormatError, match=message):
        tokenizer(tmp_path, **changes)


def test_a_byte_that_is_missing_is_named(tmp_path: Path) -> None:
    """Without a token for every byte there are texts without tokens."""
    values = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.add_space_prefix": False}
    with pytest.raises(FormatError, match="tokens is without '<0x00>'; allowed: one for each byte"):
        read_tokenizer(open_gguf(write(tmp_path / "b.gguf", metadata=values)))


# The words of qwen2, a bar between them.

CUT = [
    "I|'ll| see| don|'T|,|  | x",
    "1|2|3|4| |5|.|6|x|7",
    "def| f|(x|):\n\n|    | return| x|;\n",
    " \n\n|a| |\tb|\r\n",
    "(naïve| („|Größe日本語|...\n|'s|!!",
]


@pytest.mark.parametrize("text", CUT)
def test_words_of_qwen2(text: str, tmp_path: Path) -> None:
    """Digits stand alone, a letter takes one sign along, line ends stay with what is before them."""
    made = read_tokenizer(open_gguf(write(tmp_path / "q.gguf", metadata={"tokenizer.ggml.pre": "qwen2"})))
    cutter = made._library.pre_tokenizer
    assert cutter is not None
    plain = text.replace("|", "")
    spans = [span for _, span in cutter.pre_tokenize_str(plain)]
    assert "|".join(plain[start:end] for start, end in spans) == text


def test_qwen2_merges_in_its_words(tmp_path: Path) -> None:
    """A space and a digit are never one token; a space and letters are, where the merges lead there."""
    made = read_tokenizer(open_gguf(write(tmp_path / "q.gguf", metadata={"tokenizer.ggml.pre": "qwen2"})))
    assert [TOKENS[token] for token in made.encode("hello hello 12")] == ["hello", "Ġhello", "Ġ", "1", "2"]
    assert made.decode(made.encode("a  b\n\n\tc 12")) == "a  b\n\n\tc 12"
