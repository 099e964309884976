"""Entry points: what other packages add to lowbit, of which a broken one breaks nothing else.

A package adds backends and commands by entry points (`lowbit.backend`, `lowbit.cli`). Nothing of it is imported before
it is asked for by name, and whatever its import raises, `SystemExit` included, becomes an error that names the entry.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.metadata import EntryPoint, distributions, entry_points
from typing import Any

from lowbit.errors import UnavailableError, words_of


def entries(group: str) -> list[EntryPoint]:
    """All entries of a group, sorted by name; a package whose list of entries cannot be read has none.

    Args:
        group: such as ``lowbit.backends``.
    """
    try:
        found = list(entry_points(group=group))
    except Exception:  # the list of one package; those of the others are read one by one
        found = [entry for entry in _one_by_one() if entry.group == group]
    return sorted(set(found), key=lambda entry: (entry.name, entry.value))


def _one_by_one() -> Iterator[EntryPoint]:
    for distribution in distributions():
        with suppress(Exception):
            yield from list(distribution.entry_points)


def loaded(entry: EntryPoint, what: str, use: Callable[[Any], object] = lambda found: found) -> object:
    """What an entry names, imported.

    Args:
        entry: from `entries`.
        what: for the error, such as ``backend numpy``.
        use: what is done with it first; its errors are the entry's too.

    Raises:
        UnavailableError: it cannot be imported or used, for whatever reason.
    """
    try:
        return use(entry.load())
    except (KeyboardInterrupt, MemoryError):
        raise
    except BaseException as error:  # a module that ends the process, as scripts do, ends only its own command
        reason = f"{entry.value} fails with {words_of(error)}"
        raise UnavailableError(what, reason, "repair or reinstall its package") from error
