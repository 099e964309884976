"""Writing a model: its parts in the order in which they are committed, and the final check.

There is one part for each block and one for everything outside the blocks; each is a safetensors file in the folder of
the journal. With each part the journal records the digest of every matrix and vector *as intended*, in float32.
`finish` lets the target write what is missing, loads all of it as a user would, and compares the digests. Only then
does the result get its name.

A *target* is what is written: a directory (`lowbit.rewriting.to_directory`), whose shards are the parts, or a GGUF file
(`lowbit.rewriting.to_gguf`), which is assembled from the parts at the end.
"""

import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from lowbit.arrays import F32, Array
from lowbit.backend.whole_model import spoken_bytes
from lowbit.errors import FormatError, UnavailableError
from lowbit.formats.tokenizer import Tokenizer
from lowbit.model.config import LlamaConfig
from lowbit.model.matrices import Embedding, Matrix, to_float
from lowbit.model.weights import LayerWeights, Progress, vector_sizes
from lowbit.quantization.coded import digest
from lowbit.rewriting.journal import Journal
from lowbit.rewriting.layouts import Description, Layout
from lowbit.rewriting.source import Source
from lowbit.system.threads import side_by_side, usable_processors
from lowbit.tensor_formats.stored import Stored

Floats = Mapping[str, Array]
"""Tensors by their names in a file."""
ROUTER = "feed_forward.router"


@dataclass(frozen=True, eq=False)
class Packed:
    """A tensor of matrices, ready to write.

    Attributes:
        names: of the matrices that are its columns, side by side, as in `LayerWeights.linears`.
        ends: the last column of each, plus one.
        numbers: float32, K × N: the intended numbers.
        written: the same in a format of the layout; the numbers themselves if they stay floats.
        notes: further notes on each matrix.
    """

    names: tuple[str, ...]
    ends: tuple[int, ...]
    numbers: F32
    written: Stored | F32
    notes: Mapping[str, Any]

    def parts(self) -> Iterator[tuple[str, F32]]:
        """The numbers of its matrices by name."""
        for name, begin, end in zip(self.names, (0, *self.ends), self.ends, strict=False):
            yield name, np.ascontiguousarray(self.numbers[:, begin:end])


class Loaded(Protocol):
    """A model as a user loads it; the attributes are those of `LlamaWeights`."""

    @property
    def config(self) -> LlamaConfig: ...
    @property
    def embedding(self) -> F32 | Embedding: ...
    @property
    def norm(self) -> F32: ...
    @property
    def head(self) -> Matrix: ...
    def layer(self, number: int) -> LayerWeights:
        """One block."""


