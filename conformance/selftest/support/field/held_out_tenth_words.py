"""Mistakes of the tenth list in GPTQ and AWQ; see `held_out_tenth`."""

from field.held_out_eighth import Planted
from field.held_out_tenth import held

GPTQ_SORTED, GPTQ_SPLIT = ("strips.cpp", "gptq_sorted"), ("split_kernels.py", "gptq_split")
GPTQ_PARTS, GPTQ_RUST = ("tiles.cpp", "gptq_parts"), ("words.rs", "gptq")
GPTQ_TORCH_INT8, GPTQ_CPP_INT8 = ("torch_blocks.py", "gptq_int8"), ("more.cpp", "gptq_int8")
AWQ_SPLIT, AWQ_TILES = ("strips.cpp", "awq_split"), ("tiles.cpp", "awq_tiles")
AWQ_RUST, AWQ_CPP = ("words.rs", "awq"), ("kernels.cpp", "awq")
AWQ_REPEATED = ("vector_kernels.py", "awq_repeated")
AWQ_TORCH_INT8, AWQ_CPP_INT8 = ("torch_groups.py", "awq_int8"), ("more.cpp", "awq_int8")

TENTH_GPTQ: tuple[Planted, ...] = (
    held(
        *("gptq_zero_as_stored", "zeros", GPTQ_SORTED),
        "the stored zero is used as it is",  # vLLM read zeros of gptq-v2 as those of gptq-v1
        *("const int zero = (qzeros[g * (N / 8) + n / 8] >> 4 * (n % 8) & 15) + 1;",),
        *("const int zero = qzeros[g * (N / 8) + n / 8] >> 4 * (n % 8) & 15;",),
        "stored zeros are used without adding one",
        "zeros are read as those of gptq-v2",
    ),
    held(
        *("gptq_zero_eight", "zeros", GPTQ_SPLIT),
        "every zero is 8, as if the matrix were symmetric",  # vLLM mistook whether Machete's matrix has zeros
        *("zeros = (qzeros[:, :, None] >> SHIFTS & 15).reshape(-1, columns) + 1",),
        *("zeros = np.full((len(qzeros), columns), 8)",),
        "the stored zeros are ignored, and 8 is used for all of them",
    ),
    held(
        *("gptq_zero_wraps", "zeros", GPTQ_TORCH_INT8),
        "the mask comes after the one is added, so a zero of 16 becomes 0",  # in AutoGPTQ a zero of 0 wrapped
        *("zeros = (qzeros[:, :, None] >> SHIFTS & 15).flatten(1) + 1",),
        *("zeros = ((qzeros[:, :, None] >> SHIFTS) + 1 & 15).flatten(1)",),
        "a zero of 16 (stored 15) wraps to 0",
        "zeros are cut to 4 bits after adding one",
    ),
    held(
        *("gptq_zero_by_row", "zeros", GPTQ_RUST),
        "the zero's place in its word is that of the row",
        *("let zero = (*qzeros.add(g * (n / 8) + j / 8) >> (4 * (j % 8)) & 15) as i32 + 1;",),
        *("let zero = (*qzeros.add(g * (n / 8) + j / 8) >> (4 * (p % 8)) & 15) as i32 + 1;",),
        "the nibble of a zero is chosen by the row instead of the column",
        "a column takes the zeros of other columns in the same word",
    ),
    held(
        *("gptq_signed_top", "unpacking", GPTQ_PARTS),
        "the last code of a word is shifted without a mask, and the words are signed",
        *("const int code = word >> 4 * i & 15;",),
        *("const int code = i < 7 ? word >> 4 * i & 15 : word >> 28;",),
        "the highest nibble of a word is sign-extended",
        "the last code of each word is read as signed: 8 to 15 become -8 to -1",
    ),
    held(
        *("gptq_rows_apart", "unpacking", GPTQ_TORCH_INT8),
        "the first codes of all words come first, then the second codes",
        *("codes = (qweight[:, None] >> SHIFTS[:, None] & 15).flatten(0, 1)",),
        *("codes = (qweight[None] >> SHIFTS[:, None, None] & 15).flatten(0, 1)",),
        "the eight codes of a word are taken as rows K/8 apart instead of eight consecutive rows",
        "rows are in the wrong order after unpacking",
    ),
    held(
        *("gptq_scale_of_part", "scales", GPTQ_SPLIT),
        "a part of K has one row of scales",  # vLLM's Triton W4A16 had tiles longer than a group
        *("weights = scales.astype(np.float32)[group] *",),
        *("weights = scales.astype(np.float32)[group[:1]] *",),
        "all rows of a part of K take the scale of its first row's group",
        "one scale is used for several groups",
    ),
    held(
        *("gptq_x_in_order", "indexing", GPTQ_SORTED),
        "x is not put into the order of the rows",
        *("gathered[i] = load(x[rows[i]], kind);",),
        *("gathered[i] = load(x[i], kind);",),
        "x is not permuted when the rows are sorted by g_idx",
    ),
    held(
        *("gptq_no_g_idx", "indexing", GPTQ_CPP_INT8),
        "groups are consecutive rows",  # vLLM was wrong for act-order on ROCm
        *("const long g = g_idx[k];",),
        *("const long g = k * groups / K;",),
        "g_idx is ignored: groups are taken as consecutive rows",
    ),
    held(
        *("gptq_last_rows", "indexing", GPTQ_SPLIT),
        "the length of a part of K is rounded down",
        *("step = -(-len(qweight) // 3)",),
        *("step = len(qweight) // 3",),
        "the last rows are left out if the words of K cannot be divided by 3",
        "rows at the end of K are missing from the sum",
    ),
    held(
        *("gptq_partial_type", "arithmetic", GPTQ_SPLIT),
        "the sums of the parts have the type of x",  # vLLM's Marlin overflowed where it added up in float16
        *("partial = np.zeros((3, len(x), columns), np.float32)",),
        *("partial = np.zeros((3, len(x), columns), x.dtype)",),
        "partial sums are rounded to bfloat16 before they are added",
        "the sum is kept in bfloat16 instead of float32",
    ),
    held(
        *("gptq_added_output", "old output", GPTQ_SORTED),
        "the result is added to what y held",  # aiter's split K adds to memory that must be 0
        *("y[n] = store(sum, kind);",),
        *("y[n] = store(load(y[n], kind) + sum, kind);",),
        "the result is added to what the output held before the call",
    ),
)

