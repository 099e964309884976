"""Kernels that are wrong only where a size or a number is special: products, formats and quantisers.

An author writes such a kernel when a path of its own takes a size that fills its registers, when a buffer has a fixed
length, or when a formula has no value at one number. Each is a condition on the arguments; where it holds, the result
is clearly wrong, and everywhere else it is right. They are written without looking at the cases of the suite.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = Any
When = Callable[..., bool]


@dataclass(frozen=True)
class Special:
    """One kernel.

    Attributes:
        name: for the test.
        operation: its id.
        when: whether it is wrong for these arguments, which it takes as the reference does. A stateful operation has
            the arguments that opened it, and after them a list of those of all steps so far.
    """

    name: str
    operation: str
    when: When


SPECIAL: list[Special] = []


def wrong(operations: str, **kernels: When) -> None:
    """Kernels of some operations, each by its name."""
    for operation in operations.split():
        known = {each.name for each in SPECIAL}  # pytest imports these modules under two names
        these = [Special(f"{name}:{operation}", operation, when) for name, when in kernels.items()]
        SPECIAL.extend(each for each in these if each.name not in known)


def numbers(part: Array) -> Array:
    """Scales or zeros as they are, however they are stored."""
    from lowbit.quantization.hqq_numbers import decode

    return decode(part)


# **Parts of GPTQ.**

wrong(
    "gptq.targets",
    equal_weights=lambda w, m, v: w.size > 1 and (w == w.flat[0]).all(),
    equal_row=lambda w, m, v: w.shape[1] > 1 and bool((np.ptp(w, axis=1) == 0).any()),
    dead_column=lambda w, m, v: w.shape[1] > 1 and bool((w == 0).all(axis=0).any()),
    nothing_to_correct=lambda w, m, v: w.size > 1 and bool((w == v).all()),
    dead_input=lambda w, m, v: len(m) > 2 and bool((np.abs(np.triu(m, 1)).sum(axis=1) == 0)[:-1].any()),
    diagonal_factor=lambda w, m, v: len(m) > 1 and not np.triu(m, 1).any(),
    unit_factor=lambda w, m, v: len(m) > 1 and np.array_equal(m, np.eye(len(m))),
    last_row_exact=lambda w, m, v: len(w) > 1 and np.array_equal(w[-1], v[-1]),
    twice_as_wide_as_deep=lambda w, m, v: len(w) > 4 and w.shape[1] == 2 * len(w),
    square_of_32=lambda w, m, v: w.shape == (32, 32),
    columns_48_of_16=lambda w, m, v: w.shape == (16, 48),
    all_negative=lambda w, m, v: w.size > 1 and bool((w < 0).all()),
    huge_weights=lambda w, m, v: bool(np.abs(w).max() > 1e20),
    tiny_factor=lambda w, m, v: bool(m.diagonal().max() < 1e-10),
)
wrong(
    "gptq.hessian",
    dead_channel=lambda x: x.shape[1] > 1 and bool((x == 0).all(axis=0).any()) and bool(x.any()),
    nothing=lambda x: not x.any(),
    equal_channels=lambda x: x.shape[1] > 1 and len(x) > 1 and bool((x[:, 0] == x[:, 1]).all()) and bool(x.any()),
    equal_tokens=lambda x: len(x) > 1 and bool((x == x[:1]).all()),
    all_positive=lambda x: x.size > 4 and bool((x > 0).all()),
    huge=lambda x: bool(np.abs(x).max() > 1e15),
    tokens_64_of_32=lambda x: x.shape == (64, 32),
    tokens_512=lambda x: len(x) == 512,
    channels_256=lambda x: x.shape[1] == 256,
)
wrong(
    "gptq.factor",
    diagonal=lambda h: len(h) > 1 and not np.triu(h, 1).any(),
    identity=lambda h: len(h) > 1 and np.array_equal(h, np.eye(len(h))),
    equal_beside=lambda h: len(h) > 2 and bool((h[np.triu_indices(len(h), 1)] == h[0, 1]).all()) and h[0, 1] != 0,
    dead_input=lambda h: len(h) > 2 and bool(((h != 0).sum(axis=1) == 1).any()) and bool(np.triu(h, 1).any()),
    pivots_far_apart=lambda h: h.diagonal().max() / h.diagonal().min() > 1e12,
    huge=lambda h: bool(h.max() > 1e20),
    tiny=lambda h: bool(h.max() < 1e-20),
    rows_256=lambda h: len(h) == 256,
)

# **Real zeros.**

wrong(
    "hqq.dequantize hqq.qgemv",
    **{
        "columns_32_groups_64": lambda *a: a[-1].columns == 32 and a[-1].group_size == 64,
        "columns_64_groups_16": lambda *a: a[-1].columns == 64 and a[-1].group_size == 16,
        "columns_16_groups_128": lambda *a: a[-1].columns == 16 and a[-1].group_size == 128,
        "zeros_below_codes": lambda *a: bool((numbers(a[-1].zeros) < -1.5).any()),
        "zeros_above_codes": lambda *a: bool((numbers(a[-1].zeros) > 2 ** a[-1].bits).any()),
        "zeros_far_off": lambda *a: bool((np.abs(numbers(a[-1].zeros)) > 1000).any()),
        "zeros_all_equal": lambda *a: a[-1].groups > 1 and np.ptp(numbers(a[-1].zeros)) == 0,
        "scales_all_equal": lambda *a: a[-1].groups > 2 and np.ptp(numbers(a[-1].scales)) == 0,
        "zeros_are_codes": lambda *a: (
            a[-1].groups > 2
            and bool((numbers(a[-1].zeros) == np.rint(numbers(a[-1].zeros))).all())
            and bool((numbers(a[-1].zeros) >= 1).all())
        ),
        "square": lambda *a: a[-1].rows == a[-1].columns == 32,
        "axis_0_groups_32_of_2_bits": lambda *a: a[-1].axis == 0 and a[-1].group_size == 32 and a[-1].bits == 2,
        "one_group": lambda *a: a[-1].groups == 1,
        "scales_apart": lambda *a: bool(numbers(a[-1].scales).max() > 1e6 * numbers(a[-1].scales).min()),
    },
)
wrong(
    "hqq.codes",
    zeros_far_below=lambda w, s, z, bits: bool((z < -10).any()),
    zeros_far_above=lambda w, s, z, bits: bool((z > 2**bits + 10).any()),
    equal_weights=lambda w, s, z, bits: w.size > 1 and np.ptp(w) == 0,
    zero_weights=lambda w, s, z, bits: w.size > 1 and not w.any(),
    equal_scales=lambda w, s, z, bits: len(s) > 2 and np.ptp(s) == 0 and s[0] != 1,
    groups_32_of_64=lambda w, s, z, bits: w.shape == (64, 32),
    groups_of_64_at_3_bits=lambda w, s, z, bits: len(w) == 64 and w.shape[1] == 8 and bits == 3,
)
wrong(
    "hqq.step",
    zeros_far_off=lambda w, q, s, z, p, beta: bool((np.abs(z) > 300).any()),
    equal_weights=lambda w, q, s, z, p, beta: w.size > 1 and np.ptp(w) == 0,
    equal_codes=lambda w, q, s, z, p, beta: len(q) > 1 and q.shape[1] > 1 and bool((np.ptp(q, axis=0) == 0).all()),
    no_error=lambda w, q, s, z, p, beta: w.size > 1 and bool((w == s * (q - z)).all()),
    groups_32_of_64=lambda w, q, s, z, p, beta: w.shape == (64, 32),
    groups_of_16=lambda w, q, s, z, p, beta: w.shape == (16, 16),
    linear_norm_far=lambda w, q, s, z, p, beta: p == 1 and beta > 50,
)

# **Block Floating Point.**

wrong(
    "bfp.cast",
    block_16_mantissa_16=lambda x, f: f.block == 16 and f.mantissa == 16,
    rows_8=lambda x, f: len(x) == 8,
    rows_16=lambda x, f: len(x) == 16,
    block_8_mantissa_8=lambda x, f: f.block == 8 and f.mantissa == 8,
    mantissa_16=lambda x, f: f.mantissa == 16,
    mantissa_24=lambda x, f: f.mantissa == 24,
    block_2_mantissa_3=lambda x, f: f.block == 2 and f.mantissa == 3,
    exponent_9=lambda x, f: f.exponent == 9,
    exponent_1=lambda x, f: f.exponent == 1,
    columns_256_of_64=lambda x, f: x.shape[1] == 256 and f.block == 64,
    equal_block=lambda x, f: (
        x.shape[1] >= f.block > 2 and bool((np.ptp(x[:, : f.block], axis=1) == 0).any() and x.all())
    ),
    only_the_last_counts=lambda x, f: f.block > 2 and x.shape[1] == f.block and not x[0, :-1].any() and x[0, -1] != 0,
    all_negative=lambda x, f: x.size > 4 and bool((x < 0).all()),
    far_apart=lambda x, f: (
        f.block > 1
        and bool(
            (np.abs(x[:, : f.block]).max(1) > 2.0**60 * np.where(x == 0, 1e38, np.abs(x))[:, : f.block].min(1)).any()
        )
    ),
)
wrong(
    "bfp.decode",
    mantissa_9=lambda b: b.format.mantissa == 9,
    mantissa_16=lambda b: b.format.mantissa == 16,
    mantissa_17=lambda b: b.format.mantissa == 17,
    block_16=lambda b: b.format.block == 16 and b.format.mantissa == 8,
    rows_16=lambda b: len(b.mantissas) == 16,
    exponent_7=lambda b: b.format.exponent == 7,
    equal_exponents=lambda b: b.exponents.shape[1] > 1 and np.ptp(b.exponents) == 0,
    zero_mantissas=lambda b: not b.mantissas.any(),
)
wrong(
    "bfp.store bfp.load",
    mantissa_6=lambda b: b.format.mantissa == 6,
    mantissa_7=lambda b: b.format.mantissa == 7,
    mantissa_16=lambda b: b.format.mantissa == 16,
    block_16_mantissa_8=lambda b: b.format.block == 16 and b.format.mantissa == 8,
    rows_8=lambda b: len(b.exponents) == 8,
    columns_96=lambda b: b.columns == 96,
)
wrong(
    "bfp.dot",
    block_64_mantissa_8=lambda a, b: a.format.block == 64 and a.format.mantissa == b.format.mantissa == 8,
    block_16_mantissa_8=lambda a, b: a.format.block == 16 and a.format.mantissa == b.format.mantissa == 8,
    block_64_bfp16_by_bfp12=lambda a, b: (a.format.block, a.format.mantissa, b.format.mantissa) == (64, 8, 4),
    block_16_mantissa_9=lambda a, b: a.format.block == 16 and a.format.mantissa == 9,
    rows_8_by_8=lambda a, b: len(a.mantissas) == 8 and len(b.mantissas) == 8,
    rows_16_by_16=lambda a, b: len(a.mantissas) == 16 and len(b.mantissas) == 16,
    one_by_64=lambda a, b: len(a.mantissas) == 1 and len(b.mantissas) == 64,
    columns_96_of_32=lambda a, b: a.columns == 96 and a.format.block == 32,
    a_against_itself=lambda a, b: np.array_equal(a.mantissas, b.mantissas) and a.mantissas.size > 2,
)
wrong(
    "bfp.total",
    rows_over_16=lambda s: len(s.sums) > 16 and s.sums.shape[1] > 2,
    rows_32=lambda s: len(s.sums) == 32,
    columns_64=lambda s: s.sums.shape[1] == 64,
    blocks_16=lambda s: s.sums.shape[2] == 16,
    blocks_33=lambda s: s.sums.shape[2] == 33,
    equal_exponents=lambda s: s.sums.shape[2] > 1 and np.ptp(s.exponents) == 0 and s.exponents.flat[0] == 0,
    zero_sums=lambda s: not s.sums.any(),
    falling_exponents=lambda s: s.sums.shape[2] > 3 and bool((np.diff(s.exponents[0, 0]) < 0).all()),
)

# **Codes.**


def quantised(condition: Callable[[Array, int, int, str, str], bool]) -> When:
    def when(
        weights: Array, *, bits: int, group_size: int, convention: str = "minimum", scale_dtype: str = "float32"
    ) -> bool:
        return condition(weights, bits, group_size, convention, scale_dtype)

    return when


def ranges(w: Array, g: int, convention: str) -> tuple[Array, Array]:
    starts = range(0, len(w), g)
    low, high = np.minimum.reduceat(w, starts, axis=0), np.maximum.reduceat(w, starts, axis=0)
    return (np.minimum(low, 0), np.maximum(high, 0)) if convention == "zero_point" else (low, high)


def scale_of(w: Array, b: int, g: int, convention: str, dtype: str) -> Array:
    low, high = ranges(w, g, convention)
    with np.errstate(all="ignore"):
        return ((high - low) / np.float32(2**b - 1)).astype(dtype)


wrong(
    "affine.quantize",
    half_scale_overflows_nearly=quantised(
        lambda w, b, g, c, d: d == "float16" and bool((scale_of(w, b, g, c, d) > 6e4).any())
    ),
    half_scale_vanishes=quantised(
        lambda w, b, g, c, d: (
            d == "float16" and bool(((scale_of(w, b, g, c, d) == 0) & (np.ptp(ranges(w, g, c), 0) > 0)).any())
        )
    ),
    half_scale_subnormal=quantised(
        lambda w, b, g, c, d: (
            d == "float16" and bool(((s := scale_of(w, b, g, c, d)) > 0).any() and (s[s > 0] < 2e-5).any())
        )
    ),
    scale_vanishes=quantised(
        lambda w, b, g, c, d: (
            d == "float32" and bool(((scale_of(w, b, g, c, d) == 0) & (np.ptp(ranges(w, g, c), 0) > 0)).any())
        )
    ),
    scale_near_overflow=quantised(lambda w, b, g, c, d: bool((scale_of(w, b, g, c, "float32") > 1e36).any())),
    greatest_is_zero=quantised(
        lambda w, b, g, c, d: c == "minimum" and bool((w.max(0) == 0).any() and (w.min(0)[w.max(0) == 0] < 0).any())
    ),
    greatest_is_zero_everywhere=quantised(
        lambda w, b, g, c, d: g > 1 and bool((ranges(w, g, "minimum")[1] == 0).all() and (w < 0).any())
    ),
    least_is_zero_everywhere=quantised(
        lambda w, b, g, c, d: g > 1 and bool((ranges(w, g, "minimum")[0] == 0).all() and (w > 0).any())
    ),
    symmetric_range=quantised(lambda w, b, g, c, d: g > 1 and bool((np.add(*ranges(w, g, c)) == 0).all() and w.any())),
    minimum_overflows_half=quantised(lambda w, b, g, c, d: d == "float16" and bool(np.abs(w).max() > 6e4)),
    one_row_outlier=quantised(
        lambda w, b, g, c, d: len(w) > 4 and bool(np.abs(w).max() > 1e5 * np.median(np.abs(w)) > 0)
    ),
    falling=quantised(lambda w, b, g, c, d: len(w) > 4 and bool((np.diff(w, axis=0) < 0).all())),
    equal_rows=quantised(
        lambda w, b, g, c, d: w.shape[1] > 3 and bool((np.ptp(w, axis=1) == 0).all() and np.ptp(w) > 0)
    ),
    columns_48_groups_16_bits_4=quantised(lambda w, b, g, c, d: w.shape[1] == 48 and g == 16 and b == 4),
    columns_64_groups_128=quantised(lambda w, b, g, c, d: w.shape[1] == 64 and g == 128),
    groups_256=quantised(lambda w, b, g, c, d: g == 256),
    half_columns_32_zero_points=quantised(
        lambda w, b, g, c, d: w.shape[1] == 32 and c == "zero_point" and d == "float16"
    ),
)
wrong(
    "affine.dequantize linear.qgemv linear.qgemm",
    **{
        "columns_64_groups_64": lambda *a: a[-1].columns == 64 and a[-1].group_size == 64,
        "columns_32_groups_128_bits_3": lambda *a: (a[-1].columns, a[-1].group_size, a[-1].bits) == (32, 128, 3),
        "columns_128_groups_32_half": lambda *a: (
            (a[-1].columns, a[-1].group_size, a[-1].scales.itemsize) == (128, 32, 2)
        ),
        "groups_256": lambda *a: a[-1].group_size == 256,
        "groups_96_bits_4": lambda *a: a[-1].group_size == 96 and a[-1].bits == 4,
        "rows_512_columns_512": lambda *a: a[-1].rows == 512 and a[-1].columns == 512,
        "rows_256": lambda *a: a[-1].rows == 256 and a[-1].columns % 64 == 0,
        "groups_16_in_number": lambda *a: a[-1].groups == 16,
        "groups_64_in_number": lambda *a: a[-1].groups == 64,
        "scales_all_equal": lambda *a: a[-1].scales.size > 2 and np.ptp(a[-1].scales) == 0,
        "zeros_all_top": lambda *a: (
            a[-1].convention == "zero_point" and bool((a[-1].zeros == 2 ** a[-1].bits - 1).all())
        ),
        "zeros_all_zero": lambda *a: not a[-1].zeros.any(),
        "no_codes": lambda *a: not a[-1].words.any(),
        "top_codes": lambda *a: a[-1].bits != 3 and bool((a[-1].words == 0xFFFFFFFF).all()),
        "minima_positive": lambda *a: a[-1].convention == "minimum" and bool((a[-1].zeros > 0).all()),
        "scales_huge": lambda *a: bool(a[-1].scales.max() > 1e30),
    },
)
wrong(
    "linear.qgemm",
    vectors_16_columns_64=lambda x, m: len(x) == 16 and m.columns == 64,
    vectors_64=lambda x, m: len(x) == 64 and m.columns % 16 == 0,
    vectors_32_bits_3=lambda x, m: len(x) == 32 and m.bits == 3,
    vectors_8_groups_32=lambda x, m: len(x) == 8 and m.group_size == 32 and m.columns == 128,
    vectors_256=lambda x, m: len(x) == 256,
    equal_rows=lambda x, m: len(x) > 2 and bool((x == x[:1]).all()) and bool(x.all()),
)
wrong(
    "linear.qgemv",
    equal_x=lambda x, m: len(x) > 3 and np.ptp(x) == 0 and x[0] != 0,
    positive_x=lambda x, m: len(x) > 8 and bool((x > 0).all()),
    x_of_ones=lambda x, m: len(x) > 3 and bool((x == 1).all()),
    half_of_x_zero=lambda x, m: len(x) > 8 and not x[len(x) // 2 :].any() and bool(x[: len(x) // 2].all()),
)
wrong(
    "linear.qgemm_bfp",
    block_16_groups_16=lambda x, m: x.format.block == 16 and m.group_size == 16 and m.columns == 64,
    block_32_groups_64_bits_3=lambda x, m: x.format.block == 32 and m.group_size == 64 and m.bits == 3,
    block_64_columns_64=lambda x, m: x.format.block == 64 and m.columns == 64,
    block_8=lambda x, m: x.format.block == 8,
    mantissa_7=lambda x, m: x.format.mantissa == 7,
    mantissa_16=lambda x, m: x.format.mantissa == 16,
    block_16_mantissa_4=lambda x, m: x.format.block == 16 and x.format.mantissa == 4,
    rows_16=lambda x, m: x.rows == 16,
    rows_64=lambda x, m: x.rows == 64,
)
wrong(
    "packing.pack",
    units_8_columns_64=lambda q, bits: q.shape == ({2: 16, 3: 32, 4: 8, 8: 4}[bits] * 8, 64),
    columns_128_bits_3=lambda q, bits: q.shape[1] == 128 and bits == 3,
    columns_48=lambda q, bits: q.shape[1] == 48 and bits == 2,
    rows_512=lambda q, bits: len(q) == 512,
    equal_codes=lambda q, bits: q.size > 8 and np.ptp(q) == 0 and q.flat[0] == 2**bits - 1,
    no_codes=lambda q, bits: not q.any(),
)
wrong(
    "packing.unpack",
    columns_128_bits_3=lambda w, bits: w.shape[1] == 128 and bits == 3,
    words_of_ones=lambda w, bits: bool((w == 0xFFFFFFFF).all()),
    words_64=lambda w, bits: len(w) == 64,
    columns_64_words_16=lambda w, bits: w.shape == (16, 64),
)
