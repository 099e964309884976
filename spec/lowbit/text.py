"""Text from files, models and backends, made safe to show.

A string from a file or a backend may contain control characters that a terminal obeys, line breaks that forge a line of
a report, marks that change the direction of surrounding text, and lone surrogates that no encoding accepts. `cleaned`
escapes these and bounds the length; `one_line` removes line breaks as well. `quoted` does the same for a short name
inside a sentence, in quotation marks.
"""

import re
from math import isfinite

MOST_TEXT = 4000
MOST_QUOTED = 80
AS_VOWELS = ("a", "e", "i", "o", "A", "E", "I", "O", "nd")
"""How the names of classes begin that have the article "an", such as ndarray."""
# What a terminal obeys, what XML forbids, and what changes the direction of the text around it.
UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")


def cleaned(text: str, most: int = MOST_TEXT) -> str:
    """Text as every terminal and report can show it: of bounded length, with control characters spelt out.

    Line feeds and tabs stay; `one_line` removes them where a text must be one line.

    >>> cleaned("red \\x1b[31m")
    'red \\\\x1b[31m'
    """
    shown = UNSAFE.sub(lambda found: ascii(found[0])[1:-1], text[:most])
    return shown if len(text) <= most else f"{shown} … ({len(text) - most} more characters)"


def one_line(text: str, most: int = MOST_TEXT) -> str:
    """The same on one line: a line break, with the white space around it, becomes a space.

    >>> one_line("no compiler\\n  lowbit: passed\\x07")
    'no compiler lowbit: passed\\\\x07'
    """
    return cleaned(" ".join(part for line in text.splitlines() if (part := line.replace("\t", " ").strip())), most)


def json_number(number: float | None) -> float | None:
    """A number as JSON has it; None, which becomes ``null``, for infinities and NaN, which JSON has not.

    >>> json_number(0.5), json_number(float("inf")), json_number(None)
    (0.5, None, None)
    """
    return None if number is None or not isfinite(number) else number


def represented(value: object) -> str:
    """``repr``, or the size of an integer that has too many digits for it.

    >>> represented("4"), represented(10**5000)
    ("'4'", 'an integer of 16610 bits')
    """
    try:
        return repr(value)
    except ValueError:
        if isinstance(value, int):
            return f"an integer of {value.bit_length()} bits"
        raise


def kind_of(value: object) -> str:
    """The class of a value with its article, for a message.

    >>> kind_of([1]), kind_of(1), kind_of(None)
    ('a list', 'an int', 'None')
    """
    if value is None:
        return "None"
    return with_article(type(value).__name__)


def with_article(name: str) -> str:
    """The name of a class with its article."""
    return f"{'an' if name.startswith(AS_VOWELS) else 'a'} {name}"


def quoted(text: str) -> str:
    """A name from a file for a message of one line: in quotation marks, escaped and not too long.

    >>> quoted("token\\n")
    "'token\\\\n'"
    """
    return UNSAFE.sub(lambda found: ascii(found[0])[1:-1], repr(shortened(text, MOST_QUOTED)))


def shortened(text: str, most: int) -> str:
    """A text of at most `most` characters; one that was longer ends in dots."""
    return text if len(text) <= most else text[: most - 3] + "..."
