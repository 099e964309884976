"""Variants of the operations of a layer, each written out once with its steps as arguments.

`variants` changes how a step is rounded or where it ends. Here a step of softmax, attention, the norm, the gated unit
or routing is another function altogether: another scale, another activation, another mean, a constant that some models
add. What is right with every step as it is stands in the defaults, so a variant is the one step that it replaces.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from lowbit.arrays import Array
from lowbit.linear.elementary import logistic, softmax
from lowbit.model.layers import gelu
from lowbit_conformance.defects.activations import mean_square, right, under
from lowbit_conformance.defects.attention import replacing, undivided, visible
from lowbit_conformance.defects.defect import Function
from lowbit_conformance.defects.roundings import narrow, wide
from lowbit_conformance.defects.routes import by, divided, from_logits, product, weighed

Variant = tuple[str, str, Function]
Step = Callable[..., Any]


def _of_one(step: Step) -> Function:
    return lambda given, *rest: narrow(step(*wide(given), *rest))


def _of_rows(step: Step) -> Function:
    """From the exponentials of each row and its greatest score."""

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
    yield (
        "logarithm-of-softmax",
        "The logarithms of probabilities are returned.",
        _of_rows(lambda p, top: np.log(p) - np.log(_total(p))),
    )
    yield "divided-by-length", "The exponentials are divided by their number.", _of_rows(lambda p, _: p / p.shape[1])
    yield "sigmoid-for-softmax", "Each score goes through a sigmoid.", _of_one(logistic)
    for power in range(3, 13):
        least = 10.0**-power
        run = _of_rows(lambda p, _, least=least: p / (_total(p) + least))
        yield f"sum-plus-1e-{power}", f"1e-{power} is added to the sum of the exponentials.", run
    for name, of in (("last", slice(None, -1)), ("first", slice(1, None))):
        run = _of_rows(lambda p, _, of=of: p / np.maximum(_total(p[:, of]), 1e-300))
        yield f"{name}-score-not-summed", f"The sum lacks the {name} exponential.", run


def attend_variants() -> Iterator[Variant]:
    for name, words, scale in (
        ("scale-by-length", "Scores are divided by the root of the length.", lambda d, s: s**-0.5),
        ("scale-by-twice-the-width", "The scale is for 2 d_h channels.", lambda d, s: (2 * d) ** -0.5),
        ("scale-by-half-the-width", "The scale is for d_h / 2 channels.", lambda d, s: (d / 2) ** -0.5),
        ("base-2-scores", "Scores are powers of 2.", lambda d, s: np.log(2) * d**-0.5),
    ):
        yield name, words, replacing(scale=scale)
    cause = "The window is counted from the last token instead of from each."
    yield "window-from-the-end", cause, replacing(see=_window_from_the_end)
    yield "first-token-hidden", "No later token sees the first token.", replacing(see=_first_hidden)
    yield "sink-in-the-sum", "The sum has one more term of 1.", replacing(probabilities=_with_sink)
    yield "greatest-score-only", "All weight goes to the greatest score.", replacing(probabilities=_hard)
    for cap in (5, 10, 20, 30, 50):
        capped = replacing(masked=lambda s, mask, cap=cap: np.where(mask, cap * np.tanh(s / cap), -np.inf))
        yield f"scores-capped-at-{cap}", f"Scores are capped at {cap} by a tanh.", capped


def _window_from_the_end(tokens: int, length: int, window: int | None) -> Array:
    u, own = np.arange(length), np.arange(length - tokens, length)[:, None]
    first = 0 if window is None else max(0, length - window)
    return visible(tokens, length, None) & (u >= np.minimum(first, own))


def _first_hidden(tokens: int, length: int, window: int | None) -> Array:
    seen = visible(tokens, length, window)
    seen[length - tokens + np.arange(tokens) > 0, 0] = False
    return seen


def _with_sink(scores: Array) -> Array:
    powers = undivided(scores)
    return np.asarray(powers / (powers.sum(axis=-1, keepdims=True) + 1))


def _hard(scores: Array) -> Array:
    best = scores == scores.max(axis=-1, keepdims=True)
    return np.asarray(best / best.sum(axis=-1, keepdims=True))


def norm_variants() -> Iterator[Variant]:
    roots: tuple[tuple[str, str, Callable[[Array, float], Array]], ...] = (
        ("epsilon-squared", "The square of epsilon is added.", lambda x, e: np.sqrt(mean_square(x) + e * e)),
        ("epsilon-subtracted", "Epsilon is subtracted.", lambda x, e: np.sqrt(mean_square(x) - e)),
        ("epsilon-as-a-floor", "The mean is at least epsilon.", lambda x, e: np.sqrt(np.maximum(mean_square(x), e))),
        ("times-the-root", "It multiplies by the root.", lambda x, e: 1 / right(x, e)),
        (
            "mean-of-magnitudes",
            "The mean is that of the magnitudes.",
            lambda x, e: np.abs(x).mean(axis=1, keepdims=True, dtype=np.float64) + e,
        ),
        ("mean-over-everything", "The mean is over all rows.", lambda x, e: right(x.reshape(1, -1), e)),
        (
            "mean-of-first-half",
            "The mean is that of the first half of a row.",
            lambda x, e: right(x[:, : max(1, x.shape[1] // 2)], e),
        ),
    )
    for name, cause, root in roots:
        yield name, cause, under(root)
    for width in (4, 8, 16, 32):
        run = under(partial(_root_of_whole, width))
        yield f"squares-past-whole-{width}-not-summed", f"Squares past the last whole {width} are not summed.", run


def _root_of_whole(width: int, x: Array, epsilon: float) -> Array:
    """Only squares up to the last whole width are summed."""
    sums = np.square(x[:, : x.shape[1] // width * width].astype(np.float64)).sum(axis=1, keepdims=True)
    return np.asarray(np.sqrt(sums / x.shape[1] + epsilon))


ACTIVATIONS: Mapping[str, tuple[str, Step]] = {
    "tanh": ("a tanh", np.tanh),
    "hard-swish": ("the hard swish", lambda a: a * np.clip(a / 6 + 0.5, 0, 1)),
    "gelu": ("a sigmoid of 1.702 times the gate, a gelu", lambda a: a * logistic(1.702 * a)),
    "softplus": ("a softplus", lambda a: np.logaddexp(0, a)),
    "mish": ("the mish", lambda a: a * np.tanh(np.logaddexp(0, a))),
    "relu-squared": ("a squared relu", lambda a: np.maximum(a, 0) ** 2),
    "elu": ("an elu", lambda a: np.where(a > 0, a, np.expm1(np.minimum(a, 0)))),
}
JOINED: Mapping[str, tuple[str, Step]] = {
    "gate-and-up-added": ("Silu of the gate and up are added.", lambda a, b: a * logistic(a) + b),
    "silu-of-the-product": ("The silu is that of gate times up.", lambda a, b: a * b * logistic(a * b)),
    "sigmoid-of-up": ("The sigmoid is that of up.", lambda a, b: a * logistic(b) * b),
    "silu-of-both": ("Gate and up both go through silu.", lambda a, b: a * logistic(a) * b * logistic(b)),
    "up-not-multiplied": ("Up is left out.", lambda a, b: a * logistic(a)),
    "gate-and-up-at-most-7": (
        "The gate ends at 7, and up at 7 and -7.",
        lambda a, b: np.minimum(a, 7) * logistic(np.minimum(a, 7)) * np.clip(b, -7, 7),
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
        return narrow(x + of(lambda a, b: a * logistic(a) * b)(x, *weights).astype(np.float64))

    yield "x-added", "The input is added to the result.", with_residual


def gate_variants() -> Iterator[Variant]:
    yield (
        "logits-scaled",
        "Logits are divided by the root of hidden.",
        from_logits(lambda x, r: product(x, r) / np.sqrt(x.shape[1])),
    )
    yield "powers-of-2", "The softmax takes powers of 2.", by(lambda s: softmax(s * np.log(2)))
    yield "shares-not-divided", "Exponentials are not divided by their sum.", by(undivided)


def weight_variants() -> Iterator[Variant]:
    def even(own: Array) -> Array:
        return np.full(own.shape, 1 / own.shape[1])

    yield "weights-equal", "All chosen experts have the same weight.", weighed(even, even)
    yield (
        "weights-by-the-greatest",
        "Weights are divided by the greatest and not by their sum.",
        weighed(undivided, lambda s: s / s.max(axis=1, keepdims=True)),
    )
    yield (
        "sigmoids-divided",
        "Logits go through a sigmoid, and are divided by their sum.",
        weighed(lambda s: divided(logistic(s))),
    )
    for power in range(3, 13):
        run = weighed(before=partial(_divided_by_more, 10.0**-power))
        yield f"sum-of-chosen-plus-1e-{power}", f"1e-{power} is added to the sum of the chosen.", run


def _divided_by_more(least: float, own: Array) -> Array:
    return np.asarray(own / (own.sum(axis=1, keepdims=True) + least))


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
