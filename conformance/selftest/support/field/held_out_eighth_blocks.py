"""The mistakes of `held_out_eighth` in kernels for Q4_K, MXFP4 and FP8."""

from field.held_out_eighth import Planted, planted

MASKS, RUNS = ("vector_kernels.py", "q4_k_masks"), ("vector_kernels.py", "q4_k_blocks")
LOOPS, INTEGER = ("more.cpp", "q4_k"), ("kernels.cpp", "q4_k_q8_k")

Q4_K: tuple[Planted, ...] = (
    planted(
        *("q4_k-nibbles-side-by-side", "unpacking", MASKS),
        "the two codes of a byte are taken to be neighbours",
        "np.concatenate([octets & 15, octets >> 4], axis=-2)",
        "np.stack([octets & 15, octets >> 4], axis=-1)",
        "the two codes of a byte are taken as neighbours and not 32 apart",
        "the nibbles of a byte are interleaved",
    ),
    planted(
        *("q4_k-high-bits-of-minima", "unpacking", RUNS),
        "the high bits of the last four minima are taken from the scales' bytes",
        "(packed[:, j] >> 6) << 4",
        "(packed[:, j - 4] >> 6) << 4",
        "the two high bits of minima 4 to 7 come from the wrong bytes",
        "the high bits of minima are those of the scales",
    ),
    planted(
        *("q4_k-minima-added", "zeros", LOOPS),
        "minima are added",
        "d * scale * code - dmin * minimum",
        "d * scale * code + dmin * minimum",
        "minima are added and not subtracted",
        "the sign of minima is wrong",
    ),
    planted(
        *("q4_k-half-of-the-sums", "zeros", INTEGER),
        "minima meet the sum of the first half of a run only",
        "minima += minimum * (sums[0] + sums[1]);",
        "minima += minimum * sums[0];",
        "minima are multiplied by the sums of only half of the activations",
        "one of the two sums of a run of 32 is left out",
    ),
    planted(
        *("q4_k-d-and-dmin-exchanged", "scales", MASKS),
        "the two scales of a block are exchanged",
        "d, dmin = half(records[..., 0:2]), half(records[..., 2:4])",
        "dmin, d = half(records[..., 0:2]), half(records[..., 2:4])",
        "d and dmin are exchanged",
    ),
    planted(
        *("q4_k-scale-of-pair", "scales", RUNS),
        "the second run of each pair takes scale and minimum of the first",
        "scale_min(block[:, 4:16], j)",
        "scale_min(block[:, 4:16], j // 2 * 2)",
        "a run of 32 takes the scale of the run before it",
        "the high nibbles take scale and minimum of the low nibbles",
        "scales are taken from the wrong run",
    ),
    planted(
        *("q4_k-scale-of-first-block-of-x", "scales", INTEGER),
        "all blocks of x take the scale of the first",
        "std::memcpy(&scale_x, activations, 4);",
        "std::memcpy(&scale_x, x + t * blocks * 292, 4);",
        "the scale of the first block of activations is used for all of its blocks",
        "the scale of the activations belongs to another block",
    ),
    planted(
        *("q4_k-scales-for-minima", "scales", MASKS),
        "the low bits of the last four scales and minima are exchanged",
        "scales = [first & low, (third & nibbles) | (first >> six & high) << four]\n"
        "    minima = [second & low, (third >> four & nibbles) | (second >> six & high) << four]",
        "scales = [first & low, (third >> four & nibbles) | (first >> six & high) << four]\n"
        "    minima = [second & low, (third & nibbles) | (second >> six & high) << four]",
        "the low bits of scales 4 to 7 are exchanged with those of minima 4 to 7",
        "the low bits of scales 4 to 7 come from the wrong nibble",
    ),
    planted(
        *("q4_k-blocks-transposed", "indexing", LOOPS),
        "blocks are taken to lie column after column",
        "(n * blocks + b) * 144",
        "(b * N + n) * 144",
        "the order of blocks is transposed",
        "a block belongs to another column",
    ),
    planted(
        *("q4_k-dot-of-16-bits", "arithmetic", INTEGER),
        "the integer sum of a run of 32 is kept in 16 bits",
        "int scale, minimum, dot = 0;",
        "int scale, minimum;\n                    std::int16_t dot = 0;",
        "integer sums overflow 16 bits",
    ),
    planted(
        *("q8_k-truncated", "arithmetic", ("cast_kernels.py", "q8_k")),
        "codes of activations are truncated",
        "np.rint(factor * runs)",
        "np.trunc(factor * runs)",
        "codes are truncated towards 0 and not rounded",
    ),
    planted(
        *("q4_k-sums-of-last-token", "old output", LOOPS),
        "sums are not cleared between tokens",
        "std::fill(sums.begin(), sums.end(), 0.0f);",
        "",
        "each token's result includes those of the tokens before it",
        "sums are not set to 0 before a token begins",
    ),
)

