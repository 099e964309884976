"""The eleventh list of mistakes that was held out; see `held_out`. It is about the same five formats as the tenth.

Sixty mistakes, twelve in each of GPTQ, AWQ, Q4_K, MXFP4 and FP8, with activations in float16, bfloat16 and 8 bits, and
in the casts to Q8_K and Q8_0. Those in GPTQ and AWQ are here, the others in `held_out_eleventh_blocks`. A comment
says which public project had a mistake like it. Their right answers are sentences that were chosen before any mistake
was tried; `held_out_eleventh_names` has the names that the diagnosis has for the same.
"""

from field.held_out_eighth import GPTQ, Kind, Planted
from field.held_out_eleventh_names import NAMES
from field.mistakes import HALF

ELEVENTH_KERNELS: dict[tuple[str, str], tuple[str, dict[str, object]]] = {
    ("magic_kernels.py", "gptq_magic"): ("linear.gemm", {**GPTQ, **HALF}),
}

GPTQ_MAGIC, GPTQ_ORDER = ("magic_kernels.py", "gptq_magic"), ("cast_kernels.py", "gptq_order")
GPTQ_SPLIT, GPTQ_RUST = ("split_kernels.py", "gptq_split"), ("words.rs", "gptq")
GPTQ_SORTED, GPTQ_PARTS = ("strips.cpp", "gptq_sorted"), ("tiles.cpp", "gptq_parts")
GPTQ_TILED, GPTQ_TORCH = ("more.cpp", "gptq_tiled"), ("torch_kernels.py", "gptq")
GPTQ_CPP_INT8, GPTQ_TORCH_INT8 = ("more.cpp", "gptq_int8"), ("torch_blocks.py", "gptq_int8")
AWQ_CPP, AWQ_TILES = ("kernels.cpp", "awq"), ("tiles.cpp", "awq_tiles")
AWQ_SPLIT, AWQ_RUST = ("strips.cpp", "awq_split"), ("words.rs", "awq")
AWQ_TORCH, AWQ_TORCH_VECTOR = ("torch_kernels.py", "awq"), ("torch_blocks.py", "awq_vector")
AWQ_REPEATED, AWQ_FACTORED = ("vector_kernels.py", "awq_repeated"), ("more_numpy.py", "awq_factored")
AWQ_CPP_VECTOR = ("more.cpp", "awq_vector")
AWQ_CPP_INT8, AWQ_TORCH_INT8 = ("more.cpp", "awq_int8"), ("torch_groups.py", "awq_int8")


def held(id: str, kind: Kind, place: tuple[str, str], what: str, old: str, new: str, *answers: str) -> Planted:
    """A mistake in a kernel, which is given by its file and its name."""
    return Planted(*place, what, old, new, (*answers, *NAMES.get(id, ())), id, kind)


