"""Mistakes of products with quantised weights and of packing, as an author of kernels makes them.

They are written without the bank of defects: loops over codes, a row at a time. Each has the names by which a diagnosis
may call it; one without a name is to be described.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = Any
WORD = 32


@dataclass(frozen=True)
class Mistake:
    """One broken operation.

    Attributes:
        name: for the test.
        operation: its id.
        function: takes what the reference takes.
        right: the names that fit; empty if none does.
    """

    name: str
    operation: str
    function: Callable[..., Any]
    right: tuple[str, ...]


# **A kernel in plain loops**, each part of which may be replaced by a wrong one.


def code_at(words: Array, bits: int, k: int) -> Array:
    word, shift = divmod(k * bits, WORD)
    code = words[word] >> np.uint32(shift)
    if shift + bits > WORD:
        code = code | words[word + 1] << np.uint32(WORD - shift)
    return (code & np.uint32((1 << bits) - 1)).astype(np.float32)


def group_of(k: int, m: Array) -> int:
    return int(k // m.group_size)


def scale_at(m: Array, g: int) -> Array:
    return m.scales[g].astype(np.float32)


def zero_at(m: Array, g: int) -> Array:
    return m.zeros[g].astype(np.float32)


def value_of(m: Array, q: Array, s: Array, z: Array) -> Array:
    return s * q + z if m.convention == "minimum" else s * (q - z)


def weights(
    m: Array,
    *,
    code: Any = code_at,
    group: Any = group_of,
    scale: Any = scale_at,
    zero: Any = zero_at,
    value: Any = value_of,
) -> Array:
    """K × N, row by row."""
    result = np.zeros((m.rows, m.columns), np.float32)
    with np.errstate(all="ignore"):
        for k in range(m.rows):
            g = group(k, m)
            if g is not None:
                result[k] = value(m, code(m.words, m.bits, k), scale(m, g), zero(m, g))
    return result


def times(x: Array, w: Array) -> Array:
    """Float32 sums, a row of weights at a time."""
    y = np.zeros((len(x), w.shape[1]), np.float32)
    with np.errstate(all="ignore"):
        for k in range(w.shape[0]):
            y += x[:, k : k + 1] * w[k]
    return y


def product(multiply: Any = times, **parts: Any) -> Callable[[Array, Array], Array]:
    """Of one vector or of several."""

    def run(x: Array, m: Array) -> Array:
        w = weights(m, **parts)
        return multiply(x, w) if x.ndim == 2 else multiply(x[np.newaxis], w)[0]

    return run


MISTAKES: list[Mistake] = []


def weighty(name: str, right: str, operations: str = "affine.dequantize linear.qgemv", **parts: Any) -> None:
    """A mistake in the weights shows in every operation that uses them; one or two stand for all."""
    for operation in operations.split():
        function = (lambda m: weights(m, **parts)) if operation == "affine.dequantize" else product(**parts)
        MISTAKES.append(Mistake(f"{name}:{operation}", operation, function, tuple(right.split())))


def summing(name: str, right: str, multiply: Any, operations: str = "linear.qgemv") -> None:
    for operation in operations.split():
        MISTAKES.append(Mistake(f"{name}:{operation}", operation, product(multiply), tuple(right.split())))


# Where codes lie.


def nibble_order(words: Array, bits: int, k: int) -> Array:
    return code_at(words, bits, k ^ 1 if bits == 4 else k)


def top_first(words: Array, bits: int, k: int) -> Array:
    if bits == 3:
        return code_at(words, bits, k)
    per = WORD // bits
    return code_at(words, bits, k // per * per + per - 1 - k % per)


AWQ = (0, 2, 4, 6, 1, 3, 5, 7)


def awq_order(words: Array, bits: int, k: int) -> Array:
    return code_at(words, bits, k // 8 * 8 + AWQ.index(k % 8)) if bits == 4 else code_at(words, bits, k)


def big_endian(words: Array, bits: int, k: int) -> Array:
    return code_at(words.byteswap(), bits, k)


def no_straddle(words: Array, bits: int, k: int) -> Array:
    word, shift = divmod(k * bits, WORD)
    return ((words[word] >> np.uint32(shift)) & np.uint32((1 << bits) - 1)).astype(np.float32)


def ten_a_word(words: Array, bits: int, k: int) -> Array:
    if bits != 3:
        return code_at(words, bits, k)
    word, place = divmod(k, 10)
    word = min(word, len(words) - 1)
    return ((words[word] >> np.uint32(3 * place)) & np.uint32(7)).astype(np.float32)


def signed_code(words: Array, bits: int, k: int) -> Array:
    code = code_at(words, bits, k)
    return np.where(code >= 1 << (bits - 1), code - (1 << bits), code)


def short_mask(words: Array, bits: int, k: int) -> Array:
    return (code_at(words, bits, k).astype(np.int64) & ((1 << (bits - 1)) - 1)).astype(np.float32)


def no_mask(words: Array, bits: int, k: int) -> Array:
    word, shift = divmod(k * bits, WORD)
    return (words[word] >> np.uint32(shift)).astype(np.float32)


def by_columns(words: Array, bits: int, k: int) -> Array:
    return code_at(np.ascontiguousarray(words.ravel().reshape(words.shape[1], -1).T), bits, k)


def next_row(words: Array, bits: int, k: int) -> Array:
    return code_at(words, bits, min(k + 1, len(words) * WORD // bits - 1))


weighty("nibble-order", "nibbles-swapped", code=nibble_order)
weighty("top-code-first", "most-significant-first", code=top_first)
weighty("awq-order", "codes-interleaved", code=awq_order)
weighty("big-endian-words", "bytes-swapped", code=big_endian)
weighty("straddle-lost", "straddle-cut-short", code=no_straddle)
weighty("ten-codes-a-word", "three-bits-do-not-straddle", code=ten_a_word)
weighty("two-s-complement", "codes-signed", code=signed_code)
weighty("mask-one-bit-short", "codes-without-top-bit", code=short_mask)
weighty("mask-forgotten", "codes-not-masked", code=no_mask)
weighty("words-column-major", "words-by-columns", code=by_columns)
weighty("row-off-by-one", "codes-of-next-row", operations="linear.qgemv", code=next_row)

# Groups.

weighty("group-early", "group-one-row-early", group=lambda k, m: min((k + 1) // m.group_size, m.groups - 1))
weighty("group-late", "group-one-row-late", group=lambda k, m: max(k - 1, 0) // m.group_size)
weighty(
    "rest-in-last-group",
    "short-group-merged",
    group=lambda k, m: min(k // m.group_size, max(m.rows // m.group_size, 1) - 1),
)
weighty(
    "whole-groups-only",
    "short-group-dropped",
    group=lambda k, m: k // m.group_size if k // m.group_size < m.rows // m.group_size else None,
)
weighty(
    "last-group-missing",
    "last-group-dropped",
    group=lambda k, m: k // m.group_size if k // m.group_size < m.groups - 1 else None,
)
weighty("group-before", "group-before", group=lambda k, m: max(k // m.group_size - 1, 0))
weighty("group-after", "group-after", group=lambda k, m: min(k // m.group_size + 1, m.groups - 1))
weighty("one-group", "first-group-for-all", group=lambda k, m: 0)
weighty("groups-of-128", "groups-of-128-always", group=lambda k, m: min(k // 128, m.groups - 1))
weighty("scale-of-group-before", "scales-of-group-before", scale=lambda m, g: scale_at(m, max(g - 1, 0)))
weighty("scale-of-first-group", "scales-of-first-group", scale=lambda m, g: scale_at(m, 0))
weighty("zero-of-first-group", "zeros-of-first-group", zero=lambda m, g: zero_at(m, 0))
weighty("zero-of-group-before", "zeros-of-group-before", zero=lambda m, g: zero_at(m, max(g - 1, 0)))

# Scales.

weighty(
    "scales-n-by-g",
    "scales-transposed",
    scale=lambda m, g: m.scales.ravel().reshape(m.columns, -1).T[g].astype(np.float32),
)
weighty(
    "scale-of-left-column",
    "scale-of-previous-column",
    scale=lambda m, g: scale_at(m, g)[np.maximum(np.arange(m.columns) - 1, 0)],
)
weighty(
    "scale-as-half",
    "scales-rounded-to-half",
    operations="linear.qgemv",
    scale=lambda m, g: m.scales[g].astype(np.float16).astype(np.float32),
)
weighty("scale-left-out", "scale-left-out", value=lambda m, q, s, z: q + z if m.convention == "minimum" else q - z)
weighty(
    "scale-divides", "scale-inverted", value=lambda m, q, s, z: q / s + z if m.convention == "minimum" else (q - z) / s
)
weighty(
    "scale-squared", "scale-applied-twice", operations="linear.qgemv", value=lambda m, q, s, z: s * value_of(m, q, s, z)
)
weighty("arrays-exchanged", "scales-and-zeros-exchanged", value=lambda m, q, s, z: value_of(m, q, z, s))

# Zeros.


def points(value: Any) -> Any:
    """Where the convention is that of zero-points."""
    return lambda m, q, s, z: value(q, s, z) if m.convention == "zero_point" else s * q + z


def minima(value: Any) -> Any:
    return lambda m, q, s, z: value(q, s, z) if m.convention == "minimum" else s * (q - z)


weighty("zero-plus-1", "zero-plus-one", value=points(lambda q, s, z: s * (q - (z + 1))))
weighty("zero-minus-1", "zero-minus-one", value=points(lambda q, s, z: s * (q - (z - 1))))
weighty(
    "symmetric",
    "zero-assumed-symmetric",
    value=lambda m, q, s, z: s * q + z if m.convention == "minimum" else s * (q - 2 ** (m.bits - 1)),
)
weighty(
    "difference-in-uint8",
    "zero-wraps-in-a-byte",
    value=points(lambda q, s, z: s * ((q.astype(np.uint8) - z.astype(np.uint8)).astype(np.uint8)).astype(np.float32)),
)
weighty(
    "zero-int8",
    "zero-a-signed-byte",
    zero=lambda m, g: m.zeros[g].astype(np.int8).astype(np.float32) if m.convention == "zero_point" else zero_at(m, g),
)
weighty("zero-not-scaled", "zero-not-scaled", value=points(lambda q, s, z: s * q - z))
weighty("zero-added", "zero-added", value=points(lambda q, s, z: s * (q + z)))
weighty("minimum-subtracted", "minimum-subtracted", value=minima(lambda q, s, z: s * q - z))
weighty("minimum-scaled", "minimum-scaled zero-scaled-twice", value=minima(lambda q, s, z: s * (q + z)))
weighty("minimum-as-zero-point", "minimum-taken-for-zero-point", value=minima(lambda q, s, z: s * (q - z)))
weighty("zero-point-as-minimum", "zero-point-taken-for-minimum", value=points(lambda q, s, z: s * q + z))
weighty("zero-forgotten", "zeros-left-out minima-left-out", value=lambda m, q, s, z: s * q)
weighty(
    "minimum-forgotten",
    "zeros-left-out minima-left-out",
    operations="linear.qgemv",
    value=minima(lambda q, s, z: s * q),
)
weighty(
    "zero-twice",
    "zeros-counted-twice",
    value=lambda m, q, s, z: s * q + (z + z) if m.convention == "minimum" else s * (q - 2 * z),
)
weighty(
    "neighbour-zero",
    "zeros-of-neighbour-column",
    zero=lambda m, g: zero_at(m, g)[np.minimum(np.arange(m.columns) ^ 1, m.columns - 1)],
)
weighty("negated", "weights-negated", value=lambda m, q, s, z: -value_of(m, q, s, z))

# Sums.


def part(rows: Any) -> Any:
    """Only these rows take part."""

    def multiply(x: Array, w: Array) -> Array:
        y = np.zeros((len(x), w.shape[1]), np.float32)
        with np.errstate(all="ignore"):
            for k in rows(w.shape[0]):
                y += x[:, k : k + 1] * w[k]
        return y

    return multiply


def of_columns(change: Any) -> Any:
    def multiply(x: Array, w: Array) -> Array:
        return np.ascontiguousarray(change(times(x, w)))

    return multiply


def tail_zero(y: Array) -> Array:
    y[:, y.shape[1] // 8 * 8 :] = 0
    return y


def tail_again(y: Array) -> Array:
    whole = y.shape[1] // 8 * 8
    if whole:
        y[:, whole:] = y[:, : y.shape[1] - whole]
    return y


def swap_pairs(y: Array) -> Array:
    order = np.arange(y.shape[1]) ^ 1
    order[order >= y.shape[1]] = y.shape[1] - 1
    return y[:, order]


def rotate_lanes(y: Array) -> Array:
    return np.roll(y, 1, axis=1)


def unpack_lanes(y: Array) -> Array:
    order = np.arange(y.shape[1])
    for start in range(0, y.shape[1] - 15, 16):
        order[start : start + 16] = start + np.array([0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15])
    return y[:, order]


def bfloat(numbers: Array) -> Array:
    bits = np.ascontiguousarray(numbers, np.float32).view(np.uint32)
    even = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return np.where(np.isfinite(numbers), even.astype(np.uint32).view(np.float32), numbers)


def half_sums(x: Array, w: Array) -> Array:
    y = np.zeros((len(x), w.shape[1]), np.float16)
    with np.errstate(all="ignore"):
        for k in range(w.shape[0]):
            y += (x[:, k : k + 1] * w[k]).astype(np.float16)
    return y.astype(np.float32)


both = "linear.qgemv linear.qgemm"
summing("k-loop-short", "last-row-dropped", part(lambda rows: range(rows - 1)), both)
summing("k-from-1", "first-row-dropped", part(lambda rows: range(1, rows)), both)
summing("tail-of-32", "tail-rows-dropped", part(lambda rows: range(rows // 32 * 32)), both)
summing("tail-of-8", "tail-rows-of-8-dropped", part(lambda rows: range(rows // 8 * 8)))
summing("last-row-twice", "last-row-counted-twice", part(lambda rows: [*range(rows), rows - 1]))
summing("columns-of-8", "tail-columns-dropped", of_columns(tail_zero), both)
summing("columns-of-8-again", "tail-columns-from-the-start", of_columns(tail_again))
summing("last-column-zero", "last-column-dropped", of_columns(lambda y: y * (np.arange(y.shape[1]) < y.shape[1] - 1)))
summing("lanes-swapped", "columns-exchanged-in-pairs", of_columns(swap_pairs), both)
summing("lanes-unpacked", "", of_columns(unpack_lanes))
summing("lanes-rolled", "columns-one-off", of_columns(rotate_lanes))
summing("half-sums", "half-accumulation", half_sums)
summing("x-bfloat16", "activations-in-bfloat16", lambda x, w: times(bfloat(x), w))
summing("x-half", "activations-in-half", lambda x, w: times(x.astype(np.float16).astype(np.float32), w))
summing("weights-half", "weights-in-half", lambda x, w: times(x, w.astype(np.float16).astype(np.float32)))
summing("weights-bfloat16", "weights-in-bfloat16", lambda x, w: times(x, bfloat(w)))
summing("result-half", "result-in-half", lambda x, w: times(x, w).astype(np.float16).astype(np.float32))
summing("result-doubled", "result-doubled", lambda x, w: 2 * times(x, w))
summing("result-negated", "weights-negated", lambda x, w: -times(x, w))
summing("abs", "result-without-sign", lambda x, w: np.abs(times(x, w)))
summing("a-lot-of-noise", "", lambda x, w: times(x, w) * (1 + 1e-3 * np.cos(np.arange(w.shape[1]))).astype(np.float32))
summing("one-element", "", of_columns(lambda y: y + (np.arange(y.shape[1]) == y.shape[1] // 2)))


def first_x(x: Array, w: Array) -> Array:
    return np.repeat(times(x[:1], w), len(x), axis=0)


def carried(x: Array, w: Array) -> Array:
    return np.cumsum(times(x, w), axis=0, dtype=np.float32)


def last_x_zero(x: Array, w: Array) -> Array:
    y = times(x, w)
    y[-1] = 0
    return y


def reversed_rows(x: Array, w: Array) -> Array:
    return np.ascontiguousarray(times(x, w)[::-1])


def result_transposed(x: Array, w: Array) -> Array:
    y = times(x, w)
    return np.ascontiguousarray(y.T).reshape(y.shape)


def x_transposed(x: Array, w: Array) -> Array:
    return times(np.ascontiguousarray(x.ravel().reshape(x.shape[1], -1).T), w)


summing("first-x-for-all", "first-row-of-x-for-all", first_x, "linear.qgemm")
summing("sum-carried", "sums-carried-over-rows", carried, "linear.qgemm")
summing("last-x-missing", "last-row-of-x-dropped", last_x_zero, "linear.qgemm")
summing("rows-reversed", "result-reversed-along-axis-0", reversed_rows, "linear.qgemm")
summing("y-transposed", "result-transposed", result_transposed, "linear.qgemm")
summing("x-transposed", "x-transposed", x_transposed, "linear.qgemm")


# Packing.


def unpacked(code: Any) -> Any:
    def run(words: Array, bits: int) -> Array:
        rows = len(words) * WORD // bits
        return np.array([code(words, bits, k) for k in range(rows)]).astype(np.int64).astype(np.uint8)

    return run


for each, function, answer in (
    ("nibble-order", nibble_order, "nibbles-swapped"),
    ("top-code-first", top_first, "most-significant-first"),
    ("awq-order", awq_order, "codes-interleaved"),
    ("big-endian-words", big_endian, "bytes-swapped"),
    ("straddle-lost", no_straddle, "straddle-cut-short"),
    ("ten-codes-a-word", ten_a_word, "three-bits-do-not-straddle"),
    ("mask-one-bit-short", short_mask, "codes-without-top-bit"),
    ("words-column-major", by_columns, "words-by-columns"),
):
    MISTAKES.append(Mistake(f"{each}:packing.unpack", "packing.unpack", unpacked(function), (answer,)))


def packed(place: Any, straddle: bool = True) -> Any:
    def run(codes: Array, bits: int) -> Array:
        words = np.zeros((codes.shape[0] * bits // WORD, codes.shape[1]), np.uint32)
        for k in range(codes.shape[0]):
            word, shift = place(k, bits)
            words[word] |= codes[k].astype(np.uint32) << np.uint32(shift)
            if straddle and shift + bits > WORD:
                words[word + 1] |= codes[k].astype(np.uint32) >> np.uint32(WORD - shift)
        return words

    return run


def straight(k: int, bits: int) -> tuple[int, int]:
    return divmod(k * bits, WORD)


def from_top(k: int, bits: int) -> tuple[int, int]:
    word, shift = divmod(k * bits, WORD)
    return (word, shift) if bits == 3 else (word, WORD - bits - shift)


MISTAKES += [
    Mistake("top-first:packing.pack", "packing.pack", packed(from_top), ("most-significant-first",)),
    Mistake("straddle-lost:packing.pack", "packing.pack", packed(straight, straddle=False), ("straddle-not-written",)),
    Mistake(
        "nibble-order:packing.pack",
        "packing.pack",
        packed(lambda k, bits: straight(k ^ 1 if bits == 4 else k, bits)),
        ("nibbles-swapped",),
    ),
    Mistake(
        "big-endian:packing.pack", "packing.pack", lambda c, b: packed(straight)(c, b).byteswap(), ("bytes-swapped",)
    ),
    Mistake(
        "int32:packing.pack", "packing.pack", lambda c, b: packed(straight)(c, b).view(np.int32), ("words-are-int32",)
    ),
]
