"""Key-value caches, vectorised: blocks of integers, rotations, attention, and the order of channels."""

from typing import ClassVar, TypeVar

import numpy as np
import numpy.typing as npt

from lowbit.arrays import BF16, F16, F32, F64
from lowbit.attention.ksort import Order
from lowbit.attention.rope import Layout, Rotation
from lowbit.backend import Declaration
from lowbit.contract.rounding import Arithmetic, any_order
from lowbit.quantization.bfp import Blocks, Format
from lowbit.quantization.bfp_dot import BlockSums
from lowbit.quantization.bfp_storage import EXPONENT_BIAS, StoredBlocks
from lowbit.tensor_formats.stored import FORMATS
from lowbit_numpy.widening import TYPES, widened

Floats = TypeVar("Floats", F32, F64)
"""Arrays of which all have one type or all the other."""
BOUNDED = Declaration(TYPES, Arithmetic("direct", "float32", any_order))
EXACT = (
    "bfp.cast",
    "bfp.decode",
    "bfp.dot",
    "bfp.total",
    "bfp.store",
    "bfp.load",
    "ksort.permutation",
    "ksort.relabel",
    "kvcache.bfp",
    "kvcache.kivi",
)


class CacheOperations:
    """Hooks of `bfp`, `rope`, `attention`, `ksort` and `kvcache`."""

    declared: ClassVar[dict[str, Declaration]] = dict.fromkeys(EXACT, Declaration()) | dict.fromkeys(
        ("rope.rotate", "attention.softmax", "attention.attend", "attention.attend_shaped"), BOUNDED
    )

    def _kvcache_bfp(self, kv_heads: int, head_dim: int, key_format: Format, value_format: Format) -> "Cache":
        return Cache(self, kv_heads, head_dim, key_format, value_format)

    def _kvcache_kivi(
        self, kv_heads: int, head_dim: int, bits: int, group_size: int, residual: int, dtype: str = "float16"
    ) -> "KiviCache":
        return KiviCache(kv_heads, bits, group_size, residual, dtype)

    def _bfp_cast(self, x: F32, format: Format) -> Blocks:
        """Cast all blocks at once. Padding rows with zeros to whole blocks does not change the maximum of a block."""
        rows, columns = x.shape
        count = format.blocks(columns)
        padded = np.zeros((rows, count * format.block), np.float32)
        padded[:, :columns] = x
        cut = padded.reshape(rows, count, format.block)
        largest = np.abs(cut).max(axis=2)
        exponents = np.frexp(largest)[1] - 1 - (format.mantissa - 2)
        exponents = np.where(largest == 0, -format.reach, np.clip(exponents, -format.reach, format.reach))
        scaled = np.rint(np.ldexp(cut.astype(np.float64), -exponents[:, :, None]))
        mantissas = np.clip(scaled, -format.top, format.top).astype(format.dtype).reshape(rows, -1)
        return Blocks(np.ascontiguousarray(mantissas[:, :columns]), exponents.astype(np.int16), format)

    def _bfp_decode(self, blocks: Blocks) -> F32:
        exponents = np.repeat(blocks.exponents.astype(np.int32), blocks.format.block, axis=1)[:, : blocks.columns]
        with np.errstate(over="ignore", under="ignore"):
            return np.ldexp(blocks.mantissas.astype(np.float64), exponents).astype(np.float32)

    def _bfp_dot(self, a: Blocks, b: Blocks) -> BlockSums:
        """Take running sums up to the end of each block, and the differences of neighbours."""
        ends = np.array([span.start for span in a.format.spans(a.columns)])
        products = a.mantissas[:, None].astype(np.int64) * b.mantissas[None].astype(np.int64)
        exponents = a.exponents[:, None].astype(np.int32) + b.exponents[None].astype(np.int32)
        return BlockSums(np.add.reduceat(products, ends, axis=2), exponents)

    def _bfp_total(self, blocks: BlockSums) -> F32:
        """Add blocks in turn. A sum is rounded to odd in float64, so that the rounding to float32 is correct."""
        y = np.zeros(blocks.sums.shape[:2], np.float32)
        terms = np.ldexp(blocks.sums.astype(np.float64), blocks.exponents)
        with np.errstate(over="ignore", invalid="ignore"):
            for term in np.moveaxis(terms, 2, 0):
                total = y + term
                part = total - y
                lost = (y - (total - part)) + (term - part)
                even = (total.view(np.int64) & 1 == 0) & (lost != 0) & np.isfinite(lost)
                y = np.where(even, np.nextafter(total, np.copysign(np.inf, lost)), total).astype(np.float32)
        return y

    def _bfp_store(self, blocks: Blocks) -> StoredBlocks:
        """Write every mantissa as 32 bits and keep the low ones."""
        rows, columns = blocks.mantissas.shape
        octets = np.ascontiguousarray(blocks.mantissas, "<i4").view(np.uint8).reshape(rows, columns, 4)
        kept = np.unpackbits(octets, axis=2, bitorder="little")[:, :, : blocks.format.mantissa]
        stream = np.packbits(kept.reshape(rows, -1), axis=1, bitorder="little")
        return StoredBlocks(stream, (blocks.exponents + EXPONENT_BIAS).astype(np.uint8), columns, blocks.format)

    def _bfp_load(self, stored: StoredBlocks) -> Blocks:
        """The same steps in reverse, with sign extension."""
        bits, rows = stored.format.mantissa, len(stored.mantissas)
        kept = np.unpackbits(stored.mantissas, axis=1, count=stored.columns * bits, bitorder="little")
        wide = np.pad(kept.reshape(rows, stored.columns, bits), ((0, 0), (0, 0), (0, 32 - bits)), "edge")
        mantissas = np.packbits(wide, axis=2, bitorder="little").view("<i4")[:, :, 0]
        exponents = stored.exponents.astype(np.int16) - np.int16(EXPONENT_BIAS)
        return Blocks(np.ascontiguousarray(mantissas, stored.format.dtype), exponents, stored.format)

    @widened
    def _rope_rotate(self, x: F32, turn: Rotation) -> F32:
        cos, sin = turn.cos.astype(np.float32)[:, None], turn.sin.astype(np.float32)[:, None]
        result: F32 = x * cos + x[..., turn.layout.partner] * sin
        return result

    @widened
    def _attention_softmax(self, scores: F32) -> F32:
        return softmax(scores)

    @widened
    def _attention_attend(self, queries: F32, keys: F32, values: F32, window: int | None = None) -> F32:
        return attended(queries, keys, values, window)

    @widened
    def _attention_attend_shaped(
        self,
        queries: F32,
        keys: F32,
        values: F32,
        window: int | None = None,
        scale: float | None = None,
        cap: float | None = None,
        sinks: F32 | None = None,
    ) -> F32:
        return attended(queries, keys, values, window, scale, cap, sinks)

    def _ksort_permutation(self, sizes: F64) -> Order:
        return np.lexsort((np.arange(sizes.size), sizes)).astype(np.int64)

    def _ksort_relabel(self, layout: Layout, order: Order) -> Layout:
        new_name = np.argsort(order)  # an order's inverse
        return Layout(new_name[layout.partner[order]], layout.sign[order], layout.pair[order])


