"""Judging a result: equal bits, or within the bound, and if not, where and by how much.

Each function says what it is equivalent to, hides its own frame from the traceback, and raises `AssertionError` whose
text begins with the verdict.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from lowbit.affine import Floats
from lowbit.bounds import Bound
from lowbit.linear import Doubles


def assert_exact(name: str, given: object, expected: npt.NDArray[Any]) -> None:
    """``given.dtype == expected.dtype and given.shape == expected.shape and (given == expected).all()``, with NaN
    refused and the two zeros of floats told apart by their bits."""
    __tracebackhide__ = True
    if not isinstance(given, np.ndarray):
        raise AssertionError(f"WRONG: {name} is a {type(given).__name__}, not an array")
    if given.dtype != expected.dtype or given.shape != expected.shape:
        raise AssertionError(
            f"WRONG: {name} is {given.dtype} {given.shape}, the specification says {expected.dtype} {expected.shape}"
        )
    unsigned = f"u{expected.dtype.itemsize}"
    different = np.ascontiguousarray(given).view(unsigned) != np.ascontiguousarray(expected).view(unsigned)
    if different.any():
        raise AssertionError(f"WRONG: {name}: {_where(different)}; {_values(different, given, expected)}")


def assert_equal_values(given: Floats, expected: Doubles) -> None:
    """``(given == expected).all()`` for a lattice case, where the exact value is a float32 number.

    The two zeros count as equal: which of them an exact sum gives depends on its order.
    """
    __tracebackhide__ = True
    exact = expected.astype(np.float32)
    if not (exact == expected).all():
        raise RuntimeError("the lattice of this case is not exact; this is a defect of the suite")
    different = np.not_equal(given, exact)
    if different.any():
        raise AssertionError(f"WRONG on the lattice: {_where(different)}; {_values(different, given, exact)}")


def assert_within(given: Floats | Doubles, exact: Doubles, bound: Bound) -> float:
    """``(abs(given - exact) <= bound.limit).all()``; returns the largest share of the bound that was used."""
    __tracebackhide__ = True
    error = np.abs(given.astype(np.float64) - exact)
    outside = ~(error <= bound.limit)
    if outside.any():
        index = np.unravel_index(int(np.argmax(outside)), outside.shape)
        budget = f"error {error[index]:.6g} against a bound of {bound.limit[index]:.6g} ({bound.derivation})"
        raise AssertionError(f"WRONG: {_where(outside)}; {_values(outside, given, exact)}; {budget}")
    used = np.divide(error, bound.limit, out=np.zeros_like(error), where=bound.limit > 0)
    return float(np.max(used))


def assert_same_bits(first: Floats, second: Floats, what: str) -> None:
    """The bits of two results are equal, NaNs included."""
    __tracebackhide__ = True
    different = first.view(np.uint32) != second.view(np.uint32)
    if different.any():
        raise AssertionError(f"NONDETERMINISTIC: {what}: {_where(different)}; {_values(different, second, first)}")


def _where(wrong: npt.NDArray[np.bool_]) -> str:
    """How many elements are wrong, and whether they are whole rows or columns."""
    count, total = int(wrong.sum()), wrong.size
    text = f"{count} of {total} elements differ"
    if wrong.ndim == 2 and count < total:
        rows, columns = np.logical_or.reduce(wrong, axis=1), np.logical_or.reduce(wrong, axis=0)
        if (wrong == rows[:, None]).all():
            text += f", whole rows {_few(np.flatnonzero(rows))}"
        elif (wrong == columns[None, :]).all():
            text += f", whole columns {_few(np.flatnonzero(columns))}"
    elif wrong.ndim == 1 and count < total:
        text += f", columns {_few(np.flatnonzero(wrong))}"
    return text


def _few(indices: npt.NDArray[np.intp]) -> str:
    shown = ", ".join(str(index) for index in indices[:6])
    return shown + (", …" if len(indices) > 6 else "")


def _values(wrong: npt.NDArray[np.bool_], given: npt.NDArray[Any], expected: npt.NDArray[Any]) -> str:
    """The first wrong element: where it is, what it is and what it should be."""
    index = tuple(int(i) for i in np.unravel_index(int(np.argmax(wrong)), wrong.shape))
    return f"first at {list(index)}: {given[index]!s}, expected {expected[index]!s}"
