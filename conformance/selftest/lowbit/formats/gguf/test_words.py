"""Pre-tokenizers of GGUF against the ``tokenizers`` library with the published rules, and against cuts by hand."""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_gguf import write
from tokenizers import Tokenizer as Library
from trained_words import GPT_OSS, LLAMA3, TEXTS, of_bytes, published

from lowbit.formats.gguf.reader import open_gguf
from lowbit.formats.gguf.tokenizer import read_tokenizer
from lowbit.formats.tokenizer import Tokenizer

NAMES = {"llama-bpe": LLAMA3, "smaug-bpe": LLAMA3, "dbrx": LLAMA3, "gpt-4o": GPT_OSS}


def read(path: Path, name: str, content: dict[str, Any]) -> Tokenizer:
    """The tokenizer of a file with the vocabulary of a ``tokenizer.json``."""
    model = content["model"]
    metadata = {"tokenizer.ggml.pre": name, "tokenizer.ggml.token_type": [3, 3] + [1] * (len(model["vocab"]) - 2)}
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    merges = [" ".join(parts) for parts in model["merges"]]
    return read_tokenizer(open_gguf(write(path, tokens=tokens, merges=merges, metadata=metadata)))


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_those_of_the_published_rules(name: str, tmp_path: Path) -> None:
    """Of every text of the list, and every text comes back."""
    content = of_bytes(published(NAMES[name]), ignore_merges=name == "llama-bpe")
    library, made = Library.from_str(json.dumps(content)), read(tmp_path / "t.gguf", name, content)
    longest = 0
    for text in TEXTS:
        tokens = made.encode(text, begin=False)
        assert tokens == library.encode(text, add_special_tokens=False).ids, text
        assert made.decode(tokens) == text
        longest = max([longest, *(len(made.text_of(token)) for token in tokens)])
    assert longest > 4


@pytest.mark.parametrize("name", NAMES)
def test_what_begins_a_sequence(name: str, tmp_path: Path) -> None:
    """Of these names llama-bpe begins with its own token where the file does not say, as in llama.cpp."""
    content = of_bytes(published(NAMES[name]), size=300)
    assert read(tmp_path / "t.gguf", name, content).bos == (1 if name == "llama-bpe" else None)


CUT = [
    ("dbrx", "HelloWorld| it|'s| x|'LL|123|4|  | a|\n|/b"),
    ("dbrx", "!ab|\t|\tc|...\n\n|x| |1"),
    ("gpt-4o", "Hello|World| it's| x'LL|123|4|  | a|\n|/b"),
    ("gpt-4o", "HTTPServer| parse|JSONNow| ÉTÉs| 日本語a|//\n|b"),
]


@pytest.mark.parametrize(("name", "text"), CUT)
def test_words(name: str, text: str, tmp_path: Path) -> None:
    """A bar stands between two words."""
    made = read(tmp_path / "t.gguf", name, of_bytes(published(NAMES[name]), size=300))
    cutter = made._library.pre_tokenizer
    assert cutter is not None
    plain = text.replace("|", "")
    assert "|".join(plain[start:end] for _, (start, end) in cutter.pre_tokenize_str(plain)) == text


def test_a_word_that_is_a_token_needs_no_merges_in_llama_bpe(tmp_path: Path) -> None:
    """Its merges never lead to it; the other names go by the merges."""
    content = of_bytes(published(LLAMA3), size=300)
    content["model"]["vocab"]["zqz"] = len(content["model"]["vocab"])
    number = content["model"]["vocab"]["zqz"]
    assert read(tmp_path / "one.gguf", "llama-bpe", content).encode("zqz", begin=False) == [number]
    assert number not in read(tmp_path / "two.gguf", "smaug-bpe", content).encode("zqz")
