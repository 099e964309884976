"""Mistakes of the tenth list in Q4_K, MXFP4 and FP8; see `held_out_tenth`."""

from field.held_out_eighth import Planted
from field.held_out_tenth import held

Q4_K_BLOCKS, Q4_K_MASKS = ("vector_kernels.py", "q4_k_blocks"), ("vector_kernels.py", "q4_k_masks")
Q4_K_EIGHT, Q4_K_WORDS = ("split_kernels.py", "q4_k_eight"), ("strips.cpp", "q4_k_words")
Q4_K_SUMS, Q4_K_CPP = ("tiles.cpp", "q4_k_sums"), ("more.cpp", "q4_k")
Q4_K_TORCH, Q4_K_RUST_Q8_K = ("torch_blocks.py", "q4_k"), ("words.rs", "q4_k_q8_k")
CAST_Q8_K = ("cast_kernels.py", "q8_k")
MXFP4_PAIRS, MXFP4_STEPS = ("strips.cpp", "mxfp4_pairs"), ("tiles.cpp", "mxfp4_steps")
MXFP4_INT8, MXFP4_BITS = ("split_kernels.py", "mxfp4_int8"), ("vector_kernels.py", "mxfp4_bits")
MXFP4_VECTOR, MXFP4_COLUMNS = ("torch_groups.py", "mxfp4_vector"), ("vector_kernels.py", "mxfp4_columns")
MXFP4_CPP_Q8_0, CAST_Q8_0 = ("more.cpp", "mxfp4_q8_0"), ("split_kernels.py", "q8_0")
MXFP4_RUST, MXFP4_TORCH = ("kernels.rs", "mxfp4"), ("torch_kernels.py", "mxfp4")
FP8_RUST, FP8_SHIFTED = ("kernels.rs", "fp8_channel"), ("strips.cpp", "fp8_shifted")
FP8_BLOCK, FP8_BLOCK_VECTOR = ("numpy_kernels.py", "fp8_block"), ("vector_kernels.py", "fp8_block_vector")
FP8_BLOCK_INT8, FP8_TABLE = ("more.cpp", "fp8_block_int8"), ("tiles.cpp", "fp8_table")
FP8_STEPS, FP8_COLUMNS = ("tiles.cpp", "fp8_steps"), ("torch_groups.py", "fp8_columns")
FP8_TILED = ("more.cpp", "fp8_tiled")

