r"""Grids: the numbers that a block of each format can hold, and what its casts may do to a number, by definition.

A block with the scale d holds :math:`d\,G_0 < d\,G_1 < \dots`, the *grid* of its format. A cast chooses d from the
block's largest number m, and for each number one of the grid. This chapter says for every format with an `encode` what
G is, between which multiples of d the number m lies, and how far from the middle of two neighbours a number may be that
goes to the farther one. The chapter `encoding` proves it.

**How far.** Let c be the middle of two neighbours of G. Then x goes to the nearer of both unless

.. math:: |x - c\,d| < \varepsilon, \qquad \varepsilon = |c|\,(h + \rho\,d) + \alpha\,d + \beta .

- *h* is half the spacing of the scale's type at d: the cast divides by the scale before that is rounded. It is 0 for
  those that divide by the scale that is stored, and for scales of float32, whose spacing is a part of :math:`\rho`.
- :math:`\rho` is the relative error of the quotient. In float32 there are at most four roundings: of d, of its
  inverse, of their product with x, and once more of d where an inverse is stored. So :math:`\rho = 2^{-22}`. A cast
  that computes in 16 bits rounds x and the quotient to them, which is :math:`\rho = 2u + u^2` of that type.
- :math:`\alpha` is the error of a sum of the quotient and a center or zero, or of a table's middles, in steps of G.
- :math:`\beta` is the error of x where x is rounded to a subnormal number of 16 bits.

For scales of float32 the proof takes runs of m together, and :math:`\rho` grows by the length of a run.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from lowbit.arrays import F64
from lowbit.numbers.floats import FLOATS, Name, rounded
from lowbit.tensor_formats.bitsandbytes import FP4_TABLE, NF4_TABLE
from lowbit.tensor_formats.stored import FORMATS

Begin = Callable[[F64], F64]
"""A function from the largest numbers of blocks to the first numbers of the blocks, blocks × numbers."""
FLOAT32 = 2.0**-22
"""The relative error of four roundings in float32."""


def largest_only(m: F64) -> F64:
    """Blocks that begin with their largest number."""
    return m[:, None]


def from_zero(m: F64) -> F64:
    """Blocks whose smallest number is 0."""
    return np.stack([np.zeros_like(m), m], axis=-1)


def around_zero(zero: int, most: int, span: F64) -> F64:
    """Blocks of this span, in which code `zero` of the codes 0 to `most` stands for 0."""
    low = (-span * zero / most).astype(np.float32).astype(np.float64)
    return np.stack([low, (span + low).astype(np.float32).astype(np.float64)], axis=-1)


@dataclass(frozen=True)
class Grid:
    """The specification of a cast, for one choice of a format.

    Attributes:
        levels: G, ascending.
        least, most: the smallest and largest multiple of the scale that the largest number of a block may be, up to ε.
        ties: the rounding of a number that is exactly a midpoint: to the level with even index, to the larger
            magnitude, to the one nearer to 0, to the next of G, or to the one before; None if ties are not
            distinguished.
        scale: the type of the stored scale.
        relative, absolute, floor: ρ, α and β.
        rounded: whether the cast divides by the scale before the scale is rounded, so that h counts.
        exact: whether midpoints occur for every scale, rather than only for powers of two.
        signed: whether the sign of the scale is opposite to that of the largest number; otherwise the scale has no
            sign.
        begin: the first numbers of a block.
        first, last: the smallest and the largest m that are decided.
        serves: scales that are used for other m than their rounding implies, each with the smallest and the largest
            such m.
        every: whether all scales are decided one by one; otherwise one binade represents all other normal scales.
        of_scale: the relative error of the scale before rounding to its type.
        held: the scale of all smaller m, if there is a smallest scale.
        zeros: the number of codes that may stand for 0, if the cast chooses that code; m is then the span of a block.
        zero: the code among these that stands for 0.
    """

    levels: F64
    least: float
    most: float
    ties: str | None
    scale: Name | None = "float16"
    relative: float = FLOAT32
    absolute: float = 0.0
    floor: float = 0.0
    rounded: bool = True
    exact: bool = False
    signed: bool = False
    begin: Begin = largest_only
    first: float = 2.0**-100
    last: float = 2.0**120
    serves: tuple[tuple[float, float, float], ...] = ()
    every: bool = True
    of_scale: float = FLOAT32
    held: float = 0.0
    zeros: int = 0
    zero: int | None = None

    @property
    def variants(self) -> "list[Grid]":
        """The grid, or if a code is chosen for 0, the grid of each such code."""
        if not self.zeros:
            return [self]
        most = self.zeros - 1
        return [
            replace(self, levels=integers(-each, most - each), begin=partial(around_zero, each, most), zero=each)
            for each in range(self.zeros)
        ]

    @property
    def lowest(self) -> float:
        """The smallest number that may occur in a block."""
        return 0.0 if self.begin is from_zero else -np.inf

    @property
    def middles(self) -> F64:
        """c: the midpoints between neighbours of G."""
        return (self.levels[:-1] + self.levels[1:]) / 2

    @property
    def chosen(self) -> F64:
        """The number to which each midpoint is rounded."""
        below, above = self.levels[:-1], self.levels[1:]
        number = np.arange(len(below)) - (int(np.argmin(np.abs(self.levels))) if self.levels[0] < 0 else 0)
        upwards = {
            "up": np.ones(len(below), bool),
            "down": np.zeros(len(below), bool),
            "away": np.abs(above) > np.abs(below),
            "zero": np.abs(above) < np.abs(below),
            "even": number % 2 == 1,
        }[self.ties or "down"]
        return np.where(upwards, above, below)

    @property
    def every_scale(self) -> F64:
        """The positive numbers of the scale's type, ascending."""
        assert self.scale is not None
        values = FLOATS[self.scale].values
        return np.unique(values[np.isfinite(values) & (values > 0)])

    @property
    def scales(self) -> F64:
        """The scales that are decided, if scales have 16 or 8 bits."""
        assert self.scale is not None
        found, least_normal = self.every_scale, 2.0 ** (1 - FLOATS[self.scale].bias)
        return found if self.every else found[(found < least_normal) | (found >= 1) & (found < 2)]

    def slack(self, middles: F64, scales: F64) -> F64:
        """ε for multiples of scales; the scales are not negative."""
        half = half_spacing(self.scale, scales) if self.rounded else 0.0
        found: F64 = np.abs(middles) * (half + self.relative * scales) + self.absolute * scales + self.floor
        return found


