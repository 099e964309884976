"""Writing a checkpoint directory: one shard for each block, and one for everything outside the blocks.

Floats have the smallest of float16, bfloat16 and float32 that holds a tensor exactly. The configuration of a directory
without codes says float32, so a tool that follows it rounds nothing.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lowbit.arrays import F32, Array
from lowbit.formats.checkpoint.names import matrix_names
from lowbit.formats.checkpoint.reader import CONFIG, Checkpoint, open_checkpoint
from lowbit.formats.checkpoint.tensors import INDEX
from lowbit.formats.checkpoint.tokenizer import read_tokenizer
from lowbit.formats.tokenizer import Tokenizer
from lowbit.model.config import LlamaConfig
from lowbit.model.matrices import to_float
from lowbit.model.weights import LayerWeights
from lowbit.rewriting.journal import Journal
from lowbit.rewriting.layouts import FLOATS, Description
from lowbit.rewriting.source import Source, smallest
from lowbit.rewriting.writing import ROUTER, Packed, Target, commit_layer, floats_of, shards_of

DTYPE, OTHER_DTYPE = "torch_dtype", "dtype"
"""The field of a tool's compute type, and its newer name."""


class ToDirectory(Target):
    """A checkpoint directory."""

    def check(self, source: Source) -> None:
        source.check_directory()

    def holders(self, source: Source, number: int) -> Iterator[tuple[str, tuple[str, ...]]]:
        for stored, names in matrix_names(source.architecture, source.config, number).items():
            if ROUTER not in names:
                yield stored.removesuffix(".weight"), tuple(names)

    def layer(self, source: Source, number: int, layer: LayerWeights, packed: Mapping[str, Packed]) -> dict[str, Array]:
        tensors = dict[str, Array]()
        for module, each in packed.items():
            if isinstance(each.written, np.ndarray):
                tensors[f"{module}.weight"] = as_stored(each.written)
            else:
                tensors |= dict(self.layout.tensors(module, each.written))
        tensors |= source.vectors(number)
        sparse = source.architecture.sparse
        if sparse is not None:
            router = np.ascontiguousarray(to_float(layer.linears()[ROUTER]).T)
            tensors[f"model.layers.{number}.{sparse.router}.weight"] = router
        return tensors

    def ends(self, source: Source) -> dict[str, Array]:
        return dict(source.ends())

    def complete(self, journal: Journal, source: Source, description: Description | None) -> Path:
        sizes = {file: journal.note_of(file)["tensors"] for file in shards_of(source.config.layers)}
        total = sum(size for held in sizes.values() for size in held.values())
        texts = {
            INDEX: {
                "metadata": {"total_size": total},
                "weight_map": {name: file for file, held in sizes.items() for name in held},
            },
            CONFIG: self._configuration(source, description),
        }
        if description is not None:
            texts |= {name: make(description) for name, make in self.layout.files.items()}
        for name, content in texts.items():
            journal.write(name, (json.dumps(content, indent=1) + "\n").encode())
        for name, octets in source.files().items():
            journal.write(name, octets)
        return journal.folder

    def _configuration(self, source: Source, description: Description | None) -> dict[str, Any]:
        found = source.described()
        if self.layout.config is None or description is None:
            return {key: value for key, value in found.items() if key != OTHER_DTYPE} | {DTYPE: "float32"}
        return found | {"quantization_config": self.layout.config(description)}

    def opened(self, path: Path) -> tuple[Checkpoint, Tokenizer]:
        checkpoint = open_checkpoint(path)
        return checkpoint, read_tokenizer(checkpoint)

    def as_held(self, source: Source) -> LlamaConfig:
        return source.config


def commit_floats(journal: Journal, source: Source, number: int, layer: LayerWeights) -> None:
    """Write the part of a block whose matrices are floats.

    Args:
        journal: of the directory.
        source: the model to write.
        number: of the block.
        layer: the block.
    """
    target = ToDirectory(FLOATS)
    commit_layer(journal, target, source, number, layer, floats_of(target, source, number, layer))


def as_stored(numbers: F32) -> Array:
    """A matrix, K × N, as a directory stores floats: N × K."""
    return np.ascontiguousarray(smallest(numbers).T)
