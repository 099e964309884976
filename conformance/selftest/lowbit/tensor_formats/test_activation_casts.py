"""Casts of activations and caches, number by number in loops of their own, and by ml_dtypes where it rounds."""

import math
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from lowbit.arrays import F32
from lowbit.errors import ArgumentError
from lowbit.numbers.floats import FLOATS
from lowbit.tensor_formats.stored import FORMATS, Stored, quantize, quantized
from lowbit_conformance.suite.clauses.test_quantize import KINDS

ONE, LEVELS, LARGEST = np.float32(1), np.float32(127), np.float32(448)
KINDS_OF_INTEREST = ("normal", "ties", "zeros", "tiny", "spikes")


def drawn(kind: str, rows: int = 64, columns: int = 5) -> F32:
    return np.ascontiguousarray(KINDS[kind](np.random.default_rng(7), rows, columns))


def away(number: np.float32) -> int:
    return int(math.copysign(math.floor(abs(float(number)) + 0.5), number))


def even(number: np.float32) -> int:
    return round(float(number))


@pytest.mark.parametrize("kind", KINDS_OF_INTEREST)
def test_int8_as_vllm_and_sglang_cast_tokens(kind: str) -> None:
    """One multiplies by 127/m and rounds to even, the other keeps m above 1e-10 and rounds away from 0."""
    x = drawn(kind)
    for choice, least, nearest in (
        ("x (127/m), even, any m", 0.0, even),
        ("x (127/m), away, m at least 1e-10", 1e-10, away),
    ):
        found = quantized(x, "int8-token", (), choice).by_name
        for token, row in enumerate(x):
            m = max(np.abs(row).max(), np.float32(least))
            assert found["scale"][token, 0] == m / LEVELS
            factor = LEVELS / m if m else np.float32(0)
            assert found["codes"][token].tolist() == [nearest(each * factor) for each in row]


@pytest.mark.parametrize("kind", KINDS_OF_INTEREST)
def test_int8_groups_and_their_short_last(kind: str) -> None:
    """Groups of 24 of 64 channels: the last has 16, and its scale is of these alone."""
    x = drawn(kind)
    found = quantized(x, "int8-group", (("group_size", 24),), "x / d, even, any m").by_name
    assert found["scale"].shape == (5, 3)
    for (token, row), (group, first) in product(enumerate(x), enumerate((0, 24, 48))):
        part = row[first : first + 24]
        d = np.abs(part).max() / LEVELS
        assert found["scale"][token, group] == d
        codes = [even(each / d) if d else 0 for each in part]
        assert found["codes"][token, first : first + 24].tolist() == codes


def test_scales_of_16_bits_divide_before_or_after_they_are_rounded() -> None:
    """SmoothQuant divides by the scale that it stores."""
    x = drawn("normal")
    for name, kind in (("int8-token-f16", np.float16), ("int8-token-bf16", ml_dtypes.bfloat16)):
        for choice, stored in (("x / d", False), ("x / rounded d", True)):
            found = quantized(x, name, (), f"{choice}, even, any m").by_name
            for token, row in enumerate(x):
                d = np.abs(row).max() / LEVELS
                kept = d.astype(kind)
                assert found["scale"][token, 0] == kept
                divisor = kept.astype(np.float32) if stored else d
                assert found["codes"][token].tolist() == [even(each / divisor) for each in row]


@pytest.mark.parametrize("kind", KINDS_OF_INTEREST)
def test_fp8_as_vllm_casts_tokens_and_tensors(kind: str) -> None:
    """Elements as ml_dtypes rounds them, once from float32, after they were saturated."""
    x, least = drawn(kind), np.float32(1 / (448 * 512))
    tokens = quantized(x, "fp8-channel", (), "x / d, d at least 1/(448 512)").by_name
    tensor = quantized(x, "fp8-tensor", (), "x (1/d), any d").by_name
    whole = np.abs(x).max() / LARGEST
    assert tensor["weight_scale"].tolist() == [whole]
    for token, row in enumerate(x):
        d = max(np.abs(row).max() / LARGEST, least)
        assert tokens["weight_scale"][token, 0] == d
        for given, exact in ((tokens, row / d), (tensor, row * (ONE / whole))):
            expected = exact.clip(-LARGEST, LARGEST).astype(ml_dtypes.float8_e4m3fn)
            assert np.array_equal(given["weight"][token].view(np.uint8), expected.view(np.uint8))


