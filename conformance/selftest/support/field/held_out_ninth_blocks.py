"""The mistakes of `held_out_ninth` in kernels for Q4_K, MXFP4 and FP8, whose numbers lie in bytes and blocks."""

from field.held_out_eighth import Planted
from field.held_out_ninth import held

SUMS, RUST_Q8_K, CUT = ("tiles.cpp", "q4_k_sums"), ("words.rs", "q4_k_q8_k"), ("torch_blocks.py", "q4_k")
PLAIN, Q8_K = ("more.cpp", "q4_k"), ("kernels.cpp", "q4_k_q8_k")

Q4_K: tuple[Planted, ...] = (
    held(
        *("q4_k-neighbours-in-byte", "unpacking", CUT),
        "the two codes of a byte become neighbours",
        "(octets.reshape(-1, 4, 1, 32) >> shifts & 15)",
        "(octets.reshape(-1, 4, 32, 1) >> shifts.view(1, 1, 1, 2) & 15)",
        "The two codes of a byte are taken as neighbours; the high one belongs 32 places after the low one.",
    ),
    held(
        *("q4_k-nibbles-swapped", "unpacking", ("vector_kernels.py", "q4_k_blocks")),
        "even runs take the high nibble, odd runs the low one",
        "codes = octets >> 4 if j % 2 else octets & 15",
        "codes = octets & 15 if j % 2 else octets >> 4",
        "The low and the high nibble are swapped.",
    ),
    held(
        *("q4_k-codes-less-8", "unpacking", RUST_Q8_K),
        "8 is subtracted from codes, as in Q4_0",
        "dot += code as i32 * p",
        "dot += (code as i32 - 8) * p",
        "The codes are taken as signed, less 8; those of Q4_K are 0 to 15.",
    ),
    # Q4_1 adds its minimum, and so do MLX's affine groups; Q4_K subtracts it.
    held(
        *("q4_k-minima-added", "zeros", SUMS),
        "minima are added",
        "scale * dot - dmin * minimum",
        "scale * dot + dmin * minimum",
        "The minima are added instead of subtracted.",
    ),
    held(
        *("q4_k-sums-paired-apart", "zeros", ("numpy_kernels.py", "q4_k_q8_k")),
        "the sums of 16 are added with those eight places after, not with their neighbours",
        "sums.reshape(*records.shape[:2], 8, 2).sum(axis=-1)",
        "sums.reshape(*records.shape[:2], 2, 8).sum(axis=-2)",
        "The minimum of a run meets the sums of other runs: sums 2 j and 2 j + 1 belong to run j.",
    ),
    # aprender decoded scales of six bits with four of their bits.
    held(
        *("q4_k-scales-of-4-bits", "scales", Q8_K),
        "the upper two bits of the last four scales are left out",
        "*scale = (q[j + 4] & 15) | (q[j - 4] >> 6) << 4;",
        "*scale = q[j + 4] & 15;",
        "The upper two bits of the scales of runs 4 to 7 are lost.",
    ),
    # 1bit-MONSTER read the two float16 scales of a block as bfloat16.
    held(
        *("q4_k-d-in-bfloat16", "scales", PLAIN),
        "the two scales of a block are read as bfloat16",
        "const float d = half_at(block), dmin = half_at(block + 2);",
        "const float d = brain(block[0] | block[1] << 8), dmin = brain(block[2] | block[3] << 8);",
        "The scales d and dmin are read as bfloat16; they are float16.",
    ),
    held(
        *("q4_k-scale-bits-of-minima", "scales", CUT),
        "the upper two bits of the last four scales are taken from the bytes of the minima",
        "(third & 15) | ((first >> 2) & 48)",
        "(third & 15) | ((second >> 2) & 48)",
        "The upper two bits of the scales of runs 4 to 7 are read from the bytes of the minima.",
        "The upper two bits of the scales of runs 4 to 7 are wrong.",
    ),
    held(
        *("q4_k-low-runs-first", "indexing", ("vector_kernels.py", "q4_k_masks")),
        "the four runs of low nibbles come before the four of high ones",
        "np.concatenate([octets & 15, octets >> 4], axis=-2)",
        "np.concatenate([octets & 15, octets >> 4], axis=-3)",
        "The runs are in a wrong order: low nibbles are runs 0, 2, 4, 6, and high nibbles are runs 1, 3, 5, 7.",
    ),
    held(
        *("q4_k-token-stride", "indexing", RUST_Q8_K),
        "the blocks of a later token are looked for four bytes a block too early",
        "x.add(i * blocks * 292)",
        "x.add(i * blocks * 288)",
        "Tokens after the first one are read from a wrong place: a block of Q8_K has 292 bytes.",
    ),
    # imp changed the exponents of float16 scales by their bits, and lost or missed the subnormal ones.
    held(
        *("q4_k-subnormal-d", "arithmetic", RUST_Q8_K),
        "a scale of a block that is subnormal in float16 becomes 0",
        "if exponent == 0 { mantissa * 2f32.powi(-24) } else",
        "if exponent == 0 { 0.0 } else",
        "Subnormal float16 numbers, as d and dmin may be, are taken as 0.",
    ),
    held(
        *("q4_k-result-cut", "arithmetic", SUMS),
        "the result in bfloat16 is cut off instead of rounded",
        "y[t * N + n] = store(sum, kind);",
        "std::memcpy(&y[t * N + n], reinterpret_cast<const char *>(&sum) + 2, 2);",
        "The result is truncated to bfloat16 instead of rounded to nearest.",
    ),
)

