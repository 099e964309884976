r"""GGUF tensors: blocks of codes, and which of them are an affine grouping.

A quantised GGUF tensor is N rows of K weights, each row cut into blocks that begin with their scale. Three of the types
are affine groupings as in `affine`, with groups of 32 and float16 scales, and are converted without a rounding:

===== ================================ ============ ======================= =================================
type  block of 32 weights              value        convention              difference that remains
===== ================================ ============ ======================= =================================
Q4_0  float16 d, 16 bytes of nibbles   d·(q − 8)    ``zero_point``, 4 bits  d may be negative, see below
Q4_1  float16 d, m, 16 bytes           d·q + m      ``minimum``, 4 bits
Q8_0  float16 d, 32 signed bytes       d·q          ``zero_point``, 8 bits  codes move up by 128
===== ================================ ============ ======================= =================================

In both 4-bit types byte *j* holds code *j* in its low nibble and code *j* + 16 in its high one.

**Negative and vanishing scales.** `affine` asks for scales above 0. A negative *d* counts the codes from the other
end: :math:`d(q - z) = (-d)\,((c - q) - (c - z))` with :math:`c = 2^b - 1`, so code and zero-point are reflected and the
value is the same. Where *d* is 0 the weights are all 0, or all *m*, whatever the codes are: scale 1 and codes equal to
the zero give the same values. Only the sign of a zero weight is lost. A negative *d* of Q4_1 cannot be reflected,
because *m* would have to become :math:`m + c\,d`, which float16 may not hold; no known quantiser writes one, and such
a tensor stays as it is stored.

The other types that are chapters of `lowbit.tensor_formats` stay as they are stored, too: blocks, and floats of 16
bits. All further ones that the ``gguf`` package dequantises come as float32.

Source: the block structures of the ggml project, as the ``gguf`` package decodes them; errata Q1 for the conventions.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from lowbit.arrays import F32, U8
from lowbit.contract.operation import Parameters
from lowbit.errors import ArgumentError, FormatError
from lowbit.formats.gguf.header import TensorInfo
from lowbit.formats.gguf.types import TensorType
from lowbit.model.matrices import Matrix
from lowbit.quantization.affine import QuantizedMatrix
from lowbit.quantization.packing import Codes, pack
from lowbit.tensor_formats.stored import FORMATS, Stored
from lowbit.text import quoted

Q4_0, Q4_1, Q8_0 = TensorType.Q4_0, TensorType.Q4_1, TensorType.Q8_0

GROUP_SIZE = 32
CODE_BITS = {Q4_0: 4, Q4_1: 4, Q8_0: 8}
CODE_ZERO = {Q4_0: 8, Q8_0: 128}
OF_16_BITS = {TensorType.F16: "float16", TensorType.BF16: "bfloat16"}
"""Types of floats that stay as stored, and their formats."""


def matrix(data: U8, info: TensorInfo, file: str) -> Matrix:
    """A tensor of two dimensions as K × N: affine if it is exactly that, else stored or float32.

    Args:
        data: uint8, the bytes of the tensor.
        info: its entry in the header.
        file: name of the file, for messages.

    Raises:
        FormatError: not two dimensions, a type that cannot be decoded, or weights that are not finite.
    """
    if len(info.shape) != 2:
        raise FormatError(file, f"dimensions of tensor {quoted(info.name)}", len(info.shape), "2")
    rows = data.reshape(info.shape[0], -1)
    affine = affine_grouping(rows, info, file) if info.type in CODE_BITS else None
    if affine is not None:
        return affine
    name = format_of(info)
    return np.ascontiguousarray(floats(rows, info, file).T) if name is None else as_stored(name, rows, info, file)


def format_of(info: TensorInfo) -> str | None:
    """The format of a tensor's type; None if the specification has none for it."""
    if info.type in OF_16_BITS:
        return OF_16_BITS[info.type]
    name = info.type.name.lower()
    return next((each for each in (name, f"gguf-{name}") if each in FORMATS and FORMATS[each].block), None)


