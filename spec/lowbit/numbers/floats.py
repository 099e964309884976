r"""Floats of 4 to 32 bits: what a bit pattern means, and how a number is rounded to one.

Kernels read weights, scales and activations in small floating-point types. Hardware manuals, libraries and standards
agree on most of their values and differ on the rest: what happens above the largest number, whether there is an
infinity, which patterns are NaN. This chapter decides each of these questions, so that the chapters on formats and
casts need not.

**The value of a pattern.** A type has :math:`E` exponent bits, :math:`M` mantissa bits and a bias :math:`\beta`. A
pattern with sign :math:`s`, exponent field :math:`e` and mantissa field :math:`m` is

.. math:: (-1)^s\, 2^{\,e - \beta}\,\Bigl(1 + \frac{m}{2^M}\Bigr) \quad (e > 0), \qquad
   (-1)^s\, 2^{\,1 - \beta}\,\frac{m}{2^M} \quad (e = 0),

unless it is one of the special patterns of its type:

================== === === ====== ============== ============================== ==================================
type               E   M   bias   largest        infinity                       NaN
================== === === ====== ============== ============================== ==================================
float32            8   23  127    about 3.4e38   ``e`` all ones, ``m`` 0        ``e`` all ones, ``m`` not 0
float16            5   10  15     65504          as float32                     as float32
bfloat16           8   7   127    about 3.39e38  as float32                     as float32
float8_e5m2        5   2   15     57344          as float32                     as float32
float8_e4m3fn      4   3   7      448            none                           all bits but the sign are ones
float6_e3m2fn      3   2   3      28             none                           none
float6_e2m3fn      2   3   1      7.5            none                           none
float4_e2m1fn      2   1   1      6              none                           none
float8_e8m0fnu     8   0   127    2^127          none                           all ones (255)
================== === === ====== ============== ============================== ==================================

The last has no sign and no zero: pattern :math:`c` is :math:`2^{c - 127}`. It is used only as a scale.

**Rounding.** A real number goes to the nearest value of the type. Ties go to the even value: the one that is an even
multiple of the step between the two. Numbers below the least normal value round to subnormal values by the same rule.
Patterns of one sign are ordered as their values are, so the carry of a mantissa into the exponent needs no case of its
own. A number is *rounded once*, from its exact value. Going through float32 on the way to float16 rounds twice, and is
wrong where the first rounding produces a tie:

>>> x = np.array([1 + 2.0**-11 + 2.0**-40])
>>> int(round_to(x, "float16")[0]), int(x.astype(np.float32).astype(np.float16).view(np.uint16)[0])
(15361, 15360)

**Overflow** is a choice of the caller. A number overflows if it lies at or beyond the value that would follow the
largest one, or would round to it. The standards offer two behaviours:

============== ==================================================================================================
``saturate``   the largest value with the sign of the number, infinities included
``ieee``       infinity where the type has one, else NaN; refused for types that have neither
============== ==================================================================================================

A finite number that is rounded downwards does not overflow: it becomes the largest one under both.

**Scales** in ``float8_e8m0fnu`` are rarely rounded to nearest: OCP MX takes the power of two at or below a number. So
rounding has a *direction*: ``nearest``, ``down`` (towards zero) or ``up`` (away from zero). To nearest, the middle
between two powers goes up, since 1.5 steps lie between 1 and 2 and 2 is even. Numbers below the least power, zero
included, become the least power.

**NaN** stays NaN. A type without NaN refuses it, because no pattern says what happened.

Source: IEEE 754-2019 §3.4, §4.3, §7.4 (float16, float32); OCP 8-bit Floating Point Specification 1.0 §5 (FP8 and its
two conversions); OCP Microscaling Formats 1.0 §5.3 (FP6, FP4, E8M0), §6.3 (its scale).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Literal, get_args

import ml_dtypes
import numpy as np

from lowbit.arrays import F64, U8, U16, U32, Array
from lowbit.contract.checks import check_array, check_choice
from lowbit.contract.operation import EXACT, operation
from lowbit.contract.signature import Shape, checked
from lowbit.errors import ArgumentError

Overflow = Literal["saturate", "ieee"]
Direction = Literal["nearest", "down", "up"]
OVERFLOWS: tuple[Overflow, ...] = get_args(Overflow)
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)
Specials = Literal["ieee", "nan", "none"]


@dataclass(frozen=True)
class FloatType:
    """One floating-point type; the table of this chapter is `FLOATS`.

    Attributes:
        name: as numpy and ml_dtypes spell it.
        exponent: E, bits of the exponent field.
        mantissa: M, bits of the mantissa field.
        bias: what is subtracted from the exponent field.
        specials: ``ieee``: an exponent field of ones is infinity or NaN; ``nan``: only the pattern of ones is special,
            and is NaN; ``none``: every pattern is a number.
        signed: whether there is a sign bit; without one there is no zero and no subnormal number either.
    """

    name: str
    exponent: int
    mantissa: int
    bias: int
    specials: Specials
    signed: bool = True

    @property
    def bits(self) -> int:
        """Width of a pattern; patterns of fewer than 8 bits are stored one to a byte until a format packs them."""
        return self.signed + self.exponent + self.mantissa

    @property
    def pattern_dtype(self) -> np.dtype[np.unsignedinteger]:
        """The unsigned integers that hold patterns."""
        return np.dtype(np.uint8 if self.bits <= 8 else np.uint16 if self.bits <= 16 else np.uint32)

    @property
    def top(self) -> int:
        """The pattern of the largest number."""
        ones = (1 << (self.exponent + self.mantissa)) - 1
        top: int = ones - {"ieee": 2**self.mantissa, "nan": 1, "none": 0}[self.specials]
        return top

    @property
    def largest(self) -> float:
        """The largest number."""
        return float(_values(np.array([self.top]), self)[0])

    @property
    def unit_roundoff(self) -> float:
        """u: the largest relative error of rounding a number in the normal range to nearest."""
        return float(2.0 ** -(self.mantissa + 1))

    @property
    def least_subnormal(self) -> float:
        """The smallest positive number."""
        return float(2.0 ** (1 - self.bias - self.mantissa)) if self.signed else float(2.0**-self.bias)

    @property
    def values(self) -> F64:
        """float64, 2^bits: the value of every pattern; for types of at most 16 bits."""
        return _values(np.arange(2**self.bits, dtype=np.uint32), self)

    @property
    def native(self) -> bool:
        """Whether numpy itself has the type; the kind does not tell, because dtypes of ml_dtypes may claim to be floats
        too."""
        return self.name in ("float32", "float16")

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """The dtype of arrays whose elements are numbers of this type: numpy's own, or that of ml_dtypes."""
        return np.dtype(getattr(ml_dtypes, self.name, self.name))


