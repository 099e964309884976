"""Numbers of formats whose owners apply scale and zero in steps, and round each."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from lowbit.arrays import Array
from lowbit.tensor_formats.stored import FORMATS, RESULTS, Stored, dequantized
from lowbit_conformance.suite.format_inputs import FormatCase, drawn

OPTIONS = {
    "hqq-axis0": (("bits", 4), ("group_size", 64)),
    "hqq-axis1-3bit": (("group_size", 64),),
    "kivi-values": (("bits", 4), ("group_size", 32)),
    "kivi-keys-bf16": (("bits", 2), ("tokens", 32)),
    "nvfp4": (),
    "nvfp4-pack": (),
}
ONES = {"kivi-values": 0x11111111, "kivi-keys-bf16": 0x55555555, "nvfp4": 0x22, "nvfp4-pack": 0x22}
"""Words whose codes all mean 1."""


def matrix(name: str) -> Stored:
    case = FormatCase("formats.dequantize/C1", "random", "", name, 64, 48, options=OPTIONS[name], seed=1)
    return drawn(case, powers=False)


def numbers(weights: Stored, **constants: float) -> Array:
    """The numbers of the matrix, with some of its tensors constant."""
    tensors = weights.by_name | {name: np.full_like(weights.by_name[name], each) for name, each in constants.items()}
    return replace(weights, tensors=tuple(tensors.values())).values


def in_steps(weights: Stored) -> Array:
    """The owner's steps in arrays of the type itself: numpy and ml_dtypes round each operation."""
    name = weights.format
    if name.startswith("hqq"):
        parts = (
            numbers(weights, scale=1, zero=0),
            -numbers(weights, W_q=0, scale=1),
            numbers(weights, W_q=0, zero=-1),
        )
        codes, zero, scale = (each.astype(np.float16) for each in parts)
        return np.asarray((codes - zero) * scale)
    if name.startswith("kivi"):
        kind = ml_dtypes.bfloat16 if name.endswith("bf16") else np.float16
        parts = (
            numbers(weights, scale=1, minimum=0),
            numbers(weights, codes=ONES[name], minimum=0),
            numbers(weights, codes=0),
        )
        codes, scale, minimum = (each.astype(kind) for each in parts)
        return np.asarray(codes * scale + minimum)
    packed, of_tensor = ("weight", "weight_scale_2") if name == "nvfp4" else ("weight_packed", "weight_global_scale")
    codes = numbers(weights, weight_scale=1, **{of_tensor: 1}).astype(np.float32)
    scale = numbers(weights, **{packed: ONES[name], of_tensor: 1}).astype(np.float32)
    factor = weights.by_name[of_tensor]
    return np.asarray(codes * (scale * factor if name == "nvfp4" else scale / factor))


@pytest.mark.parametrize("name", OPTIONS)
def test_the_steps_are_the_owners(name: str) -> None:
    """They are one of the choices for a result of their type, and differ from the number rounded once."""
    weights = matrix(name)
    expected = in_steps(weights)
    (result,) = (each for each in RESULTS if np.dtype(getattr(ml_dtypes, each, each)) == expected.dtype)
    once, *_, steps = dequantized(weights, result)
    assert np.array_equal(steps, expected)
    assert not np.array_equal(once, expected)


def test_steps_in_16_bits_are_for_results_of_that_type() -> None:
    """Steps in float32 are for every result."""
    for name in OPTIONS:
        found = {result: len(list(dequantized(matrix(name), result))) for result in RESULTS}
        own = FORMATS[name].fields[1].dtype if "nvfp4" not in name else "float32"
        assert found == {each: 1 + (each != "float32") + (own in (each, "float32")) for each in RESULTS}
