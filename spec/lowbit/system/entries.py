"""Entry points: backends and commands of other packages, each isolated from the failure of others.

A package adds backends and commands by entry points (`lowbit.backends`, `lowbit.commands`). It is imported only when
one of them is asked for by name, and any exception of its import, `SystemExit` included, becomes an error that names
the entry.

To find the entries, the lists of all installed packages are read, including unrelated ones. Python's own reader opens
any file with the name of a list, and waits for ever if that is a pipe. Here a list is read only if it is a regular file
of bounded size.
"""

import os
import re
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, EntryPoint, distributions
from pathlib import Path
from typing import Any

from lowbit.errors import UnavailableError, on_one_line, words_of
from lowbit.text import quoted

MOST_LIST_BYTES = 2**20
ABSENT = (FileNotFoundError, NotADirectoryError, KeyError)  # the last one is for archives


@dataclass(frozen=True)
class Found:
    """The contents of the lists of the installed packages.

    Attributes:
        entries: of one group, sorted by name.
        broken: one sentence for each package whose list cannot be read; it has no entries.
    """

    entries: list[EntryPoint]
    broken: list[str]


def entries(group: str) -> list[EntryPoint]:
    """All entries of a group such as ``lowbit.backends``, sorted by name; a package whose list is broken has none."""
    return read(group).entries


def read(group: str) -> Found:
    """The same, with the lists that could not be read."""
    found: set[EntryPoint] = set()
    broken = []
    for name, distribution in _first_of_each_name():
        try:
            found |= {entry for entry in _Checked(distribution).entry_points if entry.group == group}
        except Exception as error:
            reason = f"its entry_points.txt {_words(error)}"
            broken.append(f"package {quoted(name)} is skipped: {reason}; repair or uninstall it")
    return Found(sorted(found, key=lambda entry: (entry.name, entry.value)), broken)


class _Checked(Distribution):
    """A distribution whose files are checked before they are read."""

    def __init__(self, distribution: Distribution) -> None:
        self._distribution = distribution

    def read_text(self, filename: str) -> str | None:
        """The text of a file next to the metadata; None if there is none."""
        folder = getattr(self._distribution, "_path", None)
        if folder is None:  # found by a finder other than Python's own
            return self._distribution.read_text(filename)
        try:
            return _text(folder / filename)
        except ABSENT:
            return None

    def locate_file(self, path: Any) -> Any:
        return self._distribution.locate_file(path)


def _text(path: Any) -> str:
    """The text of a regular file, or of a file in an archive on the path of imports.

    Raises:
        OSError: it cannot be opened.
        ValueError: it is not a regular file, too large, or not UTF-8.
    """
    if isinstance(path, Path):
        _check_regular(os.stat(path))
        with open(path, "rb", opener=_without_waiting) as stream:
            _check_regular(os.fstat(stream.fileno()))  # again, since it may have been replaced
            found = stream.read(MOST_LIST_BYTES + 1)
    else:
        with path.open("rb") as stream:
            found = stream.read(MOST_LIST_BYTES + 1)
    if len(found) > MOST_LIST_BYTES:
        raise ValueError(f"has more than {MOST_LIST_BYTES} bytes")
    return str(found, "utf-8")


def _check_regular(status: os.stat_result) -> None:
    """Refuse pipes and devices, which may block a reader or never end.

    Raises:
        ValueError: it is not a regular file.
    """
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("is not a regular file")


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def _words(error: Exception) -> str:
    """What is wrong with a list, as the second part of a sentence."""
    if isinstance(error, UnicodeDecodeError):
        return "is not UTF-8 text"
    if isinstance(error, OSError):
        return f"cannot be read: {error.strerror or on_one_line(error)}"
    return str(error) if type(error) is ValueError else f"is no list of entries: {on_one_line(words_of(error))}"


def _first_of_each_name() -> Iterator[tuple[str, Distribution]]:
    """The installed distributions; of several with one name, the first on the path, which Python uses."""
    seen = set()
    places = [place for place in sys.path if os.path.isdir(place or ".") or os.path.isfile(place)]  # no pipes
    for distribution in distributions(path=places):
        name = _name(distribution)
        if name not in seen:
            seen.add(name)
            yield name, distribution


def _name(distribution: Distribution) -> str:
    """Its normalised name, from the name of its folder, since the metadata may be as broken as the list."""
    folder = getattr(distribution, "_path", None)
    if folder is None:
        name = str(distribution.name)
    else:
        name = os.path.splitext(os.path.basename(str(folder).rstrip("/")))[0].partition("-")[0]
    return re.sub("[-_.]+", "-", name).lower()


def single(found: Sequence[EntryPoint], what: str) -> EntryPoint:
    """The one entry of `found`, which is not empty; `what` is for the error, as in `loaded`.

    Raises:
        UnavailableError: there are several.
    """
    if len(found) > 1:
        reason = f"several packages offer it: {', '.join(entry.value for entry in found)}"
        raise UnavailableError(what, reason, "uninstall all of them but one")
    return found[0]


def loaded(entry: EntryPoint, what: str, use: Callable[[Any], object] = lambda found: found) -> object:
    """The imported object of an entry.

    Args:
        entry: from `entries`.
        what: for the error, such as ``backend numpy``.
        use: a function that is applied to it; its errors are reported in the same way.

    Raises:
        UnavailableError: it cannot be imported or used, for any reason.
    """
    try:
        return use(entry.load())
    except (KeyboardInterrupt, MemoryError):
        raise
    except BaseException as error:  # a module that exits, as scripts do, ends only its own command
        reason = f"{entry.value} fails with {words_of(error)}"
        raise UnavailableError(what, reason, "repair or reinstall its package") from error