COLUMNS, BITS = ("vector_kernels.py", "mxfp4_columns"), ("vector_kernels.py", "mxfp4_bits")
OF_BLOCKS, OF_TOKENS = ("more.cpp", "mxfp4_q8_0"), ("more.cpp", "mxfp4_int8")
RUST = ("kernels.rs", "mxfp4")

MXFP4: tuple[Planted, ...] = (
    planted(
        *("mxfp4-high-nibble-first", "unpacking", COLUMNS),
        "the first of two elements is taken from the high nibble",
        "[octets & 15, octets >> 4]",
        "[octets >> 4, octets & 15]",
        "the two elements of a byte are exchanged",
        "the first element is taken from the high nibble",
    ),
    planted(
        *("mxfp4-nibbles-half-a-block-apart", "unpacking", OF_BLOCKS),
        "the low nibbles are taken to be the first half of the block, as in GGUF",
        "DOUBLED[octets[i] & 15] * q[2 * i] + DOUBLED[octets[i] >> 4] * q[2 * i + 1]",
        "DOUBLED[octets[i] & 15] * q[i] + DOUBLED[octets[i] >> 4] * q[i + 16]",
        "the two elements of a byte are taken as 16 apart and not as neighbours",
        "the low nibbles are taken as the first half of a block",
    ),
    planted(
        *("mxfp4-low-nibble-twice", "unpacking", RUST),
        "both elements of a byte are taken from its low nibble",
        "e2m1(octet >> 4)",
        "e2m1(octet & 15)",
        "the second element of a byte is taken from the low nibble",
        "the high nibbles are ignored",
    ),
    planted(
        *("mxfp4-subnormal-as-normal", "unpacking", BITS),
        "the element 0.5 is decoded as a normal number",
        "np.where(exponent > 0, normal, mantissa * np.float32(0.5))",
        "np.where(codes & 7 > 0, normal, mantissa * np.float32(0.5))",
        "the subnormal element 0.5 is decoded as 0.75",
        "subnormal elements are decoded as normal numbers",
    ),
    planted(
        *("mxfp4-bias-of-127-for-doubled", "scales", OF_BLOCKS),
        "the doubled elements are not halved by the scale",
        "scale[n * blocks + b] - 128",
        "scale[n * blocks + b] - 127",
        "all results are twice what they should be",
        "the exponent of the scale is one too large",
    ),
    planted(
        *("mxfp4-signed-scales", "scales", ("torch_kernels.py", "mxfp4")),
        "the bytes of scales are read as signed",
        "scale.view(torch.uint8)",
        "scale.view(torch.int8)",
        "exponents of scales from 128 on are read as negative",
        "scales are read as signed integers",
    ),
    planted(
        *("mxfp4-blocks-of-64", "scales", ("kernels.cpp", "mxfp4")),
        "the number of the scale is that of a run of 64 elements",
        "scale[n * (K / 32) + b] - 127",
        "scale[n * (K / 32) + b / 2] - 127",
        "a scale is taken to belong to 64 elements and not to 32",
        "scales are taken from the wrong block",
    ),
    planted(
        *("mxfp4-least-scale-is-zero", "scales", RUST),
        "the scale with pattern 0 is decoded as 0",
        "if scales[b] == 0 { 2f32.powi(-127) } else { f32::from_bits((scales[b] as u32) << 23) }",
        "f32::from_bits((scales[b] as u32) << 23)",
        "the scale 2^-127 is decoded as 0",
        "the scale of pattern 0 is taken to be 0",
    ),
    planted(
        *("mxfp4-odd-block", "indexing", OF_BLOCKS),
        "the last block is left out where their number is odd",
        "for (long b = 0; b < blocks; b++)",
        "for (long b = 0; b < blocks / 2 * 2; b++)",
        "the last block of 32 is left out where the number of blocks is odd",
        "the tail of K is dropped",
    ),
    planted(
        *("mxfp4-remaining-columns", "indexing", COLUMNS),
        "columns after the last whole tile of eight are not computed",
        "range(0, columns, 8)",
        "range(0, columns // 8 * 8, 8)",
        "the columns after the last multiple of 8 are not computed",
        "the last elements of the result are 0",
    ),
    planted(
        *("mxfp4-half-dropped", "arithmetic", OF_TOKENS),
        "the doubled sum is halved as an integer",
        "dot / 2.0f",
        "dot / 2",
        "the sum of a block is truncated to an integer",
        "half of an odd sum is dropped",
    ),
    planted(
        *("mxfp4-weights-in-float16", "arithmetic", ("numpy_kernels.py", "mxfp4")),
        "weights pass through float16",
        "np.ldexp(values, np.repeat(exponents, 32, axis=1))",
        "np.ldexp(values, np.repeat(exponents, 32, axis=1)).astype(np.float16)",
        "weights overflow or underflow in float16",
        "weights are converted to float16",
    ),
)

