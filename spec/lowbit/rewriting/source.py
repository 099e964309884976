"""Sources: a model to rewrite, one block after another, with everything needed besides the matrices.

A GGUF file or a checkpoint directory is opened, and its blocks are read one at a time. Vectors, embedding and head stay
floats. Those of a directory keep their type; those of a file that is dequantised get the smallest of float16, bfloat16
and float32 that holds them exactly, so nothing is rounded. Configuration and tokenizer of a directory are copied, and
those of a GGUF file are written as ``transformers`` has them. A model that such files cannot describe is refused.
"""

import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lowbit.arrays import F32, U8, Array
from lowbit.errors import ArgumentError, FormatError
from lowbit.formats.checkpoint import tokenizer as checkpoint_tokenizer
from lowbit.formats.checkpoint.architectures import ARCHITECTURES, Architecture
from lowbit.formats.checkpoint.config import CAPS, DIVISOR, KEYS, ROUTED, SORTED, read_config
from lowbit.formats.checkpoint.gptq_version import Version
from lowbit.formats.checkpoint.names import EMBEDDING, HEAD, NORM, vector_names
from lowbit.formats.checkpoint.quantization_config import CONFIGS
from lowbit.formats.checkpoint.reader import CONFIG, Checkpoint, open_checkpoint
from lowbit.formats.checkpoint.tensors import read_coded
from lowbit.formats.checkpoint.tokenizer import written_tokenizer
from lowbit.formats.gguf import tokenizer as gguf_tokenizer
from lowbit.formats.gguf.architectures import ARCHITECTURES as GGUF_ARCHITECTURES
from lowbit.formats.gguf.reader import GGUFFile, check_model, open_gguf, read_layer
from lowbit.formats.known_file import KnownFile
from lowbit.formats.tokenizer import Tokenizer
from lowbit.model.config import LlamaConfig, differing
from lowbit.model.matrices import Embedding, to_float, widened
from lowbit.model.weights import LayerWeights
from lowbit.numbers.floats import FLOATS
from lowbit.system.json_files import MOST_CONFIG_BYTES, parsed, read_bytes, read_fields
from lowbit.text import quoted

KINDS = {
    **{name: name for name in ("llama", "qwen2", "qwen3", "gemma2", "smollm3", "granite", "olmo2", "phi3")},
    "gemma3": "gemma3_text",
    "gpt-oss": "gpt_oss",
}
"""The ``model_type`` of the architectures of GGUF."""
COPIED = (
    *(checkpoint_tokenizer.FILE, checkpoint_tokenizer.SETTINGS, checkpoint_tokenizer.GENERATION),
    *(checkpoint_tokenizer.TEMPLATE, "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"),
)
"""The small files of a directory that are copied."""
ENDS = {EMBEDDING: "embedding", NORM: "norm", HEAD: "head"}
"""The tensors around the blocks, and their names in `LlamaWeights`."""
SMALL = (FLOATS["float16"].dtype, FLOATS["bfloat16"].dtype)


@dataclass(frozen=True, eq=False)
class Source(ABC):
    """A model that is rewritten.

    Attributes:
        name: of the file or directory.
        config: its shape.
        architecture: its kind, as directories have it.
        tied: whether the head is tied to the embedding.
        tokenizer: text to tokens and back.
        remarks: what a user should know about how it is read, a sentence each.
    """

    name: str
    config: LlamaConfig
    architecture: Architecture
    tied: bool
    tokenizer: Tokenizer
    remarks: tuple[str, ...]

    @abstractmethod
    def layer(self, number: int) -> LayerWeights:
        """One block; its floats are float32, regardless of their stored type."""

    @abstractmethod
    def vectors(self, number: int) -> Mapping[str, Array]:
        """The vectors of a block by the names of their tensors, as they are stored."""

    @abstractmethod
    def ends(self) -> Iterator[tuple[str, Array]]:
        """Embedding, last norm and, if untied, the head, N × K; by the names of their tensors."""

    def numbers_of_ends(self) -> Iterator[tuple[str, F32]]:
        """The same as used by a decoder, float32, by their names in `LlamaWeights`; the head is K × N."""
        for name, tensor in self.ends():
            numbers = tensor.astype(np.float32)
            if name == NORM:
                numbers += np.float32(self.architecture.gain_offset)
            yield ENDS[name], np.ascontiguousarray(numbers.T) if name == HEAD else numbers

    def blocks(self, name: str) -> tuple[str, U8] | None:
        """Embedding or head as stored in a GGUF file, by its name there: type and N × bytes; None for a directory."""
        return None

    @abstractmethod
    def rows(self) -> F32 | Embedding:
        """The embedding as a decoder reads it."""

    def check_directory(self) -> None:  # noqa: B027 - one of a directory has a config.json already
        """Refuse a model that a ``config.json`` cannot describe completely.

        Raises:
            ArgumentError: names what it cannot describe.
        """

    @property
    def kind(self) -> str:
        """The ``model_type`` of its architecture; a sorted model's is in no table."""
        return next((name for name, each in ARCHITECTURES.items() if each is self.architecture), SORTED)

    @abstractmethod
    def described(self) -> dict[str, Any]:
        """The ``config.json``, without its description of quantised matrices."""

    @abstractmethod
    def files(self) -> dict[str, bytes]:
        """The small files of tokenizer and generation."""

    @abstractmethod
    def identity(self) -> str:
        """A digest that identifies the files, in hexadecimal digits; it changes when they do."""


