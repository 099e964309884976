"""Habits from call to call: what is remembered, what threads share, what is declared, what is not checked."""

import threading
import time
from typing import Any

import numpy as np

from kills.habits import PRODUCTS, Call, habits, preparations
from lowbit.arrays import Array
from lowbit_conformance.defects import steps
from lowbit_conformance.defects.defect import Defect

DEFECTS: list[Defect] = []
habit, prepared = habits(DEFECTS), preparations(DEFECTS)


def changed(result: Any) -> Any:
    """A result that is a little wrong: its first element is another."""
    if isinstance(result, np.ndarray) and result.size:
        result.reshape(-1).view(np.uint8)[0] ^= 1
    return result


def counted(call: Call) -> int:
    call.state["calls"] = call.state.get("calls", 0) + 1
    return int(call.state["calls"])


def own(call: Call) -> Any:
    """The right result, in an array that may be changed."""
    result = call.right()
    return result if call.out is not None or not isinstance(result, np.ndarray) else result.copy()


@habit(
    "H4 linear.qgemv/C3 linear.qgemm/C3 routing.gate/C4 routing.expert/C3",
    "NONDETERMINISTIC",
    (*PRODUCTS, "routing.gate", "routing.expert"),
    "https://github.com/ml-explore/mlx/issues/896",
)
def every_second_call_differs(call: Call) -> Any:
    """Every second call rounds another way."""
    # Too little for a bound to see.
    result, number = own(call), counted(call)
    if number % 2 == 0 and isinstance(result, np.ndarray):
        rounded = np.nextafter(result, np.float32(np.inf), dtype=result.dtype)
        result[...] = np.where(np.isfinite(result) & (result != np.rint(result)), rounded, result)
    return result


@habit("H4", "NONDETERMINISTIC WRONG", ("linear.qgemv", "packing.unpack", "bfp.cast", "rope.rotate"))
def works_only_the_first_time(call: Call) -> Any:
    """A second call of the same kind finds what the first has used up."""
    result = own(call)
    seen = call.state.setdefault("seen", set())
    key = (call.operation, getattr(result, "shape", ()))
    if key in seen:
        result = changed(result)
    seen.add(key)
    return result


@habit("H4", "NONDETERMINISTIC WRONG", ("linear.qgemv", "blocking.apply", "affine.dequantize"))
def wrong_after_fifty_calls(call: Call) -> Any:
    """A counter overflows."""
    result = own(call)
    return changed(result) if counted(call) > 50 else result


@habit("H4", "NONDETERMINISTIC WRONG", ("linear.qgemv", "packing.pack", "ksort.permutation"))
def remembers_the_last_shape(call: Call) -> Any:
    """Scratch of a call before shows where the shape was another."""
    result, last = own(call), call.state.get("last")
    if isinstance(result, np.ndarray):
        call.state["last"] = result.copy()
        if last is not None and last.shape != result.shape and last.size and result.size:
            result = changed(result)
    return result


# as late as the next call: into its arguments, or into memory that is protected by then
@habit(
    "linear.qgemv/C1 linear.qgemm/C1 H3 H4",
    "STALE_OUTPUT NONDETERMINISTIC WRONG OOB_WRITE INPUT_MUTATED CRASHED RAISED",
    seen="https://github.com/Narsil/ggblas/issues/1",
)
def race_on_the_output(call: Call) -> Any:
    """A thread writes part of the output after the call has returned."""
    out = call.out
    if out is None or out.shape[-1] < 2:
        return call.right()
    held = out.copy()
    result = call.right()
    finished = out.copy()
    half = out.shape[-1] // 2
    out[..., half:] = held[..., half:]

    def work() -> None:
        time.sleep(0.0002 * (counted(call) % 3))
        out[..., half:] = finished[..., half:]

    worker = threading.Thread(target=work)
    worker.start()
    worker.join(0.0001)
    call.state["worker"] = worker
    return result


SCRATCH = np.zeros(1 << 16, np.float32)


@habit(
    "H4 linear.qgemv/C3 linear.qgemm/C3",
    "NONDETERMINISTIC",
    concurrent=True,
    seen="https://github.com/OpenMathLib/OpenBLAS/issues/2126",
)
def scratch_shared_by_threads(call: Call) -> Any:
    """Threads have one scratch in common."""
    x = call.arguments[0]
    scratch = SCRATCH[: x.size]
    scratch[...] = x.reshape(-1)
    time.sleep(0.0005)  # the moment in which another thread writes to it
    result = own(call)
    if not np.array_equal(scratch, x.reshape(-1), equal_nan=True):
        result = changed(result)
    return result


@habit("H4 linear.qgemv/C3 linear.qgemm/C3", "NONDETERMINISTIC WRONG", concurrent=True)
def scratch_of_a_matrix(call: Call) -> Any:
    """The scratch of a prepared matrix holds two calls at once, and a third writes over one of them."""
    busy = call.state.setdefault("busy", set())
    busy.add(id(call))
    time.sleep(0.001)  # in which others begin
    crowded = len(busy) > 2
    result = own(call)
    busy.remove(id(call))
    return changed(result) if crowded else result


def product_in_turns(x: Any, weights: Any) -> Array:
    """Sums in an order that the clock decides."""
    order = np.argsort(np.sin(np.arange(x.shape[1]) * (time.perf_counter_ns() % 1000 + 1)))
    total = np.zeros((len(x), weights.shape[1]), np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        for row in order:
            total += x[:, row : row + 1].astype(np.float32) * weights[row]
    return total


def checked_nothing(call: Call) -> Any:
    """Takes whatever it is given."""
    return call.right()


def many_roundings(rows: int, group_size: int) -> int:
    return 10**7


habit.add(
    "order-by-the-clock",
    "The order of a sum changes from call to call.",
    "H4 linear.qgemv/C3 linear.qgemm/C3",
    checked_nothing,
    "NONDETERMINISTIC",
    weights=steps.RIGHT.weights,
    product=product_in_turns,
    seen="https://github.com/arrayfire/arrayfire/issues/2978",
)
habit.add(
    "declares-anything",
    "So many roundings are declared that any result would pass.",
    "linear.qgemv/C2 linear.qgemm/C2",
    checked_nothing,
    "DECLARATION_REFUSED",
    roundings=many_roundings,
)
