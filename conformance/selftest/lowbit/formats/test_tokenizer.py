"""Text of tokens as they come, against the text of all of them, for the decoders that models are published with."""

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest
import tiny_checkpoint
from scored_gguf import BYTES, scored
from tiny_gguf import write

from lowbit.formats.checkpoint.reader import open_checkpoint
from lowbit.formats.checkpoint.tokenizer import read_tokenizer
from lowbit.formats.tokenizer import Tokenizer
from lowbit.runtime import open_model

SPACES = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
FALLBACK, FUSE = {"type": "ByteFallback"}, {"type": "Fuse"}
STRIP: dict[str, Any] = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
PAIRS = {"type": "Replace", "pattern": {"String": "ab"}, "content": "c"}
CHAINS: dict[str, list[dict[str, Any]]] = {
    "llama": [SPACES, FALLBACK, FUSE, STRIP],
    "gemma": [SPACES, FALLBACK, FUSE],
    "metaspace": [METASPACE, FALLBACK, FUSE],
    "two spaces": [SPACES, FALLBACK, FUSE, STRIP, STRIP],
    "pairs": [SPACES, FALLBACK, FUSE, PAIRS],
}
PIECES = ["▁", "▁▁", "a", "b", "ab", "▁ab", "\ufffd", "é"]


def of_chain(folder: Path, decoders: list[dict[str, Any]]) -> Tokenizer:
    """The tokenizer of a directory that decodes so; its tokens are all bytes, a few pieces and two special ones."""
    content = copy.deepcopy(tiny_checkpoint.TOKENIZER) | {"pre_tokenizer": None, "post_processor": None}
    content["decoder"] = {"type": "Sequence", "decoders": decoders}
    texts = ["<unk>", "<s>", "</s>", *BYTES, *PIECES]
    content["model"] |= {"vocab": {text: number for number, text in enumerate(texts)}, "merges": []}
    content["model"] |= {"byte_fallback": True}
    config = tiny_checkpoint.published(tiny_checkpoint.DENSE | {"vocab_size": len(texts)})
    return read_tokenizer(open_checkpoint(tiny_checkpoint.write(folder, config, tokenizer=content)))


def drawn(rng: random.Random, most: int) -> list[int]:
    """Tokens of `of_chain`, bytes of two characters and wrong ones among them."""
    octets = [3 + byte for byte in (*"é🙂".encode(), 0x0A, 0x20, 0xFF)]
    return [rng.choice([1, 2, *octets, *range(259, 259 + len(PIECES))]) for _ in range(rng.randint(0, most))]


@pytest.mark.parametrize("chain", CHAINS)
def test_pieces_make_the_text(chain: str, tmp_path: Path) -> None:
    """Whatever tokens come and whatever comes before them, also bytes that are no character."""
    made, rng = of_chain(tmp_path / "m", CHAINS[chain]), random.Random(0)
    broken = 0
    for _ in range(150):
        tokens, after, special = drawn(rng, 9), drawn(rng, 3), rng.random() < 0.5
        whole = made.decode(tokens, special=special)
        assert "".join(made.stream(tokens, special=special)) == whole, tokens
        following = made.decode(tokens, special=special, after=after)
        assert "".join(made.stream(tokens, special=special, after=after)) == following, (after, tokens)
        broken += whole.count("\ufffd") > 1
    assert broken > 30


def test_pieces_of_byte_level_tokens_make_the_text(tmp_path: Path) -> None:
    """Where a token is part of a character, the text waits for its other parts only."""
    made, rng = open_model(write(tmp_path / "b.gguf")).tokenizer, random.Random(1)
    octets = [made.encode(text)[at] for text in ("é", "🙂") for at in range(len(text.encode()))]
    for _ in range(150):
        tokens = [rng.choice([0, 1, *octets, *made.encode("\xff"), *made.encode("a hello")]) for _ in range(9)]
        for special in (True, False):
            assert "".join(made.stream(tokens, special=special)) == made.decode(tokens, special=special), tokens
    assert list(made.stream([*made.encode("aé"), octets[0]])) == ["a", "", "é", "", "\ufffd"]


