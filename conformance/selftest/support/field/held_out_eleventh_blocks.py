"""Mistakes of the eleventh list in Q4_K, MXFP4 and FP8; see `held_out_eleventh`."""

from field.held_out_eighth import Planted
from field.held_out_eleventh import held

Q4_K_NUMPY = ("numpy_kernels.py", "q4_k")
Q4_K_TORCH, Q4_K_EIGHT = ("torch_blocks.py", "q4_k"), ("split_kernels.py", "q4_k_eight")
Q4_K_SUMS = ("tiles.cpp", "q4_k_sums")
Q4_K_NUMPY_Q8_K = ("numpy_kernels.py", "q4_k_q8_k")
Q4_K_RUST_Q8_K, Q4_K_WORDS = ("words.rs", "q4_k_q8_k"), ("strips.cpp", "q4_k_words")
Q8_K_CAST, Q8_0_CAST = ("cast_kernels.py", "q8_k"), ("split_kernels.py", "q8_0")
MXFP4_NUMPY, MXFP4_PAIRS = ("numpy_kernels.py", "mxfp4"), ("strips.cpp", "mxfp4_pairs")
MXFP4_BITS = ("vector_kernels.py", "mxfp4_bits")
MXFP4_COLUMNS, MXFP4_VECTOR = ("vector_kernels.py", "mxfp4_columns"), ("torch_groups.py", "mxfp4_vector")
MXFP4_STEPS, MXFP4_Q8_0 = ("tiles.cpp", "mxfp4_steps"), ("more.cpp", "mxfp4_q8_0")
MXFP4_CPP_INT8, MXFP4_NUMPY_INT8 = ("more.cpp", "mxfp4_int8"), ("split_kernels.py", "mxfp4_int8")
FP8_BLOCK_CPP = ("kernels.cpp", "fp8_block")
FP8_RUST, FP8_TILED = ("kernels.rs", "fp8_channel"), ("more.cpp", "fp8_tiled")
FP8_SHIFTED, FP8_STEPS = ("strips.cpp", "fp8_shifted"), ("tiles.cpp", "fp8_steps")
FP8_COLUMNS = ("torch_groups.py", "fp8_columns")
FP8_BLOCK_VECTOR, FP8_NUMPY_INT8 = ("vector_kernels.py", "fp8_block_vector"), ("more_numpy.py", "fp8_int8")
FP8_CPP_INT8, FP8_TORCH_INT8 = ("more.cpp", "fp8_block_int8"), ("torch_blocks.py", "fp8_block_int8")

