"""Families of every operation: an array that is read or written in another order, from another place, or not at all.

A kernel of any operation may read one of its arrays backwards, one element off, only the first row, or leave the last
one out; may take a number without its sign, or one too high; and may do the same to its result. So the reference is
asked with one of its arrays changed, or its answer is changed. Nothing here knows what an operation computes. It is
the last place in which `diagnosis` looks, and what was done to the result goes before what was done to an argument.
"""

import inspect
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

import numpy as np

from lowbit.arrays import Array
from lowbit.operations import OPERATIONS
from lowbit.quantization.affine import QuantizedMatrix
from lowbit_conformance import packing
from lowbit_conformance.defects.defect import Defect, Function, arithmetical, unchecked
from lowbit_conformance.defects.narrow import Change

AXES = (0, 1, 2)
REMEMBERED = 32  # right results: those of failures of an operation and of right calls
WIDTHS = (2, 4, 8, 16, 32)
Order = Callable[[Array, int], Array]
"""From the indices along an axis and their number to the indices that are read instead."""


def _across(at: Array, count: int, width: int) -> Array:
    """Indices with neighbouring runs exchanged; a run without a neighbour stays, and a short one is read past its
    end."""
    if count <= width:
        return at
    return np.asarray(np.minimum(at ^ width, count - 1))


