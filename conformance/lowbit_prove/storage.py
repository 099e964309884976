r"""The theorem of storage: a kernel's parts of a stored matrix are the format's numbers.

``lowbit_cppyy`` reads the fields of a stored matrix by code of its own (`lowbit_cppyy.stored.formats`), into codes,
scales and offsets that all formats share (`lowbit_cppyy.stored.parts`). The specification reads them by the format's
`decode`. For all values of a field of integers, the other fields as they are, both give the same numbers:

.. math:: d_{g(k)}\, t_{s(k)}\, v(q_{kn}) + o_{kn} = \mathrm{decode}(\text{fields})_{kn} .

So two readings that were written apart agree in every bit of every code, and where one exchanges two codes the theorem
is refuted. The other integers are random, and floats differ from block to block, so that no two places look alike.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from inspect import getsource
from typing import Any

import numpy as np
import z3

from lowbit.arrays import F64
from lowbit.numbers.floats import FLOATS
from lowbit.tensor_formats.stored import FORMATS
from lowbit.tensor_formats.table import Field, Format, Sizes
from lowbit_cppyy.stored import formats as backend
from lowbit_cppyy.stored.parts import Parts
from lowbit_prove import formats, symbols, terms
from lowbit_prove.reals import REAL
from lowbit_prove.solver import satisfied
from lowbit_prove.symbols import Symbols, unknowns
from lowbit_prove.terms import UndecidedError
from lowbit_prove.theorem import Numbers, Outcome, Proof, Refutation, Theorem, Undecided

LEFT_OUT = {
    "qzeros": "whether zeros fit in a byte depends on their values",
}
"""Fields of integers without a theorem, and why."""


@dataclass(frozen=True)
class Unknown:
    """The attributes of a stored matrix and its table that the backend uses, with symbols in a field."""

    by_name: dict[str, Any]
    rows: int
    columns: int
    options: tuple[tuple[str, int], ...]
    block: int | None

    @property
    def table(self) -> "Unknown":
        return self

    def fields_of(self, tensors: dict[str, Any]) -> dict[str, Any]:
        """The fields themselves: there are no records to split."""
        return tensors


def theorems() -> Iterator[Theorem]:
    """One theorem for each field of integers of each format with kernels, and for each of its widths."""
    for name in backend.PARTS:
        table = FORMATS[name]
        for at in formats.smallest(name):
            for row in table.fields:
                if row.numpy_dtype.kind in "ui" and row.role != "index" and row.name not in LEFT_OUT:
                    width = f"-u{at['bits']}" if "bits" in at.options else ""
                    statement = f"lowbit_cppyy's parts of a matrix are decode's numbers, for all {row.name}"
                    decided = partial(decide, name, row, at)
                    yield Theorem(
                        *("storage", f"{name}{width}/{row.name}", statement),
                        *(partial(_subject, row, at, name), decided, partial(ran, name, row, at)),
                    )


def decide(name: str, row: Field, at: Sizes) -> Outcome:
    """Compare both readings, number by number."""
    table = FORMATS[name]
    fields = given(table, at, row.name)
    try:
        wanted = table.decode(fields, at)
        expected = symbols.of(wanted.products) + symbols.of(wanted.offsets)
        if table.block is not None:
            expected = expected.reshape(at.N, at.K).T
        seen: Any = Unknown(fields, at.K, at.N, tuple(at.options.items()), table.block)
        found = numbers(backend.PARTS[name](seen))
        for place in np.ndindex(expected.shape):
            same = terms.same(found.data[place], expected.data[place], REAL)
            different = z3.Not(same) if isinstance(same, z3.ExprRef) else z3.BoolVal(not same)
            if (values := satisfied(different)) is not None:
                return Refutation(f"the number in row {place[0]} and column {place[1]} is another", values)
    except UndecidedError as error:
        return Undecided(str(error))
    return Proof(at.K * at.N)


def ran(name: str, row: Field, at: Sizes, given_: Numbers) -> Refutation | None:
    """Compare both readings of the matrix of a refutation."""
    table = FORMATS[name]
    fields = given(table, at, row.name)
    fields[row.name] = formats.with_numbers(fields[row.name], given_)
    decoded = table.decode(fields, at)
    expected = decoded.products + decoded.offsets
    if table.block is not None:
        expected = expected.reshape(at.N, at.K).T
    seen: Any = Unknown(fields, at.K, at.N, tuple(at.options.items()), table.block)
    found = values_of(backend.PARTS[name](seen))
    for k, n in np.argwhere(found != expected):
        return Refutation(
            f"the number in row {k} and column {n} is {found[k, n]:g}, and decode gives {expected[k, n]:g}"
        )
    return None


def given(table: Format, at: Sizes, unknown: str) -> dict[str, Any]:
    """The fields of a matrix: one unknown, random integers, and floats that differ."""
    random, found = np.random.default_rng(1), dict[str, Any]()
    for number, row in enumerate(table.fields):
        blocks = () if table.block is None else (at.N, at.K // table.block)
        shape, dtype = (*blocks, *row.sizes(at)), row.numpy_dtype
        count = int(np.prod(shape))
        if row.name == unknown:
            found[row.name] = unknowns(row.name, shape, dtype)
        elif row.role == "index":
            found[row.name] = (np.arange(count) % at.G).reshape(shape).astype(dtype)
        elif dtype.kind in "ui":
            found[row.name] = random.integers(0, 2**8, (*shape, dtype.itemsize), np.uint8).view(dtype)[..., 0]
        else:
            found[row.name] = np.exp2(np.arange(count) % 5 + number).reshape(shape).astype(dtype)
    return found


def numbers(parts: Parts) -> Symbols:
    """The numbers of a matrix from its parts, K × N, by the formula of `lowbit_cppyy.stored.parts`."""
    structure, rows = parts.structure, parts.rows
    group = np.repeat(np.arange(len(parts.lengths)), parts.lengths)
    run = np.arange(rows) // structure.run if structure.run else group
    if structure.is_floats:
        return values(parts)
    scales = exact(parts.scales)
    if structure.scale == "exponent":
        scales = symbols.of(np.exp2(np.asarray(parts.scales, np.float64) - 127))
    each = scales[group] if parts.inner is None else scales[group] * exact(parts.inner)[run]
    found: Symbols = each * values(parts)
    if structure.offset == "center":
        found = found + each * np.float64(-parts.center)
    if structure.offset == "number":
        found = found + exact(parts.offsets)[group]
    if structure.offset == "zero":
        found = found - scales[group] * exact(parts.offsets)[group]
    if structure.offset == "minimum":
        found = found - exact(parts.offsets)[run] * exact(parts.offset_scales)[group]
    if parts.order is None:
        return found
    back: Symbols = found[np.argsort(parts.order)]
    return back


def values_of(parts: Parts) -> F64:
    """The same for parts that are numbers."""
    found: F64 = numbers(parts).data.astype(np.float64)
    return found


def values(parts: Parts) -> Symbols:
    """The values of codes: themselves, signed bytes, numbers of a table, or floats."""
    if parts.structure.is_floats:
        return symbols.of(parts.codes.view(FLOATS[parts.structure.values].dtype)).astype(np.float64)
    if parts.structure.values == "signed":
        signed: Symbols = exact(parts.codes) - np.float64(128)
        return signed
    if parts.structure.values == "codes" or parts.table is None:
        return exact(parts.codes)
    table = np.asarray(parts.table, np.float64)
    codes: Any = parts.codes
    return symbols.of(np.take_along_axis(table, codes.reshape(-1), axis=0)).reshape(codes.shape)


def exact(array: Any) -> Symbols:
    """Numbers as float64."""
    return symbols.of(array).astype(np.float64)


def _subject(row: Field, at: Sizes, name: str) -> str:
    return f"{name} {row} {at.K} {at.N} {dict(at.options)}\n{getsource(backend)}"
