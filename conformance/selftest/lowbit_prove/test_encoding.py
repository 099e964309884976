"""The theorems of encoding: samples of them hold, and casts with a mistake are refuted with numbers that fail again."""

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from lowbit.errors import ArgumentError
from lowbit.tensor_formats import (
    bitsandbytes,
    casts,
    compressed_tensors,
    dense,
    fp8,
    gguf_encode,
    int8,
    kivi,
    microscaling,
    onnx,
)
from lowbit.tensor_formats.stored import FORMATS
from lowbit_prove import catalogue, elements, encoding, grids, returning
from lowbit_prove.theorem import Numbers, Proof, Refutation, Theorem

ALL = {(name, bits): makes for name, bits, makes in grids.grids()}
ONE_IN = 499
"""Runs of largest numbers, of which a test takes one."""


def decided(name: str, bits: int | None = None) -> Any:
    return encoding.decide(FORMATS[name], bits, ALL[name, bits], ONE_IN)


@pytest.mark.parametrize(("name", "bits"), list(ALL))
def test_a_sample_of_each_theorem_holds(name: str, bits: int | None) -> None:
    assert isinstance(decided(name, bits), Proof)


def test_every_format_with_a_cast_has_a_theorem_or_a_reason() -> None:
    for name, table in FORMATS.items():
        proved = any(name == each for each, _ in ALL)
        assert proved != (name in grids.LEFT_OUT) if table.encode else not proved, name


def test_small_theorems_hold_whole() -> None:
    for name in ("gguf-nvfp4", "gguf-mxfp4"):
        assert isinstance(encoding.decide(FORMATS[name], None, ALL[name, None]), Proof)


# Mistakes. Each is planted in what a chapter calls, so the rest of the cast is the specification's own.

Plant = Callable[[pytest.MonkeyPatch], None]


def swapped(module: ModuleType, name: str, made: Callable[[Any], Any]) -> Plant:
    """Put what is made of a function of a chapter in its place."""
    return lambda monkeypatch: monkeypatch.setattr(module, name, made(getattr(module, name)))


def truncated(own: Any) -> Any:
    return lambda numbers, ties: np.trunc(numbers).astype(np.int64)


def other_ties(own: Any) -> Any:
    return lambda numbers, ties: own(numbers, "even" if ties == "away" else "away")


def one_up(own: Any) -> Any:
    """The scale is the next number of its type but one."""

    def wrong(name: Any, numbers: Any) -> Any:
        kept = own(name, numbers)
        return np.where(numbers == 0, kept.view(np.uint16), kept.view(np.uint16) + 1).astype(np.uint16).view(kept.dtype)

    return wrong


def in_float32(own: Any) -> Any:
    """The scale is not rounded to the type in which it is stored."""
    return lambda numbers, name: numbers.astype(np.float32) if name == "float16" else own(numbers, name)


def neighbours(own: Any) -> Any:
    """Codes lie in the order of elements, and not in planes."""

    def wrong(codes: Any, run: int, worth: Any) -> Any:
        planes = codes.reshape(*codes.shape[:-1], -1, run, len(worth)).swapaxes(-1, -2)
        return own(planes.reshape(codes.shape), run, worth)

    return wrong


def unsigned(own: Any) -> Any:
    """A block's scale comes from its largest magnitude, without the sign."""
    return lambda x: np.abs(own(x))


def rounded_up_at_middles(own: Any) -> Any:
    """FP4 rounds a middle away from 0."""
    return lambda quotients: own(quotients * (1 + 2.0**-40))


def away(own: Any) -> Any:
    """Floats round a middle away from 0."""
    return lambda numbers, *others: own(numbers * (1 + 2.0**-40), *others)


def shifted(own: Any) -> Any:
    """Quotients are a thousandth too large."""
    return lambda *given: own(*given) * np.float32(1.001)


def low_half_first(own: Any) -> Any:
    """The first of two codes lies in the low half of a byte."""
    return lambda codes, bits, dtype, order: own(codes, bits, dtype)


