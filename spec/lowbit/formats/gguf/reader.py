"""GGUF: from a file to the weights of a decoder.

GGUF is the file format of the ggml project and the most common format of small quantised models. The reader works in
steps, each in its own file: `lowbit.formats.gguf.header` reads and checks the header, `lowbit.formats.gguf.tensors`
decodes blocks, `lowbit.formats.gguf.architectures` names the parts of each kind of decoder,
`lowbit.formats.gguf.config` derives its shape from the metadata, and this file combines them.
`lowbit.formats.gguf.tokenizer` makes the tokenizer from the same metadata.

**Orientation.** A GGUF matrix is N × K, one row for each output; a `Matrix` is K × N, so it is transposed here. Files
of architecture ``llama`` store the rows of the query and key projections with the two channels of each rotary pair side
by side, unlike the published weights; half-split channels (see `rope`) are restored by reading the even ones of a head
first and then the odd ones. Rows of the file are columns here, and moving whole columns moves codes, scales and zeros
together: nothing is decoded and nothing is rounded.

A tensor that would be left out, such as a bias or an expert, would silently make it another model, and is refused. A
file that lacks a tensor is refused as well, and so is a part of a model that was split into several files.

Source: the GGUF specification of the ggml project.
"""

import math
import os
from collections.abc import Collection
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import numpy as np

from lowbit.arrays import F32, I64, U8
from lowbit.contract.checks import spoken
from lowbit.errors import ArgumentError, FormatError
from lowbit.formats.digests import digest
from lowbit.formats.gguf.architectures import ARCHITECTURES
from lowbit.formats.gguf.config import read_config
from lowbit.formats.gguf.header import Header, TensorInfo, walk
from lowbit.formats.gguf.tensors import CODE_BITS, floats, format_of, matrix
from lowbit.formats.known_file import KnownFile, opened
from lowbit.model.config import LlamaConfig
from lowbit.model.matrices import Embedding, Matrix, select_columns, shape_of, to_float
from lowbit.model.weights import LayerWeights, LlamaWeights, Progress, assembled, linear_shapes
from lowbit.system.memory import check_memory
from lowbit.text import kind_of, quoted

Kind = TypeVar("Kind", bool, int, float, str, list[str])

ROUTER_MATRIX = "feed_forward.router"
ROTATED = {"attn_q": "heads", "attn_k": "kv_heads"}
SPLIT_COUNT, JOINED = "split.count", "llama-gguf-split --merge FIRST_PART NEW_FILE"
"""The key of the number of files of a split model, and how llama.cpp's tool joins them."""
MOST_SHOWN = 3
"""The most missing tensors that a message names."""


