"""Which fields of a cast are wrong, where no list has the mistake, and by what factor where all of them have one.

The fields are compared with those of each choice that the owner of the format allows; the choice with the fewest wrong
fields is taken as the intended one.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from lowbit.arrays import F64
from lowbit.errors import ArgumentError
from lowbit.tensor_formats.stored import Stored
from lowbit_conformance.defects.cast_fields import MOST_CHOICES, OPERATION, right_cast
from lowbit_conformance.defects.defect import Defect, arithmetical
from lowbit_conformance.defects.places import right_answer

SAID = 3
SAME = 2.0**-9
"""Relative difference allowed between the factors of numbers that were rounded to 16 bits."""


def wrong_fields(given: Stored, right: Stored) -> list[str]:
    """The names of fields whose numbers are wrong."""
    ours, theirs = (each.table.fields_of(each.by_name) for each in (given, right))
    return [
        row.name
        for row in right.table.fields
        if ours[row.name].shape != theirs[row.name].shape
        or (np.asarray(ours[row.name]) != np.asarray(theirs[row.name])).any()
    ]


def nearest_choice(failures: list[Any]) -> tuple[str, list[str]]:
    """The choice with the fewest wrong fields in all failures, and these fields.

    Raises:
        ValueError: every choice refuses the numbers of a failure.
    """
    found: list[tuple[int, str, list[str]]] = []
    for choice in tuple(failures[0].right.table.encode)[:MOST_CHOICES]:
        names: list[str] = []
        try:
            rights = rights_of(failures, choice)
        except ArgumentError:  # a scale that this choice cannot store
            continue
        for each, right in zip(failures, rights, strict=True):
            names += [name for name in wrong_fields(each.given, right) if name not in names]
        found.append((len(names), choice, names))
    _, choice, names = min(found, key=lambda each: each[0])
    return choice, names


def rights_of(failures: list[Any], choice: str) -> list[Stored]:
    return [right_cast(each.arguments[0], each.right.format, each.right.options, choice) for each in failures]


def of_field(given: Stored, right: Stored, name: str) -> tuple[F64, F64]:
    """The returned numbers of a field and the right ones, both flat."""
    ours, theirs = (np.asarray(each.table.fields_of(each.by_name)[name]) for each in (given, right))
    return ours.astype(np.float64).reshape(-1), theirs.astype(np.float64).reshape(-1)


def factor_of(pairs: list[tuple[F64, F64]]) -> float | None:
    """The factor by which all numbers are too large; None if there is no common factor."""
    ours, theirs = (np.concatenate(each) for each in zip(*pairs, strict=True))
    there = (theirs != 0) & np.isfinite(ours) & np.isfinite(theirs)
    if not there.any() or (ours[~there & np.isfinite(theirs)] != 0).any():
        return None
    factors = ours[there] / theirs[there]
    middle = float(np.median(factors))
    alike = np.abs(factors - middle) <= SAME * abs(middle)
    return middle if alike.all() and abs(middle - 1) > SAME else None


def said_of(name: str, pairs: list[tuple[F64, F64]]) -> str:
    """What a field contains in place of the right numbers."""
    factor = factor_of(pairs)
    if factor is not None:
        return f"all of {name} are {factor:.5g} times what is right"
    ours, theirs = (np.concatenate(each) for each in zip(*pairs, strict=True))
    places = np.flatnonzero((ours != theirs) & ~(np.isnan(ours) & np.isnan(theirs)))
    if not len(places):
        return f"{name} has other bits"
    each = [f"{ours[at]:.6g} where {theirs[at]:.6g} is right" for at in places[:SAID]]
    return f"{name} has {', '.join(each)}" + (f", and {len(places) - SAID} others" if len(places) > SAID else "")


def replayed(failures: list[Any], *given: Any, **choices: Any) -> Any:
    """The returned result; right results for other arguments."""
    for each in failures:
        if len(each.arguments) == len(given) and all(map(lambda a, b: a is b, each.arguments, given)):
            return each.given
    return right_answer(OPERATION, given, choices)


def of_wrong_fields(failures: list[Any], operation: str) -> Iterator[Defect]:
    """The fields that are wrong in all failures of a cast."""
    if operation != OPERATION or any(not isinstance(each.given, Stored) for each in failures):
        return
    formats = {each.right.format for each in failures}
    if len(formats) != 1 or any(each.given.format not in formats for each in failures):
        return
    choice, names = nearest_choice(failures)
    if not names:
        return
    rights = rights_of(failures, choice)
    said = [
        said_of(name, [of_field(each.given, right, name) for each, right in zip(failures, rights, strict=True)])
        for name in names
    ]
    all_names = [row.name for row in failures[0].right.table.fields]
    left = [name for name in all_names if name not in names]
    end = f"; {', '.join(left)} {'is' if len(left) == 1 else 'are'} right" if left else ""
    cause = f"Of the fields of a cast, {'; '.join(said)}{end}."
    yield arithmetical("cast-fields-wrong", cause, "", {operation: partial(replayed, failures)})
