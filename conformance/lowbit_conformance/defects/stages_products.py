"""Products in stages: with quantised weights, with Block Floating Point, with real zeros, and the gate of a router."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from lowbit.arrays import F32, Array
from lowbit.linear.elementary import logistic
from lowbit.quantization.affine import QuantizedMatrix
from lowbit.quantization.bfp import Blocks
from lowbit.quantization.bfp_dot import BlockSums
from lowbit.quantization.hqq import HqqMatrix, from_blocks, to_blocks
from lowbit.quantization.hqq_numbers import EightBit, decode
from lowbit_conformance import packing
from lowbit_conformance.defects import steps
from lowbit_conformance.defects.defect import unchecked
from lowbit_conformance.defects.roundings import narrow, wide
from lowbit_conformance.defects.stages import At, Stages
from lowbit_conformance.defects.stages_layers import SHARES, SOFTMAX, _softmax


def _parts(at: At, matrix: QuantizedMatrix) -> tuple[Array, Array, Array]:
    """Codes, K × N, and scales and offsets of groups."""
    codes = at("codes", packing.unpack(matrix.words, matrix.bits).astype(np.float64))
    scales, zeros = steps.scales(matrix).astype(np.float64), steps.zeros(matrix).astype(np.float64)
    minimum = matrix.convention == "minimum"
    unscaled = zeros if minimum else -at("scales-of-the-zeros", scales) * zeros
    half = 2.0 ** (matrix.bits - 1)
    others = {
        "zeros-one-higher": lambda: zeros if minimum else -scales * (zeros + 1),
        "zeros-one-lower": lambda: zeros if minimum else -scales * (zeros - 1),
        "zeros-in-the-middle": lambda: zeros if minimum else -scales * half,
        "minima-scaled": lambda: zeros * scales if minimum else -scales * zeros,
        "minima-as-zeros": lambda: -zeros * scales,
        "zeros-as-minima": lambda: zeros,
        "zeros-by-columns": lambda: zeros.reshape(zeros.shape[::-1]).T * (1 if minimum else -scales),
    }
    return codes, at("scales-of-the-codes", scales), at("offsets", unscaled, **others)


OFFSETS = {
    "zeros-one-higher": "that of a zero-point one higher",
    "zeros-one-lower": "that of a zero-point one lower",
    "zeros-in-the-middle": "that of a zero-point in the middle of the codes",
    "minima-scaled": "the minimum times the scale",
    "minima-as-zeros": "that of a minimum taken for a zero-point",
    "zeros-as-minima": "that of a zero-point taken for a minimum",
    "zeros-by-columns": "that of zeros read column by column",
}


def _row_groups(rows: int, size: int, count: int) -> dict[str, Any]:
    at = np.arange(rows)
    found = {f"modulo-{n}": lambda n=n: at // size % n for n in (2, 3, 4, 8)}
    found |= {f"{n}-rows-early": lambda n=n: (at + n) // size for n in (1, 2, 4, 8)}
    found |= {f"{n}-rows-late": lambda n=n: np.maximum(at - n, 0) // size for n in (1, 2, 4, 8)}
    return found | {
        "cyclic": lambda: at % count,
        "whole-groups": lambda: np.minimum(at // size, max(rows // size - 1, 0)),
    }


GROUPS = {
    **{f"modulo-{n}": f"that group modulo {n}" for n in (2, 3, 4, 8)},
    **{f"{n}-rows-early": f"the group of {n} rows later" for n in (1, 2, 4, 8)},
    **{f"{n}-rows-late": f"the group of {n} rows before" for n in (1, 2, 4, 8)},
    "cyclic": "the row's number modulo the number of groups",
    "whole-groups": "for a short last group the group before it",
}


def _clipped(groups: Array, count: int) -> Array:
    return np.clip(groups.astype(np.int64), 0, count - 1)


def product(at: At, x: F32, matrix: QuantizedMatrix) -> Array:
    """`linear.qgemv` and `linear.qgemm`; groups are axis 1 of sums, between vectors and columns."""
    given = np.atleast_2d(x).astype(np.float64)
    codes, scales, offsets = _parts(at, matrix)
    count, starts = matrix.groups, np.arange(matrix.groups) * matrix.group_size
    own = at("groups", steps.groups(matrix), **_row_groups(matrix.rows, matrix.group_size, count))
    of_scales, of_offsets = (_clipped(at(name, own), count) for name in ("groups-of-scales", "groups-of-offsets"))
    rows = np.arange(matrix.rows)
    last, first = np.isin(rows + 1, [*starts, matrix.rows]), np.isin(rows, starts)
    in_sums, in_products = (
        at(name, given, **_without(given, first, last)) for name in ("x-of-the-offsets", "x-of-the-codes")
    )
    with np.errstate(all="ignore"):
        terms = in_products[:, :, None] * (scales[of_scales] * codes)[None]
        products = at("sums-of-groups", np.add.reduceat(terms, starts, axis=1))
        each = in_sums[:, :, None] * offsets[of_offsets][None]
        whole = {"whole-sum": lambda: given.sum(axis=1)[:, None, None] * offsets}
        corrections = at("corrections-of-groups", np.add.reduceat(each, starts, axis=1), **whole)
        both = at("groups-of-the-sum", products + corrections)
        return narrow(at("sums", both.sum(axis=1))).reshape((*x.shape[:-1], matrix.columns))


def _without(given: Array, first: Array, last: Array) -> dict[str, Any]:
    return {
        "without-last-of-groups": lambda: np.where(last, 0, given),
        "without-first-of-groups": lambda: np.where(first, 0, given),
    }


ROWS = {
    "without-last-of-groups": "that without the last row of each group",
    "without-first-of-groups": "that without the first row of each group",
}

# **Block Floating Point.**


def product_of_blocks(at: At, x: Blocks, matrix: QuantizedMatrix) -> Array:
    """Segments are axis 1 of sums."""
    codes, scales, offsets = _parts(at, matrix)
    block, size, rows = x.format.block, matrix.group_size, np.arange(matrix.rows)
    starts = np.flatnonzero((rows % block == 0) | (rows % size == 0))
    of_block, of_group = starts // block, starts // size
    most = x.exponents.shape[1] - 1
    number = at("blocks-of-segments", of_block, group=lambda: of_group, order=lambda: np.arange(len(starts)))
    exponents = x.exponents.astype(np.int64)[:, np.clip(number.astype(np.int64), 0, most)]
    exponents = at("exponents-of-segments", exponents, **_exponents(exponents))
    own = {
        "of-the-block": lambda: of_block * block // size,
        "block": lambda: of_block,
        "order": lambda: np.arange(len(starts)),
    }
    group = _clipped(at("groups-of-segments", of_group, **own), matrix.groups)
    mantissas = x.mantissas.astype(np.int64)
    unsigned = {"unsigned": lambda: np.where(mantissas < 0, mantissas + 2**x.format.mantissa, mantissas)}
    mantissas = at("mantissas", mantissas, **unsigned)
    terms = mantissas[:, :, None] * codes.astype(np.int64)[None]
    sums = {"pairs-saturated": lambda: _pairs(terms, starts, 16)}
    products = at("sums-of-products", np.add.reduceat(terms, starts, axis=1), **sums)
    totals = at(
        "sums-of-mantissas", np.add.reduceat(mantissas, starts, axis=1), added=lambda: _until(mantissas, starts)
    )
    with np.errstate(all="ignore"):
        powers, others = np.exp2(exponents)[:, :, None], np.exp2(at("exponents-of-the-sums", exponents))[:, :, None]
        first = at("scaled-products", scales[group] * products * powers)
        second = at("scaled-corrections", offsets[group] * totals[:, :, None] * others)
        return narrow(at("sums", at("segments-of-the-sum", first + second).sum(axis=1)))


def _exponents(exponents: Array) -> dict[str, Any]:
    return {f"at-least-minus-{n}": lambda n=n: np.maximum(exponents, -n) for n in (100, 126, 127, 64, 32, 16)}


def _until(mantissas: Array, starts: Array) -> Array:
    return np.cumsum(mantissas, axis=1)[:, [*(starts[1:] - 1), mantissas.shape[1] - 1]]


def _pairs(terms: Array, starts: Array, bits: int) -> Array:
    """Sums of neighbouring pairs that saturate, as one instruction of 8-bit products gives them."""
    found, most = [], 2 ** (bits - 1)
    for start, stop in zip(starts, [*starts[1:], terms.shape[1]], strict=True):
        whole = start + (stop - start) // 2 * 2
        pairs = np.clip(terms[:, start:whole:2] + terms[:, start + 1 : whole : 2], -most, most - 1).sum(axis=1)
        found.append(pairs + terms[:, whole:stop].sum(axis=1))
    return np.stack(found, axis=1)


SEGMENTS = {
    "blocks-of-segments": {"group": "the number of the group", "order": "the number of the segment"},
    "groups-of-segments": {
        "of-the-block": "the group of the first row of the block",
        "block": "the number of the block",
        "order": "the number of the segment",
    },
    "mantissas": {"unsigned": "mantissas read without their sign bit"},
    "sums-of-products": {"pairs-saturated": "sums whose neighbouring products saturate at 16 bits"},
    "sums-of-mantissas": {"added": "the sum from the first row on, not cleared between segments"},
    "exponents-of-segments": {f"at-least-minus-{n}": f"at least -{n}" for n in (100, 126, 127, 64, 32, 16)},
}


def _by_block(mantissas: Array, block: int) -> Array:
    """R × P × B, the last block filled with zeros."""
    rows, columns = mantissas.shape
    padded = np.zeros((rows, -(-columns // block) * block), np.int64)
    padded[:, :columns] = mantissas
    return padded.reshape(rows, -1, block)


def dot(at: At, a: Blocks, b: Blocks) -> BlockSums:
    """Blocks are axis 1, elements of a block axis 2; a short block is read at its own length."""
    parts = [
        at(f"mantissas-of-{name}", _by_block(each.mantissas, a.format.block)) for name, each in (("a", a), ("b", b))
    ]
    exponents = [at(f"exponents-of-{name}", each.exponents.astype(np.int64)) for name, each in (("a", a), ("b", b))]
    sums = at("sums", np.einsum("rpe,spe->rsp", *parts), **_ends(a, b, parts))
    joined = exponents[0][:, None] + exponents[1][None]
    whole = at("exponents", joined, difference=lambda: exponents[0][:, None] - exponents[1][None])
    arrays = {"sums": np.ascontiguousarray(sums, np.int64), "exponents": np.ascontiguousarray(whole, np.int32)}
    return unchecked(BlockSums, **arrays)


def _ends(a: Blocks, b: Blocks, parts: list[Array]) -> dict[str, Any]:
    spans = list(a.format.spans(a.columns))
    p, q = a.mantissas.astype(np.int64), b.mantissas.astype(np.int64)

    def each(change: Any, first: int, last: int) -> Any:
        def sums() -> Array:
            cut = [slice(span.start + first, span.stop - last) for span in spans]
            return np.stack([p[:, span] @ change(q[:, span]).T for span in cut], axis=2)

        return sums

    return {
        "without-last": each(lambda rows: rows, 0, 1),
        "without-first": each(lambda rows: rows, 1, 0),
        "turned": each(lambda rows: rows[:, ::-1], 0, 0),
        "next": each(lambda rows: np.roll(rows, -1, 1), 0, 0),
        "previous": each(lambda rows: np.roll(rows, 1, 1), 0, 0),
        "without-signs": lambda: np.einsum("rpe,spe->rsp", *map(np.abs, parts)),
    }


SUMS = {
    "without-last": "that without the last element of each block",
    "without-first": "that without the first element of each block",
    "turned": "that with the elements of b in reverse order",
    "next": "that of each element of a with the next one of b",
    "previous": "that of each element of a with the one before of b",
    "without-signs": "that of mantissas without their signs",
}

# **Real zeros.**


def _numbers(at: At, name: str, numbers: Any) -> F32:
    if not isinstance(numbers, EightBit):
        return np.asarray(at(name, decode(numbers)))
    codes, count = numbers.codes.astype(np.float32), len(numbers.scales)
    own = at(
        f"groups-of-{name}", np.arange(len(codes)) % count, runs=lambda: np.arange(len(codes)) // (len(codes) // count)
    )
    own = np.clip(own.astype(np.int64), 0, count - 1)
    s, z = numbers.scales.astype(np.float32)[own], numbers.zeros.astype(np.float32)[own]
    ways = {
        "not-decoded": lambda: codes,
        "own-zero-added": lambda: s * (codes + z),
        "own-zero-left-out": lambda: s * codes,
    }
    ways |= {"own-zero-unscaled": lambda: s * codes - z, "own-scale-left-out": lambda: codes - z}
    return np.asarray(at(name, s * (codes - z), **ways), np.float32)


def real_weights(at: At, matrix: HqqMatrix) -> F32:
    codes = packing.unpack(matrix.words, matrix.bits).astype(np.float32)
    rows, columns = codes.shape
    flat, other = np.arange(rows * columns).reshape(columns, rows).T, np.arange(rows * columns).reshape(rows, columns)
    blocks = to_blocks(flat, matrix.group_size, matrix.axis)
    groups = from_blocks(np.zeros_like(blocks) + np.arange(matrix.groups), rows, matrix.axis)
    ways = {
        "other-axis": lambda: flat % matrix.groups if matrix.axis == 1 else flat // matrix.group_size,
        "by-rows": lambda: other // matrix.group_size if matrix.axis == 1 else other % matrix.groups,
        "by-rows-of-the-other-axis": lambda: other % matrix.groups if matrix.axis == 1 else other // matrix.group_size,
    }
    own = np.clip(at("groups", groups, **ways).astype(np.int64), 0, matrix.groups - 1)
    scales, zeros = _numbers(at, "scales", matrix.scales), _numbers(at, "zeros", matrix.zeros)
    s, z = at("scales-of-weights", scales[own]), at("zeros-of-weights", zeros[own])
    s, z = s.astype(np.float32), z.astype(np.float32)
    with np.errstate(all="ignore"):
        found = {
            "zero-unscaled": lambda: s * codes - z,
            "zero-added": lambda: s * (codes + z),
            "three-roundings": lambda: s * codes - s * z,
        }
        return np.asarray(at("weights", s * (codes - z), **found), np.float32)


def real_product(at: At, x: F32, matrix: HqqMatrix) -> Array:
    with np.errstate(all="ignore"):
        return narrow((x.astype(np.float64)[:, None] * real_weights(at, matrix).astype(np.float64)).sum(axis=0))


OWN = {
    "not-decoded": "their codes of 8 bits",
    "own-zero-added": "numbers whose own zero is added",
    "own-zero-left-out": "numbers whose own zero is left out",
    "own-zero-unscaled": "numbers whose own zero is not scaled",
    "own-scale-left-out": "numbers whose own scale is left out",
}
RUNS = {"runs": "those in runs, f // (G / M)"}
REAL: Mapping[str, Mapping[str, str]] = {
    "weights": {
        "zero-unscaled": "scale q - zero: the zero is not scaled",
        "zero-added": "scale (q + zero): the zero is added",
        "three-roundings": "scale q - scale zero, rounded three times",
    },
    "groups": {
        "other-axis": "the group along the other axis",
        "by-rows": "the group of numbers that are laid out by rows",
        "by-rows-of-the-other-axis": "the group along the other axis of numbers that are laid out by rows",
    },
    "scales": OWN,
    "zeros": OWN,
    "groups-of-scales": RUNS,
    "groups-of-zeros": RUNS,
}
WEIGHT_NAMES = ("weights", "zeros-of-weights", "scales-of-weights", "zeros", "scales", "groups", "groups-of-zeros")

# **The gate.**


def gate(at: At, x: Array, router: Array, scores: str = "logits") -> Array:
    h, r = at("x", x.astype(np.float64)), at("router", router.astype(np.float64))
    with np.errstate(all="ignore"):
        logits = at("logits", h @ r, always=lambda: _softmax(At(), h @ r, {}))
        if scores == "logits":
            return narrow(logits)
        return narrow(_softmax(at, logits, {}))


def weights(at: At, scores: Array, chosen: Array, softmax: str = "after") -> Array:
    (every,) = wide(scores)
    own = at("chosen", np.take_along_axis(every, chosen, axis=1), first=lambda: every[:, : chosen.shape[1]])
    if softmax == "after":
        with np.errstate(all="ignore"):
            whole = np.exp(every - every.max(axis=1, keepdims=True))
            of_all = np.take_along_axis(whole / whole.sum(axis=1, keepdims=True), chosen, axis=1)
            return narrow(at("weights", _softmax(at, own, {}), of_all=lambda: of_all, sigmoids=lambda: logistic(own)))
    total = own.sum(axis=1, keepdims=True)
    totals = {"of-all": lambda: every.sum(axis=1, keepdims=True), "none": lambda: np.ones_like(total)}
    totals |= {"greatest": lambda: own.max(axis=1, keepdims=True), "over-rows": lambda: own.sum(axis=0)[None]}
    with np.errstate(all="ignore"):
        return narrow(at("weights", own / at("sums-of-the-chosen", total, **totals), of_all=lambda: own))


PRODUCT = (
    "sums",
    "groups-of-the-sum",
    "offsets",
    "corrections-of-groups",
    "sums-of-groups",
    "x-of-the-offsets",
    "x-of-the-codes",
    "groups",
    "groups-of-scales",
    "groups-of-offsets",
    "scales-of-the-codes",
    "scales-of-the-zeros",
    "codes",
)
OF_PRODUCTS: Mapping[str, Mapping[str, str]] = {
    "offsets": OFFSETS,
    "groups": GROUPS,
    "groups-of-scales": GROUPS,
    "groups-of-offsets": GROUPS,
    "x-of-the-offsets": ROWS,
    "x-of-the-codes": ROWS,
    "corrections-of-groups": {"whole-sum": "the sum of all activations where that of the group belongs"},
}
PRODUCTS: Mapping[str, Stages] = {
    "linear.qgemv": Stages(product, PRODUCT, OF_PRODUCTS),
    "linear.qgemm": Stages(product, PRODUCT, OF_PRODUCTS),
    "linear.qgemm_bfp": Stages(
        product_of_blocks,
        (
            "sums",
            "segments-of-the-sum",
            "offsets",
            "scaled-corrections",
            "scaled-products",
            "exponents-of-segments",
            "exponents-of-the-sums",
            "blocks-of-segments",
            "groups-of-segments",
            "sums-of-mantissas",
            "sums-of-products",
            "mantissas",
            "scales-of-the-codes",
            "scales-of-the-zeros",
            "codes",
        ),
        {**SEGMENTS, "offsets": OFFSETS},
    ),
    "bfp.dot": Stages(
        dot,
        ("sums", "exponents", "exponents-of-a", "exponents-of-b", "mantissas-of-a", "mantissas-of-b"),
        {"sums": SUMS, "exponents": {"difference": "their difference"}},
    ),
    "hqq.dequantize": Stages(real_weights, (*WEIGHT_NAMES, "groups-of-scales"), REAL),
    "hqq.qgemv": Stages(real_product, (*WEIGHT_NAMES, "groups-of-scales"), REAL),
    "routing.gate": Stages(
        gate, (*SHARES, "logits", "x", "router"), {**SOFTMAX, "logits": {"always": "their softmax, whatever is asked"}}
    ),
    "routing.weights": Stages(
        weights,
        ("weights", "sums-of-the-chosen", *SHARES, "chosen"),
        {
            **SOFTMAX,
            "weights": {"of_all": "the probabilities over all experts, not divided again", "sigmoids": "sigmoids"},
            "sums-of-the-chosen": {
                "of-all": "the sum of all probabilities",
                "none": "1",
                "greatest": "the greatest of them",
                "over-rows": "the sum over the tokens, the wrong axis",
            },
            "chosen": {"first": "the scores of the first k experts"},
        },
    ),
}