def half_spacing(kind: Name | None, scales: F64) -> F64 | float:
    """h: half the distance from a number of a type to the next; 0 for float32 and for no type."""
    if kind in (None, "float32", "float8_e8m0fnu"):
        return 0.0
    assert kind is not None
    _, exponents = np.frexp(scales)
    spacing = np.ldexp(1.0, exponents - 1 - FLOATS[kind].mantissa)
    found: F64 = np.maximum(spacing, FLOATS[kind].least_subnormal) / 2
    return found


def integers(least: int, most: int) -> F64:
    """The integers from `least` to `most` as levels."""
    return np.arange(least, most + 1, dtype=np.float64)


def floats(kind: Name) -> F64:
    """The finite numbers of a type, each once."""
    values = FLOATS[kind].values
    return np.unique(values[np.isfinite(values)])


BYTE = Grid(integers(-127, 127), 127, 127, "even", last=127 * 65504.0)
"""Codes of 8 bits with the scale m/127 in float16."""
WIDE = 2.0**-12
"""The value of ρ for float32 scales: a run of m is half as long."""


def _byte(choice: str) -> str:
    return "away" if "away" in choice else "even"


def _q8(choice: str) -> Grid:
    return replace(BYTE, ties=_byte(choice))


def _q8_1(choice: str) -> Grid:
    """The grid of Q8_1. Beyond its last m, the sum of a block may be too large for float16."""
    return replace(_q8(choice), last=2.0**11, every=False)


def _q8_k(choice: str) -> Grid:
    return replace(BYTE, scale="float32", relative=WIDE, signed=True)


def _symmetric(bits: int, choice: str) -> Grid:
    half = 2 ** (bits - 1)
    return Grid(
        *(integers(-half, half - 1), half, half, "up"), absolute=2.0 ** (bits - 24), signed=True, last=half * 65504.0
    )


def _with_minimum(bits: int, choice: str) -> Grid:
    most = 2**bits - 1
    return Grid(
        *(integers(0, most), most, most, "up"), absolute=2.0 ** (bits - 24), begin=from_zero, last=most * 65504.0
    )


def _ternary(choice: str) -> Grid:
    return Grid(integers(-1, 1), 1, 1, "away", last=65504.0, every=False)


