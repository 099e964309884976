"""What each kernel of `lowbit_cuda.kernels` computes, in numpy.

The *meaning* of a kernel gets flat arrays of exactly the elements that the kernel uses, and the numbers of the launch,
and fills the arrays that are written. A simulated device runs it in place of the kernel, and tests compare the kernel's
own C++ with it.

Sums are computed in float64 and rounded to float32 at the end, so a result is closer to the exact one than a kernel's;
both are within the bound of the specification. As in the kernels, a token's result does not depend, in any bit, on how
many tokens are processed together.

Source: the chapters `lowbit.linear.linear`, `lowbit.model.block`, `lowbit.attention.rope`,
`lowbit.attention.attention`, `lowbit.quantization.bfp_storage`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from lowbit.arrays import F32, F64, U8, U32, Array
from lowbit.quantization.bfp import bfp12, cast
from lowbit.quantization.bfp_storage import store
from lowbit_cuda.kernels.attention import BFP_BLOCK
from lowbit_cuda.kernels.layouts import from_panels, up
from lowbit_cuda.port import Kernel

Words = U32

# **Quantised matrices.**


def codes_of(words: Words, bits: int) -> U8:
    """`lowbit.quantization.packing.unpack`, without a loop over rows: uint32, K·b/32 × N, to uint8, K × N.

    >>> codes_of(np.array([[0x87654321]], np.uint32), bits=4)[:, 0]
    array([1, 2, 3, 4, 5, 6, 7, 8], dtype=uint8)
    """
    columns = words.shape[1]
    per_word = 8 if bits == 3 else 32 // bits
    if bits == 3:  # 24 bits are 8 codes: four windows of the stream in every three words
        low, middle, high = (words[i::3] for i in range(3))
        windows = low, low >> 24 | middle << 8, middle >> 16 | high << 16, high >> 8
        words = np.stack(windows, axis=1).reshape(-1, columns)
    shifts = bits * np.arange(per_word, dtype=np.uint32)[:, np.newaxis]
    codes = words[:, np.newaxis] >> shifts & np.uint32(2**bits - 1)
    return codes.astype(np.uint8).reshape(-1, columns)


def _matrix(words: Words, scales: Array, zeros: Array, bits: int, numbers: dict[str, int]) -> tuple[Array, ...]:
    """Codes (K × N), scales and zeros (G × N), cut out of their panels."""
    rows, columns = numbers["rows"], numbers["columns"]
    groups = -(-rows // numbers["group_size"])
    codes = codes_of(from_panels(words, rows * bits // 32, columns), bits)
    return codes, from_panels(scales, groups, columns), from_panels(zeros, groups, columns)


def _product(x: F32, words: Words, scales: Array, zeros: Array, bits: int, numbers: dict[str, int]) -> F32:
    """T × N: equation 2 of `lowbit.linear.linear`, one token at a time."""
    rows, group = numbers["rows"], numbers["group_size"]
    codes, scale, zero = _matrix(words, scales, zeros, bits, numbers)
    s, z = scale.astype(np.float64), zero.astype(np.float64)
    o = -s * z if numbers["zero_point"] else z
    more = up(rows, group) - rows
    q = np.pad(codes, ((0, more), (0, 0))).reshape(len(s), group, -1).astype(np.float64)
    y = np.empty((len(x), numbers["columns"]), np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        for t, row in enumerate(x.astype(np.float64)):
            parts = np.pad(row, (0, more)).reshape(len(s), 1, group)
            y[t] = (s * (parts @ q)[:, 0] + o * parts.sum(axis=2)).sum(axis=0)
    return y


def gemm(bits: int, y: F32, x: F32, words: Words, scales: Array, zeros: Array, **numbers: int) -> None:
    """Y (T × N) = X (T × K) · W."""
    rows = x.reshape(numbers["tokens"], numbers["rows"])
    y[:] = _product(rows, words, scales, zeros, bits, numbers).ravel()


def expert_in(
    bits: int,
    y: F32,
    x: F32,
    gate_words: Words,
    gate_scales: Array,
    gate_zeros: Array,
    up_words: Words,
    up_scales: Array,
    up_zeros: Array,
    **numbers: int,
) -> None:
    """Y (T × N) = silu(X · gate) ⊗ (X · up)."""
    rows = x.reshape(numbers["tokens"], numbers["rows"])
    gate = _product(rows, gate_words, gate_scales, gate_zeros, bits, numbers)
    swiglu(y, gate.ravel(), _product(rows, up_words, up_scales, up_zeros, bits, numbers).ravel(), y.size)


def dequantize(bits: int, y: F32, words: Words, scales: Array, zeros: Array, **numbers: int) -> None:
    """Y (K × N) = the weights, equal bit for bit to those of `lowbit.quantization.affine.dequantize`."""
    codes, scale, zero = _matrix(words, scales, zeros, bits, numbers)
    of_row = np.arange(numbers["rows"]) // numbers["group_size"]
    s, z, q = scale.astype(np.float32)[of_row], zero.astype(np.float32)[of_row], codes.astype(np.float32)
    y[:] = (s * (q - z) if numbers["zero_point"] else s * q + z).ravel()


def dense(y: F32, x: F32, weights: Array, tokens: int, rows: int, columns: int) -> None:
    """Y (T × N) = X (T × K) · W, with weights stored column by column."""
    matrix = weights.reshape(columns, rows).astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        for t, row in enumerate(x.reshape(tokens, rows).astype(np.float64)):
            y[t * columns : (t + 1) * columns] = matrix @ row


# **Between products.**


def rms_norm(y: F32, x: F32, gain: F32, tokens: int, columns: int, epsilon: float) -> None:
    """`lowbit.model.layers.rms_norm` of each token; ε is float32 in the kernel."""
    wide = x.reshape(tokens, columns).astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        mean_square = np.mean(wide * wide, axis=1, keepdims=True)
        y[:] = (gain.astype(np.float64) * (wide / np.sqrt(mean_square + float(np.float32(epsilon))))).ravel()


def swiglu(y: F32, gate: F32, up: F32, count: int) -> None:
    """Y = silu(gate) ⊗ up."""
    with np.errstate(invalid="ignore", over="ignore"):
        wide = gate.astype(np.float64)
        y[:] = wide / (1.0 + np.exp(-wide)) * up


def add(y: F32, x: F32, count: int) -> None:
    """Y = Y + X."""
    with np.errstate(invalid="ignore", over="ignore"):
        y += x


def combine(y: F32, answers: F32, weights: F32, tokens: int, experts: int, columns: int) -> None:
    """Y (T × N) = Y + the weighted sum of k answers per token (T × k × N), added in the order of storage."""
    parts, factors = answers.reshape(tokens, experts, columns), weights.reshape(tokens, experts, 1)
    total = np.zeros((tokens, columns))
    with np.errstate(invalid="ignore", over="ignore"):
        for e in range(experts):
            total += factors[:, e].astype(np.float64) * parts[:, e]
        y += total.astype(np.float32).ravel()


# **Rows** to and from where they are wanted. A number that is no row's reads zeros, and writes nothing.


def gather(y: F32, x: Array, index: Array, count: int, rows: int, columns: int) -> None:
    """Row i of Y is row index[i] of X, in float32."""
    there = (index >= 0) & (index < rows)
    taken = x.reshape(rows, columns)[np.where(there, index, 0)].astype(np.float32)
    y[:] = np.where(there[:, np.newaxis], taken, np.float32(0)).ravel()


def scatter(y: F32, x: F32, index: Array, count: int, rows: int, columns: int) -> None:
    """Row index[i] of Y is row i of X."""
    there = (index >= 0) & (index < rows)
    y.reshape(rows, columns)[index[there]] = x.reshape(count, columns)[there]


# **Attention.** `position` is where the first of the tokens stands: as many came before. Tokens beyond the table or the
# cache are left alone by `rope` and `append`, and have zeros from `attend`.


def rope(x: F32, table: F32, position: Array, tokens: int, heads: int, head_dim: int, context: int) -> None:
    """Rotates X (T × heads × d_h) in place, half-split; the table has d_h/2 cosines, then d_h/2 sines, per position."""
    first, half = int(position[0]), head_dim // 2
    count = _inside(first, tokens, context)
    cos, sin = table.reshape(context, 2, 1, half)[first : first + count].swapaxes(0, 1).astype(np.float64)
    parts = x.reshape(tokens, heads, 2, half)[:count]
    a, b = parts[:, :, 0].astype(np.float64), parts[:, :, 1].astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        parts[:, :, 0], parts[:, :, 1] = a * cos - b * sin, b * cos + a * sin


def append(cache: Array, x: F32, position: Array, tokens: int, kv_heads: int, head_dim: int, capacity: int) -> None:
    """Stores X (T × G × d_h) in the cache (G × C × d_h), starting at `position`."""
    first = int(position[0])
    count = _inside(first, tokens, capacity)
    rows = x.reshape(tokens, kv_heads, head_dim)[:count].swapaxes(0, 1)
    with np.errstate(over="ignore"):
        cache.reshape(kv_heads, capacity, head_dim)[:, first : first + count] = rows


def append_bfp12(
    cache: Array,
    exponents: Array,
    x: F32,
    position: Array,
    tokens: int,
    kv_heads: int,
    head_dim: int,
    capacity: int,
) -> None:
    """The same in BFP12 with blocks of 32, as in `bfp_storage.store`: mantissas and exponents separate."""
    first = int(position[0])
    count = _inside(first, tokens, capacity)
    if count == 0:
        return
    rows = x.reshape(tokens, kv_heads, head_dim)[:count].swapaxes(0, 1).reshape(-1, head_dim)
    stored = store(cast(np.ascontiguousarray(rows), bfp12(BFP_BLOCK)))
    for target, part in ((cache, stored.mantissas), (exponents, stored.exponents)):
        target.reshape(kv_heads, capacity, -1)[:, first : first + count] = part.reshape(kv_heads, count, -1)


def attend(y: F32, queries: F32, keys: Array, values: Array, position: Array, **numbers: int) -> None:
    """`lowbit.attention.attention.attend` of T tokens, each over all tokens up to itself; window 0 means no window."""
    kv_heads, head_dim, capacity = numbers["kv_heads"], numbers["head_dim"], numbers["capacity"]
    first, window = int(position[0]), numbers["window"] or None
    count = _inside(first, numbers["tokens"], capacity)
    y[:] = 0
    q = queries.reshape(-1, numbers["heads"], head_dim).astype(np.float64)
    k, v = (part.reshape(kv_heads, capacity, head_dim)[:, : first + count] for part in (keys, values))
    with np.errstate(invalid="ignore", over="ignore"):
        for t in range(count):  # one by one, so that a token does not depend on how many come with it
            seen = slice(max(0, first + t + 1 - window) if window else 0, first + t + 1)
            y.reshape(q.shape)[t] = _attended(q[t], k[:, seen].astype(np.float64), v[:, seen].astype(np.float64))


def _attended(query: F64, keys: F64, values: F64) -> F64:
    """One token (heads × d_h) over its keys and values (G × S × d_h), which neighbouring heads share."""
    grouped = query.reshape(len(keys), -1, query.shape[1])
    scores = grouped @ keys.swapaxes(1, 2) / np.sqrt(query.shape[1])
    powers = np.exp(scores - scores.max(axis=2, keepdims=True))
    result: F64 = (powers / powers.sum(axis=2, keepdims=True)) @ values
    return result.reshape(query.shape)


def attend_bfp12(
    y: F32, queries: F32, keys: Array, exponents: Array, values: Array, position: Array, **numbers: int
) -> None:
    """The same over keys in BFP12."""
    end = numbers["capacity"] if position[0] < 0 else min(int(position[0]) + numbers["tokens"], numbers["capacity"])
    shape = numbers["kv_heads"], numbers["capacity"], -1
    stored, powers = keys.reshape(shape)[:, :end], exponents.reshape(shape)[:, :end].astype(np.int64) - 127
    mantissas = np.stack([stored & 15, stored >> 4], axis=-1).astype(np.int64)
    signed = np.where(mantissas > 7, mantissas - 16, mantissas).reshape(*powers.shape, BFP_BLOCK)
    decoded = np.zeros((*shape[:2], numbers["head_dim"]))
    decoded[:, :end] = np.ldexp(signed.astype(np.float64), powers[..., np.newaxis]).reshape(shape[0], end, -1)
    attend(y, queries, decoded.ravel(), values, position, **numbers)


def _inside(first: int, tokens: int, capacity: int) -> int:
    """The number of tokens, from position `first` on, that fit into the cache."""
    return 0 if first < 0 else max(0, min(tokens, capacity - first))


# **From a kernel to its meaning.**

Meaning = Callable[..., None]
OF_BITS: tuple[Meaning, ...] = (gemm, expert_in, dequantize)
OTHERS: tuple[Meaning, ...] = (
    *(dense, rms_norm, swiglu, add, combine, gather, scatter),
    *(rope, append, append_bfp12, attend, attend_bfp12),
)
MEANINGS = {each.__name__: each for each in (*OF_BITS, *OTHERS)}


@dataclass(frozen=True, eq=False)
class Meant(Kernel):
    """A kernel of a test or a benchmark, with a meaning of its own."""

    meaning: Meaning = field(kw_only=True)


def meaning_of(kernel: Kernel) -> Meaning:
    """The meaning of a kernel: its own, or that of the kernel of the table whose name it has (``gemm_b4_f16_t1``)."""
    if isinstance(kernel, Meant):
        return kernel.meaning
    name = max((name for name in MEANINGS if f"{kernel.name}_".startswith(f"{name}_")), key=len)
    meaning, choices = MEANINGS[name], kernel.name.removeprefix(f"{name}_")
    return partial(meaning, int(choices[1])) if meaning in OF_BITS else meaning