class Target(ABC):
    """The kind of output into which a model is written.

    Args:
        layout: its own.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    @abstractmethod
    def check(self, source: Source) -> None:
        """Refuse a model that it cannot describe.

        Raises:
            ArgumentError: names what it cannot describe.
        """

    @abstractmethod
    def holders(self, source: Source, number: int) -> Iterator[tuple[str, tuple[str, ...]]]:
        """The tensors of matrices of a block, without the router: the name of each, and the matrices in it."""

    @abstractmethod
    def layer(self, source: Source, number: int, layer: LayerWeights, packed: Mapping[str, Packed]) -> Floats:
        """All tensors of a block, from its matrices by the names of `holders`."""

    @abstractmethod
    def ends(self, source: Source) -> Floats:
        """Embedding, norm and head."""

    @abstractmethod
    def complete(self, journal: Journal, source: Source, description: Description | None) -> Path:
        """Write the rest; returns the file or folder that will get the final name."""

    @abstractmethod
    def opened(self, path: Path) -> tuple[Loaded, Tokenizer]:
        """The result as a user loads it."""

    @abstractmethod
    def as_held(self, source: Source) -> LlamaConfig:
        """The shape of a model, with numbers in the types that the target stores."""


def shard_of(number: int, layers: int) -> str:
    """The file of a block, or, for the number of blocks, that of embedding, norm and head.

    >>> shard_of(0, 2)
    'model-00001-of-00003.safetensors'
    """
    return f"model-{number + 1:05}-of-{layers + 1:05}.safetensors"


def shards_of(layers: int) -> list[str]:
    """The files of all parts."""
    return [shard_of(number, layers) for number in range(layers + 1)]


def check_room(destination: Path, needed: int) -> None:
    """Refuse a disk with too little space.

    Raises:
        UnavailableError: there is less than `needed` bytes.
    """
    free = shutil.disk_usage(destination.absolute().parent).free
    if free < needed:
        reason = f"{spoken_bytes(needed)} are needed and {destination.absolute().parent} has {spoken_bytes(free)}"
        raise UnavailableError("disk space for the new model", reason, "free disk space, or name another disk")


# **Committing.**


@dataclass(frozen=True, eq=False)
class Part:
    """A part of the output.

    Attributes:
        tensors: by their names in the file.
        note: its entry in the journal.
    """

    tensors: Floats
    note: Mapping[str, Any]


def part_of_layer(
    target: Target, source: Source, number: int, layer: LayerWeights, packed: Mapping[str, Packed]
) -> Part:
    """The part of a block.

    Args:
        target: what is written.
        source: the model.
        number: of the block.
        layer: the block as read, for its vectors and its router.
        packed: its matrices.
    """
    notes: dict[str, Any] = {
        name: {"digest": digest(numbers), **each.notes} for each in packed.values() for name, numbers in each.parts()
    }
    notes |= {name: {"digest": digest(vector)} for name, vector in _vectors(source.config, layer).items()}
    linears = layer.linears()
    if ROUTER in linears:
        notes[ROUTER] = {"digest": digest(to_float(linears[ROUTER]))}
    return _part(target.layer(source, number, layer, packed), notes)


def commit_layer(
    journal: Journal, target: Target, source: Source, number: int, layer: LayerWeights, packed: Mapping[str, Packed]
) -> None:
    """Write the part of a block; the arguments are the journal of the output and those of `part_of_layer`."""
    part = part_of_layer(target, source, number, layer, packed)
    journal.commit(shard_of(number, source.config.layers), part.tensors, part.note)


def floats_of(target: Target, source: Source, number: int, layer: LayerWeights) -> dict[str, Packed]:
    """The matrices of a block as floats."""
    linears, found = layer.linears(), dict[str, Packed]()
    for holder, names in target.holders(source, number):
        numbers, ends = columns_together([to_float(linears[name]) for name in names])
        found[holder] = Packed(names, ends, numbers, numbers, {})
    return found


def columns_together(matrices: Sequence[F32]) -> tuple[F32, tuple[int, ...]]:
    """Matrices with the same rows as one, and the end of the columns of each."""
    ends = tuple(int(end) for end in np.cumsum([each.shape[1] for each in matrices]))
    return matrices[0] if len(matrices) == 1 else np.concatenate(matrices, axis=1), ends


def _vectors(config: LlamaConfig, layer: LayerWeights) -> dict[str, F32]:
    found = {name: getattr(layer, name) for name in vector_sizes(config)}
    return {name: vector for name, vector in found.items() if vector is not None}


def commit_ends(journal: Journal, target: Target, source: Source) -> None:
    """Write the part of embedding, norm and head, if it is missing."""
    file = shard_of(source.config.layers, source.config.layers)
    if journal.note_of(file) is None:
        notes = {name: {"digest": digest(numbers)} for name, numbers in source.numbers_of_ends()}
        part = _part(target.ends(source), notes)
        journal.commit(file, part.tensors, part.note)


def _part(tensors: Floats, notes: Mapping[str, Any]) -> Part:
    sizes = {name: array.nbytes for name, array in tensors.items()}
    return Part(tensors, {"tensors": sizes, "numbers": notes})


# **The end.**


def finish(
    journal: Journal, target: Target, source: Source, description: Description | None, progress: Progress | None = None
) -> dict[str, Any]:
    """Write the rest, load the result, compare it with the intended numbers, and give it its final name.

    Args:
        journal: in which every part is finished.
        target: what is written.
        source: the model.
        description: of its codes; None if there are none.
        progress: called after each block that was compared.

    Returns:
        The notes of all matrices by name, and ``bytes``, those of all tensors.

    Raises:
        FormatError: the loaded result differs from the intended one.
        UnavailableError: the disk is full.
    """
    files = shards_of(source.config.layers)
    noted = [journal.note_of(file)["numbers"] for file in files]
    total = sum(size for file in files for size in journal.note_of(file)["tensors"].values())
    result = target.complete(journal, source, description)
    loaded, tokenizer = target.opened(result)
    _compare(loaded, noted, source, progress)
    _compare_words(loaded, tokenizer, target, source)
    journal.finish(result, files)
    return {
        "bytes": total,
        "matrices": {
            f"layers[{number}].{name}": note
            for number, notes in enumerate(noted[:-1])
            for name, note in notes.items()
            if "bits" in note
        },
    }


def _compare(loaded: Loaded, noted: list[Mapping[str, Any]], source: Source, progress: Progress | None) -> None:
    layers = source.config.layers
    for number in range(layers):
        layer = loaded.layer(number)
        named = {**layer.linears(), **_vectors(source.config, layer)}
        digests = side_by_side(lambda each: digest(to_float(each)), named.values(), usable_processors())
        _same(f"layers[{number}]", dict(zip(named, digests, strict=True)), noted[number])
        if progress is not None:
            progress(number + 1, layers)
    found = {"embedding": np.asarray(loaded.embedding), "norm": loaded.norm}
    if "head" in noted[-1]:
        found["head"] = to_float(loaded.head)
    _same("model", {name: digest(each) for name, each in found.items()}, noted[-1])


def _same(where: str, found: Mapping[str, str], noted: Mapping[str, Any]) -> None:
    for name in sorted(found.keys() | noted.keys()):
        if found.get(name) != noted.get(name, {}).get("digest"):
            raise _other(f"{where} {name}", "other numbers when it is loaded", "the numbers that were meant")


def _compare_words(loaded: Loaded, tokenizer: Tokenizer, target: Target, source: Source) -> None:
    if loaded.config != target.as_held(source):
        raise _other("shape of the model", "another one", "that of the source")
    if not tokenizer.can_replace(source.tokenizer):
        raise _other("tokenizer", "another one", "that of the source")


def _other(what: str, given: str, allowed: str) -> FormatError:
    return FormatError("the new model", what, given, f"{allowed}; nothing has been put under the final name")
