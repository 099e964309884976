r"""Bounds of attention: how far a correct softmax, or a correct head, may lie from the exact one.

Attention is a chain: scores are sums, a softmax turns them into probabilities, and the output is a sum again. The steps
are those of `lowbit.linear.propagation`; here they are composed.

**Scores.** A score is a sum of :math:`d_h` products with an error of at most :math:`\gamma_D \sum |q||k|`, divided by
:math:`\sqrt{d_h}`: a root and a quotient, three roundings more.

**Probabilities** are the softmax of these scores: an absolute error of a score becomes a relative error of a
probability.

**The output** is a sum over the tokens that are seen, of inexact probabilities times exact values.

**Between the steps** a kernel of 16 bits may round scores and probabilities to the type of its inputs, as flash
attention does with probabilities before it multiplies them by values.

Source: N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., §3.1, Lemma 3.1.
"""

import numpy as np

from lowbit.arrays import F64, Activations
from lowbit.contract.rounding import HALF_LEAST_SUBNORMAL, Arithmetic, Bound, gamma, returned
from lowbit.linear.elementary import softmax
from lowbit.linear.propagation import REFERENCE, Steps, declared, product_error, softmax_error

SCALE_ROUNDINGS = 3


# **The bounds.** Each takes the arguments of its operation, what the backend declares, and the reference's result.


def softmax_bound(scores: Activations, arithmetic: Arithmetic, exact: F64) -> Bound:
    """The bound of `attention.softmax`.

    Raises:
        ArgumentError: the declared arithmetic would allow more than a tenth.
    """
    limit, inputs = np.zeros(scores.shape), scores.dtype.name
    for row, given in enumerate(scores.astype(np.float64)):
        seen = np.isfinite(given)  # −∞ has a probability of exactly 0, and takes no part in the sum
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
                limit[t, h] += head_error(steps, queries[t, h], seen, read)
            gauge[t, h] = np.abs(read.astype(np.float64)).max(axis=0)
    how = f"scores, softmax and output of {length} tokens in {arithmetic.accumulator}"
    return returned(Bound(limit, gauge, how), exact, inputs)


def head_error(steps: Steps, query: Activations, keys: Activations, values: Activations) -> F64:
    """The error of one head of one token over the tokens that it sees: float64, d_h."""
    wide, root = query[np.newaxis].astype(np.float64), np.sqrt(query.size)
    products = wide @ keys.T.astype(np.float64)
    error = product_error(steps, wide, np.zeros_like(wide), np.ascontiguousarray(keys.T))
    scores = products / root
    off = error / root + gamma(SCALE_ROUNDINGS, steps.unit) * (np.abs(products) + error) / root + HALF_LEAST_SUBNORMAL
    probabilities = softmax(scores)
    probability_error = steps.passed(probabilities, softmax_error(steps, scores, steps.passed(scores, off)))
    result: F64 = product_error(steps, probabilities, probability_error, values)[0]
    return result
