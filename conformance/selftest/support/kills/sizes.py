"""Habits that depend on where an array begins or on how large it is: right at the addresses and sizes of most tests."""

from collections.abc import Callable
from typing import Any

import numpy as np

from kills.calls import changed, own
from kills.habits import PRODUCTS, Act, Call, Weigh, habits, nothing, preparations
from kills.memory import address, first
from lowbit.arrays import F32, Array
from lowbit.quantization.affine import QuantizedMatrix
from lowbit_conformance.defects import steps
from lowbit_conformance.defects.defect import Defect

DEFECTS: list[Defect] = []
habit, prepared = habits(DEFECTS), preparations(DEFECTS)


LINE = 64  # bytes of a cache line


# **Offsets.**


def at_offset(wrong: Callable[[int], bool], which: Callable[[Call], Array | None] = first) -> Act:
    """A little wrong where an array begins at certain addresses."""

    def act(call: Call) -> Any:
        array = which(call)
        result = own(call)
        return changed(result) if array is not None and wrong(address(array)) else result

    return act


@prepared("H4", "NONDETERMINISTIC WRONG")
def matrix_at_one_offset(matrix: QuantizedMatrix, weigh: Weigh, state: dict[str, Any]) -> F32:
    """Right unless the words of a matrix begin 12 bytes into a register."""
    weights = weigh(matrix)
    if address(matrix.words) % 32 == 12:
        weights[:, :1] *= 2
    return weights


# **Sizes.**


def wraps(count: int, axis: int) -> Act:
    """Past a limit along an axis, the result repeats its beginning: an index of too few bits."""

    def act(call: Call) -> Any:
        result = own(call)
        if isinstance(result, np.ndarray) and result.ndim and result.shape[axis] > count:
            moved = np.moveaxis(result, axis, 0)
            moved[count:] = moved[: len(moved) - count]
        return result

    return act


def wide_changed(limit: int, axis: int, argument: int = 0) -> Act:
    """Wrong where an argument is longer than a buffer of fixed size."""

    def act(call: Call) -> Any:
        result = own(call)
        return 2 * result if call.arguments[argument].shape[axis] > limit and call.out is None else result

    return act


DEPTH = 1 << 14


def deep_dropped(x: F32, weights: F32) -> Array:
    """Rows past a certain depth are not multiplied."""
    return steps.product(x[:, :DEPTH], weights[:DEPTH])


@habit("routing.top_k/C1", "WRONG", ("routing.top_k",))
def experts_in_a_byte(call: Call) -> Any:
    """Experts are numbered in 8 bits."""
    result = own(call)
    return result.astype(np.uint8).astype(result.dtype) if isinstance(result, np.ndarray) else result


habit.add(
    "x-at-one-offset",
    "Right unless x begins 20 bytes into a cache line.",
    "H4",
    at_offset(lambda at: at % LINE == 20),
    "NONDETERMINISTIC WRONG",
    (*PRODUCTS, "attention.attend", "blocks.rms_norm", "rope.rotate"),
    "https://github.com/RedisAI/VectorSimilarity/pull/990",
)
habit.add(
    "output-at-one-offset",
    "Right unless the output begins 4 bytes into a register.",
    "H4",
    at_offset(lambda at: at % 16 == 4, lambda call: call.out),
    "NONDETERMINISTIC WRONG",
)
habit.add(
    "x-off-a-cache-line",
    "Right only where x begins at a cache line; the rest of a line is left out.",
    "H4",
    at_offset(lambda at: at % LINE != 0),
    "NONDETERMINISTIC WRONG",
    (*PRODUCTS, "attention.attend", "blocks.swiglu", "routing.gate"),
)
habit.add(
    "output-off-a-register",
    "Right only where the output begins at a register of 32 bytes.",
    "H4",
    at_offset(lambda at: at % 32 != 0, lambda call: call.out),
    "NONDETERMINISTIC WRONG",
)
habit.add(
    "bytes-at-odd-addresses",
    "Right unless codes begin at an odd address.",
    "H4",
    at_offset(lambda at: at % 4 == 1),
    "NONDETERMINISTIC WRONG",
    ("packing.pack", "bfp.decode"),
    "https://github.com/apache/tvm/pull/9731",
)
habit.add(
    "columns-in-16-bits",
    "Columns are counted in 16 bits.",
    "linear.qgemv/C1 linear.qgemm/C1",
    wraps(1 << 16, -1),
    "WRONG STALE_OUTPUT",
    seen="https://github.com/ggml-org/llama.cpp/pull/3921",
)
habit.add(
    "rows-past-a-buffer",
    "Rows past 16,384 do not fit the buffer for x and are left out.",
    "linear.qgemv/C1 linear.qgemm/C1",
    nothing,
    "WRONG",
    weights=steps.RIGHT.weights,
    product=deep_dropped,
)
habit.add(
    "prompt-in-a-byte",
    "Rows of X are counted in 8 bits.",
    "linear.qgemm/C1",
    wraps(1 << 8, 0),
    "WRONG",
    ("linear.qgemm",),
    "https://github.com/ml-explore/mlx/issues/1051",
)
habit.add(
    "tokens-in-16-bits",
    "Tokens are counted in 16 bits.",
    "rope.rotate/C1",
    wraps(1 << 16, 0),
    "WRONG",
    ("rope.rotate",),
)
habit.add(
    "context-past-a-buffer",
    "Scores of more than 4096 tokens do not fit their buffer.",
    "attention.attend/C3",
    wide_changed(4096, 1, 1),
    "WRONG",
    ("attention.attend",),
)
habit.add(
    "head-past-a-buffer",
    "Heads of more than 128 channels do not fit their buffer.",
    "attention.attend/C3",
    wide_changed(128, 2, 1),
    "WRONG",
    ("attention.attend",),
)
habit.add(
    "hidden-past-a-buffer",
    "Tokens of more than 2048 numbers do not fit their buffer.",
    "routing.gate/C1",
    wide_changed(2048, 1),
    "WRONG",
    ("routing.gate",),
)
