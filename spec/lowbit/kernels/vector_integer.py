r"""Vector registers, continued: small numbers in the lanes.

Table 1 has one number in a lane. Kernels that run at the speed of memory need more from an instruction, and processors
provide it: four bytes of a lane multiplied and added at once, a table of sixteen numbers looked up by sixteen lanes,
scales in half the bytes. This chapter has the words for these; the chapter `vector` adds them to the vocabulary.

===================== =====================================================================
word                  meaning
===================== =====================================================================
`load_half`           L neighbouring float16, as float32
`load_byte`           L neighbouring bytes, as integers
`permute`             each lane is an element of a table of L, by the low bits of an index
`permute_pair`        the same of a table of 2L in two registers
`as_float`            the 32 bits taken as a float32
`cvt_int_subnormal`   an integer below :math:`2^{24}` times :math:`2^{-149}`: the same bits
`and_or`              :math:`(a \wedge m) \vee o`
`select`              :math:`(m \wedge a) \vee (\neg m \wedge b)`
`dot4`                :math:`c + \sum_{i<4} a_i b_i`, bytes: :math:`a_i` unsigned, :math:`b_i` signed
`dot4_pairs`          two sums of two such products, *saturated* to 16 bits, side by side
`add_pairs`           16-bit numbers added
`dot2`                :math:`c + \sum_{i<2} a_i b_i`, signed 16-bit numbers
`cvt_signed_float`    a signed integer as float32
`srai`                a signed integer shifted right, its sign moved in
`lookup_bytes`        each byte is one of sixteen bytes of a table, by the low bits of an index
===================== =====================================================================

**Bytes in a lane** are counted from the least significant one. A register of integers is an array of uint32; each word
defines what the bits mean, as on a processor.

**Saturation.** `dot4_pairs` is the oldest of the x86 instructions that multiply bytes, and it is dangerous: a sum of
two products above 32767 silently becomes 32767. `dot4` and `dot2` add into 32 bits and wrap only there. The chapter
`integer` derives which codes are safe in which instruction.

Source: the instructions are those of x86 (PMADDUBSW, PMADDWD, VPDPBUSD, VPERMPS, VPERMT2PS, VCVTPH2PS, VPTERNLOGD,
PSRAD, PSHUFB).
"""

import numpy as np
import numpy.typing as npt

from lowbit.arrays import F32, I64, U32


def load_half(address: U32) -> F32:
    """The float16 numbers at an address, two in each element, as float32; exact.

    >>> load_half(np.array([1.0, -2.5], np.float16).view(np.uint32))
    array([ 1. , -2.5], dtype=float32)
    """
    return address.view(np.float16).astype(np.float32)


def load_byte(address: U32) -> U32:
    """The bytes at an address, four in each element, as integers.

    >>> load_byte(np.array([0x04030201], np.uint32))
    array([1, 2, 3, 4], dtype=uint32)
    """
    return address.view(np.uint8).astype(np.uint32)


def permute(table: F32, index: U32) -> F32:
    """Each lane is the element of the table at its index, modulo the number of lanes, a power of two.

    >>> permute(np.array([10, 11, 12, 13], np.float32), np.array([3, 0, 0, 6], np.uint32))
    array([13., 10., 10., 12.], dtype=float32)
    """
    return np.take_along_axis(table, index % np.uint32(len(table)), axis=0)


def permute_pair(first: F32, index: U32, second: F32) -> F32:
    """Each lane is the element of two registers, the second after the first, at its index modulo their length.

    >>> tables = np.array([[10, 11], [12, 13]], np.float32)
    >>> permute_pair(tables[0], np.array([3, 4], np.uint32), tables[1])
    array([13., 10.], dtype=float32)
    """
    return permute(np.concatenate([first, second]), index)


def as_float(a: U32) -> F32:
    """The bits of each lane, taken as a float32."""
    return a.view(np.float32).copy()


def cvt_int_subnormal(a: U32) -> F32:
    r"""Each lane, below :math:`2^{24}`, times :math:`2^{-149}`, the least positive float32; exact.

    The bits of such a float32 are the integer, so this costs no instruction:

    >>> codes = np.array([1, 15, 2**23, 2**24 - 1], np.uint32)
    >>> (cvt_int_subnormal(codes) == codes.view(np.float32)).all()
    np.True_
    """
    return a.astype(np.float32) * np.float32(2.0**-149)


def and_or(a: U32, m: U32, o: U32) -> U32:
    """``(a & m) | o``."""
    return a & m | o


