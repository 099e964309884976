"""Mistakes of attention, RoPE, norms, gates and routing; see `mistakes_products`."""

from collections.abc import Callable
from typing import Any

import numpy as np
from mistakes_products import Mistake

from lowbit.attention.rope import Rotation

Array = Any
MISTAKES: list[Mistake] = []


def wrong(name: str, operation: str, function: Callable[..., Any], right: str = "") -> None:
    MISTAKES.append(Mistake(f"{name}:{operation}", operation, function, tuple(right.split())))


def narrow(array: Array) -> Array:
    with np.errstate(all="ignore"):
        return np.asarray(array).astype(np.float32)


# **Attention.**


def attention(
    *,
    position: Any = lambda t, tokens, length: length - tokens + t,
    scale: Any = lambda d: 1 / np.sqrt(d),
    key_head: Any = lambda h, heads, groups: h // (heads // groups),
    value_head: Any = lambda h, heads, groups: h // (heads // groups),
    first: Any = lambda p, window: 0 if window is None else max(0, p + 1 - window),
    end: Any = lambda p, tokens, length: p + 1,
    normal: bool = True,
) -> Any:
    def run(q: Array, k: Array, v: Array, window: int | None = None) -> Array:
        tokens, heads, d = q.shape
        groups, length, _ = k.shape
        y = np.zeros(q.shape, np.float64)
        with np.errstate(all="ignore"):
            for t in range(tokens):
                p = position(t, tokens, length)
                a, b = first(p, window), min(end(p, tokens, length), length)
                for h in range(heads):
                    if b <= a:
                        continue
                    keys = k[key_head(h, heads, groups), a:b].astype(np.float64)
                    scores = keys @ q[t, h].astype(np.float64) * scale(d)
                    powers = np.exp(scores - scores.max())
                    shares = powers / powers.sum() if normal else powers
                    y[t, h] = shares @ v[value_head(h, heads, groups), a:b].astype(np.float64)
        return narrow(y)

    return run


A = "attention.attend"
wrong("no-scale", A, attention(scale=lambda d: 1.0), "scale-missing")
wrong("scale-by-d", A, attention(scale=lambda d: 1 / d), "scale-by-channels")
wrong(
    "heads-mod", A, attention(key_head=lambda h, n, g: h % g, value_head=lambda h, n, g: h % g), "query-heads-strided"
)
wrong("values-head-0", A, attention(value_head=lambda h, n, g: 0), "values-of-first-head")
wrong("keys-head-0", A, attention(key_head=lambda h, n, g: 0), "keys-of-first-head")
wrong("values-mod", A, attention(value_head=lambda h, n, g: h % g), "value-heads-strided")
wrong("mask-top-left", A, attention(position=lambda t, tokens, length: t), "mask-at-top-left")
wrong("sees-next", A, attention(end=lambda p, t, n: p + 2), "one-token-ahead")
wrong("sees-all", A, attention(end=lambda p, t, n: n), "mask-left-out")
wrong("not-itself", A, attention(end=lambda p, t, n: max(p, 1)), "own-token-hidden")
wrong("window-wide", A, attention(first=lambda p, w: 0 if w is None else max(0, p - w)), "window-one-too-wide")
wrong(
    "window-narrow",
    A,
    attention(first=lambda p, w: 0 if w is None else min(p, max(0, p + 2 - w))),
    "window-one-too-narrow",
)
wrong("window-none", A, attention(first=lambda p, w: 0), "window-ignored")
wrong("not-normal", A, attention(normal=False), "attention-not-divided")


def softmax(power: Any = np.exp, top: Any = lambda s: s.max(axis=1, keepdims=True), axis: int = 1) -> Any:
    def run(s: Array) -> Array:
        with np.errstate(all="ignore"):
            wide = s.astype(np.float64)
            e = power(wide - top(wide))
            return narrow(e / e.sum(axis=axis, keepdims=True))

    return run


def unsafe(s: Array) -> Array:
    with np.errstate(all="ignore"):
        e = np.exp(s, dtype=np.float32)
        return e / e.sum(axis=1, keepdims=True)


