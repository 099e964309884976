"""Packers: the arrays of a format from a coded matrix, and back.

A packer refuses what its format cannot hold, and names the number; nothing is rounded here. Packing is the inverse of
`decode` in the format's chapter in `lowbit.tensor_formats`, and `stored_of` compares the numbers before it returns an
array.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from lowbit.arrays import Array
from lowbit.contract.checks import check_choice
from lowbit.errors import ArgumentError
from lowbit.model.matrices import Matrix
from lowbit.quantization.affine import QuantizedMatrix
from lowbit.quantization.coded import CodedMatrix, exactly, runs, whole_zeros
from lowbit.quantization.packing import unpack
from lowbit.rewriting import blocks
from lowbit.tensor_formats import hqq
from lowbit.tensor_formats.bits import INTERLEAVED, end_to_end, join, split, stream
from lowbit.tensor_formats.stored import Stored, stored

Arrays = dict[str, Array]


@dataclass(frozen=True)
class Packer:
    """How a format stores a coded matrix.

    Attributes:
        pack: the arrays of the format by name.
        unpack: the inverse, from a stored matrix.
        options: the options of the format, by the names that they have in the matrix.
    """

    pack: Callable[[CodedMatrix], Arrays]
    unpack: Callable[[Stored], CodedMatrix]
    options: tuple[str, ...] = ("bits", "group_size")


def stored_of(coded: CodedMatrix, format: str) -> Stored:
    """A coded matrix in a format.

    Args:
        coded: K × N.
        format: a name in `PACKERS`.

    Raises:
        ArgumentError: numbers that the format cannot hold.
    """
    packer = PACKERS[format]
    rows, columns = coded.codes.shape
    options = {name: getattr(coded, name) for name in packer.options}
    arrays = {name: np.ascontiguousarray(each) for name, each in packer.pack(coded).items()}
    found = stored(format, rows, columns, arrays, **options)
    if not np.array_equal(found.values, coded.values):
        raise ArgumentError("matrix", "changed by packing", f"one whose numbers {format} holds exactly")
    return found


def coded_of(matrix: Matrix) -> CodedMatrix:
    """The codes, scales and zeros of a quantised matrix.

    Raises:
        ArgumentError: float32 weights, or a format that is not one of scales and zeros in groups along K.
    """
    if isinstance(matrix, QuantizedMatrix):
        order = runs(matrix.rows, matrix.group_size)
        codes, has_minima = unpack(matrix.words, matrix.bits), matrix.convention == "minimum"
        offsets = matrix.zeros.astype(np.float64)
        return CodedMatrix(codes, matrix.scales, offsets, order, matrix.bits, matrix.group_size, has_minima)
    if isinstance(matrix, np.ndarray):
        raise ArgumentError("matrix", "floats", f"codes in one of the formats {', '.join(PACKERS)}")
    check_choice("format", matrix.format, list(PACKERS))
    found = PACKERS[matrix.format].unpack(matrix)
    if not np.array_equal(found.values, matrix.values):
        raise ArgumentError("matrix", f"of numbers that {matrix.format} does not give back", "codes in groups along K")
    return found


# **What a format cannot hold.**


def _in_order(coded: CodedMatrix) -> None:
    if not coded.in_order:
        raise ArgumentError("groups of rows", "in act-order", "one after another: the format has no g_idx")


def _scales(coded: CodedMatrix, dtype: str) -> Array:
    """The scales in the type of the format, if that holds them exactly."""
    return exactly(coded.scales, dtype, "scale of a group")


# **GPTQ**: codes along K, zeros along N, and the group of each row.


def _gptq(less: int, dtype: str, coded: CodedMatrix) -> Arrays:
    zeros = whole_zeros(coded, less, 2**coded.bits - 1 + less) - less
    return {
        "qweight": end_to_end(coded.codes.T, coded.bits, np.int32).T,
        "qzeros": end_to_end(zeros, coded.bits, np.int32),
        "scales": _scales(coded, dtype),
        "g_idx": coded.g_idx,
    }


def _of_gptq(less: int, matrix: Stored) -> CodedMatrix:
    tensors, at = matrix.by_name, matrix.sizes
    codes = stream(tensors["qweight"].T, at["bits"], at.K).T
    zeros = stream(tensors["qzeros"], at["bits"], at.N) + less
    return _made(codes, tensors["scales"], zeros, tensors["g_idx"], at["bits"], at["group_size"])


def _made(
    codes: npt.NDArray[np.int64], scales: Array, zeros: Array, g_idx: Array, bits: int, group_size: int
) -> CodedMatrix:
    whole = np.ascontiguousarray(codes.astype(np.uint8))
    order = g_idx.astype(np.int32)
    return CodedMatrix(whole, np.ascontiguousarray(scales), zeros.astype(np.float64), order, bits, group_size)


# **AWQ**: words of 8 columns, or of 8 rows.


def _awq(coded: CodedMatrix) -> Arrays:
    check_choice("bits", coded.bits, (4,))
    _in_order(coded)
    return {
        "qweight": join(coded.codes, 4, np.int32, INTERLEAVED),
        "qzeros": join(whole_zeros(coded), 4, np.int32, INTERLEAVED),
        "scales": _scales(coded, "float16"),
    }


def _of_awq(matrix: Stored) -> CodedMatrix:
    tensors, size = matrix.by_name, matrix.sizes["group_size"]
    codes, zeros = (split(tensors[name], 4, INTERLEAVED) for name in ("qweight", "qzeros"))
    return _made(codes, tensors["scales"], zeros, runs(matrix.rows, size), 4, size)


def _of_awq_gemv(matrix: Stored) -> CodedMatrix:
    tensors, at = matrix.by_name, matrix.sizes
    size = at["group_size"]
    zeros, scales = split(tensors["qzeros"], 4)[:, : at.G].T, tensors["scales"][:, : at.G].T
    return _made(split(tensors["qweight"], 4).T, scales, zeros, runs(at.K, size), 4, size)


# **compressed-tensors**: N × K, codes end to end.


def _compressed(dtype: str, asymmetric: bool, coded: CodedMatrix) -> Arrays:
    _in_order(coded)
    zeros, middle = whole_zeros(coded), 2 ** (coded.bits - 1)
    fields = {
        "weight_packed": end_to_end(coded.codes.T, coded.bits, np.int32),
        "weight_scale": _scales(coded, dtype).T,
    }
    if asymmetric:
        return fields | {"weight_zero_point": end_to_end(zeros, coded.bits, np.int32).T}
    if (zeros != middle).any():
        raise ArgumentError("zero of a group", zeros[zeros != middle][0], f"{middle}, the middle of the codes")
    return fields


def _of_compressed(matrix: Stored) -> CodedMatrix:
    tensors, at = matrix.by_name, matrix.sizes
    bits, size, scales = at["bits"], at["group_size"], tensors["weight_scale"].T
    codes = stream(tensors["weight_packed"], bits, at.K).T
    zeros = np.full(scales.shape, 2 ** (bits - 1))
    if "weight_zero_point" in tensors:
        zeros = stream(tensors["weight_zero_point"].T, bits, at.N)
    return _made(codes, scales, zeros, runs(at.K, size), bits, size)


def _of_bytes(matrix: Stored) -> CodedMatrix:
    tensors, at = matrix.by_name, matrix.sizes
    scales, size = tensors["weight_scale"].T, at["group_size"]
    codes = tensors["weight"].T.astype(np.int64) + 128
    return _made(codes, scales, np.full(scales.shape, 128), runs(at.K, size), 8, size)


# **HQQ along axis 1**: groups are the rows of a new matrix, packed by slabs.


def _hqq(coded: CodedMatrix) -> Arrays:
    _in_order(coded)
    size, bits = coded.group_size, coded.bits
    if len(coded.codes) % size:
        raise ArgumentError("group_size", size, f"a divisor of the {len(coded.codes)} rows")
    if coded.has_minima:
        raise ArgumentError("offsets of the groups", "minima", "zeros: a minimum is rarely a multiple of its scale")
    groups = coded.codes.T.reshape(-1, size).astype(np.int64)
    count = hqq.SLABS if bits == 3 else 8 // bits
    high = -(-len(groups) // count)
    if bits != 3 and high * count != len(groups):
        raise ArgumentError("number of groups", len(groups), f"a multiple of {count}, the codes of a byte")
    filled = np.zeros((count * high, size), np.int64)
    filled[: len(groups)] = groups
    packed = np.zeros((high, size), np.int64)
    for number, slab in enumerate(filled.reshape(count, high, size)):
        packed |= slab << bits * (count - 1 - number)
    scales = _scales(coded, "float16").T.reshape(-1, 1)
    zeros = exactly(coded.offsets, "float16", "zero of a group").T.reshape(-1, 1)
    return {"W_q": packed.astype(np.int32 if bits == 3 else np.uint8), "scale": scales, "zero": zeros}


def _of_hqq(matrix: Stored) -> CodedMatrix:
    tensors, at = matrix.by_name, matrix.sizes
    size, bits = at["group_size"], matrix.sizes.options.get("bits", 3)
    if at.K % size:
        raise ArgumentError("group_size", size, f"a divisor of the {at.K} rows, so that no group crosses columns")
    count = hqq.SLABS if bits == 3 else 8 // bits
    codes = hqq.slabs(tensors["W_q"], bits, count)[: at.N * at.K // size].reshape(at.N, at.K).T
    scales, zeros = (tensors[name].reshape(at.N, -1).T for name in ("scale", "zero"))
    return _made(codes, scales, zeros.astype(np.float64), runs(at.K, size), bits, size)


def _one_way(coded: CodedMatrix) -> Arrays:
    raise ArgumentError("format", "one that is only read here", ", ".join(WRITTEN))


PACKERS: Mapping[str, Packer] = {
    "gptq-v1": Packer(partial(_gptq, 1, "float16"), partial(_of_gptq, 1)),
    "gptq-v2": Packer(partial(_gptq, 0, "float16"), partial(_of_gptq, 0)),
    "gptq-v1-bf16": Packer(partial(_gptq, 1, "bfloat16"), partial(_of_gptq, 1)),
    "gptq-v2-bf16": Packer(partial(_gptq, 0, "bfloat16"), partial(_of_gptq, 0)),
    "awq-gemm": Packer(_awq, _of_awq, ("group_size",)),
    "awq-gemv": Packer(_one_way, _of_awq_gemv, ("group_size",)),
    "ct-pack": Packer(partial(_compressed, "bfloat16", False), _of_compressed),
    "ct-pack-asym": Packer(partial(_compressed, "bfloat16", True), _of_compressed),
    "ct-pack-f16": Packer(partial(_compressed, "float16", False), _of_compressed),
    "ct-pack-asym-f16": Packer(partial(_compressed, "float16", True), _of_compressed),
    "ct-int": Packer(_one_way, _of_bytes, ("group_size",)),
    "ct-int-f16": Packer(_one_way, _of_bytes, ("group_size",)),
    "q4_0": Packer(partial(blocks.pack_levels, "q4_0"), blocks.unpack_levels, ()),
    "q4_1": Packer(blocks.pack_minima, blocks.unpack_minima, ()),
    "q5_0": Packer(partial(blocks.pack_levels, "q5_0"), blocks.unpack_levels, ()),
    "q8_0": Packer(partial(blocks.pack_levels, "q8_0"), blocks.unpack_levels, ()),
    "hqq-axis1": Packer(_hqq, _of_hqq),
    "hqq-axis1-3bit": Packer(_hqq, _of_hqq, ("group_size",)),
}
"""The formats of codes with scales and zeros in groups along K, by name."""
WRITTEN = tuple(name for name, each in PACKERS.items() if each.pack is not _one_way)
