"""Checks of `blocks.clamped_swiglu` and `blocks.soft_cap`, whose results depend on a number beside the arrays.

**The lattice of the clamped unit** has gates from 24 upwards, where the sigmoid is 1, and from −450 downwards, where it
is 0, on both sides of the limit and on it. A gate that is clamped from below would not be 0.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from lowbit.arrays import F32
from lowbit_conformance.isolation.remote import Remote
from lowbit_conformance.suite.bounded import assert_bounded, assert_by_elements, assert_on_lattice, run_bounded
from lowbit_conformance.suite.cases import Case
from lowbit_conformance.suite.clauses.test_blocks import EDGES, EXTREMES, MANY, SHAPES, UPS, WIDE, RowsCase
from lowbit_conformance.suite.compare import assert_equal_values, assert_same_bits
from lowbit_conformance.suite.inputs import NON_FINITE, in_turn
from lowbit_conformance.suite.marking import Generator, Record, Settings, chained, checks


@dataclass(frozen=True)
class LimitedCase(RowsCase):
    """A case with T rows of n numbers and a limit, or a cap."""

    limit: float = 32.0

    @property
    def label(self) -> str:
        return f"{super().label}-{self.limit:g}"


MOST = 2.0**32
LIMITS = (7.0, 0.3, 1.0, 6.98, 20.0)
"""The limit of GPT-OSS, and some that float32 cannot represent."""
ENDS = (1 / MOST, MOST)


def limited(
    tier: str, variants: Iterable[str], shapes: Iterable[tuple[int, int]], limits: tuple[float, ...] = LIMITS
) -> Generator:
    """Each variant at every shape with alternating limits; in the random tier also a shape from each seed."""

    def generator(clause: str, settings: Settings) -> Iterator[Case]:
        pairs = [(variant, shape) for variant in variants for shape in shapes]
        for turn, (variant, shape) in enumerate(pairs):
            yield LimitedCase(clause, tier, variant, *shape, limits[turn % len(limits)])
        for seed in settings.seeds if tier == "random" else ():
            limit = limits[seed % len(limits)]
            yield LimitedCase(clause, tier, "drawn", 1 + seed % 7, 1 + 59 * seed % 600, limit, seed=seed)

    return generator


def every(*variants: str, shapes: tuple[tuple[int, int], ...], limits: tuple[float, ...]) -> Generator:
    """Each variant at each shape with each limit."""

    def generator(clause: str, settings: Settings) -> Iterator[Case]:
        for limit in limits:
            yield from limited("edge", variants, shapes, (limit,))(clause, settings)

    return generator


# **The clamped unit.**


def clamped_lattice(case: LimitedCase) -> tuple[F32, F32, float]:
    """Integers around the limit, a few far from it, and a few zeros; ups on both sides of both limits and of −1."""
    rng, limit = case.generator(), case.limit
    above = np.maximum(24, limit + rng.integers(-9, 10, case.shape))
    gate = np.where(rng.random(case.shape) < 0.7, above, -rng.integers(450, 2001, case.shape))
    gate = np.where(rng.random(case.shape) < 0.1, 0, gate)
    about = rng.choice((-1, 1), case.shape) * (limit + rng.integers(-2, 3, case.shape))
    up = np.where(rng.random(case.shape) < 0.5, about, rng.integers(-9, 10, case.shape))
    return gate.astype(np.float32), up.astype(np.float32), limit


@checks("blocks.clamped_swiglu/C1", limited("lattice", ("",), (*SHAPES, *WIDE), (32.0, 24.0, 100.0)))
def test_clamped_on_the_lattice(backend: Remote, case: LimitedCase) -> None:
    """If the sigmoid is 1 or 0, the result is equal."""
    assert_on_lattice(backend, case, *clamped_lattice(case))


def random_clamped(case: LimitedCase) -> tuple[F32, F32, float]:
    """Gates and ups of the size of the limit, a few equal to it; in `deep` gates down to where e^-αa overflows."""
    rng = case.generator()
    gate, up = rng.normal(size=(2, *case.shape)) * {"small": 0.01, "huge": 30.0}.get(case.variant, 4.0)
    if case.variant == "deep":
        gate = -rng.uniform(3, 60, case.shape)
    if case.variant == "about-minus-1":
        up = -1 + rng.normal(size=case.shape) * 2.0 ** -rng.integers(1, 24, case.shape)
    if case.variant == "on-the-limit":
        gate, up = (rng.choice((-case.limit, case.limit), case.shape) for _ in range(2))
    return gate.astype(np.float32), up.astype(np.float32), case.limit


FEW = ((3, 7), (2, 33), (2, 576))
VARIANTS = ("small", "huge", "deep", "about-minus-1", "on-the-limit")


@checks(
    "blocks.clamped_swiglu/C2",
    chained(limited("random", ("",), (*SHAPES, *WIDE)), every(*VARIANTS, shapes=FEW, limits=LIMITS)),
)
def test_clamped_within_the_bound(backend: Remote, case: LimitedCase, record_property: Record) -> None:
    """Random gates and ups stay within the bound."""
    assert_bounded(backend, case, record_property, *random_clamped(case))


FINITE = (510, 128)
"""A row for each sign and exponent of bfloat16, and a column for each mantissa."""


def every_number() -> F32:
    """Every finite bfloat16 number."""
    numbers = (np.arange(2**16, dtype=np.uint32) << 16).view(np.float32)
    return numbers[np.isfinite(numbers)].reshape(FINITE)


@checks("blocks.clamped_swiglu/C2", limited("exhaustive", ("every-gate", "every-up"), (FINITE,)))
def test_clamped_of_every_number(backend: Remote, case: LimitedCase, record_property: Record) -> None:
    """Every bfloat16 number as gate with typical ups, and as up with typical gates."""
    other = case.generator().normal(size=case.shape).astype(np.float32)
    gate, up = (every_number(), other) if case.variant == "every-gate" else (other, every_number())
    assert_bounded(backend, case, record_property, gate, up, case.limit)


@checks(
    "blocks.clamped_swiglu/C3", every(*EXTREMES, shapes=((1, 1), (1, 8), (1, 13), (7, 9)), limits=(7.0, 1e5, *ENDS))
)
def test_clamped_of_extremes(backend: Remote, case: LimitedCase, record_property: Record) -> None:
    """Gates whose exponentials overflow, vanish or are 1, with up of all magnitudes."""
    for gate, up in in_turn(case.shape, [(a, b) for a in EXTREMES[case.variant] for b in UPS]):
        assert_bounded(backend, case, record_property, gate, up, case.limit)


@checks("blocks.clamped_swiglu/C4", limited("random", ("",), MANY))
def test_clamped_goes_by_elements(backend: Remote, case: LimitedCase) -> None:
    """The same call gives the same bits, and no element depends on another's gate or up."""
    gate, up, limit = random_clamped(case)
    assert_by_elements(backend, case, (gate, up), limit)