@dataclass(frozen=True, eq=False)
class GGUFFile:
    """A GGUF file whose header has been checked; tensors are read from it one at a time.

    Attributes:
        on_disk: the file.
        header: its metadata and its table of tensors.
        context: the longest text that the caller requests; None for the model's default.
    """

    on_disk: KnownFile
    header: Header
    context: int | None = None

    @property
    def file(self) -> str:
        """Its name, for messages."""
        return self.on_disk.path.name

    @property
    def config(self) -> LlamaConfig:
        """The shape of the model.

        Raises:
            FormatError: another architecture, a number missing or out of range, or a feature that is not supported.
        """
        return read_config(self)

    def digest(self) -> str:
        """The SHA-256 of the file, in hexadecimal digits.

        Raises:
            FormatError: the file has changed.
        """
        return digest(self.on_disk)

    def value(self, key: str, kind: type[Kind], default: Kind | None = None) -> Kind:
        """A metadata value of the expected kind; an integer is accepted for a float.

        Raises:
            FormatError: it is missing and has no default, or it is of another kind.
        """
        value = self.header.metadata.get(key, default)
        if value is None:
            raise FormatError(self.file, key, "missing", _KIND_NAMES[kind])
        if kind is float and type(value) is int:
            return kind(value)
        if type(value) is not kind:  # a boolean is not an integer here
            raise FormatError(self.file, key, kind_of(value), _KIND_NAMES[kind])
        return value

    def choice(self, key: str, allowed: Collection[str]) -> str:
        """A metadata text that is one of the allowed ones.

        Raises:
            FormatError: it is missing, or another.
        """
        given = self.value(key, str)
        if given not in allowed:
            raise FormatError(self.file, key, quoted(given), spoken([repr(name) for name in allowed]))
        return given

    @property
    def architecture(self) -> str:
        """The kind of model, a name in `ARCHITECTURES`.

        Raises:
            FormatError: another architecture.
        """
        return self.choice("general.architecture", ARCHITECTURES)

    def tensor(self, name: str) -> Matrix:
        """A matrix as K × N: quantised if the file stores codes and scales, otherwise float32.

        Query and key projections come with half-split channels.

        Raises:
            FormatError: no such tensor, not two dimensions, a type that cannot be decoded, or the file has changed.
        """
        info = self.info(name)
        weights = matrix(self._bytes(info), info, self.file)
        for part, heads in ROTATED.items():
            if name.endswith(f".{part}.weight") and ARCHITECTURES[self.architecture].interleaved:
                count, head_dim = getattr(self.config, heads), self.config.head_dim
                self._check_shape(info, 2, count * head_dim)  # before memory is allocated for a claimed size
                return select_columns(weights, half_split_order(count, head_dim))
        return weights

    def vector(self, name: str) -> F32:
        """A tensor of one dimension, as float32.

        Raises:
            FormatError: as for `tensor`.
        """
        info = self.info(name)
        self._check_shape(info, 1, info.shape[0])
        return floats(self._bytes(info).reshape(1, -1), info, self.file).reshape(-1)

    def stacked(self, name: str, count: int) -> list[Matrix]:
        """The matrices of a tensor of three dimensions, such as those of experts, each as from `tensor`.

        Raises:
            FormatError: as for `tensor`, or not three dimensions, of which the first is `count`.
        """
        info = self.info(name)
        self._check_shape(info, 3, count)
        rows = self._bytes(info).reshape(count, -1)
        each = replace(info, shape=info.shape[1:], nbytes=rows.shape[1])
        return [matrix(own, each, self.file) for own in rows]

    def rows(self, name: str) -> F32:
        """A tensor of two dimensions as float32, N × K.

        Raises:
            FormatError: as for `tensor`.
        """
        info = self.info(name)
        self._check_shape(info, 2, info.shape[0])
        return floats(self._bytes(info).reshape(info.shape[0], -1), info, self.file)

    def stored(self, name: str) -> tuple[str, U8]:
        """The name of the type of a matrix, and its bytes: uint8, N × bytes of a row.

        Raises:
            FormatError: as for `tensor`.
        """
        info = self.info(name)
        return info.type.name, self._bytes(info).reshape(info.shape[0], -1)

    def info(self, name: str) -> TensorInfo:
        """The header's entry for a tensor.

        Raises:
            FormatError: no such tensor.
        """
        info = self.header.tensors.get(name)
        if info is None:
            raise _missing(self.file, name)
        return info

    def _check_shape(self, info: TensorInfo, dimensions: int, outputs: int) -> None:
        if len(info.shape) != dimensions or info.shape[0] != outputs:
            allowed = f"{dimensions} dimensions, {outputs} rows"
            raise FormatError(self.file, f"shape of tensor {quoted(info.name)}", info.shape, allowed)

    def _bytes(self, info: TensorInfo) -> U8:
        """The data of a tensor."""
        what = f"tensor {quoted(info.name)}"
        check_memory(f"{what} of {self.file}", _working_bytes(info))
        return self.on_disk.read(what, info.offset, np.dtype(np.uint8), info.nbytes)


_KIND_NAMES: dict[type, str] = {
    int: "an integer",
    float: "a float",
    str: "a string",
    bool: "a boolean",
    list: "an array of strings",
}


def open_gguf(path: str | os.PathLike[str], context: int | None = None) -> GGUFFile:
    """Open a GGUF file and check its header.

    Args:
        path: of the file.
        context: the longest text; None for the model's default. It is checked when its `config` is read.

    Raises:
        ArgumentError: there is no readable file at `path`.
        FormatError: it is not GGUF, or its header claims more than the file holds.
    """
    path = Path(path)
    with opened(path, "a GGUF file or a checkpoint directory") as stream:
        on_disk = KnownFile.of(path, os.fstat(stream.fileno()))
        return GGUFFile(on_disk, walk(stream, on_disk.size, path.name), context)