FLOATS: Mapping[str, FloatType] = MappingProxyType(
    {
        each.name: each
        for each in (
            FloatType("float32", 8, 23, 127, "ieee"),
            FloatType("float16", 5, 10, 15, "ieee"),
            FloatType("bfloat16", 8, 7, 127, "ieee"),
            FloatType("float8_e5m2", 5, 2, 15, "ieee"),
            FloatType("float8_e4m3fn", 4, 3, 7, "nan"),
            FloatType("float6_e3m2fn", 3, 2, 3, "none"),
            FloatType("float6_e2m3fn", 2, 3, 1, "none"),
            FloatType("float4_e2m1fn", 2, 1, 1, "none"),
            FloatType("float8_e8m0fnu", 8, 0, 127, "nan", signed=False),
        )
    }
)
"""The types of this chapter by name."""

Name = Literal[
    "float32",
    "float16",
    "bfloat16",
    "float8_e5m2",
    "float8_e4m3fn",
    "float6_e3m2fn",
    "float6_e2m3fn",
    "float4_e2m1fn",
    "float8_e8m0fnu",
]
NAMES: tuple[Name, ...] = get_args(Name)
Patterns = U8 | U16 | U32


# **Patterns to numbers.** Every value is a float64 exactly: no type has more than 24 significant bits.