STEPS, TORCH_Q8_0, MIXED = ("tiles.cpp", "mxfp4_steps"), ("torch_blocks.py", "mxfp4_q8_0"), ("more.cpp", "mxfp4_int8")
RUST_MXFP4 = ("kernels.rs", "mxfp4")

MXFP4: tuple[Planted, ...] = (
    # imp read ggml's order of a block as the other one; here it is the reverse.
    held(
        *("mxfp4-order-of-ggml", "unpacking", TORCH_Q8_0),
        "the low nibbles of a block come first, as in ggml's blocks",
        "torch.stack([octets & 15, octets >> 4], dim=-1).view(len(octets), -1, 32)",
        "torch.cat([each.view(len(octets), -1, 16) for each in (octets & 15, octets >> 4)], dim=-1)",
        "The elements of a block are taken low nibbles first; the two of a byte are neighbours.",
    ),
    # b12x, AiDotNet and others decoded subnormal numbers of eight bits by the formula of normal ones.
    held(
        *("mxfp4-no-subnormals", "unpacking", ("vector_kernels.py", "mxfp4_bits")),
        "elements of exponent 0 are decoded as normal ones",
        "size = np.where(exponent > 0, normal, mantissa * np.float32(0.5))",
        "size = normal",
        "Elements of exponent 0 are decoded as normal: 0 becomes 0.5, and 0.5 becomes 0.75.",
    ),
    held(
        *("mxfp4-high-nibble-first", "unpacking", MIXED),
        "the high nibble of a byte comes first",
        "i % 2 ? octet >> 4 : octet & 15",
        "i % 2 ? octet & 15 : octet >> 4",
        "The low and the high nibble of a byte are swapped.",
    ),
    # compressed-tensors stored exponents of scales with a bias of 125.
    held(
        *("mxfp4-bias-125", "scales", ("vector_kernels.py", "mxfp4_columns")),
        "the bias of the exponents is 125",
        ".astype(np.int32) - 127",
        ".astype(np.int32) - 125",
        "The scales are four times too large: the bias is 127.",
    ),
    # omlx, and MLX for less than eight outputs, multiplied by the byte of the scale.
    held(
        *("mxfp4-scale-not-exponent", "scales", ("numpy_kernels.py", "mxfp4")),
        "the byte of a scale is multiplied as a number",
        "weights = np.ldexp(values, np.repeat(exponents, 32, axis=1))",
        "weights = values * np.repeat(scale.view(np.uint8).astype(np.float32), 32, axis=1)",
        "The byte of the scale is used as a number; it is the exponent of a power of two.",
    ),
    # TIRx's FP8 product took the first of four neighbouring scales for all four blocks.
    held(
        *("mxfp4-d-of-first-block", "scales", ("more.cpp", "mxfp4_q8_0")),
        "the scale of the first block of x is used for all blocks of a token",
        "half_at(record) * dot",
        "half_at(x + t * blocks * 34) * dot",
        "All blocks of a token take the scale of its first block.",
    ),
    # llama.cpp multiplied by the bits of a float16 scale of the activations.
    held(
        *("mxfp4-bits-of-d", "scales", TORCH_Q8_0),
        "the bits of the scale of x are taken as an integer",
        ".view(torch.float16).float()",
        ".view(torch.int16).float()",
        "The scale of a block of x is read as an integer; it is float16.",
    ),
    # aiter's product was wrong where K is no multiple of 256.
    held(
        *("mxfp4-rest-of-K", "indexing", STEPS),
        "what remains of K after steps of 256 is left out",
        "for (long start = 0; start < K; start += 256)",
        "for (long start = 0; start + 256 <= K; start += 256)",
        "The rows of K after the last whole 256 are left out.",
    ),
    held(
        *("mxfp4-scales-transposed", "indexing", MIXED),
        "scales are read as blocks x columns",
        "scale[n * (K / 32) + b]",
        "scale[b * N + n]",
        "The scales are read transposed: they are stored column by column, N x K/32.",
    ),
    held(
        *("mxfp4-x-of-even-row", "indexing", ("kernels.cpp", "mxfp4")),
        "the second element of a byte meets the x of the first",
        "load(x[t * K + k + 1], kind) * (s * FP4[octet >> 4]);",
        "load(x[t * K + k], kind) * (s * FP4[octet >> 4]);",
        "Odd rows meet the x of the even row before them.",
    ),
    # AOTriton's attention for some of AMD's GPUs was compiled with sums in the type of its inputs.
    held(
        *("mxfp4-sum-in-bfloat16", "arithmetic", RUST_MXFP4),
        "the sum is rounded to bfloat16 after each block",
        "sum += part * s;",
        "sum = brain(to_brain(sum + part * s));",
        "The sum is kept in bfloat16 instead of float32.",
    ),
    # MLX divided the number of columns by the tile and dropped the rest, which was never written.
    held(
        *("mxfp4-columns-not-written", "old output", STEPS),
        "columns after the last whole tile of four are not written",
        "first < N; first += 4)",
        "first + 4 <= N; first += 4)",
        "The last columns are not written where N is no multiple of 4.",
    ),
)

