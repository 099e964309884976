"""Habits from call to call: what is remembered, what threads share, what is declared, what is not checked."""

import threading
import time
from typing import Any

import numpy as np

from kills.habits import Call, Habit
from kills.memory import PRODUCTS, habit
from lowbit.arrays import Array
from lowbit_conformance.defects import steps


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


def every_second(call: Call) -> Any:
    """Every second call rounds another way, too little for a bound to see."""
    result, number = own(call), counted(call)
    if number % 2 == 0 and isinstance(result, np.ndarray):
        rounded = np.nextafter(result, np.float32(np.inf), dtype=result.dtype)
        result[...] = np.where(np.isfinite(result) & (result != np.rint(result)), rounded, result)
    return result


def first_time_only(call: Call) -> Any:
    """What the first call of an operation laid out is used up."""
    result = own(call)
    seen = call.state.setdefault("seen", set())
    key = (call.operation, getattr(result, "shape", ()))
    if key in seen:
        result = changed(result)
    seen.add(key)
    return result


def after_fifty(call: Call) -> Any:
    """A counter of 6 bits overflows."""
    result = own(call)
    return changed(result) if counted(call) > 50 else result


def of_the_one_before(call: Call) -> Any:
    """What was left of the call before is added where it was longer."""
    result, last = own(call), call.state.get("last")
    if isinstance(result, np.ndarray):
        call.state["last"] = result.copy()
        if last is not None and last.shape != result.shape and last.size and result.size:
            result = changed(result)
    return result


def race(call: Call) -> Any:
    """A thread writes the last part of the output, and nobody waits for it."""
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


def shared_scratch(call: Call) -> Any:
    """x is copied to a scratch that all threads have in common."""
    x = call.arguments[0]
    scratch = SCRATCH[: x.size]
    scratch[...] = x.reshape(-1)
    time.sleep(0.0005)  # the moment in which another thread writes to it
    result = own(call)
    if not np.array_equal(scratch, x.reshape(-1), equal_nan=True):
        result = changed(result)
    return result


def scratch_of_a_matrix(call: Call) -> Any:
    """The scratch of a prepared matrix holds two calls at once; a third writes over one of them."""
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


DEFECTS: tuple[Habit, ...] = (
    habit(
        "every-second-call-differs",
        "Every second call rounds another way.",
        "H4 linear.qgemv/C3 linear.qgemm/C3 routing.gate/C4 routing.expert/C3",
        "NONDETERMINISTIC",
        every_second,
        (*PRODUCTS, "routing.gate", "routing.expert"),
        "https://github.com/ml-explore/mlx/issues/896",
    ),
    habit(
        "works-only-the-first-time",
        "A second call of the same kind finds what the first has used up.",
        "H4",
        "NONDETERMINISTIC WRONG",
        first_time_only,
        ("linear.qgemv", "packing.unpack", "bfp.cast", "rope.rotate"),
    ),
    habit(
        "wrong-after-fifty-calls",
        "A counter overflows.",
        "H4",
        "NONDETERMINISTIC WRONG",
        after_fifty,
        ("linear.qgemv", "blocking.apply", "affine.dequantize"),
    ),
    habit(
        "remembers-the-last-shape",
        "Scratch of a call before shows where the shape was another.",
        "H4",
        "NONDETERMINISTIC WRONG",
        of_the_one_before,
        ("linear.qgemv", "packing.pack", "ksort.permutation"),
    ),
    habit(
        "race-on-the-output",
        "A thread writes part of the output after the call has returned.",
        "linear.qgemv/C1 linear.qgemm/C1 H3 H4",
        # as late as the next call: into its arguments, or into memory that is protected by then
        "STALE_OUTPUT NONDETERMINISTIC WRONG OOB_WRITE INPUT_MUTATED CRASHED RAISED",
        race,
        seen="https://github.com/Narsil/ggblas/issues/1",
    ),
    habit(
        "scratch-shared-by-threads",
        "Threads have one scratch in common.",
        "H4 linear.qgemv/C3 linear.qgemm/C3",
        "NONDETERMINISTIC",
        shared_scratch,
        concurrent=True,
        seen="https://github.com/OpenMathLib/OpenBLAS/issues/2126",
    ),
    habit(
        "scratch-of-a-matrix",
        "The scratch of a prepared matrix holds two calls at once, and a third writes over one of them.",
        "H4 linear.qgemv/C3 linear.qgemm/C3",
        "NONDETERMINISTIC WRONG",
        scratch_of_a_matrix,
        concurrent=True,
    ),
    habit(
        "order-by-the-clock",
        "The order of a sum changes from call to call.",
        "H4 linear.qgemv/C3 linear.qgemm/C3",
        "NONDETERMINISTIC",
        checked_nothing,
        weights=steps.RIGHT.weights,
        product=product_in_turns,
        seen="https://github.com/arrayfire/arrayfire/issues/2978",
    ),
    habit(
        "declares-anything",
        "So many roundings are declared that any result would pass.",
        "linear.qgemv/C2 linear.qgemm/C2",
        "DECLARATION_REFUSED",
        checked_nothing,
        roundings=many_roundings,
    ),
)
