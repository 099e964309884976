"""Formats as parts, and parts as streams: both say the numbers of the format's table, to the bit."""

import numpy as np
import pytest
from stored_runs import some_stored

from lowbit.arrays import F64
from lowbit_cppyy.stored.formats import PARTS
from lowbit_cppyy.stored.layout import layout_of
from lowbit_cppyy.stored.parts import Parts


def numbers_of(parts: Parts) -> F64:
    """The weights by the formula of `lowbit_cppyy.stored.parts`, exactly."""
    structure, values = parts.structure, parts.codes.astype(np.float64)
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


def test_exponents_that_are_no_normal_float_become_scales() -> None:
    """A block of MXFP4 with the least exponent, 2^-127."""
    weights = some_stored("gguf-mxfp4")
    blocks = weights.tensors[0].reshape(77, -1, 17).copy()
    blocks[3, 1, 0] = 0
    small = type(weights)(weights.format, 256, 77, (blocks.reshape(77, -1),))
    parts = PARTS["gguf-mxfp4"](small)
    assert (PARTS["gguf-mxfp4"](weights).structure.scale, parts.structure.scale) == ("exponent", "float32")
    np.testing.assert_array_equal(numbers_of(parts), small.values)


BYTES_FOR_BITS = {"q2_k": 1 / 2, "q3_k": 1 / 8, "q4_k": 1 / 8, "q5_k": 1 / 8, "iq4_xs": 1 / 16}
"""Bits that a weight takes more than in the file, since the integers of a run take a byte each."""


@pytest.mark.parametrize("name", [name for name in PARTS if not name.startswith("gptq")])
@pytest.mark.parametrize("panel", [64, 128])
def test_a_stream_is_read_back(name: str, panel: int) -> None:
    """What was laid out is what is there, and the rest is zeros; no byte is spent but on integers and padding."""
    parts = PARTS[name](some_stored(name, 256, 77))
    layout = layout_of(parts, panel)
    codes, rest = layout.invert(layout.apply(parts))
    np.testing.assert_array_equal(codes, parts.codes)
    given = list(layout._integers(parts)) + list(layout._numbers(parts))
    assert len(rest) == len(given)
    for read, written in zip(rest, given, strict=True):
        np.testing.assert_array_equal(read, written)
    bits = 8 * layout.nbytes / (256 * layout.panels * panel)
    stored = 8 * sum(each.nbytes for each in some_stored(name, 256, 80).tensors) / (256 * 80)
    assert bits == stored + BYTES_FOR_BITS.get(name, 0) or name.startswith("awq")  # whose arrays are padded
