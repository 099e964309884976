"""The twelfth list of mistakes that was held out; see `held_out`. All of its kernels were written for it.

Sixty mistakes, twelve in each of GPTQ, AWQ, Q4_K, MXFP4 and FP8, with activations in float16, bfloat16 and 8 bits, and
in the casts to Q8_K and Q8_0. Those in GPTQ and AWQ are here, the others in `held_out_twelfth_blocks` and
`held_out_twelfth_bytes`. A comment says which public project had a mistake like it. The right answers are sentences
that were chosen before any mistake was tried; `held_out_twelfth_names` has the names that the diagnosis has for the
same.
"""

from field.held_out_eighth import GPTQ, Kind, Planted
from field.held_out_twelfth_names import NAMES
from field.mistakes import HALF

BRAIN: dict[str, object] = {"activations": "bfloat16", "result": "bfloat16"}
INT8: dict[str, object] = {"activations": "int8-token", "result": "float32"}
Q8_0: dict[str, object] = {"activations": "q8_0", "result": "float32"}
Q8_K: dict[str, object] = {"activations": "q8_k", "result": "float32"}

TWELFTH_KERNELS: dict[tuple[str, str], tuple[str, dict[str, object]]] = {
    ("lanes.cpp", "gptq_warp"): ("linear.gemv", {**GPTQ, **HALF}),
    ("lanes.cpp", "gptq_panels"): ("linear.gemm", {**GPTQ, **BRAIN}),
    ("planes_kernels.py", "gptq_planes"): ("linear.gemm_cast", {**GPTQ, **INT8}),
    ("torch_tiles.py", "awq_dequantised"): ("linear.gemm", {"format": "awq-gemm", **HALF}),
    ("lanes.cpp", "awq_warp"): ("linear.gemv", {"format": "awq-gemm", **BRAIN}),
    ("lanes.cpp", "awq_lookup"): ("linear.gemm_cast", {"format": "awq-gemm", "group_size": (32, 64, 128), **INT8}),
    ("panels.cpp", "q4_k_halves"): ("linear.gemv", {"format": "q4_k", **HALF}),
    ("planes_kernels.py", "q4_k_chosen"): ("linear.gemm", {"format": "q4_k", **BRAIN}),
    ("panels.cpp", "q4_k_interleaved"): ("linear.gemm_cast", {"format": "q4_k", **Q8_K}),
    ("panels.cpp", "cast_q8_k"): ("formats.quantize", {"format": "q8_k"}),
    ("panels.cpp", "mxfp4_warp"): ("linear.gemv", {"format": "mxfp4", **HALF}),
    ("torch_tiles.py", "mxfp4_biased"): ("linear.gemm", {"format": "mxfp4", **BRAIN}),
    ("panels.cpp", "mxfp4_twos"): ("linear.gemm_cast", {"format": "mxfp4", **Q8_0}),
    ("planes_kernels.py", "mxfp4_planes"): ("linear.gemm_cast", {"format": "mxfp4", **INT8}),
    ("panels.cpp", "cast_q8_0"): ("formats.quantize", {"format": "q8_0"}),
    ("panels.cpp", "fp8_registers"): ("linear.gemm", {"format": "fp8-channel", **HALF}),
    ("torch_tiles.py", "fp8_dequantised"): ("linear.gemm", {"format": "fp8-block", **BRAIN}),
    ("panels.cpp", "fp8_workspace"): ("linear.gemv", {"format": "fp8-block", **BRAIN}),
    ("planes_kernels.py", "fp8_strips"): ("linear.gemm_cast", {"format": "fp8-channel", **INT8}),
}

GPTQ_WARP, GPTQ_PANELS = ("lanes.cpp", "gptq_warp"), ("lanes.cpp", "gptq_panels")
GPTQ_PLANES, AWQ_TORCH = ("planes_kernels.py", "gptq_planes"), ("torch_tiles.py", "awq_dequantised")
AWQ_WARP, AWQ_LOOKUP = ("lanes.cpp", "awq_warp"), ("lanes.cpp", "awq_lookup")