def test_a_run_of_bytes_with_a_wrong_one(tmp_path: Path) -> None:
    """Each byte of the run is a replacement character, also those that were a character before the wrong one came."""
    made = of_chain(tmp_path / "m", CHAINS["llama"])
    run = [3 + byte for byte in "é".encode()]
    assert list(made.stream([261, *run, 261, *run, 3 + 0xFF, 261])) == [
        "a",
        "",
        "",
        "éa",
        "",
        "",
        "",
        "\ufffd" * 3 + "a",
        "",
    ]
    assert list(made.stream([261, *run, 2, *run, 261], special=False)) == ["a", "", "", "", "", "", "ééa", ""]


def test_a_decoder_that_changes_earlier_text(tmp_path: Path) -> None:
    """One that strips the end, or replaces what two tokens spell, gives the text in one piece."""
    strip = of_chain(tmp_path / "strip", [SPACES, FALLBACK, FUSE, STRIP | {"start": 0, "stop": 1}])
    assert list(strip.stream([261, 259, 262, 259])) == ["", "", "", "", "a b"]
    pairs = of_chain(tmp_path / "pairs", CHAINS["pairs"])
    assert list(pairs.stream([261, 262, 261])) == ["", "", "", "ca"]


def test_a_text_that_goes_on_keeps_the_space_in_front(tmp_path: Path) -> None:
    """After a word, a byte, a space alone and a hidden token; a text that begins loses it."""
    made = of_chain(tmp_path / "m", CHAINS["llama"])
    space, word, line, wrong, end = 259, 264, 3 + 0x0A, 3 + 0xFF, 2
    for after in ([word], [space], [word, line], [line], [1, line], [word, end], [word, *[line] * 50]):
        assert made.decode([word, word], special=False, after=after) == " ab ab", after
        assert next(made.stream([word], special=False, after=after)) == " ab", after
    for after in ([], [1], [1, end]):
        assert made.decode([word, word], special=False, after=after) == "ab ab", after
    assert made.decode([word], after=[1]) == " ab"
    assert made.decode([wrong, word], after=[word, 3 + 0xC3, 3 + 0xA9]) == "\ufffd ab"


def test_a_continuation_of_a_gguf_file(tmp_path: Path) -> None:
    """The text of a prompt and of what follows is the text of both together."""
    made = open_model(scored(tmp_path / "s.gguf", add_space_prefix=True)).tokenizer
    tokens = made.encode("ab ab\nab", begin=False)
    for at in range(1, len(tokens)):
        both = made.decode(tokens[:at]) + made.decode(tokens[at:], after=tokens[:at])
        assert both == "ab ab\nab"


def test_many_tokens_take_little_time(tmp_path: Path) -> None:
    """The text of earlier tokens is not made again for each: the longest call of the library stays short."""
    made = of_chain(tmp_path / "m", CHAINS["llama"])
    library, longest = made._library, [0]

    class Counting:
        def __getattr__(self, name: str) -> Any:
            return getattr(library, name)

        def decode(self, tokens: list[int], **given: Any) -> str:
            longest[0] = max(longest[0], len(tokens))
            return library.decode(tokens, **given)

    counting: Any = Counting()
    assert "".join(Tokenizer(None, (), counting).stream([264] * 500)) == " ".join(["ab"] * 500)
    assert longest[0] < 8


def test_ends_by_text_may_be_added(tmp_path: Path) -> None:
    """A tokenizer with more ends replaces one with fewer, and not the other way round."""
    made = of_chain(tmp_path / "m", CHAINS["llama"])
    more = Tokenizer(made.bos, (*made.stop, 260), made._library)
    assert (more.can_replace(made), made.can_replace(more)) == (True, False)
    content = json.loads(made.to_json())
    content["added_tokens"][1]["special"] = False
    plain = Tokenizer(made.bos, (), type(made._library).from_str(json.dumps(content)))
    assert content["added_tokens"][1]["id"] in made.stop
    assert (made.can_replace(plain), plain.can_replace(made)) == (True, False)
