r"""Routing: a layer of many experts, of which each token uses a few.

A *sparse* layer holds :math:`E` feed-forward networks, its *experts*; a dense layer holds a single one. A small linear
layer, the *gate*, scores the experts for each token; the token runs through the :math:`k` with the best scores, and
their results are added, weighted by the scores. The model has the parameters of all experts but the running time of
:math:`k`: in Mixtral two of eight. But the weights that a token needs are known only when the token arrives, which is
the problem of the chapter `lowbit.moe.offload`.

**Gate.** For an input :math:`x` of the layer and the gate's matrix :math:`W_r` (hidden × E),

.. math:: l = x W_r, \qquad p = \mathrm{softmax}(l).

**Choice.** :math:`\mathcal{T}` are the :math:`k` experts of the greatest scores. Among equal scores the lowest id comes
first, so the choice depends only on the scores.

**Weights.** Two orders are in use, and both give weights that sum to 1:

.. math::

    \text{softmax after the choice:} \qquad & w_e = \frac{e^{l_e}}{\sum_{i \in \mathcal{T}} e^{l_i}} \\
    \text{softmax before it, renormalised:} \qquad & w_e = \frac{p_e}{\sum_{i \in \mathcal{T}} p_i}

They are the same number, because the denominator of :math:`p` cancels; they differ in rounding, and where two unequal
logits round to one probability, the choice may differ.

**Experts** are SwiGLU networks, :math:`E_e(x) = (\mathrm{silu}(x W_{gate,e}) \otimes x W_{up,e})\,W_{down,e}` with
:math:`\mathrm{silu}(a) = a/(1 + e^{-a})`.

**The layer** is the sum of the experts that were chosen, each computed as if it were alone:

.. math:: y = \sum_{e \in \mathcal{T}} w_e\, E_e(x), \qquad \text{added in ascending order of } e.

The order of the sum is fixed because floating-point addition is not associative and an engine runs experts in the order
in which they arrive in memory. An engine keeps the results separate until all have arrived, so that its output cannot
depend on what was cached or guessed.

A choice is discontinuous, so the chapter is divided there: `gate` is measured by its scores, `top_k` is exact for given
scores, and `sparse` takes its routes as arguments.

Source: MoE offloading §2.1 (Shazeer et al., arXiv 1701.06538, §2.1 for the gate; arXiv 2401.04088 §2.1 for softmax
after the choice); SwiGLU, arXiv 2002.05202 equation 6. Ties and the order of the sum are this project's.
"""

from typing import Annotated, Literal, get_args

import numpy as np

from lowbit.arrays import F64, I64, Activations
from lowbit.contract.operation import BOUNDED, EXACT, operation
from lowbit.contract.signature import CHOICE, FINITE, ONE_TYPE, In, Shape, checked
from lowbit.errors import ArgumentError
from lowbit.linear import elementary
from lowbit.linear.elementary import product, silu

Ids = I64

Scores = Literal["logits", "probabilities"]
SCORES: tuple[Scores, ...] = get_args(Scores)
Softmax = Literal["before", "after"]
SOFTMAXES: tuple[Softmax, ...] = get_args(Softmax)


# **Gate and choice.** Arrays are float32, float16 or bfloat16, one type per call. Scores and weights have that type
# too, as PyTorch's layers return them. If a kernel returns float32 for 16-bit inputs, as vLLM's does for the weights,
# its caller rounds. If a kernel takes float32, its caller widens, which is exact.


@checked
def gate(
    x: Annotated[Activations, Shape("T", "hidden"), ONE_TYPE],
    router: Annotated[Activations, Shape("hidden", "E"), ONE_TYPE],
    scores: Scores = "logits",
) -> F64:
    """The score of every expert for every token.

    >>> router = np.array([[1, 0, 2]], np.float32)
    >>> gate(np.array([[3.0]], np.float32), router)
    array([[3., 0., 6.]])
    >>> gate(np.array([[0.0]], np.float32), router, "probabilities").round(4)
    array([[0.3333, 0.3333, 0.3333]])

    Args:
        x: float32, float16 or bfloat16, T × hidden.
        router: of the same type, hidden × E.
        scores: ``logits``, or ``probabilities`` after a softmax over all experts.

    Returns:
        float64, T × E.

    Raises:
        ArgumentError: wrong dtype, shape or layout; another kind of scores.

    Source: MoE offloading §2.1.
    """
    logits = product(x, router.astype(np.float64))
    with np.errstate(invalid="ignore"):
        return logits if scores == "logits" else elementary.softmax(logits)