TILED, INTEGERS = ("more.cpp", "fp8_tiled"), ("more.cpp", "fp8_block_int8")
VECTOR, PARTS = ("vector_kernels.py", "fp8_vector"), ("vector_kernels.py", "fp8_block_vector")

FP8: tuple[Planted, ...] = (
    planted(
        *("fp8-read-as-e5m2", "unpacking", VECTOR),
        "the bits of E4M3 are read as E5M2",
        "numbers = weight.astype(np.float32)",
        'numbers = weight.view("float8_e5m2").astype(np.float32)',
        "elements are decoded as E5M2 and not as E4M3",
    ),
    planted(
        *("fp8-subnormals-are-zero", "unpacking", ("kernels.rs", "fp8_channel")),
        "subnormal elements are decoded as 0",
        "if exponent == 0 { mantissa * 2f32.powi(-9) }",
        "if exponent == 0 { 0.0 }",
        "subnormal elements become 0",
    ),
    planted(
        *("fp8-scales-tiled", "scales", ("torch_kernels.py", "fp8_block")),
        "the scales of a row of blocks are repeated as a whole and not one by one",
        ".repeat_interleave(128, 1)[:, :k]",
        ".repeat(1, 128)[:, :k]",
        "the scale of row k is that of block k modulo the number of blocks",
        "scales are taken from the wrong block of K",
    ),
    planted(
        *("fp8-sum-scaled-again", "scales", ("kernels.cpp", "fp8_block")),
        "the sum of all blocks so far is scaled by each block's scale",
        "sum += part * scales[n / 128 * across + b];",
        "sum = (sum + part) * scales[n / 128 * across + b];",
        "earlier blocks are multiplied by the scales of later blocks as well",
        "the running sum is scaled and not the sum of the block",
    ),
    planted(
        *("fp8-scale-of-first-channel", "scales", ("more_numpy.py", "fp8_int8")),
        "all outputs take the scale of the first",
        "weight_scale[:, 0]",
        "weight_scale[0, 0]",
        "the scale of the first output is used for all outputs",
        "the scale is taken to be one for the whole matrix",
    ),
    planted(
        *("fp8-remaining-rows", "indexing", TILED),
        "rows of K after the last whole run of 16 are left out",
        "    for (; k < K; k++) total += load(x[k], kind) * e4m3(w[k]);\n",
        "",
        "the rows of K after the last multiple of 16 are left out",
        "the tail of K is dropped",
    ),
    planted(
        *("fp8-codes-of-first-token", "indexing", INTEGERS),
        "all tokens take the codes of the first",
        "x[t * K + k]",
        "x[k]",
        "every row of the result is computed from the first row of activations",
        "the activations of the first token are used for all tokens",
    ),
    planted(
        *("fp8-remaining-tokens", "indexing", TILED),
        "the tokens after the last whole tile of four are all computed from the first of them",
        "dot(x + t * K,",
        "dot(x + T / 4 * 4 * K,",
        "the tokens after the last whole tile of four take the activations of the first of them",
        "the last rows of the result are computed from another row of activations",
    ),
    planted(
        *("fp8-last-block-of-k", "indexing", PARTS),
        "the last block of K is left out where it is not whole",
        "range(-(-rows // 128))",
        "range(rows // 128)",
        "the rows of K after the last multiple of 128 are left out",
        "the tail of K is dropped",
    ),
    planted(
        *("fp8-sums-in-float16", "arithmetic", ("numpy_kernels.py", "fp8_channel")),
        "sums become float16 before they are scaled",
        "(sums * weight_scale[:, 0])",
        "(sums.astype(np.float16) * weight_scale[:, 0])",
        "sums overflow or are rounded in float16 before the scale is applied",
        "the scale is applied after the sum was rounded to float16",
    ),
    planted(
        *("fp8-sums-as-integers", "arithmetic", INTEGERS),
        "the sum of a block is kept as an integer",
        "float part = 0;",
        "int part = 0;",
        "the sum of a block is truncated to an integer",
        "products are truncated to integers",
    ),
    planted(
        *("fp8-sums-of-last-block", "old output", PARTS),
        "the sum of a block begins with that of the block before",
        "        part[:] = 0\n",
        "",
        "the sum of a block is not set to 0 before the next block begins",
        "earlier blocks are added again with the scales of later ones",
    ),
)

EIGHTH_BLOCKS = (*Q4_K, *MXFP4, *FP8)