def half_split_order(heads: int, head_dim: int) -> I64:
    """For each half-split channel of all heads, its place in the file: even channels of a head, then odd ones.

    >>> half_split_order(heads=1, head_dim=6)
    array([0, 2, 4, 1, 3, 5])
    """
    channels = np.arange(heads * head_dim).reshape(heads, head_dim // 2, 2)
    return channels.swapaxes(1, 2).ravel()


# **The weights of a decoder**: the tensors under ``blk.0`` to ``blk.n``, and those around them.


def read_llama(source: GGUFFile, progress: Progress | None = None) -> LlamaWeights:
    """Read all weights of a decoder: a Llama, or a descendant among `lowbit.formats.gguf.architectures.ARCHITECTURES`.

    Args:
        source: from `open_gguf`.
        progress: called after each block.

    Raises:
        FormatError: another architecture, a tensor missing, of the wrong shape, not decodable, or one that the
            architecture does not have.
    """
    check_model(source)
    config = source.config
    table = source.tensor("token_embd.weight")
    layers = []
    for number in range(config.layers):
        layers.append(read_layer(source, number))
        if progress is not None:
            progress(number + 1, config.layers)
    try:
        return LlamaWeights(
            config=config,
            embedding=np.ascontiguousarray(table.T) if isinstance(table, np.ndarray) else Embedding.of(table),
            layers=tuple(layers),
            norm=source.vector("output_norm.weight"),
            head=source.tensor("output.weight") if "output.weight" in source.header.tensors else table,
        )
    except ArgumentError as error:
        raise FormatError(source.file, error.argument, error.given, error.allowed) from error


def check_model(source: GGUFFile) -> None:
    """Refuse a file without exactly the tensors of its architecture, or that does not fit into memory.

    Raises:
        FormatError: a part of a split model, another architecture, an unknown tensor, or a missing one.
        UnavailableError: too little memory for the weights.
    """
    _refuse_part(source)
    _check_tensors(source, source.config)
    check_memory(f"model {source.file}", _model_bytes(source))


def _refuse_part(source: GGUFFile) -> None:
    """Refuse a file that holds a part of a model, of which only the first part has the metadata.

    Raises:
        FormatError: it is one; says how to join the parts.
    """
    parts = source.value(SPLIT_COUNT, int, 0)
    if parts > 1:
        allowed = f"1, a model in one file. llama.cpp's `{JOINED}` joins the {parts} parts"
        raise FormatError(source.file, SPLIT_COUNT, parts, allowed)


def _model_bytes(source: GGUFFile) -> int:
    """Memory for the weights and for the tensor that takes most while it is decoded."""
    tensors = source.header.tensors
    kept = sum(info.nbytes if _stays_small(info) else 4 * math.prod(info.shape) for info in tensors.values())
    return kept + max(map(_working_bytes, tensors.values()), default=0)


def _stays_small(info: TensorInfo) -> bool:
    """Whether a matrix is kept as codes."""
    return len(info.shape) in (2, 3) and (info.type in CODE_BITS or format_of(info) is not None)


def _working_bytes(info: TensorInfo) -> int:
    """Memory that a tensor takes while it is decoded: its bytes, and its weights as float32 before and after they are
    transposed, or as codes, or its bytes in another order."""
    weights = math.prod(info.shape)
    if info.type in CODE_BITS:
        return info.nbytes + 4 * weights
    return 2 * info.nbytes if _stays_small(info) else info.nbytes + 8 * weights


def read_layer(source: GGUFFile, number: int) -> LayerWeights:
    """One block of a file that `check_model` accepted.

    Raises:
        FormatError: a tensor missing, of the wrong shape, or not decodable.
    """
    architecture, config, prefix = ARCHITECTURES[source.architecture], source.config, f"blk.{number}"
    linears, shapes = dict[str, Matrix](), linear_shapes(config)
    for stored, names in architecture.held.items():
        parts = _cut(source, f"{prefix}.{stored}.weight", [shapes[name][1] for name in names])
        linears |= zip(names, parts, strict=True)
    vectors = {name: source.vector(f"{prefix}.{stored}") for name, stored in architecture.vectors.items()}
    for part, stored in (architecture.experts or {}).items():
        experts = source.stacked(f"{prefix}.{stored}.weight", 0 if config.routing is None else config.routing.experts)
        linears |= {f"feed_forward.experts[{number}].{part}": expert for number, expert in enumerate(experts)}
        vectors[f"expert_{part}_bias"] = source.rows(f"{prefix}.{stored}.bias").reshape(-1)
    if ROUTER_MATRIX in linears:
        linears[ROUTER_MATRIX] = to_float(linears[ROUTER_MATRIX])
    return assembled(config, vectors, linears)


def _cut(source: GGUFFile, name: str, columns: list[int]) -> list[Matrix]:
    """The matrices whose columns, one after another, are those of a tensor."""
    whole = source.tensor(name)
    if len(columns) == 1:
        return [whole]
    ends = [int(end) for end in np.cumsum([0, *columns])]
    if shape_of(whole)[1] != ends[-1]:
        found = (shape_of(whole)[1], shape_of(whole)[0])
        raise FormatError(source.file, f"shape of tensor {quoted(name)}", found, f"2 dimensions, {ends[-1]} rows")
    return [select_columns(whole, np.arange(first, last)) for first, last in pairwise(ends)]


def _check_tensors(source: GGUFFile, config: LlamaConfig) -> None:
    """Refuse tensors that would be ignored, since that would change the model: a bias, rotary factors, an expert.

    Also refuse a file that lacks a tensor of this architecture.
    """
    name = source.architecture
    stored = [f"{part}.weight" for part in ARCHITECTURES[name].held]
    stored += ARCHITECTURES[name].vectors.values()
    experts = (ARCHITECTURES[name].experts or {}).values()
    stored += [f"{part}.{kind}" for part in experts for kind in ("weight", "bias")]
    needed = [f"blk.{number}.{part}" for number in range(config.layers) for part in stored]
    needed = ["token_embd.weight", *needed, "output_norm.weight"]
    known = {*needed, "output.weight", *ARCHITECTURES[name].rotary_factors}
    for tensor in source.header.tensors:
        if tensor not in known:
            raise FormatError(source.file, "tensor", quoted(tensor), f"the tensors of architecture '{name}'")
    missing = [tensor for tensor in needed if tensor not in source.header.tensors]
    if len(missing) > 1:
        shown = ", ".join(map(quoted, missing[:MOST_SHOWN])) + (", ..." if len(missing) > MOST_SHOWN else "")
        raise FormatError(source.file, "number of missing tensors", f"{len(missing)} ({shown})", "0")
    if missing:
        raise _missing(source.file, missing[0])


def _missing(file: str, tensor: str) -> FormatError:
    return FormatError(file, f"tensor {quoted(tensor)}", "missing", "in the file")
