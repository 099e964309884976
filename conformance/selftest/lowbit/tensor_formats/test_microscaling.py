"""MX, NVFP4, FP8 and compressed-tensors, element by element with arithmetic of their own."""

import numpy as np
import pytest

from lowbit.arrays import F64
from lowbit.numbers.floats import FLOATS
from lowbit.tensor_formats.stored import FORMATS, Stored, stored

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MX = {"mxfp8-e5m2": 57344.0, "mxfp8-e4m3": 448.0, "mxfp6-e3m2": 28.0, "mxfp6-e2m3": 7.5, "mxfp4": 6.0}


def encoded(name: str, weights: F64) -> Stored:
    table = FORMATS[name]
    rows, columns = weights.shape
    at = table.sizes(rows, columns, {})
    return stored(name, rows, columns, table.encoded(weights, at))


def test_mxfp4_element_by_element() -> None:
    """The sign is bit 3, the first element lies in the low half, the scale is 2^(c-127)."""
    rng = np.random.default_rng(0)
    elements = rng.integers(0, 256, (3, 32), np.uint8)
    scale = rng.integers(100, 150, (3, 2), np.uint8)
    found = stored("mxfp4", 64, 3, {"elements": elements, "scale": scale.view(FLOATS["float8_e8m0fnu"].dtype)}).values
    for n in range(3):
        for k in range(64):
            code = int(elements[n, k // 2]) >> (4 * (k % 2)) & 15
            value = (-1) ** (code >> 3) * E2M1[code & 7] * 2.0 ** (int(scale[n, k // 32]) - 127)
            assert found[k, n] == value


def test_mxfp6_codes_cross_bytes() -> None:
    """Four codes are a little-endian number of 24 bits."""
    elements = np.arange(24, dtype=np.uint8).reshape(1, 24) * 11
    scale = np.full((1, 1), 127, np.uint8).view(FLOATS["float8_e8m0fnu"].dtype)
    found = stored("mxfp6-e2m3", 32, 1, {"elements": elements, "scale": scale}).values[:, 0]
    number = int.from_bytes(elements.tobytes(), "little")
    for k in range(32):
        code = number >> (6 * k) & 63
        exponent, mantissa = code >> 3 & 3, code & 7
        value = mantissa / 8 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 1)
        assert found[k] == (-1) ** (code >> 5) * value


@pytest.mark.parametrize("name", MX)
def test_conversion_is_that_of_the_standard(name: str) -> None:
    """X = 2^(floor(log2 max) - emax); no element passes the largest, and errors are at most half a step."""
    rng = np.random.default_rng(1)
    weights = rng.normal(size=(64, 5)) * np.exp2(rng.integers(-20, 20, (2, 5)).repeat(32, axis=0))
    found = encoded(name, weights)
    scale = found.by_name["scale"].astype(np.float64)
    largest = np.abs(weights.T.reshape(5, 2, 32)).max(axis=-1)
    exponent = np.floor(np.log2(MX[name]))
    np.testing.assert_array_equal(scale, np.exp2(np.floor(np.log2(largest)) - exponent))
    blocks, wide = found.values.T.reshape(5, 2, 32), weights.T.reshape(5, 2, 32)
    assert (np.abs(blocks) <= MX[name] * scale[..., None]).all()
    inside = np.abs(wide) <= MX[name] * scale[..., None]
    assert inside.mean() > 0.9
    step = {"mxfp8-e5m2": 2, "mxfp8-e4m3": 3, "mxfp6-e3m2": 2, "mxfp6-e2m3": 3, "mxfp4": 1}[name]
    least = {"mxfp8-e5m2": -14, "mxfp8-e4m3": -6, "mxfp6-e3m2": -2, "mxfp6-e2m3": 0, "mxfp4": 0}[name]
    binade = np.maximum(np.floor(np.log2(np.abs(wide / scale[..., None]))), least)
    error = np.abs(blocks - wide) / scale[..., None]
    assert (error[inside] <= np.exp2(binade - step - 1)[inside]).all()


@pytest.mark.parametrize("name", [*MX, "mxint8"])
def test_blocks_of_zeros_and_of_one_number(name: str) -> None:
    """Zeros stay zeros under the least scale; a power of two is kept."""
    weights = np.zeros((64, 2))
    weights[40, 1] = -0.25
    found = encoded(name, weights)
    np.testing.assert_array_equal(found.values, weights)
    assert found.by_name["scale"].view(np.uint8)[0, 0] == 0


def test_mxint8_is_symmetric() -> None:
    """127 is the last mantissa on both sides; -128 is read."""
    found = encoded("mxint8", np.array([[1.999], [-1.999], *[[0.01]] * 30]))
    assert found.by_name["elements"][0, :2].tolist() == [127, -127]
    stored_low = found.by_name["elements"].copy()
    stored_low[0, 0] = -128
    assert stored("mxint8", 32, 1, found.by_name | {"elements": stored_low}).values[0, 0] == -2.0


def test_nvfp4_has_two_levels() -> None:
    """One owner multiplies by the number of the tensor, the other divides."""
    rng = np.random.default_rng(2)
    packed = rng.integers(0, 256, (4, 16), np.uint8)
    scale = np.exp2(rng.integers(-3, 3, (4, 2))).astype(FLOATS["float8_e4m3fn"].dtype)
    two = np.array([0.5], np.float32)
    times = stored("nvfp4", 32, 4, {"weight": packed, "weight_scale": scale, "weight_scale_2": two}).values
    over = stored("nvfp4-pack", 32, 4, {"weight_packed": packed, "weight_scale": scale, "weight_global_scale": two})
    for n in range(4):
        for k in range(32):
            code = int(packed[n, k // 2]) >> (4 * (k % 2)) & 15
            value = (-1) ** (code >> 3) * E2M1[code & 7] * float(scale[n, k // 16])
            assert times[k, n] == value * 0.5
            assert over.values[k, n] == value * 2


def test_fp8_blocks_at_the_edge() -> None:
    """Blocks of 128 × 128 at the right and lower edge are smaller."""
    rng = np.random.default_rng(3)
    weight = rng.normal(size=(130, 200)).astype(FLOATS["float8_e4m3fn"].dtype)
    scales = np.arange(1, 5, dtype=np.float32).reshape(2, 2)
    found = stored("fp8-block", 200, 130, {"weight": weight, "weight_scale_inv": scales}).values
    for n, k in ((0, 0), (127, 127), (128, 127), (127, 128), (129, 199)):
        assert found[k, n] == float(weight[n, k]) * scales[n // 128, k // 128]


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 8])
def test_compressed_tensors_streams(bits: int) -> None:
    """Codes along K, zeros along N, each a stream of bits that crosses words, offset by 2^(bits-1)."""
    rng = np.random.default_rng(bits)
    rows, columns, group = 50, 7, 20
    words = [-(-rows * bits // 32), -(-columns * bits // 32)]
    packed = rng.integers(-(2**31), 2**31, (columns, words[0])).astype(np.int32)
    zeros = rng.integers(-(2**31), 2**31, (words[1], 3)).astype(np.int32)
    scale = np.exp2(rng.integers(-3, 3, (columns, 3))).astype(FLOATS["bfloat16"].dtype)
    tensors = {"weight_packed": packed, "weight_scale": scale, "weight_zero_point": zeros}
    found = stored("ct-pack-asym", rows, columns, tensors, bits=bits, group_size=group).values
    for n in range(columns):
        number = int.from_bytes(packed[n].tobytes(), "little")
        for k in range(rows):
            g = k // group
            zero = int.from_bytes(np.ascontiguousarray(zeros[:, g]).tobytes(), "little") >> (bits * n) & (2**bits - 1)
            assert found[k, n] == float(scale[n, g]) * ((number >> (bits * k) & (2**bits - 1)) - zero)