def choices_of(info: TensorInfo) -> Parameters | None:
    """The choices of a matrix, by the names under which a backend declares products with it; None for a type without.

    They are known from the header, except for a Q4_1 with a negative scale, which stays as stored.
    """
    if info.type in CODE_BITS:
        convention = "minimum" if info.type == Q4_1 else "zero_point"
        grouping = {"group_size": GROUP_SIZE, "convention": convention, "scale_dtype": "float16"}
        return {"bits": CODE_BITS[info.type], **grouping}
    name = "float32" if info.type == TensorType.F32 else format_of(info)
    return None if name is None else {"format": name, "rows": info.shape[-1], "columns": info.shape[-2]}


def as_stored(name: str, rows: U8, info: TensorInfo, file: str) -> Stored:
    """The bytes of a tensor as a matrix of a format.

    Raises:
        FormatError: a scale or a float that is not finite, or a row that is not a whole number of blocks.
    """
    own = FORMATS[name].tensors[0].numpy_dtype
    try:
        return Stored(name, info.shape[1], info.shape[0], (rows.view(own),))
    except ArgumentError as error:
        raise FormatError(
            file, f"{error.argument} in tensor {quoted(info.name)}", error.given, error.allowed
        ) from error


def floats(rows: U8, info: TensorInfo, file: str) -> F32:
    """The weights as float32, N × K, decoded by the ``gguf`` package.

    Raises:
        FormatError: a type that the package does not decode, or weights that are not finite.
    """
    weights = rows.view("<f4") if info.type == TensorType.F32 else _decoded(rows, info, file)
    _check_finite(weights, info, file)
    return np.ascontiguousarray(weights, np.float32)


def _decoded(rows: U8, info: TensorInfo, file: str) -> F32:
    from gguf import GGMLQuantizationType, quants  # slow to import, and few files need it

    try:
        with np.errstate(all="ignore"):  # an overflow is refused by name
            weights: F32 = quants.dequantize(rows, GGMLQuantizationType(info.type))
    except NotImplementedError as error:
        kind = info.type.name
        raise FormatError(file, f"type of tensor {quoted(info.name)}", kind, "a type that gguf dequantises") from error
    return weights


def affine_grouping(rows: U8, info: TensorInfo, file: str) -> QuantizedMatrix | None:
    """The blocks of Q4_0, Q4_1 or Q8_0 as an affine grouping; None for a Q4_1 with a negative scale.

    Args:
        rows: uint8, N × bytes of a row.
        info: the tensor's entry in the header.
        file: name of the file, for messages.

    Raises:
        FormatError: a scale or minimum that is not finite.
    """
    bits = CODE_BITS[info.type]
    blocks = FORMATS[info.type.name.lower()].fields_of({"blocks": rows})
    scales, packed = blocks["d"][..., np.newaxis], blocks["qs"].view(np.uint8)
    _check_finite(scales, info, file)
    if info.type == Q4_1:
        zeros = blocks["m"][..., np.newaxis]
        _check_finite(zeros, info, file)
        if (scales < 0).any():
            return None
        codes = np.where(scales == 0, np.uint8(0), _nibbles(packed))
    else:
        zero = CODE_ZERO[info.type]
        codes = _nibbles(packed) if info.type == Q4_0 else packed ^ np.uint8(128)  # two's complement, moved up by 128
        codes = np.where(scales == 0, np.uint8(zero), np.where(scales < 0, 2**bits - 1 - codes, codes))
        zeros = np.where(scales < 0, 2**bits - 1 - zero, zero).astype(np.uint8)
    scales = np.where(scales == 0, np.float16(1), np.abs(scales))
    down_columns = np.ascontiguousarray(codes.reshape(len(rows), -1).T)  # K × N
    return QuantizedMatrix(
        words=pack(down_columns, bits),
        scales=np.ascontiguousarray(scales[..., 0].T),
        zeros=np.ascontiguousarray(zeros[..., 0].T),
        bits=bits,
        rows=len(down_columns),
        group_size=GROUP_SIZE,
        convention="minimum" if info.type == Q4_1 else "zero_point",
    )


def _nibbles(packed: U8) -> Codes:
    """16 bytes a block to 32 codes: first all low nibbles, then all high ones."""
    return np.concatenate([packed & np.uint8(0x0F), packed >> np.uint8(4)], axis=-1)


def _check_finite(values: npt.NDArray[np.floating[Any]], info: TensorInfo, file: str) -> None:
    finite = np.isfinite(values)
    if not finite.all():
        bad = values.ravel()[int(np.argmin(finite))]
        raise FormatError(file, f"a number in tensor {quoted(info.name)}", bad, "finite numbers")
