r"""The workspace: what tokens need on a device while they go through a model, taken once and used by every layer.

Tokens go through in *chunks* of at most `CHUNK`, so the workspace has room for one chunk. A prompt's experts are loaded
once for each chunk, which is why a chunk is large; and how large it is does not depend on the memory there is, although
that would change no bit.

The *cache* has a place for every token of the context from the start: a key and a value of :math:`d_h` channels for
each of G heads and each layer. In float16 that is :math:`4 G d_h` bytes a token and layer; with keys in BFP12 the four
becomes :math:`2 + 17/32`.

On the host, in pinned memory, are the numbers that go back and forth with every token: rows of the embedding, scores of
the gates, weights of the experts, the last hidden state, logits.

Source: lowbit's own.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from lowbit.backend.whole_model import Keys
from lowbit.model.config import LlamaConfig
from lowbit_cuda.kernels.numpy_kernels import BFP_BLOCK
from lowbit_cuda.model.arena import Arena, charged
from lowbit_cuda.model.matrices import ExpertLayout
from lowbit_cuda.port import Span

CHUNK = 256
"""Tokens that go through the layers at once."""
LOGIT_ROWS = 8
"""Rows of logits that are made at once."""
FLOAT, INDEX = 4, 4
"""Bytes."""


@dataclass(frozen=True)
class Sizes:
    """How many bytes everything takes that is not weights.

    Attributes:
        config: of the model.
        context: tokens that the cache has a place for.
        keys: the numbers in which keys and values are kept.
        expert: layout of experts, or of the feed-forward part of a dense block.
    """

    config: LlamaConfig
    context: int
    keys: Keys
    expert: ExpertLayout

    @property
    def chunk(self) -> int:
        """Tokens that go through at once."""
        return min(CHUNK, self.context)

    @property
    def device(self) -> dict[str, int]:
        """Bytes of the parts of the workspace on the device, by name."""
        config, tokens = self.config, self.chunk
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        rows = dict.fromkeys(("x", "normed", "out"), config.hidden) | {"inner": self.expert.inner}
        rows |= {"queries": queries, "mixed": queries, "keys": keys, "values": keys}
        rows |= {} if self.expert.fused else {"spare": 2 * self.expert.inner}
        if routing := config.routing:
            rows |= {"probabilities": routing.top_k, "index": 2 * routing.top_k}
            rows |= {"picked": config.hidden, "answers": routing.top_k * config.hidden}
        head = {"head_in": config.hidden, "logits": config.vocabulary}
        sizes = {name: FLOAT * tokens * count for name, count in rows.items()}
        return sizes | {name: FLOAT * LOGIT_ROWS * count for name, count in head.items()} | {"position": INDEX}

    @property
    def host(self) -> dict[str, int]:
        """Bytes of the pinned parts, by name; each is the other end of a copy to or from the part of this name.

        Only ``scores`` has no other end: kernels write it where it is.
        """
        there = self.device
        names = ("x", "normed", "probabilities", "index", "answers", "head_in", "logits", "position")
        own = {"scores": 2 * FLOAT * self.chunk * self.config.routing.experts} if self.config.routing else {}
        return {name: there[name] for name in names if name in there} | own

    @property
    def tables(self) -> dict[float, int]:
        """Bytes of the rotary table for each base."""
        bases = {self.config.layer_rope_base(layer) for layer in range(self.config.layers)}
        return dict.fromkeys(sorted(bases), FLOAT * self.context * self.config.head_dim)

    @property
    def cache(self) -> dict[str, int]:
        """Bytes of the cache of one layer, by part."""
        elements = self.config.kv_heads * self.context * self.config.head_dim
        if self.keys == "bfp12":
            return {"keys": elements // 2, "exponents": elements // BFP_BLOCK, "values": 2 * elements}
        return dict.fromkeys(("keys", "values"), np.dtype(self.keys).itemsize * elements)

    @property
    def total(self) -> int:
        """What all of it counts as on the device."""
        caches = self.config.layers * charged(self.cache.values())
        return charged(self.device.values()) + charged(self.tables.values()) + caches


@dataclass(frozen=True, eq=False)
class Workspace:
    """The parts themselves.

    Attributes:
        sizes: of everything.
        device: on the device, by name.
        host: pinned, by name.
        tables: rotary tables by base, context × d_h float32: cosines of the pairs, then their sines.
        caches: for each layer its parts by name.
    """

    sizes: Sizes
    device: Mapping[str, Span]
    host: Mapping[str, Span]
    tables: Mapping[float, Span]
    caches: tuple[Mapping[str, Span], ...]

    def __getitem__(self, name: str) -> Span:
        return self.device[name]

    def rows(self, name: str, count: int, columns: int, first: int = 0) -> Span:
        """So many rows of 4-byte numbers of a part on the device."""
        return self.device[name].part(FLOAT * first * columns, FLOAT * count * columns)


def take(arena: Arena, sizes: Sizes) -> Workspace:
    """Take all of it; the tables are filled in."""
    device = {name: arena.allocate(size, f"workspace: {name}") for name, size in sizes.device.items()}
    host = {name: arena.pin(size, f"workspace: {name}") for name, size in sizes.host.items()}
    tables = {base: arena.store(rotary_table(sizes, base), "rotary table") for base in sizes.tables}
    caches = tuple(
        {part: arena.allocate(size, f"{part} of layer {layer}") for part, size in sizes.cache.items()}
        for layer in range(sizes.config.layers)
    )
    return Workspace(sizes, device, host, tables, caches)


def rotary_table(sizes: Sizes, base: float) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    """Float32, context × d_h: for each position the cosines of d_h/2 pairs, then their sines, rounded once."""
    half = sizes.config.head_dim // 2
    theta = base ** (-np.arange(half) / half)
    angle = np.arange(sizes.context)[:, np.newaxis] * theta
    return np.concatenate([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32)