@checked
def top_k(
    scores: Annotated[Activations, Shape("T", "E"), FINITE, ONE_TYPE], k: Annotated[int, In(1, "E"), CHOICE]
) -> Ids:
    """The k experts with the highest scores, best first; ties by lowest id first.

    >>> top_k(np.array([[0.5, 2.0, 0.5, 2.0]], np.float32), k=3)
    array([[1, 3, 0]])

    Args:
        scores: float32, float16 or bfloat16, T × E, finite; +0 and −0 are equal.
        k: 1 to E.

    Returns:
        int64, T × k.

    Raises:
        ArgumentError: wrong dtype, shape or layout; a score that is not finite, which has no rank; k out of range.
    """
    order = np.argsort(-scores.astype(np.float64), axis=1, kind="stable")  # ties keep their order
    return order[:, :k].astype(np.int64)


def check_chosen(chosen: Ids, experts: int) -> None:
    """Refuse anything but distinct ids of existing experts."""
    if chosen.min() < 0 or chosen.max() >= experts:
        given = chosen.min() if chosen.min() < 0 else chosen.max()
        raise ArgumentError("an id in chosen", given, f"0 to {experts - 1}")
    ascending = np.sort(chosen, axis=1)
    if (ascending[:, 1:] == ascending[:, :-1]).any():
        raise ArgumentError("chosen", "an expert twice for one token", "distinct experts")


def _check_weights(scores: Activations, chosen: Ids, softmax: Softmax) -> None:
    check_chosen(chosen, scores.shape[1])
    scores = scores.astype(np.float32)
    if softmax == "before":
        if (scores < 0).any():
            raise ArgumentError("scores", f"as low as {scores.min()}", "probabilities of at least 0")
        if not np.take_along_axis(scores, chosen, axis=1).any(axis=1).all():
            raise ArgumentError("scores", "0 for all the chosen experts of a token", "a chosen expert above 0")


@checked(also=_check_weights)
def weights(
    scores: Annotated[Activations, Shape("T", "E"), FINITE, ONE_TYPE],
    chosen: Annotated[Ids, Shape("T", "k")],
    softmax: Softmax = "after",
) -> F64:
    """The weights of the chosen experts, which sum to 1 for each token.

    >>> logits, chosen = np.log(np.array([[1, 3, 4]], np.float32)), np.array([[2, 1]])
    >>> weights(logits, chosen).round(4)
    array([[0.5714, 0.4286]])
    >>> weights(np.array([[0.125, 0.375, 0.5]], np.float32), chosen, "before").round(4)
    array([[0.5714, 0.4286]])

    Args:
        scores: float32, float16 or bfloat16, T × E, finite: logits with the softmax ``after`` the choice;
            non-negative probabilities, with the softmax ``before`` it.
        chosen: int64, T × k: distinct experts.
        softmax: ``after`` or ``before``.

    Returns:
        float64, T × k, in the order of `chosen`.

    Raises:
        ArgumentError: wrong dtype, shape or layout; ids out of range or repeated; probabilities that are negative, or 0
            for all chosen experts.

    Source: MoE offloading §2.1.
    """
    own = np.take_along_axis(scores, chosen, axis=1).astype(np.float64)
    if softmax == "after":
        return elementary.softmax(own)
    total: F64 = own.sum(axis=1, keepdims=True)
    return own / total


# **Experts and the layer.** The formula of the layer goes token by token. A layer whose weights must be copied to the
# device goes expert by expert, and processes all tokens of an expert while its weights are there. Both add the same
# numbers in the same order.


@checked
def expert(
    x: Annotated[Activations, Shape("T", "hidden"), ONE_TYPE],
    gate: Annotated[Activations, Shape("hidden", "feed_forward"), ONE_TYPE],
    up: Annotated[Activations, Shape("hidden", "feed_forward"), ONE_TYPE],
    down: Annotated[Activations, Shape("feed_forward", "hidden"), ONE_TYPE],
) -> F64:
    """One SwiGLU expert.

    >>> one = np.ones((1, 1), np.float32)
    >>> expert(np.array([[2.0]], np.float32), one, one, one).round(4)  # silu(2) · 2
    array([[3.5232]])

    Args:
        x: float32, float16 or bfloat16, T × hidden.
        gate: of the same type, hidden × feed_forward.
        up: of the same type, hidden × feed_forward.
        down: of the same type, feed_forward × hidden.

    Returns:
        float64, T × hidden.

    Raises:
        ArgumentError: wrong dtype, shape or layout.

    Source: arXiv 2002.05202, equation 6.
    """
    return _swiglu_expert(x, gate, up, down)


def _swiglu_expert(x: Activations, *matrices: Activations) -> F64:
    """`expert` for checked arguments."""
    gate, up, down = (matrix.astype(np.float64) for matrix in matrices)
    with np.errstate(invalid="ignore", over="ignore"):
        inner = silu(product(x, gate)) * product(x, up)
    return product(inner, down)


def _check_sparse(
    x: Activations, gate: Activations, up: Activations, down: Activations, chosen: Ids, weights: Activations
) -> None:
    check_chosen(chosen, len(gate))


