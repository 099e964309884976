r"""How ggml casts numbers to IQ4_NL: the scale that fits the codes best.

The other casts of ggml take the scale from the largest number of a block. Here the scale minimises weighted squares.
With the codes' numbers :math:`q_i` of the table, and each number's square as its weight, that is

.. math:: d = \frac{\sum_i x_i^2\, q_i\, x_i}{\sum_i x_i^2\, q_i^2},

where both sums are added in order, in float32. A code belongs to the number of the table nearest to :math:`x_i` times
an inverse scale, or to the higher of two equally near ones. :math:`x_m` is the number of largest magnitude, the first
of several. A block in which that magnitude is below :math:`10^{-15}` has the scale 0.

**Two casts**, both ggml's own:

- *One fit* (``quantize_row_iq4_nl_ref``), of activations and in tests. The codes come from the inverse of :math:`x_m /
  {-127}`, and *d* fits them. They are final.
- *Search* (``quantize_iq4_nl`` without an importance matrix), of files. It fits the codes from the inverse of
  :math:`x_m / 127`, then those from :math:`(t - 127) / x_m` for :math:`t = -7 … 7`. A candidate replaces the best so
  far where its :math:`(\sum x^2 q x)^2 / \sum x^2 q^2` is larger: the reduction of the squared error. Finally the codes
  are chosen again, by the inverse of the best *d*, before *d* is rounded to float16.

**Contraction.** A compiler may round each product and sum of the fit once or twice, as it may in the chapter
`gguf_encode`.

Source: ggml, ``ggml-quants.c`` (``quantize_row_iq4_nl_impl``, ``best_index_int8``).
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import numpy as np

from lowbit.arrays import F32, F64, Array
from lowbit.tensor_formats.casts import Integers, inverse, kept_in, multiply_add, over
from lowbit.tensor_formats.gguf_encode import extreme, packed
from lowbit.tensor_formats.table import Encode, Sizes

LEAST = np.float32(1e-15)
"""Blocks whose largest magnitude is below this have the scale 0."""
TRIES = range(-7, 8)
"""The offsets that a search adds in turn to the first number of the table."""


Fitting = Callable[..., tuple[Integers, F32]]


class Fit(NamedTuple):
    """Codes, and the scale that fits them.

    Attributes:
        codes: N × blocks × elements.
        scale, gain: float32, N × blocks × 1; the gain is the scale times ``above``.
        above, below: float32, N × blocks × 1: the sums of the scale's quotient.
    """

    codes: Integers
    scale: F32
    gain: F32
    above: F32
    below: F32


def nearest_code(table: F32, numbers: F32) -> Integers:
    """The codes of the nearest numbers of a table, ties to the higher."""
    middles = (table[:-1] + table[1:]) / np.float32(2)
    codes: Integers = np.searchsorted(middles, numbers, side="right")
    return codes


def fit(table: F32, x: F32, by_inverse: F32, *, fused: bool) -> Fit:
    """The codes that an inverse scale, N × blocks × 1, gives to numbers, and the scale that fits them."""
    codes = nearest_code(table, by_inverse * x)
    above = below = np.zeros_like(by_inverse)
    for number, q in zip(np.split(x, x.shape[-1], axis=-1), np.split(table[codes], x.shape[-1], axis=-1), strict=True):
        weighted = number * number * q
        above = multiply_add(weighted, number, above, fused=fused)
        below = multiply_add(weighted, q, below, fused=fused)
    scale = over(above, below)
    return Fit(codes, scale, scale * above, above, below)


def one_fit(table: F32, x: F32, *, fused: bool) -> tuple[Integers, F32]:
    """Codes and scale of ggml's reference."""
    largest = extreme(x)
    found = fit(table, x, inverse(largest / table[0]), fused=fused)
    return np.where(largest == 0, 0, found.codes), found.scale


def search(table: F32, x: F32, *, fused: bool) -> tuple[Integers, F32]:
    """Codes and scale of ggml's writer of files."""
    largest = extreme(x)
    best = fit(table, x, inverse(-largest / table[0]), fused=fused)
    scale, gain = best.scale, best.gain
    for each in TRIES:
        found = fit(table, x, over(np.float32(each) + table[0], largest), fused=fused)
        better = (found.below > 0) & (found.above * found.above > gain * found.below)
        scale, gain = np.where(better, found.scale, scale), np.where(better, found.gain, gain)
    return nearest_code(table, inverse(scale) * x), scale


def _encode(fitting: Fitting, fused: bool, table: F64, numbers: F64, at: Sizes) -> dict[str, Array]:
    """The fields of IQ4_NL."""
    x = numbers.astype(np.float32)
    seen = np.where(np.abs(extreme(x)) < LEAST, np.float32(0), x)
    codes, scale = fitting(table.astype(np.float32), seen, fused=fused)
    return {"d": kept_in("float16", scale[..., 0]), **packed(codes, 4)}


def casts_to(table: F64) -> Mapping[str, Encode]:
    """Every choice, ggml's reference first, for a table of 16 ascending numbers."""
    return {
        f"{name}, {rounding}": partial(_encode, fitting, fused, table)
        for name, fitting in (("one fit", one_fit), ("search", search))
        for rounding, fused in (("two roundings", False), ("fused", True))
    }
