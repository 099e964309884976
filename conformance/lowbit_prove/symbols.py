"""Symbols: arrays of terms that numpy's own functions take in place of arrays of numbers.

The specification is written in numpy: the words of the vocabulary (`lowbit.kernels.vector`), packing, the formats'
`decode`. numpy lets another class stand in for its arrays (its protocols ``__array_ufunc__`` and
``__array_function__``). `Symbols` is such a class, and so the same functions compute on numbers or on terms; no meaning
is written down twice. What `Symbols` does not implement raises an error.

>>> words = unknowns("w", 2, np.uint32)
>>> (words >> np.uint32(4) & np.uint32(15)).data
array([LShR(w_0, 4) & 15, LShR(w_1, 4) & 15], dtype=object)

The functions here are tested against numpy: terms for random words and random numbers must give the same bits.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.mixins import NDArrayOperatorsMixin

from lowbit_prove import terms
from lowbit_prove.terms import Dtype, Term, UndecidedError


class Symbols(NDArrayOperatorsMixin):
    """An array of terms.

    Attributes:
        data: an array of objects, each a term of `lowbit_prove.terms`.
        dtype: the dtype of the array that this one stands for.
    """

    __hash__ = None  # type: ignore[assignment]  # as of arrays: == compares elements

    def __init__(self, data: npt.NDArray[Any], dtype: npt.DTypeLike) -> None:
        self.data, self.dtype = data, np.dtype(dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    @property
    def ndim(self) -> int:
        return self.data.ndim

    @property
    def T(self) -> "Symbols":  # noqa: N802 - numpy's name
        return Symbols(self.data.T, self.dtype)

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator["Symbols"]:
        return (self[place] for place in range(len(self)))

    def __getitem__(self, key: Any) -> "Symbols":
        return Symbols(_boxed(self.data[key]), self.dtype)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.data[key] = of(value).astype(self.dtype).data

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        raise UndecidedError("a function of numpy takes numbers, and was given terms")

    def reshape(self, *shape: Any) -> "Symbols":
        return Symbols(self.data.reshape(*shape), self.dtype)

    def swapaxes(self, first: int, second: int) -> "Symbols":
        return Symbols(self.data.swapaxes(first, second), self.dtype)

    def transpose(self, *axes: Any) -> "Symbols":
        return Symbols(self.data.transpose(*axes), self.dtype)

    def copy(self) -> "Symbols":
        return Symbols(self.data.copy(), self.dtype)

    def astype(self, dtype: npt.DTypeLike, copy: bool = True) -> "Symbols":
        kind = np.dtype(dtype)
        return self._each(partial(terms.cast, source=self.dtype, target=kind), kind)

    def view(self, dtype: npt.DTypeLike) -> "Symbols":
        """The same bits as numbers of another dtype; of the same dtype the array itself, so that writes reach it."""
        kind = np.dtype(dtype)
        if kind == self.dtype:
            return Symbols(self.data, kind)
        bits = self._each(partial(terms.bits_of, dtype=self.dtype), self.dtype)
        if kind.itemsize < self.dtype.itemsize:
            bits = _cut(bits.data, terms.width(self.dtype), terms.width(kind), kind)
        elif kind.itemsize > self.dtype.itemsize:
            bits = _glued(bits.data, terms.width(self.dtype), terms.width(kind), kind)
        return bits._each(partial(terms.from_bits, dtype=kind), kind)

    def sum(self, axis: int | None = None, dtype: npt.DTypeLike | None = None) -> "Symbols":
        """As numpy's: small integers are added in 64 bits if no dtype is given."""
        kind = np.dtype(dtype) if dtype is not None else np.zeros(1, self.dtype).sum().dtype
        wide = self.astype(kind)
        if axis is None:
            wide, axis = wide.reshape(-1), 0
        parts = np.moveaxis(wide.data, axis, 0)
        total = Symbols(_boxed(parts[0]), kind)
        for part in parts[1:]:
            total = total + Symbols(_boxed(part), kind)
        return total

    def _each(self, function: Callable[[Term], Term], dtype: Dtype) -> "Symbols":
        return Symbols(_mapped(function, self.data), dtype)

    # numpy's protocols.

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, out: Any = None, **options: Any) -> Any:
        if method == "reduce" and ufunc is np.add:
            return inputs[0].sum(options.get("axis", 0), options.get("dtype"))
        if method != "__call__" or options:
            raise UndecidedError(f"{ufunc.__name__}.{method} with {sorted(options)} of terms")
        kinds = tuple(type(each) if type(each) in (bool, int, float) else each.dtype for each in inputs)
        *operands, result = ufunc.resolve_dtypes((*kinds, None))
        numbers = [of(each, kind).astype(kind).data for each, kind in zip(inputs, operands, strict=True)]
        found = Symbols(_mapped(partial(terms.applied, ufunc, operands[0], result), *numbers), result)
        if out is None:
            return found
        out[0][...] = found
        return out[0]

    def __array_function__(self, function: Any, types: Any, inputs: Any, options: Mapping[str, Any]) -> Any:
        if function in FUNCTIONS:
            return FUNCTIONS[function](*inputs, **options)
        if function not in MOVES:
            raise UndecidedError(f"numpy.{function.__name__} of terms")
        found = _arrays((inputs, options))
        kind = np.result_type(*(each.dtype for each in found))
        moved = function(*_objects(inputs, kind), **_objects(options, kind))
        return [Symbols(each, kind) for each in moved] if isinstance(moved, list) else Symbols(_boxed(moved), kind)

    def fused_multiply_add(self, b: Any, c: Any) -> "Symbols":
        """``self * b + c`` of float32 rounded once, which numpy lacks."""
        return Symbols(_mapped(terms.fused, self.data, of(b).data, of(c).data), self.dtype)


