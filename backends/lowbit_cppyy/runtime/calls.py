"""Calling the operations of the headers beside ``cpp/bridge.h``."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from lowbit.errors import ArgumentError
from lowbit_cppyy.codegen.elementwise import ProgramKernel, pass_kernel
from lowbit_cppyy.codegen.isa import InstructionSet
from lowbit_cppyy.runtime.compiler import FIRST_CALLS, Made, Pool, preparing, raise_failure, runtime

STRANGE = 5
"""Status of a call with a wrong argument that the specification does not check."""

# Arguments of calls that do nothing.
FLOATS, DOUBLES, NUMBERS = np.zeros(1, np.float32), np.zeros(1, np.float64), np.zeros(1, np.int64)
BYTES, SHORTS, INTS = np.zeros(1, np.int8), np.zeros(1, np.int16), np.zeros(1, np.int32)

Result = TypeVar("Result")


class KernelSet(Made):
    """The kernels of one operation."""

    def __init__(self, kernels: Sequence[ProgramKernel], pool: Pool, channels: int = 0) -> None:
        addresses = np.array([runtime().kernel(kernel) for kernel in kernels], np.uint64)
        sizes = len(kernels), kernels[0].table.lanes, channels
        super().__init__("kernel_set", pool.handle, addresses, *sizes, kept=pool)


class Calls:
    """The functions of a header, for an instruction set and a pool of threads; they return 0 or one of `FAILURES`."""

    def __init__(self, header: str, table: InstructionSet, pool: Pool) -> None:
        self._table, self._pool = table, pool
        with preparing:
            runtime().include(header)
        self._bridge: Any = runtime().bridge

    def _call(self, name: str, passes: tuple[str, ...], *nothing: object) -> Callable[..., int]:
        """A function of `lowbit::bridge`, with its first argument: the set of these passes."""
        with preparing:
            kernels = KernelSet([pass_kernel(each, self._table) for each in passes], self._pool)
            function = self._function(name, kernels.handle, *nothing)
        return lambda *arguments: function(kernels.handle, *arguments)

    def _function(self, name: str, *nothing: object) -> Callable[..., int]:
        """A function of `lowbit::bridge`. A call that does nothing makes cppyy compile its wrapper here, and not where
        the process might be forked meanwhile."""

        def called() -> Callable[..., int]:
            function: Callable[..., int] = getattr(self._bridge, name)
            function.__release_gil__ = True  # type: ignore[attr-defined]  # an attribute that cppyy reads
            for _ in range(FIRST_CALLS):
                function(*nothing)
            return function

        with preparing:
            return runtime().apart(called)


def done(status: int, result: Result) -> Result:
    """The result of a call that succeeded.

    Raises:
        ArgumentError: a rotation with a partner outside the head.
        UnavailableError: no memory, a forked process, a closed backend.
    """
    if status == STRANGE:
        raise ArgumentError("turn", "a partner outside the head", "channels of the head")
    if status:
        raise_failure(status)
    return result
