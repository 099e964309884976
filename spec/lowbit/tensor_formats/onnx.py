r"""ONNX Runtime's MatMulNBits: codes of each column in blobs, with zeros of the same width.

The operator ``com.microsoft.MatMulNBits`` multiplies by a matrix that is stored N × K. Each row is cut into blocks of
``block_size`` elements, the last of which is padded, and an element is

.. math:: w_{kn} = s_{ng}\,(q_{kn} - z_{ng}), \qquad g = \lfloor k / \mathrm{block\_size} \rfloor .

**Codes** of a block form a *blob* of bytes, the first element in the lowest bits. Zeros are packed in the same way
along the blocks of a row, and each row starts a new byte. Without the input ``zero_points`` every zero is
:math:`2^{b-1}`, which is a format of its own here. The padding of blocks and zeros has no meaning.

**Casts** compute in float32, from the largest and the least number of each block and 0, *max* and *min*; the short last
block has fewer numbers. Roundings are to nearest, ties away from 0, and codes stay within 0 and :math:`2^b - 1`.

=============== ====================================================== ================================================
step            with zeros                                             without
=============== ====================================================== ================================================
scale *s*       :math:`(\max - \min) / (2^b - 1)`                      :math:`-x_m / 2^{b-1}`
zero *z*        :math:`\mathrm{round}(-\min / s)`                      :math:`2^{b-1}`
code            :math:`\mathrm{round}(x \cdot (1/s) + z)`               the same
=============== ====================================================== ================================================

:math:`x_m` is *max* or *min*, whichever is larger in magnitude, and *min* if both are equal. A block of zeros has the
scale 0 and codes of *z*. A compiler may turn the code's product and sum into one operation with a single rounding.

The operator also accepts zeros as floats, scales as float16 or bfloat16, and an index of groups, which are not covered
here.

Source: ONNX Runtime ContribOperators (com.microsoft.MatMulNBits) and its kernel for CPUs; MLAS, ``q4_dq.cpp``
(BlockwiseQuantizer).
"""

import numpy as np

from lowbit.arrays import F32, F64, Array
from lowbit.tensor_formats.bits import exact, join, split
from lowbit.tensor_formats.casts import contractions, in_groups, inverse, multiply_add, nearest, over
from lowbit.tensor_formats.table import Field, Format, Sizes, Tensors, Terms


def _codes(packed: Array, bits: int) -> F64:
    """The codes of each row of bytes, as one row."""
    return exact(split(packed.reshape(len(packed), -1), bits))


def _decoded(tensors: Tensors, at: Sizes, zeros: F64 | float) -> Terms:
    codes = _codes(tensors["B"], at["bits"])
    group = np.arange(at.K) // at["block_size"]
    scales = exact(tensors["scales"])
    return Terms((codes[:, : at.K] * scales[:, group]).T, (-scales * zeros)[:, group].T)


def _with_zeros(tensors: Tensors, at: Sizes) -> Terms:
    zeros = _codes(tensors["zero_points"], at["bits"])[:, : tensors["scales"].shape[1]]
    return _decoded(tensors, at, zeros)


def _symmetric(tensors: Tensors, at: Sizes) -> Terms:
    return _decoded(tensors, at, 2.0 ** (at["bits"] - 1))


# **Casts.** Blocks are N × G × block_size.


def _bytes(codes: Array, bits: int) -> Array:
    """Codes packed into bytes along the last axis."""
    runs = 8 // bits
    filled = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, -codes.shape[-1] % runs)])
    return join(filled, bits, np.uint8)


def _rounded(x: F32, scale: F32, zeros: F32 | np.float32, at: Sizes, *, fused: bool) -> Array:
    """B: the codes of blocks."""
    codes = nearest(multiply_add(x, inverse(scale), zeros, fused=fused), "away").clip(0, 2 ** at["bits"] - 1)
    inside = np.arange(x[0].size).reshape(x.shape[1:]) < at.K
    return _bytes(np.where(inside, codes, 0), at["bits"])


def _encode(fused: bool, numbers: F64, at: Sizes) -> dict[str, Array]:
    x = in_groups(numbers.T.astype(np.float32), at["block_size"])
    most = np.float32(2 ** at["bits"] - 1)
    low, high = np.minimum(x.min(-1, keepdims=True), 0), np.maximum(x.max(-1, keepdims=True), 0)
    scale: F32 = (high - low) / most
    zeros = nearest(over(-low, scale), "away").clip(0, int(most))
    codes = _rounded(x, scale, zeros.astype(np.float32), at, fused=fused)
    return {"B": codes, "scales": scale[..., 0], "zero_points": _bytes(zeros[..., 0], at["bits"])}


def _encode_symmetric(fused: bool, numbers: F64, at: Sizes) -> dict[str, Array]:
    x = in_groups(numbers.T.astype(np.float32), at["block_size"])
    middle = np.float32(2 ** (at["bits"] - 1))
    low, high = x.min(-1, keepdims=True), x.max(-1, keepdims=True)
    scale: F32 = -np.where(np.abs(high) > np.abs(low), high, low) / middle
    return {"B": _rounded(x, scale, middle, at, fused=fused), "scales": scale[..., 0]}


FIELDS = (
    Field(
        "B", "uint8", ("N", "K//block_size", "block_size*bits/8"), "codes", "blobs, the first code in the lowest bits"
    ),
    Field("scales", "float32", ("N", "K//block_size"), "scale", "one for each block"),
)
ZEROS = Field(
    "zero_points", "uint8", ("N", "K//block_size*bits//8"), "zero", "zeros of the blocks of a row, packed alike"
)
OPTIONS = {"bits": (4, 8, 2), "block_size": (32, 16, 64, 128)}
SOURCE = "ONNX Runtime, the page ContribOperators"

MATMULNBITS = Format(
    name="matmulnbits",
    title="ONNX MatMulNBits",
    fields=(*FIELDS, ZEROS),
    decode=_with_zeros,
    encode=contractions(_encode),
    options=OPTIONS,
    source=SOURCE,
    traps=("Zeros of a row start in a new byte, so an odd number of blocks leaves a nibble unused.",),
)
MATMULNBITS_SYMMETRIC = Format(
    name="matmulnbits-symmetric",
    title="ONNX MatMulNBits without zeros",
    fields=FIELDS,
    decode=_symmetric,
    encode=contractions(_encode_symmetric),
    options=OPTIONS,
    source=SOURCE,
    traps=("Without zeros the zero is 2^(bits-1), and not 0.",),
)