def _check_decode(patterns: Patterns, type: Name) -> None:
    kind = FLOATS[type]
    check_array("patterns", patterns, kind.pattern_dtype.type, patterns.shape)
    if kind.bits < 8 and (patterns >= 2**kind.bits).any():
        raise ArgumentError("patterns", f"as high as {patterns.max()}", f"0 to {2**kind.bits - 1} for {type}")


@checked(also=_check_decode)
def decode(patterns: Annotated[Patterns, Shape("count")], type: Name) -> F64:
    """The value of each pattern.

    >>> decode(np.array([0x01, 0x7E, 0x80], np.uint8), "float8_e4m3fn")
    array([ 1.953125e-03,  4.480000e+02, -0.000000e+00])

    Args:
        patterns: unsigned integers of the width of `FloatType.pattern_dtype`, n; those of 4 and 6 bits take one byte
            each, in its lowest bits.
        type: the name of a type.

    Returns:
        float64, n: exact.

    Raises:
        ArgumentError: an unknown type, a wrong dtype, a pattern with more bits than the type has.

    Source: the table of this chapter.
    """
    return _values(patterns, FLOATS[type])


def _values(patterns: Array, kind: FloatType) -> F64:
    codes = patterns.astype(np.int64)
    field, m = codes >> kind.mantissa & (2**kind.exponent - 1), codes & (2**kind.mantissa - 1)
    if not kind.signed:
        numbers = np.ldexp(1.0, codes - kind.bias)
    else:
        normal = field > 0
        significand = m + normal * 2**kind.mantissa
        numbers = np.ldexp(significand.astype(np.float64), np.where(normal, field, 1) - kind.bias - kind.mantissa)
    magnitudes = codes & (2 ** (kind.exponent + kind.mantissa) - 1)
    special = magnitudes > kind.top
    numbers[special] = np.nan
    if kind.specials == "ieee":
        numbers[special & (m == 0)] = np.inf
    negative = (codes >> (kind.exponent + kind.mantissa) & 1).astype(bool)
    return np.where(negative, -numbers, numbers) if kind.signed else numbers


# **Numbers to patterns.** A positive number is a multiple n of the step of its binade, and n is what is rounded. In the
# patterns of a type the binades follow each other without a gap, so the pattern is n and the number of binades below.


def _check_round(numbers: F64, type: Name, overflow: Overflow, direction: Direction) -> None:
    kind = FLOATS[type]
    if kind.specials == "none":
        if overflow != "saturate":
            raise ArgumentError("overflow", repr(overflow), f"'saturate', since {type} has no infinity and no NaN")
        if np.isnan(numbers).any():
            raise ArgumentError("numbers", "NaN at some place", f"numbers and infinities, since {type} has no NaN")
    if not kind.signed and (numbers < 0).any():
        raise ArgumentError("numbers", f"as low as {numbers.min()}", f"at least 0, since {type} has no sign")


@checked(also=_check_round)
def round_to(
    numbers: Annotated[F64, Shape("count")],
    type: Name,
    overflow: Overflow = "saturate",
    direction: Direction = "nearest",
) -> Patterns:
    """The pattern of each number, rounded once.

    >>> round_to(np.array([0.75, 0.25, 1e9]), "float4_e2m1fn")
    array([2, 0, 7], dtype=uint8)
    >>> [int(round_to(np.array([3.0]), "float8_e8m0fnu", direction=each)[0]) for each in ("nearest", "down", "up")]
    [129, 128, 129]

    Args:
        numbers: float64, n: the exact values.
        type: the name of a type.
        overflow: ``saturate`` or ``ieee``, see above.
        direction: ``nearest`` (ties to even), ``down`` (towards zero) or ``up`` (away from zero).

    Returns:
        unsigned integers of `FloatType.pattern_dtype`, n. A NaN has the sign 0 and a mantissa field of ones.

    Raises:
        ArgumentError: an unknown choice; NaN, or `overflow` ``ieee``, for a type that has no pattern for it; a number
            below 0 for a type without a sign.

    Source: IEEE 754-2019 §4.3; OCP FP8 §5.2; OCP MX 1.0 §5.3.
    """
    kind = FLOATS[type]
    magnitudes = np.abs(numbers)
    finite = np.isfinite(numbers)
    patterns = np.full(numbers.shape, kind.top + 1, np.int64)  # infinities overflow like any other too large number
    patterns[finite] = _rounded(magnitudes[finite], kind, direction)
    nan = 2 ** (kind.exponent + kind.mantissa) - 1
    beyond = nan if kind.specials != "ieee" else kind.top + 1
    to_largest = (overflow == "saturate") | (finite & (direction == "down"))
    patterns = np.where(patterns > kind.top, np.where(to_largest, kind.top, beyond), patterns)
    if kind.signed:
        patterns |= np.signbit(numbers).astype(np.int64) << (kind.exponent + kind.mantissa)
    patterns[np.isnan(numbers)] = nan
    return patterns.astype(kind.pattern_dtype)


