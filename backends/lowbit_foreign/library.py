"""`LibraryBackend`: a shared library that exports the functions of ``lowbit.h``, as a backend.

The library is loaded when it is first needed. Arguments are checked by the specification and then passed by address:
nothing is copied, unless an array is less aligned than the library declares to need. Results are written into memory
that is allocated here. While the library computes, other threads of Python run.
"""

import ctypes
import weakref
from collections.abc import Callable, Mapping
from ctypes import POINTER, c_char_p, c_int32, c_int64, c_uint32, c_void_p
from pathlib import Path
from typing import Any

from lowbit.arrays import F32, Array
from lowbit.backend import Capabilities, PreparedLinear
from lowbit.contract.operation import OPERATIONS
from lowbit.errors import ArgumentError, NotDeclaredError, UnavailableError
from lowbit.quantization.affine import QuantizedMatrix
from lowbit.text import cleaned
from lowbit_foreign.abi import ABI, MESSAGE_BYTES, Call, Kind, ResultFunction, Status, Value
from lowbit_foreign.backend import ForeignBackend
from lowbit_foreign.declared import Declared, read_text
from lowbit_foreign.flat import MOST_DIMENSIONS, Entry, Results, flatten
from lowbit_foreign.linear import ForeignLinear, copied, first_product
from lowbit_foreign.memory import GuardedArray, address, is_aligned, realigned

CALL, MAKE, END = (c_int32, c_void_p), (c_int32, c_void_p, c_void_p), (None, c_void_p)
FUNCTIONS: Mapping[str, tuple[Any, ...]] = {
    "lowbit_abi_version": (c_uint32,),
    "lowbit_capabilities": (c_char_p,),
    "lowbit_run": CALL,
}
OPTIONAL: tuple[Mapping[str, tuple[Any, ...]], ...] = (
    {"lowbit_prepare": MAKE, "lowbit_release": END},
    {"lowbit_open": MAKE, "lowbit_step": CALL, "lowbit_close": END},
)
REMEDY = "see lowbit.h"


class LibraryBackend(ForeignBackend):
    """A shared library as a backend.

    Attributes:
        name: the name of its file; after it was loaded, the name that it declares.
        path: the file.
    """

    def __init__(self, path: str | Path) -> None:
        """Nothing is loaded yet.

        Args:
            path: the file, such as ``./libmine.so``.
        """
        self.path = Path(path).absolute()
        self.name = self.path.name
        self._loaded: _Library | None = None
        self._live: weakref.WeakSet[_Handle] = weakref.WeakSet()

    def capabilities(self) -> Capabilities:
        """What the library declares.

        Raises:
            UnavailableError: it cannot be loaded, is of another version, or its declaration is not valid.
        """
        return self._library().declared.capabilities

    def close(self) -> None:
        """Release all handles; the library itself stays loaded, because its threads may still run."""
        for handle in list(self._live):
            handle.end()

    def _library(self) -> "_Library":
        if self._loaded is None:
            self._loaded = _Library(self.path)
            self.name = self._loaded.declared.name
        return self._loaded

    # Hooks.

    def opened(self, operation: str, arguments: dict[str, Any]) -> "_Handle":
        return self._make("lowbit_open", "lowbit_close", operation, arguments)[0]

    def end(self, handle: "_Handle") -> None:
        handle.end()

    def _prepare(self, matrix: QuantizedMatrix) -> PreparedLinear:
        declared = self.capabilities().operations
        if "lowbit_prepare" not in self._library().functions:
            return ForeignLinear(self.name, matrix, declared, self._multiply, {"matrix": copied(matrix)})
        operation = first_product(declared)
        handle, results = self._make("lowbit_prepare", "lowbit_release", operation, {"matrix": matrix})
        nbytes = results.value("nbytes") if results.asked("nbytes") else matrix.nbytes
        if type(nbytes) is not int or nbytes < 0:
            raise RuntimeError(f"{self.name} says that a product reads {nbytes} bytes")
        return ForeignLinear(self.name, matrix, declared, self._multiply, {}, handle, nbytes)

    def _multiply(self, operation: str, handle: object, arguments: dict[str, Any], out: F32) -> None:
        assert handle is None or isinstance(handle, _Handle)
        self.answer("run", operation, arguments, handle, out)

    # Calls of the library.

    def answer(
        self,
        do: str,
        operation: str,
        arguments: dict[str, Any],
        handle: "_Handle | None" = None,
        out: Array | None = None,
    ) -> Any:
        """Call one function of the library and return its result, which is `out` if that is given.

        Raises:
            ArgumentError, NotDeclaredError: the library reports one.
            OutOfBoundsError: it wrote outside the memory for its result.
            RuntimeError: it fails, or its result is not a value of the specification.
        """
        alignment = self.capabilities().alignment
        own = out if out is None or is_aligned(out, alignment) else GuardedArray(out.dtype, out.shape, alignment).array
        results = Results(alignment, own)
        self._enter(f"lowbit_{do}", operation, arguments, results, handle.address if handle else None)
        try:
            result = results.value()
        except ValueError as error:
            raise RuntimeError(f"{self.name} gives no result of {operation}: {error}") from None
        if out is not None and own is not out:
            out[...] = result
        return result

    def _make(self, make: str, end: str, operation: str, arguments: dict[str, Any]) -> "tuple[_Handle, Results]":
        """A handle of the library, for later calls."""
        made, results = c_void_p(), Results(self.capabilities().alignment)
        self._enter(make, operation, arguments, results, None, ctypes.byref(made))
        if not made.value:
            raise RuntimeError(f"{make} of {self.name} says that it succeeded, and gives no handle")
        handle = _Handle(made.value, self._library().functions[end])
        self._live.add(handle)
        return handle, results

    def _enter(
        self, function: str, operation: str, arguments: dict[str, Any], results: Results, handle: int | None, *rest: Any
    ) -> None:
        call = _PreparedCall(operation, arguments, results, handle, self.capabilities().alignment)
        status = self._library().functions[function](ctypes.byref(call.call), *rest)
        results.check()
        if results.trouble is not None:
            raise RuntimeError(f"{self.name}: in {operation} {results.trouble}") from results.trouble
        if status != Status.OK:
            raise failure(self.name, operation, status, call.message)


