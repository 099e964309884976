"""Running a function in an empty current folder, because it looks for files there.

cppyy is built on ROOT, which begins its search for libraries in ``.``, and reads ``.rootrc`` and ``.rootmap`` there. At
its start a shell also runs ``ls`` with ``LD_LIBRARY_PATH=DOESNOTEXIST``, so that libraries in a folder of that name are
loaded. No setting turns this off. So it is started in an empty folder.

The current folder belongs to all threads of a process. On Linux a thread can have its own: `unshare` with ``CLONE_FS``
needs no privilege. So the function runs in a new thread, and the rest of the process is not affected. Where the system
has no such call, or a container forbids it, the process itself changes its folder for that time, but only while no
other Python thread runs; otherwise an error is raised.
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
    """Call `work` in a thread whose current folder is empty, and return its result.

    An interrupt does not stop the work; it is raised afterwards.

    Args:
        what: what is unavailable if the work cannot be done, for errors.
        work: called in a separate thread if the system allows it.

    Raises:
        NoFolderOfOwnError: the folder of the process would have to be changed while other threads run.
        UnavailableError: there is no temporary folder, or no thread can be started.
        Exception: any that `work` raises.
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
    """A thread cannot have its own current folder here, and the process has other threads. Nothing was done."""


class _Apart(Generic[Result]):
    """The work and its result.

    Attributes:
        refused: a thread cannot have its own current folder here, and nothing was done.
        results: the result of the work, if it has returned.
        error: the exception that it raised.
    """

    def __init__(self, folder: str, work: Callable[[], Result]) -> None:
        self._folder, self._work = folder, work
        self.refused = False
        self.results: list[Result] = []
        self.error: BaseException | None = None
        self._allowed = False
        self._decided, self._ended = threading.Event(), threading.Event()

    def run(self, what: str) -> None:
        """Do the work in a new thread; an interrupt is kept until the thread has ended."""
        thread = threading.Thread(target=self._in_thread, name="lowbit-empty-folder", daemon=True)
        usual = threading.stack_size(STACK)
        try:
            thread.start()
            self._allowed = True
        except RuntimeError as error:
            raise UnavailableError(what, f"{error}", "raise the limit of threads (ulimit -u)") from None
        finally:  # after an interrupt of `start` the thread may or may not run; if it runs, it does nothing
            self._decided.set()
            threading.stack_size(usual)
        interrupt: BaseException | None = None
        while not self._ended.is_set():  # an interrupted `Thread.join` forgets a running thread
            try:
                self._ended.wait()
            except BaseException as error:  # from a signal handler: the work continues to its end
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
    """Give this thread its own current folder, initially the process's. Returns whether that was possible."""
    if sys.platform != "linux":
        return False
    try:
        return bool(ctypes.CDLL(None).unshare(CLONE_FS) == 0)
    except AttributeError:  # a C library without `unshare`
        return False


def _change_folder_of_process(what: str, folder: str, apart: _Apart[Result]) -> None:
    """Do the work with the folder as that of the whole process, if no other thread could be affected."""
    if threading.active_count() > 1:
        raise NoFolderOfOwnError(
            what,
            "this system does not let a thread have its own current folder (unshare), and other threads run",
            "load the backend before other threads are started, or allow unshare in the container",
        )
    before = os.open(".", getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        apart.do()
    finally:
        os.fchdir(before)
        os.close(before)


@contextmanager
def _empty_folder(what: str) -> Iterator[str]:
    """A new folder, removed at the end."""
    try:
        folder = tempfile.mkdtemp(prefix="lowbit-")
    except OSError as error:
        reason = f"no temporary folder can be created: {error.strerror}"
        raise UnavailableError(what, reason, "set TMPDIR to a folder that you can write to") from None
    try:
        yield folder
    finally:
        with suppress(OSError):
            os.rmdir(folder)


def _check_empty() -> None:
    """Check that the current folder is the one that was created, and not another in its place."""
    found = os.stat(".")
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077 or os.listdir("."):
        place = tempfile.gettempdir()
        reason = f"another user has replaced a new folder in {place}"
        raise UnavailableError("a temporary folder", reason, "set TMPDIR to a folder of your own")
