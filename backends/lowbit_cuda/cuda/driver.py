"""What the driver answers, in words.

NVIDIA's driver answers each call with a number that has a name. cuda.bindings hands it on beside the result; cuda.core
raises an exception in whose text the name stands. Both become a `DeviceError` here that says what was tried, the name
and NVIDIA's explanation.

Some errors are *sticky*: a kernel that reached outside its memory takes the whole context with it, and every later call
in the process answers the same. These are told apart, because whoever meets one need not try again.

Source: the list of ``CUresult`` in the CUDA driver API reference, which says of each whether the context survives.
"""

import re
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from lowbit.errors import on_one_line
from lowbit_cuda.port import DeviceError

STICKY = frozenset(
    f"CUDA_ERROR_{name}"
    for name in (
        *("ILLEGAL_ADDRESS", "MISALIGNED_ADDRESS", "INVALID_ADDRESS_SPACE", "INVALID_PC", "ILLEGAL_INSTRUCTION"),
        *("LAUNCH_FAILED", "LAUNCH_TIMEOUT", "ASSERT", "HARDWARE_STACK_ERROR", "ECC_UNCORRECTABLE"),
        *("CONTEXT_IS_DESTROYED", "DEINITIALIZED", "CONTAINED", "TENSOR_MEMORY_LEAK"),
    )
)
OUT_OF_MEMORY = "CUDA_ERROR_OUT_OF_MEMORY"

_NAME = re.compile(r"\b(CUDA_ERROR_[A-Z0-9_]+)\b[:,]?\s*(.*)", re.DOTALL)


class DriverError(DeviceError):
    """The driver failed a call.

    Attributes:
        operation: what was tried.
        code: the error's name, as ``CUDA_ERROR_LAUNCH_FAILED``; empty where cuda.core hides it.
        text: NVIDIA's explanation.
        sticky: whether the context is lost with it.
    """

    def __init__(self, operation: str, code: str, text: str) -> None:
        self.operation, self.code, self.sticky = operation, code, code in STICKY
        self.text = on_one_line(text.split(". ")[0]).rstrip(".")
        lost = "; the device is lost to this process, which must be started anew" if self.sticky else ""
        super().__init__(": ".join(filter(None, (f"{operation} failed", code, self.text))) + lost)


def call(operation: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of cuda.core or cuda.bindings; for the latter, without the code that it answers first.

    Raises:
        DriverError: the driver failed it.
    """
    try:
        answer = function(*arguments)
    except DeviceError:
        raise
    except Exception as error:
        if (told := _of_core(error)) is None:
            raise
        raise DriverError(operation, *told) from error
    if not (isinstance(answer, tuple) and answer and type(answer[0]).__name__ == "CUresult"):
        return answer
    code, *rest = answer
    if int(code) != 0:
        raise DriverError(operation, code.name, _explanation(code))
    return rest[0] if len(rest) == 1 else tuple(rest) or None


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
