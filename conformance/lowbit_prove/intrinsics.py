"""Intrinsics: what the instructions of x86 do to the lanes of registers.

A register is an array of lanes of 32 bits along the last axis, uint32 or float32; other axes are registers side by
side. A meaning is a function of registers in numpy's functions, so it computes on numbers and on symbols. It does what
the manual says of the instruction, in the manual's terms of bytes, halves and quarters of 128 bits, without reference
to the vocabulary. `lowbit_prove.probes` compares it with the processor.

Names are without their widths: ``_mm256_and_si256`` and ``_mm512_and_si512`` are both ``and_si``, of 8 and of 16 lanes.

Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from lowbit.kernels import vector
from lowbit_prove.operators import converted
from lowbit_prove.registers import Vector, made
from lowbit_prove.registers import scalar as scalar_type
from lowbit_prove.registers import vector as vector_type

Operand: TypeAlias = str
"""For x86 ``int``, ``float``, ``half``, ``quarter``, ``double``, ``pointer``, ``scalar int`` or ``scalar float``: half
and quarter are integer registers of half or a quarter of the length, double is pairs of lanes. For ARM the C++ name of
the type. For both ``constant``."""


@dataclass(frozen=True)
class Intrinsic:
    """One instruction.

    Attributes:
        takes: its operands; constants are literals, or `i`.
        gives: its result; ``none`` if it writes to memory.
        lane: bits of the numbers that it operates on; 0 if bits are only moved.
        meaning: a function of the number of lanes and of the operands.
    """

    takes: tuple[Operand, ...]
    gives: Operand
    lane: int
    meaning: Callable[..., Any]

    def applied(self, lanes: int, values: Sequence[Any]) -> Any:
        """The result for values from a body.

        Raises:
            UndecidedError: an operand of an ARM intrinsic has another type.
        """
        return self.meaning(lanes, *map(_taken, self.takes, values))


def _taken(kind: Operand, value: Any) -> Any:
    if (register := vector_type(kind)) is not None:
        return made(register, value)
    return converted(value, scalar_type(kind)) if kind.endswith("_t") else value


def register(kind: Operand, lanes: int) -> Vector:
    """An operand or a result as numbers in memory; `lanes` are those of x86's registers.

    >>> register("half", 8).lanes, register("int16x8_t", 0).lanes, register("scalar float", 8)
    (4, 8, Vector(dtype=dtype('float32'), lanes=1))
    """
    if (found := vector_type(kind)) is not None:
        return found
    if kind.endswith("_t"):
        return Vector(scalar_type(kind), 1)
    dtype = np.dtype(np.float32 if kind.endswith("float") or kind in ("double", "none") else np.uint32)
    return Vector(dtype, 1 if "scalar" in kind else {"half": lanes // 2, "quarter": 4}.get(kind, lanes))


def split(name: str) -> tuple[str, int]:
    """The name of an intrinsic without its widths, and the lanes of its registers.

    >>> split("_mm512_and_si512"), split("_mm_loadl_epi64")
    (('and_si', 16), ('loadl_epi64', 4))
    """
    found = re.fullmatch(r"_mm(|256|512)_(\w+)", name)
    assert found is not None, name
    return re.sub(r"si(128|256|512)", "si", found[2]), int(found[1] or 128) // 32


def _quarters(a: Any) -> Any:
    """Registers split into 128-bit parts, four lanes each."""
    return a.reshape(*a.shape[:-1], -1, 4)


def _as(a: Any, dtype: Any) -> Any:
    """The lanes viewed as shorter numbers."""
    return a.view(dtype)


def _repeated(L: int, a: Any) -> Any:
    return np.repeat(a[..., None], L, axis=-1)


def _constant(L: int, *numbers: int) -> Any:
    return np.array(numbers[::-1], np.uint32)


def _halves(L: int, number: int) -> Any:
    return np.full(L, number | number << 16, np.uint32)


def _lower(L: int, a: Any) -> Any:
    """The 64 bits at a pointer, followed by 64 zero bits."""
    found = a.view(np.uint32)[..., :2]
    return np.concatenate([found, np.zeros_like(found)], axis=-1)


def _horizontal(L: int, a: Any, b: Any) -> Any:
    """In each 128 bits: sums of neighbours of a, then of b."""
    first, second = _quarters(a), _quarters(b)
    parts = [first[..., 0] + first[..., 1], first[..., 2] + first[..., 3]]
    parts += [second[..., 0] + second[..., 1], second[..., 2] + second[..., 3]]
    return np.stack(parts, axis=-1).reshape(a.shape)


def _permuted_pairs(L: int, a: Any, places: int) -> Any:
    """Pairs of lanes, each selected among four by two bits."""
    pairs = a.reshape(*a.shape[:-1], 4, 2)
    return np.stack([pairs[..., places >> 2 * n & 3, :] for n in range(4)], axis=-2).reshape(a.shape)


def _chosen(a: Any, index: Any) -> Any:
    """Elements of a table along the last axis, by the low bits of an index."""
    return np.take_along_axis(a, index & np.uint32(a.shape[-1] - 1), axis=-1)


def _blended(L: int, a: Any, b: Any, mask: Any) -> Any:
    """Lanes of b where the highest bit of the mask is 1, else of a."""
    return np.where(mask.view(np.uint32) >> np.uint32(31) != np.uint32(0), b, a)


def _of_two(L: int, a: Any, index: Any, b: Any) -> Any:
    both = np.concatenate([a, b], axis=-1)
    if index.ndim < both.ndim:  # a constant with many registers
        index = np.broadcast_to(index, (*both.shape[:-1], index.shape[-1]))
    return _chosen(both, index)


def _ternary(L: int, a: Any, b: Any, c: Any, table: int) -> Any:
    """Bit n of the table is the result for a, b and c equal to the bits of n, a the highest."""
    ones, found = np.uint32(2**32 - 1), np.zeros_like(a)
    for n in range(8):
        if table >> n & 1:
            parts = [each if n >> bit & 1 else each ^ ones for each, bit in ((a, 2), (b, 1), (c, 0))]
            found = found | parts[0] & parts[1] & parts[2]
    return found


def _products_of_halves(L: int, a: Any, b: Any) -> Any:
    """Products of signed 16-bit numbers, added in pairs in 32 bits, which wrap."""
    products = _as(a, np.int16).astype(np.int32) * _as(b, np.int16).astype(np.int32)
    return (products[..., ::2] + products[..., 1::2]).view(np.uint32)


def _products_of_bytes(L: int, a: Any, b: Any) -> Any:
    """Products of unsigned and signed bytes, added in pairs in 16 bits, which saturate."""
    products = _as(a, np.uint8).astype(np.int32) * _as(b, np.int8).astype(np.int32)
    sums = products[..., ::2] + products[..., 1::2]
    return np.clip(sums, -(2**15), 2**15 - 1).astype(np.int16).view(np.uint32)


def _dot(L: int, total: Any, a: Any, b: Any) -> Any:
    """Four products of unsigned and signed bytes, added to 32 bits, which wrap."""
    products = (_as(a, np.uint8).astype(np.int32) * _as(b, np.int8).astype(np.int32)).view(np.uint32)
    return total + products[..., ::4] + products[..., 1::4] + products[..., 2::4] + products[..., 3::4]


def _shuffled(L: int, a: Any, index: Any) -> Any:
    """In each 128 bits: the bytes of a selected by the low four bits of each index byte; 0 if its highest bit is
    set."""
    table, places = (_as(_quarters(each), np.uint8) for each in (a, index))
    found = np.take_along_axis(table, places & np.uint8(15), axis=-1)
    return np.where(places >> np.uint8(7) != 0, np.uint8(0), found).view(np.uint32).reshape(a.shape)


def _shifted(dtype: Any, left: bool = False) -> Callable[..., Any]:
    """A shift of numbers by a constant below their width."""

    def meaning(L: int, a: Any, i: int) -> Any:
        numbers, by = _as(a, dtype), dtype(i)
        return (numbers << by if left else numbers >> by).view(np.uint32)

    return meaning


INTS: tuple[Operand, Operand] = ("int", "int")
FLOATS: tuple[Operand, Operand] = ("float", "float")

MEANINGS: Mapping[str, Intrinsic] = {
    "loadu_si": Intrinsic(("pointer",), "int", 0, lambda L, a: a.view(np.uint32)[..., :L].copy()),
    "loadu_ps": Intrinsic(("pointer",), "float", 0, lambda L, a: a.view(np.float32)[..., :L].copy()),
    "loadl_epi64": Intrinsic(("pointer",), "int", 0, _lower),
    "storeu_ps": Intrinsic(("pointer", "float"), "none", 0, lambda L, a, b: b),
    "cvtph_ps": Intrinsic(("half",), "float", 16, lambda L, a: _as(a, np.float16).astype(np.float32)),
    "cvtepu8_epi32": Intrinsic(("quarter",), "int", 8, lambda L, a: _as(a, np.uint8)[..., :L].astype(np.uint32)),
    "set1_epi32": Intrinsic(("scalar int",), "int", 0, _repeated),
    "set1_ps": Intrinsic(("scalar float",), "float", 0, _repeated),
    "set1_epi16": Intrinsic(("constant",), "int", 0, _halves),
    "set_epi32": Intrinsic(("constant",) * 16, "int", 0, _constant),
    "fmadd_ps": Intrinsic((*FLOATS, "float"), "float", 32, lambda L, a, b, c: vector.fmadd(a, b, c)),
    "add_ps": Intrinsic(FLOATS, "float", 32, lambda L, a, b: a + b),
    "mul_ps": Intrinsic(FLOATS, "float", 32, lambda L, a, b: a * b),
    "div_ps": Intrinsic(FLOATS, "float", 32, lambda L, a, b: a / b),
    "max_ps": Intrinsic(FLOATS, "float", 32, lambda L, a, b: np.where(a > b, a, b)),
    "hadd_ps": Intrinsic(FLOATS, "float", 32, _horizontal),
    "hadd_epi32": Intrinsic(INTS, "int", 32, _horizontal),
    "castps_pd": Intrinsic(("float",), "double", 0, lambda L, a: a),
    "castpd_ps": Intrinsic(("double",), "float", 0, lambda L, a: a),
    "castps_si": Intrinsic(("float",), "int", 0, lambda L, a: a.view(np.uint32)),
    "castsi_ps": Intrinsic(("int",), "float", 0, lambda L, a: a.view(np.float32)),
    "permute4x64_pd": Intrinsic(("double", "constant"), "double", 0, _permuted_pairs),
    "permute4x64_epi64": Intrinsic(("int", "constant"), "int", 0, _permuted_pairs),
    "permutevar8x32_ps": Intrinsic(("float", "int"), "float", 32, lambda L, a, index: _chosen(a, index)),
    "permutexvar_ps": Intrinsic(("int", "float"), "float", 32, lambda L, index, a: _chosen(a, index)),
    "permutex2var_ps": Intrinsic(("float", "int", "float"), "float", 32, _of_two),
    "permutex2var_epi32": Intrinsic((*INTS, "int"), "int", 32, _of_two),
    "blendv_ps": Intrinsic((*FLOATS, "float"), "float", 32, _blended),
    "srli_epi32": Intrinsic(("int", "constant"), "int", 32, _shifted(np.uint32)),
    "slli_epi32": Intrinsic(("int", "constant"), "int", 32, _shifted(np.uint32, left=True)),
    "srai_epi32": Intrinsic(("int", "constant"), "int", 32, _shifted(np.int32)),
    "srli_epi16": Intrinsic(("int", "constant"), "int", 16, _shifted(np.uint16)),
    "slli_epi16": Intrinsic(("int", "constant"), "int", 16, _shifted(np.uint16, left=True)),
    "srai_epi16": Intrinsic(("int", "constant"), "int", 16, _shifted(np.int16)),
    "and_si": Intrinsic(INTS, "int", 8, lambda L, a, b: a & b),
    "andnot_si": Intrinsic(INTS, "int", 8, lambda L, a, b: (a ^ np.uint32(2**32 - 1)) & b),
    "or_si": Intrinsic(INTS, "int", 8, lambda L, a, b: a | b),
    "ternarylogic_epi32": Intrinsic((*INTS, "int", "constant"), "int", 32, _ternary),
    "add_epi32": Intrinsic(INTS, "int", 32, lambda L, a, b: a + b),
    "sub_epi32": Intrinsic(INTS, "int", 32, lambda L, a, b: a - b),
    "add_epi16": Intrinsic(INTS, "int", 16, lambda L, a, b: (_as(a, np.uint16) + _as(b, np.uint16)).view(np.uint32)),
    "madd_epi16": Intrinsic(INTS, "int", 16, _products_of_halves),
    "maddubs_epi16": Intrinsic(INTS, "int", 8, _products_of_bytes),
    "shuffle_epi8": Intrinsic(INTS, "int", 8, _shuffled),
    "cvtepi32_ps": Intrinsic(("int",), "float", 32, lambda L, a: _as(a, np.int32).astype(np.float32)),
    "dpbusd_epi32": Intrinsic((*INTS, "int"), "int", 8, _dot),
    "dpbusd_avx_epi32": Intrinsic((*INTS, "int"), "int", 8, _dot),
}
"""The intrinsics by their names without widths."""