ELEVENTH_Q4_K: tuple[Planted, ...] = (
    held(
        "11-q4_k-neighbours",
        "unpacking",
        Q4_K_SUMS,
        "the two codes of a byte are taken as neighbours along K",
        "octets[i] >> 4 * (j % 2) & 15",
        "octets[i / 2 + 16 * (j % 2)] >> 4 * (i % 2) & 15",
        "The two codes of a byte are taken to be neighbours: they are 32 rows apart.",
    ),
    held(
        "11-q4_k-exchanged",
        "unpacking",
        Q4_K_EIGHT,
        "the lower and the upper halves of bytes are exchanged",
        "(octets[:, b, step] & 15) @ runs[b, 2 * pair, quarter]\n"
        "            dots[..., 2 * pair + 1] += (octets[:, b, step] >> 4)",
        "(octets[:, b, step] >> 4) @ runs[b, 2 * pair, quarter]\n"
        "            dots[..., 2 * pair + 1] += (octets[:, b, step] & 15)",
        "The two codes of a byte are exchanged: the first run of a pair is in the lower halves.",
    ),
    held(
        "11-q4_k-short-scales",
        "unpacking",
        Q4_K_RUST_Q8_K,
        "the last four scales lose their upper two bits",
        "((packed[j + 4] & 15) | (packed[j - 4] >> 6 << 4),",
        "(packed[j + 4] & 15,",
        "The upper two bits of the scales of runs 4 to 7 are lost.",
    ),
    held(
        "11-q4_k-minima-bits",
        "zeros",
        Q4_K_TORCH,
        "the upper bits of the last four minima come from the bytes of the scales",
        "(third >> 4) | ((second >> 2) & 48)",
        "(third >> 4) | ((first >> 2) & 48)",
        "The upper two bits of the minima of runs 4 to 7 are those of the scales.",
    ),
    held(
        "11-q4_k-minima-added",
        "zeros",
        Q4_K_EIGHT,
        "minima are added",
        "d * scale * dots - dmin * minimum * totals",
        "d * scale * dots + dmin * minimum * totals",
        "Minima are added in place of being subtracted.",
    ),
    held(  # aprender's AVX2 kernels applied each scale to one half of both runs of a pair
        "11-q4_k-half-runs",
        "scales",
        Q4_K_WORDS,
        "the scales of a pair of runs are applied to the first and the second half of both",
        "scale[j] * (code * q[32 * j + i])",
        "scale[j / 2 * 2 + i / 16] * (code * q[32 * j + i])",
        "Each scale of a pair of runs covers a half of both runs, not the whole of its own.",
    ),
    held(
        "11-q4_k-d-dmin",
        "scales",
        Q4_K_NUMPY,
        "d and dmin are exchanged",
        "return codes, d * scales, dmin * minima",
        "return codes, dmin * scales, d * minima",
        "d and dmin of a block are exchanged.",
    ),
    held(  # llama.cpp's repacked product of experts took activations in Q8_K for Q8_0, whose scale is float16
        "11-q4_k-half-d",
        "scales",
        Q4_K_NUMPY_Q8_K,
        "the scale of Q8_K is read as float16",
        "d = np.ascontiguousarray(records[..., 0:4]).view(np.float32)",
        "d = np.ascontiguousarray(records[..., 0:2]).view(np.float16).astype(np.float32)",
        "The scale of a block of Q8_K is read as float16: it is float32.",
    ),
    held(
        "11-q4_k-sums-apart",
        "indexing",
        Q4_K_RUST_Q8_K,
        "run j meets the sums j and j + 8 of 16 activations",
        "for s in [2 * run, 2 * run + 1]",
        "for s in [run, run + 8]",
        "A minimum is multiplied by the sums of other runs: run j has the sums 2 j and 2 j + 1 of 16 activations.",
    ),
    held(  # 1bit-MONSTER indexed a tile without the term of the group, so that all groups read the first
        "11-q4_k-first-totals",
        "indexing",
        Q4_K_SUMS,
        "minima of all blocks meet the sums of x of the first block",
        "totals[8 * b + j]",
        "totals[j]",
        "Minima of all blocks are multiplied by the sums of x of the first block.",
    ),
    held(  # ik_llama.cpp's AVX2 kernels summed products in 16 bits, which overflowed
        "11-q4_k-short-dots",
        "arithmetic",
        Q4_K_RUST_Q8_K,
        "the sum of a run's products is kept in 16 bits",
        "products += scale * dot;",
        "products += scale * dot as i16 as i32;",
        "The integer sum of a run overflows 16 bits.",
    ),
    held(
        "11-q8_k-sign",
        "arithmetic",
        Q8_K_CAST,
        "the factor is positive, whatever the sign of the number of largest magnitude is",
        "factor = -quotient(np.float32(127), extreme)",
        "factor = quotient(np.float32(127), np.abs(extreme))",
        "The sign of the number of largest magnitude is ignored: that number becomes -127, with the scale's sign.",
    ),
)