def _int8(scale: Name, choice: str) -> Grid:
    """The grid of int8. A cast that divides by the stored scale has no h."""
    grid = replace(BYTE, ties=_byte(choice), scale=scale, rounded="rounded" not in choice, every=False)
    if scale == "float16":
        return grid
    least = np.full(1, np.float32(1e-10) / np.float32(127) if "at least" in choice else 0.0, np.float64)
    grid = replace(grid, last=2.0**120, held=float(rounded(least, scale)[0]))
    return replace(grid, relative=WIDE) if scale == "float32" else grid


HELD = {"d at least": float(np.float32(1 / (448 * 512))), "m at least": float(np.float32(1e-4) / np.float32(448))}
"""The smallest scales of FP8, by the name of the choice."""


def _fp8(choice: str) -> Grid:
    held = next((each for words, each in HELD.items() if words in choice), 0.0)
    return Grid(floats("float8_e4m3fn"), 448, 448, "even", scale="float32", relative=2.0**-9, held=held)


def _table(levels: F64, choice: str) -> Grid:
    """bitsandbytes: midpoints of the table are rounded to float32; the CUDA code writes those of FP4 with 6 to 8
    digits."""
    written = "by magnitude" in choice
    return Grid(
        *(np.unique(levels.astype(np.float64)), 1, 1, None if written else "down"),
        scale="float32",
        relative=2.0**-15,
        absolute=4e-7 if written else 2.0**-24,
    )


def _kivi(bits: int, scale: Name, choice: str) -> Grid:
    """Computed in float32, or in the 16 bits of the scale; in the latter case the divisor is the stored scale."""
    most = 2**bits - 1
    grid = Grid(integers(0, most), most, most, "even", scale=scale, begin=from_zero)
    grid = replace(grid, last=most * 65504.0) if scale == "float16" else grid
    if choice == "in float32":
        return grid
    found = _in_16_bits(grid, scale)
    return replace(found, last=65504.0) if scale == "float16" else found


def _in_16_bits(grid: Grid, kind: Name) -> Grid:
    u = FLOATS[kind].unit_roundoff
    return replace(grid, relative=2 * u + u * u, floor=FLOATS[kind].least_subnormal, rounded=False)


def _compressed(bits: int, choice: str) -> Grid:
    half, most = 2 ** (bits - 1), (2**bits - 1) / 2
    return _in_16_bits(Grid(integers(-half, half - 1), most, most, "even", scale="bfloat16", every=False), "bfloat16")


def _matmulnbits_symmetric(bits: int, choice: str) -> Grid:
    grid = _symmetric(bits, choice)
    return replace(grid, scale="float32", relative=WIDE, last=2.0**120)


def _matmulnbits(bits: int, choice: str) -> Grid:
    """The scale is the span divided by the largest code, and the code for 0 is rounded."""
    most = 2**bits - 1
    grid = Grid(integers(0, most), most, most, "up", scale="float32", relative=WIDE, absolute=2.0 ** (bits - 24))
    return replace(grid, zeros=most + 1)


def _dense(kind: Name, choice: str) -> Grid:
    top = FLOATS[kind].largest
    return Grid(floats(kind), 1, 1, "even", scale=None, relative=0.0, exact=True, first=top, last=top)


BELOW = 1 - 2.0**-24
"""The float32 after a power of two times this number is the power itself."""
POWERS = Grid(
    *(floats("float4_e2m1fn"), 0, 0, "even"),
    scale="float8_e8m0fnu",
    relative=0.0,
    exact=True,
    of_scale=0.0,
    held=2.0**-127,
    first=2.0**-126,
    last=2.0**127,
)
"""Scales that are powers of two: a quotient is exact."""


def _mx(levels: F64, choice: str) -> Grid:
    """OCP MX, for each of the chapter's rules for the scale X."""
    grid, top = replace(POWERS, levels=levels), float(levels[-1])
    power = 2.0 ** (np.frexp(top)[1] - 1)
    if choice == "scale rounded up":  # uses a quotient in float32, which must be normal
        return replace(grid, least=top / 2, most=top, of_scale=FLOAT32, first=max(grid.first, top * 2.0**-126))
    if choice == "exponent rounded up":
        return replace(grid, least=power / 2 / BELOW, most=power)
    below = 1.0 if choice == "standard" else 1 - 2.0 ** -(int(choice.rpartition(" ")[2]) + 2)
    return replace(grid, least=power * below, most=2 * power * below * BELOW)