def softmax(scores: Floats) -> Floats:
    with np.errstate(invalid="ignore", under="ignore"):
        powers: Floats = np.exp(scores - scores.max(axis=-1, keepdims=True))
    total: Floats = powers.sum(axis=-1, keepdims=True)
    return powers / total


def softmax_with_sinks(scores: Floats, sinks: Floats) -> Floats:
    """Scores H × T × S with one more for each head, whose probability is dropped."""
    beside = np.broadcast_to(sinks[:, None, None], (*scores.shape[:2], 1))
    wide: Floats = np.concatenate([scores, beside], axis=2)
    return softmax(wide)[:, :, :-1]


def attended(
    queries: Floats,
    keys: Floats,
    values: Floats,
    window: int | None,
    scale: float | None = None,
    cap: float | None = None,
    sinks: Floats | None = None,
) -> Floats:
    """Attention with keys and values repeated for every query head, and one mask for all, in the type of the
    queries."""
    tokens, heads, head_dim = queries.shape
    group, length, kind = heads // keys.shape[0], keys.shape[1], queries.dtype.type
    wide_keys, wide_values = np.repeat(keys, group, axis=0), np.repeat(values, group, axis=0)
    products = np.einsum("thd,hsd->hts", queries, wide_keys)
    scores = products / kind(np.sqrt(head_dim)) if scale is None else products * kind(scale)
    if cap is not None:
        with np.errstate(over="ignore", under="ignore"):
            scores = kind(cap) * np.tanh(scores / kind(cap))
    back = np.arange(length - tokens, length)[:, None] - np.arange(length)
    hidden: npt.NDArray[np.bool_] = (back < 0) | (back >= (window or length))
    seen: Floats = np.where(hidden, kind(-np.inf), scores)
    probabilities = softmax(seen) if sinks is None else softmax_with_sinks(seen, sinks)
    return np.ascontiguousarray((probabilities @ wide_values).swapaxes(0, 1))


