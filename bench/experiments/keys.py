"""K-sort, table I: perplexity with keys in BFP12 and queries in BFP16, by the order of the channels.

Everything else is float64. A cache that stores keys *before* RoPE, as the paper has it, turns them back first; sorted
by the norm of the rows of W_k (as printed) or by what the channels held on a calibration text. A cache that stores them
*after* RoPE is sorted by the norm of a pair, or calibrated, or the head is rotated by a Hadamard matrix. Where a block
holds the whole head, the mantissas of a sorted cache are those of the unsorted one, moved; `Keys` counts those that are
not.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np

from experiments.measuring import DENSE, PUBLISHED, WINDOW, losses, subject
from experiments.running import Experiment, Row
from lowbit import backend as registry
from lowbit.arrays import F32, F64, I64
from lowbit.attention.attention import KeyValueCache, attend
from lowbit.attention.ksort import channel_sizes, hadamard, magnitudes, permutation, sizes_over_queries
from lowbit.attention.rope import Rotation, half_split, rotate, rotation
from lowbit.model.block import FORMULAS, MakeLinear, plain_linear
from lowbit.model.config import LlamaConfig
from lowbit.model.decoder import Decoder
from lowbit.model.matrices import to_float
from lowbit.model.weights import LlamaWeights
from lowbit.quantization.bfp import Format, bfp12, bfp16, cast, decode
from lowbit.runtime import BackendLinears

BALANCED = "keys over queries"
ORDERS = {
    "before RoPE": ("unsorted", "row norm", "calibrated", BALANCED),
    "after RoPE": ("unsorted", "pair norm", "calibrated", "Hadamard"),
}
Turn = Callable[[F64, int, int], F64]
"""Turns keys or queries at positions from a first one on (T × heads × d_h) by their angles times 1 or −1."""


def rows(quick: bool) -> list[Row]:
    """For each model floats, then keys by place, block and order, then values by order."""
    return list(_rows(quick))


def _rows(quick: bool) -> Iterator[Row]:
    for model in DENSE[:1] if quick else (*DENSE, PUBLISHED):
        head, trained = (64, False) if model == PUBLISHED else (32, True)
        yield Row({"model": model, "part": "floats", "block": 0, "order": ""}, partial(floats, model, quick))
        for place, orders in ORDERS.items():
            blocks = (head, head // 2, head // 4) if trained or place == "before RoPE" else (head // 2,)
            for block in blocks[:: 2 if quick else 1]:
                for order in orders:
                    if order == BALANCED and block == head:
                        continue  # one block has the same mantissas in any order, as the other rows show
                    settings: dict[str, str | int] = {"model": model, "part": f"keys {place}", "block": block}
                    yield Row(settings | {"order": order}, partial(measured_keys, model, place, block, order, quick))
        for order in ("unsorted", "column norm") if trained and not quick else ():
            settings = {"model": model, "part": "values", "block": head // 2, "order": order}
            yield Row(settings, partial(measured_values, model, head // 2, order, quick))


def floats(model: str, quick: bool) -> dict[str, Any]:
    """The losses with keys, values and queries in float64."""
    it = subject(model, quick)
    return losses(Decoder(it.weights, products(model)), it.windows)


def products(model: str) -> MakeLinear:
    """How matrices are multiplied: those of a quantised file natively."""
    return BackendLinears(registry.load("cppyy")) if model == PUBLISHED else plain_linear


# **Numbers in Block Floating Point.**


def through(numbers: F64, format: Format) -> F64:
    """Cast the rows of the last axis and decode them."""
    flat = np.ascontiguousarray(numbers.reshape(-1, numbers.shape[-1]), np.float32)
    return decode(cast(flat, format)).astype(np.float64).reshape(numbers.shape)


def around(numbers: F64, matrices: F64, format: Format) -> F64:
    """Heads (T × H × d) times orthogonal matrices of their own, cast and decoded, and turned back."""
    mixed = through(np.einsum("thd,hdc->thc", numbers, matrices), format)
    back: F64 = np.einsum("thc,hdc->thd", mixed, matrices)
    return back


@dataclass
class Keys:
    """How one layer stores keys.

    Attributes:
        matrix: for each key head, float64, d_h × d_h: what its channels are multiplied by before they are stored.
        turned: turns keys back and forth; None where they are stored rotated.
        block: elements of a block.
    """

    matrix: F64
    turned: Turn | None
    block: int

    def stored(self, keys: F64, start: int) -> F64:
        """What a cache gives back of keys (T × G × d_h, rotated) whose first stands at `start`."""
        before = keys if self.turned is None else self.turned(keys, start, -1)
        back = around(before, self.matrix, bfp12(self.block))
        return back if self.turned is None else self.turned(back, start, 1)

    def queried(self, queries: F64) -> F64:
        """Queries (T × H × d_h) in BFP16, cast in the order of the key head that they meet."""
        matrix = np.repeat(self.matrix, queries.shape[1] // len(self.matrix), axis=0)
        return around(queries, matrix, bfp16(self.block))


class Cache(KeyValueCache):
    """A cache that gives back what it stored, beside the rule by which it did."""

    def __init__(self, config: LlamaConfig, capacity: int, keys: Keys | None, values: Callable[[F64], F64]) -> None:
        super().__init__(config.kv_heads, config.head_dim, capacity)
        self.rule, self.stored_values = keys, values

    def append(self, keys: F64, values: F64) -> None:
        """Add tokens."""
        kept = keys if self.rule is None else self.rule.stored(keys, len(self))
        super().append(kept, self.stored_values(values))


def attended(queries: F64, cache: KeyValueCache, window: int | None) -> F64:
    """Attention with queries in BFP16."""
    assert isinstance(cache, Cache)
    rounded = queries if cache.rule is None else cache.rule.queried(queries)
    return attend(rounded, cache.keys, cache.values, window)


class BfpDecoder(Decoder):
    """A decoder whose layers store keys and values by rules."""

    def __init__(
        self,
        weights: LlamaWeights,
        linear: MakeLinear,
        keys: Sequence[Keys | None],
        values: Callable[[F64], F64] = lambda each: each,
    ) -> None:
        super().__init__(weights, linear, ops=replace(FORMULAS, attend=attended))
        self.rules, self.values = keys, values

    def new_state(self, capacity: int = 64) -> list[KeyValueCache]:
        """One cache for each block."""
        return [Cache(self.config, capacity, rule, self.values) for rule in self.rules]


# **Keys.**


def measured_keys(model: str, place: str, block: int, order: str, quick: bool) -> dict[str, Any]:
    """The losses with keys in BFP12, and how many mantissas of a sorted cache are other than those of an unsorted."""
    it = subject(model, quick)
    matrices = mixing(model, place, order, quick)
    turned = turner(it.weights.config) if place == "before RoPE" else None
    rules = [Keys(matrix, turned, block) for matrix in matrices]
    found = losses(BfpDecoder(it.weights, products(model), rules), it.windows)
    if order != "Hadamard" and order != "unsorted" and block == it.weights.config.head_dim:
        pairs = zip(calibration(model, quick), rules, strict=True)
        apart = [moved(stored_of(seen.keys, turned), rule) for seen, rule in pairs]
        found["mantissas_apart"] = sum(apart)
    return found


def turner(config: LlamaConfig) -> Turn:
    """Rotation of keys by the angles of their positions times 1 or −1."""
    layout, (frequencies,) = half_split(config.head_dim), config.frequencies

    def turned(keys: F64, start: int, sign: int) -> F64:
        turn = rotation(layout, frequencies.base, start, len(keys), frequencies.scaling)
        return rotate(keys, Rotation(layout, turn.cos, sign * turn.sin))

    return turned


def moved(keys: F64, rule: Keys) -> int:
    """Mantissas of sorted keys that are not those of the keys as they stand, moved."""
    apart = 0
    for head, matrix in enumerate(rule.matrix):
        order: I64 = matrix.argmax(axis=0)
        own = np.ascontiguousarray(keys[:, head], np.float32)
        plain = cast(own, bfp12(rule.block)).mantissas.reshape(own.shape)
        sorted_ = cast(np.ascontiguousarray(own[:, order]), bfp12(rule.block)).mantissas.reshape(own.shape)
        apart += int(np.count_nonzero(plain[:, order] != sorted_))
    return apart


def mixing(model: str, place: str, order: str, quick: bool) -> list[F64]:
    """For each layer the matrix of each key head: a permutation, or Hadamard's."""
    weights = subject(model, quick).weights
    config = weights.config
    if order in ("unsorted", "Hadamard"):
        one = np.eye(config.head_dim) if order == "unsorted" else hadamard(config.head_dim)
        return [np.stack([one] * config.kv_heads)] * config.layers
    seen = calibration(model, quick) if order in ("calibrated", BALANCED) else [None] * config.layers
    turned = turner(config) if place == "before RoPE" else None
    return [
        np.stack([permuting(size) for size in sizes(config, to_float(layer.key), it, turned, order)])
        for layer, it in zip(weights.layers, seen, strict=True)
    ]


