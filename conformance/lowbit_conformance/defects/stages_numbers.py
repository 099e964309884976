"""Quantisers, casts, orders and pooled heads in stages."""

from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import numpy as np

from lowbit.arrays import F32, Array
from lowbit.attention.rope import Layout
from lowbit.quantization import hqq_solver
from lowbit.quantization.affine import QuantizedMatrix
from lowbit.quantization.bfp import Blocks, Format
from lowbit_conformance import packing
from lowbit_conformance.defects.defect import unchecked
from lowbit_conformance.defects.roundings import wide
from lowbit_conformance.defects.stages import At, Stages

# **Block Floating Point.**


def cast(at: At, x: F32, format: Format) -> Blocks:
    """Blocks are axis 1, elements of a block axis 2."""
    rows, columns, block = *x.shape, format.block
    count = -(-columns // block)
    padded = np.zeros((rows, count * block))
    padded[:, :columns] = x
    parts = padded.reshape(rows, count, block)
    size = np.abs(parts)
    largest = at("largest-magnitudes", size.max(axis=2), **_largest(parts, size))
    power = np.frexp(largest)[1].astype(np.int64)
    free = at("exponents-before-the-clamp", power - 1 - (format.mantissa - 2))
    clamped = np.clip(free, -format.reach, format.reach)
    own = np.where(largest == 0, -format.reach, clamped)
    e = at("exponents", own, **_exponents(own, parts, format))
    scaled = at("quotients", np.ldexp(parts, -e.astype(np.int64)[:, :, None]))
    mantissas = np.clip(at("rounded", np.rint(scaled), **_rounded(scaled)), -format.top, format.top)
    whole = np.ascontiguousarray(mantissas.reshape(rows, -1)[:, :columns]).astype(format.dtype)
    exponents = np.ascontiguousarray(np.clip(e, -format.reach, format.reach)).astype(np.int16)
    return unchecked(Blocks, mantissas=whole, exponents=exponents, format=format)


def _largest(parts: Array, size: Array) -> dict[str, Any]:
    shape = size.shape[:2]
    return {
        "first": lambda: size[:, :, 0],
        "signed": lambda: np.maximum(parts.max(axis=2), 0),
        "of-first-half": lambda: size[:, :, : max(1, size.shape[2] // 2)].max(axis=2),
        "without-last": lambda: size[:, :, : max(1, size.shape[2] - 1)].max(axis=2),
        "of-the-row": lambda: np.broadcast_to(size.max(axis=(1, 2))[:, None], shape),
        "of-all-rows": lambda: np.broadcast_to(size.max(axis=(0, 2))[None], shape),
        "of-everything": lambda: np.broadcast_to(size.max(), shape),
        "mean": lambda: size.mean(axis=2),
        "root-mean-square": lambda: np.sqrt(np.square(size).mean(axis=2)),
        "so-far": lambda: np.maximum.accumulate(size.max(axis=2), axis=1),
    }


LARGEST = {
    "first": "the first element",
    "signed": "the largest element with its sign",
    "of-first-half": "the largest of the first half of the block",
    "without-last": "the largest without the last element",
    "of-the-row": "the largest of the whole row",
    "of-all-rows": "the largest of the block in all rows",
    "of-everything": "the largest of the array",
    "mean": "the mean magnitude",
    "root-mean-square": "the root mean square",
    "so-far": "the largest of this block and those before",
}


def _exponents(own: Array, parts: Array, format: Format) -> dict[str, Any]:
    def raised() -> Array:
        top = np.rint(np.abs(np.ldexp(parts, -own[:, :, None]))).max(axis=2)
        return np.asarray(np.clip(own + (top > format.top), -format.reach, format.reach))

    return {"raised": raised, "zero-for-zeros": lambda: np.where(np.abs(parts).max(axis=2) == 0, 0, own)}


def _rounded(scaled: Array) -> dict[str, Any]:
    return {"up": lambda: np.ceil(scaled), "odd": lambda: 2 * np.floor(scaled / 2) + 1}


# **Affine quantisation.**


def quantize(
    at: At, weights: F32, *, bits: int, group_size: int, convention: str = "minimum", scale_dtype: str = "float32"
) -> QuantizedMatrix:
    """By `affine.quantize`, group by group; a group is axis 0 of ranges."""
    dtype, top, minimum = np.dtype(scale_dtype), np.float32(2**bits - 1), convention == "minimum"
    rows, starts = len(weights), np.arange(0, len(weights), group_size)
    own = np.arange(rows) // group_size
    weights = at("weights", weights, **{"in-float64": lambda: weights.astype(np.float64)})
    lows, highs = np.minimum.reduceat(weights, starts, axis=0), np.maximum.reduceat(weights, starts, axis=0)
    ways = {"of-all-columns": lambda: _whole(lows, highs, 1), "of-all-groups": lambda: _whole(lows, highs, 0)}
    ways["of-everything"] = lambda: _whole(lows, highs, None)
    low, high = at("ranges", np.stack([lows, highs]), **ways)
    if not minimum:
        low, high = np.minimum(low, np.float32(0)), np.maximum(high, np.float32(0))
    with np.errstate(all="ignore"):
        wide_scale = (high.astype(np.float64) - low) / float(top)
        scale = at("scales", (high - low) / top, **{"in-float64": lambda: wide_scale.astype(np.float32)}).astype(dtype)
        scale = np.where(scale > 0, scale, dtype.type(1))
        s, lowest = scale.astype(np.float32), low.astype(dtype)
        zero = lowest if minimum else np.clip(at("zero-points", np.rint(-low / s)), 0, top).astype(np.uint8)
        offset = zero.astype(np.float32)[own]
        quotient = (weights - offset) / s[own] if minimum else weights / s[own]
        exact = (weights.astype(np.float64) - (offset if minimum else 0)) / s[own]
        real = at("quotients", quotient, **{"in-float64": lambda: exact})
        codes = np.clip(np.rint(real) + (0 if minimum else offset), 0, top).astype(np.uint8)
    parts = {"words": packing.pack(codes, bits), "scales": scale, "zeros": zero, "bits": bits, "rows": rows}
    return unchecked(QuantizedMatrix, **parts, group_size=group_size, convention=convention)


def _whole(lows: Array, highs: Array, axis: int | None) -> Array:
    both = lows.min(axis=axis, keepdims=True), highs.max(axis=axis, keepdims=True)
    return np.stack([np.broadcast_to(part, lows.shape) for part in both])


RANGES = {
    "of-all-columns": "the range of all columns together",
    "of-all-groups": "the range of the whole column",
    "of-everything": "the range of the whole matrix",
}
IN_FLOAT64 = {"in-float64": "what float64 gives, without the rounding to float32"}

# **HQQ.**


def codes(at: At, weights: F32, scales: F32, zeros: F32, bits: int) -> Array:
    with np.errstate(all="ignore"):
        ways = {
            "divided-together": lambda: (weights + zeros) / scales,
            "zero-scaled": lambda: weights / scales + zeros / scales,
        }
        ways |= {"distances": lambda: (weights - zeros) / scales, "multiplied": lambda: weights * scales + zeros}
        real = at("quotients", weights / scales + zeros, **ways)
        return np.asarray(np.clip(np.nan_to_num(np.rint(real)), 0, 2**bits - 1).astype(np.uint8))


def step(at: At, weights: F32, codes: Array, scales: F32, zeros: F32, p: float, beta: float) -> Array:
    w, q, s, z = wide(weights, codes, scales, zeros)
    with np.errstate(all="ignore"):
        errors = at("errors", w - s * (q - z), zero_added=lambda: w - s * (q + z), zero_unscaled=lambda: w - s * q + z)
        size, sign = np.abs(errors), np.sign(errors)
        kept = at("shrunk-errors", hqq_solver.shrink(errors, float(p), float(beta)), **_shrunk(size, sign, p, beta))
        terms = at("terms", q - (w - kept) / s, **_terms(w, q, s, kept))
        count = {
            "less-1": lambda: np.array(max(len(w) - 1, 1)),
            "groups": lambda: np.array(w.shape[1]),
            "one": lambda: np.array(1),
        }
        return np.asarray(at("zeros", terms.sum(axis=0) / at("count", np.array(len(w)), **count)))


def _shrunk(size: Array, sign: Array, p: float, beta: float) -> dict[str, Any]:
    powers = {"power-p": p, "power-1-minus-p": 1 - p, "power-p-minus-2": p - 2, "power-0": 0.0}

    def by(power: float) -> Callable[[], Array]:
        return lambda: sign * np.maximum(0, size - size**power / beta)

    return {
        **{name: by(power) for name, power in powers.items()},
        "beta-multiplied": lambda: np.where(size == 0, 0, sign * np.maximum(0, size - size ** (p - 1) * beta)),
        "power-added": lambda: np.where(size == 0, 0, sign * (size + size ** (p - 1) / beta)),
        "none": lambda: 0 * size,
        "whole": lambda: sign * size,
    }


def _terms(w: Array, q: Array, s: Array, kept: Array) -> dict[str, Any]:
    return {
        "multiplied": lambda: q - (w - kept) * s,
        "kept-added": lambda: q - (w + kept) / s,
        "kept-left-out": lambda: q - w / s,
        "kept-unscaled": lambda: q - w / s + kept,
        "added": lambda: q + (w - kept) / s,
    }


TERMS = {
    "multiplied": "q - (W - W_e) scale: multiplied and not divided",
    "kept-added": "q - (W + W_e) / scale: the shrunk error is added",
    "kept-left-out": "q - W / scale: the shrunk error is left out",
    "kept-unscaled": "q - W / scale + W_e: the shrunk error is not divided",
    "added": "q + (W - W_e) / scale",
}
SHRUNK = {
    "power-p": "shrinking by the power p, not p - 1",
    "power-1-minus-p": "shrinking by the power 1 - p, not p - 1",
    "power-p-minus-2": "shrinking by the power p - 2, not p - 1",
    "power-0": "shrinking by 1 / beta",
    "beta-multiplied": "shrinking where beta multiplies and does not divide",
    "power-added": "errors that grow and do not shrink",
    "none": "0",
    "whole": "the errors, not shrunk",
}

# **GPTQ.**


def hessian(at: At, x: F32) -> Array:
    (given,) = wide(x)
    mean = given.mean(axis=0)
    inputs = at("inputs", given, centred=lambda: given - mean, normalised=lambda: given / np.sqrt(max(len(x), 1)))
    return np.asarray(at("sums", inputs.T @ inputs, mean=lambda: given.T @ given / len(x)))


def factor(at: At, hessian: Array) -> Array:
    (given,) = wide(hessian)
    turned = np.linalg.cholesky(given[::-1, ::-1])[::-1, ::-1]
    diagonal = np.diagonal(turned)
    kept = {
        "times-diagonal": lambda: turned * diagonal,
        "unit-diagonal": lambda: turned / diagonal,
        "unit-rows": lambda: turned / diagonal[:, None],
        "squared-diagonal": lambda: turned - np.diag(diagonal) + np.diag(diagonal**2),
        "lower": lambda: np.linalg.cholesky(given),
        "lower-transposed": lambda: np.linalg.cholesky(given).T,
        "of-the-inverse": lambda: np.linalg.cholesky(np.linalg.inv(given)).T,
        "lower-of-the-inverse": lambda: np.linalg.cholesky(np.linalg.inv(given)),
        "whole-inverse": lambda: np.linalg.inv(turned),
        "not-reduced": lambda: np.triu(given / np.sqrt(np.diagonal(given))),
        "diagonal-only": lambda: np.diag(diagonal),
    }
    return np.ascontiguousarray(at("factors", turned, **kept))


def targets(at: At, weights: F32, factor: F32, values: F32) -> Array:
    w, f, v = wide(weights, factor, values)
    ratios = f / np.diagonal(f)
    upper = np.triu(ratios, 1)
    blocks = {f"in-blocks-of-{n}": lambda n=n: _in_blocks(upper, n) for n in (2, 4, 8, 16, 32, 64, 128)}
    lazy = {f"only-between-blocks-of-{n}": lambda n=n: upper - _in_blocks(upper, n) for n in (2, 4, 8, 16, 32, 64, 128)}
    ways = {
        "own-included": lambda: np.triu(ratios),
        "divided-by-own": lambda: np.triu(f / np.diagonal(f)[:, None], 1),
        "undivided": lambda: np.triu(f, 1),
        "divided-twice": lambda: np.triu(ratios / np.diagonal(f), 1),
        "next-only": lambda: upper * np.eye(len(f), k=1),
    }
    spread = at("ratios", upper, **ways, **blocks, **lazy)
    errors = at("errors", w - v, of_targets=lambda: _of_targets(w, v, upper), of_values=lambda: v - w)
    return np.asarray(w + at("sums-of-errors", spread.T @ errors))


def _in_blocks(upper: Array, size: int) -> Array:
    block = np.arange(len(upper)) // size
    return np.asarray(upper * (block[:, None] == block))


def _of_targets(weights: Array, values: Array, upper: Array) -> Array:
    goals, errors = weights.copy(), np.zeros_like(weights)
    for k in range(len(weights)):
        errors[k] = goals[k] - values[k]
        goals[k + 1 :] += np.outer(upper[k, k + 1 :], errors[k])
    return errors


SIZES = (2, 4, 8, 16, 32, 64, 128)
RATIOS = {
    "own-included": "those that add a row's own error too",
    "divided-by-own": "those divided by the diagonal of the row that was rounded",
    "undivided": "those that are not divided by the diagonal",
    "divided-twice": "those divided by the diagonal twice",
    "next-only": "those of the next row alone",
    **{f"in-blocks-of-{n}": f"those within blocks of {n} rows" for n in SIZES},
    **{f"only-between-blocks-of-{n}": f"those between blocks of {n} rows" for n in SIZES},
}
FACTORS = {
    "times-diagonal": "that without roots: its columns are not divided by the root of the pivot",
    "unit-diagonal": "that with columns divided by the diagonal",
    "unit-rows": "that with rows divided by the diagonal",
    "squared-diagonal": "that with pivots whose root is not taken",
    "lower": "the lower factor",
    "lower-transposed": "the lower factor, transposed",
    "of-the-inverse": "the factor of the inverse",
    "lower-of-the-inverse": "the lower factor of the inverse",
    "whole-inverse": "its inverse",
    "not-reduced": "that of a Hessian from which nothing is taken off",
    "diagonal-only": "its diagonal",
}

# **Orders and heads.**


def relabel(at: At, layout: Layout, order: Array) -> Layout:
    back = np.argsort(order)
    whole = {"inverse": lambda: back, "none": lambda: np.arange(len(order))}
    of_signs, of_pairs = (at(f"order-of-{name}", order, **whole) for name in ("signs", "frequencies"))
    of_partners, names = (
        at("order-of-partners", order, **whole),
        at("new-names", back, order=lambda: order, none=lambda: np.arange(len(order))),
    )
    parts = {
        "partner": names[layout.partner[of_partners]],
        "sign": layout.sign[of_signs],
        "pair": layout.pair[of_pairs],
    }
    return unchecked(Layout, **{name: np.ascontiguousarray(part) for name, part in parts.items()})


ORDER = {"inverse": "the inverse order", "none": "the old order"}


def pool(at: At, weights: F32, heads: int, groups: int, method: str = "mean") -> Array:
    rows, size = len(weights), heads // groups
    whole = weights.reshape(rows, heads, -1)
    ways = {
        "strided": lambda: whole.reshape(rows, size, groups, -1).swapaxes(1, 2),
        "channels-first": lambda: np.ascontiguousarray(weights.reshape(rows, -1, heads).swapaxes(1, 2)).reshape(
            rows, groups, size, -1
        ),
        "first-heads": lambda: np.repeat(whole[:, :groups, None], size, axis=2),
    }
    cells = at("groups-of-heads", whole.reshape(rows, groups, size, -1), **ways)
    total = reduce(lambda sum, member: sum + cells[:, :, member], range(1, size), cells[:, :, 0].astype(np.float64))
    count = {
        "groups": lambda: np.array(groups),
        "heads": lambda: np.array(heads),
        "less-1": lambda: np.array(max(size - 1, 1)),
    }
    with np.errstate(all="ignore"):
        mean = at("means", total / at("count", np.array(size), **count), **_others(cells, total))
    chosen = cells[:, :, 0] if method == "first" else mean
    first = {"last": lambda: cells[:, :, -1] if method == "first" else mean, "mean": lambda: mean}
    return np.ascontiguousarray(np.reshape(at("answers", chosen, **first), (rows, -1)).astype(np.float32))


def _others(cells: Array, total: Array) -> dict[str, Any]:
    size = cells.shape[2]
    return {
        "largest": lambda: cells.max(axis=2),
        "smallest": lambda: cells.min(axis=2),
        "median": lambda: np.median(cells, axis=2),
        "first": lambda: cells[:, :, 0],
        "last": lambda: cells[:, :, -1],
        "without-last": lambda: (total - (cells[:, :, -1] if size > 1 else 0)) / size,
        "by-float32-reciprocal": lambda: total.astype(np.float32) * np.float32(1 / size),
        "root-mean-square": lambda: np.sqrt(np.square(cells.astype(np.float64)).mean(axis=2)),
    }


MEANS = {
    "largest": "the largest of the group",
    "smallest": "the smallest of the group",
    "median": "the median",
    "first": "the first head",
    "last": "the last head",
    "without-last": "the sum without the last head, divided by their number",
    "by-float32-reciprocal": "the sum in float32 times 1 / r in float32",
    "root-mean-square": "the root mean square",
}
NUMBERS: Mapping[str, Stages] = {
    "bfp.cast": Stages(
        cast,
        ("rounded", "quotients", "exponents", "exponents-before-the-clamp", "largest-magnitudes"),
        {
            "largest-magnitudes": LARGEST,
            "exponents": {"raised": "one more where the top would round up", "zero-for-zeros": "0 for zeros"},
            "rounded": {"up": "the quotient rounded up", "odd": "the quotient rounded to an odd number"},
        },
    ),
    "affine.quantize": Stages(
        quantize,
        ("ranges", "scales", "quotients", "zero-points", "weights"),
        {"weights": IN_FLOAT64, "ranges": RANGES, "scales": IN_FLOAT64, "quotients": IN_FLOAT64},
    ),
    "hqq.codes": Stages(
        codes,
        ("quotients",),
        {
            "quotients": {
                "divided-together": "(W + zero) / scale",
                "zero-scaled": "W / scale + zero / scale",
                "distances": "(W - zero) / scale",
                "multiplied": "W scale + zero",
            }
        },
    ),
    "hqq.step": Stages(
        step,
        ("zeros", "count", "terms", "shrunk-errors", "errors"),
        {
            "terms": TERMS,
            "shrunk-errors": SHRUNK,
            "errors": {"zero_added": "W - scale (q + zero)", "zero_unscaled": "W - scale q + zero"},
            "count": {"less-1": "g - 1", "groups": "the number of groups", "one": "1"},
        },
    ),
    "gptq.hessian": Stages(
        hessian,
        ("sums", "inputs"),
        {
            "inputs": {"centred": "inputs without their mean", "normalised": "inputs divided by the root of T"},
            "sums": {"mean": "the mean"},
        },
    ),
    "gptq.factor": Stages(factor, ("factors",), {"factors": FACTORS}),
    "gptq.targets": Stages(
        targets,
        ("sums-of-errors", "ratios", "errors"),
        {
            "ratios": RATIOS,
            "errors": {"of_targets": "the error of the target", "of_values": "the error with the other sign"},
        },
    ),
    "ksort.relabel": Stages(
        relabel,
        ("new-names", "order-of-partners", "order-of-signs", "order-of-frequencies"),
        {
            "new-names": {"order": "the order and not its inverse", "none": "the old names"},
            **{f"order-of-{name}": ORDER for name in ("partners", "signs", "frequencies")},
        },
    ),
    "pooling.pool": Stages(
        pool,
        ("answers", "means", "count", "groups-of-heads"),
        {
            "answers": {"last": "the last head where the first is asked", "mean": "the mean, whatever is asked"},
            "means": MEANS,
            "count": {"groups": "the number of groups", "heads": "the number of heads", "less-1": "r - 1"},
            "groups-of-heads": {
                "strided": "heads j, j + G, j + 2 G and so on",
                "channels-first": "heads whose channels lie far apart",
                "first-heads": "head j alone",
            },
        },
    ),
}
