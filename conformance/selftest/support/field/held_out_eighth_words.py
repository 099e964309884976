"""The mistakes of `held_out_eighth` in kernels for GPTQ and AWQ, whose codes lie in words of 32 bits."""

from field.held_out_eighth import Planted, planted

TILED, INTEGER = ("more.cpp", "gptq_tiled"), ("more.cpp", "gptq_int8")
WORDS, BYTES = ("vector_kernels.py", "gptq_words"), ("vector_kernels.py", "gptq_8bit")

GPTQ: tuple[Planted, ...] = (
    planted(
        *("gptq-nibbles-reversed", "unpacking", TILED),
        "codes are taken from the highest nibble of a word down",
        "const int code = qweight[k / 8 * N + n] >> 4 * (k % 8) & 15;",
        "const int code = qweight[k / 8 * N + n] >> (28 - 4 * (k % 8)) & 15;",
        "the codes of a word are read in reverse order",
        "the first code of a word is taken from its highest bits",
    ),
    planted(
        *("gptq-signed-bytes", "unpacking", BYTES),
        "codes of 8 bits are read as signed bytes",
        "np.ascontiguousarray(qweight.T).view(np.uint8)",
        "np.ascontiguousarray(qweight.T).view(np.int8)",
        "codes are read as signed integers",
        "codes with their highest bit set become negative",
    ),
    planted(
        *("gptq-zeros-of-version-2", "zeros", WORDS),
        "the one is not added to stored zeros",
        "reshape(-1, columns) + 1",
        "reshape(-1, columns)",
        "the 1 is not added to stored zeros",
        "zeros are one too small",
        "zeros are read as those of version 2",
    ),
    planted(
        *("gptq-zeros-not-scaled", "zeros", ("numpy_kernels.py", "gptq")),
        "zeros are subtracted after the scale",
        "* (codes - zeros[g_idx])",
        "* codes - zeros[g_idx]",
        "zeros are not multiplied by the scale",
        "zeros are subtracted from scaled codes",
    ),
    planted(
        *("gptq-zeros-of-first-group", "zeros", INTEGER),
        "all groups take the zeros of the first",
        "qzeros[g * (N / 8) + n / 8]",
        "qzeros[n / 8]",
        "the zeros of the first group are used for all groups",
        "zeros are taken from the wrong group",
    ),
    planted(
        *("gptq-zero-shifted-by-row", "zeros", TILED),
        "the nibble of a zero is chosen by the row and not by the column",
        "qzeros[g * (N / 8) + n / 8] >> 4 * (n % 8) & 15",
        "qzeros[g * (N / 8) + n / 8] >> 4 * (k % 8) & 15",
        "the zero of another column of the same word is used",
        "the place of a zero in its word follows the row and not the column",
    ),
    planted(
        *("gptq-scale-of-first-token", "scales", INTEGER),
        "all tokens take the scale of the first",
        "x_scale[t] * total",
        "x_scale[0] * total",
        "the scale of the first token is used for all tokens",
        "the scale of the activations belongs to another token",
    ),
    planted(
        *("gptq-groups-in-order", "indexing", BYTES),
        "the group index is ignored",
        "group = g_idx",
        "group = np.arange(len(codes)) * len(scales) // len(codes)",
        "g_idx is ignored",
        "rows are taken to lie in the order of their groups",
    ),
    planted(
        *("gptq-remaining-tokens", "indexing", TILED),
        "tokens after the last whole tile of four are not computed",
        "for (long t = 0; t < T; t += 4) {",
        "for (long t = 0; t + 4 <= T; t += 4) {",
        "the rows of the result after the last whole tile of four tokens are not written",
        "the last rows of the batch are not computed",
    ),
    planted(
        *("gptq-remaining-rows", "indexing", WORDS),
        "rows of K after the last whole run of 32 are left out",
        "for word in range(rows // 8):",
        "for word in range(rows // 32 * 4):",
        "the rows of K after the last multiple of 32 are left out",
        "the tail of K is dropped",
    ),
    planted(
        *("gptq-sums-of-16-bits", "arithmetic", INTEGER),
        "the integer sum of a group is kept in 16 bits",
        "std::vector<int> sums(groups);",
        "std::vector<std::int16_t> sums(groups);",
        "integer sums overflow 16 bits",
    ),
    planted(
        *("gptq-sums-of-last-columns", "old output", TILED),
        "the sums of a tile begin with those of the tile before",
        "float sums[4] = {0};",
        "static float sums[4] = {0};",
        "sums are not set to 0 before a column begins",
        "the result is added to what was computed before",
    ),
)