TENTH_Q4_K: tuple[Planted, ...] = (
    held(
        *("q4_k_upper_runs", "scales", Q4_K_BLOCKS),
        "all eight runs are read as the first four are",  # trueno and aprender misread the scales of later runs
        *("    if j < 4:\n", "    if j < 8:\n"),
        "scales and minima of runs 4 to 7 are read in the way of runs 0 to 3",
        "the low four and the high two bits of scales and minima 4 to 7 are not put together",
    ),
    held(
        *("q4_k_swapped_halves", "scales", Q4_K_RUST_Q8_K),
        "d and dmin change places",
        *("(half_at(q, 0) * products as f32 - half_at(q, 2) * minima as f32)",),
        *("(half_at(q, 2) * products as f32 - half_at(q, 0) * minima as f32)",),
        "d and dmin are swapped",
    ),
    held(
        *("q4_k_raw_halves", "scales", Q4_K_EIGHT),
        "the bits of d and dmin are taken as integers",  # llama.cpp left out this conversion in a kernel for I8MM
        *("halves = np.ascontiguousarray(records[..., 0:4]).view(np.float16)",),
        *("halves = np.ascontiguousarray(records[..., 0:4]).view(np.uint16)",),
        "d and dmin are used as the integers of their bits instead of as float16 numbers",
    ),
    held(
        *("q4_k_minima_bits", "zeros", Q4_K_WORDS),
        "the high bits of the upper minima come from the word of the scales",
        *("(packed[2] >> 4 & nibbles) | (packed[1] >> 6 & high) << 4;",),
        *("(packed[2] >> 4 & nibbles) | (packed[0] >> 6 & high) << 4;",),
        "the high two bits of minima 4 to 7 are those of scales 4 to 7",
    ),
    held(
        *("q4_k_minima_paired", "zeros", Q4_K_WORDS),
        "the sums of sixteen meet minima in the order 0 to 7, 0 to 7",
        *("minima += minimum[s / 2] * sums[s];",),
        *("minima += minimum[s % 8] * sums[s];",),
        "the minima are multiplied by the sums of activations of other runs",
    ),
    held(
        *("q4_k_minima_added", "zeros", Q4_K_TORCH),
        "minima are added",
        *("weights = (d * scale)[:, :, None] * codes - (dmin * minimum)[:, :, None]",),
        *("weights = (d * scale)[:, :, None] * codes + (dmin * minimum)[:, :, None]",),
        "the minimum is added instead of subtracted",
    ),
    held(
        *("q4_k_not_shifted", "unpacking", Q4_K_MASKS),
        "the high nibble is masked and not shifted",
        *("codes = np.concatenate([octets & 15, octets >> 4], axis=-2)",),
        *("codes = np.concatenate([octets & 15, octets & 240], axis=-2)",),
        "the high nibble is not shifted down: codes of odd runs are 16 times too large",
    ),
    held(
        *("q4_k_sixteen_bytes", "unpacking", Q4_K_CPP),
        "a run is sixteen bytes, as a block of Q4_0 is",
        *("const int octet = block[16 + 32 * (j / 2) + i], code = j % 2 ? octet >> 4 : octet & 15;",),
        *("const int octet = block[16 + 16 * j + i % 16], code = i / 16 ? octet >> 4 : octet & 15;",),
        "each run of 32 is unpacked from 16 bytes, low nibbles first, as in Q4_0",
        "the two nibbles of a byte are taken as 16 places apart instead of 32",
    ),
    held(
        *("q4_k_first_x", "indexing", Q4_K_SUMS),
        "the first 256 numbers of x meet every block",  # a WMMA kernel of 1bit-MONSTER loaded x once for all tiles
        *("const float *run = &wide[256 * b + 32 * j];",),
        *("const float *run = &wide[32 * j];",),
        "the activations of the first block are used for all blocks",
    ),
    held(
        *("q4_k_piece_order", "indexing", Q4_K_EIGHT),
        "pieces of eight bytes are counted the other way round",
        *("pair, quarter = step // 4, step % 4",),
        *("pair, quarter = step % 4, step // 4",),
        "pieces of 8 bytes meet the wrong runs: the run's number and the place within the run are swapped",
        "codes are in the wrong order within a block",
    ),
    held(
        *("q4_k_short_sums", "arithmetic", Q4_K_WORDS),
        "sums of products in 16 bits",  # ik_llama.cpp's sums of scaled products went beyond 16 bits
        *("int lanes[8] = {0}, products = 0, minima = 0;",),
        *("std::int16_t lanes[8] = {0};\n                int products = 0, minima = 0;",),
        "integer sums overflow 16 bits",
    ),
    held(
        *("q8_k_truncates", "arithmetic", CAST_Q8_K),
        "codes are cut and not rounded",
        *("np.minimum(np.rint(factor * runs), 127).astype(np.int8)",),
        *("np.minimum(factor * runs, 127).astype(np.int8)",),
        "codes are truncated towards zero instead of rounded to nearest",
    ),
)

