"""Writing a file of GGUF: metadata, then tensors, as `lowbit.formats.gguf` reads them.

The parts in the journal hold the tensors under their names and types, as bytes. When they are complete, the file is
assembled from them one tensor at a time, so for a while the disk holds both.

- **Rows** of query and key projections of a ``llama`` get the channels of each rotary pair side by side.
- **Vectors** are float32, and gains are those that multiply.
- **Embedding and head** of a file of GGUF are copied as they are; those of a directory get the smallest type of floats
  that holds them.
- **Numbers of the configuration**, such as the epsilon of the norms, are float32 in GGUF, and are rounded to that.

Source: the GGUF specification of the ggml project; `lowbit.formats.gguf.reader`.
"""

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from safetensors import safe_open

from lowbit.arrays import F32, U8, Array
from lowbit.attention.rope_scaling import Scaling
from lowbit.errors import ArgumentError, FormatError
from lowbit.formats.gguf.architectures import ARCHITECTURES, ROTARY_FACTORS, Architecture
from lowbit.formats.gguf.config import PATTERN
from lowbit.formats.gguf.header import Header, TensorInfo, Value
from lowbit.formats.gguf.reader import (
    ROTATED,
    GGUFFile,
    check_model,
    half_split_order,
    open_gguf,
    read_layer,
)
from lowbit.formats.gguf.tokenizer import read_tokenizer
from lowbit.formats.gguf.types import DEFAULT_ALIGNMENT, TensorType
from lowbit.formats.known_file import KnownFile
from lowbit.formats.tokenizer import Tokenizer
from lowbit.model.config import LlamaConfig, differing
from lowbit.model.matrices import Embedding, Matrix
from lowbit.model.weights import LayerWeights, vector_sizes
from lowbit.numbers.floats import FLOATS
from lowbit.rewriting.gguf_words import words_of
from lowbit.rewriting.journal import Journal
from lowbit.rewriting.layouts import Description
from lowbit.rewriting.source import File, Source, smallest
from lowbit.rewriting.writing import Packed, Target, shards_of
from lowbit.tensor_formats.stored import Stored

KINDS = {
    **{name: name for name in ("llama", "qwen2", "qwen3", "gemma2", "smollm3", "granite", "olmo2", "phi3")},
    **{"mistral": "llama", "gemma3_text": "gemma3", "olmo3": "olmo2"},
}
"""The GGUF architecture of each ``model_type``."""
TYPES = {FLOATS["float16"].dtype: "F16", FLOATS["bfloat16"].dtype: "BF16", np.dtype(np.float32): "F32"}
FILE = "model.gguf"
"""The name of the file in the journal's folder, before it gets its final name."""
EMBEDDING, NORM, HEAD = "token_embd.weight", "output_norm.weight", "output.weight"
VERSION, OF_FILE = "general.quantization_version", ("general.file_type", "general.alignment")
"""The key of the next number; and keys that say of a file what may be otherwise in the next one."""
QUANTIZATION_VERSION = 2
"""Of the blocks of GGUF, as llama.cpp counts them."""


