"""Variants of the operations on numbers: quantisation, Block Floating Point, HQQ and GPTQ."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from lowbit.arrays import F32, Array
from lowbit.quantization import bfp_dot, gptq, hqq_solver
from lowbit.quantization.bfp import Blocks, Format
from lowbit.quantization.bfp_dot import BlockSums
from lowbit.quantization.bfp_storage import EXPONENT_BIAS, StoredBlocks, store, unpack_signed
from lowbit.quantization.hqq import HqqMatrix
from lowbit_conformance.defects import blocks, quantisers, reals
from lowbit_conformance.defects.defect import Function, unchecked
from lowbit_conformance.defects.narrow import Change
from lowbit_conformance.defects.roundings import exactly
from lowbit_conformance.defects.variants_roundings import ROUNDINGS, SMALL, Variants, narrowed, of_float32

# **Affine quantisation.**


def _zero_below(least: float) -> Change:
    return lambda scale: np.where(scale < least, np.float32(0), scale)


def quantize_variants() -> Variants:
    for name, words, way in ROUNDINGS:
        yield f"codes-{name}", f"In a code, {words}.", partial(quantisers.quantize, rounded=way)
        yield f"zero-points-{name}", f"In a zero-point, {words}.", partial(quantisers.quantize, zero_rounded=way)
    for format, words, way in narrowed():
        if format != "normal-range":  # that has a name of its own below
            cause = f"Scales: {words}, before codes are found with them."
            yield f"scales-in-{format}", cause, partial(quantisers.quantize, scale_changed=way)
    inside = "A code is round(w / scale + zero); the zero should be added after rounding."
    yield "zero-point-inside-rounding", inside, partial(quantisers.quantize, zero_inside=True)
    before = "Codes are computed with the scale before it is rounded for storage, and zeros with the stored one."
    for vanishing in (False, True):
        unstored = partial(quantisers.quantize, stored_first=False, zero_stored_first=True, vanishing=vanishing)
        yield "codes-by-the-scale-before", before, unstored
    for small in SMALL:
        cause = "A group without a range has a very small scale instead of 1."
        yield "no-range-small-scale", cause, partial(quantisers.quantize, no_range=small)
        least = partial(quantisers.quantize, scale_changed=partial(np.maximum, np.float32(small)))
        yield "scales-with-a-least-number", "A scale is never less than a small number.", least
    for small in (2.0**-126, *SMALL):
        nothing = partial(quantisers.quantize, scale_changed=_zero_below(small))
        cause = "A very small scale, such as a subnormal one, counts as 0, as for a group without a range."
        yield "small-scales-count-as-zero", cause, nothing


# **Block Floating Point.**


def _largest_positive(x: F32) -> F32:
    return np.maximum(x, 0)


def _cast_apart(of_exponents: Change, of_mantissas: Change, x: F32, format: Format) -> Blocks:
    """Exponents are computed from other numbers than mantissas."""
    exponents = blocks.cast(of_exponents(x), format).exponents
    each = np.repeat(exponents.astype(np.int64), format.block, axis=1)[:, : x.shape[1]]
    with np.errstate(over="ignore"):
        scaled = np.nan_to_num(np.ldexp(of_mantissas(x).astype(np.float64), -each))
    return blocks.blocks_of(np.clip(np.rint(scaled), -format.top, format.top), exponents, format)


def _log2_up(largest: Array) -> Array:
    with np.errstate(divide="ignore"):
        return np.ceil(np.log2(largest.astype(np.float32))).astype(np.int64)


def _natural_log(largest: Array) -> Array:
    with np.errstate(divide="ignore"):
        return np.floor(np.log(largest.astype(np.float32)) / np.float32(np.log(2))).astype(np.int64) + 1


def cast_variants() -> Variants:
    for name, words, way in ROUNDINGS:
        yield f"mantissas-{name}", f"In a mantissa, {words}.", partial(blocks.cast, rounded=way)
    positive = partial(_cast_apart, _largest_positive, exactly)
    yield "exponent-of-largest-positive", "The exponent is that of the largest positive element.", positive
    logarithms = (("rounded up", _log2_up), ("by a natural logarithm", _natural_log))
    for words, way in logarithms:
        cause = f"The exponent is a logarithm in float32, {words}, and misses at powers of two."
        yield "exponent-by-rounded-logarithm", cause, partial(blocks.cast, exponent_of=way)
    for format, words, narrow in narrowed():
        cause = f"Elements are {words} when their mantissas are computed, and not when the exponent is."
        yield f"elements-of-mantissas-in-{format}", cause, partial(_cast_apart, exactly, narrow)


def decode_variants() -> Variants:
    def cyclic(given: Blocks) -> Array:
        each = given.exponents.astype(np.int64)[:, np.arange(given.columns) % given.exponents.shape[1]]
        with np.errstate(over="ignore", under="ignore"):
            return np.ldexp(given.mantissas.astype(np.float64), each).astype(np.float32)

    yield "exponents-cyclic", "Element i uses the exponent of block i mod P instead of block i / B.", cyclic


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
    """An operation on stored blocks with one array changed after writing or before reading."""

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
    ("bytes-reversed", "Bytes of a row are in reverse order.", "mantissas", lambda stream: stream[:, ::-1]),
    ("exponents-with-bias-128", "The bias of exponents is 128 instead of 127.", "exponents", lambda e: e + np.uint8(1)),
    ("exponents-with-bias-126", "The bias of exponents is 126 instead of 127.", "exponents", lambda e: e - np.uint8(1)),
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


SIGNS: tuple[tuple[str, str, Callable[[Array, int], Array]], ...] = (
    ("sign-bits-dropped", "The sign bit of a mantissa is dropped.", lambda m, bits: m & (2 ** (bits - 1) - 1)),
    ("signs-lost", "Mantissas lose their signs.", lambda m, bits: np.abs(m)),
    ("read-in-ones-complement", "Mantissas are read in ones' complement.", lambda m, bits: np.where(m < 0, m + 1, m)),
    (
        "read-as-sign-and-magnitude",
        "Mantissas are read as a sign and a magnitude.",
        lambda m, bits: np.where(m < 0, -(m + 2 ** (bits - 1)), m),
    ),
    (
        "read-with-an-offset",
        "Mantissas are read as if half of their range had been added.",
        lambda m, bits: (m & (2**bits - 1)) - 2 ** (bits - 1),
    ),
)


def _turned_signs(turn: Callable[[Array, int], Array]) -> Function:
    def run(stored: StoredBlocks) -> Blocks:
        format = stored.format
        read = unpack_signed(stored.mantissas, stored.columns, format).astype(np.int64)
        mantissas = np.clip(turn(read, format.mantissa), -format.top, format.top)
        return blocks.blocks_of(mantissas, stored.exponents.astype(np.int64) - EXPONENT_BIAS, format)

    return run


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
            yield f"exponents-with-bias-{bias}", f"The bias of exponents is {bias} instead of 127.", loaded(same, way)
    for name, cause, turn in SIGNS:
        yield name, cause, _turned_signs(turn)
    signed = loaded(same, lambda e, format: e.astype(np.int8).astype(np.int64))
    yield "exponents-without-bias", "Exponents have no bias: their byte is in two's complement.", signed


# **HQQ.**


def _laid_by_rows(matrix: HqqMatrix, right: Array) -> Array:
    return np.ascontiguousarray(right.T.reshape(matrix.rows, matrix.columns))


def _by_rows(matrix: HqqMatrix) -> Array:
    flat = np.arange(matrix.rows * matrix.columns).reshape(matrix.rows, matrix.columns)
    return flat // matrix.group_size if matrix.axis == 1 else flat % matrix.groups


def real_zero_variants() -> Variants:
    yield (
        "real-zero-of-other-sign",
        "The weight is scale (q + zero): the zero is added instead of subtracted.",
        partial(reals.weights, value=lambda q, s, z: s * (q + z)),
    )
    yield (
        "zero-of-8-bit-numbers-added",
        "Scales or zeros in 8 bits: their own zero is added instead of subtracted.",
        partial(reals.weights, numbers=reals.eight_bit(lambda q, s, z: s * (q + z))),
    )
    yield (
        "real-zero-distributed-in-products",
        "The weight is scale q - scale zero, rounded three times.",
        partial(reals.weights, value=lambda q, s, z: s * q - s * z),
    )
    cause = "Groups run along the rows of K x N instead of N x K."
    yield "groups-along-other-axis", cause, partial(reals.weights, group=_by_rows)
    by_rows = "Weights are laid out as K x N instead of N x K."
    yield "weights-laid-by-rows", by_rows, lambda matrix: _laid_by_rows(matrix, reals.weights(matrix))
    for format, words, way in narrowed():
        yield f"real-zeros-in-{format}", f"Real zeros: {words}.", partial(reals.weights, zeros=way)
        yield f"weights-in-{format}", f"Weights: {words}.", lambda matrix, w=way: w(reals.weights(matrix))


def real_zero_product_variants() -> Variants:
    for name, cause, run in real_zero_variants():
        yield name, cause, lambda x, matrix, r=run: reals.product(x, r(matrix))


def code_variants() -> Variants:
    for name, words, way in ROUNDINGS:
        yield f"codes-{name}", f"In a code, {words}.", partial(reals.codes, rounded=way)

    def separately(weights: F32, scales: F32, zeros: F32, bits: int) -> Array:
        with np.errstate(all="ignore"):
            real = np.rint(weights / scales) + np.rint(zeros)
        return np.asarray(np.clip(real, 0, 2**bits - 1).astype(np.uint8))

    def wrapped(weights: F32, scales: F32, zeros: F32, bits: int) -> Array:
        with np.errstate(all="ignore"):
            real = np.nan_to_num(np.rint(weights / scales + zeros))
            return np.asarray(np.mod(np.where(np.abs(real) < 2.0**31, real, 0), 2**bits).astype(np.uint8))

    def without_last(weights: F32, scales: F32, zeros: F32, bits: int) -> Array:
        return np.minimum(reals.codes(weights, scales, zeros, bits), np.uint8(2**bits - 2))

    def wide(weights: F32, scales: F32, zeros: F32, bits: int) -> Array:
        return reals.codes(weights.astype(np.float64), scales, zeros, bits)

    yield "weight-and-zero-rounded-apart", "The quotient and the zero are rounded separately.", separately
    yield "codes-wrap", "A code beyond its range wraps and is not clamped.", wrapped
    yield "largest-code-lost", "The largest code is never used.", without_last
    yield "codes-in-float64", "The quotient is computed in float64 and not rounded to float32.", wide


def step_variants() -> Variants:
    def without_limit(d: Array, p: float, beta: float) -> Array:
        with np.errstate(divide="ignore"):
            return np.copysign(np.abs(d) - np.abs(d) ** (p - 1) / beta, d)

    def unsigned(d: Array, p: float, beta: float) -> Array:
        return np.abs(hqq_solver.shrink(d, p, beta))

    yield (
        "shrinking-without-limit",
        "Errors that shrink below 0 are not clamped to 0.",
        partial(reals.step, kept_of=without_limit),
    )
    yield "shrinking-without-sign", "A shrunk error loses its sign.", partial(reals.step, kept_of=unsigned)
    for power in (0.5, 0.7, 1.0):
        fixed = partial(reals.step, kept_of=partial(_shrunk_by, power))
        yield f"norm-always-{power:g}", f"The norm is always {power:g}.", fixed
    for kept in (np.float16, np.float32):  # the result type
        yield (
            "means-in-float16",
            "Means are computed in float16.",
            partial(reals.step, middle=partial(_half_mean, kept=kept)),
        )


def _shrunk_by(power: float, d: Array, p: float, beta: float) -> Array:
    return hqq_solver.shrink(d, power, beta)


def _half_mean(numbers: Array, axis: int, kept: type) -> Array:
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(np.mean(numbers.astype(np.float32), axis=axis, dtype=np.float16).astype(kept))


# **GPTQ.**


def factor_variants() -> Variants:
    for damping in (1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 0.01, 0.1):
        cause = "A fraction of the mean of the diagonal is added to the diagonal."
        yield "hessian-damped-again", cause, lambda h, d=damping: gptq.factor(_damped(h, d))


def _damped(hessian: Array, share: float) -> Array:
    wide = hessian.astype(np.float64)
    return wide + np.eye(len(wide)) * share * np.mean(np.diagonal(wide))


def hessian_variants() -> Variants:
    yield (
        "inputs-transposed",
        "X X^T is computed instead of X^T X.",
        lambda x: x.astype(np.float64) @ x.astype(np.float64).T,
    )


def target_variants() -> Variants:
    transposed = quantisers.spreading(lambda factor: quantisers.ratios(factor).T)
    yield "ratios-transposed", "An error goes to the rows before it.", transposed
    with_own = quantisers.spreading(lambda factor: np.triu(factor / np.diagonal(factor)))
    yield "own-error-added", "A row's own error is added to its target.", with_own
    for format, words, way in narrowed():
        yield f"errors-in-{format}", f"Errors: {words}.", partial(quantisers.targets, of_errors=of_float32(way))
