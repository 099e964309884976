"""Writing a directory: its parts in the order in which they are committed, its small files, and the final check.

A directory has one shard for each block and one for what lies around the blocks. With each shard the journal notes the
digest of every matrix and vector *as it is meant*, in float32. `finish` writes configuration, index and tokenizer,
loads the whole directory as a user would, and compares the digests. Only then does the directory get its name.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from lowbit.arrays import Array
from lowbit.backend.whole_model import spoken_bytes
from lowbit.errors import FormatError, UnavailableError
from lowbit.formats.checkpoint.names import EMBEDDING, HEAD, NORM, matrix_names
from lowbit.formats.checkpoint.reader import CONFIG, Checkpoint, open_checkpoint
from lowbit.formats.checkpoint.tensors import INDEX
from lowbit.formats.checkpoint.tokenizer import read_tokenizer
from lowbit.model.weights import LayerWeights, Progress, to_float, vector_sizes
from lowbit.rewriting.coded import CodedMatrix, digest
from lowbit.rewriting.journal import Journal
from lowbit.rewriting.layouts import Layout
from lowbit.rewriting.source import Source, smallest
from lowbit.tensor_formats.stored import Stored

Floats = Mapping[str, Array]
"""Tensors by their names in a file."""


@dataclass(frozen=True, eq=False)
class Packed:
    """A tensor of matrices, ready to be written.

    Attributes:
        names: of the matrices that are its columns, side by side, as in `LayerWeights.linears`.
        ends: the last column of each, plus one.
        coded: its numbers.
        stored: the same in the format of the layout.
        notes: what else is noted of each matrix.
    """

    names: tuple[str, ...]
    ends: tuple[int, ...]
    coded: CodedMatrix
    stored: Stored
    notes: Mapping[str, Any]

    def parts(self) -> Iterator[tuple[str, CodedMatrix]]:
        """Its matrices by name."""
        for name, begin, end in zip(self.names, (0, *self.ends), self.ends, strict=False):
            yield name, self.coded.columns(begin, end)


def shard_of(number: int, layers: int) -> str:
    """The file of a block, or with the number of blocks that of what lies around them.

    >>> shard_of(0, 2)
    'model-00001-of-00003.safetensors'
    """
    return f"model-{number + 1:05}-of-{layers + 1:05}.safetensors"


def check_room(destination: Path, needed: int) -> None:
    """Refuse a disk with too little space.

    Raises:
        UnavailableError: there is less than `needed` bytes.
    """
    free = shutil.disk_usage(destination.absolute().parent).free
    if free < needed:
        reason = f"{spoken_bytes(needed)} are needed and {destination.absolute().parent} has {spoken_bytes(free)}"
        raise UnavailableError("disk space for the new directory", reason, "free disk space, or name another disk")


def commit_layer(
    journal: Journal, source: Source, number: int, layer: LayerWeights, packed: Mapping[str, Packed], layout: Layout
) -> None:
    """Write the shard of a block.

    Args:
        journal: of the directory.
        source: the model.
        number: of the block.
        layer: the block as it is read, for its vectors and its router.
        packed: its quantised tensors by name, without ``.weight``.
        layout: of the directory.
    """
    tensors, notes = dict[str, Array](), dict[str, Any]()
    for module, each in packed.items():
        tensors |= dict(layout.tensors(module, each.stored))
        for name, part in each.parts():
            notes[name] = {"digest": digest(part.floats), "bits": part.bits, **each.notes}
    sparse = source.architecture.sparse
    if sparse is not None:
        router = layer.linears()["feed_forward.router"]
        tensors[f"model.layers.{number}.{sparse.router}.weight"] = np.ascontiguousarray(to_float(router).T)
        notes["feed_forward.router"] = {"digest": digest(to_float(router))}
    _commit_block(journal, source, number, layer, tensors, notes)


def commit_floats(journal: Journal, source: Source, number: int, layer: LayerWeights) -> None:
    """Write the shard of a block whose matrices are floats, each tensor in the smallest type that holds it exactly.

    Args:
        journal: of the directory.
        source: the model, as it is to be written.
        number: of the block.
        layer: the block.
    """
    tensors, notes, linears = dict[str, Array](), dict[str, Any](), layer.linears()
    for stored, names in matrix_names(source.architecture, source.config, number).items():
        parts = [to_float(linears[name]) for name in names]
        tensors[stored] = smallest(np.concatenate([np.ascontiguousarray(part.T) for part in parts]))
        notes |= {name: {"digest": digest(part)} for name, part in zip(names, parts, strict=True)}
    _commit_block(journal, source, number, layer, tensors, notes)


def _commit_block(
    journal: Journal, source: Source, number: int, layer: LayerWeights, tensors: Floats, notes: Mapping[str, Any]
) -> None:
    """Write a block's matrices with its vectors."""
    found = {name: getattr(layer, name) for name in vector_sizes(source.config)}
    own = {name: {"digest": digest(vector)} for name, vector in found.items() if vector is not None}
    file = shard_of(number, source.config.layers)
    _commit(journal, file, {**tensors, **source.vectors(number)}, {**notes, **own})


