"""The words between two linear layers: each against Python's own numbers, on random and on extreme bits."""

import struct

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from lowbit.arrays import F32, U32
from lowbit.kernels import vector_elementwise

WORDS = hnp.arrays(np.uint32, 4, elements=st.sampled_from((0, 1, 2**31, 2**32 - 1)) | st.integers(0, 2**32 - 1))
EXTREMES = st.sampled_from((0.0, -0.0, 2.0**-149, -(2.0**-126), 3.4e38, -3.4e38))
REALS = hnp.arrays(np.float32, 4, elements=EXTREMES | st.floats(width=32))


def bits(number: float) -> bytes:
    return struct.pack("<f", number)


@given(REALS, REALS)
def test_the_greater(a: F32, b: F32) -> None:
    """One of the operands, bit by bit; the second where the first is not greater, NaN and equal zeros too."""
    pairs = [(float(x), float(y)) for x, y in zip(a, b, strict=True)]
    greater = vector_elementwise.maximum(a, b)
    assert [bits(float(lane)) for lane in greater] == [bits(x if x > y else y) for x, y in pairs]


@given(WORDS, WORDS)
def test_integers(a: U32, b: U32) -> None:
    """Sums of neighbours wrap at 32 bits; no bit changes where a float is taken as an integer."""
    x, y = a.tolist(), b.tolist()
    sums = [(x[0] + x[1]) % 2**32, (x[2] + x[3]) % 2**32, (y[0] + y[1]) % 2**32, (y[2] + y[3]) % 2**32]
    assert vector_elementwise.add_neighbours(a, b).tolist() == sums
    taken = vector_elementwise.as_int(a.view(np.float32))
    assert taken.tolist() == x and not np.shares_memory(taken, a)


FINITE = hnp.arrays(np.float32, 4, elements=st.floats(-(2.0**60), 2.0**60, width=32))


@given(FINITE, FINITE)
def test_sums_of_neighbours(a: F32, b: F32) -> None:
    """Float64 holds enough of a sum of two float32 that rounding it again gives the nearest float32."""
    both = [*map(float, a), *map(float, b)]
    sums = [np.float32(both[n] + both[n + 1]) for n in range(0, 8, 2)]
    np.testing.assert_array_equal(vector_elementwise.add_neighbours(a, b), np.array(sums, np.float32))


def test_a_tree_of_sums_of_neighbours_sums_as_many_registers_as_there_are_lanes() -> None:
    """Four registers of four lanes become one register of four sums, in order."""
    registers = [np.arange(4 * n, 4 * n + 4, dtype=np.float32) for n in range(4)]
    first, second = (vector_elementwise.add_neighbours(*registers[n : n + 2]) for n in (0, 2))
    assert vector_elementwise.add_neighbours(first, second).tolist() == [
        float(register.sum()) for register in registers
    ]
