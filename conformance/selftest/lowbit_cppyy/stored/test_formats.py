"""Formats as parts, and parts as streams: both say the numbers of the format's table, to the bit."""

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from stored_runs import some_stored

from lowbit.arrays import F64, U32, Array
from lowbit_cppyy.layout.interleaving import fields
from lowbit_cppyy.layout.panels import row_elements
from lowbit_cppyy.stored.formats import PARTS
from lowbit_cppyy.stored.layout import StoredLayout, inner_rows, layout_of
from lowbit_cppyy.stored.parts import UNIT, Parts


def numbers_of(parts: Parts) -> F64:
    """The weights by the formula of `lowbit_cppyy.stored.parts`, exactly."""
    structure, values = parts.structure, parts.codes.astype(np.float64)
    if structure.is_floats:
        return parts.codes.view(np.dtype(getattr(ml_dtypes, structure.values, structure.values))).astype(np.float64)
    if structure.values == "signed":
        values -= 128
    if parts.table is not None:
        values = parts.table.astype(np.float64)[parts.codes]
    group = np.repeat(np.arange(len(parts.lengths)), parts.lengths)
    run = np.arange(parts.rows) // (structure.run or 1)
    scales = np.asarray(parts.scales, np.float64)
    if structure.scale == "exponent":
        scales = np.exp2(scales - 127)
    factor = scales[group] * (1 if parts.inner is None else parts.inner[run].astype(np.float64))
    found = factor * values
    if structure.offset == "center":
        found -= factor * parts.center
    elif structure.offset == "number":
        found += np.asarray(parts.offsets, np.float64)[group]
    elif structure.offset == "zero":
        found -= scales[group] * np.asarray(parts.offsets, np.float64)[group]
    elif structure.offset == "minimum":
        found -= np.asarray(parts.offset_scales, np.float64)[group] * np.asarray(parts.offsets, np.float64)[run]
    if parts.order is not None:
        found[parts.order] = found.copy()
    return found


@pytest.mark.parametrize("name", PARTS)
def test_parts_are_the_numbers_of_the_table(name: str) -> None:
    """Codes, scales, integers of runs and offsets give each weight exactly."""
    weights = some_stored(name)
    np.testing.assert_array_equal(numbers_of(PARTS[name](weights)), weights.values)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("name", ["gptq-v1", "gptq-v1-wrapped", "gptq-v2"])
def test_every_width_of_gptq(name: str, bits: int) -> None:
    """Zeros up to 2^b, groups that do not divide K, and rows in any order."""
    weights = some_stored(name, 192, 64, bits=bits, group_size=80)
    parts = PARTS[name](weights)
    np.testing.assert_array_equal(numbers_of(parts), weights.values)
    assert sum(parts.lengths) == 192


@pytest.mark.parametrize(
    ("name", "bits"), [("hqq-axis1", 1), ("hqq-axis1", 2), ("hqq-axis1", 8), ("hqq-axis1-3bit", 3)]
)
def test_groups_of_hqq_may_cross_rows(name: str, bits: int) -> None:
    """A group of 80 ends in the middle of a row of 96; what is left in common are groups of 16."""
    weights = some_stored(name, 96, 80, **({} if bits == 3 else {"bits": bits}), group_size=80)
    parts = PARTS[name](weights)
    np.testing.assert_array_equal(numbers_of(parts), weights.values)
    assert parts.lengths == [16] * 6


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("name", ["ct-pack-asym", "ct-pack-asym-f16"])
def test_every_width_with_zeros(name: str, bits: int) -> None:
    """Zeros end to end along N, and a last group that is shorter."""
    weights = some_stored(name, 96, 45, bits=bits, group_size=64)
    np.testing.assert_array_equal(numbers_of(PARTS[name](weights)), weights.values)


def test_exponents_that_are_no_normal_float_become_scales() -> None:
    """A block of MXFP4 with the least exponent, 2^-127."""
    weights = some_stored("gguf-mxfp4")
    blocks = weights.tensors[0].reshape(77, -1, 17).copy()
    blocks[3, 1, 0] = 0
    small = type(weights)(weights.format, 256, 77, (blocks.reshape(77, -1),))
    parts = PARTS["gguf-mxfp4"](small)
    assert (PARTS["gguf-mxfp4"](weights).structure.scale, parts.structure.scale) == ("exponent", "float32")
    np.testing.assert_array_equal(numbers_of(parts), small.values)


