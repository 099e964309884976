"""Blocks: the types Q4_0, Q4_1 and Q8_0 of ggml, and the matrices that they hold exactly.

A block is 32 weights of one output: a float16 scale d, for Q4_1 a float16 minimum m, and the codes. In the 4-bit types
byte j holds code j in its low nibble and code j + 16 in its high one.

===== ====================== ==================================================================
type  value                  matrices of `affine` that it holds
===== ====================== ==================================================================
Q4_1  d·q + m, q 0 to 15     ``minimum``, 2, 3 or 4 bits
Q4_0  d·(q − 8), q 0 to 15   ``zero_point``, 2 or 3 bits: code − zero-point lies in −7 … 7
Q8_0  d·q, q −128 to 127     ``zero_point``, 4 bits: code − zero-point lies in −15 … 15
===== ====================== ==================================================================

The symmetric types have no zero-point, so they store the difference of code and zero-point; the value is the same
product. With 8 bits the difference does not fit. Scales are float16; a group of 64 or more rows is several blocks with
the same scale, and a last short block is padded.

**Quantising.** Only Q4_1 makes a scale and a minimum as `affine` does under ``minimum``, for groups of 32 in 4 bits
with float16 scales, and only that is declared. Its d is 0 for a constant block, which a `QuantizedMatrix` does not
allow; scale 1 and codes 0 give the same values.

Source: the block structures of the ggml project.
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Literal

import numpy as np

from lowbit.arrays import F32, U8
from lowbit.backend import Availability, Backend, Capabilities, Declaration
from lowbit.quantization.affine import Convention, QuantizedMatrix, ScaleDtype
from lowbit.quantization.packing import Codes
from lowbit_adapters.layout import code_rows, group_rows, padded, words_of_rows
from lowbit_adapters.libraries import availability, versions

Kind = Literal["Q4_0", "Q4_1", "Q8_0"]

BLOCK = 32
CENTER = 8
BLOCK_BYTES: dict[Kind, int] = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}
GROUPS = (32, 64, 96, 128, 256, 512, 1024, 2048, 4096)

DEQUANTIZE = Declaration({"bits": (2, 3, 4), "group_size": GROUPS, "scale_dtype": ("float16",)})
QUANTIZE = Declaration({"bits": (4,), "group_size": (BLOCK,), "convention": ("minimum",), "scale_dtype": ("float16",)})


def kind_of(matrix: QuantizedMatrix) -> Kind:
    """The type that holds a matrix exactly, by its convention and bits."""
    if matrix.convention == "minimum":
        return "Q4_1"
    return "Q8_0" if matrix.bits == 4 else "Q4_0"


def encode(matrix: QuantizedMatrix) -> U8:
    """The blocks of a matrix of type `kind_of`: uint8, N × blocks × bytes of a block."""
    kind = kind_of(matrix)
    codes = code_rows(matrix.words, matrix.bits)
    blocks = -(-matrix.rows // BLOCK)
    group = np.arange(blocks) * BLOCK // matrix.group_size
    heads = [group_rows(matrix.scales)[:, group]]
    if kind == "Q4_1":
        heads.append(group_rows(matrix.zeros)[:, group])
    else:
        row_group = np.arange(matrix.rows) // matrix.group_size
        codes = codes - group_rows(matrix.zeros)[:, row_group]  # modulo 256, which is what a signed byte stores
        codes += np.uint8(CENTER if kind == "Q4_0" else 0)
    codes = padded(codes, BLOCK, 0).reshape(len(codes), blocks, BLOCK)
    if kind != "Q8_0":
        codes = codes[..., : BLOCK // 2] | codes[..., BLOCK // 2 :] << np.uint8(4)
    head = np.stack(heads, axis=-1).astype("<f2").view(np.uint8)
    return np.ascontiguousarray(np.concatenate([head, codes], axis=-1))


def decode_q4_1(blocks: U8, rows: int) -> QuantizedMatrix:
    """A matrix from blocks of Q4_1.

    Args:
        blocks: uint8, N × blocks × 20.
        rows: K; elements of the last block beyond it are dropped.

    Raises:
        ArgumentError: a scale or minimum that is not finite.
    """
    halves = np.ascontiguousarray(blocks[..., :4]).view("<f2").astype(np.float16)
    scales, minima = halves[..., 0], halves[..., 1]
    codes: Codes = np.concatenate([blocks[..., 4:] & np.uint8(15), blocks[..., 4:] >> np.uint8(4)], axis=-1)
    codes = np.where(scales[..., None] == 0, np.uint8(0), codes).reshape(len(blocks), -1)[:, :rows]
    return QuantizedMatrix(
        words=words_of_rows(codes, 4),
        scales=group_rows(np.where(scales == 0, np.float16(1), scales)),
        zeros=group_rows(minima),
        bits=4,
        rows=rows,
        group_size=BLOCK,
        convention="minimum",
    )


class BlockBackend(Backend):
    """A backend that converts blocks to floats and floats to blocks by a library."""

    libraries: ClassVar[Mapping[str, str]]

    def availability(self) -> Availability:
        return availability(self.libraries)

    def capabilities(self) -> Capabilities:
        operations = {"affine.dequantize": DEQUANTIZE, "affine.quantize": QUANTIZE}
        return Capabilities(operations, concurrent=True, details=versions(self.libraries))

    @abstractmethod
    def _to_floats(self, blocks: U8, kind: Kind) -> F32:
        """float32, N × K, from uint8, N × blocks × bytes of a block; K in whole blocks."""

    @abstractmethod
    def _to_blocks(self, weights: F32) -> U8:
        """Blocks of Q4_1, uint8, N × blocks × 20, from float32, N × K; K in whole blocks."""

    def _affine_dequantize(self, matrix: QuantizedMatrix) -> F32:
        weights = self._to_floats(encode(matrix), kind_of(matrix))
        return np.ascontiguousarray(weights[:, : matrix.rows].T)

    def _affine_quantize(
        self,
        weights: F32,
        *,
        bits: int,
        group_size: int,
        convention: Convention = "minimum",
        scale_dtype: ScaleDtype = "float32",
    ) -> QuantizedMatrix:
        rows = np.ascontiguousarray(weights.T)
        filled = np.pad(
            rows, ((0, 0), (0, -rows.shape[1] % BLOCK)), mode="edge"
        )  # does not change the least and the largest
        return decode_q4_1(self._to_blocks(filled), len(weights))
