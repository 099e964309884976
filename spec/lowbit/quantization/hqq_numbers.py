r"""Real numbers in 8 bits: how HQQ stores the scales and zeros of short groups.

With 2 bits and groups of 16, a float32 scale and zero for each group would cost 4 bits per weight, twice as much as the
codes. So both are quantised as well: numbers are cut into groups of their own, and each is a code of 8 bits with the
scale and the real zero of its group,

.. math:: x_f = s'_{f \bmod M}\,(q'_f - z'_{f \bmod M}),

in M strided groups, whose numbers lie M apart. No solver moves these zeros: :math:`s'` and :math:`z'` are those of the
range. The solver for the weights starts from the same grid, `range_grid`.

Source: MoE offloading §4.2 (scale group size); errata H, M6.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from lowbit.arrays import F32, Array
from lowbit.contract.checks import check_array, check_choice, check_finite
from lowbit.errors import ArgumentError
from lowbit.quantization.affine import SCALE_DTYPES
from lowbit.quantization.hqq_solver import codes
from lowbit.quantization.packing import Codes


@dataclass(frozen=True, eq=False)
class EightBit:
    """Real numbers as 8-bit codes. Number f is ``scales[f mod M] * (codes[f] - zeros[f mod M])``.

    Attributes:
        codes: uint8, one for each number.
        scales: float32 or float16, M; M divides the count of numbers.
        zeros: as `scales`.

    Raises:
        ArgumentError: any of these does not hold.
    """

    codes: Codes
    scales: Array
    zeros: Array

    def __post_init__(self) -> None:
        check_array("codes", self.codes, np.uint8, (None,))
        check_plain("scales", self.scales)
        check_array("zeros", self.zeros, self.scales.dtype, self.scales.shape)
        check_finite("zeros", self.zeros)
        if len(self.codes) % len(self.scales) != 0:
            raise ArgumentError("number of scales", len(self.scales), f"a divisor of {len(self.codes)}")

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and zeros."""
        return self.codes.nbytes + self.scales.nbytes + self.zeros.nbytes


Numbers = Array | EightBit
"""Scales or zeros of G groups: float32 or float16, G, or in 8 bits."""


def decode(numbers: Numbers) -> F32:
    """The float32 numbers; for 8-bit numbers ``scale * (code - zero)`` in float32, two roundings.

    >>> decode(EightBit(np.array([0, 255, 3, 4], np.uint8), np.float32([0.5, 1]), np.float32([0, 1])))
    array([  0. , 254. ,   1.5,   3. ], dtype=float32)
    """
    if not isinstance(numbers, EightBit):
        return numbers.astype(np.float32)
    blocks = numbers.codes.reshape(-1, len(numbers.scales)).astype(np.float32)
    result: F32 = numbers.scales.astype(np.float32) * (blocks - numbers.zeros.astype(np.float32))
    return result.reshape(-1)


def encode(numbers: F32, group_size: int, dtype: np.dtype[Any]) -> EightBit:
    """The same numbers in 8 bits, number f in group f mod M, with M the count of numbers over `group_size`."""
    if len(numbers) % group_size != 0:
        raise ArgumentError("meta_group", group_size, f"a divisor of the number of groups, {len(numbers)}")
    blocks = numbers.reshape(group_size, -1)
    scales, zeros = range_grid(blocks, 8, dtype)
    stored = codes(blocks, scales.astype(np.float32), zeros.astype(np.float32), 8)
    return EightBit(stored.reshape(-1), scales, zeros)


def range_grid(blocks: F32, bits: int, dtype: np.dtype[Any]) -> tuple[Array, Array]:
    """Scale and real zero of each column of g × G blocks by its range, in float32, then in the stored dtype."""
    low, high = blocks.min(axis=0), blocks.max(axis=0)
    with np.errstate(over="ignore", under="ignore", divide="ignore", invalid="ignore"):  # each case is handled below
        scale = ((high - low) / np.float32(2**bits - 1)).astype(dtype)
        zero = (-low / scale.astype(np.float32)).astype(dtype)
        ranged = (scale > 0) & np.isfinite(zero)
        scale, zero = np.where(ranged, scale, dtype.type(1)), np.where(ranged, zero, (-low).astype(dtype))
    if not (np.isfinite(scale).all() and np.isfinite(zero).all()):
        raise ArgumentError("range of a group", f"{low.min()} to {high.max()}", f"what a {dtype} scale can hold")
    return scale, zero


def above_zero(scales: EightBit) -> EightBit:
    """Scales with the codes that decode to 0, or through rounding to less, replaced by the next code: no division by
    0."""
    while not (low := decode(scales) > 0).all():
        scales = EightBit(scales.codes + ~low, scales.scales, scales.zeros)
    return scales


def check_plain(name: str, numbers: Array) -> None:
    """Refuse anything but a vector of finite float32 or float16 numbers."""
    check_choice(f"dtype of {name}", str(getattr(numbers, "dtype", None)), SCALE_DTYPES)
    check_array(name, numbers, numbers.dtype, (None,))
    check_finite(name, numbers)
