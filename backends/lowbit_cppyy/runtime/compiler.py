"""The only module that uses cppyy: it compiles each function once in a process, and calls it.

cppyy has no type information, so its objects are `Any` in here and typed outside. Importing cppyy takes half a second
and starts a compiler; nothing here does so before `runtime` is called.

Four properties of cppyy shape this module. It runs code that it finds in the current folder, so it is imported in an
empty one (`lowbit_cppyy.runtime.empty_folder`), and the current folder is then removed from its library path. Defining
the same C++ twice in a process is an error, so the process has one `Runtime`, which remembers its definitions. Passing
a numpy array where C++ takes a pointer costs 0.1 µs and asking numpy for its address costs 0.8 µs, so arrays are passed
as they are. Importing cppyy installs ROOT's handlers for a dozen signals, which turn a crash into a long trace and exit
code 129, and writes its paths into the environment; both are undone.
"""

import atexit
import ctypes
import hashlib
import os
import pkgutil
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from lowbit.arrays import F32, I64, U8, U32, U64, Array
from lowbit.errors import UnavailableError
from lowbit.system.memory import check_address_space
from lowbit_cppyy.codegen.isa import InstructionSet
from lowbit_cppyy.codegen.lowering import Compilable, prelude
from lowbit_cppyy.runtime.definitions import as_text
from lowbit_cppyy.runtime.empty_folder import NoFolderOfOwnError, run_in_empty_folder
from lowbit_cppyy.runtime.toolchain import check_toolchain

Multiply = Callable[[int, int, F32, F32, int], int]
"""``multiply(linear, route, x, out, rows of x)`` gives 0, `INEXACT` or one of the codes in `FAILURES`."""
MultiplyBlocks = Callable[[int, int, U8, npt.NDArray[np.int16], F32, int], int]
"""``multiply_blocks(linear, route, mantissas, exponents, out, rows of x)``."""

Result = TypeVar("Result")

INEXACT = 4
"""Status of `multiply` if an activation is too small or too large for the powers of two of the route, so that another
route must be used."""

FIRST_CALLS = 2
"""The number of first calls of a function in which cppyy compiles something."""
START_BYTES, COMPILE_BYTES = 384 * 2**20, 64 * 2**20
"""Address space for cppyy (230 MiB, measured) with some kernels, and for one more compilation (20 MiB at most). Its
compiler aborts the process if an allocation fails."""

NO_MEMORY = 1
"""Status of a call that had too little memory."""
FORKED = 2
"""Status of a call in a child of fork."""
FAILURES = {
    NO_MEMORY: ("there is no memory for a copy of the activations", "multiply fewer rows at once"),
    FORKED: ("its threads do not exist in a forked process", "load the backend in the child, or use spawn"),
    3: ("it was closed", "load it again"),
}


def raise_failure(code: int) -> None:
    """Raise the error for the status of a call that failed.

    Raises:
        UnavailableError: no memory, a forked process, a closed backend.
    """
    raise UnavailableError("backend cppyy", *FAILURES[code])


