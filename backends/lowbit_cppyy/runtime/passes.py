"""Calling the operations of ``cpp/decode.h`` and ``cpp/blocks.h``: their kernels, and the functions that take them."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from lowbit.errors import ArgumentError
from lowbit_cppyy.codegen.isa import InstructionSet
from lowbit_cppyy.codegen.pieces import Piece, piece
from lowbit_cppyy.runtime.compiler import FIRST_CALLS, Pool, preparing, raise_failure, runtime

STRANGE = 5
"""What a call answers where an argument is wrong that no check of the specification looks at."""

# For a call with nothing to do.
FLOATS, DOUBLES, NUMBERS = np.zeros(1, np.float32), np.zeros(1, np.float64), np.zeros(1, np.int64)
BYTES, SHORTS, INTS = np.zeros(1, np.int8), np.zeros(1, np.int16), np.zeros(1, np.int32)

Result = TypeVar("Result")


class Passes:
    """The kernels of one operation as C++ sees them; keeps alive what it points to."""

    def __init__(self, pieces: Sequence[Piece], pool: Pool, channels: int = 0) -> None:
        compiled = runtime()
        self._kept = pool
        kernels = np.array([compiled.kernel(one) for one in pieces], np.uint64)
        sizes = len(kernels), pieces[0].table.lanes, channels
        self.handle: int = compiled.bridge.create_passes(pool.handle, kernels, *sizes)
        weakref.finalize(self, compiled.bridge.destroy_passes, self.handle).atexit = False


class Calls:
    """For one instruction set and one pool of threads: functions that answer with 0 or a code of `FAILURES`."""

    def __init__(self, header: str, table: InstructionSet, pool: Pool) -> None:
        self._table, self._pool = table, pool
        with preparing:
            runtime().include(header)
        self._bridge: Any = runtime().bridge

    def _call(self, name: str, passes: tuple[str, ...], *nothing: object) -> Callable[..., int]:
        """A function of `lowbit::bridge` with the kernels that it takes first."""
        with preparing:
            made = Passes([piece(one, self._table) for one in passes], self._pool)
            function = self._function(name, made.handle, *nothing)
        return lambda *arguments: function(made.handle, *arguments)

    def _function(self, name: str, *nothing: object) -> Callable[..., int]:
        """A function of `lowbit::bridge`, called once with nothing to do: so cppyy compiles here what it needs for the
        call, and not where a fork may meet it."""

        def called() -> Callable[..., int]:
            function: Callable[..., int] = getattr(self._bridge, name)
            function.__release_gil__ = True  # type: ignore[attr-defined]  # an attribute of cppyy's
            for _ in range(FIRST_CALLS):
                function(*nothing)
            return function

        with preparing:
            return runtime().apart(called)


def done(status: int, result: Result) -> Result:
    """The result, if there is one.

    Raises:
        ArgumentError: a rotation whose partners are no channels.
        UnavailableError: no memory, a forked process, a closed backend.
    """
    if status == STRANGE:
        raise ArgumentError("turn", "a partner outside the head", "channels of the head")
    if status:
        raise_failure(status)
    return result
