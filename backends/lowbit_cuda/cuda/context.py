"""The context of a device, made current for a call and no longer.

The driver keeps one current context for each thread, and other libraries in the process set it too: PyTorch when it
changes its device, a plugin when it initialises. The context that was current at the last call need not be current now.
So every call of the device queries it, sets its own if another is current, and afterwards restores what it found, also
where that was none. A query is cheap and two more calls are not, so a program that makes thousands of calls makes them
in a block (`lowbit_cuda.port.DevicePort.batch`), within which the context is only queried.

The device's *primary context* is shared by all libraries that use the runtime API. It is retained through cuda.core,
which never releases it; nothing here resets it or changes its flags.

Source: the CUDA driver API.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from lowbit_cuda.port import DeviceError


class Context:
    """A context, and how calls make it current.

    Args:
        handle: the driver's handle.
        call: as `lowbit_cuda.cuda.driver.call`.
    """

    def __init__(self, handle: Any, call: Callable[..., Any]) -> None:
        from cuda.bindings import driver

        self._handle, self._number, self._call = handle, int(handle), call
        self._get, self._set, self._success = (
            driver.cuCtxGetCurrent,
            driver.cuCtxSetCurrent,
            driver.CUresult.CUDA_SUCCESS,
        )

    def visit(self) -> "Switched":
        """A ``with`` block in which the context is current."""
        return Switched(self)

    def switch(self) -> Any:
        """Make it current; returns the context that was current, or None if it was this one."""
        code, found = self._get()
        if code != self._success:
            found = self._call("asking for the current context", lambda: (code, found))
        if int(found) == self._number:
            return None
        self._call("making the context current", self._set, self._handle)
        return found

    def restore(self, found: Any) -> None:
        """Make another context current again; one that was destroyed meanwhile is ignored."""
        with suppress(DeviceError):
            self._call("restoring the context", self._set, found)


class Switched:
    """A block in which a context is current."""

    __slots__ = ("_context", "_found")

    def __init__(self, context: Context) -> None:
        self._context = context
        self._found: Any = None

    def __enter__(self) -> None:
        self._found = self._context.switch()

    def __exit__(self, *error: object) -> None:
        if self._found is not None:
            self._context.restore(self._found)


def current() -> Any:
    """The current context of this thread."""
    from cuda.bindings import driver

    from lowbit_cuda.cuda.driver import call

    return call("asking for the current context", driver.cuCtxGetCurrent)