def _rounded(magnitudes: F64, kind: FloatType, direction: Direction) -> Array:
    """The pattern of finite magnitudes; beyond `FloatType.top` where one overflows."""
    _, exponents = np.frexp(magnitudes)  # 2^(e−1) ≤ x < 2^e
    least = 1 - kind.bias if kind.signed else -kind.bias
    binade = np.maximum(np.where(magnitudes > 0, exponents.astype(np.int64) - 1, least), least)
    steps = np.ldexp(magnitudes, kind.mantissa - binade)  # exact: x as a multiple of the step of its binade
    n = {"nearest": np.rint, "down": np.floor, "up": np.ceil}[direction](steps).astype(np.int64)
    if not kind.signed:  # pattern 0 is the least power, which is 1 step
        n = np.maximum(n, 1) - 1
    patterns: Array = (binade - least) * 2**kind.mantissa + n
    return patterns


# **Arrays of numbers** of a type, as libraries exchange them, are the same bytes with another dtype.


def as_numbers(patterns: Patterns, type: Name) -> Array:
    """A view of patterns as an array of `FloatType.dtype`; float64 conversions of it are exact."""
    return patterns.view(FLOATS[type].dtype)


def as_patterns(numbers: Array) -> Patterns:
    """A view of an array of such a dtype as patterns; the inverse of `as_numbers`.

    Raises:
        ArgumentError: no type of this chapter has this dtype.
    """
    name = check_choice("dtype", numbers.dtype.name, list(FLOATS))
    return numbers.view(FLOATS[name].pattern_dtype)


def rounded(numbers: F64, type: Name, overflow: Overflow = "ieee") -> Array:
    """Numbers rounded once to a type, as an array of any shape of its dtype."""
    patterns = round_to(np.ascontiguousarray(numbers).reshape(-1), type, overflow)
    return as_numbers(patterns, type).reshape(numbers.shape)


# **What a backend promises.**

operation(
    "floats.decode",
    "Bit patterns to numbers",
    decode,
    promise=EXACT,
    source="IEEE 754-2019 §3.4; OCP FP8 §5; OCP MX 1.0 §5.3",
    clauses={
        "C1": "Each pattern of a finite number gives that number exactly, subnormal numbers and both zeros included.",
        "C2": "The patterns of infinities and NaN are those of the type's row in the table, and no others.",
    },
)

operation(
    "floats.round",
    "Numbers to bit patterns",
    round_to,
    promise=EXACT,
    source="IEEE 754-2019 §4.3, §7.4; OCP FP8 §5.2; OCP MX 1.0 §5.3, §6.3",
    clauses={
        "C1": "A number goes to the nearest value of the type, ties to the even significand, in a single rounding; "
        "with a direction, to the neighbour on that side.",
        "C2": "A number beyond the largest value becomes that value, or infinity or NaN, as overflow says; a "
        "finite one that is rounded downwards becomes that value.",
        "C3": "NaN becomes the NaN with sign 0 and all ones; a zero keeps its sign.",
    },
)
