"""The tokenizer of a checkpoint directory: its tokens, what begins and ends a sequence, and what is refused."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoint import MIXTRAL, TOKENIZER, published, write
from trained_words import LLAMA3

from lowbit.errors import ArgumentError, FormatError
from lowbit.formats.checkpoint.reader import open_checkpoint
from lowbit.formats.checkpoint.tokenizer import read_tokenizer
from lowbit.formats.tokenizer import Tokenizer


def tokenizer(tmp_path: Path, change: dict[str, Any] | None = None, **files: dict[str, Any] | None) -> Tokenizer:
    """The tokenizer of a directory with these files; a key of `change` is a path with dots."""
    content = copy.deepcopy(TOKENIZER)
    for key, value in (change or {}).items():
        *parents, last = key.split(".")
        inner = content
        for parent in parents:
            inner = inner[parent]
        inner[last] = value
    config = published(files.pop("config", None) or MIXTRAL)
    path = write(tmp_path / "m", config, tokenizer=content)
    for name, fields in files.items():
        (path / f"{name}.json").write_text(json.dumps(fields))
    return read_tokenizer(open_checkpoint(path))


def without_eos(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in MIXTRAL.items() if name != "eos_token_id"} | fields


def byte(text: str) -> int:
    return 3 + ord(text)


def test_tokens_and_back(tmp_path: Path) -> None:
    """Bytes, the merge, the template's first token, special tokens spelled out; nothing is cut or padded."""
    made = tokenizer(tmp_path)
    assert made.encode("hehe!") == [1, 259, 259, byte("!")]
    assert made.encode("hehe!", begin=False) == [259, 259, byte("!")]
    assert made.encode("</s>", begin=False) == [2]
    for text in ("", " a  b\n\n\tc\r\n", "naïve 日本語 🙂 Ω", "\x00\x1a", "a text that is longer than three tokens"):
        tokens = made.encode(text, begin=False)
        assert made.decode(tokens) == "".join(made.stream(tokens)) == text


def test_llamas_chain(tmp_path: Path) -> None:
    """Spaces as ``▁``, one before the text, bytes where a character is no token: the chain of Llama 2 and Mixtral."""
    decoders = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]
    normalizers = [{"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{b:02X}>": 3 + b for b in range(256)} | {"▁": 259}
    change: dict[str, Any] = {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model.vocab": vocabulary,
        "model.merges": [],
        "model.byte_fallback": True,
    }
    made = tokenizer(tmp_path, change)
    assert made.encode("a b") == [1, 259, byte("a"), 259, byte("b")]
    assert made.decode(made.encode("a 🙂", begin=False)) == "a 🙂"


def test_llama_3s_words(tmp_path: Path) -> None:
    """A known pattern cuts words, and merges do not cross them."""
    split = {"type": "Split", "pattern": {"Regex": LLAMA3}, "behavior": "Isolated", "invert": False}
    bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    made = tokenizer(tmp_path, {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, bytes_]}})
    assert made.encode("he 1234", begin=False) == [259, 3 + 32, *map(byte, "1234")]


def test_what_begins_a_sequence(tmp_path: Path) -> None:
    """The template says it, ``add_bos_token`` overrules it, and a name may be an object."""
    plain = {"post_processor": None}
    cases: list[tuple[dict[str, Any], dict[str, Any] | None, int | None]] = [
        ({}, None, 1),
        ({}, {}, 1),
        ({}, {"add_bos_token": False}, None),
        (plain, None, None),
        (plain, {"bos_token": "<s>"}, None),
        (plain, {"bos_token": "<s>", "add_bos_token": True}, 1),
        (plain, {"bos_token": {"content": "</s>"}, "add_bos_token": True}, 2),
    ]
    for number, (change, settings, expected) in enumerate(cases):
        files = {} if settings is None else {"tokenizer_config": settings}
        assert tokenizer(tmp_path / str(number), change, **files).bos == expected, number


def test_what_ends_a_sequence(tmp_path: Path) -> None:
    """The first file that says anything, in its order; none of them may."""
    cases: list[tuple[dict[str, dict[str, Any]], tuple[int, ...]]] = [
        ({}, (2,)),
        ({"generation_config": {"eos_token_id": [7, 2, 7]}}, (7, 2)),
        ({"generation_config": {"eos_token_id": None}}, (2,)),
        ({"config": without_eos()}, ()),
        ({"config": without_eos(), "tokenizer_config": {"eos_token": "<s>"}}, (1,)),
        ({"config": without_eos(eos_token_id=5), "tokenizer_config": {"eos_token": "<s>"}}, (5,)),
    ]
    for number, (files, expected) in enumerate(cases):
        assert tokenizer(tmp_path / str(number), **files).stop == expected, number


