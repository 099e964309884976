"""Checks of arguments: one function for each kind of mistake, so that every chapter reports it in the same words.

Each raises `ArgumentError` with the name of the argument, what it was and what is allowed.
They run before an operation reads or writes an array.
"""

import sys
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from lowbit.arrays import Array
from lowbit.errors import ArgumentError
from lowbit.text import kind_of, represented, with_article

Choice = TypeVar("Choice")


def spoken(choices: Sequence[object]) -> str:
    """The choices as a phrase.

    >>> spoken([2, 3, 4, 8])
    '2, 3, 4 or 8'
    """
    words = [str(choice) for choice in choices]
    return "".join(words) if len(words) < 2 else ", ".join(words[:-1]) + " or " + words[-1]


def check_choice(argument: str, given: object, allowed: Sequence[Choice]) -> Choice:
    """Return the `allowed` value that was given and refuse any other (`True` is not 1 and `4.0` is not 4)."""
    for choice in allowed:
        if type(given) is type(choice) and given == choice:
            return choice
    raise ArgumentError(argument, represented(given), spoken(allowed))


def check_instance(argument: str, given: object, *classes: type) -> None:
    """Refuse anything but an instance of one of these classes."""
    if not isinstance(given, classes):
        modules = ["" if each.__module__ == "builtins" else f"{each.__module__}." for each in classes]
        names = [with_article(module + each.__name__) for module, each in zip(modules, classes, strict=True)]
        raise ArgumentError(argument, kind_of(given), spoken(names))


def check_integer(argument: str, given: object, least: int, most: int | None = None) -> None:
    """Refuse anything but a Python integer from `least` to `most`."""
    in_range = (
        isinstance(given, int) and not isinstance(given, bool) and given >= least and (most is None or given <= most)
    )
    if not in_range:
        limit = f"an integer of at least {least}" if most is None else f"an integer from {least} to {most}"
        raise ArgumentError(argument, represented(given), limit)


def check_number(argument: str, given: object, least: float, most: float | None = None) -> None:
    """Refuse anything but a finite number from `least` to `most`."""
    number = given.item() if isinstance(given, np.floating) else given
    largest = sys.float_info.max if most is None else most  # integers may be larger than any float
    if isinstance(number, bool) or not isinstance(number, int | float) or not least <= number <= largest:
        limit = f"a finite number of at least {least:g}" if most is None else f"a number from {least:g} to {most:g}"
        raise ArgumentError(argument, represented(given), limit)


def check_array(
    argument: str,
    array: object,
    dtype: npt.DTypeLike,
    shape: Sequence[int | None],
    *,
    writeable: bool = False,
) -> None:
    """Refuse anything but a C-contiguous, aligned, native-endian array of this dtype and shape.

    `None` in `shape` stands for any size of at least 1: an operation on an empty array is the caller's mistake. A
    read-only array is accepted unless `writeable` is set.
    """
    if _is_plain(array, dtype, shape, writeable):  # the fast path: nearly every array, and products are called often
        return
    if type(array) not in (np.ndarray, np.memmap):  # np.matrix and masked arrays compute differently
        allowed = f"a numpy array of {np.dtype(dtype)}, {_spoken_shape(shape)}"
        raise ArgumentError(argument, kind_of(array), allowed)
    assert isinstance(array, np.ndarray)
    if array.dtype != dtype:
        raise ArgumentError(f"dtype of {argument}", array.dtype, str(np.dtype(dtype)))
    _check_shape(argument, array.shape, shape)
    flags = array.flags
    if not flags.c_contiguous:
        raise ArgumentError(argument, "not contiguous", "a C-contiguous array (numpy.ascontiguousarray)")
    if not flags.aligned:
        raise ArgumentError(argument, "not aligned to its dtype", "an aligned array (numpy.require)")
    if writeable and not flags.writeable:
        raise ArgumentError(argument, "read-only", "a writeable array")


def check_dtype(argument: str, array: object, names: Sequence[str]) -> None:
    """Refuse anything but a numpy array with a dtype of one of these names; its shape and layout are not checked."""
    if not isinstance(array, np.ndarray):
        library = type(array).__module__.partition(".")[0]
        given = kind_of(array) if library == "builtins" else f"a {library} {type(array).__name__}"
        raise ArgumentError(argument, given, f"a numpy array of {spoken(names)}")
    check_choice(f"dtype of {argument}", str(array.dtype), names)


def _is_plain(array: object, dtype: npt.DTypeLike, shape: Sequence[int | None], writeable: bool) -> bool:
    """Whether all requirements hold, decided quickly.

    If False, the individual checks find what is wrong. It may be False for a correct array: if the shape leaves a size
    other than the first open, or the dtype is not given by its class.
    """
    if type(array) is not np.ndarray or array.dtype.type is not dtype or not array.dtype.isnative:
        return False
    given, flags = array.shape, array.flags
    same = given == shape or (len(given) == len(shape) > 0 and shape[0] is None and given[1:] == shape[1:])
    return same and 0 not in given and (flags.carray if writeable else flags.c_contiguous and flags.aligned)


def _check_shape(argument: str, given: tuple[int, ...], shape: Sequence[int | None]) -> None:
    if len(given) != len(shape):
        raise ArgumentError(f"shape of {argument}", given, f"{len(shape)} dimensions, {_spoken_shape(shape)}")
    if any(size < 1 or wanted not in (None, size) for size, wanted in zip(given, shape, strict=True)):
        raise ArgumentError(f"shape of {argument}", given, f"{_spoken_shape(shape)}, each at least 1")


def _spoken_shape(shape: Sequence[int | None]) -> str:
    """A shape in words; built only for an error message, because every product checks its arrays."""
    return " x ".join("any" if size is None else str(size) for size in shape)


def check_finite(argument: str, array: Array) -> None:
    """Refuse NaN and infinity, and say where the first one is."""
    finite = np.isfinite(array)
    if not finite.all():
        where = tuple(int(i) for i in np.unravel_index(int(np.argmin(finite)), array.shape))
        raise ArgumentError(f"{argument}{list(where)}", array[where], "finite numbers")


def check_view(argument: str, array: object, dtype: npt.DTypeLike, shape: Sequence[int | None]) -> None:
    """Refuse anything but an array of this dtype and shape, each size at least 1; views of any stride are accepted."""
    if not isinstance(array, np.ndarray) or array.dtype != dtype:
        given = array.dtype if isinstance(array, np.ndarray) else kind_of(array)
        raise ArgumentError(argument, given, f"a numpy array of {np.dtype(dtype)}")
    _check_shape(argument, array.shape, shape)
