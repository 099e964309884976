"""Errors of NVIDIA's driver, in words.

The driver answers each call with a status code that has a name. cuda.bindings returns it beside the result; cuda.core
raises an exception whose text contains the name. Here both become a `DeviceError` that says what was tried, the name
and NVIDIA's explanation.

After some errors the device is *lost* to the process: a kernel that accessed memory out of bounds breaks the whole
context, and every later call returns the same error. Such errors are recognised in two ways:

- by their code, where the reference says that the process must be relaunched or that the context cannot be used any
  more, and where nothing is left to continue with (`LOST`);
- by the call. Waiting for, or querying, a stream or an event fails for earlier work of the device. Failed work leaves
  the context broken whatever the code is, so any error of such a call loses the device, except codes that say that the
  call itself was wrong (`ERRORS_OF_THE_CALL`).

Source: the list of ``CUresult`` in the CUDA driver API reference, version 13.5.
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
"""Errors of which the reference says that "the process must be terminated and relaunched"."""
LOST = RELAUNCH | _codes(
    "ASSERT",  # "the context cannot be used anymore, and must be destroyed"
    *("ECC_UNCORRECTABLE", "NVLINK_UNCORRECTABLE"),  # hardware that failed "during execution"
    *("CONTEXT_IS_DESTROYED", "DEINITIALIZED", "MPS_RPC_FAILURE"),  # the context, the driver or its server is gone
)
ERRORS_OF_THE_CALL = _codes(
    *("INVALID_VALUE", "INVALID_HANDLE", "INVALID_CONTEXT", "NOT_INITIALIZED", "NOT_READY", "NOT_PERMITTED"),
    *("NOT_SUPPORTED", "CAPTURED_EVENT", "OUT_OF_MEMORY", "CALL_REQUIRES_NEWER_DRIVER", "STREAM_DETACHED"),
    *(f"STREAM_CAPTURE_{what}" for what in ("UNSUPPORTED", "INVALIDATED", "IMPLICIT", "ISOLATION", "WRONG_THREAD")),
)
"""Errors that a waiting call may return although no work of the device has failed."""
OUT_OF_MEMORY = "CUDA_ERROR_OUT_OF_MEMORY"
INSTALL = 'pip install "lowbit[cuda]" (for drivers of CUDA 12: "lowbit[cuda12]")'

_NAME = re.compile(r"\b(CUDA_ERROR_[A-Z0-9_]+)\b[:,]?\s*(.*)", re.DOTALL)


class DriverError(DeviceError):
    """A call of the driver failed.

    Attributes:
        operation: what was tried, in words.
        code: the error's name, for example ``CUDA_ERROR_LAUNCH_FAILED``; empty where cuda.core hides it.
        text: NVIDIA's explanation.
    """

    ENDING = ""

    def __init__(self, operation: str, code: str, text: str) -> None:
        self.operation, self.code = operation, code
        self.text = on_one_line(text.split(". ")[0]).rstrip(".")
        super().__init__(": ".join(filter(None, (f"{operation} failed", code, self.text))) + self.ENDING)


class LostError(DriverError, DeviceLostError):
    """An error after which the device is lost."""

    ENDING = "; the device is lost to this process, which must be restarted"


def call(operation: str, function: Callable[..., Any], *arguments: Any, waits: bool = False) -> Any:
    """Call a function of cuda.core or cuda.bindings; of the latter's results, the status code is removed.

    Args:
        operation: what is tried, in words.
        function: the function.
        arguments: its arguments.
        waits: whether the call waits for, or queries, earlier work of the device.

    Raises:
        DriverError: the call failed.
        LostError: the device is lost.
    """
    try:
        answer = function(*arguments)
    except DeviceError:
        raise
    except Exception as error:
        if (found := _from_core(error)) is None:
            raise
        raise _error(operation, *found, waits) from error
    if not (isinstance(answer, tuple) and answer and type(answer[0]).__name__ == "CUresult"):
        return answer
    code, *rest = answer
    if int(code) != 0:
        raise _error(operation, code.name, _explanation(code), waits)
    return rest[0] if len(rest) == 1 else tuple(rest) or None


def _error(operation: str, code: str, text: str, waits: bool) -> DriverError:
    lost = code in LOST or (waits and code not in ERRORS_OF_THE_CALL)
    return (LostError if lost else DriverError)(operation, code, text)


def _from_core(error: Exception) -> tuple[str, str] | None:
    """The name and explanation in the text of an exception of cuda.core; None if it is not an error of the driver.

    >>> _from_core(RuntimeError("CUDA_ERROR_UNKNOWN: Nobody knows."))
    ('CUDA_ERROR_UNKNOWN', 'Nobody knows.')
    >>> _from_core(RuntimeError("Failed to create CUDA event"))
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
    """Whether a module can be found, without importing it."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its package is missing
        return False


def missing_package() -> str:
    """Which of NVIDIA's packages is not installed, in words; empty if none is missing."""
    for module in ("cuda.bindings", "cuda.core"):
        if not installed(module):
            return f"the Python package {module.replace('.', '-')} is not installed"
    return ""


def package_version(name: str) -> str:
    """The version of an installed package, or ``unknown``."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"
