"""The tokenizer out of a GGUF file, against merges done by hand."""

from pathlib import Path
from typing import Any

import pytest
from tiny_gguf import ALPHABET, MERGED, MERGES, TOKENS, write

from lowbit.errors import ArgumentError, FormatError
from lowbit.formats.gguf.reader import open_gguf
from lowbit.formats.gguf.tokenizer import KINDS, read_tokenizer
from lowbit.formats.tokenizer import Tokenizer


def tokenizer(tmp_path: Path, **changes: Any) -> Tokenizer:
    return read_tokenizer(open_gguf(write(tmp_path / "t.gguf", **changes)))


def pieces(tokens: list[int]) -> list[str]:
    return [TOKENS[token] for token in tokens]


def test_merges_in_order(tmp_path: Path) -> None:
    """A word with its space becomes one token where the merges lead there, and single bytes where they do not."""
    made = tokenizer(tmp_path)
    assert pieces(made.encode("hello hello")) == ["hello", "Ġhello"]
    assert pieces(made.encode("hall")) == ["h", "a", "ll"]


def test_digits_stand_alone_for_smollm_and_not_for_gpt2(tmp_path: Path) -> None:
    """The pre-tokenizer's name decides; a merge of digits, or of a space and a digit, is out of reach for smollm, and
    for refact, which files of Granite name."""
    for name in ("smollm", "refact"):
        alone = tokenizer(tmp_path, metadata={"tokenizer.ggml.pre": name})
        assert pieces(alone.encode(" 12")) == ["Ġ", "1", "2"]
    gpt2 = tokenizer(tmp_path, metadata={"tokenizer.ggml.pre": "gpt-2"})
    assert pieces(gpt2.encode("12")) == ["12"]
    assert pieces(gpt2.encode(" 1")) == ["Ġ1"]


def test_every_text_comes_back(tmp_path: Path) -> None:
    """Decoding undoes encoding: bytes, lines, several scripts, special tokens spelled out."""
    made = tokenizer(tmp_path)
    for text in ("", " a  b\n\n\tc\r\n", "naïve 日本語 🙂 Ω", "<|begin|>hello<|end|>", "\x00\x1a", "' s 't 1234.5"):
        assert made.decode(made.encode(text)) == text
    assert made.encode("<|end|>") == [0]


def test_text_as_it_comes(tmp_path: Path) -> None:
    """A character of several tokens appears with the last of them, and what never becomes one at the very end."""
    made = tokenizer(tmp_path)
    tokens = made.encode("a🙂b")
    assert [piece for piece in made.stream(tokens) if piece] == ["a", "🙂", "b"]
    broken = [*tokens[:3]]
    assert "".join(made.stream(broken)) == made.decode(broken) == "a\ufffd"


def test_bos_and_stop(tmp_path: Path) -> None:
    """BOS is put first where the file asks for it and only there; the end tokens are those the file names."""
    plain = tokenizer(tmp_path)
    assert (plain.bos, plain.stop, plain.encode("a")[0]) == (None, (0,), TOKENS.index("a"))
    begins = tokenizer(tmp_path, metadata={"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.eot_token_id": 5})
    assert (begins.bos, begins.stop) == (1, (0, 5))
    assert begins.encode("a") == [1, TOKENS.index("a")]
    assert begins.encode("a", begin=False) == [TOKENS.index("a")]


@pytest.mark.parametrize(
    ("name", "bos"), [("gpt-2", None), ("smollm", None), ("refact", None), ("qwen2", None), ("llama-bpe", 1)]
)
def test_what_begins_a_sequence_where_the_file_does_not_say(name: str, bos: int | None, tmp_path: Path) -> None:
    """The name of the pre-tokenizer says it, as in llama.cpp, and the key overrules it."""
    for given, expected in ((None, bos), (True, 1), (False, None)):
        metadata = {"tokenizer.ggml.pre": name, "tokenizer.ggml.add_bos_token": given}
        assert tokenizer(tmp_path, metadata=metadata).bos == expected
    assert tokenizer(tmp_path, metadata={"tokenizer.ggml.pre": name, "tokenizer.ggml.bos_token_id": None}).bos is None


