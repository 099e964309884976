"""Mistakes that were held out: written before any of them was tried, judged once; their names were added afterwards.

Each list was written after the diagnosis had been mended for the lists before it. The page on the kill matrix in the
docs says what came of each list when it was judged first.
"""

from functools import partial

from field.mistakes import BRAIN, HALF, Mistake
from lowbit.contract.ranges import Range

WIDE = Range(64)
INT8 = {"format": "fp8-channel", "activations": "int8-token", "result": "float32"}
MORE_KERNELS: dict[tuple[str, str], tuple[str, dict[str, object]]] = {
    ("more_numpy.py", "gptq_v2"): ("linear.gemm", {"format": "gptq-v2", "bits": 4, **HALF}),
    ("more_numpy.py", "awq_factored"): ("linear.gemm", {"format": "awq-gemm", **HALF}),
    ("more_numpy.py", "q4_0"): ("linear.gemm", {"format": "q4_0", **HALF}),
    ("more_numpy.py", "q6_k"): ("linear.gemm", {"format": "q6_k", **BRAIN}),
    ("more_numpy.py", "nf4"): ("linear.gemm", {"format": "nf4", **BRAIN}),
    ("more_numpy.py", "nvfp4"): ("linear.gemm", {"format": "nvfp4", **HALF}),
    ("more_numpy.py", "hqq"): ("linear.gemm", {"format": "hqq-axis1", "bits": 4, **HALF}),
    ("more_numpy.py", "fp8_int8"): ("linear.gemm_cast", dict(INT8)),
    ("more_numpy.py", "q6_k_q8_k"): (
        "linear.gemm_cast",
        {"format": "q6_k", "activations": "q8_k", "result": "float32"},
    ),
    ("torch_kernels.py", "gptq"): ("linear.gemm", {"format": "gptq-v1", "bits": 4, **BRAIN}),
    ("torch_kernels.py", "awq"): ("linear.gemm", {"format": "awq-gemm", **HALF}),
    ("torch_kernels.py", "fp8_block"): ("linear.gemm", {"format": "fp8-block", **HALF}),
    ("triton_kernels.py", "awq"): ("linear.gemm", {"format": "awq-gemm", **HALF, "columns": WIDE}),
    ("triton_kernels.py", "fp8_channel"): ("linear.gemm", {"format": "fp8-channel", **HALF, "columns": WIDE}),
    ("kernels.rs", "fp8_channel"): ("linear.gemm", {"format": "fp8-channel", **BRAIN}),
}
"""What kernels are certified for that `KERNELS` lacks, or that are certified for other types."""


def made(file: str, kernel: str, what: str, old: str, new: str, *names: str) -> Mistake:
    return Mistake(file, kernel, what, old, new, names)


numpy, more = partial(made, "numpy_kernels.py"), partial(made, "more_numpy.py")
torch, triton = partial(made, "torch_kernels.py"), partial(made, "triton_kernels.py")
numba, cpp, rust = partial(made, "numba_kernels.py"), partial(made, "kernels.cpp"), partial(made, "kernels.rs")

