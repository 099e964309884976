"""One launch in the runtime's form: numbers in slots, and arrays with their access."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lowbit.arrays import Array
from lowbit.contract.checks import check_integer
from lowbit.errors import ArgumentError
from lowbit_cuda.port import DeviceError, Kernel, Number, Parameter

MOST_THREADS, MOST_SHARED, MOST_BLOCKS = 1024, 1 << 20, 1 << 24
READ, WRITE, UPDATE, PART = 1, 2, 3, 4  # as in launch.h
POISON = 0xFF  # unwritten bytes: NaN in every float type


class KernelError(DeviceError):
    """An error in a kernel, as the runtime found it.

    Attributes:
        kernel: its name.
        kind: ``race``, ``barrier``, ``deadlock``, ``mask``, ``bounds``, ``alignment``, ``access``, ``uninitialized``,
            ``unwritten``, ``endless``, ``table`` or ``sanitizer``.
    """

    def __init__(self, kernel: str, kind: str, message: str) -> None:
        super().__init__(f"kernel {kernel}: {kind}: {message}")
        self.kernel, self.kind = kernel, kind


@dataclass(frozen=True)
class Mutation:
    """A planted bug: the barrier or vote at a line is skipped, or a shuffle there reads from another lane."""

    file: str
    line: int


@dataclass(frozen=True)
class Options:
    """Options of a launch.

    Attributes:
        seed: of the order of blocks and threads.
        strict: threads also change at accesses to shared memory.
        mutation: a bug to plant.
    """

    seed: int = 0
    strict: bool = False
    mutation: Mutation | None = None


@dataclass(frozen=True, eq=False)
class Launch:
    """A kernel with its arguments.

    Attributes:
        kernel: which.
        arrays: one for each span, C-contiguous, of its kind and extent; what is written is written in place.
        numbers: the others.
    """

    kernel: Kernel
    arrays: Mapping[str, Array]
    numbers: Mapping[str, Number]
    options: Options = field(default_factory=Options)

    def __post_init__(self) -> None:
        """Check the launch.

        Raises:
            ArgumentError: a missing or unknown argument, an array of another kind or size, a number that does not fit,
                or more blocks, threads or shared memory than there can be.
        """
        wanted = {parameter.name for parameter in self.kernel.parameters}
        if set(self.arrays) | set(self.numbers) != wanted or set(self.arrays) & set(self.numbers):
            given = sorted([*self.arrays, *self.numbers])
            raise ArgumentError(f"arguments of {self.kernel.name}", given, f"{sorted(wanted)}")
        self.kernel.check(self.numbers)
        check_integer(f"threads of {self.kernel.name}", self.kernel.block, 1, MOST_THREADS)
        check_integer(f"shared memory of {self.kernel.name}", self.kernel.shared(self.numbers), 0, MOST_SHARED)
        for blocks in self.kernel.grid(self.numbers):
            check_integer(f"blocks of {self.kernel.name}", blocks, 1, MOST_BLOCKS)
        for parameter in self.kernel.parameters:
            if parameter.access is not None:
                self._check_array(parameter, self.arrays[parameter.name])
            else:
                slot(parameter, self.numbers[parameter.name])

    def _check_array(self, parameter: Parameter, array: Array) -> None:
        name, kind = f"{parameter.name} of {self.kernel.name}", np.dtype(parameter.kind)
        if array.dtype != kind:
            raise ArgumentError(name, f"an array of {array.dtype}", parameter.kind)
        if array.nbytes != parameter.nbytes(self.numbers):
            raise ArgumentError(name, f"{array.nbytes} bytes", f"{parameter.nbytes(self.numbers)}")
        if not array.flags.c_contiguous:
            raise ArgumentError(name, "an array with gaps", "a C-contiguous one")
        if parameter.access != "read" and not array.flags.writeable:
            raise ArgumentError(name, "a read-only array", "a writeable one")


def slot(parameter: Parameter, value: Number) -> bytes:
    """A number in its eight bytes.

    Raises:
        ArgumentError: it does not fit its kind.
    """
    kind = np.dtype(parameter.kind)
    if kind.kind in "iu":
        limits = np.iinfo(kind)
        if int(value) != value or not limits.min <= value <= limits.max:
            raise ArgumentError(parameter.name, value, f"an integer from {limits.min} to {limits.max}")
        value = int(value)
    return np.asarray(value, kind).tobytes().ljust(8, b"\0")


def access_code(parameter: Parameter) -> int:
    """The runtime's code for the access of a span."""
    if parameter.access == "write":
        return WRITE if parameter.exact else PART
    return READ if parameter.access == "read" else UPDATE


def check_description(kernel: Kernel, description: str) -> None:
    """Check that the source's arguments match the table.

    Args:
        kernel: from the table.
        description: of the compiled function: ``const 4u*;4i;`` for a pointer to uint32 that is only read and an int32.

    Raises:
        KernelError: they differ, of the kind ``table``.
    """
    found = description.split(";")[:-1]
    if len(found) != len(kernel.parameters):
        raise KernelError(
            kernel.name, "table", f"it has {len(found)} arguments, and the table {len(kernel.parameters)}"
        )
    for parameter, given in zip(kernel.parameters, found, strict=True):
        kind = np.dtype(parameter.kind)
        wanted = f"{kind.itemsize}{kind.kind}"
        if parameter.access is None:
            right = given == wanted
        else:
            const, element = given.startswith("const "), given.removeprefix("const ").rstrip("*")
            right = given.endswith("*") and const == (parameter.access == "read") and _holds(element, kind)
        if not right:
            access = f", {parameter.access}" if parameter.access else ""
            message = f"{parameter.name} is {given!r}, and in the table {parameter.kind}{access}"
            raise KernelError(kernel.name, "table", message)


def _holds(element: str, kind: np.dtype[Any]) -> bool:
    """Whether a pointer type matches a span: the type itself, its bits, or a vector of it."""
    size, letter = int(element[:-1]), element[-1]
    same = size == kind.itemsize and letter == kind.kind
    return same or (size % kind.itemsize == 0 and letter in "su")
