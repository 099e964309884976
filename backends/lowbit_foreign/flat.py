"""Arguments and results for C: the trees of `lowbit.backend.wire`, flattened to lists of parts by path.

The tensors and options of a stored matrix have paths by name besides those by number, since its format's table is what
an author has at hand: ``weights.qweight`` is ``weights.tensors.0``, ``weights.bits`` is ``weights.options.0.1``.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from lowbit.arrays import Array
from lowbit.backend.wire import MOST_DEPTH, NOT_FINITE, Tree, decode, dtype_name, encode
from lowbit.errors import ArgumentError
from lowbit.tensor_formats.stored import FORMATS
from lowbit.text import quoted
from lowbit_foreign.abi import DTYPE_NUMBERS, DTYPES, NO_DTYPE, Kind
from lowbit_foreign.memory import GuardedArray, OutOfBoundsError, address

MOST_ITEMS = 2**20
"""Of a list, and bytes of a text."""
MOST_DIMENSIONS = 8
MOST_BYTES = 2**31
"""Of all parts of a result together."""


STORED = "formats.Stored"


class Entry(NamedTuple):
    """One entry of the flat list: a path, a kind, and a content (an array, number or text; the length of a list)."""

    path: str
    kind: Kind
    dtype: int
    content: Any


def flatten(path: str, value: object) -> list[Entry]:
    """A value and its parts.

    >>> from lowbit.quantization.bfp import Format
    >>> [(entry.path, entry.kind.name, entry.content) for entry in flatten("format", Format(32, 4))][:2]
    [('format', 'RECORD', 'bfp.Format'), ('format.block', 'INTEGER', 32)]

    Raises:
        ArgumentError: a value that C has no type for.
    """
    return _flatten(path, encode(value, lambda array: {"data": array}))


def _flatten(path: str, tree: Tree) -> list[Entry]:
    match tree:
        case {"array": str(name), "data": array}:
            return [Entry(path, Kind.ARRAY, _number(path, name), array)]
        case {"scalar": str(name), "value": value}:
            (entry,) = _flatten(path, value)
            return [entry._replace(dtype=_number(path, name))]
        case {"float": str(name)}:
            return [Entry(path, Kind.REAL, NO_DTYPE, NOT_FINITE[name])]
        case {"type": str(name), "fields": dict(fields)}:
            named = _by_table(fields) if name == STORED else {}
            parts = [_flatten(f"{path}.{field}", part) for field, part in (fields | named).items()]
            return [Entry(path, Kind.RECORD, NO_DTYPE, name), *(entry for part in parts for entry in part)]
        case list():
            parts = [_flatten(f"{path}.{index}", part) for index, part in enumerate(tree)]
            return [Entry(path, Kind.LIST, NO_DTYPE, len(tree)), *(entry for part in parts for entry in part)]
        case int() if not -(2**63) <= tree < 2**63:
            raise ArgumentError(path, tree, "an integer of 64 bits")
    kinds = {type(None): Kind.NONE, bool: Kind.BOOL, int: Kind.INTEGER, float: Kind.REAL, str: Kind.TEXT}
    return [Entry(path, kinds[type(tree)], NO_DTYPE, tree)]


def _by_table(fields: dict[str, Tree]) -> dict[str, Tree]:
    """The tensors and options of a stored matrix by the names of its format's table."""
    names = [row.name for row in FORMATS[fields["format"]].tensors]
    return dict(zip(names, fields["tensors"], strict=True)) | dict(fields["options"])


def _from_table(fields: dict[str, Tree]) -> dict[str, Tree]:
    """The fields of a stored matrix whose tensors and options a library has given by name; the inverse of `_by_table`.

    Entries that are not in the table stay, and are refused as fields that a stored matrix does not have.
    """
    format = fields.get("format")
    if "tensors" in fields or not isinstance(format, str) or format not in FORMATS:
        return fields
    table, left = FORMATS[format], dict(fields)
    tensors = [left.pop(row.name) for row in table.tensors if row.name in left]
    options = [[name, left.pop(name)] for name in table.options if name in left]
    return left | {"tensors": tensors, "options": options}


def _number(path: str, name: str) -> int:
    if name not in DTYPE_NUMBERS:
        raise ArgumentError(f"dtype of {path}", name, "a type that lowbit.h has")
    return DTYPE_NUMBERS[name]


