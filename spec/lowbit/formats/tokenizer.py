"""Text to tokens and back, whatever kind of file the vocabulary came from.

The work is done by the ``tokenizers`` library; a reader adds which token begins a sequence, if any, and which ones end
it. Special tokens, such as those that mark the turns of a chat, are recognised where a text spells them out.
"""

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import tokenizers
from tokenizers.pre_tokenizers import ByteLevel

from lowbit.errors import ArgumentError, FormatError
from lowbit.formats.chat import ChatTemplate
from lowbit.text import quoted

MODEL_RULES = ("type", "byte_fallback", "ignore_merges", "continuing_subword_prefix", "end_of_word_suffix")
"""Flags of byte-pair encoding that change tokens."""
UNKNOWN_RULES = ("unk_token", "fuse_unk")
"""Flags for characters that are not tokens; there are none if every byte is a token."""
SPACE = {"String": " "}
"""The pattern of a space."""
REPLACEMENT = "\ufffd"
"""The character in place of bytes that are not UTF-8."""


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """Text to tokens and back.

    Attributes:
        bos: the token before every sequence, or None if the file specifies none.
        stop: the tokens that end a sequence, the file's main one first.
        chat: the template of conversations, if the file has one.
    """

    bos: int | None
    stop: tuple[int, ...]
    _library: tokenizers.Tokenizer
    chat: ChatTemplate | None = None

    def encode(self, text: str, *, begin: bool = True) -> list[int]:
        """The tokens of a text; special tokens spelled out in it are recognised.

        Args:
            text: any text.
            begin: put `bos` first, if there is one.

        Raises:
            ArgumentError: text that is not valid Unicode, such as undecodable bytes of a command line.
            FormatError: the library cannot make tokens of it with this file's rules.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ArgumentError("text", f"undecodable at character {error.start}", "text in UTF-8") from error
        with _rules("the text"):
            tokens = self._library.encode(text, add_special_tokens=False).ids
        return [self.bos, *tokens] if begin and self.bos is not None else tokens

    def decode(self, tokens: Iterable[int], *, special: bool = True, after: Sequence[int] = ()) -> str:
        """The text of tokens; bytes that are not UTF-8 become the replacement character.

        Args:
            tokens: any.
            special: whether special tokens, such as the one that ends a sequence, are part of the text.
            after: the preceding tokens, if the text continues. Many vocabularies add a space before a text and remove
                it in decoding; a continued text keeps its first space.

        Raises:
            FormatError: the library cannot make text of them with this file's rules.
        """
        growing = _Growing(self._library, special)
        return growing.text(list(tokens), growing.before(after))

    def stream(self, tokens: Iterable[int], *, special: bool = True, after: Sequence[int] = ()) -> Iterator[str]:
        """The text of tokens as they arrive; the concatenated pieces equal the result of `decode`.

        A piece appears as soon as no further token can change it. A character spread over several tokens appears with
        the last of them. Tokens of single bytes appear when something else follows, because one wrong byte turns all of
        them into replacement characters.

        Args:
            tokens: as in `decode`.
            special: likewise.
            after: likewise.

        Raises:
            FormatError: as `decode`.
        """
        growing = _Growing(self._library, special)
        said, held, written = growing.before(after), list[int](), 0
        for token in tokens:
            held.append(token)
            piece = ""
            if not growing.is_open_after(token):
                text = growing.text(held, said)
                end = len(text.removesuffix(REPLACEMENT))  # which may be the beginning of a character
                piece, written = text[written:end], end
                if end == len(text):
                    said, held, written = held if growing.text(held) else [*said, *held], [], 0
            yield piece
        yield growing.text(held, said)[written:]

    def to_json(self) -> str:
        """The vocabulary and the rules as the content of a ``tokenizer.json``, without the part that begins a
        sequence."""
        return self._library.to_str()

    def text_of(self, token: int) -> str:
        """The spelling of a token in the vocabulary.

        Raises:
            ArgumentError: there is no such token.
        """
        text = self._library.id_to_token(token)
        if text is None:
            raise ArgumentError("token", token, "one of the vocabulary")
        return text

    def can_replace(self, other: "Tokenizer") -> bool:
        """Whether its rules give every text the same tokens and every token the same text.

        Parts of the rules that affect neither are not compared: offsets in a text, and flags that a decoder of bytes
        ignores. It may have additional names of tokens. More tokens may end a sequence, because readers of GGUF know
        some by their text; whether these are special is not compared.
        """
        ours, theirs = (None if each.chat is None else each.chat.source for each in (self, other))
        mine, given = (_rules_of(json.loads(each.to_json()), self.stop) for each in (self, other))
        added = {name: number for name, number in mine["vocab"].items() if name not in given["vocab"]}
        is_more = set(added.values()).isdisjoint(given["vocab"].values())
        mine["vocab"] = {name: number for name, number in mine["vocab"].items() if name not in added}
        return (self.bos, ours, mine) == (other.bos, theirs, given) and is_more and {*self.stop} >= {*other.stop}


def _rules_of(content: dict[str, Any], ends: Collection[int]) -> dict[str, Any]:
    """The part of a ``tokenizer.json`` that determines the tokens of a text; tokens that end a sequence count as
    special."""
    model, words = content["model"], ["lstrip", "rstrip", "single_word", "special"]
    normalizer = flat(content["normalizer"])
    if any(part["type"] == "Prepend" for part in normalizer):
        words.append("normalized")  # such a token is found with the prefix only
    whole = [each | {"special": each["special"] or each["id"] in ends} for each in content["added_tokens"]]
    added = {each["content"]: (each["id"], *(each[name] for name in words)) for each in whole}
    cuts, decoder = flat(content["pre_tokenizer"]), flat(content["decoder"])
    if normalizer and _replaces_spaces(normalizer[-1]):
        cuts = [part for part in cuts if part.get("pattern") != SPACE]  # which finds none
    for part in cuts:
        part.pop("trim_offsets", None)
    has_bytes = any(part["type"] == "ByteLevel" for part in cuts)
    is_complete = has_bytes and model["vocab"].keys() >= set(ByteLevel.alphabet())
    is_complete |= model["byte_fallback"] and model["vocab"].keys() >= {f"<0x{byte:02X}>" for byte in range(256)}
    flags = MODEL_RULES if is_complete else MODEL_RULES + UNKNOWN_RULES
    return {
        "vocab": model["vocab"] | {name: row[0] for name, row in added.items()},
        "merges": model["merges"],
        "model": {name: model.get(name) or None for name in flags},
        "added": added,
        "normalizer": normalizer,
        "cuts": cuts,
        "decoder": [{"type": "ByteLevel"} if each["type"] == "ByteLevel" else each for each in decoder],
    }


def _replaces_spaces(part: dict[str, Any]) -> bool:
    return part["type"] == "Replace" and part["pattern"] == SPACE and " " not in part["content"]


def flat(part: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The parts of a stage of a ``tokenizer.json``, one after another."""
    if part is None:
        return []
    if part["type"] != "Sequence":
        return [part]
    (inner,) = (each for each in part.values() if isinstance(each, list))
    return [each for one in inner for each in flat(one)]


