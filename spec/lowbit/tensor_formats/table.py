r"""Formats as tables: what the bytes of a stored matrix mean.

Every tool that quantises a model writes small codes, scales and perhaps zeros, and each lays them out in its own way. A
kernel is right for one of these layouts and wrong for the next. This chapter defines what a *format* is, so that each
takes about a page: a table of its *fields* and one function, `decode`, from fields to exact numbers. Everything that a
backend does with a format follows from these two: dequantising it, multiplying by it, and the cases and mistakes by
which the conformance suite tests that.

**A stored matrix** holds :math:`K \times N` numbers :math:`W`, as in ``y = x W``: K is the dimension of the sum.
Checkpoints of PyTorch and GGUF store the transposed matrix, N × K; each table says which sizes its fields have.

**A field** has a name, a dtype and a shape. Sizes are written in K, N, the number of groups G and the options of the
format, for example ``K*bits/32``. A quotient with one slash must be whole, one with two is rounded up: ``K*bits//32``
is the number of words that hold K codes, the last perhaps in part. Sizes are computed from left to right. A dtype is
one of numpy's integers, or a float of the chapter `floats`. Numbers of fewer than 8 bits are packed into wider
integers, and `decode` says how. NaN and infinity are refused in every float field.

**A block format** has a single field, of bytes. A row of K numbers is cut into blocks, and each block is a short record
with fields of its own, for example a scale and 16 bytes of codes.

**Terms.** A kernel may compute the weight :math:`s (q - z)` first, or sum :math:`s q` and :math:`-s z` apart, and its
rounding errors differ accordingly. So `decode` gives a weight in two parts, the *product* that depends on the code and
the *offset* that does not. Both are exact in float64 unless a chapter says otherwise.

**Sources.** Each format names its owner, and each trap names where it was found.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt

from lowbit.arrays import F64, Array
from lowbit.contract.checks import check_array, check_choice, check_integer
from lowbit.errors import ArgumentError

Role = Literal["codes", "scale", "zero", "index", "sum", "other"]
"""The purpose of a field: it decides how test inputs are drawn, which mistakes are tried, and what is refused. A *sum*
follows from the other fields; the format's `check` refuses a wrong one where it matters."""

OPERATORS = re.compile(r"(\*|//|/)")
"""The operators of sizes, applied from left to right."""

MOST_SIZE = 2**31
"""The largest K and N: no format here stores larger matrices in one tensor."""


@dataclass(frozen=True)
class Field:
    """One row of a format's table.

    Attributes:
        name: as the owner of the format spells it.
        dtype: the name of a dtype of numpy, or of a type of `lowbit.numbers.floats`.
        shape: sizes, each a number or a product and quotient of names: ``"K*bits/32"``.
        role: see `Role`.
        holds: the meaning of its numbers, in a few words.
        below: for integers with a smaller range than their dtype's, the exclusive upper limit, a number or a size.
        values: the only allowed values, if there are few.
        signed: for scales, whether the owner's tools write negative ones too.
    """

    name: str
    dtype: str
    shape: tuple[str | int, ...]
    role: Role
    holds: str
    below: str | int | None = None
    values: tuple[int, ...] | None = None
    signed: bool = False

    @property
    def numpy_dtype(self) -> np.dtype[np.generic]:
        """The dtype of its array, little-endian."""
        return np.dtype(getattr(ml_dtypes, self.dtype, self.dtype))

    def sizes(self, at: "Sizes") -> tuple[int, ...]:
        """Its shape in a matrix of these sizes."""
        return tuple(at.size(each, f"shape of {self.name}") for each in self.shape)


