"""Mistakes with scales that are stored in 8 bits with scales of their own, and with blocks that end in the matrix."""

from functools import partial

import numpy as np

from lowbit.tensor_formats.stored import Stored
from lowbit.tensor_formats.table import Field, Terms
from lowbit_conformance.defects.stored_codes import reread, run_of
from lowbit_conformance.defects.stored_parts import SQUARE, Named

SIZES = (16, 32, 64, 128, 256, 512, 1024)


def second_level(weights: Stored) -> Field:
    """The field with a scale for many scales.

    Raises:
        ValueError: the format has none.
    """
    rows = [row for row in weights.table.fields if row.role == "scale" and row.shape]
    nested = next((row for row in rows if str(row.shape[0]).count("//") > 1), None)
    if nested is None:
        raise ValueError("scales have no second level")
    return nested


def of_nested_size(size: int, wraps: bool, weights: Stored) -> Terms:
    """Scales of the second level for another number of blocks; past the end, the last or the first ones.

    Raises:
        ValueError: scales have no second level.
    """
    nested = second_level(weights)
    own = weights.by_name[nested.name]
    blocks = np.arange(weights.rows * weights.columns) // run_of(weights)
    taken = blocks // size % len(own) if wraps else np.minimum(blocks // size, len(own) - 1)
    places = taken.reshape(weights.columns, weights.rows).T
    values = np.zeros(places.shape)
    for place in np.unique(taken):
        of_one = reread(weights, {nested.name: np.full_like(own, own[place])})
        values = np.where(places == place, of_one.values, values)
    return Terms(values)


def offset_scaled(weights: Stored) -> Terms:
    """The offset of scales is added before they are multiplied by second-level scales.

    Raises:
        ValueError: the format has no such offset.
    """
    second_level(weights)
    fields = weights.by_name
    if not {"nested_offset", "nested_quant_map"} <= set(fields):
        raise ValueError("scales have no offset")
    shifted = fields["nested_quant_map"] + fields["nested_offset"]
    return reread(weights, {"nested_quant_map": shifted, "nested_offset": np.zeros_like(fields["nested_offset"])})


def across_rounded_down(least: int, weights: Stored) -> Terms:
    """Only whole square blocks of a line are counted, at least `least`, and lines have this number of scales.

    Raises:
        ValueError: blocks are no squares.
    """
    square = next((row for row in weights.table.fields if row.shape == (f"N//{SQUARE}", f"K//{SQUARE}")), None)
    if square is None:
        raise ValueError("blocks are no squares")
    own = weights.by_name[square.name]
    across = max(least, weights.rows // SQUARE)
    lines, places = np.indices(own.shape)
    read = own.reshape(-1)[(lines * across + places) % own.size]
    there = np.arange(weights.rows)[:, np.newaxis] < across * SQUARE
    return Terms(reread(weights, {square.name: read}).values * there)


def of_nested() -> Named:
    """All kinds of this module."""
    for size in SIZES:
        for wraps in (False, True):
            cause = f"{size} blocks are taken to have one scale of the second level."
            yield f"stored-scale-of-{size}-nested-blocks", cause, partial(of_nested_size, size, wraps)
    cause = "The offset of scales is added before the scale of the second level multiplies, and not after."
    yield "stored-offset-scaled", cause, offset_scaled
    cause = (
        f"The number of blocks of {SQUARE} rows is rounded down: the last is left out, and lines of scales are shorter."
    )
    for least in (1, 0):
        yield "stored-blocks-rounded-down", cause, partial(across_rounded_down, least)