TENTH_MXFP4: tuple[Planted, ...] = (
    held(
        *("mxfp4_high_first", "unpacking", MXFP4_PAIRS),
        "the high nibble is the first element",
        *("pairs[octet][0] = FP4[octet & 15];\n        pairs[octet][1] = FP4[octet >> 4];",),
        *("pairs[octet][0] = FP4[octet >> 4];\n        pairs[octet][1] = FP4[octet & 15];",),
        "the two elements of a byte are swapped: the high nibble is read first",
    ),
    held(
        *("mxfp4_ggml_order", "unpacking", MXFP4_INT8),
        "sixteen low nibbles, then sixteen high nibbles",  # ggml's own blocks of MXFP4 have this order
        *("codes = np.stack([octets & 15, octets >> 4], axis=-1)",),
        *("codes = np.concatenate([octets & 15, octets >> 4], axis=-1)",),
        "a block is unpacked as 16 low nibbles and then 16 high nibbles, as in ggml, instead of pairs",
    ),
    held(
        *("mxfp4_subnormal", "unpacking", MXFP4_BITS),
        "the subnormal element is decoded like a normal one",  # TileLang decoded FP4 so
        *("size = np.where(exponent > 0, normal, mantissa * np.float32(0.5))",),
        *("size = np.where(exponent + mantissa > 0, normal, np.float32(0))",),
        "the subnormal 0.5 is decoded as a normal number, 0.75",
    ),
    held(
        *("mxfp4_bias_125", "scales", MXFP4_VECTOR),
        "the scale's bias is 125",  # compressed-tensors wrote scales with this bias
        *("exponent = scale.view(torch.uint8).int() - 127",),
        *("exponent = scale.view(torch.uint8).int() - 125",),
        "the bias of the scale's exponent is 125 instead of 127: results are 4 times too large",
    ),
    held(
        *("mxfp4_raw_scale", "scales", MXFP4_COLUMNS),
        "the byte of the scale is a factor",  # MLX did so for fewer than 8 outputs, and oMLX
        *("weights = np.ldexp(FP4[codes], exponents[..., None])",),
        *("weights = FP4[codes] * (exponents[..., None] + np.float32(127))",),
        "the byte of a scale is used as a number instead of as an exponent of two",
    ),
    held(
        *("mxfp4_smallest_scale", "scales", MXFP4_PAIRS),
        "the scale of byte 0 is 0",  # a kernel for vLLM on RDNA3 read byte 0 so
        *("const std::uint32_t bits = exponent ? exponent << 23 : 0x00400000;",),
        *("const std::uint32_t bits = exponent << 23;",),
        "a scale whose byte is 0 is read as 0 instead of the power of two -127",
    ),
    held(
        *("mxfp4_q8_0_type", "scales", MXFP4_CPP_Q8_0),
        "the scale of Q8_0 is read as bfloat16",  # ik_llama.cpp changed types in blocks of Q8, and a kernel missed it
        *("half_at(record) * dot",),
        *("brain(static_cast<std::uint16_t>(record[0] | record[1] << 8)) * dot",),
        "the scale of the activations is read as bfloat16 instead of float16",
    ),
    held(
        *("mxfp4_scales_restart", "indexing", MXFP4_STEPS),
        "each step of K begins at the first scale",
        *("exponents[k / 32] - 127",),
        *("exponents[(k - start) / 32] - 127",),
        "each step of 256 rows starts again at the scale of block 0",
    ),
    held(
        *("mxfp4_scales_across", "indexing", MXFP4_INT8),
        "scales are laid out block by block",
        *("exponents = scale.view(np.uint8).astype(np.int32) - 127",),
        *("exponents = scale.view(np.uint8).astype(np.int32).reshape(scale.shape[::-1]).T - 127",),
        "scales are read as K/32 x N instead of N x K/32",
    ),
    held(
        *("q8_0_signed_largest", "arithmetic", CAST_Q8_0),
        "the scale comes from the largest number",
        *("d = np.abs(runs).max(axis=-1, keepdims=True) / np.float32(127)",),
        *("d = runs.max(axis=-1, keepdims=True) / np.float32(127)",),
        "the scale is taken from the largest number instead of the largest magnitude",
    ),
    held(
        *("mxfp4_truncated", "arithmetic", MXFP4_RUST),
        "the result is cut to bfloat16",
        *("*y.add(i * n + j) = to_brain(sum);",),
        *("*y.add(i * n + j) = (sum.to_bits() >> 16) as u16;",),
        "the result is truncated to bfloat16 instead of rounded to nearest",
    ),
    held(
        *("mxfp4_half_weights", "arithmetic", MXFP4_TORCH),
        "weights pass through float16",  # a kernel for vLLM on RDNA3 lost small weights so
        *("weights = torch.ldexp(blocks, exponent[..., None]).flatten(1)",),
        *("weights = torch.ldexp(blocks, exponent[..., None]).flatten(1).half().float()",),
        "weights are rounded to float16: large ones become infinite, and small ones become 0",
    ),
)

