"""Wrong arguments, derived from what an operation declares of its arguments (`lowbit.contract.signature`).

An annotation says which arguments are right; turned round it says which are wrong: an array of another dtype, a choice
that does not exist, a number beyond its range. So habit H8 needs no list of mistakes for each operation. What only code
can say (`Signature.also`), such as ids that must be distinct, has cases beside those of the operation's clauses.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from lowbit.contract.signature import Argument, Signature, View
from lowbit.errors import ArgumentError

Change = Callable[[Any], Any]
"""Turns a right argument into a wrong one."""

FAR = 2**40
"""Beyond every range."""


@dataclass(frozen=True)
class Mistake:
    """A way to make one argument wrong.

    Attributes:
        argument: its name.
        change: makes the wrong argument.
    """

    argument: str
    change: Change


def mistakes(signature: Signature) -> dict[str, Mistake]:
    """All mistakes for a signature, by names such as ``x-dtype``."""
    shared = _shared_sizes(signature)
    found = {}
    for argument in signature.arguments:
        for name, change in _changes(argument, shared).items():
            found[f"{argument.name}-{name}"] = Mistake(argument.name, change)
    return found


def made(signature: Signature, mistake: Mistake, arguments: tuple[Any, ...], choices: Mapping[str, Any]) -> Any:
    """The arguments of a right call with one made wrong; None if the mistake is not possible for this call.

    For example, an array of a single number is contiguous whatever its strides.
    """
    given = signature.given(arguments, choices)
    if given[mistake.argument] is None and mistake.change not in (_text, _far):
        return None
    given[mistake.argument] = mistake.change(given[mistake.argument])
    positional = [given[name] for name in list(given)[: len(arguments)]]
    named = {name: given[name] for name in list(given)[len(arguments) :] if name in {*choices, mistake.argument}}
    try:
        signature.check(*positional, **named)
    except ArgumentError:
        return positional, named
    return None


def _shared_sizes(signature: Signature) -> set[str | int]:
    """The sizes that cannot be larger in one array alone."""
    sizes = Counter(size for argument in signature.arguments if argument.shape for size in argument.shape.sizes)
    return {size for size, count in sizes.items() if count > 1 or not isinstance(size, str) or "." in size}


def _changes(argument: Argument, shared: set[str | int]) -> dict[str, Change]:
    if argument.shape is not None:
        return _array_changes(argument, shared)
    if argument.choices is not None:
        numbers = isinstance(argument.choices[0], int)
        return {"unknown": _far if numbers else _text} | ({"float": float} if numbers else {})
    if argument.limits is not None:
        whole = float not in argument.classes
        least, most = argument.limits.least, argument.limits.most
        changes: dict[str, Change] = {"text": _text, "bool": lambda number: True}
        changes |= {"float": float} if whole else {"nan": lambda number: float("nan")}
        if not isinstance(least, str):
            changes["low"] = lambda number: least - 1
        return changes | ({"high": _far if whole else lambda number: float("inf")} if most is not None else {})
    return {"class": _text}


def _array_changes(argument: Argument, shared: set[str | int]) -> dict[str, Change]:
    """The mistakes for an array."""
    assert argument.shape is not None
    other = next(each for each in (np.float64, np.float32, np.float16) if each not in argument.classes)
    changes: dict[str, Change] = {
        "list": lambda array: array.tolist(),
        "dtype": lambda array: array.astype(other),
        "dimensions": lambda array: array[np.newaxis],
        "empty": lambda array: array[:0],
    }
    if np.dtype(argument.classes[0]).itemsize > 1:
        changes["byte-order"] = _swapped
    if not isinstance(argument.shape, View):
        changes["strided"] = lambda array: np.repeat(array, 2, axis=-1)[..., ::2]
    for axis, size in enumerate(argument.shape.sizes):
        if size in shared:
            changes[f"longer-{axis}"] = partial(np.repeat, repeats=2, axis=axis)
    if argument.contents is not None:
        changes["nan"] = lambda array: _with_last(array, np.nan)
        changes["infinite"] = lambda array: _with_last(array, np.inf)
        if argument.contents.above_zero:
            changes["zero"] = lambda array: _with_last(array, 0)
    return changes


def _swapped(array: Any) -> Any:
    """The array in the other byte order."""
    return array.astype(array.dtype.newbyteorder())


def _with_last(array: Any, number: float) -> Any:
    other = array.copy()
    other.reshape(-1)[-1] = number
    return other


def _text(value: Any) -> str:
    return "something else"


def _far(value: Any) -> int:
    return FAR
