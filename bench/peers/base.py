"""What a contestant is, and the weights that all contestants of a problem are given."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from lowbit.arrays import F32, F64, Array
from lowbit.errors import LowbitError
from lowbit.quantization.affine import Convention, QuantizedMatrix, ScaleDtype, quantize

TILE = 512
"""Columns that are quantised; the others repeat them. Speed does not depend on values, and errors of 512 are enough."""
DEVIATION = 0.02
"""Of the weights, which are normally distributed, as those of real layers roughly are."""

Item = TypeVar("Item")


class AbsentError(LowbitError):
    """A contestant that cannot take part, and why."""


@dataclass(frozen=True)
class Weights:
    """The float32 weights of one problem, K × N, of which only the first columns are stored."""

    rows: int
    columns: int
    group_size: int

    @cached_property
    def tile(self) -> F32:
        """float32, K × min(N, TILE): the columns that all others repeat."""
        rng = np.random.default_rng([self.rows, self.columns])
        tile = rng.standard_normal((self.rows, min(self.columns, TILE)), np.float32)
        return np.multiply(tile, np.float32(DEVIATION))

    @cached_property
    def source(self) -> npt.NDArray[np.intp]:
        """Which column of the tile each of the N columns repeats."""
        return np.arange(self.columns, dtype=np.intp) % min(self.columns, TILE)

    def spread(self, tiled: Array, axis: int) -> Array:
        """What was made for the columns of the tile, repeated for all N along an axis; contiguous."""
        return np.ascontiguousarray(np.take(tiled, self.source, axis))

    def quantized(
        self, bits: int = 4, convention: Convention = "zero_point", scale_dtype: ScaleDtype = "float32"
    ) -> QuantizedMatrix:
        """The tile in one of lowbit's formats."""
        return _quantized(self, bits, self.group_size, convention, scale_dtype)

    def whole(self, tile: QuantizedMatrix) -> QuantizedMatrix:
        """All N columns of a quantised tile."""
        words, scales, zeros = (self.spread(array, 1) for array in (tile.words, tile.scales, tile.zeros))
        return replace(tile, words=words, scales=scales, zeros=zeros)

    def activations(self, vectors: int) -> F32:
        """float32, vectors × K, normally distributed."""
        return np.random.default_rng(vectors).standard_normal((vectors, self.rows), np.float32)


@cache
def _quantized(
    weights: Weights, bits: int, group_size: int, convention: Convention, scale_dtype: ScaleDtype
) -> QuantizedMatrix:
    size = min(group_size, weights.rows)
    return quantize(weights.tile, bits=bits, group_size=size, convention=convention, scale_dtype=scale_dtype)


class Rotation(Generic[Item]):
    """Things that are taken in turn, by all who share them."""

    def __init__(self, items: list[Item]) -> None:
        self.items = items
        self._turns = self._forever()

    def next(self) -> Item:
        return next(self._turns)

    def _forever(self) -> Iterator[Item]:
        while True:
            yield from self.items


@dataclass
class Plan:
    """How much of everything: what a contestant asks when it lays out its weights.

    Attributes:
        threads: that compute.
        rotation: bytes of weights of each contestant, so that no product finds its own in a cache.
        burst: bytes that one measurement moves at least; several products follow each other where one moves fewer.
        stores: weights that several contestants share, by name.
    """

    threads: int
    rotation: int
    burst: int
    stores: dict[str, Any] = field(default_factory=dict)

    def products(self, nbytes: int) -> int:
        """How many products of so many bytes are measured together."""
        return -(-self.burst // nbytes)

    def bursts(self, nbytes: int) -> int:
        """How many bursts of products hold the rotation; at least what two contestants that share it use a round."""
        return max(4, -(-self.rotation // (self.products(nbytes) * nbytes)))

    def store(self, name: str, make: Callable[[], Item]) -> Item:
        """What is kept under a name, made by who asks first."""
        if name not in self.stores:
            self.stores[name] = make()
        found: Item = self.stores[name]
        return found


class Contestant(ABC):
    """Weights laid out as one library wants them, many times over.

    Attributes:
        nbytes: bytes of codes, scales and zeros that one product reads.
        products: how many products one `run` computes, each with weights of its own.
        bursts: after so many runs the first weights come again.
    """

    nbytes: int
    products: int
    bursts: int

    @property
    def store(self) -> object:
        """Whose weights these are: contestants that share theirs answer the same object."""
        return self

    @abstractmethod
    def prepare(self, x: F32) -> None:
        """Get ready to multiply these rows of activations, float32, T × K."""

    @abstractmethod
    def run(self) -> None:
        """Compute the next products; this is what is timed."""

    def rest(self) -> None:  # noqa: B027 - only some libraries can be asked to
        """Let the library's threads sleep, so that they take no core from what is measured next."""

    @abstractmethod
    def result(self) -> F32:
        """What the last product of the last run came to, float32, T × N."""

    @abstractmethod
    def held(self) -> F32 | F64:
        """The weights of the tile as the library holds them, K × TILE."""

    def close(self) -> None:  # noqa: B027 - most contestants are given back with their memory
        """Give back what is not given back by itself."""
