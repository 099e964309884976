"""Reals: a float of a kernel read as the real number that it would be if nothing were rounded.

A kernel's result is a tree of multiply-adds. In exact arithmetic it is a polynomial, and which polynomial does not
depend on the order of the additions, on chains, tiles or unrolling. So two programs, or a program and a formula, are
compared as polynomials. The variables, called *leaves*, are the floats that memory holds: activations, scales, sums.
The coefficients are exact numbers that codes determine, each an expression over the bits of the stream of weights.

Rounding is another matter, which this chapter leaves out. A conversion from an integer counts as exact, and is refused
unless the integer is known to fit in the 24 bits of a float32's mantissa, times a power of two.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import z3

from lowbit_prove import terms
from lowbit_prove.terms import Exact, Term, UndecidedError

REAL = np.dtype(np.float64)
MANTISSA = 24
"""Bits of a float32's mantissa."""

Leaves = tuple[str, ...]
"""The variables of a monomial by name, in order; a variable that occurs twice is listed twice."""


@dataclass(frozen=True)
class Polynomial:
    """A sum of products of leaves, each with a coefficient that is a float64 of `lowbit_prove.terms`."""

    parts: Mapping[Leaves, Term] = field(default_factory=dict)

    def __add__(self, other: "Polynomial") -> "Polynomial":
        return sum_of((self, other))

    def __mul__(self, other: "Polynomial") -> "Polynomial":
        return sum_of(
            Polynomial({tuple(sorted((*mine, *theirs))): _real(np.multiply, number, times)})
            for mine, number in self.parts.items()
            for theirs, times in other.parts.items()
        )

    def differences(self, other: "Polynomial") -> Iterator[tuple[Leaves, Any]]:
        """Each monomial with the condition under which its coefficients differ; monomials that never differ are left
        out."""
        for leaves in sorted(self.parts.keys() | other.parts.keys()):
            equal = terms.same(self.parts.get(leaves, 0.0), other.parts.get(leaves, 0.0), REAL)
            equal = z3.simplify(equal) if isinstance(equal, z3.ExprRef) else z3.BoolVal(equal)
            if not z3.is_true(equal):
                yield leaves, z3.Not(equal)


def sum_of(polynomials: Iterable[Polynomial]) -> Polynomial:
    """The sum of any number of polynomials."""
    total = dict[Leaves, Term]()
    for polynomial in polynomials:
        for leaves, number in polynomial.parts.items():
            total[leaves] = _real(np.add, total[leaves], number) if leaves in total else number
    return Polynomial(total)


def constant(number: Term) -> Polynomial:
    """A number as a polynomial without leaves."""
    return Polynomial() if terms.known(number) and number == 0 else Polynomial({(): number})


def _real(function: np.ufunc, *numbers: Term) -> Term:
    return terms.applied(function, REAL, REAL, *numbers)


def _chosen(condition: Any, yes: Polynomial, no: Polynomial) -> Polynomial:
    leaves = yes.parts.keys() | no.parts.keys()
    pairs = {each: (yes.parts.get(each, 0.0), no.parts.get(each, 0.0)) for each in leaves}
    return Polynomial({each: terms.choose(condition, *pair, REAL) for each, pair in pairs.items()})


