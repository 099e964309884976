"""A compiled source on a device, and how a kernel in it is started.

The arguments of a kernel are handed over as its signature has them: an address of eight bytes for each span, and each
number in the type that `Parameter.kind` names, so that a count is never read as half of something longer. A number that
its type cannot hold is refused here, because on the device it would silently be another.

Source: lowbit's own; the calls are those of cuda.core.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from lowbit.errors import ArgumentError
from lowbit_cuda.cuda.compiler import Cubin
from lowbit_cuda.port import Kernel, Number, Numbers

ALWAYS_SHARED = 48 << 10
"""Bytes of shared memory that a block may have without asking."""
MOST_BLOCKS = (2**31 - 1, 65535, 65535)
MOST_THREADS = 1024


class Program:
    """Machine code of one source, loaded when its first kernel is asked for.

    Args:
        cubin: the machine code.
        ordinal: of the device.
        call: as `lowbit_cuda.cuda.driver.call`.
    """

    def __init__(self, cubin: Cubin, ordinal: int, call: Callable[..., Any]) -> None:
        from cuda.core import ObjectCode

        self._call, self._ordinal = call, ordinal
        self._code = call(f"loading {cubin.source}", lambda: ObjectCode.from_cubin(cubin.code, name=cubin.source))
        self._kernels: dict[str, Any] = {}
        self._shared: dict[str, int] = {}

    def launch(self, kernel: Kernel, numbers: Numbers, packed: Sequence[object], stream: Any) -> None:
        """Start a kernel in a stream of cuda.core, with what `values` gave.

        Raises:
            ArgumentError: more blocks or threads than a device can have.
            DriverError: the driver refused it.
        """
        from cuda.core import LaunchConfig, launch

        grid, block, shared = kernel.grid(numbers), kernel.block, kernel.shared(numbers)
        if not all(1 <= blocks <= most for blocks, most in zip(grid, MOST_BLOCKS, strict=True)):
            raise ArgumentError(f"grid of {kernel.name}", grid, f"1 to {MOST_BLOCKS} blocks")
        if not 1 <= block <= MOST_THREADS:
            raise ArgumentError(f"block of {kernel.name}", block, f"1 to {MOST_THREADS} threads")
        loaded = self._loaded(kernel.name, shared)
        config = LaunchConfig(grid=grid, block=block, shmem_size=shared)
        self._call(f"launching {kernel.name}", launch, stream, config, loaded, *packed)

    def _loaded(self, name: str, shared: int) -> Any:
        """The kernel, allowed as much shared memory as it is about to be given."""
        if name not in self._kernels:
            self._kernels[name] = self._call(f"loading {name}", self._code.get_kernel, name)
        if shared > self._shared.get(name, ALWAYS_SHARED):
            from cuda.bindings import driver

            most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            device = driver.CUdevice(self._ordinal)
            handle = self._kernels[name].handle
            asking = f"asking for {shared} bytes of shared memory for {name}"
            self._call(asking, driver.cuKernelSetAttribute, most, shared, handle, device)
            self._shared[name] = shared
        return self._kernels[name]


def values(kernel: Kernel, addresses: Mapping[str, int], numbers: Mapping[str, Number]) -> list[object]:
    """The arguments in the order and the types of the kernel's signature.

    Raises:
        ArgumentError: a number that its type cannot hold.
    """
    return [
        addresses[p.name] if p.access else number_of(f"{p.name} of {kernel.name}", p.kind, numbers[p.name])
        for p in kernel.parameters
    ]


def number_of(name: str, kind: str, value: Number) -> object:
    """A number in the type of this name; never another number.

    >>> number_of("rows", "int32", 7)
    np.int32(7)
    >>> number_of("rows", "int32", 2**31)
    Traceback (most recent call last):
    lowbit.errors.ArgumentError: rows is 2147483648; allowed: a number that int32 holds
    """
    dtype = np.dtype(kind)
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        if value != int(value) or not limits.min <= value <= limits.max:
            raise ArgumentError(name, value, f"a number that {kind} holds")
        return dtype.type(int(value))
    return dtype.type(value)
