"""A part of a long sweep for every run of the tests, and the whole of it for `nox -s conformance`."""

from collections.abc import Iterable
from typing import Any

import pytest


def thinned(values: Iterable[Any], every: int, *, rows: bool = False) -> list[Any]:
    """Parameters of a test, of which only each `every`-th is in the runs that leave out the marker ``whole``.

    The choice depends on the order of the values only, so it is the same on every machine.

    Args:
        values: the parameters.
        every: how many there are for each that is always run.
        rows: whether a value is a tuple for several names.
    """
    return [
        pytest.param(*(value if rows else (value,)), marks=() if place % every == 0 else pytest.mark.whole)
        for place, value in enumerate(values)
    ]
