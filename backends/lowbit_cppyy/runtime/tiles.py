"""The tiles of the default kernels for several rows: rows of x by registers of columns.

`lowbit_cppyy.tuning.choices` has the reasons.
"""

from collections.abc import Mapping
from types import MappingProxyType

from lowbit_cppyy.recipe import Purpose
from lowbit_cppyy.runtime.vendor import kind

Tiles = Mapping[tuple[Purpose, int], tuple[int, int]]

TILES: Tiles = MappingProxyType(
    {
        ("rows", 32): (4, 4),
        ("many rows", 32): (16, 1),
        ("integer rows", 32): (4, 2),
        ("rows", 16): (4, 2),
        ("many rows", 16): (8, 1),
        ("integer rows", 16): (4, 2),
    }
)
"""By purpose and the number of vector registers."""

ICE_LAKE: Tiles = MappingProxyType({("many rows", 32): (8, 2)})
"""What differs on an Ice Lake."""


def tile_of(purpose: Purpose, registers: int) -> tuple[int, int]:
    """The tile for a purpose and a number of vector registers on this processor."""
    key = purpose, registers
    return ICE_LAKE[key] if kind() == "icelake" and key in ICE_LAKE else TILES[key]
