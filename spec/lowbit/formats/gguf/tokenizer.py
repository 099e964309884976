"""Tokenizer of a GGUF file: its vocabulary, run by the ``tokenizers`` library.

A model reads numbers, and the mapping from text to numbers is as much part of it as its weights. A GGUF file carries
the vocabulary: the tokens in order, the type of each, and the order in which two neighbours are *merged* into a longer
token. A wrong rule still gives tokens, but not the ones that the model was trained on. So an unknown name is an error.

**Kind** ``gpt2`` **starts from bytes.** Text is cut into words by a *pre-tokenizer*, which the file carries only by
name, and the bytes of a word are merged in the order of the file's list. ``gpt-2`` is the pattern of GPT-2; for
``smollm`` and ``refact`` every digit stands alone before that pattern cuts the rest; the others have the patterns of
`lowbit.formats.words`. In that of ``qwen2`` a digit stands alone, a word includes one sign before it, and line ends
stay together. The published tokenizer of Qwen also composes accents first (NFC); the name does not imply that, and
llama.cpp does not do it. ``llama-bpe``, ``smaug-bpe`` and ``dbrx`` keep up to three digits together, and a word of
``llama-bpe`` that is a token is never merged from parts. ``gpt-4o`` also begins a word where capitals begin again.

**Kind** ``llama`` **starts from characters.** There are no words: a space becomes ``▁`` and is merged like any other
character. Unless the file says otherwise (``add_space_prefix``), a text gets a space in front, and so does what
follows a token that is recognised as a whole. Instead of a list there is a *score* for each token, and of all
neighbours that make a token the pair with the best score is merged first; that is the list sorted by score, with every
way to cut a token in two. The scores say no order of these ways; here it is that of published lists, by the numbers of
the two parts. A character that is no token becomes its bytes, each of which is one.

**The token that begins a sequence** is put first if ``add_bos_token`` says so. Where the key is absent the kind or the
pre-tokenizer decides: ``llama`` and ``llama-bpe`` begin with it, the others do not. Files of kind ``llama`` that do not
number their tokens mean 1 for the beginning and 2 for the end.

**The tokens that end it** are those that the file numbers, and those that are known by their text, `ENDS`. The latter
are special tokens whatever type the file gives them, because converters often leave both out.

Source: the vocabulary handling of llama.cpp (``llama_vocab::impl::load`` in ``src/llama-vocab.cpp``, commit 00ad355e),
which gives these names their meaning. Its number 11 for the beginning and the end in files of kind ``gpt2`` that number
neither belongs to one vocabulary, and is not taken.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import Regex, decoders, normalizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split

from lowbit.errors import FormatError
from lowbit.formats.chat import ChatTemplate
from lowbit.formats.gguf.reader import GGUFFile
from lowbit.formats.tokenizer import Tokenizer, failures_told
from lowbit.formats.words import GPT4O_WORDS, LLAMA3_WORDS, QWEN2_WORDS
from lowbit.text import quoted

Vocabulary = dict[str, int]
"""From a token to its number."""

PerToken = npt.NDArray[np.integer | np.floating]
"""A number for each token."""

NORMAL, SPECIAL, USER_DEFINED, UNUSED, BYTE = 1, 3, 4, 5, 6
PREFIX, BEGINS = "tokenizer.ggml.add_space_prefix", "tokenizer.ggml.add_bos_token"
NUMBERS: dict[str, dict[str, int]] = {"gpt2": {}, "llama": {"bos": 1, "eos": 2}}
"""The default special tokens of each kind of file."""
NUMBERED_ENDS = ("eos", "eot", "eom")
"""The tokens that end a sequence, in GGUF's names."""
ENDS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "</s>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "<｜end▁of▁sentence｜>",
    "[e~[",
)
"""Texts of tokens that end a sequence, whether or not the metadata give them by number."""
FILLING: dict[str, tuple[str, ...]] = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
"""Tokens of models that fill gaps in code, which also end a sequence: by number in the metadata, else the first of
these texts.

llama.cpp takes any one of several.
"""
NO_ENDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("<|end|>", ("<|return|>", "<|call|>")),
    ("<|end|>", ("<|return|>", "<|calls|>")),
    ("<|end|>", ("<|flush|>", "<|call|>")),
    ("<|end|>", ("<|flush|>", "<|calls|>")),
    ("</s>", ("<|tool_response>",)),
)
"""Texts of tokens that do not end a sequence in a vocabulary with certain others."""
LONGEST_TOKEN = 256
"""The most characters of a token to be split in all ways; the longest of published vocabularies are far shorter."""


def _cut_by(pattern: str) -> PreTokenizer:
    """A pre-tokenizer that cuts text into words by a pattern; the bytes of each word are then merged."""
    return Sequence([Split(Regex(pattern), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)])


