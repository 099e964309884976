"""The commonest mistakes of a first version: a term left out or counted twice, the wrong group, row or order."""

from collections.abc import Callable
from typing import Any

import numpy as np

from lowbit.arrays import F32, Array
from lowbit.attention.attention import softmax
from lowbit.attention.rope import Rotation
from lowbit.quantization.affine import Convention, QuantizedMatrix
from lowbit.quantization.bfp import Blocks, block_exponent
from lowbit.quantization.bfp_dot import BlockSums, total
from lowbit_conformance import packing
from lowbit_conformance.defects import steps
from lowbit_conformance.defects.activations import mean_square, normed
from lowbit_conformance.defects.attention import replacing, visible
from lowbit_conformance.defects.block_sums import decode, dot
from lowbit_conformance.defects.defect import MOVES, Defect, of
from lowbit_conformance.defects.experts import expert, sparse
from lowbit_conformance.defects.heads import members, rotate
from lowbit_conformance.defects.routes import product as logits_of
from lowbit_conformance.defects.steps import PRODUCTS, stepwise
from lowbit_conformance.defects.sums import bfloat16

VALUES = "affine.dequantize/C1 affine.dequantize/C2 linear.qgemv/C1 linear.qgemm/C1"
MINIMUM = "affine.dequantize/C1 linear.qgemv/C1 linear.qgemm/C1"
POINT = "affine.dequantize/C2 linear.qgemv/C1 linear.qgemm/C1"
SUMS = "linear.qgemv/C1 linear.qgemm/C1"
ROUNDED = "linear.qgemv/C2 linear.qgemm/C2"

# **Codes.**


def top_bit_lost(words: Any, bits: int) -> Array:
    return packing.unpack(words, bits) & np.uint8(2 ** (bits - 1) - 1)


