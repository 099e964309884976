"""A description of a wrong result that no defect explains: where it begins, how far it extends, and its shape.

The first wrong element is given by its place in the matrix: row, column, group, word and bit. Then what the wrong
elements have in common: whole rows, columns, groups or words; one factor; one difference; another order; NaN.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lowbit.arrays import Array
from lowbit.quantization.affine import QuantizedMatrix
from lowbit.quantization.hqq import HqqMatrix
from lowbit.quantization.packing import WORD_BITS
from lowbit.tensor_formats.stored import RESULTS
from lowbit_conformance.defects import steps
from lowbit_conformance.defects.likeness import floating, leaves

RESOLUTIONS = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
TAILS = (32, 16, 8, 4)


@dataclass(frozen=True)
class Description:
    """A description of a wrong result.

    Attributes:
        where: of the first wrong element: index, and row, column, group, word and bit if they apply.
        text: what the wrong elements have in common, in a few words.
    """

    where: Mapping[str, Any] = field(default_factory=dict)
    text: str = ""


def describe(operation: str, arguments: tuple[Any, ...], given: Any, expected: Any) -> Description:
    """Describe a wrong result by comparison with the right one.

    Args:
        operation: its id.
        arguments: of the call; for a product, x and the matrix.
        given: the returned result.
        expected: the reference's result, in its own precision.
    """
    for (path, ours), (other, right) in zip(leaves(given), leaves(expected), strict=False):
        if path != other:
            return Description(_place_of(path), f"{path or 'the result'} where {other} is expected")
        if not isinstance(ours, np.ndarray) or not isinstance(right, np.ndarray):
            if isinstance(ours, np.ndarray) != isinstance(right, np.ndarray) or ours != right:
                return Description(_place_of(path), f"{path or 'the result'} is {ours}, expected {right}")
            continue
        if ours.shape != right.shape:
            return Description({}, f"{path or 'the result'} has shape {ours.shape}, expected {right.shape}")
        wrong = different(ours, right)
        if wrong.any():
            text = "; ".join(
                [*_reach(operation, arguments, wrong), *_pattern(operation, arguments, ours, right, wrong)]
            )
            return Description(_at(operation, arguments, path, ours, right, wrong), text)
    return Description({}, "")


def place(operation: str, arguments: tuple[Any, ...], wrong: Any, right: Any) -> Mapping[str, Any]:
    """The place of the first difference from the right result."""
    return describe(operation, arguments, wrong, right).where


def _place_of(path: str) -> dict[str, Any]:
    """The number and the field of an element of a sequence.

    >>> _place_of("[16].expert")
    {'event': 16, 'field': 'expert'}
    """
    number, _, name = path.removeprefix("[").partition("]")
    if not (path.startswith("[") and number.isdecimal()):
        return {"field": path.lstrip(".")} if path else {}
    return {"event": int(number)} | ({"field": name.lstrip(".")} if name else {})


def _unequal(given: Array, near: Array) -> Array:
    """Which values differ; NaN equals NaN."""
    unequal: Array = ~((given == near) | (np.isnan(given) & np.isnan(near)))
    return unequal


def different(given: Array, right: Array) -> Array:
    """Which elements differ, by more than roundings for floats; NaN equals NaN."""
    if not floating(given):
        return np.not_equal(given, right)
    with np.errstate(all="ignore"):
        near = right.astype(given.dtype)
        unequal = _unequal(given, near)
        if right.dtype == given.dtype:
            return unequal
        scale = np.abs(right[np.isfinite(right)]).max(initial=0.0)
        room = max(2.0**-20, 4 * RESOLUTIONS.get(given.dtype.name, 0.0))
        far = np.abs(given.astype(np.float64) - right) > room * (np.abs(right) + 2.0**-6 * scale)
        differing: Array = np.where(np.isfinite(given) & np.isfinite(right), far, unequal)
    return differing


# **Where.**


def _at(
    operation: str, arguments: tuple[Any, ...], path: str, given: Array, right: Array, wrong: Array
) -> dict[str, Any]:
    """The place of the first wrong element."""
    index = tuple(int(i) for i in np.unravel_index(int(np.argmax(wrong)), wrong.shape))
    where: dict[str, Any] = ({"field": path.lstrip(".")} if path else {}) | {"index": list(index)}
    if operation == "packing.pack" or path == ".words":
        return where | _of_word(operation, arguments, index, given, right)
    matrix = next((argument for argument in arguments if isinstance(argument, (QuantizedMatrix, HqqMatrix))), None)
    if operation == "packing.unpack":
        return where | _of_row(index[0], index[1], arguments[1])
    if operation in ("affine.dequantize", "hqq.dequantize") and matrix is not None:
        row, column = index
        return where | _of_row(row, column, matrix.bits) | {"group": group_at(matrix, row, column)}
    if operation in ("linear.qgemv", "linear.qgemm", "hqq.qgemv"):
        where |= {"row of x": index[0]} if len(index) == 2 else {}
        return where | {"column": index[-1]} | _guessed_row(arguments, index, given, right)
    if operation == "linear.qgemm_bfp":
        return where | {"row of x": index[0], "column": index[-1]}
    names = ("row", "column", "block") if operation.startswith("bfp.dot") else ("row", "column")
    return where | (dict(zip(names, index, strict=False)) if len(index) in (2, len(names)) else {})


def _of_row(row: int, column: int, bits: int) -> dict[str, int]:
    return {"row": row, "column": column, "word": row * bits // WORD_BITS, "bit": row * bits % WORD_BITS}


def _of_word(
    operation: str, arguments: tuple[Any, ...], index: tuple[int, ...], given: Array, right: Array
) -> dict[str, int]:
    """The lowest wrong bit of a word, and the row of the code there."""
    changed = int(given[index]) & 0xFFFFFFFF ^ int(right[index]) & 0xFFFFFFFF
    bit = (changed & -changed).bit_length() - 1
    where = {"word": index[0], "column": index[-1], "bit": bit}
    bits = arguments[1] if operation == "packing.pack" else None
    return where | ({"row": (index[0] * WORD_BITS + bit) // bits} if bits else {})


def group_at(matrix: QuantizedMatrix | HqqMatrix, row: int, column: int) -> int:
    """The group of a weight."""
    if isinstance(matrix, QuantizedMatrix):
        return row // matrix.group_size
    flat = column * matrix.rows + row
    return flat // matrix.group_size if matrix.axis == 1 else flat % matrix.groups


def _guessed_row(arguments: tuple[Any, ...], index: tuple[int, ...], given: Array, right: Array) -> dict[str, Any]:
    """The row of the matrix whose product is missing or counted twice, if there is exactly one."""
    x, matrix = arguments[0], arguments[1]
    if not isinstance(matrix, QuantizedMatrix) or not np.isfinite(given[index]):
        return {}
    products = np.atleast_2d(x)[index[0] if len(index) == 2 else 0].astype(np.float64)
    with np.errstate(all="ignore"):
        products = products * steps.RIGHT.weights(matrix)[:, index[-1]]
        off = float(given[index]) - float(right[index])
        for sign, what in ((-1, "missing"), (1, "counted twice")):
            rows = np.flatnonzero((products == sign * off) & (products != 0))
            if len(rows) == 1:
                row = int(rows[0])
                return {"row": row, "group": row // matrix.group_size, "its product": what}
    return {}


# **How far it reaches.**


def _reach(operation: str, arguments: tuple[Any, ...], wrong: Array) -> Iterator[str]:
    yield f"{int(wrong.sum())} of {wrong.size} elements are wrong"
    if wrong.all():
        return
    if wrong.ndim == 2:
        rows, columns = _lines(wrong)
        if (wrong == rows[:, None]).all():
            yield f"whole rows {few(rows)}" + _grouping(operation, arguments, rows)
        elif (wrong == columns[None]).all():
            yield f"whole columns {few(columns)}" + _tail(columns)
        else:
            yield from _mixed(operation, arguments, wrong)
    elif wrong.ndim == 1:
        yield f"elements {few(wrong)}" + _tail(wrong)


def _lines(wrong: Array) -> tuple[Array, Array]:
    """The rows and columns with wrong elements."""
    return np.logical_or.reduce(wrong, axis=1), np.logical_or.reduce(wrong, axis=0)


def _mixed(operation: str, arguments: tuple[Any, ...], wrong: Array) -> Iterator[str]:
    rows, columns = _lines(wrong)
    if rows.sum() * 4 <= rows.size:
        yield f"only in rows {few(rows)}" + _grouping(operation, arguments, rows)
    if columns.sum() * 4 <= columns.size:
        yield f"only in columns {few(columns)}" + _tail(columns)


def _grouping(operation: str, arguments: tuple[Any, ...], rows: Array) -> str:
    """Whether the wrong rows are whole groups, or are at one place in every word."""
    matrix = next((argument for argument in arguments if isinstance(argument, QuantizedMatrix)), None)
    numbers = np.flatnonzero(rows)
    if matrix is not None and len(rows) == matrix.rows:
        groups = np.arange(matrix.rows) // matrix.group_size
        hit = np.isin(groups, groups[numbers])
        if (hit == rows).all():
            return f", whole groups {few(np.isin(np.arange(matrix.groups), groups[numbers]))}"
        starts = numbers % matrix.group_size
        if len(numbers) > 1 and len(set(starts.tolist())) == 1:
            return f", row {starts[0]} of its group each time"
    bits = matrix.bits if matrix is not None else arguments[1] if operation == "packing.unpack" else 0
    if bits and len(numbers) > 1:
        shifts = set((numbers * bits % WORD_BITS).tolist())
        if len(shifts) <= 2:
            return f", at bit {' and '.join(map(str, sorted(shifts)))} of a word each time"
    return _tail(rows)


def _tail(wrong: Array) -> str:
    """Whether only elements past the last full register are wrong."""
    for width in TAILS:
        whole = len(wrong) // width * width
        if whole < len(wrong) and not wrong[:whole].any() and wrong[whole:].all():
            return f", those past the last whole {width}"
    return ", the last" if wrong[-1] and wrong.sum() == 1 else ""


def few(wrong: Array) -> str:
    """The first few indices of wrong elements.

    >>> few(np.array([False, True, True]))
    '1, 2'
    """
    numbers = np.flatnonzero(wrong)
    return ", ".join(map(str, numbers[:6])) + (", …" if len(numbers) > 6 else "")


# **What it looks like.**


def _pattern(operation: str, arguments: tuple[Any, ...], given: Array, right: Array, wrong: Array) -> Iterator[str]:
    # A reference sums in float64; the requested type is float32, or the one that an argument names.
    asked = next((each for each in arguments if isinstance(each, str) and each in RESULTS), "float32")
    expected = asked if right.dtype == np.float64 != given.dtype else right.dtype.name
    if given.dtype.name != expected:
        yield f"the dtype is {given.dtype}, expected {expected}"
    if floating(given):
        ours, theirs = given[wrong].astype(np.float64), right[wrong].astype(np.float64)
        yield from _kinds(ours, theirs)
        yield from _numbers(operation, arguments, given, right, wrong)
    if right.size > 1:
        yield from _orders(given, right)


def _kinds(ours: Array, theirs: Array) -> Iterator[str]:
    for name, test in (("NaN", np.isnan), ("infinite", np.isinf)):
        if test(ours).all() and not test(theirs).any():
            yield f"all of them are {name}"
    if np.isfinite(ours).all() and not np.isfinite(theirs).any():
        yield "finite where NaN or infinity is expected"
    if (ours == 0).all() and (theirs != 0).all():
        yield "all of them are 0"


def _numbers(operation: str, arguments: tuple[Any, ...], given: Array, right: Array, wrong: Array) -> Iterator[str]:
    ours, theirs = given[wrong].astype(np.float64), right[wrong].astype(np.float64)
    if not (np.isfinite(ours).all() and np.isfinite(theirs).all()) or (ours == 0).all():
        return
    with np.errstate(all="ignore"):
        ratios, off = ours / theirs, ours - theirs
    factor = (theirs != 0).all() and _constant(ratios) and abs(ratios[0] - 1) > 1e-5
    if len(ours) > 1 and factor:
        yield f"all are off by the factor {ratios[0]:.7g}"
    elif len(ours) > 1 and _constant(off):
        yield f"all are off by {off[0]:.7g}"
    matrix = next((argument for argument in arguments if isinstance(argument, QuantizedMatrix)), None)
    if operation == "affine.dequantize" and matrix is not None:
        multiples = off / steps.scales(matrix)[steps.groups(matrix)][wrong]
        if np.allclose(multiples, np.rint(multiples), atol=1e-3) and _constant(np.rint(multiples)):
            yield f"off by {np.rint(multiples[0]):+g} times the scale of their group"
    worst = np.abs(off).max() / max(np.abs(right[np.isfinite(right)]).max(initial=0.0), 1e-300)
    near = [name for name, resolution in RESOLUTIONS.items() if resolution / 8 < worst <= resolution]
    if near and not factor:
        yield f"errors of the size of {near[0]}'s rounding"


def _constant(numbers: Array) -> bool:
    return bool(np.allclose(numbers, numbers[0], rtol=1e-5, atol=0.0))


def _orders(given: Array, right: Array) -> Iterator[str]:
    """Whether the result has the right elements in other places."""
    near = right.astype(given.dtype)
    if _equal(given, near):
        return
    for axis in range(given.ndim):
        for by in (1, -1, 2, -2, 4, -4, 8, -8):
            if abs(by) < given.shape[axis] and _equal(given, np.roll(near, by, axis)):
                yield f"the right elements, {abs(by)} {'later' if by > 0 else 'earlier'} along axis {axis}"
                return
    if given.ndim == 2 and given.shape[0] != 1 and _equal(given.reshape(near.T.shape), near.T):
        yield "the right elements, transposed"
    elif _equal(np.sort(given, axis=None), np.sort(near, axis=None)):
        yield "the right elements in another order"


def _equal(given: Array, near: Array) -> bool:
    if not floating(given):
        return bool((given == near).all())
    with np.errstate(all="ignore"):
        return bool(np.allclose(given, near, rtol=1e-5, atol=0.0, equal_nan=True))