def one_more(own: Any) -> Any:
    """Codes between the first and the last are one too high."""
    return lambda codes, *others: own(np.where((codes > 1) & (codes < codes.max()), codes + 1, codes), *others)


MISTAKES: dict[str, tuple[str, int | None, Plant]] = {
    "q8_0 truncates": ("q8_0", None, swapped(gguf_encode, "nearest", truncated)),
    "q8_0 ties": ("q8_0", None, swapped(gguf_encode, "nearest", other_ties)),
    "q8_0 scale": ("q8_0", None, swapped(gguf_encode, "kept_in", one_up)),
    "q8_k truncates": ("q8_k", None, swapped(gguf_encode, "nearest", truncated)),
    "q4_0 order": ("q4_0", None, swapped(gguf_encode, "joined", neighbours)),
    "q4_0 sign": ("q4_0", None, swapped(gguf_encode, "extreme", unsigned)),
    "q4_1 code": ("q4_1", None, swapped(gguf_encode, "packed", one_more)),
    "tq2_0 order": ("tq2_0", None, swapped(gguf_encode, "joined", neighbours)),
    "gguf-mxfp4 ties": ("gguf-mxfp4", None, swapped(gguf_encode, "floats_nearest", rounded_up_at_middles)),
    "int8 scale": ("int8-token-f16", None, swapped(int8, "rounded", in_float32)),
    "int8 truncates": ("int8-token", None, swapped(int8, "nearest", truncated)),
    "int8 quotient": ("int8-token-bf16", None, swapped(int8, "divided", shifted)),
    "fp8 ties": ("fp8-channel", None, swapped(fp8, "rounded", away)),
    "mxfp4 ties": ("mxfp4", None, swapped(microscaling, "round_to", away)),
    "mxfp6 ties": ("mxfp6-e2m3", None, swapped(microscaling, "round_to", away)),
    "dense ties": ("bfloat16", None, swapped(dense, "rounded", away)),
    "nf4 order": ("nf4", None, swapped(bitsandbytes, "join", low_half_first)),
    "kivi scale": ("kivi-keys", 4, swapped(kivi, "kept_in", one_up)),
    "ct-pack truncates": ("ct-pack", 4, swapped(compressed_tensors, "nearest", truncated)),
    "matmulnbits zero ties": ("matmulnbits", 4, swapped(onnx, "nearest", other_ties)),
    "matmulnbits zero truncates": ("matmulnbits", 2, swapped(onnx, "nearest", truncated)),
    "matmulnbits ties": ("matmulnbits-symmetric", 4, swapped(onnx, "nearest", other_ties)),
}


