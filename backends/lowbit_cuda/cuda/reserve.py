r"""The reserve: device memory that allocations must leave to the driver.

A budget counts allocations. The driver needs further memory for the work that it runs; if allocations have taken
everything, a launch fails in the middle of a run. So a device opens with at most the free memory less this reserve:

- the *code* of the kernels. The cubins of all sources have 11 MB together for ``sm_90``; `CODE` is more than twice
  that, because each module is placed in separate pieces.
- *graphs*. A graph that can be launched keeps the parameters of its nodes on the device. Reports range from 10 to 60
  KiB per kernel; `GRAPHS` is 64 KiB for a thousand kernels, which is 64 layers.
- *local memory* of threads, for as many as can be resident at once:

  .. math:: \text{processors} \cdot \text{threads per processor} \cdot \text{stack per thread}.

  No kernel of lowbit has a stack frame or spills, so the stack is the context's default (1 KiB).
- *the rest*: streams, events, and pieces of which small allocations use only a part (`REST`).

Memory that the context itself takes is no longer free when the device queries it, so it is not counted here. These
numbers come from the reference and from published reports; they were not measured.

Source: the limits and attributes of the CUDA driver API.
"""

from dataclasses import dataclass
from typing import Any

from lowbit.backend.whole_model import spoken_bytes
from lowbit.errors import ArgumentError
from lowbit_cuda.cuda.availability import attribute
from lowbit_cuda.port import PIECE

CODE = 32 << 20
GRAPHS = 64 << 20
REST = 2 * PIECE


@dataclass(frozen=True)
class Reserve:
    """The memory that allocations must leave free.

    Attributes:
        processors: processors of the device, or of the part of it that this process may use.
        threads: the largest number of resident threads per processor.
        stack: bytes of stack per thread.
    """

    processors: int
    threads: int
    stack: int

    @property
    def local(self) -> int:
        """Bytes of local memory, in whole pieces."""
        return -(-self.processors * self.threads * self.stack // PIECE) * PIECE

    @property
    def total(self) -> int:
        """The total in bytes.

        >>> Reserve(processors=132, threads=2048, stack=1024).total >> 20
        364
        """
        return CODE + GRAPHS + REST + self.local

    def budget(self, free: int, given: int | None) -> int:
        """The given budget or, if None, all that is free beyond the reserve, in whole pieces.

        Raises:
            ArgumentError: the device does not have that much; the message says how much it has.
        """
        most = max(free - self.total, 0) // PIECE * PIECE
        if most and (given is None or given <= most):
            return most if given is None else given
        asked = "all that is free" if given is None else f"{given} bytes ({spoken_bytes(given)})"
        has = f"the device has {spoken_bytes(free)} free, of which {spoken_bytes(self.total)} stay for the driver's "
        has += "code, graphs and local memory"
        allowed = f"at most {most} bytes ({spoken_bytes(most)})" if most else "a device with more free memory"
        raise ArgumentError("device memory", asked, f"{allowed}; {has}")


def reserve_of(ordinal: int, call: Any) -> Reserve:
    """The reserve of a device; its context must be current."""
    from cuda.bindings import driver

    names = driver.CUdevice_attribute
    processors = attribute(ordinal, names.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, "counting the processors")
    threads = attribute(ordinal, names.CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, "counting threads")
    stack = call("asking for the stack", driver.cuCtxGetLimit, driver.CUlimit.CU_LIMIT_STACK_SIZE)
    return Reserve(processors, threads, int(stack))
