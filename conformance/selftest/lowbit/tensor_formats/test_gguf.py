"""The formats of GGUF against the `gguf` package, bit for bit.

Bytes are random where the format allows all of them, and what the package writes where it can quantise. The package
rounds to float32 once, since its products and differences of a few bits are exact, so equality is of every number; a
zero may have either sign.
"""

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from lowbit.arrays import U8
from lowbit.errors import ArgumentError
from lowbit.tensor_formats.gguf_iq import grid, scale_of_iq1_m
from lowbit.tensor_formats.gguf_tables import NON_LINEAR
from lowbit.tensor_formats.stored import FORMATS, Stored, dequantize
from lowbit.tensor_formats.table import Format

ACTIVATIONS = {"q8_1", "q8_k"}
"""Types of activations, which no file holds."""
OURS_ALONE = {"q1_0", "q2_0", *ACTIVATIONS}
"""Types that ggml's C code decodes and the package does not."""

TYPES = {each.name.lower(): each for each in gguf.GGMLQuantizationType}
TYPES |= {f"gguf-{name}": TYPES[name] for name in ("mxfp4", "nvfp4")}
SHARED = sorted(name for name, each in FORMATS.items() if each.block and name in TYPES and name not in OURS_ALONE)
WRITTEN = [name for name in SHARED if "quantize_blocks" in vars(getattr(gguf.quants, TYPES[name].name))]
"""Those that the package also quantises."""

BLOCKS, ROWS = 4, 64


def finite(data: U8, table: Format) -> U8:
    """Random records, in which scales that are not finite have become 1."""
    records = data.view(table.record)
    for row in table.fields:
        if row.role == "scale" and row.numpy_dtype.kind not in "iu":
            numbers = records[row.name]
            numbers = np.where(np.isfinite(numbers.astype(np.float64)), numbers, np.ones((), numbers.dtype))
            records[row.name] = numbers if row.signed or row.dtype == "float8_e8m0fnu" else np.abs(numbers)
    if table.name == "iq1_m":
        infinite = ~np.isfinite(scale_of_iq1_m(records["scales"]))
        records["scales"][infinite] &= 0x0FFF
    return data


def dequantized(name: str, data: U8) -> npt.NDArray[np.float32]:
    """float32, as the package gives them: N × K."""
    table = FORMATS[name]
    rows = data.shape[1] // table.record.itemsize * (table.block or 1)
    return np.asarray(dequantize(Stored(name, rows, len(data), (data,))), np.float32).T


def test_every_type_that_the_package_knows_is_a_format() -> None:
    """No quantised type is left out; Q2_0 is newer than the package."""
    plain = {"f32", "f16", "bf16", "f64", "i8", "i16", "i32", "i64", "mxfp4", "nvfp4"}
    assert TYPES.keys() - plain - ACTIVATIONS == {*SHARED, "q1_0"}


def test_the_table_of_iq4() -> None:
    """The 16 numbers are those of the package."""
    assert tuple(NON_LINEAR) == gguf.quants.IQ4_NL.kvalues


def test_another_grid_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with one other number in a grid is not used."""
    grid("IQ3_S")  # the package unpacks it
    other = np.asarray(gguf.quants.IQ3_S.grid).copy()
    other.flat[7] = 17
    monkeypatch.setattr(gguf.quants.IQ3_S, "grid", other)
    with pytest.raises(RuntimeError, match="IQ3_S"):
        grid.__wrapped__("IQ3_S")


def test_an_infinite_scale_of_iq1_m_is_refused() -> None:
    """Its scale is found among the nibbles."""
    table = FORMATS["iq1_m"]
    blocks = np.zeros((1, table.record.itemsize), np.uint8)
    blocks.view(table.record)["scales"] = np.array([0x0000, 0x0000, 0xC000, 0x7000], np.uint16)
    with pytest.raises(ArgumentError, match="scales"):
        Stored("iq1_m", 256, 1, (blocks,))


def test_a_signed_scale_of_nvfp4_is_refused() -> None:
    """ggml ignores the sign bit, and no writer sets it."""
    blocks = np.zeros((1, 36), np.uint8)
    blocks[0, 2] = 0xB8
    with pytest.raises(ArgumentError, match="sign"):
        Stored("gguf-nvfp4", 64, 1, (blocks,))


@pytest.mark.parametrize("name", SHARED)
def test_sizes(name: str) -> None:
    """Elements and bytes of a block."""
    assert gguf.GGML_QUANT_SIZES[TYPES[name]] == (FORMATS[name].block, FORMATS[name].record.itemsize)


@pytest.mark.parametrize("name", SHARED)
def test_random_bytes(name: str) -> None:
    """Every number of 256 random blocks."""
    table = FORMATS[name]
    data = np.random.default_rng(1).integers(0, 256, (ROWS, BLOCKS * table.record.itemsize), np.uint8)
    data = finite(data, table)
    with np.errstate(over="ignore"):
        assert np.array_equal(dequantized(name, data), gguf.quants.dequantize(data, TYPES[name]))


@pytest.mark.parametrize("name", WRITTEN)
def test_blocks_that_the_package_writes(name: str) -> None:
    """Every number of blocks that its quantiser wrote."""
    numbers = np.random.default_rng(2).normal(size=(ROWS, BLOCKS * (FORMATS[name].block or 1))).astype(np.float32)
    data = gguf.quants.quantize(numbers, TYPES[name])
    assert np.array_equal(dequantized(name, data), gguf.quants.dequantize(data, TYPES[name]))
