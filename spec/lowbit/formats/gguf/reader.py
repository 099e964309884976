"""GGUF: from a file to the weights of a decoder.

GGUF is the file format of the ggml project and the most common format of small quantised models. The reader works in
steps, each in its own file: `lowbit.formats.gguf.header` reads and checks the header, `lowbit.formats.gguf.tensors`
decodes blocks, `lowbit.formats.gguf.architectures` names the parts of each kind of decoder, and this file combines
them. `lowbit.formats.gguf.tokenizer` makes the tokenizer from the same metadata.

**Orientation.** A GGUF matrix is N × K, one row for each output; a `Matrix` is K × N, so it is transposed here. Files
of architecture ``llama`` store the rows of the query and key projections with the two channels of each rotary pair side
by side, unlike the published weights; half-split channels (see `rope`) are restored by reading the even ones of a head
first and then the odd ones. Rows of the file are columns here, and moving whole columns moves codes, scales and zeros
together: nothing is decoded and nothing is rounded.

Unsupported features are refused: a tensor that would be left out, another rule by which metadata scale the rotary
embedding, or a layer of experts would silently make it another model. A Llama 3.1 holds the factors of its rotary
frequencies as a tensor, and a Phi-3 two lists of them, between which the context decides as
`lowbit.formats.checkpoint.rope` says.

Source: the GGUF specification of the ggml project.
"""

import hashlib
import math
import os
from collections.abc import Collection
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from lowbit.arrays import F32, I64, U8
from lowbit.contract.checks import spoken
from lowbit.errors import ArgumentError, FormatError
from lowbit.formats.gguf.architectures import (
    ARCHITECTURES,
    Architecture,
)
from lowbit.formats.gguf.header import Header, TensorInfo, Value, walk
from lowbit.formats.gguf.rope import read_rotary
from lowbit.formats.gguf.tensors import CODE_BITS, floats, format_of, matrix
from lowbit.formats.known_file import KnownFile, opened
from lowbit.model.config import LlamaConfig, Routing
from lowbit.model.weights import (
    Embedding,
    LayerWeights,
    LlamaWeights,
    Matrix,
    Progress,
    assembled,
    linear_shapes,
    select_columns,
    shape_of,
    to_float,
)
from lowbit.system.memory import check_memory
from lowbit.text import kind_of, quoted

Kind = TypeVar("Kind", bool, int, float, str, list[str])

DEFAULT_ROPE_BASE = 10000.0
ROUTER_MATRIX = "feed_forward.router"
ROTATED = {"attn_q": "heads", "attn_k": "kv_heads"}


