"""The process that owns the code under test.

The judge (`remote`) sends this file's text to a fresh interpreter, so that the code under test sees no module, no
argument and no variable of the suite: a kernel cannot tell that it is being tested. Requests and replies are JSON
objects on one socket, and arrays lie in the shared memory of `arena`. During a call the pages of that call are the only
ones that can be accessed.

This process does not judge. It reports results, exceptions and *breaches*, which are what a call did to the process:
changed its environment, its folder, its floating-point mode or its signal handlers, wrote to standard output, left a
child, or asked for the answer elsewhere.
"""

import ctypes
import dataclasses
import fcntl
import gc
import importlib
import inspect
import json
import locale
import mmap
import os
import resource
import signal
import socket
import struct
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from typing import Any

import numpy as np

import lowbit.backend
from lowbit.backend import Backend, Declaration, PreparedLinear
from lowbit.backend.declarations import availability_of, capabilities_of
from lowbit.backend.wire import Tree, decode, encode
from lowbit.contract.rounding import any_order, one_loop
from lowbit.errors import ArgumentError, NotDeclaredError, UnavailableError
from lowbit.system.entries import entries

LIBC: Any = ctypes.CDLL(None, use_errno=True)
NO_ACCESS, READ, WRITE = 0, 1, 2  # of mprotect
M_PERTURB = -6  # of mallopt: fill what malloc gives and what free takes
MOST_KEPT = 1 << 16  # bytes of a result that is kept, to see whether a later call changes it
KEPT_RESULTS = 8  # arrays; a backend may have as many buffers as matrices, or take turns with a few
SIGNALS = [number for number in range(1, 32) if number not in (signal.SIGKILL, signal.SIGSTOP)]
MOST_NOTED = 100  # answers that are not the backend's own, and its child processes
CHANNEL_LOST = 4  # a status
SUITE = "lowbit_conformance"
OBSERVED = os.path.isdir("/proc/self/task")  # whether the system tells what processes there are, and what they have
SIGACTION_BYTES = 256  # more than a struct sigaction takes anywhere

KNOWN_ROUNDINGS = {any_order: "any_order", one_loop: "one_loop"}

Breach = tuple[str, str]
Message = dict[str, Tree]