class _Growing:
    """The text of a growing sequence of tokens.

    Args:
        library: the tokenizer that decodes them.
        special: whether special tokens are part of the text.
    """

    def __init__(self, library: tokenizers.Tokenizer, special: bool) -> None:
        decoder = library.decoder
        parts = [] if decoder is None else flat(json.loads(decoder.__getstate__()))
        self._library, self._special = library, special
        self._has_bytes = any(part["type"] == "ByteFallback" for part in parts)
        self._is_steady = all(_is_steady(part) for part in parts)

    def text(self, tokens: Sequence[int], before: Sequence[int] = ()) -> str:
        """The text of tokens that follow others.

        Raises:
            FormatError: the library cannot make text of them.
        """
        with _rules("a token"):
            whole = self._library.decode([*before, *tokens], skip_special_tokens=not self._special)
        return whole[len(self.text(before)) :] if before else whole

    def is_open_after(self, token: int) -> bool:
        """Whether further tokens may change more of a text that ends with this one than its last character.

        Raises:
            FormatError: this cannot be a token.
        """
        return not self._is_steady or token in self._skipped or self._is_byte(token)

    def before(self, tokens: Sequence[int]) -> list[int]:
        """The last of these tokens: enough to have a text, without those that later ones may change.

        Raises:
            FormatError: the library cannot make text of them.
        """
        found: list[int] = []
        for token in reversed(tokens):
            if self._is_byte(token) or self.text([token]).endswith(REPLACEMENT):
                continue
            found = [token, *found]
            if self.text(found):
                return found
        return list(tokens) if tokens and not self.text(tokens).endswith(REPLACEMENT) else []

    @cached_property
    def _skipped(self) -> set[int]:
        """The tokens that do not appear in the text."""
        added = {} if self._special else self._library.get_added_tokens_decoder()
        return {number for number, token in added.items() if token.special}

    def _is_byte(self, token: int) -> bool:
        """Whether a token is a single byte, whose text depends on the bytes around it; one without a text counts."""
        with _rules("a token"):
            text = self._library.id_to_token(token)
        return text is None or (self._has_bytes and len(text) == 6 and text.startswith("<0x") and text.endswith(">"))


def _is_steady(part: dict[str, Any]) -> bool:
    """Whether a part of a decoder never changes earlier text when more follows, except bytes that begin a character."""
    if part["type"] == "Replace":
        return len(part["pattern"].get("String", "")) == 1
    return not (part["type"] == "Strip" and part["stop"])


def until(pieces: Iterable[str], stops: Sequence[str]) -> Iterator[str]:
    """A text in pieces, up to but excluding the first of some strings; nothing is read after it.

    >>> list(until(["Hello", " wor", "ld. Us", "er: a", "nd"], ["User:"]))
    ['Hello', ' wor', 'ld. ', '']

    Args:
        pieces: of the text.
        stops: strings that end it; none of them empty.
    """
    held = ""
    for piece in pieces:
        held += piece
        if found := [at for stop in stops if (at := held.find(stop)) >= 0]:
            yield held[: min(found)]
            return
        begun = max((_begun(held, stop) for stop in stops), default=0)
        yield held[: len(held) - begun]
        held = held[len(held) - begun :]
    yield held


def _begun(text: str, stop: str) -> int:
    """How many characters at the end of a text may begin a string that ends it."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)


@contextmanager
def failures_told(file: str, field: str, allowed: str) -> Iterator[None]:
    """Turn anything that the library raises into an error of the file; its panics are not an `Exception`.

    Raises:
        FormatError: the library panicked, or raised an error of its own.
    """
    try:
        yield
    except FormatError:
        raise
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__module__ == "pyo3_runtime":
            raise FormatError(file, field, f"refused: {quoted(str(error))}", allowed) from error
        raise


_rules = partial(failures_told, "the tokenizer", allowed="what its rules can do")