@dataclass(frozen=True, eq=False)
class Derived(Source):
    """A source derived from another one, with the same files.

    Attributes:
        original: the other source.
    """

    original: Source

    def described(self) -> dict[str, Any]:
        return self.original.described()

    def files(self) -> dict[str, bytes]:
        return self.original.files()

    def identity(self) -> str:
        return self.original.identity()


def smallest(numbers: F32) -> Array:
    """The same numbers in float16 or bfloat16 if one of them holds them exactly.

    >>> smallest(np.array([0.5], np.float32)).dtype, smallest(np.array([1e30], np.float32)).dtype
    (dtype('float16'), dtype('float32'))
    """
    for dtype in SMALL:
        with np.errstate(over="ignore"):
            small = numbers.astype(dtype)
        if np.array_equal(small.astype(np.float32), numbers):
            return small
    return numbers


def open_source(path: Path, gptq_version: Version | None = None) -> Source:
    """Open a GGUF file or a checkpoint directory to rewrite it.

    Args:
        path: of the file or directory.
        gptq_version: as in `lowbit.runtime.stored.open_model`.

    Raises:
        ArgumentError: there is no such file.
        FormatError: it is damaged, or its architecture is not supported.
    """
    if os.path.isdir(path):  # `Path.is_dir` raises where a folder on the way may not be entered
        return Directory.of(open_checkpoint(path, gptq_version))
    if gptq_version is not None:
        sentence = f"GPTQ version {gptq_version} was asked for, and {quoted(path.name)} is no directory of GPTQ"
        raise ArgumentError("gptq_version", gptq_version, "None", sentence)
    source = open_gguf(path)
    check_model(source)
    return File.of(source)


def _refuse_stacked(name: str, architecture: Architecture) -> None:
    """Refuse a model whose experts are stacked, for which no method of rewriting has a layout.

    Raises:
        ArgumentError: it is one.
    """
    if architecture.sparse is not None and architecture.sparse.stacked:
        sentence = (
            f"the experts of {name} are stacked in a few tensors, which are not rewritten; run it as it is stored"
        )
        raise ArgumentError("model", name, "a model whose matrices are tensors of their own", sentence)


def _digest(files: list[KnownFile], more: bytes = b"") -> str:
    stamps = [[each.device, each.inode, each.size, each.changed, each.status_changed] for each in files]
    return hashlib.sha256(json.dumps(sorted(stamps)).encode() + more).hexdigest()


# **A directory.**


@dataclass(frozen=True, eq=False)
class Directory(Source):
    """A checkpoint directory."""

    checkpoint: Checkpoint

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> "Directory":
        """A directory that is open."""
        _refuse_stacked(checkpoint.file, checkpoint.architecture)
        tied = checkpoint.tied and HEAD not in checkpoint.packed
        tokenizer = checkpoint_tokenizer.read_tokenizer(checkpoint)
        about = (checkpoint.file, checkpoint.config, checkpoint.architecture, tied, tokenizer, checkpoint.remarks)
        return cls(*about, checkpoint)

    def layer(self, number: int) -> LayerWeights:
        return self.checkpoint.layer(number, widened)

    def vectors(self, number: int) -> Mapping[str, Array]:
        names = vector_names(self.architecture, number).values()
        return {name: read_coded(self.checkpoint.table, name) for name in names}

    def ends(self) -> Iterator[tuple[str, Array]]:
        table = self.checkpoint.table
        yield from ((name, read_coded(table, name)) for name in (EMBEDDING, NORM))
        if HEAD in self.checkpoint.packed:
            yield HEAD, np.ascontiguousarray(smallest(to_float(self.checkpoint.head)).T)
        elif HEAD in table:
            yield HEAD, read_coded(table, HEAD)

    def rows(self) -> F32 | Embedding:
        return self.checkpoint.embedding

    def described(self) -> dict[str, Any]:
        found = dict(read_fields(self.checkpoint.folder / CONFIG).values)
        return {key: value for key, value in found.items() if key not in CONFIGS} | {"tie_word_embeddings": self.tied}

    def files(self) -> dict[str, bytes]:
        paths = [self.checkpoint.folder / name for name in COPIED]
        return {
            path.name: read_bytes(path, max(MOST_CONFIG_BYTES, checkpoint_tokenizer.MOST_BYTES))
            for path in paths
            if path.is_file()
        }

    def identity(self) -> str:
        formats = sorted(f"{name} {each.format}" for name, each in self.checkpoint.packed.items())
        shards = list({place.shard for place in self.checkpoint.table.values()})
        return _digest(shards, f"{self.checkpoint.digest} {formats}".encode())


