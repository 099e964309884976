r"""HQQ as its authors publish it: the same method as in `hqq`, with other choices where the method leaves one.

The two chapters before this one depart from the authors' code in four ways. The option ``recipe`` of `hqq.quantize`
follows the authors, so that codes can be compared with those of the package ``hqq``:

==================== ============================ ===================================================================
choice               ruled                        the package ``hqq``
==================== ============================ ===================================================================
grid                 the scale s, of any size     :math:`1/s`, at most 20000; codes are :math:`\mathrm{rint}(w \cdot
                                                  (1/s) + z)`. 0.2.8: 1 for a range of at most 0.0001
which zero is kept   that of the least error      the last: the step that no longer lowers the error counts
penalty              grows by :math:`\kappa`      0.1.1: grows by :math:`\kappa`; 0.2.8: stays
codes are found      with s and z as stored       with s and z in float32, before they are rounded to what is stored
==================== ============================ ===================================================================

The solver of 0.1.1 is that of the first release, of December 2023. All arithmetic is float32 on a CPU. The authors
compute the mean of a group in an order that PyTorch chooses; here it is a sum in float64, rounded once. So zeros agree
up to the rounding of a sum, and codes agree except where a weight lies that close to a tie, at the last step or an
earlier one: for 384 matrices of 6144 weights each (Student's t; 2, 3, 4 and 8 bits, both axes, groups of 16 and 64), 5
codes of the 4.7 million that the two versions gave differed between the package and this chapter.

In float32 the choices matter little: often the solver stops because no code changes any more, and then the last zero is
the best. Where scales and zeros are stored in float16, it matters that codes are found first. Of the codes of 512 × 256
such weights in groups of 64, 0.05 % differed between the ruled way and the authors' at 2 bits, 0.3 % at 4 and 3.6 % at
8.

The bound on :math:`1/s` is there for float16. It makes the scale of a group at least 0.00005, and a group whose range
is smaller than that of all its codes does not use them all: with 8 bits it acts on ranges below 0.01275, which a group
of scales that are themselves quantised often has.

Source: the package hqq, versions 0.1.1 and 0.2.8, ``core/quantize.py`` and ``core/optimize.py``; errata H.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from lowbit.arrays import F32, Array
from lowbit.quantization.hqq_numbers import EightBit, Numbers
from lowbit.quantization.hqq_solver import Solver, shrink
from lowbit.quantization.packing import Codes

Recipe = Literal["ruled", "hqq-0.1.1", "hqq-0.2.8"]
RECIPES: tuple[Recipe, ...] = get_args(Recipe)

MOST_INVERSE = np.float32(2e4)
LEAST_RANGE = np.float32(1e-4)


@dataclass(frozen=True)
class Version:
    """The differences between the two versions.

    Attributes:
        growth: whether the penalty grows from step to step.
        guarded: whether a range of at most `LEAST_RANGE` has scale 1.
    """

    growth: bool
    guarded: bool


VERSIONS: dict[Recipe, Version] = {"hqq-0.1.1": Version(True, False), "hqq-0.2.8": Version(False, True)}


def inverse_grid(blocks: F32, bits: int, version: Version) -> tuple[F32, F32]:
    """``1/scale`` and the first zero of each column of g × G blocks, float32, G each.

    >>> inverse_grid(np.array([[0.0, 0.0], [7.5, 1e-5]], np.float32), 4, VERSIONS["hqq-0.2.8"])[0]
    array([2., 1.], dtype=float32)
    >>> inverse_grid(np.array([[0.0, 0.0], [7.5, 1e-5]], np.float32), 4, VERSIONS["hqq-0.1.1"])[0]
    array([2.e+00, 2.e+04], dtype=float32)
    """
    low = blocks.min(axis=0)
    ranges = blocks.max(axis=0) - low
    with np.errstate(divide="ignore", over="ignore"):  # an infinite inverse is bounded
        inverse = 1 / ranges * np.float32(2**bits - 1)  # as PyTorch divides a number by a tensor: two roundings
    if version.guarded:
        inverse[ranges <= LEAST_RANGE] = 1
    inverse = np.minimum(inverse, MOST_INVERSE)
    return inverse, -low * inverse


def codes_by_inverse(blocks: F32, inverse: F32, zeros: F32, bits: int) -> F32:
    """``clamp(rint(W * (1/scale) + zero))``, float32, two roundings before the last."""
    result: F32 = np.clip(np.rint(blocks * inverse + zeros), 0, 2**bits - 1)
    return result


def last_zeros(blocks: F32, inverse: F32, zeros: F32, bits: int, solver: Solver, version: Version) -> F32:
    """The zeros after the last step: the first that does not lower the mean error, or the last of all steps."""
    beta, best = solver.beta, np.inf
    for _ in range(solver.steps):
        q = codes_by_inverse(blocks, inverse, zeros, bits)
        d = blocks - (q - zeros) / inverse
        left = shrink(d.astype(np.float64), solver.p, beta).astype(np.float32)
        zeros = np.add.reduce(q - (blocks - left) * inverse, axis=0, dtype=np.float64) / len(blocks)
        zeros = zeros.astype(np.float32)
        error = float(np.mean(np.abs(d), dtype=np.float64))
        if not error < best:
            break
        best = error
        beta *= solver.kappa if version.growth else 1
    return zeros


def quantize_blocks(
    blocks: F32, bits: int, dtype: np.dtype[np.floating], meta_group: int | None, solver: Solver, recipe: Recipe
) -> tuple[Codes, Numbers, Numbers]:
    """Codes, scales and zeros of g × G blocks.

    Args:
        blocks: float32, g × G: each column a group.
        bits: 2, 3, 4 or 8.
        dtype: of the numbers stored as floats, float32 or float16.
        meta_group: of scales in 8 bits, a divisor of G; None for none.
        solver: the numbers of the method.
        recipe: ``hqq-0.1.1`` or ``hqq-0.2.8``.

    Returns:
        uint8 codes, g × G; scales and zeros of the G groups, as `HqqMatrix` has them.

    Source: Quantizer.quantize and HQQLinear.quantize of the package hqq; errata H.
    """
    version = VERSIONS[recipe]
    inverse, zeros = inverse_grid(blocks, bits, version)
    zeros = np.rint(zeros) if bits == 4 else zeros
    zeros = last_zeros(blocks, inverse, zeros, bits, solver, version)
    found = codes_by_inverse(blocks, inverse, zeros, bits).astype(np.uint8)
    scales = np.reciprocal(inverse)
    if meta_group is None:
        with np.errstate(over="ignore"):  # an infinite zero is refused by the matrix
            return found, scales.astype(dtype), zeros.astype(dtype)
    return found, _in_8_bits(scales, meta_group, dtype, version), _in_8_bits(zeros, len(zeros), dtype, version)


def _in_8_bits(numbers: F32, group_size: int, dtype: np.dtype[np.floating], version: Version) -> EightBit:
    """As `hqq_numbers.encode`, on the authors' grid and with codes computed before the grid is rounded."""
    blocks: Array = numbers.reshape(group_size, -1)
    inverse, zeros = inverse_grid(blocks, 8, version)
    found = codes_by_inverse(blocks, inverse, zeros, 8).astype(np.uint8)
    with np.errstate(over="ignore"):
        return EightBit(found.reshape(-1), np.reciprocal(inverse).astype(dtype), zeros.astype(dtype))
