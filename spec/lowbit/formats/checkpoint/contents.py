"""What a checkpoint directory must hold: each tensor of its configuration, and nothing else.

A tensor that is missing would leave a part of the model undefined, and one that is ignored would change it silently. So
the table of tensors is compared with the shape of the model, in time that grows with the table and not with what a
configuration claims. The weights of a matrix may be quantised already; then the tensors of its format stand in their
place.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from lowbit.contract.checks import check_choice, spoken
from lowbit.errors import ArgumentError, FormatError
from lowbit.formats.checkpoint import stacked, stored_matrix
from lowbit.formats.checkpoint.architectures import Architecture
from lowbit.formats.checkpoint.gptq_version import VERSIONS, Version, of_version, sampled_zeros
from lowbit.formats.checkpoint.names import EMBEDDING, HEAD, Shape, tensor_shapes
from lowbit.formats.checkpoint.prequantized import Packed, packed_matrices
from lowbit.formats.checkpoint.quantization_config import Method
from lowbit.formats.checkpoint.tensors import STORED, Table, read_floats
from lowbit.model.config import LlamaConfig
from lowbit.text import quoted

CONFIG = "config.json"
WEIGHT = ".weight"
OF_CACHE = ("k_scale", "v_scale", "q_scale")


@dataclass(frozen=True)
class Packing:
    """The quantised matrices of a checkpoint.

    Attributes:
        matrices: by the names that their weights would have.
        coded: whether stacked experts are MXFP4 (`lowbit.formats.checkpoint.stacked`).
        method: how they were quantised; None for a checkpoint of floats.
        identity: what determines their numbers besides the files, for digests.
        remarks: what a user should know about how they are read, a sentence each.
    """

    matrices: Mapping[str, Packed] = field(default_factory=dict)
    coded: bool = False
    method: Method | None = None
    identity: tuple[bytes, ...] = ()
    remarks: tuple[str, ...] = ()


def read_packing(table: Table, method: Method | None, gptq_version: Version | None) -> Packing:
    """The quantised matrices of a checkpoint.

    Args:
        table: of the checkpoint.
        method: how it was quantised; None for floats.
        gptq_version: as in `lowbit.formats.checkpoint.reader.open_checkpoint`.

    Raises:
        ArgumentError: a version of GPTQ that does not exist, or for a checkpoint of another method.
        FormatError: no matrix is quantised although there is a method; a file has changed since its header was read.
    """
    if gptq_version is not None:
        check_choice("gptq_version", gptq_version, VERSIONS)
    found = [] if method is None else packed_matrices(table, method)
    is_gptq = any(each.format.startswith("gptq-") for each in found)
    if gptq_version is not None and not is_gptq:
        sentence = f"GPTQ version {gptq_version} was asked for, and the checkpoint has no matrices of GPTQ"
        raise ArgumentError("gptq_version", gptq_version, "None", sentence)
    if method is None:
        return Packing()
    if not found:
        raise FormatError(CONFIG, "quantization_config", "given", "absent where no matrix is quantised")
    remarks = []
    if gptq_version is not None:
        found = of_version(found, f"gptq-{gptq_version}")
    elif (zeros := sampled_zeros(table, found, has_label=bool(method.label))) is not None and zeros.version:
        found = of_version(found, zeros.version)
        if zeros.version != zeros.labelled:
            remarks.append(f"{zeros.sentence} gptq_version says otherwise where that is wrong.")
    if method.activations:
        remarks.append(
            f"The checkpoint is made for activations cast to {method.activations}; "
            "here its matrices are multiplied by activations that are not cast."
        )
    if any(_is_of_cache(Packing(method=method), name) for name in table):
        remarks.append("The checkpoint has scales for a cache of cast keys and values; here the cache is not cast.")
    formats = sorted({each.format for each in found})
    matrices = {f"{each.module}{WEIGHT}": each for each in found}
    return Packing(matrices, False, method, tuple(name.encode() for name in formats), tuple(remarks))


def check_table(config: LlamaConfig, tied: bool, architecture: Architecture, table: Table, packing: Packing) -> None:
    """Refuse a table that does not match the configuration exactly.

    Raises:
        FormatError: a tensor that is missing, unknown, or of another shape or type.
    """
    separate = architecture.sparse is not None and not architecture.sparse.stacked
    experts = config.routing.experts if config.routing is not None and separate else 1
    if config.layers * experts > len(table):
        claimed = f"{config.layers} layers" + ("" if config.routing is None else f" of {experts} experts")
        raise FormatError(
            CONFIG, "shape of the model", claimed, f"what {len(table)} tensors can hold; some are missing"
        )
    has_head = HEAD in table or HEAD in packing.matrices
    expected = dict(tensor_shapes(config, tied and not has_head, architecture, coded=packing.coded))
    known = set[str]()
    for name, shape in expected.items():
        if name in packing.matrices:
            _check_packed(table, packing, name, shape)
            known |= set(packing.matrices[name].tensors.values())
        else:
            _check_floats(table, name, shape)
            known.add(name)
    for name in table:
        if name not in known and not _is_empty_bias(table, packing, name) and not _is_of_cache(packing, name):
            allowed = "those of this kind and shape of model"
            raise FormatError(table[name].shard.path.name, "tensor", quoted(name), allowed)


def _check_floats(table: Table, name: str, shape: Shape) -> None:
    if name not in table:
        raise FormatError(CONFIG, f"tensor {quoted(name)}", "missing", "there, as this shape of a model asks for")
    place = table[name]
    file = place.shard.path.name
    if place.shape != shape:
        raise FormatError(file, f"shape of tensor {quoted(name)}", place.shape, " x ".join(map(str, shape)))
    types = ["U8"] if name.endswith(stacked.CODED) else list(STORED)
    if place.type not in types:
        raise FormatError(file, f"type of tensor {quoted(name)}", place.type, spoken(types))


def _check_packed(table: Table, packing: Packing, name: str, shape: Shape) -> None:
    """Refuse a quantised matrix that does not match the configuration."""
    matrix, method = packing.matrices[name], packing.method
    assert method is not None
    file = table[next(iter(matrix.tensors.values()))].shard.path.name
    if name == EMBEDDING or len(shape) != 2:
        raise FormatError(file, f"module {quoted(matrix.module)}", "quantised", "weights as floats")
    if method.unsupported:
        raise FormatError(CONFIG, method.unsupported, "given", "absent: only quantised matrices are read")
    if method.keeps_float(matrix.module):
        raise FormatError(file, f"module {quoted(matrix.module)}", "quantised", f"floats, as {CONFIG} says")
    if not matrix.format:
        given = ", ".join(f"{part} {table[stored].type}" for part, stored in sorted(matrix.tensors.items()))
        allowed = f"those of a format of lowbit.tensor_formats, for method {quoted(method.name)}"
        raise FormatError(file, f"kind of the tensors of {quoted(matrix.module)}", given, allowed)
    stored_matrix.check(table, matrix, shape[1], shape[0])
    _check_options(file, matrix, method, rows=shape[1])


OF_FORMATS = {
    "awq-gemm": {"bits": 4},
    "awq-gemv": {"bits": 4},
    "mxfp4": {"bits": 4, "group_size": 32},
    "nvfp4": {"bits": 4, "group_size": 16},
    "nvfp4-pack": {"bits": 4, "group_size": 16},
    "fp8-tensor": {"bits": 8},
    "fp8-channel": {"bits": 8},
    "fp8-block": {"bits": 8},
}
"""The bits and group sizes of formats that have no options for them."""


def _check_options(file: str, matrix: Packed, method: Method, rows: int) -> None:
    """Refuse bits or groups that differ from the configuration."""
    options = {**OF_FORMATS.get(matrix.format, {}), **matrix.layout.options}
    bits, group_size = map(options.get, ("bits", "group_size"))
    if bits is not None and method.allowed_bits and bits not in method.allowed_bits:
        allowed = f"{spoken(method.allowed_bits)}, as {CONFIG} says"
        raise FormatError(file, f"bits of matrix {quoted(matrix.module)}", bits, allowed)
    if group_size is None:
        return
    told = [rows if each == -1 else each for each in method.group_sizes]
    if told and group_size not in told:
        given, allowed = f"{group_size} by the number of its scales", f"{spoken(told)}, as {CONFIG} says"
        raise FormatError(file, f"group_size of matrix {quoted(matrix.module)}", given, allowed)
    if not told and rows % group_size:
        allowed = f"a number of groups that divides {rows}"
        raise FormatError(file, f"scales of matrix {quoted(matrix.module)}", f"of groups of {group_size}", allowed)


def _is_of_cache(packing: Packing, name: str) -> bool:
    """Whether a tensor is a scale of cast keys or values, which only a cache of another type uses."""
    return packing.method is not None and name.rpartition(".")[2] in OF_CACHE


def _is_empty_bias(table: Table, packing: Packing, name: str) -> bool:
    """Whether a tensor is a bias of zeros, as AutoGPTQ writes it for quantised matrices that have none."""
    module, _, part = name.rpartition(".")
    matrix = packing.matrices.get(f"{module}{WEIGHT}")
    if part != "bias" or matrix is None or table[name].type not in STORED:
        return False
    return not np.any(read_floats(table, name))
