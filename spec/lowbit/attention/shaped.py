r"""Attention with shaped scores: a factor, a soft cap, and sinks.

In plain attention (`attention`) a score is a product over :math:`\sqrt{d_h}`, and the probabilities of the tokens that
a token sees sum to 1. Models change three things.

**A factor.** Gemma 2 and Gemma 3 divide by the root of a number of their own instead of :math:`\sqrt{d_h}`: scores are
multiplied by a factor :math:`a`.

**A soft cap** :math:`c` keeps scores between :math:`-c` and :math:`c`, so that none of them can grow without limit in
training. Gemma 2 caps the scores, and with another number the logits of the head.

**A sink** is a score :math:`s_h` beside those of the tokens, one for each query head, that belongs to no token. It
takes a part of the probability and adds nothing to the result, so a head that finds nothing to read can read little.
GPT-OSS learns one for each head.

For query head :math:`h` of group :math:`j` and the token at position :math:`t`,

.. math::

    \mathrm{score}_u = c \tanh\Bigl(\frac{a\, q_{t,h} \cdot k_{u,j}}{c}\Bigr), \qquad
    o_{t,h} = \sum_{u \le t} \frac{e^{\mathrm{score}_u}}{e^{s_h} + \sum_{v \le t} e^{\mathrm{score}_v}}\, v_{u,j}.

The sums begin where a window does. A token that is not seen is left out after the cap, which is why a cap does not
bring it back.

Source: Gemma 2 (arXiv 2408.00118) §2; attention sinks (arXiv 2309.17453) §3; the reference implementation of GPT-OSS.
"""

from typing import Annotated

from lowbit.arrays import F64
from lowbit.attention.attention import attended, check_grouping
from lowbit.contract.signature import In, Shape, View, checked

MOST = 2.0**64
"""Of a factor or a cap, and the inverse of the least; beyond the scores of any model."""


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

    A sink that scores as much as the only token that is seen takes half of the probability:

    >>> import numpy as np
    >>> queries, keys, values = np.zeros((1, 1, 2)), np.ones((1, 1, 2)), np.full((1, 1, 2), 3.0)
    >>> attend_shaped(queries, keys, values, sinks=np.zeros(1))
    array([[[1.5, 1.5]]])

    Args:
        queries: float64, T × H × d_h, as for `lowbit.attention.attention.attend`.
        keys: float64, G × S × d_h; G divides H.
        values: float64, G × S × d_h.
        window: how many tokens a token sees, itself included; None for all.
        scale: what products are multiplied by, :math:`a`; None for :math:`1/\sqrt{d_h}`.
        cap: the soft cap, :math:`c`; None for none.
        sinks: float64, H: the score of each head's sink, :math:`s_h`; None for no sinks.

    Returns:
        float64, T × H × d_h.

    Raises:
        ArgumentError: shapes that do not belong together; a window below 1; a factor or a cap out of range.

    Source: Gemma 2 §2; the reference implementation of GPT-OSS.
    """
    return attended(queries, keys, values, window, scale, cap=cap, sinks=sinks)
