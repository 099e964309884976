"""Families of mistakes: one kind of mistake with a number or a place in it, of which the bank holds a few examples.

The bank names a defect that it holds. A format, a width or a neighbour that it does not hold is found here: the
reference is asked with one input rounded to each narrow format, and the steps of a product are replaced one by one.
Nothing here is a backend of the kill matrix; `diagnosis` looks here where no defect of the bank explains the results.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

import numpy as np

from lowbit.arrays import F32, Array
from lowbit.operations import OPERATIONS
from lowbit.quantization.affine import QuantizedMatrix
from lowbit_conformance import packing
from lowbit_conformance.defects import steps
from lowbit_conformance.defects.cast_family import of_casts
from lowbit_conformance.defects.defect import Defect, Function, arithmetical, unchecked
from lowbit_conformance.defects.narrow import FORMATS, Change
from lowbit_conformance.defects.stored_kinds import of_stored
from lowbit_conformance.defects.variants import VARIANTS
from lowbit_conformance.defects.variants_layers import LAYERS

WIDTHS = (4, 8, 16, 32, 64, 128, 256)
CUT = 2
"""The rounding of a narrow format that truncates."""
COUNTERS = (7, 8, 15, 16)  # bits
FIELDS = {"matrix": ("scales", "zeros"), "turn": ("cos", "sin"), "rotation": ("cos", "sin")}
"""Arrays are changed in arguments with these names."""


# **Narrow formats**: an input, the weights or the result in fewer bits.


def _is_real(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.kind == "f"


def _changed(value: Any, path: tuple[str, ...], change: Change) -> Any:
    """A value with the array at a path changed, constructed without checks."""
    if not path:
        return change(value) if _is_real(value) else value
    if not is_dataclass(value):
        return value
    parts = {part.name: getattr(value, part.name) for part in fields(value)}
    return unchecked(type(value), **parts | {path[0]: _changed(parts[path[0]], path[1:], change)})


def _places(operation: str) -> Iterator[tuple[str, Callable[[Change], Function]]]:
    """The parts of an operation that may be rounded, and the operation with each part rounded."""
    reference = OPERATIONS[operation].reference
    parameters = inspect.signature(reference).parameters

    def of_input(number: int, path: tuple[str, ...]) -> Callable[[Change], Function]:
        def rounded(change: Change) -> Function:
            def run(*given: Any, **choices: Any) -> Any:
                first = [_changed(each, path, change) if at == number else each for at, each in enumerate(given)]
                return reference(*first, **choices)

            return run

        return rounded

    def of_all(change: Change) -> Function:
        return lambda *given, **choices: reference(*(_changed(each, (), change) for each in given), **choices)

    def of_result(change: Change) -> Function:
        def run(*given: Any, **choices: Any) -> Any:
            right = reference(*given, **choices)
            return change(right.astype(np.float32)) if _is_real(right) else right

        return run

    arrays = [name for name, each in parameters.items() if "ndarray" in str(each.annotation)]
    for number, name in enumerate(parameters):
        if name in arrays:
            yield name, of_input(number, ())
        for part in FIELDS.get(name, ()):
            yield f"{part}", of_input(number, (part,))
    if len(arrays) > 1:
        yield "all-inputs", of_all
    yield "result", of_result


# **Integers** that are too narrow and lost signs, in parts of blocks and in their sums.


def _wrapped(bits: int) -> Change:
    return lambda numbers: numbers.astype(f"i{bits // 8}")


def _saturated(bits: int) -> Change:
    return lambda numbers: np.clip(numbers, -(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


PARTS = ("mantissas", "exponents", "sums")
INTEGERS: dict[str, tuple[str, Change]] = {
    **{f"wrap-at-{bits}-bits": (f"wrap at {bits} bits", _wrapped(bits)) for bits in (8, 16, 32)},
    **{
        f"saturate-at-{bits}-bits": (
            f"saturate at {bits} bits",
            _saturated(bits),
        )
        for bits in (8, 16, 32)
    },
    "pass-through-float32": ("pass through float32", lambda numbers: numbers.astype(np.float32)),
    "without-sign": ("lose their sign", np.abs),
    "negated": ("have the other sign", np.negative),
    "one-too-low": ("are one too low", lambda numbers: numbers - 1),
    "one-too-high": ("are one too high", lambda numbers: numbers + 1),
    "of-first-row": ("are those of the first row for all", lambda numbers: numbers[:1] + 0 * numbers),
    "of-next-block": ("are those of the next one along a row", lambda numbers: np.roll(numbers, -1, axis=-1)),
}


def _whole(change: Change) -> Change:
    return lambda numbers: np.ascontiguousarray(change(numbers).astype(numbers.dtype))


def _changed_part(value: Any, part: str, change: Change) -> Any:
    """Blocks, sums or stored blocks with one array changed; unchanged without such an array."""
    if not is_dataclass(value) or not isinstance(getattr(value, part, None), np.ndarray):
        return value
    parts = {each.name: getattr(value, each.name) for each in fields(value)}
    return unchecked(type(value), **parts | {part: change(parts[part])})


def _of_part(operation: str, part: str, number: int | None, change: Change) -> Function:
    reference = OPERATIONS[operation].reference

    def run(*given: Any, **choices: Any) -> Any:
        if number is None:
            return _changed_part(reference(*given, **choices), part, change)
        changed = [_changed_part(each, part, change) if at == number else each for at, each in enumerate(given)]
        return reference(*changed, **choices)

    return run


def _integers(operation: str) -> Iterator[Defect]:
    if not operation.startswith("bfp."):
        return
    names = list(inspect.signature(OPERATIONS[operation].reference).parameters)
    for part in PARTS:
        for kind, (words, change) in INTEGERS.items():
            for number, name in enumerate(names):
                run = _of_part(operation, part, number, _whole(change))
                cause = f"The {part} of {name} {words}."
                yield arithmetical(f"{part}-of-{name}-{kind}", cause, "", {operation: run})
            run = _of_part(operation, part, None, _whole(change))
            yield arithmetical(f"{part}-{kind}", f"The {part} of the result {words}.", "", {operation: run})


def _rounded(operation: str) -> Iterator[Defect]:
    for place, rounded in _places(operation):
        for format, (words, ways) in FORMATS.items():
            cause = f"{place.replace('-', ' ').capitalize()}: {words}."
            for number, way in enumerate(ways):
                name, said = f"{place}-in-{format}", cause
                if place == "result" and number == CUT:
                    name, said = f"{name}-cut", f"{cause.removesuffix('.')}, by truncation."
                yield arithmetical(name, said, "", {operation: rounded(way)})


# **Results** in another order or with another range.


def _filled(value: Any) -> Any:
    return _is_real(value) and value.ndim == 2 and value.shape[0] == value.shape[1]


def _where_real(change: Change) -> Change:
    return lambda value: change(value.astype(np.float32)) if _is_real(value) else value


def _where_square(change: Change) -> Change:
    return lambda value: np.ascontiguousarray(change(value)) if _filled(value) else value


def _where_whole(change: Change) -> Change:
    whole = "iu"
    return lambda value: change(value) if isinstance(value, np.ndarray) and value.dtype.kind in whole else value


def _modulo_of(dtype: str) -> Change:
    return lambda value: value.astype(dtype).astype(value.dtype)


def _finite(most: float) -> Change:
    return lambda value: np.clip(value, np.float32(-most), np.float32(most))


def _zeros(sign: float) -> Change:
    return lambda value: np.where(value == 0, np.float32(sign * 0.0), value)


RESULTS: tuple[tuple[str, str, Change], ...] = (
    ("result-transposed", "The result is transposed.", _where_square(np.transpose)),
    ("result-half-filled", "Only the lower half of the result is filled.", _where_square(np.tril)),
    ("result-half-filled", "Only the upper half of the result is filled.", _where_square(np.triu)),
    (
        "result-saturates",
        "A result past the largest float32 becomes that number instead of infinite.",
        _where_real(_finite(float(np.finfo(np.float32).max))),
    ),
    ("result-saturates-at-65504", "A result is clamped to 65504, the largest float16.", _where_real(_finite(65504.0))),
    ("zeros-never-negative", "A result of -0 is returned as +0.", _where_real(_zeros(1.0))),
    ("zeros-always-negative", "A result of 0 is returned as -0.", _where_real(_zeros(-1.0))),
    ("result-without-sign", "Results lose their sign.", _where_real(np.abs)),
    *(
        (f"result-wraps-in-{dtype}", f"Integers of the result wrap in {dtype}.", _where_whole(_modulo_of(dtype)))
        for dtype in ("int8", "uint8", "int16", "uint16")
    ),
)


def _resulting(operation: str) -> Iterator[Defect]:
    reference = OPERATIONS[operation].reference

    def changed(change: Change) -> Function:
        return lambda *given, **choices: change(reference(*given, **choices))

    for name, cause, change in RESULTS:
        yield arithmetical(name, cause, "", {operation: changed(change)})


def _varied(operation: str) -> Iterator[Defect]:
    for variants in (VARIANTS, LAYERS):
        if operation in variants:
            for name, cause, run in variants[operation]():
                yield arithmetical(name, cause, "", {operation: run})


# **Products with quantised weights**, one step replaced.

Choose = Callable[[Array, QuantizedMatrix], Array]


def _grouped(choose: Choose) -> dict[str, Any]:
    return {"groups": lambda matrix: np.clip(choose(np.arange(matrix.rows), matrix), 0, matrix.groups - 1)}


def _across(change: Callable[[Array], Array]) -> Iterator[tuple[str, dict[str, Any]]]:
    """A change of the columns of scales, zeros or both."""
    scales, zeros = (lambda matrix: change(steps.scales(matrix))), (lambda matrix: change(steps.zeros(matrix)))
    yield "scales", {"scales": scales}
    yield "zeros", {"zeros": zeros}
    yield "scales-and-zeros", {"scales": scales, "zeros": zeros}


def _panel(width: int) -> Callable[[Array], Array]:
    return lambda numbers: numbers[:, np.arange(numbers.shape[1]) // width * width]


def _turned(numbers: Array) -> Array:
    return np.ascontiguousarray(numbers.reshape(numbers.shape[::-1]).T)


def _unpacked(change: Callable[[Array, int], Array]) -> dict[str, Any]:
    """A change of the codes when they are read and when they are written."""
    return {
        "unpack": lambda words, bits: change(packing.unpack(words, bits), bits),
        "pack": lambda codes, bits: packing.pack(change(codes.copy(), bits), bits),
    }


def _exchanged(codes: Array, bits: int) -> Array:
    exchanged: Array = codes[np.arange(len(codes)) ^ 1]
    return exchanged


def _bits_turned(codes: Array, bits: int) -> Array:
    turned = np.zeros_like(codes)
    for bit in range(bits):
        turned |= (codes >> bit & 1) << (bits - 1 - bit)
    return turned


def _straddler(row: int, lost: str) -> Callable[[Array, int], Array]:
    """A 3-bit code in two words, without the bits in one of them."""

    def change(codes: Array, bits: int) -> Array:
        if bits == 3:
            first = 2 if row == 10 else 1  # bits in the word that it begins in
            mask = {"low": 8 - 2**first, "high": 2**first - 1, "whole": 0}[lost]
            codes[np.isin(np.arange(len(codes)) % 32, (10, 21) if lost == "whole" else (row,))] &= np.uint8(mask)
        return codes

    return change


def _kept(rows: Callable[[Array], Array]) -> dict[str, Any]:
    """Products of these rows only."""

    def finish(weights: F32, matrix: QuantizedMatrix) -> F32:
        weights[~rows(np.arange(len(weights)))] = 0
        return weights

    return {"finish": finish}


def _columns(choose: Callable[[Array], Array]) -> dict[str, Any]:
    return {"product": lambda x, weights: steps.product(x, weights)[:, choose(np.arange(weights.shape[1]))]}


def _of_weights(way: Change) -> dict[str, Any]:
    return {"finish": lambda weights, matrix: way(weights)}


def _with_weights(way: Change) -> dict[str, Any]:
    return {"product": lambda x, weights: steps.product(way(x), way(weights))}


def _by_whole(width: int) -> Choose:
    return lambda rows, matrix: rows // width * width // matrix.group_size


def _of_size(width: int) -> Choose:
    return lambda rows, matrix: rows // width


def _wrapping(bits: int) -> Choose:
    return lambda rows, matrix: rows // matrix.group_size % 2**bits


def _whole_rows(width: int) -> Change:
    return lambda rows: rows < (len(rows) // width * width or len(rows))


def _below(most: int) -> Change:
    return lambda rows: rows < most


def _modulo(most: int) -> Change:
    return lambda columns: columns % most


def _cyclic(most: int) -> Change:
    return lambda numbers: numbers[:, np.arange(numbers.shape[1]) % most]


def _rolled(by: int) -> Change:
    return lambda numbers: np.roll(numbers, by, axis=1)


def _swapped(codes: F32, scale: F32, zero: F32, convention: str) -> F32:
    return scale * (codes - zero) if convention == "minimum" else scale * codes + zero


def _negated(codes: F32, scale: F32, zero: F32, convention: str) -> F32:
    return scale * codes - zero if convention == "minimum" else scale * (codes + zero)


def _replaced() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """A name, a cause and the steps replaced."""
    yield (
        "last-group-for-all",
        "Every row uses the scale and zero of the last group.",
        _grouped(lambda r, m: r * 0 + m.groups),
    )
    yield "groups-cyclic", "Row k uses the scale and zero of group k mod G.", _grouped(lambda r, m: r % m.groups)
    shifted = _grouped(lambda r, m: r >> (int(m.group_size).bit_length() - 1))
    yield "group-size-power-of-2", "The group is found by a shift, as if the group size were a power of two.", shifted
    for width in WIDTHS:
        yield (
            f"groups-by-whole-{width}-rows",
            f"The group is looked up once for each {width} rows.",
            _grouped(_by_whole(width)),
        )
        yield (
            f"groups-of-{width}",
            f"Groups are taken to have {width} rows.",
            _grouped(_of_size(width)),
        )
        rows = _kept(_whole_rows(width))
        yield f"rows-past-whole-{width}-dropped", f"Rows past the last whole {width} are left out.", rows
        for what, replaced in _across(_panel(width)):
            yield f"{what}-of-panels-of-{width}", f"{width} columns share the {what} of the first.", replaced
    for bits in COUNTERS:
        wrap = _grouped(_wrapping(bits))
        yield f"groups-wrap-at-{2**bits}", f"The number of a group wraps at {2**bits}.", wrap
    for bits in (8, 10, 11, 12, 13, 14, 15, 16):
        first = _kept(_below(2**bits))
        yield f"rows-past-{2**bits}-dropped", f"Rows past {2**bits} are left out.", first
        wrapped = _columns(_modulo(2**bits))
        yield f"columns-wrap-at-{2**bits}", f"The number of a column wraps at {2**bits}.", wrapped
        for what, replaced in _across(_cyclic(2**bits)):
            yield f"{what}-wrap-at-{2**bits}", f"The column of the {what} wraps at {2**bits}.", replaced
    for side, by in (("next", -1), ("previous", 1)):
        for what, replaced in _across(_rolled(by)):
            yield f"{what}-of-{side}-column", f"A column uses the {what} of the {side} one.", replaced
    for what, replaced in _across(_turned):
        yield f"{what}-by-columns", f"The {what} are read column by column.", replaced
    for what, replaced in _across(lambda numbers: numbers[:, :1] * np.ones(numbers.shape[1], np.float32)):
        yield f"{what}-of-first-column", f"All columns use the {what} of the first.", replaced
    yield "zeros-negated", "Zeros are added where they should be subtracted, and vice versa.", {"value": _negated}
    yield "conventions-exchanged", "Minima are used as zero-points, and zero-points as minima.", {"value": _swapped}
    yield "nibbles-exchanged", "Neighbouring rows exchange their codes.", _unpacked(_exchanged)
    yield "bits-of-codes-turned", "The bits of each code are in reverse order.", _unpacked(_bits_turned)
    most = _unpacked(lambda codes, bits: np.minimum(codes, np.uint8(2**bits - 2)))
    yield "largest-code-lost", "The largest code is read as the one below it.", most
    centred = _unpacked(lambda codes, bits: codes.astype(np.float32) - 2 ** (bits - 1))
    yield "codes-centred", "Half of the range is subtracted from each code.", centred
    for row in (10, 21):
        for lost in ("low", "high"):
            cause = f"Of 3-bit codes in two words, row {row} mod 32 loses its {lost} bits."
            yield f"straddling-code-{row}-loses-{lost}-bits", cause, _unpacked(_straddler(row, lost))
    yield "straddling-codes-zero", "3-bit codes that lie in two words are 0.", _unpacked(_straddler(10, "whole"))
    masked = {"zeros": lambda m: np.asarray(m.zeros % 16, np.float32) if m.convention != "minimum" else steps.zeros(m)}
    yield "zero-points-of-4-bits", "Zero-points keep their low 4 bits only.", masked
    for format, (words, ways) in FORMATS.items():
        for way in ways:
            yield f"weights-in-{format}", f"Weights: {words}.", _of_weights(way)
            yield f"x-and-weights-in-{format}", f"Activations and weights: {words}.", _with_weights(way)


def _stepwise(operation: str) -> Iterator[Defect]:
    for name, cause, replaced in _replaced():
        wrong = steps.stepwise(name, cause, "", **replaced).wrong
        if operation in wrong:
            yield arithmetical(name, cause, "", {operation: wrong[operation]})


@cache
def relatives(operation: str) -> tuple[Defect, ...]:
    """All members of all families for an operation; members of one name are ways to make the same mistake."""
    return (
        *_stepwise(operation),
        *_varied(operation),
        *_integers(operation),
        *_resulting(operation),
        *_rounded(operation),
        *of_stored(operation),
        *of_casts(operation),
    )
