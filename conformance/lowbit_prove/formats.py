r"""The theorems of formats: no two bits of a stored matrix share a place, and none is lost.

For an integer field (codes, zeros, scales of runs) of a format, with the other fields fixed,

.. math:: \mathrm{decode}(u) = \mathrm{decode}(v) \;\Rightarrow\; u = v .

So every bit of the field can be recovered from the numbers of a matrix. A decoder that reads a bit twice, omits one or
confuses two has no such inverse. One that exchanges two codes does have an inverse; the theorem of *storage*
(`lowbit_prove.storage`) covers that.

The other integers have all bits set, and floats are 1. The matrix is the smallest that the format allows; for a block
format, one block. Products and offsets are separate, as `decode` returns them.
"""

from collections.abc import Iterator, Mapping
from functools import cache, partial
from inspect import getsource
from itertools import product
from sys import modules
from typing import Any

import numpy as np
import z3

from lowbit.arrays import Array
from lowbit.errors import ArgumentError
from lowbit.tensor_formats.stored import FORMATS
from lowbit.tensor_formats.table import Field, Format, Sizes
from lowbit_prove import symbols, terms
from lowbit_prove.solver import satisfied, variables
from lowbit_prove.symbols import unknowns
from lowbit_prove.terms import UndecidedError
from lowbit_prove.theorem import Numbers, Outcome, Proof, Refutation, Theorem, Undecided, whole

GROUP = 32
"""The value of options that may be any number; four times as much if a format requires more."""
ROLES = ("codes", "zero", "scale", "other")
SIZES = (32, 64, 128, 256)
"""Rows and columns to try. 32 codes of any width fill whole words."""
LARGER: Mapping[str, tuple[int, int]] = {
    **{"awq-gemv": (1024, 1), "int4-tile-packed": (1024, 8)},
    **dict.fromkeys(("matmulnbits", "matmulnbits-symmetric"), (128, 1)),
}
"""Rows and columns without padding, for formats that pad more."""
OTHER = "_other"
"""The suffix of the name of a word's other value."""
PACKED_WIDTHS = "bits"
"""The option for which every value has a theorem."""


def theorems() -> Iterator[Theorem]:
    """One theorem for each field of integers of each format, and for each width of the format."""
    for name, each in FORMATS.items():
        for at in smallest(name):
            for row in each.fields:
                if decidable(name, row):
                    width = f"-u{at[PACKED_WIDTHS]}" if PACKED_WIDTHS in at.options else ""
                    statement = f"decode is one to one in {row.name}"
                    subject = partial(_subject, each, row, at)
                    decisions = partial(decide, each, row, at), partial(ran, each, row, at)
                    yield Theorem("formats", f"{name}{width}/{row.name}", statement, subject, *decisions)


LEFT_OUT: Mapping[str, str] = {
    **dict.fromkeys(
        ("iq1_m", "iq1_s", "iq2_s", "iq2_xs", "iq2_xxs", "iq3_s", "iq3_xxs"), "codes name entries of a grid"
    ),
    **dict.fromkeys(("gguf-mxfp4", "gguf-nvfp4", "mxfp4", "nvfp4", "nvfp4-pack"), "two codes are zeros"),
    **dict.fromkeys(("mxfp6-e2m3", "mxfp6-e3m2"), "two codes are zeros"),
    **dict.fromkeys(("fp4", "fp4-double"), "two codes are zeros"),
    "tq1_0": "several bytes have the same digits",
    "nf4-double/absmax": "scales are rounded to float32",
}
"""Formats whose codes their numbers do not determine, or not by a computation on bits, and why."""


def decidable(name: str, row: Field) -> bool:
    """Whether there is a theorem about a field."""
    plain = row.numpy_dtype.kind in "ui" and row.role in ROLES and row.below is None
    return plain and name not in LEFT_OUT and f"{name}/{row.name}" not in LEFT_OUT


@cache
def smallest(name: str) -> tuple[Sizes, ...]:
    """The sizes of the smallest matrix of a format, for each of its widths."""
    table, found = FORMATS[name], []
    choices = [values or (GROUP, 4 * GROUP) for values in table.options.values()]
    widths = set[int | None]()
    for values in product(*choices):
        options = dict(zip(table.options, values, strict=True))
        if options.get(PACKED_WIDTHS) in widths:
            continue
        for rows, columns in _tried(name):
            if (at := _sizes(table, rows, columns, options)) is not None:
                widths.add(options.get(PACKED_WIDTHS))
                found.append(at)
                break
    return tuple(found)


