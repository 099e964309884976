"""Whether a GPU can run the kernels, and if not, what to do.

The checks are in the order in which a user can act on them: NVIDIA's packages are installed, there is a driver, it sees
a device, it is new enough for the packages, the kernels support the device, and there is a compiler for it. No check
creates a context on the device, so checking takes no device memory.

The names of errors are those of the CUDA driver API.
"""

import os
from typing import Any

from lowbit.backend import Availability
from lowbit_cuda.cuda.driver import INSTALL, DriverError, call, missing_package
from lowbit_cuda.port import DeviceError

OLDEST = (8, 0)
"""The least compute capability that the kernels support."""

INSTALL_DRIVER = "install NVIDIA's driver and see that nvidia-smi lists the device"

_REASONS = {
    "CUDA_ERROR_NO_DEVICE": ("the driver sees no NVIDIA GPU", INSTALL_DRIVER),
    "CUDA_ERROR_NOT_INITIALIZED": (
        "this process was forked from one that had used the GPU",
        "start it by spawn instead of fork",
    ),
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": (
        "the driver's library and its kernel module are of different versions",
        "restart the machine, or reinstall the driver",
    ),
    "CUDA_ERROR_STUB_LIBRARY": ("the driver found is the toolkit's stub, which only links", INSTALL_DRIVER),
}
PROHIBITED = 2
"""CU_COMPUTEMODE_PROHIBITED."""


def availability(ordinal: int = 0) -> Availability:
    """Whether device number `ordinal` can be used, and if not, why and what to do; raises nothing."""
    if missing := missing_package():
        return _no(missing, INSTALL)
    try:
        return _of_driver() or _of_device(ordinal) or _of_compiler(ordinal) or Availability(True)
    except DriverError as error:
        reason, remedy = _REASONS.get(error.code, (str(error), "see that nvidia-smi lists the device"))
        return _no(reason + _hidden(), remedy)
    except (DeviceError, RuntimeError, ImportError, OSError) as error:
        return _no(str(error).splitlines()[0] if str(error) else type(error).__name__, INSTALL_DRIVER)


def _of_driver() -> Availability | None:
    """Find, load and initialise the driver; returns what is wrong, or None."""
    try:
        from cuda.bindings import driver
    except ImportError as error:  # for example, a wheel for another system
        return _no(f"cuda-bindings cannot be imported: {error}", INSTALL)
    try:
        call("initializing the driver", driver.cuInit, 0)
    except DriverError:
        raise
    except (RuntimeError, OSError):
        return _no("NVIDIA's driver (libcuda.so.1) was not found", INSTALL_DRIVER)
    here, wanted = driver_version(), bindings_major()
    if here[0] < wanted:
        reason = f"the driver is for CUDA {here[0]}.{here[1]}, and the installed cuda-bindings are for CUDA {wanted}"
        return _no(reason, f'pip install "lowbit[cuda{here[0]}]", or a driver for CUDA {wanted}')
    return None


def _of_device(ordinal: int) -> Availability | None:
    from cuda.bindings import driver

    count = call("counting devices", driver.cuDeviceGetCount)
    if count == 0:
        return _no("the driver sees no NVIDIA GPU" + _hidden(), INSTALL_DRIVER)
    if not 0 <= ordinal < count:
        return _no(f"there is no device {ordinal}: the driver sees {count}{_hidden()}", "use another number")
    if (capability := compute_capability(ordinal)) < OLDEST:
        reason = f"the compute capability of device {ordinal} is {dotted(capability)}"
        others = [number for number in range(count) if compute_capability(number) >= OLDEST]
        remedy = (
            f"choose another: CUDA_VISIBLE_DEVICES={others[0]}"
            if others
            else "use a device of the generation Ampere or later"
        )
        return _no(f"{reason}; the kernels need {dotted(OLDEST)}", remedy)
    mode = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_MODE
    if attribute(ordinal, mode, "asking for the compute mode") == PROHIBITED:
        reason = f"device {ordinal} is in the compute mode Prohibited, in which no process may use it"
        return _no(reason, "nvidia-smi --compute-mode=DEFAULT, or use another device")
    return None


def _of_compiler(ordinal: int) -> Availability | None:
    from lowbit.errors import UnavailableError
    from lowbit_cuda.cuda.compiler import choose_architecture, compiler_version

    try:
        choose_architecture(compute_capability(ordinal))
        compiler, here = compiler_version(), driver_version()
    except UnavailableError as error:
        return _no(error.reason, error.remedy)
    if compiler[0] > here[0]:
        reason = f"NVRTC is {dotted(compiler)}, and the driver, for CUDA {dotted(here)}, may not load what it compiles"
        return _no(reason, f'pip install "lowbit[cuda{here[0]}]", or a driver for CUDA {compiler[0]}')
    return None


def _no(reason: str, remedy: str) -> Availability:
    return Availability(False, reason, remedy)


def _hidden() -> str:
    """A note on devices that the environment hides from the driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "" if visible is None else f" (CUDA_VISIBLE_DEVICES is {visible!r})"


# **Versions.**


def driver_version() -> tuple[int, int]:
    """The newest version of CUDA that the driver supports."""
    from cuda.bindings import driver

    number = int(call("asking the driver's version", driver.cuDriverGetVersion))  # 12090 is 12.9
    return number // 1000, number % 1000 // 10


def bindings_major() -> int:
    """The major version of CUDA that cuda-bindings is for."""
    from cuda import bindings

    return int(bindings.__version__.split(".")[0])


def compute_capability(ordinal: int) -> tuple[int, int]:
    """The compute capability of a device, read without a context."""
    from cuda.bindings import driver

    names, ask = driver.CUdevice_attribute, "asking for the compute capability"
    major = names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
    minor = names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR
    return attribute(ordinal, major, ask), attribute(ordinal, minor, ask)


def attribute(ordinal: int, name: Any, asking: str) -> int:
    """An attribute of a device, read without a context."""
    from cuda.bindings import driver

    device = call("finding the device", driver.cuDeviceGet, ordinal)
    return int(call(asking, driver.cuDeviceGetAttribute, name, device))


def dotted(numbers: tuple[int, int]) -> str:
    """A version as text.

    >>> dotted((8, 0))
    '8.0'
    """
    return f"{numbers[0]}.{numbers[1]}"
