r"""Marlin: 4-bit codes in the order in which tensor cores read them.

Each thread of a warp loads the codes that it multiplies as one vector, so Marlin stores codes thread by thread. This is
the layout of AutoGPTQ's and GPTQModel's checkpoints in the format *marlin*. vLLM repacks symmetric GPTQ into it when it
loads a model. There is no zero: a weight is :math:`s_{gn}\,(q_{kn} - 8)`.

**Codes.** A row of ``B`` holds 16 rows of the matrix, in runs of 64 columns and 128 words. Word :math:`4 t + j` of a
run belongs to thread :math:`t` of 32 and to tile :math:`j` of 16 columns. Its codes are those of the rows
:math:`2 (t \bmod 4) + (0, 1, 8, 9)` in column :math:`\lfloor t / 4 \rfloor` of the tile, and then of the same rows
8 columns on. The eight lie in the nibbles 0, 4, 1, 5, 2, 6, 3, 7, counted from the lowest.

**Scales** are permuted, too. With several groups each run of 64 columns is an 8 × 8 matrix that was transposed. With
one group for all rows each run of 32 columns has another order: places 0 to 7 hold the scales of columns 0, 1, 8, 9,
16, 17, 24 and 25, the next eight those of 2, 3, 10, 11 and so on. The number of groups decides: a matrix of 128 rows in
groups of 128 has the second order.

Marlin's kernel requires K in multiples of 128 and N in multiples of 256; the layout itself requires 16 and 64.

Source: IST-DASLab/marlin ``marlin/__init__.py`` (_get_perms, Layer.pack); vLLM ``marlin_utils.py``
(marlin_permute_scales).
"""

from lowbit.arrays import F64, Array
from lowbit.tensor_formats.bits import INTERLEAVED, exact, split
from lowbit.tensor_formats.table import Field, Format, Sizes, Tensors, Terms

ZERO = 8


def codes_of(words: Array) -> F64:
    """float64, K × N: the codes of B.

    The axes of the reshaped array, in order: run of 16 rows, run of 64 columns, column in a half tile, pair of rows,
    tile, half of the tile's columns, half of the tile's rows, row of the pair.
    """
    tiles, columns = len(words), words.shape[1] // 2
    codes = split(words, 4, INTERLEAVED).reshape(tiles, columns // 64, 8, 4, 4, 2, 2, 2)
    in_order = codes.transpose(0, 6, 3, 7, 1, 4, 5, 2)
    return exact(in_order).reshape(16 * tiles, columns)


def scales_of(stored: Array) -> F64:
    """float64, G × N: the scales in the order of columns."""
    groups, columns = stored.shape
    shape = (groups, -1, 8, 8) if groups > 1 else (groups, -1, 4, 4, 2)
    return exact(stored).reshape(shape).swapaxes(2, 3).reshape(groups, columns)


def _decode(tensors: Tensors, at: Sizes) -> Terms:
    scales = scales_of(tensors["s"])[at.group_of_row()]
    return Terms(scales * codes_of(tensors["B"]), -ZERO * scales)


CODES = Field("B", "int32", ("K/16", "N/64*128"), "codes", "codes of 16 rows, thread by thread")
SOURCE = "IST-DASLab/marlin, marlin/__init__.py"
TRAPS = (
    "The order of scales depends on whether there is more than one group.",
    "Codes of a word are interleaved: the first and the fifth nibble hold neighbouring rows.",
)

MARLIN = Format(
    name="marlin",
    title="Marlin, groups of rows",
    fields=(CODES, Field("s", "float16", ("K/group_size", "N"), "scale", "permuted in runs of 64 columns, or of 32")),
    decode=_decode,
    options={"group_size": (128, 64, 32)},
    source=SOURCE,
    traps=TRAPS,
)
MARLIN_CHANNEL = Format(
    name="marlin-channel",
    title="Marlin, one scale for each column",
    fields=(CODES, Field("s", "float16", (1, "N"), "scale", "permuted in runs of 32 columns")),
    decode=_decode,
    source=SOURCE,
    traps=TRAPS,
)
