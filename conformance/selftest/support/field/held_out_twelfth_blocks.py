"""The mistakes of the twelfth list in Q4_K and MXFP4, and in the casts to Q8_K and Q8_0."""

from field.held_out_eighth import Planted
from field.held_out_twelfth import held

Q4_K_HALVES, Q4_K_CHOSEN = ("panels.cpp", "q4_k_halves"), ("planes_kernels.py", "q4_k_chosen")
Q4_K_INTERLEAVED, CAST_Q8_K = ("panels.cpp", "q4_k_interleaved"), ("panels.cpp", "cast_q8_k")
MXFP4_WARP, MXFP4_BIASED = ("panels.cpp", "mxfp4_warp"), ("torch_tiles.py", "mxfp4_biased")
MXFP4_TWOS, MXFP4_PLANES = ("panels.cpp", "mxfp4_twos"), ("planes_kernels.py", "mxfp4_planes")
CAST_Q8_0 = ("panels.cpp", "cast_q8_0")

TWELFTH_Q4_K: tuple[Planted, ...] = (
    held(
        "12-q4-k-high-in-place",
        "unpacking",
        Q4_K_HALVES,
        "codes of high halves keep their place, 16 times too large",
        "(dots[2] + dots[3] / 256) / 16;",
        "dots[2] + dots[3] / 256;",
        "Codes in the high halves of bytes are 16 times too large.",
        "The codes of every second run of 32 are not shifted down by four bits.",
    ),
    held(
        "12-q4-k-neighbours",
        "unpacking",
        Q4_K_CHOSEN,
        "both codes of a byte are neighbours along K",
        "np.concatenate([octets & 15, octets >> 4], axis=2)",
        "np.stack([octets & 15, octets >> 4], axis=-1)",
        "The two codes of a byte are placed side by side instead of 32 rows apart.",
    ),
    # aprender decoded the 6-bit scales and minima of an interleaved Q4_K by another scheme than ggml's.
    held(
        "12-q4-k-minimum-bits",
        "zeros",
        Q4_K_CHOSEN,
        "the upper bits of the last four minima are those of the scales",
        "(third >> 4) | (second >> 6) << 4",
        "(third >> 4) | (first >> 6) << 4",
        "The upper two bits of the minima of runs 4 to 7 are taken from the bytes of the scales.",
        "The minima of the last four runs are wrong in their upper two bits.",
    ),
    held(
        "12-q4-k-sums-apart",
        "zeros",
        Q4_K_INTERLEAVED,
        "a minimum meets the sums of 16 codes that are 128 apart",
        "(totals[2 * j] + totals[2 * j + 1])",
        "(totals[j] + totals[j + 8])",
        "The minimum of a run is multiplied by sums of other runs.",
        "The sums of 16 that belong to a run of 32 are chosen wrongly.",
    ),
    held(
        "12-q4-k-scale-shift",
        "scales",
        Q4_K_HALVES,
        "the upper bits of the last four scales are shifted by four instead of two",
        "(packed[side] & 0xc0c0) >> 2;",
        "(packed[side] & 0xc0c0) >> 4;",
        "The upper two bits of the scales of runs 4 to 7 are at the wrong place.",
        "The scales of the last four runs are wrong in their upper two bits.",
    ),
    # llama.cpp's product for i8mm with Q4_1 multiplied by a float16 scale that it had not converted.
    held(
        "12-q4-k-bits-of-scale",
        "scales",
        Q4_K_INTERLEAVED,
        "the bits of the block's scale are taken for its value",
        "made.d[c] = half_at(block);",
        "made.d[c] = static_cast<float>(block[0] | block[1] << 8);",
        "The scale d of a block is the integer of its bits instead of the float16 number.",
    ),
    # An engine with GGUF weights read the float16 scale of its blocks as bfloat16.
    held(
        "12-q4-k-brain-scale",
        "scales",
        Q4_K_HALVES,
        "the block's scale is read as bfloat16",
        "sum += half_at(block) * (",
        "sum += brain(static_cast<std::uint16_t>(block[0] | block[1] << 8)) * (",
        "The scale d of a block is read as bfloat16 instead of float16.",
    ),
    # llama.cpp interleaves Q4_K by eight bytes or by four, and copied eight where it interleaves by four.
    held(
        "12-q4-k-turns-of-four",
        "indexing",
        Q4_K_INTERLEAVED,
        "codes are read in turns of four bytes, and were written in turns of eight",
        "own.codes[64 * (4 * (j / 2) + i / 8) + 8 * c + i % 8]",
        "own.codes[32 * (8 * (j / 2) + i / 4) + 4 * c + i % 4]",
        "Codes of interleaved columns are read in turns of four bytes instead of eight.",
        "A column takes the codes of other columns.",
    ),
    held(
        "12-q4-k-blocks-first",
        "indexing",
        Q4_K_INTERLEAVED,
        "the blocks of x are taken block after block, and are token after token",
        "x + (t * blocks + b) * 292",
        "x + (b * T + t) * 292",
        "The blocks of the activations are read in the wrong order if there are several tokens and blocks.",
        "A token takes the blocks of other tokens.",
    ),
    held(
        "12-q4-k-pairs",
        "indexing",
        Q4_K_HALVES,
        "a pair of runs has the scales and minima of another pair",
        "pair = side + 2 * upper;",
        "pair = 2 * side + upper;",
        "Runs 2 and 3 take the scales and minima of runs 4 and 5, and the reverse.",
        "The scales and minima of a run are those of another run of the block.",
    ),
    held(
        "12-q8-k-truncates",
        "arithmetic",
        CAST_Q8_K,
        "codes are truncated",
        "static_cast<int>(std::nearbyint(factor * run[i]))",
        "static_cast<int>(factor * run[i])",
        "Codes are truncated toward zero instead of rounded to nearest.",
    ),
    # ik_llama.cpp's products for AVX2 overflowed 16 bits in more than one format.
    held(
        "12-q4-k-short-dot",
        "arithmetic",
        Q4_K_INTERLEAVED,
        "the sum of a run is held in 16 bits",
        "int dot = 0;\n                        for",
        "std::int16_t dot = 0;\n                        for",
        "The integer sum of 32 products overflows 16 bits.",
        "An integer sum is held in too few bits and wraps.",
    ),
)

