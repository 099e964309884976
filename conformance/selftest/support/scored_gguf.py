"""A GGUF file whose tokenizer starts from characters and merges by scores (kind ``llama``), small enough to read."""

from pathlib import Path
from typing import Any

from tiny_gguf import CONFIG, published, write

NORMAL, SPECIAL, USER_DEFINED, BYTE = 1, 3, 4, 6
OTHERS = {"<bos>": SPECIAL, "<eos>": SPECIAL, "\n\n": USER_DEFINED, "  ": USER_DEFINED}
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["ab", "▁a", "▁ab", "bc", "abc", "cab", "ca", "aa", "▁▁", "é▁", "ba", "b▁", "cc", "bcc", "▁abc", "<eos>a"]
LETTERS = ["a", "b", "c", "▁", "é", ">"]


def scored(path: Path, words: list[str] = WORDS, chat: str | None = None, **metadata: Any) -> Path:
    """A file whose later words have the lower scores, as trained vocabularies do; single characters come last."""
    tokens = [*OTHERS, *BYTES, *words, *LETTERS]
    types = [*OTHERS.values()] + [BYTE] * 256 + [NORMAL] * (len(words) + len(LETTERS))
    scores = [-1000.0] * len(OTHERS) + [0.0] * 256 + [-float(i) for i in range(len(words) + len(LETTERS))]
    values: dict[str, Any] = {"model": "llama", "pre": "default", "scores": scores, "token_type": types}
    values |= {"add_bos_token": True, "add_space_prefix": False, "bos_token_id": 0, "eos_token_id": 1, "merges": None}
    values = {f"tokenizer.ggml.{key}": value for key, value in (values | metadata).items()}
    values["tokenizer.chat_template"] = chat
    return write(path, published(config=CONFIG), tokens=tokens, metadata=values)
