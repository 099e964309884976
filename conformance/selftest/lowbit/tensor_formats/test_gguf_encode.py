"""Casts to the formats of GGUF: against the `gguf` package where it casts, and against ggml's C code on few numbers."""

from itertools import product

import gguf
import numpy as np
import pytest

from lowbit.arrays import F32
from lowbit.errors import ArgumentError
from lowbit.tensor_formats.gguf_encode import EXPONENTS, QUOTIENTS, without_sign
from lowbit.tensor_formats.stored import FORMATS, Stored, quantize, quantized
from lowbit_conformance.suite.clauses.test_quantize import KINDS

CASTS = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "tq1_0", "tq2_0", "gguf-mxfp4")


@pytest.mark.parametrize(("name", "kind"), list(product(CASTS, KINDS)))
def test_the_package_writes_the_same_bytes(name: str, kind: str) -> None:
    """Every byte, on every kind of numbers that the suite draws."""
    x = KINDS[kind](np.random.default_rng(3), 256, 20)
    with np.errstate(divide="ignore", invalid="ignore"):
        expected = gguf.quants.quantize(x, gguf.GGMLQuantizationType[name.removeprefix("gguf-").upper()])
    assert np.array_equal(quantize(x, name).tensors[0], expected)


def test_the_exponent_is_a_choice_of_mxfp4() -> None:
    """Just below 8 the logarithm is 3 in float32, and the exponent of the float is 2; a block that is too small."""
    x = block(float(np.nextafter(np.float32(8), np.float32(0))))
    found = [int(quantized(x, "gguf-mxfp4", (), choice).tensors[0][0, 0]) for choice in EXPONENTS]
    assert found == [127 + 1, 127]
    with pytest.raises(ArgumentError, match=r"x is a block whose largest number is 1.18e-38; allowed: 2\^-125 or more"):
        quantize(block(2.0**-126), "gguf-mxfp4")