class ToGGUF(Target):
    """A file of GGUF."""

    def check(self, source: Source) -> None:
        if isinstance(source, File):  # whose metadata are copied
            return
        kind, config = KINDS.get(source.kind), source.config
        if kind is None:
            raise ArgumentError("architecture", repr(source.kind), f"one that GGUF has here: {', '.join(KINDS)}")
        header = Header(metadata(source), _claimed(config))
        file = GGUFFile(KnownFile(Path("the new file"), 0, 0, 0, 0, 0), header)
        try:
            read, words = file.config, read_tokenizer(file)
        except FormatError as error:
            raise _loses(source, str(error)) from error
        held = self.as_held(source)
        if factors_of(source):  # a tensor, compared by `finish`
            read = replace(read, rope_scaling=held.rope_scaling)
        if lost := differing(read, held):
            raise _loses(source, f"GGUF has no place for {', '.join(lost)}")
        if not words.can_replace(source.tokenizer):
            raise _loses(source, "GGUF has no name for the rules of its tokenizer")

    def holders(self, source: Source, number: int) -> Iterator[tuple[str, tuple[str, ...]]]:
        for stored, names in architecture_of(source).held.items():
            yield f"blk.{number}.{stored}.weight", tuple(names)

    def layer(self, source: Source, number: int, layer: LayerWeights, packed: Mapping[str, Packed]) -> dict[str, Array]:
        architecture, tensors = architecture_of(source), dict[str, Array]()
        for name, each in packed.items():
            kind, rows = _rows_of(each.written)
            for part, heads in ROTATED.items():
                if architecture.interleaved and name.endswith(f".{part}.weight"):
                    rows = rows[interleaved_order(getattr(source.config, heads), source.config.head_dim)]
            tensors[f"{name} {kind}"] = rows
        for name, stored in architecture.vectors.items():
            if name in vector_sizes(source.config):
                tensors[f"blk.{number}.{stored} F32"] = _octets(getattr(layer, name))
        return tensors

    def ends(self, source: Source) -> dict[str, Array]:
        names, tensors = {"embedding": EMBEDDING, "norm": NORM, "head": HEAD}, dict[str, Array]()
        for name, numbers in source.numbers_of_ends():
            found = None if name == "norm" else source.blocks(names[name])
            if found is None:
                wide = np.ascontiguousarray(numbers.T) if name == "head" else numbers
                small = wide if name == "norm" else smallest(wide)
                found = TYPES[small.dtype], _octets(small)
            tensors[f"{names[name]} {found[0]}"] = found[1]
        return tensors | {f"{name} F32": _octets(factors) for name, factors in factors_of(source).items()}

    def complete(self, journal: Journal, source: Source, description: Description | None) -> Path:
        files, path = shards_of(source.config.layers), journal.folder / FILE
        with journal.told():
            _write(path, metadata(source), [journal.folder / file for file in (files[-1], *files[:-1])])
        return path

    def opened(self, path: Path) -> tuple["LoadedFile", Tokenizer]:
        file = open_gguf(path)
        check_model(file)
        return LoadedFile(file), read_tokenizer(file)

    def as_held(self, source: Source) -> LlamaConfig:
        config, own = source.config, architecture_of(source).numbers
        names = {"rope_base", "rms_epsilon", "local_rope_base", "score_cap", "logit_cap", *own}
        held = replace(config, **{name: in_float32(getattr(config, name)) for name in names})
        if (scaling := config.rope_scaling) is None:
            return held
        return replace(held, rope_scaling=Scaling(tuple(map(in_float32, scaling.factors)), scaling.magnitude))


def _loses(source: Source, what: str) -> ArgumentError:
    sentence = f"{source.name} does not fit into a file of GGUF: {what}"
    return ArgumentError("model", source.name, "a model that GGUF can describe", sentence)


def architecture_of(source: Source) -> Architecture:
    """The kind of model, as in GGUF."""
    return ARCHITECTURES[source.gguf.architecture if isinstance(source, File) else KINDS[source.kind]]


def _claimed(config: LlamaConfig) -> dict[str, TensorInfo]:
    """The part of a tensor table that the reader needs for the shape of a model."""
    shapes = {EMBEDDING: (config.vocabulary, config.hidden)}
    shapes |= {f"blk.{number}.attn_output.weight": (config.hidden, config.hidden) for number in range(config.layers)}
    return {name: TensorInfo(name, shape, TensorType.F32, 0, 0) for name, shape in shapes.items()}


def factors_of(source: Source) -> dict[str, F32]:
    """The tensors of rotary factors: those of a file, or those of a kind of model with one list for all texts."""
    if isinstance(source, File):
        names = ARCHITECTURES[source.gguf.architecture].rotary_factors
        return {name: source.gguf.vector(name) for name in names if name in source.gguf.header.tensors}
    scaling, known = source.config.rope_scaling, architecture_of(source).rotary_factors
    if scaling is None or scaling.magnitude != 1 or ROTARY_FACTORS not in known:
        return {}
    return {ROTARY_FACTORS: np.array(scaling.factors, np.float32)}


@dataclass(frozen=True, eq=False)
class LoadedFile:
    """A file of GGUF as a user loads it, one block at a time."""

    file: GGUFFile

    @property
    def config(self) -> LlamaConfig:
        """The shape of the model."""
        return self.file.config

    @property
    def embedding(self) -> F32 | Embedding:
        """Vocabulary × hidden."""
        table = self.file.tensor(EMBEDDING)
        return np.ascontiguousarray(table.T) if isinstance(table, np.ndarray) else Embedding.of(table)

    @property
    def norm(self) -> F32:
        """Float32, hidden: gain of the last norm."""
        return self.file.vector(NORM)

    @property
    def head(self) -> Matrix:
        """Hidden × vocabulary."""
        return self.file.tensor(HEAD)

    def layer(self, number: int) -> LayerWeights:
        """One block."""
        return read_layer(self.file, number)


