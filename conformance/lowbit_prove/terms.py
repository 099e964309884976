"""Terms: one number that is either known or an expression of z3, with numpy's arithmetic of its dtype.

A known number is a Python ``bool``, ``int`` or ``float``. An unknown one of an integer dtype is a bit vector as wide as
the dtype, of float16 or float32 a floating-point term of IEEE 754, and of bool a truth value. `lowbit_prove.symbols`
makes arrays of them.

**Float64** is where the specification computes exactly: codes times scales, which are numbers of few bits. So an
unknown float64 here is an `Exact`, an integer times a power of two, and never rounded. Its integer has at most 53 bits,
as many as a float64 holds; what would need more is refused.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import z3

from lowbit.kernels.vector import fmadd

ROUND = z3.RNE()
"""To nearest, ties to even: the rounding of every float of a kernel."""
FLOATS = {"float16": z3.Float16(), "float32": z3.Float32()}
MOST_BITS = 53
"""The bits of a float64's mantissa."""
EXTENDED = 64
"""Bits of the integer of an `Exact`: a sign, and more than `MOST_BITS`."""

Dtype: TypeAlias = np.dtype[Any]


class UndecidedError(Exception):
    """A computation that terms cannot express; the result is neither a proof nor a refutation."""


@dataclass(frozen=True)
class Exact:
    """An unknown float64: an integer from ``-2**size`` to ``2**size - 1``, times ``2**exponent``."""

    integer: z3.BitVecRef
    size: int
    exponent: int = 0

    def __post_init__(self) -> None:
        if self.size > MOST_BITS:
            raise UndecidedError(f"a float64 of {self.size} bits is not exact")

    def at(self, exponent: int) -> "Exact":
        """The same number with a smaller exponent."""
        more = self.exponent - exponent
        return Exact(self.integer << more, self.size + more, exponent) if more else self


Term: TypeAlias = Any
"""A known number, an expression of z3, or an `Exact`."""


def known(*numbers: Term) -> bool:
    """Whether all of these are numbers rather than expressions."""
    return all(isinstance(each, bool | int | float) for each in numbers)


def width(dtype: Dtype) -> int:
    """Bits of a number of this dtype."""
    return 8 * dtype.itemsize


def expression(number: Term, dtype: Dtype) -> Any:
    """A number as an expression of z3, of the sort of its dtype."""
    if dtype == np.float64:
        return number if isinstance(number, Exact) else _exact(number)
    if not known(number):
        return number
    if dtype.kind == "b":
        return z3.BoolVal(bool(number))
    if dtype.kind in "ui":
        return z3.BitVecVal(int(number), width(dtype))
    bits = int(np.array(number, dtype).view(f"u{dtype.itemsize}"))
    return z3.fpBVToFP(z3.BitVecVal(bits, width(dtype)), _sort(dtype))


def _sort(dtype: Dtype) -> z3.FPSortRef:
    if dtype.name not in FLOATS:
        raise UndecidedError(f"{dtype} has no terms")
    return FLOATS[dtype.name]


def _exact(number: float) -> Exact:
    top, below = float(number).as_integer_ratio()
    if below & (below - 1):
        raise UndecidedError(f"{number} is not an integer times a power of two")
    exponent = 1 - below.bit_length()
    while top and top % 2 == 0:
        top, exponent = top // 2, exponent + 1
    return Exact(z3.BitVecVal(top, EXTENDED), abs(top).bit_length(), exponent)


# **Changing the dtype**, as ``astype`` and ``view`` do.


def cast(number: Term, source: Dtype, target: Dtype) -> Term:
    """The number in another dtype, as numpy converts it."""
    if known(number):
        with np.errstate(all="ignore"):
            return np.array(number, source).astype(target).item()
    if source == target:
        return number
    if source.kind == "b":
        one, none = (cast(each, np.dtype(np.uint8), target) for each in (1, 0))
        return choose(number, one, none, target)
    if source.kind in "ui" and target.kind in "ui":
        return _resized(number, source, target)
    if source.kind in "ui" and target == np.float64:
        wide = _signed(number, source, EXTENDED)
        integer = z3.simplify(wide)
        return Exact(integer, min(magnitude(wide), magnitude(integer)))
    if source.kind in "ui" and target.kind == "f":
        made = z3.fpSignedToFP if source.kind == "i" else z3.fpUnsignedToFP
        return made(ROUND, number, _sort(target))
    if source.kind == "f" and target == np.float32 and source == np.float16:
        return z3.fpFPToFP(ROUND, number, _sort(target))
    raise UndecidedError(f"an unknown {source} cannot be converted to {target}")