def permuting(size: F64) -> F64:
    """The matrix that puts channels in ascending order of size."""
    return np.eye(len(size))[:, permutation(size)]


def sizes(config: LlamaConfig, matrix: F32, seen: "Seen | None", turned: Turn | None, order: str) -> Iterator[F64]:
    """The sizes of the channels of each key head, from ``W_k`` or from what was seen."""
    columns = matrix.reshape(config.hidden, config.kv_heads, config.head_dim)
    for head in range(config.kv_heads):
        if seen is not None:
            keys = np.ascontiguousarray(stored_of(seen.keys, turned)[:, head], np.float32)
            yield sizes_over_queries(keys, queries_of(seen, turned, head)) if order == BALANCED else magnitudes(keys)
        elif order == "pair norm":
            own = np.ascontiguousarray(columns[:, head])
            yield channel_sizes(own, "rotated_norm", layout=half_split(config.head_dim))
        else:
            yield channel_sizes(np.ascontiguousarray(columns[:, head]))


# **What a model's attention reads.**


@dataclass(frozen=True, eq=False)
class Seen:
    """What one layer reads of a text of T tokens.

    Attributes:
        queries: rotated, float64, T × H × d_h.
        keys: rotated, float64, T × G × d_h.
    """

    queries: F64
    keys: F64


