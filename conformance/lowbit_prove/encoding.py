r"""The theorems of encoding: decode(encode(x)) lies within the format's rounding of x.

Let a block have the largest number m and the stored scale d. For every m, every float32 x that may stand beside it, and
all neighbours :math:`G_q < G_{q+1}` of the format's grid with the middle c (`lowbit_prove.grids`),

.. math:: x \ge c\,d + \varepsilon \Rightarrow \hat x \ge d\,G_{q+1}, \qquad
   x \le c\,d - \varepsilon \Rightarrow \hat x \le d\,G_q, \qquad
   \mathrm{least}\cdot d - \varepsilon \le m \le \mathrm{most}\cdot d + \varepsilon ,

where :math:`\hat x = \mathrm{decode}(\mathrm{encode}(x))`. So x goes to the nearest number of the grid, up to ε around
the midpoints, and the scale is the one that the definition derives from m.

**Why few numbers are enough.** Rounded products, quotients, sums and searches are monotonic in their operands. So
:math:`\hat x` does not fall as x grows, and for each c only the first float32 from :math:`c\,d + \varepsilon` on and
the last one up to :math:`c\,d - \varepsilon` matter. The code of x does not move away from 0 as m grows. So among all m
with the same stored scale, only the least and the largest matter. They are found by bisection, for every scale of
float16, bfloat16, E4M3 and E8M0. With scales of float32, runs of m take the place of the m with one scale. They fill
one binade: casts commute with powers of two, as long as nothing is subnormal.

**Ties.** Where d is a power of two and m its multiple, only the code is rounded. Then x = c d goes where the definition
says.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from inspect import getsource
from itertools import product
from sys import modules
from typing import NamedTuple

import numpy as np

from lowbit.arrays import F64, Array
from lowbit.contract.checks import check_choice
from lowbit.errors import ArgumentError
from lowbit.tensor_formats.bits import exact
from lowbit.tensor_formats.stored import FORMATS
from lowbit.tensor_formats.table import Format, Sizes
from lowbit_prove import grids
from lowbit_prove.grids import Grid
from lowbit_prove.theorem import Numbers, Outcome, Proof, Refutation, Theorem, Undecided, whole

AT_ONCE = 2**17
"""The count of numbers that are cast together."""
BINADE = 1.0
"""The start of the runs of m for float32 scales; they end at twice this number."""
WIDTHS = {"nf4": 32, "fp4": 32, "fp8-block": 512, "matmulnbits": 16, "matmulnbits-symmetric": 128}
"""The count of numbers that share a scale, for formats that are not block formats and fix this count."""
POWERS_OF_TWO = np.ldexp(1.0, np.arange(-40, 41))
"""Scales at which ties occur."""


class Encoded(NamedTuple):
    """The result of casting blocks.

    Attributes:
        values: float64, blocks × numbers: decode(encode(x)).
        scales: float64, blocks, as stored.
    """

    values: F64
    scales: F64


@dataclass(frozen=True)
class Cast:
    """One choice of a format's `encode`, as a function of blocks."""

    table: Format
    bits: int | None
    choice: str
    grid: Grid

    @property
    def width(self) -> int | None:
        """The count of numbers of a block; None if any count is allowed."""
        return self.table.block or WIDTHS.get(self.table.name) or (32 if self.table.name.startswith("mx") else None)

    def encoded(self, m: F64, x: F64) -> Encoded:
        """The casts of the numbers x, blocks × numbers, each in a block with the largest number m."""
        begin = self.grid.begin(m) if self.grid.scale else np.empty((len(m), 0))
        count, first = x.shape[1], begin.shape[1]
        each = (self.width or first + max(count, 1)) - first
        parts = max(1, -(-count // each))
        filled = np.pad(x, ((0, 0), (0, parts * each - count))).reshape(len(m) * parts, each)
        values, scales = self._stored(np.concatenate([np.repeat(begin, parts, axis=0), filled], axis=-1))
        return Encoded(values[:, first:].reshape(len(m), -1)[:, :count], scales[::parts])

    def _stored(self, blocks: F64) -> tuple[F64, F64]:
        """The numbers of blocks after a round trip through the bytes of the format, and their scales."""
        if self.table.name == "fp8-tensor" and len(blocks) > 1:
            found = [self._stored(each[None]) for each in blocks]
            return np.concatenate([each for each, _ in found]), np.concatenate([each for _, each in found])
        numbers = laid_out(self.table.name, blocks)
        rows, columns = numbers.shape
        at = self.table.sizes(rows, columns, self._options(blocks.shape[1]))
        fields = self.table.encoded(numbers, at, self.choice)
        tensors = dict(zip((each.name for each in self.table.tensors), self.table.tensors_of(fields, at), strict=True))
        with np.errstate(invalid="ignore"):  # a faulty cast may have an infinite scale
            values = read_back(self.table.name, self.table.terms(tensors, at).values, len(blocks))
        return values, self._scales(fields, len(blocks), at)

    def _options(self, width: int) -> Mapping[str, int]:
        return {name: self.bits or 0 if name == "bits" else width for name in self.table.options}

    def _scales(self, fields: Mapping[str, Array], count: int, at: Sizes) -> F64:
        rows = [each for each in self.table.fields if each.role == "scale" and each.name != "m"]
        if not rows:
            return np.ones(count)
        (row,) = rows
        if fields[row.name].dtype != row.numpy_dtype:
            return np.full(count, np.nan)  # not a scale of the format, so it belongs to no largest number
        scales: F64 = exact(fields[row.name]).reshape(count, -1)[:, 0]
        return scales


def laid_out(name: str, blocks: F64) -> F64:
    """Blocks as a K × N matrix of a format, each block with its own scale."""
    if name.startswith("kivi-keys"):
        return blocks
    if name == "fp8-block":  # 128 rows and 4 columns of a tile of 128 × 128
        return np.ascontiguousarray(blocks.reshape(-1, 4))
    return np.ascontiguousarray(blocks.T)


def read_back(name: str, values: F64, count: int) -> F64:
    """The inverse of `laid_out`."""
    if name.startswith("kivi-keys"):
        return values
    return values.reshape(count, -1) if name == "fp8-block" else np.ascontiguousarray(values.T)


# **Float32 numbers near a number.**


def first_from(numbers: F64, *, beyond: bool = False) -> F64:
    """The smallest float32 that is at least each number, or with `beyond` above it."""
    near = numbers.astype(np.float32)
    short = near <= numbers if beyond else near < numbers
    return np.where(short, np.nextafter(near, np.float32(np.inf)), near).astype(np.float64)


def last_to(numbers: F64, *, beyond: bool = False) -> F64:
    """The largest float32 that is at most each number, or with `beyond` below it."""
    return -first_from(-numbers, beyond=beyond)


# **One number.**


def wrong_at(cast: Cast, m: float, x: float) -> str | None:
    """What is wrong with a number x in a block with largest number m, as a sentence, or None."""
    grid = cast.grid
    values, scales = cast.encoded(np.array([m]), np.array([[x]]))
    given, scale, d = float(values[0, 0]), float(scales[0]), np.abs(scales)
    if not _spanned(cast, np.array([m]), scales)[0]:
        return f"a block whose largest number is {m!r} has the scale {scale!r}"
    told = f"{x!r} beside {m!r} becomes {given!r}, with the scale {scale!r}"
    if m == 0 and given:
        return told
    turned = np.sign(scale) or 1.0
    middles, levels = np.sort(turned * grid.middles), np.sort(scale * grid.levels)
    above = (x >= about(grid, middles, d, upper=True)) & _missed(np.full(1, given), levels[1:], upper=True)
    below = (x <= about(grid, middles, d, upper=False)) & _missed(np.full(1, given), levels[:-1], upper=False)
    if scale and (above | below).any():
        return told
    if scale and grid.ties and _met(cast, np.array([abs(m)]), d)[0]:
        for wanted in scale * grid.chosen[scale * grid.middles == x]:
            if given != wanted:
                return f"{told}; it is a middle, and goes to {float(wanted)!r}"
    return None


def _met(cast: Cast, m: F64, d: F64) -> Array:
    """Whether only the code is rounded, so that midpoints occur: for positive m with the scales d."""
    met: Array = (np.frexp(d)[0] == 0.5) & (m == cast.grid.most * d)
    return met | cast.grid.exact


def _spanned(cast: Cast, m: F64, scales: F64) -> Array:
    """Whether scales are correct for largest numbers m, both with their signs."""
    grid, largest, finite = cast.grid, np.abs(m), np.isfinite(scales)
    d = np.where(finite, np.abs(scales), 0.0)
    if grid.scale is None:
        return np.ones(len(m), bool)
    half = grids.half_spacing(grid.scale, d)
    slack = grid.most * (half + max(grid.of_scale, grid.relative) * d) + grid.floor
    low, high = largest >= grid.least * d - slack, largest <= grid.most * d + slack
    low |= (d <= grid.held) | (m == 0)
    for scale, least, most in grid.serves:
        low = np.where(d == scale, largest >= least * (1 - grid.of_scale), low)
        high = np.where(d == scale, largest <= most, high)
    signs = (m * scales <= 0) if grid.signed else (scales >= 0)
    right: Array = low & high & signs & finite
    return right


# **All numbers.**


def runs(cast: Cast, step: int) -> tuple[F64, F64]:
    """The smallest and the largest m of each run: the m with one scale, or an equal part of a binade.

    Args:
        cast: of one grid.
        step: one run in this many is taken.
    """
    grid = cast.grid
    if grid.scale is None:
        return np.full(1, grid.first), np.full(1, grid.last)
    if grid.scale == "float32":
        parts = int(2 / grid.relative)
        bounds = BINADE + np.arange(0, parts + 1) / parts * BINADE
        low, high = bounds[:-1][::step], last_to(bounds[1:], beyond=True)[::step]
        if grid.held:
            held = _number(_first_with(cast, np.nextafter([grid.held], np.inf)) - 1)
            low, high = np.append(grid.first, low), np.append(held, high)
        return low, high
    values = grid.every_scale
    wanted = np.searchsorted(values, grid.scales[::step])
    targets = np.union1d(wanted, wanted + 1)
    firsts = _first_with(cast, np.append(values, np.inf)[targets])
    low, after = (firsts[np.searchsorted(targets, each)] for each in (wanted, wanted + 1))
    return _number(low[low < after]), _number(after[low < after] - 1)


def _first_with(cast: Cast, scales: F64) -> Array:
    """The bits of the smallest decided m whose scale is at least each of these; one past the last if there is none."""
    first, last = _bits(np.array(cast.grid.first)), _bits(np.array(cast.grid.last))
    with np.errstate(over="ignore", under="ignore"):
        guessed = _bits(np.minimum(scales * cast.grid.least * (1 - 2.0**-8), cast.grid.last))
        beyond = _bits(np.minimum(scales * cast.grid.most * (1 + 2.0**-8), cast.grid.last))
    low, high = (np.clip(each, first, last) for each in (guessed, beyond))
    reached = [np.abs(scales_of(cast, _number(each))) >= scales for each in (low, high)]
    low = np.where(reached[0], first - 1, low)  # the bits `low` give a smaller scale, as do those before `first`
    high = np.where(reached[1], high, last + 1)  # the bits `high` do not, or there are none
    while ((high - low) > 1).any():
        middle = np.clip((low + high) // 2, first, last)
        found = np.abs(scales_of(cast, _number(middle))) >= scales
        closed = high - low <= 1
        high, low = np.where(found & ~closed, middle, high), np.where(found | closed, low, middle)
    return high


def scales_of(cast: Cast, m: F64) -> F64:
    """The scale of blocks with these largest numbers."""
    return cast.encoded(m, np.empty((len(m), 0))).scales


def _bits(numbers: F64) -> Array:
    return numbers.astype(np.float32).view(np.uint32).astype(np.int64)


def _number(bits: Array) -> F64:
    return bits.astype(np.uint32).view(np.float32).astype(np.float64)


def decide(table: Format, bits: int | None, makes: grids.Makes, step: int = 1) -> Outcome:
    """Prove every choice of a format, with every `step`-th run of largest numbers."""
    total = 0
    for choice in table.encode:
        for grid in makes(choice).variants:
            for sign in (1.0, -1.0) if grid.signed else (1.0,):
                cast = Cast(table, bits, choice, grid)
                found = _decided(cast, sign, *runs(cast, step))
                if not isinstance(found, Proof):
                    return found
                total += found.steps
    return Proof(total, "enumeration")


def _decided(cast: Cast, sign: float, low: F64, high: F64) -> Outcome:
    """Decide all runs, whose largest numbers have one sign, and the ties."""
    ends = sign * np.array([cast.grid.first, cast.grid.last])
    if (wrong := _misplaced(cast, ends, scales_of(cast, ends))) is not None:
        return wrong
    steps, count = 0, max(1, AT_ONCE // (4 * len(cast.grid.middles)))
    for first in range(0, len(low), count):
        part = slice(first, first + count)
        found = _few(cast, sign, low[part], high[part])
        if not isinstance(found, Proof):
            return found
        steps += found.steps
    others = _others(cast, sign)
    return Proof(steps + others.steps, "enumeration") if isinstance(others, Proof) else others


def _few(cast: Cast, sign: float, low: F64, high: F64) -> Outcome:
    """Decide some runs: their scales, and the numbers around each midpoint."""
    few = Few(cast, sign, (low, high), (scales_of(cast, sign * low), scales_of(cast, sign * high)))
    for m, scales in zip(few.ends, few.scales, strict=True):
        if (wrong := _misplaced(cast, sign * m, scales)) is not None:
            return wrong
    for upper, outer in product((True, False), (True, False)):
        if (place := few.first_wrong(upper=upper, outer=outer)) is not None:
            run, x = place
            return _confirmed(cast, sign, (float(low[run]), float(high[run])), x)
    return Proof(2 * len(low) * len(cast.grid.middles), "enumeration")


def _misplaced(cast: Cast, m: F64, scales: F64) -> Outcome | None:
    """The refutation of the first largest number with the wrong scale."""
    right = _spanned(cast, m, scales)
    return None if right.all() else _refutation(cast, float(m[~right][0]), float(m[~right][0]))


@dataclass(frozen=True)
class Few:
    """Some runs of largest numbers.

    Attributes:
        cast: of one grid.
        sign: of the largest numbers.
        ends: float64, runs: the smallest and the largest magnitude in each.
        scales: float64, runs: their scales.
    """

    cast: Cast
    sign: float
    ends: tuple[F64, F64]
    scales: tuple[F64, F64]

    def first_wrong(self, *, upper: bool, outer: bool) -> tuple[int, float] | None:
        """The first run with a wrong number, and that number, among those above or below midpoints, positive or not.

        As m grows, a code does not move away from 0, but a midpoint does. So the hardest number above a positive
        midpoint is the first above the midpoint of the smallest m, in a block with the largest m; and so on.
        """
        grid, end = self.cast.grid, int(upper == outer)
        turned = -1.0 if (self.scales[0] < 0).any() else 1.0
        middles, levels = np.sort(turned * grid.middles), np.sort(turned * grid.levels)
        columns = (middles > 0) == outer
        wanted = (levels[1:] if upper else levels[:-1])[columns]
        x = about(grid, middles[columns], np.abs(self.scales[1 - end])[:, None], upper=upper)
        m = np.broadcast_to(self.ends[end][:, None], x.shape)
        possible = (np.abs(x) <= self.ends[1][:, None]) & (x >= grid.lowest) & (self.scales[end] != 0)[:, None]
        beside, largest = possible & (np.abs(x) <= m), possible & (np.abs(x) > m)
        given = self.cast.encoded(self.sign * self.ends[end], np.where(beside, x, 0.0))
        wrong = beside & _missed(given.values, wanted * np.abs(given.scales)[:, None], upper=upper)
        if largest.any():  # these are the largest of their blocks
            alone = self.cast.encoded(self.sign * np.abs(x[largest]), x[largest][:, None])
            goals = np.broadcast_to(wanted, x.shape)[largest] * np.abs(alone.scales)
            wrong[largest] = _missed(alone.values[:, 0], goals, upper=upper)
        if not wrong.any():
            return None
        run, column = np.argwhere(wrong)[0]
        return int(run), float(x[run, column])


def about(grid: Grid, middles: F64, d: F64, *, upper: bool) -> F64:
    """The float32 nearest to midpoints that must be rounded to the next number of the grid, or to the one before."""
    slack = grid.slack(middles, d)
    strict = grid.relative == 0
    return first_from(middles * d + slack, beyond=strict) if upper else last_to(middles * d - slack, beyond=strict)


def _missed(values: F64, goals: F64, *, upper: bool) -> Array:
    return ~(values >= goals if upper else values <= goals)  # this also counts NaN as wrong


def _others(cast: Cast, sign: float) -> Outcome:
    """Decide blocks of zeros, and the midpoints themselves, for scales with which they occur."""
    grid = cast.grid
    if cast.encoded(np.zeros(1), np.zeros((1, 1))).values.any():
        return _refutation(cast, 0.0, 0.0)
    if grid.ties is None:
        return Proof(1, "enumeration")
    m = runs(cast, 1)[1] if grid.exact else grid.most * POWERS_OF_TWO
    m = m[(m >= grid.first) & (m <= grid.last)]
    if not len(m):
        return Proof(1, "enumeration")
    scales = scales_of(cast, sign * m)
    x = scales[:, None] * grid.middles
    met = _met(cast, m, np.abs(scales))[:, None]
    met = met & (np.abs(x) <= m[:, None]) & (x == x.astype(np.float32)) & (x >= grid.lowest)
    given = cast.encoded(sign * m, np.where(met, x, 0.0)).values
    right = ~met | (given == scales[:, None] * grid.chosen)
    if right.all():
        return Proof(1 + int(met.sum()), "enumeration")
    block, column = np.argwhere(~right)[0]
    return _refutation(cast, sign * float(m[block]), float(x[block, column]))


def _confirmed(cast: Cast, sign: float, ends: tuple[float, float], x: float) -> Outcome:
    """The refutation that a run shows, if a cast of one of its numbers confirms it."""
    for m in (*ends, min(max(abs(x), ends[0]), ends[1])):
        scale = scales_of(cast, np.array([sign * m]))
        tried = [
            about(cast.grid, np.sign(scale) * cast.grid.middles, np.abs(scale), upper=each) for each in (True, False)
        ]
        for each in (x, *np.concatenate(tried)):
            if cast.grid.lowest <= each and abs(each) <= m and wrong_at(cast, sign * m, float(each)):
                return _refutation(cast, sign * m, float(each))
    return Undecided(f"{cast.choice}: of the largest numbers from {ends[0]!r} to {ends[1]!r} none is wrong by itself")


def _refutation(cast: Cast, m: float, x: float) -> Outcome:
    reason = wrong_at(cast, m, x)
    if reason is None:
        return Undecided(f"{cast.choice}: {x!r} beside {m!r} is right by itself")
    zero = {} if cast.grid.zero is None else {"zero": cast.grid.zero}
    return Refutation(f"{cast.choice}: {reason}", {"choice": cast.choice, "m": m, "x": x, **zero})


def ran(table: Format, bits: int | None, makes: grids.Makes, numbers: Numbers) -> Refutation | None:
    """Cast the number of a refutation again.

    Raises:
        ArgumentError: a choice that the format does not have, or no numbers.
    """
    choice = check_choice("choice", numbers.get("choice"), list(table.encode))
    m, x = numbers.get("m"), numbers.get("x")
    if not isinstance(m, float) or not isinstance(x, float):
        raise ArgumentError("numbers", sorted(numbers), "the numbers m and x, and the name of a choice")
    variants = makes(choice).variants
    grid = variants[whole(numbers, "zero", len(variants) - 1) if "zero" in numbers else 0]
    found = _refutation(Cast(table, bits, choice, grid), m, x)
    return found if isinstance(found, Refutation) else None


def theorems() -> Iterator[Theorem]:
    """One theorem for each format and width that is decided."""
    for name, bits, makes in grids.grids():
        width = f"-u{bits}" if bits else ""
        statement = "decode(encode(x)) is the nearest number of the grid, up to ε about middles, for all float32 x"
        yield Theorem(
            *("encoding", f"{name}{width}/rounding", statement, partial(subject, name, bits)),
            *(partial(decide, FORMATS[name], bits, makes), partial(ran, FORMATS[name], bits, makes)),
        )


def subject(name: str, bits: int | None) -> str:
    """A format, and the chapters that cast to it."""
    chapters = {getattr(each, "func", each).__module__ for each in FORMATS[name].encode.values()}
    return "\n".join([name, str(bits), *(getsource(modules[each]) for each in sorted(chapters))])