def held(id: str, kind: Kind, place: tuple[str, str], what: str, old: str, new: str, *answers: str) -> Planted:
    """A mistake in a kernel, which is given by its file and its name."""
    return Planted(*place, what, old, new, (*answers, *NAMES.get(id, ())), id, kind)


TWELFTH_GPTQ: tuple[Planted, ...] = (
    held(
        "12-gptq-first-on-top",
        "unpacking",
        GPTQ_WARP,
        "the first code of a word is taken from its most significant bits",
        """const int code = packed & 15;
                    part += load(x[k], kind) * (half(scales[g * N + n]) * (code - zero));
                    packed >>= 4;""",
        """const int code = packed >> 28;
                    part += load(x[k], kind) * (half(scales[g * N + n]) * (code - zero));
                    packed <<= 4;""",
        "The eight codes of a word are read in reverse order.",
        "The first code of a word is read from the highest four bits instead of the lowest.",
    ),
    held(
        "12-gptq-signed-bytes",
        "unpacking",
        GPTQ_PLANES,
        "bytes are signed, so that the upper code of each is shifted down with its sign",
        "np.ascontiguousarray(qweight.T).view(np.uint8)",
        "np.ascontiguousarray(qweight.T).view(np.int8)",
        "The upper code of each byte is sign-extended: codes from 8 to 15 of odd rows become -8 to -1.",
        "Every second code along K is read as a signed number of four bits.",
    ),
    # vLLM took checkpoints of one of the two formats of GPTQ for the other, whose zeros are stored as they are.
    held(
        "12-gptq-zero-as-stored",
        "zeros",
        GPTQ_PANELS,
        "one is not added to the zeros",
        "(zeros >> 4 * c & 15) + 1;",
        "zeros >> 4 * c & 15;",
        "One is not added to the stored zeros.",
        "Zeros are one too small.",
    ),
    # AutoGPTQ's zeros wrap where one is added or subtracted; its kernels did not agree on when they are masked.
    held(
        "12-gptq-sixteen-wraps",
        "zeros",
        GPTQ_PLANES,
        "a zero of 16 is masked to 0",
        """(pairs & 15) + 1
    zeros[:, 1::2] = (pairs >> 4) + 1""",
        """(pairs & 15) + 1 & 15
    zeros[:, 1::2] = (pairs >> 4) + 1 & 15""",
        "A zero of 16 wraps to 0: a stored zero of 15 is masked to four bits after one was added.",
        "A stored zero of 15 is read as 0.",
    ),
    # vLLM's kernels for XPU and Machete took the zeros of symmetric GPTQ for those of asymmetric, or the reverse.
    held(
        "12-gptq-zero-of-eight",
        "zeros",
        GPTQ_WARP,
        "all weights are taken for symmetric: the zero is 8",
        "const int zero = (qzeros[g * (N / 8) + n / 8] >> 4 * (n % 8) & 15) + 1;",
        "const int zero = 8;",
        "The stored zeros are ignored; 8 is subtracted from each code.",
        "The zero is always 8.",
    ),
    # vLLM's products with int8 had a mistake in the term that corrects for a zero.
    held(
        "12-gptq-zero-meets-all-rows",
        "zeros",
        GPTQ_PLANES,
        "the zero of a group meets the sum of all codes of x",
        "own.sum(axis=1, keepdims=True) * zeros[group]",
        "x_codes.astype(np.int32).sum(axis=1, keepdims=True) * zeros[group]",
        "The zero of a group is multiplied by the sum of all of x instead of the sum of the rows of its group.",
    ),
    # AutoGPTQ 0.3.0 gave nonsense for matrices with groups that were quantised in the order of their activations.
    held(
        "12-gptq-scale-by-position",
        "scales",
        GPTQ_PANELS,
        "scales are chosen by the position of a sorted row",
        "scales + g_idx[k] * N",
        "scales + g_idx[i] * N",
        "With groups in another order the scale of a row is that of another row's group.",
        "Rows are sorted by their groups, but their scales are not.",
    ),
    # compressed-tensors reduced the scales of tokens over the tokens.
    held(
        "12-gptq-first-token-scale",
        "scales",
        GPTQ_PLANES,
        "all tokens have the scale of the first",
        "return y * x_scale",
        "return y * x_scale[0]",
        "The scale of the first token is used for all tokens.",
    ),
    # MLX chose a product without remainder of K by the group and not by its tile.
    held(
        "12-gptq-words-left",
        "indexing",
        GPTQ_WARP,
        "words beyond a multiple of 32 are not added",
        "for (long first = 0; first < words; first += 32)",
        "for (long first = 0; first + 32 <= words; first += 32)",
        "The last rows are not added if K is no multiple of 256.",
        "What remains of K after whole steps of 256 rows is left out.",
    ),
    held(
        "12-gptq-x-unsorted",
        "indexing",
        GPTQ_PANELS,
        "rows are sorted by their groups, x is not",
        "load(x[(t + r) * K + k], kind)",
        "load(x[(t + r) * K + i], kind)",
        "x is not put into the order of the sorted rows.",
        "With groups in another order each row meets another row's x.",
    ),
    held(
        "12-gptq-group-of-a-word",
        "indexing",
        GPTQ_WARP,
        "the eight rows of a word have the group of the first",
        "g = g_idx[k];",
        "g = g_idx[8 * word];",
        "All rows of a word take the group of the word's first row.",
        "Scales and zeros are those of the first of eight rows.",
    ),
    # bitsandbytes and others reduced half of the lanes on devices whose warps have 64.
    held(
        "12-gptq-half-a-warp",
        "arithmetic",
        GPTQ_WARP,
        "the tree of sums begins with 16 of 32 lanes",
        "int step = 16; step > 0; step /= 2",
        "int step = 8; step > 0; step /= 2",
        "The sums of the upper 16 of 32 lanes are not added.",
        "Rows 128 to 255 of each 256 are left out of the sum.",
    ),
)

