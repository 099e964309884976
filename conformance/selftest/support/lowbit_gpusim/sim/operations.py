"""Operations: the spans that a copy or a launch uses, its duration, and its effect on the bytes.

A stream gets the same `Operation` whether it runs at once, later, or repeatedly from a graph.

The simulation is stricter than a device: a launch that reads bytes through one argument and writes them through another
is refused, because the blocks of a kernel have no order. Spans that a kernel declares to write without reading are
filled with 0xFF before it runs, and spans that it only reads are read-only, so a wrong declaration is detected.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from lowbit.arrays import Array
from lowbit.errors import ArgumentError
from lowbit_cuda.port import DeviceError, Kernel, Number, Parameter, Span
from lowbit_gpusim.meanings import meaning_of
from lowbit_gpusim.sim.clock import Engine
from lowbit_gpusim.sim.machines import Machine
from lowbit_gpusim.sim.memory import UNWRITTEN, view

Compute = Callable[[Kernel, Mapping[str, Array], Mapping[str, Number]], None]
"""Runs a kernel: it gets an array for each span and each number, by name, and fills the arrays that are written."""

GRID = (2**31 - 1, 65535, 65535)
BLOCK = 1024
"""The largest number of blocks in x, y and z, and of threads per block: CUDA C++ programming guide, technical
specifications."""


@dataclass(frozen=True, eq=False)
class Touch:
    """A span that an operation uses.

    Attributes:
        name: the name of the argument.
        span: its bytes.
        reads, writes: how they are used.
        exact: whether all of them are used.
    """

    name: str
    span: Span
    reads: bool
    writes: bool
    exact: bool = True


@dataclass(frozen=True, eq=False)
class Operation:
    """A copy or a launch in a stream.

    Attributes:
        kind: ``copy`` or ``launch``.
        what: its name in logs and errors.
        engine: the engine that does it.
        seconds: its duration.
        touches: the spans that it uses.
        run: does it.
        failed: whether the device fails to do it.
    """

    kind: str
    what: str
    engine: Engine
    seconds: float
    touches: tuple[Touch, ...]
    run: Callable[[], None]
    failed: bool = False


def copy_operation(machine: Machine, target: Span, source: Span) -> Operation:
    """A copy.

    Raises:
        ArgumentError: the lengths differ, both spans are on the host, or they overlap.
    """
    if target.nbytes != source.nbytes:
        raise ArgumentError("target", f"{target.nbytes} bytes", f"the source's {source.nbytes}")
    places = source.memory.place, target.memory.place
    if places == ("host", "host"):
        raise ArgumentError("target and source", "both on the host", "at least one on the device")
    touches = Touch("source", source, True, False), Touch("target", target, False, True)
    _check_apart("a copy", touches)
    if places == ("device", "device"):
        engine: Engine = "compute"
        seconds = machine.kernel_seconds(2 * source.nbytes)
    else:
        engine = "to device" if places[0] == "host" else "to host"
        seconds = machine.link_seconds(source.nbytes)

    def run() -> None:
        _assign(target, source)

    return Operation("copy", f"{source.memory.what} → {target.memory.what}", engine, seconds, touches, run)


def in_numpy(kernel: Kernel, arrays: Mapping[str, Array], numbers: Mapping[str, Number]) -> None:
    """Run a kernel in numpy."""
    meaning_of(kernel)(**arrays, **numbers)


def launch_operation(
    machine: Machine, kernel: Kernel, arguments: Mapping[str, Span | Number], compute: Compute = in_numpy
) -> Operation:
    """A launch.

    Args:
        machine: determines its duration.
        kernel: the kernel.
        arguments: its spans and numbers.
        compute: runs it.

    Raises:
        ArgumentError: see `Kernel.checked`; or two arguments overlap and one of them is written.
        DeviceError: the grid, the block or the shared memory exceeds the device's limits.
    """
    spans, numbers = kernel.checked(arguments)
    _check_limits(machine, kernel, numbers)
    parameters = {parameter.name: parameter for parameter in kernel.parameters}
    touches = tuple(_touch(parameters[name], span) for name, span in spans.items())
    _check_apart(kernel.name, touches)
    moved = dict.fromkeys(("device", "host"), 0)
    for touch in touches:
        moved[touch.span.memory.place] += touch.span.nbytes * (touch.reads + touch.writes)
    seconds = machine.kernel_seconds(moved["device"], kernel.flops(numbers))
    if moved["host"]:  # over the link, but not by the copy engines
        seconds += machine.link_seconds(moved["host"])
    given = {name: _passed(parameters[name], number) for name, number in numbers.items()}

    def run() -> None:
        _compute(kernel, touches, given, compute)

    return Operation("launch", kernel.name, "compute", seconds, touches, run)


def lost(operation: Operation) -> Operation:
    """The operation with a failure: the contents of its outputs are undefined."""

    def run() -> None:
        for touch in operation.touches:
            if touch.writes:
                _fill(touch.span, UNWRITTEN)

    return replace(operation, run=run, failed=True)


# **Checks.**


def _touch(parameter: Parameter, span: Span) -> Touch:
    access = parameter.access
    return Touch(parameter.name, span, access in ("read", "update"), access in ("write", "update"), parameter.exact)


def _check_apart(name: str, touches: Sequence[Touch]) -> None:
    for one, other in combinations(touches, 2):
        a, b = one.span, other.span
        begin, end = max(a.offset, b.offset), min(a.offset + a.nbytes, b.offset + b.nbytes)
        if a.memory is b.memory and begin < end and (one.writes or other.writes):
            raise ArgumentError(f"{one.name} and {other.name} of {name}", f"overlapping in {a.memory.what}", "disjoint")


def _check_limits(machine: Machine, kernel: Kernel, numbers: Mapping[str, Number]) -> None:
    grid, shared = kernel.grid(numbers), kernel.shared(numbers)
    if not all(1 <= blocks <= most for blocks, most in zip(grid, GRID, strict=True)):
        raise DeviceError(f"launch of {kernel.name}: {grid} blocks; allowed: 1 to {GRID}")
    if not 1 <= kernel.block <= BLOCK:
        raise DeviceError(f"launch of {kernel.name}: {kernel.block} threads in a block; allowed: 1 to {BLOCK}")
    if not 0 <= shared <= machine.shared:
        raise DeviceError(
            f"launch of {kernel.name}: {shared} bytes of shared memory; allowed: at most {machine.shared}"
        )


# **Effects on bytes.**


def _assign(target: Span, source: Span) -> None:
    there, here = view(target), view(source)
    if there is not None:
        there[:] = 0 if here is None else here


def _fill(span: Span, value: int) -> None:
    data = view(span)
    if data is not None:
        data[:] = value


def _compute(kernel: Kernel, touches: Sequence[Touch], numbers: Mapping[str, Number], compute: Compute) -> None:
    kinds = {parameter.name: parameter.kind for parameter in kernel.parameters}
    views = {touch.name: view(touch.span) for touch in touches}
    backed = {name: data for name, data in views.items() if data is not None}
    if len(backed) < len(views):
        for touch in touches:
            if touch.writes:
                _fill(touch.span, 0)
        return
    arrays = {name: data.view(np.dtype(kinds[name])) for name, data in backed.items()}
    for touch in touches:
        if touch.writes and not touch.reads and touch.exact:
            _fill(touch.span, UNWRITTEN)
        if not touch.writes:
            arrays[touch.name].flags.writeable = False
    compute(kernel, arrays, numbers)


def _passed(parameter: Parameter, number: Number) -> Number:
    """A number in the precision in which the kernel receives it."""
    kind = np.dtype(parameter.kind)
    if kind.kind != "f":
        return int(number)
    return float(kind.type(number))