def unmasked(words: Any, bits: int) -> Array:
    """What is above a code in its word stays."""
    word, shift = packing.places(len(words) * 32 // bits, bits)
    codes: Array = words[word] >> shift[:, None].astype(np.uint32)
    return codes


def by_columns(words: Any, bits: int) -> Array:
    turned = np.ascontiguousarray(words.ravel().reshape(words.shape[1], -1).T)
    return packing.unpack(turned, bits)


def next_row(words: Any, bits: int) -> Array:
    codes = packing.unpack(words, bits)
    return codes[np.minimum(np.arange(len(codes)) + 1, len(codes) - 1)]


# **Groups.**


def grouped(change: Callable[[Array, int], Array]) -> Callable[[QuantizedMatrix], Array]:
    return lambda matrix: change(steps.groups(matrix), matrix.groups)


def before(rows: Array) -> Array:
    """Each group's numbers are those of the group before."""
    return rows[np.maximum(np.arange(len(rows)) - 1, 0)]


def without_last_group(weights: F32, matrix: QuantizedMatrix) -> F32:
    weights[(matrix.groups - 1) * matrix.group_size :] = 0
    return weights


# **Values**, by convention where only one of them can be mistaken.


def valued(minimum: Any = None, point: Any = None) -> Callable[[F32, F32, F32, Convention], F32]:
    def value(codes: F32, scale: F32, zero: F32, convention: Convention) -> F32:
        own = minimum if convention == "minimum" else point
        with np.errstate(all="ignore"):
            result: F32 = own(codes, scale, zero) if own else steps.value(codes, scale, zero, convention)
        return result

    return value


def finished(change: Callable[[F32], F32]) -> Callable[[F32, QuantizedMatrix], F32]:
    return lambda weights, matrix: change(weights)


def without_rows(rows: Callable[[int], slice]) -> Callable[[F32, QuantizedMatrix], F32]:
    def finish(weights: F32, matrix: QuantizedMatrix) -> F32:
        weights[rows(len(weights))] = 0
        return weights

    return finish


def last_twice(weights: F32, matrix: QuantizedMatrix) -> F32:
    weights[-1] *= 2
    return weights


def halved(numbers: Array) -> F32:
    with np.errstate(over="ignore"):
        return numbers.astype(np.float16).astype(np.float32)


# **Sums.**


def after(change: Callable[[Array], Array]) -> Callable[[F32, F32], Array]:
    """A product whose result is changed."""
    return lambda x, weights: np.ascontiguousarray(change(steps.product(x, weights)))


def pairs(y: Array) -> Array:
    columns = np.arange(y.shape[1]) ^ 1
    return y[:, np.minimum(columns, y.shape[1] - 1)]


def last_column(y: Array) -> Array:
    y[:, -1] = 0
    return y


def last_row(y: Array) -> Array:
    y[-1] = 0
    return y


def running(y: Array) -> Array:
    return np.cumsum(y, axis=0, dtype=np.float32)


def x_by_columns(x: F32, weights: F32) -> Array:
    return steps.product(np.ascontiguousarray(x.ravel().reshape(x.shape[1], -1).T), weights)


WEIGHTS = (
    stepwise(
        "codes-without-top-bit",
        "The mask is one bit short, so that codes lose their top bit.",
        f"packing.unpack/C1 {VALUES}",
        unpack=top_bit_lost,
    ),
    stepwise(
        "codes-not-masked",
        "A code keeps what lies above it in its word.",
        VALUES,
        unpack=unmasked,
        only=steps.VALUES,
    ),
    stepwise("words-by-columns", "Words are read column by column.", f"packing.unpack/C1 {VALUES}", unpack=by_columns),
    stepwise(
        "codes-of-next-row",
        "Row k has the codes of row k + 1.",
        f"packing.unpack/C1 {VALUES}",
        unpack=next_row,
    ),
    stepwise(
        "last-group-dropped",
        "The last group is left out, whether it is whole or not.",
        VALUES,
        finish=without_last_group,
    ),
    stepwise(
        "group-before",
        "Every row takes the scale and zero of the group before its own.",
        VALUES,
        groups=grouped(lambda group, count: np.maximum(group - 1, 0)),
    ),
    stepwise(
        "group-after",
        "Every row takes the scale and zero of the group after its own.",
        VALUES,
        groups=grouped(lambda group, count: np.minimum(group + 1, count - 1)),
    ),
    stepwise(
        "first-group-for-all",
        "Every row takes the scale and zero of the first group.",
        VALUES,
        groups=grouped(lambda group, count: group * 0),
    ),
    stepwise(
        "scales-of-group-before",
        "Every row takes the scale of the group before its own.",
        VALUES,
        scales=lambda matrix: before(steps.scales(matrix)),
    ),
    stepwise(
        "zeros-of-group-before",
        "Every row takes the zero of the group before its own.",
        VALUES,
        zeros=lambda matrix: before(steps.zeros(matrix)),
    ),
    stepwise(
        "scales-of-first-group",
        "Every row takes the scale of the first group.",
        VALUES,
        scales=lambda matrix: steps.scales(matrix)[np.zeros(matrix.groups, np.int64)],
    ),
    stepwise(
        "scale-left-out",
        "Codes are not multiplied by their scale.",
        VALUES,
        value=valued(lambda q, s, z: q + z, lambda q, s, z: q - z),
    ),
    stepwise(
        "scale-inverted",
        "Codes are divided by their scale.",
        VALUES,
        value=valued(lambda q, s, z: q / s + z, lambda q, s, z: (q - z) / s),
    ),
    stepwise(
        "scale-applied-twice",
        "Weights are multiplied by their scale once more.",
        VALUES,
        value=valued(lambda q, s, z: s * (s * q + z), lambda q, s, z: s * (s * (q - z))),
    ),
    stepwise(
        "scales-and-zeros-exchanged",
        "Scales are taken for zeros, and zeros for scales.",
        VALUES,
        value=valued(lambda q, s, z: z * q + s, lambda q, s, z: z * (q - s)),
    ),
    stepwise(
        "minimum-taken-for-zero-point",
        "A minimum is subtracted from the code, as if it were a zero-point.",
        MINIMUM,
        value=valued(minimum=lambda q, s, z: s * (q - z)),
    ),
    stepwise(
        "minimum-scaled",
        "A minimum is added to the code before the scale.",
        MINIMUM,
        value=valued(minimum=lambda q, s, z: s * (q + z)),
    ),
    stepwise(
        "zero-point-taken-for-minimum",
        "A zero-point is added to the scaled code, as if it were a minimum.",
        POINT,
        value=valued(point=lambda q, s, z: s * q + z),
    ),
    stepwise(
        "zeros-left-out",
        "Zeros are not looked at: the weight is s q.",
        VALUES,
        value=valued(lambda q, s, z: s * q, lambda q, s, z: s * q),
    ),
    stepwise("minima-left-out", "Minima are not added.", MINIMUM, value=valued(minimum=lambda q, s, z: s * q)),
    stepwise(
        "zero-points-left-out", "Zero-points are not subtracted.", POINT, value=valued(point=lambda q, s, z: s * q)
    ),
    stepwise(
        "zeros-counted-twice",
        "Zeros meet their codes twice.",
        VALUES,
        value=valued(lambda q, s, z: s * q + (z + z), lambda q, s, z: s * (q - (z + z))),
    ),
    stepwise("weights-negated", "Results have the other sign.", VALUES, finish=finished(np.negative)),
    stepwise("weights-in-half", "Weights are rounded to float16.", ROUNDED, finish=finished(halved), only=PRODUCTS),
    stepwise(
        "weights-in-bfloat16",
        "Weights are rounded to bfloat16.",
        ROUNDED,
        finish=finished(lambda weights: bfloat16(np.ascontiguousarray(weights))),
        only=PRODUCTS,
    ),
    stepwise(
        "last-row-dropped",
        "The loop over rows ends one row early.",
        SUMS,
        finish=without_rows(lambda rows: slice(rows - 1, None)),
        only=PRODUCTS,
    ),
    stepwise(
        "first-row-dropped",
        "The loop over rows begins at the second.",
        SUMS,
        finish=without_rows(lambda rows: slice(0, 1)),
        only=PRODUCTS,
    ),
    stepwise(
        "tail-rows-of-8-dropped",
        "Rows past the last whole 8 are left out.",
        SUMS,
        finish=without_rows(lambda rows: slice(rows // 8 * 8, None)),
        only=PRODUCTS,
    ),
    stepwise(
        "last-row-counted-twice", "The product of the last row is added twice.", SUMS, finish=last_twice, only=PRODUCTS
    ),
    stepwise("last-column-dropped", "The last column stays zero.", SUMS, product=after(last_column)),
    stepwise(
        "columns-exchanged-in-pairs", "Neighbouring columns of the result change places.", SUMS, product=after(pairs)
    ),
    stepwise(
        "columns-one-off",
        "Each result stands one column late.",
        SUMS,
        product=after(lambda y: np.roll(y, 1, axis=1)),
    ),
    stepwise("result-doubled", "Results are twice as large.", SUMS, product=after(lambda y: 2 * y)),
    stepwise("result-in-half", "Results are rounded to float16.", ROUNDED, product=after(halved)),
    stepwise(
        "activations-in-half",
        "x is rounded to float16 first.",
        ROUNDED,
        product=lambda x, weights: steps.product(halved(x), weights),
    ),
    stepwise(
        "first-row-of-x-for-all",
        "Every row of the result is that of the first row of X.",
        "linear.qgemm/C1",
        product=after(lambda y: np.repeat(y[:1], len(y), axis=0)),
        only=("linear.qgemm",),
        verdicts=MOVES,
    ),
    stepwise(
        "sums-carried-over-rows",
        "Sums are not set back to 0 between rows of X.",
        "linear.qgemm/C1",
        product=after(running),
        only=("linear.qgemm",),
        verdicts=MOVES,
    ),
    stepwise(
        "last-row-of-x-dropped",
        "The last row of the result stays zero.",
        "linear.qgemm/C1",
        product=after(last_row),
        only=("linear.qgemm",),
        verdicts=MOVES,
    ),
    stepwise(
        "result-transposed",
        "The result is written column by column.",
        "linear.qgemm/C1",
        product=after(lambda y: np.ascontiguousarray(y.T).reshape(y.shape)),
        only=("linear.qgemm",),
        verdicts=MOVES,
    ),
    stepwise(
        "x-transposed",
        "X is read column by column.",
        "linear.qgemm/C1",
        product=x_by_columns,
        only=("linear.qgemm",),
        verdicts=MOVES,
    ),
)


# **Attention and RoPE.**


def first_seen(tokens: int, length: int, window: int | None) -> Array:
    """All keys, whether they come before or after."""
    position = np.arange(length - tokens, length)[:, None]
    every = np.ones((tokens, length), np.bool_)
    return every if window is None else every & (np.arange(length) > position - window)


def narrower(tokens: int, length: int, window: int | None) -> Array:
    return visible(tokens, length, None if window is None else max(window - 1, 1))


def others_only(tokens: int, length: int, window: int | None) -> Array:
    """A token does not see itself, but the first, which has no other."""
    seen = visible(tokens, length, window)
    position = np.arange(length - tokens, length)
    lonely = seen.sum(axis=1) == 1
    seen[~lonely, position[~lonely]] = False
    return seen


def attend_undivided(queries: F32, keys: F32, values: F32, window: int | None = None) -> Array:
    tokens, heads, channels = queries.shape
    groups, length, _ = keys.shape
    result = np.empty(queries.shape)
    with np.errstate(all="ignore"):
        for h in range(heads):
            j = h * groups // heads
            scores = queries[:, h].astype(np.float64) @ keys[j].astype(np.float64).T / np.sqrt(channels)
            hidden = np.where(visible(tokens, length, window), scores, -np.inf)
            powers = np.exp(hidden - hidden.max(axis=1, keepdims=True))
            result[:, h] = powers @ values[j].astype(np.float64)
    return result


def undivided(scores: F32) -> Array:
    with np.errstate(all="ignore"):
        wide = scores.astype(np.float64)
        answer: Array = np.exp(wide - wide.max(axis=1, keepdims=True))
    return answer


def in_powers_of_2(scores: F32) -> Array:
    return softmax(scores.astype(np.float64) * np.log(2.0))


def along_columns(scores: F32) -> Array:
    return softmax(scores.astype(np.float64).T).T


def turned(cos: Callable[[Array, Array], Array], sin: Callable[[Array, Array], Array]) -> Callable[..., Array]:
    def run(x: F32, turn: Rotation) -> Array:
        return rotate(x, Rotation(turn.layout, cos(turn.cos, turn.sin), sin(turn.cos, turn.sin)))

    return run


def shifted(by: int) -> Callable[..., Array]:
    """Positions that are off, with the first or the last of them kept at the ends."""

    def rows(part: Array) -> Array:
        return part[np.clip(np.arange(len(part)) + by, 0, len(part) - 1)]

    return turned(lambda cos, sin: rows(cos), lambda cos, sin: rows(sin))


def strided_values(h: int, heads: int, groups: int) -> int:
    return h % groups


HEADS = (
    of(
        "attention.attend",
        "keys-of-first-head",
        "Values go by group, and keys are always of the first.",
        "C3",
        replacing(head=lambda h, heads, groups: 0, value_head=lambda h, heads, groups: h * groups // heads),
    ),
    of(
        "attention.attend",
        "value-heads-strided",
        "Query head h reads the values of key-value head h mod G.",
        "C1 C2 C3",
        replacing(value_head=strided_values),
    ),
    of(
        "attention.attend",
        "mask-left-out",
        "A token sees all that come after it.",
        "C1 C3 C4",
        replacing(see=first_seen),
        verdicts=MOVES,
    ),
    of(
        "attention.attend",
        "window-one-too-narrow",
        "A window of w lets a token see w - 1.",
        "C3",
        replacing(see=narrower),
    ),
    of(
        "attention.attend",
        "own-token-hidden",
        "A token does not see itself.",
        "C3",
        replacing(see=others_only),
    ),
    of(
        "attention.attend",
        "attention-not-divided",
        "Exponentials are not divided by their sum.",
        "C3",
        attend_undivided,
    ),
    of("attention.softmax", "softmax-not-divided", "Exponentials are not divided by their sum.", "C2", undivided),
    of("attention.softmax", "powers-of-2", "Powers are of 2 and not of e.", "C2", in_powers_of_2),
    of(
        "attention.softmax",
        "softmax-along-columns",
        "Columns sum to 1, and not rows.",
        "C2 C3",
        along_columns,
        verdicts=MOVES,
    ),
    of("rope.rotate", "position-one-ahead", "A token is turned by the angle of the one after it.", "C2", shifted(1)),
    of(
        "rope.rotate",
        "position-one-behind",
        "A token is turned by the angle before its own, but the first.",
        "C2",
        shifted(-1),
    ),
    of(
        "rope.rotate",
        "cosine-and-sine-exchanged",
        "Cosines are taken for sines, and sines for cosines.",
        "C1 C2",
        turned(lambda cos, sin: sin, lambda cos, sin: cos),
    ),
    of(
        "rope.rotate",
        "first-position-for-all",
        "All tokens are turned by the angle of the first.",
        "C2",
        turned(lambda cos, sin: np.repeat(cos[:1], len(cos), 0), lambda cos, sin: np.repeat(sin[:1], len(sin), 0)),
    ),
    of("rope.rotate", "not-rotated", "Heads come back as they were.", "C1 C2", lambda x, turn: x.astype(np.float64)),
    of(
        "rope.rotate",
        "sine-left-out",
        "Channels are only multiplied by cosines.",
        "C1 C2",
        turned(lambda c, s: c, lambda c, s: 0 * s),
    ),
)

# **Norms, gates, routing.**


def over(
    root: Callable[[Array, float], Array], gain: Callable[[F32], F32] = lambda given: given
) -> Callable[..., Array]:
    return lambda x, given, epsilon: normed(x, gain(given), root(mean_square(x), epsilon))


def relu(a: Array) -> Array:
    return np.maximum(a, 0)


def sigmoid(a: Array) -> Array:
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-a))


def silu(a: Array) -> Array:
    return a * sigmoid(a)


def gated(of_gate: Callable[[Array], Array], of_up: Callable[[Array], Array] = lambda up: up) -> Callable[..., Array]:
    def run(gate: F32, up: F32) -> Array:
        with np.errstate(all="ignore"):
            return of_gate(gate.astype(np.float64)) * of_up(up.astype(np.float64))

    return run


def by_key(key: Callable[[Array], Array], change: Callable[[Array], Array] = lambda ids: ids) -> Callable[..., Array]:
    def run(scores: F32, k: int) -> Array:
        return np.ascontiguousarray(change(np.argsort(key(scores), axis=1, kind="stable")[:, :k]), np.int64)

    return run


def softmax_again(scores: F32, chosen: Any, softmax_of: str = "after") -> Array:
    own = np.take_along_axis(scores, chosen, axis=1).astype(np.float64)
    return softmax(own)


def of_first_token(x: F32, gate: F32, up: F32, down: F32, chosen: Any, weights: F32) -> Array:
    return sparse(x, gate, up, down, chosen, np.repeat(weights[:1], len(weights), axis=0))


def all_ones(x: F32, gate: F32, up: F32, down: F32, chosen: Any, weights: F32) -> Array:
    return sparse(x, gate, up, down, chosen, np.ones_like(weights))


def last_left_out(x: F32, gate: F32, up: F32, down: F32, chosen: Any, weights: F32) -> Array:
    kept = weights.copy()
    kept[:, -1] = 0
    return sparse(x, gate, up, down, chosen, kept)


def gate_by(choose: Callable[[Array, str], Array]) -> Callable[..., Array]:
    def run(x: F32, router: F32, scores: str = "logits") -> Array:
        with np.errstate(all="ignore"):
            return choose(logits_of(x, router), scores)

    return run


LAYERS = (
    of(
        "blocks.rms_norm",
        "gain-left-out",
        "Rows are not multiplied by the gain.",
        "C2",
        over(lambda m, e: np.sqrt(m + e), np.ones_like),
    ),
    of(
        "blocks.rms_norm",
        "root-left-out",
        "Rows are divided by the mean square and not by its root.",
        "C2",
        over(lambda m, e: m + e),
    ),
    of("blocks.swiglu", "relu-for-silu", "The activation is a ReLU.", "C2", gated(relu)),
    of("blocks.swiglu", "silu-of-both", "The activation is applied to up as well.", "C2", gated(silu, silu)),
    of("blocks.swiglu", "up-left-out", "The result is not multiplied by up.", "C2", gated(silu, np.ones_like)),
    of(
        "blocks.swiglu",
        "sigmoid-of-minus",
        "The sigmoid is that of minus the gate.",
        "C2",
        gated(lambda a: a * sigmoid(-a)),
    ),
    of(
        "routing.gate",
        "logits-for-probabilities",
        "Probabilities are asked for, and logits come back.",
        "C3",
        gate_by(lambda logits, scores: logits),
    ),
    of(
        "routing.gate",
        "probabilities-for-logits",
        "Logits are asked for, and probabilities come back.",
        "C2",
        gate_by(lambda logits, scores: softmax(logits)),
    ),
    of(
        "routing.top_k",
        "chosen-worst-first",
        "The chosen stand in the other order.",
        "C1",
        by_key(np.negative, lambda ids: ids[:, ::-1]),
    ),
    of(
        "routing.top_k",
        "chosen-by-magnitude",
        "Scores are compared without their sign.",
        "C1",
        by_key(lambda scores: -np.abs(scores)),
    ),
    of("routing.top_k", "ids-from-1", "Experts are counted from 1.", "C1", by_key(np.negative, lambda ids: ids + 1)),
    of(
        "routing.weights",
        "softmax-of-probabilities",
        "Probabilities of the chosen go through a softmax again.",
        "C2",
        softmax_again,
    ),
    of(
        "routing.expert",
        "expert-relu-for-silu",
        "The activation is a ReLU.",
        "C2",
        lambda x, g, u, d: expert(x, g, u, d, relu),
    ),
    of(
        "routing.expert",
        "expert-sigmoid-for-silu",
        "The sigmoid is not multiplied by the gate.",
        "C2",
        lambda x, g, u, d: expert(x, g, u, d, sigmoid),
    ),
    of(
        "routing.expert",
        "expert-without-sigmoid",
        "Gate and up are multiplied as they are.",
        "C2",
        lambda x, g, u, d: expert(x, g, u, d, lambda a: a),
    ),
    of("routing.sparse", "weights-left-out", "Answers are added without their weights.", "C2", all_ones),
    of(
        "routing.sparse",
        "weights-of-first-token",
        "All tokens have the weights of the first.",
        "C2",
        of_first_token,
        verdicts=MOVES,
    ),
    of(
        "routing.sparse",
        "last-of-chosen-left-out",
        "The last of a token's experts is left out, also where it is the only one.",
        "C2",
        last_left_out,
    ),
)

# **Blocks, orders, Hessians, solvers.**


def rounded_down(x: F32, format: Any) -> Blocks:
    mantissas = np.empty(x.shape, format.dtype)
    exponents = np.empty((len(x), format.blocks(x.shape[1])), np.int16)
    for number, span in enumerate(format.spans(x.shape[1])):
        part = x[:, span].astype(np.float64)
        e = block_exponent(np.abs(part).max(axis=1), format)
        mantissas[:, span] = np.clip(np.floor(np.ldexp(part, -e[:, None])), -format.top, format.top)
        exponents[:, number] = e
    return Blocks(mantissas, exponents, format)


def one_low(blocks: Blocks) -> F32:
    return decode(blocks, blocks.exponents - np.int16(1))


def of_first_block(blocks: Blocks) -> F32:
    return decode(blocks, np.repeat(blocks.exponents[:, :1], blocks.exponents.shape[1], axis=1))


def without_sign(blocks: Blocks) -> F32:
    return decode(Blocks(np.abs(blocks.mantissas), blocks.exponents, blocks.format))


def difference(a: Array, b: Array) -> Array:
    return np.subtract(a, b)


def without_last_block(blocks: BlockSums) -> Array:
    if blocks.sums.shape[2] == 1:
        return np.zeros(blocks.sums.shape[:2], np.float32)
    sums, exponents = np.ascontiguousarray(blocks.sums[:, :, :-1]), np.ascontiguousarray(blocks.exponents[:, :, :-1])
    return total(BlockSums(sums, exponents))


def pooled(answer: Callable[[Array, str], Array]) -> Callable[..., Array]:
    def run(weights: F32, heads: int, groups: int, method: str = "mean") -> Array:
        parts = members(weights, heads, groups).astype(np.float64)
        result: Array = np.ascontiguousarray(answer(parts, method).reshape(len(weights), -1), np.float32)
        return result

    return run


def first_of(parts: Array, method: str) -> Array:
    first: Array = parts[:, :, 0]
    return first


def mean_of(parts: Array, method: str) -> Array:
    mean: Array = sum(parts[:, :, n] for n in range(parts.shape[2])) / parts.shape[2]
    return mean


def summed(parts: Array, method: str) -> Array:
    return mean_of(parts, method) * parts.shape[2] if method == "mean" else first_of(parts, method)


def without_last_input(x: F32) -> Array:
    wide = x[:-1].astype(np.float64)
    return wide.T @ wide


def next_row_only(weights: F32, factor: F32, values: F32) -> Array:
    wide = factor.astype(np.float64)
    share = np.diag(np.diagonal(wide, 1) / np.diagonal(wide)[1:], 1) if len(wide) > 1 else np.zeros((1, 1))
    return weights.astype(np.float64) + share.T @ (weights.astype(np.float64) - values)


def solved(quotient: Callable[[F32, F32, F32], Array]) -> Callable[..., Array]:
    def run(weights: F32, scales: F32, zeros: F32, bits: int) -> Array:
        with np.errstate(all="ignore"):
            return np.clip(quotient(weights, scales, zeros), 0, 2**bits - 1).astype(np.uint8)

    return run


OTHERS = (
    of("bfp.cast", "mantissas-rounded-down", "Mantissas are rounded down and not to the nearest.", "C2", rounded_down),
    of("bfp.decode", "exponent-one-low-in-decode", "A value is 2^(e-1) M.", "C1", one_low),
    of(
        "bfp.decode",
        "exponent-of-first-block",
        "All blocks of a row have the exponent of the first.",
        "C1",
        of_first_block,
    ),
    of("bfp.decode", "mantissas-without-sign", "Values are never negative.", "C1", without_sign),
    of(
        "bfp.dot",
        "exponents-subtracted",
        "The exponents of a product are subtracted and not added.",
        "C2",
        lambda a, b: dot(a, b, joined=difference),
    ),
    of("bfp.total", "last-block-not-added", "The last block is left out.", "C1", without_last_block),
    of(
        "pooling.pool",
        "sums-for-means",
        "The sum of the heads is not divided, after it was right otherwise.",
        "C1",
        pooled(summed),
    ),
    of(
        "pooling.pool",
        "first-for-mean",
        "The first head is copied where the mean is asked for.",
        "C1",
        pooled(first_of),
    ),
    of(
        "pooling.pool",
        "mean-for-first",
        "The mean comes back where the first head is asked for.",
        "C2",
        pooled(mean_of),
    ),
    of("gptq.hessian", "last-input-dropped", "The last input is left out.", "C1", without_last_input),
    of(
        "gptq.targets",
        "errors-reach-next-row-only",
        "An error changes the next row and no later one.",
        "C1",
        next_row_only,
    ),
    of(
        "hqq.codes",
        "solver-zero-subtracted",
        "The zero is subtracted and not added.",
        "C1",
        solved(lambda w, s, z: np.rint(w / s - z)),
    ),
    of("hqq.codes", "solver-zero-left-out", "The zero is left out.", "C1", solved(lambda w, s, z: np.rint(w / s))),
)

DEFECTS: tuple[Defect, ...] = (*WEIGHTS, *HEADS, *LAYERS, *OTHERS)