TENTH_AWQ: tuple[Planted, ...] = (
    held(
        *("awq_inverse_order", "unpacking", AWQ_SPLIT),
        "the order in which words are packed, where its inverse is needed",  # AutoAWQ has both tables
        *("shifts[8] = {0, 16, 4, 20, 8, 24, 12, 28};",),
        *("shifts[8] = {0, 8, 16, 24, 4, 12, 20, 28};",),
        "columns of a word are unpacked in the order 0 2 4 6 1 3 5 7 instead of its inverse 0 4 1 5 2 6 3 7",
        "codes and zeros are unpacked in the wrong order within a word",
    ),
    held(
        *("awq_codes_plain", "unpacking", AWQ_RUST),
        "codes in the plain order of nibbles, zeros in AWQ's",
        *("let code = (*qweight.add((g * group_size + p) * (n / 8) + j / 8) >> shift & 15) as i32;",),
        *("let code = (*qweight.add((g * group_size + p) * (n / 8) + j / 8) >> (4 * (j % 8)) & 15) as i32;",),
        "codes are unpacked in plain order 0 to 7 instead of AWQ's order",
    ),
    held(
        *("awq_signed_codes", "unpacking", AWQ_TORCH_INT8),
        "codes as signed numbers of 4 bits",  # 1bit-MONSTER read unsigned codes of 4 bits as signed
        *("codes = (qweight[:, :, None] >> PLACES & 15).flatten(1)",),
        *("codes = (qweight[:, :, None] << 28 - PLACES >> 28).flatten(1)",),
        "codes are read as signed: 8 to 15 become -8 to -1",
    ),
    held(
        *("awq_zero_underflow", "zeros", AWQ_SPLIT),
        "zeros are stored less one in 4 bits and read plus one",  # GPTQModel repacked AWQ for ExLlamaV2 so
        *("const int zero = qzeros[g * (N / 8) + n / 8] >> shift & 15;",),
        *("const int zero = ((qzeros[g * (N / 8) + n / 8] >> shift) - 1 & 15) + 1;",),
        "a zero of 0 becomes 16",
    ),
    held(
        *("awq_zero_plus_one", "zeros", AWQ_REPEATED),
        "one is added to the zeros",
        *("zeros = (qzeros[..., None] >> nibbles & 15)[..., order].reshape(len(qzeros), -1)",),
        *("zeros = (qzeros[..., None] >> nibbles & 15)[..., order].reshape(len(qzeros), -1) + 1",),
        "one is added to the zeros, as in gptq-v1",
    ),
    held(
        *("awq_total_of_row", "zeros", AWQ_TORCH_INT8),
        "the zero of a group meets the sum of all of x",
        *("totals = own.sum(dim=1, keepdim=True)",),
        *("totals = x_codes.int().sum(dim=1, keepdim=True)",),
        "zeros are multiplied by the sum of the whole row of x instead of the sum of its group",
    ),
    held(
        *("awq_group_of_tile", "scales", AWQ_CPP),
        "128 rows have the scale and zero of the first of them",  # LUT-GEMM is right only if a tile of K is a group
        *("const long g = k / group_size;",),
        *("const long g = k / 128 * 128 / group_size;",),
        "all rows of a tile of 128 use the scale and zero of its first group: groups shorter than 128 are ignored",
    ),
    held(
        *("awq_first_token_scale", "scales", AWQ_CPP_INT8),
        "the scale of the first token for all tokens",
        *("y[t * N + n] = x_scale[t] * sum;",),
        *("y[t * N + n] = x_scale[0] * sum;",),
        "every token is scaled by the scale of token 0",
    ),
    held(
        *("awq_half_tile", "indexing", AWQ_TILES),
        "the upper half of a tile has the scales and zeros of the lower half",  # vLLM's AWQ did so for N = 64
        *("const long n = first + i;\n                        scale[i]",),
        *("const long n = first + i % 64;\n                        scale[i]",),
        "columns 64 to 127 of a tile use the scales and zeros of columns 0 to 63",
    ),
    held(
        *("awq_groups_restart", "indexing", AWQ_SPLIT),
        "each part of K begins at the first group",
        *("const long g = k / group_size;",),
        *("const long g = (k - part * each) / group_size;",),
        "each part of K starts again at the scales and zeros of group 0",
        "the group of a row is counted from the start of its part",
    ),
    held(
        *("awq_narrow_sums", "arithmetic", AWQ_CPP),
        "each sum is rounded to the type of x after every row",  # OpenVINO added up in float16
        *("sums[i] += xk * (half(scales[g * N + 8 * word + i]) * difference);",),
        *("sums[i] = load(store(sums[i] + xk * (half(scales[g * N + 8 * word + i]) * difference), kind), kind);",),
        "the sum is kept in bfloat16 instead of float32",
    ),
    held(
        *("awq_last_tile", "old output", AWQ_TILES),
        "a last tile of fewer columns is not computed",  # a grouped product of atlas wrote half of its columns
        *("first < N; first += 128",),
        *("first + 128 <= N; first += 128",),
        "the last columns are not written if N cannot be divided by 128",
        "some results are what the memory held before",
    ),
)

TENTH_WORDS = TENTH_GPTQ + TENTH_AWQ
