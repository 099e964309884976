"""Turn the sections of a docstring into the field lists of reStructuredText, line for line.

Docstrings are written in Google's style (``Args:``, ``Returns:``, ``Raises:``, ``Attributes:``), and end with the
line ``Source:`` that says where in the papers the idea stands. sphinx.ext.napoleon reads the same style; this does it
without losing the number of any line, so that a warning names the line in the chapter where the slip is.
"""

import re
from collections.abc import Iterable, Iterator

from lowbit_docs.reading import Line

_LISTS = {"Args:": ":param {}: ", "Raises:": ":raises {}: ", "Attributes:": "    - ``{}``: "}
_TEXTS = {"Returns:": ":returns:", "Yields:": ":yields:"}
_ENTRY = re.compile(r" {4}(?P<name>\*{0,2}[\w.]+(?:, \*{0,2}[\w.]+)*): *(?P<text>.*)")


def with_fields(doc: Iterable[Line]) -> Iterator[Line]:
    """The docstring with each section as a field list.

    >>> doc = ["Lay codes in words.", "", "Args:", "    bits: 2, 3,", "        4 or 8.", "", "Source: QIGen §3."]
    >>> for line in with_fields(enumerate(doc, start=1)):
    ...     print(line)
    (1, 'Lay codes in words.')
    (2, '')
    (3, '')
    (4, ':param bits: 2, 3,')
    (5, '        4 or 8.')
    (6, '')
    (7, '')
    (7, ':Source: QIGen §3.')
    """
    section = ""
    for number, text in doc:
        if text in _LISTS or text in _TEXTS or text.startswith("Source: "):
            section = text.split(" ")[0]
            yield number, ""  # a field list is parted from the paragraph above it
            if section == "Attributes:":
                yield number, ":Attributes:"
            elif section == "Source:":
                yield number, f":{text}"
            elif section in _TEXTS:
                yield number, _TEXTS[section]
        else:
            if section == "Source:" and text:
                text = f"    {text}"
            elif text and not text.startswith(" "):
                section = ""
            yield number, _entry(section, text) if section in _LISTS else text


def _entry(section: str, text: str) -> str:
    """One line of a section that is a list: ``name: what it is``, or the continuation of such a line."""
    if match := _ENTRY.fullmatch(text):
        name = match["name"].replace("*", r"\*").replace(", ", ",")  # a space would part a type from a name
        return _LISTS[section].format(name) + match["text"]
    return f"      {text.strip()}" if section == "Attributes:" and text else text
