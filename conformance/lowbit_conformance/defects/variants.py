"""Variants of operations: the reference with one step done otherwise, for each operation that has such steps.

`families` rounds inputs and results, and replaces the steps of a product with quantised weights. Here are the steps of
the other operations: what lies between two steps in a narrower format, a limit on a count, another rounding, another
rule for the ends of a range. `VARIANTS` holds them by operation; a name may stand for several ways of one mistake.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from lowbit.arrays import F32, Array
from lowbit.attention import rope
from lowbit.attention.kvcache import BfpKeyValueCache
from lowbit.linear.elementary import softmax as softmax_of
from lowbit.moe import routing
from lowbit.moe.offload import Offload, Request, Staged
from lowbit.quantization import bfp_dot, gptq, hqq_solver
from lowbit.quantization.bfp import Blocks, Format
from lowbit.quantization.bfp_dot import BlockSums
from lowbit.quantization.bfp_storage import EXPONENT_BIAS, StoredBlocks, store, unpack_signed
from lowbit.quantization.hqq import HqqMatrix
from lowbit.quantization.hqq_numbers import EightBit, Numbers, decode
from lowbit_conformance.defects import attention, blocks, depth, engines, experts, heads, quantisers, reals, routes
from lowbit_conformance.defects.defect import Function, unchecked
from lowbit_conformance.defects.narrow import FORMATS, Change

Variant = tuple[str, str, Function]
"""A name, a cause and the operation that makes the mistake."""
Variants = Iterator[Variant]
SIZES = tuple(2**power for power in range(3, 17))
SMALL = tuple(10.0**-power for power in range(5, 21))


def up(numbers: Array) -> Array:
    """Ties upwards."""
    answer: Array = np.floor(numbers + numbers.dtype.type(0.5))
    return answer


ROUNDINGS: tuple[tuple[str, str, Callable[[Any], Any]], ...] = (
    ("ties-up", "a tie goes upwards and not to the even neighbour", up),
    ("ties-away", "a tie goes away from zero and not to the even neighbour", blocks.away),
    ("truncated", "the fraction is cut", np.trunc),
    ("rounded-down", "it is rounded down", np.floor),
    ("rounded-up", "it is rounded up", np.ceil),
)


def narrowed() -> Iterator[tuple[str, str, Change]]:
    """Each narrow format with each of its roundings."""
    for format, (words, ways) in FORMATS.items():
        for way in ways:
            yield format, words, way


# **Affine quantisation.**


def _zero_below(least: float) -> Change:
    return lambda scale: np.where(scale < least, np.float32(0), scale)


def quantize_variants() -> Variants:
    for name, words, way in ROUNDINGS:
        yield f"codes-{name}", f"In a code, {words}.", quantisers.replacing(rounded=way)
        yield f"zero-points-{name}", f"In a zero-point, {words}.", quantisers.replacing(zero_rounded=way)
    for format, words, way in narrowed():
        if format != "normal-range":  # that has a name of its own below
            cause = f"Scales: {words}, before codes are found with them."
            yield f"scales-in-{format}", cause, quantisers.replacing(scale_changed=way)
    inside = "A code is round(w / scale + zero), where the zero is added after the rounding."
    yield "zero-point-inside-rounding", inside, quantisers.replacing(zero_inside=True)
    for small in SMALL:
        cause = "A group without a range has a very small scale instead of 1."
        yield "no-range-small-scale", cause, quantisers.replacing(no_range=small)
        least = quantisers.replacing(scale_changed=partial(np.maximum, np.float32(small)))
        yield "scales-with-a-least-number", "A scale is never less than a small number.", least
    for small in (2.0**-126, *SMALL):
        nothing = quantisers.replacing(scale_changed=_zero_below(small))
        cause = "A very small scale, such as a subnormal one, counts as 0: its group as one without a range."
        yield "small-scales-count-as-zero", cause, nothing


# **Block Floating Point.**


def _largest_positive(x: F32) -> F32:
    return np.maximum(x, 0)


def _cast_by(signed: Change) -> Callable[[F32, Format], Blocks]:
    """The exponents are those of other numbers than those that are cast."""

    def cast(x: F32, format: Format) -> Blocks:
        exponents = blocks.cast(signed(x), format).exponents
        each = np.repeat(exponents.astype(np.int64), format.block, axis=1)[:, : x.shape[1]]
        mantissas = np.clip(np.rint(np.ldexp(x.astype(np.float64), -each)), -format.top, format.top)
        return blocks.blocks_of(mantissas, exponents, format)

    return cast


def _log2_up(largest: Array) -> Array:
    with np.errstate(divide="ignore"):
        return np.ceil(np.log2(largest.astype(np.float32))).astype(np.int64)


def _natural_log(largest: Array) -> Array:
    with np.errstate(divide="ignore"):
        return np.floor(np.log(largest.astype(np.float32)) / np.float32(np.log(2))).astype(np.int64) + 1


def cast_variants() -> Variants:
    for name, words, way in ROUNDINGS:
        yield f"mantissas-{name}", f"In a mantissa, {words}.", lambda x, f, w=way: blocks.cast(x, f, rounded=w)
    positive = _cast_by(_largest_positive)
    yield "exponent-of-largest-positive", "The exponent is that of the largest positive element.", positive
    logarithms = (("rounded up", _log2_up), ("by a natural logarithm", _natural_log))
    for words, way in logarithms:
        cause = f"The exponent is a logarithm in float32, {words}, and misses at powers of two."
        yield "exponent-by-rounded-logarithm", cause, lambda x, f, w=way: blocks.cast(x, f, exponent_of=w)
    for format, words, narrow in narrowed():
        cause = f"Elements are {words} when their mantissas are computed, and not when the exponent is."
        yield f"elements-of-mantissas-in-{format}", cause, lambda x, f, n=narrow: _scaled_narrow(x, f, n)


def _scaled_narrow(x: F32, format: Format, narrow: Change) -> Blocks:
    exponents = blocks.cast(x, format).exponents
    each = np.repeat(exponents.astype(np.int64), format.block, axis=1)[:, : x.shape[1]]
    with np.errstate(over="ignore"):
        scaled = np.nan_to_num(np.ldexp(narrow(x).astype(np.float64), -each))
    return blocks.blocks_of(np.clip(np.rint(scaled), -format.top, format.top), exponents, format)


def decode_variants() -> Variants:
    def cyclic(given: Blocks) -> Array:
        each = given.exponents.astype(np.int64)[:, np.arange(given.columns) % given.exponents.shape[1]]
        with np.errstate(over="ignore", under="ignore"):
            return np.ldexp(given.mantissas.astype(np.float64), each).astype(np.float32)

    yield "exponents-cyclic", "Element i takes the exponent of block i mod P and not of block i / B.", cyclic


def total_variants() -> Variants:
    for lanes in (2, 4, 8, 16, 32):
        cause = "Blocks are added in several partial sums, which are added at the end."
        yield "blocks-in-partial-sums", cause, lambda given, n=lanes: _in_lanes(given, n)
        yield "blocks-in-partial-sums", cause, lambda given, n=lanes: _in_lanes(given, n) + np.float32(0)
    yield "blocks-in-two-halves", "Each half of the blocks has a sum of its own.", _in_halves


def _part(given: BlockSums, which: slice) -> F32:
    pieces = np.ascontiguousarray(given.sums[:, :, which]), np.ascontiguousarray(given.exponents[:, :, which])
    return bfp_dot.total(BlockSums(*pieces))


def _in_lanes(given: BlockSums, lanes: int) -> F32:
    many = min(lanes, given.sums.shape[2])
    answer = _part(given, slice(0, None, lanes))
    with np.errstate(over="ignore", invalid="ignore"):
        for lane in range(1, many):
            answer = answer + _part(given, slice(lane, None, lanes))
    return answer


def _in_halves(given: BlockSums) -> F32:
    half = given.sums.shape[2] // 2
    with np.errstate(over="ignore", invalid="ignore"):
        return _part(given, slice(0, half)) + _part(given, slice(half, None)) if half else bfp_dot.total(given)


def _of_bytes(name: str, change: Change) -> Callable[[Function], Function]:
    """An operation on stored blocks with one of their arrays changed, as they are written or before they are read."""

    def changed(stored: StoredBlocks) -> StoredBlocks:
        parts = {
            each: getattr(stored, each).copy() if each in ("mantissas", "exponents") else getattr(stored, each)
            for each in ("mantissas", "exponents", "columns", "format")
        }
        parts[name] = np.ascontiguousarray(change(parts[name]))
        return unchecked(StoredBlocks, **parts)

    def wrap(function: Function) -> Function:
        def run(given: Any) -> Any:
            return function(changed(given)) if isinstance(given, StoredBlocks) else changed(function(given))

        return run

    return wrap


def _bits_reversed(stream: Array) -> Array:
    return np.packbits(np.unpackbits(stream, axis=1), axis=1, bitorder="little")


STORED: tuple[tuple[str, str, str, Change], ...] = (
    ("bits-from-the-other-end", "Bits of a byte are taken from its other end.", "mantissas", _bits_reversed),
    (
        "halves-of-bytes-exchanged",
        "The first mantissa is in the high half of a byte.",
        "mantissas",
        lambda s: s << 4 | s >> 4,
    ),
    ("bytes-reversed", "Bytes of a row stand in the other order.", "mantissas", lambda stream: stream[:, ::-1]),
    ("exponents-with-bias-128", "The bias of exponents is 128 and not 127.", "exponents", lambda e: e + np.uint8(1)),
    ("exponents-with-bias-126", "The bias of exponents is 126 and not 127.", "exponents", lambda e: e - np.uint8(1)),
    (
        "exponents-without-bias",
        "Exponents have no bias: their byte is in two's complement.",
        "exponents",
        lambda e: e - np.uint8(EXPONENT_BIAS),
    ),
)


def store_variants() -> Variants:
    for name, cause, part, change in STORED:
        yield name, cause, _of_bytes(part, change)(store)
    yield "bits-left-over-set", "The bits after the last mantissa of a row are set.", _left_over_set


def _left_over_set(given: Blocks) -> StoredBlocks:
    stored = store(given)
    used = given.columns * given.format.mantissa % 8
    stream = stored.mantissas.copy()
    stream[:, -1] |= np.uint8(0xFF << used & 0xFF if used else 0)
    return unchecked(
        StoredBlocks, mantissas=stream, exponents=stored.exponents, columns=stored.columns, format=stored.format
    )


def load_variants() -> Variants:
    def loaded(mantissas: Change, exponents: Callable[[Array, Format], Array]) -> Function:
        def run(stored: StoredBlocks) -> Blocks:
            read = unpack_signed(np.ascontiguousarray(mantissas(stored.mantissas)), stored.columns, stored.format)
            return blocks.blocks_of(read, exponents(stored.exponents.astype(np.int64), stored.format), stored.format)

        return run

    def same(stream: Array) -> Array:
        return stream

    def biased(bias: int) -> Callable[[Array, Format], Array]:
        return lambda e, format: e - bias

    def clamped(bias: int) -> Callable[[Array, Format], Array]:
        return lambda e, format: np.clip(e - bias, -format.reach, format.reach)

    for name, cause, part, change in STORED:
        if part == "mantissas":
            yield name, cause, loaded(change, biased(EXPONENT_BIAS))
    for bias in (126, 128):
        for way in (biased(bias), clamped(bias)):
            yield f"exponents-with-bias-{bias}", f"The bias of exponents is {bias} and not 127.", loaded(same, way)
    signed = loaded(same, lambda e, format: e.astype(np.int8).astype(np.int64))
    yield "exponents-without-bias", "Exponents have no bias: their byte is in two's complement.", signed


# **HQQ.**


def _own_zero_added(numbers: Numbers) -> F32:
    if not isinstance(numbers, EightBit):
        return decode(numbers)
    own = np.arange(len(numbers.codes)) % len(numbers.scales)
    s, z = numbers.scales.astype(np.float32)[own], numbers.zeros.astype(np.float32)[own]
    return s * (numbers.codes.astype(np.float32) + z)


def _laid_by_rows(matrix: HqqMatrix, right: Array) -> Array:
    return np.ascontiguousarray(right.T.reshape(matrix.rows, matrix.columns))


def _by_rows(matrix: HqqMatrix) -> Array:
    flat = np.arange(matrix.rows * matrix.columns).reshape(matrix.rows, matrix.columns)
    return flat // matrix.group_size if matrix.axis == 1 else flat % matrix.groups


def _with_zeros(way: Change) -> Callable[[HqqMatrix], Array]:
    return lambda matrix: reals.weights(matrix, zeros=way)


def _of_weights(way: Change) -> Callable[[HqqMatrix], Array]:
    return lambda matrix: way(reals.weights(matrix))


def _hqq_weights() -> Iterator[tuple[str, str, Callable[[HqqMatrix], Array]]]:
    yield (
        "real-zero-of-other-sign",
        "The weight is scale (q + zero): the zero is added and not subtracted.",
        lambda matrix: reals.weights(matrix, value=lambda q, s, z: s * (q + z)),
    )
    yield (
        "zero-of-8-bit-numbers-added",
        "Scales or zeros in 8 bits: their own zero is added and not subtracted.",
        lambda matrix: reals.weights(matrix, numbers=_own_zero_added),
    )
    yield (
        "real-zero-distributed-in-products",
        "The weight is scale q - scale zero, rounded three times.",
        lambda matrix: reals.weights(matrix, value=lambda q, s, z: s * q - s * z),
    )
    cause = "Groups run along the rows of K x N and not of N x K."
    yield "groups-along-other-axis", cause, lambda matrix: reals.weights(matrix, group=_by_rows)
    by_rows = "Weights are laid out as K x N and not as N x K."
    yield "weights-laid-by-rows", by_rows, lambda matrix: _laid_by_rows(matrix, reals.weights(matrix))
    for format, words, way in narrowed():
        yield (
            f"real-zeros-in-{format}",
            f"Real zeros: {words}.",
            _with_zeros(way),
        )
        yield f"weights-in-{format}", f"Weights: {words}.", _of_weights(way)


def real_zero_variants() -> Variants:
    yield from _hqq_weights()


def real_zero_product_variants() -> Variants:
    for name, cause, run in _hqq_weights():
        yield name, cause, lambda x, matrix, r=run: reals.product(x, r(matrix))


def code_variants() -> Variants:
    for name, words, way in ROUNDINGS:
        yield f"codes-{name}", f"In a code, {words}.", reals.coding(rounded=way)

    def separately(weights: F32, scales: F32, zeros: F32, bits: int) -> Array:
        with np.errstate(all="ignore"):
            real = np.rint(weights / scales) + np.rint(zeros)
        answer: Array = np.clip(real, 0, 2**bits - 1).astype(np.uint8)
        return answer

    def wrapped(weights: F32, scales: F32, zeros: F32, bits: int) -> Array:
        with np.errstate(all="ignore"):
            real = np.nan_to_num(np.rint(weights / scales + zeros))
            answer: Array = np.mod(np.where(np.abs(real) < 2.0**31, real, 0), 2**bits).astype(np.uint8)
        return answer

    def without_last(weights: F32, scales: F32, zeros: F32, bits: int) -> Array:
        return np.minimum(reals.codes(weights, scales, zeros, bits), np.uint8(2**bits - 2))

    def wide(weights: F32, scales: F32, zeros: F32, bits: int) -> Array:
        return reals.codes(weights.astype(np.float64), scales, zeros, bits)

    yield "weight-and-zero-rounded-apart", "The quotient and the zero are rounded one by one.", separately
    yield "codes-wrap", "A code beyond its range wraps and is not clamped.", wrapped
    yield "largest-code-lost", "The largest code is never given.", without_last
    yield "codes-in-float64", "The quotient is taken in float64 and not rounded to float32.", wide


def step_variants() -> Variants:
    def without_limit(d: Array, p: float, beta: float) -> Array:
        with np.errstate(divide="ignore"):
            return np.copysign(np.abs(d) - np.abs(d) ** (p - 1) / beta, d)

    def unsigned(d: Array, p: float, beta: float) -> Array:
        return np.abs(hqq_solver.shrink(d, p, beta))

    yield "shrinking-without-limit", "What is shrunk below 0 is not cut there.", reals.stepping(kept_of=without_limit)
    yield "shrinking-without-sign", "A shrunk error loses its sign.", reals.stepping(kept_of=unsigned)
    for power in (0.5, 0.7, 1.0):
        fixed = reals.stepping(kept_of=lambda d, p, beta, q=power: hqq_solver.shrink(d, q, beta))
        yield f"norm-always-{power:g}", f"The norm is {power:g}, whatever p says.", fixed
    for kept in (np.float16, np.float32):  # what they come back as
        yield "means-in-float16", "Means are taken in float16.", reals.stepping(middle=partial(_half_mean, kept=kept))


def _half_mean(numbers: Array, axis: int, kept: type) -> Array:
    with np.errstate(over="ignore", invalid="ignore"):
        answer: Array = np.mean(numbers.astype(np.float32), axis=axis, dtype=np.float16).astype(kept)
    return answer


# **GPTQ.**


def factor_variants() -> Variants:
    for damping in (1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 0.01, 0.1):
        cause = "A share of the mean of the diagonal is added to the diagonal."
        yield "hessian-damped-again", cause, lambda h, d=damping: gptq.factor(_damped(h, d))


def _damped(hessian: Array, share: float) -> Array:
    wide = hessian.astype(np.float64)
    return wide + np.eye(len(wide)) * share * np.mean(np.diagonal(wide))


def hessian_variants() -> Variants:
    yield "inputs-transposed", "X X^T is given for X^T X.", lambda x: x.astype(np.float64) @ x.astype(np.float64).T


def target_variants() -> Variants:
    def transposed(factor: Array) -> Array:
        return quantisers.ratios(factor).T

    def with_own(factor: Array) -> Array:
        return np.triu(factor / np.diagonal(factor))

    yield "ratios-transposed", "An error goes to the rows before it.", quantisers.spreading(transposed)
    yield "own-error-added", "A row's own error is added to its target.", quantisers.spreading(with_own)
    for format, words, way in narrowed():

        def narrow(weights: F32, factor: F32, values: F32, way: Change = way) -> Array:
            errors = way(weights - values).astype(np.float64)
            return weights.astype(np.float64) + quantisers.ratios(factor.astype(np.float64)).T @ errors

        yield f"errors-in-{format}", f"Errors: {words}.", narrow


# **Heads.**


def rope_variants() -> Variants:
    def limited(axis: int, most: int) -> Function:
        def run(x: F32, turn: rope.Rotation) -> Array:
            answer = heads.rotate(x, turn)
            past = (slice(None),) * axis + (slice(most, None),)
            answer[past] = x[past]
            return answer

        return run

    def wrapped(most: int) -> Function:
        def run(x: F32, turn: rope.Rotation) -> Array:
            token = np.arange(len(x)) % most
            wide, cos, sin = x.astype(np.float64), turn.cos[token][:, None], turn.sin[token][:, None]
            return wide * cos + wide[..., turn.layout.partner] * sin

        return run

    for size in SIZES:
        yield f"tokens-past-{size}-not-turned", f"Tokens past {size} are not turned.", limited(0, size)
        yield f"heads-past-{size}-not-turned", f"Heads past {size} are not turned.", limited(1, size)
        yield f"channels-past-{size}-not-turned", f"Channels past {size} are not turned.", limited(2, size)
        yield f"tokens-wrap-at-{size}", f"The number of a token wraps at {size}.", wrapped(size)
    mirrored = "Channels pair from both ends, whatever the layout says."
    yield "pairs-mirrored", mirrored, lambda x, turn: heads.rotate(x, turn, np.arange(x.shape[2])[::-1])


def _masked(way: Change) -> Callable[[Array, Array], Array]:
    return lambda scores, mask: np.where(mask, way(scores), -np.inf)


def _shares_in(way: Change) -> Callable[[Array], Array]:
    return lambda scores: way(softmax_of(scores))


def attend_variants() -> Variants:
    for format, words, way in narrowed():
        run = attention.replacing(
            scale=lambda channels, w=way: float(w(np.array([1 / np.sqrt(channels)], np.float32))[0])
        )
        yield f"scale-in-{format}", f"The scale of scores: {words}.", run
        yield f"scores-in-{format}", f"Scores: {words}.", depth.attending(masked=_masked(_of_float32(way)))
        yield f"shares-in-{format}", f"Shares: {words}.", depth.attending(shares=_shares_in(_of_float32(way)))
    for hidden in (-1e4, -65504.0, -1e9, -1e30):
        cause = "A hidden score is a large negative number and not minus infinity."
        yield "hidden-scores-finite", cause, depth.attending(masked=depth.replaced(hidden))
    for size in SIZES[3:]:

        def least(channels: int, size: int = size) -> float:
            return float(1 / np.sqrt(min(channels, size)))

        cause = f"The scale is that of {size} channels where there are more."
        yield f"scale-of-at-most-{size}-channels", cause, attention.replacing(scale=least)


def pool_variants() -> Variants:
    def by(divide: Callable[[Array, int], Array]) -> Function:
        def run(weights: F32, count: int, groups: int, method: str = "mean") -> F32:
            cells = heads.members(weights, count, groups)
            if method != "mean":
                return heads.pooled(cells, method)
            total = cells[:, :, 0].astype(np.float64)
            for member in range(1, cells.shape[2]):
                total += cells[:, :, member]
            with np.errstate(over="ignore"):
                mean = divide(total, cells.shape[2]).astype(np.float32)
            return np.ascontiguousarray(mean.reshape(len(cells), -1))

        return run

    one_less = by(lambda total, members: total / max(members - 1, 1))
    yield "mean-of-one-head-less", "The sum is divided by one less than the heads of a group.", one_less
    cause = "The sum is multiplied by 1 / heads and not divided."
    yield "mean-by-reciprocal", cause, by(lambda total, members: total * np.float32(1 / members))
    yield "mean-by-reciprocal", cause, by(lambda total, members: total * (1 / members))


# **Routing.**


def gate_variants() -> Variants:
    def logits_of(change: Callable[[Array], Array]) -> Function:
        return lambda x, router, scores="logits": routes.scored(change(routes.product(x, router)), scores)

    def of_inputs(change: Callable[[F32, F32], tuple[Array, Array]]) -> Function:
        return lambda x, router, scores="logits": routes.scored(routes.product(*change(x, router)), scores)

    def one_largest(x: F32, router: F32, scores: str = "logits") -> Array:
        logits = routes.product(x, router).astype(np.float32)
        if scores == "logits":
            return logits
        with np.errstate(all="ignore"):
            powers = np.exp(logits - logits.max())
            answer: Array = powers / powers.sum(axis=1, keepdims=True)
        return answer

    def clipped(most: float) -> Function:
        def run(x: F32, router: F32, scores: str = "logits") -> Array:
            logits = routes.product(x, router)
            return logits if scores == "logits" else softmax_of(np.clip(logits, -most, most))

        return run

    for format, words, way in narrowed():
        yield f"logits-in-{format}", f"Logits: {words}.", logits_of(_of_float32(way))
    yield "largest-logit-of-all-tokens", "The largest logit of all tokens is subtracted from each.", one_largest
    for most in (10.0, 20.0, 30.0, 50.0, 60.0, 64.0, 80.0, 87.0, 88.0):
        yield "logits-clamped", "Logits are clamped before the softmax.", clipped(most)
    for size in SIZES:
        yield f"channels-past-{size}-left-out", f"Channels past {size} are left out.", of_inputs(_first_channels(size))
        yield f"experts-wrap-at-{size}", f"The number of an expert wraps at {size}.", of_inputs(_experts_modulo(size))
    without = of_inputs(lambda x, router: (np.where(np.isnan(x), np.float32(0), x), router))
    finite = of_inputs(lambda x, router: (np.nan_to_num(x), router))
    yield "nan-replaced", "NaN becomes 0 on the way.", without
    yield "nan-replaced", "NaN becomes 0 and infinity the largest float32 on the way.", finite


def _of_float32(way: Change) -> Change:
    """Of numbers that a reference computes in float64."""
    return lambda numbers: way(numbers.astype(np.float32))


def _first_channels(most: int) -> Callable[[F32, F32], tuple[Array, Array]]:
    return lambda x, router: (x[:, :most], router[:most])


def _experts_modulo(most: int) -> Callable[[F32, F32], tuple[Array, Array]]:
    return lambda x, router: (x, router[:, np.arange(router.shape[1]) % most])


def choice_variants() -> Variants:
    def by_bits(scores: F32, k: int) -> Array:
        return np.argsort(-scores.view(np.int32).astype(np.int64), axis=1, kind="stable")[:, :k].astype(np.int64)

    def by_negated_bits(scores: F32, k: int) -> Array:
        """In 32 bits, where the least integer is its own negative."""
        return np.argsort(-scores.view(np.int32), axis=1, kind="stable")[:, :k].astype(np.int64)

    for way in (by_bits, by_negated_bits):
        cause = "The bits of scores are compared, which reverses negative ones."
        yield "scores-compared-as-integers", cause, way


def weight_variants() -> Variants:
    def as_listed(scores: F32, chosen: Array, softmax: Any = "after") -> Array:
        return routing.weights(scores, np.sort(chosen, axis=1), softmax)

    def of_all(scores: F32, chosen: Array, softmax: Any = "after") -> Array:
        if softmax == "after":
            return routing.weights(scores, chosen, softmax)
        every: Array = scores.astype(np.float64).sum(axis=1, keepdims=True)
        return routes.chosen_of(scores, chosen) / every

    def padded(small: float) -> Function:
        def run(scores: F32, chosen: Array, softmax: Any = "after") -> Array:
            if softmax == "after":
                return routing.weights(scores, chosen, softmax)
            own = routes.chosen_of(scores, chosen).astype(np.float32)
            answer: Array = own / (own.sum(axis=1, keepdims=True) + np.float32(small))
            return answer

        return run

    yield "weights-by-id", "Weights stand by the ids of experts and not in the order of the choice.", as_listed
    cause = "Probabilities of the chosen are divided by the sum of all."
    yield "divided-by-sum-of-all", cause, of_all
    for small in SMALL:
        yield "sum-plus-small-number", "A small number is added to the sum lest it be zero.", padded(small)


Stage = Callable[[Array], Array]


def _plain(numbers: Array) -> Array:
    return numbers


def expert(
    x: F32,
    gate: F32,
    up: F32,
    down: F32,
    *,
    function: Callable[[Array], Array] = experts.silu,
    **stages: Stage,
) -> Array:
    """An expert with what lies between its steps changed."""
    at = {
        "gate-product": _plain,
        "up-product": _plain,
        "activation": _plain,
        "inner": _plain,
        "answer": _plain,
    } | stages
    with np.errstate(all="ignore"):
        first, second = at["gate-product"](routes.product(x, gate)), at["up-product"](routes.product(x, up))
        inner = at["inner"](at["activation"](function(first)) * second)
        return at["answer"](routes.product(inner, down))


def _with_stage(stage: str, change: Change) -> Function:
    def run(x: F32, gate: F32, up: F32, down: F32) -> Array:
        return expert(x, gate, up, down, **{stage: change})

    return run


def _sigmoid_gelu(a: Array) -> Array:
    with np.errstate(over="ignore"):
        answer: Array = a / (1 + np.exp(-1.702 * a))
    return answer


def _relu(a: Array) -> Array:
    return np.maximum(a, 0)


STAGES = {
    "gate-product": "The product with gate",
    "up-product": "The product with up",
    "activation": "The activation",
    "inner": "What goes into down",
    "answer": "The answer of an expert",
}


def _ones() -> Iterator[tuple[str, str, Function]]:
    """One expert, with one step done otherwise."""
    for name, activation, words in (
        ("gelu-for-silu", experts.gelu, "a GELU by tanh"),
        ("gelu-for-silu", _sigmoid_gelu, "a GELU by a sigmoid"),
        ("relu-for-silu", _relu, "a ReLU"),
        ("silu-overflows", experts.by_exponential, "a e^a / (1 + e^a), infinite over infinite for large a"),
    ):
        yield name, f"The activation is {words}.", partial(expert, function=activation)
    yield "gate-and-up-exchanged", "silu is applied to up and not to gate.", lambda x, g, u, d: expert(x, u, g, d)
    for stage, words in STAGES.items():
        for format, rounded, way in narrowed():
            cause = f"{words}: {rounded}."
            yield f"{stage}-in-{format}", cause, _with_stage(stage, _of_float32(way))
    for format, rounded, way in narrowed():

        def of_gate(x: F32, gate: F32, up: F32, down: F32, way: Change = way) -> Array:
            with np.errstate(all="ignore"):
                inner = experts.silu(routes.product(way(x), gate)) * routes.product(x, up)
            return routes.product(inner, down)

        yield f"x-of-gate-in-{format}", f"Activations that meet gate: {rounded}.", of_gate
    for most in (10.0, 20.0, 30.0, 50.0, 80.0, 87.0, 88.0):

        def clamped(a: Array, most: float = most) -> Array:
            answer: Array = a / (1 + np.exp(-np.clip(a, -most, most)))
            return answer

        cause = "The exponent of silu is clamped."
        yield "exponent-of-silu-clamped", cause, partial(expert, function=clamped)
    for width in (4, 8, 16, 32):

        def tail(numbers: Array, width: int = width) -> Array:
            changed = numbers.copy()
            changed[..., numbers.shape[-1] // width * width or numbers.shape[-1] :] = 0
            return changed

        cause = f"Inner channels past the last whole {width} are left out."
        yield f"inner-past-whole-{width}-dropped", cause, partial(expert, inner=tail)


def expert_variants() -> Variants:
    yield from _ones()


def sparse_variants() -> Variants:
    for name, cause, one in _ones():
        yield name, cause, partial(experts.sparse, one=one)

    def again(*given: Any) -> Array:
        weights = given[5].astype(np.float64)
        with np.errstate(all="ignore"):
            total = weights.sum(axis=1, keepdims=True)
        x, gate, up, down, chosen, _ = given
        return experts.sparse(x, gate, up, down, chosen, weights / np.where(total == 0, 1, total))

    yield "weights-normalized-again", "Weights are divided by their sum once more.", again
    for most in (1, 2, 4, 6, 8, 16, 32):

        def first(*given: Any, most: int = most) -> Array:
            x, gate, up, down, chosen, weights = given
            return experts.sparse(x, gate, up, down, chosen[:, :most], weights[:, :most])

        cause = f"Of the experts of a token only the first {most} run."
        yield f"only-{most}-experts-run", cause, first
        yield (
            f"only-{most}-experts-run",
            f"Of the experts of a token only the {most} lowest run.",
            partial(_lowest, most),
        )
    for size in SIZES:

        def modulo(*given: Any, size: int = size) -> Array:
            x, gate, up, down, chosen, weights = given
            number = np.arange(len(gate)) % size
            return experts.sparse(x, gate[number], up[number], down[number], chosen, weights)

        yield f"experts-wrap-at-{size}", f"The number of an expert wraps at {size}.", modulo


def _lowest(most: int, x: F32, gate: F32, up: F32, down: F32, chosen: Array, weights: F32) -> Array:
    """Experts are sorted by their ids, and the first of them run."""
    order = np.argsort(chosen, axis=1)[:, :most]
    kept, shares = np.take_along_axis(chosen, order, axis=1), np.take_along_axis(weights, order, axis=1)
    return experts.sparse(x, gate, up, down, kept, shares)


# **The key-value cache.**


class HeadsReversed(BfpKeyValueCache):
    def step(self, keys: Any, values: Any) -> Any:
        return tuple(np.ascontiguousarray(part[::-1]) for part in super().step(keys, values))


class HeadsOfTokensReversed(BfpKeyValueCache):
    """Heads are stored in the other order, within each token."""

    def step(self, keys: Any, values: Any) -> Any:
        return super().step(*(np.ascontiguousarray(part[:, ::-1]) for part in (keys, values)))


class KeysForValues(BfpKeyValueCache):
    def step(self, keys: Any, values: Any) -> Any:
        return super().step(values, keys)


def cache_variants() -> Variants:
    for machine in (HeadsReversed, HeadsOfTokensReversed):
        yield "heads-in-other-order", "The last head stands first.", machine
    yield "keys-and-values-exchanged", "Keys are stored as values, and values as keys.", KeysForValues


# **The offload engine.**


class InOrderOfRequest(Offload):
    """Hits, too, run in the order of the request."""

    def _run_residents(self, request: Request) -> list[int]:
        missing = []
        for expert in request.needed:
            missing += super()._run_residents(Request(request.layer, (expert,), request.guesses))
        return missing


class DropsBeforeStaging(Offload):
    """Guesses that were not needed are dropped before the next are staged, into their buffers."""

    def _stage(self, request: Request) -> None:
        for guess in [staged for staged in self.staged if staged.layer == request.layer]:
            self._drop(guess, "unused")
        super()._stage(request)


class PlaceOfOwnNumber(Offload):
    """Under swap an evicted expert is kept in the host place of its own number."""

    def _promote(self, newcomer: Staged) -> None:
        layer = newcomer.layer
        if self.arrangement.memory == "swap" and len(self.slots[layer]) == self.arrangement.slots:
            self._host[layer][newcomer.expert] = self.slots[layer][0].expert
        super()._promote(newcomer)


MACHINES = (
    ("experts-in-order-of-request", "Experts run in the order of the request and not by id.", InOrderOfRequest),
    (
        "unused-dropped-before-staging",
        "Guesses that were not needed are dropped before the next are staged.",
        DropsBeforeStaging,
    ),
    (
        "evicted-to-place-of-own-number",
        "Under swap an evicted expert goes to the place of its number.",
        PlaceOfOwnNumber,
    ),
)


def trace_variants() -> Variants:
    for name, cause, machine in MACHINES:
        yield name, cause, engines.traced(machine)


def engine_variants() -> Variants:
    yield from MACHINES


VARIANTS: Mapping[str, Callable[[], Variants]] = {
    "affine.quantize": quantize_variants,
    "bfp.cast": cast_variants,
    "bfp.decode": decode_variants,
    "bfp.total": total_variants,
    "bfp.store": store_variants,
    "bfp.load": load_variants,
    "hqq.dequantize": real_zero_variants,
    "hqq.qgemv": real_zero_product_variants,
    "hqq.codes": code_variants,
    "hqq.step": step_variants,
    "gptq.hessian": hessian_variants,
    "gptq.factor": factor_variants,
    "gptq.targets": target_variants,
    "rope.rotate": rope_variants,
    "attention.attend": attend_variants,
    "pooling.pool": pool_variants,
    "routing.gate": gate_variants,
    "routing.top_k": choice_variants,
    "routing.weights": weight_variants,
    "routing.expert": expert_variants,
    "routing.sparse": sparse_variants,
    "kvcache.bfp": cache_variants,
    "offload.trace": trace_variants,
    "offload.engine": engine_variants,
}