# **Creating symbols.**


def of(array: Any, dtype: Dtype | None = None) -> Symbols:
    """An array or a number as symbols; Python numbers take the dtype."""
    if isinstance(array, Symbols):
        return array
    given = np.asarray(array, None if hasattr(array, "dtype") else dtype)
    return Symbols(_boxed(given.astype(object)), given.dtype)


def unknowns(name: str, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> Symbols:
    """An array of variables, each named by its index; it stands for all arrays of this shape and dtype at once."""
    data = np.empty(shape, object)
    for place in np.ndindex(data.shape):
        data[place] = terms.unknown("_".join(map(str, (name, *place))), dtype)
    return Symbols(data, dtype)


def _boxed(data: Any) -> npt.NDArray[Any]:
    """An array of objects, even if numpy gives a single object."""
    if isinstance(data, np.ndarray):
        return data
    box = np.empty((), object)
    box[()] = data
    return box


def _mapped(function: Callable[..., Term], *data: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if not all(each.size for each in data):
        return np.empty(np.broadcast_shapes(*(each.shape for each in data)), object)
    return _boxed(np.frompyfunc(function, len(data), 1)(*data))


def _cut(data: npt.NDArray[Any], wide: int, each: int, kind: Dtype) -> Symbols:
    parts = [_mapped(partial(terms.part, first=first, count=each), data) for first in range(0, wide, each)]
    return Symbols(np.stack(parts, axis=-1).reshape(*data.shape[:-1], -1), kind)


def _glued(data: npt.NDArray[Any], each: int, wide: int, kind: Dtype) -> Symbols:
    groups = data.reshape(*data.shape[:-1], -1, wide // each)
    parts = [groups[..., place] for place in range(wide // each)]
    return Symbols(_mapped(lambda *numbers: terms.joined(list(numbers), each), *parts), kind)


# **Functions of numpy**: those that move elements, and those that compute.

MOVES = (
    *(np.concatenate, np.stack, np.split, np.repeat, np.tile, np.broadcast_to, np.expand_dims),
    *(np.swapaxes, np.moveaxis, np.transpose, np.reshape, np.ascontiguousarray, np.copy),
)


def _arrays(given: Any) -> list[Any]:
    """All arrays among arguments."""
    if isinstance(given, Symbols | np.ndarray | np.generic):
        return [given]
    parts = given.values() if isinstance(given, Mapping) else given if isinstance(given, tuple | list) else ()
    return [found for part in parts for found in _arrays(part)]


def _objects(given: Any, kind: Dtype) -> Any:
    """Arguments with arrays of objects in place of arrays."""
    if isinstance(given, Symbols | np.ndarray | np.generic):
        return of(given).astype(kind).data
    if isinstance(given, Mapping):
        return {name: _objects(each, kind) for name, each in given.items()}
    if isinstance(given, tuple | list):
        return type(given)(_objects(each, kind) for each in given)
    return given


def _where(condition: Any, yes: Any, no: Any) -> Symbols:
    kind = np.result_type(*(each if isinstance(each, int | float) else each.dtype for each in (yes, no)))
    numbers = [of(each, kind).astype(kind).data for each in (yes, no)]
    truth = of(condition)
    if truth.dtype != bool:
        truth = truth != 0
    return Symbols(_mapped(partial(terms.choose, dtype=kind), truth.data, *numbers), kind)


def _clip(a: Symbols, least: int, most: int) -> Symbols:
    return _where(a < least, a.dtype.type(least), _where(a > most, a.dtype.type(most), a))


def _zeros_like(a: Any, dtype: npt.DTypeLike | None = None, order: str = "C", shape: Any = None) -> Symbols:
    kind = np.dtype(dtype if dtype is not None else a.dtype)
    return of(np.zeros(a.shape if shape is None else shape, kind))


def _take_along_axis(table: Any, index: Any, axis: int = -1) -> Symbols:
    """The entry of the table for each index, by a selection for each bit of the index."""
    entries, places = np.moveaxis(of(table).data, axis, -1), np.moveaxis(of(index).data, axis, -1)
    shape = np.broadcast_shapes(entries.shape[:-1], places.shape[:-1])
    entries = np.broadcast_to(entries, (*shape, entries.shape[-1]))
    places = np.broadcast_to(places, (*shape, places.shape[-1]))
    found = np.empty(places.shape, object)
    for place in np.ndindex(places.shape):
        found[place] = _chosen(list(entries[place[:-1]]), places[place], of(table).dtype)
    return Symbols(np.moveaxis(found, -1, axis), of(table).dtype)


def _chosen(entries: list[Term], index: Term, dtype: Dtype) -> Term:
    if terms.known(index):
        return entries[index]
    bits = (len(entries) - 1).bit_length()
    if len(entries) != 1 << bits:
        raise UndecidedError("an unknown place in a table whose length is not a power of two")
    for bit in range(bits):
        condition = terms.is_one(index, bit)
        pairs = zip(entries[::2], entries[1::2], strict=True)
        entries = [terms.choose(condition, high, low, dtype) for low, high in pairs]
    return entries[0]


def _unpackbits(a: Symbols, axis: int = -1, count: int | None = None, bitorder: str = "little") -> Symbols:
    if bitorder != "little" or axis != -1:
        raise UndecidedError("bits in another order than from the lowest, along the last axis")
    parts = [_mapped(lambda number, at=at: _bit(number, at), a.data) for at in range(8)]
    bits = np.stack(parts, axis=-1).reshape(*a.shape[:-1], -1)
    return Symbols(bits[..., :count], np.uint8)


def _bit(number: Term, at: int) -> Term:
    found = terms.part(number, at, 1)
    return found if terms.known(found) else terms.extended(found, 8)


def _pad(a: Symbols, widths: Sequence[tuple[int, int]]) -> Symbols:
    """An array padded with zeros."""
    padded = np.full([size + before + after for size, (before, after) in zip(a.shape, widths, strict=True)], 0, object)
    inside = tuple(slice(before, before + size) for size, (before, _) in zip(a.shape, widths, strict=True))
    padded[inside] = a.data
    return Symbols(padded, a.dtype)


def _packbits(a: Symbols, axis: int = -1, bitorder: str = "little") -> Symbols:
    if bitorder != "little" or axis != -1:
        raise UndecidedError("bits in another order than from the lowest, along the last axis")
    padded = _pad(a, [(0, 0)] * (a.ndim - 1) + [(0, -a.shape[-1] % 8)])
    bits = _mapped(partial(terms.is_set, dtype=a.dtype), padded.data)
    return _glued(bits, 1, 8, np.dtype(np.uint8))


FUNCTIONS: Mapping[Any, Callable[..., Any]] = {
    np.where: _where,
    np.clip: _clip,
    np.take_along_axis: _take_along_axis,
    np.zeros_like: _zeros_like,
    np.empty_like: _zeros_like,
    np.unpackbits: _unpackbits,
    np.packbits: _packbits,
    np.pad: _pad,
    np.sum: lambda a, axis=None, dtype=None: a.sum(axis, dtype),
}