@checks("blocks.clamped_swiglu/C5", every(*NON_FINITE, shapes=EDGES, limits=LIMITS[:2]))
def test_clamped_non_finite(backend: Remote, case: LimitedCase) -> None:
    """A non-finite number at the first, a middle and the last place of gate and up; infinities act like the limit."""
    gate, up, limit = random_clamped(case)
    clean, number = run_bounded(backend, case, case.shape, gate, up, limit), NON_FINITE[case.variant]
    for place in (0, clean.size // 2, clean.size - 1):
        for part in (gate, up):
            before = part.reshape(-1)[place]
            part.reshape(-1)[place] = number
            given = run_bounded(backend, case, case.shape, gate, up, limit)
            found, beside = given.reshape(-1)[place], (np.delete(given, place), np.delete(clean, place))
            assert_same_bits(*beside, "elements beside the non-finite one")
            if np.isnan(number):
                assert np.isnan(found), f"WRONG: a NaN became {found}"
            elif number < 0 and part is gate:
                assert found == 0 or np.isnan(found), f"WRONG: a gate of −∞ became {found}"
            else:
                part.reshape(-1)[place] = np.copysign(np.float32(3e38), number)
                limited_to = run_bounded(backend, case, case.shape, gate, up, limit)
                assert_equal_values(given, limited_to.astype(np.float64))
            part.reshape(-1)[place] = before


# **The soft cap.**

CAPS = (30.0, 50.0, 0.7, 15.0, 1.0)


def saturated(case: LimitedCase) -> F32:
    """Numbers of at least 20 times the cap, and a few zeros of both signs."""
    rng = case.generator()
    x = rng.choice((-1, 1), case.shape) * rng.uniform(20, 10 ** rng.uniform(1.4, 9, case.shape)) * case.limit
    x = np.where(np.abs(x) < 20 * case.limit, 20 * case.limit, x)
    return np.where(rng.random(case.shape) < 0.2, rng.choice((-0.0, 0.0), case.shape), x).astype(np.float32)


@checks("blocks.soft_cap/C1", limited("lattice", ("",), (*SHAPES, *WIDE), (30.0, 50.0, 2.0, 2.0**-20, 2.0**20)))
def test_the_cap_itself(backend: Remote, case: LimitedCase) -> None:
    """Numbers far beyond the cap become the cap, and zeros stay zero."""
    x = saturated(case)
    given = run_bounded(backend, case, case.shape, x, case.limit)
    assert_equal_values(given, np.sign(x.astype(np.float64)) * case.limit)


def random_numbers(case: LimitedCase) -> F32:
    """Numbers far below the cap, near it and beyond it; in `octaves` down to 2^-30 times the cap."""
    rng, sizes = case.generator(), {"small": 1e-3, "beyond": 5.0}
    x = rng.normal(size=case.shape) * case.limit * sizes.get(case.variant, 1.0)
    if case.variant == "octaves":
        x *= 2.0 ** -rng.integers(0, 31, case.shape)
    return x.astype(np.float32)


NUMBERS = ("small", "beyond", "octaves")


@checks(
    "blocks.soft_cap/C2",
    chained(limited("random", ("",), (*SHAPES, *WIDE), CAPS), every(*NUMBERS, shapes=FEW, limits=(*CAPS, *ENDS))),
)
def test_capped_within_the_bound(backend: Remote, case: LimitedCase, record_property: Record) -> None:
    """Random numbers stay within the bound, which is relative to each number."""
    assert_bounded(backend, case, record_property, random_numbers(case), case.limit)


@checks("blocks.soft_cap/C2", limited("exhaustive", ("every-bfloat16",) * 3, (FINITE,), (30.0, 1.0, 2.0**-7)))
def test_capped_of_every_number(backend: Remote, case: LimitedCase, record_property: Record) -> None:
    """Every finite bfloat16 number."""
    assert_bounded(backend, case, record_property, every_number(), case.limit)


@checks("blocks.soft_cap/C3", every(*EXTREMES, shapes=((1, 1), (1, 8), (1, 13), (7, 9)), limits=(30.0, *ENDS)))
def test_capped_of_extremes(backend: Remote, case: LimitedCase, record_property: Record) -> None:
    """Numbers for which the quotient by the cap, or its exponential, overflows or vanishes."""
    for (x,) in in_turn(case.shape, [(number,) for number in EXTREMES[case.variant]]):
        assert_bounded(backend, case, record_property, x, case.limit)


@checks("blocks.soft_cap/C4", limited("random", ("",), MANY, CAPS))
def test_capped_goes_by_elements(backend: Remote, case: LimitedCase) -> None:
    """The same call gives the same bits, and no element depends on another."""
    assert_by_elements(backend, case, (random_numbers(case),), case.limit)


@checks("blocks.soft_cap/C5", every(*NON_FINITE, shapes=EDGES, limits=(30.0, 2.0)))
def test_capped_non_finite(backend: Remote, case: LimitedCase) -> None:
    """A non-finite number at the first, a middle and the last place."""
    x, number = random_numbers(case), NON_FINITE[case.variant]
    clean = run_bounded(backend, case, case.shape, x, case.limit)
    for place in (0, clean.size // 2, clean.size - 1):
        spoilt = x.copy()
        spoilt.reshape(-1)[place] = number
        given = run_bounded(backend, case, case.shape, spoilt, case.limit)
        found = given.reshape(-1)[place]
        right = np.isnan(found) if np.isnan(number) else found == np.copysign(case.limit, number)
        assert right, f"WRONG: {number} became {found}"
        assert_same_bits(np.delete(given, place), np.delete(clean, place), "elements beside the non-finite one")
