"""The mistakes of the twelfth list in FP8."""

from field.held_out_eighth import Planted
from field.held_out_twelfth import held

FP8_REGISTERS, FP8_WORKSPACE = ("panels.cpp", "fp8_registers"), ("panels.cpp", "fp8_workspace")
FP8_TORCH, FP8_STRIPS = ("torch_tiles.py", "fp8_dequantised"), ("planes_kernels.py", "fp8_strips")

TWELFTH_FP8: tuple[Planted, ...] = (
    # vLLM's Marlin widened scales in FP8 to bfloat16 by a shift alone.
    held(
        "12-fp8-bias-left",
        "unpacking",
        FP8_REGISTERS,
        "the bias of float16 is not made up for",
        " * 256.0f; }",
        "; }",
        "Weights are 256 times too small: the exponent keeps the bias of FP8.",
    ),
    # petit-kernel overlooked that a type with `fnuz` has a bias of one more.
    held(
        "12-fp8-other-bias",
        "unpacking",
        FP8_STRIPS,
        "bytes are those of e4m3fnuz",
        "ml_dtypes.float8_e4m3fn)",
        "ml_dtypes.float8_e4m3fnuz)",
        "Weights are half of what they should be: bytes of e4m3fn are read as e4m3fnuz.",
        "The bias of the exponent is 8 instead of 7.",
    ),
    # Decoders of TileLang and others gave subnormal numbers and zeros the leading one of normal numbers.
    held(
        "12-fp8-leading-one",
        "unpacking",
        FP8_REGISTERS,
        "subnormal numbers have a leading one",
        "{ return half((bits & 0x7f) << 7 | (bits & 0x80) << 8) * 256.0f; }",
        "{ return std::ldexp(bits & 0x80 ? -1 - (bits & 7) / 8.0f : 1 + (bits & 7) / 8.0f, (bits >> 3 & 15) - 7); }",
        "Subnormal numbers and zeros are decoded as normal numbers, with a leading one.",
    ),
    # oneDNN with vLLM, and a loader of checkpoints, divided N by the number of blocks to have the size of a block.
    held(
        "12-fp8-equal-blocks",
        "scales",
        FP8_TORCH,
        "the size of blocks is N divided by their number",
        "torch.arange(columns) // 128",
        "torch.arange(columns) // -(-columns // len(weight_scale_inv))",
        "Columns take the scale of another block if N is no multiple of 128.",
        "Blocks of scales have N divided by their number of columns instead of 128.",
    ),
    # FBGEMM did not apply the scale of the last block of K if it was not whole.
    held(
        "12-fp8-whole-blocks",
        "scales",
        FP8_WORKSPACE,
        "a row of scales has as many as there are whole blocks",
        "scales[n / 128 * across + b]",
        "scales[n / 128 * (K / 128) + b]",
        "Columns from 128 on take wrong scales if K is no multiple of 128.",
        "The row of scales is one too short if the last block of K is not whole.",
    ),
    held(
        "12-fp8-first-strip",
        "scales",
        FP8_STRIPS,
        "every strip of columns has the scales of the first",
        "weight_scale[strip, 0]",
        "weight_scale[: sums.shape[1], 0]",
        "Columns from 32 on take the scales of the first 32 columns.",
    ),
    # DeepGEMM's scales are powers of two; transformers and SGLang rounded the scales and not the weights.
    held(
        "12-fp8-powers-of-two",
        "scales",
        FP8_TORCH,
        "scales are rounded up to powers of two",
        "weight_scale_inv[block_rows, first // 128]",
        "torch.exp2(torch.ceil(torch.log2(weight_scale_inv[block_rows, first // 128])))",
        "Scales are rounded up to powers of two.",
    ),
    # vLLM transposed the scales of blocks for one device, where another function reads them as they were.
    held(
        "12-fp8-scales-transposed",
        "indexing",
        FP8_WORKSPACE,
        "scales are read as those of a transposed array",
        "scales[n / 128 * across + b]",
        "scales[b * ((N + 127) / 128) + n / 128]",
        "The scales of blocks are read from the transposed place.",
        "A block takes the scale of another block.",
    ),
    # Composable Kernel had mistakes in the last of the parts of K.
    held(
        "12-fp8-parts-left",
        "indexing",
        FP8_WORKSPACE,
        "four equal parts do not cover K",
        "each = (across + 3) / 4;",
        "each = across / 4;",
        "The last blocks of K are not added if their number is no multiple of four.",
        "What remains of K after four equal parts is left out.",
    ),
    # vLLM's Marlin overflowed float16 since a scale for each output comes after the sum.
    held(
        "12-fp8-half-sums",
        "arithmetic",
        FP8_REGISTERS,
        "sums are float16",
        "float sums[4][4] = {{0}};",
        "_Float16 sums[4][4] = {{0}};",
        "The accumulator is float16 instead of float32.",
        "Sums overflow float16 before they are scaled.",
    ),
    held(
        "12-fp8-sum-kept",
        "arithmetic",
        FP8_WORKSPACE,
        "the sum of a block is not cleared before the next block of its part",
        """        for (long n = 0; n < N; n++)
            for (long b = part * each; b < std::min(across, (part + 1) * each); b++) {
                float dot = 0;
                for""",
        """        for (long n = 0, b = part * each; n < N; n++, b = part * each)
            for (float dot = 0; b < std::min(across, (part + 1) * each); b++) {
                for""",
        "The sum of a block of K is added again with the scale of the next block.",
        "The partial sum is not cleared after it was scaled.",
    ),
    # nntrainer's product with Q4_K needed a number of tokens that four divides.
    held(
        "12-fp8-tokens-left",
        "old output",
        FP8_REGISTERS,
        "tokens beyond a multiple of four are not written",
        "for (long t = 0; t < T; t += 4)",
        "for (long t = 0; t + 4 <= T; t += 4)",
        "The results of the last tokens are not written if their number is no multiple of four.",
    ),
)
