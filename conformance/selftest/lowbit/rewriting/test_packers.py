"""Packers: what is packed decodes by the chapters to the same numbers, and what a format cannot hold is refused."""

from dataclasses import replace

import numpy as np
import pytest

from lowbit.arrays import Array
from lowbit.errors import ArgumentError
from lowbit.numbers.floats import FLOATS
from lowbit.quantization.affine import quantize
from lowbit.quantization.coded import CodedMatrix, runs
from lowbit.rewriting import packers
from lowbit.rewriting.packers import PACKERS, coded_of, stored_of
from lowbit.tensor_formats.stored import FORMATS, Stored, stored

ROWS, COLUMNS, SIZE = 64, 32, 16
BF16 = FLOATS["bfloat16"].dtype


def coded(bits: int = 4, *, seed: int = 0, symmetric: bool = False) -> CodedMatrix:
    """Every code in its place counts: codes, scales and zeros are all random."""
    rng = np.random.default_rng(seed)
    shape = (ROWS // SIZE, COLUMNS)
    zeros = rng.integers(1, 2**bits, shape) if not symmetric else np.full(shape, 2 ** (bits - 1))
    scales = (rng.integers(1, 128, shape) / 256).astype(np.float16)
    codes = rng.integers(0, 2**bits, (ROWS, COLUMNS)).astype(np.uint8)
    return CodedMatrix(codes, scales, zeros.astype(np.float64), runs(ROWS, SIZE), bits, SIZE)


def bits_of(name: str) -> tuple[int, ...]:
    if name.startswith("awq"):
        return (4,)
    if name.startswith("gptq") and name.endswith("bf16"):
        return (4, 8)
    return (3,) if name.endswith("3bit") else (2, 4, 8) if name.startswith("hqq") else (2, 3, 4, 8)


WRITTEN = [name for name in packers.WRITTEN if FORMATS[name].block is None]
CASES = [(name, bits) for name in WRITTEN for bits in bits_of(name)]


@pytest.mark.parametrize(("name", "bits"), CASES)
def test_the_way_there_and_back(name: str, bits: int) -> None:
    """The numbers are those of the chapter's own `decode`, to the bit, and codes, scales and zeros come back."""
    matrix = coded(bits, symmetric=name in ("ct-pack", "ct-pack-f16"))
    found = stored_of(matrix, name)
    wide = matrix.scales.astype(np.float64)[matrix.g_idx]
    expected = wide * (matrix.codes.astype(np.float64) - matrix.offsets[matrix.g_idx])
    np.testing.assert_array_equal(found.values, expected)
    back = coded_of(found)
    for part in ("codes", "scales", "offsets", "g_idx"):
        np.testing.assert_array_equal(getattr(back, part), getattr(matrix, part))
    assert (back.bits, back.group_size) == (bits, SIZE)


@pytest.mark.parametrize("name", ["awq-gemv", "ct-int", "ct-int-f16"])
def test_formats_that_are_only_read(name: str) -> None:
    """They are decoded, and writing them is refused."""
    rng, size = np.random.default_rng(1), 32
    if name == "awq-gemv":
        words = rng.integers(-(2**31), 2**31, (COLUMNS, ROWS // 8)).astype(np.int32)
        zeros = rng.integers(-(2**31), 2**31, (COLUMNS, 4)).astype(np.int32)
        numbers = rng.random((COLUMNS, 32)).astype(np.float16)
        arrays: dict[str, Array] = {"qweight": words, "qzeros": zeros, "scales": numbers}
    else:
        scales = rng.random((COLUMNS, 2)).astype(np.float16 if name.endswith("f16") else BF16)
        arrays = {"weight": rng.integers(-128, 128, (COLUMNS, ROWS)).astype(np.int8), "weight_scale": scales}
    matrix = stored(name, ROWS, COLUMNS, arrays, group_size=size)
    np.testing.assert_array_equal(coded_of(matrix).values, matrix.values)
    with pytest.raises(ArgumentError, match="format is one that is only read here"):
        stored_of(coded(), name)


def test_act_order_stays_where_there_is_a_place_for_it() -> None:
    """Formats of GPTQ keep the group of each row; the others refuse it."""
    order = np.random.default_rng(2).permutation(runs(ROWS, SIZE))
    matrix = replace(coded(symmetric=True), g_idx=order)
    for name in WRITTEN:
        if name.startswith("gptq"):
            np.testing.assert_array_equal(coded_of(stored_of(matrix, name)).g_idx, order)
        elif not name.endswith("3bit"):
            with pytest.raises(ArgumentError, match="groups of rows is in act-order"):
                stored_of(matrix, name)


def with_zero(zero: float) -> CodedMatrix:
    matrix = coded()
    matrix.offsets[1, 2] = zero
    return matrix


REFUSED = [
    ("gptq-v1", with_zero(0), "zero of a group is 0.0; allowed: a whole number from 1 to 16"),
    ("gptq-v2", with_zero(16), "zero of a group is 16.0; allowed: a whole number from 0 to 15"),
    ("awq-gemm", with_zero(7.5), "zero of a group is 7.5; allowed: a whole number from 0 to 15"),
    ("ct-pack-f16", with_zero(7), "allowed: 8, the middle of the codes"),
    ("hqq-axis1", with_zero(1 / 3), "allowed: numbers that float16 holds exactly"),
    ("gptq-v2", replace(coded(), scales=np.full((4, COLUMNS), 0.1, np.float32)), "scale of a group is 0.1"),
    ("ct-pack-asym", replace(coded(), scales=np.full((4, COLUMNS), 0.1, np.float16)), "that bfloat16 holds exactly"),
    ("awq-gemm", coded(8), "bits is 8; allowed: 4"),
    ("gptq-v2", replace(coded(), has_minima=True), "offsets of the groups is minima"),
    ("hqq-axis1", replace(coded(), has_minima=True), "offsets of the groups is minima"),
]


@pytest.mark.parametrize(("name", "matrix", "message"), REFUSED)
def test_what_a_format_cannot_hold(name: str, matrix: CodedMatrix, message: str) -> None:
    """The message names the number and what is allowed."""
    with pytest.raises(ArgumentError) as caught:
        stored_of(matrix, name)
    assert message in str(caught.value)


def test_zeros_of_16_are_held_by_version_1_alone() -> None:
    """A stored 15 is a zero of 16."""
    found = coded_of(stored_of(with_zero(16), "gptq-v1"))
    assert found.offsets[1, 2] == 16


@pytest.mark.parametrize("convention", ["minimum", "zero_point"])
def test_groupings_of_gguf(convention: str) -> None:
    """A `QuantizedMatrix` of either convention, as the reader of GGUF files makes them."""
    weights = np.random.default_rng(3).standard_normal((ROWS, COLUMNS)).astype(np.float32)
    matrix = quantize(weights, bits=4, group_size=32, convention=convention, scale_dtype="float16")  # type: ignore[arg-type]  # mypy does not narrow a parameter
    found = coded_of(matrix)
    assert found.has_minima == (convention == "minimum")
    wide, zeros = matrix.scales.astype(np.float64)[found.g_idx], matrix.zeros.astype(np.float64)[found.g_idx]
    expected = wide * found.codes + zeros if found.has_minima else wide * (found.codes - zeros)
    np.testing.assert_array_equal(found.values, expected)


def test_what_is_no_coded_matrix() -> None:
    """Floats, and formats of other kinds."""
    with pytest.raises(ArgumentError, match="matrix is floats"):
        coded_of(np.ones((2, 2), np.float32))
    with pytest.raises(ArgumentError, match="format is 'q8_1'"):
        coded_of(Stored("q8_1", 32, 1, (np.zeros((1, 36), np.uint8),)))


def test_every_format_is_named_once() -> None:
    """A packer's options are those of its format."""
    for name, packer in PACKERS.items():
        assert set(packer.options) == set(FORMATS[name].options)
