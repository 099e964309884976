"""The tokenizer of a directory as metadata of GGUF.

It becomes a vocabulary, a list of merges and the name of a
pre-tokenizer, if the file's format has a name for its rules; `ToGGUF.check` reads them back and compares. Rows of the
embedding without a token get one that no text has, marked as unused, as llama.cpp's converter does it.

Source: the GGUF specification of the ggml project; `lowbit.formats.gguf.tokenizer`.
"""

import json
from typing import Any

import numpy as np

from lowbit.errors import ArgumentError
from lowbit.formats.gguf.header import Value
from lowbit.formats.gguf.tokenizer import NORMAL, PRE_TOKENIZERS, SPECIAL, USER_DEFINED
from lowbit.formats.tokenizer import Tokenizer, flat
from lowbit.rewriting.source import Source

UNUSED = 5
ENDS = ("eos", "eot", "eom")
"""The tokens that end a sequence, in GGUF's names; it has no more."""


def words_of(source: Source) -> dict[str, Value]:
    """The metadata under ``tokenizer.``.

    Raises:
        ArgumentError: rules that GGUF has no name for.
    """
    tokenizer = source.tokenizer
    content = json.loads(tokenizer.to_json())
    tokens, types = _tokens(content, source.config.vocabulary)
    found: dict[str, Value] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": _pre_tokenizer(source, content),
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in content["model"]["merges"]],
        "tokenizer.ggml.add_bos_token": tokenizer.bos is not None,
    }
    found |= {f"tokenizer.ggml.{name}_token_id": number for name, number in _ends(source, tokens).items()}
    if tokenizer.chat is not None:
        found["tokenizer.chat_template"] = tokenizer.chat.source
    return found


def _tokens(content: dict[str, Any], rows: int) -> tuple[list[str], list[int]]:
    """The tokens in order with their types."""
    tokens, types = [f"[PAD{number}]" for number in range(rows)], [UNUSED] * rows
    for text, number in content["model"]["vocab"].items():
        tokens[number], types[number] = text, NORMAL
    for each in content["added_tokens"]:
        tokens[each["id"]], types[each["id"]] = each["content"], SPECIAL if each["special"] else USER_DEFINED
    return tokens, types


def _pre_tokenizer(source: Source, content: dict[str, Any]) -> str:
    """The name that GGUF has for how words are cut.

    Raises:
        ArgumentError: it has none.
    """
    for name, make in PRE_TOKENIZERS.items():
        if _cuts(json.loads(make().__getstate__())) == _cuts(content["pre_tokenizer"]):
            return name
    sentence = f"{source.name} does not fit into a file of GGUF: it has no name for the pre-tokenizer of the model"
    raise ArgumentError("tokenizer", source.name, f"one of {', '.join(PRE_TOKENIZERS)}", sentence)


def _cuts(part: dict[str, Any] | None) -> list[dict[str, Any]]:
    return [{name: value for name, value in each.items() if name != "trim_offsets"} for each in flat(part)]


def _ends(source: Source, tokens: list[str]) -> dict[str, int]:
    """The tokens that begin and end a sequence.

    Raises:
        ArgumentError: more of them than GGUF has names for.
    """
    tokenizer: Tokenizer = source.tokenizer
    if len(tokenizer.stop) > len(ENDS):
        sentence = f"{source.name} does not fit into a file of GGUF: {len(tokenizer.stop)} tokens end a sequence"
        raise ArgumentError("tokens that end a sequence", len(tokenizer.stop), f"at most {len(ENDS)}", sentence)
    named = {} if tokenizer.chat is None else tokenizer.chat.tokens
    found = {} if tokenizer.bos is None else {"bos": tokenizer.bos}
    if tokenizer.bos is None and named.get("bos_token") in tokens:
        found["bos"] = tokens.index(named["bos_token"])
    stop = sorted(tokenizer.stop, key=lambda token: tokens[token] != named.get("eos_token"))
    return found | dict(zip(ENDS, stop, strict=False))
