"""Tokenizers of directories in files of GGUF, against what the ``tokenizers`` library makes of the directory."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rewriting
import tiny_checkpoint
from paths import SUPPORT
from rewriting import ends, floats
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer as Library
from trained_words import GPT_OSS, LLAMA3, TEXTS, of_bytes, of_characters, published

from lowbit.formats.gguf.reader import open_gguf
from lowbit.runtime import open_model

run, answer = partial(rewriting.run, "convert"), partial(rewriting.answer, "convert")
VOCABULARY = 1000
"""More than any of the tokenizers has, as embeddings often do."""


def directory(folder: Path, tokenizer: dict[str, Any]) -> Path:
    """A dense model with a tokenizer."""
    config = tiny_checkpoint.DENSE | {"vocab_size": VOCABULARY}
    return tiny_checkpoint.write(folder, tiny_checkpoint.published(config), tokenizer=tokenizer)


def tiny(name: str, folder: Path, tokenizer: dict[str, Any], **fields: Any) -> Path:
    """A tiny model of a kind with more rows in its embedding and its head, and other fields."""
    shutil.copytree(SUPPORT.parent / "lowbit/formats/checkpoint/data" / name, folder)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    for tensor in {"model.embed_tokens.weight", "lm_head.weight"} & tensors.keys():
        shape = (VOCABULARY, tensors[tensor].shape[1])
        tensors[tensor] = np.random.default_rng(0).standard_normal(shape).astype(np.float16)
    save_file(tensors, file)
    config = json.loads((folder / "config.json").read_text()) | {"vocab_size": VOCABULARY, **fields}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def check_tokens(source: Path, file: Path) -> None:
    """Those of every text, and the text of them."""
    library, made = Library.from_file(str(source / "tokenizer.json")), open_model(file).tokenizer
    for text in TEXTS:
        tokens = made.encode(text, begin=False)
        assert tokens == library.encode(text, add_special_tokens=False).ids, text
        assert made.decode(tokens) == library.decode(tokens, skip_special_tokens=False), text
        assert "".join(made.stream(tokens)) == made.decode(tokens), text


@pytest.mark.parametrize("prefix", [True, False], ids=["llama", "gemma"])
def test_tokenizers_of_characters(prefix: bool, tmp_path: Path) -> None:
    """With a space before the text, as Llama 2 has it, and without, as Gemma has it; and back in a directory."""
    source = directory(tmp_path / "source", of_characters(prefix=prefix))
    answer(source, "-o", tmp_path / "new.gguf", "--format", "gguf")
    check_tokens(source, tmp_path / "new.gguf")
    answer(tmp_path / "new.gguf", "-o", tmp_path / "back", "--format", "floats")
    check_tokens(source, tmp_path / "back")


def test_gemma_2(tmp_path: Path) -> None:
    """The model of a directory becomes one of GGUF with the same numbers, caps among them."""
    same = {"query_pre_attn_scalar": 8}  # the channels of a head; GGUF has no place for another
    source = tiny("gemma2", tmp_path / "source", of_characters(prefix=False), **same)
    answer(source, "-o", tmp_path / "new.gguf", "--format", "gguf")
    check_tokens(source, tmp_path / "new.gguf")
    one, other = open_model(source), open_model(tmp_path / "new.gguf")
    for name, values in floats(one.weights).items():
        np.testing.assert_array_equal(floats(other.weights)[name], values, err_msg=name)
    for this, that in zip(ends(one.weights), ends(other.weights), strict=True):
        np.testing.assert_array_equal(this, that)
    assert (other.config.score_cap, other.config.logit_cap) == (one.config.score_cap, one.config.logit_cap)
    assert other.config.logit_cap is not None


@pytest.mark.parametrize("scale", [0.25, 8**-0.5], ids=["own", "usual"])
def test_granite(scale: float, tmp_path: Path) -> None:
    """Its factors, which are float32 in GGUF, go there and back; the usual factor of scores is no number there."""
    source = tiny("granite", tmp_path / "source", of_characters(prefix=False), attention_multiplier=scale)
    answer(source, "-o", tmp_path / "new.gguf", "--format", "gguf")
    answer(tmp_path / "new.gguf", "-o", tmp_path / "back", "--format", "floats")
    one, other, back = (open_model(path) for path in (source, tmp_path / "new.gguf", tmp_path / "back"))
    for name, values in floats(one.weights).items():
        np.testing.assert_array_equal(floats(other.weights)[name], values, err_msg=name)
        np.testing.assert_array_equal(floats(back.weights)[name], values, err_msg=name)
    held = {"residual_scale": np.float32(0.6), "logit_divisor": np.float32(0.7)}
    for name in ("embedding_scale", "score_scale", "residual_scale", "logit_divisor"):
        number = getattr(one.config, name)
        assert getattr(other.config, name) == getattr(back.config, name) == held.get(name, number)
    assert (one.config.score_scale is None) == (scale != 0.25)


@pytest.mark.parametrize(
    ("pattern", "ignored", "name"),
    [
        (LLAMA3, True, "llama-bpe"),
        (LLAMA3, False, "smaug-bpe"),
        (GPT_OSS, False, "gpt-4o"),
    ],
)
def test_tokenizers_of_bytes(pattern: str, ignored: bool, name: str, tmp_path: Path) -> None:
    """The name of the pre-tokenizer is found by its pattern and by what it does with merges."""
    source = directory(tmp_path / "source", of_bytes(published(pattern), ignore_merges=ignored))
    answer(source, "-o", tmp_path / "new.gguf", "--format", "gguf")
    check_tokens(source, tmp_path / "new.gguf")
    assert open_gguf(tmp_path / "new.gguf").header.metadata["tokenizer.ggml.pre"] == name


def changed(**parts: Any) -> dict[str, Any]:
    return of_characters(prefix=True) | parts


def one_merge_less() -> dict[str, Any]:
    content = of_characters(prefix=True)
    made = [left + right for left, right in content["model"]["merges"]]
    content["model"]["merges"].pop(next(at for at, token in enumerate(made) if made.count(token) > 1))
    return content


def scattered() -> dict[str, Any]:
    content = of_characters(prefix=True)
    made = [left + right for left, right in content["model"]["merges"]]
    at = next(at for at, token in enumerate(made) if made.count(token) > 1)
    content["model"]["merges"].append(content["model"]["merges"].pop(at))
    return content


def found_with_the_prefix() -> dict[str, Any]:
    content = of_characters(prefix=True)
    content["added_tokens"][1]["normalized"] = True
    return content


METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
LOST = [
    (one_merge_less, "GGUF has no name for the rules of its tokenizer"),
    (scattered, "no scores of tokens give the order of its merges"),
    (found_with_the_prefix, "GGUF has no name for the rules of its tokenizer"),
    (partial(changed, normalizer=None, pre_tokenizer=METASPACE), "GGUF has no name for the rules of its tokenizer"),
]


@pytest.mark.parametrize(("make", "message"), LOST, ids=["merge", "order", "added", "first"])
def test_rules_that_scores_do_not_say(make: Any, message: str, tmp_path: Path) -> None:
    """A merge that is missing, an order across tokens, a token found with its prefix, a prefix only at the start."""
    source = directory(tmp_path / "source", make())
    assert message in str(run(source, "-o", tmp_path / "new.gguf", "--format", "gguf").exception)
