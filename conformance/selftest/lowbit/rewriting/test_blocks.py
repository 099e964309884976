"""Blocks of GGUF: what is packed decodes by the chapters and by the ``gguf`` package, and each type has its range."""

from dataclasses import replace

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

from lowbit.errors import ArgumentError
from lowbit.quantization.coded import CodedMatrix, runs
from lowbit.rewriting.layouts import LAYOUTS
from lowbit.rewriting.packers import coded_of, stored_of
from lowbit.tensor_formats.stored import FORMATS, stored

ROWS, COLUMNS = 128, 8


def coded(bits: int, size: int = 32, *, zero: int | None = None, seed: int = 0) -> CodedMatrix:
    """Random codes, scales and zeros; every code of the range appears."""
    rng = np.random.default_rng(seed)
    shape = (ROWS // size, COLUMNS)
    zeros = rng.integers(0, 2**bits, shape) if zero is None else np.full(shape, zero)
    scales = (rng.integers(1, 2**11, shape) / 2**12).astype(np.float16)
    codes = rng.integers(0, 2**bits, (ROWS, COLUMNS)).astype(np.uint8)
    return CodedMatrix(codes, scales, zeros.astype(np.float64), runs(ROWS, size), bits, size)


HELD = [
    ("q4_0", coded(4, zero=8), 4),
    ("q4_0", coded(4, zero=7), 4),
    ("q4_0", coded(3, zero=0), 4),
    ("q4_0", coded(2, 64), 4),
    ("q5_0", coded(4), 4),
    ("q5_0", coded(4, 64, zero=16), 4),
    ("q5_0", coded(3, 128, zero=7), 4),
    ("q8_0", coded(8, 64, zero=128), 8),
    ("q8_0", coded(8, zero=127), 8),
    ("q8_0", coded(4), 8),
    ("q4_1", replace(coded(4), offsets=-np.rint(64 * coded(4).scales.astype(np.float64)) / 8, has_minima=True), 4),
    ("q4_1", replace(coded(3), scales=np.full((4, COLUMNS), 0.25, np.float16)), 4),
]


@pytest.mark.parametrize(("name", "matrix", "bits"), HELD)
def test_the_way_there_and_back(name: str, matrix: CodedMatrix, bits: int) -> None:
    """Two other decoders give the numbers of the formula, and the way back gives them with codes of `bits`."""
    wide, offsets = (each.astype(np.float64)[matrix.g_idx] for each in (matrix.scales, matrix.offsets))
    expected = wide * matrix.codes + offsets if matrix.has_minima else wide * (matrix.codes - offsets)
    found = stored_of(matrix, name)
    np.testing.assert_array_equal(found.values, expected)
    by_package = quants.dequantize(found.tensors[0], GGMLQuantizationType[name.upper()])
    np.testing.assert_array_equal(by_package.T, expected.astype(np.float32))
    back = coded_of(found)
    np.testing.assert_array_equal(back.values, expected)
    assert (back.bits, back.group_size, back.has_minima) == (bits, 32, name == "q4_1")
    assert back.codes.max() < 2**bits


REFUSED = [
    ("q4_0", coded(4), "allowed: -8 to 7, which q4_0 holds"),
    ("q5_0", coded(8, zero=128), "allowed: -16 to 15, which q5_0 holds"),
    ("q8_0", coded(8), "allowed: -128 to 127, which q8_0 holds"),
    ("q4_1", coded(8, zero=128), "bits is 8; allowed: at most 4"),
    ("q4_1", coded(4), "minimum of a group"),
    ("q4_0", coded(4, 16, zero=8), "groups is 16 rows long; allowed: runs of rows, a multiple of 32 long"),
    ("q5_0", replace(coded(4), offsets=np.full((4, COLUMNS), 0.5)), "zero of a group is 0.5"),
    ("q5_0", replace(coded(4), g_idx=np.roll(runs(ROWS, 32), 1)), "groups is in act-order"),
    ("q8_0", replace(coded(4), scales=np.full((4, COLUMNS), 0.1, np.float32)), "that float16 holds exactly"),
]


@pytest.mark.parametrize(("name", "matrix", "message"), REFUSED)
def test_what_a_type_cannot_hold(name: str, matrix: CodedMatrix, message: str) -> None:
    """The message says what is allowed."""
    with pytest.raises(ArgumentError) as caught:
        stored_of(matrix, name)
    assert message in str(caught.value)


def test_groups_may_come_in_any_order_of_blocks() -> None:
    """What counts is that the rows of a block are of one group."""
    matrix = replace(coded(4), g_idx=runs(ROWS, 32)[::-1].copy())
    np.testing.assert_array_equal(stored_of(matrix, "q5_0").values, matrix.values)


def test_the_smallest_type_that_holds_a_matrix_is_used() -> None:
    """By the layout of GGUF."""
    layout = LAYOUTS["gguf"]
    for matrix, expected in (
        (coded(4, zero=8), "q4_0"),
        (coded(4), "q5_0"),
        (coded(4, zero=7), "q4_0"),
        (coded(8, zero=127), "q8_0"),
    ):
        assert layout.stored(matrix, symmetric=False).format == expected
    with pytest.raises(ArgumentError, match="which q8_0 holds"):
        layout.stored(coded(8), symmetric=False)


@pytest.mark.parametrize("name", ["q4_0", "q5_0", "q8_0", "q4_1"])
@pytest.mark.parametrize("seed", range(4))
def test_any_blocks_are_read(name: str, seed: int) -> None:
    """Random bytes with finite scales, some of them below 0 or 0: the values are those of the chapter."""
    rng = np.random.default_rng(seed)
    record = FORMATS[name].record
    blocks = np.frombuffer(rng.bytes(record.itemsize * 3 * COLUMNS), record).reshape(COLUMNS, 3).copy()
    blocks["d"] = rng.integers(-3, 4, blocks.shape) / 8
    if name == "q4_1":
        blocks["m"] = rng.integers(-99, 99, blocks.shape) / 64
    matrix = stored(name, 96, COLUMNS, {"blocks": blocks.view(np.uint8).reshape(COLUMNS, -1)})
    found = coded_of(matrix)
    np.testing.assert_array_equal(found.values, matrix.values)
    assert (found.codes.max() < 2**found.bits and (found.offsets >= 0).all()) or name == "q4_1"