def _resized(number: z3.BitVecRef, source: Dtype, target: Dtype) -> z3.BitVecRef:
    more = width(target) - width(source)
    if more > 0:
        return _signed(number, source, width(target))
    return z3.simplify(z3.Extract(width(target) - 1, 0, number)) if more < 0 else number


def _signed(number: z3.BitVecRef, source: Dtype, bits: int) -> z3.BitVecRef:
    """An integer extended to this many bits, with its sign if its dtype is signed."""
    more = bits - number.size()
    return number if not more else z3.SignExt(more, number) if source.kind == "i" else z3.ZeroExt(more, number)


def magnitude(number: Any) -> int:
    """A number s such that the signed integer is known to be between ``-2**s`` and ``2**s - 1``."""
    most, kind, parts = int(number.size()) - 1, number.decl().kind(), number.children()
    if z3.is_bv_value(number):
        value = int(number.as_signed_long())
        return (value if value >= 0 else ~value).bit_length()
    if kind == z3.Z3_OP_CONCAT:
        first = parts[0]
        rest = most + 1 - int(first.size())
        return rest if z3.is_bv_value(first) and first.as_long() == 0 else rest + magnitude(first)
    if kind == z3.Z3_OP_ZERO_EXT:
        return int(parts[0].size())
    if kind == z3.Z3_OP_SIGN_EXT:
        return magnitude(parts[0])
    if kind == z3.Z3_OP_BASHR and z3.is_bv_value(parts[1]):
        return max(0, magnitude(parts[0]) - int(parts[1].as_long()))
    if kind not in (z3.Z3_OP_BADD, z3.Z3_OP_BMUL, z3.Z3_OP_BOR, z3.Z3_OP_BXOR, z3.Z3_OP_ITE):
        return most
    sizes = [magnitude(each) for each in parts if not z3.is_bool(each)]
    grown = {z3.Z3_OP_BADD: max(sizes) + len(sizes) - 1, z3.Z3_OP_BMUL: sum(sizes) + len(sizes) - 1}
    return min(most, grown.get(kind, max(sizes)))


def bits_of(number: Term, dtype: Dtype) -> Term:
    """The bits of a number as an unsigned integer."""
    if known(number):
        return int(np.array(number, dtype).view(f"u{dtype.itemsize}"))
    if dtype.kind != "f":
        return number
    if z3.is_app_of(number, z3.Z3_OP_FPA_TO_FP) and number.num_args() == 1:
        return number.arg(0)  # the argument of `from_bits`, even for a NaN
    return z3.fpToIEEEBV(number)


def from_bits(bits: Term, dtype: Dtype) -> Term:
    """The number of this dtype that has these bits."""
    if known(bits):
        return np.array(bits, f"u{dtype.itemsize}").view(dtype).item()
    return z3.fpBVToFP(bits, _sort(dtype)) if dtype.kind == "f" else bits


def joined(parts: list[Term], each: int) -> Term:
    """Runs of `each` bits as one integer, the first in the lowest bits."""
    if known(*parts):
        return sum(part << each * place for place, part in enumerate(parts))
    sized = [z3.BitVecVal(part, each) if known(part) else part for part in reversed(parts)]
    return z3.simplify(z3.Concat(*sized)) if len(sized) > 1 else sized[0]


def part(bits: Term, first: int, count: int) -> Term:
    """`count` bits of an integer, from the `first` on."""
    if known(bits):
        return bits >> first & (1 << count) - 1
    return z3.simplify(z3.Extract(first + count - 1, first, bits))


# **Arithmetic.** One function for each of numpy's that the specification uses, on operands of one dtype.


def choose(condition: Term, yes: Term, no: Term, dtype: Dtype) -> Term:
    """``yes`` if the condition holds, else ``no``."""
    if known(condition):
        return yes if condition else no
    if known(yes, no) and yes == no and np.signbit(yes) == np.signbit(no):
        return yes
    if dtype == np.float64:
        first, second = expression(yes, dtype), expression(no, dtype)
        low = min(first.exponent, second.exponent)
        first, second = first.at(low), second.at(low)
        return Exact(z3.If(condition, first.integer, second.integer), max(first.size, second.size), low)
    return z3.If(condition, expression(yes, dtype), expression(no, dtype))


def product(a: z3.BitVecRef, b: z3.BitVecRef) -> z3.BitVecRef:
    """A product of integers; if both were extended from fewer bits, it is computed in as few bits as it needs."""
    short = [min(_unextended(each), _unextended(z3.simplify(each)), key=lambda form: form.size()) for each in (a, b)]
    bits = sum(each.size() for each in short)
    if bits >= a.size():
        return a * b
    first, second = (z3.SignExt(bits - each.size(), each) for each in short)
    return z3.SignExt(a.size() - bits, first * second)