# **Tensors.**


def interleaved_order(heads: int, head_dim: int) -> Array:
    """The inverse of `half_split_order`: for each channel of the file, its half-split place.

    >>> interleaved_order(heads=1, head_dim=6)
    array([0, 3, 1, 4, 2, 5])
    """
    return np.argsort(half_split_order(heads, head_dim))


def _rows_of(matrix: Stored | F32) -> tuple[str, U8]:
    """The type of a matrix K × N, and its rows: uint8, N × bytes."""
    if isinstance(matrix, Stored):
        return matrix.format.upper(), matrix.tensors[0]
    small = np.ascontiguousarray(smallest(matrix).T)
    return TYPES[small.dtype], _octets(small)


def _octets(numbers: Array) -> U8:
    """The last axis as bytes."""
    return np.ascontiguousarray(numbers).view(np.uint8)


def _tensors(parts: list[Path]) -> Iterator[tuple[str, Array]]:
    """The tensors of the parts, one at a time, by their labels."""
    for part in parts:
        with safe_open(part, "numpy") as held:
            for label in held.keys():  # noqa: SIM118 - not a mapping, it only has this method
                yield label, held.get_tensor(label)


def _write(path: Path, values: Mapping[str, Value], parts: list[Path]) -> None:
    """Put the file together from its parts."""
    architecture = str(values["general.architecture"])
    with closing(GGUFWriter(path, architecture)) as writer:
        for key, value in values.items():
            if key != "general.architecture":
                _add(writer, key, value)
        for label, rows in _tensors(parts):
            name, kind = label.split(" ")
            writer.add_tensor_info(name, rows.shape, rows.dtype, rows.nbytes, GGMLQuantizationType[kind])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
    with path.open("ab") as stream:  # the package's own writer misses some errors of a full disk
        for _, rows in _tensors(parts):
            stream.write(bytes(-stream.tell() % DEFAULT_ALIGNMENT))
            stream.write(rows.data)
        stream.write(bytes(-stream.tell() % DEFAULT_ALIGNMENT))


# **Metadata.**


def metadata(source: Source) -> dict[str, Value]:
    """The metadata of a model: its numbers, and its tokenizer. Those of a file are copied."""
    if isinstance(source, File):
        given = source.gguf.header.metadata
        return {key: value for key, value in given.items() if key not in OF_FILE} | {VERSION: QUANTIZATION_VERSION}
    kind, config = KINDS[source.kind], source.config
    numbers: dict[str, Any] = {
        "block_count": config.layers,
        "context_length": config.context,
        "embedding_length": config.hidden,
        "feed_forward_length": config.feed_forward,
        "attention.head_count": config.heads,
        "attention.head_count_kv": config.kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "rope.dimension_count": config.head_dim,
        "rope.freq_base": config.rope_base,
        "attention.layer_norm_rms_epsilon": config.rms_epsilon,
        "vocab_size": config.vocabulary,
    }
    for name, number in ARCHITECTURES[kind].numbers.items():
        if (value := getattr(config, name)) is not None:
            numbers[number.key] = value
    if ARCHITECTURES[kind].alternating and config.full_every is not None:
        numbers[PATTERN] = config.full_every
    if ARCHITECTURES[kind].capped:
        numbers |= {
            "attn_logit_softcapping": config.score_cap or 0.0,
            "final_logit_softcapping": config.logit_cap or 0.0,
        }
    found: dict[str, Value] = {
        "general.architecture": kind,
        "general.name": source.name,
        VERSION: QUANTIZATION_VERSION,
    }
    found |= {f"{kind}.{key}": in_float32(number) for key, number in numbers.items()}
    return found | words_of(source)


def in_float32(number: Any) -> Any:
    """A float rounded to float32; anything else unchanged."""
    return float(np.float32(number)) if isinstance(number, float) else number


def _add(writer: GGUFWriter, key: str, value: Value) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value if isinstance(value, list) else value.tolist())
