"""What an array may hold beside numbers as they occur: nothing, the same everywhere, one that is far above the others.

A formula may have no value for such contents, and a kernel may have a shortcut for them: a range of zero, a mean of
equal numbers, a row that is dead. Every array of an operation is given each of them, the others being as they are.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from lowbit.arrays import F32, F64

Contents = Callable[[F64], F64]
"""Turns ordinary numbers into special ones of the same shape."""


def place(x: F64, where: int, axis: int, number: float | F64) -> F64:
    other = np.moveaxis(x.copy(), axis, 0)
    other[where] = number
    return np.moveaxis(other, 0, axis)


def alone(x: F64, where: int) -> F64:
    flat = np.zeros(x.size)
    flat[where] = x.reshape(-1)[where]
    return flat.reshape(x.shape)


def outlier(x: F64, where: int) -> F64:
    flat = x.copy().reshape(-1)
    flat[where] = 1e6 * np.abs(x).max()
    return flat.reshape(x.shape)


def ramp(x: F64, axis: int) -> F64:
    other: F64 = np.sort(x, axis=axis)
    return other


def alternating(x: F64) -> F64:
    other: F64 = np.abs(x) * np.resize((1.0, -1.0), x.size).reshape(x.shape)
    return other


def halves(x: F64, axis: int) -> F64:
    other = np.moveaxis(x.copy(), axis, 0)
    other[len(other) // 2 :] = 0
    return np.moveaxis(other, 0, axis)


def far_apart(x: F64) -> F64:
    other: F64 = x * np.resize((2.0**30, 1.0, 2.0**-40), x.size).reshape(x.shape)
    return other


def pairs(x: F64) -> F64:
    """The greatest number of each row occurs twice."""
    other = x.copy()
    other[..., 0] = other[..., -1] = np.abs(x).max() + 1
    return other


CONTENTS: Mapping[str, Contents] = MappingProxyType(
    {
        "zeros": np.zeros_like,
        "negative-zeros": lambda x: np.full_like(x, -0.0),
        "ones": np.ones_like,
        "equal": lambda x: np.full_like(x, x.flat[0]),
        "equal-negative": lambda x: np.full_like(x, -np.abs(x.flat[0])),
        "equal-rows": lambda x: np.repeat(x[:1], len(x), axis=0),
        "equal-columns": lambda x: np.repeat(x[..., :1], x.shape[-1], axis=-1),
        "two-columns-equal": lambda x: place(x, 0, -1, x[..., min(1, x.shape[-1] - 1)]),
        "first-row-zero": lambda x: place(x, 0, 0, 0.0),
        "last-row-zero": lambda x: place(x, -1, 0, 0.0),
        "first-column-zero": lambda x: place(x, 0, -1, 0.0),
        "last-column-zero": lambda x: place(x, -1, -1, 0.0),
        "middle-column-zero": lambda x: place(x, x.shape[-1] // 2, -1, 0.0),
        "second-half-zero": lambda x: halves(x, 0),
        "second-columns-zero": lambda x: halves(x, -1),
        "only-first-column": lambda x: x * (np.arange(x.shape[-1]) == 0),
        "only-last-column": lambda x: x * (np.arange(x.shape[-1]) == x.shape[-1] - 1),
        "only-first": lambda x: alone(x, 0),
        "only-last": lambda x: alone(x, -1),
        "positive": np.abs,
        "negative": lambda x: -np.abs(x),
        "at-most-zero": lambda x: np.minimum(x, 0),
        "at-least-zero": lambda x: np.maximum(x, 0),
        "rising": lambda x: ramp(x, -1),
        "falling": lambda x: -ramp(-x, -1),
        "rising-rows": lambda x: ramp(x, 0),
        "falling-rows": lambda x: -ramp(-x, 0),
        "alternating": alternating,
        "signs": lambda x: np.where(x < 0, -1.0, 1.0),
        "integers": lambda x: np.rint(4 * x),
        "greatest-twice": pairs,
        "outlier-first": lambda x: outlier(x, 0),
        "outlier-last": lambda x: outlier(x, -1),
        "far-apart": far_apart,
        "large": lambda x: x * 2.0**40,
        "small": lambda x: x * 2.0**-40,
        "huge": lambda x: x * 2.0**58,
        "tiny": lambda x: x * 2.0**-58,
    }
)
"""Special contents by name; axis 0 is rows."""


EXTREMES: Mapping[str, Contents] = MappingProxyType(
    {
        "vast": lambda x: x * 2.0**70,
        "largest": lambda x: x * (3e37 / np.abs(x).max()),
        "subnormal": lambda x: x * 2.0**-140,
    }
)
"""More contents, for operations that neither square their inputs nor take exponentials of them."""


def filled(kind: str, x: F32) -> F32:
    """An array with these contents, float32 and contiguous."""
    change = EXTREMES.get(kind) or CONTENTS[kind]
    return np.ascontiguousarray(change(x.astype(np.float64)), np.float32)
