"""Declarations: the capabilities of a library or a program, read from JSON.

Nothing is guessed: an unknown key, a wrong type or an operation that the specification does not have is refused, with
one sentence that names the place. A misspelt limit would otherwise declare more than the author meant.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from lowbit.backend import Capabilities, Declaration, Range
from lowbit.contract.checks import check_choice, check_integer, spoken
from lowbit.contract.operation import Promise
from lowbit.contract.rounding import Arithmetic, Roundings, any_order, one_loop
from lowbit.errors import ArgumentError, FormatError, UnavailableError
from lowbit.operations import OPERATIONS
from lowbit.system.json_files import parsed

KEYS = ("name", "version", "operations", "concurrent", "alignment", "overread", "profiles", "details", "prepare")
ROUNDINGS: Mapping[str, Roundings] = {"any_order": any_order, "one_loop": one_loop}
MOST_NAME = 100


@dataclass(frozen=True)
class LinearRoundings:
    """Roundings that grow with rows and groups: ``rows * K + groups * G + constant``, rounded up.

    >>> LinearRoundings(rows=0.125, groups=2, constant=3)(64, 32)
    15
    """

    rows: float
    groups: float
    constant: float

    def __call__(self, rows: int, group_size: int) -> int:
        return math.ceil(self.rows * rows + self.groups * -(-rows // group_size) + self.constant)


@dataclass(frozen=True)
class Declared:
    """A declaration.

    Attributes:
        name: the name given by the author.
        capabilities: the capabilities that it claims.
        prepare: whether it prepares matrices. A program declares this; a library's exports show it.
    """

    name: str
    capabilities: Capabilities
    prepare: bool


def read_text(text: bytes, what: str) -> Declared:
    """The declaration in a JSON text.

    Raises:
        UnavailableError: it is not a JSON object, or has a repeated key.
        ArgumentError: see `read`.
    """
    try:
        document = parsed("its capabilities", text).values
    except FormatError as error:
        raise UnavailableError(what, f"in {error}", "correct them") from None
    return read(dict(document))


def read(document: object) -> Declared:
    """The declaration in a JSON object.

    Args:
        document: as returned by `json.loads`.

    Raises:
        ArgumentError: a part of it is not as ``lowbit.h`` specifies.
    """
    document = _object("the whole", document)
    _check_keys("keys", document, ("name", "operations"), KEYS)
    name = _text("name", document["name"])
    declared = _object("operations", document["operations"])
    operations = {operation: _declaration(operation, said) for operation, said in declared.items()}
    details = _object("details", document.get("details", {}))
    details = {key: _text(f"details.{key}", each) for key, each in details.items()}
    version = {"version": _text("version", document["version"])} if "version" in document else {}
    check_integer("alignment", document.get("alignment", 0), 0)
    capabilities = Capabilities(
        operations,
        _flag("concurrent", document.get("concurrent", False)),
        {"name": name} | version | details,
        document.get("alignment", 0),
        document.get("overread", 0),
        tuple(_text("profiles", profile) for profile in _list("profiles", document.get("profiles", []))),
    )
    return Declared(name, capabilities, _flag("prepare", document.get("prepare", False)))


def _declaration(operation: str, said: object) -> Declaration:
    check_choice("operation", operation, sorted(OPERATIONS))
    declared = _object(operation, said)
    _check_keys(f"keys of {operation}", declared, (), ("limits", "arithmetic"))
    limits: dict[str, tuple[object, ...] | Range] = {}
    for name, allowed in _object(f"limits of {operation}", declared.get("limits", {})).items():
        if isinstance(allowed, dict):
            _check_keys(f"keys of limit {name} of {operation}", allowed, (), ("multiple", "least", "most"))
            with _named(f"limit {name} of {operation}"):
                limits[name] = Range(**allowed)
            continue
        values = _list(f"limit {name} of {operation}", allowed)
        if not values or not all(isinstance(value, str | int | float) or value is None for value in values):
            raise ArgumentError(f"limit {name} of {operation}", values, "a list of numbers or texts")
        limits[name] = tuple(values)
    bounded = OPERATIONS[operation].promise is Promise.BOUNDED
    if bounded != ("arithmetic" in declared):
        given, allowed = ("missing", "there: it is bounded") if bounded else ("given", "absent: it is exact")
        raise ArgumentError(f"arithmetic of {operation}", given, allowed)
    return Declaration(limits, _arithmetic(operation, declared["arithmetic"]) if bounded else None)


def _arithmetic(operation: str, said: object) -> Arithmetic:
    declared = _object(f"arithmetic of {operation}", said)
    keys, more = ("form", "accumulator", "roundings"), ("weights", "promotion", "intermediate")
    _check_keys(f"keys of arithmetic of {operation}", declared, keys, (*keys, *more))
    choices = {name: declared[name] for name in more if name in declared}
    with _named(f"arithmetic of {operation}"):
        return Arithmetic(declared["form"], declared["accumulator"], _roundings(declared["roundings"]), **choices)


def _roundings(said: object) -> Roundings:
    if isinstance(said, str) and said in ROUNDINGS:
        return ROUNDINGS[said]
    parts = ("rows", "groups", "constant")
    if isinstance(said, dict) and set(said) == set(parts):
        numbers = [said[part] for part in parts]
        if all(type(number) in (int, float) and 0 <= number < 2**31 for number in numbers):
            return LinearRoundings(*numbers)
    allowed = f"{spoken(list(ROUNDINGS))}, or an object of numbers of at least 0, rows, groups and constant"
    raise ArgumentError("roundings", repr(said), allowed)


@contextmanager
def _named(place: str) -> Iterator[None]:
    """Add to errors raised inside where in the declaration the argument is."""
    try:
        yield
    except ArgumentError as error:
        raise ArgumentError(f"{error.argument} of {place}", error.given, error.allowed) from None


# **One check for each kind of JSON value.**


def _check_keys(argument: str, given: dict[str, Any], needed: tuple[str, ...], known: tuple[str, ...]) -> None:
    if missing := [key for key in needed if key not in given]:
        raise ArgumentError(argument, f"without {spoken(missing)}", f"{spoken(known)}")
    for key in given:
        check_choice(argument, key, known)


def _object(argument: str, given: object) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise ArgumentError(argument, repr(given), "an object")
    return given


def _list(argument: str, given: object) -> list[Any]:
    if not isinstance(given, list):
        raise ArgumentError(argument, repr(given), "a list")
    return given


def _text(argument: str, given: object) -> str:
    if not isinstance(given, str) or not given.isprintable() or not 0 < len(given) <= MOST_NAME:
        raise ArgumentError(argument, repr(given), f"a printable text of 1 to {MOST_NAME} characters")
    return given


def _flag(argument: str, given: object) -> bool:
    if not isinstance(given, bool):
        raise ArgumentError(argument, repr(given), "true or false")
    return given
