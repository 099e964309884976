"""The state of the host process, which a call must leave as it was, and what grows in it when calls leak.

The judge sends this file's text to the host, in front of `host`, which uses these names as its own. It needs nothing
but numpy and the standard library.
"""

import ctypes
import fcntl
import gc
import locale
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np

LIBC: Any = ctypes.CDLL(None, use_errno=True)
SIGNALS = [number for number in range(1, 32) if number not in (signal.SIGKILL, signal.SIGSTOP)]
OBSERVED = os.path.isdir("/proc/self/task")  # whether the system shows processes and their resources
SIGACTION_BYTES = 256  # more than a struct sigaction takes anywhere

Breach = tuple[str, str]
"""The verdict on a change that a call made to the process, and a text."""


class Watch:
    """The state of the process, and what a call has changed of it."""

    def __init__(self, output: int) -> None:
        self._output, self._written, self._stdout = output, 0, sys.stdout
        self._kept = fcntl.fcntl(output, fcntl.F_DUPFD_CLOEXEC, 50)  # the file of `output`, whatever happens to that
        self._libm: Any = ctypes.CDLL("libm.so.6") if sys.platform == "linux" else None
        LIBC.setlocale.restype = ctypes.c_char_p
        self._small, self._one = np.full(1, 1e-39, np.float32), np.ones(1, np.float32)
        self._handlers = {number: ctypes.create_string_buffer(SIGACTION_BYTES) for number in SIGNALS}
        self._probe = ctypes.create_string_buffer(SIGACTION_BYTES)
        self.allowed: Callable[[], tuple[int, ...]] = tuple
        self._has_programs = False  # whether the backend has ever named a child process
        self.remember()

    def remember(self) -> None:
        """Record the present state as the right one."""
        self._environment, self._folder = self._variables(), os.getcwd()
        self._locale, self._numpy = LIBC.setlocale(locale.LC_ALL, None), np.geterr()
        self._mask, self._umask = signal.pthread_sigmask(signal.SIG_BLOCK, []), self._file_mask()
        for number, handler in self._handlers.items():
            LIBC.sigaction(number, None, handler)
        self._python = [signal.getsignal(number) for number in SIGNALS]
        self._reaped = self._children_reaped()

    def breaches(self, preparing: bool) -> list[Breach]:
        """What has changed since then; the changes are undone."""
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
        os.ftruncate(self._kept, 0)  # otherwise output at every call would fill the disk
        os.lseek(self._kept, 0, os.SEEK_SET)
        self._written = 0
        return repr(text)

    def _children_reaped(self) -> int:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_minflt + used.ru_majflt

    def _children(self, preparing: bool) -> str:
        """Remaining processes that a call started, except those that the backend names in `children`."""
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
    """The significant part of a Linux struct sigaction: the handler and, if there is one, 64 signals of the mask and
    flags.

    The flag SA_RESTORER is the C library's own and appears with the first change.
    """
    raw: bytes = action.raw
    handler, flags = raw[:8], int.from_bytes(raw[136:140], "little") & ~0x04000000
    return handler if int.from_bytes(handler, "little") in (0, 1) else raw[:16] + flags.to_bytes(4, "little")


def children(process: int) -> list[int]:
    """The child processes of a process, including those that ended and were not waited for."""
    found: list[int] = []
    with suppress(OSError):
        for task in os.listdir(f"/proc/{process}/task"):
            with open(f"/proc/{process}/task/{task}/children") as file:
                found += [int(child) for child in file.read().split()]
    return found


def helpers() -> list[int]:
    """The processes that Python keeps for `multiprocessing`; they end with this one and cannot be ended before."""
    found = [("resource_tracker", "_resource_tracker", "_pid"), ("forkserver", "_forkserver", "_forkserver_pid")]
    modules = [(sys.modules.get(f"multiprocessing.{module}"), name, part) for module, name, part in found]
    numbers = [getattr(getattr(module, name, None), part, None) for module, name, part in modules]
    return [number for number in numbers if type(number) is int]


def _names(now: list[bytes], before: list[bytes]) -> str:
    changed = {entry.partition(b"=")[0].decode(errors="replace") for entry in set(now) ^ set(before)}
    return ", ".join(sorted(changed))


def measure() -> dict[str, int]:
    """Counts that grow if calls leak."""
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
