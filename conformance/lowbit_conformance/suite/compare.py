"""Judging a result: equal bits, or within the bound, and if not, where and by how much.

Each function says what it is equivalent to, hides its own frame from the traceback, and raises `AssertionError` whose
text begins with the verdict. A result may be anything at all, so its type is judged before it is used.

**A result is judged after it has been given.** Every check calls the backend first and only then computes what is
right, so that the right answer exists nowhere while the code under test runs: what is not there cannot be found.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from lowbit.arrays import F64, Array
from lowbit.contract.rounding import Bound
from lowbit.errors import ArgumentError
from lowbit.numbers.floats import FLOATS, Name

Kind = TypeVar("Kind")


def assert_kind(name: str, given: object, kind: type[Kind]) -> Kind:
    """``isinstance(given, kind)``; returns what was given."""
    __tracebackhide__ = True
    if not isinstance(given, kind):
        raise AssertionError(f"WRONG: {name} is a {type(given).__name__}, the specification says {kind.__name__}")
    return given


def assert_array(name: str, given: object, dtype: npt.DTypeLike, shape: Sequence[int]) -> Array:
    """``given.dtype == dtype and given.shape == shape`` for an array, including byte order; returns what was given."""
    __tracebackhide__ = True
    if type(given) not in (np.ndarray, np.memmap):  # a matrix or a masked array compares differently
        raise AssertionError(f"WRONG: {name} is a {type(given).__name__}, not an array")
    assert isinstance(given, np.ndarray)
    if given.dtype != np.dtype(dtype) or given.shape != tuple(shape):
        raise AssertionError(
            f"WRONG: {name} is {given.dtype} {given.shape}, the specification says {np.dtype(dtype)} {tuple(shape)}"
        )
    return given


def assert_exact(name: str, given: object, expected: Array) -> None:
    """``given.dtype == expected.dtype and given.shape == expected.shape and (given == expected).all()``, NaN is
    refused, and the two zeros of floats are distinguished by their bits."""
    __tracebackhide__ = True
    array = assert_array(name, given, expected.dtype, expected.shape)
    different = _bits(array) != _bits(expected)
    if different.any():
        raise AssertionError(f"WRONG: {name}: {_where(different)}; {_values(different, array, expected)}")


def unsigned_zeros(numbers: Array) -> Array:
    """The values with every zero positive: its sign depends on whether s (q - z) or s q - s z is computed."""
    return np.where(numbers == 0, np.zeros((), numbers.dtype), numbers)


def _bits(array: Array) -> Array:
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}").reshape(array.shape)


def assert_equal_values(given: object, expected: F64, type: Name = "float32", judged: Array | None = None) -> None:
    """``given.dtype == type and (given == expected)[judged].all()`` for a lattice case, in which that type holds the
    exact values of all judged elements.

    The two zeros count as equal, because the order of an exact sum determines which of them it gives.
    """
    __tracebackhide__ = True
    sure = True if judged is None else judged
    with np.errstate(over="ignore"):  # elements that are not judged may overflow the type
        exact = expected.astype(FLOATS[type].dtype)
    if ((exact.astype(np.float64) != expected) & sure).any():
        raise RuntimeError("the lattice of this case is not exact; this is a defect of the suite")
    array = assert_array("the result", given, exact.dtype, exact.shape)
    different = np.not_equal(array, exact) & sure
    if different.any():
        raise AssertionError(f"WRONG on the lattice: {_where(different)}; {_values(different, array, exact)}")


def assert_within(given: object, exact: F64, bound: Bound, dtype: npt.DTypeLike = np.float32) -> float:
    """``(abs(given - exact) <= bound.limit).all()``; returns the largest fraction of the bound that was used."""
    __tracebackhide__ = True
    array = assert_array("the result", given, dtype, exact.shape)
    error = np.abs(array.astype(np.float64) - exact)
    outside = ~(error <= bound.limit)
    if outside.any():
        index = np.unravel_index(int(np.argmax(outside)), outside.shape)
        budget = f"error {error[index]:.6g} against a bound of {bound.limit[index]:.6g} ({bound.derivation})"
        raise AssertionError(f"WRONG: {_where(outside)}; {_values(outside, array, exact)}; {budget}")
    used = np.divide(error, bound.limit, out=np.zeros_like(error), where=bound.limit > 0)
    return float(np.max(used))


def assert_same_bits(first: object, second: object, what: str) -> None:
    """The bits of two results are equal, NaNs included."""
    __tracebackhide__ = True
    one = assert_kind("the result", first, np.ndarray)
    two = assert_array("the result", second, one.dtype, one.shape)
    different = _bits(one) != _bits(two)
    if different.any():
        raise AssertionError(f"NONDETERMINISTIC: {what}: {_where(different)}; {_values(different, two, one)}")


@contextmanager
def refuses() -> Iterator[None]:
    """The block must raise `ArgumentError` and nothing else; a verdict raised in it passes through."""
    __tracebackhide__ = True
    try:
        yield
    except ArgumentError:
        return
    except AssertionError as error:
        verdict, _, raised = str(error).partition(": ")
        if verdict != "RAISED":
            raise
        raise AssertionError(f"WRONG: raised {raised}; the specification says ArgumentError") from error
    except Exception as error:
        raised = f"{type(error).__name__}: {error}"
        raise AssertionError(f"WRONG: raised {raised}; the specification says ArgumentError") from error
    raise AssertionError(
        "WRONG: a wrong argument was accepted; allowed is an ArgumentError before anything is computed"
    )


def _where(wrong: npt.NDArray[np.bool_]) -> str:
    """How many elements are wrong, and whether they form whole rows or columns."""
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


def _values(wrong: npt.NDArray[np.bool_], given: Array, expected: Array) -> str:
    """The first wrong element: its index, its value and the expected value."""
    index = tuple(int(i) for i in np.unravel_index(int(np.argmax(wrong)), wrong.shape))
    return f"first at {list(index)}: {given[index]!s}, expected {expected[index]!s}"
