r"""Attention over a stored cache: keys and values in the bytes of any format.

A key-value cache grows with the length of a conversation, so servers store it in fewer bits: 16-bit floats, FP8 with
scales, int8 for each token, ggml's Q8_0 and Q4_0, or KIVI's groups. Such a cache is a stored matrix like any other. Its
K rows are the channels of all key-value heads, head after head, and its N columns are the tokens, in order:

.. math:: k_{u,j,c} = W^{(k)}_{j d_h + c,\,u}, \qquad v_{u,j,c} = W^{(v)}_{j d_h + c,\,u},

with the exact numbers that the tables of the formats give. Keys and values may have different formats, as KIVI's have.
Attention over them is that of the chapter `attention`; storing is another operation (`formats.quantize`), because a
cast is discontinuous.

**The bound** is that of `lowbit.attention.bounds`, with keys and values that a kernel may form with rounding. A kernel
that first converts stored numbers to a type V (*weights* of its declaration) multiplies by numbers with an error of at
most :math:`E = \gamma_4(V)\,m + 4\,\eta_V`, where :math:`m` is the magnitude :math:`|product| + |offset|` of each. One
that declares ``exact`` applies codes and scales without forming a number, and has no E. A *factored* sum has :math:`m`
in its gauge, any other :math:`|b|`, as in `lowbit.linear.stored_bounds`. A sum of products of numbers a, with errors of
at most :math:`\epsilon`, and stored numbers b is wrong by no more than

.. math:: \sum \gamma_D\,(|a| + \epsilon)(m + E) + \epsilon\,(|b| + E) + |a|\,E + \text{underflow}.

The first such sum is a query times keys, with :math:`\epsilon = 0`; the second is probabilities times values.

Source: vLLM's attention with quantised caches; KIVI (arXiv 2402.02750) §3.2; llama.cpp's ``--cache-type-k``; the
formats name their owners.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from lowbit.arrays import F64, Activations
from lowbit.attention.attention import attended, check_sizes
from lowbit.attention.bounds import SCALE_ROUNDINGS
from lowbit.contract.operation import BOUNDED, Parameters, operation
from lowbit.contract.rounding import (
    ETA,
    HALF_LEAST_SUBNORMAL,
    UNIT_ROUNDOFF,
    Arithmetic,
    Bound,
    gamma,
    returned,
)
from lowbit.contract.signature import FINITE, ONE_TYPE, In, Shape, checked
from lowbit.errors import ArgumentError
from lowbit.linear.elementary import softmax
from lowbit.linear.propagation import REFERENCE, Steps, declared, softmax_error
from lowbit.linear.stored_bounds import SCALED
from lowbit.tensor_formats.stored import Stored


def in_heads(numbers: F64, head_dim: int) -> F64:
    """K × N numbers as G × N × d_h: the heads of a cache, token by token."""
    heads: F64 = numbers.reshape(-1, head_dim, numbers.shape[1]).swapaxes(1, 2)
    return heads


def _check_cache(queries: Activations, keys: Stored, values: Stored, window: int | None = None) -> None:
    tokens, heads, head_dim = queries.shape
    if (keys.rows, keys.columns) != (values.rows, values.columns):
        given = f"{keys.rows} x {keys.columns} and {values.rows} x {values.columns}"
        raise ArgumentError("sizes of keys and values", given, "the same channels and tokens")
    if keys.rows % head_dim:
        raise ArgumentError("rows of keys", keys.rows, f"a multiple of {head_dim}, the channels of a head")
    check_sizes(tokens, heads, keys.rows // head_dim, keys.columns)


@checked(also=_check_cache)
def attend_stored(
    queries: Annotated[Activations, Shape("T", "H", "d_h"), FINITE, ONE_TYPE],
    keys: Stored,
    values: Stored,
    window: Annotated[int, In(1)] | None = None,
) -> F64:
    """Grouped-query attention of the last T of S tokens over a stored cache of S tokens.

    Two tokens with equal keys; the query of the second attends to both:

    >>> cache = Stored("float16", 2, 2, (np.array([[1, 0], [3, 0]], np.float16),))
    >>> attend_stored(np.zeros((1, 1, 2), np.float32), cache, cache)[0, 0]
    array([2., 0.])

    Args:
        queries: float32, float16 or bfloat16, T × H × d_h, of the tokens at positions S − T to S − 1.
        keys: G d_h × S: the channels of all heads, token by token.
        values: G d_h × S.
        window: how many tokens a token attends to, itself included; None for all.

    Returns:
        float64, T × H × d_h: the value with which a backend's result is compared.

    Raises:
        ArgumentError: wrong dtype, shape or layout of the queries, or numbers that are not finite; sizes that do not
            match; a window below 1.
    """
    head_dim = queries.shape[2]
    wide = queries.astype(np.float64)
    return attended(wide, in_heads(keys.values, head_dim), in_heads(values.values, head_dim), window)


def _parameters(queries: Any, keys: Stored, values: Stored, window: int | None = None) -> Parameters:
    window_of = "none" if window is None else "sliding"
    formats = {"key_format": keys.format, "value_format": values.format}
    return {**formats, "head_dim": queries.shape[2], "window": window_of}


# **The bound.**

FORMS = ("dequantised", "factored", "direct")
EXACTLY = Arithmetic("direct", "float64", weights="exact")
"""The reference's own."""


@dataclass(frozen=True, eq=False)
class Numbers:
    """Stored numbers as a kernel may read them, each array of the same shape.

    Attributes:
        values: exact.
        gauge: their magnitudes in the gauge of a sum.
        off: the largest distance of the numbers that a kernel forms from the exact ones.
    """

    values: F64
    gauge: F64
    off: F64

    def of_head(self, head: int, seen: slice) -> "Numbers":
        """Those of one head of the visible tokens, S × d_h."""
        return Numbers(self.values[head, seen], self.gauge[head, seen], self.off[head, seen])

    @property
    def transposed(self) -> "Numbers":
        """The numbers transposed, d_h × S."""
        return Numbers(self.values.T, self.gauge.T, self.off.T)


