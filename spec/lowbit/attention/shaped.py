r"""Attention with shaped scores: a factor, a soft cap, and sinks.

In plain attention (`attention`) a score is a product over :math:`\sqrt{d_h}`, and the probabilities of the tokens that
a token sees sum to 1. Models change three things.

**A factor.** Gemma 2 and Gemma 3 divide by the root of a number of their own instead of :math:`\sqrt{d_h}`: scores are
multiplied by a factor :math:`a`.

**A soft cap** :math:`c` keeps scores between :math:`-c` and :math:`c`, so that none of them can grow without limit in
training. Gemma 2 caps the scores, and with another number the logits of the head.

**A sink** is a score :math:`s_h` beside those of the tokens, one for each query head, that belongs to no token. It
takes a part of the probability and adds nothing to the result, so a head can give little weight to all tokens. GPT-OSS
learns one for each head.

For query head :math:`h` of group :math:`j` and the token at position :math:`t`,

.. math::

    \mathrm{score}_u = c \tanh\Bigl(\frac{a\, q_{t,h} \cdot k_{u,j}}{c}\Bigr), \qquad
    o_{t,h} = \sum_{u \le t} \frac{e^{\mathrm{score}_u}}{e^{s_h} + \sum_{v \le t} e^{\mathrm{score}_v}}\, v_{u,j}.

The sums begin where a window does. Masked tokens are left out after the cap, so a cap does not bring them back.

Source: Gemma 2 (arXiv 2408.00118) §2; attention sinks (arXiv 2309.17453) §3; the reference implementation of GPT-OSS.
"""

from typing import Annotated, Any

import numpy as np

from lowbit.arrays import F64, Activations
from lowbit.attention.attention import attended, check_grouping
from lowbit.contract.operation import BOUNDED, Parameters, operation
from lowbit.contract.signature import FINITE, ONE_TYPE, In, Shape, View, checked
from lowbit.errors import ArgumentError

MOST = 2.0**32
"""The largest factor or cap, and the inverse of the least; beyond the scores of any model. Their quotient is a normal
float32."""


@checked(also=check_grouping)
def attend_shaped(
    queries: Annotated[F64, View("T", "H", "d_h")],
    keys: Annotated[F64, View("G", "S", "d_h")],
    values: Annotated[F64, View("G", "S", "d_h")],
    window: Annotated[int, In(1)] | None = None,
    scale: Annotated[float, In(1 / MOST, MOST)] | None = None,
    cap: Annotated[float, In(1 / MOST, MOST)] | None = None,
    sinks: Annotated[F64, Shape("H")] | None = None,
) -> F64:
    r"""Grouped-query attention with a factor, a soft cap and sinks.

    A sink with the same score as the only visible token takes half of the probability:

    >>> import numpy as np
    >>> queries, keys, values = np.zeros((1, 1, 2)), np.ones((1, 1, 2)), np.full((1, 1, 2), 3.0)
    >>> attend_shaped(queries, keys, values, sinks=np.zeros(1))
    array([[[1.5, 1.5]]])

    Args:
        queries: float64, T × H × d_h, as for `lowbit.attention.attention.attend`.
        keys: float64, G × S × d_h; G divides H.
        values: float64, G × S × d_h.
        window: how many tokens a token attends to, itself included; None for all.
        scale: the factor of the products, :math:`a`; None for :math:`1/\sqrt{d_h}`.
        cap: the soft cap, :math:`c`; None for none.
        sinks: float64, H: the score of each head's sink, :math:`s_h`; None for no sinks.

    Returns:
        float64, T × H × d_h.

    Raises:
        ArgumentError: shapes that do not match; a window below 1; a factor or a cap out of range.

    Source: Gemma 2 §2; the reference implementation of GPT-OSS.
    """
    return attended(queries, keys, values, window, scale, cap=cap, sinks=sinks)


# **What a backend promises.** As in the chapter `attention`, all arrays, including sinks, are of one type. A sink of −∞
# means no sink. The bound is derived in the chapter `lowbit.attention.bounds`.


def _check(
    queries: Any,
    keys: Any,
    values: Any,
    window: int | None,
    scale: float | None,
    cap: float | None,
    sinks: Activations | None,
) -> None:
    check_grouping(queries, keys)
    if sinks is not None:
        wide = sinks.astype(np.float64)
        if np.isnan(wide).any() or np.isposinf(wide).any():
            raise ArgumentError("sinks", "NaN or +∞ somewhere", "finite numbers and −∞")


@checked(also=_check)
def attend_shaped_to(
    queries: Annotated[Activations, Shape("T", "H", "d_h"), FINITE, ONE_TYPE],
    keys: Annotated[Activations, Shape("G", "S", "d_h"), FINITE, ONE_TYPE],
    values: Annotated[Activations, Shape("G", "S", "d_h"), FINITE, ONE_TYPE],
    window: Annotated[int, In(1)] | None = None,
    scale: Annotated[float, In(1 / MOST, MOST)] | None = None,
    cap: Annotated[float, In(1 / MOST, MOST)] | None = None,
    sinks: Annotated[Activations, Shape("H"), ONE_TYPE] | None = None,
) -> F64:
    """`attend_shaped` for float32, float16 or bfloat16 inputs, in float64: the reference of `attention.attend_shaped`.

    Arguments and result are those of `attend_shaped`; a sink may be −∞.

    Raises:
        ArgumentError: wrong dtypes, shapes or layouts; numbers that are not finite, apart from a sink of −∞; a window
            below 1; a factor or a cap out of range.
    """
    wide = queries.astype(np.float64), keys.astype(np.float64), values.astype(np.float64)
    return attended(*wide, window, scale, cap=cap, sinks=None if sinks is None else sinks.astype(np.float64))


def _parameters(
    queries: Activations,
    keys: Activations,
    values: Activations,
    window: int | None = None,
    scale: float | None = None,
    cap: float | None = None,
    sinks: Activations | None = None,
) -> Parameters:
    return {
        "head_dim": queries.shape[2],
        "window": "none" if window is None else "sliding",
        "cap": "none" if cap is None else "soft",
        "sinks": "none" if sinks is None else "per-head",
    }


operation(
    "attention.attend_shaped",
    "Grouped-query attention with a factor, a soft cap and sinks",
    attend_shaped_to,
    promise=BOUNDED,
    source="Gemma 2 (arXiv 2408.00118) §2; attention sinks (arXiv 2309.17453) §3; GPT-OSS",
    parameters=_parameters,
    clauses={
        "C1": "Where the scores that a token sees and the sink of its head are all equal, and a power of two of them "
        "together, the result is the sum of the values over their number, exactly where that sum is exact.",
        "C2": "Where one score, after the cap, lies 200 and more above all others and the sink, the result is that "
        "token's value exactly; where the sink lies 200 and more above all scores, it is 0; query head h reads "
        "key-value head ⌊h / r⌋.",
        "C3": "Where no sum of products overflows, each element differs from the exact one by at most the derived "
        "bound, however large a capped score is.",
        "C4": "A token depends on no later token, with a window of w on none before the w − 1 that precede it, and a "
        "query head on no other head's sink: changing those changes no bit.",
    },
)
