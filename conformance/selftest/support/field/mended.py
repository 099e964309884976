"""Mistakes that the diagnosis once gave no name, or a wrong one: one of each kind that was mended.

Casts, sums that activations carry, attention over stored and new tokens, scales whose products are too small for a
result, and factors. They were tried while they were mended, so they measure nothing.
"""

from functools import partial

from field.held_out import made, more, numpy
from field.mistakes import Mistake

cast, step = partial(made, "cast_kernels.py"), partial(made, "step_kernels.py")
residual, int8, q8_k = partial(step, "attend_residual"), partial(cast, "int8_token"), partial(cast, "q8_k")
MENDED_KERNELS: dict[tuple[str, str], tuple[str, dict[str, object]]] = {
    ("step_kernels.py", "attend_residual"): (
        "attention.attend_residual",
        {"key_format": "int8-token", "value_format": "int8-token"},
    ),
}
LARGEST, PAIRS = "np.abs(wide).max(axis=1, keepdims=True)", "sums.reshape(*records.shape[:2], 8, 2).sum(axis=-1)"
TOTAL = "total = wide[..., rows].sum(axis=-1, keepdims=True)"
PARTS = "np.concatenate([old, new])"
NEWEST = "for each in (newest_keys, newest_values)]"
DONE = "return attention(queries.astype(F32), keys, values, None).astype(queries.dtype)"
HALVES = """old, new = slice(0, len(keys_codes)), slice(len(keys_codes), None)
    both = (attention(queries.astype(F32), keys[:, part], values[:, part], None) for part in (old, new))
    return (sum(both) / 2).astype(queries.dtype)"""
ALONE = """alone = [attention(queries[[i]].astype(F32), keys, values, None) for i in range(len(queries))]
    return np.concatenate(alone).astype(queries.dtype)"""
ROUGH = """rough = []
    for part in (keys, values):
        unit = np.abs(part).max() / 64
        rough.append(np.rint(part / unit) * unit)
    return attention(queries.astype(F32), *rough, None).astype(queries.dtype)"""