@checked(also=_check_sparse)
def sparse(
    x: Annotated[Activations, Shape("T", "hidden"), ONE_TYPE],
    gate: Annotated[Activations, Shape("E", "hidden", "feed_forward"), ONE_TYPE],
    up: Annotated[Activations, Shape("E", "hidden", "feed_forward"), ONE_TYPE],
    down: Annotated[Activations, Shape("E", "feed_forward", "hidden"), ONE_TYPE],
    chosen: Annotated[Ids, Shape("T", "k")],
    weights: Annotated[Activations, Shape("T", "k"), ONE_TYPE],
) -> F64:
    """The sparse layer: for each token the weighted sum of its experts, in ascending order of their ids.

    Args:
        x: float32, float16 or bfloat16, T × hidden.
        gate: of the same type, E × hidden × feed_forward: the experts one after another.
        up: of the same type, E × hidden × feed_forward.
        down: of the same type, E × feed_forward × hidden.
        chosen: int64, T × k: distinct experts for each token.
        weights: of the same type, T × k, in the order of `chosen`.

    Returns:
        float64, T × hidden. Experts that no token chose are not read.

    Raises:
        ArgumentError: wrong dtype, shape or layout; ids out of range or twice.

    Source: MoE offloading §2.1.
    """
    y = np.zeros(x.shape)
    for e in np.unique(chosen):  # ascending
        tokens, place = np.nonzero(chosen == e)
        answers = _swiglu_expert(x[tokens], gate[e], up[e], down[e])
        with np.errstate(invalid="ignore", over="ignore"):
            y[tokens] += weights[tokens, place, np.newaxis].astype(np.float64) * answers
    return y


# **What a backend promises.** The bounds are derived in the chapter `lowbit.moe.bounds`.

operation(
    "routing.gate",
    "Scores of the experts",
    gate,
    promise=BOUNDED,
    source="MoE offloading §2.1",
    clauses={
        "C1": "Where every partial sum is exactly representable in the declared accumulator, the logits equal x W "
        "exactly.",
        "C2": "For finite x without overflow, each logit differs from x W by at most the bound derived from the "
        "declared arithmetic.",
        "C3": "Likewise each probability differs from the softmax of x W by at most its derived bound.",
        "C4": "The result has the type of x, T × E; row t depends on nothing but row t of x and the router; the same "
        "call gives the same bits.",
        "C5": "A NaN or an infinity in row t makes no finite logit in row t, and changes no other row.",
    },
)

operation(
    "routing.top_k",
    "The choice of experts",
    top_k,
    promise=EXACT,
    source="MoE offloading §2.1; ties are this project's",
    clauses={
        "C1": "Row t holds the k experts of the greatest scores of row t, best first.",
        "C2": "Of equal scores, +0 and −0 among them, the lowest id goes first and is chosen first.",
        "C3": "The result is int64, T × k.",
    },
)

operation(
    "routing.weights",
    "Weights of the chosen experts",
    weights,
    promise=BOUNDED,
    source="MoE offloading §2.1; arXiv 2401.04088 §2.1",
    clauses={
        "C1": "With the softmax after the choice, each weight differs from the softmax of the chosen logits by at "
        "most the derived bound.",
        "C2": "With the softmax before it, each weight differs from its probability divided by the sum of the chosen "
        "ones by at most the derived bound.",
        "C3": "Equal scores of one token have equal weights; a single chosen expert has weight 1.",
    },
)

operation(
    "routing.expert",
    "One SwiGLU expert",
    expert,
    promise=BOUNDED,
    source="arXiv 2002.05202 equation 6",
    clauses={
        "C1": "Where silu(a) is a or 0 to the bit and every partial sum is exact, the result equals the formula's.",
        "C2": "For finite inputs without overflow, each element differs from the formula by at most the bound derived "
        "from the declared arithmetic.",
        "C3": "The result has the type of x, T × hidden; row t depends on nothing but row t of x and the weights; the "
        "same call gives the same bits.",
        "C4": "A NaN or an infinity in row t leaves no finite element in row t, and changes no other row.",
    },
)

operation(
    "routing.sparse",
    "The sparse layer, its routes given",
    sparse,
    promise=BOUNDED,
    source="MoE offloading §2.1; the order of the sum is this project's",
    clauses={
        "C1": "Where every expert is exact as in routing.expert/C1 and so is the weighted sum, the result equals it.",
        "C2": "For finite inputs without overflow, each element differs from the weighted sum by at most the bound "
        "derived from the declared arithmetic.",
        "C3": "The order in which a token lists its experts does not change a bit: the sum goes by ascending id.",
        "C4": "Only the experts that a token chose enter its row: NaN in the weights of all others changes nothing.",
    },
)