def test_scales_of_nvfp4_are_rounded_as_the_package_does() -> None:
    """Every pattern of float16 from 0 on as a scale, and the numbers beside each middle."""
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    scales = np.concatenate([halves, np.nextafter(halves, np.float32(0)), np.nextafter(halves, np.float32(np.inf))])
    expected = gguf.quants.NVFP4.fp32_to_ue4m3(scales)
    assert np.array_equal(without_sign(scales).view(np.uint8), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_codes_of_nvfp4_are_nearest_with_the_lower_code_of_two(kind: str) -> None:
    """ggml compares the distances to all 16 numbers, and keeps the first least one; the package only decodes."""
    x = KINDS[kind](np.random.default_rng(3), 128, 20)
    found = quantize(x, "gguf-nvfp4")
    octets = found.tensors[0].reshape(-1, 36)
    runs = x.reshape(-1, 16)
    scales = gguf.quants.NVFP4.fp32_to_ue4m3(np.abs(runs).max(axis=1) / np.float32(6))
    assert np.array_equal(octets[:, :4].reshape(-1), scales)
    d = gguf.quants.NVFP4.ue4m3_to_fp32(scales)[:, None, None]
    numbers = np.array(gguf.quants.NVFP4.kvalues, np.float32)
    codes = np.abs(d * numbers - runs[:, :, None]).argmin(axis=-1)
    packed = codes[:, :8] | codes[:, 8:] << 4
    wrong = octets[:, 4:].reshape(-1, 8) != packed
    assert not wrong[scales > 0].any()
    assert np.array_equal(gguf.quants.NVFP4.dequantize_blocks(octets).reshape(20, -1), found.values.T)


def block(*numbers: float, rest: float = 0.0, size: int = 32) -> F32:
    """One block that begins with these numbers."""
    x = np.full((1, size), rest, np.float32)
    x[0, : len(numbers)] = numbers
    return x


def codes(stored: Stored) -> list[int]:
    """The first five codes of one block."""
    fields = stored.table.fields_of(stored.by_name)
    return [int(each) for each in fields["qs"][0, 0, :5]]


def test_ties_are_a_choice_of_q8_0() -> None:
    """127 makes the scale 1, so that half-integers are ties."""
    x = block(127, 0.5, 1.5, -0.5, -2.5)
    assert codes(quantized(x, "q8_0", (), "x (1/d), away")) == [127, 1, 2, -1, -3]
    assert codes(quantized(x, "q8_0", (), "x (1/d), even")) == [127, 0, 2, 0, -2]


def test_a_number_just_below_a_tie_is_rounded_down() -> None:
    """The float32 number before 0.5, to which 0.5 cannot be added in float32."""
    x = block(127, float(np.nextafter(np.float32(0.5), np.float32(0))))
    assert codes(quantize(x, "q8_0"))[1] == 0


def test_the_inverse_is_that_of_the_scale_before_it_is_rounded() -> None:
    """With 1/float16(d) the code of 0.5004 max would be another."""
    d = np.float32(1 + 2**-11 + 2**-12)  # float16 makes it 1 + 2^-10
    x = block(float(d * 127), float(d * np.float32(63.51)))
    assert codes(quantize(x, "q8_0"))[1] == 64


def test_the_quotients_of_q8_differ_somewhere() -> None:
    """Each of the three is another function, also without ties."""
    rng = np.random.default_rng(0)
    x = (rng.integers(-255, 256, (4000, 32)) / 2 * rng.uniform(0.5, 2, (4000, 1))).astype(np.float32)
    found = {each: quantized(x, "q8_0", (), f"{each}, away").tensors[0].tobytes() for each in QUOTIENTS}
    assert len(set(found.values())) == 3


def test_the_sum_of_q8_1_is_a_choice() -> None:
    """Of the codes with the float32 scale, or of the numbers; d is 1."""
    x = block(127, 0.25, 0.25)
    sums = {
        name: float(quantized(x, "q8_1", (), f"x (1/d), away, {name}").sums[0, 0])  # type: ignore[index]  # a format with sums
        for name in ("of codes", "of numbers")
    }
    assert sums == {"of codes": 127.0, "of numbers": 127.5}


def test_q8_k_follows_the_sign_of_the_extreme() -> None:
    """A positive extreme gets the code -127 and a negative scale; ties go to even."""
    x = block(127, 0.5, 1.5, -2.5, 127, size=256)
    stored = quantize(x, "q8_k")
    fields = stored.table.fields_of(stored.by_name)
    assert codes(stored) == [-127, 0, -2, 2, -127]
    assert fields["d"].tolist() == [[-1.0]]
    assert fields["bsums"][0, 0].tolist() == [-254, *[0] * 15]


def test_wrong_sums_of_q8_k_are_refused() -> None:
    """Unless the scale is 0: ggml leaves the sums of a block of zeros as they were."""
    table = FORMATS["q8_k"]
    blocks = np.zeros((1, table.record.itemsize), np.uint8)
    blocks.view(table.record)["bsums"] = 1
    assert not Stored("q8_k", 256, 1, (blocks,)).values.any()
    blocks.view(table.record)["d"] = 1
    with pytest.raises(ArgumentError, match="bsums"):
        Stored("q8_k", 256, 1, (blocks,))


def test_the_scale_of_q4_0_takes_the_sign_of_the_first_extreme() -> None:
    """The extreme gets code 0, its negative the highest."""
    stored = quantize(block(-3, 8, -8), "q4_0")
    fields = stored.table.fields_of(stored.by_name)
    assert fields["d"].tolist() == [[-1.0]]
    assert [each & 15 for each in codes(stored)[:3]] == [11, 0, 15]


def test_a_search_of_iq4_nl_has_the_smaller_error() -> None:
    """It weighs each squared error by the square of the number; rounding the scale to float16 may cost a little."""
    x = np.random.default_rng(0).normal(size=(200, 32)).astype(np.float32)
    one, searched = (quantized(x, "iq4_nl", (), f"{name}, two roundings") for name in ("one fit", "search"))
    errors = [(np.square(x) * np.square(each.values.T - x)).sum(axis=1) for each in (one, searched)]
    assert (errors[1] < errors[0] * 1.01).all()
    assert (errors[1] < errors[0] * 0.9).mean() > 0.1


@pytest.mark.parametrize(
    ("x", "format", "words"),
    [
        (block(1e7), "q8_0", "65504"),
        (block(1e-40), "q8_0", "small"),
        (block(7e4, rest=6.9e4), "q4_1", "65504"),
        (block(1), "q4_k", "format"),
        (block(1, size=48), "q8_0", "rows"),
        (block(float("nan")), "q8_0", "x"),
    ],
)
def test_refusals(x: F32, format: str, words: str) -> None:
    """What a format cannot hold, and formats without a rule."""
    with pytest.raises(ArgumentError, match=words):
        quantize(x, format)
