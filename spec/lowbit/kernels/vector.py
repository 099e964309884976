r"""Vector registers: the instructions of QIGen's Table 1 on numpy arrays of L lanes.

A kernel is fast because one instruction works on a whole register of numbers. To describe a kernel without naming a
processor, we need words for such instructions, and an executable meaning for each word. This chapter gives both: a
register is a numpy array of :math:`L` *lanes*, 32 bits each, and each word is a function of registers. Programs in
these words (those of the chapter `microkernel`, the kernels that a backend generates) can be followed and checked on
any machine.

===================== ============================ ==========================================
Table 1               word here                    meaning
===================== ============================ ==========================================
load(address)         `load_int`, `load_float`     L neighbouring elements of memory
store(address, a)     `store`                      writes L neighbouring elements
broadcast(a)          `broadcast_int`, `…_float`   every lane is :math:`a`
fmadd(a, b, c)        `fmadd`                      :math:`a \cdot b + c`
reduce_add(a)         `reduce_add`                 the sum of the lanes
srli(a, i)            ``srli``                     :math:`\lfloor a / 2^i \rfloor`
and(a, m)             ``and``                      bitwise and
cvt_int_float(a)      `cvt_int_float`              the integer as float32
===================== ============================ ==========================================

The table omits types. Here a register holds either unsigned integers (uint32) or float32, never both, so the words that
read memory say which. Some words are added: ``slli`` and ``or``, because a 3-bit code may straddle two words; ``add``,
``multiply`` and ``add_int``, which are parts of `fmadd`; ``prefetch`` and ``prefetch_once``, which change no value; and
those of two further chapters: `vector_integer`, for several small numbers in a lane and for tables, and
`vector_elementwise`, for norms, activations and attention. A word for which numpy has a function means that
function.

Each word is written in numpy's functions alone, and numpy lets another class stand in for its arrays. So the same
definitions compute on numbers, one value at a time, and on symbols, for all values at once; proofs about kernels use
the latter.

Source: QIGen §2, table 1; errata Q5.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from lowbit.arrays import F32, U32
from lowbit.kernels.vector_elementwise import add_neighbours, as_int, maximum
from lowbit.kernels.vector_integer import (
    add_pairs,
    and_or,
    as_float,
    cvt_int_subnormal,
    cvt_signed_float,
    dot2,
    dot4,
    dot4_pairs,
    load_byte,
    load_half,
    lookup_bytes,
    permute,
    permute_pair,
    select,
    srai,
)
from lowbit.quantization.bfp_dot import add_rounded_once

# **Memory.** An address is a view of the L elements that begin there. A register holds a copy, so a later write to
# memory does not change it.


def load_int(address: U32) -> U32:
    """The L words at an address.

    >>> load_int(np.array([7, 8], np.uint32))
    array([7, 8], dtype=uint32)

    Source: QIGen table 1, load.
    """
    return address.view(np.uint32).copy()


def load_float(address: F32) -> F32:
    """The L float32 numbers at an address; their 32 bits are taken unchanged.

    Source: QIGen table 1, load.
    """
    return address.view(np.float32).copy()


def store(address: F32, a: F32) -> None:
    """Write the lanes to an address.

    Source: QIGen table 1, store.
    """
    address.view(np.float32)[:] = a


def broadcast_int(a: np.uint32, lanes: int) -> U32:
    """Every lane is this integer.

    >>> broadcast_int(np.uint32(15), lanes=4)
    array([15, 15, 15, 15], dtype=uint32)

    Source: QIGen table 1, broadcast.
    """
    return np.repeat(a, lanes)


def broadcast_float(a: np.float32, lanes: int) -> F32:
    """Every lane is this number.

    Source: QIGen table 1, broadcast.
    """
    return np.repeat(a, lanes)


# **Integers.** Lanes are unsigned: shifts move in zeros and lose the bits moved out, and sums wrap at 32 bits.


def cvt_int_float(a: U32) -> F32:
    """Each lane, below :math:`2^{31}`, as float32; exact for a code at any bit position, because it has at most 8 bits.

    Source: QIGen table 1, cvt_int_float.
    """
    return a.astype(np.float32)


# **Floats.** A processor's `fmadd` rounds once, after the sum; without such an instruction, a product and a sum round
# twice. Both are correct but differ in the last bit. An instruction set declares which it has.


def fmadd(a: F32, b: F32, c: F32) -> F32:
    """``a * b + c`` rounded once to float32, which numpy does not offer.

    The product is exact in float64. The sum is not always exact, so `lowbit.quantization.bfp_dot.add_rounded_once`
    computes it.

    >>> a, c = np.float32([1 + 2**-12]), np.float32([2.0**-60])
    >>> fmadd(a, a, c) == np.float32(1 + 2**-11 + 2**-23)  # the exact sum lies just above the midpoint
    array([ True])
    >>> (a.astype(np.float64) * a + c).astype(np.float32) == np.float32(1 + 2**-11)  # two roundings lose it
    array([ True])

    An array that is not numpy's provides this function itself, as it provides numpy's other functions by numpy's
    protocols.

    Source: QIGen table 1, fmadd; S. Boldo and G. Melquiond, Emulation of FMA and correctly rounded sums, 2008.
    """
    fused: Callable[[F32, F32], F32] | None = getattr(a, "fused_multiply_add", None)
    if fused is not None:
        return fused(b, c)
    return add_rounded_once(c, a.astype(np.float64) * b.astype(np.float64))


def multiply_then_add(a: F32, b: F32, c: F32) -> F32:
    """``a * b + c`` rounded twice: `fmadd` on a processor without such an instruction."""
    return a * b + c


def reduce_add(a: F32) -> F32:
    """The sum of the lanes, in every lane, by halving: the upper half is added to the lower until one lane is left.

    No algorithm needs it, because lanes are output columns and are never summed (errata Q5).

    >>> reduce_add(np.array([1, 2, 3, 4], np.float32))
    array([10., 10., 10., 10.], dtype=float32)

    Source: QIGen table 1, reduce_add; errata Q5.
    """
    rest = a
    while len(rest) > 1:
        half = (len(rest) + 1) // 2
        lower, upper = rest[:half].copy(), rest[half:]
        lower[: len(upper)] += upper
        rest = lower
    return np.repeat(rest, len(a))


# **The vocabulary.** The instructions of programs, with the kinds of operands and results. Generators write in
# `VOCABULARY`, an instruction set must provide it, and `lowbit.kernels.interpreter` runs it; so one program has one
# meaning everywhere.

Kind = Literal["int", "float", "none"]
Operand = Literal["int", "float", "address", "scalar", "count"]


@dataclass(frozen=True)
class Word:
    """One instruction: the kind of its result, its operands, and its meaning.

    Attributes:
        gives: the kind of its result; ``none`` for a word without a result.
        takes: for each operand `int` or `float`, a register; `address`, an address in memory; `scalar`, one number from
            a constant or an address; `count`, a constant number of bits.
        meaning: in a few words.
        function: the same as a function; ``None`` if no value changes.
        lane_bytes: bytes of a lane in memory, for a word that reads or writes L lanes.
    """

    gives: Kind
    takes: tuple[Operand, ...]
    meaning: str
    function: Callable[..., Any] | None
    lane_bytes: int = 4


VOCABULARY: Mapping[str, Word] = MappingProxyType(
    {
        "load_int": Word("int", ("address",), "the words from this address on, one a lane", load_int),
        "load_float": Word("float", ("address",), "the float32 from this address on, one a lane", load_float),
        "store": Word("none", ("address", "float"), "writes the register to this address", store),
        "load_half": Word("float", ("address",), "the float16 from this address on, as float32", load_half, 2),
        "load_byte": Word("int", ("address",), "the bytes from this address on, one a lane", load_byte, 1),
        "broadcast_int": Word("int", ("scalar",), "every lane is this integer", broadcast_int),
        "broadcast_float": Word("float", ("scalar",), "every lane is this float32", broadcast_float),
        "fmadd": Word("float", ("float", "float", "float"), "a * b + c", fmadd),
        "add": Word("float", ("float", "float"), "a + b", np.add),
        "multiply": Word("float", ("float", "float"), "a * b", np.multiply),
        "divide": Word("float", ("float", "float"), "a / b", np.divide),
        "maximum": Word("float", ("float", "float"), "a where it is greater, else b", maximum),
        "add_neighbours": Word(
            "float", ("float", "float"), "sums of neighbouring lanes, of a and then b", add_neighbours
        ),
        "permute": Word("float", ("float", "int"), "element b mod L of the table a", permute),
        "permute_pair": Word("float", ("float", "int", "float"), "element b mod 2L of the table a, c", permute_pair),
        "srli": Word("int", ("int", "count"), "a >> i, zeros moved in", np.right_shift),
        "slli": Word("int", ("int", "count"), "a << i, zeros moved in", np.left_shift),
        "and": Word("int", ("int", "int"), "bitwise and", np.bitwise_and),
        "or": Word("int", ("int", "int"), "bitwise or", np.bitwise_or),
        "and_or": Word("int", ("int", "int", "int"), "a & b | c", and_or),
        "select": Word("int", ("int", "int", "int"), "a & b | ~a & c", select),
        "add_int": Word("int", ("int", "int"), "a + b", np.add),
        "subtract_int": Word("int", ("int", "int"), "a - b", np.subtract),
        "add_neighbours_int": Word("int", ("int", "int"), "the same of integers", add_neighbours),
        "dot4": Word("int", ("int", "int", "int"), "a + four products of bytes of b, unsigned, and c, signed", dot4),
        "dot4_pairs": Word("int", ("int", "int"), "pairs of products of bytes, saturated to 16 bits", dot4_pairs),
        "add_pairs": Word("int", ("int", "int"), "a + b in halves of 16 bits", add_pairs),
        "dot2": Word("int", ("int", "int", "int"), "a + two products of 16-bit numbers of b and c", dot2),
        "srai": Word("int", ("int", "count"), "a >> i, the sign moved in", srai),
        "lookup_bytes": Word("int", ("int", "int"), "for each byte of b the byte of the table a", lookup_bytes),
        "as_int": Word("int", ("float",), "the same bits", as_int),
        "as_float": Word("float", ("int",), "the same bits", as_float),
        "cvt_int_float": Word("float", ("int",), "the integer, below 2**31, as float32", cvt_int_float),
        "cvt_int_subnormal": Word("float", ("int",), "the integer, below 2**24, times 2**-149", cvt_int_subnormal),
        "cvt_signed_float": Word("float", ("int",), "the signed integer as float32", cvt_signed_float),
        "reduce_add": Word("float", ("float",), "the sum of the lanes, in every lane", reduce_add),
        "prefetch": Word("none", ("address",), "asks for this address; no effect on any value", None),
        "prefetch_once": Word("none", ("address",), "the same for what is used once, and need not be kept", None),
    }
)

UNUSED = ("reduce_add",)
"""Words of Table 1 that no kernel needs; an instruction set need not provide them."""
