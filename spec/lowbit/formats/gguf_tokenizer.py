"""The tokenizer of a GGUF file: from its own vocabulary, through the ``tokenizers`` library.

A model reads numbers, and which text is which number is as much part of it as its weights. A GGUF file carries the
vocabulary: the tokens in order, the *merges* of byte-pair encoding in order of preference, and the type of each token.
What it carries only by name is how text is cut into words *before* merging, the *pre-tokenizer*. Getting that wrong
still gives tokens, only not the ones that the model was trained on, so an unknown name is an error and not a guess.

For ``smollm`` every digit stands alone, and the rest is cut by the pattern of GPT-2, byte by byte; ``gpt-2`` is that
pattern alone.

Source: the vocabulary handling of llama.cpp, which gives these names their meaning.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import tokenizers
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.decoders import DecodeStream
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence

from lowbit.check import spoken
from lowbit.errors import ArgumentError, FormatError
from lowbit.formats.gguf import GGUFFile
from lowbit.formats.gguf_header import shown

MODEL = "gpt2"
SPECIAL, USER_DEFINED = 3, 4

PRE_TOKENIZERS: dict[str, Callable[[], PreTokenizer]] = {
    "gpt-2": lambda: ByteLevel(add_prefix_space=False),
    "smollm": lambda: Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]),
}


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
        pieces, seen, written = DecodeStream(skip_special_tokens=False), [], 0
        for token in tokens:
            seen.append(token)
            piece = pieces.step(self._library, token) or ""
            written += len(piece)
            yield piece
        yield self.decode(seen)[written:]


def read_tokenizer(source: GGUFFile) -> Tokenizer:
    """Make the tokenizer of a GGUF file.

    Raises:
        FormatError: a kind of tokenizer or pre-tokenizer that is not supported, or a vocabulary that does not fit
            together.
    """
    file = source.file
    _check_supported(source, "tokenizer.ggml.model", (MODEL,))
    _check_supported(source, "tokenizer.ggml.pre", tuple(PRE_TOKENIZERS))
    for key in ("tokenizer.ggml.add_eos_token", "tokenizer.ggml.add_space_prefix"):
        if source.value(key, bool, default=False):
            raise FormatError(file, key, True, "False")
    tokens = source.value("tokenizer.ggml.tokens", list)
    vocabulary = {token: number for number, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise FormatError(file, "tokenizer.ggml.tokens", f"{len(tokens)} tokens, some of them equal", "distinct tokens")
    merges = _merges(source, vocabulary)
    try:
        library = tokenizers.Tokenizer(BPE(vocab=vocabulary, merges=merges))
        library.pre_tokenizer = PRE_TOKENIZERS[source.value("tokenizer.ggml.pre", str)]()
        library.decoder = ByteLevelDecoder()
        library.add_tokens(_added(source, tokens))
    except Exception as error:  # the library raises nothing more specific
        reason = str(error).replace("\n", " ")
        raise FormatError(file, "tokenizer", shown(reason), "a vocabulary that fits together") from error
    begins = source.value("tokenizer.ggml.add_bos_token", bool, default=False)
    bos = _token_id(source, "bos", len(tokens)) if begins else None
    ends = (_token_id(source, name, len(tokens)) for name in ("eos", "eot", "eom"))
    return Tokenizer(bos, tuple(sorted({token for token in ends if token is not None})), library)


def _check_supported(source: GGUFFile, key: str, allowed: tuple[str, ...]) -> None:
    given = source.value(key, str)
    if given not in allowed:
        raise FormatError(source.file, key, shown(given), spoken([repr(name) for name in allowed]))


def _merges(source: GGUFFile, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """The merges as pairs; both parts and the whole are tokens."""
    key, pairs = "tokenizer.ggml.merges", []
    for number, merge in enumerate(source.value(key, list)):
        left, _, right = merge.partition(" ")
        if not (left in vocabulary and right in vocabulary and left + right in vocabulary):
            raise FormatError(source.file, f"{key}[{number}]", shown(merge), "two tokens that make a third")
        pairs.append((left, right))
    return pairs


def _added(source: GGUFFile, tokens: list[str]) -> list[tokenizers.AddedToken]:
    """The tokens that are recognised in text as a whole, before it is cut into words."""
    key = "tokenizer.ggml.token_type"
    types = source.header.metadata.get(key)
    if not (isinstance(types, np.ndarray) and types.dtype.kind in "iu" and len(types) == len(tokens)):
        raise FormatError(source.file, key, "missing or of another length", f"{len(tokens)} integers")
    return [
        tokenizers.AddedToken(token, special=bool(kind == SPECIAL), normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (SPECIAL, USER_DEFINED) and token
    ]


def _token_id(source: GGUFFile, name: str, count: int) -> int | None:
    """A token that the metadata name by number, None if they do not."""
    key = f"tokenizer.ggml.{name}_token_id"
    if key not in source.header.metadata:
        return None
    token = source.value(key, int)
    if not 0 <= token < count:
        raise FormatError(source.file, key, token, f"0 to {count - 1}")
    return token
