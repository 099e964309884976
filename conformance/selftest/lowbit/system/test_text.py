"""Text from elsewhere is shown without what a terminal obeys or a report forges (`lowbit.text`)."""

import unicodedata

import pytest

from lowbit.text import MOST_QUOTED, MOST_TEXT, cleaned, quoted

EVERYTHING = "".join(map(chr, range(0x110000)))
DIRECTIONS = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")


@pytest.mark.parametrize("show", [cleaned, quoted])
def test_no_character_that_acts_is_shown(show: object) -> None:
    """Of all characters there are: no control but the line feed and the tab, no surrogate, no turn of direction."""
    assert callable(show)
    for start in range(0, len(EVERYTHING), 40):
        for character in show(EVERYTHING[start : start + 40]):
            category = unicodedata.category(character)
            assert category != "Cs" and unicodedata.bidirectional(character) not in DIRECTIONS
            assert category != "Cc" or (show is cleaned and character in "\n\t")
            assert category not in ("Zl", "Zp")
    shown = show(EVERYTHING[0xD7F0:0xE010])
    assert shown.encode("utf-8")


def test_what_is_harmless_stays() -> None:
    """Letters of all scripts, line feeds and tabs."""
    assert cleaned("naïve 量化 \t×\n€ 🙂") == "naïve 量化 \t×\n€ 🙂"
    assert quoted("naïve 量化") == "'naïve 量化'"


@pytest.mark.parametrize(
    ("given", "shown"),
    [("\x1b]0;x\x07", "\\x1b]0;x\\x07"), ("a\rb", "a\\rb"), ("\u202egpj", "\\u202egpj"), ("\ud800", "\\ud800")],
)
def test_what_acts_is_spelt_out(given: str, shown: str) -> None:
    """As Python would write it, so that a reader sees what was there."""
    assert (cleaned(given), quoted(given)) == (shown, f"'{shown}'")


def test_length_is_bounded() -> None:
    """A long text says how much is missing; a long name ends in dots. Escapes may make it longer, not unbounded."""
    assert cleaned("x" * (MOST_TEXT + 5)) == "x" * MOST_TEXT + " … (5 more characters)"
    assert cleaned("x" * MOST_TEXT) == "x" * MOST_TEXT
    assert quoted("x" * (MOST_QUOTED + 1)) == f"'{'x' * (MOST_QUOTED - 3)}...'"
    assert len(cleaned("\x00" * 10**6)) < 5 * MOST_TEXT


def test_quoted_is_one_line() -> None:
    """A name cannot forge a line of a message."""
    for end in ("\n", "\r", "\x0b", "\x0c", "\x1c", "\x85", "\u2028", "\u2029"):
        assert len(quoted(f"a{end}b").splitlines()) == 1
