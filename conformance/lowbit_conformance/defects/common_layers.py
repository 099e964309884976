"""The commonest mistakes between products: attention and RoPE, norms, gates and routing."""

from collections.abc import Callable
from typing import Any

import numpy as np

from lowbit.arrays import F32, Array
from lowbit.attention.rope import Rotation
from lowbit.linear.elementary import softmax
from lowbit_conformance.defects.activations import mean_square, normed
from lowbit_conformance.defects.attention import replacing, visible
from lowbit_conformance.defects.defect import MOVES, of
from lowbit_conformance.defects.experts import expert, sparse
from lowbit_conformance.defects.heads import rotate
from lowbit_conformance.defects.routes import product as logits_of

# **Attention and RoPE.**


def first_seen(tokens: int, length: int, window: int | None) -> Array:
    """All keys, whether they come before or after."""
    position = np.arange(length - tokens, length)[:, None]
    every = np.ones((tokens, length), np.bool_)
    return every if window is None else every & (np.arange(length) > position - window)


def narrower(tokens: int, length: int, window: int | None) -> Array:
    return visible(tokens, length, None if window is None else max(window - 1, 1))


def others_only(tokens: int, length: int, window: int | None) -> Array:
    """A token does not see itself, but the first, which has no other."""
    seen = visible(tokens, length, window)
    position = np.arange(length - tokens, length)
    lonely = seen.sum(axis=1) == 1
    seen[~lonely, position[~lonely]] = False
    return seen


def attend_undivided(queries: F32, keys: F32, values: F32, window: int | None = None) -> Array:
    tokens, heads, channels = queries.shape
    groups, length, _ = keys.shape
    result = np.empty(queries.shape)
    with np.errstate(all="ignore"):
        for h in range(heads):
            j = h * groups // heads
            scores = queries[:, h].astype(np.float64) @ keys[j].astype(np.float64).T / np.sqrt(channels)
            hidden = np.where(visible(tokens, length, window), scores, -np.inf)
            powers = np.exp(hidden - hidden.max(axis=1, keepdims=True))
            result[:, h] = powers @ values[j].astype(np.float64)
    return result


def undivided(scores: F32) -> Array:
    with np.errstate(all="ignore"):
        wide = scores.astype(np.float64)
        answer: Array = np.exp(wide - wide.max(axis=1, keepdims=True))
    return answer


def in_powers_of_2(scores: F32) -> Array:
    return softmax(scores.astype(np.float64) * np.log(2.0))


def along_columns(scores: F32) -> Array:
    return softmax(scores.astype(np.float64).T).T


def turned(cos: Callable[[Array, Array], Array], sin: Callable[[Array, Array], Array]) -> Callable[..., Array]:
    def run(x: F32, rotation: Rotation) -> Array:
        return rotate(x, Rotation(rotation.layout, cos(rotation.cos, rotation.sin), sin(rotation.cos, rotation.sin)))

    return run


def shifted(by: int) -> Callable[..., Array]:
    """Positions that are off, with the first or the last of them kept at the ends."""

    def rows(part: Array) -> Array:
        return part[np.clip(np.arange(len(part)) + by, 0, len(part) - 1)]

    return turned(lambda cos, sin: rows(cos), lambda cos, sin: rows(sin))


def strided_values(h: int, heads: int, groups: int) -> int:
    return h % groups


HEADS = (
    of(
        "attention.attend",
        "keys-of-first-head",
        "Values go by group, and keys are always of the first.",
        "C3",
        replacing(head=lambda h, heads, groups: 0, value_head=lambda h, heads, groups: h * groups // heads),
    ),
    of(
        "attention.attend",
        "value-heads-strided",
        "Query head h reads the values of key-value head h mod G.",
        "C1 C2 C3",
        replacing(value_head=strided_values),
    ),
    of(
        "attention.attend",
        "mask-left-out",
        "A token sees all that come after it.",
        "C1 C3 C4",
        replacing(see=first_seen),
        verdicts=MOVES,
    ),
    of(
        "attention.attend",
        "window-one-too-narrow",
        "A window of w lets a token see w - 1.",
        "C3",
        replacing(see=narrower),
    ),
    of(
        "attention.attend",
        "own-token-hidden",
        "A token does not see itself.",
        "C3",
        replacing(see=others_only),
    ),
    of(
        "attention.attend",
        "attention-not-divided",
        "Exponentials are not divided by their sum.",
        "C3",
        attend_undivided,
    ),
    of("attention.softmax", "softmax-not-divided", "Exponentials are not divided by their sum.", "C2", undivided),
    of("attention.softmax", "powers-of-2", "Powers are of 2 and not of e.", "C2", in_powers_of_2),
    of(
        "attention.softmax",
        "softmax-along-columns",
        "Columns sum to 1, and not rows.",
        "C2 C3",
        along_columns,
        verdicts=MOVES,
    ),
    of("rope.rotate", "position-one-ahead", "A token is turned by the angle of the one after it.", "C2", shifted(1)),
    of(
        "rope.rotate",
        "position-one-behind",
        "A token is turned by the angle before its own, but the first.",
        "C2",
        shifted(-1),
    ),
    of(
        "rope.rotate",
        "cosine-and-sine-exchanged",
        "Cosines are taken for sines, and sines for cosines.",
        "C1 C2",
        turned(lambda cos, sin: sin, lambda cos, sin: cos),
    ),
    of(
        "rope.rotate",
        "first-position-for-all",
        "All tokens are turned by the angle of the first.",
        "C2",
        turned(lambda cos, sin: np.repeat(cos[:1], len(cos), 0), lambda cos, sin: np.repeat(sin[:1], len(sin), 0)),
    ),
    of(
        "rope.rotate", "not-rotated", "Heads come back as they were.", "C1 C2", lambda x, rotation: x.astype(np.float64)
    ),
    of(
        "rope.rotate",
        "sine-left-out",
        "Channels are only multiplied by cosines.",
        "C1 C2",
        turned(lambda c, s: c, lambda c, s: 0 * s),
    ),
)

# **Norms, gates, routing.**


def over(
    root: Callable[[Array, float], Array], gain: Callable[[F32], F32] = lambda given: given
) -> Callable[..., Array]:
    return lambda x, given, epsilon: normed(x, gain(given), root(mean_square(x), epsilon))


def relu(a: Array) -> Array:
    return np.maximum(a, 0)


def sigmoid(a: Array) -> Array:
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-a))


