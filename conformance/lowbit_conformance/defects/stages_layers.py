"""The operations of a layer in stages: attention, softmax, RoPE, norms, gated units and experts."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from lowbit.arrays import Array
from lowbit.linear.elementary import logistic
from lowbit_conformance.defects.attention import visible
from lowbit_conformance.defects.roundings import narrow, wide
from lowbit_conformance.defects.stages import At, Stages

LIMITS = (8, 10, 12, 14, 16, 18, 20, 24, 25, 30, 32, 40, 50, 60, 64, 80, 87, 88)


def _softmax(at: At, scores: Array, others: dict[str, Any]) -> Array:
    """The stages of a softmax along the last axis; scores of minus infinity are hidden."""
    top = at("greatest-scores", scores.max(axis=-1, keepdims=True), **others, **_tops(scores))
    powers = at("exponentials", np.exp(scores - top), **_powers(scores, top))
    totals = at("sums-of-exponentials", powers.sum(axis=-1, keepdims=True), **_totals(powers))
    answer: Array = at("probabilities", powers / totals, logarithm=lambda: scores - top - np.log(totals))
    return answer


def _tops(scores: Array) -> dict[str, Any]:
    return {
        "running": lambda: np.nan_to_num(np.maximum.accumulate(scores, axis=-1), neginf=0.0),
        "of-all": lambda: np.broadcast_to(scores.max(), (*scores.shape[:-1], 1)),
        "first": lambda: scores[..., :1],
        "last": lambda: scores[..., -1:],
        "mean": lambda: scores.mean(axis=-1, keepdims=True),
    }


def _powers(scores: Array, top: Array) -> dict[str, Any]:
    below = scores - top

    def cut(limit: int) -> Any:
        return lambda: np.where(below < -limit, 0, np.exp(below))

    def held(limit: int) -> Any:
        return lambda: np.exp(np.maximum(below, -limit))

    return {
        "base-2": lambda: np.exp2(below),
        "first-order": lambda: np.maximum(1 + below, 0),
        **{f"cut-below-{limit}": cut(limit) for limit in LIMITS},
        **{f"held-above-{limit}": held(limit) for limit in LIMITS},
    }


def _totals(powers: Array) -> dict[str, Any]:
    found = {
        "plus-1": lambda: powers.sum(axis=-1, keepdims=True) + 1,
        "count": lambda: np.full((*powers.shape[:-1], 1), float(powers.shape[-1])),
        "greatest": lambda: powers.max(axis=-1, keepdims=True),
        "without-last": lambda: powers[..., :-1].sum(axis=-1, keepdims=True),
        "without-first": lambda: powers[..., 1:].sum(axis=-1, keepdims=True),
        "of-float16": lambda: powers.astype(np.float16).astype(np.float64).sum(axis=-1, keepdims=True),
    }
    if powers.ndim > 1:
        found["over-rows"] = lambda: np.broadcast_to(powers.sum(axis=-2, keepdims=True), powers.shape)
        found["over-everything"] = lambda: np.broadcast_to(powers.sum(), (*powers.shape[:-1], 1))
    return found


TOTALS = {
    "plus-1": "that sum plus 1",
    "count": "the number of scores",
    "greatest": "the greatest of them",
    "without-last": "the sum without the last",
    "without-first": "the sum without the first",
    "of-float16": "the sum of exponentials rounded to float16",
    "over-rows": "the sum over the rows, the wrong axis",
    "over-everything": "the sum of all rows together",
}
SOFTMAX: dict[str, Mapping[str, str]] = {
    "greatest-scores": {
        "running": "the greatest score so far, and what was summed before is not rescaled",
        "of-all": "the greatest score of all rows",
        "first": "the first score",
        "last": "the last score",
        "mean": "the mean of the scores",
    },
    "exponentials": {
        "base-2": "powers of 2",
        "first-order": "1 plus the exponent",
        **{f"cut-below-{n}": f"0 for scores more than {n} below the greatest" for n in LIMITS},
        **{f"held-above-{n}": f"e^-{n} for scores further below the greatest" for n in LIMITS},
    },
    "sums-of-exponentials": TOTALS,
    "probabilities": {"logarithm": "their logarithm"},
}


def softmax(at: At, scores: Array) -> Array:
    rows = at("scores", scores.astype(np.float64))
    return narrow(_softmax(at, rows, {}))


# **Attention.**


def _not_empty(seen: Array, own: Array) -> Array:
    """Let a token that would see nothing see itself."""
    return np.asarray(seen | own & ~seen.any(axis=1, keepdims=True))


def _masks(tokens: int, length: int, window: int | None) -> dict[str, Any]:
    u, position = np.arange(length)[None], (length - tokens + np.arange(tokens))[:, None]
    whole, own = visible(tokens, length, window), u == position

    def of(**choices: int) -> Any:
        return lambda: visible(tokens, length, window, **choices)

    return {
        "next-seen-too": of(ahead=1),
        "two-seen-too": of(ahead=2),
        "self-hidden": lambda: _not_empty(visible(tokens, length, window, ahead=-1), own),
        "self-hidden-in-windows": lambda: _not_empty(visible(tokens, length, window, ahead=-1, back=1), own),
        "window-one-wider": of(back=1),
        "window-one-narrower": lambda: _not_empty(visible(tokens, length, window, back=-1), own),
        "no-window": lambda: visible(tokens, length, None),
        "later-seen": lambda: np.ones_like(whole) if window is None else u > position - window,
        "positions-from-0": of(start=0),
        "window-from-the-end": lambda: _not_empty(whole & (u > length - 1 - (window or length)), own),
        "first-always-seen": lambda: whole | (u == 0),
        "first-hidden": lambda: _not_empty(whole & (u > 0), own),
        "last-hidden": lambda: _not_empty(whole & (u < length - 1), own),
        "last-hidden-from-others": lambda: whole & (u < length - 1) | own,
        **{
            f"past-whole-{width}-hidden": lambda width=width: _not_empty(whole & (u < length // width * width), own)
            for width in (2, 4, 8, 16, 32)
        },
    }


MASKS = {
    "next-seen-too": "one that shows the next token too",
    "two-seen-too": "one that shows the next two tokens too",
    "self-hidden": "one that hides a token from itself",
    "self-hidden-in-windows": "one that hides a token from itself, its window one earlier",
    "window-one-wider": "a window one wider",
    "window-one-narrower": "a window one narrower",
    "no-window": "one without the window",
    "later-seen": "one that shows later tokens",
    "positions-from-0": "one whose positions count from 0, not from S - T",
    "window-from-the-end": "a window that is counted from the last token for all",
    "first-always-seen": "one that shows the first token in spite of the window",
    "first-hidden": "one that hides the first token",
    "last-hidden": "one that hides the last token",
    "last-hidden-from-others": "one that hides the last token from the others",
    **{
        f"past-whole-{width}-hidden": f"one that hides what is past the last whole {width}"
        for width in (2, 4, 8, 16, 32)
    },
}
HEADS = {"modulo": "h mod G", "first": "0 for all", "next": "the one after", "previous": "the one before"}


def _heads(heads: int, groups: int) -> dict[str, Any]:
    own = np.arange(heads) // (heads // groups)
    return {
        "modulo": lambda: np.arange(heads) % groups,
        "first": lambda: own * 0,
        "next": lambda: (own + 1) % groups,
        "previous": lambda: (own - 1) % groups,
    }


def attend(at: At, queries: Array, keys: Array, values: Array, window: int | None = None) -> Array:
    (tokens, heads, width), (groups, length, _) = queries.shape, keys.shape
    q, k, v = (at(name, part) for name, part in zip("qkv", wide(queries, keys, values), strict=True))
    own = np.arange(heads) // (heads // groups)
    both = at("key-value-heads", own, **_heads(heads, groups))
    of_keys, of_values = (
        at("heads-of-keys", both, **_heads(heads, groups)),
        at("heads-of-values", both, **_heads(heads, groups)),
    )
    scale = at("scale", np.array(width**-0.5), **_scales(width, heads, groups, length))
    scores = at("scores", np.einsum("thd,hsd->hts", q, k[of_keys % groups]) * scale)
    seen = at("mask", visible(tokens, length, window), **_masks(tokens, length, window))
    hidden = at("hidden-scores", np.array(-np.inf), **{f"{n:g}": lambda n=n: np.array(n) for n in HIDDEN})
    probabilities = _softmax(at, np.where(seen, scores, hidden), {})
    answers = at("answers", np.einsum("hts,hsd->thd", probabilities, v[of_values % groups]))
    by_group = answers.reshape(tokens, groups, -1, width)
    turned = {"heads-of-groups-turned": lambda: by_group[:, :, ::-1].reshape(answers.shape)}
    strided = {"heads-strided": lambda: by_group.swapaxes(1, 2).reshape(answers.shape)}
    return narrow(at("heads-of-the-result", answers, **turned, **strided))


HIDDEN = (0.0, -1.0, -10.0, -50.0, -100.0, -1e3, -1e4)


def _scales(width: int, heads: int, groups: int, length: int) -> dict[str, Any]:
    counts = {"heads": heads, "groups": groups, "members": heads // groups, "length": length, "channels": heads * width}
    return {name: lambda n=n: np.array(n**-0.5) for name, n in counts.items()}


SCALES = {
    "heads": "1 divided by the root of the number of heads",
    "groups": "1 divided by the root of the number of key-value heads",
    "members": "1 divided by the root of the query heads of a group",
    "length": "1 divided by the root of the length",
    "channels": "1 divided by the root of all channels",
}

# **RoPE.**


def rotate(at: At, x: Array, rotation: Any) -> Array:
    tokens, heads = x.shape[:2]
    (values,) = wide(x)
    other = np.minimum(np.arange(heads), tokens - 1)
    cos = at("cosines", rotation.cos[:, None], by_head=lambda: rotation.cos[other][None])
    sin = at("sines", rotation.sin[:, None], by_head=lambda: rotation.sin[other][None])
    angles = at("angles", np.stack(np.broadcast_arrays(cos, sin)), by_head=lambda: _by_head(rotation, other, tokens))
    partner = rotation.layout.partner
    own = at("own-terms", values * angles[0])
    return narrow(at("sum", own + at("partner-terms", at("partners", values[..., partner]) * angles[1])))


def _by_head(rotation: Any, head: Array, tokens: int) -> Array:
    both = np.stack([rotation.cos[head], rotation.sin[head]])[:, None]
    return np.broadcast_to(both, (2, tokens, *both.shape[2:]))


# **Norms and gated units.**


def norm(at: At, x: Array, gain: Array, epsilon: float) -> Array:
    values, gains = wide(x, gain)
    count = x.shape[1]
    counts = {f"whole-{w}": lambda w=w: np.array(-(-count // w) * w) for w in WHOLE}
    fewer = {f"fewer-{w}": lambda w=w: np.array(max(count // w * w, 1)) for w in WHOLE}
    one = {"less-1": lambda: np.array(max(count - 1, 1)), "rows": lambda: np.array(len(x)), "root": lambda: count**0.5}
    with np.errstate(all="ignore"):
        squares = at("squares", values * values, of_float16=lambda: (x.astype(np.float16) ** 2).astype(np.float64))
        sums = at("sums-of-squares", squares.sum(axis=1, keepdims=True), over_rows=lambda: squares.sum(axis=0)[None])
        mean = at(
            "mean",
            sums / at("count", np.array(count), **counts, **fewer, **one),
            over_rows=lambda: squares.mean(0)[None],
        )
        least = at("epsilon", np.array(epsilon), root=lambda: epsilon**0.5)
        inverse = at("reciprocal-of-the-root", 1 / at("root", np.sqrt(at("mean-plus-epsilon", mean + least))))
        return narrow(at("gains", gains) * at("normal", values * inverse))


WHOLE = (4, 8, 16, 32, 64)
COUNTS = {
    **{f"whole-{w}": f"n rounded up to a multiple of {w}" for w in WHOLE},
    **{f"fewer-{w}": f"n rounded down to a multiple of {w}" for w in WHOLE},
    "less-1": "n - 1",
    "rows": "the number of rows",
    "root": "the root of n",
}
POWERS = {"base-2": "powers of 2", "other-sign": "exponentials of the gate and not of minus the gate"}


def _joined(at: At, gate: Array, up: Array, logit: Array | None = None) -> Array:
    """Gate times the logistic function of a logit, by default of itself, times up."""
    own = gate if logit is None else logit
    powers = at("exponentials", np.exp(-own), **{"base-2": lambda: np.exp2(-own), "other-sign": lambda: np.exp(own)})
    share = at("sigmoids", 1 / (1 + powers), hard=lambda: np.clip(own / 6 + 0.5, 0, 1), step=lambda: 1.0 * (own > 0))
    answer: Array = at("products", at("silu", gate * share) * at("ups", up), sum=lambda: gate * share + up)
    return answer


def swiglu(at: At, gate: Array, up: Array) -> Array:
    with np.errstate(all="ignore"):
        return narrow(_joined(at, *wide(gate, up)))


def geglu(at: At, gate: Array, up: Array) -> Array:
    a, b = wide(gate, up)
    with np.errstate(all="ignore"):
        slope = at("slopes", np.full_like(a, 2 * np.sqrt(2 / np.pi)))
        return narrow(_joined(at, a, b, slope * at("cubics", a + at("cubes", 0.044715 * a**3))))


def expert(at: At, x: Array, gate: Array, up: Array, down: Array) -> Array:
    h, g, u, d = wide(x, gate, up, down)
    with np.errstate(all="ignore"):
        first, second = at("gate-products", h @ g), at("up-products", h @ u)
        inner = _joined(at, first, second)
        return narrow(at("answers", inner @ d, plus_x=lambda: inner @ d + h))


def sparse(at: At, x: Array, gate: Array, up: Array, down: Array, chosen: Array, weights: Array) -> Array:
    h, w = wide(x, weights)
    ids, order = at("ids", chosen), np.argsort(chosen, axis=1)
    answers = np.zeros((*chosen.shape, x.shape[1]))
    for e in np.unique(ids):
        if 0 <= e < len(gate):
            tokens, place = np.nonzero(ids == e)
            g, u, d = wide(gate[e], up[e], down[e])
            first = h[tokens] @ g
            answers[tokens, place] = (first * logistic(first) * (h[tokens] @ u)) @ d
    sums = {
        "sorted": lambda: np.take_along_axis(w, order, axis=1),
        "of-first-token": lambda: np.broadcast_to(w[:1], w.shape),
    }
    again = {
        "divided": lambda: w / w.sum(axis=1, keepdims=True),
        "shares": lambda: w / w.shape[1],
    }
    kept = at("weights", w, **sums, **again)
    by_id = np.take_along_axis(at("weighted-answers", kept[:, :, None] * answers), order[:, :, None], axis=1)
    return narrow(at("sum-of-experts", at("answers-by-id", by_id).sum(axis=1), plus_x=lambda: by_id.sum(axis=1) + h))


WEIGHTS = {
    "sorted": "the weights by the ids of their experts, which stand in the order of the choice",
    "of-first-token": "the weights of the first token",
    "divided": "the weights divided by their sum once more",
    "shares": "the weights divided by k",
}
SILU: Mapping[str, Mapping[str, str]] = {
    "exponentials": POWERS,
    "sigmoids": {"hard": "a hard sigmoid", "step": "1 for positive gates and 0 for others"},
    "products": {"sum": "the sum of silu and up"},
}
PLUS_X = {"plus_x": "the answer with the input added"}
BY_HEAD = {"by_head": "what belongs to the position of the head's number"}
MEANS = {"over_rows": "that over the rows, the wrong axis"}
GATED = ("products", "ups", "silu", "sigmoids", "exponentials")
SHARES = ("probabilities", "sums-of-exponentials", "exponentials", "greatest-scores")
LAYERS: Mapping[str, Stages] = {
    "attention.softmax": Stages(softmax, (*SHARES, "scores"), SOFTMAX),
    "attention.attend": Stages(
        attend,
        (
            "heads-of-the-result",
            "answers",
            *SHARES,
            "hidden-scores",
            "mask",
            "scores",
            "scale",
            "key-value-heads",
            "heads-of-keys",
            "heads-of-values",
            "q",
            "k",
            "v",
        ),
        {
            **SOFTMAX,
            "heads-of-the-result": {
                "heads-of-groups-turned": "each group of heads in reverse order",
                "heads-strided": "the heads of one group far apart",
            },
            "hidden-scores": {f"{n:g}": f"{n:g}, not minus infinity" for n in HIDDEN},
            "mask": MASKS,
            "scale": SCALES,
            **{name: HEADS for name in ("key-value-heads", "heads-of-keys", "heads-of-values")},
        },
    ),
    "rope.rotate": Stages(
        rotate,
        ("sum", "own-terms", "partner-terms", "partners", "angles", "cosines", "sines"),
        {"angles": BY_HEAD, "cosines": BY_HEAD, "sines": BY_HEAD},
    ),
    "blocks.rms_norm": Stages(
        norm,
        (
            "normal",
            "gains",
            "reciprocal-of-the-root",
            "root",
            "mean-plus-epsilon",
            "epsilon",
            "mean",
            "count",
            "sums-of-squares",
            "squares",
        ),
        {
            "count": COUNTS,
            "mean": MEANS,
            "sums-of-squares": MEANS,
            "squares": {"of_float16": "squares in float16"},
            "epsilon": {"root": "its root"},
        },
    ),
    "blocks.swiglu": Stages(swiglu, GATED, SILU),
    "blocks.geglu": Stages(geglu, (*GATED, "cubics", "cubes", "slopes"), SILU),
    "routing.expert": Stages(expert, ("answers", *GATED, "gate-products", "up-products"), {**SILU, "answers": PLUS_X}),
    "routing.sparse": Stages(
        sparse,
        ("sum-of-experts", "answers-by-id", "weighted-answers", "weights", "ids"),
        {"weights": WEIGHTS, "sum-of-experts": PLUS_X},
    ),
}
