"""Blocks of GGUF against the ``gguf`` package's own decoding, on blocks of random bytes."""

import numpy as np
import pytest
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from lowbit.arrays import U8
from lowbit.errors import FormatError
from lowbit.formats.gguf.header import TensorInfo
from lowbit.formats.gguf.tensors import matrix
from lowbit.formats.gguf.types import TensorType
from lowbit.model.matrices import select_columns, to_float
from lowbit.quantization.affine import QuantizedMatrix, dequantize
from lowbit.tensor_formats.stored import Stored

Kind = GGMLQuantizationType

SCALES = {Kind.Q4_0: 1, Kind.Q4_1: 2, Kind.Q8_0: 1}  # float16 numbers at the front of a block
SPECIAL_SCALES = np.array([0.0, -0.0, 6e-8, -6e-8, 65504.0, -65504.0, 1.0, -1.0], np.float16)  # 6e-8: subnormal
ROWS, BLOCKS = 64, 5


def random_blocks(kind: Kind, seed: int) -> U8:
    """N × bytes of a row: random bytes, so every code occurs; scales of every exponent, both signs and zero."""
    rng = np.random.default_rng(seed)
    size = GGML_QUANT_SIZES[kind][1]
    blocks = rng.integers(0, 256, (ROWS, BLOCKS, size), np.uint8)
    numbers = SCALES[kind]
    heads = np.ascontiguousarray(blocks[..., : 2 * numbers]).view(np.float16)
    heads = np.where(np.isfinite(heads), heads, np.float16(1))
    heads[: len(SPECIAL_SCALES), 0, 0] = SPECIAL_SCALES
    blocks[..., : 2 * numbers] = np.ascontiguousarray(heads).view(np.uint8)
    return blocks.reshape(ROWS, -1)


def info_of(kind: Kind, rows: U8) -> TensorInfo:
    block, size = GGML_QUANT_SIZES[kind]
    return TensorInfo("t", (len(rows), rows.shape[1] // size * block), TensorType(kind), 0, rows.nbytes)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q8_0])
def test_symmetric_blocks_are_an_affine_grouping(kind: Kind, seed: int) -> None:
    """Q4_0 and Q8_0 become a QuantizedMatrix with the same weights, also where d is negative, zero or subnormal."""
    rows = random_blocks(kind, seed)
    result = matrix(rows.reshape(-1), info_of(kind, rows), "f")
    assert isinstance(result, QuantizedMatrix)
    assert (result.convention, result.group_size) == ("zero_point", 32)
    np.testing.assert_array_equal(dequantize(result), quants.dequantize(rows, kind).T)


@pytest.mark.parametrize("seed", range(8))
def test_q4_1_is_an_affine_grouping(seed: int) -> None:
    """With d at least 0, as every quantiser writes it, d·q + m comes out the same to the bit."""
    rows = random_blocks(Kind.Q4_1, seed)
    blocks = rows.reshape(ROWS, BLOCKS, -1)
    blocks[..., 1] &= 0x7F  # the sign of d
    result = matrix(rows.reshape(-1), info_of(Kind.Q4_1, rows), "f")
    assert isinstance(result, QuantizedMatrix)
    assert result.convention == "minimum"
    expected = quants.dequantize(rows, Kind.Q4_1).T
    np.testing.assert_array_equal(dequantize(result), expected)
    np.testing.assert_array_equal(np.signbit(dequantize(result)), np.signbit(expected))


def test_q4_1_with_a_negative_scale_stays_as_it_is_stored() -> None:
    """No affine grouping with scales above 0 says the same."""
    rows = random_blocks(Kind.Q4_1, 0)
    result = matrix(rows.reshape(-1), info_of(Kind.Q4_1, rows), "f")
    assert isinstance(result, Stored)
    np.testing.assert_array_equal(to_float(result), quants.dequantize(rows, Kind.Q4_1).T)


@pytest.mark.parametrize("kind", ["Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "MXFP4"])
def test_other_types_stay_as_they_are_stored(kind: str) -> None:
    """What is not an affine grouping keeps its bytes; the tests of formats say what they mean."""
    code = GGMLQuantizationType[kind]
    block, size = GGML_QUANT_SIZES[code]
    rows = np.random.default_rng(1).integers(0, 60, (6, 2 * size), np.uint8)  # no float16 is infinite or NaN
    result = matrix(rows.reshape(-1), TensorInfo("t", (6, 2 * block), TensorType(code), 0, rows.nbytes), "f")
    assert isinstance(result, Stored)
    assert (result.format.removeprefix("gguf-"), result.rows, result.columns) == (kind.lower(), 2 * block, 6)
    np.testing.assert_array_equal(result.tensors[0], rows)


def test_columns_of_stored_blocks_can_be_chosen() -> None:
    """As the order of rotated channels asks for."""
    rows = np.random.default_rng(1).integers(0, 60, (6, 144), np.uint8)
    result = matrix(rows.reshape(-1), TensorInfo("t", (6, 256), TensorType(Kind.Q4_K), 0, rows.nbytes), "f")
    chosen = select_columns(result, np.array([5, 0, 2]))
    np.testing.assert_array_equal(to_float(chosen), to_float(result)[:, [5, 0, 2]])


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_plain_floats(kind: str) -> None:
    """float32, float16 and bfloat16 keep their values."""
    code = GGMLQuantizationType[kind]
    weights = np.random.default_rng(2).standard_normal((3, 8)).astype(np.float16 if kind == "F16" else np.float32)
    stored = quants.quantize(weights, code).view(np.uint8)
    result = to_float(matrix(stored.reshape(-1), TensorInfo("t", (3, 8), TensorType(code), 0, stored.nbytes), "f"))
    np.testing.assert_array_equal(result, quants.dequantize(stored, code).reshape(3, 8).T)


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q8_0, Kind.Q6_K, Kind.F32])
def test_weights_that_are_not_finite_are_refused(kind: Kind) -> None:
    """A NaN anywhere in a tensor, scale or weight, is an error that names the tensor."""
    size = 8 * GGML_QUANT_SIZES[kind][1] * (32 if kind == Kind.F32 else 1)
    rows = np.full((1, size), 0xFF, np.uint8)
    block, block_bytes = GGML_QUANT_SIZES[kind]
    with pytest.raises(FormatError, match=r"tensor 't' is nan"):
        matrix(rows.reshape(-1), TensorInfo("t", (1, size // block_bytes * block), TensorType(kind), 0, size), "f")


def test_a_type_that_the_package_does_not_decode_is_named() -> None:
    """Integers are known to the package and not decoded by it."""
    size = GGML_QUANT_SIZES[Kind.I8][1]
    with pytest.raises(FormatError, match="I8"):
        matrix(np.zeros(256 * size, np.uint8), TensorInfo("t", (1, 256), TensorType(Kind.I8), 0, size), "f")