@dataclass(frozen=True)
class Words:
    """The meaning of the name of a pre-tokenizer.

    Attributes:
        make: makes the pre-tokenizer.
        ignore_merges: whether a word that is in the vocabulary becomes that token, regardless of merges.
        begins: whether a sequence begins with BOS if the file does not say.
    """

    make: Callable[[], PreTokenizer]
    ignore_merges: bool = False
    begins: bool = False


PRE_TOKENIZERS: dict[str, Words] = {
    "gpt-2": Words(lambda: ByteLevel(add_prefix_space=False)),
    **dict.fromkeys(
        ("smollm", "refact"),
        Words(lambda: Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])),
    ),
    "qwen2": Words(lambda: _cut_by(QWEN2_WORDS)),
    "llama-bpe": Words(lambda: _cut_by(LLAMA3_WORDS), ignore_merges=True, begins=True),
    "smaug-bpe": Words(lambda: _cut_by(LLAMA3_WORDS)),
    "dbrx": Words(lambda: _cut_by(LLAMA3_WORDS)),
    "gpt-4o": Words(lambda: _cut_by(GPT4O_WORDS)),
}


def read_tokenizer(source: GGUFFile) -> Tokenizer:
    """Make the tokenizer of a GGUF file.

    Raises:
        FormatError: a kind of tokenizer or pre-tokenizer that is not supported, or a vocabulary that does not fit
            together.
    """
    file = source.file
    kind = source.choice("tokenizer.ggml.model", KINDS)
    for key in ("tokenizer.ggml.add_eos_token", *([PREFIX] if kind == "gpt2" else [])):
        if source.value(key, bool, default=False):
            raise FormatError(file, key, True, "False")
    tokens = source.value("tokenizer.ggml.tokens", list)
    vocabulary = {token: number for number, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise FormatError(file, "tokenizer.ggml.tokens", f"{len(tokens)} tokens, some of them equal", "distinct tokens")
    types = np.array(_per_token(source, "token_type", len(tokens), "iu", "integers"))
    by_text = ends_by_text(vocabulary, [name for name in FILLING if _key_of(name) in source.header.metadata])
    types[list(by_text)] = SPECIAL
    with failures_told(file, "tokenizer", "a vocabulary that fits together"):
        library = KINDS[kind](source, vocabulary, types)
        library.add_tokens(_added(tokens, types))
    bos = _token_id(source, "bos", len(tokens)) if _begins(source, kind) else None
    eos = _token_id(source, "eos", len(tokens))
    numbered = (_token_id(source, name, len(tokens)) for name in (*NUMBERED_ENDS, *FILLING))
    ends = by_text | {token for token in numbered if token is not None}
    stop = sorted(ends - _no_ends(vocabulary), key=lambda token: (token != eos, token))
    return Tokenizer(bos, tuple(stop), library, _chat_template(source, tokens))


def ends_by_text(vocabulary: Mapping[str, int], numbered: Collection[str] = ()) -> set[int]:
    """The tokens of a vocabulary that end a sequence by their text.

    Args:
        vocabulary: from a token to its number.
        numbered: the names of `FILLING` whose tokens the file numbers.
    """
    found = [text for text in ENDS if text in vocabulary]
    for name, texts in FILLING.items():
        if name not in numbered:
            found += [text for text in texts if text in vocabulary][:1]
    return {vocabulary[text] for text in found} - _no_ends(vocabulary)


def _no_ends(vocabulary: Mapping[str, int]) -> set[int]:
    """The tokens that do not end a sequence because others of the vocabulary do."""
    found = (text for text, others in NO_ENDS if vocabulary.keys() >= {text, *others})
    return {vocabulary[text] for text in found}


def _begins(source: GGUFFile, kind: str) -> bool:
    """Whether a sequence begins with BOS."""
    by_name = kind != "gpt2" or PRE_TOKENIZERS[source.choice("tokenizer.ggml.pre", PRE_TOKENIZERS)].begins
    return source.value(BEGINS, bool, default=by_name)


def _chat_template(source: GGUFFile, tokens: list[str]) -> ChatTemplate | None:
    if "tokenizer.chat_template" not in source.header.metadata:
        return None
    numbers = {f"{name}_token": _token_id(source, name, len(tokens)) for name in ("bos", "eos")}
    texts = {name: tokens[number] for name, number in numbers.items() if number is not None}
    return ChatTemplate(source.file, source.value("tokenizer.chat_template", str), texts)


def _from_bytes(source: GGUFFile, vocabulary: Vocabulary, types: PerToken) -> tokenizers.Tokenizer:
    """Byte-pair encoding by a list of merges, in the words that a pre-tokenizer cuts."""
    words = PRE_TOKENIZERS[source.choice("tokenizer.ggml.pre", PRE_TOKENIZERS)]
    merges = source.value("tokenizer.ggml.merges", list)
    pairs = [merge.partition(" ")[::2] for merge in merges]
    try:
        model = BPE(vocab=vocabulary, merges=pairs, ignore_merges=words.ignore_merges)
    except Exception:
        _check_merges(source.file, merges, vocabulary)
        raise
    library = tokenizers.Tokenizer(model)
    library.pre_tokenizer = words.make()
    library.decoder = decoders.ByteLevel()
    return library


def _from_characters(source: GGUFFile, vocabulary: Vocabulary, types: PerToken) -> tokenizers.Tokenizer:
    """Byte-pair encoding by scores, over the whole text, with bytes for characters that are not tokens."""
    for byte in range(256):
        if f"<0x{byte:02X}>" not in vocabulary:
            raise FormatError(source.file, "tokenizer.ggml.tokens", f"without '<0x{byte:02X}>'", "one for each byte")
    scores = _per_token(source, "scores", len(vocabulary), "f", "floats")
    merges = _scored_merges(source, vocabulary, types, scores)
    library = tokenizers.Tokenizer(BPE(vocab=vocabulary, merges=merges, byte_fallback=True))
    spaces, back = normalizers.Replace(" ", "▁"), [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if source.value(PREFIX, bool, default=True):
        library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
        library.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)])
    else:
        library.normalizer, library.decoder = spaces, decoders.Sequence(back)
    return library


