"""Habits of remembering: what a backend keeps of a call or a matrix, found again by too little."""

import time
from collections.abc import Callable, Hashable
from copy import deepcopy
from typing import Any

import numpy as np

from kills.habits import PRODUCTS, Act, Call, Weigh, habits, preparations
from kills.memory import address, arrays
from lowbit.arrays import F32, Array
from lowbit.quantization.affine import QuantizedMatrix
from lowbit_conformance.defects import steps
from lowbit_conformance.defects.defect import Defect

DEFECTS: list[Defect] = []
habit, prepared = habits(DEFECTS), preparations(DEFECTS)


LOST = "WRONG NONDETERMINISTIC"
SEVERAL = (*PRODUCTS, "packing.unpack", "bfp.cast", "blocks.rms_norm", "attention.attend", "routing.top_k")


def octets(array: Array) -> Array:
    """The bytes of an array, in C order."""
    return np.frombuffer(array.tobytes(), np.uint8)


def remembered(key: Callable[[Array], Hashable], *, of_the_matrix: bool = True) -> Act:
    """The result of the last call comes again where the keys of all arrays are those of that call."""

    def act(call: Call) -> Any:
        given = [array for argument in call.arguments for array in arrays(argument)]
        plain = tuple(argument for argument in call.arguments if isinstance(argument, (int, str)))
        matrix = id(call.state.get("matrix")) if of_the_matrix and call.out is not None else 0
        kept = (call.operation, matrix, plain, *((array.shape, array.dtype.str, key(array)) for array in given))
        last, result = call.state.get("last", (None, None))
        if last != kept or (call.out is not None and call.out.shape != result.shape):
            result = call.right()
            call.state["last"] = kept, deepcopy(result)
            return result
        if call.out is None:
            return deepcopy(result)
        call.out[...] = result
        return call.out

    return act


def first_bytes(array: Array) -> Hashable:
    return octets(array)[:64].tobytes()


def sampled(array: Array) -> Hashable:
    return array.reshape(-1)[::16].tobytes()


def summed(array: Array) -> Hashable:
    """A sum that the order of the elements does not change."""
    return int(octets(array).astype(np.int64).sum())


def counted_bytes(array: Array) -> Hashable:
    """How often each byte occurs."""
    return np.bincount(octets(array), minlength=256).tobytes()


@habit("H4", "NONDETERMINISTIC WRONG OOB_WRITE", ("packing.unpack", "bfp.cast", "blocks.rms_norm", "attention.attend"))
def result_given_out_again(call: Call) -> Any:
    """The array that was given for equal arguments is given again."""
    # The caller may have written to it.
    given = [array for argument in call.arguments for array in arrays(argument)]
    key = (call.operation, repr(call.arguments), *(array.tobytes() for array in given))
    kept: dict[Any, Any] = call.state.setdefault("kept", {})
    if key not in kept:
        kept[key] = call.right()
        for old in list(kept)[:-4]:
            del kept[old]
    return kept[key]


@habit("H2", "OOB_WRITE", ("packing.unpack", "bfp.decode", "rope.rotate"))
def results_in_three_scratches(call: Call) -> Any:
    """Results take turns in three arrays."""
    result = call.right()
    if not isinstance(result, np.ndarray) or call.out is not None:
        return result
    turn = call.state["turn"] = call.state.get("turn", 0) + 1
    name = f"{turn % 3} {result.shape} {result.dtype}"
    scratch: Array = call.state.setdefault(name, np.empty_like(result))
    scratch[...] = result
    return scratch


@habit("linear.qgemm/C3", LOST, ("linear.qgemm",))
def rows_of_the_call_before(call: Call) -> Any:
    """Fewer rows of X at the same address are taken for those of the call before."""
    # X is laid out anew unless it lies where it lay.
    x, out = call.arguments[0], call.out
    before = call.state.get("before")
    result = call.right()
    if out is not None and before is not None and before[0] == (address(x), id(call.state["matrix"])):
        if len(out) < len(before[1]):
            out[...] = before[1][: len(out)]
        return result
    if out is not None:
        call.state["before"] = (address(x), id(call.state["matrix"])), out.copy()
    return result


# **Matrices.**


def weights_by(key: Callable[[QuantizedMatrix], Hashable]) -> Any:
    """Prepared weights are found again by this key."""

    def preparing(matrix: QuantizedMatrix, weigh: Weigh, state: dict[str, Any]) -> F32:
        kept = state.setdefault("weights", {})
        found = (key(matrix), matrix.words.shape, matrix.bits, matrix.group_size, matrix.convention)
        if found not in kept:
            kept[found] = weigh(matrix)
        result: F32 = kept[found]
        return result

    return preparing