@dataclass(frozen=True)
class Sizes:
    """The sizes of one matrix and the options of its format, by the names that tables use.

    >>> at = Sizes(K=4096, N=11008, options={"bits": 4, "group_size": 128})
    >>> at.G, at.size("K*bits/32", "rows")
    (32, 512)
    >>> at.size("K//1000*8/group_size", "padded groups")
    Traceback (most recent call last):
    lowbit.errors.ArgumentError: padded groups is K//1000*8 = 40; allowed: a multiple of 128
    """

    K: int
    N: int
    options: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def G(self) -> int:  # noqa: N802 - the symbol of the tables
        """Groups along K; the last may be short. A format without groups has one."""
        return -(-self.K // self.options.get("group_size", self.K))

    def __getitem__(self, name: str) -> int:
        return self.options[name] if name in self.options else int(getattr(self, name))

    def size(self, expression: str | int, what: str) -> int:
        """The value of a size that a table writes as a number or an expression.

        Args:
            expression: ``128`` or ``"K*bits/32"``.
            what: the name of the size, for the error.

        Raises:
            ArgumentError: a quotient with ``/`` is not whole.
        """
        if isinstance(expression, int):
            return expression
        first, *steps = OPERATORS.split(expression)
        total, done = self._number(first), first
        for operator, name in zip(steps[::2], steps[1::2], strict=True):
            by = self._number(name)
            if operator == "/" and total % by:
                raise ArgumentError(what, f"{done} = {total}", f"a multiple of {by}")
            total = total * by if operator == "*" else -(-total // by)
            done += operator + name
        return total

    def _number(self, name: str) -> int:
        return int(name) if name.isdigit() else self[name]

    def group_of_row(self) -> npt.NDArray[np.int64]:
        """int64, K: the group of each row, for groups that are runs of ``group_size`` rows, or of all rows."""
        return np.arange(self.K) // self.options.get("group_size", self.K)


@dataclass(frozen=True)
class Terms:
    """The numbers of a matrix, as sums of two parts.

    Attributes:
        products: float64, K × N: the part that depends on the code of each element.
        offsets: float64, of a shape that broadcasts to K × N: the part that does not; 0 for formats without zeros.
    """

    products: F64
    offsets: F64 | float = 0.0

    @property
    def values(self) -> F64:
        """float64, K × N: the numbers themselves."""
        total: F64 = self.products + self.offsets
        return total

    @property
    def magnitudes(self) -> F64:
        """float64, K × N: :math:`|product| + |offset|`, the gauge of kernels that sum the two parts separately."""
        total: F64 = np.abs(self.products) + np.abs(self.offsets)
        return total

    def across(self, at: "Sizes") -> "Terms":
        """The terms of a block format, N × blocks × elements, as those of a matrix."""
        offsets = np.broadcast_to(self.offsets, self.products.shape)
        return Terms(self.products.reshape(at.N, at.K).T, offsets.reshape(at.N, at.K).T)


Tensors = Mapping[str, Array]
"""The fields of a matrix by name; of a block format, each of shape N × blocks × the field's own.

The terms that a block format's `decode` returns are N × blocks × elements."""
Decode = Callable[[Tensors, Sizes], Terms]
Encode = Callable[..., dict[str, Array]]
"""Takes numbers and sizes; for a format with a field `summed`, also that field of a cast under test."""
Stepwise = Callable[[Tensors, Sizes], Array]


@dataclass(frozen=True, kw_only=True, eq=False)
class Format:
    """One format: its table and the meaning of the table.

    Attributes:
        name: as a backend declares it: ``gptq-v2``.
        title: a few words.
        fields: of the whole matrix; those of a block format are of one block.
        decode: from fields to exact numbers.
        encode: from numbers (float64) to fields, if the format defines that. If kernels differ, there is one function
            for each choice, by its name; the first is the reference of the format's owner. The numbers are K × N; for a
            block format they are N × blocks × elements, and the fields N × blocks × the field's own shape.
        options: the allowed values of each option; None for any positive integer.
        summed: the field with a sum or mean of float32, which a cast may add in any order; None if there is none.
            `encode` uses the one of a cast under test, if some order can give it.
        block: for a block format, the number of elements of a block; else None.
        check: checks what the table cannot express; takes fields and sizes, and raises `ArgumentError`.
        source: the owner's definition.
        traps: common mistakes of kernels, a sentence each.
        spread: fields of a block whose bits have no field of their own in its record, as test inputs draw them.
        sums: for activations whose blocks store their sum: reads it, float64, N × blocks.
        stepwise: from fields to numbers K × N, as the owner's code computes them: each step rounded to the dtype of the
            result. None if that equals the exact number, rounded once.
        complete: makes a valid matrix of fields that test inputs draw independently: puts the bits of `spread` in their
            places, and corrects the sums.
    """

    name: str
    title: str
    fields: tuple[Field, ...]
    decode: Decode
    source: str
    encode: Mapping[str, Encode] = field(default_factory=dict)
    options: Mapping[str, tuple[int, ...] | None] = field(default_factory=dict)
    summed: str | None = None
    block: int | None = None
    check: Callable[[Tensors, Sizes], None] | None = None
    traps: tuple[str, ...] = ()
    spread: tuple[Field, ...] = ()
    sums: Callable[[Tensors], F64] | None = None
    stepwise: Stepwise | None = None
    complete: Callable[[Tensors, Sizes], dict[str, Array]] | None = None

    @cached_property
    def record(self) -> np.dtype[np.void]:
        """The record of one block, as a packed structured dtype."""
        return np.dtype([(each.name, each.numpy_dtype, each.shape) for each in self.fields])

    @cached_property
    def tensors(self) -> tuple[Field, ...]:
        """The fields of the whole matrix: for a block format one, of bytes."""
        if self.block is None:
            return self.fields
        shape = ("N", f"K*{self.record.itemsize}/{self.block}")
        return (Field("blocks", "uint8", shape, "other", f"records of {self.record.itemsize} bytes, row by row"),)

    def sizes(self, rows: int, columns: int, options: Mapping[str, int]) -> Sizes:
        """The sizes of a matrix, checked.

        Raises:
            ArgumentError: sizes that the format cannot have, an option that is missing, unknown or not allowed.
        """
        check_integer("rows", rows, 1, MOST_SIZE)
        check_integer("columns", columns, 1, MOST_SIZE)
        if options.keys() != self.options.keys():
            raise ArgumentError(f"options of {self.name}", sorted(options), ", ".join(self.options) or "none")
        for name, allowed in self.options.items():
            if allowed is None:
                check_integer(name, options[name], 1, MOST_SIZE)
            else:
                check_choice(name, options[name], allowed)
        if self.block and rows % self.block:
            raise ArgumentError("rows", rows, f"a multiple of {self.block}, the elements of a block of {self.name}")
        return Sizes(rows, columns, options)

    def checked(self, tensors: Mapping[str, Array], at: Sizes) -> None:
        """Refuse arrays that are not a matrix of this format.

        Raises:
            ArgumentError: an array of a wrong dtype or shape; a float that is not finite; an integer out of its range;
                whatever `check` refuses.
        """
        for each in self.tensors:
            check_array(each.name, tensors[each.name], each.numpy_dtype.type, each.sizes(at))
        fields = self.fields_of(tensors)
        for each in self.fields:
            self._check_contents(each, fields[each.name], at)
        if self.check is not None:
            self.check(fields, at)

    def _check_contents(self, row: Field, array: Array, at: Sizes) -> None:
        if row.numpy_dtype.kind not in "iu":
            what = "a finite scale" if row.role == "scale" else "a finite number"
            _check_all(row, array, np.isfinite(array), what)
        if row.below is not None:
            end = at.size(row.below, row.name)
            _check_all(row, array, (array >= 0) & (array < end), f"0 to {end - 1}")
        if row.values is not None:
            _check_all(row, array, np.isin(array, row.values), ", ".join(map(str, row.values)))

    def fields_of(self, tensors: Mapping[str, Array]) -> dict[str, Array]:
        """The arrays that `decode` takes: the tensors themselves, or the records of blocks, cut into their fields."""
        if self.block is None:
            return dict(tensors)
        records = tensors["blocks"].view(self.record)
        return {each.name: records[each.name] for each in self.fields}

    def tensors_of(self, fields: Mapping[str, Array], at: Sizes) -> tuple[Array, ...]:
        """The inverse of `fields_of`, in the order of the table."""
        if self.block is None:
            return tuple(np.ascontiguousarray(fields[each.name]) for each in self.fields)
        records = np.zeros((at.N, at.K // self.block), self.record)
        for each in self.fields:
            records[each.name] = fields[each.name]
        return (records.view(np.uint8).reshape(at.N, -1),)

    def encoded(
        self, numbers: F64, at: Sizes, choice: str | None = None, judged: Tensors | None = None
    ) -> dict[str, Array]:
        """The fields of numbers, float64, K × N, as encoded by the owner's reference or another choice of `encode`.

        A field that is `summed` follows the sum of the `judged` cast.
        """
        given = numbers if self.block is None else numbers.T.reshape(at.N, -1, self.block)
        with np.errstate(all="ignore"):  # an overflow in a scale is refused with the infinite field
            encode = self.encode[choice or next(iter(self.encode))]
            return encode(given, at, *([judged[self.summed]] if self.summed and judged is not None else []))

    def terms(self, tensors: Mapping[str, Array], at: Sizes) -> Terms:
        """The numbers of a matrix, K × N."""
        found = self.decode(self.fields_of(tensors), at)
        return found if self.block is None else found.across(at)


def _check_all(row: Field, array: Array, right: npt.NDArray[np.bool_], allowed: str) -> None:
    """Refuse the first wrong number of a field and name its place."""
    if not right.all():
        where = [int(i) for i in np.unravel_index(int(np.argmin(right)), array.shape)]
        raise ArgumentError(f"{row.name}{where}", array[tuple(where)], allowed)