BLOCKS, TABLE, SINGLE = ("tiles.cpp", "fp8_steps"), ("tiles.cpp", "fp8_table"), ("torch_blocks.py", "fp8_vector")
TILED, TORCH_BLOCKS = ("more.cpp", "fp8_tiled"), ("torch_blocks.py", "fp8_block_int8")

FP8: tuple[Planted, ...] = (
    # AiDotNet, b12x and 1bit-MONSTER decoded subnormal numbers by the formula of normal ones.
    held(
        *("fp8-no-subnormals", "unpacking", ("kernels.rs", "fp8_channel")),
        "subnormal numbers are decoded as normal ones",
        "if exponent == 0 { mantissa * 2f32.powi(-9) } else { (8.0 + mantissa)",
        "if exponent == 0 && mantissa == 0.0 { 0.0 } else { (8.0 + mantissa)",
        "Subnormal numbers of E4M3 are decoded as normal ones.",
    ),
    # AMD's FNUZ formats have a bias of one more; petit-kernel decoded them with the other bias.
    held(
        *("fp8-bias-of-fnuz", "unpacking", TABLE),
        "numbers are decoded with the bias of FNUZ",
        "table[code] = e4m3(static_cast<std::uint8_t>(code));",
        "table[code] = e4m3(static_cast<std::uint8_t>(code)) / 2;",
        "The exponents have the bias 8 of E4M3FNUZ instead of 7: all results are half of what they should be.",
    ),
    # SGLang's product did not move on to the next scale where its steps of K are shorter than a block.
    held(
        *("fp8-scale-does-not-advance", "scales", BLOCKS),
        "the scale of the first block of K is used for all",
        "part * scale[step / 2]",
        "part * scale[0]",
        "All rows take the scale of the first block of K.",
    ),
    # FBGEMM did not apply the scale of a last block of K that is not whole.
    held(
        *("fp8-last-scale-left-out", "scales", TORCH_BLOCKS),
        "the last block of K is not scaled where it is not whole",
        "y += sums * scale.repeat_interleave(128)[:n]",
        "y += sums * scale.repeat_interleave(128)[:n] if 128 * block + 128 <= k else sums",
        "The scale of the last block of K is not applied where K is no multiple of 128.",
    ),
    # vLLM needed a path of its own for a scale for each output: PyTorch's product took one scale.
    held(
        *("fp8-scale-of-first-column", "scales", SINGLE),
        "the scale of the first output is used for all",
        "sums * weight_scale[:, 0]",
        "sums * weight_scale[0]",
        "All columns take the scale of the first column.",
    ),
    # vLLM's kernels for Intel's GPUs gave wrong results where blocks do not divide K, until they refused it.
    held(
        *("fp8-stride-of-whole-blocks", "indexing", ("kernels.cpp", "fp8_block")),
        "the stride of the scales counts whole blocks of K only",
        "scales[n / 128 * across + b]",
        "scales[n / 128 * (K / 128) + b]",
        "The stride of the rows of scales is too small where K is no multiple of 128.",
        "The columns after the first 128 take wrong scales where K is no multiple of 128.",
    ),
    held(
        *("fp8-rest-reads-first-tokens", "indexing", TILED),
        "tokens after the last whole four read x from the start",
        "dot(x + t * K, weight",
        "dot(x + t % 4 * K, weight",
        "The tokens after the last whole four take the x of the first tokens.",
    ),
    held(
        *("fp8-weights-not-transposed", "indexing", ("numpy_kernels.py", "fp8_channel")),
        "the stored N x K numbers are read as K x N",
        "weight.astype(np.float32).T",
        "weight.astype(np.float32).reshape(weight.shape[::-1])",
        "The weights are read as K x N; they are stored N x K.",
    ),
    # SGLang's product of FP8 with 4 bits wrote its result in float16, which overflowed.
    held(
        *("fp8-result-by-float16", "arithmetic", SINGLE),
        "the result passes through float16",
        "(sums * weight_scale[:, 0]).to(x.dtype)",
        "(sums * weight_scale[:, 0]).half().to(x.dtype)",
        "The result is narrowed to float16 before it is bfloat16: large results overflow, small ones are lost.",
    ),
    # torchao's product of float16 with stored weights overflowed before the scale was applied.
    held(
        *("fp8-sum-in-float16", "arithmetic", ("numpy_kernels.py", "fp8_channel")),
        "the sum is rounded to float16 before it is scaled",
        "(sums * weight_scale[:, 0]).astype(x.dtype)",
        "(sums.astype(x.dtype) * weight_scale[:, 0]).astype(x.dtype)",
        "The sum is kept in float16 before it is scaled, and overflows.",
    ),
    held(
        *("fp8-sum-in-bfloat16", "arithmetic", TORCH_BLOCKS),
        "the product of a block is made in bfloat16",
        "sums = x_codes[:, part].float() @ weight[:, part].float().T",
        "sums = x_codes[:, part].bfloat16() @ weight[:, part].bfloat16().T",
        "The sum of each block is rounded to bfloat16.",
    ),
    held(
        *("fp8-last-token-not-written", "old output", TILED),
        "the last token is not written where the tokens are no multiple of four",
        "for (; t < T; t++)",
        "for (; t + 1 < T; t++)",
        "The result of the last token is not written.",
    ),
)

NINTH_BLOCKS: tuple[Planted, ...] = Q4_K + MXFP4 + FP8
