"""A GPU as a `lowbit_cuda.port.DevicePort`.

Each method is a few calls: of cuda.core for streams, events, kernels and graphs, of the driver for memory and copies.
This class adds what the port requires beyond them: the budget, arguments checked before a kernel starts, memory that is
freed only after the work that uses it has ended, and errors in words.

**Streams** do not synchronise with the default stream, so there is no order beyond the one that the port promises. The
simulated device is stricter than a GPU: a program that passes there does not rely on an order that happens to hold
here.

**Waiting.** Every event is created with ``CU_EVENT_BLOCKING_SYNC``, and the host waits only for events; for a stream it
waits for an event at its end. A waiting thread then sleeps and leaves its processor to experts that the host computes.
Without the flag it would spin. Whether ``cuStreamSynchronize`` spins depends on flags of the context, which other
libraries share, so it is not used.

**Threads.** Any thread may use a device, one at a time. Each call checks which context is current, uses the device's
and restores the other (`lowbit_cuda.cuda.context`). By NVIDIA's rules a process forked from the one that opened the
device cannot use it; calls then raise an error that says so.

**A lost device.** When work of the device has failed, the context is broken (`lowbit_cuda.cuda.driver`). The call that
learns of it raises a `DeviceLostError`, and so does every later call, at once and without calling the driver. `free`
only updates the counts, and `close` releases everything without a call.

**What remains.** The device's primary context is shared with everything in the process that uses the GPU, such as
PyTorch, and lives as long as the process. `close` releases everything that this device created in it.

The terms are those of the CUDA driver API reference and of cuda.core's documentation.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from lowbit.arrays import Array
from lowbit.contract.checks import check_integer
from lowbit.errors import ArgumentError, UnavailableError
from lowbit.text import kind_of
from lowbit_cuda.cuda import compiler, context
from lowbit_cuda.cuda.availability import availability, compute_capability, dotted, driver_version
from lowbit_cuda.cuda.driver import DriverError, LostError, call, package_version
from lowbit_cuda.cuda.handles import Capture, CudaEvent, CudaGraph, CudaStream, graph_of
from lowbit_cuda.cuda.launches import Program, values
from lowbit_cuda.cuda.memory import Heap
from lowbit_cuda.cuda.reserve import reserve_of
from lowbit_cuda.port import (
    DeviceError,
    DeviceLostError,
    DevicePort,
    Event,
    Graph,
    Kernel,
    Memory,
    Number,
    Span,
    Stream,
)

Own = TypeVar("Own", CudaStream, CudaEvent, CudaGraph)


class CudaDevice:
    """A GPU that implements `lowbit_cuda.port.DevicePort`, which documents the methods.

    Args:
        budget: bytes of device memory that may be in use; by default the free memory less a reserve for what the driver
            needs besides allocations (`lowbit_cuda.cuda.reserve`).
        ordinal: the number of the device among those that the driver sees.
        kernels: the folder of the kernels' sources; by default `lowbit_cuda.kernels`.

    Raises:
        ArgumentError: the budget is not positive, or more than the device has; the ordinal is negative.
        UnavailableError: the device, or something that it needs, is missing; the message says what to do.
        DeviceError: the driver cannot open it.
    """

    def __init__(self, budget: int | None = None, *, ordinal: int = 0, kernels: Path | None = None) -> None:
        check_integer("ordinal", ordinal, 0)
        if budget is not None:
            check_integer("budget", budget, 1)
        state = availability(ordinal)
        if not state.usable:
            raise UnavailableError("the CUDA device", state.reason, state.remedy)
        from cuda.bindings import driver
        from cuda.core import Device

        self._closed, self._lost, self._pid = False, "", os.getpid()
        self._streams: list[CudaStream] = []
        self._ordinal, self._kernels, self._capability = ordinal, kernels, compute_capability(ordinal)
        found = context.current()
        self._core = self._call("opening the device", Device, ordinal)
        try:
            self._call("making the context current", self._core.set_current)
        except DriverError as error:
            if error.code == "CUDA_ERROR_DEVICE_UNAVAILABLE":
                reason = f"another process has exclusive use of device {ordinal} (compute mode Exclusive Process)"
                raise UnavailableError("the CUDA device", reason, "wait for it, or use another device") from error
            raise
        self._context = context.Context(context.current(), self._call)
        try:
            free = self._call("asking for free memory", driver.cuMemGetInfo)[0]
            self._reserve = reserve_of(ordinal, self._call)
        finally:
            self._context.restore(found)
        self._heap = Heap(self._reserve.budget(int(free), budget), self._call)
        self._graphs: WeakSet[CudaGraph] = WeakSet()
        self._programs: dict[str, Program] = {}

    @property
    def budget(self) -> int:
        return self._heap.budget

    @property
    def used(self) -> int:
        return self._heap.used

    @property
    def peak(self) -> int:
        return self._heap.peak

    @property
    def pinned(self) -> int:
        return self._heap.pinned

    def describe(self) -> Mapping[str, str]:
        """The device, and the versions of the software that runs it."""
        from cuda.bindings import driver

        with self._enter():
            total = self._call("asking for the memory", driver.cuMemGetInfo)[1]
            name = str(self._call("asking for the name", getattr, self._core, "name"))
        return {
            "device": name,
            "compute capability": dotted(self._capability),
            "memory": f"{total} bytes",
            "reserve": f"{self._reserve.total} bytes",
            "driver": f"CUDA {dotted(driver_version())}",
            "NVRTC": dotted(compiler.compiler_version()),
            "cuda.core": package_version("cuda-core"),
            "cuda.bindings": package_version("cuda-bindings"),
        }

    # Memory.

    def allocate(self, nbytes: int, what: str) -> Memory:
        with self._enter():
            return self._heap.allocate(nbytes, what)

    def pin(self, nbytes: int, what: str) -> Memory:
        with self._enter():
            return self._heap.pin(nbytes, what)

    def free(self, memory: Memory) -> None:
        if memory.handle is None:
            return
        with self._enter(even_if_lost=True):
            if any(stream.capture and memory in stream.capture.memories for stream in self._streams):
                raise ArgumentError(f"memory for {memory.what}", "in use by a graph being captured", "unused memory")
            self._heap.free(memory, self._wait_for, lost=bool(self._lost))

    def write(self, span: Span, data: Array) -> None:
        self._check()
        if not isinstance(data, np.ndarray) or not data.flags.c_contiguous or data.dtype.hasobject:
            raise ArgumentError("data", kind_of(data), "a C-contiguous array of numbers")
        self._heap.bytes_of(span, data.nbytes)[:] = data.reshape(-1).view(np.uint8)

    def read(self, span: Span, dtype: npt.DTypeLike, shape: Sequence[int]) -> Array:
        self._check()
        for size in shape:
            check_integer("shape", size, 0)
        answer: Array = np.empty(tuple(shape), dtype)
        answer.reshape(-1).view(np.uint8)[:] = self._heap.bytes_of(span, answer.nbytes)
        return answer

    # Work in streams.

    def stream(self, name: str) -> CudaStream:
        """A new stream, which does not synchronise with the default stream."""
        from cuda.core import StreamOptions

        make = partial(self._core.create_stream, options=StreamOptions(nonblocking=True))
        with self._enter():
            stream = CudaStream(name, self._call(f"making the stream {name}", make), self)
        self._streams.append(stream)
        return stream

    def load(self, kernels: Iterable[Kernel]) -> None:
        """Compile kernels, or read them from the cache, and load them onto the device."""
        with self._enter():
            for kernel in kernels:
                self._program(kernel.source).load(kernel.name)

    def copy(self, target: Span, source: Span, stream: Stream) -> None:
        self._check()
        from cuda.bindings import driver

        to, of, given = self._address(target), self._address(source), self._own("stream", stream, CudaStream)
        if target.nbytes != source.nbytes:
            raise ArgumentError("target", f"{target.nbytes} bytes", f"the source's {source.nbytes}")
        if target.memory.place == source.memory.place == "host":
            raise ArgumentError("target and source", "both on the host", "at least one on the device")
        if max(to, of) < min(to, of) + target.nbytes:
            raise ArgumentError("target and source", f"overlapping in {target.memory.what}", "disjoint")
        if target.nbytes:
            handle = given.core.handle
            step = partial(self._call, f"a copy in {given.name}", driver.cuMemcpyAsync, to, of, target.nbytes, handle)
            with self._enter():
                given.give(step, (target.memory, source.memory))

    def launch(self, kernel: Kernel, arguments: Mapping[str, Span | Number], stream: Stream) -> None:
        self._check()
        spans, numbers = kernel.checked(arguments)
        packed = values(kernel, {name: self._address(span) for name, span in spans.items()}, numbers)
        given = self._own("stream", stream, CudaStream)
        with self._enter():
            step = self._program(kernel.source).launch(kernel, numbers, packed, given.core)
            given.give(step, [span.memory for span in spans.values()])

    def _program(self, source: str) -> Program:
        if source not in self._programs:
            arch = compiler.choose_architecture(self._capability)
            cubin = compiler.compile_source(source, arch, folder=self._kernels)
            try:
                self._programs[source] = Program(cubin, self._ordinal, self._call)
            except DriverError as error:
                made, here = compiler.compiler_version(), driver_version()
                if made <= here or isinstance(error, DeviceLostError):
                    raise
                package = "nvidia-cuda-nvrtc" + "-cu12" * (made[0] == 12)
                older = f"the driver is for CUDA {dotted(here)}, and NVRTC is {dotted(made)}"
                remedy = f'install a newer driver, or pip install "{package}=={dotted(here)}.*"'
                raise DeviceError(f"{error}; {older}: {remedy}") from error
        return self._programs[source]

    def record(self, stream: Stream) -> CudaEvent:
        with self._enter():
            return CudaEvent(self._mark(self._idle(stream)), self)

    def _mark(self, stream: CudaStream) -> Any:
        from cuda.core import EventOptions

        options = EventOptions(timing_enabled=True, blocking_sync=True)
        return self._call(f"marking {stream.name}", partial(stream.core.record, options=options))

    def wait(self, stream: Stream, event: Event) -> None:
        with self._enter():
            mark = self._own("event", event, CudaEvent)
            self._call(f"making {stream.name} wait", self._idle(stream).core.wait, mark.core)

    @contextmanager
    def capture(self, stream: Stream) -> Iterator[Callable[[], CudaGraph]]:
        self._check()
        given = self._idle(stream)
        made: list[CudaGraph] = []
        given.capture = capture = Capture()
        try:
            yield lambda: graph_of(made)
        finally:
            given.capture = None
        with self._enter():
            made.append(self._graph(given, capture))
        self._graphs.add(made[0])

    def _graph(self, stream: CudaStream, capture: Capture) -> CudaGraph:
        """Capture in the driver only now: a stream in capture does not allow compiling or loading."""
        builder = self._call("starting a graph", stream.core.create_graph_builder)
        try:
            self._call("starting a graph", builder.begin_building, "relaxed")
            for step in capture.steps:
                step()
            self._call("ending a graph", builder.end_building)
            made = self._call("completing a graph", builder.complete)
        except BaseException:
            with suppress(Exception):  # report the first error
                builder.close()
            raise
        builder.close()
        return CudaGraph(made, capture.memories, self)

    def replay(self, graph: Graph, stream: Stream) -> None:
        self._check()
        kept, given = self._own("graph", graph, CudaGraph), self._idle(stream)
        for memory in kept.memories:
            self._heap.of(memory)
        step = partial(self._call, f"running a graph in {stream.name}", kept.core.launch, given.core)
        with self._enter():
            given.give(step, kept.memories)

    def batch(self) -> AbstractContextManager[None]:
        """Keep the context current for a block, so that calls in it only query it."""
        return self._enter()

    # Waiting and time.

    def synchronize(self, event: Event) -> None:
        with self._enter():
            self._call("waiting for an event", self._own("event", event, CudaEvent).core.sync, waits=True)

    def finish(self) -> None:
        with self._enter():
            for given in self._streams:
                self._idle(given)
            for given in self._streams:
                self._wait_for(given)

    def reached(self, event: Event) -> bool:
        with self._enter():
            mark = self._own("event", event, CudaEvent).core
            return bool(self._call("asking for an event", getattr, mark, "is_done", waits=True))

    def seconds(self, first: Event, second: Event) -> float:
        """Seconds between two events on the device's clock, whose resolution is about half a microsecond."""
        if not (self.reached(first) and self.reached(second)):
            raise ArgumentError("events", "not both reached", "two events that are reached")
        start, end = self._own("event", first, CudaEvent).core, self._own("event", second, CudaEvent).core
        with self._enter():
            return float(self._call("measuring between events", lambda: end - start)) / 1000

    def now(self) -> float:
        return time.perf_counter()

    def on_host(self, what: str, reads: Sequence[Span], function: Callable[..., Any]) -> Any:
        self._check()
        arrays = [self._heap.bytes_of(span, span.nbytes) for span in reads]
        for array in arrays:
            array.flags.writeable = False
        return function(*arrays)

    # Closing.

    def close(self) -> None:
        """Wait, and release everything: graphs, kernels, memory, streams. An error in one step does not stop the
        others.

        Raises:
            DeviceError: the first error, at the end. Nothing is raised if the device was already known to be lost, or
                if the driver has shut down before Python.
        """
        if self._closed or os.getpid() != self._pid:
            return
        errors, reported = list[DeviceError](), bool(self._lost)
        for step in self._last_steps():
            try:
                with self._enter(even_if_lost=True):
                    step()
            except DeviceError as error:
                errors.append(error)
        self._closed = True
        if errors and not reported and getattr(errors[0], "code", "") != "CUDA_ERROR_DEINITIALIZED":
            raise errors[0]

    def _last_steps(self) -> Iterator[Callable[[], object]]:
        """The steps of `close`; on a lost device, only those that do not call the driver."""
        for stream in self._streams:
            if not self._lost:
                yield partial(self._wait_for, stream)
        for graph in list(self._graphs):
            if not self._lost:
                yield partial(self._call, "releasing a graph", graph.close)
        for program in self._programs.values():
            if not self._lost:
                yield program.close
        for memory in list(self._heap.held.values()):
            yield partial(self._heap.free, memory, lambda stream: None, lost=bool(self._lost))  # all work has ended
        for stream in self._streams:
            if not self._lost:
                yield partial(self._call, f"releasing {stream.name}", stream.core.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # Shared by all methods.

    def _enter(self, *, even_if_lost: bool = False) -> AbstractContextManager[None]:
        """Refuse calls on a closed or lost device; then make the device's context current, unless it is lost."""
        self._check(even_if_lost=even_if_lost)
        return nullcontext() if self._lost else self._context.visit()

    def _check(self, *, even_if_lost: bool = False) -> None:
        if self._closed:
            raise DeviceError("the device is closed")
        if os.getpid() != self._pid:
            raise DeviceError("the device was opened by the process that this one was forked from; open it after spawn")
        if self._lost and not even_if_lost:
            raise DeviceLostError(f"the device is lost since an earlier error: {self._lost}")

    def _call(self, operation: str, function: Callable[..., Any], *arguments: Any, waits: bool = False) -> Any:
        """`lowbit_cuda.cuda.driver.call`, which also records that the device is lost."""
        try:
            try:
                return call(operation, function, *arguments, waits=waits)
            except DriverError as error:
                if not error.code:
                    self._ask_why(operation, error)
                raise
        except DeviceLostError as error:
            self._lost = self._lost or str(error)
            raise

    def _ask_why(self, operation: str, error: DriverError) -> None:
        """Find the code of an error that cuda.core hides: if the device's work has failed, a stream reports it."""
        from cuda.bindings import driver

        for stream in self._streams[:1]:
            try:
                call(operation, driver.cuStreamQuery, stream.core.handle, waits=True)
            except LostError:
                raise
            except DriverError:
                raise error from None

    def _wait_for(self, stream: CudaStream) -> None:
        """Wait for a stream, by an event that blocks instead of spinning."""
        self._call(f"waiting for {stream.name}", self._mark(stream).sync, waits=True)

    def _address(self, span: Span) -> int:
        if not isinstance(span, Span):
            raise ArgumentError("span", kind_of(span), "a Span of memory of this device")
        return self._heap.of(span.memory).pointer + span.offset

    def _own(self, name: str, given: object, kind: type[Own]) -> Own:
        """A stream, event or graph, checked to be of this device."""
        if not isinstance(given, kind) or given.device is not self:
            raise ArgumentError(name, kind_of(given), "one of this device")
        return given

    def _idle(self, stream: Stream) -> CudaStream:
        """A stream, checked not to be capturing a graph."""
        given = self._own("stream", stream, CudaStream)
        if given.capture is not None:
            raise ArgumentError(f"stream {given.name}", "capturing a graph", "only copies and launches until then")
        return given


_implements: type[DevicePort] = CudaDevice  # checked by mypy
