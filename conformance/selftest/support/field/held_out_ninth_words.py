"""The mistakes of `held_out_ninth` in kernels for GPTQ and AWQ, whose codes lie in words of 32 bits."""

from field.held_out_eighth import Planted
from field.held_out_ninth import held

PARTS, RUST_GPTQ, GROUPS = ("tiles.cpp", "gptq_parts"), ("words.rs", "gptq"), ("torch_blocks.py", "gptq_int8")

GPTQ: tuple[Planted, ...] = (
    held(
        *("gptq-order-of-awq", "unpacking", RUST_GPTQ),
        "codes are taken from a word in AWQ's order of columns",
        ">> (4 * (p % 8)) & 15) as i32;",
        ">> (4 * PLACES[p % 8]) & 15) as i32;",
        "The codes of a word are taken in the order 0, 4, 1, 5, 2, 6, 3, 7 instead of 0 to 7.",
    ),
    held(
        *("gptq-mask-of-3-bits", "unpacking", GROUPS),
        "codes of four bits are masked to three",
        "SHIFTS[:, None] & 15)",
        "SHIFTS[:, None] & 7)",
        "The highest bit of each code is lost: the mask is 7 instead of 15.",
    ),
    # AutoGPTQ masked a zero to four bits after it had added one.
    held(
        *("gptq-zero-16-wraps", "zeros", RUST_GPTQ),
        "a zero is masked to four bits after one was added",
        "as i32 + 1;",
        "as i32 + 1 & 15;",
        "A stored zero of 15 means 16, and the kernel makes it 0.",
    ),
    # vLLM's kernels for Intel's GPUs set every zero to 8 where a model is said to be symmetric.
    held(
        *("gptq-zero-is-8", "zeros", GROUPS),
        "the stored zeros are not read; 8 is subtracted",
        "numbers = codes - zeros[g_idx.long()]",
        "numbers = codes - 8",
        "The stored zeros are ignored: the kernel always subtracts 8.",
        "The zero is a constant, whatever is stored.",
    ),
    held(
        *("gptq-zeros-in-order", "zeros", ("numpy_kernels.py", "gptq")),
        "zeros follow the order of rows, scales follow g_idx",
        "zeros[g_idx]",
        "zeros[np.arange(len(codes)) * len(zeros) // len(codes)]",
        "The zero of a row is that of the group by the row's place; g_idx is not used for zeros.",
    ),
    # vLLM's product of ExLlama adds one to zeros; zeros that were stored as they are came out one too high.
    held(
        *("gptq-v2-zeros-plus-1", "zeros", ("more_numpy.py", "gptq_v2")),
        "one is added to zeros that are stored as they are",
        ".reshape(len(scales), -1)",
        ".reshape(len(scales), -1) + 1",
        "The zeros are one too high: version 2 stores zeros as they are.",
    ),
    held(
        *("gptq-scale-of-word", "scales", ("vector_kernels.py", "gptq_words")),
        "the eight rows of a word take the scale of its first row",
        "scales[group].astype(np.float32)",
        "scales[g_idx[8 * word]].astype(np.float32)",
        "The scale of a row is that of the first row of its word; g_idx may differ inside a word.",
    ),
    held(
        *("gptq-x-scale-in-loop", "scales", GROUPS),
        "the scale of x is applied after each group instead of once",
        "        y += dots.float() * scale\n    return y * x_scale",
        "        y = (y + dots.float() * scale) * x_scale\n    return y",
        "The scale of x is multiplied once for each group instead of once in all.",
    ),
    # A review in vLLM found a product that took groups from the places of rows, with act-order models.
    held(
        *("gptq-no-g-idx", "indexing", ("numpy_kernels.py", "gptq_factored")),
        "rows are grouped by their places",
        "rows = np.flatnonzero(g_idx == group)",
        "rows = np.arange(group * len(g_idx) // len(scales), (group + 1) * len(g_idx) // len(scales))",
        "g_idx is ignored: the group of a row is its place divided by the group size.",
    ),
    # ik_llama.cpp's product with vectors was right for one token and wrong for two or three.
    held(
        *("gptq-tokens-in-pairs", "indexing", ("more.cpp", "gptq_tiled")),
        "the last two of four tokens read the x of the first two",
        "x[(t + i) * K + k]",
        "x[(t + i % 2) * K + k]",
        "Of each four tokens, the third and the fourth take the x of the first and the second.",
    ),
    held(
        *("gptq-difference-in-int8", "arithmetic", ("vector_kernels.py", "gptq_8bit")),
        "the difference of code and zero is kept in 8 bits",
        "(codes - zeros[group])",
        "(codes - zeros[group]).astype(np.int8)",
        "The difference of a code and its zero overflows 8 bits and wraps.",
    ),
    # SGLang's GPTQ product added the parts of K to memory that was not cleared; Marlin needs a cleared workspace too.
    held(
        *("gptq-workspace-kept", "old output", PARTS),
        "the sums of the parts of K are kept from call to call",
        "std::vector<float> sums(N);",
        "static std::vector<float> sums;\n    sums.resize(N);",
        "The result of an earlier call is added: the workspace is not cleared.",
    ),
)

