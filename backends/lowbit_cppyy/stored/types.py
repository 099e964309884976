"""How arrays of any type are passed to C++: as bytes, with a number for the type."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from lowbit.arrays import U8, Array
from lowbit.numbers.floats import FLOATS

NAMES = ("float32", "float16", "bfloat16")
"""The names, in the order of ``Type`` in ``cpp/stored.h``."""
TYPES: Mapping[np.dtype[Any], int] = MappingProxyType({FLOATS[name].dtype: number for number, name in enumerate(NAMES)})
"""The numbers of the types of activations and results."""


def as_bytes(array: Array) -> U8:
    """The memory of an array, as cppyy takes it whatever its type is."""
    return array.reshape(-1).view(np.uint8)
