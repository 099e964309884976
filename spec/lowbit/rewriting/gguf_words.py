"""The tokenizer of a directory as metadata of GGUF.

It becomes a vocabulary and, where it starts from bytes, a list of merges and the name of a pre-tokenizer, if the file's
format has a name for its rules. Where it starts from characters, the order of the merges becomes a score for each
token. `ToGGUF.check` reads them back and compares. Rows of the embedding without a token get one that occurs in no
text, marked as unused, as in llama.cpp's converter.

Source: the GGUF specification of the ggml project; `lowbit.formats.gguf.tokenizer`.
"""

import json
import re
from itertools import pairwise
from typing import Any

import numpy as np

from lowbit.arrays import F32
from lowbit.errors import ArgumentError
from lowbit.formats.gguf.header import Value
from lowbit.formats.gguf.tokenizer import (
    BYTE,
    NORMAL,
    NUMBERED_ENDS,
    PRE_TOKENIZERS,
    PREFIX,
    SPECIAL,
    UNUSED,
    USER_DEFINED,
    ends_by_text,
)
from lowbit.formats.tokenizer import Tokenizer, flat
from lowbit.rewriting.source import Source

BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")


def words_of(source: Source) -> dict[str, Value]:
    """The metadata under ``tokenizer.``.

    Raises:
        ArgumentError: rules for which GGUF has no name.
    """
    tokenizer = source.tokenizer
    content = json.loads(tokenizer.to_json())
    tokens, types = _tokens(content, source.config.vocabulary)
    found: dict[str, Value] = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.add_bos_token": tokenizer.bos is not None,
    }
    found |= (
        _of_characters(source, content, tokens) if content["model"]["byte_fallback"] else _of_bytes(source, content)
    )
    found |= {f"tokenizer.ggml.{name}_token_id": number for name, number in _ends(source, tokens).items()}
    if tokenizer.chat is not None:
        found["tokenizer.chat_template"] = tokenizer.chat.source
    return found


def _of_bytes(source: Source, content: dict[str, Any]) -> dict[str, Value]:
    """The kind ``gpt2``: a list of merges in the words of a pre-tokenizer."""
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": _pre_tokenizer(source, content),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in content["model"]["merges"]],
    }


def _of_characters(source: Source, content: dict[str, Any], tokens: list[str]) -> dict[str, Value]:
    """The kind ``llama``: a score for each token."""
    found: dict[str, Value] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.scores": _scores(source, content["model"]["merges"], tokens),
        PREFIX: any(part["type"] == "Prepend" for part in flat(content["normalizer"])),
    }
    if content["model"]["unk_token"] in tokens:
        found["tokenizer.ggml.unknown_token_id"] = tokens.index(content["model"]["unk_token"])
    return found


def _scores(source: Source, merges: list[list[str]], tokens: list[str]) -> F32:
    """Scores that reproduce the order of the merges: the first merged token has 0, the next one −1.

    Tokens that no merge makes have lower scores.

    Raises:
        ArgumentError: the merges of one token are not consecutive, so no scores reproduce their order.
    """
    made = [left + right for left, right in merges]
    order = list(dict.fromkeys(made))
    if sum(one != other for one, other in pairwise(made)) + 1 > max(1, len(order)):
        sentence = f"{source.name} does not fit into a file of GGUF: no scores of tokens give the order of its merges"
        raise ArgumentError("tokenizer", source.name, "merges that are grouped by the token that they make", sentence)
    ranks = {token: rank for rank, token in enumerate(order)}
    return np.array([-ranks.get(token, len(order) + number) for number, token in enumerate(tokens)], np.float32)


def _tokens(content: dict[str, Any], rows: int) -> tuple[list[str], list[int]]:
    """The tokens in order with their types."""
    tokens, types = [f"[PAD{number}]" for number in range(rows)], [UNUSED] * rows
    for text, number in content["model"]["vocab"].items():
        is_byte = content["model"]["byte_fallback"] and BYTE_TOKEN.fullmatch(text)
        tokens[number], types[number] = text, BYTE if is_byte else NORMAL
    for each in content["added_tokens"]:
        tokens[each["id"]], types[each["id"]] = each["content"], SPECIAL if each["special"] else USER_DEFINED
    return tokens, types


def _pre_tokenizer(source: Source, content: dict[str, Any]) -> str:
    """GGUF's name for the way words are cut.

    Raises:
        ArgumentError: it has none.
    """
    ignored, cuts = bool(content["model"]["ignore_merges"]), _cuts(content["pre_tokenizer"])
    known = {name: _cuts(json.loads(words.make().__getstate__())) for name, words in PRE_TOKENIZERS.items()}
    fitting = [name for name, own in known.items() if own == cuts]
    if fitting:  # llama-bpe or smaug-bpe, whichever treats merges in the same way
        return min(fitting, key=lambda name: PRE_TOKENIZERS[name].ignore_merges != ignored)
    sentence = f"{source.name} does not fit into a file of GGUF: it has no name for the pre-tokenizer of the model"
    raise ArgumentError("tokenizer", source.name, f"one of {', '.join(PRE_TOKENIZERS)}", sentence)


def _cuts(part: dict[str, Any] | None) -> list[dict[str, Any]]:
    return [{name: value for name, value in each.items() if name != "trim_offsets"} for each in flat(part)]


def _ends(source: Source, tokens: list[str]) -> dict[str, int]:
    """The tokens that begin and end a sequence, except those that end it by their text.

    Raises:
        ArgumentError: more tokens than GGUF has names for.
    """
    tokenizer: Tokenizer = source.tokenizer
    named = {} if tokenizer.chat is None else tokenizer.chat.tokens
    found = {} if tokenizer.bos is None else {"bos": tokenizer.bos}
    if tokenizer.bos is None and named.get("bos_token") in tokens:
        found["bos"] = tokens.index(named["bos_token"])
    stop = sorted(tokenizer.stop, key=lambda token: tokens[token] != named.get("eos_token"))
    known = ends_by_text({text: number for number, text in enumerate(tokens)})
    told = stop[:1] + [token for token in stop[1:] if token not in known]
    if len(told) > len(NUMBERED_ENDS):
        sentence = f"{source.name} does not fit into a file of GGUF: {len(told)} tokens end a sequence by their number"
        raise ArgumentError("tokens that end a sequence", len(told), f"at most {len(NUMBERED_ENDS)}", sentence)
    return found | dict(zip(NUMBERED_ENDS, told, strict=False))