def _gguf_mxfp4(choice: str) -> Grid:
    """The float32 logarithm is rounded up to an integer that is at most 2^-18 above it."""
    below = 1 - 2.0**-18 if "log2" in choice else 1.0
    return replace(POWERS, least=4 * below, most=8 * BELOW, ties="zero", first=2.0**-125)


def _gguf_nvfp4(choice: str) -> Grid:
    """ggml rounds to at most 7 subnormal steps, and gives 448 from the midpoint of 240 and 256 on."""
    serves = (7 / 512, 6 * 6.5 / 512, 6 / 64), (448.0, 6 * 248.0, np.inf)
    grid = Grid(floats("float4_e2m1fn"), 6, 6, "zero", scale="float8_e4m3fn", relative=0.0, exact=True)
    return replace(grid, serves=serves)


Makes = Callable[[str], Grid]
FP4_LEVELS, NF4_LEVELS = FP4_TABLE.astype(np.float64), NF4_TABLE.astype(np.float64)
GRIDS: Mapping[str, Makes] = {
    "q8_0": _q8,
    "q8_1": _q8_1,
    "q8_k": _q8_k,
    **{f"q{bits}_0": partial(_symmetric, bits) for bits in (4, 5)},
    **{f"q{bits}_1": partial(_with_minimum, bits) for bits in (4, 5)},
    **dict.fromkeys(("tq1_0", "tq2_0"), _ternary),
    **dict.fromkeys(("int8-token", "int8-group"), partial(_int8, "float32")),
    "int8-token-f16": partial(_int8, "float16"),
    "int8-token-bf16": partial(_int8, "bfloat16"),
    **dict.fromkeys(("fp8-tensor", "fp8-channel", "fp8-block"), _fp8),
    "nf4": partial(_table, NF4_LEVELS),
    "fp4": partial(_table, FP4_LEVELS),
    "float16": partial(_dense, "float16"),
    "bfloat16": partial(_dense, "bfloat16"),
    "mxfp8-e5m2": partial(_mx, floats("float8_e5m2")),
    "mxfp8-e4m3": partial(_mx, floats("float8_e4m3fn")),
    "mxfp6-e3m2": partial(_mx, floats("float6_e3m2fn")),
    "mxfp6-e2m3": partial(_mx, floats("float6_e2m3fn")),
    "mxfp4": partial(_mx, floats("float4_e2m1fn")),
    "mxint8": partial(_mx, integers(-127, 127) / 64),
    "gguf-mxfp4": _gguf_mxfp4,
    "gguf-nvfp4": _gguf_nvfp4,
    "ct-int": partial(_compressed, 8),
}
"""For each format, the function from the name of a choice to its grid. Formats of several widths are in `OF_WIDTHS`."""
OF_WIDTHS: Mapping[str, Callable[[int, str], Grid]] = {
    "ct-pack": _compressed,
    "matmulnbits-symmetric": _matmulnbits_symmetric,
    "matmulnbits": _matmulnbits,
    **{f"kivi-{part}": lambda bits, choice: _kivi(bits, "float16", choice) for part in ("keys", "values")},
    **{f"kivi-{part}-bf16": lambda bits, choice: _kivi(bits, "bfloat16", choice) for part in ("keys", "values")},
}


def grids() -> Iterator[tuple[str, int | None, Makes]]:
    """Every format, width and choice that is decided: a name, bits if the format has several widths, and its grids."""
    for name, makes in GRIDS.items():
        yield name, None, makes
    for name, of_width in OF_WIDTHS.items():
        for bits in FORMATS[name].options["bits"] or ():
            if (name, bits) == ("matmulnbits", 8):  # 256 zeros times 254 middles
                continue
            yield name, bits, partial(of_width, bits)


LEFT_OUT: Mapping[str, str] = {
    "iq4_nl": "its scale is fitted to all numbers of a block by least squares, and not derived from the largest",
    **dict.fromkeys(("nf4-double", "fp4-double"), "absmax is rounded to 8 bits about a mean of all blocks"),
    **dict.fromkeys(("nvfp4", "nvfp4-pack"), "a block's scale is rounded about that of the whole tensor"),
    "ct-pack-asym": "the zero is rounded in bfloat16, and so is what it is added to",
    "float32": "nothing is rounded",
}
"""Formats with an `encode` and without a theorem, and why."""