TILES, RUST_AWQ, BYTES = ("tiles.cpp", "awq_tiles"), ("words.rs", "awq"), ("more.cpp", "awq_int8")
SINGLE, REPEATED = ("torch_blocks.py", "awq_vector"), ("vector_kernels.py", "awq_repeated")

AWQ: tuple[Planted, ...] = (
    held(
        *("awq-codes-not-interleaved", "unpacking", SINGLE),
        "codes are taken in the order of the nibbles, zeros in AWQ's order",
        "codes = (qweight[:, :, None] >> order & 15)",
        "codes = (qweight[:, :, None] >> SHIFTS & 15)",
        "The codes of a word are taken in natural order; AWQ interleaves the columns of a word.",
    ),
    held(
        *("awq-neighbours-exchanged", "unpacking", REPEATED),
        "the two halves of a word are exchanged",
        "np.array([0, 4, 1, 5, 2, 6, 3, 7])",
        "np.array([4, 0, 5, 1, 6, 2, 7, 3])",
        "Neighbouring columns are exchanged: even ones lie in the low half of a word, odd ones in the high half.",
    ),
    # pie's conversion to Marlin's layout left the interleaving out for zeros alone.
    held(
        *("awq-zeros-not-interleaved", "zeros", TILES),
        "zeros are taken in the order of the nibbles, codes in AWQ's order",
        "n / 8] >> 4 * places[n % 8] & 15;",
        "n / 8] >> 4 * (n % 8) & 15;",
        "The zeros of a word are taken in natural order; AWQ interleaves the columns of a word.",
        "A column takes the zero of another column of its word.",
    ),
    held(
        *("awq-sum-of-x-not-reset", "zeros", BYTES),
        "the sum of x that a zero meets goes on from group to group",
        "int total = 0;",
        "static int total;\n                if (g == 0) total = 0;",
        "The zero of a group meets the sum of x over all groups so far, not over its own.",
        "The sum of x is not set to 0 at the start of a group.",
    ),
    # GPTQModel packed AWQ's zeros less one for ExLlama, where 0 less one came out as 15.
    held(
        *("awq-zero-0-wraps", "zeros", ("torch_kernels.py", "awq")),
        "one is subtracted from four bits and added again",
        "zero = zeros.repeat_interleave",
        "zero = ((zeros - 1 & 15) + 1).repeat_interleave",
        "A zero of 0 becomes 16.",
    ),
    # A user of TensorRT-LLM took the zeros and the sums of x out of QServe's product, and it was wrong.
    held(
        *("awq-zeros-left-out", "zeros", BYTES),
        "the zeros times the sums of x are not subtracted",
        "(products - zero * total)",
        "products",
        "The zeros are not subtracted.",
    ),
    held(
        *("awq-scales-interleaved", "scales", RUST_AWQ),
        "scales are taken in the order of the nibbles of a word",
        "scales.add(g * n + j)",
        "scales.add(g * n + j / 8 * 8 + PLACES[j % 8])",
        "The scales are permuted like the codes of a word; they are stored in the order of the columns.",
        "A column takes the scale of another column of its word.",
    ),
    # QQQ's product needs groups that are multiples of its tile of K; smaller groups gave NaN.
    held(
        *("awq-groups-of-tile", "scales", TILES),
        "scales and zeros are decoded anew for each 128 rows, also where groups are smaller",
        "if (k % group_size == 0)",
        "if (k % 128 == 0)",
        "Groups of less than 128 rows take the scale and the zero of the first group of 128 rows.",
    ),
    # vLLM's AWQ product was wrong where the number of columns is a multiple of 64 and not of 128.
    held(
        *("awq-stride-of-tiles", "indexing", TILES),
        "the words of a row are counted in whole tiles of 128 columns",
        "qweight[k * (N / 8) + n / 8]",
        "qweight[k * (N / 128 * 16) + n / 8]",
        "Codes are wrong where N is no multiple of 128: the stride of the rows of words is too small.",
        "The codes are read from a wrong row.",
    ),
    # 1bit-MONSTER indexed nibbles by the place in a group, so that all groups read the first one.
    held(
        *("awq-codes-of-first-group", "indexing", RUST_AWQ),
        "the row of a code is its place in the group",
        "qweight.add((g * group_size + p) * (n / 8) + j / 8)",
        "qweight.add(p * (n / 8) + j / 8)",
        "All groups read the codes of the first group.",
    ),
    # OpenVINO summed a group of 128 products in float16, which overflowed.
    held(
        *("awq-sums-in-float16", "arithmetic", SINGLE),
        "the sum of a group is rounded to float16",
        "codes.view(len(scales), group_size, -1))[:, 0]",
        "codes.view(len(scales), group_size, -1))[:, 0].half().float()",
        "The sum of each group is kept in float16, which overflows or rounds too much.",
    ),
    # GPTQModel considered to run bfloat16 on AWQ kernels for float16 by casts.
    held(
        *("awq-x-in-float16", "arithmetic", ("numpy_kernels.py", "awq")),
        "x in bfloat16 is cast to float16",
        "y = x.astype(np.float32) @",
        "y = x.astype(np.float16).astype(np.float32) @",
        "x is narrowed to float16: large numbers overflow, and small ones are lost.",
    ),
)

NINTH_WORDS: tuple[Planted, ...] = GPTQ + AWQ