def attention_of(weights: LlamaWeights, linear: MakeLinear, tokens: list[int]) -> list[Seen]:
    """Queries and keys of each layer."""
    queries = dict[int, list[F64]]()

    def watched(new: F64, cache: KeyValueCache, window: int | None) -> F64:
        queries.setdefault(id(cache), []).append(new.copy())
        return attend(new, cache.keys, cache.values, window)

    decoder = Decoder(weights, linear, ops=replace(FORMULAS, attend=watched))
    state = decoder.new_state()
    decoder.hidden(tokens, state)
    return [
        Seen(np.concatenate(queries[id(each)]), np.ascontiguousarray(each.keys.transpose(1, 0, 2))) for each in state
    ]


@cache
def calibration(model: str, quick: bool) -> list[Seen]:
    """Of a window of the calibration text."""
    it = subject(model, quick)
    return attention_of(it.weights, products(model), it.calibration[:WINDOW])


def stored_of(rotated: F64, turned: Turn | None) -> F64:
    """Keys or queries in the place where the cache stores keys."""
    return rotated if turned is None else turned(rotated, 0, -1)


def queries_of(seen: Seen, turned: Turn | None, head: int) -> F32:
    """The queries of all heads that meet a key head, one below the other: float32, tokens × d_h.

    Before RoPE the queries are turned back too, so a channel is weighted as for a key at the query's own position.
    """
    group = seen.queries.shape[1] // seen.keys.shape[1]
    own = stored_of(seen.queries, turned)[:, head * group : (head + 1) * group]
    return np.ascontiguousarray(own.reshape(-1, own.shape[-1]), np.float32)


# **Values.**


def measured_values(model: str, block: int, order: str, quick: bool) -> dict[str, Any]:
    """The losses with values in BFP12, their channels as they stand or by the norm of the columns of W_v."""
    it = subject(model, quick)
    config, matrices = it.weights.config, []
    for layer in it.weights.layers:
        columns = to_float(layer.value).reshape(config.hidden, config.kv_heads, config.head_dim)
        heads = [channel_sizes(np.ascontiguousarray(columns[:, head])) for head in range(config.kv_heads)]
        whole = np.stack([permuting(size) if order == "column norm" else np.eye(config.head_dim) for size in heads])
        matrices.append(whole)

    def stored(matrix: F64, values: F64) -> F64:
        return around(values, matrix, bfp12(block))

    class Values(BfpDecoder):
        def new_state(self, capacity: int = 64) -> list[KeyValueCache]:
            return [Cache(config, capacity, None, partial(stored, matrix)) for matrix in matrices]

    return losses(Values(it.weights, products(model), [None] * config.layers), it.windows)


EXPERIMENT = Experiment("ksort", "Perplexity with keys in BFP12, by the order of channels (K-sort, table I).", rows)