ENDLESS = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
DOUBLES = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"normalizer": DOUBLES}, "content is 'aa'; allowed: not longer than what it replaces"),
    ({"normalizer": {"type": "Sequence", "normalizers": [DOUBLES] * 3}}, "content is 'aa'"),
    ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}] * 17}}, "a sequence of at most 16"),
    ({"normalizer": {"type": "Sequence", "normalizers": ["NFC"]}}, "a sequence of at most 16"),
    ({"normalizer": {"type": "Prepend", "prepend": "x" * 9}}, "prepend is 9; allowed: at most one character"),
    ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AA"}}, "type is 'Precompiled'"),
    ({"normalizer": {"type": "Replace", "pattern": {"Regex": "a*"}, "content": ""}}, "a plain text"),
    ({"normalizer": ["NFC"]}, "normalizer is "),
    ({"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "((a*)*)*b"}}}, "a known pattern"),
    ({"pre_tokenizer": {"type": "Sequence", "decoy": [], "pretokenizers": [ENDLESS]}}, "a known pattern"),
    ({"pre_tokenizer": {"type": "Sequence", "pre_tokenizers": [ENDLESS]}}, "pretokenizers is missing"),
    ({"pre_tokenizer": ENDLESS | {"pattern": {"String": "a", "Regex": "(a+)+$"}}}, "a known pattern"),
    ({"decoder": {"type": "Sequence", "decoy": [], "decoders": [DOUBLES]}}, "content is 'aa'"),
    ({"pre_tokenizer": {"type": "UnicodeScripts"}}, "type is 'UnicodeScripts'"),
    ({"pre_tokenizer": {}}, "type is missing"),
    ({"decoder": {"type": "Strip", "content": " ", "start": 10**9, "stop": 0}}, "start is 1000000000"),
    ({"decoder": {"type": "CTC"}}, "type is 'CTC'"),
    ({"post_processor": {"type": "BertProcessing"}}, "type is 'BertProcessing'"),
    ({"post_processor.single": []}, "single is "),
    ({"post_processor.single": TOKENIZER["post_processor"]["single"][::-1]}, "single is "),
    ({"post_processor.single": [{"SpecialToken": {"id": "<q>"}}, {"Sequence": {}}]}, "'<q>'; allowed: a token of"),
    ({"model.type": "Unigram"}, "type is 'Unigram'; allowed: 'BPE'"),
    ({"model.dropout": 0.1}, "dropout is 0.1"),
    (
        {"model.vocab": {"a": 260}, "model.merges": []},
        "vocabulary is .* allowed: distinct numbers below the model's 260",
    ),
    ({"model.vocab": {"a": 0, "b": 0}, "model.merges": []}, "vocabulary is "),
    ({"model.vocab": {"a": 2**40}}, "content is "),
    ({"model.merges": ["x y"]}, "content is "),
    ({"model.merges": [["h"]]}, "content is "),
    ({"added_tokens": [{"id": -1}]}, "content is "),
    ({"version": "9"}, "content is "),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[str(number) for number in range(len(REFUSED))])
def test_chains_that_are_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    """What would multiply a text, search without end, drop merges at random or not fit together is named in a line."""
    with pytest.raises(FormatError, match=message) as caught:
        tokenizer(tmp_path, change)
    assert str(caught.value).startswith("tokenizer.json: ") and str(caught.value).isprintable()


def test_an_added_token_beyond_the_vocabulary(tmp_path: Path) -> None:
    """The model has no row for it, so its text is text like any other."""
    beyond = {"id": 260, "content": "<image>", "special": True, "normalized": False}
    beyond |= {"single_word": False, "lstrip": False, "rstrip": False}
    made = tokenizer(tmp_path / "one", {"added_tokens": [*TOKENIZER["added_tokens"], beyond]})
    ids = made.encode("<image>")
    assert ids == tokenizer(tmp_path / "other", {}).encode("<image>")
    assert made.decode(ids).endswith("<image>") and max(ids) < 260


def test_a_panic_of_the_library_is_an_error_of_the_file(tmp_path: Path) -> None:
    """A decoder that cuts a character off each end of a token of one character stops the library with a panic."""
    cutting = {"type": "Strip", "content": "a", "start": 1, "stop": 1}
    made = tokenizer(tmp_path, {"decoder": cutting})
    with pytest.raises(FormatError, match=r"the tokenizer: a token is refused: '.*'; allowed: what its rules"):
        made.decode([byte("a")])
    with pytest.raises(FormatError, match="a token is refused"):
        list(made.stream([byte("a")]))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer_config": {"add_eos_token": True}}, "tokenizer_config.json: add_eos_token is True"),
        ({"tokenizer_config": {"add_bos_token": "yes"}}, "add_bos_token is 'yes'; allowed: a boolean"),
        ({"generation_config": {"eos_token_id": 260}}, "generation_config.json: eos_token_id is 260; allowed: tokens"),
        ({"generation_config": {"eos_token_id": ["a"]}}, r"eos_token_id is \['a'\]"),
        ({"generation_config": {"eos_token_id": True}}, "eos_token_id is True"),
        ({"config": without_eos(), "tokenizer_config": {"eos_token": "<q>"}}, "eos_token is '<q>'"),
        ({"config": without_eos(), "tokenizer_config": {"eos_token": "\ud800"}}, r"eos_token is '\\ud800'"),
    ],
)
def test_ends_that_are_refused(files: dict[str, Any], message: str, tmp_path: Path) -> None:
    """A token outside the vocabulary, and an end that every text would get."""
    with pytest.raises(FormatError, match=message):
        tokenizer(tmp_path, **files)


def test_no_tokenizer(tmp_path: Path) -> None:
    """The file that is missing is named."""
    path = write(tmp_path / "m")
    (path / "tokenizer.json").unlink()
    with pytest.raises(ArgumentError, match=r"a directory that holds tokenizer\.json"):
        read_tokenizer(open_checkpoint(path))
    (path / "tokenizer.json").write_bytes(b"[" * 10**5)
    with pytest.raises(FormatError, match="content"):
        read_tokenizer(open_checkpoint(path))
