"""What the driver answers, in words.

NVIDIA's driver answers each call with a number that has a name. cuda.bindings hands it on beside the result; cuda.core
raises an exception in whose text the name stands. Both become a `DeviceError` here that says what was tried, the name
and NVIDIA's explanation.

After some errors the device is *lost* to the process: a kernel that reached outside its memory takes the whole context
with it, and every later call answers the same. They are told apart in two ways:

- by their code, where the reference says that the process must be relaunched or that the context cannot be used any
  more, and where nothing is left that could go on (`LOST`);
- by the call that answers. Waiting for a stream or an event, or asking for one, fails for what the device was given
  before. Work of the device that has failed leaves the context broken whatever the code is, so any error of such a
  call loses the device, except those that say that the call itself was wrong (`OF_THE_CALL`).

Source: the list of ``CUresult`` in the CUDA driver API reference, of version 13.5.
"""

import re
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from lowbit.errors import on_one_line
from lowbit_cuda.port import DeviceError, DeviceLostError


def _codes(*names: str) -> frozenset[str]:
    return frozenset(f"CUDA_ERROR_{name}" for name in names)


RELAUNCH = _codes(
    *("ILLEGAL_ADDRESS", "MISALIGNED_ADDRESS", "INVALID_ADDRESS_SPACE", "INVALID_PC", "ILLEGAL_INSTRUCTION"),
    *("LAUNCH_FAILED", "LAUNCH_TIMEOUT", "HARDWARE_STACK_ERROR", "TENSOR_MEMORY_LEAK", "CONTAINED"),
    *("EXTERNAL_DEVICE", "MPS_CLIENT_TERMINATED"),
)
"""Of these the reference says that "the process must be terminated and relaunched"."""
LOST = RELAUNCH | _codes(
    "ASSERT",  # "the context cannot be used anymore, and must be destroyed"
    *("ECC_UNCORRECTABLE", "NVLINK_UNCORRECTABLE"),  # hardware that failed "during execution"
    *("CONTEXT_IS_DESTROYED", "DEINITIALIZED", "MPS_RPC_FAILURE"),  # the context, the driver or its server is gone
)
OF_THE_CALL = _codes(
    *("INVALID_VALUE", "INVALID_HANDLE", "INVALID_CONTEXT", "NOT_INITIALIZED", "NOT_READY", "NOT_PERMITTED"),
    *("NOT_SUPPORTED", "CAPTURED_EVENT", "OUT_OF_MEMORY", "CALL_REQUIRES_NEWER_DRIVER", "STREAM_DETACHED"),
    *(f"STREAM_CAPTURE_{what}" for what in ("UNSUPPORTED", "INVALIDATED", "IMPLICIT", "ISOLATION", "WRONG_THREAD")),
)
"""What a call that waits may answer although nothing of the device's work has failed."""
OUT_OF_MEMORY = "CUDA_ERROR_OUT_OF_MEMORY"

_NAME = re.compile(r"\b(CUDA_ERROR_[A-Z0-9_]+)\b[:,]?\s*(.*)", re.DOTALL)


class DriverError(DeviceError):
    """The driver failed a call.

    Attributes:
        operation: what was tried.
        code: the error's name, as ``CUDA_ERROR_LAUNCH_FAILED``; empty where cuda.core hides it.
        text: NVIDIA's explanation.
    """

    ENDING = ""

    def __init__(self, operation: str, code: str, text: str) -> None:
        self.operation, self.code = operation, code
        self.text = on_one_line(text.split(". ")[0]).rstrip(".")
        super().__init__(": ".join(filter(None, (f"{operation} failed", code, self.text))) + self.ENDING)


class LostError(DriverError, DeviceLostError):
    """An error with which the device is lost."""

    ENDING = "; the device is lost to this process, which must be started anew"


def call(operation: str, function: Callable[..., Any], *arguments: Any, waits: bool = False) -> Any:
    """Call a function of cuda.core or cuda.bindings; for the latter, without the code that it answers first.

    Args:
        operation: what is tried, in words.
        function: the function.
        arguments: what it is given.
        waits: whether it waits, or asks, for what the device was given before.

    Raises:
        DriverError: the driver failed it.
        LostError: the device is lost.
    """
    try:
        answer = function(*arguments)
    except DeviceError:
        raise
    except Exception as error:
        if (told := _of_core(error)) is None:
            raise
        raise _error(operation, *told, waits) from error
    if not (isinstance(answer, tuple) and answer and type(answer[0]).__name__ == "CUresult"):
        return answer
    code, *rest = answer
    if int(code) != 0:
        raise _error(operation, code.name, _explanation(code), waits)
    return rest[0] if len(rest) == 1 else tuple(rest) or None


def _error(operation: str, code: str, text: str, waits: bool) -> DriverError:
    lost = code in LOST or (waits and code not in OF_THE_CALL)
    return (LostError if lost else DriverError)(operation, code, text)


def _of_core(error: Exception) -> tuple[str, str] | None:
    """The name and explanation that an exception of cuda.core hides in its text; None if it is no error of the driver.

    >>> _of_core(RuntimeError("CUDA_ERROR_UNKNOWN: Nobody knows."))
    ('CUDA_ERROR_UNKNOWN', 'Nobody knows.')
    >>> _of_core(RuntimeError("Failed to create CUDA event"))
    ('', 'Failed to create CUDA event')
    """
    text = str(error)
    if found := _NAME.search(text):
        return found[1], found[2]
    if type(error).__name__ == "CUDAError" and text.isdigit():
        from cuda.bindings import driver

        code = driver.CUresult(int(text))
        return code.name, _explanation(code)
    return ("", text) if type(error) is RuntimeError else None


def _explanation(code: Any) -> str:
    from cuda.bindings import driver

    answer, text = driver.cuGetErrorString(code)
    return text.decode(errors="replace") if int(answer) == 0 and text else ""


def installed(module: str) -> bool:
    """Whether Python finds a module, without importing it."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the package that it should lie in is not there
        return False


def package_version(name: str) -> str:
    """The version of an installed package, or ``unknown``."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"


def spoken_version(number: int) -> str:
    """A version of CUDA as the driver counts it.

    >>> spoken_version(12090)
    '12.9'
    """
    return f"{number // 1000}.{number % 1000 // 10}"