class Borrowed:
    """Weights that are made of the caller's arrays with every call."""

    def __init__(self, matrix: QuantizedMatrix, weigh: Weigh) -> None:
        self._matrix, self._weigh = matrix, weigh

    def weights(self) -> F32:
        return self._weigh(self._matrix)


class WhenNeeded(Borrowed):
    """Weights that the first call makes, of the caller's arrays."""

    _made: F32 | None = None

    def weights(self) -> F32:
        if self._made is None:
            self._made = super().weights()
        return self._made


class Racing(Borrowed):
    """Weights that the first call makes, and that another takes before they are there."""

    _begun = False

    def __init__(self, matrix: QuantizedMatrix, weigh: Weigh) -> None:
        made = weigh(matrix)
        self._source, self._made = made, np.zeros_like(made)

    def weights(self) -> F32:
        if not self._begun:
            self._begun = True
            time.sleep(0.002)  # in which other threads come
            self._made[...] = self._source
        return self._made


def kept_as(kind: type[Borrowed]) -> Any:
    def preparing(matrix: QuantizedMatrix, weigh: Weigh, state: dict[str, Any]) -> Any:
        return kind(matrix, weigh)

    return preparing


def product_of(x: F32, kept: Any) -> Array:
    """The product with weights that are kept in one of these ways."""
    return steps.product(x, kept.weights())


habit.add(
    "result-by-address",
    "The last result comes again where arrays lie where they lay.",
    "H4",
    remembered(address),
    LOST,
    SEVERAL,
    "https://github.com/thorvg/thorvg/pull/2026",
)
habit.add(
    "result-by-object", "The last result comes again for the same Python objects.", "H4", remembered(id), LOST, SEVERAL
)
habit.add(
    "result-by-first-bytes",
    "The last result comes again where the first 64 bytes are equal.",
    "H4",
    remembered(first_bytes),
    LOST,
    SEVERAL,
)
habit.add(
    "result-by-samples",
    "The last result comes again where every sixteenth element is equal.",
    "H4",
    remembered(sampled),
    LOST,
    SEVERAL,
)
habit.add(
    "result-by-sum",
    "The last result comes again where the bytes have an equal sum.",
    "H4",
    remembered(summed),
    LOST,
    SEVERAL,
)
habit.add(
    "result-by-histogram",
    "The last result comes again where the same bytes come in another order.",
    "H4",
    remembered(counted_bytes),
    LOST,
    SEVERAL,
)
habit.add(
    "result-of-another-matrix",
    "The last result comes again for an equal x, whichever matrix it is for.",
    "linear.qgemv/C3 linear.qgemm/C3",
    remembered(lambda array: array.tobytes(), of_the_matrix=False),
    LOST,
)
prepared.add(
    "weights-by-object",
    "Prepared weights are found again by the matrix object.",
    "linear.qgemv/C3 linear.qgemm/C3",
    weights_by(id),
    LOST,
)
prepared.add(
    "weights-by-first-words",
    "Prepared weights are found again by the first words.",
    "linear.qgemv/C3 linear.qgemm/C3",
    weights_by(lambda matrix: matrix.words[:1].tobytes()),
    LOST,
)
prepared.add(
    "weights-without-scales",
    "Prepared weights are found again by all words, without scales and zeros.",
    "linear.qgemv/C3 linear.qgemm/C3",
    weights_by(lambda matrix: matrix.words.tobytes()),
    LOST,
)
prepared.add(
    "weights-without-zeros",
    "Prepared weights are found again by words and scales, without zeros.",
    "linear.qgemv/C3 linear.qgemm/C3",
    weights_by(lambda matrix: (matrix.words.tobytes(), matrix.scales.tobytes())),
    LOST,
)
prepared.add(
    "weights-by-sum",
    "Prepared weights are found again by the sum of all words.",
    "linear.qgemv/C3 linear.qgemm/C3",
    weights_by(lambda matrix: int(matrix.words.sum(dtype=np.uint64))),
    LOST,
)
prepared.add(
    "matrix-borrowed",
    "A prepared matrix reads the arrays that it was prepared from.",
    "H1",
    kept_as(Borrowed),
    "OOB_READ WRONG",
    weights=steps.RIGHT.weights,
    product=product_of,
)
prepared.add(
    "matrix-read-when-needed",
    "A matrix is laid out at the first call, from the arrays that it was prepared from.",
    "H1",
    kept_as(WhenNeeded),
    "OOB_READ WRONG",
    weights=steps.RIGHT.weights,
    product=product_of,
)
prepared.add(
    "race-on-the-first-call",
    "The first call lays out a matrix, and others do not wait for it.",
    "linear.qgemv/C3 linear.qgemm/C3",
    kept_as(Racing),
    "WRONG NONDETERMINISTIC",
    weights=steps.RIGHT.weights,
    product=product_of,
    concurrent=True,
)