TENTH_FP8: tuple[Planted, ...] = (
    held(
        *("fp8_no_subnormals", "unpacking", FP8_RUST),
        "every element is decoded as a normal number",  # TileLang and b12x had no case for subnormals of E4M3
        *("if exponent == 0 { mantissa * 2f32.powi(-9) } else { (8.0 + mantissa) * 2f32.powi(exponent - 10) }",),
        *("(8.0 + mantissa) * 2f32.powi(exponent - 10)",),
        "subnormals and zeros are decoded as normal numbers",
    ),
    held(
        *("fp8_bias_8", "unpacking", FP8_SHIFTED),
        "the exponent has a bias of 8",  # E4M3 without negative zero, of AMD's MI300, has this bias
        *("* 256.0f;",),
        *("* 128.0f;",),
        "weights are half as large: the bias of e4m3fnuz is used",
    ),
    held(
        *("fp8_derived_block", "scales", FP8_BLOCK),
        "the height of a block is N over the number of blocks",  # TensorRT-Model-Connect derived it so
        *("np.repeat(weight_scale_inv, 128, axis=0)[:columns]",),
        *("np.repeat(weight_scale_inv, -(-columns // len(weight_scale_inv)), axis=0)[:columns]",),
        "the block's size is N divided by the number of blocks instead of 128",
        "columns near the end of a block use the scales of the next block",
    ),
    held(
        *("fp8_divides", "scales", FP8_BLOCK_VECTOR),
        "sums are divided by weight_scale_inv",
        *("y += part * np.repeat(",),
        *("y += part / np.repeat(",),
        "the scale divides instead of multiplies",
    ),
    held(
        *("fp8_scales_across", "scales", FP8_BLOCK_INT8),
        "the grid of scales is read the other way round",
        *("scales[n / 128 * across + b]",),
        *("scales[b * ((N + 127) / 128) + n / 128]",),
        "the scales are read as K/128 x N/128 instead of N/128 x K/128",
    ),
    held(
        *("fp8_no_x_scale", "scales", FP8_TABLE),
        "the scale of the token is not applied",
        *("x_scale[t] * scale[n] * sum;",),
        *("scale[n] * sum;",),
        "the scale of the activations is left out",
    ),
    held(
        *("fp8_first_x", "indexing", FP8_STEPS),
        "the first 64 numbers of x meet every step",  # a WMMA kernel of 1bit-MONSTER loaded x once for all tiles
        *("part += load(x[k], kind) * e4m3(weight[n * K + k]);",),
        *("part += load(x[k % 64], kind) * e4m3(weight[n * K + k]);",),
        "the first 64 activations are used for all of K",
    ),
    held(
        *("fp8_first_scales", "indexing", FP8_COLUMNS),
        "each 64 outputs have the scales of the first",
        *("weight_scale[part, 0]",),
        *("weight_scale[: len(weight[part]), 0]",),
        "every 64 columns use the scales of the first 64 columns",
    ),
    held(
        *("fp8_blocks_down", "indexing", FP8_SHIFTED),
        "the number of blocks along K is rounded down",  # compressed-tensors took only whole blocks
        *("const long across = (K + 127) / 128;",),
        *("const long across = K / 128;",),
        "the last block of K is left out if K cannot be divided by 128",
        "rows of scales are counted with one block too few",
    ),
    held(
        *("fp8_half_sums", "arithmetic", FP8_SHIFTED),
        "the sum is rounded to float16 after each block",  # vLLM's Marlin and OpenVINO added up in float16
        *("sums[i] += part * scales[first / 128 * across + b];",),
        *("sums[i] = half(to_half(sums[i] + part * scales[first / 128 * across + b]));",),
        "the sum over the blocks is kept in float16 instead of float32",
    ),
    held(
        *("fp8_integer_lanes", "arithmetic", FP8_TABLE),
        "sums of products are integers, as for weights of 8 bits",
        *("float lanes[8] = {0}, sum = 0;",),
        *("int lanes[8] = {0};\n            float sum = 0;",),
        "sums are cut to integers: the fractions of products are lost",
    ),
    held(
        *("fp8_last_tokens", "old output", FP8_TILED),
        "the loop over the remaining tokens ends where it begins",  # llm-awq's gemm gave NaN for the last token
        *("for (; t < T; t++)",),
        *("for (; t < T / 4 * 4; t++)",),
        "the last tokens are not written if the number of tokens cannot be divided by 4",
    ),
)

TENTH_BLOCKS = TENTH_Q4_K + TENTH_MXFP4 + TENTH_FP8
