"""Checks of `blocks.rms_norm`, `blocks.swiglu` and `blocks.geglu`.

**The norm's lattice** has ε = 3 and rows of two kinds, all of ±1 and three quarters ±3 to one quarter ±5: their mean
squares are 1 and 13, and with ε they are 4 and 16, whose roots are exact. A power of two on all of it changes nothing.
Every square is above 0, so that none can be left out unseen.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from lowbit.arrays import F32
from lowbit.model import layers as blocks
from lowbit.model.bounds import rms_norm_bound
from lowbit.model.layers import LEAST_EPSILON
from lowbit_conformance.isolation.remote import Remote
from lowbit_conformance.suite.bounded import (
    arithmetic,
    assert_bounded,
    assert_by_elements,
    assert_on_lattice,
    limit_of,
    run_bounded,
)
from lowbit_conformance.suite.cases import Case
from lowbit_conformance.suite.compare import assert_equal_values, assert_same_bits, assert_within, refuses
from lowbit_conformance.suite.inputs import NON_FINITE, in_turn
from lowbit_conformance.suite.marking import Generator, Record, Settings, chained, checks, grid


@dataclass(frozen=True)
class RowsCase(Case):
    """A case with T tokens of n channels."""

    tokens: int
    columns: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.tokens, self.columns

    @property
    def label(self) -> str:
        return f"t{self.tokens}-n{self.columns}"


# Around whole registers, and the widths of models; one token and many.
SHAPES = ((1, 1), (3, 2), (2, 7), (1, 8), (4, 9), (2, 16), (5, 17), (3, 31), (1, 33), (2, 100), (70, 24))
WIDE = ((3, 576), (2, 1536), (1, 4096), (1, 11008), (1, 28672))
POWERS = ((2, 1), (3, 2), (2, 4), (5, 8), (4, 16), (70, 32), (3, 64), (2, 256), (3, 1024), (1, 4096), (1, 16384))


def cases(
    tier: str, variants: tuple[str, ...], shapes: tuple[tuple[int, int], ...], *, drawn: bool = False
) -> Generator:
    """Each variant at every shape, then the first variant at a shape from each seed."""

    def generator(clause: str, settings: Settings) -> Iterator[Case]:
        yield from grid(RowsCase, tier, variants, *shapes)(clause, settings)
        for seed in settings.seeds if drawn else ():
            yield RowsCase(clause, "random", "drawn", 1 + seed % 7, 1 + (53 * seed + 17 * len(clause)) % 600, seed=seed)

    return generator


PLAIN = cases("random", ("",), (*SHAPES, *WIDE), drawn=True)
FEW = ((3, 7), (2, 33), (2, 576))

# **The norm.**

Norm = tuple[F32, F32, float]
OCTAVES = {"small": -10, "large": 20}


def integers(case: RowsCase, sizes: tuple[int, ...]) -> F32:
    """Integers of these magnitudes and both signs, each magnitude equally often, in random order."""
    rng = case.generator()
    sized = np.resize(sizes, case.columns) * rng.choice((-1, 1), case.shape)
    return rng.permuted(sized, axis=1).astype(np.float32)


def gain_of(case: RowsCase) -> F32:
    """Gains around 1 and of both signs, as after training."""
    return case.generator().normal(1, 0.5, case.columns).astype(np.float32)


def lattice(case: RowsCase) -> Norm:
    """See the top of this file; the gain is an integer from 1 to 9."""
    x, unit = integers(case, (1,)), 2.0 ** OCTAVES.get(case.variant, 0)
    if case.columns >= 4:
        x[::2] = integers(case, (3, 3, 3, 5))[::2]
    gain = case.generator().integers(1, 10, case.columns).astype(np.float32)
    return x * np.float32(unit), gain, 3 * unit * unit


@checks("blocks.rms_norm/C1", cases("lattice", ("", "small", "large"), POWERS))
def test_norm_on_the_lattice(backend: Remote, case: RowsCase) -> None:
    """Rows whose root is 2 or 4 times a power of two: the results are equal."""
    assert_on_lattice(backend, case, *lattice(case))


@checks("blocks.rms_norm/C2", cases("lattice", ("",), (*SHAPES, *WIDE), drawn=True))
def test_norm_of_an_exact_sum(backend: Remote, case: RowsCase, record_property: Record) -> None:
    """Small integers, any n: in every order of the sum only a few roundings remain."""
    inputs = integers(case, (1, 2, 3)), gain_of(case), 1e-5
    assert_bounded(backend, case, record_property, *inputs, summed_exactly=True)


@checks("blocks.rms_norm/C2", cases("exhaustive", ("every-place",), tuple((n, n) for n in range(1, 71))))
def test_norm_of_every_place(backend: Remote, case: RowsCase, record_property: Record) -> None:
    """At every width up to 70, rows of ±1 with one ±3, at each position once."""
    x = integers(case, (1,))
    x[np.arange(case.columns), np.arange(case.columns)] *= 3
    assert_bounded(backend, case, record_property, x, gain_of(case), 1e-6, summed_exactly=True)


EPSILONS = {"least-epsilon": LEAST_EPSILON, "epsilon-prevails": 1e-2, "epsilon-1": 1.0}
SCALES = {"least-epsilon": 2.0**-64, "epsilon-prevails": 1e-2, "subnormal": 2.0**-140, "huge": 2.0**55}


def random_norm(case: RowsCase) -> Norm:
    """Typical activations; in `outlier` one channel is far above the others, in `sparse` some rows are 0."""
    rng = case.generator()
    x = rng.normal(size=case.shape) * SCALES.get(case.variant, 1.0)
    if case.variant == "outlier":
        x[:, rng.integers(case.columns)] *= 1000
    if case.variant == "sparse":
        x[rng.random(case.shape) < 0.9] = 0
    epsilon = EPSILONS.get(case.variant, (1e-5, 1e-6)[case.columns % 2])
    return x.astype(np.float32), gain_of(case), epsilon


NORMAL = ("outlier", "sparse", "huge", "subnormal", *EPSILONS)


@checks("blocks.rms_norm/C3", chained(PLAIN, grid(RowsCase, "random", NORMAL, *FEW)))
def test_norm_within_the_bound(backend: Remote, case: RowsCase, record_property: Record) -> None:
    """Random rows, with an ε that is negligible, comparable or dominant."""
    assert_bounded(backend, case, record_property, *random_norm(case))


EDGES = ((3, 1), (4, 9), (5, 33), (3, 100))


@checks("blocks.rms_norm/C4", cases("edge", ("zeros", "negative-zeros", "either-zero"), EDGES))
def test_norm_of_zeros(backend: Remote, case: RowsCase) -> None:
    """A row of zeros among others, and all rows zero, with the least ε and a usual one."""
    x, gain, epsilon = random_norm(case)
    zeros = {"zeros": (0.0,), "negative-zeros": (-0.0,)}.get(case.variant, (0.0, -0.0))
    x[1] = np.resize(zeros, case.columns)
    for least in (epsilon, LEAST_EPSILON):
        assert_equal_values(run_bounded(backend, case, case.shape, x, gain, least)[1], np.zeros(case.columns))
    assert_equal_values(run_bounded(backend, case, case.shape, 0 * x, gain, epsilon), np.zeros(case.shape))


MANY = ((2, 1), (4, 7), (5, 33), (3, 100), (70, 24), (2, 1536))


@checks("blocks.rms_norm/C5", cases("random", ("",), MANY))
def test_norm_goes_by_rows(backend: Remote, case: RowsCase) -> None:
    """The same call gives the same bits, and the first and last rows do not depend on others."""
    x, gain, epsilon = random_norm(case)
    first = run_bounded(backend, case, case.shape, x, gain, epsilon)
    assert_same_bits(first, run_bounded(backend, case, case.shape, x, gain, epsilon), "the same call again")
    for row in (0, case.tokens - 1):
        others = x * np.float32(3) + 1
        others[row] = x[row]
        again = run_bounded(backend, case, case.shape, others, gain, epsilon)
        assert_same_bits(first[row], again[row], f"row {row} changed when others did")


@checks("blocks.rms_norm/C6", cases("edge", tuple(NON_FINITE), EDGES[1:]))
def test_norm_passes_non_finite_on(backend: Remote, case: RowsCase) -> None:
    """A non-finite number at each position of row 1 in turn, and at a position of the gain."""
    x, gain, epsilon = random_norm(case)
    clean = run_bounded(backend, case, case.shape, x, gain, epsilon)
    for place in (0, case.columns // 2, case.columns - 1):
        spoilt = x.copy()
        spoilt[1, place] = NON_FINITE[case.variant]
        given = run_bounded(backend, case, case.shape, spoilt, gain, epsilon)
        kept = np.delete(given, 1, axis=0), np.delete(clean, 1, axis=0)
        assert_same_bits(*kept, "rows other than the non-finite one")
        assert not np.isfinite(given[1, place]), "WRONG: a non-finite number became finite at its place"
        beside = np.delete(given[1], place)
        hidden = np.isfinite(beside) & ((beside != 0) | (case.variant == "nan"))
        assert not hidden.any(), "WRONG: a non-finite row has finite elements, which are not those of a limit"
        raised = gain.copy()
        raised[place] = NON_FINITE[case.variant]
        given = run_bounded(backend, case, case.shape, x, raised, epsilon)
        assert not np.isfinite(given[:, place]).any(), "WRONG: a non-finite gain left a finite column"
        assert_same_bits(np.delete(given, place, axis=1), np.delete(clean, place, axis=1), "columns beside that gain")


LARGE: dict[str, Callable[[F32], F32]] = {
    "all-large": lambda row: row + np.copysign(np.float32(1e20), row),
    "one-large": lambda row: np.where(np.arange(len(row)) == len(row) // 2, np.float32(1e25), row),
    "largest": lambda row: np.copysign(np.float32(3.4e38), row),
    "sum-alone": lambda row: np.copysign(np.float32(1.5e19), row),
}


@checks("blocks.rms_norm/C7", cases("edge", tuple(LARGE), ((3, 2), *EDGES[1:], (2, 576))))
def test_norm_hides_no_overflow(backend: Remote, case: RowsCase) -> None:
    """Row 1 overflows in float32: its result is right or has no finite element; the other rows are right."""
    x, gain, epsilon = random_norm(case)
    x[1] = LARGE[case.variant](x[1])
    declared, given = arithmetic(backend, case), run_bounded(backend, case, case.shape, x, gain, epsilon)
    exact = blocks.rms_norm_of(x, gain, epsilon)
    if not np.isfinite(given[1]).any():
        given = np.vstack([given[:1], exact[1:2].astype(np.float32), given[2:]])
    assert_within(given, exact, limit_of(lambda: rms_norm_bound(x, gain, epsilon, declared, exact)))


# **The activation.**


def gated_lattice(case: RowsCase) -> tuple[F32, F32]:
    """Gates from 40 to 2000, from −760 to −2000, and a few of 0; integers from 1 to 9 of both signs as up."""
    rng = case.generator()
    sizes = np.where(
        rng.random(case.shape) < 0.6, rng.integers(40, 2001, case.shape), -rng.integers(760, 2001, case.shape)
    )
    gate = np.where(rng.random(case.shape) < 0.1, 0, sizes)
    up = rng.integers(1, 10, case.shape) * rng.choice((-1, 1), case.shape)
    return gate.astype(np.float32), up.astype(np.float32)


@checks(("blocks.geglu/C1", "blocks.swiglu/C1"), cases("lattice", ("",), (*SHAPES, *WIDE), drawn=True))
def test_gated_on_the_lattice(backend: Remote, case: RowsCase) -> None:
    """If the activation is the identity or zero, the result is equal."""
    assert_on_lattice(backend, case, *gated_lattice(case))


def random_gates(case: RowsCase) -> tuple[F32, F32]:
    """Nearly linear, curved and saturated gates; in `deep` down to where e^-a overflows."""
    rng = case.generator()
    gate, up = rng.normal(size=(2, *case.shape))
    if case.variant == "deep":
        gate = -rng.uniform(5, 87, case.shape)
    return (gate * {"small": 0.01, "huge": 30.0}.get(case.variant, 2.0)).astype(np.float32), up.astype(np.float32)


gates = chained(PLAIN, grid(RowsCase, "random", ("small", "huge", "deep"), *FEW))


@checks(("blocks.geglu/C2", "blocks.swiglu/C2"), gates)
def test_gated_within_the_bound(backend: Remote, case: RowsCase, record_property: Record) -> None:
    """Random gates stay within the bound."""
    assert_bounded(backend, case, record_property, *random_gates(case))


@checks(("blocks.geglu/C2", "blocks.swiglu/C2"), cases("exhaustive", ("every-bfloat16",), ((510, 128),)))
def test_gated_of_every_gate(backend: Remote, case: RowsCase, record_property: Record) -> None:
    """Every finite bfloat16 number as gate: a row for each sign and exponent, a column for each mantissa."""
    numbers = np.arange(2**16, dtype=np.uint32) << 16
    finite = numbers.view(np.float32)[np.isfinite(numbers.view(np.float32))]
    up = case.generator().choice((-1, 1), case.shape) * case.generator().uniform(0.5, 1, case.shape)
    assert_bounded(backend, case, record_property, finite.reshape(case.shape), up.astype(np.float32))


EXTREMES: dict[str, tuple[float, ...]] = {
    "overflow-of-e": (-80, -87.3, -87.4, -88.7, -88.8, -89, -103, -104, -110, -745, -746),
    "below": (-1e3, -1e9, -1e20, -1e30, -1e37, -3.4e38),
    "above": (16.6, 17, 88.7, 88.8, 89, 104, 1e3, 1e9, 1e30, 3.4e38),
    "about-0": (0.0, -0.0, 2.0**-149, -(2.0**-149), 2.0**-126, -(2.0**-126), 1e-20, -1e-20, 2.0**-24),
}
UPS = (0.0, -0.0, 1, -3, 2.0**-149, 2.0**-126, 1e-20, 1e9, -1e30, 3.4e38)


@checks(("blocks.geglu/C3", "blocks.swiglu/C3"), cases("edge", tuple(EXTREMES), ((1, 1), (1, 8), (1, 13), (7, 9))))
def test_gated_of_extremes(backend: Remote, case: RowsCase, record_property: Record) -> None:
    """Gates whose exponentials overflow, vanish or are 1, with up of all magnitudes for which the product is finite."""
    pairs = [(a, b) for a in EXTREMES[case.variant] for b in UPS if abs(a * b) < 3e38]
    for gate, up in in_turn(case.shape, pairs):
        assert_bounded(backend, case, record_property, gate, up)


@checks(("blocks.geglu/C4", "blocks.swiglu/C4"), cases("random", ("",), MANY))
def test_gated_goes_by_elements(backend: Remote, case: RowsCase) -> None:
    """The same call gives the same bits, and no element depends on another's gate or up."""
    assert_by_elements(backend, case, random_gates(case))


