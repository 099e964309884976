"""Operators: what C++'s operators do to numbers and to vectors of them.

On two vectors of the same type, an operator works lane by lane. A number combined with a vector is converted to the
type of its lanes. A comparison of vectors gives integers of as many bits, -1 where it holds and else 0. Alone, integers
of less than 32 bits become `int`. What C++ leaves undefined is refused: shifts by too many bits, places outside of
arrays.

Source: ISO C++17, clauses 7 and 8; the manual of GCC, Vector Extensions, which clang follows.
"""

import operator
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import z3

from lowbit_prove import terms
from lowbit_prove.registers import Type, Vector
from lowbit_prove.solver import satisfied
from lowbit_prove.symbols import Symbols, of
from lowbit_prove.terms import UndecidedError

ARITHMETIC: Mapping[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "&": operator.and_,
    "|": operator.or_,
    "^": operator.xor,
    "<<": operator.lshift,
    ">>": operator.rshift,
}
COMPARISONS: Mapping[str, Callable[[Any, Any], Any]] = {
    "<": operator.lt,
    ">": operator.gt,
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}
OF_FLOATS = ("+", "-", "*", "/")


def number(text: str) -> Any:
    """A number from its text: a Python ``int``, or a number of the type that the text gives.

    >>> number("0x7BFF"), number("7u").dtype, float(number("0x1p-24f")) == 2.0**-24
    (31743, dtype('uint32'), True)
    """
    if "p" in text:
        return np.float32(float.fromhex(text.rstrip("f")))
    return np.uint32(int(text[:-1], 0)) if text.endswith("u") else int(text, 0)


def applied(name: str, values: list[Any]) -> Any:
    """The result of an operator.

    Raises:
        UndecidedError: it is not defined for them.
    """
    if name == "?":
        return _chosen(*values)
    if name == "[]":
        return _element(*values)
    if name == "negative" and isinstance(values[0], int):
        return -values[0]
    if name == "~" and _lanes(values[0]) and values[0].dtype.kind in "ui":
        return values[0] ^ values[0].dtype.type(
            -1 if values[0].dtype.kind == "i" else 2 ** terms.width(values[0].dtype) - 1
        )
    if len(values) != 2:
        raise UndecidedError(f"{name} of such operands is not read")
    first, second = _alike(*values)
    floating = any(not isinstance(each, int) and each.dtype.kind == "f" for each in (first, second))
    if name in COMPARISONS:
        truth = COMPARISONS[name](first, second)
        return _all_bits(truth, first.dtype) if _lanes(first) else truth
    if floating != (name in OF_FLOATS) and (floating or name == "/"):
        raise UndecidedError(f"{name} of such operands is not read")
    if name in ("<<", ">>"):
        _check_count(first, second)
    return ARITHMETIC[name](first, second)


def _lanes(value: Any) -> bool:
    """Whether a value is a vector."""
    return not isinstance(value, int | dict | list) and value.ndim > 0


def _alike(first: Any, second: Any) -> tuple[Any, Any]:
    """Two operands in one type."""
    if _lanes(first) and _lanes(second):
        if first.dtype != second.dtype or first.shape[-1] != second.shape[-1]:
            raise UndecidedError("two vectors of different types")
        return first, second
    if _lanes(first):
        return first, converted(second, first.dtype)
    if _lanes(second):
        return converted(first, second.dtype), second
    first, second = _promoted(first), _promoted(second)
    kinds = {each.dtype for each in (first, second) if not isinstance(each, int)}
    if len(kinds) == 2 and all(each.kind in "ui" for each in kinds):  # int and unsigned
        return converted(first, np.dtype(np.uint32)), converted(second, np.dtype(np.uint32))
    return first, second


def _promoted(value: Any) -> Any:
    if isinstance(value, dict | list):
        raise UndecidedError("an operator of a struct")
    small = not isinstance(value, int) and value.dtype.kind in "ui" and value.dtype.itemsize < 4
    return value.astype(np.int32) if small else value


def converted(value: Any, dtype: np.dtype[Any]) -> Any:
    """One number in another type."""
    if isinstance(value, int):
        if dtype.kind in "ui" and not np.iinfo(dtype).min <= value <= np.iinfo(dtype).max:
            raise UndecidedError(f"{value} is no {dtype}")
        return dtype.type(value)
    if isinstance(value, dict | list) or value.ndim:
        raise UndecidedError("a vector where a number is taken")
    return value.astype(dtype)


def _check_count(a: Any, count: Any) -> None:
    bits = 32 if isinstance(a, int) else terms.width(a.dtype)
    if isinstance(count, Symbols) or not np.all((np.asarray(count) >= 0) & (np.asarray(count) < bits)):
        raise UndecidedError(f"a shift by a number of bits that may be outside of 0 … {bits - 1}")


def _all_bits(truth: Any, dtype: np.dtype[Any]) -> Any:
    signed = np.dtype(f"int{terms.width(dtype)}").type
    return np.where(truth, signed(-1), signed(0))


def _chosen(condition: Any, yes: Any, no: Any) -> Any:
    yes, no = _alike(yes, no)
    if _lanes(condition):
        if not _lanes(yes) or condition.dtype.itemsize != yes.dtype.itemsize or condition.shape[-1] != yes.shape[-1]:
            raise UndecidedError("a choice between other lanes than those of its condition")
        condition = condition != condition.dtype.type(0)
    return np.where(condition, yes, no)


def _element(vector: Any, place: Any) -> Any:
    """An element by its index, which is in range for all values of the unknowns."""
    if not _lanes(vector):
        raise UndecidedError("an element of a value that is not a vector")
    index = of(place).data[()] if isinstance(place, Symbols) else int(place)
    lanes = vector.shape[-1]
    if terms.known(index):
        if not 0 <= index < lanes:
            raise UndecidedError(f"element {index} of {lanes}")
        return vector[..., index]
    if satisfied(z3.UGE(index, lanes)) is not None:
        raise UndecidedError(f"an element that may lie outside {lanes}")
    return np.take_along_axis(vector, place.reshape(1), axis=-1)[0]


def reinterpreted(value: Any, kind: Type) -> Any:
    """A vector's bits as another vector with the same number of bytes."""
    same = _lanes(value) and isinstance(kind, Vector) and value.shape[-1] * value.dtype.itemsize == kind.size
    if not same or not isinstance(kind, Vector):
        raise UndecidedError("a cast between values of other sizes")
    return value.view(kind.dtype)


def each_converted(value: Any, kind: Type) -> Any:
    """A vector's numbers in another type."""
    if not _lanes(value) or not isinstance(kind, Vector) or value.shape[-1] != kind.lanes:
        raise UndecidedError("a conversion to a vector of other lanes")
    return value.astype(kind.dtype)


def shuffled(first: Any, second: Any, *places: int) -> Any:
    """Selected lanes of two vectors; those of the second are numbered after those of the first."""
    first, second = _alike(first, second)
    both = np.concatenate([first, second], axis=-1)
    if not all(0 <= place < both.shape[-1] for place in places):
        raise UndecidedError("a lane that two vectors do not have")
    return both[..., list(places)]