class Runtime:
    """cppyy, the headers of `cpp/` and the kernels compiled so far.

    Attributes:
        tables: names of the instruction sets whose preludes are compiled.
        namespace: the C++ namespace `lowbit`.
    """

    def __init__(self) -> None:
        check_toolchain()
        check_address_space("backend cppyy", START_BYTES)
        self._kernels: dict[str, int] = {}
        self.tables: set[str] = set()
        self._included: set[str] = set()
        for entry in sys.path:
            pkgutil.get_importer(entry)  # cached, so that a relative entry keeps its meaning in another folder
        with _signal_handlers_kept(), _environment_kept():
            run_in_empty_folder("backend cppyy", self._start)
        self.include("bridge.h")
        bridge = self.bridge
        self.multiply: Multiply = bridge.multiply
        self.multiply_cast: Multiply = bridge.multiply_cast
        self.multiply_blocks: MultiplyBlocks = bridge.multiply_blocks

    def _start(self) -> None:
        """Import cppyy, and let it look for libraries in its own folder only."""
        imported_before = "cppyy" in sys.modules
        import cppyy

        self._cppyy: Any = cppyy
        if not imported_before:  # a program that imported it itself may rely on the path
            libraries = Path(sys.modules["cppyy_backend"].__path__[0]) / "lib"
            cppyy.gbl.gSystem.SetDynamicPath(str(libraries))
        self._compile("")  # the first compilation loads further libraries

    def include(self, header: str, first_calls: Callable[[], None] | None = None) -> None:
        """Compile a header of `cpp/` at the first request, and the wrappers that cppyy compiles during
        `first_calls`."""
        with preparing, as_file(files("lowbit_cppyy") / "cpp") as folder:
            if header not in self._included:
                self.define(f'#include "{folder.absolute()}/{header}"')
                own = self._call_bridge_once if header == "bridge.h" else self._call_kernel_set_once
                self.apart(first_calls or own)
                self._included.add(header)

    def apart(self, work: Callable[[], Result]) -> Result:
        """The result of `work`, which makes cppyy compile something.

        The compiler looks in the current folder for a file with the name that it gives to each input, such as
        ``input_line_27``. It does not read the file, but if the file is a link to another one, it confuses the two and
        fails. So `work` runs in an empty folder if possible.
        """
        try:
            return run_in_empty_folder("backend cppyy", work)
        except NoFolderOfOwnError:
            return work()

    def _call_bridge_once(self) -> None:
        """Make cppyy compile its wrapper of every function of ``bridge.h``.

        It does so in the first two calls of each function. They must not release the GIL, because a child forked
        meanwhile would inherit the compiler's lock in the locked state. They must not run in a folder to which others
        can write.
        """
        self.namespace: Any = self._cppyy.gbl.lowbit
        self.bridge: Any = self.namespace.bridge
        bridge = self.bridge
        without_gil = (bridge.multiply, bridge.multiply_cast, bridge.multiply_blocks, bridge.stop_pool)
        for call in (*without_gil, bridge.destroy_pool):
            call.__release_gil__ = True
        floats, bytes_, shorts = np.zeros(1, np.float32), np.zeros(1, np.uint8), np.zeros(1, np.int16)
        bridge.multiply(0, 0, floats, floats, 0)
        bridge.multiply_cast(0, 0, floats, floats, 0)
        bridge.multiply_blocks(0, 0, bytes_, shorts, floats, 0)
        numbers, addresses = np.zeros(12, np.int64), np.zeros(8, np.uint64)
        for _ in range(FIRST_CALLS):
            pool = bridge.create_pool(1)
            bridge.destroy_linear(bridge.create_linear(numbers, 0, 0, pool))
            bridge.destroy_route(bridge.create_route(0, numbers, addresses, numbers, 0))
            bridge.stop_pool(pool)
            bridge.destroy_pool(pool)

    def _call_kernel_set_once(self) -> None:
        """The same for the functions of ``decode.h`` that every operation uses."""
        for _ in range(FIRST_CALLS):
            self.bridge.destroy_kernel_set(self.bridge.create_kernel_set(0, np.zeros(1, np.uint64), 0, 0, 0))

    def kernel(self, kernel: Compilable) -> int:
        """The address of a kernel (a `lowbit::MicroKernel` of C++), compiled at the first request."""
        with preparing:
            if kernel.name not in self._kernels:
                table = kernel.table
                self.include_table(table)
                address_of = (
                    f"namespace lowbit::kernels {{ inline std::uintptr_t {kernel.name}()"
                    f" {{ return reinterpret_cast<std::uintptr_t>(&{table.name}::{kernel.name}); }} }}"
                )
                self.define(once(kernel.name, kernel.source + address_of))
                name = kernel.name
                self._kernels[name] = self.apart(lambda: int(getattr(self.namespace.kernels, name)()))
            return self._kernels[kernel.name]

    def address(self, array: Array) -> int:
        """The address of an array for C++; the caller keeps the array alive."""
        return int(array.ctypes.data)

    @contextmanager
    def written(self, arrays: Sequence[Array]) -> Iterator[U64]:
        """The addresses of arrays that C++ writes to; the arrays hold the results at the end of the context."""
        yield np.array([self.address(each) for each in arrays], np.uint64)

    def include_table(self, table: InstructionSet) -> None:
        """Compile the prelude of an instruction set at the first request."""
        with preparing:
            if table.name not in self.tables:
                self.define(once(table.name, f"{as_text()}{prelude(table)}"))
                self.tables.add(table.name)

    def define(self, source: str) -> None:
        """Compile C++ that has not been compiled before."""
        check_address_space("compiling a kernel", COMPILE_BYTES)
        self.apart(lambda: self._compile(source))

    def _compile(self, source: str) -> None:
        # Without AVX the compiler warns that vectors are passed in another way than with AVX. No vectors are passed,
        # because the functions that take them are inlined.
        quiet = f'#pragma clang diagnostic push\n#pragma clang diagnostic ignored "-Wpsabi"\n{source}'
        try:
            self._cppyy.cppdef(f"{quiet}\n#pragma clang diagnostic pop")
        except SyntaxError as error:
            lines = str(error).splitlines()
            reason = f"cppyy could not compile a kernel: {next((x for x in lines if 'error:' in x), lines[-1]).strip()}"
            raise UnavailableError("backend cppyy", reason, "check the C++ compiler, and EXTRA_CLING_ARGS") from error