@checks(("blocks.geglu/C5", "blocks.swiglu/C5"), cases("edge", tuple(NON_FINITE), EDGES))
def test_gated_passes_non_finite_on(backend: Remote, case: RowsCase) -> None:
    """A non-finite number at the first, a middle and the last place of the gate and of up."""
    inputs = random_gates(case)
    clean = run_bounded(backend, case, case.shape, *inputs)
    for place in (0, clean.size // 2, clean.size - 1):
        for number in (0, 1):
            spoilt = [part.copy() for part in inputs]
            spoilt[number].reshape(-1)[place] = NON_FINITE[case.variant]
            given = run_bounded(backend, case, case.shape, *spoilt)
            assert not np.isfinite(given.reshape(-1)[place]), "WRONG: a non-finite number became finite"
            beside = np.delete(given, place), np.delete(clean, place)
            assert_same_bits(*beside, "elements beside the non-finite one")


# **Mistakes** that do not follow from the range of ε.

MISTAKES = {"epsilon-subnormal": 2.0**-127, "epsilon-none": None}


@checks("blocks.rms_norm/H8", grid(RowsCase, "edge", MISTAKES, (3, 19)))
def test_norm_refuses(backend: Remote, case: RowsCase) -> None:
    """An ε just below its range, or a missing ε, raises ArgumentError."""
    x, gain, _ = random_norm(case)
    with refuses():
        backend.run("blocks.rms_norm", x, gain, MISTAKES[case.variant])