KINDS: dict[str, Callable[[GGUFFile, Vocabulary, PerToken], tokenizers.Tokenizer]] = {
    "gpt2": _from_bytes,
    "llama": _from_characters,
}


def _check_merges(file: str, merges: list[str], vocabulary: Vocabulary) -> None:
    """Refuse merges of which a part or the result is not a token.

    The library refuses them with a less specific message. Checking each one beforehand would take as long as making the
    tokenizer.
    """
    for number, merge in enumerate(merges):
        left, _, right = merge.partition(" ")
        if not (left in vocabulary and right in vocabulary and left + right in vocabulary):
            field = f"tokenizer.ggml.merges[{number}]"
            raise FormatError(file, field, quoted(merge), "two tokens that make a third")


def _scored_merges(
    source: GGUFFile, vocabulary: Vocabulary, types: PerToken, scores: PerToken
) -> list[tuple[str, str]]:
    """Every split of every normal token into two others, best score first; ties by token, then parts."""
    normal = np.flatnonzero(np.asarray(types) == NORMAL)
    tokens = list(vocabulary)  # in the order of their numbers
    pieces = {tokens[number] for number in normal}
    if any(len(token) > LONGEST_TOKEN for token in pieces):
        allowed = f"at most {LONGEST_TOKEN} characters each"
        raise FormatError(source.file, "tokenizer.ggml.tokens", f"one of {max(map(len, pieces))} characters", allowed)
    best_first = (tokens[number] for number in normal[np.argsort(-np.asarray(scores)[normal], kind="stable")])
    return [cut for token in best_first for cut in _cuts(token, pieces, vocabulary)]


def _cuts(token: str, pieces: set[str], vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """The ways to split a token into two others, ordered by the numbers of the parts."""
    cuts = ((token[:at], token[at:]) for at in range(1, len(token)))
    found = [(left, right) for left, right in cuts if left in pieces and right in pieces]
    return sorted(found, key=lambda parts: (vocabulary[parts[0]], vocabulary[parts[1]]))


def _per_token(source: GGUFFile, name: str, count: int, kinds: str, called: str) -> PerToken:
    """An array of the metadata with a number for each token."""
    key = f"tokenizer.ggml.{name}"
    numbers = source.header.metadata.get(key)
    if not (isinstance(numbers, np.ndarray) and numbers.dtype.kind in kinds and len(numbers) == count):
        raise FormatError(source.file, key, "missing or of another length", f"{count} {called}")
    return numbers


def _added(tokens: list[str], types: PerToken) -> list[tokenizers.AddedToken]:
    """The tokens that are recognised in a text as a whole, before any other step."""
    return [
        tokenizers.AddedToken(token, special=bool(kind == SPECIAL), normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (SPECIAL, USER_DEFINED) and token
    ]


def _token_id(source: GGUFFile, name: str, count: int) -> int | None:
    """A token that the metadata give by number, else the default of the kind of file; None if there is neither."""
    key = _key_of(name)
    if key not in source.header.metadata:
        meant = NUMBERS[source.choice("tokenizer.ggml.model", KINDS)].get(name)
        return None if meant is None or meant >= count else meant
    token = source.value(key, int)
    if not 0 <= token < count:
        raise FormatError(source.file, key, token, f"0 to {count - 1}")
    return token


def _key_of(name: str) -> str:
    """The metadata key of a token's number."""
    return f"tokenizer.ggml.{name}_token_id"
