r"""Vector registers, continued: norms, activations and attention.

A decode step is more than products with weights. It also has norms, exponentials, probabilities that sum to 1, and dot
products whose sum runs *along* a register, not across several. Six more words are enough for these; the chapter
`vector` adds them to the vocabulary.

======================= =====================================================================
word                    meaning
======================= =====================================================================
``divide``              :math:`a / b`
`maximum`               :math:`a` where it is greater, else :math:`b`
`as_int`                the 32 bits of a float taken as an integer
``subtract_int``        :math:`a - b`
`add_neighbours`        the sums of neighbouring lanes, those of a and then those of b
``add_neighbours_int``  the same of integers
======================= =====================================================================

**Not a number.** `maximum` compares as processors do: a comparison with NaN is false, so the result is the
second operand. The order of the operands therefore matters in a program.

**Sums along a register.** Let :math:`L` registers hold :math:`L` numbers each, to be summed in each register.
`add_neighbours` of the first and the second is a register that holds both, each half as long, and so on: after
:math:`\log_2 L` levels, :math:`L - 1` words in all, one register holds the :math:`L` sums in order. That is about one
addition per register, whereas summing a single register takes :math:`\log_2 L` additions and leaves a register with one
sum.

Source: the instructions are those of x86 (DIVPS, MAXPS, PSUBD, HADDPS, VPERMT2PS).
"""

from typing import TypeVar

import numpy as np

from lowbit.arrays import F32, U32

Register = TypeVar("Register", F32, U32)


def maximum(a: F32, b: F32) -> F32:
    """``a`` where it is greater than ``b``, else ``b``, also if one of them is a NaN.

    >>> maximum(np.array([1, 5, np.nan], np.float32), np.array([2, 4, 6], np.float32))
    array([2., 5., 6.], dtype=float32)
    """
    return np.where(a > b, a, b)


def as_int(a: F32) -> U32:
    """The bits of each lane, taken as an integer.

    >>> as_int(np.array([1.0, -0.0], np.float32)).tolist()
    [1065353216, 2147483648]
    """
    return a.view(np.uint32).copy()


def add_neighbours(a: Register, b: Register) -> Register:
    """The sums of lanes 0 and 1, 2 and 3, … of `a`, followed by those of `b`; the number of lanes is even.

    Sums of integers wrap at 32 bits.

    >>> add_neighbours(np.array([1, 2, 3, 4], np.float32), np.array([10, 20, 30, 40], np.float32))
    array([ 3.,  7., 30., 70.], dtype=float32)
    """
    both = np.concatenate([a, b])
    sums: Register = both[::2] + both[1::2]
    return sums
