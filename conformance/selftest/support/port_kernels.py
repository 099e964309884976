"""Kernels of the contract of the port, and what its programs share.

The kernels' source is ``contract_kernels/contract.cuh``; here is what they mean in numpy.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from lowbit.arrays import F32, I32, Array
from lowbit_cuda.port import DevicePort, Memory, Numbers, Parameter, Span, Stream
from lowbit_gpusim.meanings import Meant

KERNELS = Path(__file__).parent / "contract_kernels"
COUNT = 300
"""Numbers in an array: more than a block has threads, and no multiple of it."""


# **Kernels.**


def count(numbers: Numbers) -> int:
    return int(numbers["n"])


def some_blocks(numbers: Numbers) -> tuple[int, int, int]:
    return -(-count(numbers) // 128), 1, 1


def _fill(y: F32, n: int, first: float, step: int) -> None:
    y[:] = np.float32(first) + (np.arange(n, dtype=np.int64) * step).astype(np.float32)


def _add(x: F32, y: F32, n: int, by: float) -> None:
    y[:] = y + np.float32(by) * x


def _turn(x: I32, y: I32, n: int) -> None:
    y[:] = x[::-1]


fill = Meant(
    "contract_fill",
    "contract.cuh",
    (
        Parameter("y", "float32", "write", count),
        Parameter("n", "int64"),
        Parameter("first", "float32"),
        Parameter("step", "int32"),
    ),
    some_blocks,
    128,
    meaning=_fill,
)
add = Meant(
    "contract_add",
    "contract.cuh",
    (
        Parameter("x", "float32", "read", count),
        Parameter("y", "float32", "update", count),
        Parameter("n", "int32"),
        Parameter("by", "float32"),
    ),
    some_blocks,
    128,
    meaning=_add,
)
reaching = replace(add, parameters=tuple(replace(one, host=one.access is not None) for one in add.parameters))
"""`add`, of which both arrays may lie on the host."""
turn = Meant(
    "contract_turn",
    "contract.cuh",
    (Parameter("x", "int32", "read", count), Parameter("y", "int32", "write", count), Parameter("n", "int32")),
    lambda numbers: (1, 1, 1),
    128,
    meaning=_turn,
    shared=lambda numbers: 4 * count(numbers),
)


# **What programs share.**


def ramp(first: float = 0.0) -> F32:
    return np.arange(COUNT, dtype=np.float32) + np.float32(first)


def sent(device: DevicePort, stream: Stream, values: Array) -> Memory:
    """The values on the device; the host has waited for them."""
    host, there = device.pin(values.nbytes, "values"), device.allocate(values.nbytes, "values")
    device.write(host.span(), values)
    device.copy(there.span(), host.span(), stream)
    device.synchronize(device.record(stream))
    device.free(host)
    return there


def fetched(device: DevicePort, stream: Stream, span: Span, dtype: npt.DTypeLike = np.float32) -> Array:
    """What the device holds when the stream comes to it."""
    host = device.pin(span.nbytes, "answer")
    device.copy(host.span(), span, stream)
    device.synchronize(device.record(stream))
    answer = device.read(host.span(), dtype, (span.nbytes // np.dtype(dtype).itemsize,))
    device.free(host)
    return answer


def until_reached(device: DevicePort, event: Any) -> None:
    """Ask until it is so."""
    end = time.monotonic() + 60  # which only a hang takes
    while not device.reached(event):
        assert time.monotonic() < end, "an event was not reached in 60 seconds"
        device.on_host("waiting", (), lambda: None)


def refused(kind: type[Exception], function: Callable[..., object], *arguments: object) -> None:
    with pytest.raises(kind):
        function(*arguments)