class Memory:
    """The shared memory as this process sees it: closed, except for the pages of the call that runs."""

    def __init__(self, file: int, control: int, arguments: int) -> None:
        self.map = mmap.mmap(file, os.fstat(file).st_size)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self.control = np.frombuffer(self.map, np.uint64, control // 8)
        self.results = self.next = control + arguments
        LIBC.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        self._protect(control, arguments, NO_ACCESS)

    def _protect(self, start: int, size: int, access: int) -> None:
        if LIBC.mprotect(self.base + start, size, access):
            raise OSError(ctypes.get_errno(), "mprotect")

    def allow(self, segments: list[list[int]]) -> None:
        for start, size, writeable in segments:
            self._protect(start, size, READ | WRITE if writeable else READ)

    def forbid(self, segments: list[list[int]]) -> None:
        for start, size, _ in segments:
            self._protect(start, size, NO_ACCESS)

    def get(self, dtype: np.dtype[Any], shape: tuple[int, ...], tree: Message) -> Any:
        """An argument, which lies where the judge has put it."""
        if "at" not in tree:
            return np.empty(shape, dtype)  # an array without elements lies nowhere
        array: Any = np.ndarray(shape, dtype, self.map, tree["at"], tree.get("strides"))
        array.setflags(write=tree["writeable"])
        return array

    def holds(self, array: Any) -> bool:
        """Whether an array lies in the pages of arguments."""
        low, high = np.lib.array_utils.byte_bounds(array)
        return bool(low < self.base + self.results and high > self.base)

    def put(self, array: Any) -> Message:
        """Copy a result to where the judge will read it."""
        at = -(-self.next // 64) * 64
        if at + array.nbytes > len(self.map):
            raise MemoryError(f"a result of {array.nbytes} bytes")
        self.next = at + array.nbytes
        np.ndarray(array.shape, array.dtype, self.map, at)[...] = array
        return {"at": at}


# **Answers that are not the backend's own.**

_asked: list[Breach] = []


def fall_back(name: str) -> None:
    """Note and refuse a call of a function of the specification."""
    note_fallback(f"it called {name}, which a backend must not: it computes the result itself")
    raise RuntimeError(f"{name} cannot be called here: a backend computes the result itself")


def note_fallback(text: str) -> None:
    """Note an answer, or a way to one, that is not the backend's own."""
    if len(_asked) < MOST_NOTED:
        _asked.append(("SILENT_FALLBACK", text))


def breaches_asked() -> list[Breach]:
    """What has been noted since this was asked last."""
    found = list(_asked)
    _asked.clear()
    return found


SEAL: Any = None
"""The seal of `sealing`, once it is closed; the functions that it has sealed look for it here."""


def close_seal(text: str) -> None:
    """Run the text of `sealing`, and seal the functions of the specification."""
    global SEAL
    names: dict[str, Any] = {"__name__": "seal"}
    exec(compile(text, "<string>", "exec"), names)
    SEAL = names["Seal"](fall_back, note_fallback)
    SEAL.close()


class Others:
    """The packages of other backends that are installed; none of them has a reason to be imported here."""

    def __init__(self) -> None:
        found = entries(lowbit.backend.ENTRY_POINTS)
        packages = {entry.value.partition(":")[0].partition(".")[0] for entry in found} - {"lowbit"}
        self._packages = packages | {SUITE}

    def owned(self, modules: list[str]) -> None:
        """The packages of these modules are those of the backend under test itself."""
        self._packages -= {module.partition(".")[0] for module in modules}

    def breaches(self) -> list[Breach]:
        """The packages that have been imported since this was asked last."""
        imported = sorted(package for package in self._packages if package in sys.modules)
        self._packages -= set(imported)
        kinds = {SUITE: "which knows the right answers"}
        return [
            ("SILENT_FALLBACK", f"it imported {package}, {kinds.get(package, 'which is another backend')}")
            for package in imported
        ]


# **The state of the process**, which a call must leave as it was.


class Watch:
    """What the process looks like, and what of that a call has changed."""

    def __init__(self, output: int) -> None:
        self._output, self._written, self._stdout = output, 0, sys.stdout
        self._kept = fcntl.fcntl(output, fcntl.F_DUPFD_CLOEXEC, 50)  # whatever becomes of `output`, this is its file
        self._libm: Any = ctypes.CDLL("libm.so.6") if sys.platform == "linux" else None
        LIBC.setlocale.restype = ctypes.c_char_p
        self._small, self._one = np.full(1, 1e-39, np.float32), np.ones(1, np.float32)
        self._handlers = {number: ctypes.create_string_buffer(SIGACTION_BYTES) for number in SIGNALS}
        self._probe = ctypes.create_string_buffer(SIGACTION_BYTES)
        self.allowed: Callable[[], tuple[int, ...]] = tuple
        self._has_programs = False  # whether the backend has ever named a child of its own
        self.remember()

    def remember(self) -> None:
        """Take the present state for the right one."""
        self._environment, self._folder = self._variables(), os.getcwd()
        self._locale, self._numpy = LIBC.setlocale(locale.LC_ALL, None), np.geterr()
        self._mask, self._umask = signal.pthread_sigmask(signal.SIG_BLOCK, []), self._file_mask()
        for number, handler in self._handlers.items():
            LIBC.sigaction(number, None, handler)
        self._python = [signal.getsignal(number) for number in SIGNALS]
        self._reaped = self._children_reaped()

    def breaches(self, preparing: bool) -> list[Breach]:
        """What has changed since; it is changed back."""
        found = [("STATE_CHANGED", text) for text in self._changes()]
        if text := self._printed():
            found.append(("WROTE_TO_STDOUT", text))
        if text := self._children(preparing):
            found.append(("FORKED", text))
        return found

    def _changes(self) -> Iterator[str]:
        if (variables := self._variables()) != self._environment:
            yield f"environment variables {_names(variables, self._environment)}"
            self._restore_environment(variables)
        if (folder := self._folder_now()) != self._folder:
            yield f"the working folder, to {folder}"
            os.chdir(self._folder)
        if LIBC.setlocale(locale.LC_ALL, None) != self._locale:
            yield f"the locale, to {LIBC.setlocale(locale.LC_ALL, None).decode(errors='replace')}"
            LIBC.setlocale(locale.LC_ALL, self._locale)
        if np.geterr() != self._numpy:
            yield f"numpy's error state, to {np.geterr()}"
            np.seterr(**self._numpy)
        if mode := self._floating_point():
            yield mode
            self._libm.fesetenv(ctypes.c_void_p(-1))  # FE_DFL_ENV
        if (mask := self._file_mask()) != self._umask:
            yield f"the file mode mask, to {mask:o}"
            os.umask(self._umask)
        if signal.pthread_sigmask(signal.SIG_BLOCK, []) != self._mask:
            yield "the mask of blocked signals"
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        if changed := self._changed_handlers():
            yield f"the handlers of {', '.join(changed)}"
        if not self._output_is_open() or sys.stdout is not self._stdout:
            yield "standard output, which was closed or replaced"
            os.dup2(self._kept, self._output)
            sys.stdout = self._stdout
        if any(signal.getitimer(signal.ITIMER_REAL)):
            yield "a timer was left running"
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _changed_handlers(self) -> list[str]:
        changed = []
        for number, python, handler in zip(SIGNALS, self._python, self._handlers.values(), strict=True):
            LIBC.sigaction(number, None, self._probe)
            if essence(self._probe) != essence(handler) or signal.getsignal(number) != python:
                changed.append(signal.Signals(number).name)
                if callable(python) or isinstance(python, int):
                    signal.signal(number, python)
                LIBC.sigaction(number, handler, None)
        return changed

    def _floating_point(self) -> str:
        if self._libm is None:
            return ""
        if rounding := self._libm.fegetround():
            return f"the rounding mode, to {rounding:#x}"
        if self._libm.fegetexcept():
            return "the masks of floating-point exceptions"
        with np.errstate(all="ignore"):
            if not (self._small * self._one)[0]:
                return "subnormal numbers, which are now taken for zero or flushed to it"
        return ""

    def _variables(self) -> list[bytes]:
        """The environment as C sees it."""
        pointers = ctypes.POINTER(ctypes.c_char_p).in_dll(LIBC, "environ")
        found: list[bytes] = []
        while pointers and (entry := pointers[len(found)]) is not None:
            found.append(entry)
        return sorted(found)

    def _restore_environment(self, now: list[bytes]) -> None:
        for entry in set(now) - set(self._environment):
            os.unsetenv(entry.partition(b"=")[0])
        wanted = dict(entry.split(b"=", 1) for entry in self._environment)
        for name, value in wanted.items():
            os.putenv(name, value)
        for name in set(os.environb) - set(wanted):
            del os.environb[name]
        os.environb.update(wanted)
        self._environment = self._variables()

    def _folder_now(self) -> str:
        try:
            return os.getcwd()
        except OSError:
            return "one that is gone"

    def _file_mask(self) -> int:
        mask = os.umask(0)
        os.umask(mask)
        return mask

    def _output_is_open(self) -> bool:
        try:
            return os.path.sameopenfile(self._output, self._kept)
        except OSError:
            return False

    def _printed(self) -> str:
        with suppress(Exception):  # it may have been closed, or replaced by anything
            sys.stdout.flush()
        LIBC.fflush(None)
        size = os.fstat(self._kept).st_size
        if size == self._written:
            return ""
        text = os.pread(self._kept, min(size - self._written, 200), self._written).decode(errors="replace")
        os.ftruncate(self._kept, 0)  # or what prints at every call would fill the disk
        os.lseek(self._kept, 0, os.SEEK_SET)
        self._written = 0
        return repr(text)

    def _children_reaped(self) -> int:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_minflt + used.ru_majflt

    def _children(self, preparing: bool) -> str:
        """What is left of processes that a call started; those that the backend names in `children` are its own."""
        reaped, self._reaped = self._reaped, self._children_reaped()
        named = self.allowed()
        self._has_programs = self._has_programs or bool(named)
        own = (*named, *helpers())
        strangers: list[int] = []
        if hasattr(os, "waitid"):  # not on macOS, where the children are not seen either
            with suppress(ChildProcessError):  # there is none at all
                os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                strangers = [child for parent in (os.getpid(), *own) for child in children(parent) if child not in own]
        for child in strangers:
            with suppress(OSError):
                os.kill(child, signal.SIGKILL)
            with suppress(OSError):
                os.waitpid(child, 0)
        if strangers:
            self._reaped = self._children_reaped()
            return f"a child process is left: {strangers}"
        if reaped != self._reaped and not preparing and not self._has_programs:
            return "a child process ran and ended; only `prepare` and `warm_up` may start programs, such as a compiler"
        return ""


def essence(action: Any) -> bytes:
    """Of a struct sigaction of Linux what decides: the handler, and if there is one, 64 signals of the mask and flags.

    The flag SA_RESTORER is the C library's own and appears with the first change.
    """
    raw: bytes = action.raw
    handler, flags = raw[:8], int.from_bytes(raw[136:140], "little") & ~0x04000000
    return handler if int.from_bytes(handler, "little") in (0, 1) else raw[:16] + flags.to_bytes(4, "little")


def children(process: int) -> list[int]:
    """The child processes of a process, those that have ended and were not waited for among them."""
    found: list[int] = []
    with suppress(OSError):
        for task in os.listdir(f"/proc/{process}/task"):
            with open(f"/proc/{process}/task/{task}/children") as file:
                found += [int(child) for child in file.read().split()]
    return found


def helpers() -> list[int]:
    """The processes that Python itself keeps for `multiprocessing`: they end with this one, and cannot be ended
    before."""
    found = [("resource_tracker", "_resource_tracker", "_pid"), ("forkserver", "_forkserver", "_forkserver_pid")]
    modules = [(sys.modules.get(f"multiprocessing.{module}"), name, part) for module, name, part in found]
    numbers = [getattr(getattr(module, name, None), part, None) for module, name, part in modules]
    return [number for number in numbers if type(number) is int]


def _names(now: list[bytes], before: list[bytes]) -> str:
    changed = {entry.partition(b"=")[0].decode(errors="replace") for entry in set(now) ^ set(before)}
    return ", ".join(sorted(changed))


def measure() -> dict[str, int]:
    """What grows when calls leak."""
    gc.collect()
    counts = {"Python objects": sys.getallocatedblocks()}
    if hasattr(LIBC, "mallinfo2"):
        LIBC.mallinfo2.restype = _MallInfo
        info = LIBC.mallinfo2()
        counts["bytes of malloc"] = info.uordblks + info.hblkhd
    if OBSERVED:
        counts |= {"threads": len(os.listdir("/proc/self/task")), "open files": len(os.listdir("/proc/self/fd"))}
        with open("/proc/self/statm") as file:
            counts["pages mapped"] = int(file.read().split()[0])
    return counts


class _MallInfo(ctypes.Structure):
    """The struct mallinfo2 of the GNU C library."""

    NAMES = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = tuple((name, ctypes.c_size_t) for name in NAMES.split())


# **Requests.**


class Host:
    """The backend under test, and what the judge may ask of it."""

    def __init__(self, memory: Memory, watch: Watch, others: Others) -> None:
        self.memory, self.watch, self.others = memory, watch, others
        self.backend: Any = None
        self.claimed: Mapping[str, Declaration] = {}
        self.held: dict[int, Any] = {}
        self.number = 0
        self.given: deque[tuple[Any, bytes]] = deque(maxlen=KEPT_RESULTS)
        self.fresh: list[Any] = []
        self.same: dict[tuple[int, int], tuple[list[Any], dict[str, Any]]] = {}
        self.broken: list[Breach] = []
        self.warm: set[str] = set()

    # Loading.

    def load(self, kind: str, name: str, own: list[str], seal: str, handler: str) -> Message:
        """Import and make the backend.

        `own` are packages that it may import, and `seal` is the text of `sealing`: empty for those that may call the
        reference, as only the suite's own may.
        """
        if seal:
            close_seal(seal)
        try:
            self.backend = made(kind, name)
        except (ArgumentError, UnavailableError) as error:
            return {"refused": str(error)}
        try:
            state = availability_of(self.backend)
            if not state.usable:
                return {"refused": str(UnavailableError(f"backend {name}", state.reason, state.remedy))}
            if kind == "function":  # whose code has not run; importing the library of its arrays may change the process
                self.watch.remember()
            capabilities = self.capabilities()
            same = capabilities == self.capabilities()
        except (ArgumentError, UnavailableError) as error:
            return {"misdeclared": str(error)}
        # As the adapter of programs has; what is declared may have no end.
        self.watch.allowed = lambda: tuple(islice(getattr(self.backend, "children", ()), MOST_NOTED))
        kinds = [kind for kind in type(self.backend).__mro__ if kind is type(self.backend) or inspect.isabstract(kind)]
        self.others.owned([*(kind.__module__ for kind in kinds), *own])  # it may complete another's abstract class
        breaches = self.watch.breaches(preparing=True) + self.others.breaches() + breaches_asked()
        if not same:
            breaches.append(("NONDETERMINISTIC", "its capabilities are not the same when asked again"))
        if handler:
            ctypes.CDLL(handler).lowbit_record_faults(ctypes.c_void_p(self.memory.base))
        self.watch.remember()
        gc.collect()
        gc.freeze()  # what is there now stays, and need not be looked through again and again
        return {"capabilities": capabilities, "breaches": breaches}

    def capabilities(self) -> Message:
        given: Any = capabilities_of(self.backend)  # plain values
        self.claimed = given.operations
        operations = {}
        for name, declaration in given.operations.items():
            arithmetic = declaration.arithmetic
            told = None
            if arithmetic:
                told = {part.name: getattr(arithmetic, part.name) for part in dataclasses.fields(arithmetic)}
                told["roundings"] = KNOWN_ROUNDINGS.get(arithmetic.roundings, "own")
            operations[name] = {"limits": declaration.told_limits, "arithmetic": told}
        rest = {part.name: getattr(given, part.name) for part in dataclasses.fields(given)}
        rest |= {"operations": operations, "details": dict(given.details or {})}
        return json.loads(json.dumps(rest))  # type: ignore[no-any-return]  # JSON is Any to mypy

    def roundings(self, operation: str, rows: int, group_size: int) -> Message:
        arithmetic: Any = self.claimed[operation].arithmetic
        return {"roundings": int(arithmetic.roundings(rows, group_size))}

    # Calls. A request carries several attempts at one call, each with its arrays in other places.

    def call(self, what: str, attempts: list[Message], operation: str = "") -> Message:
        """Perform the attempts one by one: `run`, `prepare`, `open`, or a method of a handle: a product or `step`."""
        outcomes: list[Message] = []
        breaches = self.warm_up(operation) if what in ("run", "open") else []
        for attempt in attempts:
            outcomes.append(self.attempt(what, operation, attempt))
            breaches += self.broken
            if os.getpid() != PROCESS:
                os._exit(3)  # a child that came back from the call; its parent answers
        breaches += self.watch.breaches(what == "prepare") + self.others.breaches() + breaches_asked()
        return {"outcomes": outcomes, "breaches": breaches}

    def warm_up(self, operation: str) -> list[Breach]:
        """Let the backend make ready what the first call of an operation needs, which may take programs."""
        if operation in self.warm:
            return []
        self.warm.add(operation)
        with suppress(Exception):  # what is wrong shows in the call
            self.backend.warm_up(operation)
        return self.watch.breaches(preparing=True)

    def attempt(self, what: str, operation: str, attempt: Message) -> Message:
        segments, held = attempt["segments"], what in ("prepare", "open")
        self.memory.allow(segments)
        try:
            arguments, choices = self.arguments(attempt)
            if hasattr(LIBC, "mallopt"):  # of the GNU C library
                LIBC.mallopt(M_PERTURB, attempt["perturb"])
            try:
                result = self.function(what, operation, attempt.get("handle"))(*arguments, **choices)
            except BaseException as error:
                return raised(error)
            finally:
                self.broken = self.overwritten()
            if not held:
                return self.outcome(result, arguments)
            if what == "prepare" and not isinstance(result, PreparedLinear):
                return {"strange": f"prepare gave a {type(result).__name__}, which is no PreparedLinear"}
            self.number += 1
            self.held[self.number] = result
            numbers = {"handle": self.number}
            if what == "prepare":
                numbers |= {name: int(getattr(result, name)) for name in ("rows", "columns", "nbytes")}
            return numbers
        finally:
            self.memory.forbid(segments)

    def arguments(self, attempt: Message) -> tuple[list[Any], dict[str, Any]]:
        """The arguments of an attempt; those of one with a name are the objects of the attempt that had it before."""
        name = tuple(attempt.get("same", ()))
        if name in self.same:
            return self.same[name]
        arguments = [decode(tree, self.memory.get) for tree in attempt["arguments"]]
        choices = {key: decode(tree, self.memory.get) for key, tree in attempt["choices"].items()}
        if name:
            self.same[name] = arguments, choices
        return arguments, choices

    def forget(self, serial: int) -> Message:
        """Give up the arguments that were kept under names of this series."""
        self.same = {name: kept for name, kept in self.same.items() if name[0] != serial}
        return {}

    def function(self, what: str, operation: str, handle: int | None) -> Callable[..., Any]:
        if what in ("run", "open"):
            call = getattr(self.backend, what)
            return lambda *arguments, **choices: call(operation, *arguments, **choices)
        if handle is not None:
            return getattr(self.held[handle], what)  # type: ignore[no-any-return]  # what is held is Any
        return self.backend.prepare  # type: ignore[no-any-return]  # the backend is Any

    def outcome(self, result: Any, arguments: list[Any]) -> Message:
        for number, argument in enumerate(arguments):
            if result is argument and isinstance(argument, np.ndarray) and argument.flags.writeable:
                return {"argument": number}
        try:
            return {"result": encode(result, self.put)}
        except (ArgumentError, MemoryError, RecursionError) as error:
            of = "" if isinstance(result, np.ndarray) else f"the result is a {type(result).__name__}: "
            return {"strange": f"{of}{error}"}
        finally:
            self.keep()

    def keep(self) -> None:
        """Write other bytes into the arrays that were given, as their owner, the caller, may; and remember them."""
        for array in self.fresh:
            if array.flags.writeable:
                if any(np.may_share_memory(array, before) for before, _ in self.given):
                    self.given.clear()
                    self.broken.append(("OOB_WRITE", "the result lies in an array that was given as a result before"))
                other = np.invert(np.frombuffer(array.tobytes(), np.uint8))
                array[...] = other.view(array.dtype).reshape(array.shape)
        self.given.extend((array, array.tobytes()) for array in self.fresh)
        self.fresh.clear()

    def put(self, array: Any) -> Message:
        """Copy an array of a result to the judge, and keep it, to see whether a later call changes it.

        Raises:
            ArgumentError: it is of a class derived from numpy's, or lies in the memory of an argument.
        """
        if type(array) is not np.ndarray:
            raise ArgumentError("an array of the result", f"a {type(array).__name__}", "a numpy.ndarray")
        if array.size and self.memory.holds(array):
            raise ArgumentError("an array of the result", "in the memory of an argument", "an array of its own")
        if 0 < array.nbytes <= MOST_KEPT:
            self.fresh.append(array)
        return self.memory.put(array)

    def overwritten(self) -> list[Breach]:
        """Whether an array that an earlier call gave as its result has changed since."""
        if any(array.tobytes() != content for array, content in self.given):
            self.given.clear()
            return [("OOB_WRITE", "the result of a call before was overwritten")]
        return []

    def release(self, handles: list[int]) -> None:
        """Close and forget what is held by these handles."""
        for handle in handles:
            held = self.held.pop(handle)
            if hasattr(held, "close"):
                held.close()

    # Many calls at once, and many calls.

    def together(self, calls: list[Message], times: int) -> Message:
        """Perform several calls in as many threads, each `times` times; the outcomes of each."""
        outcomes: list[list[Message]] = [[] for _ in calls]
        ready, lock = threading.Barrier(len(calls)), threading.Lock()

        def work(number: int, call: Message) -> None:
            attempt = call["attempt"]
            function = self.function(call["what"], call["operation"], attempt.get("handle"))
            arguments, choices = self.arguments(attempt)
            ready.wait()
            for _ in range(times):
                try:
                    result = function(*arguments, **choices)
                    with lock:
                        own = next((a for a in arguments if a is result and isinstance(a, np.ndarray)), result)
                        outcomes[number].append({"result": encode(own, self.memory.put)})
                except BaseException as error:
                    outcomes[number].append(raised(error))

        segments = [segment for call in calls for segment in call["attempt"]["segments"]]
        self.memory.allow(segments)
        threads = [threading.Thread(target=work, args=pair) for pair in enumerate(calls)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.memory.forbid(segments)
        return {"outcomes": outcomes, "breaches": self.watch.breaches(False) + breaches_asked()}

    def walk(self, handles: list[int], steps: list[Tree], times: int) -> Message:
        """Repeat the same steps of each session, and give no answers."""
        arguments = [decode(step, self.memory.get) for step in steps]
        for handle in handles:
            take = self.function("step", "", handle)
            for _ in range(times):
                for step in arguments:
                    take(*step)
        return {"breaches": self.watch.breaches(False)}

    def repeat(self, what: str, attempt: Message, operation: str, batches: int, times: int) -> Message:
        """Perform a call again and again; what there was of everything before and after each batch of `times`."""
        self.memory.allow(attempt["segments"])
        arguments, choices = self.arguments(attempt)
        function = self.function(what, operation, attempt.get("handle"))
        counts = []
        try:
            for number in range(batches + 1):
                for _ in range(times if number else 3):
                    result = function(*arguments, **choices)
                    if what == "open":
                        result.close()
                    del result
                counts.append(measure())
        except BaseException as error:
            return raised(error) | {"breaches": []}
        finally:
            self.memory.forbid(attempt["segments"])
        return {"counts": counts, "breaches": self.watch.breaches(what == "prepare") + breaches_asked()}


PROCESS = os.getpid()
FOREIGN = {
    "function": "lowbit.backend.function:FunctionBackend",
    "library": "lowbit_foreign:LibraryBackend",
    "command": "lowbit_foreign:CommandBackend",
}


def made(kind: str, name: str) -> Backend:
    """The backend under test: a name that `lowbit.backend.find` knows, or what a function gives of the name."""
    if kind == "name":
        return lowbit.backend.find(name)
    module, _, factory = FOREIGN.get(kind, kind).partition(":")
    backend: Backend = getattr(importlib.import_module(module), factory)(name)
    return backend


def raised(error: BaseException) -> Message:
    """An exception as the judge is told of it."""
    known = next((kind for kind in (ArgumentError, NotDeclaredError) if isinstance(error, kind)), None)
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != raised.__code__.co_filename
    ]
    place = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""
    try:
        text = str(error)
    except Exception:
        text = "(its text cannot be made)"
    told: Message = {"raised": type(error).__name__, "text": text[:1000], "place": place}
    if known:
        told |= {"known": known.__name__, "arguments": [str(part) for part in error.args][:3]}
    return told


def serve(channel: socket.socket, memory: Memory, watch: Watch, others: Others) -> None:
    """Answer requests until the judge is gone."""
    host = Host(memory, watch, others)
    while message := receive(channel):
        memory.next = memory.results
        token = message.pop("token")
        request: Callable[..., Message] = getattr(host, message.pop("do"))
        try:
            host.release(message.pop("release"))
            reply = request(**message)
        except BaseException as error:
            reply = {"failed": raised(error)}
        if os.getpid() != PROCESS:
            os._exit(3)
        send(channel, reply | {"token": token})


def receive(channel: socket.socket) -> Message:
    """One message; empty when the other side is gone."""
    head = read_exactly(channel, 8)
    return json.loads(read_exactly(channel, struct.unpack("<Q", head)[0])) if head else {}


def read_exactly(channel: socket.socket, size: int) -> bytes:
    parts = b""
    while len(parts) < size:
        part = channel.recv(min(size - len(parts), 1 << 20))
        if not part:
            return b""
        parts += part
    return parts


def send(channel: socket.socket, message: Message) -> None:
    text = json.dumps(message).encode()
    channel.sendall(struct.pack("<Q", len(text)) + text)


def main() -> None:
    """Take over standard input, which is the socket to the judge, and leave an empty one behind."""
    channel = socket.socket(fileno=fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, 50))
    with open(os.devnull) as empty:
        os.dup2(empty.fileno(), 0)
    # A backend that crashes leaves no core file in the folder of the user; it would hold 4 GiB of shared memory.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if sys.platform == "linux":
        LIBC.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: do not outlive the judge
        LIBC.prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: grandchildren become children
    greeting = receive(channel)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    memory = Memory(greeting["file"], greeting["control"], greeting["arguments"])
    os.close(greeting["file"])
    isolation = globals().get("ISOLATION", "")  # set by the text before this one
    if isolation == "none" and not OBSERVED:
        isolation = "unobserved"
    send(channel, {"base": memory.base, "isolation": isolation, "token": greeting["token"]})
    try:
        serve(channel, memory, Watch(1), Others())
    except OSError as error:
        os.write(2, f"the channel to the process that judges was closed or replaced: {error.strerror}".encode())
        os._exit(CHANNEL_LOST)
    os._exit(0)


if __name__ == "__main__":
    main()