def once(name: str, source: str) -> str:
    """C++ that may be compiled twice, because Ctrl-C may arrive after the compilation and before it is recorded."""
    return f"#ifndef LOWBIT_HAS_{name}\n#define LOWBIT_HAS_{name}\n{source}\n#endif"


preparing = threading.RLock()
"""Held while anything is compiled or created for later calls. A fork waits for it, so that no child inherits the lock
from a thread that the child lacks."""
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=preparing.acquire, after_in_parent=preparing.release, after_in_child=preparing.release)

_runtime: Runtime | None = None
_other: ContextVar[Runtime | None] = ContextVar("other", default=None)


def runtime() -> Runtime:
    """The only runtime of the process, created at the first request; inside `using`, the one given there.

    Raises:
        UnavailableError: cppyy or the C++ headers are missing.
    """
    global _runtime
    if other := _other.get():
        return other
    with preparing:
        if _runtime is None:
            _runtime = Runtime()
            atexit.register(_stop_pools)  # runs before cppyy's own handler, which was registered earlier
        return _runtime


@contextmanager
def using(other: Runtime) -> Iterator[None]:
    """Let this thread use another runtime."""
    token = _other.set(other)
    try:
        yield
    finally:
        _other.reset(token)


def replace_runtime(other: Runtime) -> None:
    """Use another runtime, whose C++ runs elsewhere, for all later compilations and calls."""
    global _runtime
    with preparing:
        _runtime = other