def commit_ends(journal: Journal, source: Source) -> None:
    """Write embedding, last norm and head, unless an earlier process has."""
    file = shard_of(source.config.layers, source.config.layers)
    if journal.note_of(file) is not None:
        return
    tensors, notes, added = dict(source.ends()), {}, np.float32(source.architecture.gain_offset)
    for name, tensor in tensors.items():
        used = tensor.astype(np.float32) + (added if name == NORM else np.float32(0))
        notes[name] = {"digest": digest(used)}
    _commit(journal, file, tensors, notes)


def _commit(journal: Journal, file: str, tensors: Floats, notes: Mapping[str, Any]) -> None:
    sizes = {name: array.nbytes for name, array in tensors.items()}
    journal.commit(file, tensors, {"tensors": sizes, "numbers": notes})


# **The end.**


def finish(
    journal: Journal,
    source: Source,
    more: Mapping[str, Any] = MappingProxyType({}),
    files: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Write the small files, load the directory, compare it with what was meant, and give it its name.

    Args:
        journal: in which every part is finished.
        source: the model.
        more: what the configuration says beside the shape of the model, such as ``quantization_config``.
        files: further files of JSON, by name.
        progress: called after each block that was compared.

    Returns:
        The notes of all matrices by name, and ``bytes``.

    Raises:
        FormatError: what is loaded is not what was meant.
        UnavailableError: the disk is full.
    """
    layers = source.config.layers
    shards = [shard_of(number, layers) for number in range(layers + 1)]
    sizes = {file: journal.note_of(file)["tensors"] for file in shards}
    weight_map = {name: file for file in shards for name in sizes[file]}
    total = sum(size for file in shards for size in sizes[file].values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    texts = {INDEX: index, CONFIG: {**source.described(), **more}, **files}
    for name, content in texts.items():
        journal.write(name, _as_json(content))
    for name, octets in source.files().items():
        journal.write(name, octets)
    _compare(open_checkpoint(journal.folder), journal, source, progress)
    for file in set(journal.parts) - set(shards):
        (journal.folder / file).unlink(missing_ok=True)
    noted = {
        f"layers[{number}].{name}": note
        for number, file in enumerate(shards[:-1])
        for name, note in journal.note_of(file)["numbers"].items()
        if "bits" in note
    }
    journal.finish()
    return {"bytes": total, "matrices": noted}


def _as_json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=1) + "\n").encode()


def _compare(checkpoint: Checkpoint, journal: Journal, source: Source, progress: Progress | None) -> None:
    layers = source.config.layers
    for number in range(layers):
        layer, noted = checkpoint.layer(number), journal.note_of(shard_of(number, layers))["numbers"]
        found = {name: to_float(matrix) for name, matrix in layer.linears().items()}
        vectors = {name: getattr(layer, name) for name in vector_sizes(source.config)}
        found |= {name: vector for name, vector in vectors.items() if vector is not None}
        _same(f"layers[{number}]", {name: digest(each) for name, each in found.items()}, noted)
        if progress is not None:
            progress(number + 1, layers)
    noted = journal.note_of(shard_of(layers, layers))["numbers"]
    found = {EMBEDDING: checkpoint.embedding, NORM: checkpoint.norm}
    found |= {HEAD: np.ascontiguousarray(to_float(checkpoint.head).T)} if HEAD in noted else {}
    _same("ends", {name: digest(each) for name, each in found.items()}, noted)
    if checkpoint.config != source.config:
        raise FormatError(CONFIG, "shape of the model", "another one", "that of the source")
    tokenizer, own = read_tokenizer(checkpoint), source.tokenizer
    if (tokenizer.bos, tokenizer.stop) != (own.bos, own.stop) or tokenizer.to_json() != own.to_json():
        raise FormatError("tokenizer.json", "tokenizer", "another one", "that of the source")


def _same(where: str, found: Mapping[str, str], noted: Mapping[str, Any]) -> None:
    for name in sorted(found.keys() | noted.keys()):
        if found.get(name) != noted.get(name, {}).get("digest"):
            allowed = "the numbers that were meant; nothing has been put under the final name"
            raise FormatError("the new directory", f"{where} {name}", "other numbers when it is loaded", allowed)
