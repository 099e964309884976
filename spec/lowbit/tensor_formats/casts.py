"""What casts to several formats share: quotients in float32, roundings to integers and to float16, and named choices.

Kernels in use compute a cast in float32. A block of zeros has the scale 0 and codes of 0, so a quotient by 0 is 0 here.
Numbers so small that a quotient is infinite are refused: infinity times 0 is not a code.
"""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from typing import Literal

import numpy as np
import numpy.typing as npt

from lowbit.arrays import F32, Array
from lowbit.errors import ArgumentError
from lowbit.numbers.floats import FLOATS, Name, rounded
from lowbit.quantization.bfp_dot import add_rounded_once
from lowbit.tensor_formats.table import Encode

Ties = Literal["away", "even"]
Integers = npt.NDArray[np.int64]
TIES: tuple[Ties, ...] = ("away", "even")


def nearest(numbers: F32, ties: Ties) -> Integers:
    """The nearest integers."""
    if ties == "even":
        return np.rint(numbers).astype(np.int64)
    return np.copysign(np.floor(np.abs(numbers.astype(np.float64)) + 0.5), numbers).astype(np.int64)


def inverse(d: F32) -> F32:
    """1/d in float32, and 0 for 0; raises as `over`."""
    return over(np.float32(1), d)


def over(above: F32 | np.float32, below: F32) -> F32:
    """A quotient in float32, and 0 where the divisor is 0.

    Raises:
        ArgumentError: a quotient is infinite.
    """
    divisor = np.where(below == 0, np.float32(1), below)
    with np.errstate(over="ignore"):
        found = np.where(below == 0, np.float32(0), above / divisor).astype(np.float32)
    if not np.isfinite(found).all():
        raise ArgumentError("x", "a block of numbers so small that a quotient is infinite", "larger numbers, or zeros")
    return found


def kept_in(name: Name, numbers: F32) -> Array:
    """Numbers rounded once to the type in which a format stores them.

    Raises:
        ArgumentError: a number is too large, or NaN.
    """
    found = rounded(numbers.astype(np.float64), name)
    if not np.isfinite(found.astype(np.float64)).all():
        given = f"a scale or minimum of {np.abs(numbers).max():.6g}"
        raise ArgumentError("x", given, f"at most {FLOATS[name].largest:.6g}, that of {name}")
    return found


def stepped(name: Name, numbers: Array) -> F32:
    """Numbers rounded once to the type of a cast's arithmetic, as float32."""
    found: F32 = rounded(numbers.astype(np.float64), name).astype(np.float32)
    return found


def in_groups(lines: F32, size: int) -> F32:
    """Lines of numbers as lines × groups × `size`; a short last group repeats its last number."""
    return np.pad(lines, ((0, 0), (0, -lines.shape[1] % size)), "edge").reshape(len(lines), -1, size)


def multiply_add(x: F32, factor: F32, added: F32 | np.float32, *, fused: bool) -> F32:
    """``x * factor + added`` in float32, with two roundings, or with one if fused."""
    if fused:
        return add_rounded_once(added, x.astype(np.float64) * factor)
    return x * factor + added


def choices(encode: Callable[..., dict[str, Array]], *sets: tuple[str, ...]) -> Mapping[str, Encode]:
    """One `Encode` for each combination of choices."""
    return {", ".join(each): partial(encode, *each) for each in product(*sets)}


def contractions(encode: Callable[..., dict[str, Array]]) -> Mapping[str, Encode]:
    """A product and sum with two roundings, as written in the source, and with one, as compilers may fuse them."""
    return {"two roundings": partial(encode, False), "fused": partial(encode, True)}