ELEVENTH_GPTQ: tuple[Planted, ...] = (
    held(
        "11-gptq-odd-codes",
        "unpacking",
        GPTQ_MAGIC,
        "codes in the upper half of a byte are not divided by 16",
        "high.view(np.float16).astype(np.float32) / 16 - 64",
        "high.view(np.float16).astype(np.float32) - 1024",
        "Every second code along K is 16 times too large.",
        "Codes in the upper half of a byte are not shifted down by four bits.",
    ),
    held(
        "11-gptq-top-code",
        "unpacking",
        GPTQ_CPP_INT8,
        "the topmost code of a word is shifted down with its sign and not masked",
        "const int code = qweight[k / 8 * N + n] >> 4 * (k % 8) & 15;",
        "const int code = k % 8 == 7 ? qweight[k / 8 * N + n] >> 28 : qweight[k / 8 * N + n] >> 4 * (k % 8) & 15;",
        "The last code of a word is sign-extended: codes from 8 to 15 become -8 to -1.",
    ),
    held(
        "11-gptq-zero-wraps",
        "zeros",
        GPTQ_TORCH,
        "the zero is masked to four bits after one was added",
        "wf.view(1, 1, -1)), 15) + 1",
        "wf.view(1, 1, -1)) + 1, 15)",
        "A stored zero of 15 gives the zero 0 instead of 16: the sum wraps in four bits.",
    ),
    held(
        "11-gptq-zero-by-group",
        "zeros",
        GPTQ_SORTED,
        "the zero's place in its word is chosen by the group, as if words held groups",
        "n / 8] >> 4 * (n % 8) & 15) + 1",
        "n / 8] >> 4 * (g % 8) & 15) + 1",
        "The zero's place in its word is that of the group: it must be that of the column.",
        "A column uses the zero of another column of the same word.",
    ),
    held(  # SGLang's Marlin for experts loaded one row of zeros for a step of K that spans several groups
        "11-gptq-zero-of-step",
        "zeros",
        GPTQ_PARTS,
        "all rows of a step of 128 use the zero of its first row",
        "(qzeros[g * (N / 8)",
        "(qzeros[g_idx[start] * (N / 8)",
        "Zeros are read once for 128 rows: groups that start later in the step use the zero of its first group.",
        "The zero is that of another group, while the scale is right.",
    ),
    held(  # vLLM passed zeros to a kernel that adds one without the one taken off
        "11-gptq-zero-as-stored",
        "zeros",
        GPTQ_MAGIC,
        "the stored zero is used as it is",
        "zeros = (qzeros[:, :, None] >> shifts & 15).reshape(-1, columns) + 1",
        "zeros = (qzeros[:, :, None] >> shifts & 15).reshape(-1, columns)",
        "One is not added to the stored zero.",
        "Zeros are taken as those of gptq-v2, which are stored as they are.",
    ),
    held(
        "11-gptq-first-token",
        "scales",
        GPTQ_TORCH_INT8,
        "all tokens are scaled by the scale of the first",
        "return y * x_scale",
        "return y * x_scale[0]",
        "Every token is multiplied by the scale of the first token.",
    ),
    held(
        "11-gptq-x-in-place",
        "indexing",
        GPTQ_ORDER,
        "rows of W are put into the order of groups, and x is not",
        "return product(x[:, order], weights)",
        "return product(x, weights)",
        "x is not permuted as the rows of W are when g_idx is not in order.",
    ),
    held(  # CUTLASS looked scales up by the step within a part of K, so that all parts used those of the first
        "11-gptq-part-groups",
        "indexing",
        GPTQ_SPLIT,
        "each part of K uses the groups of the first part",
        "group = g_idx[rows]",
        "group = g_idx[: len(codes)]",
        "Each part of K uses the scales and zeros of the first part.",
        "The group of a row is looked up by its place within a part of K, without the part's start.",
    ),
    held(
        "11-gptq-groups-in-order",
        "indexing",
        GPTQ_CPP_INT8,
        "the group is the row divided by the group size",
        "const long g = g_idx[k];",
        "const long g = k / ((K + groups - 1) / groups);",
        "g_idx is ignored: the group of row k is taken to be k divided by the group size.",
    ),
    held(  # AutoGPTQ's ExLlama kernel overflowed with rows that are ordered by activation
        "11-gptq-half-sums",
        "arithmetic",
        GPTQ_SORTED,
        "the sum of a group is kept in float16",
        "part += gathered[i] * (code - zero);",
        "part = half(to_half(part + gathered[i] * (code - zero)));",
        "Sums are accumulated in float16 and not in float32.",
        "The running sum is rounded to float16 and overflows where float32 does not.",
    ),
    held(  # MLX launched as many tiles of columns as fit, and the rest was never written
        "11-gptq-last-columns",
        "old output",
        GPTQ_RUST,
        "columns after the last whole tile of 16 are not computed",
        "for j in 0..n {",
        "for j in 0..n / 16 * 16 {",
        "The columns that remain after tiles of 16 are never written: the output holds what was there before.",
    ),
)

