"""Arguments taken apart for C, and results put together again: the trees of `lowbit.values`, flattened by path."""

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lowbit.errors import ArgumentError
from lowbit.values import NOT_FINITE, Tree, decode, encode
from lowbit_foreign.abi import DTYPE_NUMBERS, DTYPES, NO_DTYPE, Kind

Array = npt.NDArray[Any]
Allocate = Callable[[np.dtype[Any], tuple[int, ...]], Array]
"""Makes the C-contiguous array that a library will write a result to."""

MOST_ITEMS = 2**24
MOST_TEXT = 2**20
MOST_DIMENSIONS = 8


class Entry(NamedTuple):
    """One line of the flat list: a path, a kind, and what is there (an array, number or text; the length of a list)."""

    path: str
    kind: Kind
    dtype: int
    content: Any


def flatten(path: str, value: object) -> list[Entry]:
    """A value and its parts.

    >>> from lowbit.bfp import Format
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
            parts = [_flatten(f"{path}.{field}", part) for field, part in fields.items()]
            return [Entry(path, Kind.RECORD, NO_DTYPE, name), *(entry for part in parts for entry in part)]
        case list():
            parts = [_flatten(f"{path}.{index}", part) for index, part in enumerate(tree)]
            return [Entry(path, Kind.LIST, NO_DTYPE, len(tree)), *(entry for part in parts for entry in part)]
        case int() if not -(2**63) <= tree < 2**63:
            raise ArgumentError(path, tree, "an integer of 64 bits")
    kinds = {type(None): Kind.NONE, bool: Kind.BOOL, int: Kind.INTEGER, float: Kind.REAL, str: Kind.TEXT}
    return [Entry(path, kinds[type(tree)], NO_DTYPE, tree)]


def _number(path: str, name: str) -> int:
    if name not in DTYPE_NUMBERS:
        raise ArgumentError(f"dtype of {path}", name, "a type that lowbit.h has")
    return DTYPE_NUMBERS[name]


class Results:
    """The memory that a library writes its result to, handed out part by part.

    Attributes:
        trouble: why a request was refused, or None; then the call has failed.
    """

    ROOT = "result"

    def __init__(self, allocate: Allocate, out: Array | None = None) -> None:
        """With `out`, the whole result is that array and nothing else."""
        self._allocate, self._out = allocate, out
        self._memory: dict[str, tuple[Kind, Any]] = {}
        self._nothing = ctypes.c_int64()  # what a part without memory of its own points to
        self.trouble: BaseException | None = None

    def request(self, path: str, kind: int, dtype: int, shape: tuple[int, ...]) -> int:
        """The address for one part.

        Raises:
            ValueError: no such kind, dtype or shape; the path was asked for before; with `out`, another array.
        """
        if path in self._memory:
            raise ValueError(f"{path} was asked for twice")
        asked = Kind(kind)
        if self._out is not None and path == self.ROOT:
            self._check_out(asked, dtype, shape)
            memory: Any = self._out
        elif asked is Kind.ARRAY:
            memory = self._array(path, dtype, shape)
        else:
            memory = self._part(path, asked, shape)
        self._memory[path] = asked, memory
        if isinstance(memory, np.ndarray):
            return int(memory.__array_interface__["data"][0])
        return ctypes.addressof(self._nothing if memory is None or isinstance(memory, int) else memory)

    def _check_out(self, kind: Kind, dtype: int, shape: tuple[int, ...]) -> None:
        assert self._out is not None
        if kind is not Kind.ARRAY or DTYPES.get(dtype) != self._out.dtype or shape != self._out.shape:
            given = f"{kind.name} {DTYPES.get(dtype, '')} {shape}"
            raise ValueError(f"the result was asked for as {given}; it is an array {self._out.dtype} {self._out.shape}")

    def _array(self, path: str, dtype: int, shape: tuple[int, ...]) -> Array:
        if dtype not in DTYPES:
            raise ValueError(f"{path} was asked for with the dtype {dtype}, which lowbit.h does not have")
        if min(shape, default=0) < 0:
            raise ValueError(f"{path} was asked for with the shape {shape}")
        return self._allocate(DTYPES[dtype], shape)

    @staticmethod
    def _part(path: str, kind: Kind, shape: tuple[int, ...]) -> Any:
        sized = kind in (Kind.TEXT, Kind.RECORD, Kind.LIST)
        most = MOST_ITEMS if kind is Kind.LIST else MOST_TEXT
        if len(shape) != sized or (sized and not 0 <= shape[0] <= most):
            raise ValueError(f"{path} was asked for as {kind.name} with the shape {shape}")
        if kind is Kind.LIST:
            return shape[0]
        if sized:
            return ctypes.create_string_buffer(shape[0] + 1)
        return {Kind.NONE: None, Kind.REAL: ctypes.c_double()}.get(kind, ctypes.c_int64())

    def asked(self, path: str) -> bool:
        """Whether the library asked for this path."""
        return path in self._memory

    def value(self, path: str = ROOT) -> Any:
        """The result.

        Raises:
            ValueError: a part was never asked for, or what was written is no value of the specification.
        """
        children: dict[str, list[str]] = {}
        for known in self._memory:
            children.setdefault(known.rpartition(".")[0], []).append(known)
        return decode(self._tree(path, children), lambda dtype, shape, tree: tree["data"])

    def _tree(self, path: str, children: dict[str, list[str]]) -> Tree:
        if path not in self._memory:
            raise ValueError(f"{path} was never asked for")
        kind, memory = self._memory[path]
        match kind:
            case Kind.ARRAY:
                return {"array": memory.dtype.str, "shape": list(memory.shape), "data": memory}
            case Kind.RECORD:
                fields = {child.rpartition(".")[2]: self._tree(child, children) for child in children.get(path, [])}
                return {"type": memory.value.decode(), "fields": fields}
            case Kind.LIST:
                return [self._tree(f"{path}.{index}", children) for index in range(memory)]
            case Kind.TEXT:
                return memory.value.decode()
            case Kind.NONE:
                return None
            case Kind.BOOL:
                return bool(memory.value)
        return memory.value if np.isfinite(memory.value) else {"float": repr(memory.value)}