class _Symbol(ctypes.Structure):
    """The loader's information about an address: ``Dl_info``."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


@contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """Undo the signal handlers that cppyy's libraries install in this context, and no others: another thread may
    install its own meanwhile."""
    libc = ctypes.CDLL(None)
    size = 256  # bytes, more than a struct sigaction takes on any system
    handlers = {number: ctypes.create_string_buffer(size) for number in range(1, 32)}
    for number, handler in handlers.items():
        libc.sigaction(number, None, handler)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            now, known = ctypes.create_string_buffer(size), _Symbol()
            libc.sigaction(number, None, now)
            libc.dladdr(ctypes.c_void_p.from_buffer(now), ctypes.byref(known))  # a struct begins with the handler
            if b"/cppyy_backend/" in (known.file or b""):
                libc.sigaction(number, handler, None)


PASSED = ("CLING_STANDARD_PCH", "EXTRA_CLING_ARGS", "ROOTSYS")
"""The variables by which cppyy passes paths and options to its own libraries."""


@contextmanager
def _environment_kept() -> Iterator[None]:
    """Restore the variables of `PASSED` at the end, when they have been read. Other threads may set other variables
    meanwhile."""
    before = {name: os.environ.get(name) for name in PASSED}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
                os.unsetenv(name)  # os.environ does not see a variable that was set from C++
            else:
                os.environ[name] = value


class Made:
    """A C++ object, freed with its last owner; it keeps alive what it points to.

    Args:
        kind: the suffix after ``create_`` and ``destroy_`` in the names of its functions in `lowbit::bridge`.
        arguments: of the ``create_`` function.
        kept: what it points to.
    """

    def __init__(self, kind: str, *arguments: object, kept: object = None) -> None:
        self._bridge, self._kept = runtime().bridge, kept
        self.handle: int = getattr(self._bridge, f"create_{kind}")(*arguments)
        # Not at interpreter exit: a daemon thread may still be in a call.
        weakref.finalize(self, getattr(self._bridge, f"destroy_{kind}"), self.handle).atexit = False


class Pool(Made):
    """A pool of threads, stopped by `stop`, with its last owner, or at interpreter exit."""

    def __init__(self, threads: int) -> None:
        super().__init__("pool", threads)
        stop_at_exit(self)

    def stop(self) -> None:
        """End the threads after their current calls; later calls raise an error. Stopping twice is harmless."""
        self._bridge.stop_pool(self.handle)


class Stopped(Protocol):
    """An object with threads."""

    def stop(self) -> None: ...


_pools: weakref.WeakSet[Stopped] = weakref.WeakSet()


def stop_at_exit(owner: Stopped) -> None:
    """Stop an object at interpreter exit, if it still exists."""
    if not _pools:
        atexit.register(_stop_pools)
    _pools.add(owner)


def _stop_pools() -> None:
    """Stop all pools at interpreter exit: no thread may still be inside a kernel."""
    for pool in list(_pools):
        pool.stop()
    if any(thread.daemon for thread in threading.enumerate()):
        # Python ends a daemon thread when it next takes the GIL. Inside cppyy's frames that would abort the process.
        # Threads that were inside a kernel take the GIL now, while it is still safe.
        time.sleep(0.05)


class Layout(Protocol):
    """The layout of a prepared matrix: its sizes in the order of ``create_linear``, and the starts of its blocks."""

    @property
    def numbers(self) -> I64: ...

    @property
    def starts(self) -> I64: ...


class Linear(Made):
    """A prepared matrix: the stream of a layout."""

    def __init__(self, layout: Layout, stream: U32, pool: Pool) -> None:
        compiled, starts = runtime(), layout.starts
        addresses = compiled.address(stream), compiled.address(starts), pool.handle
        super().__init__("linear", layout.numbers, *addresses, kept=(stream, starts, pool))


class TiledKernel(Compilable, Protocol):
    """A kernel of a matrix, and the number of columns that one call computes."""

    @property
    def columns(self) -> int: ...


class Stream(Protocol):
    """A stream of activations for a matrix of a layout, as numbers and lists for the function that makes a route."""

    route: ClassVar[str]

    @property
    def layout(self) -> Layout: ...

    @property
    def firsts(self) -> list[int]: ...

    def numbers(self, columns: int) -> I64: ...

    def lists(self) -> list[Array]: ...


class Route(Made):
    """A kernel with the stream of activations that it reads.

    Attributes:
        laid_out: equal for two routes with the same layout of activations.
    """

    def __init__(self, kernel: TiledKernel, stream: Stream) -> None:
        compiled, lists = runtime(), stream.lists()
        self.laid_out = _digest(stream.layout.numbers[:GROUP_NUMBERS], stream.numbers(0), *lists)
        addresses = np.array([compiled.address(values) for values in lists], np.uint64)
        numbers, firsts = stream.numbers(kernel.columns), np.array(stream.firsts, np.int64)
        arguments = compiled.kernel(kernel), numbers, addresses, firsts, len(firsts) - 1
        super().__init__(stream.route, *arguments, kept=lists)


GROUP_NUMBERS = 6
"""The number of leading numbers of a layout, its rows and groups, that determine the layout of activations."""


def _digest(*lists: Array) -> bytes:
    digest = hashlib.sha256()
    for values in lists:
        digest.update(str((values.dtype, values.shape)).encode() + values.tobytes())
    return digest.digest()
