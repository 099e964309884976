r"""The workspace: device memory for tokens on their way through a model, allocated once and used by every layer.

Tokens pass through in *chunks* of at most `CHUNK`, so the workspace holds one chunk. A prompt's experts are loaded once
for each chunk, so a chunk is large. Its size does not depend on the memory available, although that would change no
bit.

The *cache* has a place for every token of the context from the start: a key and a value of :math:`d_h` channels for
each of G heads and each layer. In float16 that is :math:`4 G d_h` bytes per token and layer; with keys in BFP12 the
factor 4 becomes :math:`2 + 17/32`.

Pinned host memory holds what is exchanged for every token: rows of the embedding, scores of the gates, weights of the
experts, the last hidden state, logits.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from lowbit.attention.rope import Frequencies
from lowbit.model.caches import Keys
from lowbit.model.config import LlamaConfig
from lowbit_cuda.kernels.attention import BFP_BLOCK
from lowbit_cuda.model.arena import Arena, charged
from lowbit_cuda.model.matrices import ExpertLayout
from lowbit_cuda.port import Span

CHUNK = 256
"""Tokens that pass through the layers at once."""
LOGIT_ROWS = 8
"""Rows of logits that are computed at once."""
FLOAT, INDEX = 4, 4
"""Bytes."""


@dataclass(frozen=True)
class Sizes:
    """The bytes of everything but weights.

    Attributes:
        config: the model's configuration.
        context: the number of tokens that the cache can hold.
        keys: the type in which keys are stored.
        expert: the layout of an expert, or of the feed-forward part of a dense block.
    """

    config: LlamaConfig
    context: int
    keys: Keys
    expert: ExpertLayout

    @property
    def chunk(self) -> int:
        """Tokens that pass through the layers at once."""
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
        """Bytes of the pinned parts, by name; each is copied to or from the device part of the same name.

        The exception is ``scores``, which kernels write directly.
        """
        there = self.device
        names = ("x", "normed", "probabilities", "index", "answers", "head_in", "logits", "position")
        own = {"scores": 2 * FLOAT * self.chunk * self.config.routing.experts} if self.config.routing else {}
        return {name: there[name] for name in names if name in there} | own

    @property
    def tables(self) -> dict[Frequencies, int]:
        """Bytes of the rotary table for all frequencies."""
        return dict.fromkeys(self.config.frequencies, FLOAT * self.context * self.config.head_dim)

    @property
    def cache(self) -> dict[str, int]:
        """Bytes of the cache of one layer, by part."""
        elements = self.config.kv_heads * self.context * self.config.head_dim
        if self.keys == "bfp12":
            return {"keys": elements // 2, "exponents": elements // BFP_BLOCK, "values": 2 * elements}
        return dict.fromkeys(("keys", "values"), np.dtype(self.keys).itemsize * elements)

    @property
    def total(self) -> int:
        """The bytes that all of it counts as on the device."""
        caches = self.config.layers * charged(self.cache.values())
        return charged(self.device.values()) + charged(self.tables.values()) + caches


@dataclass(frozen=True, eq=False)
class Workspace:
    """The parts themselves.

    Attributes:
        sizes: the sizes of the parts.
        device: parts on the device, by name.
        host: pinned parts, by name.
        tables: rotary tables by frequencies, context × d_h float32: the cosines of all pairs, then their sines.
        caches: the parts of each layer's cache, by name.
    """

    sizes: Sizes
    device: Mapping[str, Span]
    host: Mapping[str, Span]
    tables: Mapping[Frequencies, Span]
    caches: tuple[Mapping[str, Span], ...]

    def __getitem__(self, name: str) -> Span:
        return self.device[name]

    def rows(self, name: str, count: int, columns: int, first: int = 0) -> Span:
        """Rows of 4-byte elements of a part on the device."""
        return self.device[name].part(FLOAT * first * columns, FLOAT * count * columns)


def allocate(arena: Arena, sizes: Sizes) -> Workspace:
    """Allocate the workspace, and fill in its tables."""
    device = {name: arena.allocate(size, f"workspace: {name}") for name, size in sizes.device.items()}
    host = {name: arena.pin(size, f"workspace: {name}") for name, size in sizes.host.items()}
    tables = {each: arena.store(rotary_table(sizes, each), "rotary table") for each in sizes.tables}
    caches = tuple(
        {part: arena.allocate(size, f"{part} of layer {layer}") for part, size in sizes.cache.items()}
        for layer in range(sizes.config.layers)
    )
    return Workspace(sizes, device, host, tables, caches)


def rotary_table(sizes: Sizes, frequencies: Frequencies) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    """Float32, context × d_h: for each position the cosines of d_h/2 pairs, then their sines, rounded once."""
    head_dim, half = sizes.config.head_dim, sizes.config.head_dim // 2
    turned = frequencies.rotation(head_dim, 0, sizes.context)
    return np.concatenate([turned.cos[:, half:], turned.sin[:, half:]], axis=1).astype(np.float32)
