"""Casts whose scales follow another rule, which the scales themselves show: other numbers, or another divisor.

A scale of 8-bit integers or of FP8 is the largest magnitude of some numbers over the largest code. Kernels take it over
other numbers, such as a channel in place of a token, or divide by another number. The divisor is solved for, and each
rule is compared with the scales alone. Whether codes fit such scales, and where they do not, what was done to them, is
compared next. So a rule need not be tried with every way of dividing and rounding that kernels have.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from lowbit.arrays import F64, Array
from lowbit.numbers.floats import FLOATS
from lowbit.tensor_formats.int8 import runs
from lowbit.tensor_formats.stored import Stored
from lowbit.tensor_formats.table import Field
from lowbit_conformance.defects.cast_fields import OPERATION, right_cast
from lowbit_conformance.defects.cast_rules import STORED, Rule, largest, rules
from lowbit_conformance.defects.casts import Options
from lowbit_conformance.defects.defect import Defect, arithmetical

CLOSE = 2.0**-20
"""Relative error of a float32 number that was computed in any of several orders."""
INTEGER_TOP, FLOAT_TOP = 127.0, 448.0


@dataclass(frozen=True, eq=False)
class View:
    """A cast, or the result of one.

    Attributes:
        numbers: the cast numbers: tokens x runs x numbers of a run, padded with zeros.
        scales: tokens x runs; with a sign if blocks have one.
        codes: like the numbers.
        whole: whether the stored sums, if any, are those of these codes.
    """

    numbers: F64
    scales: F64
    codes: F64
    whole: bool


def rows_of(format: Any) -> tuple[Field, Field] | None:
    """The fields of scales and codes of a format with one scale for each run of 8-bit codes; None for other formats."""
    scales = [row for row in format.fields if row.role == "scale"]
    codes = [row for row in format.fields if row.role == "codes"]
    if len(scales) != 1 or len(codes) != 1 or codes[0].dtype not in ("int8", "float8_e4m3fn"):
        return None
    return None if scales[0].dtype in ("float8_e8m0fnu", "float8_e4m3fn") else (scales[0], codes[0])


def view_of(x: Array, given: Stored) -> View:
    """A result beside the numbers that were cast.

    Raises:
        ValueError: the format does not have one scale for each run.
    """
    table, at = given.table, given.sizes
    rows = rows_of(table)
    if rows is None:
        raise ValueError("runs do not have one scale each")
    fields = table.fields_of(given.by_name)
    scale, codes = (np.asarray(fields[row.name]).astype(np.float64) for row in rows)
    size = table.block or dict(given.options).get("group_size", at.K)
    if scale.size == 1:
        numbers = np.asarray(x, np.float64).reshape(1, 1, -1)
    else:
        numbers = runs(np.asarray(x, np.float64).T, at, size).astype(np.float64)
    shape = numbers.shape
    filled = np.zeros((shape[0], shape[1] * shape[2]))
    lines = codes.reshape(shape[0], -1)
    if scale.size != shape[0] * shape[1] or lines.shape[1] > filled.shape[1]:
        raise ValueError("scales belong to other runs")
    filled[:, : lines.shape[1]] = lines
    return View(numbers, scale.reshape(shape[:2]), filled.reshape(shape), sums_fit(given, fields))


def sums_fit(given: Stored, fields: dict[str, Array]) -> bool:
    """Whether the stored sums of codes are right for the codes."""
    table = given.table
    if table.complete is None:
        return True
    again = table.complete(dict(fields), given.sizes)
    return all(np.array_equal(again[row.name], fields[row.name]) for row in table.fields if row.role == "sum")


def precision(given: Stored) -> float:
    """The relative distance allowed between a stored scale and the computed one."""
    rows = rows_of(given.table)
    kind = FLOATS[rows[0].dtype] if rows else FLOATS["float32"]
    return max(CLOSE, 2.0 ** -(kind.mantissa + 1))


def top_of(given: Stored) -> float:
    rows = rows_of(given.table)
    return INTEGER_TOP if rows and rows[1].dtype == "int8" else FLOAT_TOP


# **Codes**: how a kernel turns quotients into codes.


def fitting(view: View, integers: bool, read: Callable[[F64], F64], scales: F64 | None = None) -> bool:
    """Whether codes are `read` of the quotients, each of which may have been rounded in either direction.

    Args:
        view: the cast.
        integers: whether codes are integers.
        read: turns quotients into codes.
        scales: the divisors of the numbers; the stored ones if None.
    """
    by = (view.scales if scales is None else np.copysign(scales, view.scales))[..., np.newaxis]
    with np.errstate(all="ignore"):
        quotients = np.where(by == 0, 0.0, view.numbers / by)
    if not np.isfinite(quotients).all():
        return False
    if not integers:  # FP8: half of the distance between neighbours, saturated
        near = np.abs(view.codes - quotients.clip(-FLOAT_TOP, FLOAT_TOP))
        return bool((near <= np.maximum(np.abs(quotients) * 2.0**-4, 2.0**-10) * (1 + CLOSE)).all())
    ways = [read(quotients * (1 + by)) for by in (0.0, CLOSE, -CLOSE)]
    return bool(np.any([way == view.codes for way in ways], axis=0).all())


def saturated(numbers: F64) -> F64:
    found: F64 = np.rint(numbers).clip(-128, 127)
    return found


def wrapped(numbers: F64) -> F64:
    return (np.rint(numbers) + 128) % 256 - 128


def clamped(least: float, most: float, numbers: F64) -> F64:
    found: F64 = np.rint(numbers).clip(least, most)
    return found


FIT: tuple[Callable[[F64], F64], ...] = (saturated, partial(clamped, -127, 127), wrapped)


def _half_added(numbers: F64) -> F64:
    found: F64 = np.trunc(numbers + 0.5)
    return found


CODES: tuple[tuple[str, str, Callable[[F64], F64]], ...] = (
    ("truncates", "rounded towards zero", np.trunc),
    ("rounds-down", "rounded down", np.floor),
    ("half-added-to-all", "rounded towards zero after 1/2 was added, to negative ones as well", _half_added),
    ("rounds-up", "rounded up, as if 1/2 was added before rounding", np.ceil),
    ("rounded-away", "rounded away from zero", lambda a: np.copysign(np.ceil(np.abs(a)), a)),
    ("codes-one-higher", "one too high", lambda a: np.rint(a) + 1),
    ("codes-one-lower", "one too low", lambda a: np.rint(a) - 1),
    ("codes-without-sign", "without their sign", lambda a: np.abs(np.rint(a))),
    ("codes-negated", "with the other sign", lambda a: -np.rint(a)),
    ("codes-never-negative", "0 where they are negative", lambda a: np.maximum(np.rint(a), 0)),
    ("codes-doubled", "twice as large", lambda a: np.rint(2 * a)),
    ("codes-halved", "half as large", lambda a: np.rint(a / 2)),
    ("codes-even", "even: rounded to a multiple of 2", lambda a: 2 * np.rint(a / 2)),
    (
        "codes-unsigned",
        "128 too high, as unsigned codes, and wrap around",
        lambda a: (np.rint(a) + 256) % 256 - 128,
    ),
)


def codes_of(views: list[View]) -> Iterator[tuple[str, str]]:
    """The change that explains all 8-bit integer codes for their stored scales, right or not."""
    least, most = (end([pick(view.codes) for view in views]) for end, pick in ((min, np.min), (max, np.max)))
    bounds = ((-128, 127), (-127, 127))
    for name, words, read in CODES:
        ends: tuple[Rule, ...] = (*(partial(np.clip, a_min=low, a_max=high) for low, high in bounds), _in_bytes)
        if any(all(fitting(view, True, partial(then, read, end)) for view in views) for end in ends):
            yield name, f"Codes are {words}."
    if (least > -127 or most < 127) and all(fitting(view, True, partial(clamped, least, most)) for view in views):
        yield f"clamped-at-{most:g}", f"Codes are clamped to {least:g} … {most:g}."


def then(first: Callable[[F64], F64], second: Callable[[F64], F64], numbers: F64) -> F64:
    return second(first(numbers))


def _in_bytes(numbers: F64) -> F64:
    return (numbers + 128) % 256 - 128


# **As defects.**

ROUNDED = "inverse-of-rounded-scale", "Numbers are divided by the stored scale, after it was rounded to its type."
SIGNS = (
    "sign-of-scale",
    "The scale has the right magnitude, but not the sign that the number of largest magnitude gives it.",
)
"""If codes fit scales of the right magnitude."""


def divisor(views: list[View]) -> float | None:
    """The number by which all largest magnitudes are divided; None if there is none."""
    pairs = [(largest(view.numbers), np.abs(view.scales)) for view in views]
    most, scales = (np.concatenate([each[at].reshape(-1) for each in pairs]) for at in (0, 1))
    there = (scales > 0) & (most > 0)
    if not there.any():
        return None
    return float(np.median(most[there] / scales[there]))


def same(found: F64, scales: F64, near: float, kind: str) -> bool:
    """Whether scales are these numbers, rounded to their type."""
    least = FLOATS[kind].least_subnormal if kind in FLOATS else 0.0
    with np.errstate(invalid="ignore"):
        near_enough = np.isfinite(found) & (np.abs(found - np.abs(scales)) <= near * np.abs(found) + least)
        alike = near_enough | (found == np.abs(scales))
    return bool(alike.all())


def explained(
    failures: list[Any], rule: Rule, levels: float, x: Array, format: str, options: Options = ()
) -> Stored | None:
    """The returned result where it was wrong, right results where the rule gives the right scales, and None
    elsewhere."""
    for each in failures:
        if each.arguments[0] is x:
            return each.given  # type: ignore[no-any-return]  # a failure may be of any operation
    right = right_cast(x, format, options, next(iter(failures[0].right.table.encode)))
    view = view_of(x, right)
    rows = rows_of(right.table)
    kind = rows[0].dtype if rows else "float32"
    return right if same(rule(view.numbers) / levels, view.scales, precision(right), kind) else None


def of_scales_of_casts(failures: list[Any], operation: str) -> Iterator[Defect]:
    """The rules that explain all scales if codes fit them; with right scales, the change of codes."""
    if operation != OPERATION or any(not isinstance(each.given, Stored) for each in failures):
        return
    first = failures[0].right
    rows = rows_of(first.table)
    if rows is None or any(each.given.format != first.format for each in failures):
        return
    try:
        views = [view_of(each.arguments[0], each.given) for each in failures]
    except ValueError:
        return
    if not all(view.whole and not np.isnan(view.scales).any() for view in views):
        return
    integers, top, near, kind = rows[1].dtype == "int8", top_of(first), precision(first), rows[0].dtype

    def follow(rule: Rule, levels: float) -> bool:
        try:
            return all(same(rule(view.numbers) / levels, view.scales, near, kind) for view in views)
        except ValueError:
            return False

    def named(name: str, cause: str, rule: Rule, levels: float) -> Defect:
        return arithmetical(f"cast-{name}", cause, "", {operation: partial(explained, failures, rule, levels)})

    fit = any(all(fitting(view, integers, read) for view in views) for read in FIT)
    levels = divisor(views) if fit else None
    for other in () if levels is None else (round(2 * levels) / 2, levels):
        if other > 0 and abs(other - top) > near * top and follow(largest, other):
            cause = f"The scale is the largest magnitude over {other:g} where {top:g} is right."
            yield named(f"{other:g}-levels", cause, largest, other)
            return
    if fit and follow(largest, top):
        own = [np.sign(view_of(each.arguments[0], each.right).scales) for each in failures]
        signs = all((np.sign(view.scales) == right).all() for view, right in zip(views, own, strict=True))
        name, cause = ROUNDED if signs else SIGNS
        yield named(name, cause, largest, top)
        return
    for name, words, rule in rules(top) if fit else ():
        if follow(rule, top):
            cause = f"In place of the largest magnitude of its numbers, a scale comes from {words}."
            yield named(name, cause, rule, top)
    if integers and not fit and follow(largest, top):
        for name, cause in codes_of(views):
            yield named(name, cause, largest, top)
    right = any(all(fitting(view, integers, read, largest(view.numbers) / top) for view in views) for read in FIT)
    for name, words, stored in STORED if right and not fit else ():
        if follow(partial(stored, top), 1.0):
            cause = f"Codes belong to the right scale, but what is stored as the scale is {words}."
            yield named(name, cause, partial(stored, top), 1.0)
