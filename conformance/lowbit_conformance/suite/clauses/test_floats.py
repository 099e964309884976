"""Checks of `floats.decode` and `floats.round`, both exact: every pattern and every place to round at, of each type."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from lowbit.arrays import F64
from lowbit.numbers import floats
from lowbit.numbers.floats import DIRECTIONS, FLOATS, NAMES, OVERFLOWS, Direction, Name, Overflow
from lowbit_conformance.isolation.remote import Remote
from lowbit_conformance.suite.bounded import assert_reference
from lowbit_conformance.suite.cases import Case
from lowbit_conformance.suite.compare import assert_exact
from lowbit_conformance.suite.marking import Settings, checks


@dataclass(frozen=True)
class FloatCase(Case):
    """A case of one type.

    Attributes:
        type: its name.
        overflow, direction: of the rounding.
    """

    type: Name
    overflow: Overflow = "saturate"
    direction: Direction = "nearest"

    @property
    def label(self) -> str:
        return "-".join((self.type, self.overflow, self.direction) if "round" in self.clause else (self.type,))


def types(clause: str, settings: Settings) -> Iterator[FloatCase]:
    """Each type, those with few patterns first."""
    for name in sorted(NAMES, key=lambda each: FLOATS[each].bits):
        yield FloatCase(clause, tier(name), "", name)


def tier(name: str) -> str:
    """The tier of a type: types with few patterns are quick."""
    return "lattice" if FLOATS[name].bits <= 8 else "exhaustive"


def patterns_of(case: FloatCase) -> Any:
    """Every pattern of a type of at most 16 bits; of float32, patterns around every exponent."""
    kind = FLOATS[case.type]
    if kind.bits <= 16:
        return np.arange(2**kind.bits).astype(kind.pattern_dtype)
    near = np.arange(512, dtype=np.int64)[:, None] * 2**23 + np.arange(-40, 40)
    return np.unique(near % 2**32).astype(np.uint32)


@checks("floats.decode/C1", types)
def test_every_finite_pattern(backend: Remote, case: FloatCase) -> None:
    """Every pattern of a finite number is decoded to that number."""
    patterns, kind = patterns_of(case), FLOATS[case.type]
    magnitudes = patterns & (2 ** (kind.exponent + kind.mantissa) - 1)
    assert_reference(backend, case, "numbers", np.ascontiguousarray(patterns[magnitudes <= kind.top]), case.type)


LENGTHS = range(1, 71)
"""Lengths of arrays: every remainder of a kernel's registers."""
EVERY_LENGTH = "every-length"


def lengths(clause: str, settings: Settings) -> Iterator[FloatCase]:
    """Each type once; for roundings also each direction."""
    for turn, name in enumerate(NAMES):
        for direction in DIRECTIONS if clause.startswith("floats.round/") else DIRECTIONS[:1]:
            overflow = OVERFLOWS[0 if FLOATS[name].specials == "none" else turn % 2]
            yield FloatCase(clause, "exhaustive", EVERY_LENGTH, name, overflow, direction)


def finite_patterns(case: FloatCase) -> Any:
    """Random patterns of finite, nonzero numbers."""
    patterns = patterns_of(case)
    numbers = floats.decode(patterns, case.type)
    return case.generator().permutation(patterns[np.isfinite(numbers) & (numbers != 0)])


@checks("floats.decode/C1", lengths)
def test_patterns_of_every_length(backend: Remote, case: FloatCase) -> None:
    """An array of any length is decoded to its end."""
    patterns = np.resize(finite_patterns(case), LENGTHS[-1] + len(LENGTHS))
    for length in LENGTHS:  # each from another start, so that the last patterns differ
        part = np.ascontiguousarray(patterns[length : 2 * length])
        assert_reference(backend, case, f"{length} numbers", part, case.type)


@checks("floats.decode/C2", types)
def test_every_special_pattern(backend: Remote, case: FloatCase) -> None:
    """Patterns of infinities and NaN are decoded to these, and no other patterns are."""
    patterns = patterns_of(case)
    given = backend.run("floats.decode", patterns, case.type)
    expected = floats.decode(patterns, case.type)
    assert_exact("which are NaN", np.isnan(given), np.isnan(expected))
    assert_exact("infinities", np.where(np.isinf(given), given, 0), np.where(np.isinf(expected), expected, 0))


def roundings(clause: str, settings: Settings) -> Iterator[FloatCase]:
    """Each type with each choice; an `overflow` only if the type has a pattern for it."""
    for name in NAMES:
        for direction in DIRECTIONS:
            for overflow in OVERFLOWS[: 1 if FLOATS[name].specials == "none" else 2]:
                yield FloatCase(clause, tier(name), "", name, overflow, direction)


def places(case: FloatCase) -> F64:
    """Every number of a type, the midpoints of neighbours, and the float64 numbers on both sides of these."""
    kind = FLOATS[case.type]
    values = floats.decode(patterns_of(case), case.type)
    values = np.unique(values[np.isfinite(values)])
    middles = (values[1:] + values[:-1]) / 2
    below, above = np.nextafter(middles, -np.inf), np.nextafter(middles, np.inf)
    found = np.concatenate([values, middles, below, above])
    return found if kind.signed else found[found >= 0]


@checks("floats.round/C1", roundings)
def test_every_place_to_round_at(backend: Remote, case: FloatCase) -> None:
    """Numbers of the type, midpoints and their float64 neighbours are rounded in the given direction."""
    assert_rounded(backend, case, places(case))


def assert_rounded(backend: Remote, case: FloatCase, numbers: F64) -> None:
    __tracebackhide__ = True
    assert_reference(backend, case, "patterns", numbers, case.type, case.overflow, case.direction)


@checks("floats.round/C1", lengths)
def test_numbers_of_every_length(backend: Remote, case: FloatCase) -> None:
    """An array of any length is rounded to its end."""
    values = floats.decode(finite_patterns(case), case.type)
    numbers = np.resize(values, LENGTHS[-1] + len(LENGTHS))
    for length in LENGTHS:
        assert_rounded(backend, case, np.ascontiguousarray(numbers[length : 2 * length]))


@checks("floats.round/C2", roundings)
def test_numbers_beyond_the_largest(backend: Remote, case: FloatCase) -> None:
    """Numbers from the largest to infinity are rounded as `overflow` says."""
    kind = FLOATS[case.type]
    step = kind.largest * kind.unit_roundoff
    numbers = np.array([kind.largest, kind.largest + step / 4, 2 * kind.largest, 1e300, np.inf])
    near = kind.largest + step * np.array([0.49, 0.5, 0.51, 1.0, 1.5])
    numbers = np.concatenate([numbers, near])
    if kind.signed:
        numbers = np.concatenate([numbers, -numbers])
    assert_rounded(backend, case, numbers)


@checks("floats.round/C3", roundings)
def test_zeros_and_nan(backend: Remote, case: FloatCase) -> None:
    """Both zeros, the least float64 numbers, and NaN if the type has one, are rounded correctly."""
    kind = FLOATS[case.type]
    numbers = np.array([0.0, 5e-324, 1e-310])
    if kind.signed:
        numbers = np.concatenate([numbers, -numbers])
    if kind.specials != "none":
        numbers = np.append(numbers, [np.nan, -np.nan])
    assert_rounded(backend, case, numbers)
