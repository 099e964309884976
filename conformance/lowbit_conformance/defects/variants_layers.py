"""Variants of the operations of a layer, each written out once with its steps as arguments.

`variants` changes how a step is rounded or where it ends. Here a step of softmax, attention, the norm, the gated unit
or routing is another function altogether: another scale, another activation, another mean, a constant that some models
add. What is right with every step as it is stands in the defaults, so a variant is the one step that it replaces.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from lowbit.arrays import Array
from lowbit_conformance.defects.defect import Function

Variant = tuple[str, str, Function]
Step = Callable[..., Any]


def narrow(array: Array) -> Array:
    """As float32, without a word about overflow."""
    with np.errstate(all="ignore"):
        return np.asarray(array, np.float64).astype(np.float32)


def wide(*arrays: Array) -> Iterator[Array]:
    return (np.asarray(array, np.float64) for array in arrays)


def sigmoid(a: Array) -> Array:
    with np.errstate(all="ignore"):
        return np.asarray(1 / (1 + np.exp(-a)))


def softmax(scores: Array) -> Array:
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True))


def _of_one(step: Step) -> Function:
    return lambda given, *rest: narrow(step(*wide(given), *rest))


def _of_rows(step: Step) -> Function:
    """Of each row's powers, and what the greatest score was."""

    def run(scores: Array) -> Array:
        s = scores.astype(np.float64)
        top = s.max(axis=1, keepdims=True)
        return narrow(step(np.exp(s - top), top))

    return run


def _total(powers: Array) -> Array:
    return np.asarray(powers.sum(axis=1, keepdims=True))


def softmax_variants() -> Iterator[Variant]:
    yield (
        "one-in-the-sum",
        "1 is added to the sum of the exponentials.",
        _of_rows(lambda p, top: p / (_total(p) + np.exp(-top))),
    )
    yield "sink-in-the-sum", "The sum has one more term of 1.", _of_rows(lambda p, top: p / (_total(p) + 1))
    yield "logarithm-of-softmax", "The logarithms come back.", _of_rows(lambda p, top: np.log(p) - np.log(_total(p)))
    yield "divided-by-length", "The exponentials are divided by their number.", _of_rows(lambda p, _: p / p.shape[1])
    yield "sigmoid-for-softmax", "Each score goes through a sigmoid.", _of_one(sigmoid)
    for power in range(3, 13):
        least = 10.0**-power
        run = _of_rows(lambda p, _, least=least: p / (_total(p) + least))
        yield f"sum-plus-1e-{power}", f"1e-{power} is added to the sum of the exponentials.", run
    for name, of in (("last", slice(None, -1)), ("first", slice(1, None))):
        run = _of_rows(lambda p, _, of=of: p / np.maximum(_total(p[:, of]), 1e-300))
        yield f"{name}-score-not-summed", f"The {name} exponential is not in the sum.", run


