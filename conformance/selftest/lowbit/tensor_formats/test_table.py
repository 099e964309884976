"""Tables of formats: sizes, checks, and that every format can be drawn, decoded and refused."""

from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from lowbit.backend.wire import as_json, from_json
from lowbit.errors import ArgumentError
from lowbit.numbers.floats import FLOATS
from lowbit.tensor_formats.stored import FORMATS, Stored, dequantize, quantized, stored
from lowbit.tensor_formats.table import Sizes
from lowbit_conformance.suite.clauses.test_formats import fitted, options_of
from lowbit_conformance.suite.format_inputs import FormatCase, drawn


def matrix(name: str, rows: int = 64, columns: int = 16) -> Stored:
    """A random matrix of a format, at least this large."""
    table = FORMATS[name]
    options = options_of(table, 0)
    rows, columns = fitted(table, rows, columns, options)
    return drawn(FormatCase("formats.dequantize/C1", "random", "", name, rows, columns, options=options), powers=False)


@pytest.mark.parametrize("name", FORMATS)
def test_numbers_are_finite_and_of_the_right_shape(name: str) -> None:
    """What is drawn from a table decodes to K × N finite numbers, the sum of their two parts."""
    found = matrix(name)
    assert found.values.shape == (found.rows, found.columns)
    assert np.isfinite(found.values).all()
    assert (found.terms.magnitudes >= np.abs(found.values)).all()
    assert dequantize(found).dtype == np.float32


@pytest.mark.parametrize("name", FORMATS)
def test_every_bit_of_codes_matters(name: str) -> None:
    """Flipping a bit of a field of codes changes a number: no part of it is unread."""
    found = matrix(name, 32, 8)
    tensors = [each.copy() for each in found.tensors]
    table, at = found.table, found.sizes
    fields = table.fields_of(dict(zip((row.name for row in table.tensors), tensors, strict=True)))
    before = table.terms(found.by_name, at)
    for row in table.fields:
        if row.role == "codes" and row.values is None and row.below is None:
            octets = fields[row.name].view(np.uint8) if table.block is None else fields[row.name]
            flat = octets.reshape(-1)
            if np.shares_memory(flat, octets):
                flat[:1] ^= 1
                after = table.terms(dict(zip((each.name for each in table.tensors), tensors, strict=True)), at)
                assert (after.values != before.values).any(), row.name
                flat[:1] ^= 1


@pytest.mark.parametrize("name", FORMATS)
def test_wrong_arrays_are_refused(name: str) -> None:
    """Another dtype, another shape, a missing array, a size that does not fit: each error names the array."""
    found = matrix(name)
    for number, row in enumerate(found.table.tensors):
        wrong = list(found.tensors)
        wrong[number] = wrong[number].astype(np.complex64)
        with pytest.raises(ArgumentError, match=row.name):
            Stored(name, found.rows, found.columns, tuple(wrong), found.options)
        wrong[number] = found.tensors[number][:-1].copy() if found.tensors[number].ndim else np.zeros(2)
        with pytest.raises(ArgumentError, match=row.name):
            Stored(name, found.rows, found.columns, tuple(wrong), found.options)
    with pytest.raises(ArgumentError, match="number of tensors"):
        Stored(name, found.rows, found.columns, (*found.tensors, found.tensors[0]), found.options)
    with pytest.raises(ArgumentError, match=f"options of {name}"):
        Stored(name, found.rows, found.columns, found.tensors, (*found.options, ("colour", 3)))


def test_sizes_must_be_whole() -> None:
    """A quotient of the table that is not whole names what it is the size of."""
    with pytest.raises(ArgumentError, match=r"rows of words is K\*bits = 36; allowed: a multiple of 32"):
        Sizes(9, 1, {"bits": 4}).size("K*bits/32", "rows of words")


def test_scales_and_indices_are_checked() -> None:
    """NaN in a scale, an index beyond the groups, an unknown format: a sentence before anything is computed."""
    found = matrix("gptq-v2")
    scales = found.by_name["scales"].copy()
    scales[0, 1] = np.nan
    with pytest.raises(ArgumentError, match=r"scales\[0, 1\] is nan; allowed: a finite scale"):
        stored("gptq-v2", found.rows, found.columns, found.by_name | {"scales": scales}, **dict(found.options))
    index = found.by_name["g_idx"].copy()
    index[0] = found.sizes.G
    with pytest.raises(ArgumentError, match=r"g_idx\["):
        stored("gptq-v2", found.rows, found.columns, found.by_name | {"g_idx": index}, **dict(found.options))
    with pytest.raises(ArgumentError, match="format is 'gptq'"):
        stored("gptq", 32, 32, {})


@pytest.mark.parametrize("name", FLOATS)
def test_arrays_of_every_float_cross_the_wire(name: str) -> None:
    """Those of float8_e5m2 too, which ml_dtypes gives the kind of numpy's own."""
    array = np.zeros(2, FLOATS[name].dtype)
    assert from_json(as_json(array)).dtype == array.dtype


@pytest.mark.parametrize("options", [3, [("bits", 4)], (("bits", 4, 1),), ((4, "bits"),), (("bits", 4), ("bits", 4))])
def test_options_of_another_form_are_refused(options: Any) -> None:
    """Whatever a file or a backend may say."""
    found = matrix("gptq-v2")
    with pytest.raises(ArgumentError, match="options is of another form"):
        Stored("gptq-v2", found.rows, found.columns, found.tensors, options)
    with pytest.raises(ArgumentError, match="tensors is a list"):
        Stored("gptq-v2", found.rows, found.columns, list(found.tensors), found.options)  # type: ignore[arg-type]  # wrong on purpose


@pytest.mark.parametrize("name", [name for name, each in FORMATS.items() if each.encode])
@pytest.mark.parametrize("magnitude", [np.finfo(np.float32).max, np.finfo(np.float32).smallest_subnormal])
def test_extreme_numbers_are_cast_or_refused(name: str, magnitude: np.float32) -> None:
    """To finite numbers, or by an ArgumentError; either way without a warning of numpy."""
    options = options_of(FORMATS[name], 0)
    rows, columns = fitted(FORMATS[name], 64, 16, options)
    x = np.where(np.arange(columns * rows) % 3, magnitude, -magnitude).astype(np.float32).reshape(columns, rows)
    for choice in FORMATS[name].encode:
        with suppress(ArgumentError):
            assert np.isfinite(quantized(x, name, options, choice).values).all()