# **A GGUF file.**


@dataclass(frozen=True, eq=False)
class File(Source):
    """A GGUF file."""

    gguf: GGUFFile

    @classmethod
    def of(cls, gguf: GGUFFile) -> "File":
        """A file that is open.

        Raises:
            ArgumentError: a model with stacked experts.
        """
        kind = ARCHITECTURES[KINDS[gguf.architecture]]
        _refuse_stacked(gguf.file, kind)
        tokenizer, tied = gguf_tokenizer.read_tokenizer(gguf), "output.weight" not in gguf.header.tensors
        return cls(gguf.file, gguf.config, kind, tied, tokenizer, (), gguf)

    def layer(self, number: int) -> LayerWeights:
        return read_layer(self.gguf, number).changed(widened)

    def vectors(self, number: int) -> Mapping[str, Array]:
        own, found = GGUF_ARCHITECTURES[self.gguf.architecture].vectors, dict[str, Array]()
        for name, stored in vector_names(self.architecture, number).items():
            gain = np.float32(self.architecture.gain_offset) if name.endswith("norm") else np.float32(0)
            found[stored] = smallest(self.gguf.vector(f"blk.{number}.{own[name]}") - gain)
        return found

    def ends(self) -> Iterator[tuple[str, Array]]:
        for name, stored in ((EMBEDDING, "token_embd.weight"), (HEAD, "output.weight")):
            if name == EMBEDDING or not self.tied:
                yield name, np.ascontiguousarray(smallest(to_float(self.gguf.tensor(stored))).T)
        yield NORM, smallest(self.gguf.vector("output_norm.weight") - np.float32(self.architecture.gain_offset))

    def blocks(self, name: str) -> tuple[str, U8] | None:
        return self.gguf.stored(name)

    def rows(self) -> F32 | Embedding:
        table = self.gguf.tensor("token_embd.weight")
        return np.ascontiguousarray(table.T) if isinstance(table, np.ndarray) else Embedding.of(table)

    def check_directory(self) -> None:
        try:
            read = read_config(parsed(CONFIG, json.dumps(self.described()).encode()))
        except FormatError as error:
            sentence = f"no {CONFIG} describes {self.name}: {error}; start from the published directory"
            raise ArgumentError("model", self.name, "a model that a directory can describe", sentence) from error
        if lost := differing(read, self.config):
            sentence = f"a {CONFIG} does not say of {self.name}: {', '.join(lost)}; start from the published directory"
            raise ArgumentError("model", self.name, "a model that a directory can describe", sentence)

    def described(self) -> dict[str, Any]:
        kind, config = KINDS[self.gguf.architecture], self.config
        activation, given = self.architecture.activation_field
        found: dict[str, Any] = {
            "architectures": [self.architecture.decoder],
            "model_type": kind,
            **{key: getattr(config, name) for name, key in KEYS.items() if name not in (*ROUTED, "window")},
            activation: given,
            "tie_word_embeddings": self.tied,
            "torch_dtype": "float16",
        }
        if self.tokenizer.bos is not None:
            found["bos_token_id"] = self.tokenizer.bos
        if self.tokenizer.stop:
            found["eos_token_id"] = self.tokenizer.stop[0]
        if config.window is not None:
            found |= {KEYS["window"]: config.window, "sliding_window_pattern": config.full_every}
            found |= {"rope_local_base_freq": config.local_rope_base}
        if self.architecture.scaled_scores:
            found[DIVISOR] = config.head_dim if config.score_scale is None else round(config.score_scale**-2)
        for name, key in self.architecture.factors.items():
            factor = getattr(config, name)
            found[key] = config.head_dim**-0.5 if factor is None else factor  # None is the usual factor of scores
        if self.architecture.capped:
            found |= dict(zip(CAPS, (config.score_cap, config.logit_cap), strict=True))
        return found

    def files(self) -> dict[str, bytes]:
        return written_tokenizer(self.tokenizer)

    def identity(self) -> str:
        return _digest([self.gguf.on_disk])