@pytest.mark.parametrize("mistake", list(MISTAKES))
def test_a_mistake_is_refuted_with_numbers_that_fail_again(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, bits, plant = MISTAKES[mistake]
    (theorem,) = [each for each in encoding.theorems() if each.name == f"{name}{f'-u{bits}' if bits else ''}/rounding"]
    with monkeypatch.context() as planted:
        plant(planted)
        found = decided(name, bits)
        assert isinstance(found, Refutation), found
        again = theorem.run(found.numbers)
        assert again is not None and again.reason == found.reason
    assert theorem.run(found.numbers) is None


def test_a_mistake_with_one_scale_is_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is found where all scales are decided, and its numbers have that scale."""
    own = casts.inverse
    monkeypatch.setattr(
        gguf_encode, "inverse", lambda d: own(np.where(np.abs(d).astype(np.float16) == 1.5, d * 1.01, d))
    )
    grid = replace(ALL["q4_0", None](""), every=False, first=8 * 1.49, last=8 * 1.51)
    found = encoding.decide(FORMATS["q4_0"], None, lambda choice: grid)
    assert isinstance(found, Refutation) and np.float16(abs(float(found.numbers["m"])) / 8) == 1.5


def test_numbers_of_no_refutation_are_refused() -> None:
    (theorem,) = catalogue.chosen(["encoding/q8_0/rounding"])
    wrong: list[Numbers] = [{}, {"choice": "x / d", "m": 1.0, "x": 1.0}, {"choice": "x / d, even", "m": 1}]
    for numbers in wrong:
        with pytest.raises(ArgumentError):
            theorem.run(numbers)


# Bytes that return.


@pytest.mark.parametrize("theorem", list(returning.theorems()), ids=lambda each: each.name)
def test_bytes_return(theorem: Theorem) -> None:
    name, _, bits = theorem.name.removesuffix("/bytes").partition("-u")
    key = name, int(bits) if bits else None
    assert isinstance(returning.decide(FORMATS[name], key[1], ALL[key], 61), Proof)


def test_scales_that_do_not_return_are_counted() -> None:
    """Of E4M3's, 256, 288, 320, 352, 384 and 416 become 448; the largest returns."""
    found = returning.decide(FORMATS["gguf-nvfp4"], None, ALL["gguf-nvfp4", None])
    assert isinstance(found, Proof)
    cast = encoding.Cast(FORMATS["gguf-nvfp4"], None, "reference", ALL["gguf-nvfp4", None]("reference"))
    scales, lost = returning.kept_scales(cast, 1.0, 1)
    assert lost == 6 and list(scales[-2:]) == [240.0, 448.0]


def test_bytes_of_compressed_tensors_do_not_return() -> None:
    """The exception that the chapter names: bfloat16 has no number for 123 times the scale."""
    d = 135 / 128
    grid = ALL["ct-int", None]("reference")
    found = encoding.Cast(FORMATS["ct-int"], None, "reference", grid).encoded(
        np.array([127 * d]), np.array([[-123 * d]])
    )
    assert found.scales[0] == d and found.values[0, 0] == -124 * d


RETURNING = {
    "q8_0 truncates": "encoding/q8_0/bytes",
    "q8_0 scale": "encoding/q8_0/bytes",
    "q4_0 order": "encoding/q4_0/bytes",
    "q4_0 sign": "encoding/q4_0/bytes",
    "q4_1 code": "encoding/q4_1/bytes",
}


@pytest.mark.parametrize("mistake", RETURNING)
def test_bytes_that_do_not_return_are_refuted(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, bits, plant = MISTAKES[mistake]
    (theorem,) = [each for each in returning.theorems() if each.id == RETURNING[mistake]]
    with monkeypatch.context() as planted:
        plant(planted)
        found = returning.decide(FORMATS[name], bits, ALL[name, bits], 61)
        assert isinstance(found, Refutation) and theorem.run(found.numbers) is not None
    assert theorem.run(found.numbers) is None


# Elements of OCP MX.


def test_products_of_elements_are_exact_in_float32() -> None:
    (theorem,) = catalogue.chosen(["formats/ocp-mx/products"])
    assert theorem.decide() == Proof(518400, "enumeration")


def test_elements_are_what_their_types_say() -> None:
    """256 patterns of 8 bits, of which 8 and 2 are no numbers; and the largest of each format."""
    largest = {
        "mxfp8-e5m2": 57344,
        "mxfp8-e4m3": 448,
        "mxfp6-e3m2": 28,
        "mxfp6-e2m3": 7.5,
        "mxfp4": 6,
        "mxint8": 127 / 64,
    }
    missing = {"mxfp8-e5m2": 8, "mxfp8-e4m3": 2}
    for name, most in largest.items():
        found = elements.elements(name)
        assert len(found) == 2 ** elements.BITS[name] and np.isnan(found).sum() == missing.get(name, 0)
        assert np.nanmax(found) == most


def test_a_product_that_is_not_exact_is_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 most are not."""
    own = elements.in_float32
    monkeypatch.setattr(elements, "in_float32", lambda first, second: own(first, second).astype(ml_dtypes.bfloat16))
    found = elements.decide()
    assert isinstance(found, Refutation) and elements.ran(found.numbers) is not None
    monkeypatch.undo()
    assert elements.ran(found.numbers) is None