TWELFTH_MXFP4: tuple[Planted, ...] = (
    # ggml's blocks have elements 16 rows apart in a byte, others have neighbours; imp read one as the other.
    held(
        "12-mxfp4-halves",
        "unpacking",
        MXFP4_TWOS,
        "a byte has elements that are 16 rows apart, as ggml's blocks have",
        "DOUBLED[octets[i] & 15] * q[2 * i] + DOUBLED[octets[i] >> 4] * q[2 * i + 1]",
        "DOUBLED[octets[i] & 15] * q[i] + DOUBLED[octets[i] >> 4] * q[i + 16]",
        "The two elements of a byte are taken to be 16 rows apart instead of side by side.",
    ),
    # Triton packed the first element into the high half of a byte.
    held(
        "12-mxfp4-high-first",
        "unpacking",
        MXFP4_PLANES,
        "the even row is in the high half of a byte",
        "DOUBLED[octets & 15], DOUBLED[octets >> 4]",
        "DOUBLED[octets >> 4], DOUBLED[octets & 15]",
        "The two elements of each byte are swapped.",
        "The first element is read from the high half of a byte instead of the low one.",
    ),
    held(
        "12-mxfp4-no-subnormals",
        "unpacking",
        MXFP4_BIASED,
        "elements of 0.5 are flushed to zero",
        "values = bits.view(torch.float32) * 2.0**126",
        "values = torch.where((codes & 6) > 0, bits.view(torch.float32) * 2.0**126, 0.0)",
        "Elements of 0.5 and -0.5 become zero.",
        "The subnormal element is flushed to zero.",
    ),
    # FBGEMM's MX4 read the scales, which have no sign, as signed bytes.
    held(
        "12-mxfp4-signed-scale",
        "scales",
        MXFP4_BIASED,
        "the bytes of scales are signed",
        "scale.view(torch.uint8).int() - 127",
        "scale.view(torch.int8).int() - 127",
        "Scales from 128 upward are read as negative: the byte of a scale is sign-extended.",
    ),
    held(
        "12-mxfp4-whole-scale",
        "scales",
        MXFP4_WARP,
        "doubled elements meet the whole scale",
        "(exponent - 1) << 23",
        "exponent << 23",
        "Weights are twice too large: elements are doubled and the scale is not halved.",
        "The exponent of the scale is one too large.",
    ),
    # compressed-tensors stored the scales of MXFP4 with a bias of 125.
    held(
        "12-mxfp4-bias-125",
        "scales",
        MXFP4_PLANES,
        "the bias of scales is 125",
        "scale.view(np.uint8).astype(np.int32) - 128",
        "scale.view(np.uint8).astype(np.int32) - 126",
        "Weights are four times too large: the bias of scales is 125 instead of 127.",
        "The exponent of the scale is two too large.",
    ),
    # One loop of several in MLX multiplied by the byte of a scale and not by the scale.
    held(
        "12-mxfp4-byte-of-scale",
        "scales",
        MXFP4_TWOS,
        "the block that remains is multiplied by the byte of its scale",
        "half_scale(exponent[b]) * block_dot(",
        "exponent[b] * block_dot(",
        "The last block of an odd number is multiplied by the byte of its scale instead of the power of two.",
    ),
    # MLX left out what remained of K after its tiles of 64, which are two blocks.
    held(
        "12-mxfp4-odd-block",
        "indexing",
        MXFP4_TWOS,
        "the block that remains is left out",
        "for (; b < blocks; b++)",
        "for (; b + 1 < blocks; b++)",
        "The last block is not added if the number of blocks is odd.",
        "What remains of K after whole steps of 64 rows is left out.",
    ),
    # vLLM ignored a stride of scales that were stored along the other axis.
    held(
        "12-mxfp4-scales-transposed",
        "indexing",
        MXFP4_WARP,
        "scales are read as those of a transposed array",
        "scale[n * (K / 32) + b]",
        "scale[b * N + n]",
        "Scales are read from the transposed place: blocks x columns instead of columns x blocks.",
        "A column takes the scales of other columns.",
    ),
    held(
        "12-mxfp4-half-sums",
        "arithmetic",
        MXFP4_PLANES,
        "the sums of blocks are float16",
        "np.ldexp(dots.astype(np.float32), exponents)",
        "np.ldexp(dots.astype(np.float16), exponents)",
        "The sums of blocks are held and scaled in float16: they are rounded, overflow and underflow.",
        "The accumulator is float16 instead of float32.",
    ),
    # A review of candle found that its cast for Arm rounds halves to even, and the scalar one away from zero.
    held(
        "12-q8-0-halves-to-even",
        "arithmetic",
        CAST_Q8_0,
        "halves are rounded to even",
        "std::lround(run[i] * inverse)",
        "std::lrint(run[i] * inverse)",
        "Halves are rounded to even instead of away from zero.",
    ),
    # vLLM's Marlin and SGLang's GPTQ added to memory that had not been cleared.
    held(
        "12-mxfp4-lanes-kept",
        "old output",
        MXFP4_WARP,
        "the lanes are not cleared between columns",
        "float lanes[32] = {0};",
        "static float lanes[32];",
        "The sums of the previous column are not cleared before the next.",
        "Each result contains sums of results before it.",
    ),
)

TWELFTH_BLOCKS = TWELFTH_Q4_K + TWELFTH_MXFP4
