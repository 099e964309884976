"""Tokenizers trained on a committed list of texts, in the forms in which models publish them.

`TEXTS` have what rules of tokenizers disagree about: capitals inside words, endings with apostrophes, digits, runs of
spaces and line ends, accents as one character and as two, scripts without capitals, and special tokens spelled out.
"""

import json
from typing import Any

from tokenizers import Tokenizer, decoders, normalizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

TEXTS = (
    "",
    " ",
    "a",
    "Hello world, hello World; HELLO WORLD!",
    "It's what they'd've said: I'LL go, you'Re right, we'm, o'clock, 'tis, don't.",
    "camelCase HTTPServer parseJSONNow iPhone XMLHttpRequest e2eTest",
    "1 12 123 1234 12345 3.14159 1,000,000 2024-11-25 0x1F",
    "two  spaces   three    four\tand\ttabs\n",
    "line\nline\r\nline\n\n\nline   \n  indented\n\tx = 1;\n",
    "def f(x):\n    return {'a': x, \"b\": [1, 2, 3]}  # done\n",
    "https://example.org/a/b//c?d=e&f=g#h path/to//file/\n/",
    "naïve café naïve Größe ÉTÉ État İstanbul ſtraße ǅungla",
    "Привет, мир! Здравствуйте ПРИВЕТ",
    "日本語のテキスト 中文文本，标点。한국어 텍스트",
    "नमस्ते दुनिया مرحبا بالعالم שלום",
    "🙂🙃 👩‍👩‍👧 ½ ² ① Ⅷ ٣٤",
    "<s>text</s> <s> </s>again",
    "▁already ▁▁marked",
    "\x00\x1a\u200b\u00a0nbsp\u2003em",
    "...!!! ??? -- --- *** (((x))) ~~ ``` ===\n",
    "aaaaaaaaaa bbbb abababab",
)

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
GPT_OSS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The patterns of the published files, spelled as there."""

SPECIAL = ("<unk>", "<s>", "</s>")


def published(pattern: str) -> dict[str, Any]:
    """The pre-tokenizer of a ``tokenizer.json``."""
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    octets = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [split, octets]}


def of_bytes(pre_tokenizer: dict[str, Any], size: int = 700, **model: Any) -> dict[str, Any]:
    """A ``tokenizer.json`` that starts from bytes and cuts words as it is told; `model` changes flags of its model."""
    library = Tokenizer.from_str(json.dumps(_empty() | {"pre_tokenizer": pre_tokenizer}))
    trainer = BpeTrainer(vocab_size=size, initial_alphabet=ByteLevel.alphabet(), special_tokens=[*SPECIAL[1:]])
    library.train_from_iterator(TEXTS, trainer)
    library.decoder = decoders.ByteLevel()
    content: dict[str, Any] = json.loads(library.to_str())
    content["model"] |= model
    return content


def of_characters(*, prefix: bool, size: int = 900) -> dict[str, Any]:
    """A ``tokenizer.json`` that starts from characters, as those of Llama 2 (with a prefix) and Gemma are published.

    A published list has every way to cut a token into two others, and those of one token by their numbers.
    """
    library = Tokenizer(BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    spaces = normalizers.Replace(" ", "▁")
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    special = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = sorted({letter for text in TEXTS for letter in text if letter.isascii() and letter.isprintable()})
    trainer = BpeTrainer(vocab_size=size, special_tokens=special, limit_alphabet=90, initial_alphabet=letters)
    library.train_from_iterator([text for text in TEXTS if "<s>" not in text], trainer)
    back = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    library.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)] if prefix else back)
    content: dict[str, Any] = json.loads(library.to_str())
    content["added_tokens"] = content["added_tokens"][: len(SPECIAL)]
    content["model"]["merges"] = _all_cuts(content["model"]["vocab"], content["model"]["merges"])
    if not prefix:  # Gemma's cuts at spaces, of which there is none any more
        split = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
        content["pre_tokenizer"] = split
    return content


def _all_cuts(vocabulary: dict[str, int], merges: list[list[str]]) -> list[list[str]]:
    """Every way to make each token that some merge makes, in the order of the first one."""
    found = list[list[str]]()
    for token in dict.fromkeys(left + right for left, right in merges):
        cuts = [[token[:at], token[at:]] for at in range(1, len(token))]
        known = [cut for cut in cuts if all(part in vocabulary for part in cut)]
        found += sorted(known, key=lambda parts: [vocabulary[part] for part in parts])
    return found


def _empty() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(Tokenizer(BPE()).to_str())
    return content