MENDED: tuple[Mistake, ...] = (
    residual("new tokens first", PARTS, "np.concatenate([new, old])", "residual-first"),
    residual("new tokens backwards", PARTS, "np.concatenate([old, new[::-1]])", "residual-backwards"),
    residual(
        "new tokens of the next head",
        NEWEST,
        "for each in (np.roll(newest_keys, 1, 1), np.roll(newest_values, 1, 1))]",
        "residual-next-head",
    ),
    residual(
        "last token as the one before",
        PARTS,
        "(lambda every: np.concatenate([every[:-1], every[-2:-1]]))(np.concatenate([old, new]))",
        "residual-last-forgotten",
    ),
    residual("one step for all tokens", DONE, ROUGH, "residual-one-step-for-all-tokens", "residual-all-rounded"),
    residual("two softmaxes", DONE, HALVES, "residual-two-softmaxes"),
    residual("later tokens are seen", DONE, ALONE, "residual-sees-later-tokens"),
    residual(
        "scales of the token before",
        "keys_codes.astype(F32) * keys_scale, values_codes.astype(F32) * values_scale",
        "(codes.astype(F32) * np.roll(scale, 1, 0)"
        " for codes, scale in ((keys_codes, keys_scale), (values_codes, values_scale)))",
        "residual-scale-of-neighbour",
    ),
    residual("new values as 0", NEWEST, "for each in (newest_keys, 0 * newest_values)]", "residual-values-new-as-0"),
    residual(
        "new keys and values exchanged",
        NEWEST,
        "for each in (newest_values, newest_keys)]",
        "residual-keys-and-values-exchanged",
    ),
    int8("divided by 125", "np.float32(127)", "np.float32(125)", "cast-125-levels"),
    int8("divided by 127.5", "np.float32(127)", "np.float32(127.5)", "cast-127.5-levels"),
    int8(
        "largest of a channel",
        LARGEST,
        "np.resize(np.abs(wide).max(axis=0), (len(x), 1))",
        "cast-scale-of-channel",
    ),
    int8(
        "largest of the first token", LARGEST, f"np.repeat({LARGEST}[:1], len(x), axis=0)", "cast-scale-of-first-token"
    ),
    int8(
        "last channel left out",
        LARGEST,
        "np.abs(wide[:, :-1]).max(axis=1, keepdims=True)",
        "cast-largest-of-all-but-the-last",
    ),
    int8("clamped at 126", "-127, 127", "-127, 126", "cast-clamped-at-126"),
    int8("largest stored as the scale", "(stored, scale)", "(stored, largest)", "cast-magnitude-stored"),
    q8_k(
        "divided by 128", "quotient(np.float32(127), extreme)", "quotient(np.float32(128), extreme)", "cast-128-levels"
    ),
    q8_k(
        "divided by 126", "quotient(np.float32(127), extreme)", "quotient(np.float32(126), extreme)", "cast-126-levels"
    ),
    numpy("q4_k_q8_k", "first half of the sums of 16", PAIRS, "sums[..., :8]", "x-sums-one-for-two"),
    numpy(
        "q4_k_q8_k",
        "every second sum of 16, twice",
        PAIRS,
        "2 * sums[..., ::2]",
        "x-sums-even-for-both",
        "x-sums-twice",
    ),
    numpy(
        "q4_k_q8_k",
        "sums of 64 for sums of 32",
        PAIRS,
        "sums.reshape(*records.shape[:2], 4, 4).sum(axis=-1).repeat(2, axis=-1)",
        "x-sums-of-four-for-two",
    ),
    more(
        "q6_k_q8_k",
        "sum of the block",
        "- 32 * sums[t]",
        "- 32 * sums[t].sum(axis=-1, keepdims=True)",
        "x-sums-of-the-block-for-one",
    ),
    more(
        "nvfp4",
        "packed scales read as powers of two",
        "weight_scale.astype",
        "weight_scale.view('float8_e8m0fnu').astype",
        "stored-scale-read-as-float8_e8m0fnu",
    ),
    numpy(
        "gptq",
        "zeros not scaled",
        "[g_idx] * (codes - zeros[g_idx])",
        "[g_idx] * codes - zeros[g_idx]",
        "stored-zero-not-scaled",
    ),
    numpy("gptq", "clamped results", "return y.astype", "return np.clip(y, -6e4, 6e4).astype", "result-clamped"),
    numpy(
        "gptq_factored",
        "every second group",
        "range(len(scales))",
        "range(0, len(scales), 2)",
        "stored-groups-odd-ones-dropped",
    ),
    numpy(
        "gptq_factored",
        "sums of x in bfloat16",
        TOTAL,
        "total = wide[..., rows].astype(x.dtype).sum(axis=-1, keepdims=True).astype(np.float32)",
        "stored-sums-of-x-in-bfloat16",
    ),
    numpy("q4_k", "minima a 64th", "dmin * minima", "dmin * minima / 64", "stored-offset-times-a-factor"),
    numpy(
        "mxfp4",
        "exponents as factors",
        "np.ldexp(values, np.repeat(exponents, 32, axis=1))",
        "values * np.repeat(exponents, 32, axis=1)",
        "stored-scale-taken-as-exponents",
    ),
    numpy(
        "q4_k",
        "high bits of late scales two places high",
        "(packed[..., 0:4] >> 6 << 4)], -1)",
        "(packed[..., 0:4] >> 6 << 6)], -1)",
        "stored-scale-pieces-apart",
    ),
    more("fp8_int8", "divided by 127", "weight_scale[:, 0])", "weight_scale[:, 0] / 127)", "result-times-a-factor"),
    more(
        "fp8_int8",
        "codes of x clipped",
        "x_codes.astype(np.float32)",
        "np.clip(x_codes, -127, 126).astype(np.float32)",
        "x-codes-clipped-at-126",
    ),
)
