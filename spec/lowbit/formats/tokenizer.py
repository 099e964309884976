"""Text to tokens and back, whatever kind of file the vocabulary came from.

The work is done by the ``tokenizers`` library; what a reader adds is which token begins a sequence, if any does, and
which ones end it. A chat's own marks are read as what they say where they are spelled out in a text.

Source: lowbit's own.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import tokenizers
from tokenizers import decoders

from lowbit.errors import ArgumentError


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """Text to tokens and back.

    Attributes:
        bos: the token put before every sequence, or None if the file asks for none.
        stop: the tokens that end a sequence.
    """

    bos: int | None
    stop: tuple[int, ...]
    _library: tokenizers.Tokenizer

    def encode(self, text: str, *, begin: bool = True) -> list[int]:
        """The tokens of a text; special tokens written out in it are read as what they say.

        Args:
            text: any text.
            begin: put `bos` first, if there is one.

        Raises:
            ArgumentError: text that is not valid Unicode, as undecodable bytes of a command line become.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ArgumentError("text", f"undecodable at character {error.start}", "text in UTF-8") from error
        tokens = self._library.encode(text, add_special_tokens=False).ids
        return [self.bos, *tokens] if begin and self.bos is not None else tokens

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of tokens, special ones included; bytes that are no UTF-8 become the replacement character."""
        return self._library.decode(list(tokens), skip_special_tokens=False)

    def stream(self, tokens: Iterable[int]) -> Iterator[str]:
        """The text of tokens as they come; a character spread over several tokens appears with the last of them."""
        pieces, seen, written = decoders.DecodeStream(skip_special_tokens=False), [], 0
        for token in tokens:
            seen.append(token)
            piece = pieces.step(self._library, token) or ""
            written += len(piece)
            yield piece
        yield self.decode(seen)[written:]
