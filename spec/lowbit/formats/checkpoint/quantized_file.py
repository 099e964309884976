"""Quantised matrices in a file: one block of a model that lowbit has quantised.

It is a safetensors file, so that other tools can read it. A quantised matrix is three tensors, ``NAME.words``,
``NAME.scales`` and ``NAME.zeros``; a float32 matrix is one, ``NAME.weights``. The metadata entry ``lowbit`` says as
JSON what the numbers mean and where they come from:

============ ===========================================================================================
``format``   the name and version of this format
``source``   a digest of everything that determines the content: the weights, the plan, the version of the method
``holds``    which part of the model it is
``matrices`` bits, rows, group size and convention of each quantised matrix
``sha256``   the sum of the tensors' bytes, in the order of their names
============ ===========================================================================================

**Read by mapping.** Such a file is written once, under a temporary name, and never changed, so it can be mapped into
memory: a block takes no memory of its own, and what is not used is not read. The price is that the sum has to be
checked before anything is used, which reads the file once. A file that is cut short, has another source, or has a
byte changed anywhere is refused.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lowbit.arrays import F32, Array
from lowbit.errors import ArgumentError, FormatError
from lowbit.formats.checkpoint.tensors import DTYPES, Table, read_header, write_tensors
from lowbit.model.matrices import Matrix, to_float
from lowbit.quantization.affine import QuantizedMatrix
from lowbit.system.json_files import Fields, parsed
from lowbit.system.storage import OWN_MODE
from lowbit.text import quoted

FORMAT = "lowbit quantised 1"
TEXT = "lowbit"
PARTS = ("words", "scales", "zeros")
TYPES = {"words": "U32", "scales": "F16", "zeros": "F16", "weights": "F32"}
VALUES = ("bits", "rows", "group_size", "convention")


@dataclass(frozen=True)
class Origin:
    """The origin of a file: a digest of everything that determines its content, and the part of the model in it."""

    source: str
    holds: str

    def texts(self) -> dict[str, str]:
        """Its form in the header."""
        return {"format": FORMAT, "source": self.source, "holds": self.holds}


# **Writing.**


def write_quantized(path: Path, matrices: Mapping[str, Matrix | F32], origin: Origin) -> None:
    """Write matrices and vectors; the file appears complete or not at all.

    Args:
        path: where; the folder exists.
        matrices: quantised in convention ``minimum`` with float16 scales, or float32 of any shape, into which the bytes
            of a format are decoded.
        origin: of the file.

    Raises:
        UnavailableError: it cannot be written.
    """
    tensors: dict[str, Array] = {}
    values = dict[str, dict[str, Any]]()
    for name, matrix in matrices.items():
        if isinstance(matrix, QuantizedMatrix):
            tensors |= {f"{name}.{part}": getattr(matrix, part) for part in PARTS}
            values[name] = {value: getattr(matrix, value) for value in VALUES}
        else:
            tensors[f"{name}.weights"] = to_float(matrix)
    account = origin.texts() | {"matrices": values, "sha256": _sum_of(tensors)}
    write_tensors(path, tensors, {TEXT: json.dumps(account, sort_keys=True)}, OWN_MODE)


def _sum_of(tensors: Mapping[str, Array]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(np.ascontiguousarray(tensors[name]).data)
    return digest.hexdigest()


# **Reading.**


def read_matrices(path: Path, origin: Origin) -> dict[str, Matrix | F32]:
    """The contents of such a file, mapped into memory and read-only; the digest is checked.

    Raises:
        ArgumentError: there is no such file.
        FormatError: it is of another origin, or damaged.
    """
    table, account = check_origin(path, origin)
    tensors = _mapped(path, table)
    if (expected := account.value("sha256", str)) != (given := _sum_of(tensors)):
        raise FormatError(path.name, "sha256 of the data", given, quoted(expected))
    found: dict[str, Matrix | F32] = {}
    try:
        for name, value in account.value("matrices", dict).items():
            parts: dict[str, Any] = {part: tensors.pop(f"{name}.{part}") for part in PARTS}
            found[name] = QuantizedMatrix(**parts, **{key: value[key] for key in VALUES})
    except (ArgumentError, KeyError, TypeError) as error:
        given = " ".join(str(error).split())
        raise FormatError(path.name, f"matrix {quoted(name)}", given, "a matrix in three parts") from error
    return found | {name.removesuffix(".weights"): weights for name, weights in tensors.items()}


def check_origin(path: Path, origin: Origin) -> tuple[Table, Fields]:
    """The tensors of such a file and their description, if it is of this origin; the numbers are not read.

    Raises:
        ArgumentError: there is no such file.
        FormatError: it is of another origin, or its header is damaged.
    """
    header = read_header(path, tuple(DTYPES))
    account = parsed(path.name, header.metadata.get(TEXT, "").encode())
    for key, expected in origin.texts().items():
        if account.value(key, str) != expected:
            raise FormatError(path.name, key, quoted(account.value(key, str)), quoted(expected))
    for name, place in header.table.items():
        if TYPES.get(name.rpartition(".")[2]) != place.type:
            raise FormatError(
                path.name, f"type of tensor {quoted(name)}", place.type, "words, scales, zeros or weights"
            )
    return header.table, account


def _mapped(path: Path, table: Table) -> dict[str, Array]:
    whole = np.asarray(np.memmap(path, np.uint8, "r"))
    tensors = {}
    for name, place in table.items():
        dtype = DTYPES[place.type]
        octets = whole[place.offset : place.offset + place.nbytes]
        octets = octets if place.offset % dtype.itemsize == 0 else octets.copy()
        tensors[name] = octets.view(dtype).reshape(place.shape)
    return tensors
