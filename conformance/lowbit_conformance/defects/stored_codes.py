"""Stored matrices seen as integers: codes, the step from one code to the next, and what a code of 0 is worth.

Nothing here knows a format. The numbers of a matrix are compared with those of the same matrix with all bits of its
codes cleared and with all of them set, and so the step follows from the table. Where the numbers are no multiples of a
step, the codes stand for something else, such as floats, and there is no such view.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from lowbit.arrays import F64, Array
from lowbit.numbers.floats import FLOATS
from lowbit.tensor_formats.stored import Stored
from lowbit.tensor_formats.table import Terms

CLOSE = 1e-6
"""Tolerance of a code: codes are integers except for roundings in float64."""
PLAIN = 17
"""Byte for integer scales, also of 4 bits in a byte: none is 0."""


@dataclass(frozen=True, eq=False)
class Codes:
    """The view: a number is ``codes * step + base``, each K × N.

    Attributes:
        codes: integers from 0 on, or of both signs if the format stores two's complement.
        step: the value of one code.
        base: the value of code 0.
        bits: of a code.
        hidden: the zero if the step is 0, so that neither the base nor the numbers show it.
    """

    codes: F64
    step: F64
    base: F64
    bits: int
    hidden: F64

    @property
    def values(self) -> F64:
        return self.codes * self.step + self.base

    @property
    def zero(self) -> F64:
        """The code with the value 0."""
        return zero_of(self.base, self.step, self.hidden)

    def at(self, scale: npt.NDArray[np.int64] | None = None, zero: npt.NDArray[np.int64] | None = None) -> Terms:
        """The numbers with the steps of some other rows and the bases of others."""
        step = self.step if scale is None else self.step[scale]
        return Terms(self.codes * step, self.base if zero is None else self.base[zero])


def reread(weights: Stored, changed: dict[str, Array]) -> Terms:
    """The numbers of a matrix with other arrays for some of its fields."""
    table, at = weights.table, weights.sizes
    with np.errstate(all="ignore"):
        found = table.decode(table.fields_of(weights.by_name) | changed, at)
    return found if table.block is None else found.across(at)


def filled(weights: Stored, octet: int | None, plain: bool = False, whole: bool = True) -> F64:
    """The numbers of the matrix with all bytes of its codes equal, or unchanged; with plain scales none is 0.

    Without offsets if not `whole`, so that a zero keeps its sign.
    """
    fields = weights.table.fields_of(weights.by_name)
    for row in weights.table.fields:
        shape = fields[row.name].shape
        if row.role == "codes" and octet is not None:
            same = np.full(fields[row.name].nbytes, octet, np.uint8)
            fields[row.name] = same.view(row.numpy_dtype).reshape(shape)
        elif row.role == "scale" and plain:
            value = PLAIN if row.numpy_dtype.kind in "iu" and row.dtype not in FLOATS else 1
            fields[row.name] = np.full(shape, value).astype(row.numpy_dtype)
    terms = reread(weights, fields)
    return terms.values if whole else terms.products


def numbers_of(x: Any) -> F64:
    """float64, T × K."""
    return np.asarray(x.values.T if isinstance(x, Stored) else np.atleast_2d(x).astype(np.float64))


def like(x: Any, total: F64) -> Array:
    return total[0] if not isinstance(x, Stored) and x.ndim == 1 else total


@lru_cache(maxsize=64)
def codes_of(weights: Stored) -> Codes | None:
    """The view of a matrix; None if its codes are not integers."""
    rows = [row for row in weights.table.fields if row.role == "codes"]
    if not rows or any(row.dtype in FLOATS for row in rows):
        return None
    signed = any(row.dtype == "int8" for row in rows)
    bits = 8 if signed else width(weights)
    octet, most = (1, 1) if signed else (255, 2**bits - 1)
    base, plain = filled(weights, 0), filled(weights, 0, True)
    step, unit = (filled(weights, octet) - base) / most, (filled(weights, octet, True) - plain) / most
    with np.errstate(all="ignore"):  # scales of 0 hide codes; plain ones do not
        exact = (filled(weights, None, True) - plain) / unit
    codes = np.round(exact)
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    if not (np.abs(exact - codes) < CLOSE).all() or codes.min() < low or codes.max() > high:
        return None
    return Codes(codes, step, base, bits, -plain / unit)


def zero_of(base: F64, step: F64, hidden: F64) -> F64:
    """The zero in codes, from a scaled base; `hidden` if both the step and the base are 0."""
    there = step != 0
    found: F64 = np.where(there, -base / np.where(there, step, 1.0), np.where(base == 0, hidden, 0.0))
    return found


def width(weights: Stored) -> int:
    """The bits of a code: those of all fields of codes, for each number."""
    fields = weights.table.fields_of(weights.by_name)
    octets = sum(fields[row.name].nbytes for row in weights.table.fields if row.role == "codes")
    return max(1, 8 * octets // (weights.rows * weights.columns))


def run_of(weights: Stored) -> int:
    """The number of rows of a group, from its option, of a block, or all rows."""
    options = dict(weights.options)
    named = next((options[name] for name in ("group_size", "block_size", "blocksize") if options.get(name)), 0)
    shapes = [str(size) for row in weights.table.fields if row.role == "scale" for size in row.shape]
    runs = [int(found[1]) for size in shapes if (found := re.fullmatch(r"K//?(\d+)", size))]
    return int(named or weights.table.block or (runs[0] if runs else weights.rows))


# **Codes in integers**: the codes in one integer of a field, in order.


def split(array: Array, bits: int) -> Array:
    """The codes of each integer from its lowest bits up, on a new last axis."""
    width = 8 * array.dtype.itemsize
    shifts = np.arange(0, width - width % bits, bits).astype(np.uint64)
    wide = np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}").astype(np.uint64)
    found: Array = (wide[..., np.newaxis] >> shifts) & np.uint64(2**bits - 1)
    return found


def joined(codes: Array, like: Array, bits: int) -> Array:
    """The inverse of `split`."""
    shifts = np.arange(0, codes.shape[-1] * bits, bits).astype(np.uint64)
    total = np.bitwise_or.reduce(codes << shifts, axis=-1).astype(f"u{like.dtype.itemsize}")
    return np.ascontiguousarray(total).view(like.dtype).reshape(like.shape)