ELEVENTH_AWQ: tuple[Planted, ...] = (
    held(
        "11-awq-plain-order",
        "unpacking",
        AWQ_RUST,
        "codes and zeros are taken from words in plain order",
        "let shift = 4 * PLACES[j % 8];",
        "let shift = 4 * (j % 8);",
        "Words are unpacked in sequential order and not in AWQ's interleaved order.",
    ),
    held(
        "11-awq-inverse-order",
        "unpacking",
        AWQ_TORCH,
        "columns are put into their order by the inverse table",
        "[0, 4, 1, 5, 2, 6, 3, 7]",
        "[0, 2, 4, 6, 1, 3, 5, 7]",
        "The inverse of AWQ's order is used to unpack: the order of packing in place of that of unpacking.",
        "The columns within a word of eight are permuted, in codes and zeros alike.",
    ),
    held(  # pie's repacking of AWQ for Marlin left the interleaving of eight out for zeros alone
        "11-awq-zeros-plain",
        "zeros",
        AWQ_REPEATED,
        "zeros are not put into the order of columns",
        "zeros = (qzeros[..., None] >> nibbles & 15)[..., order]",
        "zeros = (qzeros[..., None] >> nibbles & 15)",
        "Zeros are unpacked in sequential order, while codes are unpacked in AWQ's order.",
    ),
    held(  # GPTQModel took one from AWQ's zeros for ExLlama, and a zero of 0 became 15, which is read as 16
        "11-awq-zero-of-0",
        "zeros",
        AWQ_CPP_INT8,
        "one is taken from the zero in four bits and added again: 0 becomes 16",
        "const int zero = qzeros[g * (N / 8) + n / 8] >> place & 15;",
        "const int zero = ((qzeros[g * (N / 8) + n / 8] >> place & 15) - 1 & 15) + 1;",
        "A zero of 0 becomes 16: it wraps where one is taken from it.",
    ),
    held(
        "11-awq-zero-plus-one",
        "zeros",
        AWQ_FACTORED,
        "one is added to zeros, as in GPTQ",
        "zeros = (qzeros[..., None] >> order & 15).reshape(len(qzeros), -1).astype(np.float32)",
        "zeros = (qzeros[..., None] >> order & 15).reshape(len(qzeros), -1).astype(np.float32) + 1",
        "One is added to the stored zero: AWQ stores zeros as they are, unlike GPTQ.",
    ),
    held(
        "11-awq-zero-unscaled",
        "zeros",
        AWQ_TORCH_INT8,
        "the zero's part is subtracted without the scale",
        "y += scale * (dots - totals * zeros[group])",
        "y += scale * dots - totals * zeros[group]",
        "The zero times the sum of x is subtracted after the scale was applied: it is not multiplied by the scale.",
    ),
    held(
        "11-awq-tiled-groups",
        "scales",
        AWQ_REPEATED,
        "scales and zeros are repeated as a whole and not row by row",
        "np.repeat(each, group_size, axis=0)",
        "np.tile(each, (group_size, 1))",
        "The group of row k is k modulo the number of groups, not k divided by the group size.",
    ),
    held(
        "11-awq-scales-interleaved",
        "scales",
        AWQ_CPP,
        "scales are interleaved as codes are",
        "half(scales[g * N + 8 * word + i])",
        "half(scales[g * N + 8 * word + places[i]])",
        "Scales are read in AWQ's interleaved order, but they are stored in the order of columns.",
        "The scales of the eight columns of a word are permuted.",
    ),
    held(
        "11-awq-parts-floor",
        "indexing",
        AWQ_SPLIT,
        "the number of groups in a part of K is rounded down",
        "(K / group_size + 2) / 3 * group_size",
        "K / group_size / 3 * group_size",
        "The last groups of K are left out where the number of groups is no multiple of 3.",
        "The last rows of K are not summed.",
    ),
    held(
        "11-awq-unpadded-scales",
        "indexing",
        AWQ_CPP_VECTOR,
        "rows of scales are taken to be as long as the number of groups",
        "half(scales[n * padded + g])",
        "half(scales[n * (K / group_size) + g])",
        "The padding of the rows of scales is ignored: columns after the first use scales of other columns.",
    ),
    held(  # llama.cpp keeps the sum of a block of activations in float16, where it overflowed
        "11-awq-half-totals",
        "arithmetic",
        AWQ_TORCH_VECTOR,
        "the sum of a group of x is kept in float16",
        "totals = runs.sum(dim=2)",
        "totals = runs.sum(dim=2).half()",
        "The sum of x that meets the zero is rounded to float16.",
    ),
    held(  # Triton's matrix product added its parts to memory that was not set to zero
        "11-awq-old-sums",
        "old output",
        AWQ_SPLIT,
        "the sums of parts are kept between calls and not set to zero",
        "std::vector<float> sums(3 * N);",
        "static std::vector<float> sums;\n    sums.resize(3 * N);",
        "Sums are not set to zero before a call: they hold those of the call before.",
    ),
)

ELEVENTH_WORDS = ELEVENTH_GPTQ + ELEVENTH_AWQ
