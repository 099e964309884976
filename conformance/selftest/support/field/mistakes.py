"""Mistakes as authors of such kernels make them: each is one change of the text of a kernel.

Each entry says which names of the diagnosis are right for it. A mistake without a name is one that no defect of the
bank describes; then only the kill counts.
"""

from dataclasses import dataclass

HALF = {"activations": "float16", "result": "float16"}
BRAIN = {"activations": "bfloat16", "result": "bfloat16"}
KERNELS: dict[str, tuple[str, dict[str, object]]] = {
    "gptq": ("linear.gemm", {"format": "gptq-v1", "bits": 4, **HALF}),
    "gptq_factored": ("linear.gemm", {"format": "gptq-v1", "bits": 4, **BRAIN}),
    "awq": ("linear.gemm", {"format": "awq-gemm", **BRAIN}),
    "q4_k": ("linear.gemm", {"format": "q4_k", **HALF}),
    "q4_k_q8_k": ("linear.gemm_cast", {"format": "q4_k", "activations": "q8_k", "result": "float32"}),
    "q4_0_q8_0": ("linear.gemm_cast", {"format": "q4_0", "activations": "q8_0", "result": "float32"}),
    "mxfp4": ("linear.gemm", {"format": "mxfp4", **BRAIN}),
    "fp8_channel": ("linear.gemm", {"format": "fp8-channel", **HALF}),
    "fp8_block": ("linear.gemm", {"format": "fp8-block", **BRAIN}),
}
"""What each kernel is certified for: its operation and limits."""


@dataclass(frozen=True)
class Mistake:
    """One change of a kernel.

    Attributes:
        file: of the kernel, in this folder.
        kernel: its name in `KERNELS`.
        what: the mistake, in a few words.
        old: a text that the source has once in the kernel's own part.
        new: what stands in its place.
        names: the right answers of the diagnosis.
    """

    file: str
    kernel: str
    what: str
    old: str
    new: str
    names: tuple[str, ...] = ()


def numpy(kernel: str, what: str, old: str, new: str, *names: str) -> Mistake:
    return Mistake("numpy_kernels.py", kernel, what, old, new, names)


def cpp(kernel: str, what: str, old: str, new: str, *names: str) -> Mistake:
    return Mistake("kernels.cpp", kernel, what, old, new, names)


