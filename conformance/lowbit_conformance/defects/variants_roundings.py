"""What variants of several operations share: roundings, narrow formats and sizes."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from lowbit.arrays import Array
from lowbit_conformance.defects import (
    blocks,
)
from lowbit_conformance.defects.defect import Function
from lowbit_conformance.defects.narrow import FORMATS, Change

Variant = tuple[str, str, Function]
"""A name, a cause and the operation that makes the mistake."""
Variants = Iterator[Variant]
SIZES = tuple(2**power for power in range(3, 17))
SMALL = tuple(10.0**-power for power in range(5, 21))


def up(numbers: Array) -> Array:
    """Ties upwards."""
    answer: Array = np.floor(numbers + numbers.dtype.type(0.5))
    return answer


ROUNDINGS: tuple[tuple[str, str, Callable[[Any], Any]], ...] = (
    ("ties-up", "ties round upwards instead of to even", up),
    ("ties-away", "ties round away from zero instead of to even", blocks.away),
    ("truncated", "the fraction is cut", np.trunc),
    ("rounded-down", "it is rounded down", np.floor),
    ("rounded-up", "it is rounded up", np.ceil),
)


def narrowed() -> Iterator[tuple[str, str, Change]]:
    """Each narrow format with each of its roundings."""
    for format, (words, ways) in FORMATS.items():
        for way in ways:
            yield format, words, way


def of_float32(way: Change) -> Change:
    """For numbers that a reference computes in float64."""
    return lambda numbers: way(numbers.astype(np.float32))