@dataclass(frozen=True, eq=False)
class GGUFFile:
    """A GGUF file whose header has been checked; tensors are read from it one at a time.

    Attributes:
        on_disk: the file.
        header: its metadata and its table of tensors.
        context: the longest text that a caller asks for; None for the usual one of the model.
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
        return _config(self)

    def digest(self) -> str:
        """The SHA-256 of the file, in hexadecimal digits.

        Raises:
            FormatError: the file has changed.
        """
        with self.on_disk.opened() as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()

    def value(self, key: str, kind: type[Kind], default: Kind | None = None) -> Kind:
        """A metadata value of the expected kind; for a float an integer will do.

        Raises:
            FormatError: it is missing and has no default, or it is of another kind.
        """
        value = self.header.metadata.get(key, default)
        if value is None:
            raise FormatError(self.file, key, "missing", _KIND_NAMES[kind])
        if kind is float and type(value) is int:
            return kind(value)
        if type(value) is not kind:  # a boolean is no integer here
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
        """A matrix as K × N: quantised where the file stores codes and scales, otherwise float32.

        Query and key projections come with half-split channels.

        Raises:
            FormatError: no such tensor, not two dimensions, a type that cannot be decoded, or the file has changed.
        """
        info = self._info(name)
        weights = matrix(self._bytes(info), info, self.file)
        for part, heads in ROTATED.items():
            if name.endswith(f".{part}.weight") and ARCHITECTURES[self.architecture].interleaved:
                count, head_dim = getattr(self.config, heads), self.config.head_dim
                self._check_shape(info, 2, count * head_dim)  # before anything is made of a size that is only claimed
                return select_columns(weights, half_split_order(count, head_dim))
        return weights

    def vector(self, name: str) -> F32:
        """A tensor of one dimension, as float32.

        Raises:
            FormatError: as for `tensor`.
        """
        info = self._info(name)
        self._check_shape(info, 1, info.shape[0])
        return floats(self._bytes(info).reshape(1, -1), info, self.file).reshape(-1)

    def stacked(self, name: str, count: int) -> list[Matrix]:
        """The matrices of a tensor of three dimensions, such as those of experts, each as `tensor` gives one.

        Raises:
            FormatError: as for `tensor`, or not three dimensions, of which the first is `count`.
        """
        info = self._info(name)
        self._check_shape(info, 3, count)
        rows = self._bytes(info).reshape(count, -1)
        each = replace(info, shape=info.shape[1:], nbytes=rows.shape[1])
        return [matrix(own, each, self.file) for own in rows]

    def rows(self, name: str) -> F32:
        """A tensor of two dimensions as float32, N × K.

        Raises:
            FormatError: as for `tensor`.
        """
        info = self._info(name)
        self._check_shape(info, 2, info.shape[0])
        return floats(self._bytes(info).reshape(info.shape[0], -1), info, self.file)

    def stored(self, name: str) -> tuple[str, U8]:
        """The name of the type of a matrix, and its bytes: uint8, N × bytes of a row.

        Raises:
            FormatError: as for `tensor`.
        """
        info = self._info(name)
        return info.type.name, self._bytes(info).reshape(info.shape[0], -1)

    def _info(self, name: str) -> TensorInfo:
        info = self.header.tensors.get(name)
        if info is None:
            raise FormatError(self.file, f"tensor {quoted(name)}", "missing", "a file that holds it")
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
        context: the longest text; None for the usual one of the model, which is checked when its `config` is read.

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


# **A decoder in GGUF**: its numbers under the name of its architecture, its tensors under ``blk.0`` to ``blk.n``.


def _config(source: GGUFFile) -> LlamaConfig:
    name = source.architecture
    architecture = ARCHITECTURES[name]

    def integer(key: str, default: int | None = None) -> int:
        return source.value(f"{name}.{key}", int, default)

    def real(key: str, default: float | None = None) -> float:
        return source.value(f"{name}.{key}", float, default)

    heads = integer("attention.head_count")
    hidden = integer("embedding_length")
    head_dim = integer("attention.key_length", hidden // max(1, heads))
    _refuse_other_features(source, name, architecture, head_dim)
    layers = integer("block_count")
    rotary = read_rotary(source, name, architecture, head_dim, source.context)
    if layers > len(source.header.tensors):
        allowed = f"at most the {len(source.header.tensors)} tensors of the file"
        raise FormatError(source.file, f"{name}.block_count", layers, allowed)
    embedding = source._info("token_embd.weight")
    try:
        return LlamaConfig(
            layers=layers,
            hidden=hidden,
            feed_forward=integer("expert_feed_forward_length" if architecture.experts else "feed_forward_length"),
            heads=heads,
            kv_heads=integer("attention.head_count_kv", heads),
            head_dim=head_dim,
            vocabulary=embedding.shape[0],
            context=rotary.context,
            rope_base=real("rope.freq_base", DEFAULT_ROPE_BASE),
            rope_scaling=rotary.scaling,
            rms_epsilon=real("attention.layer_norm_rms_epsilon"),
            routing=Routing(integer("expert_count"), integer("expert_used_count")) if architecture.experts else None,
            activation=architecture.activation,
            sinks=architecture.sinks,
            embedding_scale=math.sqrt(max(0, hidden)) if architecture.scaled_embedding else 1.0,
            heads_normed_together=architecture.heads_normed_together,
            unrotated=_unrotated(architecture, layers),
            score_scale=_score_scale(architecture, layers, heads, hidden, head_dim),
            score_cap=_cap(source, f"{name}.attn_logit_softcapping", architecture),
            logit_cap=_cap(source, f"{name}.final_logit_softcapping", architecture),
            **_further_numbers(source, name, architecture, layers),
        )
    except ArgumentError as error:
        raise FormatError(source.file, error.argument, error.given, error.allowed) from error


def _score_scale(architecture: Architecture, layers: int, heads: int, hidden: int, head_dim: int) -> float | None:
    """What scores are multiplied by: None for one over the root of the channels of a head."""
    if layers != architecture.largest or hidden // max(1, heads) in (0, head_dim):
        return None
    return float((hidden // heads) ** -0.5)


def _cap(source: GGUFFile, key: str, architecture: Architecture) -> float | None:
    """A soft cap; 0 is none."""
    return (source.value(key, float, 0.0) if architecture.capped else 0.0) or None


def _unrotated(architecture: Architecture, layers: int) -> tuple[int, ...]:
    every = architecture.unrotated_every
    return tuple(range(every - 1, layers, every)) if every else ()


SHAPE = {
    "layers": "block_count",
    "hidden": "embedding_length",
    "feed_forward": "feed_forward_length",
    "heads": "attention.head_count",
    "kv_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "vocabulary": "vocab_size",
    "context": "context_length",
    "experts": "expert_count",
    "top_k": "expert_used_count",
}
"""The keys of a shape, which all architectures share."""


def claimed_shape(source: GGUFFile) -> dict[str, int | None]:
    """The shape of a model as its metadata give it, whatever its architecture is; None for what they do not say.

    Layers may differ in a number, which is then a list in the metadata and None here.
    """
    name = source.header.metadata.get("general.architecture")
    given = {part: source.header.metadata.get(f"{name}.{key}") for part, key in SHAPE.items()}
    shape = {part: number if type(number) is int else None for part, number in given.items()}
    if shape["kv_heads"] is None and given["kv_heads"] is None:
        shape["kv_heads"] = shape["heads"]
    if shape["head_dim"] is None and shape["hidden"] and shape["heads"]:
        shape["head_dim"] = shape["hidden"] // shape["heads"]
    embedding = source.header.tensors.get("token_embd.weight")
    if embedding is not None:
        shape["vocabulary"] = embedding.shape[0]
    return shape


PATTERN = "attention.sliding_window_pattern"


def _further_numbers(source: GGUFFile, name: str, architecture: Architecture, layers: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        argument: source.value(f"{name}.{number.key}", number.kind, number.default)
        for argument, number in architecture.numbers.items()
    }
    if "window" not in found or found["window"] == 0 == architecture.numbers["window"].default:
        return found | {"window": None, "local_rope_base": None}
    if architecture.alternating:
        found["full_every"] = _full_every(source, f"{name}.{PATTERN}", architecture.full_every, layers)
    return found


def _full_every(source: GGUFFile, key: str, usual: int, layers: int) -> int | None:
    """Every which layer is full: a number, or a list that says for each layer whether it is local."""
    given = source.header.metadata.get(key, usual)
    if not isinstance(given, np.ndarray):
        return source.value(key, int, usual)
    local = [bool(each) for each in given]
    every = local.index(False) + 1 if False in local else None
    if local != [every is None or (layer + 1) % every != 0 for layer in range(layers)]:
        raise FormatError(
            source.file, key, local, f"for each of {layers} layers whether it is local, all but every n-th"
        )
    return every


def _refuse_other_features(source: GGUFFile, name: str, architecture: Architecture, head_dim: int) -> None:
    """Metadata that would make this another model, each with the only value that is supported."""
    supported: dict[str, Value] = {
        "attention.value_length": head_dim,
        "attention.causal": True,
        "attention.scale": 0.0,
    }
    if architecture.experts is None:
        supported["expert_count"] = 0
    if not architecture.capped:
        supported |= {"attn_logit_softcapping": 0.0, "final_logit_softcapping": 0.0}
    for key, value in supported.items():
        given = source.header.metadata.get(f"{name}.{key}", value)
        if type(given) is not type(value) or given != value:
            raise FormatError(source.file, f"{name}.{key}", given, str(value))


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
    """Refuse a file that has other tensors than those of its architecture, or does not fit into memory.

    Raises:
        FormatError: another architecture, or a tensor that it does not have.
        UnavailableError: too little memory for the weights.
    """
    _refuse_other_tensors(source, source.config)
    check_memory(f"model {source.file}", _model_bytes(source))


def _model_bytes(source: GGUFFile) -> int:
    """Memory that the weights take, and the tensor that takes most while it is decoded."""
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
    """One block of a file that `check_model` found right.

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


def _refuse_other_tensors(source: GGUFFile, config: LlamaConfig) -> None:
    """Refuse tensors that would be ignored, which would change the model: a bias, rotary factors, an expert."""
    name = source.architecture
    stored = [f"{part}.weight" for part in ARCHITECTURES[name].matrices.values()]
    stored += ARCHITECTURES[name].vectors.values()
    experts = (ARCHITECTURES[name].experts or {}).values()
    stored += [f"{part}.{kind}" for part in experts for kind in ("weight", "bias")]
    known = {"token_embd.weight", "output_norm.weight", "output.weight", *ARCHITECTURES[name].rotary_factors}
    known |= {f"blk.{number}.{part}" for number in range(config.layers) for part in stored}
    for tensor in source.header.tensors:
        if tensor not in known:
            raise FormatError(source.file, "tensor", quoted(tensor), f"the tensors of architecture '{name}'")
