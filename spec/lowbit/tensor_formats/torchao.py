r"""torchao: int4 weights for PyTorch's tinygemm kernels, on CUDA and on CPUs.

Codes of 4 bits are packed in the order of one kernel's loads, and scales and zeros lie side by side. A zero is a
*number*, not a code: it is the weight that code 8 stands for,

.. math:: w_{kn} = s_{gn}\,(q_{kn} - 8) + z_{gn}, \qquad g = \lfloor k / \mathrm{group\_size} \rfloor .

``scale_and_zero`` holds both for each group and column, in bfloat16. Some kernels add :math:`z - 8 s` to :math:`s q`,
so these are the two parts of a weight here. They are exact where s and z are less than 2^40 apart.

**Int4TilePackedTo4dTensor** (CUDA) has one word for each thread of a warp and each 32 rows:
``qdata[n, k, t, i]`` belongs to column :math:`8 n + \lfloor t / 4 \rfloor` and to 32 rows from :math:`128 k + 32 i` on.
Of these, thread t has the pairs that begin at :math:`2 (t \bmod 4)` plus 0, 8, 16 and 24. The first rows of the four
pairs lie in the nibbles 0 to 3, counted from the lowest, and the second rows in the nibbles 4 to 7. K is padded to a
multiple of 1024 and N to one of 8.

**Int4OpaqueTensor** (CPU) cuts the columns into blocks: 64 with AVX-512, 32 with AVX2. The processor that packs
decides, and the tensor does not say which it was. For each row a block has half as many bytes as columns. With AVX-512
byte i of the first 16 holds column i in its low half and column i + 32 in its high half, and the next 16 bytes hold
columns i + 16 and i + 48; with AVX2 byte i holds columns i and i + 16. A last block that is not full has neighbouring
columns in a byte, the first in the low half. Blocks follow each other, so the shape of the tensor, N × K/2, says
nothing about its order. N is a multiple of 16.

Source: torchao ``int4_tile_packed_to_4d_tensor.py``, ``int4_opaque_tensor.py`` and ``quantization/utils.py``
(pack_tinygemm_scales_and_zeros); PyTorch ``aten/src/ATen/native/cuda/int4mm.cu`` (matrix_to_m16n8k16_Bint4_layout) and
``aten/src/ATen/native/cpu/int4mm_kernel.cpp`` (weight_to_int4pack_kernel).
"""

from functools import partial

import numpy as np

from lowbit.arrays import F64, Array
from lowbit.tensor_formats.bits import exact, planes, split
from lowbit.tensor_formats.table import Field, Format, Sizes, Tensors, Terms

MIDDLE = 8
"""The code that decodes to the zero of its group."""


def _terms(codes: F64, tensors: Tensors, at: Sizes) -> Terms:
    numbers = exact(tensors["scale_and_zero"])[at.group_of_row(), : at.N]
    scales, zeros = numbers[..., 0], numbers[..., 1]
    return Terms(scales * codes, zeros - MIDDLE * scales)


def tiles(words: Array) -> F64:
    """float64, K × N with the padding: the codes of the 4-d tensor.

    The axes of the reshaped array, in order: run of 8 columns, run of 128 rows, column, pair of rows, run of 32 rows,
    row of the pair, half of the 32 rows, half of those 16.
    """
    columns, rows = words.shape[:2]
    codes = split(words, 4).reshape(columns, rows, 8, 4, 4, 2, 2, 2)
    return exact(codes.transpose(1, 4, 6, 7, 3, 5, 0, 2)).reshape(128 * rows, 8 * columns)


def _tile_packed(tensors: Tensors, at: Sizes) -> Terms:
    return _terms(tiles(tensors["qdata"])[: at.K, : at.N], tensors, at)


def _opaque(block: int, tensors: Tensors, at: Sizes) -> Terms:
    flat, parts = tensors["qdata"].reshape(-1), []
    for first in range(0, at.N, block):
        width = min(block, at.N - first)
        octets = flat[first * at.K // 2 : (first + width) * at.K // 2].reshape(at.K, width // 2)
        # A full block pairs lanes of 16 columns: the low halves of all bytes, then the high halves.
        codes = planes(octets, 4, width // 2) if width == block else split(octets, 4)
        parts.append(codes)
    return _terms(exact(np.concatenate(parts, axis=1)), tensors, at)


def _numbers(groups: str, columns: str) -> Field:
    return Field("scale_and_zero", "bfloat16", (groups, columns, 2), "scale", "scale, then zero", signed=True)


TILE_PACKED = Format(
    name="int4-tile-packed",
    title="torchao Int4TilePackedTo4dTensor",
    fields=(
        Field("qdata", "int32", ("N//8", "K//1024*8", 32, 4), "codes", "a word for each thread and 32 rows; padded"),
        _numbers("K//1024*1024/group_size", "N//8*8"),
    ),
    decode=_tile_packed,
    options={"group_size": (128, 64, 32, 256)},
    source="PyTorch, aten/src/ATen/native/cuda/int4mm.cu",
    traps=("The zero is a weight that is added, and belongs to code 8.", "Rows are padded to a multiple of 1024."),
)


def _cpu(name: str, title: str, block: int) -> Format:
    return Format(
        name=name,
        title=title,
        fields=(
            Field("qdata", "uint8", ("N/16*16", "K/2"), "codes", f"blocks of {block} columns, each row by row"),
            _numbers("K/group_size", "N"),
        ),
        decode=partial(_opaque, block),
        options={"group_size": (128, 64, 32)},
        source="PyTorch, aten/src/ATen/native/cpu/int4mm_kernel.cpp",
        traps=(
            "The order depends on the processor that packed, and a last block that is not full has another.",
            "The zero is a weight that is added, and belongs to code 8.",
        ),
    )


OPAQUE_AVX512 = _cpu("int4-opaque-avx512", "torchao Int4OpaqueTensor, packed with AVX-512", 64)
OPAQUE_AVX2 = _cpu("int4-opaque-avx2", "torchao Int4OpaqueTensor, packed with AVX2", 32)
