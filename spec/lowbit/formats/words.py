"""Patterns of words: how published tokenizers of bytes cut a text before they merge.

Each is the pattern in the ``tokenizer.json`` of its models, and no other is allowed there, because matching a pattern
may never end. A pattern has alternatives, and the first that matches at a position is taken.

llama.cpp's own patterns are written for another engine and differ in rare texts: it compares English endings without
the long s (``'ſ``), and its ``gpt-4o`` treats every letter outside a–z and A–Z as both cases.

Source: the published tokenizers of Qwen 2, Llama 3 (which DBRX and Smaug share) and gpt-oss.
"""

QWEN2_WORDS = "|".join(
    (
        r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]",  # English contractions
        r"[^\r\n\p{L}\p{N}]?\p{L}+",  # letters, with one sign or space before them
        r"\p{N}",  # one digit
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",  # signs, with a space before and line ends after them
        r"\s*[\r\n]+",
        r"\s+(?!\S)",  # whitespace except its last character, which goes with the next word
        r"\s+",
    )
)
LLAMA3_WORDS = "|".join(
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}{1,3}",  # up to three digits
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
GPT4O_WORDS = "|".join(
    (
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDING}",  # a word ends where capitals begin again
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDING}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
PATTERNS = (LLAMA3_WORDS, LLAMA3_WORDS.replace("{1,3}", ""), QWEN2_WORDS, GPT4O_WORDS)
"""All that a directory may have."""
