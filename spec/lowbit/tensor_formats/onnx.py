r"""ONNX Runtime's MatMulNBits: codes of each column in blobs, with zeros of as many bits.

The operator ``com.microsoft.MatMulNBits`` multiplies by a matrix that is stored N × K. Each row is cut into blocks of
``block_size`` elements, the last of which is padded, and an element is

.. math:: w_{kn} = s_{ng}\,(q_{kn} - z_{ng}), \qquad g = \lfloor k / \mathrm{block\_size} \rfloor .

**Codes** of a block form a *blob* of bytes, the first element in the lowest bits. Zeros are packed in the same way
along the blocks of a row, and each row starts a new byte. Without the input ``zero_points`` every zero is
:math:`2^{b-1}`, which is a format of its own here. What lies in the padding of blocks and zeros means nothing.

The operator also takes zeros as floats, scales as float16 or bfloat16, and an index of groups, which are not here.

Source: ONNX Runtime ContribOperators (com.microsoft.MatMulNBits) and its kernel for CPUs.
"""

import numpy as np

from lowbit.arrays import F64, Array
from lowbit.tensor_formats.bits import exact, split
from lowbit.tensor_formats.table import Field, Format, Sizes, Tensors, Terms


def _codes(packed: Array, bits: int) -> F64:
    """float64: the codes of each row of bytes, in a row."""
    return exact(split(packed.reshape(len(packed), -1), bits)).reshape(len(packed), -1)


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
    options=OPTIONS,
    source=SOURCE,
    traps=("Zeros of a row start in a new byte, so an odd number of blocks leaves a nibble unused.",),
)
MATMULNBITS_SYMMETRIC = Format(
    name="matmulnbits-symmetric",
    title="ONNX MatMulNBits without zeros",
    fields=FIELDS,
    decode=_symmetric,
    options=OPTIONS,
    source=SOURCE,
    traps=("Without zeros the zero is 2^(bits-1), and not 0.",),
)
