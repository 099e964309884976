r"""Checks of stored matrices whose float16 scales are subnormal.

A conversion of float16 written by hand often takes :math:`2^{-24}, \dots, 1023 \cdot 2^{-24}` for 0, and is right in
every case with scales of usual sizes. Weights with such scales are small, so activations are :math:`2^8` times as large
as usual: nothing else comes near the ends of a type. Weights that a kernel forms in float16 lie on the grid of its
subnormal numbers, or are rounded as usual, so that the usual bound holds.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from lowbit.arrays import F64
from lowbit.tensor_formats.stored import FORMATS, RESULTS, Stored, quantize
from lowbit.tensor_formats.table import Format
from lowbit_conformance.isolation.remote import Remote
from lowbit_conformance.suite.clauses.test_formats import (
    CAST,
    assert_bounded,
    assert_cast_bounded,
    assert_numbers,
    cast_of,
    fitted,
)
from lowbit_conformance.suite.clauses.test_formats_extremes import common_options
from lowbit_conformance.suite.format_inputs import FormatCase, drawn
from lowbit_conformance.suite.marking import Record, Settings, checks

LARGER = 2.0**8
SMALLER = 2.0**-11
"""Magnitude of activations whose scale, 1/127 of the largest of a block, is subnormal."""
LEAST, LARGEST = 512, 1023
"""Multiples of the least float16 number: the larger half of the subnormal numbers."""


def scaled_in_half(table: Format) -> bool:
    """Whether a format has float16 scales and no other float16 numbers."""
    roles = {row.role for row in table.fields if row.dtype == "float16"}
    return roles == {"scale"}


def matrices(clause: str) -> Iterator[FormatCase]:
    """A matrix of each such format."""
    for table in FORMATS.values():
        if scaled_in_half(table):
            options = common_options(table)
            shape = fitted(table, 2 * (table.block or 32), 24, options)
            yield FormatCase(clause, "edge", "subnormal-scales", table.name, *shape, options=options)


def with_subnormal_scales(given: Stored, case: FormatCase) -> Stored:
    """The matrix with subnormal float16 scales, of both signs if these are allowed."""
    rng, changed = case.generator(), dict(given.table.fields_of(given.by_name))
    for row in given.table.fields:
        if row.dtype == "float16":
            shape = changed[row.name].shape
            signs = rng.choice((-1, 1), shape) if row.signed else 1
            integers = rng.integers(LEAST, LARGEST, shape, endpoint=True) * signs
            changed[row.name] = (integers * 2.0**-24).astype(np.float16)
    return replace(given, tensors=given.table.tensors_of(changed, given.sizes))


def weights_of(case: FormatCase) -> Stored:
    return with_subnormal_scales(drawn(case, powers=False), case)


def numbers(clause: str, settings: Settings) -> Iterator[FormatCase]:
    for case in matrices(clause):
        yield from (replace(case, result=own) for own in RESULTS)


@checks("formats.dequantize/C1", numbers)
def test_numbers_with_subnormal_scales(backend: Remote, case: FormatCase) -> None:
    """Every number is the one in the table."""
    assert_numbers(backend, case, weights_of(case))


def products(clause: str, settings: Settings) -> Iterator[FormatCase]:
    for case in matrices(clause):
        for own in RESULTS:
            vectors = 1 if clause.startswith("linear.gemv") else 3
            yield replace(case, vectors=vectors, activations=own, result=own)


def larger_numbers(case: FormatCase) -> F64:
    """Activations, T × K, that make up for small scales."""
    return LARGER * case.generator().standard_normal((case.vectors, case.rows))


@checks(("linear.gemv/C2", "linear.gemm/C2"), products)
def test_products_with_subnormal_scales(backend: Remote, case: FormatCase, record_property: Record) -> None:
    """Activations are larger than usual, and results have usual magnitudes."""
    assert_bounded(backend, case, record_property, larger_numbers(case), weights_of(case))


def casts(clause: str, settings: Settings) -> Iterator[FormatCase]:
    """Each such format with every format of activations that it can be combined with; and activations with such
    scales."""
    for case in matrices(clause):
        for turn, name in enumerate(each for each in CAST if case.rows % (FORMATS[each].block or 1) == 0):
            yield replace(case, vectors=3, activations=name, result=RESULTS[turn % 3])
            if RESULTS[turn % 3] != "float32":  # the type in which most such kernels return their results
                yield replace(case, vectors=3, activations=name, result="float32")
            if any(row.dtype == "float16" for row in FORMATS[name].fields):
                yield replace(case, variant="subnormal-activations", vectors=3, activations=name)


@checks("linear.gemm_cast/C2", casts)
def test_cast_products_with_subnormal_scales(backend: Remote, case: FormatCase, record_property: Record) -> None:
    """Scales of weights or activations are subnormal, and the other scales are ordinary. Results are small, and every
    type holds them."""
    if case.variant == "subnormal-scales":
        assert_cast_bounded(backend, case, record_property, cast_of(case, powers=False), weights_of(case))
    else:
        numbers = case.generator().standard_normal((case.vectors, case.rows)) * SMALLER
        assert_cast_bounded(backend, case, record_property, quantize(numbers.astype(np.float32), case.activations))
