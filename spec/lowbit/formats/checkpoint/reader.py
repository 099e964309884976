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

**Quantised checkpoints** have a few tensors in place of the weights of most matrices. These matrices stay in their
bytes (`lowbit.formats.checkpoint.stored_matrix`). Matrices of 16-bit floats stay so as well, since they take half of
what they would as float32; vectors become float32.

Source: the published checkpoint of Mixtral 8x7B; the safetensors format.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from lowbit.arrays import F32
from lowbit.attention.ksort import LayerOrders
from lowbit.contract.checks import check_integer
from lowbit.errors import ArgumentError, FormatError
from lowbit.formats.checkpoint import stacked, stored_matrix
from lowbit.formats.checkpoint.architectures import Architecture
from lowbit.formats.checkpoint.config import architecture_of, is_tied, read_config
from lowbit.formats.checkpoint.contents import Packing, check_table, read_packing
from lowbit.formats.checkpoint.digests import with_digests
from lowbit.formats.checkpoint.gptq_version import Version
from lowbit.formats.checkpoint.names import EMBEDDING, HEAD, NORM, matrix_names, stack_prefix, vector_names
from lowbit.formats.checkpoint.prequantized import Packed
from lowbit.formats.checkpoint.quantization_config import method_of
from lowbit.formats.checkpoint.stored_matrix import OF_16_BITS, floats_of_16_bits
from lowbit.formats.checkpoint.tensors import (
    INDEX,
    MOST_INDEX_BYTES,
    STORED,
    WIDTHS,
    Place,
    Table,
    read_coded,
    read_floats,
    read_table,
)
from lowbit.formats.known_file import wrong_path
from lowbit.model.config import LlamaConfig
from lowbit.model.matrices import Embedding, Matrix, select_columns, to_float
from lowbit.model.weights import LayerWeights, Progress, assembled, linear_shapes
from lowbit.system.json_files import MOST_CONFIG_BYTES, parsed, read_bytes
from lowbit.system.threads import side_by_side
from lowbit.tensor_formats.stored import Stored
from lowbit.text import quoted

CONFIG = "config.json"

ROUTER = "feed_forward.router"


def _is_kept(place: Place) -> bool:
    """Whether a tensor takes the same bytes in memory: matrices of 16-bit floats, and everything but floats."""
    return place.type not in STORED or (place.type in OF_16_BITS and len(place.shape) > 1)