class Cache:
    """Keys and values of one layer: integers of all heads side by side, in arrays that double when full."""

    def __init__(self, casts: CacheOperations, kv_heads: int, head_dim: int, *formats: Format) -> None:
        self._casts, self._heads, self._length = casts, kv_heads, 0
        self._formats = formats
        self._mantissas = [np.zeros((1, kv_heads, head_dim), format.dtype) for format in formats]
        self._exponents = [np.zeros((1, kv_heads, format.blocks(head_dim)), np.int16) for format in formats]

    def step(self, *tokens: F32) -> tuple[F32, ...]:
        """Cast T tokens, keys and values, and decode all tokens so far."""
        start, self._length = self._length, self._length + len(tokens[0])
        self._grow()
        for kind, (given, format) in enumerate(zip(tokens, self._formats, strict=True)):
            blocks = self._casts._bfp_cast(given.reshape(-1, given.shape[2]), format)
            self._mantissas[kind][start : self._length] = blocks.mantissas.reshape(given.shape)
            self._exponents[kind][start : self._length] = blocks.exponents.reshape(*given.shape[:2], -1)
        return tuple(self._decoded(kind) for kind in range(len(self._formats)))

    def _grow(self) -> None:
        for arrays in (self._mantissas, self._exponents):
            for kind, array in enumerate(arrays):
                if len(array) < self._length:
                    more = np.zeros((max(len(array), self._length - len(array)), *array.shape[1:]), array.dtype)
                    arrays[kind] = np.concatenate([array, more])

    def _decoded(self, kind: int) -> F32:
        """float32, G × S × d_h."""
        mantissas, exponents = (
            np.ascontiguousarray(arrays[kind][: self._length].swapaxes(0, 1)).reshape(self._heads * self._length, -1)
            for arrays in (self._mantissas, self._exponents)
        )
        values = self._casts._bfp_decode(Blocks(mantissas, exponents, self._formats[kind]))
        return values.reshape(self._heads, self._length, -1)


PARTS = (("keys", "tokens"), ("values", "group_size"))


class KiviCache:
    """Keys and values of one layer, tokens × channels, in float32; the newest of each are not rounded yet."""

    def __init__(self, kv_heads: int, bits: int, group_size: int, residual: int, dtype: str) -> None:
        self._heads, self._residual = kv_heads, residual
        suffix = "-bf16" if dtype == "bfloat16" else ""
        self._formats = [(f"kivi-{part}{suffix}", {"bits": bits, size: group_size}) for part, size in PARTS]
        self._tokens: list[F32 | None] = [None, None]
        self._rounded = [0, 0]

    def step(self, *tokens: F16 | BF16) -> tuple[F32, ...]:
        """Add T tokens, and round those that are no longer among the newest."""
        for kind, given in enumerate(tokens):
            own, new = self._tokens[kind], given.reshape(len(given), -1).astype(np.float32)
            self._tokens[kind] = all_tokens = new if own is None else np.concatenate([own, new])
            length, first = len(all_tokens), self._rounded[kind]
            end = length - length % self._residual if kind == 0 else max(0, length - self._residual)
            if end > first:
                all_tokens[first:end] = self._through(kind, all_tokens[first:end])
                self._rounded[kind] = end
        return tuple(self._in_heads(each) for each in self._tokens if each is not None)

    def _through(self, kind: int, part: F32) -> F32:
        """Numbers in the format of their kind, decoded."""
        name, options = self._formats[kind]
        at = FORMATS[name].sizes(part.shape[1], len(part), options)
        found = FORMATS[name].terms(FORMATS[name].encoded(part.T.astype(np.float64), at), at)
        return np.asarray(found.values.T, np.float32)

    def _in_heads(self, tokens: F32) -> F32:
        return tokens.reshape(len(tokens), self._heads, -1).swapaxes(0, 1).copy()
