"""When two results count as the same."""

import numpy as np

from lowbit.tensor_formats.stored import Stored, stored
from lowbit_conformance.isolation.equal_bits import same

D, CODES, SUMS = slice(0, 4), slice(4, 260), slice(260, 292)
"""The bytes of a block of Q8_K."""


def block(scale: float = 0.0, code: int = 0, sums: int = 0) -> Stored:
    octets = np.zeros((1, 292), np.uint8)
    octets[0, D] = np.array([scale], np.float32).view(np.uint8)
    octets[0, CODES] = code
    octets[0, SUMS] = np.full(16, sums, "<i2").view(np.uint8)
    return stored("q8_k", 256, 1, {"blocks": octets})


def test_sums_of_a_block_of_zeros_are_not_compared() -> None:
    """ggml leaves them as they were. Codes and scales are compared."""
    assert same(block(), block(sums=77))
    assert not same(block(), block(code=1, sums=16))
    assert not same(block(scale=1.0, code=1, sums=16), block(scale=2.0, code=1, sums=16))


def test_other_stored_results_are_compared_whole() -> None:
    octets = np.zeros((1, 36), np.uint8)
    assert same(stored("q8_1", 32, 1, {"blocks": octets}), stored("q8_1", 32, 1, {"blocks": octets.copy()}))
    assert not same(stored("q8_1", 32, 1, {"blocks": octets}), stored("q8_1", 32, 1, {"blocks": octets + 1}))