class Reader:
    """Reads floats as polynomials.

    Attributes:
        meanings: the meaning of a float or an integer of memory, by the id of its z3 expression.
        leaves: the expression of each variable that stands for itself.
    """

    def __init__(self) -> None:
        self.meanings: dict[int, Callable[[], Polynomial]] = {}
        self.leaves: dict[str, Any] = {}
        self._read: dict[int, tuple[Any, Polynomial]] = {}
        self._kept: list[Any] = []  # so that the id of an expression is not reused

    def leaf(self, number: Any) -> Polynomial:
        """A float of memory as a polynomial: its meaning, or a variable."""
        plain = z3.simplify(number)
        if plain.get_id() in self.meanings:
            return self.meanings[plain.get_id()]()
        name = str(plain)
        self.leaves[name] = plain
        return Polynomial({(name,): 1.0})

    def means(self, number: Any, meaning: Callable[[], Polynomial]) -> None:
        """Set the meaning of a float, or of a signed integer of at most `MANTISSA` bits."""
        plain = z3.simplify(number)
        self._kept.append(plain)
        self.meanings[plain.get_id()] = cache(meaning)

    def read(self, number: Term) -> Polynomial:
        """A float32 as a polynomial."""
        if terms.known(number):
            return constant(float(number))
        if number.get_id() not in self._read:
            self._read[number.get_id()] = number, self._expression(number)
        return self._read[number.get_id()][1]

    def _expression(self, number: Any) -> Polynomial:
        kind, parts = number.decl().kind(), number.children()
        if kind == z3.Z3_OP_FPA_FMA:
            return sum_of(self._products(number))
        if kind in (z3.Z3_OP_FPA_ADD, z3.Z3_OP_FPA_MUL):
            first, second = self.read(parts[1]), self.read(parts[2])
            return first + second if kind == z3.Z3_OP_FPA_ADD else first * second
        if kind == z3.Z3_OP_ITE:
            return _chosen(parts[0], self.read(parts[1]), self.read(parts[2]))
        if kind == z3.Z3_OP_FPA_TO_FP and len(parts) == 2 and z3.is_bv(parts[1]):
            return self.integer(parts[1], np.dtype(np.int32))
        if kind == z3.Z3_OP_FPA_TO_FP_UNSIGNED:
            return self.integer(parts[1], np.dtype(np.uint32))
        plain = z3.simplify(number)
        if z3.is_fp_value(plain):
            bits = z3.simplify(z3.fpToIEEEBV(plain)).as_long()
            return constant(float(np.array(bits, np.uint32).view(np.float32)))
        return self.leaf(number)

    def _products(self, number: Any) -> Iterator[Polynomial]:
        """The terms of a chain of multiply-adds: each product, and the number to which the first is added."""
        while z3.is_app_of(number, z3.Z3_OP_FPA_FMA):
            _, a, b, number = number.children()
            yield self.read(a) * self.read(b)
        yield self.read(number)

    def integer(self, number: Any, dtype: terms.Dtype) -> Polynomial:
        """An integer that is converted to float32 exactly, as a polynomial."""
        plain = z3.simplify(number)
        if plain.get_id() in self.meanings:
            if dtype.kind != "i":
                raise UndecidedError("a signed integer is converted as an unsigned one")
            return self.meanings[plain.get_id()]()
        if z3.is_bv_value(plain):
            return constant(float(plain.as_signed_long() if dtype.kind == "i" else plain.as_long()))
        if z3.is_app_of(plain, z3.Z3_OP_ITE):
            return _chosen(plain.arg(0), self.integer(plain.arg(1), dtype), self.integer(plain.arg(2), dtype))
        zeros = _trailing(plain)
        short = plain if not zeros else z3.simplify(z3.Extract(plain.size() - 1, zeros, plain))
        kind = np.dtype(np.int64) if dtype.kind == "i" else np.dtype(np.uint64)
        more = 64 - short.size()
        wide = z3.SignExt(more, short) if dtype.kind == "i" else z3.ZeroExt(more, short)
        exact = terms.cast(wide, kind, REAL)
        if exact.size > MANTISSA:
            raise UndecidedError(f"an integer of {exact.size} bits is converted to float32")
        return Polynomial({(): Exact(exact.integer, exact.size, zeros)})


def _trailing(number: Any) -> int:
    """The number of low bits of an integer that are known to be zero."""
    last = number.children()[-1] if z3.is_app_of(number, z3.Z3_OP_CONCAT) else None
    return int(last.size()) if last is not None and z3.is_bv_value(last) and last.as_long() == 0 else 0