MISTAKES = (
    numpy(
        "gptq",
        "act-order ignored",
        "[g_idx] * (codes - zeros[g_idx])",
        "[np.sort(g_idx)] * (codes - zeros[np.sort(g_idx)])",
        "stored-group-index-ignored",
    ),
    numpy(
        "gptq",
        "stored zero not raised by one",
        ".reshape(-1, columns) + 1",
        ".reshape(-1, columns)",
        "stored-zero-one-too-low",
    ),
    numpy(
        "gptq",
        "nibbles of a word in reverse",
        "np.arange(0, 32, 4, dtype",
        "np.arange(28, -4, -4, dtype",
        "stored-codes-and-zeros-in-reverse",
    ),
    numpy(
        "gptq",
        "codes of a word in reverse",
        "shifts[None, :, None]",
        "shifts[None, ::-1, None]",
        "stored-codes-in-reverse",
    ),
    numpy("gptq", "zero added", "(codes - zeros[g_idx])", "(codes + zeros[g_idx])", "stored-offset-subtracted"),
    numpy(
        "gptq", "zero wraps at 15", ".reshape(-1, columns) + 1", ".reshape(-1, columns) + 1 & 15", "stored-zero-wrapped"
    ),
    numpy(
        "gptq",
        "zeros unpacked along groups",
        "(qzeros[:, :, None] >> shifts)",
        "(qzeros[:, None] >> shifts[:, None])",
        "stored-zeros-in-planes",
    ),
    numpy(
        "gptq",
        "scale of the group before",
        "np.float32)[g_idx]",
        "np.float32)[g_idx - 1]",
        "stored-scale-of-the-neighbour",
    ),
    numpy(
        "gptq",
        "codes read as signed",
        "((qweight[:, None, :] >> shifts[None, :, None]) & 15)",
        "(((qweight[:, None, :] >> shifts[None, :, None]) & 15 ^ 8) - 8)",
        "stored-sign-of-codes-mistaken",
    ),
    numpy(
        "gptq",
        "sum in float16",
        "x.astype(np.float32) @ weights.astype(np.float32)",
        "(x[:, :, None] * weights.astype(np.float16)).cumsum(1, np.float16)[:, -1]",
        "sums-in-float16",
    ),
    numpy(
        "gptq_factored",
        "zeros applied to the sum of all of x",
        "wide[..., rows].sum",
        "wide.sum",
        "stored-zero-times-the-whole-sum",
    ),
    numpy(
        "gptq_factored",
        "zeros not scaled",
        "np.float32) * (part - total * zeros[group].astype(np.float32))",
        "np.float32) * part - total * zeros[group].astype(np.float32)",
        "stored-zero-not-scaled",
    ),
    numpy(
        "gptq_factored",
        "last group left out",
        "range(len(scales))",
        "range(max(1, len(scales) - 1))",
        "stored-last-group-left-out",
    ),
    numpy(
        "gptq_factored", "zero of the group before", "zeros[group]", "zeros[group - 1]", "stored-zero-of-the-neighbour"
    ),
    numpy(
        "awq",
        "columns of a word in order",
        "[0, 4, 1, 5, 2, 6, 3, 7]",
        "[0, 1, 2, 3, 4, 5, 6, 7]",
        "stored-codes-and-zeros-in-another-order",
    ),
    numpy(
        "awq",
        "order of columns inverted",
        "[0, 4, 1, 5, 2, 6, 3, 7]",
        "[0, 2, 4, 6, 1, 3, 5, 7]",
        "stored-codes-and-zeros-in-another-order",
    ),
    numpy(
        "awq",
        "zeros in order",
        "(qzeros[:, :, None] >> (4 * places))",
        "(qzeros[:, :, None] >> (4 * np.sort(places)))",
        "stored-zeros-in-another-order",
    ),
    numpy(
        "awq",
        "groups begin a row late",
        "np.arange(len(codes)) // group_size",
        "(np.arange(len(codes)) - 1).clip(0) // group_size",
        "stored-groups-one-row-late",
    ),
    numpy(
        "awq",
        "scale of the first group",
        "scales.astype(np.float32)[group]",
        "scales.astype(np.float32)[0 * group]",
        "stored-scale-of-the-first",
    ),
    numpy(
        "awq",
        "zero raised by one as in GPTQ",
        "(codes - zeros[group])",
        "(codes - zeros[group] - 1)",
        "stored-zero-one-too-high",
    ),
    numpy("awq", "groups interleaved", "// group_size", "% len(scales)", "stored-groups-interleaved"),
    numpy("q4_k", "minimum added", "* codes - minima", "* codes + minima", "stored-offset-subtracted"),
    numpy("q4_k", "minimum scaled by d", "dmin * minima", "d * minima", "stored-one-scale-for-both"),
    numpy(
        "q4_k",
        "high bits of late scales lost",
        "(packed[..., 8:12] & 15) | (packed[..., 0:4] >> 6 << 4)",
        "packed[..., 8:12] & 15",
        "stored-high-bits-of-scales",
    ),
    numpy(
        "q4_k", "nibbles swapped", "[chunks & 15, chunks >> 4]", "[chunks >> 4, chunks & 15]", "stored-nibbles-swapped"
    ),
    numpy(
        "q4_k",
        "nibbles interleaved",
        "[chunks & 15, chunks >> 4], axis=-2",
        "[chunks & 15, chunks >> 4], axis=-1",
        "stored-nibbles-interleaved",
    ),
    numpy(
        "q4_k",
        "scales and minima exchanged",
        "return codes, d * scales, dmin * minima",
        "return codes, d * minima, dmin * scales",
        "stored-scales-and-minima-exchanged",
    ),
    numpy("q4_k", "minimum forgotten", " - minima[..., None]", "", "stored-offset-forgotten"),
    numpy(
        "q4_k", "scale of the run before", "d * scales,", "d * np.roll(scales, 1, -1),", "stored-scale-of-the-neighbour"
    ),
    numpy(
        "q4_k_q8_k",
        "one of two sums of 16 codes",
        ".sum(axis=-1)\n    y = np.zeros",
        "[..., 0]\n    y = np.zeros",
        "stored-half-of-a-sum-missing",
    ),
    numpy("q4_k_q8_k", "codes of x unsigned", ".view(np.int8)", "", "x-sign-of-codes-mistaken"),
    numpy("q4_k_q8_k", "scale of the first block of x", "d[t] * (scales", "d[t][0] * (scales", "x-scale-of-the-first"),
    numpy(
        "q4_k_q8_k",
        "sum of 32 products in 16 bits",
        "(codes.astype(np.int32) * q[t]).sum(axis=-1)",
        "(codes.astype(np.int32) * q[t]).sum(axis=-1).astype(np.int16)",
        "stored-integer-sums-wrap",
    ),
    numpy("q4_0_q8_0", "8 not subtracted", ".astype(np.int32) - 8", ".astype(np.int32)", "stored-offset-forgotten"),
    numpy("q4_0_q8_0", "7 subtracted", "- 8", "- 7", "stored-zero-one-too-low"),
    numpy(
        "q4_0_q8_0",
        "nibbles interleaved",
        "np.concatenate([w[..., 2:] & 15, w[..., 2:] >> 4], axis=-1)",
        "np.stack([w[..., 2:] & 15, w[..., 2:] >> 4], -1).reshape(*w.shape[:2], 32)",
        "stored-nibbles-interleaved",
    ),
    numpy(
        "mxfp4",
        "nibbles swapped",
        "[FP4[elements & 15], FP4[elements >> 4]]",
        "[FP4[elements >> 4], FP4[elements & 15]]",
        "stored-nibbles-swapped",
    ),
    numpy("mxfp4", "bias of 128", "- 127", "- 128", "stored-numbers-halved"),
    numpy(
        "mxfp4",
        "sign lost",
        "FP4[elements & 15], FP4[elements >> 4]",
        "FP4[elements & 7], FP4[elements >> 4 & 7]",
        "stored-sign-of-codes-lost",
    ),
    numpy(
        "mxfp4",
        "largest element 8",
        "np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6,",
        "np.array([0, 0.5, 1, 1.5, 2, 3, 4, 8,",
        "stored-codes-read-as-other-numbers",
    ),
    numpy(
        "fp8_channel",
        "scale of the first output",
        "weight_scale[:, 0]",
        "weight_scale[0, 0]",
        "stored-scale-of-the-first",
    ),
    numpy(
        "fp8_channel",
        "divided by the scale",
        "sums * weight_scale",
        "sums / weight_scale",
        "stored-divided-by-the-scale",
    ),
    numpy(
        "fp8_block",
        "scale of the first block of a row",
        "np.repeat(np.repeat(weight_scale_inv, 128",
        "np.repeat(np.repeat(0 * weight_scale_inv + weight_scale_inv[:, :1], 128",
        "stored-scale-of-the-first",
    ),
    cpp(
        "gptq",
        "words read as if transposed",
        "qweight[k / 8 * N + n]",
        "qweight[n * (K / 8) + k / 8]",
        "stored-codes-transposed",
    ),
    cpp(
        "gptq",
        "last row left out",
        "k < K; k++) {\n                const long g = g_idx",
        "k < K - 1; k++) {\n                const long g = g_idx",
        "stored-last-1-rows-left-out",
        "x-last-dropped-along-axis-1",
    ),
    cpp(
        "awq",
        "result stored in the order of nibbles",
        "y[t * N + 8 * word + i]",
        "y[t * N + 8 * word + places[i]]",
        "stored-result-in-another-order",
    ),
    cpp(
        "awq",
        "rounding of float16 instead of bfloat16",
        "= store(sums[i], kind)",
        "= store(half(to_half(sums[i])), kind)",
        "result-in-float16",
    ),
    cpp(
        "q4_k_q8_k",
        "high bits of scales from the wrong byte",
        "(q[j - 4] >> 6)",
        "(q[j] >> 6)",
        "stored-high-bits-of-scales",
    ),
    cpp("q4_k_q8_k", "minimum added", "- scale_x * dmin", "+ scale_x * dmin", "stored-offset-subtracted"),
    cpp("mxfp4", "one of four sums left out", "+ (sums[2] + sums[3])", "+ sums[2]", "stored-one-row-in-4-left-out"),
    cpp("mxfp4", "low nibble twice", "FP4[octet >> 4]", "FP4[octet & 15]", "stored-one-nibble-twice"),
    cpp(
        "fp8_block",
        "subnormal numbers as zero",
        ": std::ldexp(1.0f * mantissa, -9)",
        ": 0.0f",
        "stored-subnormal-codes-lost",
    ),
    cpp("fp8_block", "only the last block counts", "sum += part", "sum = part", "stored-last-block-only"),
    cpp(
        "fp8_block",
        "x of the first vector",
        "x[t * K + k], kind) * e4m3",
        "x[k], kind) * e4m3",
        "result-first-for-all-along-axis-0",
    ),
)