def _unextended(number: z3.BitVecRef) -> z3.BitVecRef:
    """The shortest signed integer that is known to extend to this one."""
    if z3.is_app_of(number, z3.Z3_OP_SIGN_EXT):
        return number.arg(0)
    if z3.is_app_of(number, z3.Z3_OP_ZERO_EXT):
        return z3.ZeroExt(1, number.arg(0))
    if z3.is_app_of(number, z3.Z3_OP_BASHR) and z3.is_bv_value(number.arg(1)):
        count = min(number.arg(1).as_long(), number.size() - 1)
        return z3.simplify(z3.Extract(number.size() - 1, count, number.arg(0)))
    if z3.is_app_of(number, z3.Z3_OP_CONCAT) and not z3.is_bv_value(number):
        bits = magnitude(number)
        return z3.simplify(z3.Extract(bits, 0, number)) if bits + 1 < number.size() else number
    if z3.is_bv_value(number):
        value = number.as_signed_long()
        return z3.BitVecVal(value, (value if value >= 0 else ~value).bit_length() + 1)
    return number


def _shifted_right(a: Any, b: Any, dtype: Dtype) -> Any:
    return a >> b if dtype.kind == "i" else z3.LShR(a, b)


def _compared(signed: Callable[[Any, Any], Any], unsigned: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    return lambda a, b, dtype: unsigned(a, b) if dtype.kind == "u" else signed(a, b)


def _power(number: Any) -> int:
    """The exponent of a power of two; unknown integers are divided only by powers of two."""
    value = number.as_signed_long() if z3.is_bv_value(number) else 0
    if value < 1 or value & (value - 1):
        raise UndecidedError("a quotient or remainder by anything but a power of two")
    return value.bit_length() - 1


def _remainder(a: Any, b: Any, dtype: Dtype) -> Any:
    """The remainder, also of negative numbers: as in numpy, it has the sign of the divisor."""
    return a & z3.BitVecVal((1 << _power(b)) - 1, a.size())


def _quotient(a: Any, b: Any, dtype: Dtype) -> Any:
    return _shifted_right(a, z3.BitVecVal(_power(b), a.size()), dtype)


INTEGERS: dict[str, Callable[[Any, Any, Dtype], Any]] = {
    "add": lambda a, b, dtype: a + b,
    "subtract": lambda a, b, dtype: a - b,
    "multiply": lambda a, b, dtype: product(a, b),
    "bitwise_and": lambda a, b, dtype: a & b,
    "bitwise_or": lambda a, b, dtype: a | b,
    "bitwise_xor": lambda a, b, dtype: a ^ b,
    "left_shift": lambda a, b, dtype: a << b,
    "right_shift": _shifted_right,
    "remainder": _remainder,
    "floor_divide": _quotient,
    "greater": _compared(lambda a, b: a > b, z3.UGT),
    "greater_equal": _compared(lambda a, b: a >= b, z3.UGE),
    "less": _compared(lambda a, b: a < b, z3.ULT),
    "less_equal": _compared(lambda a, b: a <= b, z3.ULE),
    "equal": lambda a, b, dtype: a == b,
    "not_equal": lambda a, b, dtype: a != b,
}
"""Operations on bit vectors. The shifts of numpy and z3 also agree for counts beyond the width."""

REALS: dict[str, Callable[[Any, Any, Dtype], Any]] = {
    "add": lambda a, b, dtype: z3.fpAdd(ROUND, a, b),
    "subtract": lambda a, b, dtype: z3.fpSub(ROUND, a, b),
    "multiply": lambda a, b, dtype: z3.fpMul(ROUND, a, b),
    "divide": lambda a, b, dtype: z3.fpDiv(ROUND, a, b),
    "greater": lambda a, b, dtype: z3.fpGT(a, b),
    "less": lambda a, b, dtype: z3.fpLT(a, b),
    "equal": lambda a, b, dtype: z3.fpEQ(a, b),
}
"""Operations on float16 and float32."""


def _sum(a: Exact, b: Exact, dtype: Dtype) -> Exact:
    low = min(a.exponent, b.exponent)
    a, b = a.at(low), b.at(low)
    return Exact(a.integer + b.integer, max(a.size, b.size) + 1, low)


def _negative(a: Exact) -> Exact:
    return Exact(-a.integer, a.size + 1, a.exponent)


def _scaled(a: Exact, b: Exact, dtype: Dtype) -> Exact:
    """A product; a product with a known number stays a sum of multiples, which z3 compares without a search."""
    if z3.is_bv_value(a.integer):
        a, b = b, a
    size, exponent = a.size + b.size + 1, a.exponent + b.exponent
    if not z3.is_bv_value(b.integer):
        return Exact(product(a.integer, b.integer), size, exponent)
    times = b.integer.as_signed_long()
    return Exact(a.integer, a.size, exponent) if times == 1 else Exact(a.integer * times, size, exponent)


def _divided(a: Exact, b: Exact, dtype: Dtype) -> Exact:
    if not z3.is_bv_value(b.integer) or b.integer.as_signed_long() != 1:
        raise UndecidedError("a quotient by anything but a power of two")
    return Exact(a.integer, a.size, a.exponent - b.exponent)


def _exact_remainder(a: Exact, b: Exact, dtype: Dtype) -> Exact:
    if a.exponent != 0 or not z3.is_bv_value(b.integer) or b.integer.as_signed_long() != 1 or b.exponent < 0:
        raise UndecidedError("the remainder of an unknown float64 but an integer's by a power of two")
    return Exact(a.integer & ((1 << b.exponent) - 1), b.exponent)


def _same(a: Exact, b: Exact, dtype: Dtype) -> z3.BoolRef:
    low = min(a.exponent, b.exponent)
    return a.at(low).integer == b.at(low).integer


EXACTLY: dict[str, Callable[[Any, Any, Dtype], Any]] = {
    "add": _sum,
    "subtract": lambda a, b, dtype: _sum(a, _negative(b), dtype),
    "multiply": _scaled,
    "divide": _divided,
    "remainder": _exact_remainder,
    "equal": _same,
    "not_equal": lambda a, b, dtype: z3.Not(_same(a, b, dtype)),
}
"""Operations on float64."""


def applied(ufunc: Any, dtype: Dtype, result: Dtype, *numbers: Term) -> Term:
    """One of numpy's functions of numbers of one dtype.

    Args:
        ufunc: numpy's function, a `numpy.ufunc`.
        dtype: of the numbers.
        result: of the result.
        numbers: one or two.

    Raises:
        UndecidedError: terms have no such function.
    """
    if known(*numbers):
        with np.errstate(all="ignore"):
            return ufunc(*(np.array(each, dtype)[()] for each in numbers)).astype(result).item()
    name = ufunc.__name__
    if name == "negative":
        return applied(np.subtract, dtype, result, -0.0 if dtype.kind == "f" else 0, *numbers)
    if dtype.kind == "b" and name in ("logical_and", "logical_or", "bitwise_and", "bitwise_or"):
        return (z3.And if name.endswith("and") else z3.Or)(*(expression(each, dtype) for each in numbers))
    functions = EXACTLY if dtype == np.float64 else REALS if dtype.kind == "f" else INTEGERS
    if name not in functions or dtype.kind == "b":
        raise UndecidedError(f"{name} of unknown numbers of {dtype}")
    first, second = (expression(each, dtype) for each in numbers)
    return functions[name](first, second, dtype)


def fused(a: Term, b: Term, c: Term) -> Term:
    """``a * b + c`` of float32, rounded once."""
    if known(a, b, c):
        return fmadd(*(np.array([each], np.float32) for each in (a, b, c)))[0].item()
    return z3.fpFMA(ROUND, *(expression(each, np.dtype(np.float32)) for each in (a, b, c)))


def extended(number: z3.BitVecRef, bits: int) -> z3.BitVecRef:
    """An unsigned integer, zero-extended to `bits` bits."""
    return z3.ZeroExt(bits - number.size(), number)


def is_one(number: z3.BitVecRef, bit: int) -> Any:
    """Whether a bit of an unknown integer is 1."""
    return z3.simplify(z3.Extract(bit, bit, number) == 1)


def is_set(number: Term, dtype: Dtype) -> Term:
    """A bit that is 1 if an integer is not 0."""
    if known(number):
        return int(number != 0)
    plain = z3.simplify(number)
    if magnitude(plain) == 1 and z3.is_app_of(plain, z3.Z3_OP_CONCAT):
        return part(plain, 0, 1)  # it is 0 or 1
    return z3.If(number != 0, z3.BitVecVal(1, 1), z3.BitVecVal(0, 1))


def same(a: Term, b: Term, dtype: Dtype) -> Any:
    """Whether two numbers have the same bits: a truth value, or an expression for one."""
    if known(a, b):
        return bits_of(a, dtype) == bits_of(b, dtype)
    first, second = expression(a, dtype), expression(b, dtype)
    return _same(first, second, dtype) if dtype == np.float64 else first == second


def unknown(name: str, dtype: npt.DTypeLike) -> z3.ExprRef:
    """A new variable that stands for every number of this dtype."""
    kind: Dtype = np.dtype(dtype)
    if kind.kind in "ui":
        return z3.BitVec(name, width(kind))
    return z3.FP(name, _sort(kind))
