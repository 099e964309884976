"""Checkpoint directories: from the files in which models are published to the weights of a decoder.

A published model is a directory: ``config.json`` holds its shape, ``model.safetensors`` or its shards the weights, and
``tokenizer.json`` the tokenizer. The reader works in steps, each in its own file: `lowbit.system.json_files` reads JSON
with limits, `lowbit.formats.checkpoint.config` derives the shape of a decoder from it,
`lowbit.formats.checkpoint.architectures` says what sets one kind of model apart,
`lowbit.formats.checkpoint.names` gives the name and shape of each tensor, `lowbit.formats.checkpoint.tensors` finds and
reads tensors, `lowbit.formats.checkpoint.tokenizer` makes the tokenizer, and this file combines them.

**Opening reads no weights.** A Mixtral 8x7B is 93 GB, so the whole table of tensors is checked first: no tensor is
missing, none is unknown, and each has its shape and a type that converts to float32 exactly. An unknown tensor would
otherwise be ignored silently, and a model without one of its parts still produces text. Then weights are read one at a
time, a block at a time, or all of them, as memory allows: a `Checkpoint` is a `LayeredWeights`, and `in_memory` makes a
whole model of it.

Source: the published checkpoint of Mixtral 8x7B; the safetensors format.
"""

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lowbit.arrays import F32
from lowbit.contract.checks import check_integer
from lowbit.errors import ArgumentError, FormatError
from lowbit.formats.checkpoint.architectures import ARCHITECTURES, Architecture
from lowbit.formats.checkpoint.config import is_tied, kind_of, read_config
from lowbit.formats.checkpoint.names import EMBEDDING, HEAD, NORM, matrix_names, tensor_shapes, vector_names
from lowbit.formats.checkpoint.tensors import INDEX, MOST_INDEX_BYTES, Table, read_floats, read_table
from lowbit.model.config import LlamaConfig
from lowbit.model.weights import ATTENTION, NORMS, GatedWeights, LayerWeights, Matrix, SparseWeights, linear_shapes
from lowbit.system.json_files import MOST_CONFIG_BYTES, parsed, read_bytes
from lowbit.system.threads import side_by_side
from lowbit.text import quoted

CONFIG = "config.json"


