"""Defects of precision that show in deep or long operations alone, as kernels have that take another way there.

A kernel with tensor cores rounds its operands to TF32, half or bfloat16; one that splits a long sum keeps its parts in
half. Most of those here are right below 1024 rows or tokens, so that small cases do not find them.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lowbit.arrays import F32, F64, I64, Array
from lowbit.linear.elementary import softmax
from lowbit.quantization import hqq
from lowbit.quantization.affine import QuantizedMatrix
from lowbit.quantization.bfp import Blocks
from lowbit.quantization.bfp_dot import BlockSums
from lowbit.quantization.hqq import HqqMatrix
from lowbit.quantization.hqq_numbers import EightBit, Numbers, decode
from lowbit_conformance.defects import block_sums, experts, integers, quantisers, routes, steps
from lowbit_conformance.defects import reals as real_zeros
from lowbit_conformance.defects.attention import visible
from lowbit_conformance.defects.defect import COMMON, Defect, Function, of
from lowbit_conformance.defects.integers import Run, runs_of
from lowbit_conformance.defects.steps import PRODUCTS, stepwise

DEEP = 1024
Rounding = Callable[[Any], Any]


def significant(numbers: Array, bits: int) -> Array:
    """Round to a number of significant bits, ties to even, with the exponents of float32."""
    with np.errstate(invalid="ignore"):
        mantissa, exponent = np.frexp(numbers.astype(np.float64))
        rounded: F32 = np.ldexp(np.rint(np.ldexp(mantissa, bits)), exponent - bits).astype(np.float32)
    return rounded


def tensor_float(numbers: Array) -> Array:
    return significant(numbers, 11)


def bfloat16(numbers: Array) -> Array:
    return significant(numbers, 8)


def half(numbers: Array) -> Array:
    with np.errstate(over="ignore", invalid="ignore"):
        return numbers.astype(np.float16).astype(np.float32)


def fourteen_bits(numbers: Array) -> Array:
    return significant(numbers, 14)


def exactly(numbers: Array) -> Array:
    return numbers


# **Products with quantised weights.**

BOTH = "linear.qgemv/C1 linear.qgemv/C2 linear.qgemm/C1 linear.qgemm/C2"
LATTICE = "linear.qgemv/C1 linear.qgemm/C1"


def operands(of_x: Rounding, of_weights: Rounding = exactly) -> Callable[[F32, F32], Array]:
    """A product of operands that are rounded where it is deep."""

    def product(x: F32, weights: F32) -> Array:
        deep = len(weights) >= DEEP
        return steps.product(of_x(x) if deep else x, of_weights(weights) if deep else weights)

    return product


def eight_bits(size: int) -> Callable[[F32, F32], Array]:
    """Activations become 8-bit integers, with one scale for each run of them, where the product is deep."""

    def product(x: F32, weights: F32) -> Array:
        if len(weights) < DEEP:
            return steps.product(x, weights)
        blocks = np.pad(x, ((0, 0), (0, -x.shape[1] % size))).reshape(len(x), -1, size).astype(np.float64)
        with np.errstate(invalid="ignore"):
            step = np.abs(blocks).max(axis=2, keepdims=True) / 127
            blocks = np.where(step > 0, np.rint(blocks / np.where(step > 0, step, 1)) * step, blocks)
        return steps.product(blocks.reshape(len(x), -1)[:, : x.shape[1]].astype(np.float32), weights)

    return product


def chunks(size: int, narrow: Rounding) -> Callable[[F32, F32], Array]:
    """A sum that is narrow within chunks of rows, and of float32 from one to the next."""

    def product(x: F32, weights: F32) -> Array:
        if len(weights) < DEEP:
            return steps.product(x, weights)
        total = np.zeros((len(x), weights.shape[1]), np.float32)
        padding = -len(weights) % size
        wide, deep = np.pad(x, ((0, 0), (0, padding))), np.pad(weights, ((0, padding), (0, 0)))
        with np.errstate(over="ignore", invalid="ignore"):
            parts = np.zeros((wide.shape[1] // size, *total.shape))
            for place in range(size):
                terms = wide[:, place::size].T[:, :, None].astype(np.float64) * deep[place::size][:, None]
                parts = narrow((parts + terms).astype(np.float32)).astype(np.float64)
            for part in parts:
                total += part.astype(np.float32)
        return total

    return product


def terms_in_half(x: F32, weights: F32) -> Array:
    """Each product is rounded to float16, and their sum is wide."""
    result = steps.product(x, weights)
    if len(weights) >= DEEP:
        with np.errstate(over="ignore", invalid="ignore"):
            for row, own in enumerate(x):
                used = np.flatnonzero(own)
                result[row] = half(own[used, None] * weights[used]).sum(axis=0, dtype=np.float64)
    return result


def weights_rounded(narrow: Rounding) -> Callable[[F32, QuantizedMatrix], F32]:
    return lambda weights, matrix: narrow(weights) if matrix.rows >= DEEP else weights


def scales_rounded(narrow: Rounding) -> Callable[[QuantizedMatrix], F32]:
    return lambda matrix: narrow(steps.scales(matrix)) if matrix.rows >= DEEP else steps.scales(matrix)


def minima_rounded(narrow: Rounding) -> Callable[[QuantizedMatrix], F32]:
    def zeros(matrix: QuantizedMatrix) -> F32:
        deep = matrix.rows >= DEEP and matrix.convention == "minimum"
        return np.asarray(narrow(steps.zeros(matrix)) if deep else steps.zeros(matrix))

    return zeros


def deep(name: str, cause: str, clauses: str = BOTH, **replaced: Any) -> Defect:
    return stepwise(name, cause, clauses, only=PRODUCTS, **replaced)


def tall(of_x: Rounding) -> Callable[[F32, F32], Array]:
    """x is rounded where it has many rows."""
    return lambda x, weights: steps.product(of_x(x) if len(x) >= 32 else x, weights)


def wide(of_x: Rounding) -> Callable[[F32, F32], Array]:
    """x is rounded where the matrix has many columns."""
    return lambda x, weights: steps.product(of_x(x) if weights.shape[1] >= DEEP else x, weights)


def flushed(numbers: Array) -> Array:
    return np.where(np.abs(numbers) < np.float32(2.0**-126), np.float32(0), numbers)


def deep_halves_flushed(matrix: QuantizedMatrix) -> F32:
    tiny = (matrix.scales < 2.0**-14) & (matrix.scales.dtype == np.float16) & (matrix.rows >= DEEP)
    return np.where(tiny, np.float32(0), steps.scales(matrix))


LINEAR = (
    stepwise(
        "tall-x-in-tf32",
        "x of 32 rows and more is rounded to TF32.",
        "linear.qgemm/C1",
        only=("linear.qgemm",),
        product=tall(tensor_float),
    ),
    stepwise(
        "tall-x-in-half",
        "x of 32 rows and more is rounded to float16.",
        "linear.qgemm/C1",
        only=("linear.qgemm",),
        product=tall(half),
    ),
    deep(
        "wide-x-in-bfloat16", "Products of 1024 columns and more round x to bfloat16.", LATTICE, product=wide(bfloat16)
    ),
    deep("deep-subnormals-flushed", "Deep products take subnormal x for zero.", LATTICE, product=operands(flushed)),
    deep(
        "deep-subnormal-halves-flushed",
        "Subnormal float16 scales of deep matrices are 0.",
        LATTICE,
        scales=deep_halves_flushed,
    ),
    deep(
        "deep-operands-in-tf32",
        "Deep products round both operands to TF32.",
        product=operands(tensor_float, tensor_float),
    ),
    deep("deep-x-in-tf32", "Deep products round x to TF32.", product=operands(tensor_float)),
    deep("deep-x-in-bfloat16", "Deep products round x to bfloat16.", product=operands(bfloat16)),
    deep("deep-x-in-half", "Deep products round x to float16.", product=operands(half)),
    deep("deep-x-in-14-bits", "Deep products keep 14 significant bits of x.", LATTICE, product=operands(fourteen_bits)),
    deep("deep-x-in-8-bits", "Deep products round x to 8 bits in blocks of 32.", LATTICE, product=eight_bits(32)),
    deep("deep-weights-in-half", "Deep weights are dequantised to float16.", finish=weights_rounded(half)),
    deep("deep-weights-in-bfloat16", "Deep weights are dequantised to bfloat16.", finish=weights_rounded(bfloat16)),
    deep("deep-scales-in-half", "Scales of deep matrices are kept in float16.", scales=scales_rounded(half)),
    deep("deep-scales-in-bfloat16", "Scales of deep matrices are kept in bfloat16.", scales=scales_rounded(bfloat16)),
    deep("deep-minima-in-half", "Minima of deep matrices are kept in float16.", zeros=minima_rounded(half)),
    deep("deep-minima-in-bfloat16", "Minima of deep matrices are kept in bfloat16.", zeros=minima_rounded(bfloat16)),
    deep("deep-products-in-half", "Deep products round each product to float16.", product=terms_in_half),
    deep("deep-chunks-of-16-in-half", "Chunks of 16 rows are summed in float16.", product=chunks(16, half)),
    deep("deep-chunks-of-128-in-half", "Chunks of 128 rows are summed in float16.", product=chunks(128, half)),
    deep(
        "deep-chunks-in-14-bits",
        "Chunks of 32 rows are summed in 14 significant bits.",
        LATTICE,
        product=chunks(32, fourteen_bits),
    ),
)

# **Real zeros.**


def hqq_product(of_x: Rounding, of_weights: Rounding) -> Function:
    def product(x: F32, matrix: HqqMatrix) -> Array:
        weights = hqq.dequantize(matrix)
        if matrix.rows >= DEEP:
            x, weights = of_x(x), of_weights(weights)
        return real_zeros.product(x, weights)

    return product


def eight_bit(value: Callable[[F32, F32, F32], Any]) -> Callable[[Numbers], F32]:
    """Numbers in 8 bits from their codes, scales and zeros by another expression."""

    def numbers(given: Numbers) -> F32:
        if not isinstance(given, EightBit):
            return decode(given)
        own = np.arange(len(given.codes)) % len(given.scales)
        parts = given.codes.astype(np.float32), given.scales.astype(np.float32)[own]
        return np.asarray(value(*parts, given.zeros.astype(np.float32)[own]), np.float32)

    return numbers


def both_of(name: str, cause: str, numbers: Callable[[Numbers], F32], clauses: str) -> Defect:
    return real_zeros.both(name, cause, clauses, numbers=numbers)


REAL_ZEROS = (
    of(
        "hqq.qgemv",
        "deep-real-zeros-in-tf32",
        "Deep products round both operands to TF32.",
        "C1 C2",
        hqq_product(tensor_float, tensor_float),
    ),
    of(
        "hqq.qgemv",
        "deep-real-zero-weights-in-half",
        "Deep weights are dequantised to float16.",
        "C1 C2",
        hqq_product(exactly, half),
    ),
    both_of(
        "eight-bit-numbers-rounded-once",
        "Numbers in 8 bits are decoded in float64 and rounded once.",
        eight_bit(lambda q, s, z: s.astype(np.float64) * (q.astype(np.float64) - z)),
        "hqq.dequantize/C3",
    ),
    both_of(
        "eight-bit-numbers-distributed",
        "Numbers in 8 bits are scale' code less scale' zero', each rounded.",
        eight_bit(lambda q, s, z: s * q - s * z),
        "hqq.dequantize/C3",
    ),
    both_of(
        "eight-bit-numbers-in-half",
        "Numbers in 8 bits are decoded to float16.",
        eight_bit(lambda q, s, z: half(s * (q - z))),
        "hqq.dequantize/C3 hqq.qgemv/C2",
    ),
    both_of(
        "eight-bit-zeros-rounded",
        "Zeros of numbers in 8 bits are rounded to whole codes.",
        eight_bit(lambda q, s, z: s * (q - np.rint(z))),
        "hqq.dequantize/C3 hqq.qgemv/C2",
    ),
    both_of(
        "eight-bit-zero-of-the-first",
        "All meta groups take the zero of the first.",
        eight_bit(lambda q, s, z: s * (q - z[:1])),
        "hqq.dequantize/C3 hqq.qgemv/C2",
    ),
)

# **Routing.**


def gate(of_x: Rounding, of_router: Rounding) -> Function:
    def logits(x: F32, router: F32, scores: str = "logits") -> Array:
        if len(router) >= DEEP:
            x, router = of_x(x), of_router(router)
        return routes.scored(routes.product(x, router), scores)

    return logits


def without_largest(kind: type[np.floating[Any]]) -> Callable[[Array], Array]:
    """Exponentials of the scores as they are, in this dtype."""

    def shares(logits: Array) -> Array:
        with np.errstate(all="ignore"):
            powers = np.exp(logits.astype(kind))
            answer: Array = powers / powers.sum(axis=-1, keepdims=True)
        return answer

    return shares


def clamped(logits: Array) -> Array:
    return without_largest(np.float64)(np.clip(logits, -88, 88))


def probabilities(shares: Callable[[Array], Array]) -> Function:
    def answer(x: F32, router: F32, scores: str = "logits") -> Array:
        logits = routes.product(x, router)
        return logits if scores == "logits" else shares(logits)

    return answer


def weighed(shares: Callable[[Array], Array]) -> Function:
    def answer(scores: F32, chosen: Array, softmax: str = "after") -> Array:
        own = routes.chosen_of(scores, chosen)
        return shares(own) if softmax == "after" else own / own.sum(axis=1, keepdims=True)

    return answer


def expert(of_weights: Rounding, of_inner: Rounding = exactly) -> Callable[..., Array]:
    def one(x: F32, gate: F32, up: F32, down: F32) -> Array:
        if max(gate.shape) < DEEP:
            return experts.expert(x, gate, up, down)
        gate, up, down = (of_weights(part) for part in (gate, up, down))
        with np.errstate(over="ignore", invalid="ignore"):
            inner = experts.silu(routes.product(x, gate)) * routes.product(x, up)
        return routes.product(of_inner(inner), down)

    return one


def layer(one: Callable[..., Array]) -> Function:
    return lambda x, gate, up, down, chosen, weights: experts.sparse(x, gate, up, down, chosen, weights, one)


ROUTES = (
    of(
        "routing.gate",
        "deep-gate-in-tf32",
        "Deep gates round both operands to TF32.",
        "C1",
        gate(tensor_float, tensor_float),
    ),
    of("routing.gate", "deep-gate-x-in-bfloat16", "Deep gates round x to bfloat16.", "C1", gate(bfloat16, exactly)),
    of("routing.gate", "deep-router-in-half", "Routers of deep gates are kept in float16.", "C1", gate(exactly, half)),
    of(
        "routing.gate",
        "gate-without-max",
        "Exponentials of logits as they are overflow.",
        "C3",
        probabilities(without_largest(np.float32)),
    ),
    of(
        "routing.gate",
        "gate-without-max-in-float64",
        "Exponentials of logits as they are, in float64.",
        "C3",
        probabilities(without_largest(np.float64)),
    ),
    of(
        "routing.gate",
        "gate-logits-clamped",
        "Logits are clamped to ±88 before their exponentials.",
        "C3",
        probabilities(clamped),
    ),
    of(
        "routing.weights",
        "weights-without-max",
        "Exponentials of chosen logits as they are overflow.",
        "C1",
        weighed(without_largest(np.float32)),
    ),
    of(
        "routing.weights",
        "weights-without-max-in-float64",
        "Exponentials of chosen logits as they are, in float64.",
        "C1",
        weighed(without_largest(np.float64)),
    ),
    of(
        "routing.weights",
        "weights-logits-clamped",
        "Chosen logits are clamped to ±88 before their exponentials.",
        "C1",
        weighed(clamped),
    ),
    of(
        "routing.expert",
        "deep-expert-in-tf32",
        "Matrices of deep experts are rounded to TF32.",
        "C1",
        expert(tensor_float, tensor_float),
    ),
    of("routing.expert", "deep-expert-in-half", "Matrices of deep experts are kept in float16.", "C1", expert(half)),
    of(
        "routing.expert",
        "deep-inner-in-bfloat16",
        "Activations between the products of deep experts are bfloat16.",
        "C1",
        expert(exactly, bfloat16),
    ),
    of(
        "routing.sparse",
        "deep-layer-in-tf32",
        "Matrices of deep experts are rounded to TF32.",
        "C1",
        layer(expert(tensor_float, tensor_float)),
    ),
    of(
        "routing.sparse",
        "deep-layer-in-half",
        "Matrices of deep experts are kept in float16.",
        "C1",
        layer(expert(half)),
    ),
)

# **Softmax and attention.**


def powers_clamped(scores: F32) -> Array:
    """Differences are clamped to −80, and −∞ is not."""
    return softmax(
        np.maximum(scores - scores.max(axis=1, keepdims=True), np.where(np.isneginf(scores), -np.inf, -80.0))
    )


def largest_from(start: float) -> Function:
    """The search for the largest score begins at a number."""

    def shares(scores: F32) -> Array:
        return from_largest(scores.astype(np.float64), start)

    return shares


def from_largest(scores: F64, start: float) -> F64:
    with np.errstate(all="ignore"):
        powers = np.exp((scores - np.maximum(scores.max(axis=-1, keepdims=True), start)).astype(np.float32))
        answer: F64 = (powers / powers.sum(axis=-1, keepdims=True)).astype(np.float64)
    return answer


def deep_softmax(narrow: Rounding) -> Function:
    return lambda scores: (
        narrow(softmax(scores.astype(np.float64))) if scores.shape[1] >= DEEP else softmax(scores.astype(np.float64))
    )


def attending(
    masked: Callable[[F64, npt.NDArray[np.bool_]], F64] | None = None,
    shares: Callable[[F64], F64] = softmax,
    of_operands: Rounding = exactly,
    of_shares: Rounding = exactly,
    of_values: Rounding = exactly,
    head: Callable[[int, int], int] = lambda h, heads: h,
) -> Function:
    """Right, unless something is replaced: how scores are masked, the softmax, and what is rounded in long contexts."""

    def attend(queries: F32, keys: F32, values: F32, window: int | None = None) -> F64:
        tokens, heads, channels = queries.shape
        groups, length, _ = keys.shape
        mask = visible(tokens, length, window)
        if length >= DEEP:
            queries, keys, values = of_operands(queries), of_operands(keys), of_values(values)
        result = np.empty(queries.shape)
        with np.errstate(all="ignore"):
            for h in range(heads):
                j = h * groups // heads
                scores = (
                    queries[:, head(h, heads)].astype(np.float64) @ keys[j].astype(np.float64).T / np.sqrt(channels)
                )
                scores = np.where(mask, scores, -np.inf) if masked is None else masked(scores, mask)
                own = shares(scores)
                own = of_shares(own) if length >= DEEP else own
                result[:, h] = own.astype(np.float64) @ values[j].astype(np.float64)
        return result

    return attend


def added(number: float) -> Callable[[F64, npt.NDArray[np.bool_]], F64]:
    return lambda scores, mask: np.where(mask, scores, scores + number)


def replaced(number: float) -> Callable[[F64, npt.NDArray[np.bool_]], F64]:
    return lambda scores, mask: np.where(mask, scores, number)


def attention(name: str, cause: str, clauses: str, verdicts: tuple[str, ...] = ("WRONG",), **changed: Any) -> Defect:
    return of("attention.attend", name, cause, clauses, attending(**changed), COMMON, verdicts)


def neighbours_of_group(h: int, heads: int) -> int:
    """The last two heads change places."""
    return h if h < heads - 2 or heads < 2 else 2 * heads - 3 - h


ATTENTION = (
    of(
        "attention.softmax",
        "softmax-powers-clamped",
        "Differences of scores below -80 count as -80.",
        "C2",
        powers_clamped,
    ),
    of(
        "attention.softmax",
        "largest-score-from-0",
        "The search for the largest score begins at 0.",
        "C1 C2",
        largest_from(0.0),
    ),
    of(
        "attention.softmax",
        "largest-score-from-minus-5000",
        "The search for the largest score begins at -5000.",
        "C1 C2",
        largest_from(-5e3),
    ),
    of(
        "attention.softmax",
        "long-shares-in-half",
        "Shares of long rows are rounded to float16.",
        "C2",
        deep_softmax(half),
    ),
    attention(
        "mask-adds-minus-10000", "What is hidden loses 10^4 of its score instead of all.", "C2", masked=added(-1e4)
    ),
    attention("mask-is-minus-10000", "What is hidden has a score of -10^4.", "C2", masked=replaced(-1e4)),
    attention("mask-is-minus-65504", "What is hidden has the least score of float16.", "C2", masked=replaced(-65504.0)),
    attention("mask-is-minus-1e9", "What is hidden has a score of -10^9.", "C2", masked=replaced(-1e9)),
    attention(
        "mask-adds-minus-1e9", "What is hidden loses 10^9 of its score instead of all.", "C2", masked=added(-1e9)
    ),
    attention(
        "attention-without-max",
        "Exponentials of scores as they are overflow.",
        "C2",
        shares=lambda scores: without_largest(np.float32)(scores),
    ),
    attention(
        "running-max-from-0",
        "The running maximum of scores begins at 0.",
        "C2",
        shares=lambda scores: from_largest(scores, 0.0),
    ),
    attention(
        "running-max-from-minus-10000",
        "The running maximum of scores begins at -10^4.",
        "C2",
        shares=lambda scores: from_largest(scores, -1e4),
    ),
    attention(
        "running-max-from-minus-1e9",
        "The running maximum of scores begins at -10^9.",
        "C2",
        shares=lambda scores: from_largest(scores, -1e9),
    ),
    attention(
        "long-scores-in-tf32", "Queries and keys of long contexts are rounded to TF32.", "C3", of_operands=tensor_float
    ),
    attention(
        "long-scores-in-bfloat16",
        "Queries and keys of long contexts are rounded to bfloat16.",
        "C3",
        of_operands=bfloat16,
    ),
    attention("long-values-in-tf32", "Values of long contexts are rounded to TF32.", "C2", of_values=tensor_float),
    attention("long-values-in-half", "Values of long contexts are rounded to float16.", "C2", of_values=half),
    attention(
        "long-probabilities-in-half", "Probabilities of long contexts are rounded to float16.", "C3", of_shares=half
    ),
    attention(
        "last-heads-exchanged", "The queries of the last two heads change places.", "C2 C3", head=neighbours_of_group
    ),
)

# **Norm, GPTQ and blocks of integers.**


def square_of_narrow(narrow: Rounding) -> Function:
    """The mean square is that of a narrow x."""

    def norm(x: F32, gain: F32, epsilon: float) -> Array:
        with np.errstate(all="ignore"):
            square = np.mean(np.square(narrow(x).astype(np.float64)), axis=1, keepdims=True)
            answer: Array = gain.astype(np.float64) * (x.astype(np.float64) / np.sqrt(square + epsilon))
        return answer

    return norm


def deep_hessian(x: F32) -> Array:
    return quantisers.hessian(tensor_float(x) if len(x) >= DEEP else x)


def targets(of_errors: Rounding, of_ratios: Rounding) -> Function:
    def answer(weights: F32, factor: F32, values: F32) -> Array:
        wide = weights.astype(np.float64)
        ratios, errors = quantisers.ratios(factor.astype(np.float64)), wide - values
        if len(weights) >= DEEP:
            ratios, errors = of_ratios(ratios).astype(np.float64), of_errors(errors).astype(np.float64)
        goals: Array = wide + ratios.T @ errors
        return goals

    return answer


def sixteen_bits(mantissas: Array, matrix: QuantizedMatrix, x: Blocks) -> Array:
    scales, zeros = matrix.scales.astype(np.float64), matrix.zeros.astype(np.float64)
    offsets = zeros if matrix.convention == "minimum" else -scales * zeros
    y = np.zeros((x.rows, matrix.columns))
    codes = integers.codes_of(matrix)
    for first, last, block, group in runs_of(matrix.rows, x.format.block, matrix.group_size):
        power, own = np.exp2(x.exponents[:, block].astype(np.float64))[:, None], mantissas[:, first:last]
        y += power * (own @ codes[first:last]) * scales[group]
        sums = own.sum(axis=1, keepdims=True).astype(np.int16).astype(np.float64)
        y += power * sums * offsets[group]
    return y


def sums_of_16_bits(x: Blocks, matrix: QuantizedMatrix) -> Array:
    return sixteen_bits(integers.plain(x), matrix, x)


def power_of_float32(x: Blocks, run: Run) -> Array:
    """2^e, infinite beyond what float32 holds."""
    with np.errstate(over="ignore"):
        power: Array = np.exp2(x.exponents[:, run[2]].astype(np.float32) + np.float32(1))
    return power.astype(np.float64) / 2


def with_infinite_power(x: Blocks, matrix: QuantizedMatrix) -> Array:
    with np.errstate(invalid="ignore"):
        return integers.product(x, matrix, powers=power_of_float32)


def scales_of_half(x: Blocks, matrix: QuantizedMatrix) -> Array:
    if matrix.rows < DEEP:
        return integers.product(x, matrix)
    return integers.product(x, replace(matrix, scales=half(matrix.scales).astype(matrix.scales.dtype)))


def in_float32(products: I64) -> I64:
    total = np.zeros(products.shape[:-1], np.float32)
    for place in range(products.shape[-1]):
        total += products[..., place].astype(np.float32)
    return total.astype(np.int64)


def in_32_bits(products: I64) -> I64:
    total: I64 = products.sum(axis=-1).astype(np.int32).astype(np.int64)
    return total


def narrow_dot(
    narrow: Callable[[I64], I64],
) -> Callable[[Blocks, Blocks], BlockSums]:
    """Sums of bytes, that is of mantissas of up to 12 bits, in a narrow accumulator."""

    def dot(a: Blocks, b: Blocks) -> BlockSums:
        small = max(a.format.mantissa, b.format.mantissa) <= 12
        return block_sums.dot(a, b, narrow) if small else block_sums.dot(a, b)

    return dot


OTHERS = (
    of(
        "blocks.rms_norm",
        "norm-of-tf32",
        "The mean square is that of x rounded to TF32.",
        "C2",
        square_of_narrow(tensor_float),
    ),
    of(
        "blocks.rms_norm",
        "norm-of-half",
        "The mean square is that of x rounded to float16.",
        "C2",
        square_of_narrow(half),
    ),
    of("gptq.hessian", "deep-hessian-in-tf32", "Inputs of long calibrations are rounded to TF32.", "C1", deep_hessian),
    of(
        "gptq.targets",
        "deep-errors-in-tf32",
        "Errors of deep layers are rounded to TF32.",
        "C1",
        targets(tensor_float, exactly),
    ),
    of(
        "gptq.targets",
        "deep-factor-in-half",
        "The factor of deep layers is rounded to float16.",
        "C1",
        targets(exactly, half),
    ),
    of(
        integers.OPERATION,
        "mantissa-sums-in-16-bits",
        "Sums of the mantissas of a segment wrap in 16 bits.",
        "C1",
        sums_of_16_bits,
    ),
    of(
        integers.OPERATION,
        "power-of-empty-block-infinite",
        "2^e of an empty block is infinite, and 0 times it is NaN.",
        "C1",
        with_infinite_power,
    ),
    of(
        integers.OPERATION,
        "deep-integer-scales-in-half",
        "Scales of deep matrices are kept in float16.",
        "C1",
        scales_of_half,
    ),
    of(
        "bfp.dot",
        "small-sums-in-float32",
        "Sums of products of short mantissas are kept in float32.",
        "C1",
        narrow_dot(in_float32),
    ),
    of(
        "bfp.dot",
        "small-sums-in-32-bits",
        "Sums of products of short mantissas wrap in 32 bits.",
        "C1",
        narrow_dot(in_32_bits),
    ),
)

DEFECTS = (*LINEAR, *REAL_ZEROS, *ROUTES, *ATTENTION, *OTHERS)