REPEATED, FACTORED = ("vector_kernels.py", "awq_repeated"), ("more_numpy.py", "awq_factored")
EIGHTS, VECTOR = ("more.cpp", "awq_int8"), ("more.cpp", "awq_vector")
UNROLLED = ("kernels.cpp", "awq")

AWQ: tuple[Planted, ...] = (
    planted(
        *("awq-order-inverted", "unpacking", REPEATED),
        "the order of packing is used in place of its inverse",
        "[0, 4, 1, 5, 2, 6, 3, 7]",
        "[0, 2, 4, 6, 1, 3, 5, 7]",
        "the columns of a word are in the inverse of their order",
        "the columns of a word are read in the wrong order",
    ),
    planted(
        *("awq-columns-exchanged", "unpacking", EIGHTS),
        "the codes of even and odd columns are exchanged",
        "qweight[k * (N / 8) + n / 8] >> place & 15",
        "qweight[k * (N / 8) + n / 8] >> (place ^ 16) & 15",
        "the codes of even and odd columns are exchanged",
        "the halves of a word of codes are exchanged",
    ),
    planted(
        *("awq-zeros-in-plain-order", "zeros", FACTORED),
        "zeros are unpacked without the interleaving that codes have",
        "zeros = (qzeros[..., None] >> order & 15)",
        "zeros = (qzeros[..., None] >> np.arange(0, 32, 4, dtype=np.int32) & 15)",
        "zeros are read in plain order and not in the order of codes",
        "zeros are unpacked in the wrong order",
    ),
    planted(
        *("awq-zeros-plus-one", "zeros", EIGHTS),
        "one is added to zeros, as for GPTQ's version 1",
        "const int zero = qzeros[g * (N / 8) + n / 8] >> place & 15;",
        "const int zero = (qzeros[g * (N / 8) + n / 8] >> place & 15) + 1;",
        "1 is added to zeros",
        "zeros are one too large",
    ),
    planted(
        *("awq-zeros-of-eight", "zeros", VECTOR),
        "stored zeros are ignored, and every zero is 8",
        "qzeros[n * (padded / 8) + g / 8] >> 4 * (g % 8) & 15;",
        "8;",
        "the stored zeros are ignored",
        "every zero is taken to be 8",
    ),
    planted(
        *("awq-zero-shifted-by-column", "zeros", VECTOR),
        "the nibble of a zero is chosen by the column and not by the group",
        ">> 4 * (g % 8) & 15;",
        ">> 4 * (n % 8) & 15;",
        "the zero of another group of the same word is used",
        "the place of a zero in its word follows the column and not the group",
    ),
    planted(
        *("awq-scales-interleaved", "scales", ("torch_kernels.py", "awq")),
        "scales are put into the order of columns as codes are, and lie in that order already",
        "scales.float().repeat_interleave",
        "scales.float()[:, reverse].repeat_interleave",
        "scales are read in the order of packed codes and not in plain order",
        "scales are taken from the wrong column",
    ),
    planted(
        *("awq-scales-in-type-of-x", "scales", UNROLLED),
        "the bits of float16 scales are read in the type of x",
        "half(scales[g * N + 8 * word + i])",
        "load(scales[g * N + 8 * word + i], kind)",
        "float16 scales are read as bfloat16",
        "scales are read in the wrong type",
    ),
    planted(
        *("awq-groups-of-128", "indexing", ("numpy_kernels.py", "awq")),
        "groups are taken to be of 128 rows",
        "np.arange(len(codes)) // group_size",
        "np.arange(len(codes)) // 128",
        "the group size is ignored and 128 is assumed",
        "rows take scale and zero of the wrong group",
    ),
    planted(
        *("awq-stride-not-padded", "indexing", VECTOR),
        "a row of scales is taken to be as long as the number of groups",
        "half(scales[n * padded + g])",
        "half(scales[n * ((K + group_size - 1) / group_size) + g])",
        "the padding of the rows of scales is ignored",
        "the stride of scales is the number of groups and not the padded one",
    ),
    planted(
        *("awq-total-of-8-bits", "arithmetic", EIGHTS),
        "the sum of the codes of x is kept in 8 bits",
        "int total = 0;",
        "std::int8_t total = 0;",
        "the sum of the activations that meets the zero overflows 8 bits",
        "the correction by zeros overflows",
    ),
    planted(
        *("awq-sums-in-float16", "arithmetic", FACTORED),
        "the sums of groups are added in float16",
        "np.zeros((len(x), codes.shape[1]), np.float32)",
        "np.zeros((len(x), codes.shape[1]), np.float16)",
        "sums are accumulated in float16",
        "the accumulator has 16 bits",
    ),
)

EIGHTH_WORDS = (*GPTQ, *AWQ)