def as_stored(name: str, matrix: F32) -> Matrix:
    """The weights as they are."""
    return matrix


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A checkpoint directory whose table of tensors has been checked; weights are read when they are needed.

    Attributes:
        folder: where it is.
        config: the shape of the model.
        tied: whether the head is the embedding over again.
        table: where each tensor lies.
        digest: sum of ``config.json`` and of the index: the same for the same description of a model.
        architecture: the kind of model.
    """

    folder: Path
    config: LlamaConfig
    tied: bool
    table: Table
    digest: str
    architecture: Architecture

    @property
    def file(self) -> str:
        """Its name, for messages."""
        return self.folder.name

    @property
    def embedding(self) -> F32:
        """Float32, vocabulary × hidden; like all weights here, it is read anew each time."""
        return read_floats(self.table, EMBEDDING)

    @property
    def norm(self) -> F32:
        """Float32, hidden: gain of the last norm."""
        return self._vector(NORM, "norm")

    @property
    def head(self) -> F32:
        """Float32, hidden × vocabulary.

        Raises:
            FormatError: a head that is the embedding over again, and is also stored with other numbers.
        """
        stored = read_floats(self.table, HEAD, transposed=True) if HEAD in self.table else None
        if stored is not None and not self.tied:
            return stored
        head = read_floats(self.table, EMBEDDING, transposed=True)
        if stored is not None and not np.array_equal(head, stored):  # some files hold a tied head twice
            file, allowed = self.table[HEAD].shard.path.name, "that of the embedding, which it is tied to"
            raise FormatError(file, f"tensor {quoted(HEAD)}", "another matrix", allowed)
        return head

    def layer(self, number: int, change: Callable[[str, F32], Matrix] = as_stored, threads: int = 1) -> LayerWeights:
        """One block.

        Args:
            number: 0 to the number of layers - 1.
            change: called with the name and the weights of each linear layer as soon as it is read, routers included.
                Only its result is kept, so while a block is quantised no more of its matrices are in memory as
                float32 than there are threads.
            threads: matrices that are read and changed at a time.

        Raises:
            ArgumentError: there is no such block.
            FormatError: a weight that is not finite, or a file that has changed since it was opened.
        """
        check_integer("layer", number, 0, self.config.layers - 1)
        vectors = vector_names(self.architecture, number)
        parts = {name: self._vector(stored, name) for name, stored in vectors.items()}
        held, shapes = matrix_names(self.architecture, self.config, number), linear_shapes(self.config)

        def linears(stored: str) -> dict[str, Matrix]:
            whole, names = read_floats(self.table, stored, transposed=True), held[stored]
            if len(names) == 1:
                return {names[0]: change(names[0], whole)}
            ends = np.cumsum([shapes[name][1] for name in names])
            split = np.split(whole, ends[:-1], axis=1)
            return {name: change(name, np.ascontiguousarray(part)) for name, part in zip(names, split, strict=True)}

        changed = side_by_side(linears, held, threads)
        return assembled(self.config, parts, {name: matrix for each in changed for name, matrix in each.items()})

    def _vector(self, stored: str, name: str) -> F32:
        """A vector as it is used: a gain with what the kind of model adds to it."""
        vector, offset = read_floats(self.table, stored), self.architecture.gain_offset
        return vector + np.float32(offset) if offset and name.endswith("norm") else vector


def assembled(config: LlamaConfig, vectors: dict[str, F32], linears: dict[str, Matrix]) -> LayerWeights:
    """A block made of its vectors and of its linear layers, by the names of `LayerWeights.linears`."""

    def gated(prefix: str) -> GatedWeights:
        return GatedWeights(*(linears[f"{prefix}.{name}"] for name in ("gate", "up", "down")))

    feed_forward: GatedWeights | SparseWeights
    if config.routing is None:
        feed_forward = gated("feed_forward")
    else:
        router = linears["feed_forward.router"]
        if not isinstance(router, np.ndarray):
            raise ArgumentError("router", "quantised", "float32 weights")
        experts = tuple(gated(f"feed_forward.experts[{number}]") for number in range(config.routing.experts))
        feed_forward = SparseWeights(router, experts)
    parts: dict[str, Any] = dict.fromkeys(NORMS) | vectors | {name: linears[name] for name in ATTENTION}
    return LayerWeights(**parts, feed_forward=feed_forward)


def open_checkpoint(folder: str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint directory and check its configuration and table of tensors; no weights are read.

    Raises:
        ArgumentError: there is no such directory, or it lacks a file.
        FormatError: a kind of model or a feature that is not supported; a tensor that is missing, unknown, or of
            another shape or type than the configuration asks for; a damaged file.
    """
    path = Path(folder)
    if not path.is_dir():
        raise ArgumentError("model", quoted(str(path)), "a checkpoint directory that exists")
    described = read_bytes(path / CONFIG, MOST_CONFIG_BYTES)
    fields = parsed(CONFIG, described)
    architecture, config, tied = ARCHITECTURES[kind_of(fields)], read_config(fields), is_tied(fields)
    table = read_table(path)
    _check_table(config, tied, architecture, table)
    index = read_bytes(path / INDEX, MOST_INDEX_BYTES) if (path / INDEX).exists() else b""
    sums = (hashlib.sha256(described).digest(), hashlib.sha256(index).digest())
    digest = hashlib.sha256(b"".join(sums)).hexdigest()
    return Checkpoint(path.resolve(), config, tied, table, digest, architecture)


def _check_table(config: LlamaConfig, tied: bool, architecture: Architecture, table: Table) -> None:
    """Refuse a table that is not exactly the configuration's, in time that grows with the table and not with claims."""
    experts = 1 if config.routing is None else config.routing.experts
    if config.layers * experts > len(table):
        claimed = f"{config.layers} layers" + ("" if config.routing is None else f" of {experts} experts")
        raise FormatError(
            CONFIG, "shape of the model", claimed, f"what {len(table)} tensors can hold; some are missing"
        )
    expected = dict(tensor_shapes(config, tied and HEAD not in table, architecture))
    for name, shape in expected.items():
        if name not in table:
            raise FormatError(CONFIG, f"tensor {quoted(name)}", "missing", "there, as this shape of a model asks for")
        place = table[name]
        if place.shape != shape:
            file = place.shard.path.name
            raise FormatError(file, f"shape of tensor {quoted(name)}", place.shape, " x ".join(map(str, shape)))
    if len(table) != len(expected):
        extra = next(name for name in table if name not in expected)
        raise FormatError(
            table[extra].shard.path.name, "tensor", quoted(extra), "those of this kind and shape of model"
        )