SECOND: tuple[Mistake, ...] = (
    torch("gptq", "stored zero not raised by one", "15) + 1\n", "15)\n", "stored-zero-one-too-low"),
    torch(
        "gptq",
        "zeros of a word along groups",
        "zeros.reshape(scales.shape)",
        "zeros.transpose(1, 2).reshape(scales.shape)",
        "stored-zeros-in-planes",
    ),
    torch(
        "gptq",
        "difference in bytes",
        "(weight - zeros[g_idx.long()])",
        "(weight - zeros[g_idx.long()]).to(torch.uint8)",
        "stored-code-less-zero-wraps-in-bytes",
    ),
    more(
        "gptq_v2", "zero raised by one as in v1", "zeros = (qzeros", "zeros = 1 + (qzeros", "stored-zero-one-too-high"
    ),
    more(
        "gptq_v2",
        "groups of 128 rows",
        "scale, zero =",
        "g_idx = np.minimum(np.arange(len(g_idx)) // 128, len(scales) - 1)\n    scale, zero =",
        "stored-index-of-another-size",
    ),
    cpp(
        "gptq",
        "zeros shifted by the place of the row",
        "4 * (n % 8)",
        "4 * (k % 8)",
        "stored-zero-at-the-place-of-the-other-axis",
    ),
    cpp("gptq", "codes masked with 31", "(k % 8) & 15", "(k % 8) & 31", "stored-codes-not-masked"),
    numpy(
        "gptq",
        "x sorted by groups, codes not",
        "y = x.astype",
        "y = x[..., np.argsort(g_idx, kind='stable')].astype",
        "stored-rows-permuted",
    ),
    numpy(
        "gptq_factored",
        "zeros for the first group only",
        "total * zeros",
        "(group == 0) * total * zeros",
        "stored-groups-past-1-dropped-for-zeros",
    ),
    numpy(
        "gptq_factored",
        "last group overwrites the sum",
        "y += scales",
        "y = scales",
        "stored-groups-all-but-last-dropped",
    ),
    numpy("gptq", "zero clipped to 15", "zeros[g_idx])\n", "np.minimum(zeros, 15)[g_idx])\n", "stored-zero-clipped"),
    more(
        "awq_factored",
        "last row of each group left out",
        "(g + 1) * group_size)",
        "(g + 1) * group_size - 1)",
        "stored-rows-of-runs-last-dropped",
    ),
    more("awq_factored", "zero of the first group", "zeros[g] * total", "zeros[0] * total", "stored-zero-of-the-first"),
    torch(
        "awq",
        "zeros left in the order of words",
        "zeros = (qzeros[:, :, None] >> shifts[None, None] & 15).reshape(len(qzeros), -1)[:, reverse]",
        "zeros = (qzeros[:, :, None] >> shifts[None, None] & 15).reshape(len(qzeros), -1)",
        "stored-zeros-in-another-order",
    ),
    torch(
        "awq",
        "scales repeated as a whole",
        "scales.float().repeat_interleave(group_size, dim=0)",
        "scales.float().repeat(group_size, 1)",
        "stored-scale-interleaved",
    ),
    torch("awq", "scale before the zero", "(codes - zero) * scale", "codes * scale - zero", "stored-zero-not-scaled"),
    triton(
        "awq",
        "group of the first row of a tile",
        "group = k // group_size",
        "group = start // group_size + 0 * k",
        "stored-scale-and-zero-of-the-first-of-512-rows",
    ),
    triton(
        "awq",
        "scale of the word",
        "group[:, None] * columns + n[None, :], mask",
        "group[:, None] * columns + n[None, :] // 8, mask",
        "stored-scale-divided-by-8-along-columns",
    ),
    triton("awq", "rows of x one N apart", "x + t * rows + k", "x + t * columns + k", "x-of-another-stride"),
    cpp("awq", "scales read as bfloat16", "xk * (half(scales", "xk * (brain(scales", "stored-scale-read-as-bfloat16"),
    cpp(
        "awq",
        "last word left out",
        "word < N / 8; word++",
        "word < N / 8 - 1; word++",
        "result-last-8-dropped-along-axis-1",
    ),
    numpy(
        "awq",
        "scale and zero of the next group",
        "group = np.arange(len(codes)) // group_size",
        "group = np.minimum(np.arange(len(codes)) // group_size + 1, len(scales) - 1)",
        "stored-scale-and-zero-next-for-each-along-groups",
    ),
    numpy(
        "q4_k",
        "dmin without its sign",
        "return codes, d * scales, dmin",
        "return codes, d * scales, np.abs(dmin)",
        "stored-scale-sign-lost",
    ),
    numpy(
        "q4_k", "codes begin a byte early", "records[..., 16:]", "records[..., 15:143]", "stored-field-begins-elsewhere"
    ),
    numpy(
        "q4_k",
        "late scales read as bytes",
        "(packed[..., 8:12] & 15) | (packed[..., 0:4] >> 6 << 4)",
        "packed[..., 4:8] & 63",
        "stored-scale-packed-otherwise",
    ),
    numpy(
        "q4_k",
        "high bits of late minima two places low",
        "(packed[..., 4:8] >> 6 << 4)",
        "(packed[..., 4:8] >> 6 << 2)",
        "stored-scale-packed-otherwise",
    ),
    numba(
        "q4_k_q8_k",
        "high bits of minima from the scales",
        "(scales[j] >> 6)",
        "(scales[j - 4] >> 6)",
        "stored-high-bits-of-scales",
    ),
    numba(
        "q4_k_q8_k",
        "codes of four runs only",
        "32 * (j // 2) + i",
        "32 * (j % 4) + i",
        "stored-runs-of-codes-bytes-modulo",
    ),
    numba(
        "q4_k_q8_k",
        "sums of other halves",
        "np.int32(sums[t, b, 2 * j + 1])",
        "np.int32(sums[t, b, j + 8])",
        "x-one-sum-of-two-halves-interleaved",
        "x-sums-mixed",
    ),
    cpp(
        "q4_k_q8_k",
        "minima without the scale of x",
        "- scale_x * dmin * minima",
        "- dmin * minima",
        "x-scale-taken-as-1",
    ),
    cpp(
        "q4_k_q8_k",
        "codes of x of the first run",
        "q[32 * j + i]",
        "q[i]",
        "x-codes-modulo-32-along-places",
        "x-codes-modulo-32-in-runs",
    ),
    numpy(
        "q4_k_q8_k",
        "scale of x missing",
        "(d[t] * (scales * dots - minima * sums[t]))",
        "(scales * dots - minima * sums[t])",
        "x-scale-forgotten",
    ),
    torch(
        "mxfp4",
        "exponents signed",
        "scale.view(torch.uint8).to(torch.int32) - 127",
        "scale.view(torch.int8).to(torch.int32)",
        "stored-scale-exponents-read-otherwise",
    ),
    torch(
        "mxfp4",
        "weights in float16",
        "torch.ldexp(blocks, exponent[..., None])",
        "torch.ldexp(blocks, exponent[..., None]).half().float()",
    ),
    rust("mxfp4", "sign of odd elements lost", "e2m1(octet >> 4)", "e2m1(octet >> 4 & 7)", "stored-codes-loses-a-bit"),
    rust(
        "mxfp4", "subnormal element halved", "[0.0, 0.5, 1.0", "[0.0, 0.25, 1.0", "stored-codes-read-as-other-numbers"
    ),
    rust("mxfp4", "scale with the byte 0 as 0", "2f32.powi(-127) }", "0.0 }", "stored-least-power-of-two-as-zero"),
    cpp(
        "mxfp4",
        "x not stepped by two",
        "const long k = 32 * b + 2 * (i + j)",
        "const long k = 32 * b + (i + j)",
        "x-not-stepped-by-2-in-runs",
    ),
    cpp(
        "mxfp4",
        "scales read column by column",
        "scale[n * (K / 32) + b]",
        "scale[b * N + n]",
        "stored-scales-transposed",
    ),
    numpy(
        "mxfp4",
        "elements in two halves",
        "np.stack([FP4[elements & 15], FP4[elements >> 4]], axis=-1)",
        "np.stack([FP4[elements & 15], FP4[elements >> 4]], axis=1)",
        "stored-codes-in-planes",
    ),
    numpy(
        "fp8_channel",
        "scale applied twice",
        "sums * weight_scale[:, 0]",
        "sums * weight_scale[:, 0] ** 2",
        "stored-scale-squared",
    ),
    torch(
        "fp8_block",
        "blocks interleaved",
        "weight_scale_inv.repeat_interleave(128, 0)[:n]",
        "weight_scale_inv.repeat(128, 1)[:n]",
        "stored-scale-other-numbers",
    ),
    cpp(
        "fp8_block",
        "scales read column by column",
        "scales[n / 128 * across + b]",
        "scales[b * ((N + 127) / 128) + n / 128]",
        "stored-scales-transposed",
    ),
    triton(
        "fp8_channel", "subnormals half as large", "0.001953125", "0.0009765625", "stored-codes-read-as-other-numbers"
    ),
    triton(
        "fp8_channel",
        "largest exponent as special",
        "exponent > 0, normal",
        "(exponent > 0) & (exponent < 15), normal",
        "stored-codes-read-as-other-numbers",
    ),
    rust(
        "fp8_channel",
        "result cut to bfloat16",
        "to_brain(sum * *scale.add(j))",
        "((sum * *scale.add(j)).to_bits() >> 16) as u16",
        "result-in-bfloat16-cut",
    ),
    rust(
        "fp8_channel",
        "x one place further",
        "row.iter().zip(codes)",
        "row.iter().skip(1).zip(codes)",
        "x-moved-earlier-along-axis-1",
    ),
    more("fp8_int8", "scale of x missing", "sums * x_scale * weight_scale", "sums * weight_scale", "x-scale-forgotten"),
    more(
        "fp8_int8", "codes of x unsigned", "x_codes.astype", "x_codes.view(np.uint8).astype", "x-sign-of-codes-mistaken"
    ),
    more(
        "q4_0", "halves exchanged", "np.concatenate([low, high]", "np.concatenate([high, low]", "stored-nibbles-swapped"
    ),
    numba(
        "q4_0_q8_0",
        "first half of x twice",
        "q[t, b, i + 16]",
        "q[t, b, i]",
        "x-codes-modulo-16-along-places",
        "x-modulo-16-in-runs",
    ),
    rust("q4_0_q8_0", "scale of weights missing", "sum += d_x * d * dot", "sum += d_x * dot", "stored-scale-forgotten"),
    rust(
        "q4_0_q8_0",
        "second half of x unsigned",
        "p[18 + e] as i8 as i32",
        "p[18 + e] as i32",
        "x-codes-wrapped-in-part",
    ),
    more(
        "q6_k",
        "high bits of the third plane from the second",
        "(qh >> 4 & 3)",
        "(qh >> 2 & 3)",
        "stored-codes-bits-for-others",
    ),
    more(
        "q6_k",
        "scales unsigned",
        "records[..., 192:208].view(np.int8)",
        "records[..., 192:208]",
        "stored-scale-sign-mistaken",
    ),
    more("q6_k_q8_k", "16 subtracted", "- 32 * sums[t]", "- 16 * sums[t]", "stored-zero-halved"),
    more(
        "nf4",
        "low half first",
        "[weight[:, 0] >> 4, weight[:, 0] & 15]",
        "[weight[:, 0] & 15, weight[:, 0] >> 4]",
        "stored-nibbles-swapped",
    ),
    more(
        "nf4",
        "blocks of 64",
        "np.repeat(absmax, blocksize)[: len(codes)]",
        "absmax[np.minimum(np.arange(len(codes)) // 64, len(absmax) - 1)]",
        "stored-scale-of-blocks-of-64",
    ),
    more(
        "nvfp4",
        "divided by the global scale",
        "scale * weight_scale_2[0]",
        "scale / weight_scale_2[0]",
        "stored-scale-inverted",
    ),
    more(
        "nvfp4",
        "scales of blocks read as powers of two",
        "weight_scale.astype",
        "weight_scale.view('float8_e8m0fnu').astype",
    ),
    more(
        "hqq",
        "scale before the zero",
        "(codes - zero.astype(np.float32)) * scale.astype(np.float32)",
        "codes * scale.astype(np.float32) - zero.astype(np.float32)",
        "stored-zero-not-scaled",
    ),
    more("hqq", "halves exchanged", "[W_q >> 4, W_q & 15]", "[W_q & 15, W_q >> 4]", "stored-nibbles-swapped"),
)
