r"""Bounds of attention: how far a correct softmax, or a correct head, may lie from the exact one.

Attention is a chain: scores are sums, a softmax turns them into probabilities, and the output is a sum again. The steps
are those of `lowbit.linear.propagation`; here they are composed.

**Scores.** A score is a sum of :math:`d_h` products with an error of at most :math:`\gamma_D \sum |q||k|`, divided by
:math:`\sqrt{d_h}`: a root and a quotient, three roundings more.

**Probabilities** are the softmax of these scores: an absolute error of a score becomes a relative error of a
probability.

**The output** is a sum over the tokens that are seen, of inexact probabilities times exact values.

**Shaped scores** (`lowbit.attention.shaped`) have a factor in place of :math:`1/\sqrt{d_h}`, which is rounded once and
multiplied once, within the three roundings above. A soft cap then propagates the error of a score, and a sink is one
more score in the softmax, without an error; its probability multiplies nothing.

**Between the steps** a kernel of 16 bits may round scores, capped scores and probabilities to the type of its inputs,
as flash attention does with probabilities before it multiplies them by values.

Source: N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., §3.1, Lemma 3.1.
"""

from dataclasses import dataclass

import numpy as np

from lowbit.arrays import F64, Activations
from lowbit.contract.rounding import HALF_LEAST_SUBNORMAL, Arithmetic, Bound, gamma, returned
from lowbit.linear.elementary import soft_cap, softmax
from lowbit.linear.propagation import REFERENCE, Steps, declared, product_error, soft_cap_error, softmax_error

SCALE_ROUNDINGS = 3


@dataclass(frozen=True)
class Shape:
    """The parameters of the scores of one head.

    Attributes:
        scale: the factor of the products; None for 1/√d_h.
        cap: the soft cap; None for none.
        sink: the score of the head's sink; −∞ for none.
    """

    scale: float | None = None
    cap: float | None = None
    sink: float = -np.inf


PLAIN = Shape()


# **The bounds.** Each takes the arguments of its operation, what the backend declares, and the reference's result.


def softmax_bound(scores: Activations, arithmetic: Arithmetic, exact: F64) -> Bound:
    """The bound of `attention.softmax`.

    Raises:
        ArgumentError: the declared arithmetic would allow more than a tenth.
    """
    limit, inputs = np.zeros(scores.shape), scores.dtype.name
    for row, given in enumerate(scores.astype(np.float64)):
        seen = np.isfinite(given)  # −∞ has a probability of exactly 0 and adds nothing to the sum
        logits = given[np.newaxis, seen]
        for steps in (declared(arithmetic, inputs), REFERENCE):
            limit[row, seen] += softmax_error(steps, logits, np.zeros_like(logits))[0]
    how = f"softmax of {scores.shape[1]} scores in {arithmetic.accumulator}"
    bound = returned(Bound(limit, exact, how), exact, inputs)
    return Bound(np.where(np.isfinite(scores.astype(np.float64)), bound.limit, 0.0), exact, bound.derivation)


def attend_bound(
    queries: Activations,
    keys: Activations,
    values: Activations,
    window: int | None,
    arithmetic: Arithmetic,
    exact: F64,
) -> Bound:
    """The bound of `attention.attend`, head by head and token by token.

    Raises:
        ArgumentError: the declared arithmetic would allow more than a tenth.
    """
    return _bound(queries, keys, values, window, [PLAIN] * queries.shape[1], arithmetic, exact)


def attend_shaped_bound(
    queries: Activations,
    keys: Activations,
    values: Activations,
    window: int | None,
    scale: float | None,
    cap: float | None,
    sinks: Activations | None,
    arithmetic: Arithmetic,
    exact: F64,
) -> Bound:
    """The bound of `attention.attend_shaped`, likewise; a sink adds the roundings of one more token to the softmax.

    Raises:
        ArgumentError: the declared arithmetic would allow more than a tenth.
    """
    own = [-np.inf] * queries.shape[1] if sinks is None else sinks.astype(np.float64)
    return _bound(queries, keys, values, window, [Shape(scale, cap, float(sink)) for sink in own], arithmetic, exact)


def _bound(
    queries: Activations,
    keys: Activations,
    values: Activations,
    window: int | None,
    shapes: list[Shape],
    arithmetic: Arithmetic,
    exact: F64,
) -> Bound:
    tokens, heads, _ = queries.shape
    kv_heads, length, _ = keys.shape
    limit, gauge, inputs = np.zeros(queries.shape), np.zeros(queries.shape), queries.dtype.name
    for t in range(tokens):
        end = length - tokens + t + 1
        first = 0 if window is None else max(0, end - window)
        for h in range(heads):
            j = h * kv_heads // heads
            seen, read = keys[j, first:end], values[j, first:end]
            for steps in (declared(arithmetic, inputs), REFERENCE):
                limit[t, h] += head_error(steps, queries[t, h], seen, read, shapes[h])
            gauge[t, h] = np.abs(read.astype(np.float64)).max(axis=0)
    how = f"scores, softmax and output of {length} tokens in {arithmetic.accumulator}"
    return returned(Bound(limit, gauge, how), exact, inputs)


def head_error(steps: Steps, query: Activations, keys: Activations, values: Activations, shape: Shape = PLAIN) -> F64:
    """The error of one head of one token over the tokens it attends to: float64, d_h."""
    wide = query[np.newaxis].astype(np.float64)
    products = wide @ keys.T.astype(np.float64)
    error = product_error(steps, wide, np.zeros_like(wide), np.ascontiguousarray(keys.T))
    scores, off = _scores(steps, products, error, query.size, shape)
    if shape.sink > -np.inf:
        scores, off = np.append(scores, [[shape.sink]], axis=1), np.append(off, [[0.0]], axis=1)
    probabilities = softmax(scores)
    probability_error = steps.passed(probabilities, softmax_error(steps, scores, off))
    tokens = len(keys)
    result: F64 = product_error(steps, probabilities[:, :tokens], probability_error[:, :tokens], values)[0]
    return result


def _scores(steps: Steps, products: F64, error: F64, head_dim: int, shape: Shape) -> tuple[F64, F64]:
    """Scores and their errors, from the products of queries and keys and the errors of those."""
    factor = 1 / np.sqrt(head_dim) if shape.scale is None else shape.scale
    scores = products * factor
    own = gamma(SCALE_ROUNDINGS, steps.unit) * (np.abs(products) + error) * factor + HALF_LEAST_SUBNORMAL
    off = steps.passed(scores, error * factor + own)
    if shape.cap is None:
        return scores, off
    capped = soft_cap(scores, shape.cap)
    return capped, steps.passed(capped, soft_cap_error(steps, scores, off, shape.cap))
