"""What any backend that declares `linear.qgemm_bfp` must do: cast and product in one call are the two one by one."""

from collections.abc import Iterator

import numpy as np

from lowbit.arrays import F32
from lowbit.backend import Backend
from lowbit.errors import NotDeclaredError
from lowbit.linear.integer import ACTIVATIONS
from lowbit.quantization.affine import CONVENTIONS, QuantizedMatrix, quantize
from lowbit.quantization.bfp import cast


def activations() -> Iterator[F32]:
    """Float32, T × 96, where a cast goes wrong: powers of two, ties, saturation, zeros, outliers, subnormal numbers."""
    rng = np.random.default_rng(5)
    x = rng.standard_normal((5, 96)).astype(np.float32)
    yield x
    yield x[:1] * np.float32(2.0**-140)
    yield -np.exp2(np.arange(96, dtype=np.float32))[None]
    yield np.float32(2.0**-149) * rng.integers(-3, 4, (2, 96)).astype(np.float32)
    yield x * np.where(rng.random(x.shape) < 0.03, np.float32(1000), np.float32(1))
    yield (rng.integers(-255, 256, (3, 96)) / np.float32(2)).astype(np.float32)
    yield np.full((2, 96), 255.9, np.float32) * rng.choice((-1, 1), (2, 96)).astype(np.float32)
    yield np.where(np.arange(96) // 32 == 1, x[:2], np.float32(-0.0)).astype(np.float32)


def matrices() -> Iterator[QuantizedMatrix]:
    """96 × 37, all widths and both conventions; the second group of two is short, or blocks straddle groups."""
    weights = np.random.default_rng(6).standard_normal((96, 37)).astype(np.float32)
    for bits in (2, 3, 4, 8):
        for convention in CONVENTIONS:
            for group_size in (32, 64, 96):
                yield quantize(weights, bits=bits, group_size=group_size, convention=convention)


def assert_cast_is_composition(backend: Backend) -> int:
    """``qgemm_cast(x)`` has the bits of ``qgemm_bfp(cast(x, ACTIVATIONS))``, with and without out; of how many calls.

    Raises:
        AssertionError: it has not, or the backend declares none of the matrices.
    """
    tried = 0
    for matrix in matrices():
        try:
            prepared = backend.prepare(matrix)
            prepared.qgemm_bfp(cast(np.zeros((1, 96), np.float32), ACTIVATIONS))
        except NotDeclaredError:
            continue
        for number, x in enumerate(activations()):
            apart = prepared.qgemm_bfp(cast(x, ACTIVATIONS))
            before, out = x.copy(), np.full(apart.shape, np.nan, np.float32)
            assert prepared.qgemm_cast(x, out) is out
            where = f"{backend.name}, {matrix.bits} bits, groups of {matrix.group_size}, activations {number}"
            for together in (out, prepared.qgemm_cast(x)):
                different = np.flatnonzero(together.view(np.uint32) != apart.view(np.uint32))
                assert not len(different), f"{where}: {len(different)} of {apart.size} elements have other bits"
            assert before.tobytes() == x.tobytes(), f"{where}: x was written"
            tried += 1
    assert tried, f"{backend.name} declares linear.qgemm_bfp for none of these matrices"
    return tried