def numbers_of(cache: Stored, head_dim: int, arithmetic: Arithmetic) -> Numbers:
    """The numbers of a cache, G × S × d_h, as a kernel of this arithmetic reads them."""
    values, magnitudes = in_heads(cache.values, head_dim), in_heads(cache.terms.magnitudes, head_dim)
    gauge, off = magnitudes if arithmetic.form == "factored" else np.abs(values), np.zeros(values.shape)
    if arithmetic.weights != "exact":
        off = gamma(SCALED, UNIT_ROUNDOFF[arithmetic.weights]) * magnitudes + SCALED * ETA[arithmetic.weights]
    return Numbers(values, gauge, off)


def attend_stored_bound(
    queries: Activations, keys: Stored, values: Stored, arithmetic: Arithmetic, exact: F64, window: int | None = None
) -> Bound:
    """The bound of `attention.attend_stored`, head by head and token by token.

    Args:
        queries: T × H × d_h.
        keys: as given to the operation.
        values: as given to the operation.
        arithmetic: what the backend declares; its roundings are taken at d_h for scores and at S for outputs.
        exact: float64, T × H × d_h: the reference's result.
        window: as given to the operation.

    Raises:
        ArgumentError: a form that stored numbers do not have; an arithmetic that would allow more than a tenth.
    """
    head_dim = queries.shape[2]

    def read(by: Arithmetic) -> tuple[Numbers, Numbers]:
        return numbers_of(keys, head_dim, by), numbers_of(values, head_dim, by)

    return bound_over(queries, read, arithmetic, exact, window)


def bound_over(
    queries: Activations,
    read_by: Callable[[Arithmetic], tuple[Numbers, Numbers]],
    arithmetic: Arithmetic,
    exact: F64,
    window: int | None = None,
) -> Bound:
    """The bound of attention over keys and values as a kernel of an arithmetic reads them.

    Raises:
        ArgumentError: a form that stored numbers do not have; an arithmetic that would allow more than a tenth.
    """
    if arithmetic.form not in FORMS:
        raise ArgumentError("form of attention over a stored cache", repr(arithmetic.form), " or ".join(FORMS))
    kernels = [
        (steps, *read_by(by))
        for steps, by in ((declared(arithmetic, queries.dtype.name), arithmetic), (REFERENCE, EXACTLY))
    ]
    tokens, heads, _ = queries.shape
    read = kernels[-1][2].values
    kv_heads, length, _ = read.shape
    limit, gauge = np.zeros(queries.shape), np.zeros(queries.shape)
    for t in range(tokens):
        end = length - tokens + t + 1
        seen = slice(0 if window is None else max(0, end - window), end)
        for h in range(heads):
            j, query = h * kv_heads // heads, queries[t, h].astype(np.float64)
            for steps, own_keys, own_values in kernels:
                limit[t, h] += head_error(steps, query, own_keys.of_head(j, seen), own_values.of_head(j, seen))
            gauge[t, h] = np.abs(read[j, seen]).max(axis=0)
    how = f"scores, softmax and output of {length} stored tokens in {arithmetic.accumulator}"
    return returned(Bound(limit, gauge, how), exact, queries.dtype.name)


def head_error(steps: Steps, query: F64, keys: Numbers, values: Numbers) -> F64:
    """The error of one head of one token over the tokens it attends to: float64, d_h."""
    products, root = keys.values @ query, np.sqrt(query.size)
    error = sum_error(steps, query, np.zeros(query.shape), keys.transposed)
    scores = products / root
    off = error / root + gamma(SCALE_ROUNDINGS, steps.unit) * (np.abs(products) + error) / root + HALF_LEAST_SUBNORMAL
    probabilities = softmax(scores)
    inexact = softmax_error(steps, scores[np.newaxis], steps.passed(scores, off)[np.newaxis])[0]
    return sum_error(steps, probabilities, steps.passed(probabilities, inexact), values)


def sum_error(steps: Steps, x: F64, error: F64, numbers: Numbers) -> F64:
    """The error of ``x W`` for stored numbers W, n × m, where that of x, n, is at most `error`: float64, m."""
    size, relative = np.abs(x), steps.sum_gamma(len(x))
    summed = relative * ((size + error) @ (numbers.gauge + numbers.off))
    carried = error @ (np.abs(numbers.values) + numbers.off) + size @ numbers.off
    largest = max(1.0, float(numbers.gauge.max()), float(size.max()))
    underflow = HALF_LEAST_SUBNORMAL * (1 + relative) * 3 * (len(x) + 1) * largest
    return steps.stored(x @ numbers.values, summed + carried + underflow)


# **What a backend promises.**

operation(
    "attention.attend_stored",
    "Attention over a stored cache",
    attend_stored,
    promise=BOUNDED,
    source="the owners of the formats; GQA §2.2",
    parameters=_parameters,
    clauses={
        "C1": "A token that sees one token only takes its value, as the format's table gives it, exactly where the "
        "declared types hold it.",
        "C2": "Where one score lies 200 and more above all others, the result is that token's value in the same way; "
        "query head h reads the channels of key-value head ⌊h / r⌋.",
        "C3": "Each element differs from the exact one by at most the bound derived from the declared arithmetic and "
        "the type into which stored numbers are turned.",
        "C4": "A token depends on no later token, with a window of w on none before the w − 1 that precede it, and on "
        "no unused bits of the last word: changing those changes no bit.",
    },
)