class Inverse:
    """Reads back the stream of a matrix whose groups are alike, from the docstring of `lowbit_cppyy.stored.layout`."""

    def __init__(self, layout: StoredLayout, stream: U32) -> None:
        self._layout, self._structure, self._units = layout, layout.structure, layout.units[0]
        self._groups = stream.reshape(layout.panels, len(layout.lengths), -1)

    def codes(self) -> Array:
        """K × N."""
        bits, columns = self._structure.bits, self._layout.columns
        if self._structure.values in ("float16", "float32"):
            patterns = self._rows(self._body(), 0, UNIT, np.dtype(f"u{bits // 8}"))
            return patterns.reshape(-1, columns)[: self._layout.lengths[0]]
        words = self._rows(self._body(), 0, bits, np.dtype(np.uint32)).reshape(-1, bits, columns)
        if self._structure.values == "bfloat16":
            both = np.stack([words, words >> np.uint32(16)], axis=2).astype(np.uint16)
            return both.reshape(-1, columns)[: self._layout.lengths[0]]
        codes = np.zeros((len(words), UNIT, columns), np.uint8)
        for code in range(UNIT):
            for field in fields(bits, code):
                own = words[:, field.word] >> np.uint32(field.position) & np.uint32((1 << field.width) - 1)
                codes[:, code] |= own.astype(np.uint8) << np.uint8(field.first)
        grouped = codes.reshape(len(self._layout.lengths), -1, columns)
        return grouped[:, : self._layout.lengths[0]].reshape(-1, columns)

    def rest(self) -> Iterator[Array]:
        """Integers of runs, minima, scales and offsets, as they are stored."""
        structure, columns = self._structure, self._layout.columns
        end = structure.bits * self._layout.panel
        for _ in range(inner_rows(structure) * structure.run // UNIT):
            runs = UNIT // structure.run
            yield self._rows(self._body(), end, runs, np.dtype(np.uint8)).reshape(-1, columns)
            end += runs * row_elements(self._layout.panel, "uint8")
        if structure.scale == "one":
            return
        tail, end = self._groups[..., self._units * self._layout.unit_elements :], 0
        scale = np.dtype(np.uint8 if structure.scale == "exponent" else structure.scale)
        second = np.dtype(np.uint8) if structure.offset == "zero" else scale
        for dtype in (scale, second)[: 1 + (structure.offset not in ("none", "center"))]:
            yield self._rows(tail, end, 1, dtype).reshape(-1, columns)
            end += row_elements(self._layout.panel, dtype)

    def _body(self) -> U32:
        """Panels × groups × units × elements."""
        units = self._groups[..., : self._units * self._layout.unit_elements]
        return units.reshape(*self._groups.shape[:2], self._units, -1)

    def _rows(self, part: U32, start: int, rows: int, dtype: np.dtype[Any]) -> Array:
        """Rows of N numbers, … × rows × N, from panels × … × elements."""
        each = row_elements(self._layout.panel, dtype)
        own = np.ascontiguousarray(part[..., start : start + rows * each])
        numbers = own.view(dtype).reshape(*part.shape[:-1], rows, -1)[..., : self._layout.panel]
        whole = np.moveaxis(numbers, 0, -2)
        return whole.reshape(*whole.shape[:-2], -1)[..., : self._layout.columns]


BYTES_FOR_BITS = {"q2_k": 1 / 2, "q3_k": 1 / 8, "q4_k": 1 / 8, "q5_k": 1 / 8, "iq4_xs": 1 / 16}
"""Bits that a weight takes more than in the file, since the integers of a run take a byte each."""
BYTES_FOR_BITS |= dict.fromkeys(("ct-pack", "ct-int"), 16 / 64)
"""So do bfloat16 scales, of groups of 64, which take four bytes."""
BYTES_FOR_BITS |= {"ct-pack-asym": 44 / 64, "ct-pack-asym-f16": 44 / 64, "hqq-axis1": 32 / 64}
"""And so do offsets, where the file has zeros of 4 or 16 bits."""
PADDED = "awq", "hqq-axis1-3bit"
"""Formats whose arrays hold more than the codes."""


@pytest.mark.parametrize("name", [name for name in PARTS if not name.startswith("gptq")])
@pytest.mark.parametrize("panel", [64, 128])
def test_a_stream_is_read_back(name: str, panel: int) -> None:
    """What was laid out is what is there, and the rest is zeros; no byte is spent but on integers and padding."""
    parts = PARTS[name](some_stored(name, 256, 77))
    layout = layout_of(parts, panel)
    inverse = Inverse(layout, layout.apply(parts))
    np.testing.assert_array_equal(inverse.codes(), parts.codes)
    given = [*layout._integers(parts), *layout._numbers(parts)]
    for read, written in zip(inverse.rest(), given, strict=True):
        np.testing.assert_array_equal(read, written)
    bits = 8 * layout.nbytes / (256 * layout.panels * panel)
    stored = 8 * sum(each.nbytes for each in some_stored(name, 256, 80).tensors) / (256 * 80)
    assert bits == stored + BYTES_FOR_BITS.get(name, 0) or name.startswith(PADDED)