HELD_OUT: tuple[Mistake, ...] = (
    numpy(
        "gptq",
        "zero of the neighbouring column",
        "zeros = ((qzeros[:, :, None] >> shifts) & 15).reshape(-1, columns) + 1",
        "zeros = np.roll(((qzeros[:, :, None] >> shifts) & 15).reshape(-1, columns) + 1, 1, axis=1)",
        "stored-zero-one-later-along-columns",
    ),
    numpy(
        "gptq",
        "scale of the first column",
        "scales.astype(np.float32)[g_idx]",
        "scales.astype(np.float32)[g_idx][:, :1]",
        "stored-scale-first-for-all-along-columns",
    ),
    numpy(
        "gptq",
        "codes of 4 bits masked with 7",
        "shifts[None, :, None]) & 15)",
        "shifts[None, :, None]) & 7)",
        "stored-high-bit-of-codes-lost",
    ),
    numpy(
        "gptq_factored",
        "zeros masked with 7",
        "(qzeros[:, :, None] >> shifts) & 15",
        "(qzeros[:, :, None] >> shifts) & 7",
        "stored-zero-loses-high-bits",
        "stored-zero-loses-a-bit",
    ),
    numpy(
        "gptq_factored",
        "first group left out",
        "for group in range(len(scales))",
        "for group in range(len(scales) > 1, len(scales))",
        "stored-groups-first-dropped",
    ),
    numpy("awq", "zero forgotten", "(codes - zeros[group])", "(codes)", "stored-offset-forgotten"),
    numpy(
        "awq",
        "half of the range instead of the zero",
        "(codes - zeros[group])",
        "(codes - 8)",
        "stored-zero-as-half-the-range",
    ),
    numpy(
        "awq", "result doubled", "return y.astype(x.dtype)", "return (2 * y).astype(x.dtype)", "stored-numbers-doubled"
    ),
    numpy(
        "awq",
        "columns reversed in a word",
        "[0, 4, 1, 5, 2, 6, 3, 7]",
        "[7, 3, 6, 2, 5, 1, 4, 0]",
        "stored-codes-and-zeros-in-reverse",
    ),
    numpy("q4_k", "scales of 5 bits", "packed[..., 0:4] & 63", "packed[..., 0:4] & 31", "stored-scale-loses-a-bit"),
    numpy(
        "q4_k",
        "minima of the run before",
        "dmin * minima\n",
        "dmin * np.roll(minima, 1, -1)\n",
        "stored-zero-of-the-neighbour",
    ),
    numpy(
        "q4_k",
        "d without its sign",
        "return codes, d * scales",
        "return codes, np.abs(d) * scales",
        "stored-scale-sign-lost",
    ),
    numpy("q4_k_q8_k", "minima added", "- minima * sums[t]", "+ minima * sums[t]", "stored-offset-subtracted"),
    numpy(
        "q4_0_q8_0",
        "codes signed",
        ".astype(np.int32) - 8",
        ".astype(np.int32)\n    codes = np.where(codes > 7, codes - 16, codes)",
        "stored-codes-in-twos-complement",
    ),
    numpy(
        "q4_0_q8_0",
        "scale of x of the block before",
        "(dots * scale_a[:, None]",
        "(dots * np.roll(scale_a, 1, -1)[:, None]",
        "x-scale-of-the-neighbour",
    ),
    numpy(
        "mxfp4",
        "scale of the next block",
        "np.repeat(exponents, 32, axis=1)",
        "np.repeat(np.roll(exponents, -1, 1), 32, axis=1)",
        "stored-scale-of-the-next",
    ),
    numpy(
        "fp8_channel",
        "weights read as e5m2",
        "weight.astype(np.float32)",
        "weight.view('float8_e5m2').astype(np.float32)",
        "stored-codes-read-as-float8_e5m2",
    ),
    cpp("gptq", "zeros of the first group", "qzeros[g * (N / 8)", "qzeros[0 * g * (N / 8)", "stored-zero-of-the-first"),
    cpp(
        "mxfp4",
        "sum begins with the second block",
        "for (long b = 0; b < K / 32",
        "for (long b = K > 32; b < K / 32",
        "stored-groups-first-dropped",
        "stored-runs-first-dropped",
    ),
    cpp("fp8_block", "exponent bias of 8", "exponent - 10)", "exponent - 11)", "stored-numbers-halved"),
)
"""The first list that was held out: written after the suite and the diagnosis had been mended for the list above, and
before any of these was tried; their right names were added afterwards."""