def select(m: U32, a: U32, b: U32) -> U32:
    """The bits of `a` where the mask `m` has ones, and of `b` elsewhere.

    >>> select(np.array([0xF0], np.uint32), np.array([0xAB], np.uint32), np.array([0xCD], np.uint32)) == 0xAD
    array([ True])
    """
    return b ^ m & (a ^ b)  # where the mask has a one, b cancels


def dot4(c: U32, a: U32, b: U32) -> U32:
    """``c`` plus four products of bytes, those of `a` unsigned and those of `b` signed; wraps at 32 bits.

    >>> a, b = np.array([[1, 2, 3, 255]], np.uint8), np.array([[1, 10, -1, -128]], np.int8)
    >>> dot4(np.array([1000], np.uint32), a.view(np.uint32)[0], b.view(np.uint32)[0]).view(np.int32)
    array([-31622], dtype=int32)
    """
    products = _bytes(a, np.uint8) * _bytes(b, np.int8)
    total: U32 = c + products.sum(axis=-1).astype(np.int32).view(np.uint32)
    return total


def dot4_pairs(a: U32, b: U32) -> U32:
    """Two signed 16-bit numbers per lane: the sums of products of bytes 0 and 1, and of 2 and 3, saturated.

    >>> a, b = np.array([255, 255, 1, 2], np.uint8), np.array([127, 127, 3, -4], np.int8)
    >>> dot4_pairs(a.view(np.uint32), b.view(np.uint32)).view(np.int16)
    array([32767,    -5], dtype=int16)
    """
    products = _bytes(a, np.uint8) * _bytes(b, np.int8)
    sums = products.reshape(-1, 2, 2).sum(axis=-1)
    pairs: U32 = np.clip(sums, -(2**15), 2**15 - 1).astype(np.int16).view(np.uint32)
    return pairs[:, 0]


def add_pairs(a: U32, b: U32) -> U32:
    """The two 16-bit numbers of each lane added, each wrapping separately."""
    return (a.view(np.uint16) + b.view(np.uint16)).view(np.uint32)


def dot2(c: U32, a: U32, b: U32) -> U32:
    """``c`` plus two products of signed 16-bit numbers; wraps at 32 bits.

    >>> pair = np.array([300, -2], np.int16).view(np.uint32)
    >>> dot2(np.array([5], np.uint32), pair, np.array([100, 1], np.int16).view(np.uint32))
    array([30003], dtype=uint32)
    """
    products = a.view(np.int16).astype(np.int64) * b.view(np.int16).astype(np.int64)
    total: U32 = c + products.reshape(-1, 2).sum(axis=-1).astype(np.uint64).astype(np.uint32)
    return total


def cvt_signed_float(a: U32) -> F32:
    """Each lane, a signed integer, as float32; exact below 2^24, else rounded to nearest, ties to even."""
    return a.view(np.int32).astype(np.float32)


def srai(a: U32, i: int) -> U32:
    """Each lane, a signed integer, shifted right by `i` bits; copies of its sign are moved in.

    >>> srai(np.array([-64], np.int32).view(np.uint32), 4).view(np.int32)
    array([-4], dtype=int32)
    """
    return (a.view(np.int32) >> np.int32(i)).view(np.uint32)


def lookup_bytes(table: U32, index: U32) -> U32:
    """Each byte is the byte of the table at its index: four look-ups per lane.

    A processor looks up a byte among the sixteen bytes of its own four lanes, so a table is repeated every four lanes.

    >>> table = np.arange(100, 116, dtype=np.uint8).view(np.uint32)
    >>> lookup_bytes(table, np.array([0x0F020100] * 4, np.uint32)).view(np.uint8)[:4]
    array([100, 101, 102, 115], dtype=uint8)

    Args:
        table: sixteen bytes in every four lanes.
        index: with the same number of lanes, a multiple of four; its bytes count modulo 16, and a byte above 127 gives
            0.
    """
    tables, indices = (each.view(np.uint8).reshape(-1, 16) for each in (table, index))
    found = np.where(indices < 128, np.take_along_axis(tables, indices & np.uint8(15), axis=1), np.uint8(0))
    return found.reshape(-1).view(np.uint32)


def _bytes(a: U32, dtype: npt.DTypeLike) -> I64:
    """The four bytes of each lane, as numbers that do not overflow."""
    return a.view(dtype).reshape(-1, 4).astype(np.int64)
