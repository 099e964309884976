"""Changed attention: a model whose queries, keys or values are rewritten, written as a directory of floats.

A `Changed` source is read like its original, but returns changed blocks. `write_floats` writes any source as a
directory of floats.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import version as version_of
from math import prod
from pathlib import Path
from typing import Any

from lowbit.arrays import F32, Array
from lowbit.formats.checkpoint.architectures import Architecture
from lowbit.formats.checkpoint.names import tensor_shapes, vector_names
from lowbit.formats.fetch import Report, silent
from lowbit.model.config import LlamaConfig
from lowbit.model.matrices import Embedding, Matrix, to_float
from lowbit.model.weights import LayerWeights
from lowbit.rewriting.journal import journal
from lowbit.rewriting.layouts import FLOATS
from lowbit.rewriting.source import Derived, Source, smallest
from lowbit.rewriting.to_directory import ToDirectory, commit_floats
from lowbit.rewriting.writing import check_room, commit_ends, finish, shard_of
from lowbit.runtime.stored import part_of

VERSION = 1
"""The version of the output; a folder left by another version is not resumed."""


@dataclass(frozen=True)
class Change:
    """The changes of one block; everything else stays.

    Attributes:
        matrices: by the names of `LayerWeights.linears`, functions from float32 weights, K × N, to their replacement.
        vectors: by the names of `LayerWeights`, functions of a vector in its stored type.
        added: vectors that the block did not have.
    """

    matrices: Mapping[str, Callable[[F32], F32]] = field(default_factory=dict)
    vectors: Mapping[str, Callable[[Array], Array]] = field(default_factory=dict)
    added: Mapping[str, F32] = field(default_factory=dict)

    def of(self, layer: LayerWeights) -> LayerWeights:
        """The block, changed."""

        def changed(name: str, matrix: Matrix) -> Matrix:
            return self.matrices[name](to_float(matrix)) if name in self.matrices else matrix

        found = {name: getattr(layer, name) for name in self.vectors}
        vectors = {name: self.vectors[name](vector) for name, vector in found.items() if vector is not None}
        parts: dict[str, Any] = {**vectors, **self.added}
        return replace(layer.changed(changed), **parts)


@dataclass(frozen=True, eq=False)
class Changed(Derived):
    """A source whose blocks are changed.

    Attributes:
        change: returns the change of a block, given its number and the block.
        fields: the fields of ``config.json`` that change.
        made: the changes of the blocks read so far.
    """

    change: Callable[[int, LayerWeights], Change]
    fields: Mapping[str, Any]
    made: dict[int, Change] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        original: Source,
        config: LlamaConfig,
        architecture: Architecture,
        change: Callable[[int, LayerWeights], Change],
        fields: Mapping[str, Any],
    ) -> "Changed":
        """A changed source with another configuration; everything else is that of the original."""
        about = (original.tied, original.tokenizer, original.remarks)
        return cls(original.name, config, architecture, *about, original, change, fields)

    def layer(self, number: int) -> LayerWeights:
        layer = self.original.layer(number)
        if number not in self.made:
            self.made[number] = self.change(number, layer)
        return self.made[number].of(layer)

    def vectors(self, number: int) -> Mapping[str, Array]:
        if number not in self.made:
            self.layer(number)
        change, found = self.made[number], dict(self.original.vectors(number))
        for name, stored in vector_names(self.architecture, number).items():
            if name in change.vectors:
                found[stored] = change.vectors[name](found[stored])
            if name in change.added:
                found[stored] = smallest(change.added[name])
        return found

    def ends(self) -> Any:
        return self.original.ends()

    def rows(self) -> F32 | Embedding:
        return self.original.rows()

    def described(self) -> dict[str, Any]:
        return super().described() | dict(self.fields)


def write_floats(
    source: Source, destination: Path, request: Mapping[str, Any], report: Report = silent
) -> dict[str, Any]:
    """Write a source as a directory of floats, or finish what an interrupted process began.

    Args:
        source: the model to write.
        destination: the directory; a free name, or an empty directory.
        request: JSON that says how the source was changed.
        report: called while it works.

    Returns:
        ``bytes`` of the tensors, and ``resumed``, the number of blocks that already existed.

    Raises:
        ArgumentError: a destination that exists.
        UnavailableError: too little memory or disk space.
        FormatError: a damaged source; a result that differs from the intended one.
    """
    shapes = tensor_shapes(source.config, source.tied, source.architecture)
    call = {"version": [VERSION, version_of("lowbit")], "source": source.identity(), **request}
    with journal(destination, call) as parts:
        check_room(destination, 4 * sum(prod(shape) for _, shape in shapes) - parts.nbytes)
        target, layers, resumed = ToDirectory(FLOATS), source.config.layers, 0
        for number in range(layers):
            report(f"writing {source.name}", number, layers)
            if parts.note_of(shard_of(number, layers)) is None:
                commit_floats(parts, source, number, source.layer(number))
            else:
                resumed += 1
        commit_ends(parts, target, source)
        told = finish(parts, target, source, None, part_of(report, "checking"))
    return {"bytes": told["bytes"], "resumed": resumed}