MX = {"mxfp8-e4m3": "float8_e4m3fn", "mxfp8-e5m2": "float8_e5m2", "mxfp4": "float4_e2m1fn"}


@pytest.mark.parametrize("name", MX)
def test_mx_with_the_scale_rounded_up(name: str) -> None:
    """The least power of two with which nothing saturates; it differs from the standard's in some blocks only."""
    x, kind = drawn("normal", 256, 20), FLOATS[MX[name]].dtype
    largest = FLOATS[MX[name]].largest
    found = quantized(x, name, (), "scale rounded up")
    scale = found.by_name["scale"].astype(np.float64)
    m = np.abs(x).reshape(20, -1, 32).max(axis=-1)
    assert (m <= scale * largest).all() and (2 * m > scale * largest).all()
    shares = x.reshape(20, -1, 32) / scale[..., None].astype(np.float32)
    expected = shares.astype(kind).astype(np.float64) * scale[..., None]
    assert np.array_equal(found.values.T.reshape(expected.shape), expected)
    standard = quantize(x, name).by_name["scale"].astype(np.float64)
    assert set((scale / standard).reshape(-1)) == {1.0, 2.0}


def test_nvfp4_of_two_owners() -> None:
    """The rules of ModelOpt and of compressed-tensors, with elements as ml_dtypes rounds them."""
    x = drawn("zeros", 64, 6)
    x[4] *= np.float32(1e-9)
    one, other = quantize(x, "nvfp4").by_name, quantize(x, "nvfp4-pack").by_name
    second = np.abs(x).max() / np.float32(2688)
    factor = np.float32(2688) / np.abs(x).max()
    assert (one["weight_scale_2"], other["weight_global_scale"]) == (second, factor)
    for n, block in product(range(6), range(4)):
        part = x[n, 16 * block : 16 * block + 16]
        m, e4m3 = np.abs(part).max(), ml_dtypes.float8_e4m3fn
        scale = (m / (np.float32(6) * second) or ONE).astype(e4m3)
        assert one["weight_scale"][n, block] == scale
        local = min(factor * (m / np.float32(6)), LARGEST).astype(e4m3)
        local = local if local else e4m3(0.125)
        assert other["weight_scale"][n, block] == local
        quotients = part / (local.astype(np.float32) / factor)
        codes = quotients.clip(-6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
        packed = other["weight_packed"][n, 8 * block : 8 * block + 8]
        assert np.array_equal(packed, codes[::2] | codes[1::2] << 4)
        if scale:
            codes = (part / (scale.astype(np.float32) * second)).clip(-6, 6).astype(ml_dtypes.float4_e2m1fn)
            packed = one["weight"][n, 8 * block : 8 * block + 8]
            assert np.array_equal(packed, codes[::2].view(np.uint8) | codes[1::2].view(np.uint8) << 4)


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize(
    ("dtype", "kept"),
    [
        (np.float32, np.float16),
        (np.float16, np.float16),
        (np.float32, ml_dtypes.bfloat16),
        (ml_dtypes.bfloat16, ml_dtypes.bfloat16),
    ],
)
def test_kivi_groups_keys_by_channel_and_values_by_token(bits: int, dtype: Any, kept: Any) -> None:
    """37 tokens of 40 channels in groups of 16: the last groups and the last words are short."""
    x = np.random.default_rng(5).normal(size=(37, 40)).astype(np.float32)
    x[16:32, 3] = 0.5
    suffix = "" if kept is np.float16 else "-bf16"
    for name, option, lines in (("kivi-keys", "tokens", x.T), ("kivi-values", "group_size", x)):
        found = quantized(x, name + suffix, (("bits", bits), (option, 16)), f"in {np.dtype(dtype)}")
        fields, values = found.by_name, found.values if name == "kivi-keys" else found.values.T
        for (line, row), group in product(enumerate(lines), range(3)):
            part = row[16 * group : 16 * group + 16].astype(dtype)
            scale, least = (part.max() - part.min()) / dtype(2**bits - 1), part.min()
            assert fields["scale"][line, group] == kept(scale)
            assert fields["minimum"][line, group] == kept(least)
            for i, number in enumerate(part):
                place, code = 16 * group + i, even((number - least) / scale) if scale else 0
                word = int(fields["codes"][line, place * bits // 32])
                assert word >> (place * bits % 32) & (2**bits - 1) == code
                assert values[line, place] == float(kept(scale)) * code + float(kept(least))


def test_dense_formats_are_what_ml_dtypes_writes() -> None:
    """float16 and bfloat16, what the first cannot hold, and float32, which is not rounded."""
    x = drawn("normal")
    assert np.array_equal(quantize(x, "float16").by_name["numbers"], x.astype(np.float16))
    assert np.array_equal(quantize(x, "float32").by_name["numbers"], x)
    assert np.array_equal(quantize(x, "bfloat16").by_name["numbers"], x.astype(ml_dtypes.bfloat16))
    with pytest.raises(ArgumentError, match="65504"):
        quantize(x * np.float32(1e6), "float16")


def test_a_scale_for_each_head() -> None:
    """fp8-head: the channels of head h have the scale h, in every token."""
    elements = np.ones((3, 8), ml_dtypes.float8_e4m3fn)
    found = Stored("fp8-head", 8, 3, (elements, np.array([2, 0], np.float32)), (("head_dim", 4),))
    assert found.values.tolist() == [[2.0] * 3] * 4 + [[0.0] * 3] * 4


def test_choices_differ() -> None:
    """Each named choice of a format is another function of some numbers."""
    for name in (
        *("int8-token", "fp8-channel", "mxint8", "mxfp8-e4m3", "mxfp6-e2m3", "mxfp4"),
        *("kivi-values", "matmulnbits", "matmulnbits-symmetric", "nf4", "fp4"),
    ):
        table = FORMATS[name]
        sizes = {"bits": 4, "blocksize": 4096}
        options = tuple((option, sizes.get(option, 32)) for option in table.options)
        seen: dict[bytes, str] = {}
        rng = np.random.default_rng(0)
        near_ties = rng.integers(-255, 256, (4000, 32)) / 2 * rng.uniform(0.5, 2, (4000, 1))
        few = [*(drawn(kind, 32, 20) for kind in ("tiny", "zeros")), np.full((1, 32), 448), np.zeros((128, 32))]
        x = np.concatenate([near_ties, *few]).astype(np.float32)
        for choice in table.encode:
            bytes_of = b"".join(each.tobytes() for each in quantized(x, name, options, choice).tensors)
            assert seen.setdefault(bytes_of, choice) == choice, f"{name}: {choice} is {seen[bytes_of]}"


@pytest.mark.parametrize("name", ["int8-token", "int8-group", "fp8-channel", "q8_0", "q8_1", "q8_k"])
def test_numbers_whose_quotient_is_infinite_are_refused(name: str) -> None:
    """127/m overflows where m is subnormal: an infinity times 0 is no code."""
    x = np.full((1, 256), 1e-39, np.float32)
    x[:, ::3] = 0
    options = (("group_size", 32),) if "group_size" in FORMATS[name].options else ()
    choice = "x (448/m), any d" if name == "fp8-channel" else None
    with pytest.raises(ArgumentError, match="so small that"):
        quantized(x, name, options, choice)
