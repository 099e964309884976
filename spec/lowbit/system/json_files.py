"""JSON files of checkpoints and test vectors: read with limits, and field by field.

A JSON file is small compared with the weights that it describes, but it can harm a reader: a gigabyte of brackets,
nesting ten thousand levels deep, a number of a million digits, one key with two values. Such files are refused with a
one-line error, if possible before they are parsed. The result is an object whose fields are read by name and kind;
``null`` and an absent field are the same, as in the programs that write these files.

Source: RFC 8259.
"""

import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from lowbit.errors import ArgumentError, FormatError
from lowbit.text import MOST_QUOTED, quoted, shortened

Kind = TypeVar("Kind", bool, int, float, str, dict[str, Any], list[Any])

MOST_CONFIG_BYTES = 2**20
MOST_VALUES = 2**23
"""The most values of one text; each takes about a hundred bytes of memory, however short it is. Tokenizers have two
million."""
LARGEST_INTEGER = 2**53
"""JSON readers disagree on larger integers."""

KINDS: dict[type, str] = {
    bool: "a boolean",
    int: f"an integer up to {LARGEST_INTEGER}",
    float: "a number",
    str: "a string",
    dict: "an object",
    list: "a list",
}


@dataclass(frozen=True, eq=False)
class Fields:
    """The object that a JSON file holds.

    Attributes:
        file: its name, for messages.
        values: its fields by name.
    """

    file: str
    values: Mapping[str, Any]

    def value(self, key: str, kind: type[Kind], default: Kind | None = None) -> Kind:
        """A field of the expected kind; an integer is accepted for a float.

        Raises:
            FormatError: it is absent and has no default, or it is of another kind.
        """
        value = self.values.get(key)
        value = default if value is None else value
        if value is None:
            raise FormatError(self.file, key, "missing", KINDS[kind])
        if kind is float and type(value) is int and abs(value) <= LARGEST_INTEGER:
            return kind(value)
        if type(value) is not kind or (type(value) is int and abs(value) > LARGEST_INTEGER):
            raise FormatError(self.file, key, described(value), KINDS[kind])
        return value

    def optional(self, key: str, kind: type[Kind]) -> Kind | None:
        """The same, or None if it is absent or null."""
        return None if self.values.get(key) is None else self.value(key, kind)


def read_fields(path: Path, most_bytes: int = MOST_CONFIG_BYTES) -> Fields:
    """The object in a JSON file.

    Raises:
        ArgumentError: there is no readable file at `path`.
        FormatError: it is too large, not JSON, or not an object.
    """
    return parsed(path.name, read_bytes(path, most_bytes))


def read_bytes(path: Path, most_bytes: int, argument: str = "model") -> bytes:
    """All of a plain file of at most `most_bytes`; `argument` named the directory, for messages.

    Raises:
        ArgumentError: there is no readable file at `path`.
        FormatError: it is larger than `most_bytes`.
    """
    if not path.is_file():  # opening a pipe would wait for a writer
        raise ArgumentError(argument, quoted(str(path.parent)), f"a directory that holds {path.name}")
    try:
        with path.open("rb") as stream:
            data = stream.read(1 + min(most_bytes, os.fstat(stream.fileno()).st_size))  # allocated at once
    except OSError as error:
        raise ArgumentError(argument, f"{quoted(str(path))} ({error.strerror})", "a file that can be read") from error
    if len(data) > most_bytes:
        raise FormatError(path.name, "size", f"more than {most_bytes} bytes", f"at most {most_bytes} bytes")
    return data


def parsed(file: str, data: bytes) -> Fields:
    """The object that these bytes spell.

    >>> parsed("config.json", b'{"layers": 2, "window": null}').optional("window", int)

    Raises:
        FormatError: not JSON in UTF-8, too many values, a repeated key in an object, NaN or infinity, or not an object.
    """
    values = sum(data.count(mark) for mark in (b",", b"[", b"{"))
    if values > MOST_VALUES:
        raise FormatError(file, "number of values", values, f"at most {MOST_VALUES}")

    def refuse(name: str) -> None:
        raise ValueError(f"the number {name}")

    try:
        found = json.loads(data.decode("utf-8"), object_pairs_hook=_distinct, parse_constant=refuse)
    except (ValueError, RecursionError) as error:  # including wrong UTF-8 and numbers of too many digits
        raise FormatError(file, "content", quoted(str(error)), "JSON in UTF-8") from error
    if not isinstance(found, dict):
        raise FormatError(file, "content", described(found), "an object")
    return Fields(file, found)


def described(value: object) -> str:
    """A value of JSON in a few words, however large it is.

    >>> described({"rope_type": "yarn"}), described("gelu"), described([1] * 1000)
    ("{'rope_type': 'yarn'}", "'gelu'", 'a list of 1000')
    """
    if isinstance(value, list | dict):
        if len(value) > 4:
            return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
        try:
            return shortened(repr(value), MOST_QUOTED)
        except (ValueError, RecursionError):
            return "a list or object that cannot be shown"
    if isinstance(value, int) and abs(value) > LARGEST_INTEGER:
        return f"an integer of {value.bit_length()} bits"
    return quoted(value) if isinstance(value, str) else str(value)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        twice = next(key for key, times in Counter(key for key, _ in pairs).items() if times > 1)
        raise ValueError(f"the key {quoted(twice)} is there twice")
    return result