def _turned(at: Array, count: int, width: int) -> Array:
    """Indices with each run in reverse order; a short run stays."""
    other = at // width * width + (width - 1 - at % width)
    return np.asarray(np.where(at // width < count // width, other, at))


def _evens(at: Array, count: int, width: int) -> Array:
    """Indices with the even ones first in each run; a short run stays."""
    place = at % width
    other = at - place + np.where(place < width // 2, 2 * place, 2 * place - width + 1)
    return np.asarray(np.where(at // width < count // width, other, at))


ORDERS: tuple[tuple[str, str, Order], ...] = (
    ("reversed", "in reverse order", lambda at, n: n - 1 - at),
    ("one-later", "one place later, the last one first", lambda at, n: (at - 1) % n),
    ("one-earlier", "one place earlier, the first one last", lambda at, n: (at + 1) % n),
    ("next-for-each", "from the next place, and the last from its own", lambda at, n: np.minimum(at + 1, n - 1)),
    ("one-before-for-each", "from the place before, and the first from its own", lambda at, n: np.maximum(at - 1, 0)),
    ("exchanged-in-pairs", "with neighbours exchanged", lambda at, n: _across(at, n, 1)),
    ("exchanged-in-fours", "with neighbouring runs of 4 exchanged", lambda at, n: _across(at, n, 4)),
    ("exchanged-in-eights", "with neighbouring runs of 8 exchanged", lambda at, n: _across(at, n, 8)),
    ("first-for-all", "from the first place for all", lambda at, n: 0 * at),
    ("last-for-all", "from the last place for all", lambda at, n: 0 * at + n - 1),
    ("even-ones-first", "with even places before odd ones", lambda at, n: np.argsort(at % 2, kind="stable")),
    ("halves-interleaved", "with its two halves interleaved", lambda at, n: at // 2 + at % 2 * (-(-n // 2))),
    *(
        (f"{by}-later", f"{by} places later, the last ones first", lambda at, n, by=by: (at - by) % n)
        for by in (2, 4, 8)
    ),
    *(
        (f"{by}-earlier", f"{by} places earlier, the first ones last", lambda at, n, by=by: (at + by) % n)
        for by in (2, 4, 8)
    ),
    *(
        (f"first-of-{w}-for-all", f"from the first of each {w} for all of them", lambda at, n, w=w: at // w * w)
        for w in WIDTHS
    ),
    *(
        (f"turned-in-runs-of-{w}", f"with each run of {w} in reverse order", lambda at, n, w=w: _turned(at, n, w))
        for w in WIDTHS[1:]
    ),
    *(
        (
            f"even-first-in-runs-of-{w}",
            f"with even places first in each run of {w}",
            lambda at, n, w=w: _evens(at, n, w),
        )
        for w in WIDTHS[1:]
    ),
    *((f"modulo-{w}", f"from place i mod {w} for place i", lambda at, n, w=w: at % w) for w in WIDTHS),
    *(
        (
            f"past-whole-{w}-from-the-first",
            f"past the last whole {w} from the first place there",
            lambda at, n, w=w: np.minimum(at, n // w * w),
        )
        for w in WIDTHS
    ),
)

Kept = Callable[[Array, int], Array]
"""From the indices along an axis and their number to a mask of those that are present."""

DROPPED: tuple[tuple[str, str, Kept], ...] = (
    ("first-dropped", "without its first place", lambda at, n: at > 0),
    ("last-dropped", "without its last place", lambda at, n: at < n - 1),
    ("all-but-last-dropped", "with its last place only", lambda at, n: at == n - 1),
    ("odd-ones-dropped", "without its odd places", lambda at, n: at % 2 == 0),
    ("even-ones-dropped", "without its even places", lambda at, n: at % 2 == 1),
    ("second-half-dropped", "without its second half", lambda at, n: at < (n + 1) // 2),
    ("first-half-dropped", "without its first half", lambda at, n: at >= n // 2),
    *((f"last-{w}-dropped", f"without its last {w} places", lambda at, n, w=w: at < n - w) for w in WIDTHS),
    *(
        (f"past-whole-{width}-dropped", f"without the remainder past the last whole {width}", _whole)
        for width, _whole in ((w, lambda at, n, w=w: at < n // w * w) for w in (2, 4, 8, 16, 32))
    ),
    *(
        (f"past-{width}-dropped", f"without what is past the first {width}", _first)
        for width, _first in ((w, lambda at, n, w=w: at < w) for w in (1, 2, 4, 8, 16, 32))
    ),
)

NUMBERS: tuple[tuple[str, str, str, Change], ...] = (
    ("negated", "with the other sign", "if", lambda a: -a),
    ("without-sign", "without its sign", "if", np.abs),
    ("taken-as-0", "as 0", "iuf", lambda a: 0 * np.nan_to_num(a)),
    ("taken-as-1", "as 1", "f", lambda a: 0 * np.nan_to_num(a) + 1),
    ("doubled", "twice", "f", lambda a: a + a),
    ("halved", "half", "f", lambda a: a / 2),
    ("squared", "squared", "f", lambda a: a * a),
    ("one-too-high", "one too high", "iuf", lambda a: a + 1),
    ("one-too-low", "one too low", "iuf", lambda a: a - 1),
    ("rounded", "rounded to an integer", "f", np.rint),
    ("never-negative", "as 0 where it is negative", "f", lambda a: np.maximum(a, 0)),
    ("clamped-to-1", "clamped to -1 … 1", "f", lambda a: np.clip(a, -1, 1)),
    ("complemented", "with every bit inverted", "u", np.invert),
    ("one-bit-lower", "shifted right by one bit", "u", lambda a: a >> 1),
    ("one-bit-higher", "shifted left by one bit", "u", lambda a: a << 1),
    ("bytes-exchanged", "with its bytes in reverse order", "u", lambda a: a.byteswap()),
)


IN_RUNS: tuple[tuple[str, str, Order], ...] = (
    *(
        (
            f"modulo-{w}-in-runs-of-{run}",
            f"from place i mod {w} of each run of {run} for place i",
            lambda at, n, w=w, run=run: at // run * run + at % run % w,
        )
        for run in (4, 8, 16, 32)
        for w in WIDTHS
        if w < run
    ),
    *(
        (
            f"past-whole-{w}-from-the-beginning",
            f"past the last whole {w} from the first places of all",
            lambda at, n, w=w: np.where(at < n // w * w, at, at % w),
        )
        for w in WIDTHS
    ),
)
"""Orders of results and arguments, as when unrolled code reads one number in place of another."""


def _along(axis: int, order: Order) -> Change:
    def change(array: Array) -> Array:
        if array.ndim <= axis:
            return array
        size = array.shape[axis]
        return np.asarray(np.take(array, order(np.arange(size), size) % size, axis=axis))

    return change


def _only(axis: int, kept: Kept) -> Change:
    def change(array: Array) -> Array:
        if array.ndim <= axis:
            return array
        there = kept(np.arange(array.shape[axis]), array.shape[axis])
        shape = [-1 if each == axis else 1 for each in range(array.ndim)]
        return np.asarray(np.where(there.reshape(shape), array, np.zeros_like(array)))

    return change


# **Sums and shapes.**


def _shifted(axis: int, by: int) -> Change:
    """Each number at its neighbour's place, and 0 at the free place."""

    def change(array: Array) -> Array:
        if array.ndim <= axis:
            return array
        rolled, count = np.roll(array, by, axis=axis), array.shape[axis]
        place = (slice(None),) * axis + (slice(0, by) if by > 0 else slice(count + by, None),)
        rolled[place] = 0
        return rolled

    return change


def _summed(axis: int, total: bool) -> Change:
    """The sum of a number and all before it, or of all."""

    def change(array: Array) -> Array:
        if array.ndim <= axis or array.dtype.kind not in "iuf":
            return array
        with np.errstate(all="ignore"):
            sums = array.sum(axis=axis, keepdims=True) if total else np.cumsum(array, axis=axis)
        return np.asarray(np.broadcast_to(sums, array.shape).astype(array.dtype))

    return change


def _summed_in_runs(axis: int, width: int) -> Change:
    """The sum of a number and of all at its place in earlier runs."""

    def change(array: Array) -> Array:
        if array.ndim <= axis or array.dtype.kind not in "iuf" or array.shape[axis] % width:
            return array
        runs = np.moveaxis(array, axis, 0)
        with np.errstate(all="ignore"):
            sums = np.cumsum(runs.reshape(-1, width, *runs.shape[1:]), axis=0).reshape(runs.shape)
        return np.ascontiguousarray(np.moveaxis(sums, 0, axis)).astype(array.dtype)

    return change


def _reread(first: int, second: int) -> Change:
    """Written with two axes exchanged, and read in the right shape."""

    def change(array: Array) -> Array:
        if array.ndim <= second:
            return array
        return np.ascontiguousarray(array.swapaxes(first, second)).reshape(array.shape)

    return change


def _rewritten(first: int, second: int) -> Change:
    """Read as if two axes had been exchanged when it was written."""

    def change(array: Array) -> Array:
        if array.ndim <= second:
            return array
        shape = list(array.shape)
        shape[first], shape[second] = shape[second], shape[first]
        return np.ascontiguousarray(array.reshape(shape).swapaxes(first, second))

    return change


def _shaped() -> Iterator[tuple[str, str, Change]]:
    for axis in AXES:
        end = f"along axis {axis}"
        yield f"added-up-along-axis-{axis}", f"is added to all that come before, {end}.", _summed(axis, total=False)
        for width in WIDTHS:
            cause = f"is added to those that come before at the same place of {width}, {end}"
            yield f"added-up-in-runs-of-{width}-along-axis-{axis}", cause + ".", _summed_in_runs(axis, width)
        yield f"total-along-axis-{axis}", f"is taken as the sum of all, {end}.", _summed(axis, total=True)
        for by, words in ((1, "later"), (-1, "earlier")):
            cause = f"is taken one place {words}, with 0 where none comes, {end}."
            yield f"moved-{words}-along-axis-{axis}", cause, _shifted(axis, by)
    for first, second in ((0, 1), (1, 2), (0, 2)):
        axes = f"axes {first} and {second}"
        yield f"axes-{first}-{second}-exchanged", f"is written with {axes} exchanged.", _reread(first, second)
        yield f"axes-{first}-{second}-read-exchanged", f"is read with {axes} exchanged.", _rewritten(first, second)


def _numeric(kinds: str, change: Change) -> Change:
    def changed(array: Array) -> Array:
        with np.errstate(all="ignore"):
            return np.asarray(change(array).astype(array.dtype)) if array.dtype.kind in kinds else array

    return changed


def changes() -> Iterator[tuple[str, str, Change]]:
    """The end of a name, the end of a cause, and a change of an array; the simplest comes first, because the first of
    several with the same result is named."""
    for name, words, kinds, change in NUMBERS:
        yield name, f"is taken {words}.", _numeric(kinds, change)
    for axis in AXES:
        for name, words, order in (*ORDERS, *IN_RUNS):
            yield f"{name}-along-axis-{axis}", f"is taken {words}, along axis {axis}.", _along(axis, order)
        for name, words, kept in DROPPED:
            cause = f"is taken {words}, along axis {axis}."
            yield f"{name}-along-axis-{axis}", cause, _only(axis, kept)
    yield from _shaped()


# **Where.** An argument, one of its fields, several fields of one shape, the codes of a matrix, or the result.


def _with(value: Any, names: tuple[str, ...], change: Change) -> Any:
    """A value with the arrays of these fields changed, constructed without checks; "" is the value itself."""
    if names == ("codes",) and isinstance(value, QuantizedMatrix):
        codes = np.ascontiguousarray(change(packing.unpack(value.words, value.bits).astype(np.uint8)))
        parts = {each.name: getattr(value, each.name) for each in fields(value)}
        return unchecked(type(value), **parts | {"words": packing.pack(codes, value.bits)})
    if isinstance(value, np.ndarray):
        return np.ascontiguousarray(change(value)) if names == ("",) else value
    if not is_dataclass(value) or isinstance(value, type):
        return value
    parts = {each.name: getattr(value, each.name) for each in fields(value)}
    changed = {name: _with(parts[name], ("",), change) for name in names if name in parts}
    return unchecked(type(value), **parts | changed)


def _unchanged_by(one: Any, other: Any) -> bool:
    """Whether a change had no effect, so that there is nothing to compute."""
    if one is other:
        return True
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.shape == other.shape and one.tobytes() == other.tobytes()
    if not is_dataclass(one) or type(one) is not type(other):
        return False
    return all(_unchanged_by(getattr(one, each.name), getattr(other, each.name)) for each in fields(one))


FIELDS: dict[str, tuple[tuple[str, ...], ...]] = {
    "QuantizedMatrix": (("scales",), ("zeros",), ("scales", "zeros"), ("codes",)),
    "HqqMatrix": (("scales",), ("zeros",), ("scales", "zeros")),
    "Blocks": (("mantissas",), ("exponents",)),
    "BlockSums": (("sums",), ("exponents",)),
    "StoredBlocks": (("mantissas",), ("exponents",)),
    "Rotation": (("cos",), ("sin",), ("cos", "sin")),
    "Layout": (("partner",), ("sign",), ("pair",)),
}
TOGETHER: dict[str, tuple[tuple[int, ...], ...]] = {
    "attention.attend": ((1, 2),),
    "attention.attend_shaped": ((1, 2),),
    "routing.sparse": ((4, 5), (1, 2, 3)),
    "routing.expert": ((1, 2),),
}


def _arguments(operation: str) -> Iterator[tuple[str, Callable[[Change], Function]]]:
    reference = OPERATIONS[operation].reference
    parameters = list(inspect.signature(reference).parameters.values())

    def of(numbers: tuple[int, ...], names: tuple[str, ...]) -> Callable[[Change], Function]:
        def changed(change: Change) -> Function:
            def run(*given: Any, **choices: Any) -> Any:
                each = [_with(value, names, change) if at in numbers else value for at, value in enumerate(given)]
                if all(_unchanged_by(*pair) for pair in zip(given, each, strict=True)):
                    return right_answer(operation, given, choices)
                return reference(*each, **choices)

            return run

        return changed

    for number, each in enumerate(parameters):
        kind = str(each.annotation)
        if "ndarray" in kind:
            yield each.name, of((number,), ("",))
        for names in next((FIELDS[name] for name in FIELDS if f".{name}'" in kind or kind.endswith(name)), ()):
            yield f"{'-and-'.join(names)}-of-{each.name}", of((number,), names)
    for numbers in TOGETHER.get(operation, ()):
        yield "-and-".join(parameters[number].name for number in numbers), of(numbers, ("",))


def _exchanged(operation: str) -> Iterator[Defect]:
    """Two exchanged arguments, and an argument returned as the result."""
    reference = OPERATIONS[operation].reference
    names = list(inspect.signature(reference).parameters)

    def exchange(one: int, other: int) -> Function:
        def run(*given: Any, **choices: Any) -> Any:
            each = list(given)
            each[one], each[other] = each[other], each[one]
            return reference(*each, **choices)

        return run

    for other in range(1, len(names)):
        for one in range(other):
            cause = f"The arguments {names[one]} and {names[other]} are exchanged."
            name = f"{names[one]}-and-{names[other]}-exchanged"
            yield arithmetical(name, cause, "", {operation: exchange(one, other)})


def _unchanged(operation: str) -> Iterator[Defect]:
    def keep(number: int) -> Function:
        def run(*given: Any, **choices: Any) -> Any:
            right, kept = right_answer(operation, given, choices), given[number]
            arrays = isinstance(right, np.ndarray) and isinstance(kept, np.ndarray)
            return kept.reshape(right.shape) if arrays and kept.size == right.size else kept

        return run

    for number, name in enumerate(inspect.signature(OPERATIONS[operation].reference).parameters):
        yield arithmetical(f"{name}-returned", f"The result is {name} as it was given.", "", {operation: keep(number)})


Given = tuple[Any, ...]
_answers: deque[tuple[str, Given, dict[str, Any], Any]] = deque(maxlen=REMEMBERED)


def right_answer(operation: str, given: Given, choices: dict[str, Any]) -> Any:
    """The reference's result, cached because hundreds of changes are tried on it."""
    for name, others, chosen, answer in _answers:
        same = name == operation and len(others) == len(given) and chosen == choices
        if same and all(one is other for one, other in zip(others, given, strict=True)):
            return answer
    answer = OPERATIONS[operation].reference(*given, **choices)
    if not hasattr(answer, "step"):  # a stateful operation is opened anew each time
        _answers.append((operation, given, choices, answer))
    return answer


def _results(operation: str) -> Iterator[Defect]:
    def changed(names: tuple[str, ...], change: Change) -> Function:
        return lambda *given, **choices: _with(right_answer(operation, given, choices), names, change)

    kind = str(inspect.signature(OPERATIONS[operation].reference).return_annotation)
    found = next((FIELDS[name] for name in FIELDS if f".{name}'" in kind or kind.endswith(name)), (("",),))
    for names in found:
        what = "-and-".join(names) + "-of-the-result" if names != ("",) else "result"
        for name, words, change in changes():
            cause = f"The {what.replace('-', ' ')} {words}"
            yield arithmetical(f"{what}-{name}", cause, "", {operation: changed(names, change)})


@cache
def of_results(operation: str) -> tuple[Defect, ...]:
    """Right results written to other places, or as other numbers."""
    return (*_results(operation), *_unchanged(operation))


@cache
def of_arguments(operation: str) -> tuple[Defect, ...]:
    """Right results for other arguments."""
    found = list(_exchanged(operation))
    for what, changed in _arguments(operation):
        for name, words, change in changes():
            cause = f"The argument {what.replace('-', ' ')} {words}"
            found.append(arithmetical(f"{what}-{name}", cause, "", {operation: changed(change)}))
    return tuple(found)
