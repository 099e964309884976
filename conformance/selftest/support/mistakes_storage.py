"""Mistakes of what is stored and moved: casts, caches, orders, quantisers, experts; see `mistakes_products`."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from mistakes_layers import narrow
from mistakes_products import Mistake

from lowbit.quantization.bfp import Blocks
from lowbit.quantization.bfp_dot import BlockSums
from lowbit_numpy.engines import Engine

Array = Any
MISTAKES: list[Mistake] = []


def wrong(name: str, operation: str, function: Callable[..., Any], right: str = "") -> None:
    MISTAKES.append(Mistake(f"{name}:{operation}", operation, function, tuple(right.split())))


# **Block Floating Point.**


def cast(round: Any = np.rint, shift: int = 0, low: int = 0, zero: Any = None) -> Any:
    def run(x: Array, f: Any) -> Any:
        mantissas = np.zeros(x.shape, f.dtype)
        exponents = np.zeros((len(x), f.blocks(x.shape[1])), np.int16)
        for r in range(len(x)):
            for n, start in enumerate(range(0, x.shape[1], f.block)):
                part = x[r, start : start + f.block].astype(np.float64)
                top = np.abs(part).max()
                e = -f.reach if top == 0 else int(np.frexp(top)[1]) - 1 - (f.mantissa - 2)
                e = int(np.clip(e + (shift if top else 0), -f.reach, f.reach))
                if top == 0 and zero is not None:
                    e = zero
                m = round(np.ldexp(part, -e))
                mantissas[r, start : start + f.block] = np.clip(m, -f.top - low, f.top)
                exponents[r, n] = e
        return made(Blocks, mantissas=mantissas, exponents=exponents, format=f)

    return run


def made(kind: Any, **parts: Any) -> Any:
    """Past the checks of its construction, as a library fills a structure."""
    result = object.__new__(kind)
    for name, part in parts.items():
        object.__setattr__(result, name, part)
    return result


C = "bfp.cast"
wrong("truncated", C, cast(np.trunc), "mantissas-truncated")
wrong("floor", C, cast(np.floor), "mantissas-rounded-down")
wrong("ties-away", C, cast(lambda v: np.sign(v) * np.floor(np.abs(v) + 0.5)), "mantissa-ties-away")
wrong("exponent-high", C, cast(shift=1), "exponent-one-too-high")
wrong("exponent-low", C, cast(shift=-1), "exponent-one-too-low")
wrong("minus-8", C, cast(low=1), "mantissas-down-to-minus-8")
wrong("zero-exponent", C, cast(zero=0), "zero-block-exponent-0")


def decoded(power: Any) -> Any:
    def run(b: Blocks) -> Array:
        e = np.repeat(b.exponents, b.format.block, axis=1)[:, : b.columns].astype(np.int64)
        with np.errstate(all="ignore"):
            return narrow(power(b.mantissas.astype(np.float64), e, b))

    return run


D = "bfp.decode"
wrong("twice", D, decoded(lambda m, e, b: np.ldexp(m, e + 1)), "exponent-one-off-in-decode")
wrong("half", D, decoded(lambda m, e, b: np.ldexp(m, e - 1)), "exponent-one-low-in-decode")
wrong("first-exponent", D, decoded(lambda m, e, b: np.ldexp(m, e[:, :1] + 0 * e)), "exponent-of-first-block")
wrong("no-sign", D, decoded(lambda m, e, b: np.ldexp(np.abs(m), e)), "mantissas-without-sign")


def dotted(exponent: Any = np.add, whole: bool = False, swap: bool = False) -> Any:
    def run(a: Blocks, b: Blocks) -> BlockSums:
        if swap:
            a, b = b, a
        count = a.format.blocks(a.columns)
        sums = np.zeros((a.rows, b.rows, count), np.int64)
        powers = np.zeros(sums.shape, np.int32)
        for n, start in enumerate(range(0, a.columns, a.format.block)):
            span = slice(start, start + a.format.block)
            if not (whole and start + a.format.block > a.columns):
                sums[:, :, n] = a.mantissas[:, span].astype(np.int64) @ b.mantissas[:, span].astype(np.int64).T
            powers[:, :, n] = exponent.outer(a.exponents[:, n].astype(np.int32), b.exponents[:, n].astype(np.int32))
        return BlockSums(sums, powers)

    return run


wrong("larger", "bfp.dot", dotted(np.maximum), "larger-exponent-for-both")
wrong("whole-blocks", "bfp.dot", dotted(whole=True), "short-block-not-summed")
wrong("difference", "bfp.dot", dotted(np.subtract), "exponents-subtracted")


def totalled(order: Any) -> Any:
    def run(b: BlockSums) -> Array:
        y = np.zeros(b.sums.shape[:2], np.float32)
        with np.errstate(all="ignore"):
            for n in order(b.sums.shape[2]):
                y = (
                    y.astype(np.longdouble) + np.ldexp(b.sums[:, :, n].astype(np.longdouble), b.exponents[:, :, n])
                ).astype(np.float32)
        return y

    return run


wrong("backwards", "bfp.total", totalled(lambda n: reversed(range(n))), "blocks-added-backwards")
wrong("last-missing", "bfp.total", totalled(lambda n: range(n - 1)), "last-block-not-added")

# **Orders, heads, Hessians.**

K = "ksort.permutation"
wrong("descending", K, lambda s: np.argsort(-s, kind="stable").astype(np.int64), "sorted-descending")
wrong("ranks", K, lambda s: np.argsort(np.argsort(s, kind="stable"), kind="stable").astype(np.int64), "ranks-for-order")
wrong(
    "reversed-ties", K, lambda s: np.array(sorted(range(len(s)), key=lambda i: (s[i], -i)), np.int64), "equals-reversed"
)
wrong("float32", K, lambda s: np.argsort(s.astype(np.float32), kind="stable").astype(np.int64), "sorted-in-float32")


def pooled(member: Any, answer: Any) -> Any:
    def run(w: Array, heads: int, groups: int, method: str = "mean") -> Array:
        size, per = w.shape[1] // heads, heads // groups
        y = np.zeros((w.shape[0], groups * size), np.float32)
        for j in range(groups):
            parts = [
                w[:, h * size : (h + 1) * size].astype(np.float64)
                for h in (member(j, i, per, groups) for i in range(per))
            ]
            y[:, j * size : (j + 1) * size] = answer(parts, method)
        return y

    return run


def mean_or_first(parts: Any, method: str) -> Array:
    return parts[0] if method == "first" else sum(parts) / len(parts)


P = "pooling.pool"
wrong("strided", P, pooled(lambda j, i, r, g: j + i * g, mean_or_first), "pooled-heads-strided")
wrong(
    "sum",
    P,
    pooled(lambda j, i, r, g: j * r + i, lambda p, m: p[0] if m == "first" else sum(p)),
    "sum-for-mean sums-for-means",
)
wrong(
    "last",
    P,
    pooled(lambda j, i, r, g: j * r + i, lambda p, m: p[-1] if m == "first" else sum(p) / len(p)),
    "last-head-for-first",
)
wrong("always-first", P, pooled(lambda j, i, r, g: j * r + i, lambda p, m: p[0]), "first-for-mean")
wrong("always-mean", P, pooled(lambda j, i, r, g: j * r + i, lambda p, m: sum(p) / len(p)), "mean-for-first")

H = "gptq.hessian"
wrong("twice", H, lambda x: narrow(2 * (x.astype(np.float64).T @ x.astype(np.float64))), "hessian-times-2")
wrong("mean", H, lambda x: narrow(x.astype(np.float64).T @ x.astype(np.float64) / len(x)), "hessian-averaged")
wrong("upper", H, lambda x: narrow(np.triu(x.astype(np.float64).T @ x.astype(np.float64))), "hessian-half-filled")
wrong("last-input", H, lambda x: narrow(x[:-1].astype(np.float64).T @ x[:-1].astype(np.float64)), "last-input-dropped")


def propagated(factor: Any) -> Any:
    def run(w: Array, m: Array, values: Array) -> Array:
        y, wide = w.astype(np.float64), m.astype(np.float64)
        for k in range(len(w)):
            error = w[k].astype(np.float64) - values[k]
            for j in range(k + 1, len(w)):
                y[j] += factor(wide, k, j) * error
        return narrow(y)

    return run


T = "gptq.targets"
wrong("not-divided", T, propagated(lambda m, k, j: m[k, j]), "error-not-divided")
wrong("own-row", T, propagated(lambda m, k, j: m[k, j] / m[k, k]), "error-divided-by-own-row")
wrong("sign", T, propagated(lambda m, k, j: -m[k, j] / m[j, j]), "error-with-other-sign")
wrong("next-only", T, propagated(lambda m, k, j: m[k, j] / m[j, j] if j == k + 1 else 0), "errors-reach-next-row-only")

# **HQQ.**


def real_zeros(change: Any) -> Any:
    def run(w: Array, s: Array, z: Array, bits: int) -> Array:
        with np.errstate(all="ignore"):
            return np.clip(change(w, s, z), 0, 2**bits - 1).astype(np.uint8)

    return run


Q = "hqq.codes"
wrong("truncated", Q, real_zeros(lambda w, s, z: np.trunc(w / s + z)), "solver-codes-truncated")
wrong("ties-away", Q, real_zeros(lambda w, s, z: np.floor(w / s + z + np.float32(0.5))), "solver-ties-away")
wrong("times-scale", Q, real_zeros(lambda w, s, z: np.rint(w * s + z)), "solver-scale-inverted")
wrong("zero-subtracted", Q, real_zeros(lambda w, s, z: np.rint(w / s - z)), "solver-zero-subtracted")
wrong("zero-forgotten", Q, real_zeros(lambda w, s, z: np.rint(w / s)), "solver-zero-left-out")

# **Experts and slots**: an engine written anew is long, so these spoil the events of a small one that is right.


def events(change: Any) -> Any:
    def run(arrangement: Any, requests: Any) -> Any:
        engine = Engine(arrangement)
        return change(tuple(event for request in requests for event in engine.step(request)))

    return run


wrong("no-hits", "offload.trace", events(lambda t: tuple(e for e in t if e.kind != "hit")))
wrong(
    "slots-from-1",
    "offload.trace",
    events(lambda t: tuple(e if e.slot is None else replace(e, slot=e.slot + 1) for e in t)),
)