S = "attention.softmax"
wrong("no-max", S, unsafe, "softmax-without-max")
wrong(
    "max-of-all", S, lambda s: softmax(np.exp, lambda w: w.max())(s.astype(np.float32)), "softmax-with-max-of-all-rows"
)
wrong("other-axis", S, softmax(top=lambda s: s.max(axis=0, keepdims=True), axis=0), "softmax-along-columns")
wrong("base-2", S, softmax(np.exp2), "powers-of-2")
wrong(
    "not-divided",
    S,
    lambda s: narrow(np.exp(s.astype(np.float64) - s.max(axis=1, keepdims=True))),
    "softmax-not-divided",
)

# **RoPE.**


def rope(change: Any = lambda c, s: (c, s), pairs: str = "") -> Any:
    def run(x: Array, turn: Rotation) -> Array:
        cos, sin = change(turn.cos, turn.sin)
        d = x.shape[2]
        partner = np.asarray(turn.layout.partner)
        wide = x.astype(np.float64)
        if pairs == "halves":
            partner = (np.arange(d) + d // 2) % d
        elif pairs == "neighbours":
            partner = np.arange(d) ^ 1
        y = wide * cos[:, None] + wide[:, :, partner] * sin[:, None]
        return narrow(y)

    return run


R = "rope.rotate"
wrong("minus-sin", R, rope(lambda c, s: (c, -s)), "rotation-backwards")
wrong("halves", R, rope(pairs="halves"), "pairs-taken-for-halves")
wrong("neighbours", R, rope(pairs="neighbours"), "pairs-taken-for-neighbours")
wrong(
    "position-minus-1",
    R,
    rope(lambda c, s: (c[np.maximum(np.arange(len(c)) - 1, 0)], s[np.maximum(np.arange(len(s)) - 1, 0)])),
    "position-one-behind position-one-off",
)
wrong(
    "position-plus-1",
    R,
    rope(
        lambda c, s: (
            c[np.minimum(np.arange(len(c)) + 1, len(c) - 1)],
            s[np.minimum(np.arange(len(s)) + 1, len(s) - 1)],
        )
    ),
    "position-one-ahead",
)
wrong("sin-for-cos", R, rope(lambda c, s: (s, c)), "cosine-and-sine-exchanged")
wrong(
    "position-0",
    R,
    rope(lambda c, s: (np.repeat(c[:1], len(c), axis=0), np.repeat(s[:1], len(s), axis=0))),
    "first-position-for-all",
)
wrong("not-turned", R, lambda x, turn: x.copy(), "not-rotated")
wrong("no-sin", R, rope(lambda c, s: (c, 0 * s)), "sine-left-out")

# **Norms and gates.**


def norm(
    mean: Any = lambda x: (x * x).mean(axis=1, keepdims=True),
    root: Any = lambda m, e: np.sqrt(m + e),
    gain: Any = lambda g: g,
) -> Any:
    def run(x: Array, g: Array, epsilon: float) -> Array:
        with np.errstate(all="ignore"):
            wide = x.astype(np.float64)
            return narrow(wide / root(mean(wide), epsilon) * gain(g.astype(np.float64)))

    return run


N = "blocks.rms_norm"
wrong("eps-outside", N, norm(root=lambda m, e: np.sqrt(m) + e), "epsilon-outside-the-root")
wrong("eps-1e-5", N, norm(root=lambda m, e: np.sqrt(m + 1e-5)), "epsilon-of-another-model")
wrong("no-eps", N, norm(root=lambda m, e: np.sqrt(m)), "epsilon-left-out")
wrong("sum", N, norm(mean=lambda x: (x * x).sum(axis=1, keepdims=True)), "squares-not-averaged")
wrong(
    "n-1",
    N,
    norm(mean=lambda x: (x * x).sum(axis=1, keepdims=True) / max(x.shape[1] - 1, 1)),
    "squares-averaged-by-one-less",
)
wrong("over-rows", N, norm(mean=lambda x: (x * x).mean(axis=0, keepdims=True)), "mean-over-tokens")
wrong("gain-1", N, norm(gain=lambda g: 1 + g), "gain-plus-one")
wrong("no-gain", N, norm(gain=lambda g: 0 * g + 1), "gain-left-out")
wrong("no-root", N, norm(root=lambda m, e: m + e), "root-left-out")
wrong(
    "layer-norm",
    N,
    lambda x, g, e: norm()(x.astype(np.float64) - x.astype(np.float64).mean(axis=1, keepdims=True), g, e),
    "layer-norm-for-rms-norm",
)


def silu(a: Array) -> Array:
    return a / (1 + np.exp(-a))


def gated(activation: Any, other: Any = lambda u: u, exchange: bool = False) -> Any:
    def run(gate: Array, up: Array) -> Array:
        a, b = (up, gate) if exchange else (gate, up)
        with np.errstate(all="ignore"):
            return narrow(activation(a.astype(np.float64)) * other(b.astype(np.float64)))

    return run


def gelu(a: Array) -> Array:
    return 0.5 * a * (1 + np.tanh(np.sqrt(2 / np.pi) * (a + 0.044715 * a**3)))


def relu(a: Array) -> Array:
    return np.maximum(a, 0)


G = "blocks.swiglu"
wrong("exchanged", G, gated(silu, exchange=True), "swiglu-exchanged")
wrong("gelu", G, gated(gelu), "geglu-for-swiglu")
wrong("relu", G, gated(relu), "relu-for-silu")
wrong("sigmoid", G, gated(lambda a: 1 / (1 + np.exp(-a))), "sigmoid-for-silu")
wrong("plain", G, gated(lambda a: a), "swiglu-without-sigmoid")
wrong("both", G, gated(silu, silu), "silu-of-both")
wrong("without-up", G, gated(silu, lambda u: 0 * u + 1), "up-left-out")
wrong("sign", G, gated(lambda a: a / (1 + np.exp(a))), "sigmoid-of-minus")

E_G = "blocks.geglu"
wrong("exchanged", E_G, gated(gelu, exchange=True), "geglu-exchanged")
wrong("silu", E_G, gated(silu), "swiglu-for-geglu")
wrong("relu", E_G, gated(relu), "relu-for-gelu")
wrong("plain", E_G, gated(lambda a: a), "geglu-without-activation")
wrong("both", E_G, gated(gelu, gelu), "gelu-of-both")
wrong("without-up", E_G, gated(gelu, lambda u: 0 * u + 1), "geglu-without-up")
wrong("sigmoid", E_G, gated(lambda a: a / (1 + np.exp(-1.702 * a))), "gelu-by-a-sigmoid")
wrong("no-cube", E_G, gated(lambda a: 0.5 * a * (1 + np.tanh(np.sqrt(2 / np.pi) * a))), "gelu-without-cube")

# **Routing.**


def logits(x: Array, router: Array) -> Array:
    return x.astype(np.float64) @ router.astype(np.float64)


def shares(s: Array, axis: int = 1) -> Array:
    e = np.exp(s - s.max(axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)


def gate(of: Any) -> Any:
    def run(x: Array, router: Array, scores: str = "logits") -> Array:
        with np.errstate(all="ignore"):
            return narrow(of(logits(x, router), scores))

    return run


GATE, TOP, W, E, X = "routing.gate", "routing.top_k", "routing.weights", "routing.expert", "routing.sparse"
wrong("sigmoid", GATE, gate(lambda s, how: s if how == "logits" else 1 / (1 + np.exp(-s))), "sigmoid-for-softmax")
wrong("over-tokens", GATE, gate(lambda s, how: s if how == "logits" else shares(s, 0)), "softmax-over-tokens")
wrong("always-softmax", GATE, gate(lambda s, how: shares(s)), "probabilities-for-logits")
wrong("never-softmax", GATE, gate(lambda s, how: s), "logits-for-probabilities")
wrong(
    "short-loop",
    GATE,
    lambda x, r, scores="logits": gate(lambda s, how: s if how == "logits" else shares(s))(x[:, :-1], r[:-1], scores),
    "gate-without-last-channel",
)


def chosen(key: Any, rows: Any = lambda ids: ids) -> Any:
    def run(scores: Array, k: int) -> Array:
        result = [sorted(range(len(row)), key=lambda i: key(row, i))[:k] for row in scores]
        return np.array([rows(ids) for ids in result], np.int64).reshape(len(scores), k)

    return run


wrong("least", TOP, chosen(lambda row, i: (row[i], i)), "least-chosen")
wrong("by-id", TOP, chosen(lambda row, i: (-row[i], i), sorted), "chosen-unordered")
wrong("ties-high", TOP, chosen(lambda row, i: (-row[i], -i)), "ties-to-the-highest")
wrong("worst-first", TOP, chosen(lambda row, i: (-row[i], i), lambda ids: ids[::-1]), "chosen-worst-first")
wrong("half", TOP, chosen(lambda row, i: (-np.float16(row[i]), i)), "chosen-in-half")
wrong("int32", TOP, lambda s, k: chosen(lambda row, i: (-row[i], i))(s, k).astype(np.int32), "ids-are-int32")
wrong("by-size", TOP, chosen(lambda row, i: (-abs(row[i]), i)), "chosen-by-magnitude")
wrong("ids-from-1", TOP, lambda s, k: chosen(lambda row, i: (-row[i], i))(s, k) + 1, "ids-from-1")


def weighing(before: Any, after: Any) -> Any:
    def run(scores: Array, ids: Array, softmax: str = "after") -> Array:
        own = np.take_along_axis(scores, ids, axis=1).astype(np.float64)
        with np.errstate(all="ignore"):
            return narrow((after if softmax == "after" else before)(own, scores.astype(np.float64), ids))

    return run


def divide(own: Array, scores: Array, ids: Array) -> Array:
    return own / own.sum(axis=1, keepdims=True)


def soft(own: Array, scores: Array, ids: Array) -> Array:
    return shares(own)


wrong("not-divided", W, weighing(lambda o, s, i: o, soft), "not-renormalized")
wrong("of-all", W, weighing(divide, lambda o, s, i: np.take_along_axis(shares(s), i, axis=1)), "softmax-of-all-experts")
wrong("logits", W, weighing(divide, lambda o, s, i: o), "logits-for-weights")
wrong(
    "two-norm",
    W,
    weighing(lambda o, s, i: o / np.sqrt((o * o).sum(axis=1, keepdims=True)), soft),
    "weights-by-two-norm",
)
wrong(
    "first-k",
    W,
    weighing(lambda o, s, i: divide(s[:, : i.shape[1]], s, i), lambda o, s, i: shares(s[:, : i.shape[1]])),
    "weights-of-first-experts",
)
wrong("softmax-twice", W, weighing(lambda o, s, i: shares(o), soft), "softmax-of-probabilities")


def expert(activation: Any = silu, exchange: bool = False) -> Any:
    def run(x: Array, g: Array, u: Array, d: Array) -> Array:
        a, b = (u, g) if exchange else (g, u)
        with np.errstate(all="ignore"):
            return narrow((activation(logits(x, a)) * logits(x, b)) @ d.astype(np.float64))

    return run


wrong("exchanged", E, expert(exchange=True), "gate-and-up-exchanged")
wrong("gelu", E, expert(gelu), "gelu-for-silu")
wrong("relu", E, expert(relu), "expert-relu-for-silu")
wrong("sigmoid", E, expert(lambda a: 1 / (1 + np.exp(-a))), "expert-sigmoid-for-silu")
wrong("no-activation", E, expert(lambda a: a), "expert-without-sigmoid")


def sparse(
    share: Any = lambda w, ids, t, n: w[t, n], members: Any = range, pick: Any = lambda ids, t, n: ids[t, n]
) -> Any:
    def run(x: Array, g: Array, u: Array, d: Array, ids: Array, w: Array) -> Array:
        y = np.zeros(x.shape)
        for t in range(len(x)):
            for n in members(ids.shape[1]):
                e = pick(ids, t, n)
                y[t] += float(share(w, ids, t, n)) * expert()(x[t : t + 1], g[e], u[e], d[e])[0].astype(np.float64)
        return narrow(y)

    return run


wrong("equal-shares", X, sparse(lambda w, ids, t, n: 1 / ids.shape[1]), "weights-ignored")
wrong("weights-one", X, sparse(lambda w, ids, t, n: 1), "weights-left-out")
wrong("last-missing", X, sparse(members=lambda k: range(max(k - 1, 0))), "last-expert-dropped last-of-chosen-left-out")
wrong("sorted-ids", X, sparse(pick=lambda ids, t, n: sorted(ids[t])[n]), "ids-sorted-without-weights")
wrong("weights-of-token-0", X, sparse(lambda w, ids, t, n: w[0, n]), "weights-of-first-token")