def as_stored(name: str, matrix: Matrix) -> Matrix:
    """The weights, unchanged."""
    return matrix


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A checkpoint directory whose table of tensors has been checked; weights are read when they are needed.

    Attributes:
        folder: where it is.
        config: the shape of the model.
        tied: whether the head is tied to the embedding.
        table: where each tensor lies.
        digest: digest of ``config.json`` and of the index: the same for the same description of a model.
        architecture: the kind of model.
        packed: the quantised matrices, by the names that their weights would have.
        remarks: what a user should know about how it is read, a sentence each.
        coded: whether stacked experts are MXFP4.
    """

    folder: Path
    config: LlamaConfig
    tied: bool
    table: Table
    digest: str
    architecture: Architecture
    packed: Mapping[str, Packed] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    coded: bool = False

    @property
    def file(self) -> str:
        """Its name, for messages."""
        return self.folder.name

    @property
    def nbytes(self) -> int:
        """Bytes of its weights in memory: matrices as stored, and all other floats as float32."""
        inside = {name for each in self.packed.values() for name in each.tensors.values()}
        others = [place for name, place in self.table.items() if name not in inside]
        floats = sum(place.nbytes if _is_kept(place) else 4 * prod(place.shape) for place in others)
        return floats + sum(each.nbytes for each in self.packed.values())

    def identified(self, progress: Progress | None = None) -> "Checkpoint":
        """The same checkpoint with the digest of each tensor, against which the tensor is checked whenever it is read.

        Args:
            progress: called with bytes done and total bytes.

        Raises:
            ArgumentError, FormatError: as `with_digests`.
        """
        if all(place.sha256 for place in self.table.values()):
            return self
        return replace(self, table=with_digests(self.table, progress))

    def contents(self) -> dict[str, Any]:
        """Everything that determines its weights, in JSON types: with digests once it is `identified`."""
        tensors = {name: [place.type, place.shape, place.sha256] for name, place in self.table.items()}
        return {"tensors": tensors, "description": self.digest}

    @property
    def embedding(self) -> F32 | Embedding:
        """Vocabulary × hidden; like all weights here, it is read on each access."""
        if self.table[EMBEDDING].type not in OF_16_BITS:
            return read_floats(self.table, EMBEDDING)
        return Embedding.of(self._halves(EMBEDDING))

    @property
    def norm(self) -> F32:
        """Float32, hidden: gain of the last norm."""
        return self._vector(NORM, "norm")

    @property
    def head(self) -> Matrix:
        """Hidden × vocabulary.

        Raises:
            FormatError: a tied head that is also stored with other numbers.
        """
        if HEAD in self.packed:
            return self._stored(HEAD, self.config.hidden, self.config.vocabulary)
        stored = self._floats(HEAD) if HEAD in self.table else None
        if stored is not None and not self.tied:
            return stored
        head = self._floats(EMBEDDING)
        if stored is not None and not np.array_equal(to_float(head), to_float(stored)):  # some hold a tied head twice
            file, allowed = self.table[HEAD].shard.path.name, "that of the embedding, which it is tied to"
            raise FormatError(file, f"tensor {quoted(HEAD)}", "another matrix", allowed)
        return head

    def layer(self, number: int, change: Callable[[str, Matrix], Matrix] = as_stored, threads: int = 1) -> LayerWeights:
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
            names = held[stored]
            parts = self._matrices(stored, [shapes[name] for name in names])
            if ROUTER in names:
                parts = map(to_float, parts)
            return {name: change(name, part) for name, part in zip(names, parts, strict=True)}

        changed = side_by_side(linears, held, threads)
        if (prefix := stack_prefix(self.architecture, number)) is not None:
            parts |= stacked.biases(self.table, prefix)
            changed += [
                {name: change(name, matrix)} for name, matrix in stacked.matrices(self.table, prefix, coded=self.coded)
            ]
        return assembled(self.config, parts, {name: matrix for each in changed for name, matrix in each.items()})

    def _matrices(self, stored: str, shapes: list[tuple[int, int]]) -> Iterable[Matrix]:
        """The matrices that are the rows of one tensor, in their order."""
        ends = [int(end) for end in np.cumsum([columns for _, columns in shapes])]
        if stored in self.packed:
            whole = self._stored(stored, shapes[0][0], ends[-1])
            return [whole] if len(shapes) == 1 else stored_matrix.cut(whole, ends, self.packed[stored], self.table)
        floats = self._floats(stored)
        if len(shapes) == 1:
            return [floats]
        return [select_columns(floats, np.arange(first, end)) for first, end in pairwise((0, *ends))]

    def _floats(self, name: str) -> Matrix:
        """A matrix of floats, K × N, in the type in which it is stored."""
        if self.table[name].type not in OF_16_BITS:
            return read_floats(self.table, name, transposed=True)
        return self._halves(name)

    def _halves(self, name: str) -> Stored:
        """The same of a matrix of 16-bit floats."""
        return floats_of_16_bits(self.table[name], name, read_coded(self.table, name))

    def _stored(self, name: str, rows: int, columns: int) -> Stored:
        return stored_matrix.read(self.table, self.packed[name], rows, columns)

    def _vector(self, stored: str, name: str) -> F32:
        """A vector as used: a gain includes the kind's offset."""
        vector, offset = read_floats(self.table, stored), self.architecture.gain_offset
        if name == "key_order":
            try:
                LayerOrders.of(vector, self.config.head_dim, self.config.heads)
            except ArgumentError as error:
                file = self.table[stored].shard.path.name
                raise FormatError(file, f"tensor {quoted(stored)}", error.given, error.allowed) from error
        return vector + np.float32(offset) if offset and name.endswith("norm") else vector


def open_checkpoint(
    folder: str | os.PathLike[str], gptq_version: Version | None = None, context: int | None = None
) -> Checkpoint:
    """Open a checkpoint directory and check its configuration and table of tensors.

    No weights are read, except a few zeros of GPTQ, which show its version.

    Args:
        folder: the directory.
        gptq_version: ``v1`` or ``v2``, overriding the label and zeros of a GPTQ checkpoint; None to follow them.
        context: the longest text; None for the default (`lowbit.formats.checkpoint.rope`).

    Raises:
        ArgumentError: there is no such directory, or it lacks a file; a version of GPTQ that does not exist, or for
            another checkpoint; a context that the model does not have.
        FormatError: a kind of model, a method of quantisation or a feature that is not supported; a tensor that is
            missing, unknown, or of another shape or type than in the configuration; a damaged file.
    """
    path = Path(folder)
    if not os.path.isdir(path):
        raise wrong_path("model", path, "a checkpoint directory")
    described = read_bytes(path / CONFIG, MOST_CONFIG_BYTES)
    fields = parsed(CONFIG, described)
    architecture, config, tied = architecture_of(fields), read_config(fields, context), is_tied(fields)
    method = method_of(path, fields)
    if method is not None:
        method.check()
    table = read_table(path, tuple(STORED if method is None else WIDTHS))
    coded = method is not None and stack_prefix(architecture, 0) is not None and method.name == stacked.FORMAT
    packing = Packing(coded=True, identity=(b"mxfp4",)) if coded else read_packing(table, method, gptq_version)
    if coded and gptq_version is not None:
        sentence = f"GPTQ version {gptq_version} was asked for, and the checkpoint has no matrices of GPTQ"
        raise ArgumentError("gptq_version", gptq_version, "None", sentence)
    check_table(config, tied, architecture, table, packing)
    index = read_bytes(path / INDEX, MOST_INDEX_BYTES) if (path / INDEX).exists() else b""
    parts = [described, index, *packing.identity]
    digest = hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()
    return Checkpoint(
        path.resolve(), config, tied, table, digest, architecture, packing.matrices, packing.remarks, coded
    )
