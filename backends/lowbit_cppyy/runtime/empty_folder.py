"""Doing something that looks for files in the current folder, while standing in an empty one.

cppyy is built on ROOT, which begins its search for libraries in ``.``, and reads ``.rootrc`` and ``.rootmap`` there.
While it starts it also has a shell run ``ls`` with ``LD_LIBRARY_PATH=DOESNOTEXIST``, so that libraries in a folder of
that name are loaded. No setting turns any of this off. So it is started in a folder in which there is nothing.

The current folder belongs to all threads of a process. On Linux a thread can have one of its own: `unshare` with
``CLONE_FS`` needs no privilege. The work is therefore done in a new thread, and the process does not notice. Where the
system has no such call, or a container refuses it, the process itself changes its folder for the time, provided that no
other thread of Python could be misled by that; otherwise the work is refused.
"""

import ctypes
import os
import stat
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Generic, TypeVar

from lowbit.errors import UnavailableError

Result = TypeVar("Result")

CLONE_FS = 0x200
STACK = 16 << 20  # bytes; the compiler recurses deeply


def run_in_empty_folder(what: str, work: Callable[[], Result]) -> Result:
    """What `work` returns, called while the thread that it runs in stands in an empty folder.

    An interrupt does not end the work; it is raised when the work is done.

    Args:
        what: for errors, what is unavailable if the work cannot be done.
        work: run in a thread of its own where the system allows it.

    Raises:
        NoFolderOfOwnError: the folder of the process would have to be changed while other threads run.
        UnavailableError: there is no temporary folder, or no thread can be started.
        Exception: whatever `work` raises.
    """
    with _empty_folder(what) as folder:
        apart = _Apart(folder, work)
        apart.run(what)
        if apart.refused:
            _change_folder_of_process(what, folder, apart)
    if apart.error is not None:
        raise apart.error
    return apart.results[0]


class NoFolderOfOwnError(UnavailableError):
    """A thread cannot have a current folder of its own here, and the process has other threads. Nothing was done."""


class _Apart(Generic[Result]):
    """The work, and what came of it.

    Attributes:
        refused: a thread cannot have a folder of its own here, and nothing was done.
        results: what the work returned, if it has.
        error: what it raised.
    """

    def __init__(self, folder: str, work: Callable[[], Result]) -> None:
        self._folder, self._work = folder, work
        self.refused = False
        self.results: list[Result] = []
        self.error: BaseException | None = None
        self._allowed = False
        self._decided, self._ended = threading.Event(), threading.Event()

    def run(self, what: str) -> None:
        """Do it in a new thread; an interrupt is kept until the thread has ended."""
        thread = threading.Thread(target=self._in_thread, name="lowbit-empty-folder", daemon=True)
        usual = threading.stack_size(STACK)
        try:
            thread.start()
            self._allowed = True
        except RuntimeError as error:
            raise UnavailableError(what, f"{error}", "raise the limit of threads (ulimit -u)") from None
        finally:  # after an interrupt of `start` nobody knows whether the thread runs; it does nothing then
            self._decided.set()
            threading.stack_size(usual)
        interrupt: BaseException | None = None
        while not self._ended.is_set():  # `Thread.join` forgets a running thread when it is interrupted
            try:
                self._ended.wait()
            except BaseException as error:  # of a signal handler: the work is not left half done
                interrupt = interrupt or error
        thread.join()
        if interrupt is not None:
            raise interrupt

    def _in_thread(self) -> None:
        self._decided.wait()
        try:
            if self._allowed and _has_own_folder():
                self.do()
            else:
                self.refused = True
        finally:
            self._ended.set()

    def do(self) -> None:
        """Change to the folder and do the work."""
        try:
            os.chdir(self._folder)
            _check_empty()
            self.results.append(self._work())
        except BaseException as error:
            self.error = error


def _has_own_folder() -> bool:
    """Give this thread a current folder of its own, as a copy of the process's; whether that was possible."""
    if sys.platform != "linux":
        return False
    try:
        return bool(ctypes.CDLL(None).unshare(CLONE_FS) == 0)
    except AttributeError:  # a C library without it
        return False


def _change_folder_of_process(what: str, folder: str, apart: _Apart[Result]) -> None:
    """Do the work with the whole process in the folder, if there is no other thread that could be misled."""
    if threading.active_count() > 1:
        raise NoFolderOfOwnError(
            what,
            "this system does not let a thread have a current folder of its own (unshare), and other threads run",
            "load the backend before other threads are started, or let the container allow unshare",
        )
    before = os.open(".", getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        apart.do()
    finally:
        os.fchdir(before)
        os.close(before)


@contextmanager
def _empty_folder(what: str) -> Iterator[str]:
    """A new folder, which is removed at the end."""
    try:
        folder = tempfile.mkdtemp(prefix="lowbit-")
    except OSError as error:
        reason = f"no temporary folder can be created: {error.strerror}"
        raise UnavailableError(what, reason, "name a folder that you can write to in TMPDIR") from None
    try:
        yield folder
    finally:
        with suppress(OSError):
            os.rmdir(folder)


def _check_empty() -> None:
    """Make sure that the current folder is the one that was made: nobody has put another in its place."""
    found = os.stat(".")
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077 or os.listdir("."):
        place = tempfile.gettempdir()
        reason = f"another user has replaced a new folder in {place}"
        raise UnavailableError("a temporary folder", reason, "name a folder of your own in TMPDIR")