ENDS: list[tuple[list[str], set[str]]] = [
    (["<|eot_id|>", "<|eom_id|>"], {"<|eot_id|>", "<|eom_id|>"}),
    (["<|im_start|>", "<|im_end|>"], {"<|im_end|>"}),
    (["<end_of_turn>", "</s>"], {"<end_of_turn>", "</s>"}),
    (["<|return|>", "<|call|>", "<|end|>"], {"<|return|>", "<|call|>"}),
    (["<|flush|>", "<|calls|>", "<|end|>"], {"<|flush|>", "<|calls|>"}),
    (["<|return|>", "<|flush|>", "<|end|>"], {"<|return|>", "<|flush|>", "<|end|>"}),
    (["<|tool_response>", "</s>"], {"<|tool_response>"}),
    (["<fim-pad>", "<|fim_pad|>", "<REPO>", "<|file_sep|>"], {"<|fim_pad|>", "<REPO>", "<|file_sep|>"}),
]


@pytest.mark.parametrize(("texts", "ends"), ENDS)
def test_ends_that_are_known_by_their_text(texts: list[str], ends: set[str], tmp_path: Path) -> None:
    """Beside the end that the file numbers, with llama.cpp's exceptions; they are special whatever their type is."""
    tokens = [*ALPHABET, *MERGED, "<|last|>", *texts]
    made = tokenizer(tmp_path, tokens=tokens, metadata={"tokenizer.ggml.eos_token_id": tokens.index("<|last|>")})
    assert {tokens[token] for token in made.stop} == ends | {"<|last|>"}
    numbered = tokenizer(tmp_path, tokens=tokens, metadata={"tokenizer.ggml.eos_token_id": made.stop[-1]})
    assert numbered.stop[0] == made.stop[-1]  # the one that other programs are told, if they take one only
    for text in ends:
        assert made.encode(f"a{text}") == [tokens.index("a"), tokens.index(text)]
        assert made.decode(made.encode(f"a{text}b"), special=False) == "ab"


def test_an_end_that_is_numbered_is_not_looked_for(tmp_path: Path) -> None:
    """A file that numbers its padding of gaps means that token, and not the one with such a text."""
    tokens = [*TOKENS, "<|fim_pad|>"]
    assert tokenizer(tmp_path, tokens=tokens).stop == (0, len(TOKENS))
    assert tokenizer(tmp_path, tokens=tokens, metadata={"tokenizer.ggml.fim_pad_token_id": 7}).stop == (0, 7)


def test_undecodable_bytes_of_a_command_line_are_refused(tmp_path: Path) -> None:
    """A lone surrogate is how Python carries a byte that is no UTF-8."""
    with pytest.raises(ArgumentError, match="text is undecodable at character 1"):
        tokenizer(tmp_path).encode("a\udcff")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"metadata": {"tokenizer.ggml.model": "t5"}}, r"tokenizer\.ggml\.model is 't5'; allowed: 'gpt2' or 'llama'"),
    ({"metadata": {"tokenizer.ggml.pre": "phi-2"}}, r"pre is 'phi-2'; allowed: 'gpt-2', .*'dbrx' or 'gpt-4o'"),
    ({"metadata": {"tokenizer.ggml.pre": None}}, r"tokenizer\.ggml\.pre is missing"),
    (
        {"metadata": {"tokenizer.ggml.tokens": [1, 2]}},
        r"tokenizer\.ggml\.tokens is an ndarray; allowed: an array of str",
    ),
    ({"metadata": {"tokenizer.ggml.token_type": [1, 2]}}, r"tokenizer\.ggml\.token_type"),
    ({"metadata": {"tokenizer.ggml.eos_token_id": len(TOKENS)}}, r"eos_token_id is \d+; allowed: 0 to \d+"),
    ({"metadata": {"tokenizer.ggml.add_eos_token": True}}, r"add_eos_token is True"),
    ({"metadata": {"tokenizer.ggml.add_space_prefix": True}}, r"add_space_prefix is True; allowed: False"),
    ({"tokens": [*ALPHABET, ALPHABET[5]]}, "some of them equal"),
    ({"merges": [*MERGES, "no such"]}, r"merges\[7\] is 'no such'; allowed: two tokens that make a third"),
    ({"merges": ["he"]}, r"merges\[0\] is 'he'"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_what_is_not_supported_is_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    """An unknown kind of tokenizer is an error and not a guess; a vocabulary that does not fit together is named."""
    with pytest.raises(FormatError, match=message):
        tokenizer(tmp_path, **changes)


def test_a_panic_of_the_library_is_an_error_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's panics are no `Exception`; a file that causes one is refused in one line."""
    panic = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})

    def fail(*given: object) -> None:
        raise panic("index out of bounds")

    monkeypatch.setitem(KINDS, "gpt2", fail)
    with pytest.raises(FormatError, match="tokenizer is refused: 'index out of bounds'; allowed: a vocabulary that"):
        tokenizer(tmp_path)