TWELFTH_AWQ: tuple[Planted, ...] = (
    held(
        "12-awq-inverse-order",
        "unpacking",
        AWQ_TORCH,
        "columns have the order of packing instead of its inverse",
        "[0, 4, 1, 5, 2, 6, 3, 7]",
        "[0, 2, 4, 6, 1, 3, 5, 7]",
        "The order of columns in a word is the inverse of AWQ's.",
        "Codes and zeros of the columns of a word are permuted.",
    ),
    held(
        "12-awq-codes-plain",
        "unpacking",
        AWQ_WARP,
        "codes are read in the order of their bits, zeros in that of AWQ",
        "codes >> PLACES[c] & 15",
        "codes >> 4 * c & 15",
        "Codes are read in the plain order of their bits instead of AWQ's order.",
        "The codes of the columns of a word are permuted.",
    ),
    # Decoders of TileLang took numbers of four bits with a sign for such without, or the reverse.
    held(
        "12-awq-signed-codes",
        "unpacking",
        AWQ_LOOKUP,
        "the highest bit of a code counts -8",
        "table[16 * q + patterns[bit]] * (1 << bit)",
        "table[16 * q + patterns[bit]] * (bit == 3 ? -8 : 1 << bit)",
        "Codes are taken for signed numbers: 8 to 15 become -8 to -1.",
        "Codes are sign-extended.",
    ),
    # GPTQModel's ExLlama kernel for AWQ kept the one that GPTQ adds.
    held(
        "12-awq-one-more",
        "zeros",
        AWQ_TORCH,
        "one is added to the zeros, as for GPTQ",
        "zeros = qzeros[group].repeat_interleave(8) >> shifts & 15",
        "zeros = (qzeros[group].repeat_interleave(8) >> shifts & 15) + 1",
        "One is added to the zeros, as GPTQ needs and AWQ does not.",
        "Zeros are one too large.",
    ),
    # A conversion of AWQ's zeros to Marlin's layout left the order of the eight columns out; the codes were right.
    held(
        "12-awq-zeros-plain",
        "zeros",
        AWQ_TORCH,
        "zeros are read in the order of their bits, codes in that of AWQ",
        "zeros = qzeros[group].repeat_interleave(8) >> shifts & 15",
        "zeros = qzeros[group].repeat_interleave(8) >> 4 * (torch.arange(columns, dtype=torch.int32) % 8) & 15",
        "Zeros are read in the plain order of their bits instead of AWQ's order.",
        "The zeros of the columns of a word are permuted.",
    ),
    # A path of llm-awq subtracts 8 scales from offsets that have them already.
    held(
        "12-awq-eight-more",
        "zeros",
        AWQ_WARP,
        "8 is subtracted besides the zero",
        "-scale[c] * (zeros >> PLACES[c] & 15)",
        "-scale[c] * ((zeros >> PLACES[c] & 15) + 8)",
        "8 is subtracted from each code besides its zero.",
        "Zeros are 8 too large.",
    ),
    # GPTQModel stored AWQ's zeros less one, so that a zero of 0 became 15, and added one again.
    held(
        "12-awq-nought-is-sixteen",
        "zeros",
        AWQ_LOOKUP,
        "a zero of 0 is read as 16",
        "const int zero = qzeros[g * (N / 8) + n / 8] >> PLACES[n % 8] & 15;",
        "const int zero = ((qzeros[g * (N / 8) + n / 8] >> PLACES[n % 8]) - 1 & 15) + 1;",
        "A zero of 0 is read as 16.",
        "A zero of 0 wraps to 15 when one is subtracted, and one is added again.",
    ),
    # LUT-GEMM takes one group for a tile of K, whose size need not be the group's.
    held(
        "12-awq-group-of-a-tile",
        "scales",
        AWQ_TORCH,
        "tiles have 128 rows, and the scales and zeros of their first group",
        "step = math.gcd(32, group_size)",
        "step = 128",
        "All 128 rows of a tile take the scale and zero of the tile's first group, also if groups are smaller.",
        "With groups of 32 or 64 rows only each fourth or second group's scale is used.",
    ),
    held(
        "12-awq-zeros-transposed",
        "indexing",
        AWQ_WARP,
        "zeros are read as those of a transposed array",
        "qzeros[g * (N / 8) + word]",
        "qzeros[word * (K / group_size) + g]",
        "Zeros are read from the transposed place: columns x groups instead of groups x columns.",
        "A column takes the zeros of another column and group.",
    ),
    held(
        "12-awq-rows-of-a-table",
        "indexing",
        AWQ_LOOKUP,
        "the four rows of a pattern are in reverse order",
        "(code >> bit & 1) << i;",
        "(code >> bit & 1) << (3 - i);",
        "Within each four rows the codes meet x in reverse order.",
    ),
    # Parts of K that are no whole number of tiles or groups were wrong in MLX and Composable Kernel.
    held(
        "12-awq-odd-group",
        "indexing",
        AWQ_WARP,
        "the last group is left out if the number of groups is odd",
        "g < K / group_size; g++",
        "g < K / group_size / 2 * 2; g++",
        "The last group is not added if the number of groups is odd.",
    ),
    held(
        "12-awq-table-of-bytes",
        "arithmetic",
        AWQ_LOOKUP,
        "the sums of a table are stored in 8 bits",
        "std::vector<int> table(4 * K);",
        "std::vector<std::int8_t> table(4 * K);",
        "The sums of four numbers of x overflow 8 bits.",
        "An integer sum is held in too few bits and wraps.",
    ),
)

TWELFTH_WORDS = TWELFTH_GPTQ + TWELFTH_AWQ