def _tried(name: str) -> list[tuple[int, int]]:
    """Rows and columns, the smallest matrices first."""
    if name in LARGER:
        return [LARGER[name]]
    columns = (1, *SIZES) if FORMATS[name].block is not None else SIZES
    return sorted(product(SIZES, columns), key=lambda sizes: (sizes[0] * sizes[1], sizes))


def _sizes(table: Format, rows: int, columns: int, options: Mapping[str, int]) -> Sizes | None:
    try:
        at = table.sizes(rows, columns, dict(options))
        for each in (*table.tensors, *table.fields):
            each.sizes(at)
    except ArgumentError:
        return None
    return at


def given(table: Format, at: Sizes, unknown: tuple[str, ...]) -> dict[str, Any]:
    """The fields of a matrix: symbols for the unknown fields; elsewhere all bits of integers are set, and floats are
    1."""
    found = dict[str, Any]()
    for row in table.fields:
        blocks = () if table.block is None else (at.N, at.K // table.block)
        shape, dtype = (*blocks, *row.sizes(at)), row.numpy_dtype
        if row.name in unknown:
            found[row.name] = unknowns(row.name, shape, dtype)
        elif dtype.kind in "ui" and row.role != "index":
            found[row.name] = np.full(shape, -1, f"i{dtype.itemsize}").view(dtype)
        else:
            found[row.name] = np.ones(shape, dtype) if dtype.kind not in "ui" else np.zeros(shape, dtype)
    return found


def decide(table: Format, row: Field, at: Sizes) -> Outcome:
    """Whether the numbers determine the field."""
    try:
        fields = given(table, at, (row.name,))
        terms_ = table.decode(fields, at)
        numbers = [each for part in (terms_.products, terms_.offsets) for each in symbols.of(part).data.flat]
        return one_to_one(list(fields[row.name].data.flat), [each for each in numbers if not terms.known(each)])
    except UndecidedError as error:
        return Undecided(str(error))


def one_to_one(words: list[Any], numbers: list[Any]) -> Outcome:
    """Whether numbers that are computed from words determine the words.

    The numbers in which a word occurs should determine it. So each word is decided separately, for all values of the
    other words, equal or not. If these numbers alone do not determine a word, all words are decided together.
    """
    equal: dict[str, list[Any]] = {str(word): [] for word in words}
    every = []
    for number in numbers:
        names = list(variables(number.integer))
        again = z3.substitute(number.integer, *((name, _other(name)) for name in names))
        every.append(number.integer == again)
        for name in names:
            equal[str(name)].append(every[-1])
    for word in words:
        if satisfied(z3.And(word != _other(word), *equal[str(word)])) is None:
            continue
        if (found := satisfied(z3.And(word != _other(word), *every))) is not None:
            return Refutation(f"two values of {word} give the same numbers", found)
    return Proof(len(words))


def ran(table: Format, row: Field, at: Sizes, numbers: Numbers) -> Refutation | None:
    """Decode both values of the field of a refutation; words that it does not name are the same in both."""
    fields = given(table, at, (row.name,))
    first = with_numbers(fields[row.name], numbers)
    second = with_numbers(fields[row.name], numbers, OTHER)
    found = [table.decode({**fields, row.name: each}, at) for each in (first, second)]
    same = all(np.array_equal(getattr(found[0], part), getattr(found[1], part)) for part in ("products", "offsets"))
    if not same or np.array_equal(first, second):
        return None
    return Refutation(f"two values of {row.name} give the same numbers")


def with_numbers(field: symbols.Symbols, numbers: Numbers, other: str = "") -> Array:
    """The field of a refutation: the number of each variable by its name, or 0 if there is none.

    Args:
        field: of variables.
        numbers: of the refutation.
        other: the suffix of the name of a variable's other value, used if there is such a number.
    """
    values = []
    for name in map(str, field.data.flat):
        chosen = next((each for each in (f"{name}{other}", name) if each in numbers), None)
        values.append(0 if chosen is None else whole(numbers, chosen))
    bits = np.array(values, f"u{field.dtype.itemsize}")
    return bits.view(field.dtype).reshape(field.shape)


def _other(word: Any) -> Any:
    """The variable for another value of a word."""
    return z3.BitVec(f"{word}{OTHER}", word.size())


def _subject(table: Format, row: Field, at: Sizes) -> str:
    decoding = getattr(table.decode, "func", table.decode)
    return f"{table.name} {row} {at.K} {at.N} {dict(at.options)}\n{getsource(modules[decoding.__module__])}"
