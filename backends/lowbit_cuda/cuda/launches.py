"""A compiled source on a device, and launches of its kernels.

The arguments of a kernel are passed as its signature has them: an address of eight bytes for each span, and each number
in the type of `Parameter.kind`, so that a number is never read in a wider type than it was written. Numbers that do not
fit their type were refused before, by `lowbit_cuda.port.Kernel.checked`.

Machine code is loaded by a call of the driver and not by cuda.core, which keeps it until the process ends. By default
the driver loads a kernel at its first launch, which then allocates memory and may wait for all running work, and which
a stream in capture does not allow. So a kernel is loaded completely when it is looked up (``cuFuncLoad``; before CUDA
12.4, looking up the function does it).

The calls are those of the CUDA driver API and of cuda.core.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from lowbit_cuda.cuda.availability import driver_version
from lowbit_cuda.cuda.compiler import Cubin
from lowbit_cuda.port import LIMITS, DeviceError, Kernel, Number, Numbers

ALWAYS_SHARED = 48 << 10
"""Bytes of shared memory that a block may use by default."""
MOST_BLOCKS = (2**31 - 1, 65535, 65535)
MOST_THREADS = 1024
LOADS = (12, 4)
"""The first CUDA whose driver has ``cuFuncLoad``."""
TYPES: Mapping[str, Any] = {kind: np.dtype(kind).type for kind in (*LIMITS, "float32")}
"""The numpy types by the names in `Parameter.kind`."""


class Program:
    """Machine code of one source on a device.

    Args:
        cubin: the machine code.
        ordinal: the number of the device.
        call: as `lowbit_cuda.cuda.driver.call`.
    """

    def __init__(self, cubin: Cubin, ordinal: int, call: Callable[..., Any]) -> None:
        from cuda.bindings import driver

        self._call, self._ordinal, self.source = call, ordinal, cubin.source
        self._library = call(f"loading {cubin.source}", driver.cuLibraryLoadData, cubin.code, [], [], 0, [], [], 0)
        self._kernels: dict[str, tuple[Any, Any]] = {}
        self._shared: dict[str, int] = {}
        self._configs: dict[tuple[tuple[int, int, int], int, int], Any] = {}

    def launch(self, kernel: Kernel, numbers: Numbers, packed: Sequence[object], stream: Any) -> Callable[[], object]:
        """A function that starts a kernel in a stream of cuda.core, with arguments from `values`; the kernel is loaded
        now.

        Raises:
            DeviceError: there are too many blocks or threads, or the kernel cannot be loaded.
        """
        from cuda.core import LaunchConfig, launch

        grid, block, shared = kernel.grid(numbers), kernel.block, kernel.shared(numbers)
        if not all(1 <= blocks <= most for blocks, most in zip(grid, MOST_BLOCKS, strict=True)):
            raise DeviceError(f"launch of {kernel.name}: {grid} blocks; allowed: 1 to {MOST_BLOCKS}")
        if not 1 <= block <= MOST_THREADS:
            raise DeviceError(f"launch of {kernel.name}: {block} threads in a block; allowed: 1 to {MOST_THREADS}")
        loaded = self._loaded(kernel.name, shared)
        config = self._configs.get((grid, block, shared)) or LaunchConfig(grid=grid, block=block, shmem_size=shared)
        self._configs[grid, block, shared] = config
        return partial(self._call, f"launching {kernel.name}", launch, stream, config, loaded, *packed)

    def load(self, name: str) -> None:
        """Load a kernel onto the device, once.

        Raises:
            DeviceError: it cannot be loaded.
        """
        if name in self._kernels:
            return
        from cuda.bindings import driver
        from cuda.core import Kernel as CoreKernel

        handle = self._call(f"finding {name}", driver.cuLibraryGetKernel, self._library, name.encode())
        function = self._call(f"loading {name}", driver.cuKernelGetFunction, handle)
        if driver_version() >= LOADS:
            self._call(f"loading {name}", driver.cuFuncLoad, function)
        self._kernels[name] = handle, self._call(f"finding {name}", CoreKernel.from_handle, int(handle))

    def _loaded(self, name: str, shared: int) -> Any:
        """cuda.core's kernel, with a limit of shared memory that allows this launch."""
        from cuda.bindings import driver

        self.load(name)
        handle, loaded = self._kernels[name]
        if shared > self._shared.get(name, ALWAYS_SHARED):
            most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            asking, device = f"asking for {shared} bytes of shared memory for {name}", driver.CUdevice(self._ordinal)
            self._call(asking, driver.cuKernelSetAttribute, most, shared, handle, device)
            self._shared[name] = shared
        return loaded

    def close(self) -> None:
        """Unload the program; none of its kernels may be running."""
        from cuda.bindings import driver

        self._kernels.clear()
        library, self._library = self._library, None
        if library is not None:
            self._call(f"unloading {self.source}", driver.cuLibraryUnload, library)


def values(kernel: Kernel, addresses: Mapping[str, int], numbers: Mapping[str, Number]) -> list[object]:
    """The arguments in the order and types of the kernel's signature, from checked numbers."""
    return [addresses[p.name] if p.access else TYPES[p.kind](numbers[p.name]) for p in kernel.parameters]