class Results:
    """The memory that a library writes its result to, allocated part by part.

    Attributes:
        trouble: why a request was refused, or None; then the call has failed.
    """

    ROOT = "result"

    def __init__(self, alignment: int, out: Array | None = None) -> None:
        """With `out`, the whole result is that array."""
        self._alignment, self._out = alignment, out
        self._bytes = 0
        self._parts: dict[str, tuple[Kind, Array]] = {}
        self._arrays: list[tuple[str, GuardedArray]] = []
        self.trouble: BaseException | None = None

    def request(self, path: str, kind: int, dtype: int, shape: tuple[int, ...]) -> int:
        """The address for one part.

        Raises:
            ValueError: no such kind, dtype or shape; the path was requested before; with `out`, another array.
        """
        if path in self._parts:
            raise ValueError(f"{quoted(path)} was requested twice")
        if len(self._parts) >= MOST_ITEMS or path.count(".") > MOST_DEPTH:
            allowed = f"at most {MOST_ITEMS} parts, {MOST_DEPTH} of them inside one another"
            raise ValueError(f"{quoted(path)} was requested after {len(self._parts)} parts; allowed: {allowed}")
        asked = Kind(kind)
        if self._out is not None and path == self.ROOT:
            array = self._checked_out(asked, dtype, shape)
        else:
            array = self._allocated(path, *_layout(path, asked, dtype, shape))
        if asked is Kind.LIST:
            array[0] = shape[0]
        self._parts[path] = asked, array
        return address(array)

    def _checked_out(self, kind: Kind, dtype: int, shape: tuple[int, ...]) -> Array:
        assert self._out is not None
        if kind is not Kind.ARRAY or DTYPES.get(dtype) != self._out.dtype or shape != self._out.shape:
            given = f"{kind.name} {DTYPES.get(dtype, '')} {shape}"
            raise ValueError(f"the result was requested as {given}; it is an array {self._out.dtype} {self._out.shape}")
        return self._out

    def _allocated(self, path: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        self._bytes += math.prod(shape) * dtype.itemsize
        if self._bytes > MOST_BYTES:
            raise ValueError(f"{quoted(path)} would make the result {self._bytes} bytes; allowed: {MOST_BYTES}")
        guarded = GuardedArray(dtype, shape, self._alignment)
        self._arrays.append((path, guarded))
        return guarded.array

    def check(self) -> None:
        """Check that the library wrote to this memory only.

        Raises:
            OutOfBoundsError: it wrote outside it.
        """
        for path, guarded in self._arrays:
            if where := guarded.stray_write():
                raise OutOfBoundsError(f"it wrote {where} of {quoted(path)}")

    def asked(self, path: str) -> bool:
        """Whether the library requested this path."""
        return path in self._parts

    def value(self, path: str = ROOT) -> Any:
        """The result.

        Raises:
            ValueError: a part was never requested, or the result is not a value of the specification.
        """
        children: dict[str, list[str]] = {}
        for known in self._parts:
            children.setdefault(known.rpartition(".")[0], []).append(known)
        return decode(self._tree(path, children), lambda dtype, shape, tree: tree["data"])

    def _tree(self, path: str, children: dict[str, list[str]]) -> Tree:
        if path not in self._parts:
            raise ValueError(f"{quoted(path)} was never requested")
        kind, array = self._parts[path]
        match kind:
            case Kind.NONE:
                return None
            case Kind.ARRAY:
                return {"array": dtype_name(array.dtype), "shape": list(array.shape), "data": array}
            case Kind.TEXT:
                return array.tobytes().decode()
            case Kind.RECORD:
                fields = {child.rpartition(".")[2]: self._tree(child, children) for child in children.get(path, [])}
                name = array.tobytes().decode()
                return {"type": name, "fields": _from_table(fields) if name == STORED else fields}
            case Kind.LIST:
                return [self._tree(f"{path}.{index}", children) for index in range(int(array[0]))]
            case Kind.BOOL:
                return bool(array[0])
        number = array[0].item()
        return number if math.isfinite(number) else {"float": repr(number)}


def _layout(path: str, kind: Kind, dtype: int, shape: tuple[int, ...]) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """The dtype and shape of the memory for a part.

    Raises:
        ValueError: a dtype or shape that ``lowbit.h`` does not have.
    """
    if kind is Kind.ARRAY:
        if dtype not in DTYPES or min(shape, default=0) < 0:
            given = f"with dtype {dtype} and shape {shape}"
            raise ValueError(f"{quoted(path)} was requested {given}, which lowbit.h does not have")
        return DTYPES[dtype], shape
    sized = kind in (Kind.TEXT, Kind.RECORD, Kind.LIST)
    if len(shape) != sized or (sized and not 0 <= shape[0] <= MOST_ITEMS):
        raise ValueError(f"{quoted(path)} was requested as {kind.name} with the shape {shape}")
    if kind in (Kind.TEXT, Kind.RECORD):
        return np.dtype(np.uint8), shape
    return np.dtype(np.float64 if kind is Kind.REAL else np.int64), (1,)
