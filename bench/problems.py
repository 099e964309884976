"""What is measured: shapes, widths and groups, and matrices for them."""

from dataclasses import dataclass

import numpy as np

from lowbit.arrays import F32
from lowbit.quantization.affine import QuantizedMatrix
from lowbit.quantization.packing import WORD_BITS

SMOLLM2 = ((576, 576), (576, 192), (576, 1536), (1536, 576))  # the linear layers of SmolLM2-135M
LARGE = ((4096, 4096), (4096, 11008))  # those of a 7-billion-parameter Llama


@dataclass(frozen=True)
class Problem:
    """One product: T rows of activations (0: a single vector) times K × N codes of `bits` bits."""

    rows: int
    columns: int
    bits: int = 4
    group_size: int = 128
    vectors: int = 0

    @property
    def id(self) -> str:
        """The heading under which the backends are compared."""
        operation = f"qgemm {self.vectors}x" if self.vectors else "qgemv "
        return f"{operation}{self.rows}x{self.columns} {self.bits} bits, groups of {self.group_size}"

    @property
    def large(self) -> bool:
        return (self.rows, self.columns) in LARGE

    def matrix(self) -> QuantizedMatrix:
        """Random codes with small scales; speed does not depend on their values."""
        rng = np.random.default_rng(self.rows * self.columns + self.bits)
        words = rng.integers(0, 2**32, (self.rows * self.bits // WORD_BITS, self.columns), dtype=np.uint32)
        groups = -(-self.rows // self.group_size)
        scales = rng.uniform(0.001, 0.002, (groups, self.columns)).astype(np.float32)
        zeros = (-8 * scales).astype(np.float32)
        return QuantizedMatrix(words, scales, zeros, self.bits, self.rows, self.group_size, "minimum")

    def activations(self) -> F32:
        shape = (self.vectors, self.rows) if self.vectors else (self.rows,)
        return np.random.default_rng(1).normal(size=shape).astype(np.float32)


PROBLEMS = (
    *(Problem(rows, columns, group_size=64) for rows, columns in SMOLLM2),
    *(Problem(rows, columns) for rows, columns in LARGE),
    *(Problem(4096, 11008, bits) for bits in (3, 2)),
    Problem(576, 1536, group_size=64, vectors=16),
    Problem(4096, 4096, vectors=16),
)
