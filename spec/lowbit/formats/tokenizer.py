"""Text to tokens and back, whatever kind of file the vocabulary came from.

The work is done by the ``tokenizers`` library; a reader adds which token begins a sequence, if any, and which ones end
it. Special tokens, such as those that mark the turns of a chat, are recognised where a text spells them out.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import tokenizers
from tokenizers import decoders

from lowbit.errors import ArgumentError, FormatError
from lowbit.formats.chat import ChatTemplate
from lowbit.text import quoted


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """Text to tokens and back.

    Attributes:
        bos: the token put before every sequence, or None if the file asks for none.
        stop: the tokens that end a sequence.
        chat: the template of conversations, if the file has one.
    """

    bos: int | None
    stop: tuple[int, ...]
    _library: tokenizers.Tokenizer
    chat: ChatTemplate | None = None

    def encode(self, text: str, *, begin: bool = True) -> list[int]:
        """The tokens of a text; special tokens that it spells out are recognised.

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

    def decode(self, tokens: Iterable[int], *, special: bool = True) -> str:
        """The text of tokens; bytes that are no UTF-8 become the replacement character.

        Args:
            tokens: any.
            special: whether special tokens, such as the one that ends a sequence, are part of the text.

        Raises:
            FormatError: the library cannot make text of them with this file's rules.
        """
        with _rules("a token"):
            return self._library.decode(list(tokens), skip_special_tokens=not special)

    def stream(self, tokens: Iterable[int], *, special: bool = True) -> Iterator[str]:
        """The text of tokens as they come; a character spread over several tokens appears with the last of them."""
        pieces, seen, written = decoders.DecodeStream(skip_special_tokens=not special), [], 0
        for token in tokens:
            seen.append(token)
            with _rules("a token"):
                piece = pieces.step(self._library, token) or ""
            written += len(piece)
            yield piece
        yield self.decode(seen, special=special)[written:]

    def to_json(self) -> str:
        """The vocabulary and the rules as the content of a ``tokenizer.json``, without what begins a sequence."""
        return self._library.to_str()

    def text_of(self, token: int) -> str:
        """How the vocabulary spells a token.

        Raises:
            ArgumentError: there is no such token.
        """
        text = self._library.id_to_token(token)
        if text is None:
            raise ArgumentError("token", token, "one of the vocabulary")
        return text


def until(pieces: Iterable[str], stops: Sequence[str]) -> Iterator[str]:
    """A text in pieces, up to the first of some strings, which is left out; nothing more is read after it.

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
    """Turn whatever the library raises into an error of the file; its panics are no `Exception`.

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
