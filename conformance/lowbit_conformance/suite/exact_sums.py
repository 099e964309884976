r"""Activations whose products with a stored matrix have one right answer: every partial sum is exact.

A sum of the terms :math:`x_k W_{kj}` of a column j is exact in any order in a type with unit roundoff u where

.. math:: \sum_k |x_k| \, m_{kj} \le \frac{1}{u} \min_{k : x_k \ne 0} p_{kj},

if x has integers, :math:`m_{kj}` is the magnitude of a weight, and :math:`p_{kj}` is the largest power of two of which
its parts are multiples. The sum must not overflow, and no :math:`p_{kj}` may lie below the least subnormal number.

Elements of x are 0 so that this holds. It may hold in some columns only, as for results of bfloat16; these are judged.
Each vector takes as many rows as make the number of judged weights largest.
"""

import numpy as np

from lowbit.arrays import F64, I64, Array
from lowbit.contract.rounding import ETA, LARGEST, UNIT_ROUNDOFF, Weights
from lowbit.numbers.floats import rounded
from lowbit.tensor_formats.stored import Stored
from lowbit.tensor_formats.table import Terms


def exact_sums(
    weights: Stored,
    vectors: int,
    kind: Weights,
    types: tuple[str, ...],
    rng: np.random.Generator,
    largest: int = 1,
    signs: bool = True,
    rows: I64 | None = None,
) -> tuple[F64, Array]:
    """Integers whose products with a matrix are exact in each of the given types.

    Args:
        weights: K × N.
        vectors: T.
        kind: the type that holds a weight before it is multiplied; weights that it cannot hold are not judged.
        types: the types that a sum passes through.
        rng: draws rows and signs.
        largest: the largest element.
        signs: whether there are negative elements.
        rows: all other elements are 0; None for all rows of the matrix.

    Returns:
        T × K integers, and a mask of the exact elements of the T × N results.
    """
    chosen = np.arange(weights.rows) if rows is None else rows
    terms = weights.terms if rows is None else of_rows(weights.terms, rows)
    units, magnitudes = units_of(terms), terms.magnitudes
    held = representable(terms.values, kind)
    alone = (held & within(magnitudes, units, types)).sum(axis=1)
    x, judged = np.zeros((vectors, weights.rows)), np.zeros((vectors, weights.columns), bool)
    for row, exact in zip(x, judged, strict=True):
        order = rng.permutation(chosen.size)
        order = order[np.argsort(-alone[order], kind="stable")]
        for most in (largest, 1):
            steps = rng.integers(1, most + 1, chosen.size).astype(np.float64)
            sums = np.cumsum(steps[:, np.newaxis] * magnitudes[order], axis=0)
            fits = within(sums, np.minimum.accumulate(units[order]), types) & np.logical_and.accumulate(held[order])
            count = 1 + int(np.argmax(fits.sum(axis=1) * np.arange(1, chosen.size + 1)))
            exact[:] = fits[count - 1]
            if exact.any():
                break  # no row fits otherwise; try steps of 1
        row[chosen[order[:count]]] = steps[:count] * (rng.choice((-1, 1), count) if signs else 1)
    return x, judged


def exact_products(x: F64, terms: Terms, types: tuple[str, ...], kind: Weights = "exact") -> Array:
    """A mask, T × N: which elements of X W are exact sums in each of the given types, for any X of T × K.

    `kind` must hold each weight that is multiplied.
    """
    units, held = units_of(terms), representable(terms.values, kind)
    least = np.stack([(unit_of(row)[:, np.newaxis] * units).min(axis=0) for row in x])
    exact = within(np.abs(x) @ terms.magnitudes, least, types)
    return np.asarray(exact & ((x != 0) @ ~held == 0))


def within(sums: F64, units: F64, types: tuple[str, ...]) -> Array:
    """Whether sums of these magnitudes, of multiples of these powers of two, are exact in each of the given types."""
    roundoff, least = (max(table[each] for each in types) for table in (UNIT_ROUNDOFF, ETA))
    largest = min(LARGEST.get(each, np.inf) for each in types)
    return np.asarray((sums <= units / roundoff) & (sums <= largest) & (units >= 2 * least))


def of_rows(terms: Terms, rows: I64) -> Terms:
    """The terms of some rows of a matrix."""
    offsets = np.broadcast_to(terms.offsets, terms.products.shape)
    return Terms(terms.products[rows], offsets[rows])


def units_of(terms: Terms) -> F64:
    """The largest power of two of which both parts of each weight are multiples: K × N."""
    offsets = np.broadcast_to(terms.offsets, terms.products.shape)
    return np.minimum(unit_of(terms.products), unit_of(offsets))


def unit_of(values: F64) -> F64:
    """The largest power of two of which each number is a multiple; infinity for 0.

    >>> unit_of(np.array([12.0, 0.75, 0.0]))
    array([4.  , 0.25,  inf])
    """
    fraction, exponent = np.frexp(values)
    significand = np.abs(np.ldexp(fraction, 53)).astype(np.int64)
    lowest = (significand & -significand).astype(np.float64)
    return np.where(values == 0, np.inf, np.ldexp(lowest, exponent - 53))


def representable(values: F64, name: Weights) -> Array:
    """Which numbers a type of weights holds; all numbers if no weight is formed."""
    if name == "exact":
        return np.ones(values.shape, bool)
    kept = rounded(np.ascontiguousarray(values), name).astype(np.float64)
    return np.asarray(kept == values)