ELEVENTH_MXFP4: tuple[Planted, ...] = (
    held(
        "11-mxfp4-flushed",
        "unpacking",
        MXFP4_BITS,
        "elements with the exponent 0 become 0",
        "size = np.where(exponent > 0, normal, mantissa * np.float32(0.5))",
        "size = np.where(exponent > 0, normal, np.float32(0))",
        "Subnormal elements become 0: 0.5 and -0.5 are lost.",
    ),
    held(
        "11-mxfp4-halves",
        "unpacking",
        MXFP4_COLUMNS,
        "16 bytes hold first the elements 0 to 15 and then 16 to 31, as in ggml",
        "codes = np.stack([octets & 15, octets >> 4], axis=-1).reshape(len(octets), -1, 32)",
        "octets = octets.reshape(len(octets), -1, 16)\n"
        "        codes = np.concatenate([octets & 15, octets >> 4], axis=-1)",
        "The two elements of a byte are taken to be 16 rows apart, as in ggml: they are neighbours.",
    ),
    held(
        "11-mxfp4-high-first",
        "unpacking",
        MXFP4_VECTOR,
        "the first element of a byte is taken from its upper half",
        "values[:, 0::2] = FP4[octets & 15]\n    values[:, 1::2] = FP4[octets >> 4]",
        "values[:, 0::2] = FP4[octets >> 4]\n    values[:, 1::2] = FP4[octets & 15]",
        "The two elements of a byte are exchanged: the first is in the lower half.",
    ),
    held(  # MLX multiplied by the scale's byte itself, in its branch for few columns
        "11-mxfp4-raw-scale",
        "scales",
        MXFP4_STEPS,
        "the byte of a scale is used as a number where fewer than four columns remain",
        "const float s = std::ldexp(1.0f, exponents[k / 32] - 127);",
        "const float s = count < 4 ? exponents[k / 32] : std::ldexp(1.0f, exponents[k / 32] - 127);",
        "The byte of a scale is used as the scale, in the columns after the last four: it is an exponent.",
    ),
    held(  # vLLM's scalar kernel for RDNA3 put the byte into the bits of float32
        "11-mxfp4-scale-of-0",
        "scales",
        MXFP4_VECTOR,
        "a scale whose byte is 0 becomes the number 0",
        "torch.ldexp(values.view(len(octets), -1, 32), exponent[:, :, None])",
        "values.view(len(octets), -1, 32) * (exponent + 127 << 23).view(torch.float32)[:, :, None]",
        "A scale whose byte is 0 gives 0 in place of 2 to the power of -127.",
    ),
    held(
        "11-mxfp4-no-half",
        "scales",
        MXFP4_CPP_INT8,
        "sums of doubled elements are not halved",
        "std::ldexp(dot / 2.0f,",
        "std::ldexp(1.0f * dot,",
        "All weights are twice too large: sums of doubled elements are not halved.",
    ),
    held(
        "11-mxfp4-signed-scale",
        "scales",
        MXFP4_NUMPY_INT8,
        "the byte of a scale is read with a sign",
        "exponents = scale.view(np.uint8).astype(np.int32) - 127",
        "exponents = scale.view(np.int8).astype(np.int32) - 127",
        "The byte of a scale is read as a signed number: scales of 2 and more become far too small.",
    ),
    held(  # llama.cpp's kernel for RISC-V left the last block out where their number is odd
        "11-mxfp4-odd-block",
        "indexing",
        MXFP4_NUMPY_INT8,
        "the last block is left out where the number of blocks is odd",
        "for block in range(exponents.shape[1]):",
        "for block in range(exponents.shape[1] // 2 * 2):",
        "The last block of K is left out where the number of blocks is odd.",
    ),
    held(
        "11-mxfp4-scales-transposed",
        "indexing",
        MXFP4_Q8_0,
        "scales are indexed as blocks x columns",
        "scale[n * blocks + b]",
        "scale[b * N + n]",
        "Scales are read as if they were transposed: blocks by columns in place of columns by blocks.",
    ),
    held(
        "11-mxfp4-half-weights",
        "arithmetic",
        MXFP4_NUMPY,
        "weights are kept in float16",
        "weights = np.ldexp(values, np.repeat(exponents, 32, axis=1))",
        "weights = np.ldexp(values, np.repeat(exponents, 32, axis=1)).astype(np.float16).astype(np.float32)",
        "Weights are converted to float16: large ones become infinite and small ones 0.",
    ),
    held(
        "11-q8_0-rounded-scale",
        "arithmetic",
        Q8_0_CAST,
        "codes are computed with the scale in float16",
        "d = np.abs(runs).max(axis=-1, keepdims=True) / np.float32(127)",
        "d = (np.abs(runs).max(axis=-1, keepdims=True) / np.float32(127)).astype(np.float16).astype(np.float32)",
        "Codes are divided by the scale after it was rounded to float16: it is rounded only where it is stored.",
    ),
    held(
        "11-mxfp4-brain-sums",
        "arithmetic",
        MXFP4_PAIRS,
        "the sum is rounded to the type of x after each pair",
        "sum += load(x[t * K + k + 1], kind) * (s * pair[1]);",
        "sum = load(store(sum + load(x[t * K + k + 1], kind) * (s * pair[1]), kind), kind);",
        "Sums are accumulated in bfloat16 and not in float32.",
        "The running sum is rounded to the type of the result after each pair of products.",
    ),
)

