r"""Blocks of GGUF: codes with scales and zeros as Q4_0, Q4_1, Q5_0 and Q8_0, and back.

A block is 32 neighbours along K with its own scale, so a group becomes one or more blocks with equal scales. Its length
must be a multiple of 32. Most types cannot store the zero of a group; they hold *levels*, :math:`\ell = q - z`, whose
range decides which type holds a matrix exactly:

===== ============================ =================================================================================
type  levels                       holds
===== ============================ =================================================================================
Q4_0  −8 to 7                      4 bits with zeros in the middle; fewer bits with any zeros
Q4_1  codes 0 to 15 and a minimum  groups that have minima, or whose :math:`-s z` is a float16 number
Q5_0  −16 to 15                    4 bits with any zeros
Q8_0  −128 to 127                  8 bits with zeros in the middle
===== ============================ =================================================================================

**The scale of a block may be below 0.** The levels of such a block count the other way, so −7 to 8 fit Q4_0 too.

**The way back** from Q5_0 gives 4 bits with zeros where the levels of each block span at most 15, and 5 bits otherwise.

Source: ggml, ``ggml-common.h``; `lowbit.tensor_formats.gguf_basic`.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from lowbit.arrays import Array
from lowbit.errors import ArgumentError
from lowbit.quantization.coded import CodedMatrix, exactly, runs, whole_zeros
from lowbit.tensor_formats.bits import join, planes
from lowbit.tensor_formats.stored import FORMATS, Stored

BLOCK = 32
CENTERS: Mapping[str, int] = {"q4_0": 8, "q5_0": 16, "q8_0": 128}
"""The number added to a level to give its code, by type."""

Integers = npt.NDArray[np.int64]


def pack_levels(type: str, coded: CodedMatrix) -> dict[str, Array]:
    """The blocks of a type in `CENTERS`.

    Raises:
        ArgumentError: a level that it cannot hold; groups that are not runs of whole blocks.
    """
    center = CENTERS[type]
    d = _of_blocks(coded, exactly(coded.scales, "float16", "scale of a group"))
    levels = (coded.codes - whole_zeros(coded, -(2**15), 2**15)[coded.g_idx]).T.reshape(*d.shape, BLOCK)
    sign = np.where(levels.max(axis=-1) >= center, -1, 1)
    levels = levels * sign[..., np.newaxis]
    if levels.min() < -center or levels.max() >= center:
        given, allowed = f"{levels.min()} to {levels.max()}", f"{-center} to {center - 1}, which {type} holds"
        raise ArgumentError("codes less zeros", given, allowed)
    fields, codes = {"d": d * sign.astype(np.float16)}, levels + center
    if type == "q8_0":
        return _records(type, fields | {"qs": (codes - center).astype(np.int8)})
    if type == "q5_0":
        fields["qh"] = join(codes >> 4, 1, np.uint8)
    return _records(type, fields | {"qs": _nibbles(codes & 15)})


def pack_minima(coded: CodedMatrix) -> dict[str, Array]:
    """The blocks of Q4_1.

    Raises:
        ArgumentError: more than 4 bits; a minimum that is not a float16 number; groups that are not runs of whole
            blocks.
    """
    if coded.bits > 4:
        raise ArgumentError("bits", coded.bits, "at most 4, which q4_1 holds")
    scales = exactly(coded.scales, "float16", "scale of a group")
    minima = coded.offsets if coded.has_minima else -scales.astype(np.float64) * coded.offsets
    m = exactly(minima, "float16", "minimum of a group")
    codes = coded.codes.T.reshape(coded.codes.shape[1], -1, BLOCK).astype(np.int64)
    return _records("q4_1", {"d": _of_blocks(coded, scales), "m": _of_blocks(coded, m), "qs": _nibbles(codes)})


def unpack_levels(matrix: Stored) -> CodedMatrix:
    """Levels as codes with zeros; a negative scale is made positive by reflecting the codes, and levels with a scale of
    0 become 0."""
    fields = matrix.table.fields_of(matrix.by_name)
    if matrix.format == "q8_0":
        codes = fields["qs"].astype(np.int64) + CENTERS["q8_0"]
    else:
        codes = planes(fields["qs"], 4, 16)
        if "qh" in fields:
            codes |= np.unpackbits(fields["qh"], axis=-1, bitorder="little").astype(np.int64) << 4
    levels = codes - CENTERS[matrix.format]
    d = fields["d"].astype(np.float64)
    levels *= np.sign(d).astype(np.int64)[..., np.newaxis]
    scales = np.where(d == 0, np.float16(1), np.abs(fields["d"]))
    bits = {"q4_0": 4, "q5_0": 5, "q8_0": 8}[matrix.format]
    return _with_zeros(levels, scales, bits, matrix.rows)


def _with_zeros(levels: Integers, scales: Array, bits: int, rows: int) -> CodedMatrix:
    """Levels, N × blocks × 32, as codes; 5-bit codes become 4-bit ones if possible."""
    zeros = _zeros(levels, 4 if bits == 5 else bits)
    codes = levels + zeros
    if bits == 5 and codes.min() >= 0 and codes.max() <= 15:
        bits = 4
    elif bits == 5:
        zeros = _zeros(levels, 5)
        codes = levels + zeros
    whole = np.ascontiguousarray(codes.reshape(len(codes), -1).T.astype(np.uint8))
    offsets = _turned(zeros[..., 0].astype(np.float64))
    return CodedMatrix(whole, _turned(scales), offsets, runs(rows, BLOCK), bits, BLOCK)


def _zeros(levels: Integers, bits: int) -> Integers:
    """The zero of each block: the middle of the codes if possible, else the least that leaves no code below 0."""
    middle = 2 ** (bits - 1)
    least, most = levels.min(axis=-1, keepdims=True), levels.max(axis=-1, keepdims=True)
    zeros: Integers = np.where((least >= -middle) & (most < middle), middle, np.maximum(-least, 0))
    return zeros


def unpack_minima(matrix: Stored) -> CodedMatrix:
    """Codes with minima; a scale may be below 0."""
    fields = matrix.table.fields_of(matrix.by_name)
    codes = planes(fields["qs"], 4, 16).reshape(matrix.columns, -1)
    whole = np.ascontiguousarray(codes.T.astype(np.uint8))
    scales, minima = _turned(fields["d"]), _turned(fields["m"].astype(np.float64))
    return CodedMatrix(whole, scales, minima, runs(matrix.rows, BLOCK), 4, BLOCK, has_minima=True)


def _of_blocks(coded: CodedMatrix, numbers: Array) -> Array:
    """The numbers of groups, repeated for their blocks: N × blocks.

    Raises:
        ArgumentError: rows of a block that are in several groups.
    """
    if len(coded.codes) % BLOCK:
        raise ArgumentError("rows", len(coded.codes), f"a multiple of {BLOCK}, the elements of a block")
    groups = coded.g_idx.reshape(-1, BLOCK)
    if (groups != groups[:, :1]).any():
        given = f"{coded.group_size} rows long" if coded.in_order else "in act-order"
        raise ArgumentError("groups", given, f"runs of rows, a multiple of {BLOCK} long, as the blocks of GGUF are")
    return numbers[groups[:, 0]].T


def _nibbles(codes: Integers) -> Array:
    return (codes[..., :16] | codes[..., 16:] << 4).astype(np.uint8)


def _records(type: str, fields: Mapping[str, Array]) -> dict[str, Array]:
    records = np.zeros(fields["d"].shape, FORMATS[type].record)
    for name, array in fields.items():
        records[name] = array
    return {"blocks": records.view(np.uint8).reshape(len(records), -1)}


def _turned(numbers: Array) -> Array:
    return np.ascontiguousarray(numbers.T)