def attention(
    scale: Step = lambda d, s: d**-0.5,
    first: Step = lambda p, window, s: 0 if window is None else max(0, p + 1 - window),
    scores: Step = lambda s, positions, p: s,
    probabilities: Step = softmax,
) -> Function:
    """`attention.attend` by the steps that it is made of."""

    def run(queries: Array, keys: Array, values: Array, window: int | None = None) -> Array:
        tokens, heads, head_dim = queries.shape
        members, length = heads // keys.shape[0], keys.shape[1]
        q, k, v = wide(queries, keys, values)
        y = np.zeros(queries.shape)
        for token in range(tokens):
            p = length - tokens + token
            seen = np.arange(min(first(p, window, length), p), p + 1)
            for head in range(heads):
                s = k[head // members, seen] @ q[token, head] * scale(head_dim, length)
                y[token, head] = probabilities(scores(s, seen, p)) @ v[head // members, seen]
        return narrow(y)

    return run


def attend_variants() -> Iterator[Variant]:
    yield "scale-by-length", "Scores are divided by the root of the length.", attention(scale=lambda d, s: s**-0.5)
    yield "scale-by-twice-the-width", "The scale is that of 2 d_h.", attention(scale=lambda d, s: (2 * d) ** -0.5)
    yield "scale-by-half-the-width", "The scale is that of d_h / 2.", attention(scale=lambda d, s: (d / 2) ** -0.5)
    yield "base-2-scores", "Scores are powers of 2.", attention(scores=lambda s, at, p: s * np.log(2))
    yield (
        "window-from-the-end",
        "The window is counted from the last token and not from each.",
        attention(first=lambda p, window, s: 0 if window is None else max(0, s - window)),
    )
    yield (
        "first-token-hidden",
        "The first token is seen by no later one.",
        attention(first=lambda p, window, s: max(1, 0 if window is None else p + 1 - window)),
    )
    yield "sink-in-the-sum", "The sum has one more term of 1.", attention(probabilities=_with_sink)
    yield "greatest-score-only", "All weight goes to the greatest score.", attention(probabilities=_hard)
    for cap in (5, 10, 20, 30, 50):
        capped = attention(scores=lambda s, at, p, cap=cap: cap * np.tanh(s / cap))
        yield f"scores-capped-at-{cap}", f"Scores are capped at {cap} by a tanh.", capped


def _with_sink(scores: Array) -> Array:
    powers = np.exp(scores - scores.max())
    return np.asarray(powers / (powers.sum() + 1))


def _hard(scores: Array) -> Array:
    best = scores == scores.max()
    return np.asarray(best / best.sum())


def _norm(
    mean: Step = lambda x: np.square(x).mean(axis=1, keepdims=True),
    root: Step = lambda m, e: np.sqrt(m + e),
    gains: Step = lambda y, g: y * g,
) -> Function:
    def run(x: Array, gain: Array, epsilon: float) -> Array:
        values, g = wide(x, gain)
        with np.errstate(all="ignore"):
            return narrow(gains(values / root(mean(values), epsilon), g))

    return run


def norm_variants() -> Iterator[Variant]:
    yield "epsilon-squared", "The square of epsilon is added.", _norm(root=lambda m, e: np.sqrt(m + e * e))
    yield "epsilon-subtracted", "Epsilon is subtracted.", _norm(root=lambda m, e: np.sqrt(m - e))
    yield "epsilon-as-a-floor", "The mean is at least epsilon.", _norm(root=lambda m, e: np.sqrt(np.maximum(m, e)))
    yield "times-the-root", "It multiplies by the root.", _norm(root=lambda m, e: 1 / np.sqrt(m + e))
    yield (
        "mean-of-magnitudes",
        "The mean is that of the magnitudes.",
        _norm(lambda x: np.abs(x).mean(axis=1, keepdims=True), lambda m, e: m + e),
    )
    yield "mean-over-everything", "The mean is over all rows.", _norm(lambda x: np.square(x).mean(keepdims=True))
    yield (
        "mean-of-first-half",
        "The mean is that of the first half of a row.",
        _norm(lambda x: np.square(x[:, : max(1, x.shape[1] // 2)]).mean(axis=1, keepdims=True)),
    )
    for width in (4, 8, 16, 32):
        run = _norm(lambda x, w=width: np.square(x[:, : x.shape[1] // w * w]).sum(axis=1, keepdims=True) / x.shape[1])
        yield f"squares-past-whole-{width}-not-summed", f"Squares past the last whole {width} are not summed.", run


def gelu(a: Array) -> Array:
    return np.asarray(a * sigmoid(2 * np.sqrt(2 / np.pi) * (a + 0.044715 * a**3)))


ACTIVATIONS: Mapping[str, tuple[str, Step]] = {
    "tanh": ("a tanh", np.tanh),
    "hard-swish": ("the hard swish", lambda a: a * np.clip(a / 6 + 0.5, 0, 1)),
    "gelu": ("a sigmoid of 1.702 times the gate, a gelu", lambda a: a * sigmoid(1.702 * a)),
    "softplus": ("a softplus", lambda a: np.logaddexp(0, a)),
    "mish": ("the mish", lambda a: a * np.tanh(np.logaddexp(0, a))),
    "relu-squared": ("a squared relu", lambda a: np.maximum(a, 0) ** 2),
    "elu": ("an elu", lambda a: np.where(a > 0, a, np.expm1(np.minimum(a, 0)))),
}
JOINED: Mapping[str, tuple[str, Step]] = {
    "gate-and-up-added": ("Silu of the gate and up are added.", lambda a, b: a * sigmoid(a) + b),
    "silu-of-the-product": ("The silu is that of gate times up.", lambda a, b: a * b * sigmoid(a * b)),
    "sigmoid-of-up": ("The sigmoid is that of up.", lambda a, b: a * sigmoid(b) * b),
    "silu-of-both": ("Gate and up both go through silu.", lambda a, b: a * sigmoid(a) * b * sigmoid(b)),
    "up-not-multiplied": ("Up is left out.", lambda a, b: a * sigmoid(a)),
    "gate-and-up-at-most-7": (
        "The gate ends at 7, and up at 7 and -7.",
        lambda a, b: np.minimum(a, 7) * sigmoid(np.minimum(a, 7)) * np.clip(b, -7, 7),
    ),
}


def _joined() -> Iterator[tuple[str, str, Step]]:
    for name, (words, activation) in ACTIVATIONS.items():
        yield f"{name}-for-silu", f"In place of silu there is {words}.", lambda a, b, f=activation: f(a) * b
    for name, (words, join) in JOINED.items():
        yield name, words, join


def gated_variants() -> Iterator[Variant]:
    for name, cause, join in _joined():
        yield name, cause, lambda gate, up, join=join: narrow(join(*wide(gate, up)))


def gelu_variants() -> Iterator[Variant]:
    """Other activations, and other ways to join it with up."""

    def of(join: Step) -> Function:
        return lambda gate, up: narrow(join(*wide(gate, up)))

    for name, (words, other) in ACTIVATIONS.items():
        if name not in ("gelu", "tanh"):
            yield f"{name}-for-gelu", f"In place of gelu there is {words}.", of(lambda a, b, f=other: f(a) * b)
    yield "gate-and-up-added", "Gelu of the gate and up are added.", of(lambda a, b: gelu(a) + b)
    yield "gelu-of-the-product", "The gelu is that of gate times up.", of(lambda a, b: gelu(a * b))
    yield (
        "gate-and-up-at-most-7",
        "The gate ends at 7, and up at 7 and -7.",
        of(lambda a, b: gelu(np.minimum(a, 7)) * np.clip(b, -7, 7)),
    )


def expert_variants() -> Iterator[Variant]:
    def of(join: Step) -> Function:
        def run(x: Array, gate: Array, up: Array, down: Array) -> Array:
            h, g, u, d = wide(x, gate, up, down)
            with np.errstate(all="ignore"):
                return narrow(join(h @ g, h @ u) @ d)

        return run

    for name, cause, join in _joined():
        yield name, cause, of(join)

    def with_residual(x: Array, *weights: Array) -> Array:
        return narrow(x + of(lambda a, b: a * sigmoid(a) * b)(x, *weights).astype(np.float64))

    yield "x-added", "The input is added to the result.", with_residual


def _gate(of_logits: Step = lambda s, x: s, of_probabilities: Step = softmax) -> Function:
    def run(x: Array, router: Array, scores: str = "logits") -> Array:
        h, r = wide(x, router)
        with np.errstate(all="ignore"):
            logits = of_logits(h @ r, h)
            return narrow(logits if scores == "logits" else of_probabilities(logits))

    return run


def gate_variants() -> Iterator[Variant]:
    yield "logits-scaled", "Logits are divided by the root of hidden.", _gate(lambda s, x: s / np.sqrt(x.shape[1]))
    yield "powers-of-2", "The softmax takes powers of 2.", _gate(of_probabilities=lambda s: softmax(s * np.log(2)))
    yield "shares-not-divided", "Exponentials are not divided by their sum.", _gate(of_probabilities=_powers)


def _powers(scores: Array) -> Array:
    return np.asarray(np.exp(scores - scores.max(axis=-1, keepdims=True)))


def _weigh(after: Step = softmax, before: Step = lambda s: s / s.sum(axis=1, keepdims=True)) -> Function:
    def run(scores: Array, chosen: Array, softmax: str = "after") -> Array:
        (own,) = wide(np.take_along_axis(scores, chosen, axis=1))
        with np.errstate(all="ignore"):
            return narrow((after if softmax == "after" else before)(own))

    return run


def weight_variants() -> Iterator[Variant]:
    def even(own: Array) -> Array:
        return np.full(own.shape, 1 / own.shape[1])

    yield "weights-equal", "All chosen experts have the same weight.", _weigh(even, even)
    yield (
        "weights-by-the-greatest",
        "Weights are divided by the greatest and not by their sum.",
        _weigh(_powers, lambda s: s / s.max(axis=1, keepdims=True)),
    )
    yield (
        "sigmoids-divided",
        "Logits go through a sigmoid, and are divided by their sum.",
        _weigh(lambda s: sigmoid(s) / sigmoid(s).sum(axis=1, keepdims=True)),
    )
    for power in range(3, 13):
        least = 10.0**-power
        run = _weigh(before=lambda s, least=least: s / (s.sum(axis=1, keepdims=True) + least))
        yield f"sum-of-chosen-plus-1e-{power}", f"1e-{power} is added to the sum of the chosen.", run


LAYERS: Mapping[str, Callable[[], Iterator[Variant]]] = {
    "attention.softmax": softmax_variants,
    "attention.attend": attend_variants,
    "blocks.rms_norm": norm_variants,
    "blocks.swiglu": gated_variants,
    "blocks.geglu": gelu_variants,
    "routing.expert": expert_variants,
    "routing.gate": gate_variants,
    "routing.weights": weight_variants,
}