def silu(a: Array) -> Array:
    return a * sigmoid(a)


def gated(of_gate: Callable[[Array], Array], of_up: Callable[[Array], Array] = lambda up: up) -> Callable[..., Array]:
    def run(gate: F32, up: F32) -> Array:
        with np.errstate(all="ignore"):
            return of_gate(gate.astype(np.float64)) * of_up(up.astype(np.float64))

    return run


def by_key(key: Callable[[Array], Array], change: Callable[[Array], Array] = lambda ids: ids) -> Callable[..., Array]:
    def run(scores: F32, k: int) -> Array:
        return np.ascontiguousarray(change(np.argsort(key(scores), axis=1, kind="stable")[:, :k]), np.int64)

    return run


def softmax_again(scores: F32, chosen: Any, softmax_of: str = "after") -> Array:
    own = np.take_along_axis(scores, chosen, axis=1).astype(np.float64)
    return softmax(own)


def of_first_token(x: F32, gate: F32, up: F32, down: F32, chosen: Any, weights: F32) -> Array:
    return sparse(x, gate, up, down, chosen, np.repeat(weights[:1], len(weights), axis=0))


def all_ones(x: F32, gate: F32, up: F32, down: F32, chosen: Any, weights: F32) -> Array:
    return sparse(x, gate, up, down, chosen, np.ones_like(weights))


def last_left_out(x: F32, gate: F32, up: F32, down: F32, chosen: Any, weights: F32) -> Array:
    kept = weights.copy()
    kept[:, -1] = 0
    return sparse(x, gate, up, down, chosen, kept)


def gate_by(choose: Callable[[Array, str], Array]) -> Callable[..., Array]:
    def run(x: F32, router: F32, scores: str = "logits") -> Array:
        with np.errstate(all="ignore"):
            return choose(logits_of(x, router), scores)

    return run


LAYERS = (
    of(
        "blocks.rms_norm",
        "gain-left-out",
        "Rows are not multiplied by the gain.",
        "C2",
        over(lambda m, e: np.sqrt(m + e), np.ones_like),
    ),
    of(
        "blocks.rms_norm",
        "root-left-out",
        "Rows are divided by the mean square and not by its root.",
        "C2",
        over(lambda m, e: m + e),
    ),
    of("blocks.swiglu", "relu-for-silu", "The activation is a ReLU.", "C2", gated(relu)),
    of("blocks.swiglu", "silu-of-both", "The activation is applied to up as well.", "C2", gated(silu, silu)),
    of("blocks.swiglu", "up-left-out", "The result is not multiplied by up.", "C2", gated(silu, np.ones_like)),
    of(
        "blocks.swiglu",
        "sigmoid-of-minus",
        "The sigmoid is that of minus the gate.",
        "C2",
        gated(lambda a: a * sigmoid(-a)),
    ),
    of(
        "routing.gate",
        "logits-for-probabilities",
        "Probabilities are asked for, and logits come back.",
        "C3",
        gate_by(lambda logits, scores: logits),
    ),
    of(
        "routing.gate",
        "probabilities-for-logits",
        "Logits are asked for, and probabilities come back.",
        "C2",
        gate_by(lambda logits, scores: softmax(logits)),
    ),
    of(
        "routing.top_k",
        "chosen-worst-first",
        "The chosen stand in the other order.",
        "C1",
        by_key(np.negative, lambda ids: ids[:, ::-1]),
    ),
    of(
        "routing.top_k",
        "chosen-by-magnitude",
        "Scores are compared without their sign.",
        "C1",
        by_key(lambda scores: -np.abs(scores)),
    ),
    of("routing.top_k", "ids-from-1", "Experts are counted from 1.", "C1", by_key(np.negative, lambda ids: ids + 1)),
    of(
        "routing.weights",
        "softmax-of-probabilities",
        "Probabilities of the chosen go through a softmax again.",
        "C2",
        softmax_again,
    ),
    of(
        "routing.expert",
        "expert-relu-for-silu",
        "The activation is a ReLU.",
        "C2",
        lambda x, g, u, d: expert(x, g, u, d, relu),
    ),
    of(
        "routing.expert",
        "expert-sigmoid-for-silu",
        "The sigmoid is not multiplied by the gate.",
        "C2",
        lambda x, g, u, d: expert(x, g, u, d, sigmoid),
    ),
    of(
        "routing.expert",
        "expert-without-sigmoid",
        "Gate and up are multiplied as they are.",
        "C2",
        lambda x, g, u, d: expert(x, g, u, d, lambda a: a),
    ),
    of("routing.sparse", "weights-left-out", "Answers are added without their weights.", "C2", all_ones),
    of(
        "routing.sparse",
        "weights-of-first-token",
        "All tokens have the weights of the first.",
        "C2",
        of_first_token,
        verdicts=MOVES,
    ),
    of(
        "routing.sparse",
        "last-of-chosen-left-out",
        "The last of a token's experts is left out, also where it is the only one.",
        "C2",
        last_left_out,
    ),
)
