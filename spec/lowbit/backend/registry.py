"""The registry: how lowbit finds a backend.

A package makes its backend known by an entry point in the group ``lowbit.backends``; nothing in lowbit lists them. A
class that no package has registered yet is named as ``module:Class``.

**The default** is the first of `DEFAULT_ORDER` that can run on this machine. The output names a backend that was chosen
in this way.
"""

import os
import re
import sys
from contextlib import suppress
from difflib import get_close_matches
from importlib.machinery import PathFinder
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pkgutil import iter_modules
from typing import Any

from lowbit.backend.base import Backend
from lowbit.contract.checks import spoken
from lowbit.errors import ArgumentError, UnavailableError
from lowbit.system.entries import entries, loaded, single

ENTRY_POINTS = "lowbit.backends"
DEFAULT_ORDER = ("cppyy", "numpy", "reference")
"""The default is the first of these that can run here, from the fastest to the slowest."""
DIRECT = re.compile(r"[\w.]+:[\w.]+")


def names() -> list[str]:
    """The names of all installed backends, sorted; names of the form ``module:Class`` are never among them."""
    return sorted({entry.name for entry in entries(ENTRY_POINTS) if not DIRECT.fullmatch(entry.name)})


def check_name(name: str) -> None:
    """Refuse a name that no installed package offers and that is not of the form ``module:Class``."""
    if not isinstance(name, str):
        raise ArgumentError("backend", repr(name), "a name")
    if not DIRECT.fullmatch(name) and name not in names():
        nearest = _nearest(name, names())
        raise ArgumentError("backend", repr(name), f"{spoken(names())}, or module:Class{nearest}")


def check_exists(name: str) -> None:
    """Refuse what `check_name` refuses, and a ``module:Class`` whose package does not exist; runs no code of the
    package."""
    check_name(name)
    if DIRECT.fullmatch(name):
        _check_package(name)


def check_function(name: str) -> None:
    """Refuse a name not of the form ``module:function``, or whose package does not exist; runs no code of the
    package."""
    if not DIRECT.fullmatch(name):
        raise ArgumentError("function", repr(name), "module:function")
    _check_package(name)


def find(name: str) -> Backend:
    """The backend of this name, whether or not it can run here.

    A class that no package has registered yet is named as ``module:Class``, which is useful during development.

    Raises:
        ArgumentError: no installed package offers it, or there is no such module or class.
        UnavailableError: its package cannot be imported.
    """
    check_name(name)
    found = [entry for entry in entries(ENTRY_POINTS) if entry.name == name]
    if DIRECT.fullmatch(name):
        found = [_direct(name, "class")]
    entry = single(found, f"backend {name}")
    backend = loaded(entry, f"backend {name}", lambda made: made())
    if not isinstance(backend, Backend):
        reason = f"{entry.value} is not a lowbit.backend.Backend"
        raise UnavailableError(f"backend {name}", reason, "derive it from that class")
    return backend


def import_named(name: str) -> Any:
    """The object that ``module:name`` names; the current folder is searched last.

    Raises:
        ArgumentError: there is no such module or name.
        UnavailableError: the module fails while it is imported.
    """
    check_function(name)
    return loaded(_direct(name, "function"), f"function {name}")


def _direct(name: str, kind: str) -> EntryPoint:
    """The entry point of ``module:name``.

    Its module may be in the current folder. Nothing else is imported from there: modules of the standard library and of
    installed packages take precedence.
    """
    entry = EntryPoint(name, name, ENTRY_POINTS)
    _check_package(name)
    package = entry.module.partition(".")[0]
    if not _is_on_path(package) or _is_mere_folder(package):
        sys.path.append(os.getcwd())
    _check_exists(entry, kind)
    return entry


def _is_on_path(package: str) -> bool:
    """Whether a package is found without the current folder."""
    return package in sys.modules or (package != "" and find_spec(package) is not None)


def _is_mere_folder(package: str) -> bool:
    """Whether a package is a folder without an ``__init__.py``: Python prefers any module of that name to it."""
    found = None if package in sys.modules else find_spec(package)
    return found is not None and found.origin is None


def _check_package(name: str) -> None:
    """Refuse a ``module:name`` if not even the first part of the module exists."""
    package = name.partition(":")[0].partition(".")[0]
    if not _is_on_path(package) and (package == "" or PathFinder.find_spec(package, [os.getcwd()]) is None):
        raise _no_module(package, name.partition(":")[0])


def _no_module(name: str, module: str) -> ArgumentError:
    """The error for a module that does not exist, with the nearest name.

    Args:
        name: of the module that is missing.
        module: the module to import: the same, or one inside it.
    """
    parent = sys.modules.get(name.rpartition(".")[0])
    siblings = [each.name for each in iter_modules(getattr(parent, "__path__", None))]
    siblings += [] if parent else [each.name for each in iter_modules([os.getcwd()])]
    nearest = _nearest(name.rpartition(".")[2], siblings) or _nearest(module, siblings)
    sentence = f"there is no module {name!r} in this folder or on Python's path{nearest}"
    return ArgumentError("module", name, "a module that can be imported", sentence)


def _check_exists(entry: EntryPoint, kind: str) -> None:
    """Refuse a module or class that does not exist, as opposed to one that fails during import."""
    module, what = entry.module, f"{'backend' if kind == 'class' else kind} {entry.value}"
    try:
        imported = loaded(EntryPoint(entry.name, module, entry.group), what)
    except UnavailableError as error:
        missing = error.__cause__
        if not isinstance(missing, ModuleNotFoundError) or missing.name is None:
            raise UnavailableError(what, error.reason, "mend the module") from missing
        if f"{module}.".startswith(f"{missing.name}."):
            raise _no_module(missing.name, module) from None
        reason = f"{module} imports {missing.name}, which is not installed or misspelt"
        raise UnavailableError(what, reason, f"install {missing.name}, or mend the import") from missing
    there: Any = imported
    for part in entry.attr.split("."):
        if not hasattr(there, part):
            nearest = _nearest(part, [each for each in dir(there) if not each.startswith("_")])
            sentence = f"{module} has no {kind} {part!r}{nearest}"
            raise ArgumentError(kind, part, f"a {kind} of {module}", sentence)
        there = getattr(there, part)


def _nearest(name: str, known: list[str]) -> str:
    """The most similar known name, for the end of a message; empty if there is none."""
    found = get_close_matches(name, known, 1)
    return f"; the nearest name is {found[0]}" if found else ""


def load(name: str | None = None) -> Backend:
    """The backend of this name, ready to run; without a name the default, the first usable one of `DEFAULT_ORDER`.

    >>> load("reference").name
    'reference'
    >>> load().name in DEFAULT_ORDER
    True
    >>> load("abacus")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    lowbit.errors.ArgumentError: backend is 'abacus'; allowed: ...

    Raises:
        ArgumentError: no installed package offers it.
        UnavailableError: it cannot run here; the message says why and what to do.
    """
    if name is None:
        return _default()
    backend = find(name)
    state = backend.availability()
    if not state.usable:
        raise UnavailableError(f"backend {name}", state.reason, state.remedy)
    return backend


def _default() -> Backend:
    *others, last = DEFAULT_ORDER
    for name in others:
        with suppress(ArgumentError, UnavailableError):
            return load(name)
    return load(last)  # its error says why, if it cannot run either