def failure(name: str, operation: str, status: int, message: str) -> Exception:
    """The exception for a status and the library's message."""
    if status == Status.NOT_DECLARED:
        return NotDeclaredError(name, operation, message)
    if status == Status.BAD_ARGUMENT:
        return ArgumentError(f"an argument of {operation}", f"refused by {name}", message or "it does not say what")
    if status == Status.FAILED:
        return RuntimeError(f"{name} fails in {operation}: {message or 'it does not say why'}")
    return RuntimeError(f"{name} ends {operation} with the status {status}, which lowbit.h does not have")


class _Library:
    """A library that has been loaded and declares this version of ``lowbit.h``."""

    def __init__(self, path: Path) -> None:
        what = f"library {path}"
        if not path.is_file():
            raise UnavailableError(what, "there is no such file", "build it first")
        try:
            library = ctypes.CDLL(str(path))
        except OSError as error:
            raise UnavailableError(what, f"it cannot be loaded: {error}", "build it for this machine") from None
        self.functions: dict[str, Any] = {}
        for name, signature in FUNCTIONS.items():
            if not self._find(library, name, signature):
                raise UnavailableError(what, f"it exports no {name}", REMEDY)
        for group in OPTIONAL:
            found = [name for name, signature in group.items() if self._find(library, name, signature)]
            if found and len(found) < len(group):
                missing = ", ".join(sorted(set(group) - set(found)))
                raise UnavailableError(what, f"it exports {found[0]} and no {missing}", REMEDY)
        version = self.functions["lowbit_abi_version"]()
        if version != ABI:
            raise UnavailableError(what, f"it is of version {version} of lowbit.h", f"build it with version {ABI}")
        text = self.functions["lowbit_capabilities"]()
        if text is None:
            raise UnavailableError(what, "lowbit_capabilities gives NULL", REMEDY)
        self.declared: Declared = read_text(text, what)
        for operation in self.declared.capabilities.operations:
            if OPERATIONS[operation].stateful and "lowbit_open" not in self.functions:
                raise UnavailableError(what, f"it declares {operation} and exports no lowbit_open", REMEDY)

    def _find(self, library: ctypes.CDLL, name: str, signature: tuple[Any, ...]) -> bool:
        function = getattr(library, name, None)
        if function is None:
            return False
        function.restype, *function.argtypes = signature
        self.functions[name] = function
        return True


class _Handle:
    """A handle of the library, released once: by `end`, when it is no longer used, or at exit."""

    def __init__(self, address: int, end: Callable[[int], None]) -> None:
        self.address = address
        self.end = weakref.finalize(self, end, address)


class _PreparedCall:
    """One `Call` and all the memory that it points to; that memory lives as long as this object."""

    def __init__(
        self, operation: str, arguments: dict[str, Any], results: Results, handle: int | None, alignment: int
    ) -> None:
        entries = [entry for name, value in arguments.items() for entry in flatten(name, value)]
        self._kept: list[Any] = []
        self._values = (Value * max(1, len(entries)))()
        for value, entry in zip(self._values, entries, strict=False):
            self._fill(value, entry, alignment)
        self._message = ctypes.create_string_buffer(MESSAGE_BYTES)
        self._result = ResultFunction(lambda call, *asked: _answer(results, *asked))
        self.call = Call(
            ctypes.sizeof(Call),
            ABI,
            operation.encode(),
            handle,
            len(entries),
            self._values,
            self._result,
            None,
            ctypes.addressof(self._message),
            MESSAGE_BYTES,
        )

    @property
    def message(self) -> str:
        """The message of the library."""
        return cleaned(" ".join(self._message.value.decode(errors="replace").split()))

    def _fill(self, value: Value, entry: Entry, alignment: int) -> None:
        value.size, value.kind, value.path = ctypes.sizeof(Value), entry.kind, entry.path.encode()
        value.dtype = entry.dtype
        match entry.kind:
            case Kind.ARRAY:
                array = entry.content if is_aligned(entry.content, alignment) else realigned(entry.content, alignment)
                sizes = c_int64 * array.ndim
                shape, strides = sizes(*array.shape), sizes(*array.strides)
                self._kept += [array, shape, strides]
                value.ndim, value.data = array.ndim, address(array)
                value.shape = ctypes.cast(shape, POINTER(c_int64))
                value.strides = ctypes.cast(strides, POINTER(c_int64))
            case Kind.TEXT | Kind.RECORD:
                text = entry.content.encode()
                value.text, value.integer = text, len(text)
            case Kind.REAL:
                value.real = entry.content
            case Kind.BOOL | Kind.INTEGER | Kind.LIST:
                value.integer = entry.content


def _answer(results: Results, path: bytes | None, kind: int, dtype: int, ndim: int, shape: Any) -> int | None:
    """Implements `call->result`. An exception cannot cross C, so it is kept in `results` until the call is over."""
    try:
        if path is None or not 0 <= ndim <= MOST_DIMENSIONS or (ndim and not shape):
            raise ValueError(f"a result was requested without a path, or with {ndim} dimensions")
        return results.request(path.decode(), kind, dtype, tuple(shape[:ndim]) if ndim else ())
    except BaseException as error:
        results.trouble = results.trouble or error
        return None
