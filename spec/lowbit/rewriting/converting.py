"""Converting a model: the same numbers in another layout, block by block.

Codes, scales and zeros stay the same; only their places change. What a layout cannot hold is refused, and the message
says which number of which matrix would be lost. To round the numbers anew, use `lowbit.rewriting.quantizing`.

A first pass over the codes collects the configuration of a directory (`lowbit.rewriting.codes_of_model`). A second pass
packs and writes.
"""

from collections.abc import Iterator, Mapping
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

import numpy as np

from lowbit.arrays import F32
from lowbit.errors import ArgumentError
from lowbit.formats.fetch import Report, silent
from lowbit.model.matrices import Matrix, to_float
from lowbit.model.weights import linear_shapes
from lowbit.quantization.affine import QuantizedMatrix
from lowbit.rewriting.codes_of_model import Codes, about, codes_of, together
from lowbit.rewriting.layouts import FLOATS, Description, Layout
from lowbit.rewriting.packers import coded_of
from lowbit.rewriting.quantizing import float_modules, part_report, writing
from lowbit.rewriting.source import File, Source
from lowbit.rewriting.targets import target_of
from lowbit.rewriting.writing import Packed, Target, columns_together, commit_ends, commit_layer, finish, shard_of
from lowbit.runtime.stored import part_of
from lowbit.tensor_formats.stored import Stored

VERSION = 1
"""The version of a conversion's output; a folder left by another version is not resumed."""


def convert(source: Source, destination: Path, layout: Layout, report: Report = silent) -> dict[str, Any]:
    """Write a model in another layout, or finish what an interrupted process began.

    Args:
        source: the model.
        destination: of the output; a free name, or for a directory an empty one.
        layout: of the output.
        report: called while it works.

    Returns:
        ``bytes`` of the tensors, ``resumed``, the number of blocks that already existed, and ``matrices``, the bits and
        the digest of the float32 numbers of each matrix of codes.

    Raises:
        ArgumentError: a number that the layout cannot hold; a destination that exists.
        UnavailableError: too little memory or disk space.
        FormatError: a damaged source; a result that differs from the intended one.
    """
    if layout.is_file and isinstance(source, File):
        raise ArgumentError("--format", layout.name, "a layout of directories: the source is a file of GGUF already")
    target = target_of(layout)
    target.check(source)
    codes = Codes() if layout is FLOATS else codes_of(source, target, part_report(report, f"reading {source.name}"))
    description = None if layout.config is None else codes.description(layout, float_modules(source))
    call = {"command": "convert", "version": [VERSION, version_of("lowbit")], "source": source.identity()}
    with writing(source, destination, target, call | {"layout": layout.name}, _room(source, codes)) as parts:
        layers, resumed, told = source.config.layers, 0, part_report(report, f"converting {source.name}")
        for number in range(layers):
            told("", number, layers)
            if parts.note_of(shard_of(number, layers)) is not None:
                resumed += 1
                continue
            layer = source.layer(number)
            packed = dict(_packed(source, target, number, layer.linears(), description))
            commit_layer(parts, target, source, number, layer, packed)
        commit_ends(parts, target, source)
        found = finish(parts, target, source, description, part_of(report, "checking"))
    return found | {"resumed": resumed}


def _room(source: Source, codes: Codes) -> int:
    """The approximate size of the output: codes unchanged, and all floats as float32."""
    config = source.config
    weights = config.layers * sum(rows * columns for rows, columns in linear_shapes(config).values())
    return codes.nbytes + 4 * (weights - codes.weights + 2 * config.vocabulary * config.hidden)


def _packed(
    source: Source, target: Target, number: int, linears: Mapping[str, Matrix], description: Description | None
) -> Iterator[tuple[str, Packed]]:
    """The matrices of a block in the layout."""
    symmetric = description is not None and description.symmetric
    for holder, names in target.holders(source, number):
        matrices = [linears[name] for name in names]
        numbers, ends = columns_together([to_float(each) for each in matrices])
        written: Stored | F32 = numbers
        notes: dict[str, Any] = {}
        with about(holder):
            if target.layout is FLOATS:
                _check_exact(matrices)
            elif (coded := together(matrices)) is not None:
                written, notes = target.layout.stored(coded, symmetric=symmetric), {"bits": coded.bits}
        yield holder, Packed(names, ends, numbers, written, notes)


def _check_exact(matrices: list[Matrix]) -> None:
    """Refuse codes whose numbers float32 cannot hold.

    Raises:
        ArgumentError: names one of them.
    """
    for matrix in matrices:
        if isinstance(matrix, np.ndarray):
            continue
        values = coded_of(matrix).values if isinstance(matrix, QuantizedMatrix) else matrix.values
        wrong = values != to_float(matrix)
        if wrong.any():
            raise ArgumentError("number of the matrix", values[wrong][0], "numbers that float32 holds exactly")