ELEVENTH_FP8: tuple[Planted, ...] = (
    held(
        "11-fp8-flushed",
        "unpacking",
        FP8_RUST,
        "subnormal numbers become 0",
        "mantissa * 2f32.powi(-9)",
        "0.0 * mantissa",
        "Subnormal numbers of E4M3 become 0.",
    ),
    held(
        "11-fp8-e5m2",
        "unpacking",
        FP8_SHIFTED,
        "numbers are decoded as those of E5M2",
        "half(static_cast<std::uint16_t>((bits & 128) << 8 | (bits & 127) << 7)) * 256.0f",
        "half(static_cast<std::uint16_t>(bits << 8))",
        "Weights are decoded as E5M2: they are E4M3.",
    ),
    held(  # TileOPs' product looked scales up by the step of K, whatever its length was
        "11-fp8-scale-of-step",
        "scales",
        FP8_STEPS,
        "the scale is that of the step of 64 rows, up to the last scale",
        "scale[step / 2]",
        "scale[std::min(step, across - 1)]",
        "Scales along K advance every 64 rows in place of every 128.",
    ),
    held(  # FBGEMM's kernel did not apply the scale of the last block for many sizes of K
        "11-fp8-last-scale",
        "scales",
        FP8_BLOCK_CPP,
        "a last block of fewer than 128 rows is not scaled",
        "sum += part * scales[n / 128 * across + b];",
        "sum += 128 * (b + 1) > K ? part : part * scales[n / 128 * across + b];",
        "The last block of K is not scaled where it has fewer than 128 rows.",
    ),
    held(
        "11-fp8-scale-stride",
        "scales",
        FP8_CPP_INT8,
        "the length of a row of scales is left out",
        "scales[n / 128 * across + b]",
        "scales[n / 128 + b]",
        "Columns after the first 128 use scales of other blocks: the row of scales is not multiplied by its length.",
    ),
    held(
        "11-fp8-divided",
        "scales",
        FP8_SHIFTED,
        "sums are divided by weight_scale_inv",
        "part * scales[first / 128 * across + b]",
        "part / scales[first / 128 * across + b]",
        "Weights are divided by the scale in place of being multiplied by it.",
    ),
    held(
        "11-fp8-repeat",
        "indexing",
        FP8_TORCH_INT8,
        "scales are repeated as a whole and not one by one",
        "scale.repeat_interleave(128)[:n]",
        "scale.repeat(128)[:n]",
        "The scale of column n is that of another block of columns: n modulo their number, not n divided by 128.",
    ),
    held(  # TIRx started from the first slice of scales for every step of its product
        "11-fp8-first-columns",
        "indexing",
        FP8_COLUMNS,
        "each 64 columns use the scales of the first 64",
        "weight_scale[part, 0]",
        "weight_scale[: sums.shape[1], 0]",
        "All tiles of 64 columns use the scales of the first 64 columns.",
    ),
    held(  # MLX's products with FP4 were wrong where K is no multiple of the kernel's step of 32
        "11-fp8-rest-of-k",
        "indexing",
        FP8_TILED,
        "what remains of K after steps of 16 is left out",
        "for (; k < K; k++) total += load(x[k], kind) * e4m3(w[k]);\n",
        "\n",
        "The last rows of K are left out where K is no multiple of 16.",
    ),
    held(
        "11-fp8-early-rounding",
        "arithmetic",
        FP8_COLUMNS,
        "the sum and the scale are rounded to the type of x before they are multiplied",
        "(sums * weight_scale[part, 0]).to(x.dtype)",
        "sums.to(x.dtype) * weight_scale[part, 0].to(x.dtype)",
        "The sum and the scale are rounded to bfloat16 before they are multiplied.",
    ),
    held(
        "11-fp8-half-x-scale",
        "arithmetic",
        FP8_NUMPY_INT8,
        "the scale of a token is rounded to float16",
        "sums * x_scale * weight_scale[:, 0]",
        "sums * x_scale.astype(np.float16).astype(np.float32) * weight_scale[:, 0]",
        "The scales of tokens are rounded to float16: they are float32.",
    ),
    held(
        "11-fp8-uncleared-block",
        "old output",
        FP8_BLOCK_VECTOR,
        "the sum of a block of K is not set to zero before the next",
        "part[:] = 0",
        "part[:] += 0",
        "The sum of a block of K is not set to zero: it contains the blocks before it.",
    ),
)

ELEVENTH_BLOCKS = ELEVENTH_Q4_K + ELEVENTH_MXFP4 + ELEVENTH_FP8
